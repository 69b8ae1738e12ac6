"""Fluentd's Forward protocol, version 1 (Forward-Protocol-Specification-v1 in the wiki of Fluentd).

A message is [tag, [[time, record]…], options] in MessagePack, one per turn of a feed. With
`fluentd-request-ack` its options have the id of the chunk, and the server answers {"ack": id} when
it has taken the chunk over. Without, delivery is that of `streams.py`.

Owns:    the connection.
Threads: the event loop's.
"""

from __future__ import annotations

import base64
import secrets
import time
from collections import OrderedDict

import msgspec

from engine._fast.wireform import Form
from engine.logs import dial
from engine.logs.deliveries import Delivery, Fluentd, Tls
from engine.shipper import forms
from engine.shipper.destination import Mark, Owner, Refused
from engine.shipper.feed import Feed, Formed
from engine.shipper.senders.streams import Connection, StreamDestination

CHUNKS = 32
"""Chunks that may be without acknowledgement at a time."""
ACK_PATIENCE = 60.0
"""Seconds until a missing acknowledgement ends the connection, unless `fluentd-read-timeout` says
otherwise."""
_ANSWER_LONGEST = 4096


class _Chunk:
    """A message that waits for its answer, or entries of which nothing is sent, which are `done`
    but must wait for those before them.
    """

    __slots__ = ("done", "mark", "sent")

    def __init__(self, mark: Mark, *, done: bool) -> None:
        self.mark: Mark | None = mark
        """None: its feed has left this destination."""
        self.done = done
        self.sent = time.monotonic()


class FluentdStream(StreamDestination):
    """A Fluentd server, or Fluent Bit's input `forward`."""

    def __init__(self, owner: Owner, document: Delivery) -> None:
        super().__init__(owner, document)
        assert isinstance(document.target, Fluentd)
        self._fluentd = document.target
        self._first_pause = max(0.1, min(document.target.retry_wait, 30.0))
        self._patience = document.target.write_timeout or None
        self._chunks: OrderedDict[str, _Chunk] = OrderedDict()
        self._chunk = ""

    def form(self, document: Delivery) -> Form:
        assert isinstance(document.target, Fluentd)
        return forms.fluentd(document, document.target)

    async def dial(self) -> Connection:
        target = self._fluentd
        self._chunks.clear()
        if target.scheme == "unix":
            return await dial.stream(self.new_connection, target.path)
        return await dial.tcp(self.new_connection, target.host, target.port, Tls() if target.scheme == "tls" else None)

    def wrap(self, feed: Feed, formed: Formed) -> bytes:
        tag = msgspec.msgpack.encode(feed.document.tag)
        start = b"\x93%b\xdd%b" % (tag, formed.messages.to_bytes(4, "big"))
        options = {"size": formed.messages}
        if not self._fluentd.request_ack:
            return start + formed.wire + msgspec.msgpack.encode(options)
        self._chunk = base64.b64encode(secrets.token_bytes(16)).decode()
        return start + formed.wire + msgspec.msgpack.encode({**options, "chunk": self._chunk})

    def may_send(self) -> bool:
        return len(self._chunks) < CHUNKS and not (self._fluentd.request_ack and self._is_due())

    def _is_due(self) -> bool:
        """The connection has the age at which `fluentd-async-reconnect-interval` wants another
        one, perhaps to another address of the name."""
        interval = self._fluentd.async_reconnect_interval
        return interval > 0 and time.monotonic() - self._opened >= interval

    def _renew(self, connection: Connection, now: float) -> None:
        """Turn the connection over when it is due and nothing lacks its acknowledgement."""
        if self._is_due() and not self._turning and not self._chunks:
            self._turning = now
            connection.end_writing()

    def sent_part(self, feed: Feed, formed: Formed) -> None:
        if not self._fluentd.request_ack:
            super().sent_part(feed, formed)
        else:
            self.sent(0, feed)
            name, self._chunk = self._chunk or secrets.token_hex(16), ""
            self._chunks[name] = _Chunk(self._marks.pop(), done=not formed.messages)

    def remove(self, feed: Feed) -> None:
        super().remove(feed)
        for chunk in self._chunks.values():
            if chunk.mark is not None and chunk.mark.feed is feed:
                chunk.mark = None

    def pending(self) -> bool:
        return bool(self._chunks) or super().pending()

    def look(self, connection: Connection, now: float) -> None:
        if not self._fluentd.request_ack:
            super().look(connection, now)
            self._renew(connection, now)
            return
        for each in answers(connection.received):
            if each in self._chunks:
                self._chunks[each].done = True
        while self._chunks:
            name, chunk = next(iter(self._chunks.items()))
            if not chunk.done:
                patience = self._fluentd.read_timeout or ACK_PATIENCE
                if now - chunk.sent > patience:
                    raise TimeoutError(f"no acknowledgement of a chunk within {patience:g} s")
                break
            del self._chunks[name]
            if chunk.mark is not None:
                self.settled(chunk.mark)
        self._renew(connection, now)

    async def close(self) -> None:
        self._chunks.clear()
        await super().close()


def answers(received: bytearray) -> list[str]:
    """The ids in complete answers {"ack": id}, which are removed from `received`.

    Raises Refused for anything else.
    """
    found: list[str] = []
    while received:
        try:
            size, chunk = _answer(received)
        except IndexError:  # incomplete
            if len(received) > _ANSWER_LONGEST:
                raise Refused("the answer to a chunk is too long") from None
            return found
        found.append(chunk)
        del received[:size]
    return found


def _answer(data: bytearray) -> tuple[int, str]:
    """Bytes of the first value in `data`, which is {"ack": id}, and the id. Raises IndexError when
    it is incomplete."""
    if data[0] & 0xF0 != 0x80:
        raise Refused("the answer to a chunk is no map")
    at, found = 1, ""
    for _ in range(data[0] & 0x0F):
        at, name = _text(data, at)
        at, value = _text(data, at)
        if name == "ack":
            found = value
    return at, found


def _text(data: bytearray, at: int) -> tuple[int, str]:
    """A MessagePack string or binary at `at`; its end and its text."""
    kind = data[at]
    widths = {0xD9: 1, 0xDA: 2, 0xDB: 4, 0xC4: 1, 0xC5: 2, 0xC6: 4}
    if kind & 0xE0 == 0xA0:
        size, begin = kind & 0x1F, at + 1
    elif kind in widths:
        begin = at + 1 + widths[kind]
        if begin > len(data):
            raise IndexError
        size = int.from_bytes(data[at + 1 : begin], "big")
    else:
        raise Refused("the answer to a chunk has something besides text")
    if begin + size > len(data):
        raise IndexError
    return begin + size, data[begin : begin + size].decode(errors="replace")
