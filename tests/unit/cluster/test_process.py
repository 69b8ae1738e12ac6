"""The life of the manager's process, with a real process that manages nothing."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.cluster import process
from engine.cluster.process import Process, Removed
from engine.errors import ServerError, Unavailable, WrongState
from engine.swarm_session.messages import Begin, Call

FAKE = "tests.unit.cluster.fake_manager"


class Place:
    """ROOT/swarm and RUN/swarm."""

    def __init__(self, directory: Path) -> None:
        self.root, self.run = directory / "root", directory / "run"
        self.root.mkdir()
        self.made: list[Process] = []
        self.removals = 0

    def process(self) -> Process:
        """As a daemon that has just started has it."""

        def removed() -> None:
            self.removals += 1

        made = Process(self.root, self.run, on_removed=removed, program=FAKE)
        self.made.append(made)
        return made

    def begun(self) -> list[tuple[int, str]]:
        if not (self.root / "begun").exists():
            return []
        return [(int(pid), how) for pid, how in map(str.split, (self.root / "begun").read_text().splitlines())]

    def alive(self) -> list[int]:
        return process._processes(FAKE, self.root)


@pytest.fixture
def place() -> Iterator[Place]:
    with tempfile.TemporaryDirectory(prefix="eng") as directory:  # short: it has a socket's path
        made = Place(Path(directory))
        yield made
        for pid in made.alive():
            os.kill(pid, signal.SIGKILL)


def begin(how: str = "init") -> Begin:
    return Begin(how=how, node="n1", listen="0.0.0.0:2377", advertise="10.0.0.1:2377")


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(120):
            await test()

    asyncio.run(limited())


@contextlib.asynccontextmanager
async def ended(made: Process) -> AsyncIterator[Process]:
    try:
        yield made
    finally:
        await made.stop()


async def until(probe: Callable[[], bool]) -> None:
    limit = time.monotonic() + 60
    while not probe():
        assert time.monotonic() < limit
        await asyncio.sleep(0.02)


async def asked(made: Process, verb: str = "x") -> bytes:
    connection = await made.connection(60)
    answer = await connection.ask(Call(verb=verb))
    return bytes(answer.body)


def test_begins_serves_and_stops(place: Place) -> None:
    async def test() -> None:
        made = place.process()
        assert not made.serves
        await made.begin(begin())
        assert made.serves and made.watched
        assert await asked(made, "info") == b"info"
        assert [how for _, how in place.begun()] == ["init"]
        assert (place.run.stat().st_mode & 0o777, place.root.stat().st_mode & 0o777) == (0o700, 0o700)
        await made.stop()
        assert not made.serves and not made.watched
        assert place.alive() == []
        made.clear()
        assert not place.run.exists()
        await made.stop()  # nothing to do

    run(test)


def test_a_later_daemon_adopts_it(place: Place) -> None:
    async def test() -> None:
        first = place.process()
        await first.begin(begin())
        (pid,) = place.alive()
        await first.detach()
        async with ended(place.process()) as second:
            await second.begin(begin("restore"))
            assert place.alive() == [pid]
            assert place.begun() == [(pid, "init"), (pid, "restore")]
            assert await asked(second) == b"x"
        assert place.alive() == []

    run(test)


def test_all_processes_are_looked_at_in_a_thread(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """That takes 0.1 s where there are 10,000."""
    threads: list[str] = []
    found = process._processes

    def looking(program: str, root: Path) -> list[int]:
        threads.append(threading.current_thread().name)
        return found(program, root)

    async def test() -> None:
        first = place.process()
        await first.begin(begin())
        await first.detach()
        await place.process().stop()

    with monkeypatch.context() as patched:
        patched.setattr(process, "_processes", looking)
        run(test)
    assert len(threads) > 1 and threading.current_thread().name not in threads
    assert place.alive() == []


def test_it_is_started_again_when_it_dies(place: Place) -> None:
    async def test() -> None:
        async with ended(place.process()) as made:
            await made.begin(begin())
            for _ in range(2):
                (pid,) = place.alive()
                os.kill(pid, signal.SIGKILL)
                await until(lambda pid=pid: place.begun()[-1][0] != pid)  # type: ignore[misc]
                assert await asked(made) == b"x"
            assert [how for _, how in place.begun()] == ["init", "restore", "restore"]

    run(test)


def test_it_is_started_again_when_descriptors_were_lacking(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    real = process.client.dial_own
    refused = 0

    async def dial(run: Path) -> Any:
        nonlocal refused
        if not refused:
            refused += 1
            raise OSError(errno.EMFILE, "Too many open files")
        return await real(run)

    async def test() -> None:
        async with ended(place.process()) as made:
            await made.begin(begin())
            (pid,) = place.alive()
            monkeypatch.setattr(process.client, "dial_own", dial)
            os.kill(pid, signal.SIGKILL)
            await until(lambda: place.begun()[-1][0] != pid)
            assert refused == 1 and made.watched

    run(test)


def test_an_adopted_one_is_started_again_when_it_dies(place: Place) -> None:
    async def test() -> None:
        first = place.process()
        await first.begin(begin())
        await first.detach()
        async with ended(place.process()) as made:
            await made.begin(begin("restore"))
            os.kill(place.alive()[0], signal.SIGKILL)
            await until(lambda: len(place.begun()) == 3)
            assert await asked(made) == b"x"

    run(test)


def test_one_that_was_removed_is_not_started_again(place: Place) -> None:
    async def test() -> None:
        async with ended(place.process()) as made:
            await made.begin(begin())
            (await made.connection(60)).write(Call(verb="exit", name="3", seq=9))
            await until(lambda: place.removals == 1)
            await asyncio.sleep(0.3)
            assert place.alive() == [] and len(place.begun()) == 1
            assert not made.watched

    run(test)


def test_another_status_is_no_removal(place: Place) -> None:
    async def test() -> None:
        async with ended(place.process()) as made:
            await made.begin(begin())
            (await made.connection(60)).write(Call(verb="exit", name="1", seq=9))
            await until(lambda: len(place.begun()) == 2)
            assert place.removals == 0

    run(test)


def test_a_begin_learns_of_the_removal(place: Place) -> None:
    async def test() -> None:
        (place.root / "removed").touch()
        async with ended(place.process()) as made:
            with pytest.raises(Removed):
                await made.begin(begin("restore"))
            assert not made.watched

    run(test)


def test_a_removal_while_it_was_dead(place: Place) -> None:
    async def test() -> None:
        async with ended(place.process()) as made:
            await made.begin(begin())
            (place.root / "removed").touch()
            os.kill(place.alive()[0], signal.SIGKILL)
            await until(lambda: place.removals == 1)
            assert not made.serves

    run(test)


def test_a_refused_begin_keeps_nothing_running_by_itself(place: Place) -> None:
    async def test() -> None:
        (place.root / "refuse").write_text("no quorum")
        async with ended(place.process()) as made:
            with pytest.raises(ServerError, match="no quorum"):
                await made.begin(begin())
            assert not made.watched and not made.serves
            (place.root / "refuse").unlink()
            await made.begin(begin())
            assert len(place.alive()) == 1
        assert place.alive() == []

    run(test)


def test_a_restart_that_is_refused_is_tried_again(place: Place) -> None:
    async def test() -> None:
        async with ended(place.process()) as made:
            await made.begin(begin())
            (place.root / "refuse").write_text("no quorum")
            os.kill(place.alive()[0], signal.SIGKILL)
            await until(lambda: made.trouble == "no quorum")
            with pytest.raises(Unavailable, match="no quorum"):
                await made.connection(0.01)
            (place.root / "refuse").unlink()
            assert await asked(made) == b"x"
            assert made.trouble == ""

    run(test)


def test_a_leave_that_is_refused_goes_on_serving(place: Place) -> None:
    async def test() -> None:
        async with ended(place.process()) as made:
            await made.begin(begin())
            (place.root / "keep").write_text("last manager")
            with pytest.raises(WrongState, match="last manager"):
                await made.stop(leave=True)
            assert await asked(made) == b"x"
            assert made.watched
            await made.stop(leave=True, force=True)
            assert place.alive() == []

    run(test)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "STOP_LIMIT", 0.3)
    monkeypatch.setattr(process, "TERM_LIMIT", 0.3)


@pytest.mark.usefixtures("impatient")
def test_a_stuck_one_is_killed(place: Place) -> None:
    async def test() -> None:
        (place.root / "stuck").touch()
        made = place.process()
        await made.begin(begin())
        await made.stop()
        assert place.alive() == []

    run(test)


@pytest.mark.usefixtures("impatient")
def test_a_frozen_one_is_killed(place: Place) -> None:
    async def test() -> None:
        made = place.process()
        await made.begin(begin())
        os.kill(place.alive()[0], signal.SIGSTOP)
        await made.stop()
        assert place.alive() == []

    run(test)


def test_a_stop_by_a_daemon_that_has_begun_nothing(place: Place) -> None:
    async def test() -> None:
        first = place.process()
        await first.begin(begin())
        await first.detach()
        await place.process().stop()
        assert place.alive() == []

    run(test)


def test_the_log_is_told_what_is_missing(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "NEEDED", ("grpc_that_is_missing",))
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ServerError, match=r"the program etcd .*grpc_that_is_missing.*engined\[swarm\]"):
        asyncio.run(place.process().begin(begin()))
