"""The reader of messages and attributes, against messages built by hand and cut at random."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.system.netlink import codec
from engine.system.netlink.codec import NetlinkError, Request


def test_errors() -> None:
    assert codec.refusal(struct.pack("=i", 0) + bytes(16), 0x100, "x") is None
    failure = codec.refusal(struct.pack("=i", -17) + bytes(16), 0x100, "link a")
    assert isinstance(failure, NetlinkError)
    assert failure.errno == 17
    assert str(failure) == "[Errno 17] link a: File exists"
    words = codec.attribute(1, b"what is wrong\0")
    failure = codec.refusal(struct.pack("=i", -22) + bytes(16) + words, 0x300, "link a")
    assert str(failure) == "[Errno 22] link a: Invalid argument (what is wrong)"
    request = struct.pack("=IHHII", 20, 16, 5, 1, 0) + b"body"
    failure = codec.refusal(struct.pack("=i", -22) + request + words, 0x200, "link a")
    assert str(failure).endswith("(what is wrong)")


def test_cut_messages_are_refused() -> None:
    with pytest.raises(NetlinkError, match="truncated message"):
        list(codec.read_messages(struct.pack("=IHHII", 50, 2, 0, 1, 0) + bytes(10)))
    with pytest.raises(NetlinkError, match="truncated message"):
        list(codec.read_messages(struct.pack("=IHHII", 3, 2, 0, 1, 0)))


@given(st.integers(16, 600), st.integers(0, 0xFFFF), st.integers(0, 0xFFFFFFFF), st.binary(max_size=100))
def test_messages_are_read_as_they_are_written(kind: int, flags: int, sequence: int, body: bytes) -> None:
    whole = codec.message(Request(kind, 0, body, "x"), sequence, flags)
    assert len(whole) % 4 == 0
    assert list(codec.read_messages(whole * 2)) == [(kind, flags | codec.REQUEST, sequence, body)] * 2


@given(st.binary(max_size=300))
def test_attributes_of_anything(data: bytes) -> None:
    for value in [*codec.read_attributes(data).values(), *codec.read_list(data)]:
        assert value in data or not value
    assert codec.read_number(data, 0, 1) >= 0


@given(st.dictionaries(st.integers(1, 0x3FFF), st.binary(max_size=50), max_size=8))
def test_attributes_are_read_as_they_are_written(values: dict[int, bytes]) -> None:
    data = b"".join(codec.attribute(kind, value) for kind, value in values.items())
    assert codec.read_attributes(data) == values
    assert list(codec.read_list(data)) == list(values.values())


def test_numbers_and_text() -> None:
    data = codec.text(3, "eth0") + codec.attribute(4, b"\x0a\x00\x00\x01") + codec.u32(5, 7)
    assert codec.read_number(data, 0, 4) == 0x0A000001
    assert codec.read_number(data, 0, 9) == 0
    assert codec.read_text(codec.read_attributes(data)[3]) == "eth0"
    assert codec.read_attributes(codec.nest(9, data))[9] == data
