"""Frames and detach keys compared with the simplest model of each, in any split."""

from __future__ import annotations

import struct
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine._fast.frames import Demultiplexer, DetachKeys, header, mux

streams = st.sampled_from((0, 1, 2))


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    marks = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[begin:end] for begin, end in pairwise(marks)]


@given(streams, st.integers(0, 0xFFFFFFFF))
def test_header_is_stream_zeros_and_big_endian_size(stream: int, size: int) -> None:
    assert header(stream, size) == struct.pack(">BxxxL", stream, size)


@pytest.mark.parametrize(("stream", "size"), [(-1, 0), (3, 0), (1, 1 << 32)])
def test_header_refuses_what_the_format_does_not_have(stream: int, size: int) -> None:
    with pytest.raises(ValueError):
        header(stream, size)


@given(streams, st.binary())
def test_mux_is_header_and_payload(stream: int, data: bytes) -> None:
    assert mux(stream, data) == header(stream, len(data)) + data
    assert mux(stream, memoryview(data)) == mux(stream, bytearray(data))


def test_mux_refuses_an_unknown_stream() -> None:
    with pytest.raises(ValueError):
        mux(3, b"x")


def joined(pairs: list[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    """Merge neighbouring frames of the same stream."""
    out: list[tuple[int, bytes]] = []
    for stream, data in pairs:
        if out and out[-1][0] == stream:
            out[-1] = (stream, out[-1][1] + data)
        elif data:
            out.append((stream, data))
    return out


@given(st.lists(st.tuples(streams, st.binary(max_size=40)), max_size=8), st.lists(st.integers(0, 1000), max_size=12))
def test_demultiplexer_in_any_split(frames: list[tuple[int, bytes]], cuts: list[int]) -> None:
    text = b"".join(mux(stream, data) for stream, data in frames)
    reader = Demultiplexer()
    pairs = [pair for piece in split(text, cuts) for pair in reader.feed(piece)]
    assert all(data for _, data in pairs)
    assert joined(pairs) == joined(frames)
    assert reader.complete


def test_demultiplexer_byte_by_byte_and_unfinished() -> None:
    text = mux(1, b"abc") + mux(2, b"") + mux(2, b"d")
    reader = Demultiplexer()
    pairs = []
    for index in range(len(text) - 1):
        pairs += reader.feed(text[index : index + 1])
        assert reader.complete == (index in (10, 18))
    assert pairs == [(1, b"a"), (1, b"b"), (1, b"c")]
    assert not reader.complete
    assert reader.feed(text[-1:]) == [(2, b"d")]
    assert reader.complete


def test_demultiplexer_hands_out_a_payload_as_it_comes() -> None:
    reader = Demultiplexer()
    assert reader.feed(header(1, 1 << 20) + b"x") == [(1, b"x")]


@pytest.mark.parametrize("text", [b"\3\0\0\0\0\0\0\1", b"\1\1\0\0\0\0\0\1", b"\1\0\0\0\xff\0\0\0", b"hello wo"])
def test_demultiplexer_refuses_what_is_no_header(text: bytes) -> None:
    with pytest.raises(ValueError, match=text.hex()):
        Demultiplexer().feed(text)


def detached_model(sequence: bytes, typed: bytes) -> tuple[bytes, bool]:
    """The bytes that are forwarded, which are those before the first occurrence of the sequence;
    and whether it occurred.
    """
    at = typed.find(sequence) if sequence else -1
    return (typed[:at], True) if at >= 0 else (typed, False)


few = st.binary(max_size=30).map(lambda data: bytes(b"ab\x10\x11"[byte % 4] for byte in data))


@given(few.filter(lambda s: len(s) < 6), few, st.lists(st.integers(0, 1000), max_size=8))
def test_detach_keys_in_any_split(sequence: bytes, typed: bytes, cuts: list[int]) -> None:
    keys = DetachKeys(sequence)
    forwarded, detached = b"", False
    for piece in split(typed, cuts):
        part, detached = keys.feed(piece)
        forwarded += part
    assert detached == keys.detached
    if not detached:
        forwarded += keys.held()
    assert (forwarded, detached) == detached_model(sequence, typed)


@given(few.filter(lambda s: len(s) < 6), few)
def test_detach_keys_hold_back_no_more_than_a_possible_start(sequence: bytes, typed: bytes) -> None:
    keys = DetachKeys(sequence)
    for index in range(len(typed)):
        keys.feed(typed[index : index + 1])
        if keys.detached:
            return
        seen = typed[: index + 1]
        longest = max(n for n in range(len(sequence) + 1) if seen.endswith(sequence[:n]))
        assert keys.held() == sequence[:longest]


def test_default_keys() -> None:
    keys = DetachKeys(b"\x10\x11")
    assert keys.feed(b"ls\x10") == (b"ls", False)
    assert keys.feed(b"\x10x") == (b"\x10\x10x", False)
    assert keys.feed(b"") == (b"", False)
    assert keys.feed(b"\x10\x10\x11rest") == (b"\x10", True)
    assert keys.feed(b"later") == (b"", True)


def test_an_empty_sequence_never_matches() -> None:
    keys = DetachKeys(b"")
    assert keys.feed(b"\x10\x11") == (b"\x10\x11", False)
    assert keys.held() == b""
