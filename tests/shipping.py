"""Spools without an engine: what the monitor and the daemon write for the shipper, and the shipper
process itself.

Owns: the directories below its base, and the shipper process.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from engine._fast.board import Board
from engine._fast.logwriter import LogWriter
from engine.logs import deliveries
from engine.logs.deliveries import Delivery, Remote

ROOT = Path(__file__).resolve().parent.parent


class Spool:
    """One container's spool, written as the monitor does."""

    def __init__(self, logs: Path, board: Board, target: Remote, tag: str = "", **more: Any) -> None:
        self.id = secrets.token_hex(32)
        self.directory = logs / self.id
        self.directory.mkdir(parents=True)
        more = {"host": "box", "image_name": "busybox", "image_id": "sha256:0", "pid": 77, "quota": 100 << 20} | more
        self.document = Delivery(id=self.id, name="web", tag=tag or self.id[:12], target=target, **more)
        (self.directory / "delivery").write_bytes(deliveries.encode(self.document))
        self.path = self.directory / "spool.log"
        self.writer = LogWriter(os.fsencode(self.path), 20 << 20, 5)
        self._board = board
        self._slot = board.open(self.id, (0, 0, 0, 0), 0)

    def write(self, data: bytes, stream: int = 1) -> None:
        _, before = self.writer.position()
        self.writer.write(stream, data)
        _, after = self.writer.position()
        self._board.wrote(self._slot, max(0, after - before), data.count(b"\n"))

    def end(self) -> None:
        self.writer.close()
        self._board.close(self._slot)


class Shipping:
    """A board, spools, and a shipper that serves them."""

    def __init__(self, base: Path) -> None:
        self.root, self.run = base / "root", base / "run"
        self.logs = self.root / "logs"
        self.logs.mkdir(parents=True)
        self.run.mkdir()
        self.board = Board(os.fsencode(self.run / "shipper"), monitor=True)
        self.process: subprocess.Popen[bytes] | None = None
        self.log = base / "shipper.log"
        self.events = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.events.bind(str(self.run / "shipper" / "events.sock"))

    def spool(self, target: Remote, tag: str = "", **more: Any) -> Spool:
        return Spool(self.logs, self.board, target, tag, **more)

    def start(self) -> None:
        arguments = [sys.executable, "-P", "-m", "engine.shipper", "--root", str(self.root), "--run", str(self.run)]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(arguments, env=environment, stderr=log)

    def kill(self, number: int = signal.SIGKILL) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(30)

    def states(self, containers: list[str] | None = None) -> dict[str, Any]:
        """The shipper's answer; waits until it serves."""
        end = time.monotonic() + 10
        while True:
            with socket.socket(socket.AF_UNIX) as connection:
                try:
                    connection.connect(str(self.run / "shipper" / "socket"))
                except (FileNotFoundError, ConnectionRefusedError):
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

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.kill()
        self.events.close()
