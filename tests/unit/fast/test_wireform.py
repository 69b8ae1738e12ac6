"""Messages of log drivers: bytes written by hand for each protocol, and a model in Python for
everything else.
"""

from __future__ import annotations

import json
import os
import random
import struct
import threading
import time
from array import array
from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine._fast import wireform
from engine._fast.logwriter import LogWriter
from engine._fast.wireform import Form, entries
from tests.unit.fast.jsonlogs import SECOND, SLICE, _descriptors, as_text, directory, entry, parsed, slices  # noqa: F401 (_descriptors: a fixture)

AT = 1709168523_123456789
"""2024-02-29T01:02:03.123456789Z"""
ALL = 1 << 20
TEXTS = {name: getattr(wireform, name) for name in ("RAW", "JSON", "MSGPACK_STR", "JOURNAL")}
TIMES = (
    *("NO_TIME", "STAMP", "RFC3339", "RFC3339_MICRO", "RFC3339_NANO", "MILLIS_FRACTION", "MICROS_FRACTION"),
    *("EVENT_TIME", "SECONDS_INT", "MILLIS"),
)
FRAMES = ("LINE", "NUL", "COUNT", "CONCATENATED", "DATAGRAM")


def form(text: str = "RAW", time: str = "NO_TIME", frame: str = "CONCATENATED", **options: Any) -> Form:
    """Names instead of numbers, and one text for both streams."""
    for name in ("head", "middle", "tail", "part_middle"):
        value = options.pop(name, None if name == "part_middle" else b"")
        options[name] = (value, value) if isinstance(value, bytes) else value
    if isinstance(partial := options.get("partial"), str):
        options["partial"] = getattr(wireform, partial)
    numbers = {"text": TEXTS[text], "time": getattr(wireform, time), "frame": getattr(wireform, frame)}
    return Form(**numbers, **options)


def wire(shape: Form, block: bytes, number: int = 0) -> bytes:
    made, consumed, count, _, _ = shape.format(block, 0, number, ALL)
    assert consumed == len(block) and count == block.count(b"\n")
    return made


@pytest.fixture(autouse=True)
def _local_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "Asia/Kolkata")  # +05:30
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


BOTH = entry('hello <b> "x"\n', AT) + entry("é\t\n", AT + 7 * SECOND, 2)


# --- what each driver sends -----------------------------------------------------------------------


def syslog(time: str, head: str, middle: str, **options: Any) -> Form:
    """Facility daemon: 3 * 8 + severity 6 or 3. Docker ends each message in a newline, in each
    frame."""
    heads = tuple(head.format(24 + severity).encode() for severity in (6, 3))
    return form("RAW", time, head=heads, middle=middle.encode(), tail=b"\n", skip_empty=True, **options)


def test_syslog() -> None:
    local = syslog("STAMP", "<{}>", " 0123456789ab[42]: ")
    assert wire(local, BOTH).decode() == (
        '<30>Feb 29 06:32:03 0123456789ab[42]: hello <b> "x"\n<27>Feb 29 06:32:10 0123456789ab[42]: é\t\n'
    )
    rfc3164 = syslog("STAMP", "<{}>", " host web[42]: ")
    assert wire(rfc3164, entry("one digit\r\n", AT - 23 * 86400 * SECOND)).decode() == (
        "<30>Feb  6 06:32:03 host web[42]: one digit\r\n"
    )
    rfc5424 = syslog("RFC3339", "<{}>1 ", " host web 42 web - ")
    assert wire(rfc5424, BOTH).decode() == (
        '<30>1 2024-02-29T06:32:03+05:30 host web 42 web - hello <b> "x"\n'
        "<27>1 2024-02-29T06:32:10+05:30 host web 42 web - é\t\n"
    )
    micro = syslog("RFC3339_MICRO", "<{}>1 ", " host web 42 web - ", frame="COUNT")
    assert wire(micro, BOTH).decode() == (
        '71 <30>1 2024-02-29T06:32:03.123456+05:30 host web 42 web - hello <b> "x"\n'
        "61 <27>1 2024-02-29T06:32:10.123456+05:30 host web 42 web - é\t\n"
    )


def test_syslog_skips_empty_lines() -> None:
    shape = syslog("NO_TIME", "<{}>", "")
    assert wire(shape, entry("\n", AT) + entry("", AT) + entry(" \n", AT)) == b"<30> \n"
    assert shape.format(entry("\n", AT), 0, 0, ALL) == (b"", len(entry("\n", AT)), 1, array("I"), 0)


def test_gelf() -> None:
    heads = b'{"version":"1.1","host":"h","timestamp":'
    middles = tuple(b',"level":%d,"short_message":"' % level for level in (6, 3))
    shape = form("JSON", "MILLIS_FRACTION", "NUL", head=heads, middle=middles, tail=b'","_tag":"t"}', skip_empty=True)
    made = wire(shape, BOTH + entry("\n", AT))
    assert made == (
        b'{"version":"1.1","host":"h","timestamp":1709168523.123,"level":6,"short_message":"hello <b> \\"x\\"",'
        b'"_tag":"t"}\0'
        b'{"version":"1.1","host":"h","timestamp":1709168530.123,"level":3,"short_message":"\\u00e9\\t","_tag":"t"}\0'
    )
    assert [json.loads(each)["short_message"] for each in made.split(b"\0")[:-1]] == ['hello <b> "x"', "é\t"]


def test_splunk() -> None:
    middles = tuple(b'","host":"h","event":{"source":"%s","tag":"t","line":"' % name for name in (b"stdout", b"stderr"))
    inline = form("JSON", "MICROS_FRACTION", head=b'{"time":"', middle=middles, tail=b'"}}')
    assert wire(inline, BOTH) == (
        b'{"time":"1709168523.123457","host":"h","event":{"source":"stdout","tag":"t","line":"hello <b> \\"x\\""}}'
        b'{"time":"1709168530.123457","host":"h","event":{"source":"stderr","tag":"t","line":"\\u00e9\\t"}}'
    )
    raw = form(
        "JSON",
        "MICROS_FRACTION",
        head=b'{"time":"',
        middle=b'","host":"h","event":"t k=v ',
        tail=b'"}',
        skip_blank=True,
    )
    assert wire(raw, entry(" a \n", AT) + entry(" \t\n", AT)) == (
        b'{"time":"1709168523.123457","host":"h","event":"t k=v  a "}'
    )


def fluentd(time: str = "EVENT_TIME") -> Form:
    def fields(count: int, source: bytes) -> bytes:
        return bytes((0x80 | count,)) + b"\xaccontainer_id\xa2id\xa6source\xa6" + source + b"\xa3log"

    return form(
        "MSGPACK_STR",
        time,
        head=b"\x92",
        middle=(fields(3, b"stdout"), fields(3, b"stderr")),
        part_middle=(fields(7, b"stdout"), fields(7, b"stderr")),
        partial="FLUENTD",
    )


def decoded(made: bytes, count: int) -> list[Any]:
    """Entries of a message in Forward mode, whose times are numbers of nanoseconds."""

    def time_of(code: int, data: memoryview) -> int:
        assert code == 0 and len(data) == 8
        second, nanoseconds = struct.unpack(">II", data)
        return int(second) * SECOND + int(nanoseconds)

    found: list[Any] = msgspec.msgpack.decode(b"\xdd" + struct.pack(">I", count) + made, ext_hook=time_of)
    return found


def test_fluentd() -> None:
    assert wire(fluentd(), BOTH) == (
        b"\x92\xd7\x00\x65\xdf\xd7\x8b\x07\x5b\xcd\x15"
        b'\x83\xaccontainer_id\xa2id\xa6source\xa6stdout\xa3log\xadhello <b> "x"'
        b"\x92\xd7\x00\x65\xdf\xd7\x92\x07\x5b\xcd\x15"
        b"\x83\xaccontainer_id\xa2id\xa6source\xa6stderr\xa3log\xa3\xc3\xa9\t"
    )
    record = {"container_id": "id", "source": "stdout", "log": 'hello <b> "x"'}
    found = [[AT, record], [AT + 7 * SECOND, {**record, "source": "stderr", "log": "é\t"}]]
    assert decoded(wire(fluentd(), BOTH), 2) == found
    assert decoded(wire(fluentd("SECONDS_INT"), BOTH), 2)[0] == [AT // SECOND, record]
    for size in (0, 31, 32, 255, 256, 65535, 65536):
        text = "x" * size
        assert decoded(wire(fluentd(), entry(text + "\n", AT)), 1)[0][1]["log"] == text


def test_fluentd_parts() -> None:
    """Of two streams at the same time, each with a line in parts."""
    long = "x" * SLICE
    block = b"".join(
        entry(text, AT + at, stream)
        for at, (text, stream) in enumerate(
            [(long, 1), (long, 2), (long, 1), ("whole\n", 2), ("end\n", 1), ("\n", 1), ("y" * (SLICE - 3), 1), ("z", 1)]
        )
    )
    records = [each[1] for each in decoded(wire(fluentd(), block), 8)]
    parts = [
        tuple(record.get(f"partial_{name}") for name in ("message", "ordinal", "last", "id")) for record in records
    ]
    first, second, third = parts[0][3], parts[1][3], parts[6][3]
    assert parts == [
        ("true", "1", "false", first),
        ("true", "1", "false", second),
        ("true", "2", "false", first),
        ("true", "2", "true", second),
        ("true", "3", "true", first),
        (None, None, None, None),
        ("true", "1", "false", third),
        ("true", "2", "true", third),
    ]
    assert len({first, second, third}) == 3
    assert all(len(each) == 64 and set(each) <= set("0123456789abcdef") for each in (first, second, third))
    assert [record["log"] for record in records][3:6] == ["whole", "end", ""]
    # An id depends on the time, the stream and the container, and on nothing else.
    assert wire(fluentd(), block) == wire(fluentd(), block)
    other = form("MSGPACK_STR", partial="FLUENTD", middle=b"other", part_middle=b"\x85\xa1a")
    assert first.encode() not in wire(other, block)


def test_whole_lines_are_no_parts() -> None:
    """Not shorter ones without a newline, which are the end of a stream, nor those with one."""
    block = entry("x" * (SLICE - 4), AT) + entry("y" * SLICE + "\n", AT + 1)
    assert all(len(record) == 3 for _, record in decoded(wire(fluentd(), block), 2))


def test_journald() -> None:
    heads = tuple(b"PRIORITY=%d\nSYSLOG_TIMESTAMP=" % priority for priority in (6, 3))
    shape = form(
        "JOURNAL", "RFC3339_NANO", "DATAGRAM", head=heads, middle=b"\n", tail=b"CONTAINER_ID=id\n", partial="JOURNALD"
    )
    made, _, count, ends, messages = shape.format(BOTH, 0, 41, ALL)
    assert made.decode() == (
        'PRIORITY=6\nSYSLOG_TIMESTAMP=2024-02-29T01:02:03.123456789Z\nMESSAGE=hello <b> "x"\n'
        "CONTAINER_LOG_ORDINAL=41\nCONTAINER_ID=id\n"
        "PRIORITY=3\nSYSLOG_TIMESTAMP=2024-02-29T01:02:10.123456789Z\nMESSAGE=é\t\n"
        "CONTAINER_LOG_ORDINAL=42\nCONTAINER_ID=id\n"
    )
    assert (count, list(ends), messages) == (2, [made.index(b"PRIORITY=3"), len(made)], 2)
    block = entry("x" * SLICE, AT, 2) + entry("end\n", AT + 1, 2)
    first, second = wire(shape, block, 43).split(b"PRIORITY=3\n")[1:]
    identity = first.split(b"CONTAINER_PARTIAL_ID=")[1][:64]
    assert first.endswith(
        b"CONTAINER_LOG_ORDINAL=43\nCONTAINER_PARTIAL_ID=" + identity + b"\nCONTAINER_PARTIAL_ORDINAL=1\n"
        b"CONTAINER_PARTIAL_LAST=false\nCONTAINER_PARTIAL_MESSAGE=true\nCONTAINER_ID=id\n"
    )
    assert second.endswith(
        b"MESSAGE=end\nCONTAINER_LOG_ORDINAL=44\nCONTAINER_PARTIAL_ID=" + identity + b"\nCONTAINER_PARTIAL_ORDINAL=2\n"
        b"CONTAINER_PARTIAL_LAST=true\nCONTAINER_ID=id\n"
    )


def test_journald_message_with_newlines() -> None:
    """Which this engine's entries do not have: the size, in little endian, then the value."""
    shape = form("JOURNAL", head=b"A=1\n", tail=b"B=2\n")
    assert wire(shape, entry("two\nlines\n", AT)) == b"A=1\nMESSAGE\n\x09\0\0\0\0\0\0\0two\nlines\nB=2\n"


# --- times ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "at", "expected"),
    [
        ("RFC3339_NANO", AT, b"2024-02-29T01:02:03.123456789Z"),
        ("RFC3339_NANO", AT - 789, b"2024-02-29T01:02:03.123456Z"),
        ("RFC3339_NANO", AT - 123456789, b"2024-02-29T01:02:03Z"),
        ("MILLIS_FRACTION", AT, b"1709168523.123"),
        ("MILLIS_FRACTION", AT - 3 * 10**6, b"1709168523.12"),
        ("MILLIS_FRACTION", AT - 123456789, b"1709168523"),
        ("MILLIS_FRACTION", 0, b"0"),
        ("MICROS_FRACTION", AT, b"1709168523.123457"),
        ("MICROS_FRACTION", AT + 876543000, b"1709168524.000000"),
        ("MICROS_FRACTION", 5, b"0.000000"),
        ("MILLIS", AT, b"1709168523123"),
        ("MILLIS", 7 * 10**6, b"7"),
        ("MILLIS", 0, b"0"),
        ("SECONDS_INT", AT, b"\xce\x65\xdf\xd7\x8b"),
        ("SECONDS_INT", 127 * SECOND, b"\x7f"),
        ("SECONDS_INT", 128 * SECOND, b"\xcc\x80"),
        ("SECONDS_INT", 256 * SECOND, b"\xcd\x01\x00"),
        ("SECONDS_INT", 65536 * SECOND, b"\xce\x00\x01\x00\x00"),
        ("SECONDS_INT", (1 << 32) * SECOND, b"\xcf\x00\x00\x00\x01\x00\x00\x00\x00"),
        ("EVENT_TIME", 1, b"\xd7\x00\x00\x00\x00\x00\x00\x00\x00\x01"),
        ("STAMP", 0, b"Jan  1 05:30:00"),
        ("RFC3339", 0, b"1970-01-01T05:30:00+05:30"),
    ],
)
def test_time(kind: str, at: int, expected: bytes) -> None:
    assert wire(form(time=kind), entry("\n", at)) == expected


@pytest.mark.parametrize(
    ("zone", "stamp", "rfc3339"),
    [
        ("UTC", b"Jul  1 00:00:00", b"2024-07-01T00:00:00Z"),
        ("Europe/Berlin", b"Jul  1 02:00:00", b"2024-07-01T02:00:00+02:00"),
        ("America/St_Johns", b"Jun 30 21:30:00", b"2024-06-30T21:30:00-02:30"),
        ("Africa/Abidjan", b"Jul  1 00:00:00", b"2024-07-01T00:00:00Z"),
    ],
)
def test_time_zones(monkeypatch: pytest.MonkeyPatch, zone: str, stamp: bytes, rfc3339: bytes) -> None:
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    block = entry("\n", 1719792000 * SECOND + 5000)
    assert wire(form(time="STAMP"), block) == stamp
    assert wire(form(time="RFC3339"), block) == rfc3339
    assert wire(form(time="RFC3339_MICRO"), block) == rfc3339[:19] + b".000005" + rfc3339[19:]


def test_summer_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both times within one call, and the one from before again."""
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    change = 1711846800
    block = b"".join(entry("\n", at * SECOND) for at in (change - 1, change, change - 1))
    assert wire(form(time="RFC3339", frame="LINE"), block).split() == [
        *(b"2024-03-31T01:59:59+01:00", b"2024-03-31T03:00:00+02:00", b"2024-03-31T01:59:59+01:00"),
    ]


@given(st.lists(st.integers(0, 7258118399 * SECOND), min_size=1, max_size=4))
@example([AT, AT + 1])
def test_times_of_any_age(times: list[int]) -> None:
    """In one zone for all, as a change of TZ is seen by new forms only."""
    block = b"".join(entry("\n", at) for at in times)
    for kind in TIMES:
        assert wire(form(time=kind), block) == b"".join(as_time(kind, at) for at in times), kind


def as_time(kind: str, at: int) -> bytes:
    """The model: times in +05:30."""
    second, nanoseconds = divmod(at, SECOND)
    utc = datetime.fromtimestamp(second, UTC)
    offset = 5 * 3600 + 1800
    local = datetime.fromtimestamp(second + offset, UTC)
    if kind == "NO_TIME":
        return b""
    if kind == "STAMP":
        return f"{local:%b} {local.day:2} {local:%H:%M:%S}".encode()
    if kind == "RFC3339":
        return f"{local:%Y-%m-%dT%H:%M:%S}+05:30".encode()
    if kind == "RFC3339_MICRO":
        return f"{local:%Y-%m-%dT%H:%M:%S}.{nanoseconds // 1000:06}+05:30".encode()
    if kind == "RFC3339_NANO":
        return (f"{utc:%Y-%m-%dT%H:%M:%S}.{nanoseconds:09}".rstrip("0").rstrip(".") + "Z").encode()
    if kind == "MILLIS_FRACTION":
        return f"{second}.{nanoseconds // 10**6:03}".rstrip("0").rstrip(".").encode()
    if kind == "MICROS_FRACTION":
        return f"{(Decimal(at + 500) // 1000) / 10**6:.6f}".encode()
    if kind == "EVENT_TIME":
        return b"\xd7\0" + struct.pack(">II", second & 0xFFFFFFFF, nanoseconds)
    if kind == "SECONDS_INT":
        return msgspec.msgpack.encode(second)
    return str(at // 10**6).encode()


# --- texts and frames -----------------------------------------------------------------------------


def as_text_of(kind: str, text: str) -> bytes:
    """The model of the text of an entry of this engine, without its newline."""
    raw = text.encode()
    if kind == "MSGPACK_STR":
        return msgspec.msgpack.encode(text)
    if kind == "JOURNAL":
        return b"MESSAGE=" + raw + b"\n"
    return raw


def framed(kind: str, message: bytes) -> bytes:
    return {"LINE": message + b"\n", "NUL": message + b"\0", "COUNT": b"%d " % len(message) + message}.get(
        kind, message
    )


LINES = (
    st.binary(max_size=60) | st.text(max_size=40).map(str.encode) | st.sampled_from([b"x" * 40_000, b"", b"\xff" * 9])
)


@settings(max_examples=150)
@given(
    data=st.lists(LINES, max_size=6).map(b"\n".join),
    text=st.sampled_from(sorted(TEXTS)),
    kind=st.sampled_from(TIMES),
    frame=st.sampled_from(FRAMES),
    room=st.integers(0, 300),
    start=st.integers(0, 3),
)
def test_output_to_messages(data: bytes, text: str, kind: str, frame: str, room: int, start: int) -> None:
    """What a container writes is in the messages, however the block is split."""
    with directory() as place:
        path = os.fsencode(place / "log")
        writer = LogWriter(path)
        writer.write(1, data)
        writer.write(2, data)
        writer.end()
        writer.close()
        block = (place / "log").read_bytes()
    # What was written, and the times that the writer gave.
    whole, rest = slices(data)
    lines = [json.loads(line) for line in block.splitlines()]
    # `end` writes what is left of both streams after all else.
    left = [(name, rest) for name in ("stdout", "stderr") if rest]
    written = [(name, line) for name in ("stdout", "stderr") for line in whole] + left
    assert [(each["stream"], each["log"]) for each in lines] == [(name, as_text(line)) for name, line in written]
    found, consumed, count = entries(b"x" * start + block, start, ALL)
    assert (consumed, count) == (len(block), len(lines))
    expected = []
    escaped = [escapes for _, escapes, _, _ in parsed(block)]
    for (stream, at, raw, newline), line, escapes in zip(found, lines, escaped, strict=True):
        log = line["log"]
        assert (stream, newline) == (1 if line["stream"] == "stdout" else 2, log.endswith("\n"))
        assert raw.decode() + "\n" * newline == log
        # JSON is copied as it stands in the entry.
        copied = escapes.removesuffix("\\n") if newline else escapes
        wanted = copied.encode() if text == "JSON" else as_text_of(text, raw.decode())
        expected.append(framed(frame, b"<" + as_time(kind, at) + b"|" + wanted + b">"))
    shape = form(text, kind, frame, head=b"<", middle=b"|", tail=b">")
    made, consumed, count, ends, messages = shape.format(b"x" * start + block, start, 0, ALL)
    assert made == b"".join(expected)
    assert (consumed, count, messages) == (len(block), len(lines), len(lines))
    if frame == "DATAGRAM":
        assert [made[begin:end] for begin, end in zip([0, *ends], ends, strict=False)] == expected
    else:
        assert len(ends) == 0
    if text == "JSON" and frame == "CONCATENATED":
        for log, each in zip(lines, expected, strict=True):
            assert json.loads(b'"' + each.partition(b"|")[2][:-1] + b'"') == log["log"].removesuffix("\n")
    pieces, at, total = [], 0, 0
    while at < len(block):
        piece, consumed, count, ends, messages = shape.format(block, at, 0, room)
        assert count == messages >= 1 and (count == 1 or len(piece) - len(expected[total + count - 1]) < room)
        pieces.append(piece)
        at += consumed
        total += count
    assert b"".join(pieces) == made and total == len(lines)


@settings(max_examples=60)
@given(
    sizes=st.lists(
        st.tuples(st.integers(1, 2), st.sampled_from([0, 5, SLICE - 4, SLICE - 3, SLICE, 2 * SLICE, 50_000])),
        max_size=8,
    ),
    split=st.integers(0, 12),
)
def test_state(sizes: list[tuple[int, int]], split: int) -> None:
    """A form that is set back gives the same bytes again, and so does another form."""
    block = b"".join(
        entry("x" * min(size, SLICE) + "\n" * (size % 2), AT + at, stream) for at, (stream, size) in enumerate(sizes)
    )
    shape, at = fluentd(), 0
    assert shape.state == (0, 0, 0, 0)
    made = wire(fluentd(), block)
    for _ in range(min(split, len(sizes))):
        state = shape.state
        first = shape.format(block, at, 0, 0)
        after = shape.state
        shape.state = state
        assert shape.format(block, at, 0, 0) == first and shape.state == after
        other = fluentd()
        other.state = state
        assert other.format(block, at, 0, 0) == first
        at += first[1]
    rest = shape.format(block, at, 0, ALL)[0]
    assert made.endswith(rest)
    shape.state = (0, 0, 0, 0)
    assert wire(shape, block) == made


def test_numbers_of_entries() -> None:
    shape = form("JOURNAL", partial="JOURNALD", skip_empty=True)
    block = entry("\n", AT) + b"no entry\n" + entry("a\n", AT)
    made, consumed, count, _, messages = shape.format(block, 0, (1 << 64) - 2, ALL)
    assert made == b"MESSAGE=a\nCONTAINER_LOG_ORDINAL=18446744073709551615\n"
    assert (consumed, count, messages) == (len(block), 2, 1)


@pytest.mark.parametrize(
    "blank",
    ["", " ", "\t\r\v\f", "\x85\xa0\u1680\u2000\u200a\u2028\u2029\u202f\u205f\u3000", "\n \n"],
)
def test_blank_lines(blank: str) -> None:
    shape = form("JSON", skip_blank=True)
    for text in (json.dumps(blank), json.dumps(blank, ensure_ascii=False)):
        line = entry("@", AT).replace(b'"@"', text[:-1].encode() + b'\\n"')
        for more, expected in (("", 0), ("\u200b", 1), ("é", 1), ("\b", 1), ("😀", 1), ("x", 1)):
            block = line.replace(b'\\n","stream', json.dumps(more)[1:-1].encode() + b'\\n","stream')
            assert shape.format(block, 0, 0, ALL)[4] == expected, (blank, more)
    block = entry(blank + "\n", AT)
    assert form("JSON", skip_empty=True).format(block, 0, 0, ALL)[4] == (blank != "")
    assert form("JSON").format(block, 0, 0, ALL)[4] == 1


def test_newline_inside_a_line() -> None:
    """Another engine's entry must not make two messages."""
    block = entry("a\nb\n\n", AT)
    assert wire(form(frame="LINE", head=b"x\n"), block) == b"x\na b \n"
    assert wire(form(frame="COUNT"), block) == b"4 a\nb\n"
    assert wire(form("JSON", frame="LINE"), block) == b"a\\nb\\n\n"


TEXT = 'aé\u20ac😀"\\\x01<\u2028\r'


@pytest.mark.parametrize("kind", sorted(TEXTS))
def test_longest(kind: str) -> None:
    """The text is cut after a character: no message is longer, and one more character is too
    many."""
    with directory() as place:
        writer = LogWriter(os.fsencode(place / "log"))
        writer.write(1, 3 * TEXT.encode() + b"\n")
        writer.close()
        block = (place / "log").read_bytes()
    whole = wire(form(kind, head=b"<", tail=b">"), block)
    for longest in range(1, len(whole) + 3):
        shape = form(kind, head=b"<", tail=b">", longest=longest, frame="DATAGRAM")
        made = wire(shape, block)
        if longest >= len(whole):
            assert made == whole
            continue
        text = made[1:-1]
        if kind == "MSGPACK_STR":
            text = msgspec.msgpack.decode(text).encode()
        elif kind == "JOURNAL":
            text = text[8:-1]
        elif kind == "JSON":
            text = json.loads(b'"' + text + b'"').encode()
        assert (3 * TEXT).startswith(text.decode())
        size = len(text.decode())
        assert size < 3 * len(TEXT)
        assert len(made) <= longest or size == 0
        more = form(kind, head=b"<", tail=b">").format(entry((3 * TEXT)[: size + 1] + "\n", AT), 0, 0, ALL)[0]
        if kind in ("RAW", "JOURNAL"):
            assert len(more) > longest
        counted = wire(form(kind, head=b"<", tail=b">", longest=longest, frame="COUNT"), block)
        assert counted == b"%d " % len(made) + made


# --- lines of other engines, and broken ones ------------------------------------------------------

OTHERS = [
    (b'{"time":"2024-02-29T01:02:03.5Z","stream":"stderr","log":"a\\n"}', (2, "a\n", AT - AT % SECOND + SECOND // 2)),
    (
        b' { "log" : "b" , "stream":"stdout", "time" : "2024-02-29T03:02:03+02:00", "x":{"y":[1,"}"]} } \r',
        (1, "b", AT - AT % SECOND),
    ),
    (b'{"log":"c\\n","stream":"stdout","attrs":{"k":"v"},"time":"2024-02-29T01:02:03.123456789Z"}', (1, "c\n", AT)),
    (
        b'{"log":"\\ud83d\\ude00\\u00e9\\/\\b\\f\\ud83d\\n","stream":"stdout","time":"2024-02-29T01:02:03.123456789Z"}',
        (1, "😀é/\b\f\ufffd\n", AT),
    ),
    (
        b'{"log":"raw\x01\t\xff\xc3\xa9\\u000A","stream":"stdout","time":"2024-02-29T01:02:03.123456789Z"}',
        (1, "raw\x01\t\ufffdé\n", AT),
    ),
    (b'{"log":"<&>\\\\n","stream":"stdout","time":"2024-02-29T01:02:03.123456789Z"}', (1, "<&>\\n", AT)),
    (b'{"stream":"stdout","time":"2024-02-29T01:02:03.123456789Z"}', (1, "", AT)),
    (b'\0\0{"log":"d\\n","stream":"stdout","time":"2024-02-29T01:02:03.123456789Z"}', (1, "d\n", AT)),
]
BROKEN = [
    *(b"", b"x", b"{}", b'{"log":"a\\n","stream":"stdout"}', b"\xff" * 200),
    b'{"log":"a\\q","stream":"stdout","time":"2024-02-29T01:02:03.123456789Z"}',
    b'{"log":"a\\","stream":"stdout","time":"2024-02-29T01:02:03.123456789Z"}',
    b'{"log":"a\\u12","stream":"stdout","time":"2024-02-29T01:02:03.123456789Z"}',
    b'{"log":"a"b","stream":"stdout","time":"2024-02-29T01:02:03.123456789Z"}',
    b'{"log":"a","stream":"stdin","time":"2024-02-29T01:02:03.123456789Z"}',
    b'{"log":"a","stream":"stdout","time":"2024-02-29T01:02:03.12345678xZ"}',
    b'{"log":"a","stream":"stdout","time":"2024-13-29T01:02:03.123456789Z"}',
]


@pytest.mark.parametrize(("line", "expected"), OTHERS)
def test_other_forms_of_entries(line: bytes, expected: tuple[int, str, int]) -> None:
    stream, log, at = expected
    text = log.removesuffix("\n")
    block = line + b"\n"
    assert entries(block, 0, ALL) == ([(stream, at, text.encode(), log.endswith("\n"))], len(block), 1)
    for kind in TEXTS:
        made, consumed, count, _, messages = form(kind, "RFC3339_NANO", middle=b" ").format(block, 0, 0, ALL)
        assert (consumed, count, messages) == (len(block), 1, 1)
        assert made.startswith(as_time("RFC3339_NANO", at) + b" ")
        body = made.partition(b" ")[2]
        if kind == "JSON":
            assert json.loads(b'"' + body + b'"') == text
        else:
            assert body == as_text_of(kind, text)


@pytest.mark.parametrize("line", BROKEN)
def test_broken_lines(line: bytes) -> None:
    """Are consumed and leave nothing, also between entries of the same second."""
    good = entry("a\n", AT)
    block = line + b"\n" + good + line + b"\n" + good + line + b"\n" + line
    shape = form(time="MILLIS", frame="LINE", middle=b" ")
    made, consumed, count, _, messages = shape.format(block, 0, 0, ALL)
    assert (made, count, messages) == (b"1709168523123 a\n" * 2, 2, 2)
    assert consumed == len(block) - len(line)
    found, consumed, count = entries(block, 0, ALL)
    assert (found, consumed, count) == ([(1, AT, b"a", True)] * 2, len(block) - len(line), 2)


def test_long_lines() -> None:
    """Entries of other engines may have up to 4 MiB. The GIL is released, and output grows."""
    text = "é\n\t" * 400_000
    block = entry(text, AT) * 2 + entry("x" * (4 << 20), AT) + entry("end\n", AT)
    made, consumed, count, _, _ = form("JSON").format(block, 0, 0, 1 << 40)
    assert (consumed, count) == (len(block), 3)
    assert json.loads(b'"' + made + b'"') == text + text + "end"
    assert form("JSON").format(block, 0, 0, 0)[2] == 1


def test_incomplete_line() -> None:
    """Is left for the next call; and nothing is consumed of nothing."""
    block = entry("a\n", AT)
    shape = form(frame="LINE")
    for size in range(len(block)):
        assert shape.format(block[:size], 0, 0, ALL)[:3] == (b"", 0, 0)
        assert entries(block[:size], 0, ALL) == ([], 0, 0)
    assert shape.format(block + block[:50], 0, 0, ALL)[:3] == (b"a\n", len(block), 1)
    assert shape.format(block, len(block), 0, ALL)[:3] == (b"", 0, 0)


def test_entries_by_room() -> None:
    block = b"".join(entry("x" * 10 + "\n", AT + at) for at in range(5))
    assert [entries(block, 0, room)[2] for room in (0, 1, 10, 11, 20, 21, 100)] == [1, 1, 1, 2, 2, 3, 5]


def test_refused() -> None:
    fixed = {"head": (b"", b""), "middle": (b"", b""), "tail": (b"", b"")}
    good = {"text": 0, "time": 0, "frame": 0, **fixed}
    for change in (
        *({"text": 4}, {"time": 10}, {"frame": 5}, {"frame": -1}, {"partial": 3}, {"longest": -1}),
        *({"head": (b"",)}, {"partial": wireform.FLUENTD}, {"partial": wireform.JOURNALD}),
        {"text": wireform.MSGPACK_STR, "partial": wireform.FLUENTD},
        {"tail": (b"", b"x" * (1 << 20))},
    ):
        with pytest.raises(ValueError):
            Form(**{**good, **change})  # type: ignore[arg-type]
    for change in ({"head": ("", "")}, {"middle": None}, {"tail": (None, b"")}, {"head": [b"", b""]}):
        with pytest.raises(TypeError):
            Form(**{**good, **change})  # type: ignore[arg-type]
    shape = Form(**good)  # type: ignore[arg-type]
    for start in (-1, 2):
        with pytest.raises(ValueError):
            shape.format(b"x", start, 0, 0)
        with pytest.raises(ValueError):
            entries(b"x", start, 0)
    for state in ((0, 0, 0), (0, -1, 0, 0)):
        with pytest.raises(ValueError):
            shape.state = state  # type: ignore[assignment]
    assert shape.state == (0, 0, 0, 0)


def test_threads() -> None:
    """Each with its own form; one form in two threads at once is refused, or they take turns."""
    block = b"".join(entry(f"line {at}\n", AT + at) for at in range(20_000))
    expected = wire(form("JSON", "RFC3339_NANO"), block)
    shared, found = form("JSON", "RFC3339_NANO"), []

    def run(shape: Form) -> None:
        try:
            found.append(shape.format(block, 0, 0, 1 << 30)[0])
        except RuntimeError:
            found.append(b"")

    threads = [threading.Thread(target=run, args=(shape,)) for shape in [shared] * 4 + [form("JSON", "RFC3339_NANO")]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found.count(expected) + found.count(b"") == 5 and expected in found


def test_random_blocks() -> None:
    """Mutated blocks: whatever is an entry to one function is one to the other."""
    noise = random.Random(1)
    lines = [entry(TEXT + "\n", AT), entry("x" * 50, AT + SECOND, 2), *(line + b"\n" for line, _ in OTHERS)]
    for _ in range(2000):
        block = bytearray(b"".join(noise.choices(lines, k=4)))
        for _ in range(noise.randrange(6)):
            block[noise.randrange(len(block))] = noise.choice([noise.randrange(256), 0x5C, 0x22, 0x0A, 0xE2])
        found, consumed, count = entries(bytes(block), 0, ALL)
        made = form("MSGPACK_STR").format(bytes(block), 0, 0, ALL)
        assert made[1:3] == (consumed, count)
        logs = msgspec.msgpack.decode(b"\xdd" + struct.pack(">I", count) + made[0])
        assert [log.encode() for log in logs] == [text for _, _, text, _ in found]
        made = form("JSON", frame="NUL").format(bytes(block), 0, 0, ALL)
        assert [json.loads(b'"' + each + b'"') for each in made[0].split(b"\0")[:-1]] == logs
