"""A root of a Debian release in namespaces of its own, with a network that reaches nothing.

`.ci/roots` makes a root of each release once; each test has a copy. The engine in it is reached by
its Unix socket through /proc/PID/root.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support import PATIENCE, ROOT
from tests.support.engine import client
from tests.support.images import archives

ROOTS = ROOT / ".venv" / "roots"
"""Made by `.ci/roots`."""

_UNSHARE = ("unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--uts", "--ipc")

_ENTER = """
set -e
root=$1; shift
mount --make-rprivate /
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount -t sysfs sysfs "$root/sys"
mount --rbind /sys/fs/cgroup "$root/sys/fs/cgroup"
mount --rbind /dev "$root/dev"
mount -t tmpfs tmpfs "$root/run"
mount -t tmpfs tmpfs "$root/tmp"
ip link set lo up
cd "$root"
pivot_root . .
umount -l .
cd /
exec /usr/bin/env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root \
    DEBIAN_FRONTEND=noninteractive /bin/sh -c 'echo entered; read line'
"""
"""The namespaces end when the standard input of the last shell is closed."""


class Root:
    """A copy of a release's root, entered."""

    def __init__(self, suite: str, place: Path) -> None:
        self.path = place / suite
        subprocess.run(["cp", "-a", "--reflink=auto", ROOTS / suite, self.path], check=True)
        self._holder = subprocess.Popen(
            [*_UNSHARE, "bash", "-c", _ENTER, "-", str(self.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._holder.stdout
        assert self._holder.stdout.readline() == "entered\n"
        children = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children").read_text()
        self._init = int(children.split()[0])

    def leave(self) -> None:
        """End what runs in it, and remove it."""
        assert self._holder.stdin
        self._holder.stdin.close()
        self._holder.wait()
        shutil.rmtree(self.path)

    def command(self, *command: str) -> list[str]:
        """The command that runs `command` in the root."""
        environment = ["/usr/bin/env", "-i", "PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root"]
        return ["nsenter", f"--target={self._init}", "-a", "-r", "-w", *environment, "LC_ALL=C.UTF-8", *command]

    def run(self, *command: str, check: bool = True) -> str:
        """What a command prints to both outputs."""
        done = subprocess.run(
            self.command("DEBIAN_FRONTEND=noninteractive", *command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=300 * PATIENCE,
        )
        assert not check or done.returncode == 0, f"{command}: {done.stdout}"
        return done.stdout

    @contextlib.contextmanager
    def serving(self, program: str = "engined") -> Iterator[subprocess.Popen[str]]:
        """`engined serve`, which listens. It is terminated at the end."""
        engine = subprocess.Popen(
            self.command(program, "serve"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            assert engine.stdout
            log = ""
            while not (line := engine.stdout.readline()).startswith("listening on "):
                assert line, log
                log += line
            yield engine
        finally:
            # nsenter passes no signal on
            self.run("sh", "-c", "kill $(cat /run/engined/engined.pid)", check=False)
            engine.wait()

    def ask(self, method: str, target: str, body: Any = None) -> bytes:
        """A request to the engine. Returns the body of its answer."""
        answer = client.request(f"/proc/{self._init}/root/run/engined.sock", method, target, body)
        assert answer.status < 300, (method, target, answer.status, answer.body)
        return answer.body

    def start_container(self, *command: str) -> str:
        """The ID of a container that was started, of an image that is loaded first."""
        self.ask("POST", "/images/load?quiet=1", archives.docker_archive(archives.busybox()))
        created = self.ask("POST", "/containers/create", {"Image": "busybox", "Cmd": command})
        container = str(json.loads(created)["Id"])
        self.ask("POST", f"/containers/{container}/start")
        return container

    def names(self, word: str = "engined") -> set[str]:
        """Paths of the root that have `word` in their last part, in any of its file systems but
        /proc and /sys.
        """
        return set(self.run("find", "/etc", "/usr", "/opt", "/var", "/root", "/run", "-name", f"*{word}*").split())
