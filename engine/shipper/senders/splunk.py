"""Splunk's HTTP Event Collector (HEC). Its requests and answers are in `logs/collector.py`.

A body has events of several feeds, one after another. It is sent as soon as there are any, while
fewer than `REQUESTS` are on the way; what comes meanwhile goes into the next one. A feed has events
in one unanswered request at a time, so its events reach the collector in order.

Delivered is what the collector answers with 200. With `splunk-index-acknowledgment` it is what the
indexer has acknowledged (`/services/collector/ack`). Everything without an acknowledgement is sent
again when one is missing for too long, and on each new connection, with another channel.

A collector that refuses an event by itself would refuse it for ever. The others are sent again
without it, and it counts as lost. If the index is not allowed, these are all events of the
container in that request. Other refusals, those of the token for example, are states of the target:
nothing is lost, and it is tried again.

Memory: aiohttp, 10 MB; at most `REQUESTS` bodies.

Owns:    the connections, and the task that asks for acknowledgements.
Threads: the event loop's.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from engine._fast.wireform import Form
from engine.logs import collector
from engine.logs.collector import Collector
from engine.logs.deliveries import Delivery, Splunk
from engine.logs.web import Answer
from engine.shipper import forms
from engine.shipper.destination import TURN, Mark, Owner, Refused
from engine.shipper.feed import Entry, Feed
from engine.shipper.senders.requests import GRACE, RequestDestination

REQUESTS = 4
EVENTS = 5000
"""Most events of a request. A collector limits its bytes; Docker sends 1,000. Format json may
exceed it.
"""
BODY = 900_000
"""Bytes of a request at which no more is added, before compression. Collectors of early versions
take 1,000,000."""
POLL = 1.0
"""Seconds between queries of acknowledgements."""
POLLED = 1000
"""Most acknowledgements of one query."""
ACK_PATIENCE = 180.0
"""Seconds until a missing acknowledgement ends the connection. Indexers need tens of seconds."""

_SAMPLE = b'{"log":"x\\n","stream":"stdout","time":"2026-01-01T00:00:00.000000000Z"}\n'
_NANOSECONDS = 1_000_000_000


class Event(NamedTuple):
    feed: Feed
    text: bytes


class Piece(NamedTuple):
    """Events of one feed. `ends`: where each ends in `wire`."""

    feed: Feed
    wire: bytes
    ends: Sequence[int]

    def events(self) -> Iterable[Event]:
        begin = 0
        for end in self.ends:
            yield Event(self.feed, self.wire[begin:end])
            begin = end


class Body:
    """Events of one request, or of several after a refusal, and what they settle."""

    __slots__ = ("accepted", "acks", "events", "marks", "pieces", "refused", "size")

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.size = 0
        self.events = 0
        self.marks: dict[Feed, Mark] = {}
        self.accepted = False
        """Nothing of it must be sent again, if the acknowledgements come."""
        self.acks: set[int] = set()
        """Acknowledgements that are missing."""
        self.refused: dict[Feed, tuple[int, str]] = {}
        """Events that were dropped, and why."""

    @property
    def done(self) -> bool:
        return self.accepted and not self.acks

    def add(self, feed: Feed, wire: bytes, ends: Sequence[int]) -> None:
        self.pieces.append(Piece(feed, wire, ends))
        self.size += len(wire)
        self.events += len(ends)

    def drop(self, feed: Feed, events: int, why: str) -> None:
        before = self.refused.get(feed, (0, ""))[0]
        self.refused[feed] = before + events, why


class SplunkCollector(RequestDestination):
    """A collector, with one token."""

    def __init__(self, owner: Owner, document: Delivery) -> None:
        super().__init__(owner, document)
        assert isinstance(document.target, Splunk)
        self._splunk = document.target
        self._collector = Collector(self._splunk, limit=REQUESTS + 1)
        self._busy: set[Feed] = set()
        """Feeds with events in a request without an answer."""
        self._bodies: dict[Feed, deque[Body]] = {}
        """What is not settled, in order."""
        self._acks: dict[int, tuple[Body, float]] = {}
        """Acknowledgements that are missing, and since when, in order."""
        self._polling = asyncio.Event()
        self._json: dict[str, JsonEvents] = {}

    def form(self, document: Delivery) -> Form:
        target = document.target
        assert isinstance(target, Splunk)
        self._json.pop(document.id, None)
        if target.format == "json":
            self._json[document.id] = JsonEvents(document, target)
        return forms.splunk(document, target)

    def remove(self, feed: Feed) -> None:
        super().remove(feed)
        self._bodies.pop(feed, None)
        self._busy.discard(feed)
        self._json.pop(feed.document.id, None)

    async def open(self) -> None:
        self._collector = Collector(self._splunk, limit=REQUESTS + 1)
        await self._collector.open()

    async def close(self) -> None:
        await self.abandon_requests()
        self._busy.clear()
        self._bodies.clear()
        self._acks.clear()
        self._polling.clear()
        await self._collector.close()

    async def pass_on(self) -> None:
        if self._splunk.index_acknowledgment:
            self.spawn(self._poll(), beside=True)
        while True:
            await self.check()
            may_send = self.requests < REQUESTS and not self.ending
            body = self._gather() if may_send else None
            if body is not None:
                self.spawn(self._deliver(body))
            if body is not None or (may_send and self._ready):
                await asyncio.sleep(0)  # other destinations' turn
            else:
                await self.wait_for_change(None)

    # --- bodies -----------------------------------------------------------------------------------

    def _gather(self) -> Body | None:
        """The next body. None: no feed has anything to send."""
        body = Body()
        turns: deque[Feed] = deque()
        """Feeds that have had a turn and may have more."""
        read: list[Feed] = []
        while body.size < BODY and body.events < EVENTS:
            feed = self.next_feed()
            if feed is None:
                if not turns:
                    break
                feed = turns.popleft()
            elif feed in self._busy:
                continue  # it is notified again when that request is answered
            elif feed not in read:
                read.append(feed)
            if self._add(body, feed):
                turns.append(feed)
            else:
                feed.idle()
        filled = {piece.feed for piece in body.pieces}
        for feed in read:
            if feed in filled:
                body.marks[feed] = self.on_the_way(feed)
                self._bodies.setdefault(feed, deque()).append(body)
                self._busy.add(feed)
                feed.rest()
            else:
                if not self.has_marks(feed):  # entries of which nothing is sent
                    feed.acknowledge(*feed.mark())
                if not feed.drained:
                    self.notify(feed)
        return body if body.pieces else None

    def _add(self, body: Body, feed: Feed) -> bool:
        """Add events of a feed. False: it has no more."""
        room = min(TURN, BODY - body.size)
        if (texts := self._json.get(feed.document.id)) is not None:
            entries = feed.take(room)
            if entries is None:
                return False
            if entries:
                body.add(feed, *texts.events(entries))
        else:
            smallest = len(feed.form.format(_SAMPLE, 0, 0, 1)[0])
            formed = feed.format(min(room, (EVENTS - body.events) * smallest))
            if formed is None:
                return False
            if formed.messages:
                body.add(feed, formed.wire, formed.ends)
        return True

    # --- requests ---------------------------------------------------------------------------------

    async def _deliver(self, body: Body) -> None:
        """Send a body until the collector has accepted everything that it does not refuse."""
        answer = await self._collector.post(b"".join([piece.wire for piece in body.pieces]))
        if collector.refuses_event(answer):
            await self._deliver_others([event for piece in body.pieces for event in piece.events()], answer, body)
        else:
            self._accepted(body, answer)
        body.accepted = True
        for feed in body.marks:
            self._busy.discard(feed)
            if feed in self.feeds and not feed.drained:
                self.notify(feed)
        body.pieces.clear()
        self._settle(body)

    def _accepted(self, body: Body, answer: Answer) -> None:
        """Raises Refused if the collector does not take the request."""
        if answer.status != 200:
            raise Refused(collector.reason(answer))
        if not self._splunk.index_acknowledgment:
            return
        number = collector.code(answer).ack_id
        if number is None:
            raise Refused("the collector gives no acknowledgements: they are disabled for this token")
        body.acks.add(number)
        self._acks[number] = body, time.monotonic()
        self._polling.set()

    async def _deliver_others(self, events: list[Event], answer: Answer, body: Body) -> None:
        """Send the events, of which the collector has refused at least one by that answer, without
        it."""
        left, lost = without_refused(events, answer)
        while True:
            for feed, count in lost.items():
                body.drop(feed, count, collector.reason(answer))
            lost = {}
            if not left:
                return
            events = left.pop(0)
            answer = await self._collector.post(b"".join([event.text for event in events]))
            if collector.refuses_event(answer):
                others, lost = without_refused(events, answer)
                left[:0] = others
            else:
                self._accepted(body, answer)

    def _settle(self, body: Body) -> None:
        """Settle what is done, of each feed in order."""
        if not body.done:
            return
        for feed in body.marks:
            waiting = self._bodies.get(feed)
            while waiting and waiting[0].done:
                first = waiting.popleft()
                if feed in first.refused:
                    self.drop(feed, *first.refused[feed])
                self.settled(first.marks[feed])
            if not waiting:
                self._bodies.pop(feed, None)

    # --- acknowledgements -------------------------------------------------------------------------

    async def _poll(self) -> None:
        """Ask for acknowledgements while some are missing."""
        while True:
            await self._polling.wait()
            await asyncio.sleep(POLL)
            missing = list(self._acks)
            for begin in range(0, len(missing), POLLED):
                for number in await self._collector.acknowledged(missing[begin : begin + POLLED]):
                    if (found := self._acks.pop(number, None)) is not None:
                        found[0].acks.discard(number)
                        self._settle(found[0])
            if not self._acks:
                self._polling.clear()
            elif time.monotonic() - next(iter(self._acks.values()))[1] > ACK_PATIENCE:
                raise TimeoutError(f"no acknowledgement of the indexer within {ACK_PATIENCE:g} s")

    async def finish(self) -> None:
        """Waits for acknowledgements too, for a moment."""
        await super().finish()
        end = time.monotonic() + GRACE
        while self._acks and self._failure is None and time.monotonic() < end:
            await self.wait_for_change(POLL / 10)


def without_refused(events: list[Event], answer: Answer) -> tuple[list[list[Event]], dict[Feed, int]]:
    """What to send instead of events of which the collector refuses at least one, in order, and how
    many events of which feeds are lost.

    Without the number of the refused event the events are halved until it is alone.
    """
    code = collector.code(answer)
    number = code.invalid_event_number
    if answer.status == collector.TOO_LARGE or number is None or not 0 <= number < len(events):
        if len(events) > 1:
            half = len(events) // 2
            return [events[:half], events[half:]], {}
        number = 0
    feed = events[number].feed
    if code.code == collector.INCORRECT_INDEX:
        others = [event for event in events if event.feed is not feed]
    else:
        others = events[:number] + events[number + 1 :]
    return [others] if others else [], {feed: len(events) - len(others)}


class JsonEvents:
    """Events of format json: a line that is a JSON document becomes a part of the event, any other
    a string in it."""

    def __init__(self, document: Delivery, target: Splunk) -> None:
        self._start, rest = forms.splunk_envelope(document, target)
        self._middle = rest + b',"event":{"line":'
        extra = forms.splunk_extra(document)
        self._ends = tuple(b',"source":"%b"%b}}' % (stream, extra) for stream in (b"stdout", b"stderr"))

    def events(self, entries: Iterable[Entry]) -> tuple[bytes, list[int]]:
        """The events, and where each ends."""
        parts: list[bytes] = []
        ends: list[int] = []
        size = 0
        for entry in entries:
            text = self.event(entry)
            parts.append(text)
            size += len(text)
            ends.append(size)
        return b"".join(parts), ends

    def event(self, entry: Entry) -> bytes:
        seconds, rest = divmod(entry.time + 500, _NANOSECONDS)
        line: bytes | msgspec.Raw
        try:
            line = _document.decode(entry.text)
        except (msgspec.DecodeError, RecursionError):
            line = msgspec.json.encode(entry.text.decode(errors="replace"))
        # a msgspec.Raw has the buffer of its text
        return b"".join((
            self._start, b"%d.%06d" % (seconds, rest // 1000), self._middle, line, self._ends[entry.stream - 1],
        ))  # fmt: skip


_document = msgspec.json.Decoder(msgspec.Raw)
