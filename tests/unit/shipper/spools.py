"""Spools in a directory, written by hand, and what a feed needs besides them."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from engine._fast.wireform import Form
from engine.logs import deliveries
from engine.logs.deliveries import Delivery, Fluentd, Remote, Syslog
from engine.shipper import forms
from engine.shipper.destination import Destination
from engine.shipper.feed import Entry, Feed
from tests.support import PATIENCE

ID = "c0ffee" * 10 + "abcd"
TARGET = Syslog("tcp", "127.0.0.1", 1)


def entry(number: int, *, stream: str = "stdout", size: int = 0, newline: bool = True) -> bytes:
    """An entry of a spool, whose text has the number and at least `size` bytes."""
    text = f"line {number}".ljust(size, "x") + ("\\n" if newline else "")
    return b'{"log":"%b","stream":"%b","time":"2026-01-02T03:04:05.%09dZ"}\n' % (
        text.encode(),
        stream.encode(),
        number * 10 + 1,
    )


def number(text: bytes) -> int:
    found = re.match(rb"line (\d+)", text)
    assert found, text
    return int(found[1])


def numbers(entries: list[Entry]) -> list[int]:
    return [number(each.text) for each in entries]


async def until(condition: Callable[[], Any]) -> None:
    """Let the loop run until something is true. Its tasks take a few turns."""
    async with asyncio.timeout(20 * PATIENCE):
        while not condition():  # noqa: ASYNC110 (nothing would set an event)
            await asyncio.sleep(0)


OPEN: list[Feed] = []
"""The feeds of spools. The end of each test closes them (conftest.py)."""


class Owner:
    """Records what a process would be told."""

    def __init__(self) -> None:
        self.acks: list[Feed] = []
        self.losses: list[int] = []
        self.changes: list[str] = []

    def acknowledged(self, feed: Feed) -> None:
        self.acks.append(feed)

    def lost(self, feed: Feed, lines: int) -> None:
        self.losses.append(lines)

    def changed(self, destination: Destination) -> None:
        self.changes.append(destination.error)


class Nowhere(Destination):
    """A destination without a sender."""

    def form(self, document: Delivery) -> Form:
        if isinstance(document.target, Fluentd):
            return forms.fluentd(document, document.target)
        assert isinstance(document.target, Syslog)
        return forms.syslog(document, document.target, datagrams=False)

    async def open(self) -> None:
        raise AssertionError

    async def pass_on(self) -> None:
        raise AssertionError

    async def close(self) -> None:
        raise AssertionError


def delivery(target: Remote = TARGET, **more: Any) -> Delivery:
    return Delivery(**({"id": ID, "name": "web", "tag": "tag", "target": target, "quota": 1 << 30} | more))


class Spool:
    """A spool and the feed that reads it."""

    def __init__(self, directory: Path, target: Remote = TARGET, **more: Any) -> None:
        directory.mkdir(exist_ok=True)
        self.directory = directory
        self.live = directory / "spool.log"
        self.live.touch()
        self.written = 0
        """Entries."""
        self.bytes = 0
        self.owner = Owner()
        self.document = delivery(target, **more)
        (directory / "delivery").write_bytes(deliveries.encode(self.document))
        self.destination = Nowhere(self.owner, self.document)
        self.feed = self.open()

    def open(self) -> Feed:
        """A feed as another process would make it."""
        feed = Feed(str(self.directory), self.document, self.destination)
        OPEN.append(feed)
        return feed

    def reopen(self) -> None:
        """The process was killed, after it had saved its position."""
        self.feed.save(self.feed.position())
        self.feed.close()
        self.feed = self.open()
        self.feed.written = self.bytes

    def write(self, count: int = 1, **more: Any) -> None:
        self.append(b"".join(entry(self.written + each, **more) for each in range(count)))
        self.written += count

    def append(self, data: bytes) -> None:
        with self.live.open("ab") as file:
            file.write(data)
        self.bytes += len(data)
        self.feed.written = self.bytes

    def rotation(self, max_file: int = 9) -> Iterator[None]:
        """Rotates as `LogWriter.rotate` does, and stops before each of its steps."""
        new = Path(f"{self.live}.new")
        yield
        new.touch()
        count = 1
        while count < max_file - 1 and os.path.exists(f"{self.live}.{count}"):
            count += 1
        for index in range(count, 1, -1):
            yield
            os.rename(f"{self.live}.{index - 1}", f"{self.live}.{index}")
        yield
        if max_file > 1:
            os.rename(self.live, f"{self.live}.1")
        yield
        os.rename(new, self.live)

    def rotate(self, max_file: int = 9) -> None:
        for _ in self.rotation(max_file):
            pass

    def drain(self, room: int = 1 << 16) -> list[int]:
        """Numbers of everything that there is to read."""
        found: list[int] = []
        while (entries := self.feed.take(room)) is not None:
            found += numbers(entries)
        return found

    def acknowledge(self) -> None:
        self.feed.acknowledge(*self.feed.mark())
