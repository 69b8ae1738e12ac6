"""kill -9 of the daemon, of the monitor, a reboot, an upgrade: containers, their output and their
exit codes survive."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.support import PATIENCE, ROOT
from tests.support.engine import cgroups
from tests.support.engine.client import frames, hijack, payload, read_to_end
from tests.support.engine.harness import TempEngine, alive, busybox_archive, kill_and_wait, until
from tests.support.nightly import nightly

LINES = 4000
PRINT = (
    f"i=0; while [ $i -lt {LINES} ]; do echo line $i; i=$((i+1)); [ $((i % 100)) = 0 ] && usleep 20000; done; exit 7"
)
PRINTED = b"".join(b"line %d\n" % number for number in range(LINES))


def printing(engine: TempEngine, identifier: str) -> None:
    until("it prints", lambda: engine.logs(identifier, "stdout=1&tail=1"))


def test_daemon_killed_while_containers_print(own_engine: TempEngine) -> None:
    """No line is lost or duplicated, neither in the log nor for an attached client. Exit codes are
    kept."""
    engine = own_engine
    attached_to = engine.create("sh", "-c", PRINT)
    stream, early = hijack(engine.socket, f"/v1.24/containers/{attached_to}/attach?stream=1&stdout=1")
    engine.post(f"/containers/{attached_to}/start")
    others = [engine.started("sh", "-c", PRINT) for _ in range(3)]
    everyone = [attached_to, *others]
    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.append(read_to_end(stream, early)))
    reader.start()
    printing(engine, others[-1])
    pids = {identifier: engine.inspect(identifier)["State"]["Pid"] for identifier in everyone}
    for _ in range(3):
        engine.restart()
        for identifier in everyone:
            state = engine.inspect(identifier)["State"]
            assert (state["Running"] and state["Pid"] == pids[identifier]) or state["ExitCode"] == 7
    for identifier in everyone:
        assert engine.wait(identifier) == 7
        assert engine.logs(identifier, "stdout=1") == PRINTED
    reader.join(30 * PATIENCE)
    assert payload(received[0]) == PRINTED


def test_exits_while_no_daemon_is_there(own_engine: TempEngine) -> None:
    engine = own_engine
    go = engine.base / "go"
    script = "until [ -e /base/go ]; do usleep 10000; done; echo last words; exit {}"
    codes = {
        engine.started("sh", "-c", script.format(code), host={"Binds": [f"{engine.base}:/base"]}): code
        for code in (0, 3, 255)
    }
    killed = engine.started("sleep", "600")
    pids = {identifier: engine.inspect(identifier)["State"]["Pid"] for identifier in [*codes, killed]}
    engine.kill9()
    go.touch()
    kill_and_wait(pids[killed])
    for pid in pids.values():
        until("it has ended", lambda pid=pid: not alive(pid))
    ended = time.time()
    engine.start()
    for identifier, code in codes.items():
        state = engine.inspect(identifier)["State"]
        assert (state["Running"], state["Status"], state["ExitCode"]) == (False, "exited", code)
        assert state["FinishedAt"] <= time.strftime(
            "%Y-%m-%dT%H:%M:%S", time.gmtime(ended + 1)
        )  # the time of the exit, not of its detection
        assert engine.wait(identifier) == code
        assert engine.logs(identifier) == b"last words\n"
    assert engine.wait(killed) == 137
    assert engine.docker("ps", "-q").out == ""


def test_attached_session_talks_on_without_a_daemon(own_engine: TempEngine) -> None:
    engine = own_engine
    identifier = engine.create("cat", OpenStdin=True, StdinOnce=True)
    stream, received = hijack(engine.socket, f"/v1.24/containers/{identifier}/attach?stream=1&stdin=1&stdout=1")
    engine.post(f"/containers/{identifier}/start")

    def echo(word: bytes) -> None:
        nonlocal received
        stream.sendall(word)
        while not received.endswith(word):
            chunk = stream.recv(4096)
            assert chunk, received
            received += chunk

    echo(b"before ")
    engine.kill9()
    echo(b"without ")
    engine.start()
    echo(b"after ")
    late, early = hijack(engine.socket, f"/v1.24/containers/{identifier}/attach?stream=1&stdout=1")
    echo(b"both")
    stream.shutdown(1)
    assert payload(read_to_end(stream, received)) == b"before without after both"
    assert payload(read_to_end(late, early)) == b"both"
    assert engine.wait(identifier) == 0


@pytest.mark.parametrize("milliseconds", [0, *nightly(3), 8, *nightly(15), 30, *nightly(60, 120)])
def test_daemon_killed_while_containers_start_and_end(own_engine: TempEngine, milliseconds: int) -> None:
    """Afterwards each container is either running or not, works, and can be removed completely,
    whenever the daemon died."""
    engine = own_engine
    before = engine.footprint()
    fresh = [engine.create("sleep", "600", network="bridge" if number % 2 else "none") for number in range(4)]
    ending = [engine.started("sh", "-c", "read word; exit 9", OpenStdin=True) for _ in range(2)]

    def ask(method: str, target: str) -> None:
        with contextlib.suppress(OSError, AssertionError, Exception):
            engine.request(method, f"/v1.24/containers/{target}")

    asked = [threading.Thread(target=ask, args=("POST", f"{identifier}/start")) for identifier in fresh]
    asked += [
        threading.Thread(target=ask, args=("POST", f"{ending[0]}/kill")),
        threading.Thread(target=ask, args=("DELETE", f"{ending[1]}?force=1")),
        threading.Thread(target=ask, args=("POST", "create?name=born")),
    ]
    for thread in asked:
        thread.start()
    threading.Event().wait(milliseconds / 1000)  # only the instant of death varies here
    engine.kill9()
    for thread in asked:
        thread.join(30 * PATIENCE)
    engine.start()
    for identifier in fresh:
        state = engine.inspect(identifier)["State"]
        assert state["Running"] == (state["Pid"] > 0 and alive(state["Pid"])), state
        if not state["Running"]:
            engine.post(f"/containers/{identifier}/start")
        assert engine.inspect(identifier)["State"]["Running"]
    assert {*engine.containers()} >= {*fresh}
    engine.remove_all()
    engine.assert_settles(before)


@pytest.mark.parametrize("milliseconds", [1, *nightly(10), 30, *nightly(80)])
def test_daemon_killed_while_an_image_loads(milliseconds: int) -> None:
    with TempEngine() as engine:
        archive = busybox_archive()

        def load() -> None:
            with contextlib.suppress(Exception):
                engine.request("POST", "/v1.24/images/load", archive)

        loading = threading.Thread(target=load)
        loading.start()
        threading.Event().wait(milliseconds / 1000)
        engine.restart()
        loading.join(30 * PATIENCE)
        images = engine.request("GET", "/v1.24/images/json").json()
        if not images:
            assert os.listdir(engine.root / "layers") == ["init"]
        engine.load_busybox()
        assert len(engine.request("GET", "/v1.24/images/json").json()) == 1
        assert engine.docker("run", "--rm", "--network", "none", "busybox", "echo", "works").out == "works\n"


def test_upgrade(own_engine: TempEngine) -> None:
    """SIGTERM ends only the daemon. Containers, monitor and attached clients continue, and the next
    daemon takes over."""
    engine = own_engine
    identifier = engine.started("sh", "-c", f"until [ -e /attached ]; do usleep 10000; done; {PRINT}")
    stream, early = hijack(engine.socket, f"/v1.24/containers/{identifier}/attach?logs=1&stream=1&stdout=1")
    engine.touch(identifier, "/attached")
    monitor = engine.monitor_pid()
    engine.terminate()
    assert alive(monitor)
    engine.start()
    assert engine.monitor_pid() == monitor
    assert payload(read_to_end(stream, early)) == PRINTED
    assert engine.wait(identifier) == 7


def test_following_readers_after_a_restart(own_engine: TempEngine) -> None:
    engine = own_engine
    identifier = engine.started("sh", "-c", PRINT)
    printing(engine, identifier)
    engine.restart()
    answer = engine.request("GET", f"/v1.24/containers/{identifier}/logs?stdout=1&follow=1")
    assert b"".join(part for _, part in frames(answer.body)) == PRINTED


def test_monitor_killed_while_containers_print(own_engine: TempEngine) -> None:
    """Containers continue, a new monitor watches them, later output and exit codes are recorded."""
    engine = own_engine
    printers = [engine.started("sh", "-c", PRINT) for _ in range(3)]
    reader = engine.started("sh", "-c", "read word; echo got $word; exit 4", OpenStdin=True)
    typist = engine.started("sh", "-c", "read word; echo got $word; exit 5", OpenStdin=True, Tty=True)
    printing(engine, printers[-1])
    pids = {identifier: engine.inspect(identifier)["State"]["Pid"] for identifier in (*printers, reader, typist)}
    dead = engine.kill_monitor()
    assert until("a new monitor", lambda: [pid for pid in engine._monitors() if pid != dead])
    for identifier in (reader, typist):
        state = engine.inspect(identifier)["State"]
        assert (state["Running"], state["Pid"]) == (True, pids[identifier])
    for identifier, code in ((reader, 4), (typist, 5)):
        stream, early = hijack(engine.socket, f"/v1.24/containers/{identifier}/attach?stream=1&stdin=1&stdout=1")
        stream.sendall(b"word\n")
        assert b"got word" in read_to_end(stream, early)
        assert engine.wait(identifier) == code
    for identifier in printers:
        assert engine.wait(identifier) == 7
        printed = engine.logs(identifier, "stdout=1").splitlines(keepends=True)
        # Output that the dead monitor had read but not written (at most one read) is lost. Nothing
        # after it is duplicated or incomplete.
        assert printed[-1] == b"line %d\n" % (LINES - 1)
        assert len(printed) > LINES - 2000
    assert engine.docker("run", "--rm", "--network", "none", "busybox", "echo", "works").out == "works\n"


def zombies(parent: int) -> list[str]:
    found = []
    for process in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, ppid = process.read_text().rpartition(")")[2].split()[:2]
            if state == "Z" and int(ppid) == parent:
                found.append(process.parent.name)
    return found


@pytest.mark.parametrize("made", [True, False], ids=["process-made", "process-being-made"])
def test_monitor_killed_in_the_middle_of_an_exec(tmp_path: Path, made: bool) -> None:
    """No process of a failed launch runs on or stays as a zombie, which would keep the container
    from ending. The client sees end of stream, not garbage."""
    runtime, gate = tmp_path / "slow", tmp_path / "gate"
    os.mkfifo(gate)
    wait, run = (
        f"case \"$*\" in *'exec --detach'*) : < {gate};; esac",
        f'{shutil.which("crun") or "runc"} "$@"; status=$?',
    )
    runtime.write_text(
        f"#!/bin/sh\n{run}\n{wait}\nexit $status\n" if made else f"#!/bin/sh\n{wait}\n{run}\nexit $status\n"
    )
    runtime.chmod(0o755)
    with TempEngine("--runtime", str(runtime)) as engine:
        engine.load_busybox()
        before = engine.footprint()
        container = engine.started("sleep", "600")
        body = {"Cmd": ["sleep", "601"], "AttachStdout": True}
        exec_id = engine.request("POST", f"/v1.24/containers/{container}/exec", body).json()["Id"]
        answers: list[bytes] = []
        asked = (
            f"POST /v1.24/exec/{exec_id}/start HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            "Content-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
        )
        client = threading.Thread(target=lambda: answers.append(engine.send(asked.encode(), timeout=60)))
        client.start()

        def commands() -> list[str]:
            listed = engine.request("GET", f"/v1.24/containers/{container}/top?ps_args=-o+pid,args").json()["Processes"]
            return sorted(line[1] for line in listed)

        if made:
            until("the process is there", lambda: commands() == ["sleep 600", "sleep 601"])
        else:
            until("the runtime is asked", lambda: [name for name in os.listdir(engine.run / "exec") if name == exec_id])
        engine.kill_monitor()
        client.join(60)
        assert answers[0] == b"" or (answers[0].startswith(b"HTTP/1.1 200 OK\r\n") and answers[0].endswith(b"\r\n\r\n"))
        until("its process is gone", lambda: commands() == ["sleep 600"])
        found = engine.request("GET", f"/v1.24/exec/{exec_id}/json").json()
        assert not found["Running"] and found["ExitCode"] != 0
        engine.post(f"/containers/{container}/stop?t=0")
        assert engine.wait(container) == 137
        until("nobody waits to be collected", lambda: not zombies(engine.pid))
        engine.remove_all()
        engine.assert_settles(before)


def test_exit_code_of_an_exec_whose_monitor_is_killed(own_engine: TempEngine) -> None:
    """The client asks for it as soon as its stream has ended; 0 would say that it succeeded."""
    engine = own_engine
    container = engine.started("sleep", "600")
    script = "touch /begun; while [ ! -e /go ]; do sleep 0.1; done; exit 7"
    client = engine.popen("exec", container, "sh", "-c", script)
    until("it runs", lambda: "begun" in engine.docker("exec", container, "ls", "/").out)
    engine.kill_monitor()
    engine.docker("exec", container, "touch", "/go")
    assert client.wait(60) == 7


def test_exit_codes_of_containers_that_end_while_no_monitor_is_there(own_engine: TempEngine) -> None:
    engine = own_engine
    identifiers = [engine.started("sleep", "600") for _ in range(4)]
    pids = [engine.inspect(identifier)["State"]["Pid"] for identifier in identifiers]
    engine.kill_monitor()
    for pid in pids:
        kill_and_wait(pid)
    for identifier in identifiers:
        assert engine.wait(identifier) == 137


def test_daemon_and_monitor_killed(own_engine: TempEngine) -> None:
    engine = own_engine
    before = engine.footprint()
    quiet = engine.started("sleep", "600")
    loud = engine.started("sh", "-c", "while :; do echo loud; usleep 10000; done")
    monitor = engine.monitor_pid()
    engine.kill9()
    kill_and_wait(monitor)
    engine.start()

    def told(identifier: str) -> bool:
        state = engine.inspect(identifier)["State"]
        return bool(state["Running"] == (state["Pid"] > 0 and alive(state["Pid"])))

    for identifier in (quiet, loud):  # the output of `loud` is not read
        until("what is told of it is true", lambda identifier=identifier: told(identifier))
    assert engine.docker("run", "--rm", "--network", "none", "busybox", "echo", "works").out == "works\n"
    engine.remove_all()
    engine.assert_settles(before)


FOREVER = (
    "i=0; until [ -e /base/go ]; do echo line $i; i=$((i+1)); [ $((i % 100)) = 0 ] && usleep 20000; done; "
    "echo last; exit 7"
)
EXIT_STATUS_OF_OTHERS = tuple(int(part) for part in os.uname().release.split(".")[:2]) >= (6, 15)
"""The kernel knows the exit status of a process that another parent has reaped. Without that it is
lost when both have been killed: the container's parent is then the host's init."""


class Everlasting:
    """Containers that must not notice that daemon and monitor are killed one after the other."""

    def __init__(self, engine: TempEngine) -> None:
        self.engine = engine
        self.before = engine.footprint()
        self.files = engine.open_files()
        binds = {"Binds": [f"{engine.base}:/base"]}
        self.printers = [engine.started("sh", "-c", FOREVER, host=binds) for _ in range(3)]
        self.typist = engine.started("sh", "-c", "read word; echo got $word; exit 5", OpenStdin=True, Tty=True)
        self.quiet = engine.started("sleep", "600")
        self.pids = {identifier: engine.inspect(identifier)["State"]["Pid"] for identifier in self.all}
        printing(engine, self.printers[-1])

    @property
    def all(self) -> list[str]:
        return [*self.printers, self.typist, self.quiet]

    def assert_alive(self) -> None:
        for identifier in self.all:
            state = self.engine.inspect(identifier)["State"]
            assert (state["Running"], state["Pid"]) == (True, self.pids[identifier]), state
        # the mount namespace with their root file systems is kept as well
        names = self.engine.request("GET", f"/v1.24/containers/{self.quiet}/archive?path=/bin/busybox")
        assert names.status == 200, names

    def assert_end(self) -> None:
        """Each works to its end: no line and no exit is lost, and nothing is left behind."""
        engine = self.engine
        self.assert_alive()
        (engine.base / "go").touch()
        stream, early = hijack(engine.socket, f"/v1.24/containers/{self.typist}/attach?stream=1&stdin=1&stdout=1")
        stream.sendall(b"word\n")
        assert b"got word" in read_to_end(stream, early)
        for identifier, code in [*((printer, 7) for printer in self.printers), (self.typist, 5)]:
            assert engine.wait(identifier) == (code if EXIT_STATUS_OF_OTHERS else 255)
        for identifier in self.printers:
            printed = engine.logs(identifier, "stdout=1").splitlines()
            assert printed.pop() == b"last"
            assert printed == [b"line %d" % number for number in range(len(printed))]
        assert engine.docker("run", "--rm", "--network", "none", "busybox", "echo", "works").out == "works\n"
        engine.remove_all()
        engine.assert_settles(self.before)
        until("no descriptor is left", lambda: engine.open_files() <= self.files)
        left = {name for name in os.listdir(engine.run / "monitor") if not (name[0] == "u" and name[1:].isdigit())}
        assert left == {"journal", "lock", "log", "socket"}
        until("no child waits to be reaped", lambda: not zombies(engine.pid) and not zombies(engine.monitor_pid()))


def test_daemon_killed_while_the_next_monitor_starts(own_engine: TempEngine) -> None:
    """From the moment the next monitor exists, it has everything, whenever the daemon dies."""
    engine = own_engine
    containers = Everlasting(engine)
    for milliseconds in (0, 1, 3, 10, 30, 60, 100, 200, 300):
        following = engine.replace_monitor()
        threading.Event().wait(milliseconds / 1000)  # only the instant of death varies here
        engine.restart()
        assert engine.monitor_pid() == following, milliseconds
        containers.assert_alive()
    following = engine.replace_monitor()
    engine.kill9()
    kill_and_wait(containers.pids[containers.quiet])
    engine.start()
    assert engine.monitor_pid() == following
    assert engine.wait(containers.quiet) == (137 if EXIT_STATUS_OF_OTHERS else 255)
    containers.quiet = engine.started("sleep", "600")
    containers.pids[containers.quiet] = engine.inspect(containers.quiet)["State"]["Pid"]
    containers.assert_end()


def begin(engine: TempEngine) -> threading.Thread:
    """Start the daemon without waiting for it. It may be killed meanwhile."""

    def start() -> None:
        with contextlib.suppress(AssertionError):
            engine.start()

    starting = threading.Thread(target=start)
    starting.start()
    until("its process", lambda: engine.process is not None)
    return starting


def opened(pid: int) -> list[str]:
    found = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/{pid}/fd/{name}"))
    return found


def test_next_daemon_waits_for_a_monitor_that_starts(own_engine: TempEngine) -> None:
    """Its socket is not there yet. A second monitor would take the place of the one that has the
    containers."""
    engine = own_engine
    containers = Everlasting(engine)
    following = engine.replace_monitor()
    os.kill(following, signal.SIGSTOP)
    engine.kill9()
    starting = begin(engine)
    until("it opens its parts", lambda: any(each.endswith("/state.db") for each in opened(engine.pid)))
    threading.Event().wait(0.3)  # it looks for the monitor meanwhile
    assert engine._monitors() == [following]
    os.kill(following, signal.SIGCONT)
    starting.join()
    assert engine.monitor_pid() == following
    containers.assert_end()


@pytest.mark.parametrize("milliseconds", [0, 30])
def test_monitor_killed_while_the_next_daemon_starts(own_engine: TempEngine, milliseconds: int) -> None:
    """The monitor is killed as soon as the next daemon has its descriptors, and that daemon as soon
    as another monitor exists."""
    engine = own_engine
    containers = Everlasting(engine)
    engine.kill9()
    starting = begin(engine)
    wanted = len(containers.all)
    until("it has the descriptors", lambda: opened(engine.pid).count("anon_inode:[pidfd]") >= wanted)
    following = engine.replace_monitor()
    threading.Event().wait(milliseconds / 1000)
    engine.kill9()
    starting.join()
    engine.start()
    assert engine.monitor_pid() == following
    containers.assert_end()


def test_reboot(own_engine: TempEngine) -> None:
    """RUN is new and nothing of the containers is on the host. They show as exited, can start
    again, and leave nothing behind.
    """
    engine = own_engine
    before = engine.footprint()
    ran = engine.started("sh", "-c", "echo x >> /count; wc -l < /count; exec sleep 600", network="bridge")
    never = engine.create("true")
    done = engine.started("sh", "-c", "exit 6")
    assert engine.wait(done) == 6
    # A client gets the exit code before the row has it. The next verb waits for both.
    engine.post(f"/containers/{done}/rename?name=done")
    until("it has printed", lambda: engine.logs(ran) == b"1\n")
    engine.reboot()
    states = {identifier: engine.inspect(identifier)["State"] for identifier in (ran, never, done)}
    assert (states[ran]["Status"], states[ran]["Running"], states[ran]["Pid"]) == ("exited", False, 0)
    assert states[ran]["ExitCode"] != 0
    assert states[never]["Status"] == "created"
    assert (states[done]["Status"], states[done]["ExitCode"]) == ("exited", 6)
    assert engine.footprint().mounts <= before.mounts
    assert engine.footprint().cgroups == set()
    engine.post(f"/containers/{ran}/start")
    until("it runs again on its own files", lambda: engine.logs(ran) == b"1\n2\n")
    engine.remove_all()
    engine.assert_settles(before)


def test_a_control_group_that_a_crash_left_is_removed() -> None:
    """Where the driver cgroupfs has it. systemd removes its own."""
    with TempEngine("--exec-opt", "native.cgroupdriver=cgroupfs") as engine:
        engine.load_busybox()
        before = engine.footprint()
        ended = engine.started("true")
        engine.wait(ended)
        until("its teardown is over", lambda: engine.footprint().cgroups == before.cgroups)
        engine.kill9()
        group = cgroups.ROOT / ("" if cgroups.V2 else "memory") / "engined" / ended
        group.mkdir(parents=True)
        engine.start()
        until("it is gone", lambda: not group.exists())


def test_a_directory_that_no_container_has_is_swept(own_engine: TempEngine) -> None:
    engine = own_engine
    kept = engine.started("sleep", "3600")
    engine.kill9()
    stray = engine.root / "containers" / ("f" * 64)
    (stray / "rootfs").mkdir(parents=True)
    engine.start()
    assert not stray.exists()
    assert [path.name for path in (engine.root / "containers").iterdir()] == [kept]


def test_stop_leaves_nothing_and_keeps_containers(own_engine: TempEngine) -> None:
    engine = own_engine
    polite = engine.started("sh", "-c", "trap 'echo bye; exit 3' TERM; echo on; while :; do usleep 20000; done")
    deaf = engine.started("sh", "-c", "trap '' TERM; echo on; while :; do usleep 20000; done", network="bridge")
    for identifier in (polite, deaf):
        until("it has set its trap", lambda identifier=identifier: engine.logs(identifier) == b"on\n")
    engine.stop(seconds=5)
    engine.assert_gone()
    assert not os.path.exists(engine.socket)
    engine.start()
    assert engine.inspect(polite)["State"]["ExitCode"] == 3
    assert engine.logs(polite) == b"on\nbye\n"
    assert engine.inspect(deaf)["State"]["ExitCode"] == 137
    engine.post(f"/containers/{deaf}/start")
    assert engine.inspect(deaf)["State"]["Running"]


def test_one_daemon_a_run_directory(own_engine: TempEngine) -> None:
    """A second daemon on the same RUN reports that in one line and changes nothing."""
    engine = own_engine
    identifier = engine.started("sleep", "600")
    second = subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "engine",
                "serve",
                "--socket",
                f"{engine.base}/other.sock",
                "--root",
                str(engine.root),
            ),
            *("--run", str(engine.run), "--bridge", engine.bridge),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30 * PATIENCE,
        check=False,
    )
    assert second.returncode == 1
    assert second.stderr.count("\n") == 1 and "already running" in second.stderr
    assert engine.inspect(identifier)["State"]["Running"]


def test_a_stale_socket_is_replaced(own_engine: TempEngine) -> None:
    engine = own_engine
    engine.kill9()
    assert os.path.exists(engine.socket)
    engine.start()
    assert engine.request("GET", "/_ping").body == b"OK"
    assert os.stat(engine.socket).st_mode & 0o777 == 0o660


def test_stop_of_an_engine_whose_daemon_is_dead(own_engine: TempEngine) -> None:
    engine = own_engine
    engine.started("sleep", "600")
    engine.kill9()
    assert os.path.exists(engine.socket)
    engine.stop()
    assert not os.path.exists(engine.socket)
    engine.assert_gone()


def test_two_engines_side_by_side() -> None:
    """Same names, same image, one host: neither engine sees or affects the other, and their
    addresses do not overlap."""
    with TempEngine() as one, TempEngine() as two:
        for engine in (one, two):
            engine.load_busybox()
            engine.docker("run", "-d", "--name", "same", "busybox", "sh", "-c", f"echo {engine.bridge}; exec sleep 600")
        for engine in (one, two):
            (only,) = engine.containers()
            until("it has printed", lambda engine=engine: engine.logs("same") == engine.bridge.encode() + b"\n")
            assert engine.inspect("same")["Id"] == only
        addresses = {engine.inspect("same")["NetworkSettings"]["IPAddress"].rpartition(".")[0] for engine in (one, two)}
        assert len(addresses) == 2
        one.kill9()
        one.start()
        assert two.inspect("same")["State"]["Running"]
        one.stop()
        one.assert_gone()
        assert two.inspect("same")["State"]["Running"]
        gateway = two.inspect("same")["NetworkSettings"]["Gateway"]
        assert "1 packets received" in two.docker("run", "--rm", "busybox", "ping", "-c", "1", "-W", "5", gateway).out
        one.start()
        assert one.inspect("same")["State"]["Status"] == "exited"
