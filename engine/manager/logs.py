"""Logs of services and tasks: the broker between a client and the agents that have the containers.

Each node is asked by the manager that has its session: directly here, and through a connection to
the other manager elsewhere, which passes the request on (`relay`). Answers are streamed with credit
all the way (`Connection.stream`): a client that does not read stops the reading of the files.

Without `follow`, each node is asked once for all tasks that it has. With it, each task is read by
itself from when its container exists, so that new tasks are picked up; a reading that breaks with a
connection goes on from its last line. Following a service ends with the service, following a task
with the task.

What cannot be read is reported by lines of the stream `ERROR`, at which clients stop. Hence they
come last; while following, a node that is away for some time is no error.

Owns:    the connections to other managers, as long as they are in use.
Threads: the event loop's.
Raises:  NotFound, InvalidParameter for the request itself.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol

from msgspec.structs import replace

from engine.errors import EngineError, InvalidParameter, Unavailable, words
from engine.manager import records
from engine.manager import tasks as rules
from engine.manager.control.services import find_service
from engine.manager.control.tasks import find_task
from engine.manager.store import Event, Store
from engine.swarm_session.clock import Clock
from engine.swarm_session.frames import Connection
from engine.swarm_session.messages import Ended, Follow, LogLine, LogLines, ReadLogs
from engine.swarm_session.states import NodeState, TaskState
from engine.system.tasks import shield

ERROR = 3
"""Stream of a line that tells why something could not be read."""
NODES = 32
"""Nodes that are read at the same time."""
AGAIN = 1.0
"""Seconds until a reading that broke is tried again."""

Dial = Callable[[str], Awaitable[Connection]]
"""A connection to another manager, by its node. Raises Unavailable."""

Answer = Callable[[tuple[LogLine, ...]], Awaitable[None]]


class Agents(Protocol):
    """What this needs of the dispatcher."""

    node: str
    """This manager's."""

    def agent(self, node: str) -> Connection | None: ...


class Logs:
    def __init__(self, store: Store, clock: Clock, agents: Agents, dial: Dial) -> None:
        self._store = store
        self._clock = clock
        self._agents = agents
        self._dial = dial
        self._managers: dict[str, _Shared] = {}

    async def follow(self, connection: Connection, message: Follow) -> None:
        """Answer with the lines of a service's or a task's logs, then `Ended`."""
        await self._store.current()
        if message.of == "service":
            service = find_service(self._store, message.name).key
            chosen = ""
        elif message.of == "task":
            entry = find_task(self._store, message.name)
            service, chosen = entry.record.service, entry.key
        else:
            raise InvalidParameter(f"logs of a {message.of[:64]}: only a service or a task has logs")

        async def answer(lines: tuple[LogLine, ...]) -> None:
            await connection.stream(LogLines(seq=message.seq, lines=lines))

        if message.query.get("follow"):
            await _Following(self, self._store, self._clock, answer, service, chosen, message.query).run()
        else:
            await self._read_all(answer, service, chosen, message.query)
        await connection.send(Ended(seq=message.seq))

    async def _read_all(self, answer: Answer, service: str, chosen: str, query: dict[str, Any]) -> None:
        by_node: defaultdict[str, list[str]] = defaultdict(list)
        for key in (chosen,) if chosen else sorted(self._store.tasks_of(service)):
            if has_log(self._store, key) and (task := self._store.record(records.TASKS, key)) is not None:
                by_node[task.node].append(key)
        room = asyncio.Semaphore(NODES)
        failures: list[LogLine] = []

        async def sorted_out(lines: tuple[LogLine, ...]) -> None:
            failures.extend(line for line in lines if line.stream == ERROR)
            if rest := tuple(line for line in lines if line.stream != ERROR):
                await answer(rest)

        async def read(node: str, keys: list[str]) -> None:
            async with room:
                try:
                    await self.read(node, tuple(keys), query, sorted_out)
                except (EngineError, ConnectionError) as error:
                    failures.append(_failure(self._store, self._clock, keys[0], node, error))

        async with _flat(asyncio.TaskGroup()) as group:
            for node, keys in by_node.items():
                group.create_task(read(node, keys))
        if failures:
            text = b"; ".join(dict.fromkeys(line.data.rstrip(b"\n") for line in failures))
            await answer((replace(failures[0], data=text + b"\n"),))

    async def read(self, node: str, keys: tuple[str, ...], query: dict[str, Any], answer: Answer) -> None:
        """Pass the lines of these tasks of one node to `answer`, until the node ends them. Lines of
        other tasks are dropped: a node speaks for its own alone.

        Raises Unavailable when the node has no session, ConnectionError when it breaks.
        """
        asked = frozenset(keys)
        async with self._source(node) as source:
            request = ReadLogs(tasks=keys, query=query)
            async with contextlib.aclosing(source.ask_for_many(request)) as answers:
                async for message in answers:
                    if isinstance(message, LogLines):
                        await answer(tuple(self._placed(line, node) for line in message.lines if line.task in asked))

    def _placed(self, line: LogLine, node: str) -> LogLine:
        task = self._store.record(records.TASKS, line.task)
        return replace(line, node=node, service="" if task is None else task.service)

    @contextlib.asynccontextmanager
    async def _source(self, node: str) -> AsyncIterator[Connection]:
        """The connection over which this node's logs are asked for."""
        agent = self._agents.agent(node)
        if agent is not None:
            yield agent
            return
        data = self._store.record(records.NODE_DATA, node)
        if data is None or not data.owner or data.state == NodeState.DOWN:
            raise Unavailable("the node is not available")
        if self._store.get(records.MANAGERS, data.owner) is None or data.owner == self._agents.node:
            raise Unavailable("the node has no session now")
        shared = self._managers.get(data.owner)
        if shared is None or shared.ended:
            shared = self._managers[data.owner] = _Shared(self._dial(data.owner))
        async with shared as connection:
            yield connection


class _Following:
    """One request with `follow`."""

    def __init__(
        self, logs: Logs, store: Store, clock: Clock, answer: Answer, service: str, chosen: str, query: dict[str, Any]
    ) -> None:
        self._logs, self._store, self._clock = logs, store, clock
        self._answer = answer
        self._service, self._chosen = service, chosen
        self._query = query
        self._seen: set[str] = set()
        self._readers: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()

    async def run(self) -> None:
        unsubscribe = self._store.subscribe(self._changed)
        try:
            query = self._query
            while True:
                self._wake.clear()
                for key in self._new():
                    self._seen.add(key)
                    reader = asyncio.create_task(self._read(key, query), name=f"logs of task {key}")
                    self._readers.add(reader)
                    reader.add_done_callback(self._ended)
                # tasks that come later are read from their start
                query = {**self._query, "tail": -1}
                for reader in [reader for reader in self._readers if reader.done()]:
                    self._readers.discard(reader)
                    reader.result()
                if not self._readers and self._over():
                    return
                await self._wake.wait()
        finally:
            unsubscribe()
            for reader in self._readers:
                reader.cancel()
            if self._readers:
                await asyncio.wait(self._readers)

    def _changed(self, event: Event) -> None:
        if event.kind is records.TASK_STATUS or event.kind is records.TASKS:
            task = self._store.record(records.TASKS, event.key)
            if task is None or task.service == self._service:
                self._wake.set()
        elif event.kind is records.SERVICES and event.key == self._service:
            self._wake.set()

    def _ended(self, _reader: asyncio.Task[None]) -> None:
        self._wake.set()

    def _new(self) -> list[str]:
        keys = (self._chosen,) if self._chosen else self._store.tasks_of(self._service)
        return [key for key in sorted(keys) if key not in self._seen and has_log(self._store, key)]

    def _over(self) -> bool:
        """True if no more lines can come."""
        if self._chosen:
            return self._chosen in self._seen or _is_over(self._store, self._chosen)
        return self._store.get(records.SERVICES, self._service) is None

    async def _read(self, key: str, query: dict[str, Any]) -> None:
        """Read one task until it has ended."""
        last = 0

        async def answer(lines: tuple[LogLine, ...]) -> None:
            nonlocal last
            await self._answer(lines)
            last = max([last, *(line.time for line in lines if line.stream != ERROR)])

        while True:
            task = self._store.record(records.TASKS, key)
            if task is None:
                return
            over = _is_over(self._store, key)
            try:
                await self._logs.read(task.node, (key,), query, answer)
                if over or _is_over(self._store, key):
                    return
            except (EngineError, ConnectionError) as error:
                if over:
                    if self._chosen:
                        await self._answer((_failure(self._store, self._clock, key, task.node, error),))
                    return
            if last:
                query = {**query, "tail": -1, "since": last + 1}
            await self._clock.sleep(AGAIN)


class _Shared:
    """A connection to another manager, for all readings that use it at the same time."""

    def __init__(self, dialling: Awaitable[Connection]) -> None:
        self._dialling = asyncio.ensure_future(dialling)
        self._users = 0
        self.ended = False

    async def __aenter__(self) -> Connection:
        self._users += 1
        try:
            connection = await shield(self._dialling)
            if connection.closed.is_set():
                raise ConnectionError("the connection to the other manager has ended")
        except BaseException as error:
            self.ended = self.ended or not isinstance(error, asyncio.CancelledError)
            await self.__aexit__()
            raise
        return connection

    async def __aexit__(self, *_: object) -> None:
        self._users -= 1
        if self._users:
            return
        self.ended = True
        if not self._dialling.done():
            self._dialling.cancel()
        elif not self._dialling.cancelled() and self._dialling.exception() is None:
            await self._dialling.result().close()


async def relay(agents: Agents, connection: Connection, message: ReadLogs, store: Store) -> None:
    """Serve another manager's request for logs of a node whose session is here."""
    connection.on_beat = connection.on_beat or _unheard  # a quiet log is not a silent peer
    by_node: defaultdict[str, list[str]] = defaultdict(list)
    for key in message.tasks:
        if (task := store.record(records.TASKS, key)) is not None:
            by_node[task.node].append(key)

    async def read(node: str, keys: list[str]) -> None:
        agent = agents.agent(node)
        if agent is None:
            raise Unavailable("the node has no session now")
        request = ReadLogs(tasks=tuple(keys), query=message.query)
        async with contextlib.aclosing(agent.ask_for_many(request)) as answers:
            async for answer in answers:
                await connection.stream(replace(answer, seq=message.seq))

    async with _flat(asyncio.TaskGroup()) as group:
        for node, keys in by_node.items():
            group.create_task(read(node, keys))
    await connection.send(Ended(seq=message.seq))


def _unheard() -> None:
    pass


@contextlib.asynccontextmanager
async def _flat(group: asyncio.TaskGroup) -> AsyncIterator[asyncio.TaskGroup]:
    """The group, whose first failure is raised as itself."""
    try:
        async with group:
            yield group
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None


def has_log(store: Store, key: str) -> bool:
    """Returns True if the task's container exists, or existed."""
    task = store.record(records.TASKS, key)
    status = store.record(records.TASK_STATUS, key)
    if task is None or not task.node or status is None or status.state == TaskState.ORPHANED:
        return False
    return bool(status.container) or TaskState.STARTING <= status.state < TaskState.REJECTED


def _is_over(store: Store, key: str) -> bool:
    task = store.record(records.TASKS, key)
    return task is None or rules.observed(store, key, task).ended


def _failure(store: Store, clock: Clock, key: str, node: str, error: Exception) -> LogLine:
    data = store.record(records.NODE_DATA, node)
    description = None if data is None else data.description
    name = description.hostname if description is not None and description.hostname else node
    reason = words(error)
    text = f"incomplete log stream: node {name}: {reason}\n"
    task = store.record(records.TASKS, key)
    service = "" if task is None else task.service
    return LogLine(task=key, stream=ERROR, time=clock.now(), data=text.encode(), node=node, service=service)
