"""The engines that are compared: each started here on directories of its own, and ended by the pid it was started with.

dockerd and podman run in a network and mount namespace of their own (they write iptables rules and sysctls), with their defaults but
for paths. A peer that is not installed is said to be missing; one that is installed and does not start is an error, never skipped.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from bench import wire
from tests import archives
from tests.harness import TempEngine


class Engined:
    """This engine, as its users start it."""

    name = "engined"

    def __init__(self) -> None:
        self._engine = TempEngine()
        self.socket = self._engine.socket
        self.base = self._engine.base

    @staticmethod
    def missing() -> str:
        return ""

    def start(self) -> None:
        self._engine.start()

    def close(self) -> None:
        self._engine.close()

    def version(self) -> str:
        return f"engined {wire.Connection(self.socket).json('GET', '/version')['Version']}"


class _Peer:
    """Another engine: a program in namespaces of its own."""

    name = ""
    program = ""

    def __init__(self) -> None:
        self.base = Path(tempfile.mkdtemp(prefix="peer", dir="/tmp"))
        self.socket = str(self.base / "s.sock")
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def missing(cls) -> str:
        """Why it cannot take part; "" when it can."""
        return "" if shutil.which(cls.program) else f"{cls.program} is not installed (make bench-peers)"

    def command(self) -> list[str]:
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        return {}

    def start(self) -> None:
        with open(self.base / "log", "wb") as log:
            self._process = subprocess.Popen(
                ["unshare", "--net", "--mount", "sh", "-c", 'ip link set lo up; exec "$@"', "sh", *self.command()],
                env={**os.environ, **self.environment()},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError):
                connection = wire.Connection(self.socket)
                assert connection.ask("GET", "/_ping")[0] == 200
                connection.close()
                return
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self.program} does not start:\n{(self.base / 'log').read_text()[-2000:]}")
            time.sleep(0.02)

    def close(self) -> None:
        """Remove its containers, end it, then whatever of it is left; remove its directories."""
        try:
            if self._process is not None and self._process.poll() is None:
                connection = wire.Connection(self.socket)
                for container in connection.json("GET", "/containers/json?all=1"):
                    connection.ask("DELETE", f"/containers/{container['Id']}?force=1&v=1")
                self._process.terminate()
                self._process.wait(60)
        finally:
            for pid in pids(self.base):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for line in reversed(Path("/proc/self/mounts").read_text().splitlines()):
                if line.split()[1].startswith(f"{self.base}/"):
                    subprocess.run(["umount", "-l", line.split()[1]], check=False)
            shutil.rmtree(self.base, ignore_errors=True)

    def version(self) -> str:
        said = subprocess.run([self.program, "--version"], check=True, capture_output=True, text=True).stdout
        found = re.search(r"\d+\.\d+\.\d+[^\s,]*", said)
        return f"{self.name} {found[0] if found else said.strip()}"


class Dockerd(_Peer):
    name = "dockerd"
    program = "dockerd"

    def command(self) -> list[str]:
        base = self.base
        return [
            *("dockerd", "--host", f"unix://{self.socket}", "--pidfile", f"{base}/pid"),
            *("--data-root", f"{base}/root", "--exec-root", f"{base}/run", "--config-file", f"{base}/none.json"),
            *("--cgroup-parent", base.name),
        ]

    def start(self) -> None:
        (self.base / "none.json").write_text("{}")  # not /etc/docker/daemon.json
        super().start()

    def close(self) -> None:
        super().close()
        _remove_groups(self.base.name)


class Podman(_Peer):
    name = "podman"
    program = "podman"
    _groups_were_there = False

    def start(self) -> None:
        self._groups_were_there = bool([*Path("/sys/fs/cgroup").glob("**/libpod_parent")])
        base = self.base
        (base / "storage.conf").write_text(
            f'[storage]\ndriver = "overlay"\ngraphroot = "{base}/root"\nrunroot = "{base}/run"\n'
        )
        # Its own default asks for a higher RLIMIT_NOFILE than root may set everywhere, and for systemd and journald.
        (base / "containers.conf").write_text(
            '[containers]\ndefault_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]\nlog_driver = "k8s-file"\n'
            '[engine]\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\n'
        )
        super().start()

    def close(self) -> None:
        super().close()
        if not self._groups_were_there:
            _remove_groups("libpod_parent")

    def command(self) -> list[str]:
        paths = ["--root", f"{self.base}/root", "--runroot", f"{self.base}/run", "--tmpdir", f"{self.base}/tmp"]
        return ["podman", *paths, "system", "service", "--time=0", f"unix://{self.socket}"]

    def environment(self) -> dict[str, str]:
        return {
            "CONTAINERS_CONF": f"{self.base}/containers.conf",
            "CONTAINERS_STORAGE_CONF": f"{self.base}/storage.conf",
        }


Engine = Engined | Dockerd | Podman
KINDS: tuple[type[Engined] | type[Dockerd] | type[Podman], ...] = (Engined, Dockerd, Podman)


def _remove_groups(name: str) -> None:
    """The empty control groups that a peer leaves in each hierarchy."""
    for top in Path("/sys/fs/cgroup").glob(f"**/{name}"):
        for directory, _, _ in os.walk(top, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(directory)


def pids(base: Path) -> list[int]:
    """Every process of the engine that lives in `base`: daemon, monitor, containerd, shims, conmon. Not the containers'."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with contextlib.suppress(OSError):
                if os.fsencode(base) in Path(f"/proc/{name}/cmdline").read_bytes():
                    found.append(int(name))
    return found


def proportional_set_size(base: Path) -> int:
    """PSS of all of them together, in bytes (proc(5), smaps_rollup): shared pages count once in all."""
    total = 0
    for pid in pids(base):
        with contextlib.suppress(OSError):
            found = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
            total += int(found[1]) * 1024 if found else 0
    return total


def load_busybox(engine: Engine) -> None:
    """The same image for everybody."""
    connection = wire.Connection(engine.socket)
    status, body = connection.ask("POST", "/images/load?quiet=1", archives.docker_archive(archives.busybox()))
    if status != 200 or b"errorDetail" in body:
        raise RuntimeError(f"{engine.name}: load: {status} {body!r}")
    connection.close()
