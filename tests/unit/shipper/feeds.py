"""Feeds over spools on disk, and the process that they belong to, for tests of senders."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from engine._fast.logwriter import LogWriter
from engine.logs.deliveries import Delivery, Remote
from engine.shipper.destination import Destination
from engine.shipper.feed import Feed


class Owner:
    """The shipper's process, as destinations and feeds see it."""

    def __init__(self) -> None:
        self.lines_lost = 0
        self.changes: list[str] = []

    def acknowledged(self, feed: Feed) -> None:
        pass

    def lost(self, feed: Feed, lines: int) -> None:
        self.lines_lost += lines

    def changed(self, destination: Destination) -> None:
        self.changes.append(destination.error)


def document(target: Remote, number: int = 1, **more: Any) -> Delivery:
    return Delivery(id=f"{number:064x}", name="web", tag=f"tag{number}", target=target, host="box", **more)


class Spool:
    """One container's spool, and its feed of a destination."""

    def __init__(self, base: Path, destination: Destination, delivery: Delivery) -> None:
        self.directory = base / delivery.id
        self.directory.mkdir()
        self.path = self.directory / "spool.log"
        self.writer = LogWriter(os.fsencode(self.path), 0, 1)
        self.feed = Feed(str(self.directory), delivery, destination)
        self.feed.slot = 0
        destination.add(self.feed)

    def write(self, data: bytes, stream: int = 1) -> None:
        """Write lines, as the monitor does."""
        self.writer.write(stream, data)
        self.feed.written = self.path.stat().st_size
        self.feed.destination.notify(self.feed)

    def entries(self, lines: list[tuple[int, str]]) -> None:
        """Write lines with these times in milliseconds."""
        with self.path.open("a") as file:
            for at, text in lines:
                second = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at // 1000))
                file.write(f'{{"log":"{text}\\n","stream":"stdout","time":"{second}.{at % 1000:03}000000Z"}}\n')
        self.feed.written = self.path.stat().st_size

    def end(self) -> None:
        """The container has ended."""
        self.writer.close()
        self.feed.slot = -1

    def close(self) -> None:
        self.writer.close()
        self.feed.close()
