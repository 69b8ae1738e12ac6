"""Spools without an engine: what the monitor and the daemon write for the shipper, and the shipper
process itself.

Owns: the directories below its base, and the shipper process.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from engine._fast import spool
from engine._fast.board import Board
from engine.logs import cursor, deliveries
from engine.logs.deliveries import Delivery, Remote
from engine.shipper.process import UNDELIVERED
from tests.support import PATIENCE, ROOT


class Spool:
    """One container's spool, written as the monitor does."""

    def __init__(
        self,
        logs: Path,
        board: Board,
        target: Remote,
        tag: str = "",
        *,
        max_size: int = 20 << 20,
        max_file: int = 5,
        **more: Any,
    ) -> None:
        """`max_size`, `max_file`: of the spool's files. `more`: fields of the document."""
        self.id = secrets.token_hex(32)
        self.directory = logs / self.id
        self.directory.mkdir(parents=True)
        more = {"host": "box", "image_name": "busybox", "image_id": "sha256:0", "pid": 77, "quota": 100 << 20} | more
        self.document = Delivery(id=self.id, name="web", tag=tag or self.id[:12], target=target, **more)
        self.path = self.directory / "spool.log"
        self._options = (max_size, max_file)
        self.open(board)

    def open(self, board: Board, **more: Any) -> None:
        """The container starts, or a new monitor goes on. `more`: fields of another document."""
        self.document = msgspec.structs.replace(self.document, **more)
        (self.directory / "delivery").write_bytes(deliveries.encode(self.document))
        self.board = board
        self.running = True
        self.writer = spool.Spool(os.fsencode(self.path), *self._options)
        saved = None
        with contextlib.suppress(FileNotFoundError):
            saved = cursor.decode((self.directory / "cursor").read_bytes())
        acked = cursor.newest(
            saved.position if saved is not None else None, board.left().get(self.id), board.last(self.id)
        )
        self.writer.join(board, self.id, acked, self.document.quota, self.document.blocking)

    @property
    def slot(self) -> int:
        """Its number on the board."""
        number = 0
        while self.board.slot(number)[:2] != (self.id, True):
            number += 1
        return number

    def write(self, data: bytes, stream: int = 1) -> None:
        """Waits while the container would be paused."""
        end = time.monotonic() + 120 * PATIENCE
        while self.full:
            assert time.monotonic() < end, "the container is paused for too long"
            time.sleep(0.002)
        self.writer.write(stream, data)

    @property
    def full(self) -> bool:
        """The container is paused."""
        if self.writer.full:
            self.writer.look()
        return self.writer.full

    def end(self) -> None:
        """The container exits."""
        self.running = False
        self.writer.close()


class Shipping:
    """A board, spools, and a shipper that serves them."""

    def __init__(self, base: Path, within: Sequence[str] = ()) -> None:
        """`within`: a command that runs the shipper elsewhere and keeps its pid."""
        self.root, self.run = base / "root", base / "run"
        self.logs = self.root / "logs"
        self.logs.mkdir(parents=True)
        self.run.mkdir()
        self.within = within
        self.board = Board(os.fsencode(self.run / "shipper"), monitor=True)
        self.spools: list[Spool] = []
        self.process: subprocess.Popen[bytes] | None = None
        self.log = base / "shipper.log"
        self.events = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.events.bind(str(self.run / "shipper" / "events.sock"))

    def spool(self, target: Remote, tag: str = "", **more: Any) -> Spool:
        made = Spool(self.logs, self.board, target, tag, **more)
        self.spools.append(made)
        return made

    def replace_monitor(self) -> None:
        """The monitor was killed, and the next one opens the spools of running containers again."""
        self.board = Board(os.fsencode(self.run / "shipper"), monitor=True)
        for each in self.spools:
            if each.running:
                each.open(self.board)

    def removed(self, removed: Spool, seconds: int | None = None, *, rescan: bool = True) -> Path:
        """The container is removed while it has undelivered lines. Returns the new directory.
        `seconds`: when that was. `rescan`: the shipper is told."""
        place = self.logs / UNDELIVERED
        place.mkdir(exist_ok=True)
        moved = place / f"{removed.id}.{int(time.time()) if seconds is None else seconds}"
        os.rename(removed.directory, moved)
        if rescan:
            self.board.rescan()
        return moved

    def start(self) -> None:
        program = [*self.within, sys.executable, "-P", "-m", "engine.shipper"]
        arguments = [*program, "--root", str(self.root), "--run", str(self.run)]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(arguments, env=environment, stderr=log)

    def kill(self, number: int = signal.SIGKILL) -> int:
        """Returns the exit status."""
        assert self.process is not None
        process, self.process = self.process, None
        process.send_signal(number)
        return process.wait(30 * PATIENCE)

    def states(self, containers: list[str] | None = None) -> dict[str, Any]:
        """The shipper's answer; waits until it serves. Empty when it has ended by itself."""
        end = time.monotonic() + 10 * PATIENCE
        while True:
            with socket.socket(socket.AF_UNIX) as connection:
                try:
                    connection.connect(str(self.run / "shipper" / "socket"))
                except (FileNotFoundError, ConnectionRefusedError):
                    if self.ended:
                        return {}
                    if time.monotonic() > end:
                        raise
                    time.sleep(0.02)
                    continue
                connection.sendall(json.dumps({"containers": containers}).encode() + b"\n")
                answer = b""
                while part := connection.recv(1 << 20):
                    answer += part
            found: dict[str, Any] = json.loads(answer)
            return found

    @property
    def ended(self) -> bool:
        """The shipper has ended by itself, as it does when it has had nothing to do for a while."""
        return self.process is not None and self.process.poll() == 0

    def delivered(self) -> bool:
        """Nothing waits, and no target has an error."""
        states = self.states().values()
        return self.ended or (bool(states) and all(not each["waiting"] and not each["error"] for each in states))

    def close(self) -> None:
        if self.process is not None:
            self.kill()
        self.events.close()
