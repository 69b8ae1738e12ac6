"""Events, batches and refusals of the sender for CloudWatch Logs, over spools on disk, with a
service in memory."""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.common import patterns
from engine.logs import cloudwatch
from engine.logs.cloudwatch import ServiceError
from engine.logs.deliveries import Awslogs
from engine.shipper.destination import Destination
from engine.shipper.feed import Entry, Lost
from engine.shipper.senders import awslogs
from engine.shipper.senders.awslogs import (
    BATCH_EVENTS,
    BATCH_MAX,
    EVENT_MAX,
    Batch,
    CloudWatch,
    Event,
    Joiner,
    LogEvent,
    Request,
    encoded,
    gather,
    halves,
    packed,
    rejected,
    split,
)
from tests.support import PATIENCE
from tests.support.logs.receivers import not_valid
from tests.unit.shipper.feeds import Owner, Spool, document

DAY = 86_400_000
NOW = 1_795_539_605_488
PART = b"p" * (16 << 10)


def target(**more: Any) -> Awslogs:
    return Awslogs(**({"region": "eu-west-1", "group": "group", "stream": "stream"} | more))


def events_of(request: Request) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(b"[%b]" % request.wire[:-1])
    assert len(found) == request.events
    return found


def check(request: Request) -> None:
    """The service accepts it."""
    events = events_of(request)
    wrong = not_valid([each["timestamp"] for each in events], [len(each["message"].encode()) for each in events])
    assert not wrong, wrong


# --- events ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "sizes"),
    [
        (0, []),
        (1, [1]),
        (EVENT_MAX, [EVENT_MAX]),
        (EVENT_MAX + 1, [EVENT_MAX, 1]),
        (3 * EVENT_MAX, [EVENT_MAX] * 3),
        (1_000_000, [EVENT_MAX] * 3 + [1_000_000 - 3 * EVENT_MAX]),
    ],
)
def test_sizes_of_pieces(size: int, sizes: list[int]) -> None:
    assert [len(each.text) for each in split(Event(1, b"x" * size, 0, 0))] == sizes


@pytest.mark.parametrize("character", ["é", "€", "\U0001f600"])
@pytest.mark.parametrize("before", range(4))
def test_pieces_end_after_a_character(character: str, before: int) -> None:
    text = "x" * before + character * 200_000
    pieces = split(Event(1, text.encode(), 3, 4))
    assert "".join(each.text.decode() for each in pieces) == text
    assert all(EVENT_MAX - 4 < len(each.text) <= EVENT_MAX for each in pieces[:-1])
    assert {(each.time, each.begin, each.end) for each in pieces} == {(1, 3, 4)}


def test_text_that_is_no_utf8_is_split_too() -> None:
    pieces = split(Event(1, b"\x80" * (EVENT_MAX + 10), 0, 0))
    assert sum(len(each.text) for each in pieces) == EVENT_MAX + 10


def entry(text: bytes, at: int = 0, stream: int = 1, *, ended: bool = True) -> Entry:
    return Entry(stream, at * 1_000_000, text, ended)


def joined(entries: list[Entry], pattern: str = "") -> tuple[list[tuple[int, bytes]], int | None]:
    """The events, and where the rest begins."""
    joiner = Joiner(patterns.compiled(pattern) if pattern else None)
    found = [event for number, each in enumerate(entries) for event in joiner.add(number, each)]
    return [(event.time, event.text) for event in found], joiner.pending


JOINS: dict[str, tuple[str, list[Entry], list[tuple[int, bytes]], int | None]] = {
    "lines": ("", [entry(b"a", 1), entry(b"b", 2)], [(1, b"a"), (2, b"b")], None),
    "empty lines are no events": ("", [entry(b""), entry(b"b", 2)], [(2, b"b")], None),
    "parts": (
        "",
        [entry(PART, 1, ended=False), entry(PART, 2, ended=False), entry(b"end", 3), entry(b"x", 4)],
        [(1, PART + PART + b"end"), (4, b"x")],
        None,
    ),
    "a part without its end": ("", [entry(b"a", 1), entry(PART, 2, ended=False)], [(1, b"a")], 1),
    "a short rest at the end of a container": ("", [entry(b"a", 1, ended=False)], [(1, b"a")], None),
    "parts of both streams": (
        "",
        [entry(PART, 1, ended=False), entry(PART, 2, 2, ended=False), entry(b"e", 3, 2), entry(b"o", 4)],
        [(2, PART + b"e"), (1, PART + b"o")],
        None,
    ),
    "a part before lines of the other stream": (
        "",
        [entry(PART, 1, ended=False), entry(b"e", 2, 2)],
        [(2, b"e")],
        0,
    ),
    "parts up to the limit": (
        "",
        [entry(PART, number, ended=False) for number in range(16)] + [entry(b"end", 16)],
        [(0, PART * 15), (15, PART + b"end")],
        None,
    ),
    "a long line of parts": (
        "",
        [entry(PART, number, ended=False) for number in range(40)],
        [(0, PART * 15), (15, PART * 15)],
        30,
    ),
    "by a pattern": (
        "^>",
        [entry(b"> a", 1), entry(b"b", 2), entry(b"", 3), entry(b"> c", 4), entry(b"d", 5)],
        [(1, b"> a\nb\n\n")],
        3,
    ),
    "the first line need not match": ("^>", [entry(b"a", 1), entry(b"> b", 2)], [(1, b"a\n")], 1),
    "a pattern anywhere in a line": ("b+", [entry(b"a", 1), entry(b"abba", 2), entry(b"c", 3)], [(1, b"a\n")], 1),
    "a pattern over both streams": (
        "^>",
        [entry(b"> a", 1), entry(b"b", 2, 2), entry(b"> c", 3, 2)],
        [(1, b"> a\nb\n")],
        2,
    ),
    "a pattern in characters": ("^.é$", ["aé", "ab", "\U0001f600é", "aaé"], [], 0),
    "a pattern of ASCII": (r"^\w+$", ["a", "é", "b"], [], 0),
    "a pattern of a line of parts": (
        "z$",
        [entry(b"a", 0), entry(PART, 1, ended=False), entry(b"z", 2), entry(b"b", 3)],
        [(0, b"a\n")],
        1,
    ),
    "a pattern that never matches": (
        "^>",
        [entry(b"x" * 100_000, number) for number in range(5)],
        [(0, (b"x" * 100_000 + b"\n") * 2), (2, (b"x" * 100_000 + b"\n") * 2)],
        4,
    ),
    "a part among lines": (
        "^>",
        [entry(b"> a", 1), entry(PART, 2, ended=False), entry(b"> b", 3, 2)],
        [(1, b"> a\n")],
        1,
    ),
}


@pytest.mark.parametrize("name", JOINS)
def test_joins(name: str) -> None:
    pattern, given_entries, events, pending = JOINS[name]
    if isinstance(given_entries[0], str):
        texts = [str(each) for each in given_entries]
        found, _ = joined([entry(each.encode(), number) for number, each in enumerate(texts)], pattern)
        assert [text.decode() for _, text in found] == {
            "a pattern in characters": ["aé\nab\n", "\U0001f600é\naaé\n"][:1],
            "a pattern of ASCII": ["a\né\n"],
        }[name]
        return
    assert joined(given_entries, pattern) == (events, pending)


lines = st.tuples(st.sampled_from([b"", b"a", b"> b", b"x" * 30_000, PART]), st.integers(1, 2), st.booleans())


@given(st.lists(lines, max_size=60), st.sampled_from(["", "^>"]))
def test_no_text_is_lost_or_moved(given_lines: list[tuple[bytes, int, bool]], pattern: str) -> None:
    """Events have the text of each stream in its order; the numbers cover their entries."""
    entries = [entry(text, number, stream, ended=ended) for number, (text, stream, ended) in enumerate(given_lines)]
    joiner = Joiner(patterns.compiled(pattern) if pattern else None)
    events: list[Event] = []
    for number, each in enumerate(entries):
        before = len(events)
        events += joiner.add(number, each)
        assert all(event.begin <= event.end <= number for event in events[before:])
        pending = joiner.pending
        assert pending is None or pending <= number
    events += joiner.flush(len(entries))
    assert joiner.pending is None
    assert all(0 < len(event.text) <= EVENT_MAX for event in events)
    letters = b"".join(event.text for event in events).replace(b"\n", b"")
    assert sorted(letters) == sorted(b"".join(each.text for each in entries))
    if {stream for _, stream, _ in given_lines} == {1}:
        assert letters == b"".join(each.text for each in entries)
        assert [event.end for event in events] == sorted(event.end for event in events)


# --- batches --------------------------------------------------------------------------------------


def log_events(*times: int, size: int = 1) -> list[LogEvent]:
    return [LogEvent(at, "x" * size) for at in times]


@pytest.mark.parametrize(
    ("events", "counts"),
    [
        ([], []),
        (log_events(*range(10)), [10]),
        (log_events(*range(BATCH_EVENTS)), [BATCH_EVENTS]),
        (log_events(*range(BATCH_EVENTS + 1)), [BATCH_EVENTS, 1]),
        (log_events(*[1] * 25_000), [BATCH_EVENTS, BATCH_EVENTS, 5000]),
        (log_events(*[1] * 4, size=EVENT_MAX), [4]),
        (log_events(*[1] * 5, size=EVENT_MAX), [4, 1]),
        (log_events(*[1] * 2, size=EVENT_MAX * 2 - 26), [2]),
        (log_events(0, DAY), [2]),
        (log_events(0, DAY + 1), [1, 1]),
        (log_events(0, DAY, DAY + 1, 2 * DAY + 1, 2 * DAY + 2), [2, 2, 1]),
    ],
)
def test_limits(events: list[LogEvent], counts: list[int]) -> None:
    assert [len(each) for each in packed(events)] == counts


def test_bytes_are_those_of_utf8() -> None:
    """Not characters, and not those of JSON."""
    fits = BATCH_MAX // 4
    for character, size in (("é", 2), ("\x01", 1), ("\U0001f600", 4), ('"', 1)):
        events = [LogEvent(1, character * ((fits - 26) // size))] * 4
        assert [len(each) for each in packed(events)] == [4]
        assert [len(each) for each in packed([*events, LogEvent(1, "x")])] == [4, 1]


@given(st.lists(st.tuples(st.integers(NOW - 3 * DAY, NOW), st.integers(1, EVENT_MAX)), min_size=1, max_size=30))
def test_requests_are_accepted(given_events: list[tuple[int, int]]) -> None:
    """Within the limits, in order, and nothing is missing."""
    batch = Batch()
    for at, size in given_events:
        batch.add_events([Event(at, b"%d " % at + b"x" * max(0, size - 14), 0, 0)])
    requests = batch.requests()
    for request in requests:
        check(request)
    found = [(each["timestamp"], len(each["message"])) for request in requests for each in events_of(request)]
    assert sorted(found) == sorted((at, max(14, size)) for at, size in given_events)


@given(st.lists(st.integers(0, 3 * DAY), min_size=1, max_size=50))
@example([0, 0, 1])
@example([1, 0])
def test_events_of_one_time_keep_their_order(offsets: list[int]) -> None:
    batch = Batch()
    batch.add_events([Event(NOW + at // 1000 * 1000, b"%d" % number, 0, 0) for number, at in enumerate(offsets)])
    found = [each for request in batch.requests() for each in events_of(request)]
    by_time = defaultdict(list)
    for each in found:
        by_time[each["timestamp"]].append(int(each["message"]))
    assert all(numbers == sorted(numbers) for numbers in by_time.values())


@pytest.mark.parametrize("count", [2, 3, 10, 1001])
def test_halves(count: int) -> None:
    whole = encoded([LogEvent(number, f'"{number}"\n') for number in range(count)])
    first, second = halves(whole)
    assert events_of(first) + events_of(second) == events_of(whole)
    assert abs(first.events - second.events) <= 1


@pytest.mark.parametrize(
    ("info", "count"),
    [
        (None, 0),
        ({}, 0),
        ({"tooOldLogEventEndIndex": 3}, 3),
        ({"expiredLogEventEndIndex": 4, "tooOldLogEventEndIndex": 2}, 4),
        ({"tooNewLogEventStartIndex": 7}, 3),
        ({"tooNewLogEventStartIndex": 0}, 10),
        ({"tooOldLogEventEndIndex": 2, "tooNewLogEventStartIndex": 9}, 3),
        ({"tooOldLogEventEndIndex": 10, "tooNewLogEventStartIndex": 0}, 10),
        ("text", 0),
    ],
)
def test_events_that_the_service_rejects(info: Any, count: int) -> None:
    assert rejected({"rejectedLogEventsInfo": info} if info is not None else {}, 10) == count


# --- reading --------------------------------------------------------------------------------------


class Target(Destination):
    """A destination that sends nothing."""

    def form(self, document: Any) -> Any:
        return awslogs.form()

    async def open(self) -> None: ...
    async def pass_on(self) -> None: ...
    async def close(self) -> None: ...

    def add(self, feed: Any) -> None:
        self.feeds.add(feed)


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    delivery = document(target())
    made = Spool(tmp_path, Target(Owner(), delivery), delivery)
    yield made
    made.close()


def read(spool: Spool, pattern: str = "", stale: int = 5000, now: int | None = None) -> tuple[list[str], bool]:
    """The messages of a batch, and whether an event was left."""
    batch = gather(spool.feed, awslogs.compiled(pattern), stale, now or time.time_ns() // 1_000_000)
    found = []
    if batch.count:
        for request in batch.requests():
            check(request)
            found += [each["message"] for each in events_of(request)]
    return found, batch.later


def read_all(spool: Spool, pattern: str = "", **more: Any) -> list[str]:
    found: list[str] = []
    while True:
        messages, _ = read(spool, pattern, **more)
        if not messages:
            return found
        found += messages


def test_reading_lines(spool: Spool) -> None:
    texts = [f'{number} ü\t"\\' for number in range(30_000)]
    spool.write("".join(f"{text}\n" for text in texts).encode())
    assert read_all(spool) == texts
    assert spool.feed.drained and spool.feed.at.lines == 30_000


def test_a_full_batch_is_one_request(spool: Spool) -> None:
    for _ in range(20):
        spool.write((b"x" * 91 + b"\n") * 1000)
    batch = gather(spool.feed, None, 5000, NOW)
    (request,) = batch.requests()
    check(request)
    assert batch.ordered and len(request.wire) > 900_000


@pytest.mark.parametrize("size", [1, 50, 91, 5000, 16_380, 16_383, 16_384, 16_385, 40_000, 262_118, 262_119, 600_000])
def test_lines_of_any_size(spool: Spool, size: int) -> None:
    count = min(3000, 3_000_000 // size)
    for _ in range(count):
        spool.write(b"y" * size + b"\n")
    spool.end()
    found = read_all(spool)
    assert "".join(found) == "y" * size * count
    if size <= EVENT_MAX - (16 << 10):
        assert len(found) == count


@pytest.mark.parametrize("size", [20_000, 100_000])
def test_escapes_of_any_size(spool: Spool, size: int) -> None:
    for _ in range(20):
        spool.write(b"\x01" * size + b"\n")
    spool.end()
    assert read_all(spool) == ["\x01" * size] * 20


def test_an_event_that_may_continue_is_left(spool: Spool) -> None:
    spool.write(b"> a\nb\n> c\n")
    assert read(spool, "^>") == (["> a\nb\n"], True)
    assert not spool.feed.drained
    spool.write(b"d\n")
    assert read(spool, "^>") == ([], True)
    spool.write(b"> e\n")
    assert read(spool, "^>") == (["> c\nd\n"], True)
    assert read(spool, "^>", stale=0) == (["> e\n"], False)
    assert spool.feed.at.bytes == spool.path.stat().st_size


@pytest.mark.parametrize(
    ("age", "later"), [(0, True), (4999, True), (5000, False), (DAY, False), (-1, False), (-DAY, False)]
)
def test_an_old_event_is_not_left(spool: Spool, age: int, later: bool) -> None:
    """Nor one that is younger than now, by a clock that was set."""
    spool.entries([(NOW, "> a"), (NOW + 60_000, "b")])
    assert read(spool, "^>", now=NOW + age) == ([] if later else ["> a\nb\n"], later)


def test_an_event_of_a_container_that_has_ended_is_not_left(spool: Spool) -> None:
    spool.write(b"> a\nb\n")
    spool.end()
    assert read(spool, "^>") == (["> a\nb\n"], False)


def test_a_part_is_left(spool: Spool) -> None:
    spool.write(b"a\n" + PART)
    assert read(spool) == (["a"], True)
    spool.write(b"end\nb\n")
    assert read(spool) == ([PART.decode() + "end", "b"], False)


def test_what_ends_after_a_part_is_left_with_it(spool: Spool) -> None:
    """Else it would be sent again when the part is read again."""
    spool.write(b"a\n")
    spool.write(PART)
    spool.write(b"b\nc\n", 2)
    assert read(spool) == (["a"], True)
    assert read(spool) == ([], True)
    spool.write(b"end\n")
    texts, more = read(spool)
    # in the order of their milliseconds, and the part's is that of its beginning
    assert (sorted(texts), more) == (["b", "c", PART.decode() + "end"], False)


def test_parts_of_both_streams_that_are_left(spool: Spool) -> None:
    spool.write(b"e" * (16 << 10), 2)
    spool.write(PART)
    spool.write(b"\n", 2)
    assert read(spool) == ([], True)
    assert spool.feed.at.bytes == 0
    spool.write(b"\n")
    assert read(spool) == (["e" * (16 << 10), PART.decode()], False)


def test_a_part_does_not_hold_up_a_full_batch(spool: Spool) -> None:
    spool.write(PART)
    for _ in range(30):
        spool.write((b"z" * 91 + b"\n") * 1000, 2)
    found = read_all(spool)
    assert found.count(PART.decode()) == 1
    assert found.count("z" * 91) == 30_000 and len(found) == 30_001


def test_an_event_beyond_the_first_turn_is_found_again(spool: Spool) -> None:
    """The feed returns to the entry in the middle of what it has read."""
    for number in range(2000):
        spool.write(b"> %d\nmore\n" % number)
    found, later = read(spool, "^>")
    assert later and found == [f"> {number}\nmore\n" for number in range(1999)]
    at = spool.feed.at
    assert at.lines == 3998
    assert spool.path.read_bytes()[at.offset :].count(b"\n") == 2


@settings(max_examples=40)
@given(st.data())
def test_batches_are_cut_between_events(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """However lines come and batches are read, each event is sent once, and whole."""
    delivery = document(target())
    spool = Spool(tmp_path_factory.mktemp("spool"), Target(Owner(), delivery), delivery)
    written: list[str] = []
    sent: list[str] = []
    for number in range(data.draw(st.integers(1, 12))):
        size = data.draw(st.sampled_from([0, 1, 200, 20_000]))
        for part in (f"> {number}\n", *["x" * size + "\n"] * data.draw(st.integers(0, 30))):
            spool.write(part.encode())
            if data.draw(st.integers(0, 9)) == 0:
                sent += read(spool, "^>", stale=DAY)[0]
            written = [*written, part] if part.startswith(">") else [*written[:-1], written[-1] + part]
    spool.end()
    sent += read_all(spool, "^>")
    spool.close()
    assert "".join(sent) == "".join(written)
    # those that are small enough are whole
    assert [text for text in written if len(text) < EVENT_MAX // 2] == [
        text for text in sent if text.startswith(">") and text in written and len(text) < EVENT_MAX // 2
    ]


def test_a_notice_is_an_event(spool: Spool) -> None:
    """Lines are missing at its place, so no event goes on behind it, and it is not left."""
    spool.write(b"> a\nb\n")
    spool.feed._lost = Lost(lines=7, bytes=70, untold=7)
    text = "7 lines of this container were lost before this one: its target is too slow\n"
    assert read(spool, "^>") == ([text], True)
    assert read(spool, "^>", stale=0) == (["> a\nb\n"], False)


def test_no_event_goes_on_behind_a_notice(spool: Spool) -> None:
    spool.write(b"> a\n")
    batch, joiner = Batch(), Joiner(awslogs.compiled("^>"))
    events = joiner.add(0, Entry(1, 0, b"> before", True))
    spool.feed._lost = Lost(lines=7, bytes=70, untold=7)
    assert not events
    awslogs._join(spool.feed, batch, joiner, 0, NOW)
    found = [each["message"] for request in batch.requests() for each in events_of(request)]
    assert sorted(text.split()[0] for text in found) == ["7", ">", ">"] and "> before\n" in found


def test_clocks_that_jump_are_put_in_order(spool: Spool) -> None:
    spool.entries([(NOW + offset, f"{offset}") for offset in (0, 5, 3, -2 * DAY, 10, DAY, -1)])
    spool.end()
    found = read_all(spool)
    assert found == [str(offset) for offset in (-2 * DAY, -1, 0, 3, 5, 10, DAY)]


@pytest.mark.parametrize("at", [0, 1, 999_999_999_999, 1_000_000_000_000, 7_226_582_400_000])
def test_times_of_other_centuries(spool: Spool, at: int) -> None:
    spool.entries([(NOW, "now"), (at, "then"), (NOW, "again")])
    spool.end()
    assert sorted(read_all(spool)) == ["again", "now", "then"]


def test_a_pattern_that_is_none(caplog: pytest.LogCaptureFixture) -> None:
    assert awslogs.compiled("(") is None and "awslogs-multiline-pattern" in caplog.text
    assert awslogs.compiled("") is None


# --- the sender -----------------------------------------------------------------------------------


class Service:
    """The service in memory, in place of its requests."""

    def __init__(self) -> None:
        self.puts: list[dict[str, Any]] = []
        self.created: list[tuple[str, str]] = []
        self.missing: set[str] = set()
        self.stored: dict[str, list[str]] = defaultdict(list)
        self.plan: Callable[[dict[str, Any]], dict[str, Any] | Exception | None] = lambda document: None
        self.gate = asyncio.Event()
        self.gate.set()
        self.under_way: list[str] = []
        self.most = 0

    async def open(self) -> None: ...
    async def close(self) -> None: ...

    async def create(self, group: str, stream: str, *, with_group: bool) -> None:
        self.created.append((group, stream))
        self.missing.discard(stream)

    async def call(self, operation: str, body: bytes) -> dict[str, Any]:
        assert operation == "PutLogEvents"
        document = json.loads(body)
        self.puts.append(document)
        stream = document["logStreamName"]
        assert stream not in self.under_way  # one at a time
        self.under_way.append(stream)
        self.most = max(self.most, len(self.under_way))
        try:
            await self.gate.wait()
            await asyncio.sleep(0)
        finally:
            self.under_way.remove(stream)
        if stream in self.missing:
            raise refusal(cloudwatch.NOT_FOUND)
        planned = self.plan(document)
        if isinstance(planned, Exception):
            raise planned
        self.stored[stream] += [event["message"] for event in document["logEvents"]]
        return planned or {}


def refusal(code: str, message: str = "", status: int = 400, **details: Any) -> ServiceError:
    return ServiceError(status, code, message, details)


class World:
    """A sender, its feeds and a service, on a loop."""

    def __init__(self, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.base = base
        self.owner = Owner()
        self.service = Service()
        monkeypatch.setattr(awslogs, "CloudWatchLogs", lambda target: self.service)
        self.sender = CloudWatch(self.owner, document(target()))
        self.spools: list[Spool] = []

    def spool(self, data: bytes = b"", **options: Any) -> Spool:
        options = {"stream": f"s{len(self.spools)}", "flush_interval": 0} | options
        made = Spool(self.base, self.sender, document(target(**options), len(self.spools) + 1))
        self.spools.append(made)
        if data:
            made.write(data)
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


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    monkeypatch.setattr(awslogs, "back_off", lambda attempts: 0.001)
    monkeypatch.setattr("engine.shipper.destination.back_off", lambda attempts, first: 0.001)

    def running(body: Callable[[World], Any]) -> None:
        async def whole() -> None:
            world = World(tmp_path, monkeypatch)
            try:
                async with asyncio.timeout(60):
                    await body(world)
            finally:
                await world.close()

        asyncio.run(whole())

    yield running


def numbered(count: int) -> bytes:
    return b"".join(b"%d\n" % number for number in range(count))


def texts(count: int) -> list[str]:
    return [str(number) for number in range(count)]


def test_streams_are_sent_at_a_time(run: Callable[..., None]) -> None:
    async def body(world: World) -> None:
        world.service.gate.clear()
        for _ in range(30):
            world.spool(numbered(100))
        await world.until(lambda: world.service.most == awslogs.REQUESTS)
        world.service.gate.set()
        await world.until(lambda: world.settled)
        assert world.service.stored == {f"s{number}": texts(100) for number in range(30)}
        assert world.service.most == awslogs.REQUESTS
        assert not world.service.created

    run(body)


def test_memory_is_bounded(run: Callable[..., None]) -> None:
    async def body(world: World) -> None:
        world.service.gate.clear()
        for _ in range(8):
            world.spool((b"x" * 991 + b"\n") * 2000)
        await world.until(lambda: world.sender._size >= awslogs.ON_THE_WAY)
        for _ in range(20):
            await asyncio.sleep(0)
        assert world.service.most <= awslogs.ON_THE_WAY // awslogs.ROOM + 1
        world.service.gate.set()
        await world.until(lambda: world.settled)
        assert world.sender._size == 0

    run(body)


def test_lines_wait_for_the_interval(run: Callable[..., None]) -> None:
    """Unless there are enough for a batch, or the container has ended."""

    async def body(world: World) -> None:
        waits, full, ended, soon = (world.spool(flush_interval=number) for number in (3600, 3600, 3600, 1))
        waits.write(numbered(10))
        full.write((b"x" * 999 + b"\n") * 1500)
        soon.write(numbered(10))
        ended.write(numbered(10))
        ended.end()
        world.sender.notify(ended.feed)
        await world.until(lambda: "s1" in world.service.stored and "s2" in world.service.stored)
        assert "s3" not in world.service.stored
        await world.until(lambda: "s3" in world.service.stored)
        assert "s0" not in world.service.stored
        waits.end()
        world.sender.notify(waits.feed)
        await world.until(lambda: "s0" in world.service.stored)

    run(body)


def test_a_stream_that_is_missing(run: Callable[..., None]) -> None:
    """It is created, once."""

    async def body(world: World) -> None:
        world.service.missing = {"s0", "s1"}
        first = world.spool(numbered(10))
        second = world.spool(numbered(10), create_stream=False)
        await world.until(lambda: first.feed.acked.lines == 10)
        assert world.service.created == [("group", "s0")]
        first.write(numbered(10))
        await world.until(lambda: first.feed.acked.lines == 20)
        assert world.service.created == [("group", "s0")]
        assert world.sender.trouble(second.feed) == "ResourceNotFoundException"
        assert world.sender.trouble(first.feed) == world.sender.error == ""
        world.service.missing.clear()
        await world.until(lambda: world.settled)
        assert world.sender.trouble(second.feed) == ""

    run(body)


@pytest.mark.parametrize(
    "failure",
    [
        refusal("ThrottlingException"),
        refusal("AccessDeniedException"),
        refusal("InvalidParameterException", "Value at 'logStreamName' failed to satisfy constraint"),
        refusal("InvalidParameterException", "Value at 'logGroupName' failed to satisfy constraint"),
    ],
)
def test_failures_of_a_stream(run: Callable[..., None], failure: ServiceError) -> None:
    async def body(world: World) -> None:
        world.service.plan = lambda document: failure if document["logStreamName"] == "s0" else None
        wrong, right = world.spool(numbered(10)), world.spool(numbered(10))
        await world.until(lambda: right.feed.acked.lines == 10 and world.sender.trouble(wrong.feed))
        assert wrong.feed.acked.lines == 0 and world.owner.lines_lost == 0
        assert not world.sender.error and not world.owner.changes
        await world.until(lambda: world.sender._streams[wrong.feed].attempts > 3)
        world.service.plan = lambda document: None
        await world.until(lambda: world.settled)
        assert world.service.stored["s0"] == texts(10)
        assert world.sender._streams[wrong.feed].attempts == 0

    run(body)


@pytest.mark.parametrize(
    "failure",
    [
        refusal("ServiceUnavailableException", status=500),
        refusal("", "502 Bad Gateway", status=502),
        refusal("", "404 Not Found", status=404),
        refusal("UnrecognizedClientException", "The security token included in the request is invalid"),
        ConnectionResetError(104, "connection closed by the target"),
        TimeoutError("no answer within 30 s"),
    ],
)
def test_failures_of_the_service(run: Callable[..., None], failure: Exception) -> None:
    async def body(world: World) -> None:
        world.service.plan = lambda document: failure
        world.spool(numbered(10))
        await world.until(lambda: world.sender.attempts > 3)
        # until it is due, another failure comes
        waits = world.spool(numbered(10), flush_interval=1)
        world.service.plan = lambda document: None
        await world.until(lambda: world.settled)
        assert world.service.stored == {"s0": texts(10), "s1": texts(10)}
        assert len(world.owner.changes) == 2 and world.owner.changes[1] == ""
        assert waits.feed.drained

    run(body)


def test_events_that_are_not_valid(run: Callable[..., None]) -> None:
    bad = {"7", "8", "63"}

    async def body(world: World) -> None:
        def plan(document: dict[str, Any]) -> Exception | None:
            has = bad & {event["message"] for event in document["logEvents"]}
            return refusal("InvalidParameterException", "1 validation error") if has else None

        world.service.plan = plan
        spool = world.spool(numbered(100))
        await world.until(lambda: world.settled)
        assert world.service.stored["s0"] == [text for text in texts(100) if text not in bad]
        assert spool.feed.dropped_lines == world.owner.lines_lost == 3

    run(body)


def test_rejected_events_are_not_repeated(run: Callable[..., None]) -> None:
    async def body(world: World) -> None:
        world.service.plan = lambda document: {"rejectedLogEventsInfo": {"tooOldLogEventEndIndex": 4}}
        spool = world.spool(numbered(10))
        await world.until(lambda: world.settled)
        assert len(world.service.puts) == 1 and spool.feed.dropped_lines == 4

    run(body)


def test_sequence_tokens(run: Callable[..., None]) -> None:
    """They are sent from the first answer on that has one, and corrected by refusals."""

    async def body(world: World) -> None:
        answers: list[Any] = [
            {"nextSequenceToken": "1"},
            {"nextSequenceToken": "2"},
            refusal("InvalidSequenceTokenException", expectedSequenceToken="9"),
            {"nextSequenceToken": "10"},
            refusal("DataAlreadyAcceptedException", expectedSequenceToken="11"),
            refusal("InvalidSequenceTokenException"),
            {},
        ]
        world.service.plan = lambda document: answers.pop(0)
        spool = world.spool()
        for number in range(5):
            spool.write(b"%d\n" % number)
            await world.until(lambda at=number: spool.feed.acked.lines == at + 1)  # type: ignore[misc]
        tokens = [put.get("sequenceToken") for put in world.service.puts]
        assert tokens == [None, "1", "2", "9", "10", "11", None]
        assert world.service.stored["s0"] == ["0", "1", "2", "4"]  # 3 was there already

    run(body)


def test_a_token_that_is_never_right(run: Callable[..., None]) -> None:
    """It is a failure of the stream, rather than an endless loop."""

    async def body(world: World) -> None:
        world.service.plan = lambda document: refusal("InvalidSequenceTokenException", expectedSequenceToken="1")
        spool = world.spool(numbered(1))
        await world.until(lambda: world.sender.trouble(spool.feed))
        world.service.plan = lambda document: None
        await world.until(lambda: world.settled)

    run(body)


def test_a_feed_that_is_removed_meanwhile(run: Callable[..., None]) -> None:
    async def body(world: World) -> None:
        world.service.gate.clear()
        gone, stays = world.spool(numbered(10)), world.spool(numbered(10))
        await world.until(lambda: len(world.service.under_way) == 2)
        waiting = world.spool(numbered(10), flush_interval=3600)
        for spool in (gone, waiting):
            world.sender.remove(spool.feed)
            spool.feed.close()
        world.service.gate.set()
        await world.until(lambda: stays.feed.acked.lines == 10)
        assert gone.feed.acked.lines == 0
        assert set(world.sender._streams) == {stays.feed}

    run(body)


def test_lines_without_text(run: Callable[..., None]) -> None:
    async def body(world: World) -> None:
        world.spool(b"\n" * 3000)
        await world.until(lambda: world.settled)
        assert not world.service.puts

    run(body)


# --- the service's addresses ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("region", "endpoint", "url"),
    [
        ("eu-west-1", "", "https://logs.eu-west-1.amazonaws.com/"),
        ("cn-north-1", "", "https://logs.cn-north-1.amazonaws.com.cn/"),
        ("us-gov-west-1", "", "https://logs.us-gov-west-1.amazonaws.com/"),
        ("us-iso-east-1", "", "https://logs.us-iso-east-1.c2s.ic.gov/"),
        ("us-isob-east-1", "", "https://logs.us-isob-east-1.sc2s.sgov.gov/"),
        ("eu-west-1", "http://localhost:4566", "http://localhost:4566/"),
        (
            "eu-west-1",
            "https://vpce-1.logs.eu-west-1.vpce.amazonaws.com/x",
            "https://vpce-1.logs.eu-west-1.vpce.amazonaws.com/x",
        ),
    ],
)
def test_endpoints(region: str, endpoint: str, url: str) -> None:
    assert cloudwatch.endpoint(target(endpoint=endpoint), region) == url


@pytest.mark.parametrize(
    ("environment", "url", "proxy"),
    [
        ({}, "https://logs.eu-west-1.amazonaws.com/", None),
        ({"HTTPS_PROXY": "http://proxy:3128"}, "https://logs.eu-west-1.amazonaws.com/", "http://proxy:3128"),
        ({"HTTPS_PROXY": "proxy:3128"}, "https://logs.eu-west-1.amazonaws.com/", "http://proxy:3128"),
        ({"HTTPS_PROXY": "http://proxy:3128"}, "http://localhost:4566/", None),
        ({"HTTPS_PROXY": "http://proxy", "NO_PROXY": "amazonaws.com"}, "https://logs.eu-west-1.amazonaws.com/", None),
    ],
)
def test_proxies(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], url: str, proxy: str | None) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cloudwatch._proxy(url) == proxy
