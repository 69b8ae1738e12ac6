"""A real engine for tests: `engined serve` on temporary paths and its own bridge, seen only from
outside.

It starts, kills, restarts and stops the processes, talks to the socket (docker CLI, docker-py, raw
bytes), and reports what the engine has on the host: mounts, links, cgroups, processes, directories,
descriptors. It imports nothing of the engine, because the engine's own statements prove nothing
here.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import select
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import quote

from tests.support import PATIENCE, ROOT
from tests.support.engine import client
from tests.support.images.archives import busybox, docker_archive

if TYPE_CHECKING:
    import docker

API_VERSION = "1.24"
DEADLINE = 30.0 * PATIENCE
"""Seconds after which an event that should happen soon counts as failed. No test waits so long
unless it fails.
"""
BREATH = 16
"""Descriptors by which the stock of sandboxes may grow between two counts. Tests for leaks must
open more than this.
"""
COUNT_TO_STOP = "i=0; until [ -e /stop ]; do echo $i; i=$((i+1)); done"
"""A shell script that prints while a client attaches, however late. `TempEngine.touch` ends it."""
_LOST = ("was never retrieved", "was never awaited", "was destroyed but it is pending", "Exception ignored in")
"""Words of asyncio and the interpreter about a failure that the program did not handle."""


@functools.cache
def busybox_archive() -> bytes:
    """Debian's static busybox as a docker-archive, `busybox:latest`."""
    return docker_archive(busybox())


def until(what: str, probe: Callable[[], Any], seconds: float = 30.0) -> Any:
    """Polls `probe` and returns its first true value.

    Raises AssertionError naming `what` and the last value at the deadline. A long wait polls less
    often, and an expensive probe takes half of the time at most.
    """
    began = time.monotonic()
    while True:
        asked = time.monotonic()
        if value := probe():
            return value
        now = time.monotonic()
        if now - began > seconds * PATIENCE:
            raise AssertionError(f"after {now - began:.1f} s still not: {what} (last: {value!r})")
        time.sleep(max(min(max(0.005, (now - began) / 20), 0.05), now - asked))


def below(directory: Path) -> list[Path]:
    """Files and directories below it. Unlike `Path.rglob`, it goes on when one of them is removed
    meanwhile.
    """
    return [Path(top, name) for top, directories, names in os.walk(directory) for name in (*directories, *names)]


def size_of(files: Iterable[Path]) -> int:
    """Bytes of the files, without those that are removed meanwhile."""
    size = 0
    for path in files:
        with contextlib.suppress(FileNotFoundError):
            size += path.stat().st_size
    return size


def contents(directory: Path) -> Iterator[tuple[Path, bytes]]:
    """Regular files below it with what they have, without those that are removed meanwhile."""
    for path in below(directory):
        with contextlib.suppress(FileNotFoundError):
            if path.is_file() and not path.is_symlink():
                yield path, path.read_bytes()


def free_ports(count: int) -> list[int]:
    """Free TCP ports below the range that the kernel and the engine choose from."""
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found: list[int] = []
    with contextlib.ExitStack() as held:
        while len(found) < count:
            port = random.randrange(10_000, low) if low > 10_100 else 0
            probe = held.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                probe.bind(("", port))
                found.append(probe.getsockname()[1])
    return found


def free_run(count: int) -> int:
    """The first of `count` free neighbouring ports."""
    while True:
        (first,) = free_ports(1)
        with contextlib.ExitStack() as held, contextlib.suppress(OSError, OverflowError):
            for port in range(first, first + count):
                held.enter_context(socket.socket()).bind(("", port))
            return first


@dataclass(frozen=True)
class Result:
    """Exit status and output of a program."""

    status: int
    out: str
    err: str

    @property
    def line(self) -> str:
        """The output, which must be one line."""
        assert self.out.count("\n") == 1, self
        return self.out.strip()


@dataclass
class Footprint:
    """The objects of the engine's containers on the host at one moment."""

    mounts: set[str] = field(default_factory=set)
    cgroups: set[str] = field(default_factory=set)
    processes: set[str] = field(default_factory=set)
    directories: set[str] = field(default_factory=set)

    def beyond(self, other: Footprint) -> dict[str, set[str]]:
        """Objects that are not in `other`, by kind."""
        surplus = {entry.name: getattr(self, entry.name) - getattr(other, entry.name) for entry in fields(self)}
        return {name: values for name, values in surplus.items() if values}


class TempEngine:
    """One engine, from its first start to `close()`, over any number of kills and restarts."""

    common: ClassVar[tuple[str, ...]] = ()
    """Arguments of every engine of this test run (`pytest --runtime`)."""

    def __init__(self, *arguments: str, within: Sequence[str] = (), checkout: Path = ROOT) -> None:
        """`arguments` for `serve`; `within` is a command that runs the daemon elsewhere
        (nsenter), keeping its pid. `checkout` is another checkout, whose engine and virtual
        environment are used.
        """
        self.within = within
        python = sys.executable if checkout == ROOT else str(checkout / ".venv/bin/python")
        self._program = (python, "-m", "engine")
        self._checkout = checkout
        # short: sun_path has 108 bytes
        self.base = Path(tempfile.mkdtemp(prefix="eng", dir="/tmp"))
        self.root = self.base / "root"
        self.run = self.base / "run"
        self.socket = str(self.base / "s.sock")
        self.bridge = f"e{self.base.name}"[:15]
        self.log_path = self.base / "log"
        self.arguments = arguments
        self.process: subprocess.Popen[bytes] | None = None
        self._known: set[str] = set()
        self._bridges: set[str] = set()
        """Bridges of networks seen so far."""
        self._links_before = links()
        (self.base / "docker").mkdir()

    # --- processes --------------------------------------------------------------------------------

    def start(self) -> TempEngine:
        """Start the daemon and wait until it has restored all containers.

        Raises AssertionError with its log when it exits instead.
        """
        begin = self.spawn()

        def listening() -> bool:
            said = self.log_path.read_bytes()[begin:]
            assert self.process is not None
            assert self.process.poll() is None, f"engined ended at start:\n{said.decode(errors='replace')}"
            # as --log-format says
            begins = b"listening on ", b'{"level":"info","msg":"listening on '
            return any(line.startswith(begins) for line in said.splitlines())

        until(f"listening on {self.socket}\n{self.log()}", listening)
        return self

    def spawn(self) -> int:
        """Start the daemon, without waiting for anything. Returns where its log begins."""
        assert self.process is None, "it runs already"
        with open(self.log_path, "ab") as log:
            begin = log.tell()
            self.process = subprocess.Popen(
                [
                    *self.within,
                    *(*self._program, "serve", "--socket", self.socket, "--root", str(self.root)),
                    *("--run", str(self.run), "--bridge", self.bridge, *self.common, *self.arguments),
                ],
                cwd=self._checkout,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a Ctrl-C at the tests' terminal is not the engine's
            )
        return begin

    @property
    def pid(self) -> int:
        """Pid of the daemon."""
        assert self.process is not None, "no daemon runs"
        return self.process.pid

    def kill9(self) -> None:
        """Send SIGKILL to the daemon only, and wait until it has exited."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self.process = None

    def terminate(self) -> None:
        """Send SIGTERM to the daemon only, as for an upgrade. It must exit with 0."""
        assert self.process is not None
        self.process.terminate()
        status = self.process.wait(DEADLINE)
        self.process = None
        assert status == 0, f"the daemon ended with {status}:\n{self.log()}"

    def restart(self) -> None:
        """`kill9` and `start`."""
        self.kill9()
        self.start()

    def monitor_pid(self) -> int:
        """Pid of the monitor. Raises AssertionError unless there is exactly one."""
        found = self._monitors()
        assert len(found) == 1, f"monitors: {found}"
        return found[0]

    def _monitors(self) -> list[int]:
        words = (b"engine.monitor", os.fsencode(self.run))
        found = {pid for pid, command in _commands() if all(word in command for word in words)}
        # A child of a monitor has the same command line until it executes a program.
        return [pid for pid in found if _parent(pid) not in {None, *found}]

    def kill_monitor(self) -> int:
        """Send SIGKILL to the monitor and wait until it has exited. Returns its pid."""
        pid = self.monitor_pid()
        kill_and_wait(pid)
        return pid

    def replace_monitor(self) -> int:
        """`kill_monitor`, and wait until the process of the next monitor exists. Returns its
        pid.
        """
        dead = self.kill_monitor()
        (following,) = until("another monitor", lambda: [pid for pid in self._monitors() if pid != dead])
        return int(following)

    def stop(self, seconds: int = 1) -> None:
        """Run `engined stop`; the daemon may have been killed. Raises AssertionError unless
        everything ended.
        """
        self.remember()
        stopped = subprocess.run(
            [*self.within, *self._program, "stop", "--run", str(self.run), "--time", str(seconds)],
            cwd=self._checkout,
            capture_output=True,
            text=True,
            timeout=90 * PATIENCE,
            check=False,
        )
        assert stopped.returncode == 0, f"engined stop: {stopped.stderr}\n{self.log()}"
        if self.process is not None:
            status = self.process.wait(DEADLINE)
            self.process = None
            assert status == 0, f"the daemon ended with {status}:\n{self.log()}"

    def reboot(self) -> None:
        """Simulates a reboot: kills every process, removes RUN, mounts, links and cgroups; then
        `start`.
        """
        self.remember()
        self._demolish()
        shutil.rmtree(self.run)
        self.start()

    def close(self) -> None:
        """Stop, assert that nothing is left on the host, and remove its directories, whatever
        failed before.
        """
        try:
            if self.process is not None and self.process.poll() is None:
                self.stop()
                self.assert_gone()
            self.assert_no_lost_failures()
        finally:
            self._demolish()
            shutil.rmtree(self.base)

    def __enter__(self) -> TempEngine:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if error is not None:  # what explains it goes with the engine
            from tests.support.engine import explain

            for title, text in explain.sections(self.base.name, self, 0, 0):
                error.add_note(f"--- {title}\n{text}")
        self.close()

    def log(self, begin: int = 0) -> str:
        """Log of daemon and monitor from byte `begin` on, at most its last 20,000 bytes."""
        if not self.log_path.exists():
            return ""
        return self.log_path.read_bytes()[begin:][-20000:].decode(errors="replace")

    def assert_no_lost_failures(self) -> None:
        """Raises AssertionError if asyncio has logged that a task or callback of the daemon failed
        and its exception was never retrieved.
        """
        if self.log_path.exists():
            lines = self.log_path.read_bytes().decode(errors="replace").splitlines()
            lost = [line for line in lines if any(words in line for words in _LOST)]
            assert not lost, "\n".join([*lost, self.log()])

    # --- talking to it ----------------------------------------------------------------------------

    def request(
        self, method: str, target: str, body: Any = None, headers: Mapping[str, str] | None = None, timeout: float = 60
    ) -> client.Answer:
        """Send one request, as `client.request` does."""
        return client.request(self.socket, method, target, body, headers, timeout)

    def send(self, data: bytes, *, timeout: float = 10) -> bytes:
        """Send exactly these bytes on a new connection and half-close.

        Returns everything until the server closes.
        """
        with client.connect(self.socket, timeout) as connection:
            # the answer may come before everything was read
            with contextlib.suppress(BrokenPipeError):
                connection.sendall(data)
                connection.shutdown(1)
            received = b""
            with contextlib.suppress(ConnectionResetError):
                while chunk := connection.recv(65536):
                    received += chunk
            return received

    @property
    def environment(self) -> dict[str, str]:
        """Environment of a docker CLI that uses this engine at API 1.24, without the user's
        configuration.
        """
        kept = {name: value for name, value in os.environ.items() if not name.startswith("DOCKER_")}
        return kept | {
            "DOCKER_HOST": f"unix://{self.socket}",
            "DOCKER_API_VERSION": API_VERSION,
            "DOCKER_CONFIG": str(self.base / "docker"),
        }

    def docker(
        self, *arguments: str, input: bytes | str | None = None, status: int | None = 0, timeout: float = 60
    ) -> Result:
        """Run the docker CLI. Raises AssertionError unless it exits with `status` (None: any)."""
        done = subprocess.run(
            ["docker", *arguments],
            env=self.environment,
            input=input.encode() if isinstance(input, str) else input,
            stdin=subprocess.DEVNULL if input is None else None,
            capture_output=True,
            timeout=timeout * PATIENCE,
            check=False,
        )
        result = Result(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))
        assert status is None or result.status == status, (arguments, result)
        return result

    def popen(self, *arguments: str, **keywords: Any) -> subprocess.Popen[bytes]:
        """Start the docker CLI, with its output piped by default."""
        keywords = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | keywords
        return subprocess.Popen(["docker", *arguments], env=self.environment, **keywords)

    def client(self) -> docker.DockerClient:
        """A docker-py client at API 1.24. The caller closes it."""
        import docker  # only for the tests that need it

        return docker.DockerClient(base_url=f"unix://{self.socket}", version=API_VERSION, timeout=int(60 * PATIENCE))

    def load_busybox(self) -> None:
        """Load Debian's static busybox as `busybox:latest`."""
        answer = self.request(
            "POST", "/v1.24/images/load?quiet=1", busybox_archive(), {"Content-Type": "application/x-tar"}
        )
        assert answer.status == 200, answer
        assert b"error" not in answer.body, answer.body

    def create(self, *command: str, name: str = "", network: str = "none", **config: Any) -> str:
        """Create a busybox container; returns its id.

        `host` has HostConfig fields, the rest are Config fields.
        """
        host = {"NetworkMode": network} | config.pop("host", {})
        body = {"Image": "busybox", "Cmd": list(command), "HostConfig": host} | config
        answer = self.request("POST", f"/v1.24/containers/create{f'?name={name}' if name else ''}", body)
        assert answer.status == 201, answer
        identifier = str(answer.json()["Id"])
        self._known.add(identifier)
        return identifier

    def post(self, target: str, status: int = 204) -> client.Answer:
        """POST /v1.24`target` without a body.

        Raises AssertionError unless the answer is `status`.
        """
        answer = self.request("POST", f"/v1.24{target}")
        assert answer.status == status, answer
        return answer

    def started(self, *command: str, **keywords: Any) -> str:
        """Create and start a container; returns its id."""
        identifier = self.create(*command, **keywords)
        self.post(f"/containers/{identifier}/start")
        return identifier

    def image_names(self) -> set[str]:
        """The names of all images."""
        listed = self.request("GET", "/v1.24/images/json").json()
        return {name for image in listed for name in image["RepoTags"] or () if name != "<none>:<none>"}

    def inspect(self, container: str) -> Any:
        answer = self.request("GET", f"/v1.24/containers/{container}/json")
        assert answer.status == 200, answer
        return answer.json()

    def wait(self, container: str, timeout: float = 60) -> int:
        """POST wait; returns the exit code."""
        answer = self.request("POST", f"/v1.24/containers/{container}/wait", timeout=timeout)
        assert answer.status == 200, answer
        return int(answer.json()["StatusCode"])

    def logs(self, container: str, query: str = "stdout=1&stderr=1") -> bytes:
        """Both streams of a container without a terminal, without frame headers, in the order of
        the log.
        """
        answer = self.request("GET", f"/v1.24/containers/{container}/logs?{query}")
        assert answer.status == 200, answer
        return b"".join(part for _, part in client.frames(answer.body))

    def touch(self, container: str, path: str) -> None:
        """Make the file that the program of a running container waits for.

        An exec is not used: the file may end the container, and an engine that removes it then no
        longer knows the exec when its client asks for the exit code.
        """
        Path(f"/proc/{self.inspect(container)['State']['Pid']}/root", path.lstrip("/")).touch()

    def containers(self) -> list[str]:
        """Ids of all containers, running or not."""
        return [entry["Id"] for entry in self.request("GET", "/v1.24/containers/json?all=1").json()]

    def networks(self) -> dict[str, str]:
        """Names and ids of user-defined networks."""
        answer = self.request("GET", "/v1.24/networks?filters=" + quote('{"type":["custom"]}'))
        assert answer.status == 200, answer
        found = {entry["Name"]: entry["Id"] for entry in answer.json()}
        self._bridges.update(f"br-{identifier[:12]}" for identifier in found.values())
        return found

    def remove_all(self) -> None:
        """`rm -f` of every container, and of every network."""
        for identifier in self.containers():
            answer = self.request("DELETE", f"/v1.24/containers/{identifier}?force=1&v=1")
            assert answer.status in (204, 404), answer
        for identifier in self.networks().values():
            answer = self.request("DELETE", f"/v1.24/networks/{identifier}")
            assert answer.status in (204, 404), answer

    def remove_volumes(self) -> None:
        """Every one, after `remove_all`."""
        for volume in self.request("GET", "/v1.24/volumes").json()["Volumes"] or ():
            answer = self.request("DELETE", f"/v1.24/volumes/{volume['Name']}")
            assert answer.status == 204, answer

    def recorded(self) -> dict[str, set[str]]:
        """Keys in state.db by kind. The engine has the file locked, so a copy is read."""
        with tempfile.TemporaryDirectory(dir=self.base) as place:
            for name in ("state.db", "state.db-wal"):
                with contextlib.suppress(FileNotFoundError):
                    shutil.copy(self.root / name, place)
            with contextlib.closing(sqlite3.connect(f"{place}/state.db")) as copy:
                found: dict[str, set[str]] = {}
                for kind, key in copy.execute("SELECT kind, key FROM record"):
                    found.setdefault(kind, set()).add(key)
                return found

    def listed(self) -> dict[str, set[str]]:
        """Containers and volumes as the API lists them, and the snapshots that belong to those,
        by the kinds of `recorded`.
        """
        containers = set(self.containers())
        volumes = self.request("GET", "/v1.24/volumes").json()["Volumes"]
        named = {volume["Name"] for volume in volumes if volume["Driver"] == "local"}
        return {"container": containers, "snapshot": containers, "volume": named}

    def assert_recorded(self) -> None:
        """Wait until state.db has the same objects as the API lists, and `layers` one directory for
        each layer and snapshot in it.

        Another row would be an object that only the next start shows. Another directory is one that
        is still being removed, and the next test would count it.
        """
        listed = recorded = {}

        def same() -> bool:
            nonlocal listed, recorded
            listed = self.listed()
            with contextlib.suppress(sqlite3.Error):  # copied while the log was being written
                recorded = self.recorded()
            return (
                all(recorded.get(kind, set()) == keys for kind, keys in listed.items() if kind != "volume")
                and recorded.get("volume", set()) >= listed["volume"]
                and len(recorded.get("layer", ())) + len(recorded.get("snapshot", ())) == self._layer_directories()
            )

        try:
            until("state.db has what the API lists", same)
        except AssertionError:
            raise AssertionError(
                f"state.db has {recorded}, the API lists {listed}, {self._layer_directories()} directories"
            ) from None

    def _layer_directories(self) -> int:
        return sum(name.isdecimal() for name in os.listdir(self.root / "layers"))

    # --- objects on the host ----------------------------------------------------------------------

    def remember(self) -> None:
        """Record the ids of all containers so far, so that their leftovers can be found later."""
        with contextlib.suppress(OSError, AssertionError, ValueError):
            self._known.update(self.containers())
            # processes of plugins are found as those of containers are
            self._known.update(entry["Id"] for entry in self.request("GET", "/v1.41/plugins").json())
            self.networks()
            history = self.request("GET", f"/v1.24/events?since=0&until={time.time():.9f}").body
            for line in history.splitlines():
                event = json.loads(line)
                # A prune's event names no container; an empty name would stand for every process.
                if event.get("Type") == "container" and event["Actor"]["ID"]:
                    self._known.add(event["Actor"]["ID"])

    def footprint(self) -> Footprint:
        """The objects of its containers on the host now."""
        self.remember()
        found = Footprint(mounts={line.split()[4] for line in _mount_lines() if str(self.base) in line})
        found.mounts |= self.mounts_aside()
        found.cgroups = {path for path in _cgroup_directories() if self._names_container(path)}
        found.processes = {f"{pid} {' '.join(name)}" for pid, *name in self._container_processes()}
        for parent in ("containers", "layers"):
            with contextlib.suppress(FileNotFoundError):
                found.directories |= {f"{parent}/{entry}" for entry in os.listdir(self.root / parent)}
        found.directories |= {
            f"run/{path.relative_to(self.run)}" for path in below(self.run) if self._names_container(str(path))
        }
        return found

    def mounts_aside(self) -> set[str]:
        """Mounts for containers and calls in the daemon threads' own mount namespace."""
        host = os.readlink("/proc/self/ns/mnt")
        found: set[str] = set()
        for thread in Path(f"/proc/{self.process.pid}/task").iterdir() if self.process is not None else ():
            with contextlib.suppress(OSError):
                if os.readlink(thread / "ns" / "mnt") != host:
                    lines = (thread / "mountinfo").read_text().splitlines()
                    found |= {path for line in lines if (path := line.split()[4]).startswith(("/roots/", "/calls/"))}
        return found

    def assert_settles(self, before: Footprint) -> None:
        """Wait until the host has nothing of this engine that was not in `before`."""
        surplus: dict[str, set[str]] = {}

        def settled() -> bool:
            nonlocal surplus
            surplus = self.footprint().beyond(before)
            return not surplus

        try:
            until("nothing is left behind", settled)
        except AssertionError:
            raise AssertionError(f"left behind: {surplus}\n{self.log()}") from None

    def present(self) -> list[str]:
        """Its processes, mounts, cgroups and links now, each in words."""
        found = [
            f"process {pid}: {command.replace(bytes(1), b' ').decode(errors='replace')}"
            for pid, command in self._own_processes()
        ]
        found += [f"container process {pid} {name}" for pid, name, _ in self._container_processes()]
        found += [f"mount: {line}" for line in _mount_lines() if str(self.base) in line]
        found += [f"cgroup: {path}" for path in _cgroup_directories() if self._names_container(path)]
        # A new veth or macvlan link without a bridge belongs to this engine. Its bridge was
        # removed, or it never had one.
        found += [
            f"link: {name}"
            for name, link in links().items()
            if name in {self.bridge, *self._bridges}
            or (name.startswith(("veth", "dm-")) and name not in self._links_before and "master" not in link)
        ]
        return found

    def assert_gone(self) -> None:
        """Wait until no process, mount, link or cgroup of this engine is left, after `stop`."""

        last: list[str] = []

        def nothing() -> bool:
            nonlocal last
            last = self.present()
            return not last

        try:
            until("nothing is left", nothing)
        except AssertionError:
            raise AssertionError("left by engined stop: " + "; ".join(last)) from None

    def descriptors(self) -> int:
        """Open descriptors of daemon and monitor together."""
        return sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in (self.pid, self.monitor_pid()))

    def open_files(self) -> int:
        """Open descriptors of daemon and monitor, without sockets and network namespaces, whose
        number the stock of sandboxes changes.
        """
        found = []
        for pid in (self.pid, self.monitor_pid()):
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(FileNotFoundError):
                    found.append(os.readlink(f"/proc/{pid}/fd/{name}"))
        return sum(not target.startswith(("socket:", "net:")) for target in found)

    def _names_container(self, path: str) -> bool:
        assert "" not in self._known
        return any(identifier in path for identifier in self._known)

    def _container_processes(self) -> list[tuple[int, str, str]]:
        found = []
        for pid in _pids():
            with contextlib.suppress(OSError):
                group = Path(f"/proc/{pid}/cgroup").read_text()
                if self._names_container(group) and alive(pid):  # zombies belong to their parents
                    found.append((pid, Path(f"/proc/{pid}/comm").read_text().strip(), ""))
        return found

    def _own_processes(self) -> list[tuple[int, bytes]]:
        return [
            (pid, command)
            for pid, command in _commands()
            if os.fsencode(self.base) + b"/" in command and pid != os.getpid()
        ]

    def _demolish(self) -> None:
        """Kill every process of this engine and its containers, unmount and delete what they leave.

        Does not use the API.
        """
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None
        for _ in range(3):  # a process may just have started another one
            for pid, _command in self._own_processes():
                kill_and_wait(pid)
            for pid, *_name in self._container_processes():
                kill_and_wait(pid)
        for line in reversed(_mount_lines()):
            if str(self.base) in line:
                subprocess.run(["umount", "-l", line.split()[4]], check=False, capture_output=True)
        for path in sorted(_cgroup_directories(), key=len, reverse=True):
            if self._names_container(path):
                with contextlib.suppress(OSError):
                    os.rmdir(path)
        bridges = {self.bridge, *self._bridges}
        for name, link in links().items():
            if name in bridges or link.get("master") in bridges:
                subprocess.run(["ip", "link", "delete", name], check=False, capture_output=True)


def kill_and_wait(pid: int) -> None:
    """Send SIGKILL and wait until the process has exited. It need not be our child."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        assert poll.poll(DEADLINE * 1000), f"process {pid} does not die"
    finally:
        os.close(descriptor)


def alive(pid: int) -> bool:
    """Returns True if the process runs. A zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _parent(pid: int) -> int | None:
    """Pid of the parent. None when the process has exited."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def _commands() -> Iterator[tuple[int, bytes]]:
    for pid in _pids():
        with contextlib.suppress(OSError):
            if command := Path(f"/proc/{pid}/cmdline").read_bytes():
                yield pid, command


def _mount_lines() -> list[str]:
    return Path("/proc/self/mountinfo").read_text().splitlines()


def _cgroup_directories() -> list[str]:
    return [path for path, _, _ in os.walk("/sys/fs/cgroup")]


def links() -> dict[str, dict[str, Any]]:
    """The links of this network namespace by name, as ip(8) shows them: "master" is the name of its
    bridge. /sys shows those of the namespace in which it was mounted.
    """
    shown = subprocess.run(["ip", "-j", "link"], capture_output=True, check=True).stdout
    return {link["ifname"]: link for link in json.loads(shown) if link}
