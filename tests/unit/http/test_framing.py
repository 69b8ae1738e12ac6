"""Body readers alone, and heads of answers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InvalidParameter
from engine.http.framing import ChunkedReader, LengthReader


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
