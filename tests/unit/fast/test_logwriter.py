"""The json-file log: each written line compared with Python's json and a plain model of Docker's
driver."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine._fast.frames import Demultiplexer
from engine._fast.jsonentry import time_text
from engine._fast.logreader import LogReader
from engine._fast.logwriter import LogWriter
from engine._fast.spool import PackedLog
from tests.unit.fast.jsonlogs import (  # noqa: F401 (_descriptors: a fixture)
    SECOND,
    SLICE,
    _descriptors,
    as_text,
    directory,
    entry,
    escaped,
    everything,
    files,
    parsed,
    read,
    slices,
)

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


@given(st.lists(st.one_of(st.binary(max_size=60), output)), st.lists(st.integers(0, 300), max_size=6))
def test_an_exact_log_gives_back_any_bytes(parts: list[bytes], cuts: list[int]) -> None:
    data = b"".join(parts)
    with directory() as place:
        path = place / "c.log"
        writer = LogWriter(os.fsencode(path), exact=True)
        marks = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
        for begin, end in pairwise(marks):
            writer.write(1, data[begin:end])
        writer.close()
        for line in path.read_bytes().splitlines():
            json.loads(line)
        assert read(path) == data


def test_an_exact_log_keeps_every_pair_of_bytes(tmp_path: Path) -> None:
    path = tmp_path / "c.log"
    data = b"".join(bytes((a, b)) for a in range(256) for b in range(256))
    writer = PackedLog(os.fsencode(path), 1 << 30, 2, exact=True)
    writer.write(1, data)
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


def test_time_goes_on_where_the_file_ends_when_the_clock_is_a_little_behind(tmp_path: Path) -> None:
    path = tmp_path / "c.log"
    future = time.time_ns() + 2 * SECOND
    path.write_bytes(entry("old\n", future - future % 10 + 1))
    writer = LogWriter(os.fsencode(path))
    writer.write(1, b"a\nb\nc\n")
    writer.close()
    assert len(parsed(path.read_bytes())) == 4  # which asserts their order
    assert not path.stat().st_mode & stat.S_ISVTX


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("kind", [LogWriter, PackedLog])
def test_times_are_true_again_after_the_clock_was_ahead(tmp_path: Path, kind: type[LogWriter], rotated: bool) -> None:
    path = tmp_path / "c.log"
    future = 1924992000 * SECOND + 1  # 2031
    (tmp_path / "c.log.1" if rotated else path).write_bytes(entry("old\n", future) + b"garbage\n")
    before = time.time_ns()
    writer = kind(os.fsencode(path), 10_000, 2)
    writer.write(1, b"a\nb\n")
    writer.write(1, b"c\n")
    writer.close()
    lines = path.read_bytes().splitlines(keepends=True)[0 if rotated else 2 :]
    times = [item[3] for item in parsed(b"".join(lines))]
    after = time_text(time.time_ns())
    assert sorted([after, *times, time_text(before - 1)]) == [time_text(before - 1), *times, after]
    # what `since` and `until` select, in the order of the file
    assert read(path, since_ns=before - 1) == b"old\na\nb\nc\n"
    assert read(path, until_ns=time.time_ns()) == b"a\nb\nc\n"
    assert read(path) == b"old\na\nb\nc\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_times_do_not_go_back_in_a_file_whose_mode_cannot_say_so(tmp_path: Path) -> None:
    """The reader's search by time needs that bit."""
    path = tmp_path / "c.log"
    future = 1924992000 * SECOND + 1  # 2031
    path.write_bytes(entry("old\n", future))
    writer = LogWriter(os.fsencode(path))
    with files_of_another_user():
        writer.write(1, b"a\n")
    assert len(parsed(path.read_bytes())) == 2  # which asserts their order
    before = time.time_ns()
    writer.write(1, b"b\n")
    writer.close()
    assert path.stat().st_mode & stat.S_ISVTX
    assert read(path, until_ns=time.time_ns()) == b"b\n"
    assert read(path, since_ns=before - 1) == b"old\na\nb\n"


@contextmanager
def files_of_another_user() -> Iterator[None]:
    """This thread may write to files that are open, and change no mode: setfsuid(2).

    The change makes the process undumpable (PR_SET_DUMPABLE, prctl(2)), which other tests look at.
    """
    libc = ctypes.CDLL(None)
    libc.setfsuid(65534)
    try:
        yield
    finally:
        libc.setfsuid(0)
        libc.prctl(4, 1, 0, 0, 0)


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


# --- failing writes -------------------------------------------------------------------------------


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Limit files to `size`: write(2) writes the part that fits, then fails with EFBIG (Python
    ignores SIGXFSZ)."""
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


@pytest.mark.parametrize("kind", ["fifo", "device", "directory", "socket"])
def test_only_a_regular_file_is_a_log(tmp_path: Path, kind: str) -> None:
    """A FIFO would block the caller in open(2) or, once full, in write(2)."""
    path = tmp_path / "c.log"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(path))
    else:
        path = Path("/dev/full")
    with pytest.raises(OSError, match=r"regular file|directory|No such device"):
        LogWriter(os.fsencode(path))
    with pytest.raises(OSError, match=r"regular file|No such device"):
        LogReader(os.fsencode(path))


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


# --- rotation -------------------------------------------------------------------------------------


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
    """Entries that rotation removes within a call are not written; the others are the same as when
    written line by line."""
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
    for round_ in range(3):  # each shorter than the one before, by which a reader can detect it
        for index in range(4 - round_):
            writer.write(1, b"%d %d\n" % (round_, index))
        assert everything(reader) == b"".join(b"%d %d\n" % (round_, index) for index in range(4 - round_))
        os.truncate(path, 0)
        assert writer.position() == (path.stat().st_ino, 0)
    writer.close()
    reader.close()
    assert files(path) == [path]
