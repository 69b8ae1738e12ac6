"""Output that a monitor had read when it was killed is logged once by the next monitor, whenever
the first one was killed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest

from engine._fast.logwriter import LogWriter
from engine._fast.pump import Loop, Stdio
from engine._fast.unlogged import Unlogged, all_logged, forget, left_in
from tests.support import PATIENCE


class Owner:
    def detached(self, number: int, keys: bool) -> None: ...
    def input_ended(self) -> None: ...
    def drained(self) -> None: ...


def logged(path: Path) -> bytes:
    """The output in the log with its rotated files."""
    files = [path, *(Path(f"{path}.{number}") for number in range(1, 100))]
    data = b"".join(file.read_bytes() for file in reversed(files) if file.exists())
    return "".join(json.loads(line)["log"] for line in data.splitlines()).encode()


def monitor(directory: Path, pipe: int, number: int, max_size: int) -> None:
    """Does what engine/monitor does with the file of an earlier monitor, in a process of its own,
    until it is killed."""
    loop = Loop()
    sink = LogWriter(os.fsencode(directory / "log"), max_size, 50)
    # the newest file that knows the process: a monitor may have been killed before it took over
    for before in range(number - 1, 0, -1):
        path = directory / f"u{before}"
        if path.exists() and (left := left_in(os.fsencode(path)).get("key")) is not None:
            sink.resume(left.lines, left.stream, left.chunk, left.inode, left.offset)
            break
    loop.unlogged = Unlogged(os.fsencode(directory / f"u{number}"))
    stdio = Stdio(loop, Owner())
    stdio.start(-1, pipe, -1, -1, False, sink, b"key")
    stdio.begin()
    loop.run()


@pytest.mark.parametrize("max_size", [0, 1_000_000], ids=["one-file", "rotated"])
@pytest.mark.parametrize("block", [37, 4096, 1 << 18])
def test_no_line_is_lost_or_doubled_by_kills(tmp_path: Path, block: int, max_size: int) -> None:
    ours, theirs = os.pipe()
    end = time.monotonic() + 2  # seconds: of load
    writer = os.fork()
    if writer == 0:
        os.close(ours)
        data, count, written = b"", 0, 0
        # No more than the rotated files hold.
        while (time.monotonic() < end and written < 20_000_000) or len(data) >= block:
            while len(data) < block:
                data += b"line %d of %s\n" % (count, b"x" * (count % 200))
                count += 1
            written += os.write(theirs, data[:block])
            data = data[block:]
        os.write(theirs, data + b"end %d\n" % count)
        os._exit(0)
    os.close(theirs)
    choose = random.Random(block)
    number = 0
    ended = 0
    while not ended or number < 2:
        number += 1
        pid = os.fork()
        if pid == 0:
            try:
                monitor(tmp_path, ours, number, max_size)
            finally:
                os._exit(1)
        # longer and longer, so that a slow host also gets to the end
        time.sleep(0.02 + choose.random() / 10 * (1 + number / 50))
        assert number < 1000, "the writer does not end"
        if not ended:
            ended = os.waitpid(writer, os.WNOHANG)[0]
        end = time.monotonic() + 30 * PATIENCE
        while ended and b'"end ' not in (tmp_path / "log").read_bytes()[-500:]:
            assert time.monotonic() < end, "the last line is not in the log"
            time.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
        assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL, f"monitor {number} failed"
    os.close(ours)
    lines = logged(tmp_path / "log").splitlines()
    assert lines[-1].startswith(b"end ")
    expected = [b"line %d of %s" % (count, b"x" * (count % 200)) for count in range(int(lines[-1].split()[1]))]
    assert lines[:-1] == expected, f"{len(expected)} lines, {number} monitors"


def test_what_is_not_logged_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "u1"
    kept = Unlogged(os.fsencode(path))
    assert kept.path == os.fsencode(path)
    file = os.open(path, os.O_RDWR)
    pipes = [os.pipe(), os.pipe()]
    ends = [ours for ours, _ in pipes]
    assert all_logged(file, ends)
    assert all_logged(file, [])
    for ours, theirs in pipes:
        os.write(theirs, b"x")
        assert not all_logged(file, ends)
        os.read(ours, 1)
        assert all_logged(file, ends)
        os.close(theirs)
        assert all_logged(file, ends)  # ended, and read to its end
    os.pwrite(file, (7).to_bytes(8, "little"), 0)  # a chunk that is read and not logged
    assert not all_logged(file, ends)
    os.pwrite(file, bytes(8), 0)
    assert all_logged(file, ends)
    assert not all_logged(file, [*ends, ends[0]])
    os.ftruncate(file, 0)
    assert not all_logged(file, ends)
    for ours in ends:
        os.close(ours)
    assert not all_logged(file, ends)
    os.close(file)


def test_what_is_logged_is_in_the_log(tmp_path: Path) -> None:
    """A yes is never wrong, whenever a monitor reads, and after one was killed; and it comes."""

    def check(line: bytes) -> bool:
        found = all_logged(file, [ours])
        assert not found or b'"' + line + b'\\n"' in (tmp_path / "log").read_bytes()[-200:]
        return found

    ours, theirs = os.pipe()
    for number in range(1, 16):
        pid = os.fork()
        if pid == 0:
            try:
                monitor(tmp_path, ours, number, 0)
            finally:
                os._exit(1)
        path = tmp_path / f"u{number}"
        end = time.monotonic() + 30 * PATIENCE
        try:
            # as a daemon, which knows that this monitor has taken the process over
            while not (path.exists() and left_in(os.fsencode(path))):
                assert time.monotonic() < end
                time.sleep(0.001)
            file = os.open(path, os.O_RDONLY)
            for line in (b"%d %d" % (number, index) for index in range(200)):
                os.write(theirs, line + b"\n")
                check(line)
                while not check(line):
                    assert time.monotonic() < end
            os.write(theirs, b"%d last\n" % number)
        finally:
            os.kill(pid, signal.SIGKILL)
            assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
        check(b"%d last" % number)
        os.close(file)
    os.close(ours)
    os.close(theirs)


def test_a_prompt_survives(tmp_path: Path) -> None:
    """An unfinished line is in no log yet: the next monitor restores it, and logs it whole."""
    log = tmp_path / "log"

    def arrived(number: int, text: bytes) -> bool:
        if text.endswith(b"\n"):
            return log.exists() and bool(logged(log))
        path = tmp_path / f"u{number}"
        left = left_in(os.fsencode(path)) if path.exists() else None
        return bool(left and left["key"].lines[0].endswith(text))

    ours, theirs = os.pipe()
    for number, text in enumerate((b"pass", b"wo", b"rd: x\n"), 1):
        pid = os.fork()
        if pid == 0:
            monitor(tmp_path, ours, number, 0)
        os.write(theirs, text)
        end = time.monotonic() + 30 * PATIENCE
        while not arrived(number, text):
            assert time.monotonic() < end
            time.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
        assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    assert logged(log) == b"password: x\n"
    os.close(ours)
    os.close(theirs)


def test_what_another_monitor_has_taken_over_is_forgotten(tmp_path: Path) -> None:
    """Otherwise a monitor that comes after the end of the process would log the line again."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        monitor(tmp_path, ours, 1, 0)
    os.write(theirs, b"password: ")
    path = os.fsencode(tmp_path / "u1")
    end = time.monotonic() + 30 * PATIENCE
    while not (Path(os.fsdecode(path)).exists() and left_in(path) and left_in(path)["key"].lines[0]):
        assert time.monotonic() < end
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    found = left_in(path)["key"]
    assert found.lines == (b"password: ", b"")
    forget(path, found.slot)
    assert left_in(path) == {}
    os.close(ours)
    os.close(theirs)


@pytest.mark.parametrize("size", [0, 1, 100, 270_000, 400_000])
def test_a_damaged_file_is_harmless(tmp_path: Path, size: int) -> None:
    path = tmp_path / "u1"
    for seed in range(20):
        path.write_bytes(random.Random(seed).randbytes(size))
        for left in left_in(os.fsencode(path)).values():
            assert all(len(line) <= 16384 for line in left.lines)
