"""A receiver of Fluentd's Forward mode that acknowledges in good and bad ways, and a decoder of
MessagePack that shares nothing with the engine's.

Entries are stored before their chunk is acknowledged, as a server with a file buffer does.
"""

from __future__ import annotations

import struct
import time
from dataclasses import dataclass
from typing import Any, Literal

from tests.support.logs.targets.streams import Stream, StreamReceiver

Answer = Literal["at once", "late", "never", "garbage", "half", "other"]


class Incomplete(Exception):
    """The value continues after the data."""


@dataclass(frozen=True)
class EventTime:
    """Extension 0: https://github.com/fluent/fluentd/wiki/Forward-Protocol-Specification-v1."""

    seconds: int
    nanoseconds: int


@dataclass(frozen=True)
class Event:
    tag: str
    time: int | EventTime
    record: dict[str, str]


def unpack(data: bytes | bytearray, at: int = 0) -> tuple[Any, int]:
    """The value at `at`, and where it ends. Raises Incomplete, ValueError."""

    def take(size: int) -> bytes:
        nonlocal at
        if at + size > len(data):
            raise Incomplete
        at += size
        return bytes(data[at - size : at])

    def number(size: int) -> int:
        return int.from_bytes(take(size), "big")

    def many(count: int) -> list[Any]:
        nonlocal at
        found = []
        for _ in range(count):
            value, at = unpack(data, at)
            found.append(value)
        return found

    def pairs(count: int) -> dict[Any, Any]:
        flat = many(2 * count)
        names = flat[::2]
        if len(set(names)) != count:
            raise ValueError(f"a name twice in a map: {names}")
        return dict(zip(names, flat[1::2], strict=True))

    kind = take(1)[0]
    value: Any
    if kind < 0x80:
        value = kind
    elif kind < 0x90:
        value = pairs(kind & 15)
    elif kind < 0xA0:
        value = many(kind & 15)
    elif kind < 0xC0:
        value = take(kind & 31).decode(errors="surrogateescape")
    elif kind >= 0xE0:
        value = kind - 256
    elif kind in (0xC0, 0xC2, 0xC3):
        value = {0xC0: None, 0xC2: False, 0xC3: True}[kind]
    elif 0xC4 <= kind <= 0xC6:
        value = take(number(1 << kind - 0xC4))
    elif 0xCC <= kind <= 0xCF:
        value = number(1 << kind - 0xCC)
    elif 0xD0 <= kind <= 0xD3:
        value = int.from_bytes(take(1 << kind - 0xD0), "big", signed=True)
    elif kind == 0xD7:
        extension, body = number(1), take(8)
        if extension != 0:
            raise ValueError(f"extension {extension}")
        value = EventTime(*struct.unpack(">II", body))
    elif 0xD9 <= kind <= 0xDB:
        value = take(number(1 << kind - 0xD9)).decode(errors="surrogateescape")
    elif kind in (0xDC, 0xDD):
        value = many(number(2 if kind == 0xDC else 4))
    elif kind in (0xDE, 0xDF):
        value = pairs(number(2 if kind == 0xDE else 4))
    else:
        raise ValueError(f"kind {kind:#x}")
    return value, at


class ForwardReceiver(StreamReceiver):
    """See the module."""

    def __init__(self, *, answer: Answer = "at once", delay: float = 0.0, **more: Any) -> None:
        """`delay`: seconds before an answer that is "late"."""
        self.answer: Answer = answer
        self.delay = delay
        self.options: list[dict[str, Any]] = []
        """Options of each message."""
        self._events: dict[Stream, list[Event]] = {}
        self._done: dict[Stream, int] = {}
        super().__init__(**more)

    @property
    def events(self) -> list[Event]:
        """Of all connections, in the order of their beginning. The thread of a connection that has
        ended may still decode what it has read while the next one sends.
        """
        return [event for stream in list(self.connections) for event in self._events.get(stream, ())]

    def took(self, stream: Stream) -> None:
        at = self._done.get(stream, 0)
        while True:
            try:
                message, at = unpack(stream.data, at)
            except Incomplete:
                break
            self._done[stream] = at
            self._store(stream, message)
        # what is decoded need not be kept
        del stream.data[: self._done.get(stream, 0)]
        self._done[stream] = 0

    def _store(self, stream: Stream, message: Any) -> None:
        tag, entries, options = message
        assert options["size"] == len(entries)
        self.options.append(options)
        events = [Event(tag, time, record) for time, record in entries]
        self.store(stream, events)
        if chunk := options.get("chunk"):
            self._acknowledge(stream, chunk)

    def store(self, stream: Stream, events: list[Event]) -> None:
        """Before the acknowledgement."""
        self._events.setdefault(stream, []).extend(events)

    def _acknowledge(self, stream: Stream, chunk: str) -> None:
        good = b"\x81\xa3ack" + bytes([0xA0 | len(chunk)]) + chunk.encode()
        if self.answer == "late":
            time.sleep(self.delay)
        answers = {
            "at once": good,
            "late": good,
            "never": b"",
            "garbage": b"HTTP/1.1 400 Bad Request\r\n\r\n",
            "half": good[: len(good) // 2],
            "other": b"\x81\xa3ack\xa5other",
        }
        if answer := answers[self.answer]:
            stream.peer.sendall(answer)
