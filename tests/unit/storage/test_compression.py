"""Compressed streams: what may follow their last member."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
from collections.abc import Callable

import pytest

from engine.errors import InvalidParameter
from engine.storage.compression import Inflated


class Slow(io.BytesIO):
    """Returns a few bytes at a time."""

    def __init__(self, data: bytes, step: int) -> None:
        super().__init__(data)
        self._step = step

    def read(self, size: int | None = -1, /) -> bytes:
        return super().read(self._step)


def content(stream: Inflated) -> bytes:
    parts = []
    while part := stream.read():
        parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize("step", [1, 2, 7, 1 << 20])
@pytest.mark.parametrize("tail", [b"", b"\0" * 9, b"garbage", b"\0\0garbage" * 50, b"\x1f", b"\x1fgarbage"])
def test_garbage_behind_gzip_is_passed_over(step: int, tail: bytes) -> None:
    packed = Slow(gzip.compress(b"one ") + gzip.compress(b"two") + tail, step)
    assert content(Inflated(packed, "gzip")) == b"one two"
    assert packed.read() == b""


@pytest.mark.parametrize("tail", [gzip.compress(b"cut")[:-9], b"\x1f\x8bgarbage"], ids=["cut", "garbage"])
def test_a_damaged_member_is_an_error(tail: bytes) -> None:
    with pytest.raises(InvalidParameter, match="damaged gzip stream"):
        content(Inflated(io.BytesIO(gzip.compress(b"one") + tail), "gzip"))


@pytest.mark.parametrize(("kind", "compress"), [("bzip2", bz2.compress), ("xz", lzma.compress)])
def test_garbage_behind_others_is_an_error(kind: str, compress: Callable[[bytes], bytes]) -> None:
    with pytest.raises(InvalidParameter, match=f"damaged {kind} stream"):
        content(Inflated(io.BytesIO(compress(b"one") + b"garbage"), kind))
