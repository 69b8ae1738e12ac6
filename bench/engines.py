"""The engines that are compared. Each has its own root directory, network namespace and mount
namespace.

A holder process keeps the namespaces and reads a pipe from this process. An interruption ends
everything from here. If this process is killed, the holder sees the end of the pipe, kills the
engine and its containers, and removes its directories and cgroups. Engines run with their defaults,
except for paths and what their classes document. All processes in the network namespace belong to
the engine: daemon, monitor, containerd, shims, conmon, proxies. Containers have network namespaces
of their own.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from bench import wire
from tests.support import ROOT
from tests.support.engine.harness import TempEngine, until

PRIVATE = ("/etc/docker", "/run/netns", "/run/containerd", "/var/lib/cni", "/dev/shm")
"""Where peers keep state that cannot be configured: /etc/docker has dockerd's key, /run/containerd
sockets of shims, /dev/shm podman's locks. Each engine has its own tmpfs there. A dockerd that finds
no socket in /run/containerd starts a containerd of its own.
"""

HOLDER = """
mount --make-rprivate /
ip link set lo up
made=
for place; do
    [ -d $place ] || made="$made $place"
    mkdir -p $place && mount -t tmpfs tmpfs $place
done
echo held
read -r base groups
cat >/dev/null
set +e
here=$(readlink /proc/$$/ns/net | tr '[]' '??')
left=1
while [ "$left" ]; do
    left=
    for process in $( { find /proc/[0-9]*/ns/net -lname "$here"; grep -lF "$base/" /proc/[0-9]*/mountinfo; } |
        cut -d/ -f3); do
        [ "$process" != $$ ] && kill -9 "$process" && left=1
    done
    sleep 0.1
done 2>/dev/null
tac /proc/self/mountinfo | cut -d' ' -f5 | grep -F "$base/" | xargs -r umount -l
find /sys/fs/cgroup -depth -type d |
    grep -F -e "/${groups:?}" $(ls "$base/root/containers" | sed 's,^,-e /,') |
    xargs -r rmdir
rm -rf --one-file-system "$base"
for place in $made; do umount $place && rmdir $place; done
"""
"""The holder. Its arguments are PRIVATE. A kill(1) of its own find and grep fails, because they
have ended. The only line of input names a directory and a cgroup name; at the end of input, all
processes in the namespaces, the directory and the cgroups are removed.
"""

QUIET = 0.3
"""Seconds after which the engine has ended what it does for an earlier request."""
TICKS = os.sysconf("SC_CLK_TCK")


class Namespaces:
    """A network and a mount namespace, and the process that keeps them alive."""

    def __init__(self) -> None:
        self._made = [place for place in PRIVATE if not os.path.exists(place)]
        self._holder = subprocess.Popen(
            ["unshare", "--net", "--mount", "sh", "-c", f"set -e{HOLDER}", "sh", *PRIVATE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != b"held\n":
            raise RuntimeError("no namespaces can be made here: unshare --net --mount failed")
        self._network = os.readlink(f"/proc/{self._holder.pid}/ns/net")
        self.not_the_engine: set[int] = {self._holder.pid}
        """The benchmark's own processes in the namespaces."""

    @property
    def holder(self) -> int:
        """The pid of a process in the namespaces."""
        return self._holder.pid

    def own(self, base: Path, groups: str = "") -> None:
        """Registers a directory, and cgroups with that name or a container's id, for removal
        when this process is killed.
        """
        assert self._holder.stdin is not None
        self._holder.stdin.write(f"{base} {groups or base.name}\n".encode())
        self._holder.stdin.flush()

    def command(self, *arguments: str, directory: Path = ROOT) -> list[str]:
        """A command that runs `arguments` in the namespaces and that directory. The process keeps
        its pid.
        """
        here = f"--wd={directory}"
        return ["nsenter", "--target", str(self._holder.pid), "--net", "--mount", here, "--", *arguments]

    def pids(self) -> list[int]:
        """Every process of the engine."""
        found = []
        for name in os.listdir("/proc"):
            if name.isdigit() and int(name) not in self.not_the_engine:
                with contextlib.suppress(OSError):
                    if os.readlink(f"/proc/{name}/ns/net") == self._network:
                        found.append(int(name))
        return found

    def close(self) -> None:
        """Kill all processes in the namespaces and release them."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._holder.kill()
        self._holder.communicate()
        for place in self._made:
            with contextlib.suppress(OSError):  # something on the host uses it now
                os.rmdir(place)


def processor_times(pid: int) -> tuple[float, float]:
    """CPU seconds of a process, with its exited threads (in nanoseconds), and of its exited
    children (in ticks).

    Raises OSError if it has exited.
    """
    # clock_getcpuclockid(3); schedstat has no exited threads
    own = time.clock_gettime(~pid << 3 | 2)
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return own, (int(fields[13]) + int(fields[14])) / TICKS


class Meter:
    """The processor time of one piece of work, set afterwards (`Engine.metered`)."""

    seconds = 0.0


class Engine:
    """One engine, from `start` to `close`."""

    name = ""
    program = ""

    def __init__(self) -> None:
        self.namespaces = Namespaces()
        self.idle: list[str] = []
        """Idle running containers (`steps.stock`)."""

    base: Path
    socket: str

    @classmethod
    def missing(cls) -> str:
        """The reason why this engine cannot take part; empty if it can."""
        return "" if shutil.which(cls.program) else f"{cls.program} is not installed (make bench-peers)"

    def start(self) -> None:
        """Start the engine and wait until its API answers."""
        raise NotImplementedError

    def stop(self) -> None:
        """Send SIGTERM to the daemon only, as a service manager does, and wait until it has exited.

        Containers keep running.
        """
        raise NotImplementedError

    def close(self) -> None:
        """End the engine and its containers and remove its directories, whatever failed before."""
        raise NotImplementedError

    def version(self) -> str:
        raise NotImplementedError

    def connection(self) -> wire.Connection:
        return wire.Connection(self.socket)

    def answers(self) -> bool:
        """Returns True if the API answers a ping."""
        try:
            with wire.Connection(self.socket, 10) as connection:
                return connection.ask("GET", "/_ping")[0] == 200
        except OSError:
            return False

    def proportional_set_size(self) -> int:
        """PSS of all its processes, in bytes. Shared pages are counted once."""
        return self.memory("Pss")

    def memory(self, field: str) -> int:
        """A field of smaps_rollup (proc(5)) of all its processes together, in bytes."""
        total = 0
        for pid in self.namespaces.pids():
            with contextlib.suppress(OSError):
                found = re.search(rf"^{field}:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
                total += int(found[1]) * 1024 if found else 0
        return total

    def processor_time(self) -> float:
        """CPU seconds of its processes, and of their exited children (in ticks)."""
        total = 0.0
        for pid in self.namespaces.pids():
            with contextlib.suppress(OSError):
                own, children = processor_times(pid)
                total += own + children
        return total

    @contextlib.contextmanager
    def metered(self) -> Iterator[Meter]:
        """Measure the processor time of the work in this context, and of what the engine does
        after it.

        It is entered when for a while no process of the engine has started or ended: the time of
        one that ends is lost, unless its parent belongs to the engine.
        """
        meter = Meter()
        deadline = time.monotonic() + 60
        processes: set[int] = set()
        while processes != (processes := {*self.namespaces.pids()}):
            assert time.monotonic() < deadline, f"{self.name} starts and ends processes all the time"
            time.sleep(QUIET)
        before = self.processor_time()
        yield meter
        time.sleep(QUIET)
        meter.seconds = self.processor_time() - before
        ended = processes - {*self.namespaces.pids()}
        assert not ended, f"processes of {self.name} ended while their time was measured: {ended}"

    def descriptors(self) -> int:
        total = 0
        for pid in self.namespaces.pids():
            with contextlib.suppress(OSError):
                total += len(os.listdir(f"/proc/{pid}/fd"))
        return total


class Engined(Engine):
    """engined with its default options."""

    name = "engined"
    program = sys.executable
    checkout = ROOT

    def __init__(self) -> None:
        super().__init__()
        within = self.namespaces.command(directory=self.checkout)
        self._engine = TempEngine(within=within, checkout=self.checkout)
        self.socket = self._engine.socket
        self.base = self._engine.base
        self.namespaces.own(self.base)

    def start(self) -> None:
        self._engine.start()
        until("engined answers", self.answers)

    def stop(self) -> None:
        self._engine.terminate()

    def kill(self) -> None:
        """Send SIGKILL to the daemon only, and wait until it has exited."""
        self._engine.kill9()

    def spawn(self) -> None:
        """Start the daemon, and wait until it answers a ping: it may still restore containers."""
        self._engine.spawn()
        until("engined answers", self.answers)

    def close(self) -> None:
        try:
            self._engine.close()
        finally:
            self.namespaces.close()

    def version(self) -> str:
        with self.connection() as connection:
            return f"engined {connection.json('GET', '/version')['Version']}"


def earlier_engined(path: Path) -> type[Engine]:
    """The engine of another checkout, prepared with `make build` there, as the peer `earlier`."""

    class Earlier(Engined):
        name = "earlier"
        program = str(path / ".venv/bin/engined")
        checkout = path

        @classmethod
        def missing(cls) -> str:
            return "" if Path(cls.program).exists() else f"{cls.program} does not exist (make build)"

    return Earlier


class _Peer(Engine):
    """Another engine, from Debian's packages, installed or unpacked."""

    def __init__(self) -> None:
        super().__init__()
        self.base = Path(tempfile.mkdtemp(prefix="peer", dir="/tmp"))
        self.socket = str(self.base / "s.sock")
        self.groups = self.base.name
        """Name of the cgroups that belong to it; empty for none."""
        self._process: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str]:
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        return {}

    def start(self) -> None:
        self.namespaces.own(self.base, self.groups)
        with open(self.base / "log", "ab") as log:
            self._process = subprocess.Popen(
                self.namespaces.command(*self.command()),
                env={**os.environ, **self.environment()},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + 120
        while not self.answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self.program} does not start:\n{(self.base / 'log').read_text()[-2000:]}")
            time.sleep(0.005)

    def stop(self) -> None:
        assert self._process is not None
        self._process.terminate()
        self._process.wait(120)

    def close(self) -> None:
        """Kill all its processes at once. Everything else is removed with the namespaces and the
        directory.
        """
        deadline = time.monotonic() + 10
        while found := [*self.namespaces.pids(), *self._containers()]:
            if time.monotonic() > deadline:
                break
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        if self._process is not None:
            self._process.wait()
        self.namespaces.close()
        shutil.rmtree(self.base, ignore_errors=True)
        _remove_groups(self.groups)

    def _containers(self) -> list[int]:
        """Processes with mounts below this engine's root.

        It mounts only in its own namespace, so these are its containers.
        """
        found = []
        for name in os.listdir("/proc"):
            if name.isdigit():
                with contextlib.suppress(OSError):
                    if f"{self.base}/" in Path(f"/proc/{name}/mountinfo").read_text():
                        found.append(int(name))
        return found

    def version(self) -> str:
        said = subprocess.run([self.program, "--version"], check=True, capture_output=True, text=True).stdout
        found = re.search(r"\d+\.\d+\.\d+[^\s,]*", said)
        return f"{self.name} {found[0] if found else said.strip()}"


class HostDockerd(_Peer):
    """The host's dockerd, with live-restore, so that its containers survive a restart of the daemon
    as well.

    It starts a containerd, whose configuration and data are below `--exec-root` and `--data-root`.
    """

    name = "dockerd-host"
    program = "dockerd"

    def command(self) -> list[str]:
        base = self.base
        return [
            *(self.program, "--host", f"unix://{self.socket}", "--pidfile", f"{base}/pid", "--live-restore"),
            *("--data-root", f"{base}/root", "--exec-root", f"{base}/run", "--config-file", f"{base}/none.json"),
            *("--storage-driver", "overlay2", "--cgroup-parent", base.name),
            *("--exec-opt", "native.cgroupdriver=cgroupfs"),  # systemd's takes slices alone
        ]

    def start(self) -> None:
        (self.base / "none.json").write_text("{}")  # not /etc/docker/daemon.json
        super().start()


class Dockerd(HostDockerd):
    """The newest dockerd and containerd, which `.ci/clients dockerd` unpacks, with the host's
    runc.
    """

    name = "dockerd"
    _programs = ROOT / ".venv/peers/dockerd/bin"
    program = str(_programs / "dockerd")

    def environment(self) -> dict[str, str]:
        return {"PATH": f"{self._programs}:{os.environ['PATH']}"}


class Podman(_Peer):
    """podman's API service.

    Some defaults are changed: they need a higher RLIMIT_NOFILE than root may set on every host, and
    systemd and journald.
    """

    name = "podman"
    program = "podman"

    def __init__(self) -> None:
        super().__init__()
        self.groups = "" if _groups("libpod_parent") else "libpod_parent"

    def start(self) -> None:
        base = self.base
        (base / "networks").mkdir(exist_ok=True)
        (base / "storage.conf").write_text(
            f'[storage]\ndriver = "overlay"\ngraphroot = "{base}/root"\nrunroot = "{base}/run"\n'
        )
        (base / "containers.conf").write_text(
            '[containers]\ndefault_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]\nlog_driver = "k8s-file"\n'
            f'[network]\nnetwork_config_dir = "{base}/networks"\n'
            '[engine]\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\n'
        )
        (base / "registries.conf").write_text('[[registry]]\nlocation = "127.0.0.1"\ninsecure = true\n')
        super().start()

    def command(self) -> list[str]:
        paths = ["--root", f"{self.base}/root", "--runroot", f"{self.base}/run", "--tmpdir", f"{self.base}/tmp"]
        return ["podman", *paths, "system", "service", "--time=0", f"unix://{self.socket}"]

    def environment(self) -> dict[str, str]:
        return {
            "CONTAINERS_CONF": f"{self.base}/containers.conf",
            "CONTAINERS_STORAGE_CONF": f"{self.base}/storage.conf",
            "CONTAINERS_REGISTRIES_CONF": f"{self.base}/registries.conf",
        }


KINDS: tuple[type[Engine], ...] = (Engined, Dockerd, HostDockerd, Podman)


def default_kinds() -> list[type[Engine]]:
    """One of each kind: the host's dockerd only where the newest has not been fetched."""
    left_out = HostDockerd if not Dockerd.missing() or HostDockerd.missing() else Dockerd
    return [kind for kind in KINDS if kind is not left_out]


def _groups(name: str) -> list[str]:
    """Cgroups of that name in any hierarchy. Others may appear and vanish meanwhile."""
    return [f"{path}/{name}" for path, names, _ in os.walk("/sys/fs/cgroup") if name in names]


def _remove_groups(name: str) -> None:
    """Remove the empty cgroups that a peer leaves in each hierarchy."""
    for top in _groups(name):
        for directory, _, _ in os.walk(top, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(directory)
