"""A container's log as a stream: history, the hand-over to an attach, following, and cancellation
at any moment."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import AsyncGenerator, Awaitable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine._fast.frames import Demultiplexer
from engine._fast.logwriter import LogWriter
from engine.containers import logs
from engine.errors import ServerError
from tests.support import PATIENCE
from tests.support.engine.descriptors import none_left_open


@pytest.fixture(autouse=True)
def _descriptors() -> Iterator[None]:
    with none_left_open():
        yield


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[LogWriter]:
    made = LogWriter(os.fsencode(tmp_path / "c.log"), 2000, 50)
    yield made
    made.close()


def stream(writer: LogWriter, **options: Any) -> Awaitable[AsyncGenerator[bytes, None]]:
    of_lines = {"framed": False} | {name: options.pop(name) for name in logs.Lines.__struct_fields__ if name in options}
    return logs.opened(logs.read(Path(os.fsdecode(writer.path)), logs.Lines(**of_lines), **options))


async def collected(opened: Awaitable[AsyncGenerator[bytes, None]]) -> bytes:
    return b"".join([chunk async for chunk in await opened])


def test_history_with_every_option(writer: LogWriter) -> None:
    writer.write(1, b"".join(b"%d\n" % index for index in range(100)))
    writer.write(2, b"error\n")

    async def main() -> None:
        numbers = b"".join(b"%d\n" % index for index in range(100))
        assert await collected(stream(writer)) == numbers + b"error\n"
        assert await collected(stream(writer, tail=3)) == b"98\n99\nerror\n"
        assert await collected(stream(writer, tail=0)) == b""
        assert await collected(stream(writer, stdout=False, tail=2)) == b"error\n"
        assert Demultiplexer().feed(await collected(stream(writer, framed=True, tail=2))) == [
            (1, b"99\n"),
            (2, b"error\n"),
        ]
        dressed = await collected(stream(writer, tail=1, timestamps=True, details=b"a=b "))
        assert dressed[30:] == b" a=b error\n"

    asyncio.run(main())


def test_no_log_is_an_empty_one(tmp_path: Path) -> None:
    opened = logs.opened(logs.read(tmp_path / "none.log", logs.Lines(tail=5)))
    assert asyncio.run(collected(opened)) == b""


def test_what_is_removed_once_it_is_open_is_read(writer: LogWriter) -> None:
    async def main() -> None:
        chunks = await stream(writer, tail=2)
        writer.write(1, b"later\n")
        os.unlink(writer.path)
        assert [chunk async for chunk in chunks] == [b"1\n2\n"]

    writer.write(1, b"0\n1\n2\n")
    asyncio.run(main())


def test_a_log_that_cannot_be_read_is_a_server_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "c.log").symlink_to("c.log")
    with pytest.raises(ServerError, match=r"c\.log cannot be read"):
        asyncio.run(collected(logs.opened(logs.read(tmp_path / "c.log", logs.Lines()))))


def test_a_directory_in_its_place_is_a_server_error(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="cannot be read: not a regular file"):
        asyncio.run(collected(logs.opened(logs.read(tmp_path, logs.Lines()))))


def test_the_hand_over_to_an_attach_ends_where_it_was_told(writer: LogWriter) -> None:
    writer.write(1, b"before\n")
    position = writer.position()
    writer.write(1, b"after\n" * 500)

    async def follow(_inode: int, _offset: int) -> bool:
        raise AssertionError("nothing beyond the position is waited for")

    assert asyncio.run(collected(stream(writer, until_position=position))) == b"before\n"
    assert asyncio.run(collected(stream(writer, until_position=position, follow=follow))) == b"before\n"


def test_following_over_rotation_until_the_end(writer: LogWriter) -> None:
    """`follow` acts as the monitor: it writes more, or reports the end of the container after a
    last line.
    """
    asked = []

    async def follow(inode: int, offset: int) -> bool:
        assert (inode, offset) == writer.position()
        asked.append((inode, offset))
        if len(asked) > 40:
            writer.write(1, b"last word")
            writer.end()
            return False
        writer.write(1, b"".join(b"%d %d\n" % (len(asked), index) for index in range(20)))
        return True

    writer.write(1, b"first\n")
    wanted = (
        b"first\n" + b"".join(b"%d %d\n" % (turn, index) for turn in range(1, 41) for index in range(20)) + b"last word"
    )
    assert asyncio.run(collected(stream(writer, follow=follow))) == wanted
    assert len(set(asked)) == 41
    assert len(list(Path(os.fsdecode(writer.path)).parent.iterdir())) > 10


def test_following_begins_before_there_is_a_log(tmp_path: Path) -> None:
    path = tmp_path / "c.log"

    async def follow(inode: int, offset: int) -> bool:
        if path.exists():
            return False
        assert (inode, offset) == (0, 0)
        writer = LogWriter(os.fsencode(path))
        writer.write(1, b"here\n")
        writer.close()
        return True

    assert (
        asyncio.run(collected(logs.opened(logs.read(path, logs.Lines(framed=False, tail=10), follow=follow))))
        == b"here\n"
    )


def test_following_what_is_filtered_out_shows_nothing_and_ends(writer: LogWriter) -> None:
    turns = 0

    async def follow(_inode: int, _offset: int) -> bool:
        nonlocal turns
        turns += 1
        writer.write(1, b"not this\n")
        return turns < 5

    assert asyncio.run(collected(stream(writer, stdout=False, follow=follow))) == b""
    assert turns == 5


def test_a_promise_that_is_not_kept_does_not_spin(writer: LogWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log was moved away, so the monitor's position never equals the reader's."""
    pauses, turns = [], 0

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    async def follow(_inode: int, _offset: int) -> bool:
        nonlocal turns
        turns += 1
        return turns < 10

    monkeypatch.setattr(asyncio, "sleep", pause)
    writer.write(1, b"x\n")
    assert asyncio.run(collected(stream(writer, follow=follow))) == b"x\n"
    assert len(pauses) == 8


@pytest.fixture
def no_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads open all logs."""
    monkeypatch.setattr(logs._AtOnce, "open", lambda *_: None)


def test_the_loop_is_not_held_up_and_reading_happens_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Apart from a small first chunk."""
    here, elsewhere = [], []

    class Watched(logs.LogReader):  # type: ignore[misc]
        def read(self, max_bytes: int) -> bytes:
            chunk = super().read(max_bytes)
            (here if threading.get_ident() == main else elsewhere).append(len(chunk))
            return chunk

    main = threading.get_ident()
    monkeypatch.setattr(logs, "LogReader", Watched)
    lines = b"".join(b"%d\n" % index for index in range(30_000))
    large = LogWriter(os.fsencode(tmp_path / "large.log"))
    large.write(1, lines)
    large.close()
    for _ in range(2):
        assert asyncio.run(collected(stream(large))) == lines
    assert sum(elsewhere) > len(lines)
    assert all(size <= logs.AT_ONCE for size in here)


class Told:
    """A reading that keeps what it is told."""

    def __init__(self, complete: bool) -> None:
        self._complete = complete
        self.told: list[str] = []

    def complete(self) -> bool:
        return self._complete

    async def begin(self) -> None:
        if "begin" not in self.told:
            self.told.append("begin")

    def holds(self, inode: int) -> None:
        self.told.append("holds")

    def end(self) -> None:
        if self.told[-1:] not in ([], ["end"]):
            self.told.append("end")


def test_a_few_last_lines_need_neither_the_monitor_nor_a_thread(
    writer: LogWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_thread(*_: object) -> None:
        raise AssertionError("a thread")

    async def main(reading: Told, **options: Any) -> bytes:
        monkeypatch.setattr(asyncio.get_running_loop(), "run_in_executor", no_thread)
        return await collected(stream(writer, reading=reading, **options))

    monkeypatch.setattr(logs, "_at_once", logs._AtOnce())
    writer.write(1, b"".join(b"%d\n" % index for index in range(100)))
    asyncio.run(collected(stream(writer)))  # looks up the names of the files
    if nowait_works(Path(os.fsdecode(writer.path))):
        complete, incomplete = Told(True), Told(False)
        assert asyncio.run(main(complete, tail=2)) == b"98\n99\n"
        assert complete.told == []
        assert asyncio.run(main(incomplete, tail=2)) == b"98\n99\n"
        assert incomplete.told == ["begin", "end"]


def nowait_works(path: Path) -> bool:
    """False for some file systems."""
    file = os.open(path, os.O_RDONLY)
    try:
        return os.preadv(file, [bytearray(1)], 0, os.RWF_NOWAIT) == 1
    except OSError:
        return False
    finally:
        os.close(file)


def test_rotation_waits_for_a_reader_that_needs_a_thread(writer: LogWriter, no_at_once: None) -> None:
    reading = Told(True)
    writer.write(1, b"x\n")
    assert asyncio.run(collected(stream(writer, reading=reading))) == b"x\n"
    assert reading.told == ["begin", "end"]


def test_following_is_always_registered(writer: LogWriter) -> None:
    async def follow(_inode: int, _offset: int) -> bool:
        return False

    reading = Told(True)
    writer.write(1, b"x\n")
    assert asyncio.run(collected(stream(writer, reading=reading, follow=follow))) == b"x\n"
    assert (reading.told[0], reading.told[-1]) == ("begin", "end")
    assert "holds" in reading.told


def test_a_file_system_that_waits_is_left_to_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, tries, waits = 100.0, 0, 0

    class Slow:
        def __init__(self, *arguments: Any, **options: Any) -> None:
            nonlocal now, tries, waits
            now += seconds
            waits += waited
            tries += 1
            raise BlockingIOError

    def several(count: int) -> int:
        nonlocal tries
        tries = 0
        for _ in range(count):
            assert at_once.open(tmp_path, None, {}) is None
        return tries

    monkeypatch.setattr(logs, "LogReader", Slow)
    monkeypatch.setattr(logs.time, "monotonic", lambda: now)
    monkeypatch.setattr(logs, "_waits", lambda: waits)
    at_once = logs._AtOnce()
    seconds, waited = 0.5, 0
    assert several(10) == 10  # a busy host
    for waited in (1, 1, 0, 1, 1):  # noqa: B007 (`Slow` reads it)
        assert several(1) == 1
    assert several(10) == 1
    now += at_once.PAUSE
    assert several(10) == at_once.TRIES


def test_closed_half_way(writer: LogWriter) -> None:
    writer.write(1, b"x" * 15_000 + b"\n")

    async def main() -> None:
        chunks = await stream(writer, follow=None)
        async for chunk in chunks:
            assert chunk
            break
        gc.collect()  # frees leftovers of earlier tests
        before = len(os.listdir("/proc/self/fd"))
        await chunks.aclose()
        assert len(os.listdir("/proc/self/fd")) < before

    asyncio.run(main())


def test_cancelled_while_waiting_for_more(writer: LogWriter) -> None:
    async def main() -> None:
        waiting = asyncio.Event()

        async def follow(_inode: int, _offset: int) -> bool:
            waiting.set()
            await asyncio.Event().wait()
            return True

        gc.collect()  # frees leftovers of earlier tests
        before = len(os.listdir("/proc/self/fd"))
        task = asyncio.create_task(collected(stream(writer, follow=follow)))
        await waiting.wait()
        assert len(os.listdir("/proc/self/fd")) > before
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(os.listdir("/proc/self/fd")) == before

    asyncio.run(main())


def test_cancelled_while_a_thread_reads(writer: LogWriter, monkeypatch: pytest.MonkeyPatch, no_at_once: None) -> None:
    """The thread is inside `read` when the client disconnects: the descriptors are closed after it
    returns."""
    inside, go_on = threading.Event(), threading.Event()

    class Slow(logs.LogReader):  # type: ignore[misc]
        def read(self, max_bytes: int) -> bytes:
            inside.set()
            go_on.wait(30 * PATIENCE)
            return super().read(max_bytes)

    monkeypatch.setattr(logs, "LogReader", Slow)
    writer.write(1, b"x\n")

    async def main() -> None:
        task = asyncio.create_task(collected(stream(writer)))
        await asyncio.to_thread(inside.wait, 30)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()

    asyncio.run(main())  # waits for the executor's threads


def test_closing_a_reader_from_another_thread_while_it_reads(tmp_path: Path) -> None:
    path = tmp_path / "c.log"
    made = LogWriter(os.fsencode(path))
    for _ in range(20):
        made.write(1, (b"y" * 99 + b"\n") * 10_000)
    made.close()
    for delay in range(10):
        reader = logs.LogReader(os.fsencode(path), stderr=True)
        got: list[bytes] = []

        def work(reader: Any = reader, got: list[bytes] = got) -> None:
            while data := reader.read(1 << 20):
                got.append(data)

        thread = threading.Thread(target=work)
        thread.start()
        while len(got) < delay and thread.is_alive():
            pass
        reader.close()
        thread.join()
        assert reader.done
        assert set(b"".join(got)) <= set(b"y\n")
