"""Amazon CloudWatch Logs. Its requests and credentials are in `logs/cloudwatch.py`.

A batch (PutLogEvents) has events of one stream, so of one feed. A feed has one batch on the way,
hence its events arrive in order. Lines wait in the spool, not in memory, until the interval of
`awslogs-force-flush-interval-seconds` is over or there is enough for a full batch; only then a
batch is read, and sent at once.

An entry is an event, except that parts of long lines are joined up to the limit of an event, and
that `awslogs-multiline-pattern` joins lines: a line that it matches begins an event. An event that
may continue is left in the spool: the feed returns to its beginning. It is sent when it is older
than the interval, or when the container has ended. The pattern is RE2's, as Docker's is Go's, and
takes linear time. It searches the text as UTF-8 without decoding it.

Lines that the service refuses, because they are too old or too new, count as lost. A stream that
cannot be written, for want of its group or of a permission, waits by itself, so that other streams
go on.

Docker's `awslogs-max-buffered-events` limits memory that is not needed here, and has no effect.

Memory: aiohttp, 10 MB, and botocore, 9 MB; batches on the way, up to `ON_THE_WAY`.

Owns:    the connections.
Threads: the event loop's; botocore asks for credentials in others.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from engine._fast import wireform
from engine._fast.wireform import Form
from engine.common import patterns
from engine.logs import cloudwatch
from engine.logs.cloudwatch import CloudWatchLogs, ServiceError
from engine.logs.deliveries import Awslogs, Delivery
from engine.shipper.destination import TURN, Mark, Owner, back_off
from engine.shipper.feed import Entry, Feed, Formed, Position, State
from engine.shipper.senders.requests import RequestDestination

_log = logging.getLogger(__name__)

# Limits of PutLogEvents. An event counts with the bytes of its text in UTF-8, and these more.
EVENT_OVERHEAD = 26
EVENT_MAX = 262_144 - EVENT_OVERHEAD
BATCH_MAX = 1_048_576
BATCH_EVENTS = 10_000
BATCH_SPAN = 24 * 60 * 60 * 1000
"""Milliseconds between the first and the last event."""

ROOM = BATCH_MAX - (100 << 10)
"""Bytes of a batch at which no more is read. A message may be 100 KiB of JSON."""
FULL = BATCH_MAX
"""Bytes in the spool for which the interval is not awaited."""
REQUESTS = 16
ON_THE_WAY = 2 << 20
"""Bytes of batches on the way at which no more is read."""
TOKENS = 3
"""Attempts with the sequence token that the service expects."""
PART = (16 << 10) - 3
"""Bytes of the shortest entry that the next one of its stream continues."""

_HEAD = b'{"timestamp":'
_FRAME = len(_HEAD + b',"message":""},') + 13
"""Bytes of an event without its text."""
_DIGITS = slice(len(_HEAD), len(_HEAD) + 13)
_MILLISECOND = 1_000_000


class Event(NamedTuple):
    """`time`: milliseconds since the epoch. `begin`, `end`: the numbers of its first and its last
    entry."""

    time: int
    text: bytes
    begin: int
    end: int


class _Part(NamedTuple):
    time: int
    text: bytes
    begin: int


class Joiner:
    """Joins entries to events: parts to lines, and lines by a pattern. Entries are numbered."""

    def __init__(self, pattern: Any = None) -> None:
        """`pattern`: has `search`. A line that it finds something in begins an event."""
        self._pattern = pattern
        self._parts: dict[int, _Part] = {}
        """Lines without their end, by stream."""
        self._lines: list[bytes] = []
        self._size = 0
        self._time = self._begin = self._end = 0

    def add(self, number: int, entry: Entry) -> list[Event]:
        """The events that end before or with this entry."""
        at, text, begin = entry.time // _MILLISECOND, entry.text, number
        found: list[Event] = []
        if (part := self._parts.pop(entry.stream, None)) is not None:
            if len(part.text) + len(text) > EVENT_MAX:
                found = self._line(*part, number - 1)
            else:
                at, text, begin = part.time, part.text + text, part.begin
        if not entry.ended and len(entry.text) >= PART:
            self._parts[entry.stream] = _Part(at, text, begin)
            return found
        return found + self._line(at, text, begin, number)

    def _line(self, at: int, text: bytes, begin: int, end: int) -> list[Event]:
        if self._pattern is None:
            return split(Event(at, text, begin, end))
        found: list[Event] = []
        if self._lines and (self._size + len(text) > EVENT_MAX or self._pattern.search(text)):
            found = self._event()
        if not self._lines:
            self._time, self._begin = at, begin
        self._lines.append(text)
        self._size += len(text) + 1
        self._begin, self._end = min(self._begin, begin), end
        return found

    def _event(self) -> list[Event]:
        text = b"\n".join((*self._lines, b""))
        self._lines, self._size = [], 0
        return split(Event(self._time, text, self._begin, self._end))

    def flush(self, number: int) -> list[Event]:
        """Events of what may continue, as it is. `number`: of the next entry."""
        parts, self._parts = sorted(self._parts.values(), key=lambda part: part.begin), {}
        found = [event for part in parts for event in self._line(*part, number - 1)]
        return found + self._event() if self._lines else found

    @property
    def pending(self) -> int | None:
        """The number of the first entry of what may continue."""
        begins = [part.begin for part in self._parts.values()]
        if self._lines:
            begins.append(self._begin)
        return min(begins, default=None)

    @property
    def since(self) -> int:
        """The time of what may continue, in milliseconds since the epoch."""
        return min([part.time for part in self._parts.values()] + [self._time] * bool(self._lines), default=0)


def split(event: Event) -> list[Event]:
    """An event in pieces of at most `EVENT_MAX` bytes that end after a character. None for one
    without text, which the service refuses."""
    text = event.text
    if len(text) <= EVENT_MAX:
        return [event] if text else []
    pieces = []
    begin = 0
    while begin < len(text):
        end = most = min(begin + EVENT_MAX, len(text))
        while most - 3 < end < len(text) and text[end] & 0xC0 == 0x80:
            end -= 1
        pieces.append(event._replace(text=text[begin:end]))
        begin = end
    return pieces


class LogEvent(msgspec.Struct):
    timestamp: int
    message: str


class Request(NamedTuple):
    """Events of one PutLogEvents.

    `wire`: as JSON, with a comma after each. `events`: their number.
    """

    wire: bytes
    events: int


class Batch:
    """Events of a feed: for one request, unless clocks or lines are unusual."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.count = 0
        self.size = 0
        """As the limit counts, or more."""
        self.ordered = True
        self.first = self.last = 0
        """Times in milliseconds, if `ordered`."""
        self.later = False
        """An event that may continue was left."""

    @property
    def room(self) -> int:
        """Bytes of JSON that can be added, 0 or less if the batch is full. An event takes at least
        `_FRAME` of them."""
        return min(ROOM - self.size, (BATCH_EVENTS - 100 - self.count) * _FRAME)

    def add_formed(self, formed: Formed) -> bool:
        """False: there may be a part of a line among the messages, which is not added then."""
        wire, ends = formed.wire, formed.ends
        begins = [0, *ends[:-1]]
        times = [wire[begin + _DIGITS.start : begin + _DIGITS.stop] for begin in begins]
        if max(map(int.__sub__, ends, begins)) >= PART + _FRAME:
            return False
        self._add(wire, len(ends), len(wire), times)
        return True

    def add_events(self, events: Sequence[Event]) -> None:
        parts = [_JSON % (each.time, msgspec.json.encode(each.text.decode(errors="replace"))) for each in events]
        size = sum(map(len, (each.text for each in events))) + EVENT_OVERHEAD * len(events)
        self._add(b"".join(parts), len(events), size, [b"%013d" % each.time for each in events])

    def _add(self, wire: bytes, count: int, size: int, times: list[bytes]) -> None:
        """`times`: thirteen digits each, unless a clock is wrong by centuries."""
        first, last = times[0], times[-1]
        if not (first.isdigit() and last.isdigit() and times == sorted(times)):
            self.ordered = False
        if self.ordered:
            self.ordered = not self.parts or int(first) >= self.last
            self.first, self.last = self.first if self.parts else int(first), int(last)
        self.parts.append(wire)
        self.count += count
        self.size += size

    def requests(self) -> list[Request]:
        """Requests that the service accepts: within its limits, and in the order of time. The batch
        has no events afterwards."""
        wire = b"".join(self.parts)
        self.parts.clear()
        within = self.size <= BATCH_MAX and self.count <= BATCH_EVENTS
        if self.ordered and within and self.last - self.first <= BATCH_SPAN:
            return [Request(wire, self.count)]
        events = _events.decode(b"[%b]" % wire[:-1])
        events.sort(key=lambda event: event.timestamp)
        return [encoded(each) for each in packed(events)]


_JSON = b'{"timestamp":%d,"message":%b},'
_events = msgspec.json.Decoder(list[LogEvent])


def packed(events: Iterable[LogEvent]) -> Iterable[list[LogEvent]]:
    """Events in the order of time, in runs that are within the limits of a request."""
    run: list[LogEvent] = []
    size = 0
    for event in events:
        more = len(event.message.encode()) + EVENT_OVERHEAD
        if run and (
            size + more > BATCH_MAX or len(run) == BATCH_EVENTS or event.timestamp - run[0].timestamp > BATCH_SPAN
        ):
            yield run
            run, size = [], 0
        run.append(event)
        size += more
    if run:
        yield run


def encoded(events: Sequence[LogEvent]) -> Request:
    return Request(msgspec.json.encode(events)[1:-1] + b",", len(events))


def halves(request: Request) -> tuple[Request, Request]:
    events = _events.decode(b"[%b]" % request.wire[:-1])
    half = len(events) // 2
    return encoded(events[:half]), encoded(events[half:])


def rejected(answer: dict[str, Any], count: int) -> int:
    """How many of the events that were sent the service has refused: `rejectedLogEventsInfo`. They
    are the first and the last ones, as events are in the order of time."""
    info = answer.get("rejectedLogEventsInfo")
    if not isinstance(info, dict):
        return 0
    old = max(info.get("tooOldLogEventEndIndex") or 0, info.get("expiredLogEventEndIndex") or 0)
    new = info.get("tooNewLogEventStartIndex")
    return min(count, old + (count - new if new is not None else 0))


def gather(feed: Feed, pattern: Any, stale: int, now: int) -> Batch:
    """Read a batch of a feed, up to where an event begins.

    An event that may continue is left in the spool if it began within the last `stale` milliseconds
    and the container runs. `now`: the time in milliseconds.
    """
    batch = Batch()
    while pattern is None and batch.room > 0:
        before = feed.mark()
        formed = feed.format(min(TURN, batch.room))
        if formed is None:
            return batch
        if formed.messages and not batch.add_formed(formed):
            feed.rollback(before)
            break
    if batch.room > 0:
        _join(feed, batch, Joiner(pattern), stale, now)
    return batch


def _join(feed: Feed, batch: Batch, joiner: Joiner, stale: int, now: int) -> None:
    """Add the events of entries that must be joined."""
    events: list[Event] = []
    marks: list[tuple[int, tuple[Position, State]]] = []
    """Where each turn began: the number of its first entry, and the position."""
    number = size = 0
    at_end = False
    while size < ROOM - batch.size and len(events) < BATCH_EVENTS - batch.count:
        before, known = feed.mark(), len(events)
        entries = feed.take(TURN)
        if entries is None:
            at_end = True
            break
        # That lines are missing here is an entry which is not in the spool, and an event by itself.
        notice = bool(entries) and feed.mark()[0] == before[0]
        if notice:
            events += joiner.flush(number)
        marks.append((number, before))
        for entry in entries:
            events += joiner.add(number, entry)
            number += 1
        if notice:
            events += joiner.flush(number)
        size += sum([len(event.text) + EVENT_OVERHEAD for event in events[known:]])
    begin = joiner.pending
    if begin is not None:
        if at_end and (feed.slot < 0 or not 0 <= now - joiner.since < stale):
            events += joiner.flush(number)
        else:
            whole = list(events)
            while whole and whole[-1].end >= begin:
                begin = min(begin, whole.pop().begin)
            if whole or batch.count or at_end:
                _return(feed, marks, begin)
                events = whole
                batch.later = at_end
            else:  # it takes a whole batch, with what came meanwhile
                events += joiner.flush(number)
    if events:
        batch.add_events(events)


def _return(feed: Feed, marks: list[tuple[int, tuple[Position, State]]], number: int) -> None:
    """Read again from that entry."""
    first, mark = next(each for each in reversed(marks) if each[0] <= number)
    feed.rollback(mark)
    for _ in range(first, number):
        feed.take(0)


def compiled(expression: str) -> Any:
    """The pattern of `awslogs-multiline-pattern`; None if there is none. The options were checked,
    so one that RE2 does not have is of another version of the engine: lines are not joined."""
    try:
        return patterns.compiled(expression) if expression else None
    except ValueError as error:
        _log.error("awslogs-multiline-pattern %r: %s", expression, error)
        return None


class Stream:
    """What is known of a feed's stream in CloudWatch."""

    __slots__ = ("attempts", "busy", "due", "error", "until", "waiting")

    def __init__(self) -> None:
        self.busy = False
        """A batch is on the way."""
        self.waiting = False
        """It waits in `CloudWatch._now`."""
        self.due = 0.0
        """When to read the feed, by the monotonic clock; 0 if it has nothing."""
        self.until = 0.0
        """No attempt before that time."""
        self.attempts = 0
        self.error = ""


class CloudWatch(RequestDestination):
    """The streams of a region."""

    def __init__(self, owner: Owner, document: Delivery) -> None:
        super().__init__(owner, document)
        assert isinstance(document.target, Awslogs)
        self._service = CloudWatchLogs(document.target)
        self._streams: dict[Feed, Stream] = {}
        self._now: deque[Feed] = deque()
        """Feeds to read, in turn."""
        self._due: list[tuple[float, int, Feed]] = []
        """A heap of times to read feeds. Those that differ from `Stream.due` have no effect."""
        self._count = 0
        self._tokens: dict[tuple[str, str], str] = {}
        """Sequence tokens, which only other implementations of the service require."""
        self._size = 0

    def form(self, document: Delivery) -> Form:
        return form()

    def add(self, feed: Feed) -> None:
        self._streams[feed] = Stream()
        super().add(feed)

    def remove(self, feed: Feed) -> None:
        super().remove(feed)
        self._streams.pop(feed, None)

    def trouble(self, feed: Feed) -> str:
        stream = self._streams.get(feed)
        return (stream.error if stream is not None else "") or self.error

    async def open(self) -> None:
        await self._service.open()

    async def close(self) -> None:
        await self.abandon_requests()
        self._size = 0
        self._now.clear()
        self._due.clear()
        for feed, stream in self._streams.items():
            if stream.waiting or stream.due:
                self.notify(feed)
            stream.busy = stream.waiting = False
            stream.due = 0.0
        await self._service.close()

    async def pass_on(self) -> None:
        while True:
            await self.check()
            self._admit(time.monotonic())
            if self._now and not self.ending and self.requests < REQUESTS and self._size < ON_THE_WAY:
                feed = self._now.popleft()
                if (stream := self._streams.get(feed)) is not None:
                    self._begin(feed, stream)
                    await asyncio.sleep(0)  # other destinations' turn
            else:
                await self.wait_for_change(max(0.0, self._due[0][0] - time.monotonic()) if self._due else None)

    # --- when a feed is read ----------------------------------------------------------------------

    def _admit(self, now: float) -> None:
        """Sort the feeds that have something into those to read now, and those to read later."""
        while (feed := self.next_feed()) is not None:
            stream = self._streams[feed]
            if stream.busy or stream.waiting:
                continue
            if now >= stream.until and (feed.slot < 0 or feed.written - feed.at.bytes >= FULL):
                self._read_now(feed, stream)
            elif not stream.due:
                self._read_later(feed, stream, now)
        while self._due and self._due[0][0] <= now:
            due, _, feed = heapq.heappop(self._due)
            known = self._streams.get(feed)
            if known is not None and known.due == due:
                self._read_now(feed, known)

    def _read_now(self, feed: Feed, stream: Stream) -> None:
        stream.waiting, stream.due = True, 0.0
        self._now.append(feed)

    def _read_later(self, feed: Feed, stream: Stream, now: float) -> None:
        wait = 0.0 if feed.slot < 0 else target_of(feed).flush_interval
        stream.due = max(now + wait, stream.until)
        self._count += 1
        heapq.heappush(self._due, (stream.due, self._count, feed))

    def _begin(self, feed: Feed, stream: Stream) -> None:
        """Read a batch and send it."""
        stream.waiting = False
        target = target_of(feed)
        batch = gather(feed, compiled(target.multiline), target.flush_interval * 1000, time.time_ns() // _MILLISECOND)
        if batch.count:
            stream.busy = True
            self._size += batch.size
            feed.rest()
            self.spawn(self._deliver(feed, stream, batch, self.on_the_way(feed)))
            return
        if not self.has_marks(feed):  # entries of which nothing is sent
            feed.acknowledge(*feed.mark())
        self._go_on(feed, stream, batch)

    def _go_on(self, feed: Feed, stream: Stream, batch: Batch) -> None:
        """Read the feed again if there is more in it."""
        if batch.later:
            self._read_later(feed, stream, time.monotonic())
        elif not feed.drained:
            self.notify(feed)
        else:
            feed.idle()

    # --- requests ---------------------------------------------------------------------------------

    async def _deliver(self, feed: Feed, stream: Stream, batch: Batch, mark: Mark) -> None:
        target = target_of(feed)
        refused = 0
        try:
            requests = batch.requests()
            while requests:
                refused += await self._put(target, requests.pop(0))
        except ServiceError as error:
            if of_service(error):
                raise
            self._stream_failed(feed, stream, error)
        else:
            stream.attempts, stream.until = 0, 0.0
            if stream.error:
                stream.error = ""
                _log.warning("awslogs %s %s: reached again", target.group, target.stream)
            if refused:
                self.drop(feed, refused, "too old or too new, or not valid")
            self.settled(mark)
            stream.busy = False
            if self._streams.get(feed) is stream:
                self._go_on(feed, stream, batch)
        self._size -= batch.size

    def _stream_failed(self, feed: Feed, stream: Stream, error: ServiceError) -> None:
        """The feed waits, and is read again from what is acknowledged."""
        stream.busy = False
        stream.attempts += 1
        now = time.monotonic()
        stream.until = now + back_off(stream.attempts)
        text = error.strerror or error.code
        if stream.error != text:
            stream.error = text
            target = target_of(feed)
            _log.warning("awslogs %s %s: %s", target.group, target.stream, text)
        if self._streams.get(feed) is stream:
            self._marked.pop(feed, None)
            feed.rollback()
            self._read_later(feed, stream, now)

    async def _put(self, target: Awslogs, request: Request) -> int:
        """Send events. Returns how many of them the service has refused."""
        name = target.group, target.stream
        tokens, created = 0, False
        while True:
            try:
                answer = await self._service.call("PutLogEvents", self._body(name, request))
            except ServiceError as error:
                expected = error.details.get("expectedSequenceToken")
                if error.code in (cloudwatch.INVALID_TOKEN, cloudwatch.ALREADY_ACCEPTED):
                    if isinstance(expected, str):
                        self._tokens[name] = expected
                    else:
                        self._tokens.pop(name, None)
                    if error.code == cloudwatch.ALREADY_ACCEPTED:
                        return 0
                    tokens += 1
                    if tokens < TOKENS:
                        continue
                elif error.code == cloudwatch.NOT_FOUND and target.create_stream and not created:
                    self._tokens.pop(name, None)
                    await self._service.create(*name, with_group=target.create_group)
                    created = True
                    continue
                elif refuses_events(error):
                    if request.events == 1:
                        return 1
                    first, second = halves(request)
                    return await self._put(target, first) + await self._put(target, second)
                raise
            if isinstance(token := answer.get("nextSequenceToken"), str):
                self._tokens[name] = token
            return rejected(answer, request.events)

    def _body(self, name: tuple[str, str], request: Request) -> bytes:
        members = {"logGroupName": name[0], "logStreamName": name[1]}
        if token := self._tokens.get(name):
            members["sequenceToken"] = token
        return b"".join((msgspec.json.encode(members)[:-1], b',"logEvents":[', memoryview(request.wire)[:-1], b"]}"))


def form() -> Form:
    """Events as JSON, with a comma after each. They end where `ends` says."""
    return Form(
        text=wireform.JSON,
        time=wireform.MILLIS,
        frame=wireform.DATAGRAM,
        head=(_HEAD, _HEAD),
        middle=(b',"message":"', b',"message":"'),
        tail=(b'"},', b'"},'),
        skip_empty=True,
    )


def target_of(feed: Feed) -> Awslogs:
    target = feed.document.target
    assert isinstance(target, Awslogs)
    return target


def of_service(error: ServiceError) -> bool:
    """True if all streams have this error."""
    return not error.code or error.status >= 500 or error.code in cloudwatch.UNAUTHENTIC


def refuses_events(error: ServiceError) -> bool:
    """True if the service refuses the events of a request, not its stream."""
    if error.code != cloudwatch.INVALID_PARAMETER:
        return error.status == 413
    return not any(name in str(error.strerror) for name in ("logGroupName", "logStreamName"))
