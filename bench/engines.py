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
from pathlib import Path

from bench import wire
from tests.support import ROOT
from tests.support.engine.harness import TempEngine, until

HOLDER = """
mount --make-rprivate /
ip link set lo up
for place in /run/netns /var/lib/cni /dev/shm; do mkdir -p $place && mount -t tmpfs tmpfs $place; done
echo held
read -r base groups
cat >/dev/null
set +e
here=$(readlink /proc/$$/ns/net)
left=1
while [ "$left" ]; do
    left=
    for process in /proc/[0-9]*; do
        [ "$process" != /proc/$$ ] && [ -s $process/cmdline ] || continue
        if [ "$(readlink $process/ns/net)" = "$here" ] || grep -qF "$base/" $process/mountinfo; then
            kill -9 ${process#/proc/} && left=1
        fi
    done 2>/dev/null
    sleep 0.1
done
tac /proc/self/mountinfo | cut -d' ' -f5 | grep -F "$base/" | xargs -r umount -l
find /sys/fs/cgroup -depth -type d |
    grep -F -e "/${groups:?}" $(ls "$base/root/containers" | sed 's,^,-e /,') |
    xargs -r rmdir
rm -rf --one-file-system "$base"
"""
"""The holder. Peers keep state in /run/netns, /var/lib/cni and /dev/shm (podman's locks) that
cannot be configured, so these are private. The only line of input names a directory and a cgroup
name; at the end of input, all processes in the namespaces, the directory and the cgroups are
removed.
"""

TICKS = os.sysconf("SC_CLK_TCK")


class Namespaces:
    """A network and a mount namespace, and the process that keeps them alive."""

    def __init__(self) -> None:
        self._holder = subprocess.Popen(
            ["unshare", "--net", "--mount", "sh", "-c", f"set -e{HOLDER}"],
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
        """CPU seconds of its threads (from schedstat, in microseconds) and of its exited
        children (in ticks).
        """
        total = 0.0
        for pid in self.namespaces.pids():
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                total += (int(fields[13]) + int(fields[14])) / TICKS
                for thread in os.listdir(f"/proc/{pid}/task"):
                    total += int(Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()[0]) / 1e9
        return total

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
    """Another engine, from Debian's packages."""

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


class Dockerd(_Peer):
    """dockerd with live-restore, so that its containers survive a restart of the daemon as well."""

    name = "dockerd"
    program = "dockerd"

    def command(self) -> list[str]:
        base = self.base
        return [
            *("dockerd", "--host", f"unix://{self.socket}", "--pidfile", f"{base}/pid", "--live-restore"),
            *("--data-root", f"{base}/root", "--exec-root", f"{base}/run", "--config-file", f"{base}/none.json"),
            *("--cgroup-parent", base.name),
        ]

    def start(self) -> None:
        (self.base / "none.json").write_text("{}")  # not /etc/docker/daemon.json
        super().start()


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


KINDS: tuple[type[Engine], ...] = (Engined, Dockerd, Podman)


def _groups(name: str) -> list[str]:
    """Cgroups of that name in any hierarchy. Others may appear and vanish meanwhile."""
    return [f"{path}/{name}" for path, names, _ in os.walk("/sys/fs/cgroup") if name in names]


def _remove_groups(name: str) -> None:
    """Remove the empty cgroups that a peer leaves in each hierarchy."""
    for top in _groups(name):
        for directory, _, _ in os.walk(top, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(directory)
