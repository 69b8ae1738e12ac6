"""The pump on pipes and socket pairs: no root, no runtime.

The loop runs in a thread of the test until its end.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import resource
import select
import signal
import socket
import threading
import time
import tty
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine._fast.board import Board
from engine._fast.frames import Demultiplexer, mux
from engine._fast.logwriter import LogWriter
from engine._fast.pump import Loop, Stdio
from engine._fast.spool import Spool

BLOCK = bytes(range(256)) * 256


class Bench:
    """A loop in a thread, the streams of one process, and the calls to its owner."""

    def __init__(self, stall: int = 0) -> None:
        self.loop = Loop(stall)
        self.stdio = Stdio(self.loop, self)
        self.told: list[tuple[object, ...]] = []
        self.ends: dict[str, int] = {}
        self._thread: threading.Thread | None = None
        self._closing: list[Callable[[], object]] = []

    def detached(self, number: int, keys: bool) -> None:
        self.told.append(("detached", number, keys))

    def input_ended(self) -> None:
        self.told.append(("input ended",))

    def rotated(self) -> None:
        self.told.append(("rotated",))

    def dropped(self, lines: int) -> None:
        self.told.append(("dropped", lines))

    def drained(self) -> None:
        self.told.append(("drained",))
        self.stdio.dismiss()

    def start(self, stdin: bool = False, stdin_once: bool = False, log: object = None) -> None:
        ours = {"i": -1}
        if stdin:
            self.ends["i"], ours["i"] = os.pipe()
        ours["o"], self.ends["o"] = os.pipe()
        ours["e"], self.ends["e"] = os.pipe()
        self.stdio.start(ours["i"], ours["o"], ours["e"], -1, stdin_once, log)
        self.stdio.begin()

    def attach(
        self,
        *,
        stdin: bool = False,
        raw: bool = False,
        head: bytes = b"",
        early: bytes = b"",
        keys: bytes = b"",
        hold: bool = False,
        pair: tuple[socket.socket, socket.socket] | None = None,
    ) -> tuple[socket.socket, int]:
        ours, theirs = pair or socket.socketpair()
        ours.settimeout(60)
        number = self.stdio.attach(theirs.detach(), stdin, True, True, raw, head, early, keys, hold)
        self._closing.append(ours.close)
        return ours, number

    def serve(self) -> None:
        """Run the loop in a thread. From here on the test may only make system calls on the other
        ends."""
        self._thread = threading.Thread(target=self.loop.run, daemon=True)
        self._thread.start()

    def do(self, work: Callable[[], object]) -> None:
        """Call `work` in the loop, and wait for it."""
        done = threading.Event()
        read, write = os.pipe()

        def ready(events: int) -> None:
            watch.cancel()
            os.close(read)
            work()
            done.set()

        watch = self.loop.watch(read, ready)
        os.close(write)
        assert done.wait(60)

    def end(self, *letters: str) -> None:
        for letter in letters or tuple(self.ends):
            os.close(self.ends.pop(letter))

    def stop(self) -> None:
        self.end()
        for close in self._closing:
            close()
        if self._thread is not None:
            self.do(lambda: self.stdio.finish(0))
            self.do(self.loop.stop)
            self._thread.join(60)


@pytest.fixture
def bench() -> Iterator[Bench]:
    gc.collect()  # frees leftovers of earlier tests
    before = set(os.listdir("/proc/self/fd"))
    made = Bench()
    yield made
    made.stop()
    del made
    left = set(os.listdir("/proc/self/fd")) - before
    assert len(left) <= 1, left  # the loop's own, until it is collected


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def take(sock: socket.socket) -> bytes:
    parts = []
    while part := sock.recv(1 << 20):
        parts.append(part)
    return b"".join(parts)


def payloads(data: bytes) -> dict[int, bytes]:
    found = {1: b"", 2: b""}
    for stream, part in Demultiplexer().feed(data):
        found[stream] += part
    return found


def test_head_comes_first_then_frames(bench: Bench) -> None:
    client, _ = bench.attach(head=b"HTTP/1.1 101 UPGRADED\r\n\r\n")
    assert client.recv(100) == b"HTTP/1.1 101 UPGRADED\r\n\r\n"  # before the process runs
    bench.start()
    bench.serve()
    os.write(bench.ends["o"], b"out")
    assert client.recv(100) == mux(1, b"out")
    os.write(bench.ends["e"], b"err")
    assert client.recv(100) == mux(2, b"err")
    bench.end()
    bench.do(lambda: bench.stdio.finish(9))
    assert client.recv(1) == b""
    assert bench.told == [("drained",)]


@pytest.mark.parametrize("size", [10, 300_000])
def test_no_output_before_the_head_was_read(bench: Bench, size: int) -> None:
    """docker-py reads the head with a buffer, and the rest without it. `size` bytes are more than
    the pipe holds, or less.
    """
    head, output = b"HTTP/1.1 101 UPGRADED\r\n\r\n", bytes(size)
    client, _ = bench.attach(head=head, raw=True)
    bench.start()
    bench.serve()

    def write() -> None:
        done = 0
        while done < size:
            done += os.write(bench.ends["o"], output[done:])
        bench.end()
        bench.do(lambda: bench.stdio.finish(9))

    writing = threading.Thread(target=write)
    writing.start()
    time.sleep(0.05)  # the output comes before the client reads
    assert client.recv(1 << 20) == head
    assert take(client) == output
    writing.join()


def test_output_of_a_process_that_ends_before_the_head_was_read(bench: Bench) -> None:
    head = b"HTTP/1.1 101 UPGRADED\r\n\r\n"
    client, _ = bench.attach(head=head, raw=True)
    bench.start()
    bench.serve()
    os.write(bench.ends["o"], b"out")
    bench.end()
    bench.do(lambda: bench.stdio.finish(9))
    time.sleep(0.02)  # the process has ended before the client reads
    assert client.recv(1000) == head
    assert client.recv(1000) == b"out"
    assert client.recv(1000) == b""


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_output_that_a_client_takes_late_is_complete(bench: Bench, kind: str) -> None:
    """The writer stalls meanwhile. Everything arrives, although the process has ended and the
    client has sent bytes that were not read.
    """
    pair = None
    if kind == "tcp":
        with socket.create_server(("127.0.0.1", 0)) as server:
            ours = socket.create_connection(server.getsockname())
            pair = (ours, server.accept()[0])
    client, _ = bench.attach(pair=pair)
    bench.start()
    bench.serve()
    wrote = 0

    def write() -> None:
        nonlocal wrote
        for _ in range(200):
            wrote += os.write(bench.ends["o"], BLOCK)
        bench.end()

    writer = threading.Thread(target=write)
    writer.start()
    client.sendall(b"never read")
    until(lambda: wrote > 1 << 20)
    seen = -1
    while seen != wrote:  # stalled: nothing moves in a tenth of a second
        seen = wrote
        time.sleep(0.1)
    assert wrote < 200 * len(BLOCK)
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(take(client)))
    reader.start()
    writer.join(60)
    bench.do(lambda: bench.stdio.finish(9))
    reader.join(60)
    assert payloads(got[0])[1] == BLOCK * 200


@pytest.mark.parametrize("raw", [False, True], ids=["framed", "raw"])
@pytest.mark.parametrize("room", [1 << 12, 1 << 16, 1 << 20])
def test_much_output_to_one_client_then_to_two(bench: Bench, raw: bool, room: int) -> None:
    """While there is one client with room, pages are spliced from pipe to socket. The output is the
    same."""
    stream = random.Random(room)
    pair = socket.socketpair()
    pair[1].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, room)
    first, _ = bench.attach(raw=raw, pair=pair)
    bench.start()
    bench.serve()
    got: dict[str, bytes] = {}

    def read(client: socket.socket, name: str) -> None:
        parts = []
        while part := client.recv(stream.choice((100, 70_000, 1 << 20))):
            parts.append(part)
            if stream.random() < 0.02:
                time.sleep(0.01)
        got[name] = b"".join(parts)

    def write(letter: str, blocks: int) -> None:
        for _ in range(blocks):
            data = BLOCK * 12 if letter == "o" else BLOCK[::-1] * 3
            while data:
                data = data[os.write(bench.ends[letter], data[: stream.choice((999, 4096, 300_000, 1 << 20))]) :]

    def write_both(blocks: int) -> None:
        writers = [threading.Thread(target=write, args=(letter, blocks)) for letter in ("oe" if not raw else "o")]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join(60)

    readers = [threading.Thread(target=read, args=(first, "first"))]
    readers[0].start()
    write_both(10)
    until(lambda: bench.stdio.attached)
    second: list[socket.socket] = []
    bench.do(lambda: second.append(bench.attach(raw=raw)[0]))
    readers.append(threading.Thread(target=read, args=(second[0], "second")))
    readers[1].start()
    write_both(3)
    bench.end()
    bench.do(lambda: bench.stdio.finish(9))
    for reader in readers:
        reader.join(60)
    whole = {1: BLOCK * 12 * 13, 2: b"" if raw else BLOCK[::-1] * 3 * 13}
    seen = {name: {1: data, 2: b""} if raw else payloads(data) for name, data in got.items()}
    assert seen["first"] == whole
    assert all(whole[at].endswith(seen["second"][at]) for at in whole)
    assert len(seen["second"][1]) >= 3 * 12 * len(BLOCK)


def test_a_client_that_leaves_in_the_midst_of_much(bench: Bench) -> None:
    client, _ = bench.attach()
    bench.start()
    bench.serve()
    wrote = threading.Event()

    def write() -> None:
        for _ in range(100):
            os.write(bench.ends["o"], BLOCK)
        wrote.set()

    writer = threading.Thread(target=write)
    writer.start()
    client.recv(1 << 20)
    client.close()
    assert wrote.wait(60)
    assert bench.told == [("detached", 1, False)]


def test_a_process_that_ends_does_not_wait_for_a_slow_client(bench: Bench) -> None:
    client, _ = bench.attach(raw=True)
    bench.start()
    bench.serve()
    os.set_blocking(bench.ends["o"], False)
    wrote = 0
    idle = 0
    while idle < 20:  # until pipe, backlog and socket are full
        try:
            wrote += os.write(bench.ends["o"], BLOCK)
            idle = 0
        except BlockingIOError:
            idle += 1
            time.sleep(0.01)
    bench.end()
    bench.do(lambda: bench.stdio.finish(9))
    until(lambda: ("drained",) in bench.told)
    assert len(take(client)) == wrote


def test_stalled_client_is_disconnected_and_the_stream_goes_on() -> None:
    bench = Bench(stall=1)
    _, number = bench.attach(raw=True)
    bench.start()
    bench.serve()
    for _ in range(200):
        os.write(bench.ends["o"], BLOCK)  # blocks until the client is gone
    assert ("detached", number, False) in bench.told
    bench.stop()


def test_input_back_pressure_and_end(bench: Bench) -> None:
    client, _ = bench.attach(stdin=True, early=b"early ")
    bench.start(stdin=True, stdin_once=True)
    bench.serve()
    client.setblocking(False)
    sent = 0
    while select.select([], [client], [], 0.2)[1]:  # until no more is taken
        with contextlib.suppress(BlockingIOError):
            sent += client.send(BLOCK)
    assert sent < 16 << 20
    client.shutdown(socket.SHUT_WR)
    got = bytearray()
    while part := os.read(bench.ends["i"], 1 << 20):
        got += part
    assert bytes(got[:6]) == b"early "
    assert len(got) == sent + 6
    until(lambda: ("input ended",) in bench.told)


def test_detach_keys_split_over_reads(bench: Bench) -> None:
    client, number = bench.attach(stdin=True, raw=True, keys=b"\x10\x11")
    bench.start(stdin=True, stdin_once=False)
    bench.serve()
    client.sendall(b"a\x10b\x10")
    assert os.read(bench.ends["i"], 10) == b"a\x10b"
    client.sendall(b"\x11")
    assert client.recv(1) == b""
    until(lambda: bench.told == [("detached", number, True)])


def test_a_client_that_leaves(bench: Bench) -> None:
    client, number = bench.attach()
    other, _ = bench.attach()
    bench.start()
    bench.serve()
    client.close()
    until(lambda: bench.told == [("detached", number, False)])
    os.write(bench.ends["o"], b"x")
    assert other.recv(100) == mux(1, b"x")


def test_half_close_without_stdin_changes_nothing(bench: Bench) -> None:
    client, _ = bench.attach()
    client.shutdown(socket.SHUT_WR)
    bench.start()
    bench.serve()
    os.write(bench.ends["o"], b"x")
    assert client.recv(100) == mux(1, b"x")


@pytest.mark.parametrize("terminal", [False, True])
def test_the_end_of_input_ends_the_client(bench: Bench, terminal: bool) -> None:
    """Unless it closes the process's stdin: without a terminal and with `stdin_once`. The process
    continues."""
    client, number = bench.attach(stdin=True, raw=terminal)
    other, _ = bench.attach(raw=terminal)
    if terminal:
        master, slave = os.openpty()
        tty.setraw(slave)
        bench.stdio.start(-1, -1, -1, master, True, None)
        bench.stdio.begin()
        bench.ends["o"] = bench.ends["i"] = slave
    else:
        bench.start(stdin=True, stdin_once=False)
    bench.serve()
    client.sendall(b"typed")
    client.shutdown(socket.SHUT_WR)
    assert take(client) == b""
    until(lambda: bench.told == [("detached", number, False)])
    assert os.read(bench.ends["i"], 100) == b"typed"
    os.write(bench.ends["o"], b"x")
    assert other.recv(100) == (b"x" if terminal else mux(1, b"x"))
    if terminal:
        del bench.ends["i"]


def test_nothing_is_left_of_a_client_that_leaves_while_it_is_behind(bench: Bench) -> None:
    """Its socket is full of spliced output, and nothing is kept for it."""
    client, number = bench.attach(stdin=True, raw=True)
    bench.start(stdin=True, stdin_once=False)
    bench.serve()
    os.set_blocking(bench.ends["o"], False)
    idle = 0
    while idle < 20:  # until pipe and socket are full
        try:
            os.write(bench.ends["o"], BLOCK)
            idle = 0
        except BlockingIOError:
            idle += 1
            time.sleep(0.01)
    client.shutdown(socket.SHUT_WR)
    assert take(client)
    until(lambda: bench.told == [("detached", number, False)])
    bench.do(lambda: None)  # the batch of events is over
    assert not [each for each in gc.get_objects() if f"{type(each)}" == "<class 'engine._fast.pump.Client'>"]


def test_a_held_client_whose_input_ends_is_ended_by_its_release(bench: Bench) -> None:
    client, number = bench.attach(stdin=True, hold=True)
    bench.start(stdin=True, stdin_once=False)
    bench.serve()
    client.sendall(b"typed")
    client.shutdown(socket.SHUT_WR)
    assert os.read(bench.ends["i"], 100) == b"typed"
    time.sleep(0.05)
    assert not bench.told, "its history is still being written"
    bench.do(lambda: bench.loop.release(number))
    assert take(client) == b""
    assert bench.told == [("detached", number, False)]


def test_hold_keeps_what_the_log_does_not_have(bench: Bench, tmp_path: Path) -> None:
    path = tmp_path / "log"
    bench.start(log=LogWriter(str(path).encode()))
    bench.serve()
    os.write(bench.ends["o"], b"whole\nhalf ")
    until(lambda: path.stat().st_size > 0)
    state: list[object] = []
    bench.do(lambda: state.extend((bench.stdio.position(), bench.attach(hold=True))))
    position, (client, number) = state  # type: ignore[misc]
    assert position == (path.stat().st_ino, path.stat().st_size)
    os.write(bench.ends["o"], b"line\n")
    until(lambda: path.stat().st_size > position[1])
    client.setblocking(False)
    with pytest.raises(BlockingIOError):
        client.recv(1)
    client.settimeout(60)
    bench.do(lambda: bench.loop.release(number))
    bench.end()
    bench.do(lambda: bench.stdio.finish(9))
    assert payloads(take(client))[1] == b"half line\n"
    logged = [json.loads(line)["log"] for line in path.read_text().splitlines()]
    assert logged == ["whole\n", "half line\n"]


def spool(place: Path, quota: int, *, max_size: int = 0, max_file: int = 2, blocking: bool = True) -> Spool:
    made = Spool(os.fsencode(place / "spool.log"), max_size, max_file)
    made.join(Board(os.fsencode(place / "shipper"), monitor=True), "c", (0, 0, 0, 0), quota, blocking)
    return made


def acknowledge(place: Path, size: int) -> int:
    """As the shipper; returns how much is written."""
    shipper = Board(os.fsencode(place / "shipper"), monitor=False)
    assert shipper.ack(0, "c", 1, 1, size, 1)
    return shipper.slot(0)[2]


def test_a_full_log_stops_its_process_alone(bench: Bench, tmp_path: Path) -> None:
    """Its pipes fill up, and it goes on when enough is acknowledged. Another one is not concerned.
    A client of it sees what is logged.
    """
    log = spool(tmp_path, 1_000_000)
    other = Stdio(bench.loop, bench)
    read, write = os.pipe()
    other.start(-1, read, -1, -1, False, LogWriter(os.fsencode(tmp_path / "other")))
    other.begin()
    bench.start(log=log)
    bench.serve()
    block = (b"x" * 99 + b"\n") * 2000
    done = 0

    def produce() -> None:
        nonlocal done
        for _ in range(40):
            for letter in "oe":
                left = block
                while left:
                    left = left[os.write(bench.ends[letter], left) :]
            done += 1

    writer = threading.Thread(target=produce)
    writer.start()
    until(lambda: log.full)
    seen = -1
    while seen != done:
        seen = done
        time.sleep(0.1)
    written = acknowledge(tmp_path, 1)
    assert 1_000_000 < written < 3_000_000 and done < 40
    os.write(write, b"not concerned\n")
    until(lambda: (tmp_path / "other").stat().st_size)
    acknowledge(tmp_path, written - 750_000)
    time.sleep(0.15)
    assert log.full and acknowledge(tmp_path, written - 750_000) == written
    while writer.is_alive():
        acknowledge(tmp_path, acknowledge(tmp_path, 1))
        time.sleep(0.01)
    writer.join(60)
    acknowledge(tmp_path, 1 << 40)
    bench.do(lambda: bench.end("o", "e"))
    os.close(write)
    bench.do(lambda: other.finish(9))
    bench.do(lambda: bench.stdio.finish(9))
    until(lambda: bench.told.count(("drained",)) == 2)
    assert (tmp_path / "spool.log").read_bytes().count(b"\n") == 40 * 2 * 2000


def test_a_process_that_ends_while_its_log_is_full(bench: Bench, tmp_path: Path) -> None:
    """What is in its pipes is logged, and nothing waits for the shipper."""
    log = spool(tmp_path, 100)
    bench.start(log=log)
    bench.serve()
    os.write(bench.ends["o"], b"a\n" * 100)
    until(lambda: log.full)
    time.sleep(0.02)
    os.write(bench.ends["o"], b"b\n" * 100)
    os.write(bench.ends["e"], b"c\n" * 100)
    time.sleep(0.1)
    assert b'"b' not in (tmp_path / "spool.log").read_bytes()
    bench.end()
    bench.do(lambda: bench.stdio.finish(9))
    until(lambda: ("drained",) in bench.told)
    data = (tmp_path / "spool.log").read_bytes()
    assert [data.count(b'"%s' % letter) for letter in (b"a", b"b", b"c")] == [100] * 3
    time.sleep(0.1)  # the timer finds nothing to do


def test_a_log_that_is_full_at_the_start(bench: Bench, tmp_path: Path) -> None:
    before = spool(tmp_path, 100)
    before.write(1, b"x\n" * 100)
    before.close()
    log = spool(tmp_path, 100)
    assert log.full
    bench.start(log=log)
    bench.serve()
    os.write(bench.ends["o"], b"waits\n")
    time.sleep(0.15)
    assert b"waits" not in (tmp_path / "spool.log").read_bytes()
    shipper = Board(os.fsencode(tmp_path / "shipper"), monitor=False)
    assert shipper.ack(log.slot, "c", 1, 1, 1 << 40, 1)
    until(lambda: b"waits" in (tmp_path / "spool.log").read_bytes())


def test_files_of_a_quiet_log_are_removed_when_they_are_acknowledged(bench: Bench, tmp_path: Path) -> None:
    log = spool(tmp_path, 1 << 20, max_size=1000, max_file=2)
    log.compress = True
    bench.start(log=log)
    bench.serve()
    os.write(bench.ends["o"], b"some line\n" * 100)
    until(lambda: log.turns > 5)
    until(lambda: ("rotated",) in bench.told)
    assert len(list(tmp_path.glob("spool.log*"))) > 5
    acknowledge(tmp_path, 1 << 40)
    until(lambda: len(list(tmp_path.glob("spool.log*"))) == 2)


def test_lines_that_a_log_cannot_take_are_counted(
    bench: Bench, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.log"
    path.write_bytes(b"line\n" * 100_000)
    log = LogWriter(os.fsencode(path))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    bench.start(log=log)
    bench.serve()
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size, hard))
    try:
        os.write(bench.ends["o"], b"a\nb\n")
        until(lambda: ("dropped", 2) in bench.told)
        os.write(bench.ends["o"], b"c\nd")
        until(lambda: ("dropped", 1) in bench.told)
        bench.do(lambda: bench.stdio.finish(0))
        until(lambda: ("drained",) in bench.told)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert bench.told == [("dropped", 2), ("dropped", 1), ("dropped", 1), ("drained",)]
    [line] = capfd.readouterr().err.splitlines()
    assert line == f"{path}: File too large; lines of output are lost"


def test_a_log_that_does_not_block(bench: Bench, tmp_path: Path) -> None:
    log = spool(tmp_path, 10_000, max_size=5000, max_file=2, blocking=False)
    bench.start(log=log)
    bench.serve()
    for _ in range(200):
        os.write(bench.ends["o"], b"some line\n" * 100)
    bench.end()
    bench.do(lambda: bench.stdio.finish(9))
    until(lambda: ("drained",) in bench.told)
    assert len(list(tmp_path.glob("spool.log*"))) <= 5


def test_children_that_hold_the_streams_get_their_grace(bench: Bench) -> None:
    client, _ = bench.attach(raw=True)
    bench.start()
    bench.serve()
    bench.do(lambda: bench.stdio.finish(0.2))
    os.write(bench.ends["o"], b"late")
    assert take(client) == b"late"
    assert bench.told == [("drained",)]


def test_a_busy_stream_does_not_starve_another() -> None:
    loop = Loop(0)
    stop = threading.Event()
    busy, quiet = Bench(), Bench()
    for each in (busy, quiet):
        each.loop = loop
        each.stdio = Stdio(loop, each)
        each.start()
    quick, _ = quiet.attach(raw=True)
    busy.serve()

    def flood() -> None:
        while not stop.is_set():
            os.write(busy.ends["o"], BLOCK)

    writer = threading.Thread(target=flood)
    writer.start()
    for number in range(50):
        os.write(quiet.ends["o"], b"%d" % number)
        assert quick.recv(10) == b"%d" % number
    stop.set()
    writer.join(60)
    quiet.end()
    busy.do(lambda: quiet.stdio.finish(9))
    assert quick.recv(1) == b""
    busy.stop()
    quick.close()


@pytest.mark.parametrize("stdin_once", [True, False])
def test_the_end_of_a_clients_input(bench: Bench, stdin_once: bool) -> None:
    """With stdin_once it ends the process's stdin and output continues; otherwise the attach ends,
    and typed input has been delivered."""
    client, number = bench.attach(stdin=True, raw=True)
    bench.start(stdin=True, stdin_once=stdin_once)
    bench.serve()
    client.sendall(b"typed\n")
    client.shutdown(socket.SHUT_WR)
    assert os.read(bench.ends["i"], 100) == b"typed\n"
    if stdin_once:
        assert os.read(bench.ends["i"], 100) == b""
        os.write(bench.ends["o"], b"answer")
        assert client.recv(100) == b"answer" and ("detached", number, False) not in bench.told
    else:
        assert client.recv(100) == b""
        until(lambda: ("detached", number, False) in bench.told)
        assert select.select([bench.ends["i"]], [], [], 0.1)[0] == []


def test_input_that_ends_in_the_start_of_the_detach_keys(bench: Bench) -> None:
    client, _ = bench.attach(stdin=True, raw=True, keys=b"\x10\x11")
    bench.start(stdin=True, stdin_once=True)
    bench.serve()
    client.sendall(b"a\x10")
    client.shutdown(socket.SHUT_WR)
    taken = b""
    while part := os.read(bench.ends["i"], 100):
        taken += part
    assert taken == b"a\x10"


def test_no_frame_is_left_open_when_another_process_reads_the_pipe(bench: Bench) -> None:
    """A container can empty the pipe with `cat /proc/self/fd/1`. A client then receives whole
    frames, or its connection is closed.
    """
    client, _ = bench.attach()
    bench.start()
    bench.serve()
    pipe = f"/proc/self/fd/{bench.ends['o']}"
    thief = os.fork()
    if thief == 0:
        descriptor = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        while True:
            with contextlib.suppress(BlockingIOError):
                os.read(descriptor, 1 << 16)
    writer = os.fork()
    if writer == 0:
        end = time.monotonic() + 2  # seconds: of load
        while time.monotonic() < end:
            os.write(bench.ends["o"], b"\xff" * (1 << 16))
        os._exit(0)
    frames = Demultiplexer()
    client.settimeout(1)
    try:
        with contextlib.suppress(TimeoutError):
            while part := client.recv(1 << 20):
                for _, payload in frames.feed(part):
                    assert payload.count(0xFF) == len(payload)
    finally:
        os.waitpid(writer, 0)
        os.kill(thief, signal.SIGKILL)
        os.waitpid(thief, 0)


@pytest.mark.parametrize("where", ["attach", "start"])
def test_a_loop_without_room_leaves_descriptors_to_the_caller(bench: Bench, where: str) -> None:
    """epoll refuses a regular file, as it refuses any descriptor when its limit is reached
    (epoll_ctl(2), ENOSPC).
    """
    read, write = os.pipe()
    file = os.memfd_create("none")
    gc.collect()  # frees leftovers of earlier tests
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError):
        if where == "attach":
            bench.stdio.attach(file, False, True, True, False, b"", b"", b"", False)
        else:
            bench.stdio.start(-1, read, file, -1, False, None)
    assert set(os.listdir("/proc/self/fd")) == before and bench.stdio.attached == 0 and not bench.stdio.running
    for descriptor in (read, write, file):
        os.close(descriptor)
    bench.start()
    bench.serve()
    client, _ = bench.attach()
    os.write(bench.ends["o"], b"x")
    assert payloads(client.recv(100))[1] == b"x"
