"""Events, bodies, refusals and acknowledgements of the sender for Splunk, with a collector in
memory."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from isal import isal_zlib

from engine.logs import collector
from engine.logs.deliveries import Splunk
from engine.logs.web import Answer
from engine.shipper.feed import Entry
from engine.shipper.senders import splunk
from engine.shipper.senders.splunk import Event, JsonEvents, SplunkCollector, without_refused
from tests.support import PATIENCE
from tests.support.logs.receivers import documents
from tests.unit.shipper.feeds import Owner, Spool, document

URL = "https://hec.example:8088/services/collector/event/1.0"


def target(**more: Any) -> Splunk:
    return Splunk(**({"url": URL, "token": "t"} | more))


def answer(status: int = 200, body: Any = None, reason: str = "") -> Answer:
    return Answer(status, reason, {}, body if isinstance(body, bytes) else json.dumps(body or {}).encode())


# --- answers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "found"),
    [
        (URL, "https://hec.example:8088/services/collector/ack"),
        ("http://[::1]:8088/services/collector/event", "http://[::1]:8088/services/collector/ack"),
        ("http://h/splunk/services/collector/event/1.0?x=1", "http://h/splunk/services/collector/ack"),
        ("http://h/other", "http://h/services/collector/ack"),
        ("http://h", "http://h/services/collector/ack"),
    ],
)
def test_the_url_of_acknowledgements(url: str, found: str) -> None:
    assert collector.ack_url(url) == found


@pytest.mark.parametrize(
    ("status", "body", "refuses"),
    [
        (200, {"code": 0}, False),
        (400, {"text": "No data", "code": 5}, True),
        (400, {"text": "Invalid data format", "code": 6, "invalid-event-number": 3}, True),
        (400, {"text": "Incorrect index", "code": 7, "invalid-event-number": 0}, True),
        (400, {"text": "Event field is required", "code": 12}, True),
        (400, {"text": "Event field cannot be blank", "code": 13}, True),
        (400, {"text": "Error in handling indexed fields", "code": 15}, True),
        (400, {"text": "another", "code": 99, "invalid-event-number": 1}, True),
        (400, {"text": "Data channel is missing", "code": 10}, False),
        (400, {"text": "ACK is disabled", "code": 14}, False),
        (400, b"<html>", False),
        (401, {"text": "Token is required", "code": 2}, False),
        (403, {"text": "Invalid token", "code": 4}, False),
        (403, {"text": "Invalid data format", "code": 6}, False),
        (413, b"", True),
        (500, {"text": "Internal server error", "code": 8}, False),
        (503, {"text": "Server is busy", "code": 9}, False),
    ],
)
def test_refusals_of_events(status: int, body: Any, refuses: bool) -> None:
    assert collector.refuses_event(answer(status, body)) is refuses


@pytest.mark.parametrize(
    ("given_answer", "text"),
    [
        (answer(403, {"text": "Invalid token", "code": 4}, "Forbidden"), "403 Forbidden: Invalid token (code 4)"),
        (answer(502, b"<html>\n  Bad\tgateway</html>", "Bad Gateway"), "502 Bad Gateway: <html> Bad gateway</html>"),
        (answer(502, b"x" * 1000), "502: " + "x" * 150),
        (answer(500, b"\xff\xfe", "E"), "500 E: \ufffd\ufffd"),
        (answer(404, b"", "Not Found"), "404 Not Found"),
        (answer(307, b"there", "Temporary Redirect"), "307 Temporary Redirect: redirects are not followed"),
        (answer(400, b'{"code": "six", "text": 5}', "Bad"), '400 Bad: {"code": "six", "text": 5}'),
    ],
)
def test_reasons(given_answer: Answer, text: str) -> None:
    assert collector.reason(given_answer) == text


def test_levels_of_compression() -> None:
    """All of zlib's give a gzip member."""
    for level in range(-1, 10):
        packed = isal_zlib.compress(b"text" * 100, collector.gzip_level(level), 31)
        assert gzip.decompress(packed) == b"text" * 100


# --- refused events -------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def small_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few thousand lines take several requests."""
    monkeypatch.setattr(splunk, "EVENTS", 1000)


class Judge:
    """Refuses events, by their numbers."""

    def __init__(self, bad: set[int], *, numbered: bool = True, most: int = 1 << 30, code: int = 6) -> None:
        self.bad, self.numbered, self.most, self.code = bad, numbered, most, code

    def judge(self, numbers: Sequence[int]) -> Answer:
        if len(numbers) > self.most:
            return answer(413)
        for index, number in enumerate(numbers):
            if number in self.bad:
                more = {"invalid-event-number": index} if self.numbered else {}
                return answer(400, {"code": self.code, **more})
        return answer(200)


def delivered(count: int, judge: Judge, feeds: int = 1) -> tuple[list[int], int]:
    """The events that are accepted, in order, and how many are dropped."""
    left = [[Event(number % feeds, str(number).encode()) for number in range(count)]]  # type: ignore[arg-type]
    accepted: list[int] = []
    dropped = 0
    for _ in range(20 * count + 20):
        if not left:
            return accepted, dropped
        events = left.pop(0)
        numbers = [int(event.text) for event in events]
        said = judge.judge(numbers)
        if said.status == 200:
            accepted += numbers
        else:
            others, lost = without_refused(events, said)
            left[:0] = others
            dropped += sum(lost.values())
    raise AssertionError("it does not end")


@given(st.integers(1, 60), st.sets(st.integers(0, 59)), st.booleans())
def test_all_but_the_refused_events_are_delivered(count: int, bad: set[int], numbered: bool) -> None:
    accepted, dropped = delivered(count, Judge(bad, numbered=numbered))
    assert accepted == [number for number in range(count) if number not in bad]
    assert dropped == count - len(accepted)


@given(st.integers(1, 60), st.integers(0, 10))
def test_a_request_that_is_too_large_is_halved(count: int, most: int) -> None:
    accepted, dropped = delivered(count, Judge(set(), most=most))
    assert accepted == (list(range(count)) if most else [])
    assert dropped == count - len(accepted)


def test_an_incorrect_index_is_that_of_a_container() -> None:
    accepted, dropped = delivered(30, Judge({3}, code=collector.INCORRECT_INDEX), feeds=3)
    assert accepted == [number for number in range(30) if number % 3]
    assert dropped == 10


@pytest.mark.parametrize("number", [-1, 5, 1 << 40])
def test_a_number_that_no_event_has(number: int) -> None:
    events = [Event(0, b"") for _ in range(5)]  # type: ignore[arg-type]
    others, lost = without_refused(events, answer(400, {"code": 6, "invalid-event-number": number}))
    assert [len(each) for each in others] == [2, 3] and not lost


# --- format json ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "embedded"),
    [
        (b'{"a": 1}', {"a": 1}),
        (b' {"a" : [1, 2.5e3, null]}\t', {"a": [1, 2500.0, None]}),
        (b"[]", []),
        (b"12", 12),
        (b'"text"', "text"),
        (b"true", True),
        (b"null", None),
        (b"", ""),
        (b"plain", "plain"),
        (b"{'a': 1}", "{'a': 1}"),
        (b'{"a": 1} {"b": 2}', '{"a": 1} {"b": 2}'),
        (b'{"a": NaN}', '{"a": NaN}'),
        (b'{"a": 1,}', '{"a": 1,}'),
        (b'{"a": "\x01"}', '{"a": "\x01"}'),
        ("ü \U0001f600".encode(), "ü \U0001f600"),
        (b"[" * 20_000, "[" * 20_000),
        # Python 3.14 follows as many levels as the stack holds, older ones a thousand
        (b"[" * 1_000_000 + b"]" * 1_000_000, "[" * 1_000_000 + "]" * 1_000_000),
        (b"\xff", "\ufffd"),
    ],
)
def test_documents_are_embedded(line: bytes, embedded: Any) -> None:
    given_target = target(format="json", source="s")
    texts = JsonEvents(document(given_target, attributes={"a": "b"}), given_target)
    event = texts.event(Entry(2, 1_795_539_605_488_000_499, line, True))
    assert json.loads(event) == {
        "time": "1795539605.488000",
        "host": "box",
        "source": "s",
        "event": {"line": embedded, "source": "stderr", "tag": "tag1", "attrs": {"a": "b"}},
    }


@pytest.mark.parametrize(
    ("nanoseconds", "text"),
    [(0, "0.000000"), (499, "0.000000"), (500, "0.000001"), (1_999_999_500, "2.000000"), (1_000_001_000, "1.000001")],
)
def test_times_are_rounded_to_microseconds(nanoseconds: int, text: str) -> None:
    texts = JsonEvents(document(target()), target())
    assert json.loads(texts.event(Entry(1, nanoseconds, b"", True)))["time"] == text


def test_ends_of_events() -> None:
    texts = JsonEvents(document(target()), target())
    wire, ends = texts.events([Entry(1, 0, b"%d" % number, True) for number in range(10)])
    begins = [0, *ends[:-1]]
    lines = [json.loads(wire[begin:end])["event"]["line"] for begin, end in zip(begins, ends, strict=True)]
    assert lines == list(range(10))


# --- the sender -----------------------------------------------------------------------------------


class Collector:
    """A collector in memory, in place of its requests."""

    def __init__(self) -> None:
        self.posts: list[list[Any]] = []
        self.stored: dict[str, list[int]] = defaultdict(list)
        self.numbers = itertools.count()
        self.done: set[int] = set()
        self.at_once = True
        """It acknowledges everything that it has accepted."""
        self.plan: Callable[[int], Answer | Exception | None] = lambda number: None
        """An answer or a failure of the request with that number."""
        self.gate = asyncio.Event()
        self.gate.set()
        self.opened = 0
        self.under_way = self.most = 0

    async def open(self) -> None:
        self.opened += 1

    async def close(self) -> None:
        pass

    async def post(self, events: bytes) -> Answer:
        number = len(self.posts)
        found = list(documents(events.decode()))
        self.posts.append(found)
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            await self.gate.wait()
            await asyncio.sleep(0)
        finally:
            self.under_way -= 1
        planned = self.plan(number)
        if isinstance(planned, Exception):
            raise planned
        if planned is not None:
            return planned
        for event in found:
            self.stored[event["event"]["tag"]].append(int(event["event"]["line"]))
        identity = next(self.numbers)
        if self.at_once:
            self.done.add(identity)
        return answer(200, {"code": 0, "ackId": identity})

    async def acknowledged(self, ids: Sequence[int]) -> list[int]:
        return [number for number in ids if number in self.done]


class World:
    """A sender, its feeds and a collector, on a loop."""

    def __init__(self, base: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        self.base = base
        self.owner = Owner()
        self.collector = Collector()
        monkeypatch.setattr(splunk, "Collector", lambda target, limit: self.collector)
        self.target = target(**options)
        self.sender = SplunkCollector(self.owner, document(self.target))
        self.spools: list[Spool] = []

    def spool(self, count: int = 0) -> Spool:
        made = Spool(self.base, self.sender, document(self.target, len(self.spools) + 1))
        self.spools.append(made)
        if count:
            made.write(b"".join(b"%d\n" % number for number in range(count)))
        return made

    async def until(self, condition: Callable[[], Any]) -> None:
        end = time.monotonic() + 30 * PATIENCE
        while not condition():
            assert time.monotonic() < end
            await asyncio.sleep(0.001)

    @property
    def settled(self) -> bool:
        feeds = [spool.feed for spool in self.spools]
        return all(feed.acked.bytes == feed.written and not self.sender.has_marks(feed) for feed in feeds)

    async def close(self) -> None:
        await self.sender.end(orderly=False)
        for spool in self.spools:
            spool.close()


Body = Callable[[World], Any]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    monkeypatch.setattr(splunk, "POLL", 0.005)

    def running(body: Body, **options: Any) -> None:
        async def whole() -> None:
            world = World(tmp_path, monkeypatch, **options)
            try:
                async with asyncio.timeout(60):
                    await body(world)
            finally:
                await world.close()

        asyncio.run(whole())

    yield running


@pytest.mark.parametrize("acknowledged", [False, True])
@pytest.mark.parametrize("form", ["inline", "json"])
def test_everything_is_sent_once_in_order(run: Callable[..., None], form: str, acknowledged: bool) -> None:
    async def body(world: World) -> None:
        for _ in range(5):
            world.spool(3000)
        await world.until(lambda: world.settled)
        assert world.collector.stored == {f"tag{number}": list(range(3000)) for number in range(1, 6)}
        assert world.collector.most <= splunk.REQUESTS
        assert max(map(len, world.collector.posts)) <= (1000 if form == "inline" else 2100)

    run(body, format=form, index_acknowledgment=acknowledged)


def test_feeds_share_a_body(run: Callable[..., None]) -> None:
    async def body(world: World) -> None:
        for _ in range(20):
            world.spool(10)
        await world.until(lambda: world.settled)
        assert len(world.collector.posts) == 1

    run(body)


def test_lines_wait_while_requests_are_on_the_way(run: Callable[..., None]) -> None:
    """A feed has events in one request at a time, and there are `REQUESTS` at most."""

    async def body(world: World) -> None:
        world.collector.gate.clear()
        spools = [world.spool(1) for _ in range(10)]
        await world.until(lambda: world.collector.posts)
        for number in range(1, 50):
            for spool in spools:
                spool.write(b"%d\n" % number)
            await asyncio.sleep(0.001)
        others = [world.spool(1) for _ in range(10)]
        await world.until(lambda: world.collector.under_way == 2)
        world.collector.gate.set()
        await world.until(lambda: world.settled)
        assert world.collector.stored == {f"tag{number}": list(range(50)) for number in range(1, 11)} | {
            f"tag{number}": [0] for number in range(11, 21)
        }
        assert len(others) == 10 and len(world.collector.posts) == 3

    run(body)


def test_lines_of_which_nothing_is_sent(run: Callable[..., None]) -> None:
    """They are acknowledged without a request."""

    async def body(world: World) -> None:
        world.spool().write(b"\n  \n" * 1000)
        await world.until(lambda: world.settled)
        assert not world.collector.posts

    run(body, format="raw")


def test_a_failure_of_one_request(run: Callable[..., None]) -> None:
    """The others that are on the way are settled, and are not sent again."""

    async def body(world: World) -> None:
        world.collector.gate.clear()
        for _ in range(4):
            world.spool(1000)
            expected = len(world.spools)
            await world.until(lambda at=expected: world.collector.under_way == at)  # type: ignore[misc]
        world.collector.plan = lambda number: ConnectionResetError(104, "cut") if number == 1 else None
        world.collector.gate.set()
        await world.until(lambda: world.settled)
        assert world.collector.stored == {f"tag{number}": list(range(1000)) for number in range(1, 5)}
        assert len(world.collector.posts) == 5 and world.collector.opened == 2
        assert world.owner.changes == ["cut", ""]

    run(body)


@pytest.mark.parametrize("answers", [[503], [429, 503], [500, 401, 403, 404, 302]])
def test_refused_requests_are_sent_again(
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch, answers: list[int]
) -> None:
    monkeypatch.setattr("engine.shipper.destination.back_off", lambda attempts, first: 0.001)

    async def body(world: World) -> None:
        plan = {number: answer(status, {"text": "no", "code": 9}) for number, status in enumerate(answers)}
        world.collector.plan = plan.get
        world.spool(500)
        await world.until(lambda: world.settled)
        assert world.collector.stored == {"tag1": list(range(500))}
        assert world.owner.lines_lost == 0

    run(body)


def test_refused_events_are_counted_once(run: Callable[..., None]) -> None:
    """Also if the rest of their request fails afterwards."""

    async def body(world: World) -> None:
        refused = answer(400, {"code": 6, "invalid-event-number": 7})
        world.collector.plan = {0: refused, 1: answer(503), 2: refused}.get
        spool = world.spool(20)
        await world.until(lambda: world.settled)
        assert world.collector.stored["tag1"] == [number for number in range(20) if number != 7]
        assert world.owner.lines_lost == spool.feed.dropped_lines == 1

    run(body)


# --- acknowledgements -----------------------------------------------------------------------------


def test_nothing_is_settled_before_its_acknowledgement(run: Callable[..., None]) -> None:
    async def body(world: World) -> None:
        world.collector.at_once = False
        spool = world.spool(2500)
        await world.until(lambda: len(world.collector.stored["tag1"]) == 2500)
        await world.until(lambda: world.collector.under_way == 0)
        assert spool.feed.acked.bytes == 0 and world.sender.has_marks(spool.feed)
        assert len(world.collector.posts) == 3
        world.collector.done = {1, 2}  # not in order
        await world.until(lambda: len(world.sender._acks) == 1)
        assert spool.feed.acked.bytes == 0
        world.collector.done = {0}
        await world.until(lambda: world.settled)
        assert spool.feed.acked.lines == 2500

    run(body, index_acknowledgment=True)


def test_feeds_are_settled_by_themselves(run: Callable[..., None]) -> None:
    """An acknowledgement that is missing holds up the feeds of its request alone."""

    async def body(world: World) -> None:
        world.collector.at_once = False
        first = world.spool(10)
        await world.until(lambda: len(world.collector.posts) == 1)
        second = world.spool(10)
        await world.until(lambda: len(world.collector.posts) == 2)
        world.collector.done = {1}
        await world.until(lambda: second.feed.acked.lines == 10)
        assert first.feed.acked.lines == 0

    run(body, index_acknowledgment=True)


def test_a_missing_acknowledgement(run: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """After the patience everything without one is sent again."""
    monkeypatch.setattr(splunk, "ACK_PATIENCE", 0.05)

    async def body(world: World) -> None:
        world.collector.at_once = False
        spool = world.spool(10)
        await world.until(lambda: world.sender.error)
        assert world.sender.error == "no acknowledgement of the indexer within 0.05 s"
        assert spool.feed.acked.bytes == 0
        world.collector.at_once = True
        await world.until(lambda: world.settled)
        stored = world.collector.stored["tag1"]
        assert len(stored) >= 20 and stored == list(range(10)) * (len(stored) // 10)

    run(body, index_acknowledgment=True)


def test_a_refused_event_among_acknowledgements(run: Callable[..., None]) -> None:
    """Each request that its others need has an acknowledgement of its own."""

    async def body(world: World) -> None:
        world.collector.at_once = False
        world.collector.plan = {0: answer(413), 2: answer(400, {"code": 6, "invalid-event-number": 0})}.get
        spool = world.spool(10)
        await world.until(lambda: len(world.sender._acks) == 2)
        world.collector.done = {0}
        await world.until(lambda: len(world.sender._acks) == 1)
        assert spool.feed.acked.lines == 0 and world.owner.lines_lost == 0
        world.collector.done = {1}
        await world.until(lambda: world.settled)
        assert world.collector.stored["tag1"] == [0, 1, 2, 3, 4, 6, 7, 8, 9]
        assert world.owner.lines_lost == 1

    run(body, index_acknowledgment=True)


def test_a_collector_that_gives_none(run: Callable[..., None]) -> None:
    async def body(world: World) -> None:
        world.collector.plan = lambda number: answer(200, {"code": 0})
        spool = world.spool(10)
        await world.until(lambda: world.sender.error)
        assert "acknowledgements" in world.sender.error and spool.feed.acked.bytes == 0

    run(body, index_acknowledgment=True)


def test_a_feed_that_is_removed_meanwhile(run: Callable[..., None]) -> None:
    async def body(world: World) -> None:
        world.collector.gate.clear()
        gone, stays = world.spool(10), world.spool(10)
        await world.until(lambda: world.collector.under_way)
        world.sender.remove(gone.feed)
        gone.feed.close()
        world.collector.gate.set()
        await world.until(lambda: stays.feed.acked.lines == 10)
        assert gone.feed.acked.lines == 0
        assert not world.sender._bodies and not world.sender._busy

    run(body, index_acknowledgment=True)


@given(st.data())
def test_acknowledgements_in_any_order(data: st.DataObject) -> None:
    """A feed's position is never beyond a body without an acknowledgement, and is at the end when
    there is none."""

    class Owned(Owner):
        pass

    sender = SplunkCollector(Owned(), document(target(index_acknowledgment=True)))
    feeds: list[Any] = [_Feed(number) for number in range(3)]
    bodies = []
    for number in range(data.draw(st.integers(1, 8))):
        body = splunk.Body()
        for feed in data.draw(st.lists(st.sampled_from(feeds), min_size=1, unique=True)):
            feed.read += 1
            body.marks[feed] = _mark(feed)
            sender._marked[feed] = sender._marked.get(feed, 0) + 1
            sender._bodies.setdefault(feed, deque()).append(body)
        body.accepted = True
        body.acks = set(range(number * 10, number * 10 + data.draw(st.integers(1, 3))))
        bodies.append(body)
    order = data.draw(st.permutations([(body, ack) for body in bodies for ack in body.acks]))
    for body, ack in order:
        body.acks.discard(ack)
        sender._settle(body)
        for feed in feeds:
            open_bodies = [each for each in bodies if feed in each.marks and not each.done]
            limit = min((each.marks[feed].position for each in open_bodies), default=feed.read + 1)
            assert feed.acked < limit
    assert all(feed.acked == feed.read for feed in feeds)
    assert not sender._marked and not sender._bodies


class _Feed:
    def __init__(self, number: int) -> None:
        self.number = number
        self.read = self.acked = 0

    def acknowledge(self, position: int, state: object) -> None:
        assert position == self.acked + 1
        self.acked = position


def _mark(feed: Any) -> Any:
    return splunk.Mark(0, feed, feed.read, (0, 0, 0, 0))
