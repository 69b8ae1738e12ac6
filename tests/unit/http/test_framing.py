"""Body readers alone, and heads of answers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InvalidParameter
from engine.http.framing import ChunkedReader, HeadWriter, LengthReader, field_lines


class Collect:
    def __init__(self) -> None:
        self.data = b""

    def feed(self, chunk: bytes) -> None:
        assert chunk
        self.data += chunk


@given(st.binary(max_size=50), st.binary(max_size=20), st.integers(1, 7))
def test_length(body: bytes, tail: bytes, step: int) -> None:
    reader, sink, stream, at = LengthReader(len(body)), Collect(), body + tail, 0
    while not reader.done:
        piece = stream[at : at + step]
        at += reader.read(piece, 0, sink)
    assert sink.data == body and at == len(body)


@given(
    st.lists(st.binary(min_size=1, max_size=40), max_size=5), st.binary(max_size=20), st.integers(1, 9), st.booleans()
)
def test_chunked(chunks: list[bytes], tail: bytes, step: int, trailers: bool) -> None:
    coded = b"".join(b"%X;a=b\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    coded += b"0\r\n" + b"A: b\r\nC: d\r\n" * trailers + b"\r\n"
    reader, sink, stream, at = ChunkedReader(), Collect(), coded + tail, 0
    while not reader.done:
        taken = reader.read(stream[: at + step], at, sink)
        assert taken > at
        at = taken
    assert sink.data == b"".join(chunks) and at == len(coded)
    whole = ChunkedReader()
    assert whole.read(stream, 0, None) == len(coded) and whole.done


@given(st.binary(max_size=100))
def test_chunked_never_fails_otherwise(data: bytes) -> None:
    reader = ChunkedReader()
    try:
        taken = reader.read(data, 0, None)
    except InvalidParameter as error:
        assert "malformed chunked body" in error.message
    else:
        assert taken <= len(data)
        assert reader.done or taken == len(data)


def test_heads() -> None:
    heads = HeadWriter((("Server", "s"), ("Ostype", "linux")))
    expected = (
        b"HTTP/1.1 200 OK\r\nServer: s\r\nOstype: linux\r\nContent-Type: text/plain\r\n"
        b"Date: Tue, 06 Jan 2015 15:47:31 GMT\r\n"
    )
    assert heads.start(200, "text/plain", 1420559251.9) == expected
    assert heads.start(200, "text/plain", 1420559251.99) == expected
    assert b"15:47:32" in heads.start(200, "text/plain", 1420559252.0)
    assert heads.start(204, "", 1420559252.0) == (
        b"HTTP/1.1 204 No Content\r\nServer: s\r\nOstype: linux\r\nDate: Tue, 06 Jan 2015 15:47:32 GMT\r\n"
    )
    assert heads.start(599, "", 1420559252.0).startswith(b"HTTP/1.1 599 Unknown\r\n")


def test_a_field_cannot_break_out_of_its_line() -> None:
    assert field_lines((("A", "b"), ("C", "ü"))) == b"A: b\r\nC: \xfc\r\n"
    for name, value in (("A", "b\r\nC: d"), ("A", "b\n"), ("A\r", "b"), ("A", "\0")):
        with pytest.raises(ValueError, match="control characters"):
            field_lines(((name, value),))
