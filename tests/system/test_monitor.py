"""The monitor with the real runtime: streams, exits, crashes of either side, and nothing left
behind.

Needs root, crun and /bin/busybox (static). Each test has its own RUN directory, monitor and crun
state.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import gc
import hashlib
import itertools
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine._fast.frames import Demultiplexer
from engine._fast.spawn import spawn
from engine.errors import NotFound, ServerError
from engine.logs.targets import JsonFile
from engine.monitor import messages
from engine.monitor.client import Monitor
from engine.monitor.handles import Client, Exit, LaunchFailed
from engine.monitor.launch import Program
from tests.support import PATIENCE
from tests.support.engine import cgroups

LIMIT = 60.0 * PATIENCE
CGROUP = f"/engined-monitor-{os.getpid()}"
"""Cgroup of this run only, so that leftovers of other runs cause no failures."""
MIB = 1 << 20


def wait_until(condition: Callable[[], Any], what: str) -> Any:
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        result = condition()
        if result:
            return result
        time.sleep(0.01)
    raise AssertionError(f"not within {LIMIT:.0f} s: {what}")


async def until(condition: Callable[[], Any], what: str) -> Any:
    return await asyncio.to_thread(wait_until, condition, what)


def descriptors(pid: int) -> list[str]:
    links = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"/proc/{pid}/fd/{name}"))
    return sorted(links)


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class Reader:
    """Reads a socket to its end in a thread: its size, checksum, and the first bytes."""

    def __init__(self, sock: socket.socket, keep: int = 1 << 20) -> None:
        self.sock, self._keep = sock, keep
        self.size = 0
        self.data = bytearray()
        self.hash = hashlib.sha256()
        self.ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while part := self.sock.recv(1 << 20):
                self.hash.update(part)
                self.size += len(part)
                if len(self.data) < self._keep:
                    self.data += part
        self.ended.set()

    async def end(self) -> bytes:
        assert await asyncio.to_thread(self.ended.wait, LIMIT), f"no end of output after {self.size} bytes"
        return bytes(self.data)

    def streams(self) -> dict[int, bytes]:
        found: dict[int, bytes] = {1: b"", 2: b""}
        for stream, data in Demultiplexer().feed(bytes(self.data)):
            found[stream] += data
        return found


class Bench:
    """A RUN directory, a rootfs, and bundles that use it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.run = directory / "run"
        self.rootfs = directory / "rootfs"
        for name in ("bin", "proc", "dev", "sys", "tmp"):
            (self.rootfs / name).mkdir(parents=True)
        shutil.copy("/bin/busybox", self.rootfs / "bin/busybox")
        for name in ("sh", "cat", "echo", "sleep", "head", "dd", "stty", "true", "yes", "seq", "read"):
            (self.rootfs / "bin" / name).symlink_to("busybox")
        self.exits: dict[str, Exit] = {}
        self.detached: list[tuple[str, int, bool]] = []
        self.keys = (f"{os.getpid()}x{number}x{directory.name}" for number in itertools.count())
        self.started: set[str] = set()

    def monitor(self, stall: int = 300) -> Monitor:
        return Monitor(
            self.run,
            attach_stall=stall,
            on_exit=self.exits.__setitem__,
            on_detach=lambda *event: self.detached.append(event),
        )

    def launch(self, script: str | list[str], tty: bool = False) -> tuple[str, dict[str, Any]]:
        """A key and the arguments of Monitor.run for a container of that shell script."""
        key = next(self.keys)
        bundle = self.directory / "bundles" / key
        bundle.mkdir(parents=True)
        spec = {
            "ociVersion": "1.0.2",
            "process": {
                "terminal": tty,
                "user": {"uid": 0, "gid": 0},
                "args": ["/bin/sh", "-c", script] if isinstance(script, str) else script,
                "env": ["PATH=/bin"],
                "cwd": "/",
            },
            "root": {"path": str(self.rootfs), "readonly": False},
            "mounts": [
                {"destination": "/proc", "type": "proc", "source": "proc"},
                {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["mode=755"]},
                {"destination": "/dev/pts", "type": "devpts", "source": "devpts", "options": ["newinstance"]},
            ],
            "linux": {
                "namespaces": [{"type": kind} for kind in ("pid", "ipc", "uts", "mount")],
                "cgroupsPath": f"{CGROUP}/{key}",
            },
        }
        (bundle / "config.json").write_text(json.dumps(spec))
        argv = ["crun", "--root", str(self.directory / "crun"), "--log", "@log@", "run", "--detach"]
        argv += ["--bundle", str(bundle), "--pid-file", "@pid@"]
        if tty:
            argv += ["--console-socket", "@console@"]
        self.started.add(key)
        return key, {
            "argv": [*argv, key],
            "cwd": str(bundle),
            "tty": tty,
        }

    def log(self, key: str) -> JsonFile:
        return JsonFile(str(self.directory / "bundles" / key / "out.log"))

    def log_bytes(self, key: str) -> bytes:
        return (self.directory / "bundles" / key / "out.log").read_bytes()

    def logged(self, key: str) -> bytes:
        return b"".join(json.loads(line)["log"].encode() for line in self.log_bytes(key).splitlines())

    def delete(self, key: str) -> None:
        subprocess.run(
            ["crun", "--root", str(self.directory / "crun"), "delete", "--force", key], capture_output=True, check=False
        )
        self.started.discard(key)

    async def exit_of(self, key: str) -> Exit:
        await until(lambda: key in self.exits, f"exit of {key}")
        return self.exits[key]

    def clean(self) -> None:
        for key in list(self.started):
            self.delete(key)
        for directory in cgroups.directories(CGROUP[1:]):
            directory.rmdir()  # fails when a container's cgroup is left


@pytest.fixture
def bench() -> Iterator[Bench]:
    assert os.getuid() == 0, "these tests need root"
    assert os.path.exists("/bin/busybox"), "these tests need /bin/busybox: apt-get install busybox-static"
    assert shutil.which("crun"), "these tests need crun: apt-get install crun"
    directory = Path(tempfile.mkdtemp(prefix="mon", dir="/tmp"))
    made = Bench(directory)
    try:
        yield made
    finally:
        for pid in monitors_of(made.run):
            os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        # containers reparented to this process while it was the daemon of a killed monitor
        while True:
            try:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    break
            except ChildProcessError:
                break
        try:
            made.clean()
        finally:
            shutil.rmtree(directory)


def monitors_of(run: Path) -> list[int]:
    wanted = f"--run\0{run}\0".encode()
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                if wanted in Path(f"/proc/{name}/cmdline").read_bytes():
                    found.append(int(name))
    return found


def drive(bench: Bench, story: Callable[[Monitor], Awaitable[None]], stall: int = 300) -> None:
    async def main() -> None:
        monitor = bench.monitor(stall)
        await monitor.open()
        try:
            await story(monitor)
        finally:
            for key in list(monitor.processes):
                with contextlib.suppress(NotFound, ServerError):
                    monitor.signal(key, 9)
            await until(lambda: not monitor.processes, "the end of all processes")
            await monitor.shutdown()

    asyncio.run(main())


async def attach(
    monitor: Monitor, key: str, *, stdin: bool = False, raw: bool = False, hold: bool = False, **more: Any
) -> tuple[socket.socket, int]:
    """Attach a client to `key`. Returns the client's end of its socket, and its number."""
    ours, theirs = socket.socketpair()
    with theirs:
        client = Client(descriptor=theirs.fileno(), stdin=stdin, stdout=True, stderr=True, raw=raw, **more)
        attached = await monitor.attach(key, client, hold=hold)
    return ours, attached.client


# --- output ---------------------------------------------------------------------------------------


def test_output_is_complete_and_in_order(bench: Bench) -> None:
    async def story(monitor: Monitor) -> None:
        key, launch = bench.launch("seq 1 8600000")  # 67 MB
        client, _ = await attach(monitor, key, raw=True, head=b"HEAD\r\n\r\n")
        reader = Reader(client)
        await monitor.run(key, **launch)
        await reader.end()
        expected = hashlib.sha256(b"HEAD\r\n\r\n")
        size = 8
        for start in range(1, 8600001, 100000):
            part = "".join(f"{number}\n" for number in range(start, start + 100000)).encode()
            expected.update(part)
            size += len(part)
        assert (reader.size, reader.hash.hexdigest()) == (size, expected.hexdigest())
        assert size > 64 * MIB
        assert (await bench.exit_of(key)).status == 0

    drive(bench, story)


def test_streams_are_framed_and_logged(bench: Bench) -> None:
    async def story(monitor: Monitor) -> None:
        key, launch = bench.launch("echo out; echo err >&2; echo -n unfinished")
        client, _ = await attach(monitor, key)
        reader = Reader(client)
        await monitor.run(key, **launch, log=bench.log(key))
        await reader.end()
        assert reader.streams() == {1: b"out\nunfinished", 2: b"err\n"}
        await bench.exit_of(key)
        lines = (bench.directory / "bundles" / key / "out.log").read_text().splitlines()
        entries = [(each["stream"], each["log"]) for each in map(json.loads, lines)]
        assert sorted(entries) == [("stderr", "err\n"), ("stdout", "out\n"), ("stdout", "unfinished")]

    drive(bench, story)


def test_two_clients_see_the_same(bench: Bench) -> None:
    async def story(monitor: Monitor) -> None:
        key, launch = bench.launch("seq 1 400000")
        readers = [Reader((await attach(monitor, key, raw=True))[0]) for _ in range(2)]
        await monitor.run(key, **launch)
        for reader in readers:
            await reader.end()
        assert readers[0].hash.digest() == readers[1].hash.digest()
        assert readers[0].size == sum(len(str(number)) + 1 for number in range(1, 400001))

    drive(bench, story)


def test_a_slow_client_stalls_only_its_container(bench: Bench) -> None:
    async def story(monitor: Monitor) -> None:
        slow, launch_slow = bench.launch("head -c 33554432 /dev/zero; echo done >&2; sleep 1000")
        client, _ = await attach(monitor, slow, raw=True)
        await monitor.run(slow, **launch_slow, log=bench.log(slow))
        other, launch_other = bench.launch("seq 1 1000000")
        reader = Reader((await attach(monitor, other, raw=True))[0])
        await monitor.run(other, **launch_other)
        await reader.end()
        assert (await bench.exit_of(other)).status == 0
        logged = (bench.directory / "bundles" / slow / "out.log").stat().st_size
        late = Reader(client)
        await until(lambda: late.size == 33554432 + 5, "the slow client's output")
        # a NUL is six characters of JSON: the stream would have stalled before 16 MiB
        assert logged < 6 * 16 * MIB

    drive(bench, story)


def test_a_client_that_takes_nothing_is_disconnected(bench: Bench) -> None:
    async def story(monitor: Monitor) -> None:
        key, launch = bench.launch("head -c 16777216 /dev/zero; echo done > /dev/null")
        client, number = await attach(monitor, key, raw=True)
        await monitor.run(key, **launch)
        assert (await bench.exit_of(key)).status == 0
        assert bench.detached == [(key, number, False)]
        client.close()

    drive(bench, story, stall=1)


def test_output_of_a_grandchild_is_awaited_but_not_for_ever(bench: Bench) -> None:
    async def story(monitor: Monitor) -> None:
        # Without a PID namespace the grandchild outlives its init, holds the pipes, and is
        # reparented to the monitor.
        key, launch = bench.launch("(echo late; exec sleep 1000) & exit 5")
        config = Path(launch["cwd"]) / "config.json"
        spec = json.loads(config.read_text())
        spec["linux"]["namespaces"] = [each for each in spec["linux"]["namespaces"] if each["type"] != "pid"]
        spec["mounts"] = []
        config.write_text(json.dumps(spec))
        reader = Reader((await attach(monitor, key))[0])
        await monitor.run(key, **launch)
        assert (await bench.exit_of(key)).status == 5
        await reader.end()
        assert reader.streams()[1] == b"late\n"
        orphans = await until(lambda: children(monitor.pid), "the orphan")
        os.kill(orphans[0], 9)
        await until(lambda: not children(monitor.pid), "the orphan's collection")

    drive(bench, story)


# --- input ----------------------------------------------------------------------------------------


def test_stdin_round_trip_with_half_close(bench: Bench) -> None:
    async def story(monitor: Monitor) -> None:
        key, launch = bench.launch("cat")
        client, _ = await attach(monitor, key, stdin=True, raw=True, detach_keys=b"", early=b"early" * 20000)
        reader = Reader(client)
        await monitor.run(key, **launch, open_stdin=True, stdin_once=True)
        block = os.urandom(MIB)
        expected = hashlib.sha256(b"early" * 20000)

        def write() -> None:
            for _ in range(64):
                client.sendall(block)
                expected.update(block)
            client.shutdown(socket.SHUT_WR)

        await asyncio.to_thread(write)
        await reader.end()
        assert reader.size == 64 * MIB + 100000
        assert reader.hash.digest() == expected.digest()
        assert (await bench.exit_of(key)).status == 0

    drive(bench, story)


def test_stdin_stays_open_without_stdin_once(bench: Bench) -> None:
    """The end of a client's input ends its attach, as in Docker. Its input has been delivered, and
    the next client can send input.
    """

    async def story(monitor: Monitor) -> None:
        key, launch = bench.launch("while read line; do echo got $line; done")
        process = await monitor.run(key, **launch, open_stdin=True)
        watching, _ = await attach(monitor, key, raw=True)
        reader = Reader(watching)
        for number in range(2):
            client, _ = await attach(monitor, key, stdin=True, raw=True)
            with client:
                client.sendall(b"line %d\n" % number)
                client.shutdown(socket.SHUT_WR)
                await Reader(client).end()
        await until(lambda: bytes(reader.data) == b"got line 0\ngot line 1\n", "the echo")
        assert process.stdio == "ioe"

    drive(bench, story)


def test_a_process_that_closes_stdin_loses_no_output(bench: Bench) -> None:
    async def story(monitor: Monitor) -> None:
        key, launch = bench.launch("head -c 3; exec 0</dev/null; seq 1 100000")
        client, _ = await attach(monitor, key, stdin=True, raw=True)
        reader = Reader(client)
        await monitor.run(key, **launch, open_stdin=True, stdin_once=True)

        def flood() -> None:
            with contextlib.suppress(OSError):
                for _ in range(64):
                    client.sendall(bytes(MIB))

        await asyncio.to_thread(flood)
        await reader.end()
        assert reader.size == 3 + sum(len(str(number)) + 1 for number in range(1, 100001))

    drive(bench, story)


def test_a_client_that_has_gone_before_the_run_still_gave_its_input(bench: Bench) -> None:
    async def story(monitor: Monitor) -> None:
        key, launch = bench.launch("cat > /tmp/gone")
        client, _ = await attach(monitor, key, stdin=True, raw=True)
        client.sendall(b"last words")
        client.close()
        await monitor.run(key, **launch, open_stdin=True, stdin_once=True)
        assert (await bench.exit_of(key)).status == 0
        assert (bench.rootfs / "tmp/gone").read_bytes() == b"last words"

    drive(bench, story)


# --- terminals ------------------------------------------------------------------------------------


def test_terminal_size_resize_and_input(bench: Bench) -> None:
    async def story(monitor: Monitor) -> None:
        key, launch = bench.launch("read a; stty size; read b; stty size; exit 3", tty=True)
        client, _ = await attach(monitor, key, stdin=True, raw=True)
        reader = Reader(client)
        await monitor.run(key, **launch, size=(24, 80), log=bench.log(key))
        client.sendall(b"x\n")
        await until(lambda: b"24 80" in reader.data, "the first size")
        await monitor.resize(key, 50, 132)
        client.sendall(b"y\n")
        await reader.end()
        assert b"50 132" in reader.data
        assert (await bench.exit_of(key)).status == 3
        assert b"24 80" in bench.logged(key)
        with pytest.raises(ServerError):
            await monitor.resize(key, 1, 1)

    drive(bench, story)


def test_detach_keys(bench: Bench) -> None:
    async def story(monitor: Monitor) -> None:
        key, launch = bench.launch("stty raw -echo; echo ready; while read -n 1 c; do echo -n $c; done", tty=True)
        client, number = await attach(monitor, key, stdin=True, raw=True)
        reader = Reader(client)
        await monitor.run(key, **launch)
        await until(lambda: bytes(reader.data) == b"ready\n", "the raw terminal")
        client.sendall(b"ab")
        await until(lambda: bytes(reader.data) == b"ready\nab", "the echo")
        client.sendall(b"\x10")
        client.sendall(b"\x11")
        await reader.end()
        await until(lambda: bench.detached == [(key, number, True)], "the report")
        again, _ = await attach(monitor, key, stdin=True, raw=True)
        reader = Reader(again)
        again.sendall(b"c")
        await until(lambda: bytes(reader.data) == b"c", "life after the detach")

    drive(bench, story)


# --- one order ------------------------------------------------------------------------------------


def test_a_client_and_a_document_come_with_the_run(bench: Bench) -> None:
    """An exec is one order. Its client receives all of the output, or stays attached for the
    failure message. Nothing of the order is left behind.
    """

    def client(theirs: socket.socket) -> Client:
        return Client(descriptor=theirs.fileno(), stdin=True, stdout=True, stderr=True, raw=True, head=b"HEAD ")

    def document(*args: str) -> bytes:
        process = {"user": {"uid": 0, "gid": 0}, "args": args, "env": ["PATH=/bin"], "cwd": "/", "terminal": False}
        return json.dumps(process).encode()

    async def story(monitor: Monitor) -> None:
        key, launch = bench.launch("sleep 600")
        await monitor.run(key, **launch)
        log, run = launch["argv"].index("--log"), launch["argv"].index("run")
        argv = [*launch["argv"][:run], "exec", "--detach", "--process", "@process@", "--pid-file", "@pid@", key]
        assert argv[log + 1] == "@log@"
        # The memory file with the runtime's messages is closed after the answer.
        await until(lambda: not [each for each in descriptors(monitor.pid) if "memfd" in each], "the launch is over")
        held = await asyncio.to_thread(descriptors, monitor.pid)

        ours, theirs = socket.socketpair()
        with theirs:
            await monitor.run(
                "exec", argv, cwd="/", open_stdin=True, stdin_once=True, client=client(theirs), document=document("cat")
            )
        reader = Reader(ours)
        ours.sendall(b"typed")
        ours.shutdown(socket.SHUT_WR)
        await reader.end()
        assert bytes(reader.data) == b"HEAD typed"
        assert (await bench.exit_of("exec")).status == 0

        ours, theirs = socket.socketpair()
        with theirs:
            with pytest.raises(LaunchFailed, match="nothere"):
                await monitor.run("failing", argv, cwd="/", client=client(theirs), document=document("nothere"))
            theirs.sendall(b"it failed")
        monitor.drop("failing")
        reader = Reader(ours)
        await reader.end()
        assert bytes(reader.data) == b"HEAD it failed"

        kept = await asyncio.to_thread(lambda: os.memfd_create("not a socket"))
        try:  # as if the socket could not be passed; then no process is run
            refused = Client(descriptor=kept, stdin=False, stdout=True, stderr=True, raw=True)
            with pytest.raises(ServerError) as error:
                await monitor.run("refused", argv, cwd="/", client=refused, document=document("cat"))
            assert not isinstance(error.value, LaunchFailed)
        finally:
            os.close(kept)
        assert not [name for name in os.listdir(bench.run / "monitor") if name.startswith("p")]
        await until(lambda: descriptors(monitor.pid) == held, "the monitor's descriptors are as before")

    drive(bench, story)


# --- attach, hold, log ----------------------------------------------------------------------------


def test_hold_and_release_without_gap_or_repeat(bench: Bench) -> None:
    async def story(monitor: Monitor) -> None:
        writes = "n=0; while [ $n -lt 3000 ]; do n=$((n+1)); echo -n begin$n; echo end$n; done"
        key, launch = bench.launch(f"{writes}; until [ -e /tmp/attached ]; do sleep 0.01; done")
        await monitor.run(key, **launch, log=bench.log(key))
        ours, theirs = socket.socketpair()
        await until(lambda: os.path.getsize(bench.log(key).path) > 2000, "some log")
        client = Client(descriptor=theirs.fileno(), stdin=False, stdout=True, stderr=True, raw=True)
        attached = await monitor.attach(key, client, hold=True)
        (bench.rootfs / "tmp/attached").touch()
        assert os.stat(bench.log(key).path).st_ino == attached.log_inode
        history = bench.log_bytes(key)[: attached.log_offset]
        theirs.sendall(b"".join(json.loads(line)["log"].encode() for line in history.splitlines()))
        theirs.close()
        reader = Reader(ours)
        await monitor.release(key, attached.client)
        await reader.end()
        expected = b"".join(b"begin%dend%d\n" % (number, number) for number in range(1, 3001))
        assert bytes(reader.data) == expected
        await bench.exit_of(key)
        assert bench.logged(key) == expected

    drive(bench, story)


def test_a_held_client_may_outlive_its_process(bench: Bench) -> None:
    async def story(monitor: Monitor) -> None:
        key, launch = bench.launch("echo short")
        ours, client = await attach(monitor, key, raw=True, hold=True)
        await monitor.run(key, **launch)
        await bench.exit_of(key)
        reader = Reader(ours)
        assert not reader.data
        await monitor.release(key, client)
        assert await reader.end() == b"short\n"

    drive(bench, story)


def test_watch_log(bench: Bench) -> None:
    async def story(monitor: Monitor) -> None:
        key, launch = bench.launch("read a; echo more; read b")
        client, _ = await attach(monitor, key, stdin=True, raw=True)
        await monitor.run(key, **launch, open_stdin=True, log=bench.log(key))
        inode = os.stat(bench.log(key).path).st_ino
        # there is no such process, so the answer comes at once
        await asyncio.wait_for(monitor.watch_log(key, inode, 5), LIMIT)
        watch = asyncio.create_task(monitor.watch_log(key, inode, 0))
        abandoned = asyncio.create_task(monitor.watch_log(key, inode, 0))
        await monitor.watch_log(key, 0, 0)  # after this answer both are registered
        abandoned.cancel()
        client.sendall(b"a\n")
        await asyncio.wait_for(watch, LIMIT)
        size = os.stat(bench.log(key).path).st_size
        assert size > 0
        watch = asyncio.create_task(monitor.watch_log(key, inode, size))
        client.sendall(b"b\n")
        await asyncio.wait_for(watch, LIMIT)
        await asyncio.wait_for(monitor.watch_log(key, inode, size), LIMIT)

    drive(bench, story)


@pytest.mark.parametrize("next_daemon", [False, True])
def test_it_is_seen_without_a_question_that_all_is_logged(bench: Bench, next_daemon: bool) -> None:
    async def story(monitor: Monitor) -> None:
        key, launch = bench.launch("until [ -e /tmp/go ]; do sleep 0.01; done; echo x; echo >/tmp/written; sleep 1000")
        await monitor.run(key, **launch, log=bench.log(key))
        if next_daemon:
            first, monitor = monitor, bench.monitor()
            await first.close()
            await monitor.open()
        try:
            await until(lambda: monitor.all_logged(key), "that nothing is in the pipes")
            os.kill(monitor.pid, signal.SIGSTOP)
            try:
                (bench.rootfs / "tmp/go").touch()
                await until((bench.rootfs / "tmp/written").exists, "the line")
                assert not monitor.all_logged(key)
            finally:
                os.kill(monitor.pid, signal.SIGCONT)
            await until(lambda: monitor.all_logged(key), "that it is logged")
            assert bench.logged(key) == b"x\n"
        finally:
            monitor.signal(key, 9)
            await bench.exit_of(key)
            if next_daemon:
                await monitor.close()
                await first.open()

    drive(bench, story)


def test_drop_closes_waiting_clients(bench: Bench) -> None:
    async def story(monitor: Monitor) -> None:
        reader = Reader((await attach(monitor, "nothing", head=b"head"))[0])
        monitor.drop("nothing")
        assert await reader.end() == b"head"

    drive(bench, story)


# --- exits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("script", "status"), [("exit 0", 0), ("exit 1", 1), ("kill -9 $$", 0), ("exit 255", 255)])
def test_exit_codes(bench: Bench, script: str, status: int) -> None:
    async def story(monitor: Monitor) -> None:
        key, launch = bench.launch(script)
        before = time.time_ns()
        if script.startswith("kill"):  # SIGKILL from inside its PID namespace does not kill an init
            key, launch = bench.launch("sleep 1000")
            await monitor.run(key, **launch)
            monitor.signal(key, 9)
            status_wanted = 137
        else:
            await monitor.run(key, **launch)
            status_wanted = status
        found = await bench.exit_of(key)
        assert found.status == status_wanted
        assert before < found.at < time.time_ns()
        with pytest.raises(NotFound):
            monitor.signal(key, 9)
        journal = bench.run / "monitor/journal"
        assert journal.stat().st_size > 0
        monitor.forget(key)
        await until(lambda: journal.stat().st_size == 0, "the journal's end")

    drive(bench, story)


def test_a_failed_run_gives_the_runtimes_reason(bench: Bench) -> None:
    async def story(monitor: Monitor) -> None:
        key, launch = bench.launch(["/bin/missing"])
        reader = Reader((await attach(monitor, key))[0])
        with pytest.raises(LaunchFailed) as caught:
            await monitor.run(key, **launch, open_stdin=True)
        assert "/bin/missing" in caught.value.reason
        assert "no such file" in caught.value.reason.lower()
        assert caught.value.status > 0
        with pytest.raises(LaunchFailed, match="No such file"):
            await monitor.run(key, **{**launch, "argv": ["/nonexistent/runtime"]})
        # The attached client waits for the run that succeeds.
        bench.delete(key)
        bench.started.add(key)
        config = Path(launch["cwd"]) / "config.json"
        config.write_text(config.read_text().replace("/bin/missing", "/bin/true"))
        await monitor.run(key, **launch)
        assert await reader.end() == b""

    drive(bench, story)


def test_many_short_runs_leave_nothing(bench: Bench) -> None:
    async def story(monitor: Monitor) -> None:
        async def one() -> None:
            key, launch = bench.launch("echo hello")
            client, _ = await attach(monitor, key)
            reader = Reader(client)
            await monitor.run(key, **launch, open_stdin=True, log=bench.log(key))
            await reader.end()
            assert reader.streams()[1] == b"hello\n"
            assert (await bench.exit_of(key)).status == 0
            monitor.forget(key)
            await asyncio.to_thread(bench.delete, key)
            client.close()

        await one()
        gc.collect()  # reference cycles left by earlier tests
        ours, theirs = len(descriptors(os.getpid())), len(descriptors(monitor.pid))
        gate = asyncio.Semaphore(16)

        async def gated() -> None:
            async with gate:
                await one()

        await asyncio.gather(*(gated() for _ in range(300)))
        await until(lambda: len(descriptors(monitor.pid)) <= theirs, "the monitor's descriptors as before")
        await until(lambda: len(descriptors(os.getpid())) <= ours, "its own as before")
        # it looks for orphans once for all that end within 0.1 s
        await until(lambda: not children(monitor.pid), "no child")
        assert sorted(os.listdir(bench.run / "monitor")) == ["journal", "lock", "log", "socket", "u1"]
        await until(lambda: (bench.run / "monitor/journal").stat().st_size == 0, "the journal's end")
        assert (bench.run / "monitor/log").read_text() == ""

    drive(bench, story)


# --- crashes --------------------------------------------------------------------------------------

DAEMON = """
import asyncio, json, os, sys
from pathlib import Path
from engine.monitor.client import Monitor
from engine.monitor.handles import Client
from engine.logs.targets import JsonFile

async def main():
    monitor = Monitor(Path(sys.argv[1]), attach_stall=300, on_exit=lambda key, end: None)
    await monitor.open()
    for line in sys.stdin:
        key, launch, log, client = json.loads(line)
        if client is not None:
            streams = dict(stdin=True, stdout=True, stderr=True, raw=True)
            await monitor.attach(key, Client(descriptor=client, **streams, detach_keys=b""))
        running = asyncio.ensure_future(monitor.run(key, **launch, log=JsonFile(log), open_stdin=True, stdin_once=True))
        if not key.endswith("nowait"):
            await running
        else:
            await asyncio.sleep(0)
        print(key, flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""


def test_kill_of_the_daemon(bench: Bench) -> None:
    """Containers print, exit and are being started when the daemon is killed. The next daemon
    learns all of it.
    """
    ours, theirs = socket.socketpair()
    daemon = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(DAEMON), str(bench.run)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=[theirs.fileno()],
    )
    assert daemon.stdin is not None
    assert daemon.stdout is not None

    def start(script: str, client: int | None = None, suffix: str = "") -> str:
        key, launch = bench.launch(script)
        if suffix:
            bench.started.discard(key)
            launch["argv"][-1] = key = key + suffix
            bench.started.add(key)
        log = str(bench.directory / "bundles" / key.removesuffix(suffix) / "out.log")
        daemon.stdin.write(json.dumps([key, launch, log, client]) + "\n")  # type: ignore[union-attr]
        daemon.stdin.flush()  # type: ignore[union-attr]
        assert daemon.stdout.readline().strip() == key  # type: ignore[union-attr]
        return key

    printing = start("seq 1 3000000; cat; seq 1 1000; exit 7", theirs.fileno())
    theirs.close()
    ending = start("sleep 0.3; exit 9")
    started = start("seq 1 1000; sleep 1000", suffix="nowait")
    reader = Reader(ours)
    daemon.kill()
    daemon.wait()
    daemon.stdin.close()
    daemon.stdout.close()
    wait_until(lambda: reader.size > 20 * MIB, "output after the daemon's death")
    wait_until(lambda: (bench.run / "monitor/journal").stat().st_size > 0, "the exit in the journal")

    async def story(monitor: Monitor) -> None:
        assert monitor.exits[ending].status == 9
        assert set(monitor.processes) == {printing, started}
        assert monitor.processes[started].stdio == "ioe"
        monitor.forget(ending)
        ours.sendall(b"still attached\n")
        ours.shutdown(socket.SHUT_WR)
        await reader.end()
        expected = hashlib.sha256()
        for number in range(1, 3000001):
            expected.update(b"%d\n" % number)
        expected.update(b"still attached\n" + b"".join(b"%d\n" % number for number in range(1, 1001)))
        assert reader.hash.digest() == expected.digest()
        assert (await bench.exit_of(printing)).status == 7
        assert hashlib.sha256(bench.logged(printing)).digest() == expected.digest()
        monitor.signal(started, 9)
        assert (await bench.exit_of(started)).status == 137

    drive(bench, story)


def test_kill_of_the_daemon_closes_held_clients(bench: Bench) -> None:
    async def story(monitor: Monitor) -> None:
        other = bench.monitor()
        held, _ = await attach(monitor, "a", hold=True)
        free, _ = await attach(monitor, "a", head=b"x")
        await other.open()  # a newer daemon ends the connection of the older one
        assert await Reader(held).end() == b""
        other.drop("a")
        assert await Reader(free).end() == b"x"
        await other.shutdown()

    async def main() -> None:
        monitor = bench.monitor()
        await monitor.open()
        await story(monitor)
        await monitor.close()

    asyncio.run(main())


def test_kill_of_the_monitor(bench: Bench) -> None:
    async def story(monitor: Monitor) -> None:
        key, launch = bench.launch("while read line; do echo $line; done; exit 4")
        await monitor.run(key, **launch, open_stdin=True, stdin_once=True, log=bench.log(key))
        ending, launch_ending = bench.launch("read line; exit 6")
        await monitor.run(ending, **launch_ending, open_stdin=True, stdin_once=True)
        terminal, launch_terminal = bench.launch("while read line; do stty size; done", tty=True)
        await monitor.run(terminal, **launch_terminal, size=(10, 20))
        client, _ = await attach(monitor, key, stdin=True, raw=True)
        reader = Reader(client)
        client.sendall(b"before\n")
        await until(lambda: bytes(reader.data) == b"before\n", "the first echo")
        watch = asyncio.create_task(
            monitor.watch_log(key, os.stat(bench.log(key).path).st_ino, os.stat(bench.log(key).path).st_size)
        )
        await asyncio.sleep(0)
        old = monitor.pid
        os.kill(old, 9)
        monitor.signal(ending, 9)  # ends while no monitor runs
        await reader.end()
        await until(lambda: monitor.pid != old, "a new monitor")
        client, _ = await attach(monitor, key, stdin=True, raw=True)
        reader = Reader(client)
        client.sendall(b"after\n")
        await until(lambda: bytes(reader.data) == b"after\n", "the echo after the restoration")
        await asyncio.wait_for(watch, LIMIT)
        assert (await bench.exit_of(ending)).status == 137
        console, _ = await attach(monitor, terminal, stdin=True, raw=True)
        screen = Reader(console)
        await monitor.resize(terminal, 30, 40)
        console.sendall(b"\n")
        await until(lambda: b"30 40" in screen.data, "the terminal")
        client.shutdown(socket.SHUT_WR)
        assert (await bench.exit_of(key)).status == 4
        assert bench.logged(key) == b"before\nafter\n"

    drive(bench, story)


def test_exits_wait_for_a_daemon_that_is_not_ready(bench: Bench) -> None:
    """An exit between `open` and `deliver` is neither lost nor reported before the caller is
    ready."""

    async def main() -> None:
        earlier = bench.monitor()
        await earlier.open()
        gate = bench.rootfs / "tmp/gate"
        os.mkfifo(gate)
        key, launch = bench.launch("read word < /tmp/gate; exit 5")
        await earlier.run(key, **launch)
        await earlier.close()
        monitor = bench.monitor()
        await monitor.open(hold=True)
        await asyncio.to_thread(gate.write_text, "go\n")
        await until(lambda: key in monitor.exits, "its end")
        assert key not in bench.exits and key not in monitor.processes
        monitor.deliver()
        assert bench.exits[key].status == 5 and monitor.exits == {}
        monitor.forget(key)
        await monitor.shutdown()

    asyncio.run(main())


def test_kill_of_both(bench: Bench) -> None:
    """The next daemon learns the exits from the journal of a dead monitor."""

    async def first() -> str:
        monitor = bench.monitor()
        await monitor.open()
        key, launch = bench.launch("exit 11")
        await monitor.run(key, **launch)
        await bench.exit_of(key)
        forgotten, launch = bench.launch("exit 12")
        await monitor.run(forgotten, **launch)
        await bench.exit_of(forgotten)
        monitor.forget(forgotten)
        await monitor.watch_log("nothing", 0, 0)  # the previous order has been carried out
        monitor.closing = True
        os.kill(monitor.pid, 9)
        await until(lambda: not monitors_of(bench.run), "the monitor's end")
        await monitor.close()
        return key

    key = asyncio.run(first())

    async def story(monitor: Monitor) -> None:
        assert {each: found.status for each, found in monitor.exits.items()} == {key: 11}

    drive(bench, story)


def test_one_monitor_for_a_run_directory(bench: Bench) -> None:
    async def story(monitor: Monitor) -> None:
        second = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-m", "engine.monitor", "--run", str(bench.run)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert second.returncode == 3
        assert "another monitor" in second.stderr
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
            os.kill(monitor.pid, number)
        key, launch = bench.launch("true")
        await monitor.run(key, **launch)
        assert (await bench.exit_of(key)).status == 0
        assert os.getsid(monitor.pid) == monitor.pid

    drive(bench, story)


def test_the_runtime_is_executed_where_nobody_can_write_to_it(tmp_path: Path) -> None:
    """Processes in a container can reach the runtime that enters it through /proc/PID/exe
    (CVE-2019-5736)."""
    runtime, upgrade = tmp_path / "busybox", tmp_path / "upgrade"
    shutil.copy("/bin/busybox", runtime)
    program = Program()
    descriptor = program.descriptor(str(runtime))
    null = os.open(os.devnull, os.O_RDWR)
    pid = spawn([bytes(runtime), b"sleep", b"100"], [], b"/", null, null, null, 0, descriptor)
    try:
        wait_until(lambda: os.path.samestat(os.stat(f"/proc/{pid}/exe"), os.stat(runtime)), "the program")
        assert os.statvfs(f"/proc/{pid}/exe").f_flag & os.ST_RDONLY
        assert not os.statvfs(runtime).f_flag & os.ST_RDONLY
        assert not [line for line in descriptors(pid) if "busybox" in line]
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    with pytest.raises(OSError, match="Read-only file system"):
        os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY)

    assert program.descriptor(str(runtime)) == descriptor
    shutil.copy("/bin/true", upgrade)
    upgrade.rename(runtime)
    upgraded = program.descriptor(str(runtime))
    assert os.path.samestat(os.fstat(upgraded), os.stat(runtime))
    assert len([line for line in descriptors(os.getpid()) if line.endswith("/busybox")]) <= 1, "the old one is closed"

    # A script cannot be executed by a descriptor that execve(2) closes, so it is executed by its
    # name.
    upgrade.write_text("#!/bin/sh\nexit 7\n")
    upgrade.chmod(0o755)
    upgrade.rename(runtime)
    pid = spawn([bytes(runtime)], [], b"/", null, null, null, 0, program.descriptor(str(runtime)))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7

    runtime.unlink()
    assert program.descriptor(str(runtime)) == -1
    with pytest.raises(FileNotFoundError):
        spawn([bytes(runtime)], [], b"/", null, null, null, 0, program.descriptor(str(runtime)))
    assert program.descriptor("sh") == -1
    os.close(null)


def test_a_monitor_of_the_previous_protocol(bench: Bench) -> None:
    """Upgrade and downgrade. A daemon uses a monitor that speaks only the previous protocol, and
    the next daemon takes it over.
    """
    bench.run.mkdir()
    command = [sys.executable, "-P", "-S", "-m", "engine.monitor", "--run", str(bench.run), "--protocol", "3"]
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as old:
        assert old.stdout is not None and old.stdout.read() == b"ready\n"

        async def story(monitor: Monitor) -> None:
            assert monitor.pid == old.pid
            key, launch = bench.launch("while read line; do echo got $line; done; exit 7")
            await monitor.run(key, **launch, log=bench.log(key), open_stdin=True, stdin_once=True)
            ours, _ = await attach(monitor, key, stdin=True, raw=True)
            await asyncio.to_thread(ours.sendall, b"one\n")
            assert await asyncio.to_thread(ours.recv, 100) == b"got one\n"
            await monitor.close()
            again = bench.monitor()
            await again.open()
            assert again.pid == old.pid and again.processes[key].log == bench.log(key)
            await asyncio.to_thread(ours.sendall, b"two\n")
            assert await asyncio.to_thread(ours.recv, 100) == b"got two\n"
            second, launch = bench.launch("echo more")
            await again.run(second, **launch, log=bench.log(second))
            ours.shutdown(socket.SHUT_WR)
            assert (await bench.exit_of(key)).status == 7
            assert (await bench.exit_of(second)).status == 0
            assert bench.logged(second) == b"more\n" and bench.logged(key) == b"got one\ngot two\n"
            os.kill(old.pid, signal.SIGKILL)
            await until(lambda: again.pid != old.pid, "a monitor of this version")
            await again.shutdown()
            await monitor.open()

        drive(bench, story)


def test_kills_of_the_monitor_lose_no_line(bench: Bench) -> None:
    """Containers that write much, and lines in pieces, while the monitor is killed repeatedly."""

    async def story(monitor: Monitor) -> None:
        keys = []
        for script in ("i=0; while [ $i -lt 60000 ]; do echo line $i; i=$((i+1)); done", "seq 1 400000") * 2:
            key, launch = bench.launch(script)
            await monitor.run(key, **launch, log=bench.log(key))
            keys.append(key)
        kills = 0
        while not all(key in bench.exits for key in keys) and kills < 12:
            await asyncio.sleep(0.15)
            pid = monitor.pid
            os.kill(pid, signal.SIGKILL)
            kills += 1
            await until(lambda pid=pid: monitor.pid != pid and monitor._connected.is_set(), "another monitor")
        for number, key in enumerate(keys):
            await bench.exit_of(key)
            wanted = (
                [f"line {count}" for count in range(60000)] if number % 2 == 0 else [f"{n}" for n in range(1, 400001)]
            )
            assert bench.logged(key).decode().splitlines() == wanted, kills

    drive(bench, story)


# --- a daemon that dies with its orders under way -------------------------------------------------


class Raw:
    """A daemon's end of a connection, which sends orders and reads nothing."""

    def __init__(self, bench: Bench, ours: socket.socket | None = None) -> None:
        self.end = ours or socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if ours is None:
            self.end.connect(str(bench.run / "monitor/socket"))
        self.end.settimeout(LIMIT)
        self.bench = bench
        self.sequence = itertools.count(1)
        self.pipes: list[int] = []

    def send(self, order: Callable[[int], messages.Order], descriptors: list[int] | None = None) -> None:
        socket.send_fds(self.end, [messages.encode(order(next(self.sequence)))], descriptors or [])

    def adopt(self, key: str, pid: int) -> None:
        """Hand a process over whose output is a pipe; closes everything here but the pipe's writing
        end."""
        pidfd = os.pidfd_open(pid)
        reading, writing = os.pipe()
        log = JsonFile(str(self.bench.directory / f"{key}.log"))
        self.send(lambda seq: messages.Adopt(seq, key, pid, "o", False, log), [pidfd, reading])
        os.close(pidfd)
        os.close(reading)
        self.pipes.append(writing)

    def close(self) -> None:
        self.end.close()
        for descriptor in self.pipes:
            os.close(descriptor)


MANY = 100
"""More orders than a monitor reads in one turn of its loop."""


@pytest.fixture
def sleeping() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def start_monitor(bench: Bench, connection: int = -1, lock: int = -1) -> subprocess.Popen[bytes]:
    """With an inherited connection and lock, unless they are -1. Returns when it serves."""
    command = [sys.executable, "-P", "-S", "-m", "engine.monitor", "--run", str(bench.run)]
    if connection >= 0:
        command += ["--connection", str(connection), "--lock", str(lock)]
    inherited = [each for each in (connection, lock) if each >= 0]
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, pass_fds=inherited)
    assert process.stdout is not None and process.stdout.read() == b"ready\n"
    process.stdout.close()
    return process


def test_a_monitor_whose_daemon_is_dead_from_the_start(bench: Bench, sleeping: subprocess.Popen[bytes]) -> None:
    """It takes over what it was sent before it existed. The next daemon gets all of it, and every
    line and exit."""
    (bench.run / "monitor").mkdir(parents=True)
    lock = os.open(bench.run / "monitor/lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 * MIB)
    raw = Raw(bench, ours)
    raw.send(messages.Hello)
    kept = os.memfd_create("kept")
    raw.send(messages.Keep, [kept])
    for name in ("one", "two", "three"):
        raw.send(lambda seq, name=name: messages.Hold(seq, name), [kept])  # type: ignore[misc]
    raw.send(lambda seq: messages.Hold(seq, "two"))
    for number in range(MANY):
        raw.adopt(f"key{number}", sleeping.pid)
    theirs.sendall(b"\xc0")  # unread when it dies: the monitor gets ECONNRESET first
    ours.close()
    process = start_monitor(bench, theirs.fileno(), lock)
    theirs.close()
    with open(bench.run / "monitor/lock", "rb") as another, pytest.raises(BlockingIOError):
        fcntl.flock(another, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(lock)

    async def story(monitor: Monitor) -> None:
        assert monitor.pid == process.pid
        assert set(monitor.processes) == {f"key{number}" for number in range(MANY)}
        for descriptor in (monitor.kept, *monitor.held.values()):
            assert os.path.samestat(os.fstat(kept), os.fstat(descriptor))
        assert set(monitor.held) == {"one", "three"}
        for number, writing in enumerate(raw.pipes):
            os.write(writing, b"line %d\n" % number)
        raw.close()
        sleeping.terminate()
        sleeping.wait()
        for number in range(MANY):
            status = (await bench.exit_of(f"key{number}")).status
            assert status in (143, 255)  # 255 on kernels before 6.15: it is not the monitor's child
            logged = (bench.directory / f"key{number}.log").read_bytes()
            assert json.loads(logged)["log"] == f"line {number}\n"

    drive(bench, story)
    os.close(kept)
    process.wait()


def test_orders_of_a_daemon_that_dies_are_carried_out(bench: Bench, sleeping: subprocess.Popen[bytes]) -> None:
    """It has not read every report, so the monitor gets ECONNRESET before the rest of the
    queue."""
    bench.run.mkdir()
    process = start_monitor(bench)
    raw = Raw(bench)
    raw.end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 * MIB)
    raw.send(messages.Hello)
    select.select([raw.end], [], [])
    os.kill(process.pid, signal.SIGSTOP)
    for number in range(MANY):
        raw.adopt(f"key{number}", sleeping.pid)
    raw.end.close()
    os.kill(process.pid, signal.SIGCONT)

    async def story(monitor: Monitor) -> None:
        assert len(monitor.processes) == MANY
        raw.close()
        sleeping.kill()
        sleeping.wait()

    drive(bench, story)
    process.wait()


def test_orders_of_a_daemon_come_before_the_next_ones_hello(bench: Bench, sleeping: subprocess.Popen[bytes]) -> None:
    bench.run.mkdir()
    process = start_monitor(bench)
    raw = Raw(bench)
    raw.end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 * MIB)
    raw.send(messages.Hello)
    select.select([raw.end], [], [])
    os.kill(process.pid, signal.SIGSTOP)
    for number in range(MANY):
        raw.adopt(f"key{number}", sleeping.pid)
    following = Raw(bench)
    following.send(messages.Hello)
    os.kill(process.pid, signal.SIGCONT)
    states = []
    while not isinstance(report := messages.decode_report(following.end.recv(messages.PACKET)), messages.Done):
        states.append(report)
    assert len(states) == MANY
    raw.close()
    sleeping.kill()
    sleeping.wait()
    following.close()

    async def story(monitor: Monitor) -> None:
        pass

    drive(bench, story)
    process.wait()


def test_a_process_is_taken_over_once(bench: Bench, sleeping: subprocess.Popen[bytes]) -> None:
    """Offered again it stays as it is. One whose exit is in the journal stays ended."""
    bench.run.mkdir()
    process = start_monitor(bench)
    raw = Raw(bench)
    raw.send(messages.Hello)
    raw.adopt("one", sleeping.pid)
    raw.adopt("one", sleeping.pid)
    with subprocess.Popen(["true"]) as short:
        raw.adopt("two", short.pid)
    os.close(raw.pipes[2])
    wait_until(lambda: (bench.run / "monitor/journal").stat().st_size, "the exit in the journal")
    raw.adopt("two", sleeping.pid)

    def answers() -> dict[int, messages.Report]:
        found = {}
        while len(found) < 5:
            report = messages.decode_report(raw.end.recv(messages.PACKET))
            if not isinstance(report, messages.Exited):
                assert isinstance(report, messages.Done), report
                found[report.seq] = report
        return found

    def has_no_reader(pipe: int) -> bool:
        try:
            return not os.write(pipe, b"x")
        except BrokenPipeError:
            return True

    assert set(answers()) == {1, 2, 3, 4, 5}
    for pipe in (raw.pipes[1], raw.pipes[3]):  # the monitor closes the duplicates after its answer
        wait_until(functools.partial(has_no_reader, pipe), "the second descriptors of each are closed")
    os.write(raw.pipes[0], b"line\n")
    del raw.pipes[2]
    raw.close()
    sleeping.kill()
    sleeping.wait()

    async def story(monitor: Monitor) -> None:
        await until(lambda: {*monitor.exits, *bench.exits} == {"one", "two"}, "both ends")

    drive(bench, story)
    assert json.loads((bench.directory / "one.log").read_bytes())["log"] == "line\n"
    process.wait()


def test_a_monitor_ends_the_launches_of_a_dead_one(bench: Bench) -> None:
    """Of its own RUN alone. The daemon that would do it may be dead as well."""
    bench.run.mkdir()
    command = ["sh", "-c", "sleep 600; :", "runtime"]
    left, other = (
        subprocess.Popen([*command, f"{run}/monitor/p77.1"], start_new_session=True)
        for run in (bench.run, f"{bench.run}2")
    )
    try:
        process = start_monitor(bench)
        assert left.wait(10 * PATIENCE) == -signal.SIGKILL
        assert other.poll() is None
    finally:
        for each in (left, other):
            os.killpg(each.pid, signal.SIGKILL)
            each.wait()

    async def story(monitor: Monitor) -> None:
        pass

    drive(bench, story)
    process.wait()


@pytest.mark.parametrize("removed", ["socket", "monitor"])
def test_a_monitor_whose_socket_was_removed(bench: Bench, removed: str) -> None:
    """A cleaner of temporary files removed the socket while no daemon ran. The next daemon finds
    the monitor and starts no second one.
    """

    async def story(monitor: Monitor) -> None:
        key, launch = bench.launch("while :; do sleep 1; done")
        await monitor.run(key, **launch)
        pid = monitor.pid
        await monitor.close()
        if removed == "socket":
            (bench.run / "monitor/socket").unlink()
        else:
            shutil.rmtree(bench.run / "monitor")
        again = bench.monitor()
        await again.open()
        assert again.pid == pid and set(again.processes) == {key} and monitors_of(bench.run) == [pid]
        again.signal(key, 9)
        assert (await bench.exit_of(key)).status == 137
        await again.shutdown()
        await monitor.open()

    drive(bench, story)


def test_a_monitor_that_nothing_can_find_ends(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A monitor ends if it has no daemon, no process and no RUN directory."""
    bench.run.mkdir()
    code = f"from engine.monitor import monitor; monitor.LOOK_PAUSE = 0.2; monitor.main(['--run', {str(bench.run)!r}])"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.read() == b"ready\n"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1)
        shutil.rmtree(bench.run)
        assert process.wait(10 * PATIENCE) == 0
