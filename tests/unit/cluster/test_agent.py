"""An agent's session, over a real connection to a fake manager, with an executor that runs
nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.cluster import agent as module
from engine.cluster.agent import Agent
from engine.cluster.attaching import Attaching
from engine.cluster.state import Identity
from engine.cluster.views import NodeNetworks
from engine.common.facts import Counts, Host
from engine.config import Config
from engine.errors import Forbidden, ServerError, Unavailable
from engine.swarm_session.frames import Connection
from engine.swarm_session.messages import (
    Assigned,
    Assignments,
    Hello,
    Message,
    Peer,
    Session,
    Status,
    Statuses,
    order_of_managers,
)
from engine.swarm_session.states import TaskState
from engine.wire.services import ServiceSpec
from tests.support import PATIENCE
from tests.support.fakes.manager import FakeManager
from tests.support.fakes.overlays import MemoryRecords, fake_networks


class Executor:
    """Records its assignments, and reports the states that a test sets."""

    def __init__(
        self,
        parts: Any,
        node: Any,
        networks: NodeNetworks,
        changed: Callable[[str, bool], None],
        stored: Callable[[str], Awaitable[None]],
    ) -> None:
        self.changed = changed
        self.stored = stored
        self.assigned: list[Assignments] = []
        self.states: dict[str, TaskState] = {}
        self.saved: list[str] = []
        self.failure: Exception | None = None
        self.opened = self.closed = self.ended = 0

    def open(self) -> None:
        self.opened += 1

    async def close(self) -> None:
        self.closed += 1

    async def end(self) -> None:
        self.ended += 1

    async def assign(self, message: Assignments) -> None:
        if self.failure is not None:
            raise self.failure
        self.assigned.append(message)

    async def save(self, tasks: Iterable[str]) -> None:
        if self.failure is not None:
            raise self.failure
        self.saved += tasks

    def statuses(self, tasks: Iterable[str] | None = None) -> tuple[Status, ...]:
        chosen = self.states if tasks is None else [each for each in tasks if each in self.states]
        return tuple(Status(task=each, state=int(self.states[each]), since=1) for each in chosen)

    def set(self, task: str, state: TaskState, urgent: bool = False) -> None:
        self.states[task] = state
        self.changed(task, urgent)

    def task_of(self, container: str) -> None:
        return None


class Site:
    def __init__(self, agent: Agent, manager: FakeManager, sessions: list[Session], barred: list[str]) -> None:
        self.agent = agent
        self.manager = manager
        self.sessions = sessions
        self.barred = barred
        found: Any = agent._executor
        self.executor: Executor = found

    async def until(self, what: str, probe: Callable[[], Any]) -> None:
        await self.manager.until(what, probe, 5)


@contextlib.asynccontextmanager
async def site(directory: Path, *, period: float = 0.05, role: str = "manager") -> AsyncIterator[Site]:
    manager = FakeManager(directory / "manager.sock", period=period)
    identity = Identity(
        node="n1", swarm="s", role=role, directory=directory, socket=manager.socket, epoch=5, advertise="10.0.0.1"
    )
    drivers = ["local"]

    async def known_drivers() -> list[str]:
        return list(drivers)

    parts: Any = SimpleNamespace(
        config=Config(),
        host=Host(name="h"),
        counts=lambda: Counts(labels=("zone=a",)),
        volumes=SimpleNamespace(known_drivers=known_drivers, drivers=drivers),
        networks=fake_networks(),
        records=MemoryRecords(),
    )
    networks = NodeNetworks(parts)
    sessions: list[Session] = []
    barred: list[str] = []
    agent = Agent(
        parts,
        identity,
        on_session=sessions.append,
        on_barred=barred.append,
        networks=networks,
        attaching=Attaching(parts, networks),
    )
    manager.epoch = 5
    await manager.open()
    try:
        yield Site(agent, manager, sessions, barred)
    finally:
        await agent.close()
        await manager.close()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Executor", Executor)
    monkeypatch.setattr(module, "BACKOFF", (0.01, 0.05))
    monkeypatch.setattr(module, "BATCH_TIME", 0.02)
    monkeypatch.setattr(module, "SAVE_PAUSE", 0.02)
    monkeypatch.setattr(module, "LEAVE_LIMIT", 0.3)
    monkeypatch.setattr(module, "SILENCE", 10_000)  # a busy machine is no silent manager


async def test_a_session(tmp_path: Path) -> None:
    async with site(tmp_path) as here:
        here.manager.tasks = {"t": Assigned(id="t", service="s", name="n", spec="s/1", desired=512)}
        here.manager.specs = {"s/1": ServiceSpec(name="web")}
        assert here.agent.reason
        here.agent.start()
        await here.until("the set", lambda: here.executor.assigned)
        assert here.executor.assigned[0].whole and here.executor.opened == 1 and not here.agent.reason
        (hello,) = here.manager.hellos
        assert (hello.epoch, hello.advertise, hello.description.hostname) == (5, "10.0.0.1", "h")
        assert hello.description.engine.labels == {"zone": "a"}
        assert [session.id for session in here.sessions] == ["session1"]
        assert len(here.manager.hellos) == 1


async def test_beats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with site(tmp_path) as here:
        here.agent.start()
        await here.until("begun", lambda: not here.agent.reason)
        assert here.manager.connection is not None
        beats: list[int] = []
        here.manager.connection.on_beat = lambda: beats.append(1)
        await here.until("it beats", lambda: len(beats) > 3)
        assert len(here.manager.hellos) == 1
        monkeypatch.setattr(module, "SILENCE", 2)
        await here.manager.session(2)


async def test_states_are_collected_and_the_last_one_counts(tmp_path: Path) -> None:
    async with site(tmp_path) as here:
        here.executor.states["before"] = TaskState.RUNNING
        here.agent.start()
        await here.manager.session()
        assert here.manager.statuses["before"].state == TaskState.RUNNING
        messages: list[Message] = []
        here.manager.refuse = messages.append
        for state in (TaskState.ACCEPTED, TaskState.PREPARING, TaskState.RUNNING):
            here.executor.set("t", state)
            here.executor.set("u", state)
        await here.manager.state("t", TaskState.RUNNING, 5)
        assert here.manager.history["t"] == [TaskState.RUNNING] and here.manager.history["u"] == [TaskState.RUNNING]
        assert len([each for each in messages if isinstance(each, Statuses)]) == 1
        assert here.executor.saved == ["t", "u"]


async def test_large_batches_are_divided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BATCH", 10)
    async with site(tmp_path) as here:
        sizes = []

        def count(message: Message) -> None:
            if isinstance(message, Statuses):
                sizes.append(len(message.of))

        here.manager.refuse = count
        here.agent.start()
        await here.manager.session()
        await here.until("begun", lambda: not here.agent.reason)
        for number in range(25):
            here.executor.set(f"t{number}", TaskState.RUNNING)
        await here.until("all", lambda: len(here.manager.statuses) == 25)
        assert sizes == [10, 10, 5]


async def test_states_that_were_refused_are_sent_again(tmp_path: Path) -> None:
    async with site(tmp_path) as here:
        here.agent.start()
        await here.manager.session()
        tries = 0

        def refuse(message: Message) -> None:
            nonlocal tries
            if isinstance(message, Statuses):
                tries += 1
                if tries < 3:
                    raise ServerError("context deadline exceeded")

        here.manager.refuse = refuse
        here.executor.set("t", TaskState.FAILED)
        await here.manager.state("t", TaskState.FAILED, 5)
        assert tries == 3 and len(here.manager.hellos) == 1


async def test_a_full_disk_delays_the_report(tmp_path: Path) -> None:
    async with site(tmp_path) as here:
        here.agent.start()
        await here.until("begun", lambda: not here.agent.reason)
        here.executor.failure = ServerError("full")
        here.executor.set("t", TaskState.RUNNING)
        await asyncio.sleep(0.1)
        assert "t" not in here.manager.statuses
        here.executor.failure = None
        await here.manager.state("t", TaskState.RUNNING, 5)
        assert here.executor.saved == ["t"]


async def test_without_a_session_the_next_hello_has_the_states(tmp_path: Path) -> None:
    async with site(tmp_path) as here:
        here.agent.start()
        await here.manager.session()
        await here.manager.close()
        await here.until("lost", lambda: here.agent.reason)
        here.executor.set("t", TaskState.RUNNING)
        await asyncio.sleep(0.1)
        assert here.executor.saved == ["t"], "it is on disk at once"
        await here.manager.open()
        await here.manager.session(2)
        assert [status.task for status in here.manager.hellos[1].statuses] == ["t"]


@pytest.mark.parametrize("failure", [ServerError("full"), RuntimeError("a bug")])
async def test_tasks_that_cannot_be_taken_come_again(tmp_path: Path, failure: Exception) -> None:
    async with site(tmp_path) as here:
        here.executor.failure = failure
        here.agent.start()
        await here.manager.session(3)
        here.executor.failure = None
        await here.until("taken", lambda: here.executor.assigned)


async def test_an_earlier_cluster_gives_no_tasks(tmp_path: Path) -> None:
    async with site(tmp_path) as here:
        here.manager.epoch = 4
        here.agent.start()
        await here.until("refused", lambda: len(here.manager.hellos) > 2)
        assert not here.executor.assigned and not here.sessions
        assert "earlier cluster (epoch 4, this node has seen 5)" in here.agent.reason
        here.manager.epoch = 6
        await here.until("taken", lambda: here.executor.assigned)
        here.manager.epoch = 5
        await here.manager.bye("go")
        await here.until("refused", lambda: "this node has seen 6" in here.agent.reason)


async def test_goodbye_and_barred(tmp_path: Path) -> None:
    async with site(tmp_path) as here:
        here.agent.start()
        await here.manager.session()
        await here.manager.bye("overloaded")
        await here.manager.session(2)
        assert not here.barred
        await here.manager.bye("removed", barred=True)
        await here.until("barred", lambda: here.barred == ["removed"])

        def refuse(message: Message) -> None:
            if isinstance(message, Hello):
                raise Forbidden("this node was removed")

        here.manager.refuse = refuse
        await here.until("barred at the beginning", lambda: "this node was removed" in here.barred)


async def test_a_renewed_certificate_needs_a_new_session(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with site(tmp_path) as here:
        here.agent.start()
        await here.until("begun", lambda: not here.agent.reason)
        here.agent.renewed()
        await here.manager.session(2)
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING], "it is no fault"


async def test_a_node_that_is_not_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "DESCRIPTION_TIME", 0.1)
    async with site(tmp_path) as here:
        here.agent.start()
        await asyncio.sleep(0.4)
        assert len(here.manager.hellos) == 1
        parts: Any = here.agent._parts
        parts.volumes.drivers.append("flocker")
        await here.manager.session(2)
        names = [plugin.name for plugin in here.manager.hellos[1].description.engine.plugins]
        assert names == ["flocker", "local"]
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING], "it is no fault"


async def test_terms_that_change(tmp_path: Path) -> None:
    async with site(tmp_path) as here:
        here.agent.start()
        await here.until("begun", lambda: not here.agent.reason)
        assert here.manager.connection is not None
        changed = Session(id="session1", node="n1", period=0.5, managers=(), role="worker", epoch=5, renew=True)
        await here.manager.connection.send(changed)
        await here.until("they arrive", lambda: len(here.sessions) == 2)
        assert here.sessions[1].role == "worker" and here.sessions[1].renew


async def test_a_worker_that_knows_no_manager(tmp_path: Path) -> None:
    async with site(tmp_path, role="worker") as here:
        here.agent.start()
        await here.until("tried", lambda: here.agent.reason == "no manager of the swarm is known")


async def test_leave(tmp_path: Path) -> None:
    async with site(tmp_path) as here:
        await here.agent.leave()
        assert here.executor.ended == 1 and here.manager.left and here.executor.closed
    async with site(tmp_path) as here:
        await here.manager.close()
        await asyncio.wait_for(here.agent.leave(), 3 * PATIENCE)
        assert here.executor.ended == 1, "without a manager too"


@contextlib.asynccontextmanager
async def others(
    here: Site, directory: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> AsyncIterator[list[FakeManager]]:
    """`count` other managers, whose addresses are their numbers."""
    found = [FakeManager(directory / f"manager{number}.sock", period=here.manager.period) for number in range(count)]
    for each in found:
        each.epoch = 5
        await each.open()

    async def dial(address: str, _tls: Any, serve: Any) -> Connection:
        reader, writer = await asyncio.open_unix_connection(str(found[int(address)].socket))
        return Connection(reader, writer, serve, dialled=True)

    (directory / "ca.crt").write_text("roots")
    monkeypatch.setattr(module.client, "dial", dial)
    monkeypatch.setattr(module.client, "context", lambda *_: None)
    peers = tuple(Peer(node=f"m{number}", address=str(number)) for number in range(count))
    here.agent.managers = peers
    try:
        yield [found[int(peer.address)] for peer in order_of_managers("n1", peers)]
    finally:
        await here.agent.close()
        for each in found:
            await each.close()


async def test_a_manager_that_does_not_answer_beats_is_left_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with site(tmp_path, role="worker", period=0.2) as here, others(here, tmp_path, monkeypatch, 3) as managers:
        here.agent.start()
        await managers[0].session()
        assert managers[0].connection is not None
        managers[0].connection.on_beat = lambda: None
        monkeypatch.setattr(module, "SILENCE", 2)
        await managers[1].session()
        monkeypatch.setattr(module, "SILENCE", 10_000)
        assert len(managers[0].hellos) == 1
        assert managers[2].hellos == []
        await managers[1].bye("overloaded")
        await managers[2].session()


async def test_the_own_manager_comes_first_and_others_when_it_begins_no_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "OWN_LIMIT", 0.2)
    monkeypatch.setattr(module, "OWN_HELLO_LIMIT", 0.2)

    def no_quorum(message: Message) -> None:
        if isinstance(message, Hello):
            raise Unavailable("the swarm has no leader or lost its quorum")

    async with site(tmp_path) as here, others(here, tmp_path, monkeypatch, 2) as managers:
        here.agent.start()
        await here.manager.session()
        assert managers[0].hellos == managers[1].hellos == []
        here.manager.refuse = no_quorum
        await here.manager.bye("lost its quorum")
        await here.until("another one", lambda: managers[0].hellos or managers[1].hellos)
        for each in managers:
            each.refuse = no_quorum
            if each.connection is not None:
                await each.bye("lost its quorum")
        here.manager.refuse = lambda message: None
        await here.manager.session(2)
