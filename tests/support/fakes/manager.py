"""A manager as an agent sees it, on a Unix socket: it assigns what a test says, and keeps what the
agent reports.

Only the session is here: no store, no certificates, no other nodes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from engine.swarm_session.frames import Connection
from engine.swarm_session.messages import (
    Assigned,
    Assignments,
    Beat,
    Bye,
    Delivery,
    Done,
    Hello,
    LeaveSwarm,
    LogLine,
    LogLines,
    Message,
    ReadLogs,
    Session,
    Status,
    Statuses,
)
from engine.swarm_session.states import TaskState
from engine.wire.services import ServiceSpec


class FakeManager:
    """One manager. `tasks` is the set that a new session gets."""

    def __init__(self, socket: Path, *, period: float = 20.0) -> None:
        self.socket = socket
        self.period = period
        self.epoch = 1
        self.hellos: list[Hello] = []
        self.statuses: dict[str, Status] = {}
        self.history: dict[str, list[TaskState]] = {}
        self.tasks: dict[str, Assigned] = {}
        self.specs: dict[str, ServiceSpec] = {}
        self.auths: dict[str, str] = {}
        self.secrets: dict[str, Delivery] = {}
        self.configs: dict[str, Delivery] = {}
        self.log_driver: Any = None
        self.left = False
        self.refuse: Callable[[Message], None] = lambda message: None
        """Raises what the manager refuses a message with."""
        self.connection: Connection | None = None
        self._changed = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        self.socket.parent.mkdir(parents=True, exist_ok=True)
        self.socket.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._accept, str(self.socket))

    async def close(self) -> None:
        """As if the manager's process were killed."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in list(self._serving):
            task.cancel()
        if self._serving:
            await asyncio.wait(self._serving)
        self.socket.unlink(missing_ok=True)
        self.connection = None

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        connection = Connection(reader, writer, self._serve, dialled=False)
        connection.on_beat = lambda: connection.write(Beat())
        try:
            with contextlib.suppress(asyncio.CancelledError):  # asyncio.streams logs it
                await connection.run()
        finally:
            self._serving.discard(task)
            if self.connection is connection:
                self.connection = None
            self._changed.set()

    async def _serve(self, connection: Connection, message: Message) -> None:
        self.refuse(message)
        if isinstance(message, Hello):
            self.hellos.append(message)
            self._report(message.statuses)
            self.connection = connection
            session = Session(
                seq=message.seq,
                id=f"session{len(self.hellos)}",
                node="node1",
                period=self.period,
                managers=(),
                role="manager",
                epoch=self.epoch,
            )
            await connection.send(session)
            await connection.send(self._whole())
        elif isinstance(message, Statuses):
            self._report(message.of)
            await connection.send(Done(seq=message.seq))
        elif isinstance(message, LeaveSwarm):
            self.left = True
            await connection.send(Done(seq=message.seq))
        self._changed.set()

    def _whole(self) -> Assignments:
        return Assignments(
            whole=True,
            put=tuple(self.tasks.values()),
            specs=self.specs,
            auths=self.auths,
            secrets=tuple(self.secrets.values()),
            configs=tuple(self.configs.values()),
            log_driver=self.log_driver,
        )

    def _report(self, statuses: Sequence[Status]) -> None:
        for status in statuses:
            state = TaskState(status.state)
            history = self.history.setdefault(status.task, [])
            if not history or history[-1] != state:
                history.append(state)
            self.statuses[status.task] = status

    # --- what a test does -------------------------------------------------------------------------

    async def put(self, *tasks: Assigned, spec: ServiceSpec | None = None) -> None:
        """Assign, or change, these tasks; `spec` is that of the first one."""
        specs = {}
        if spec is not None:
            specs = {tasks[0].spec: spec}
            self.specs |= specs
        self.tasks |= {task.id: task for task in tasks}
        if self.connection is not None:
            wanted_secrets = {each for task in tasks for each in task.secrets}
            wanted_configs = {each for task in tasks for each in task.configs}
            await self.connection.send(
                Assignments(
                    put=tasks,
                    specs=specs,
                    auths=self.auths,
                    secrets=tuple(self.secrets[each] for each in wanted_secrets),
                    configs=tuple(self.configs[each] for each in wanted_configs),
                    log_driver=self.log_driver,
                )
            )

    async def remove(self, *tasks: str) -> None:
        for task in tasks:
            del self.tasks[task]
        if self.connection is not None:
            await self.connection.send(Assignments(remove=tasks))

    async def bye(self, reason: str, *, barred: bool = False) -> None:
        assert self.connection is not None
        await self.connection.send(Bye(reason=reason, barred=barred))

    async def until(self, what: str, probe: Callable[[], Any], seconds: float = 20.0) -> Any:
        """The first true value of `probe`, which is asked after each message."""
        try:
            async with asyncio.timeout(seconds):
                while not (value := probe()):
                    self._changed.clear()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(0.05):
                            await self._changed.wait()
        except TimeoutError:
            raise AssertionError(f"after {seconds:g} s still not: {what} (statuses: {self.statuses})") from None
        return value

    async def state(self, task: str, state: TaskState, seconds: float = 20.0) -> Status:
        """Wait until the task is reported in this state."""
        await self.until(
            f"{task} is {state.label}",
            lambda: task in self.statuses and self.statuses[task].state == state,
            seconds,
        )
        return self.statuses[task]

    async def session(self, number: int = 1) -> None:
        """Wait for the session of this number."""
        await self.until(f"session {number}", lambda: len(self.hellos) >= number and self.connection is not None)

    async def logs(self, *tasks: str, **query: Any) -> AsyncIterator[LogLine]:
        assert self.connection is not None
        async with contextlib.aclosing(self.connection.ask_for_many(ReadLogs(tasks=tasks, query=query))) as answers:
            async for answer in answers:
                assert isinstance(answer, LogLines)
                for line in answer.lines:
                    yield line


__all__ = ["FakeManager"]
