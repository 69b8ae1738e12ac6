"""The process on a temporary directory: what it takes from the board and from the disk, what it
forgets, what it answers and reports. Its targets are Unix sockets in the same event loop."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gc
import json
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine._fast.board import Board
from engine.logs import cursor
from engine.logs.deliveries import Splunk, Syslog
from engine.shipper import destination as destinations
from engine.shipper import process
from engine.shipper.feed import Feed
from engine.shipper.process import BUSY, Shipper, main
from tests.support import PATIENCE
from tests.support.logs.shipping import Shipping, Spool
from tests.unit.shipper.spools import until


class Reading(asyncio.Protocol):
    """Appends what it receives to `data`."""

    def __init__(self, data: bytearray) -> None:
        self._data = data

    def data_received(self, data: bytes) -> None:
        self._data += data


class Target:
    """A server of syslog lines."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.data = bytearray()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.get_running_loop().create_unix_server(lambda: Reading(self.data), self.path)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()  # Python 3.13 removes the socket
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)

    @property
    def lines(self) -> list[str]:
        """Tag and text of each line."""
        return [line.split(" ", 3)[3].replace("[77]:", "") for line in self.data.decode().splitlines()]

    @property
    def syslog(self) -> Syslog:
        return Syslog("unix", path=self.path)


class Stage:
    """Spools, a target and a shipper in this process."""

    def __init__(self, base: Path) -> None:
        self.shipping = Shipping(base)
        self.shipping.events.setblocking(False)
        self.logs = self.shipping.logs
        self.target = Target(base / "t")
        self.other = Target(base / "o")
        self.shipper: Shipper | None = None
        self.ended = False

    def spool(self, tag: str = "a", **more: Any) -> Spool:
        return self.shipping.spool(more.pop("target", self.target.syslog), tag, **more)

    def play(self, scene: Callable[[], Awaitable[None]], *, kill: bool = False, **times: float) -> None:
        """Run the shipper and the scene. `kill`: it ends without an orderly end."""

        async def run() -> None:
            await self.target.start()
            await self.other.start()
            self.shipper = Shipper(
                str(self.shipping.root),
                str(self.shipping.run),
                **({"tidy": 0.005, "idle": 1e9, "give_up": 1e9} | times),
            )
            serving = asyncio.ensure_future(self.shipper.serve())
            try:
                await scene()
            finally:
                if not kill:
                    self.shipper._ending.set()
                    await serving
                    self.ended = True
                serving.cancel()
                for each in self.shipper.destinations.values():
                    await each.end(orderly=False)
                for feed in self.shipper.feeds.values():
                    feed.close()
                await self.target.stop()
                await self.other.stop()

        asyncio.run(run())

    def events(self) -> list[dict[str, Any]]:
        found = []
        try:
            while True:
                found.append(json.loads(self.shipping.events.recv(1 << 16)))
        except BlockingIOError:
            return found

    async def states(self, containers: list[str] | None = None) -> dict[str, Any]:
        answer = await self.ask(json.dumps({"containers": containers}).encode() + b"\n")
        found: dict[str, Any] = json.loads(answer)
        return found

    async def ask(self, question: bytes) -> bytes:
        reader, writer = await self.connect()
        writer.write(question)
        answer = await reader.read()
        writer.close()
        return answer

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """To the shipper's socket; waits until it serves."""
        while True:
            try:
                return await asyncio.open_unix_connection(str(self.shipping.run / "shipper/socket"))
            except (FileNotFoundError, ConnectionRefusedError):
                await asyncio.sleep(0.001)

    @property
    def feeds(self) -> dict[str, Any]:
        assert self.shipper is not None
        return dict(self.shipper.feeds)


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setattr(process, "SAVE", 0.005)
    monkeypatch.setattr(destinations, "LONGEST_PAUSE", 0.01)
    made = Stage(tmp_path / "s")
    yield made
    made.shipping.close()


# --- from the board -------------------------------------------------------------------------------


def test_delivers_lines_as_they_come(stage: Stage) -> None:
    spool = stage.spool()
    spool.write(b"one\ntwo\n")

    async def scene() -> None:
        await until(lambda: stage.target.lines == ["a one", "a two"])
        spool.write(b"three\n", 2)
        await until(lambda: stage.target.lines[2:] == ["a three"])
        await until(lambda: spool.writer.unacked == 0)
        size = spool.path.stat().st_size
        assert stage.shipping.board.last(spool.id) == (spool.path.stat().st_ino, size, size, 3)
        path = spool.directory / "cursor"
        await until(lambda: (known := cursor.decode(path.read_bytes())) is not None and known.bytes == size)

    stage.play(scene)
    assert stage.shipping.board.left() == {}


def test_a_process_goes_on_where_the_last_one_was(stage: Stage) -> None:
    spool = stage.spool()
    spool.write(b"one\n")

    async def first() -> None:
        await until(lambda: stage.target.lines == ["a one"])

    async def second() -> None:
        spool.write(b"two\n")
        await until(lambda: len(stage.target.lines) == 2)

    stage.play(first)
    stage.play(second)
    assert stage.target.lines == ["a one", "a two"]


def test_many_containers(stage: Stage) -> None:
    spools = [stage.spool(f"c{index}") for index in range(100)]

    async def scene() -> None:
        for turn in range(3):
            for spool in spools:
                spool.write(b"%d\n" % turn)
            await until(lambda turn=turn: len(stage.target.lines) == 100 * (turn + 1))
        assert stage.shipper is not None
        assert len(stage.shipper.destinations) == 1

    stage.play(scene)
    for index in range(100):
        assert [line for line in stage.target.lines if line.startswith(f"c{index} ")] == [
            f"c{index} {turn}" for turn in range(3)
        ]


def test_a_container_that_ends_is_delivered_and_forgotten(stage: Stage) -> None:
    spool = stage.spool()
    spool.write(b"one\n")
    spool.end()

    async def scene() -> None:
        await until(lambda: stage.target.lines == ["a one"] and not stage.feeds)
        assert stage.shipper is not None
        await until(lambda: not stage.shipper or not stage.shipper.destinations)

    stage.play(scene)
    assert cursor.decode((spool.directory / "cursor").read_bytes())[2:4] == (spool.path.stat().st_size, 1)  # type: ignore[index]


@pytest.mark.parametrize("forgotten", [True, False])
@pytest.mark.parametrize("elsewhere", [True, False])
def test_a_container_that_starts_again(stage: Stage, forgotten: bool, elsewhere: bool) -> None:
    """With another document, before or after the shipper has forgotten it."""
    spool = stage.spool()
    spool.write(b"one\n")

    async def scene() -> None:
        await until(lambda: stage.target.lines == ["a one"] and spool.writer.unacked == 0)
        spool.end()
        if forgotten:
            await until(lambda: not stage.feeds)
        else:
            # what is read in a turn that began before has the old document
            feed = stage.feeds[spool.id]
            await until(lambda: feed.slot < 0 and feed.drained)
        target = stage.other.syslog if elsewhere else stage.target.syslog
        spool.open(stage.shipping.board, tag="b", target=target)
        spool.write(b"two\n")
        await until(lambda: stage.other.lines == ["b two"] if elsewhere else stage.target.lines[1:] == ["b two"])
        await until(lambda: spool.writer.unacked == 0)

    stage.play(scene)
    assert stage.target.lines == (["a one"] if elsewhere else ["a one", "b two"])


def test_a_slot_that_is_reopened_between_two_looks(stage: Stage) -> None:
    """With the same number: only its count of lines shows that."""
    spool = stage.spool()
    spool.write(b"one\ntwo\n")

    async def scene() -> None:
        await until(lambda: len(stage.target.lines) == 2)
        spool.end()
        spool.open(stage.shipping.board, tag="b")
        spool.write(b"three\n")
        await until(lambda: len(stage.target.lines) == 3)
        await until(lambda: spool.writer.unacked == 0)

    stage.play(scene)
    assert stage.target.lines == ["a one", "a two", "b three"]


@pytest.mark.parametrize("order", [1, -1])
def test_a_new_monitor(stage: Stage, order: int) -> None:
    """It opens some of the spools again, in other slots."""
    spools = [stage.spool(f"c{index}") for index in range(6)]
    for spool in spools:
        spool.write(b"one\n")

    async def scene() -> None:
        await until(lambda: len(stage.target.lines) == 6)
        alive = spools[:4][::order]
        stage.shipping.spools = alive
        stage.shipping.replace_monitor()
        for spool in alive:
            spool.write(b"two\n")
        await until(lambda: len(stage.target.lines) == 10)
        await until(lambda: all(spool.writer.unacked == 0 for spool in alive))
        await until(lambda: set(stage.feeds) == {spool.id for spool in alive})

    stage.play(scene)


def test_a_board_that_is_replaced(stage: Stage) -> None:
    spool = stage.spool()
    spool.write(b"one\n")

    async def scene() -> None:
        await until(lambda: stage.target.lines == ["a one"])
        os.unlink(stage.shipping.run / "shipper/board")
        stage.shipping.replace_monitor()
        spool.write(b"two\n")
        await until(lambda: stage.target.lines[1:] == ["a two"])
        await until(lambda: spool.writer.unacked == 0)

    stage.play(scene)


def test_a_run_directory_that_is_gone_ends_the_process(stage: Stage) -> None:
    async def scene() -> None:
        await asyncio.sleep(0.01)
        shutil.rmtree(stage.shipping.run)
        assert stage.shipper is not None
        await until(stage.shipper._ending.is_set)

    stage.play(scene)


# --- from the disk --------------------------------------------------------------------------------


def test_spools_that_no_container_writes(stage: Stage) -> None:
    """Of containers that ended while no shipper ran."""
    spool = stage.spool()
    spool.write(b"one\n")
    spool.end()
    stage.shipping.board = Board(os.fsencode(stage.shipping.run / "shipper"), monitor=True)

    async def scene() -> None:
        await until(lambda: stage.target.lines == ["a one"] and not stage.feeds)

    stage.play(scene)


@pytest.mark.parametrize("when", ["before", "running", "known", "unheard"])
def test_removed_containers_are_delivered(stage: Stage, when: str) -> None:
    """Before the shipper has started; while it knows the spool or not; without a word of the
    daemon."""
    spool = stage.spool()
    spool.write(b"one\n")
    if when != "known":
        spool.end()
    moved = stage.shipping.removed(spool) if when == "before" else Path()

    async def scene() -> None:
        nonlocal moved
        if when != "before":
            await until(lambda: stage.target.lines == ["a one"])
        if when == "known":
            spool.write(b"two\n")
            spool.end()
            moved = stage.shipping.removed(spool)
        elif when != "before":
            await until(lambda: not stage.feeds or when == "unheard")
            moved = stage.shipping.removed(spool, rescan=when != "unheard")
        await until(lambda: not moved.exists() and not stage.feeds)

    stage.play(scene)
    assert stage.target.lines == (["a one", "a two"] if when == "known" else ["a one"])
    assert stage.events() == []


@pytest.mark.parametrize("start", ["young", "old", "nonsense"])
def test_given_up(stage: Stage, start: str) -> None:
    """The target is away all the time, so the feed waits in its queue."""
    spool = stage.spool(target=Syslog("unix", path=stage.target.path + "-away"))
    spool.write(b"one\ntwo\n")
    spool.end()
    moved = stage.shipping.removed(spool, {"young": None, "old": 1, "nonsense": 0}[start])
    if start == "nonsense":
        moved = moved.rename(moved.with_suffix(".x"))

    async def scene() -> None:
        await until(lambda: not moved.exists() and not stage.feeds)

    stage.play(scene, give_up=1e8 if start == "old" else 1.0 if start == "young" else 0.05)
    events = stage.events()
    lost = [event for event in events if event["action"] == "lost"]
    assert [(event["container"], event["lines"]) for event in lost] == [(spool.id, 2)]


def test_a_spool_that_is_gone(stage: Stage) -> None:
    spool = stage.spool(target=Syslog("unix", path=stage.target.path + "-away"))
    spool.write(b"one\n")

    async def scene() -> None:
        await until(lambda: stage.feeds)
        spool.end()
        shutil.rmtree(spool.directory)
        await until(lambda: not stage.feeds)

    stage.play(scene)


@pytest.mark.parametrize("document", [b"", b"{", b'{"id":"x","name":"n","tag":"t","target":{"driver":"none"}}', None])
def test_a_document_that_cannot_be_read(stage: Stage, document: bytes | None) -> None:
    """It does not disturb the others."""
    bad, good = stage.spool("bad"), stage.spool("good")
    if document is None:
        (bad.directory / "delivery").unlink()
        (bad.directory / "delivery").mkdir()
    else:
        (bad.directory / "delivery").write_bytes(document)
    bad.write(b"one\n")
    good.write(b"one\n")

    async def scene() -> None:
        await until(lambda: stage.target.lines == ["good one"])
        good.write(b"two\n")
        await until(lambda: len(stage.target.lines) == 2)

    stage.play(scene)


def test_a_sender_that_is_not_installed(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(process.make_destination.__globals__["_SENDERS"], "splunk", ("nowhere", "Nothing"))
    bad, good = stage.spool("bad", target=Splunk("https://127.0.0.1:1", "t")), stage.spool("good")
    bad.write(b"one\n")
    good.write(b"one\n")

    async def scene() -> None:
        await until(lambda: stage.target.lines == ["good one"])

    stage.play(scene)


def test_an_unreadable_spool(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others of its destination go on, and it does when it can be read."""
    bad, good = stage.spool("bad"), stage.spool("good")
    bad.write(b"one\n")
    os.rename(bad.path, f"{bad.path}-hidden")
    os.mkdir(bad.path)

    async def scene() -> None:
        good.write(b"one\n")
        await until(lambda: stage.target.lines == ["good one"])
        await until(lambda: stage.feeds[bad.id].broken)
        os.rmdir(bad.path)
        os.rename(f"{bad.path}-hidden", bad.path)
        await until(lambda: stage.target.lines[1:] == ["bad one"])

    stage.play(scene)
    assert stage.events() == []


# --- what it forgets, saves and reports -----------------------------------------------------------


def test_ends_when_nothing_is_left(stage: Stage) -> None:
    spool = stage.spool()
    spool.write(b"one\n")

    async def scene() -> None:
        assert stage.shipper is not None
        await until(lambda: stage.target.lines == ["a one"])
        await asyncio.sleep(0.05)
        assert not stage.shipper._ending.is_set(), "the container runs"
        spool.end()
        await until(stage.shipper._ending.is_set)

    stage.play(scene, idle=0.02)
    assert not (stage.shipping.run / "shipper/socket").exists()


def test_sigterm(stage: Stage) -> None:
    spool = stage.spool()
    spool.write(b"one\n")

    async def scene() -> None:
        await until(lambda: stage.target.lines == ["a one"])
        os.kill(os.getpid(), signal.SIGTERM)
        assert stage.shipper is not None
        await until(stage.shipper._ending.is_set)

    stage.play(scene)
    known = cursor.decode((spool.directory / "cursor").read_bytes())
    assert known is not None and known.lines == 1


def test_a_killed_process_sends_again_what_it_had_not_saved(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "SAVE", 1e6)
    spool = stage.spool()
    spool.write(b"one\n")

    async def first() -> None:
        await until(lambda: stage.target.lines == ["a one"])

    async def second() -> None:
        await until(lambda: len(stage.target.lines) == 2)

    stage.play(first, kill=True)
    stage.play(second)
    assert stage.target.lines == ["a one", "a one"]


def test_events_of_a_target(stage: Stage) -> None:
    spool = stage.spool(target=Syslog("unix", path=stage.target.path + "x"))
    spool.write(b"one\n")
    target = Target(Path(stage.target.path + "x"))

    async def scene() -> None:
        found: list[dict[str, Any]] = []
        await until(lambda: found.extend(stage.events()) or found)
        await target.start()
        await until(lambda: found.extend(stage.events()) or len(found) == 2)
        await target.stop()
        common = {"driver": "syslog", "address": f"unix://{target.path}", "containers": 1}
        assert found == [
            {"action": "unreachable", "error": "No such file or directory", **common},
            {"action": "reachable", "error": "", **common},
        ]

    stage.play(scene)


def test_no_daemon_hears_the_events(stage: Stage) -> None:
    os.unlink(stage.shipping.run / "shipper/events.sock")
    spool = stage.spool(target=Syslog("unix", path="/nonexistent/socket"))
    spool.write(b"one\n")

    async def scene() -> None:
        await until(lambda: stage.feeds and stage.feeds[spool.id].destination.attempts > 3)

    stage.play(scene)


def test_states(stage: Stage) -> None:
    good = stage.spool("good")
    away = stage.spool("away", target=Syslog("unix", path=stage.target.path + "x"))
    good.write(b"one\ntwo\n")
    away.write(b"three\n")

    async def scene() -> None:
        await until(lambda: len(stage.target.lines) == 2 and stage.feeds[away.id].destination.error)
        await until(lambda: stage.feeds[good.id].acked.lines == 2)
        states = await stage.states()
        assert set(states) == {good.id, away.id}
        since = states[good.id].pop("since")
        assert abs(time.time() - since) < 60
        assert states[good.id] == {
            "driver": "syslog",
            "address": f"unix://{stage.target.path}",
            "error": "",
            "attempts": 0,
            "delivered": 2,
            "waiting": 0,
            "waiting_bytes": 0,
            "dropped": 0,
        }
        state = states[away.id]
        assert state["error"] == "No such file or directory" and state["attempts"] >= 1
        assert (state["delivered"], state["waiting"], state["waiting_bytes"]) == (0, 1, away.path.stat().st_size)
        assert set(await stage.states([good.id, "unknown"])) == {good.id}
        assert await stage.states([]) == {}

    stage.play(scene)


def test_states_count_what_was_just_written(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also between two looks at the board."""
    monkeypatch.setattr(process, "LOOK", 3600)
    spool = stage.spool()
    spool.write(b"one\n")

    async def scene() -> None:
        for count in (2, 3):
            await until(lambda: stage.feeds and stage.feeds[spool.id].delivered)
            spool.write(b"more\n")
            state = (await stage.states())[spool.id]
            assert state["delivered"] + state["waiting"] == count

    stage.play(scene)


@pytest.mark.parametrize(
    "question", [b"\n", b"{}\n", b"[]\n", b"{", b"", b'{"containers": 5}\n', b'{"containers": [1]}\n']
)
def test_a_question_that_is_none(stage: Stage, question: bytes) -> None:
    async def scene() -> None:
        if question:
            assert await stage.ask(question + b"\n") in (b"", b"{}\n")
        else:
            _, writer = await stage.connect()
            writer.close()
        assert await stage.states() == {}

    stage.play(scene)


def test_lines_that_are_lost(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Non-blocking, with a target that is away for a while."""
    monkeypatch.setattr(process, "REPORT", 0.2)
    spool = stage.spool(target=Syslog("unix", path=stage.target.path + "x"), blocking=False, quota=10_000)
    target = Target(Path(stage.target.path + "x"))

    async def scene() -> None:
        for turn in range(20):
            spool.write(b"".join(b"%d\n" % number for number in range(100 * turn, 100 * turn + 100)))
            await asyncio.sleep(0.005)
        await target.start()
        await until(lambda: target.lines and target.lines[-1] == "a 1999")
        lost = stage.feeds[spool.id].dropped_lines
        assert 1800 <= lost < 1930
        assert target.lines[0] == f"a {lost} lines of this container were lost before this one: its target is too slow"
        assert target.lines[1:] == [f"a {number}" for number in range(lost, 2000)]
        await until(lambda: stage.feeds[spool.id].acked.lines == 2000)
        state = (await stage.states())[spool.id]
        assert (state["delivered"], state["dropped"]) == (2000 - lost, lost)
        reported: list[int] = []

        def told() -> bool:
            reported.extend(event["lines"] for event in stage.events() if event["action"] == "lost")
            return sum(reported) == lost

        await until(told)
        assert len(reported) < 5, "they are added up"
        await target.stop()

    stage.play(scene)


def test_a_feed_is_not_closed_while_its_position_is_written(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its descriptor would be another file's, or an older position would be the last one."""
    may_write, writes = threading.Event(), threading.Event()
    real = Feed.save

    def save(feed: Feed, position: cursor.Cursor) -> None:
        writes.set()
        assert may_write.wait(20 * PATIENCE)
        assert feed._cursor >= 0
        real(feed, position)

    monkeypatch.setattr(Feed, "save", save)
    spool = stage.spool()
    spool.write(b"one\n")

    async def scene() -> None:
        await until(writes.is_set)
        spool.end()
        await until(lambda: stage.feeds[spool.id].delivered)
        await asyncio.sleep(0.05)
        assert stage.feeds
        may_write.set()
        await until(lambda: not stage.feeds)

    stage.play(scene)
    assert cursor.decode((spool.directory / "cursor").read_bytes()) is not None


# --- the program ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments", [[], ["--root", "/r"], ["--run", "/r"], ["--root", "/r", "--run", "/r", "--x", "1"]]
)
def test_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert "usage" in capsys.readouterr().err


def test_another_shipper_serves(stage: Stage) -> None:
    lock = os.open(stage.shipping.run / "shipper/lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert main(["--root", str(stage.shipping.root), "--run", str(stage.shipping.run)]) == BUSY
    os.close(lock)


def test_no_board(tmp_path: Path) -> None:
    assert main(["--root", str(tmp_path), "--run", str(tmp_path / "run")]) == 1


def test_descriptors_are_closed(stage: Stage) -> None:
    gc.collect()  # frees leftovers of earlier tests
    before = set(os.listdir("/proc/self/fd"))
    spool = stage.spool()
    spool.write(b"one\n")

    async def scene() -> None:
        await until(lambda: stage.target.lines == ["a one"])

    stage.play(scene)
    spool.end()
    del stage.shipper
    after = set(os.listdir("/proc/self/fd")) - before
    assert len([each for each in after if _is_file(each)]) == 0


def _is_file(descriptor: str) -> bool:
    try:
        return "spool" in os.readlink(f"/proc/self/fd/{descriptor}") or "cursor" in os.readlink(
            f"/proc/self/fd/{descriptor}"
        )
    except OSError:
        return False


def test_the_socket_is_not_in_the_way(stage: Stage) -> None:
    """Of a shipper that was killed."""
    with socket.socket(socket.AF_UNIX) as old:
        old.bind(str(stage.shipping.run / "shipper/socket"))

    async def scene() -> None:
        assert await stage.states() == {}

    stage.play(scene)
