"""The json-file log: each written line against Python's json and a plain model of Docker's driver, each read against what was written."""

from __future__ import annotations

import errno
import gc
import json
import os
import random
import re
import resource
import struct
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine._fast.frames import Demultiplexer
from engine._fast.jsonlog import LogReader, LogWriter, time_text

SLICE = 16384
SECOND = 10**9
NAMES = {1: "stdout", 2: "stderr"}


# --- models ---------------------------------------------------------------------------------------------------------


def as_text(data: bytes) -> str:
    """UTF-8 as Go decodes it: U+FFFD for each byte that is part of no character."""
    return "".join(text for text, _ in _characters(data))


def _characters(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Each character with the bytes it stands for."""
    while data:
        try:
            whole, rest = data.decode(), b""
        except UnicodeDecodeError as error:
            whole, rest = data[: error.start].decode(), data[error.start :]
        yield from ((character, character.encode()) for character in whole)
        if rest:
            yield "\ufffd", rest[:1]
        data = rest[1:]


def escaped(data: bytes) -> str:
    """Docker's JSON string of `data`, without the quotes."""
    out = []
    for character, source in _characters(data):
        code = ord(character)
        if character == "\ufffd" and source != b"\xef\xbf\xbd":
            out.append("\\ufffd")
        elif character in '"\\':
            out.append("\\" + character)
        elif character in "\n\r":
            out.append({"\n": "\\n", "\r": "\\r"}[character])
        elif code < 0x20 or character in "<>&\u2028\u2029":
            out.append(f"\\u{code:04x}")
        else:
            out.append(character)
    return "".join(out)


def slices(data: bytes) -> tuple[list[bytes], bytes]:
    """The entries that a stream's bytes make, and what is left in the line: at 16 KiB a line is cut, before a character that is not whole."""
    entries = []
    while True:
        head = data[:SLICE]
        newline = head.find(b"\n")
        if newline >= 0:
            entries.append(data[: newline + 1])
            data = data[newline + 1 :]
        elif len(head) == SLICE:
            cut = SLICE
            for back in (1, 2, 3):
                byte = head[-back]
                if byte >= 0xC0:
                    if back < (4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2):
                        cut = SLICE - back
                    break
                if byte < 0x80:
                    break
            entries.append(data[:cut])
            data = data[cut:]
        else:
            return entries, data


LINE = re.compile(
    r'\{"log":"((?:[^"\\]|\\.)*)","stream":"(stdout|stderr)","time":"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{8}[1-9]Z)"\}\n'
)


def parsed(text: bytes) -> list[tuple[int, str, str, str]]:
    """(stream, escaped log, log, time) of each line, each of which must have exactly Docker's form and mean the same to Python's json."""
    entries = []
    for line in text.decode().split("\n")[:-1]:
        match = LINE.fullmatch(line + "\n")
        assert match, line[:200]
        loaded = json.loads(line)
        assert list(loaded) == ["log", "stream", "time"]
        assert (loaded["stream"], loaded["time"]) == (match[2], match[3])
        entries.append((1 if match[2] == "stdout" else 2, match[1], loaded["log"], match[3]))
    times = [entry[3] for entry in entries]
    assert all(a < b for a, b in pairwise(times))
    return entries


def entry(log: str, at: int, stream: int = 1) -> bytes:
    return (
        json.dumps({"log": log, "stream": NAMES[stream], "time": time_text(at)}, separators=(",", ":")) + "\n"
    ).encode()


@contextmanager
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.fixture(autouse=True)
def _descriptors() -> Iterator[None]:
    gc.collect()  # what earlier tests left is theirs
    before = sorted(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) == len(before)


def everything(reader: LogReader, chunk: int = 1 << 16) -> bytes:
    out = []
    while True:
        data = reader.read(chunk)
        if not data and reader.at_end:
            return b"".join(out)
        out.append(data)


def read(path: Path, tail: int | None = None, chunk: int = 1 << 16, **options: object) -> bytes:
    reader = LogReader(os.fsencode(path), **options)  # type: ignore[arg-type]
    if tail is not None:
        reader.seek_tail(tail)
    try:
        return everything(reader, chunk)
    finally:
        reader.close()


def files(path: Path) -> list[Path]:
    """Oldest first."""
    numbered = sorted(path.parent.glob(path.name + ".[0-9]*"), key=lambda file: -int(file.suffix[1:]))
    return [*numbered, path]


# --- time stamps ----------------------------------------------------------------------------------------------------


@given(st.integers(0, 7258118399 * SECOND))
def test_time_text(at: int) -> None:
    second, fraction = divmod(at, SECOND)
    assert time_text(at) == f"{datetime.fromtimestamp(second, UTC):%Y-%m-%dT%H:%M:%S}.{fraction:09}Z"


def test_time_text_refuses_other_ages() -> None:
    for at in (-1, 7258118400 * SECOND):
        with pytest.raises(ValueError):
            time_text(at)


# --- writing --------------------------------------------------------------------------------------------------------

output = st.one_of(
    st.binary(max_size=80),
    st.text(max_size=40).map(str.encode),
    st.sampled_from(
        [
            b"\n",
            b"",
            b"a\nb\n",
            b"\xe2\x82",
            b"\xac\n",
            b"\xf0\x9f",
            b"\x98\x80",
            '"\\<>&\u2028\u2029\x7f\r\t\b'.encode(),
        ]
    ),
    st.integers(SLICE - 6, SLICE + 6).map(lambda size: b"x" * size),
    st.integers(SLICE - 6, 2 * SLICE).map(lambda size: ("é€😀" * (size // 9)).encode()[:size]),
)
writes = st.lists(st.tuples(st.sampled_from((1, 2)), output), max_size=9)


@settings(max_examples=80)
@given(writes, st.booleans())
def test_any_output_in_any_split(calls: list[tuple[int, bytes]], reopen: bool) -> None:
    with directory() as place:
        path = place / "c.log"
        writer = LogWriter(os.fsencode(path))
        for stream, data in calls:
            writer.write(stream, data)
            assert writer.position() == (path.stat().st_ino, path.stat().st_size)
        wanted = {}
        for stream in (1, 2):
            whole, rest = slices(b"".join(data for which, data in calls if which == stream))
            assert writer.pending(stream) == rest
            wanted[stream] = [*whole, rest] if rest else whole
        writer.close()
        entries = parsed(path.read_bytes())
        for stream in (1, 2):
            mine = [item for item in entries if item[0] == stream]
            assert [item[1] for item in mine] == [escaped(data) for data in wanted[stream]]
            assert [item[2] for item in mine] == [as_text(data) for data in wanted[stream]]
            assert read(path, stdout=stream == 1, stderr=stream == 2) == "".join(item[2] for item in mine).encode()
        frames = Demultiplexer().feed(read(path, framed=True))
        assert [(stream, data.decode()) for stream, data in frames] == [(item[0], item[2]) for item in entries]
        if reopen:
            writer = LogWriter(os.fsencode(path))
            writer.write(1, b"again\n")
            writer.close()
            assert [item[2] for item in parsed(path.read_bytes())] == [*(item[2] for item in entries), "again\n"]


@given(st.text(max_size=60), st.lists(st.integers(0, 300), max_size=6))
def test_text_comes_back_byte_for_byte(text: str, cuts: list[int]) -> None:
    data = text.encode()
    with directory() as place:
        path = place / "c.log"
        writer = LogWriter(os.fsencode(path))
        marks = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
        for begin, end in pairwise(marks):
            writer.write(1, data[begin:end])
        writer.close()
        assert read(path) == data


def test_byte_by_byte() -> None:
    data = ('{"a":"\\n"}\n<é€😀>\t\u2028\n\n' + "x" * 40 + "\r\nend").encode() + b"\xff\xfe\n"
    with directory() as place:
        path = place / "c.log"
        writer = LogWriter(os.fsencode(path))
        for index in range(len(data)):
            writer.write(1, data[index : index + 1])
        writer.close()
        assert [item[1] for item in parsed(path.read_bytes())] == [
            escaped(part) for part in data.splitlines(keepends=True)[:1]
        ] + [escaped(part) for part in slices(data)[0][1:]]
        assert read(path, chunk=1) == as_text(data).encode()


def test_every_byte_and_every_pair_of_bytes_at_every_place_of_a_block() -> None:
    with directory() as place:
        path = place / "c.log"
        writer = LogWriter(os.fsencode(path))
        lines = [b"." * at + bytes((byte,)) + b"." * (17 - at) for at in range(18) for byte in range(256) if byte != 10]
        lines += [bytes((a, b)) for a in range(256) for b in range(0, 256, 5) if 10 not in (a, b)]
        writer.write(2, b"\n".join(lines) + b"\n")
        writer.close()
        assert [item[1] for item in parsed(path.read_bytes())] == [escaped(line + b"\n") for line in lines]
        assert read(path) == "".join(as_text(line) + "\n" for line in lines).encode()


def test_a_line_of_exactly_16_kib_is_cut_before_its_newline() -> None:
    with directory() as place:
        path = place / "c.log"
        writer = LogWriter(os.fsencode(path))
        writer.write(1, b"x" * (SLICE - 1) + b"\n" + b"y" * SLICE + b"\n")
        writer.close()
        assert [len(item[2]) for item in parsed(path.read_bytes())] == [SLICE, SLICE, 1]


def test_a_character_at_the_cut_stays_whole() -> None:
    for shift in range(4):
        line = (b"x" * (SLICE - 4 + shift) + "😀😀".encode()) * 2
        with directory() as place:
            path = place / "c.log"
            writer = LogWriter(os.fsencode(path))
            for at in range(0, len(line), 1000):
                writer.write(1, line[at : at + 1000])
            writer.close()
            assert read(path) == line
            assert max(len(item[2].encode()) for item in parsed(path.read_bytes())) <= SLICE


def test_end_of_one_stream_leaves_the_other_line_open(tmp_path: Path) -> None:
    path = tmp_path / "c.log"
    writer = LogWriter(os.fsencode(path))
    writer.write(1, b"out")
    writer.write(2, b"err")
    writer.end(1)
    assert (writer.pending(1), writer.pending(2)) == (b"", b"err")
    writer.write(1, b"more\n")
    writer.end()
    writer.end()
    writer.close()
    writer.close()
    assert [item[:2] for item in parsed(path.read_bytes())] == [(1, "out"), (1, "more\\n"), (2, "err")]


def test_misuse(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        LogWriter(os.fsencode(tmp_path / "no" / "c.log"))
    for arguments in ((b"",), (b"a\0b",), (b"x" * 5000,), (b"x", -1), (b"x", 1, 0)):
        with pytest.raises(ValueError):
            LogWriter(*arguments)
    (tmp_path / "link").symlink_to("elsewhere")
    with pytest.raises(OSError):
        LogWriter(os.fsencode(tmp_path / "link"))
    writer = LogWriter(os.fsencode(tmp_path / "c.log"))
    for stream in (0, 3):
        with pytest.raises(ValueError):
            writer.write(stream, b"x")
        with pytest.raises(ValueError):
            writer.pending(stream)
    writer.close()
    for call in (lambda: writer.write(1, b"x"), writer.position):
        with pytest.raises(ValueError):
            call()


def test_attributes_stand_between_stream_and_time(tmp_path: Path) -> None:
    path = tmp_path / "c.log"
    writer = LogWriter(os.fsencode(path), attrs=b'{"tier":"a b","z":"=","a":"\xd0\x96"}')
    writer.write(1, b"x\n")
    writer.close()
    assert list(json.loads(path.read_bytes())) == ["log", "stream", "attrs", "time"]
    assert read(path, details=b"given ") == b"a=%D0%96,tier=a+b,z=%3D x\n"
    assert read(path) == b"x\n"
    with pytest.raises(ValueError):
        LogWriter(os.fsencode(path), attrs=b'{"a":\n1}')


def test_time_goes_on_where_the_file_ends_even_when_the_clock_is_behind(tmp_path: Path) -> None:
    path = tmp_path / "c.log"
    future = 4102444799 * SECOND + 999_999_998  # the last but one nanosecond of 2099
    path.write_bytes(entry("old\n", future))
    writer = LogWriter(os.fsencode(path))
    writer.write(1, b"a\nb\nc\n")
    writer.close()
    assert [item[3] for item in parsed(path.read_bytes().split(b"\n", 1)[1])] == [
        time_text(future + 1),
        time_text(future + 3),
        time_text(future + 4),
    ]


def test_time_goes_on_from_the_rotated_file_when_the_live_one_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "c.log"
    future = 4102444800 * SECOND
    (tmp_path / "c.log.1").write_bytes(entry("old\n", future) + b"garbage\n")
    writer = LogWriter(os.fsencode(path), 1000, 2)
    writer.write(1, b"a\n")
    writer.close()
    assert parsed(path.read_bytes())[0][3] == time_text(future + 1)


@pytest.mark.parametrize("tail", [b'{"log":"to', b"\0" * 40000, b"x" * 70000, b"{"])
def test_opening_cuts_a_torn_tail_off(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "c.log"
    whole = entry("one\n", SECOND) + b"nonsense\n"
    for before in (whole, b""):
        path.write_bytes(before + tail)
        writer = LogWriter(os.fsencode(path))
        assert path.read_bytes() == before
        assert writer.position() == (path.stat().st_ino, len(before))
        writer.write(1, b"two\n")
        writer.close()
        assert read(path) == (b"one\n" if before else b"") + b"two\n"


# --- failing writes -------------------------------------------------------------------------------------------------


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Files cannot grow beyond `size`: write(2) writes what fits, then fails with EFBIG (Python ignores SIGXFSZ)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_drops_entries_says_so_once_and_recovers(tmp_path: Path) -> None:
    path = tmp_path / "c.log"
    writer = LogWriter(os.fsencode(path))
    writer.write(1, b"first\n")
    size = path.stat().st_size
    with file_size_limit(size * 2 + 30):
        with pytest.raises(OSError) as raised:
            writer.write(1, b"secon\nthird\nfourth\n")
        assert (raised.value.errno, raised.value.filename) == (errno.EFBIG, str(path))
        assert (writer.error, writer.dropped) == (errno.EFBIG, 2)
        writer.write(1, b"fifth which is longer\npart")  # silent now
        assert (writer.error, writer.dropped) == (errno.EFBIG, 3)
        assert read(path) == b"first\nsecon\n"  # nothing torn is left behind
    writer.write(1, b"ly kept\n")
    assert (writer.error, writer.dropped) == (0, 3)
    assert writer.position() == (path.stat().st_ino, path.stat().st_size)
    with file_size_limit(path.stat().st_size), pytest.raises(OSError):
        writer.write(1, b"again said once\n")
    writer.close()
    assert [item[2] for item in parsed(path.read_bytes())] == ["first\n", "secon\n", "partly kept\n"]


def test_a_device_that_is_full() -> None:
    writer = LogWriter(b"/dev/full")
    with pytest.raises(OSError) as raised:
        writer.write(1, b"x\n" * 100_000)
    assert (raised.value.errno, writer.dropped) == (errno.ENOSPC, 100_000)
    writer.close()


def test_a_follower_sees_through_a_failed_write(tmp_path: Path) -> None:
    path = tmp_path / "c.log"
    writer = LogWriter(os.fsencode(path))
    writer.write(1, b"one\n")
    reader = LogReader(os.fsencode(path))
    assert everything(reader) == b"one\n"
    with path.open("ab") as file:  # as if the write were half done
        file.write(b'{"log":"tor')
    assert everything(reader) == b""
    os.truncate(path, reader.position()[1])
    writer.write(1, b"two\n")
    assert everything(reader) == b"two\n"
    assert reader.position() == writer.position()
    reader.close()
    writer.close()


# --- rotation -------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.integers(150, 2000), st.integers(1, 6), st.lists(st.integers(0, 400), max_size=60), st.integers(1, 4))
def test_rotation(max_size: int, max_file: int, lengths: list[int], batch: int) -> None:
    lines = [b"%d %s\n" % (index, b"." * length) for index, length in enumerate(lengths)]
    with directory() as place:
        path = place / "c.log"
        for start in range(0, len(lines), batch * 7):  # reopened every seven batches
            writer = LogWriter(os.fsencode(path), max_size, max_file)
            for at in range(start, min(start + batch * 7, len(lines)), batch):
                writer.write(1, b"".join(lines[at : min(at + batch, start + batch * 7)]))
            assert writer.position() == (path.stat().st_ino, path.stat().st_size)
            writer.close()
        if not lines:
            return
        kept = files(path)
        assert len(kept) <= max_file
        assert [file.name for file in kept] == [f"c.log.{n}" for n in range(len(kept) - 1, 0, -1)] + ["c.log"]
        assert not (place / "c.log.new").exists()
        for file in kept:
            assert file.stat().st_size <= max_size or file.read_bytes().count(b"\n") == 1
        together = [item[2].encode() for item in parsed(b"".join(file.read_bytes() for file in kept))]
        assert together == lines[len(lines) - len(together) :]
        if len(kept) < max_file:
            assert together == lines
        assert read(path) == b"".join(together)


@settings(max_examples=60)
@given(
    st.integers(0, 3000),
    st.integers(1, 18),
    st.lists(st.lists(st.integers(0, 300), max_size=120), max_size=4),
    st.sampled_from((1, 40)),
)
def test_files_are_the_same_however_much_comes_at_once(
    max_size: int, max_file: int, calls: list[list[int]], by: int
) -> None:
    """What rotation takes away within a call is not written; what stays is what single lines leave."""
    found = []
    for single in (True, False):
        number = 0
        with directory() as place:
            path = place / "c.log"
            writer = LogWriter(os.fsencode(path), max_size, max_file)
            for lengths in calls:
                lines = [b"%d %s\n" % (number + index, b"." * length * by) for index, length in enumerate(lengths)]
                number += len(lines)
                for data in lines if single else [b"".join(lines)]:
                    writer.write(1, data)
                assert writer.position() == (path.stat().st_ino, path.stat().st_size)
            writer.close()
            found.append([[item[2] for item in parsed(file.read_bytes())] for file in files(path)])
            assert not (place / "c.log.new").exists()
    assert found[0] == found[1]


def test_a_rotation_that_fails_is_tried_again_and_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "c.log"
    (tmp_path / "c.log.new").mkdir()
    writer = LogWriter(os.fsencode(path), 200, 3)
    for index in range(10):
        writer.write(1, b"%d\n" % index)
    assert read(path) == b"".join(b"%d\n" % index for index in range(10))
    assert writer.error == 0
    (tmp_path / "c.log.new").rmdir()
    for index in range(100):
        writer.write(1, b"%d\n" % index)
    assert len(files(path)) == 3
    assert path.stat().st_size <= 200
    writer.close()


def test_a_log_emptied_by_an_operator_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "c.log"
    writer = LogWriter(os.fsencode(path), 400, 2)
    reader = LogReader(os.fsencode(path))
    for round_ in range(3):  # each shorter than the one before: that is how a reader can know
        for index in range(4 - round_):
            writer.write(1, b"%d %d\n" % (round_, index))
        assert everything(reader) == b"".join(b"%d %d\n" % (round_, index) for index in range(4 - round_))
        os.truncate(path, 0)
        assert writer.position() == (path.stat().st_ino, 0)
    writer.close()
    reader.close()
    assert files(path) == [path]


# --- reading --------------------------------------------------------------------------------------------------------


def test_no_log_yet(tmp_path: Path) -> None:
    path = tmp_path / "c.log"
    reader = LogReader(os.fsencode(path), since_ns=1)
    reader.seek_tail(3)
    assert (everything(reader), reader.position(), reader.done) == (b"", (0, 0), False)
    writer = LogWriter(os.fsencode(path))
    writer.write(1, b"now\n")
    assert everything(reader) == b"now\n"
    assert reader.position() == writer.position()
    writer.close()
    reader.close()
    assert (reader.read(10), reader.done, reader.at_end) == (b"", True, True)


def test_other_forms_of_the_same(tmp_path: Path) -> None:
    """What Docker's and others' writers make: short fractions, other order, spaces, unknown keys, escapes this engine does not use.

    An entry without `log` shows nothing.
    """
    path = tmp_path / "c.log"
    path.write_bytes(
        b'{"time":"2024-02-29T01:02:03Z","stream":"stderr","log":"a\\n"}\n'
        b' { "log" : "b\\n" , "stream" : "stdout" , "time" : "2024-02-29T03:02:03.5+02:00" , "x" : {"y":[1,"}"]} } \r\n'
        b'{"log":"\\ud83d\\ude00\\u00e9\\/\\b\\f\\t\\"\\\\\\ud83d\\n","stream":"stdout","attrs":{"k":"v"},"time":"2024-02-29T01:02:04.000000001Z"}\n'
        b'\0\0\0{"stream":"stdout","time":"2024-02-29T01:02:05.12Z"}\n'
        b'{"log":"c","stream":"stdout","time":"2024-02-29T01:02:06.123456789123Z"}\n'
    )
    assert read(path, timestamps=True).decode() == (
        "2024-02-29T01:02:03.000000000Z a\n"
        "2024-02-29T01:02:03.500000000Z b\n"
        '2024-02-29T01:02:04.000000001Z 😀é/\b\f\t"\\\ufffd\n'
        "2024-02-29T01:02:06.123456789Z c"
    )
    assert read(path, stdout=False) == b"a\n"


GARBAGE = [
    b"",
    b"{}",
    b"nonsense",
    b"\0\0\0",
    b"\xff" * 300,
    b'{"log":"x","stream":"stdin","time":"2024-02-29T01:02:03Z"}',
    b'{"log":"x","stream":"stdout","time":"yesterday"}',
    b'{"log":"x","stream":"stdout"}',
    b'{"log":"x","stream":"stdout","time":"2024-02-29T01:02:03Z"',
    b'{"log":"x","stream":"stdout","time":"2024-02-29T01:02:03Z"}}',
    b'{"log":"x\\u12g4","stream":"stdout","time":"2024-02-29T01:02:03.123456789Z"}',
    b'{"log":"x\\","stream":"stdout","time":"2024-02-29T01:02:03.123456789Z"}',
    b'{"log":"x" "stream":"stdout","time":"2024-02-29T01:02:03.123456789Z"}',
    b'{"log":"x\\q","stream":"stdout","time":"2024-02-29T01:02:03.123456789Z"}',
    b'["log","stream","time"]',
    b'{"log":"x","stream":"stdout","time":"2024-13-29T01:02:03.123456789Z","attrs":[[[[{]}',
]


def test_garbage_is_skipped_and_not_counted(tmp_path: Path) -> None:
    path = tmp_path / "c.log"
    lines = [b"line %d\n" % index for index in range(40)]
    with path.open("wb") as file:
        for index, line in enumerate(lines):
            file.write(GARBAGE[index % len(GARBAGE)] + b"\n" + entry(line.decode(), (index + 1) * SECOND))
        file.write(b"garbage at the end\n")
    assert read(path) == b"".join(lines)
    for count in range(45):
        assert read(path, tail=count) == b"".join(lines[max(0, 40 - count) :])


@settings(max_examples=300)
@given(st.binary(max_size=300), st.integers(0, 400))
def test_any_bytes_can_be_read_without_harm(noise: bytes, at: int) -> None:
    good = entry("first\n", SECOND) + entry("last\n", 2 * SECOND)
    with directory() as place:
        path = place / "c.log"
        path.write_bytes(good[:at] + noise + good[at:] + b"\n" + entry("end\n", 3 * SECOND))
        assert read(path, timestamps=True, details=b" ", framed=True).endswith(b"end\n")
        assert read(path, tail=1) == b"end\n"
        assert read(path, since_ns=3 * SECOND, chunk=1) == b"end\n"


def test_a_line_too_long_for_an_entry_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "c.log"
    long = "x" * (3 << 20)
    path.write_bytes(
        entry("a\n", 1)
        + b'{"log":"'
        + b"y" * (9 << 20)
        + b'"}\n'
        + entry(long, 2)
        + entry("b\n", 3)
        + b"z" * (5 << 20)
        + b"\n"
    )
    assert read(path) == b"a\n" + long.encode() + b"b\n"
    assert read(path, tail=1) == b"b\n"
    assert read(path, tail=2) == long.encode() + b"b\n"
    assert read(path, tail=3) == read(path, tail=9) == read(path)
    assert read(path, since_ns=3) == b"b\n"


def filled(
    place: Path, count: int = 300, max_size: int = 3000, max_file: int = 100, seed: int = 1
) -> tuple[Path, list[tuple[int, bytes, int]]]:
    """A rotated log of both streams, and its entries (stream, bytes, ns)."""
    chance = random.Random(seed)
    path = place / "c.log"
    writer = LogWriter(os.fsencode(path), max_size, max_file)
    for index in range(count):
        writer.write(chance.choice((1, 2)), b"%d %s\n" % (index, b'"' * chance.choice((0, 0, 5, 200))))
    writer.close()
    entries = []
    for item in parsed(b"".join(file.read_bytes() for file in files(path))):
        whole, fraction = item[3][:-1].split(".")
        at = int(datetime.fromisoformat(whole + "+00:00").timestamp()) * SECOND + int(fraction)
        entries.append((item[0], item[2].encode(), at))
    return path, entries


def joined(entries: list[tuple[int, bytes, int]]) -> bytes:
    return b"".join(data for _, data, _ in entries)


def test_tail_is_the_last_entries_for_every_number(tmp_path: Path) -> None:
    path, entries = filled(tmp_path)
    assert len(files(path)) > 5
    for count in range(len(entries) + 3):
        last = entries[max(0, len(entries) - count) :]
        assert read(path, tail=count) == joined(last)
        assert read(path, tail=count, stdout=False) == joined([item for item in last if item[0] == 2])
    with pytest.raises(ValueError):
        read(path, tail=-1)


def test_tail_of_entries_larger_than_a_block(tmp_path: Path) -> None:
    path = tmp_path / "c.log"
    writer = LogWriter(os.fsencode(path))
    lines = [b"\x01" * (SLICE - 1) + b"\n" for _ in range(20)]
    writer.write(1, b"".join(lines))
    writer.close()
    for count in range(22):
        assert len(read(path, tail=count)) == SLICE * min(count, 20)


def test_since_and_until_include_their_instant(tmp_path: Path) -> None:
    path, entries = filled(tmp_path)
    for index in range(0, len(entries), 7):
        at = entries[index][2]
        assert read(path, since_ns=at) == joined(entries[index:])
        assert read(path, since_ns=at + 1) == joined(entries[index + 1 :])
        assert read(path, until_ns=at) == joined(entries[: index + 1])
        assert read(path, until_ns=at - 1) == joined(entries[:index])
        assert read(path, since_ns=at, tail=20) == joined(entries[max(index, len(entries) - 20) :])
        later = entries[min(index + 11, len(entries) - 1)][2]
        assert read(path, since_ns=at, until_ns=later) == joined(entries[index : index + 12])
    assert read(path, since_ns=1) == joined(entries)
    assert read(path, since_ns=1 << 62) == b""


def test_until_is_done(tmp_path: Path) -> None:
    path, entries = filled(tmp_path)
    reader = LogReader(os.fsencode(path), until_ns=entries[5][2])
    assert everything(reader) == joined(entries[:6])
    assert reader.done
    reader.close()


def test_since_finds_its_place_in_a_large_file(tmp_path: Path) -> None:
    path = tmp_path / "c.log"
    with path.open("wb") as file:
        for index in range(40_000):
            file.write(entry(f"{index}\n", (index + 1) * SECOND) + (b"garbage\n" if index % 3 else b""))
    for index in (0, 1, 19_999, 20_000, 39_990, 39_999):
        reader = LogReader(os.fsencode(path), since_ns=(index + 1) * SECOND)
        assert (index + 1) * 70 - reader.position()[1] < 600_000
        assert reader.position()[1] > index * 70 - 600_000
        assert everything(reader, 1 << 20) == b"".join(b"%d\n" % number for number in range(index, 40_000))
        reader.close()


@settings(max_examples=40)
@given(st.integers(1, 5000), st.booleans(), st.booleans(), st.sampled_from([b"", b" ", b"tier=a "]))
def test_chunks_of_any_size_and_every_dress(chunk: int, framed: bool, timestamps: bool, details: bytes) -> None:
    with directory() as place:
        path, entries = filled(place, count=60)
        wanted = []
        for stream, data, at in entries:
            line = (time_text(at).encode() + b" " if timestamps else b"") + details + data
            wanted.append(struct.pack(">BxxxL", stream, len(line)) + line if framed else line)
        reader = LogReader(os.fsencode(path), framed=framed, timestamps=timestamps, details=details)
        got = []
        while data := reader.read(chunk):
            assert len(data) <= max(chunk, 700)
            got.append(data)
        reader.close()
        assert b"".join(got) == b"".join(wanted)


def test_a_long_line_has_one_time_stamp(tmp_path: Path) -> None:
    path = tmp_path / "c.log"
    writer = LogWriter(os.fsencode(path))
    long = ("é" * SLICE * 2).encode()
    writer.write(1, b"a" + long)
    writer.write(2, b"between\n")
    writer.write(1, b"end\nno newline")
    writer.end()
    writer.write(1, b"next\n")
    writer.close()
    lines = read(path, timestamps=True, stderr=False, details=b"d ")
    stamp = rb"\d{4}-[^ ]{25} d "
    assert re.fullmatch(stamp + b"a" + long + b"end\n" + stamp + b"no newline" + stamp + b"next\n", lines)
    assert read(path, stderr=False) == b"a" + long + b"end\nno newlinenext\n"


def test_until_position_is_exact_at_every_entry(tmp_path: Path) -> None:
    path = tmp_path / "c.log"
    writer = LogWriter(os.fsencode(path), 700, 50)
    positions = [writer.position()]
    for index in range(60):
        writer.write(1, b"%d\n" % index)
        positions.append(writer.position())
    writer.write(1, b"open line")
    for count, position in enumerate(positions):
        wanted = b"".join(b"%d\n" % index for index in range(count))
        reader = LogReader(os.fsencode(path), until_position=position)
        assert everything(reader, 7) == wanted
        assert reader.done
        reader.close()
        assert read(path, until_position=position, tail=2) == b"".join(
            b"%d\n" % index for index in range(max(0, count - 2), count)
        )
    writer.close()


def test_until_position_in_a_file_that_is_gone_is_nothing(tmp_path: Path) -> None:
    path = tmp_path / "c.log"
    writer = LogWriter(os.fsencode(path), 200, 2)
    writer.write(1, b"first\n")
    gone = writer.position()
    holder = os.open(path, os.O_RDONLY)  # its inode number stays its own
    for index in range(50):
        writer.write(1, b"%d\n" % index)
    reader = LogReader(os.fsencode(path), until_position=gone)
    assert (reader.read(100), reader.done) == (b"", True)
    os.close(holder)
    writer.close()


# --- following ------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    st.integers(150, 1500), st.lists(st.tuples(st.integers(0, 12), st.booleans()), max_size=40), st.integers(1, 3000)
)
def test_following_over_rotation_loses_and_repeats_nothing(
    max_size: int, steps: list[tuple[int, bool]], chunk: int
) -> None:
    with directory() as place:
        path = place / "c.log"
        writer = LogWriter(os.fsencode(path), max_size, 500)
        reader = LogReader(os.fsencode(path))
        got, written = [], []
        for count, look in steps:
            for _ in range(count):
                written.append(b"%d\n" % len(written))
                writer.write(1, written[-1])
            if look:
                got.append(everything(reader, chunk))
                assert b"".join(got) == b"".join(written)
                assert reader.position() == writer.position()
        writer.close()
        got.append(everything(reader, chunk))
        reader.close()
        assert b"".join(got) == b"".join(written)


def test_a_follower_that_is_too_slow_skips_what_is_gone_and_no_more(tmp_path: Path) -> None:
    path = tmp_path / "c.log"
    writer = LogWriter(os.fsencode(path), 500, 3)
    writer.write(1, b"0\n")
    reader = LogReader(os.fsencode(path))
    assert reader.read(100) == b"0\n"
    for index in range(1, 100):
        writer.write(1, b"%d\n" % index)
    rest = [int(line) for line in everything(reader).split()]
    first = int(read(path).split()[0])
    mine = [number for number in rest if number < first]
    assert mine == list(range(1, len(mine) + 1))  # the file it held
    assert rest[len(mine) :] == list(range(first, 100))
    reader.close()
    writer.close()


@pytest.mark.parametrize("max_file", [1, 3])
def test_a_follower_that_reads_on_holds_what_rotation_takes_away(tmp_path: Path, max_file: int) -> None:
    path = tmp_path / "c.log"
    writer = LogWriter(os.fsencode(path), 500, max_file)
    writer.write(1, b"0\n")
    reader = LogReader(os.fsencode(path))
    got, inodes = [reader.read(100)], {path.stat().st_ino}
    for index in range(1, 400):
        writer.write(1, b"%d\n" % index)
        inodes.add(path.stat().st_ino)
        if index % 3 == 0:
            got.append(reader.read(4))
    assert len(inodes) > 10 and int(read(path).split()[0]) > 300, "most of it is gone from the disk"
    assert b"".join(got) != b"".join(b"%d\n" % index for index in range(400)), "and was not read before it went"
    got.append(everything(reader))
    assert b"".join(got) == b"".join(b"%d\n" % index for index in range(400))
    reader.close()
    writer.close()


def test_a_follower_that_falls_far_behind_holds_no_more_than_its_share(tmp_path: Path) -> None:
    path = tmp_path / "c.log"
    writer = LogWriter(os.fsencode(path), 500, 1)
    writer.write(1, b"0\n")
    reader = LogReader(os.fsencode(path))
    before = len(os.listdir("/proc/self/fd"))
    got = []
    for index in range(1, 2000):
        writer.write(1, b"%d\n" % index)
        if index % 10 == 0:
            got.append(reader.read(1))
    assert 10 < len(os.listdir("/proc/self/fd")) - before <= 64
    numbers = [int(line) for line in b"".join([*got, everything(reader)]).split()]
    assert numbers == sorted(set(numbers)) and numbers[-1] == 1999
    reader.close()
    assert len(os.listdir("/proc/self/fd")) == before - 1
    writer.close()


@settings(max_examples=60)
@given(
    st.integers(150, 600),
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(0, 60), st.sampled_from(["", "told", "read"])), max_size=60),
)
def test_rotation_waits_for_a_follower(max_size: int, max_file: int, steps: list[tuple[int, str]]) -> None:
    """Many files' worth of lines come between two looks, and the word of what is held comes late: nothing is lost, and little is kept."""
    with directory() as place:
        path = place / "c.log"
        writer = LogWriter(os.fsencode(path), max_size, max_file)
        writer.follow(7, 0)
        reader = LogReader(os.fsencode(path))
        got, written = [], []
        for count, look in steps:
            written += [b"%d\n" % index for index in range(len(written), len(written) + count)]
            writer.write(1, b"".join(written[len(written) - count :]))
            if look:
                got.append(everything(reader, 100))
            if look == "told":
                writer.follow(7, reader.newest())
        writer.close()
        got.append(everything(reader))
        reader.close()
        assert b"".join(got) == b"".join(written)


def test_rotation_goes_on_when_followers_are_gone(tmp_path: Path) -> None:
    path = tmp_path / "c.log"
    writer = LogWriter(os.fsencode(path), 500, 3)
    writer.follow(1, 0)
    writer.follow(2, 0)
    writer.unfollow(3)
    inode = path.stat().st_ino
    writer.write(1, b"line\n" * 1000)
    assert path.stat().st_ino == inode
    writer.follow(1, inode)
    writer.write(1, b"line\n" * 1000)
    assert path.stat().st_ino == inode, "the other is not there yet"
    writer.unfollow(2)
    writer.write(1, b"line\n" * 1000)
    assert path.stat().st_ino != inode
    writer.unfollow(1)
    writer.write(1, b"line\n" * 1000)
    assert path.stat().st_size <= 500
    assert len(list(tmp_path.iterdir())) == 3
    writer.close()


def test_a_follower_that_never_comes_costs_a_bounded_log_and_nobody_else_a_line(tmp_path: Path) -> None:
    path = tmp_path / "c.log"
    lenience = 32 << 20
    writer = LogWriter(os.fsencode(path), 10_000, 4)
    reader = LogReader(os.fsencode(path))
    writer.follow(1, 0)
    writer.follow(2, reader.newest())
    block = [b"%07d %s\n" % (index, b"x" * 8000) for index in range(100)]
    got, largest = [], 0
    for turn in range(90):  # 72 MB of entries
        writer.write(1, b"".join(block))
        largest = max(largest, sum(file.stat().st_size for file in tmp_path.iterdir()))
        while chunk := reader.read(1 << 20):
            got.append(chunk)
        writer.follow(2, reader.newest())
        if turn == 50:
            assert writer.outrun == 1
            writer.follow(1, 0)  # it is heard of again, and lost once more
    assert writer.outrun == 1
    assert b"".join(got) == b"".join(block) * 90
    assert lenience < largest < 2 * lenience + 4 * 10_000 + (1 << 20)
    writer.unfollow(1)
    writer.unfollow(2)
    for _ in range(5):
        writer.write(1, b"".join(block))
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 4 * 10_000
    reader.close()
    writer.close()


def test_until_now_is_what_there_was(tmp_path: Path) -> None:
    path = tmp_path / "c.log"
    writer = LogWriter(os.fsencode(path), 300, 10)
    assert everything(LogReader(os.fsencode(tmp_path / "none"), until_now=True)) == b""
    for index in range(10):
        writer.write(1, b"%d\n" % index)
    reader = LogReader(os.fsencode(path), until_now=True)
    assert reader.read(3) == b"0\n"
    for index in range(10, 40):
        writer.write(1, b"%d\n" % index)
    assert everything(reader) == b"".join(b"%d\n" % index for index in range(1, 10))
    assert reader.done
    reader.close()
    with path.open("ab") as file:  # an entry that is being written
        file.write(b'{"log":"to')
    reader = LogReader(os.fsencode(path), until_now=True)
    with path.open("ab") as file:
        file.write(b'rn\\n","stream":"stdout","time":"2026-01-02T03:04:05.123456789Z"}\n')
    reader.seek_tail(1)
    assert everything(reader) == b"39\n"
    reader.close()
    writer.close()


def test_following_a_writer_in_another_thread(tmp_path: Path) -> None:
    path = tmp_path / "c.log"
    writer = LogWriter(os.fsencode(path), 20_000, 1000)
    total = 20_000
    ended = threading.Event()

    def write() -> None:
        for at in range(0, total, 20):
            writer.write(1, b"".join(b"%d\n" % index for index in range(at, at + 20)))
        writer.close()
        ended.set()

    thread = threading.Thread(target=write)
    reader = LogReader(os.fsencode(path))
    thread.start()
    got = []
    while not ended.is_set():
        got.append(reader.read(4096))
    thread.join()
    got.append(everything(reader))
    reader.close()
    assert b"".join(got) == b"".join(b"%d\n" % index for index in range(total))


def test_a_torn_line_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "c.log"
    lines = entry("one\n", 1) + entry("two é\n", 2)
    reader = None
    got = b""
    with path.open("wb", buffering=0) as file:
        for index in range(len(lines)):
            file.write(lines[index : index + 1])
            reader = reader or LogReader(os.fsencode(path))
            got += everything(reader)
            whole = lines[: index + 1].count(b"\n")
            assert got == b"one\ntwo \xc3\xa9\n"[: (0, 4, 11)[whole]]
    assert reader is not None
    reader.close()


def test_a_read_does_not_look_through_a_large_log_in_one_go(tmp_path: Path) -> None:
    path = tmp_path / "c.log"
    writer = LogWriter(os.fsencode(path))
    for _ in range(45):
        writer.write(1, (b"x" * 99 + b"\n") * 10_000)
    writer.write(2, b"found\n")
    writer.close()
    reader = LogReader(os.fsencode(path), stdout=False)
    assert (reader.read(1 << 20), reader.at_end) == (b"", False)
    assert everything(reader) == b"found\n"
    reader.close()
