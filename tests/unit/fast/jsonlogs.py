"""Models of Docker's json-file driver that the tests of entries, writer and reader share."""

from __future__ import annotations

import gzip
import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest

from engine._fast.jsonentry import time_text
from engine._fast.logreader import LogReader
from engine._fast.packed import pack
from tests.support.engine.descriptors import none_left_open

SLICE = 16384
SECOND = 10**9
NAMES = {1: "stdout", 2: "stderr"}


# --- models ---------------------------------------------------------------------------------------


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
    """The entries that a stream's bytes make, and the rest of the line. A line is cut at 16 KiB,
    before an incomplete character."""
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
    """(stream, escaped log, log, time) of each line; asserts that each has exactly Docker's form
    and means the same to Python's json."""
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
    with none_left_open():
        yield


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
    numbered = [file for file in path.parent.glob(path.name + ".[0-9]*") if not file.name.endswith(".packing")]
    return [*sorted(numbered, key=lambda file: -number(file)), path]


def number(file: Path) -> int:
    """Of a rotated file, which may be packed."""
    return int(file.name.removesuffix(".gz").rpartition(".")[2])


def original(file: Path) -> bytes:
    data = file.read_bytes()
    return gzip.decompress(data) if file.suffix == ".gz" else data


def packed_copy(file: Path) -> Path:
    """A rotated file, packed into one beside it, as the daemon does it before the monitor renames
    the result."""
    copy = file.with_name(f"{file.name.rpartition('.')[0]}.{file.stat().st_ino}.packing")
    with file.open("rb") as source, copy.open("w+b") as into:
        pack(source.fileno(), into.fileno())
    return copy


def pack_file(file: Path) -> Path:
    """Pack a rotated file as the daemon and the monitor do together; returns the packed one."""
    return _replace(file, packed_copy(file))


def pack_foreign(file: Path) -> Path:
    """As another program does it: without a label."""
    copy = file.with_name("copy")
    copy.write_bytes(gzip.compress(file.read_bytes(), 1))
    return _replace(file, copy)


def _replace(file: Path, copy: Path) -> Path:
    packed = file.with_name(file.name + ".gz")
    copy.rename(packed)
    file.unlink()
    return packed
