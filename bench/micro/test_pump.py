"""The pump, from a process's pipe to an attached client: bytes per second, and a check that they
are right.

Budget: 1 GB/s from container to client, framed, without a log. Writer, pump and reader are three
processes, as in the engine. The reader calls recv(2) into one buffer and checks only the frame
headers, so that the pump is measured and not a Python client.
"""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import socket
import struct
from pathlib import Path
from typing import Any

import pytest

from engine._fast.logwriter import LogWriter
from engine._fast.pump import Loop, Stdio

SIZE = 1 << 30
PIPE = 1 << 20
LOGGED = 64 << 20


SO_SNDBUFFORCE = 32  # of asm/socket.h: beyond the limit of sysctl


class Owner:
    def __init__(self, loop: Loop) -> None:
        self.loop = loop

    def detached(self, number: int, keys: bool) -> None:
        raise AssertionError("the client left")

    def input_ended(self) -> None: ...

    def drained(self) -> None:
        self.loop.stop()


def write(descriptor: int, size: int, line: bytes) -> None:
    block = line * ((256 << 10) // len(line))
    while size > 0:
        size -= os.write(descriptor, block[: min(size, len(block))])


def pump(pipe: int, client: int, raw: bool, log: str) -> None:
    loop = Loop(10)
    stdio = Stdio(loop, Owner(loop))
    stdio.attach(client, False, True, True, raw, b"", b"", b"", False)
    stdio.start(-1, pipe, -1, -1, False, LogWriter(log.encode()) if log else None)
    stdio.begin()
    stdio.finish(3600)
    loop.run()
    stdio.dismiss()


def child(work: Any, *arguments: Any) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            work(*arguments)
            os._exit(0)
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
    return pid


def transfer(size: int, raw: bool, log: str = "", line: bytes = bytes(4096)) -> tuple[int, int]:
    """Payload bytes received, and number of frames."""
    output, stdout = os.pipe()
    ours, theirs = socket.socketpair()
    writer = child(write, stdout, size, line)
    os.close(stdout)
    pumping = child(pump, output, theirs.fileno(), raw, log)
    os.close(output)
    theirs.close()
    received = frames = 0
    view = memoryview(bytearray(2 << 20))
    ahead = 0
    while received < size:
        got = ours.recv_into(view)
        if not got:
            break
        if raw:
            received += got
            continue
        at = 0
        while at < got:
            if ahead == 0:
                head = bytes(view[at : at + 8])
                at += len(head)
                while len(head) < 8:
                    head += ours.recv(8 - len(head))
                stream, ahead = struct.unpack(">BxxxI", head)
                assert stream == 1
                frames += 1
            step = min(ahead, got - at)
            received += step
            ahead -= step
            at += step
    ours.close()
    for pid in (writer, pumping):
        assert os.waitpid(pid, 0)[1] == 0
    return received, frames


@pytest.mark.timed("three processes: test_pump_alone is counted")
@pytest.mark.parametrize("raw", [False, True], ids=["framed", "raw"])
def test_pump_to_client(benchmark: Any, raw: bool) -> None:
    received, frames = benchmark.pedantic(transfer, (SIZE, raw), rounds=3, warmup_rounds=1)
    assert received == SIZE
    assert raw or frames >= SIZE >> 18
    benchmark.extra_info["GB/s"] = round(SIZE / benchmark.stats.stats.min / 1e9, 2)


@pytest.mark.timed("three processes: test_pump_alone is counted")
def test_pump_to_client_and_log(benchmark: Any, tmp_path: Path) -> None:
    log = tmp_path / "log"

    def fresh() -> None:
        log.unlink(missing_ok=True)

    received, _ = benchmark.pedantic(transfer, (LOGGED, False, str(log), b"x" * 99 + b"\n"), setup=fresh, rounds=3)
    assert received == LOGGED
    assert log.read_bytes().count(b"\n") >= LOGGED // 100
    benchmark.extra_info["GB/s"] = round(LOGGED / benchmark.stats.stats.min / 1e9, 2)


@pytest.mark.parametrize("kind", ["framed", "raw", "logged"])
def test_pump_alone(benchmark: Any, tmp_path: Path, kind: str) -> None:
    """A full pipe to a client that has room for all of it, in this process alone."""
    kept: list[Any] = []

    def setup() -> tuple[tuple[Loop, Stdio], dict[str, Any]]:
        for descriptor in kept:
            descriptor.close()
        output, stdout = os.pipe()
        size = fcntl.fcntl(stdout, fcntl.F_SETPIPE_SZ, PIPE)
        line = b"x" * 99 + b"\n"
        assert os.write(stdout, (line * (size // len(line) + 1))[:size]) == size
        os.close(stdout)
        ours, theirs = socket.socketpair()
        theirs.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, 16 * PIPE)
        kept[:] = ours, theirs
        loop = Loop(10)
        stdio = Stdio(loop, Owner(loop))
        stdio.attach(os.dup(theirs.fileno()), False, True, True, kind == "raw", b"", b"", b"", False)
        log = LogWriter(str(tmp_path / "log").encode()) if kind == "logged" else None
        stdio.start(-1, output, -1, -1, False, log)
        return (loop, stdio), {}

    def run(loop: Loop, stdio: Stdio) -> None:
        stdio.begin()
        stdio.finish(3600)
        loop.run()
        stdio.dismiss()

    benchmark.pedantic(run, setup=setup, rounds=20)
    received = 0
    kept[1].close()
    while piece := kept[0].recv(1 << 20):
        received += len(piece)
    assert received == PIPE if kind == "raw" else PIPE < received < PIPE * 1.01
    kept[0].close()


@pytest.mark.timed("the loop is another process")
def test_idle_descriptors_cost_nothing(benchmark: Any) -> None:
    """One byte through a loop that also watches thousands of silent pipes."""
    loop = Loop(0)
    silent = []
    keep = []
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    for _ in range(3000):
        stdio = Stdio(loop, Owner(loop))
        output, stdout = os.pipe()
        stdio.start(-1, output, -1, -1, False, None)
        stdio.begin()
        silent.append(stdout)
        keep.append(stdio)
    ask, answer = os.pipe()
    back, reply = os.pipe()
    loop.watch(ask, lambda events: os.write(reply, os.read(ask, 1)))
    pumping = child(loop.run)

    def turn() -> None:
        os.write(answer, b"x")
        assert os.read(back, 1) == b"x"

    try:
        benchmark(turn)
    finally:
        os.kill(pumping, signal.SIGKILL)
        os.waitpid(pumping, 0)
        for descriptor in (*silent, ask, answer, back, reply):
            os.close(descriptor)
        for stdio in keep:
            stdio.finish(0)
            stdio.expire()  # type: ignore[attr-defined]
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
