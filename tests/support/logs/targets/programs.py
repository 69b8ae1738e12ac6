"""The programs that `.ci/targets` unpacks, as processes."""

from __future__ import annotations

import functools
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

from tests.support import PATIENCE, ROOT
from tests.support.engine.harness import until

UNPACKED = ROOT / ".venv" / "targets"


@functools.cache
def environment() -> dict[str, str]:
    """Variables with which unpacked programs find their libraries. Raises AssertionError where
    nothing is unpacked."""
    assert (UNPACKED / "complete").exists(), "run .ci/targets first"
    places = {str(path.parent) for path in UNPACKED.rglob("*.so.[0-9]*")} | {str(UNPACKED / "lib/systemd")}
    return os.environ | {"LD_LIBRARY_PATH": ":".join(sorted(places))}


class Server:
    """One server process in a directory of its own, which may be killed and started again."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.directory.mkdir(parents=True, exist_ok=True)
        self.process: subprocess.Popen[bytes] | None = None
        self.log = directory / "log"

    def run(self, command: Sequence[str], ready: Callable[[], object], within: Sequence[str] = ()) -> None:
        """Start the program, and wait until it is ready. `within`: a command that runs it elsewhere
        and keeps its pid."""
        assert self.process is None, "it runs already"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*within, *command],
                env=environment(),
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

        def is_ready() -> object:
            assert self.process is not None
            assert self.process.poll() is None, self.log.read_text(errors="replace")
            return ready()

        try:
            until(f"{command[0]} is ready", is_ready)
        except BaseException:
            self.kill()
            raise

    @property
    def pid(self) -> int:
        assert self.process is not None, "it does not run"
        return self.process.pid

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Idempotent. Waits for the end."""
        if self.process is not None:
            process, self.process = self.process, None
            process.send_signal(number)
            try:
                process.wait(20 * PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise

    def stop(self) -> None:
        """An orderly end."""
        self.kill(signal.SIGTERM)

    def start(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def free_port(kind: socket.SocketKind = socket.SOCK_STREAM) -> int:
    """A port that the kernel has chosen, for a server that cannot report such a port itself, or
    that is to return at the same one."""
    with socket.socket(socket.AF_INET, kind) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listens(port: int) -> bool:
    """Something accepts TCP connections at that port of loopback. Reads the kernel's table, since a
    connection would be one more for the server."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        if words[3] == "0A" and int(words[1].partition(":")[2], 16) == port:
            return True
    return False


def binds(port: int) -> bool:
    """A UDP socket is bound to that port."""
    lines = Path("/proc/net/udp").read_text().splitlines()[1:]
    return any(int(line.split()[1].partition(":")[2], 16) == port for line in lines)
