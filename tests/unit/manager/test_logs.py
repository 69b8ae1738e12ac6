"""Service logs: a client, the broker, dispatchers and agents over real connections, the store over
etcd's fake.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from msgspec.structs import replace

from engine.errors import InvalidParameter, NotFound, Unavailable
from engine.manager import records
from engine.manager.dispatcher import Dispatcher
from engine.manager.identity import Identity
from engine.manager.logs import ERROR, Logs
from engine.manager.records import TaskStatus
from engine.manager.store import Delete, Put, Store
from engine.swarm_session import frames
from engine.swarm_session.frames import Connection
from engine.swarm_session.messages import Ended, Follow, LogLine, LogLines, ReadLogs
from engine.swarm_session.states import Role, TaskState
from tests.support.fakes.clock import FakeClock
from tests.support.fakes.etcd import FakeEtcd
from tests.unit.manager.agents import Agent, dispatcher_of, found, task

QUERY = {"follow": False, "stdout": True, "stderr": True, "since": 0, "tail": -1, "details": False}


class Node(Agent):
    """An agent whose containers have written lines, and may write more."""

    def __init__(self, node: str) -> None:
        super().__init__(node)
        self.lines: dict[str, list[LogLine]] = {}
        self.ended: set[str] = set()
        self.asked: list[ReadLogs] = []
        self.more = asyncio.Event()
        self.reading = 0
        self.logs = self._read

    def writes(self, task: str, *texts: str) -> None:
        lines = self.lines.setdefault(task, [])
        for text in texts:
            lines.append(LogLine(task=task, stream=1, time=len(lines) + 1, data=f"{text}\n".encode()))
        self.more.set()

    def ends(self, task: str) -> None:
        self.ended.add(task)
        self.more.set()

    async def _read(self, connection: Connection, message: ReadLogs) -> None:
        self.asked.append(message)
        self.reading += 1
        try:
            await asyncio.gather(*(self._read_one(connection, message, task) for task in message.tasks))
        finally:
            self.reading -= 1
        await connection.send(Ended(seq=message.seq))

    async def _read_one(self, connection: Connection, message: ReadLogs, task: str) -> None:
        since, tail = message.query["since"], message.query["tail"]
        sent = 0
        if tail >= 0:
            sent = max(0, len(self.lines.get(task, ())) - tail)
        while True:
            lines = self.lines.get(task, ())
            while sent < len(lines):
                if lines[sent].time >= since:
                    await connection.stream(LogLines(seq=message.seq, lines=(lines[sent],)))
                sent += 1
            if not message.query["follow"] or task in self.ended:
                return
            self.more.clear()
            await self.more.wait()


class Swarm:
    def __init__(self, store: Store, clock: FakeClock) -> None:
        self.store, self.clock = store, clock
        self.dispatcher = dispatcher_of(store, clock)
        self.broker = Logs(store, clock, self.dispatcher, self.dial)
        self.others: dict[str, Dispatcher] = {}
        self.stores: list[Store] = []
        self.nodes: list[Node] = []
        self.dialled: list[Connection] = []
        self.tasks: list[asyncio.Task[Any]] = []

    async def pair(self, serve: Callable[[Connection, Any], Awaitable[None]]) -> Connection:
        left, right = socket.socketpair()
        for each in (left, right):
            each.setblocking(False)

        async def ignore(_connection: Connection, _message: Any) -> None:
            pass

        here = Connection(*await asyncio.open_unix_connection(sock=left), ignore, dialled=True)
        there = Connection(*await asyncio.open_unix_connection(sock=right), serve, dialled=False)
        self.tasks += [asyncio.create_task(here.run()), asyncio.create_task(there.run())]
        return here

    async def dial(self, node: str) -> Connection:
        """To another manager, as this one."""
        other = self.others.get(node)
        if other is None:
            raise Unavailable(f"manager {node} is not present")

        async def serve(connection: Connection, message: Any) -> None:
            assert other is not None
            await other.serve(connection, message, Identity("m1", Role.MANAGER))

        connection = await self.pair(serve)
        self.dialled.append(connection)
        return connection

    async def client(self) -> Connection:
        return await self.pair(self.broker.follow)

    async def other(self, etcd: FakeEtcd, node: str) -> Dispatcher:
        store = Store(etcd.peer(), self.clock)
        await store.load()
        self.stores.append(store)
        self.others[node] = dispatcher_of(store, self.clock, node)
        await self.others[node].start()
        return self.others[node]

    async def node(self, name: str, at: Dispatcher | None = None) -> Node:
        node = Node(name)
        self.nodes.append(node)
        await node.connect(at or self.dispatcher)
        await self.during(node.register())
        return node

    async def runs(self, key: str, node: str, slot: int = 1, state: TaskState = TaskState.RUNNING, **more: Any) -> None:
        status = TaskStatus(state=state, since=1, container=f"c-{key}")
        await self.store.commit(
            [Put(records.TASKS, key, task(node, slot=slot, **more)), Put(records.TASK_STATUS, key, status)]
        )

    async def until(self, condition: Callable[[], Any], seconds: float = 5.0) -> None:
        for _ in range(int(seconds * 50)):
            if condition():
                return
            await self.clock.advance(0.02)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            for node in self.nodes:
                if not node.connection.closed.is_set():
                    node.beat()
        assert condition()

    async def during(self, coroutine: Any) -> Any:
        work = asyncio.ensure_future(coroutine)
        await self.until(work.done)
        return await work

    async def read(self, of: str = "service", name: str = "web", **query: Any) -> list[LogLine]:
        client = await self.client()

        async def all_lines() -> list[LogLine]:
            answers = client.ask_for_many(Follow(of=of, name=name, query={**QUERY, **query}))
            return [line async for answer in answers for line in answer.lines]

        return list(await self.during(all_lines()))

    def following(self, client: Connection, of: str = "service", name: str = "web", **query: Any) -> Reading:
        return Reading(self, client, Follow(of=of, name=name, query={**QUERY, "follow": True, **query}))


class Reading:
    def __init__(self, swarm: Swarm, client: Connection, message: Follow) -> None:
        self.lines: list[LogLine] = []
        self.swarm = swarm
        self.task = asyncio.create_task(self._read(client, message))
        swarm.tasks.append(self.task)

    async def _read(self, client: Connection, message: Follow) -> None:
        async with contextlib.aclosing(client.ask_for_many(message)) as answers:  # type: ignore[type-var]
            async for answer in answers:
                self.lines += answer.lines

    @property
    def texts(self) -> list[str]:
        return [line.data.decode().rstrip() for line in self.lines]


@contextlib.asynccontextmanager
async def swarm(
    store: Store, clock: FakeClock, *nodes: str, managers: tuple[str, ...] = ("m1",)
) -> AsyncIterator[Swarm]:
    await found(store, *(nodes or ("n1", "n2")), managers=managers)
    made = Swarm(store, clock)
    await made.dispatcher.start()
    try:
        yield made
    finally:
        for each in made.tasks:
            each.cancel()
        await asyncio.gather(*made.tasks, return_exceptions=True)
        for dispatcher in (made.dispatcher, *made.others.values()):
            await made.during(dispatcher.close())
        for node in made.nodes:
            await node.close()
        for other in made.stores:
            await other.close()


def texts(lines: list[LogLine]) -> list[str]:
    return sorted(line.data.decode().rstrip() for line in lines)


# --- once -----------------------------------------------------------------------------------------


async def test_the_lines_of_all_tasks_of_a_service(store: Store, clock: FakeClock) -> None:
    async with swarm(store, clock) as s:
        one, two = await s.node("n1"), await s.node("n2")
        for number, node in enumerate((one, one, two), 1):
            await s.runs(f"t{number}", node.node, number)
            node.writes(f"t{number}", f"{number}a", f"{number}b")
        await s.runs("t4", "n2", 4, TaskState.FAILED)
        two.writes("t4", "4a")
        await store.commit([Put(records.TASKS, "t5", task(slot=5)), Put(records.TASKS, "other", task(service="s2"))])
        lines = await s.read()
        assert texts(lines) == ["1a", "1b", "2a", "2b", "3a", "3b", "4a"]
        assert {(line.task, line.node, line.service) for line in lines} == {
            ("t1", "n1", "s1"),
            ("t2", "n1", "s1"),
            ("t3", "n2", "s1"),
            ("t4", "n2", "s1"),
        }
        assert [ask.tasks for ask in one.asked] == [("t1", "t2")], "one request a node"
        assert [line.data for line in lines if line.task == "t1"] == [b"1a\n", b"1b\n"], "in order"


async def test_a_node_sends_no_lines_of_other_tasks(store: Store, clock: FakeClock) -> None:
    async with swarm(store, clock) as s:
        node = await s.node("n1")
        await s.runs("t1", "n1")
        await s.runs("t2", "n2", 2)
        node.writes("t1", "own")
        node.lines["t1"].append(LogLine(task="t2", stream=1, time=2, data=b"forged\n"))
        lines = await s.read("task", "t1")
        assert texts(lines) == ["own"]


async def test_one_task_by_id_and_the_query_as_it_is(store: Store, clock: FakeClock) -> None:
    async with swarm(store, clock) as s:
        node = await s.node("n1")
        for number in (1, 2):
            await s.runs(f"t{number}", "n1", number)
            node.writes(f"t{number}", *(f"{number}-{line}" for line in range(5)))
        assert texts(await s.read("task", "t2")) == [f"2-{line}" for line in range(5)]
        assert texts(await s.read("task", "t2", tail=2)) == ["2-3", "2-4"]
        assert texts(await s.read(tail=1)) == ["1-4", "2-4"], "of each task"
        assert texts(await s.read(since=5)) == ["1-4", "2-4"]
        assert node.asked[0].query == QUERY


@pytest.mark.parametrize(
    ("of", "name", "kind", "words"),
    [
        ("service", "nope", NotFound, "service nope not found"),
        ("task", "nope", NotFound, "task nope not found"),
        ("service", "", NotFound, "not found"),
        ("network", "x", InvalidParameter, "network"),
    ],
)
async def test_what_cannot_be_followed(
    store: Store, clock: FakeClock, of: str, name: str, kind: type[Exception], words: str
) -> None:
    async with swarm(store, clock) as s:
        with pytest.raises(kind, match=words):
            await s.read(of, name)


async def test_a_service_without_containers_has_no_lines(store: Store, clock: FakeClock) -> None:
    async with swarm(store, clock) as s:
        await store.commit([Put(records.TASKS, "t1", task())])
        assert await s.read() == []
        assert await s.read("task", "t1") == []


async def test_a_node_that_is_away_is_named_and_the_others_are_read(store: Store, clock: FakeClock) -> None:
    async with swarm(store, clock) as s:
        one = await s.node("n1")
        await s.runs("t1", "n1")
        await s.runs("t2", "n2", 2)
        one.writes("t1", "here")
        lines = await s.read()
        assert [line.stream for line in lines] == [1, ERROR], "clients stop at the error"
        assert texts(lines) == ["here", "incomplete log stream: node n2: the node is not available"]


async def test_logs_of_a_node_at_another_manager(store: Store, etcd: FakeEtcd, clock: FakeClock) -> None:
    async with swarm(store, clock, managers=("m1", "m2")) as s:
        other = await s.other(etcd, "m2")
        one, two = await s.node("n1"), await s.node("n2", other)
        await s.runs("t1", "n1")
        await s.runs("t2", "n2", 2)
        await s.runs("t3", "n2", 3)
        one.writes("t1", "here")
        two.writes("t2", *(f"there {number:03}" for number in range(300)))
        two.writes("t3", "too")
        lines = await s.read()
        assert texts(lines) == ["here", *(f"there {number:03}" for number in range(300)), "too"]
        assert {line.node for line in lines if line.task == "t3"} == {"n2"}
        await s.until(s.dialled[0].closed.is_set)
        assert len(s.dialled) == 1
        assert texts(await s.read()) == texts(lines)


async def test_a_manager_that_does_not_answer_is_an_error_line(store: Store, clock: FakeClock) -> None:
    async with swarm(store, clock, managers=("m1", "m2")) as s:
        data = records.NodeData(state=records.NodeState.READY, owner="m2", session="x")
        await store.commit([Put(records.NODE_DATA, "n1", data)])
        await s.runs("t1", "n1")
        assert texts(await s.read()) == ["incomplete log stream: node n1: manager m2 is not present"]


# --- following ------------------------------------------------------------------------------------


async def test_following_shows_new_lines_and_new_tasks(store: Store, clock: FakeClock) -> None:
    async with swarm(store, clock) as s:
        one, two = await s.node("n1"), await s.node("n2")
        await s.runs("t1", "n1")
        one.writes("t1", "old", "older")
        reading = s.following(await s.client(), tail=1)
        await s.until(lambda: reading.texts == ["older"])
        one.writes("t1", "new")
        await s.until(lambda: reading.texts == ["older", "new"])
        two.writes("t2", "first", "second")
        await store.commit([Put(records.TASKS, "t2", task("n2", slot=2))])
        await s.until(lambda: reading.texts == ["older", "new"])
        await s.runs("t2", "n2", 2)
        await s.until(lambda: reading.texts == ["older", "new", "first", "second"])
        assert not reading.task.done()
        reading.task.cancel()
        await s.until(lambda: one.reading == two.reading == 0)


async def test_following_a_task_ends_with_it(store: Store, clock: FakeClock) -> None:
    async with swarm(store, clock) as s:
        node = await s.node("n1")
        await store.commit([Put(records.TASKS, "t1", task())])
        reading = s.following(await s.client(), "task", "t1")
        await s.until(lambda: True)
        assert not reading.task.done()
        await s.runs("t1", "n1")
        node.writes("t1", "a")
        await s.until(lambda: reading.texts == ["a"])
        node.writes("t1", "b")
        node.ends("t1")
        await s.runs("t1", "n1", state=TaskState.COMPLETE)
        await s.until(reading.task.done)
        assert reading.texts == ["a", "b"]


async def test_following_a_service_ends_when_it_is_removed(store: Store, clock: FakeClock) -> None:
    async with swarm(store, clock) as s:
        node = await s.node("n1")
        await s.runs("t1", "n1")
        node.writes("t1", "a")
        reading = s.following(await s.client())
        await s.until(lambda: reading.texts == ["a"])
        await store.commit([Delete(records.SERVICES, "s1")])
        node.writes("t1", "bye")
        await s.until(lambda: reading.texts == ["a", "bye"])
        assert not reading.task.done()
        node.ends("t1")
        await store.commit([Delete(records.TASKS, "t1"), Delete(records.TASK_STATUS, "t1")])
        await s.until(reading.task.done)


async def test_a_broken_session_is_followed_on_without_repeating(store: Store, clock: FakeClock) -> None:
    async with swarm(store, clock) as s:
        node = await s.node("n1")
        await s.runs("t1", "n1")
        node.writes("t1", "a", "b")
        reading = s.following(await s.client(), tail=1)
        await s.until(lambda: reading.texts == ["b"])
        node.connection.abort("test")
        await s.until(node.there.closed.is_set)
        again = await s.node("n1")
        again.lines = node.lines
        again.writes("t1", "c")
        await s.until(lambda: reading.texts == ["b", "c"])


async def test_a_session_that_moves_to_another_manager_is_followed_there(
    store: Store, etcd: FakeEtcd, clock: FakeClock
) -> None:
    async with swarm(store, clock, managers=("m1", "m2")) as s:
        node = await s.node("n1")
        await s.runs("t1", "n1")
        node.writes("t1", "a")
        reading = s.following(await s.client())
        await s.until(lambda: reading.texts == ["a"])
        moved = await s.node("n1", await s.other(etcd, "m2"))
        moved.lines = node.lines
        moved.writes("t1", "b")
        await s.until(lambda: [line.data for line in reading.lines if line.stream == 1] == [b"a\n", b"b\n"])


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_a_client_that_does_not_read_stops_the_reading_at_the_node(
    store: Store, etcd: FakeEtcd, clock: FakeClock, elsewhere: bool
) -> None:
    async with swarm(store, clock, managers=("m1", "m2")) as s:
        node = await s.node("n1", await s.other(etcd, "m2") if elsewhere else None)
        await s.runs("t1", "n1")
        node.writes("t1", *map(str, range(2000)))
        client = await s.client()
        async with contextlib.aclosing(client.ask_for_many(Follow(of="service", name="web", query=QUERY))) as answers:  # type: ignore[type-var]
            first = await s.during(anext(answers))
            assert first.lines[0].data == b"0\n"
            for _ in range(50):
                await clock.advance(0.01)
            (serving,) = node.connection._serving.values()
            assert serving.unread == frames.WINDOW
            got = [first.lines[0].data]
            reading = asyncio.ensure_future(_rest(answers))
            await s.until(reading.done)
            got += await reading
        assert got == [b"%d\n" % number for number in range(2000)]


async def _rest(answers: AsyncIterator[Any]) -> list[bytes]:
    return [line.data async for answer in answers for line in answer.lines]


async def test_a_client_that_leaves_ends_all_reading(store: Store, etcd: FakeEtcd, clock: FakeClock) -> None:
    async with swarm(store, clock, managers=("m1", "m2")) as s:
        other = await s.other(etcd, "m2")
        nodes = [await s.node("n1"), await s.node("n2", other)]
        for number, node in enumerate(nodes, 1):
            await s.runs(f"t{number}", node.node, number)
            node.writes(f"t{number}", "x")
        for how in itertools.cycle(("cancel", "close")):
            client = await s.client()
            reading = s.following(client)
            await s.until(lambda: sum(node.reading for node in nodes) == 2)
            await s.until(lambda reading=reading: len(reading.lines) == 2)
            if how == "cancel":
                reading.task.cancel()
            else:
                await client.close()
            await s.until(lambda: sum(node.reading for node in nodes) == 0)
            await s.until(lambda: all(connection.closed.is_set() for connection in s.dialled))
            if how == "close":
                break


def test_the_line_keeps_all_else() -> None:
    line = LogLine(task="t", stream=2, time=3, data=b"x", details={"a": "b"})
    assert replace(line, node="n").details == {"a": "b"}
