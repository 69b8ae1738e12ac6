"""The benchmark's client against a scripted server: framing, marks, and the meaning of
responses."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from bench import wire

Serve = Callable[..., str]


@pytest.fixture
def serve(tmp_path: Path) -> Serve:
    """Serve one connection: after each request send the next of the responses, in the pieces given;
    then close."""

    def start(*answers: list[bytes]) -> str:
        path = str(tmp_path / "s.sock")
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen()

        def run() -> None:
            with listener, listener.accept()[0] as connection:
                for pieces in answers:
                    connection.recv(65536)
                    for piece in pieces:
                        connection.sendall(piece)

        threading.Thread(target=run, daemon=True).start()
        return path

    return start


LENGTH = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def test_the_same_head_again_is_framed_as_the_first_was(serve: Serve) -> None:
    path = serve([LENGTH, b"1234"], [LENGTH + b"56", b"78"], [b"HTTP/1.1 204 No Content\r\n\r\n"])
    with wire.Connection(path) as connection:
        assert connection.ask("GET", "/a") == (200, b"1234")
        assert connection.ask("GET", "/a") == (200, b"5678")
        assert connection.ask("GET", "/b") == (204, b"")


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_chunks_in_pieces_of_any_size(serve: Serve, size: int) -> None:
    body = b'4\r\n{"a"\r\n5\r\n:"b"}\r\n0\r\n\r\n'
    whole = CHUNKED + body
    path = serve([whole[at : at + size] for at in range(0, len(whole), size)])
    with wire.Connection(path) as connection:
        assert connection.json("GET", "/a") == {"a": "b"}


@pytest.mark.parametrize("body", [b"plain", b"", b"[1]\r\n", b"12\r\nnot so long\r\n"])
def test_what_is_not_in_chunks_stays_as_it_is(body: bytes) -> None:
    assert wire.joined(body) == body


def test_a_mark_is_counted_and_the_end_told(serve: Serve) -> None:
    path = serve([LENGTH + b"~a", b"~~", b"b~"])
    assert wire.Download(path, "GET", "/a").count(b"~") == (4, True)


def test_an_answer_cut_short_is_an_error(serve: Serve) -> None:
    path = serve([LENGTH + b"12"])
    with wire.Connection(path) as connection, pytest.raises(ConnectionError, match="middle"):
        connection.ask("GET", "/a")


def test_a_silent_server_is_an_error(serve: Serve) -> None:
    path = serve([LENGTH], [])
    with wire.Connection(path, 0.05) as connection, pytest.raises((TimeoutError, ConnectionError)):
        connection.ask("GET", "/a")


def test_the_answer_to_head_has_no_body(serve: Serve) -> None:
    found = b"HTTP/1.1 200 OK\r\nX-Stat: one\r\nContent-Length: 100\r\n\r\n"
    missing = b"HTTP/1.1 404 Not Found\r\nContent-Length: 100\r\n\r\n"
    path = serve([found[:20], found[20:]], [found], [missing])
    with wire.Connection(path) as connection:
        assert connection.head("/a").endswith(b"X-Stat: one\r\nContent-Length: 100")
        assert connection.head("/a").startswith(b"HTTP/1.1 200")
        with pytest.raises(ValueError, match="HEAD /a: 404"):
            connection.head("/a")


def test_what_an_engine_has_not_got_is_not_a_wrong_answer() -> None:
    assert isinstance(wire.refusal("x", 404, b'{"message":"page not found"}'), wire.Lacks)
    assert isinstance(wire.refusal("x", 501, b""), wire.Lacks)
    assert isinstance(wire.refusal("x", 500, b'{"message":"option: invalid log driver"}'), wire.Lacks)
    assert isinstance(wire.refusal("x", 400, b'{"message":"client version 1.42 is too new."}'), wire.Lacks)
    assert isinstance(wire.refusal("x", 404, b'{"message":"No such container: x"}'), ValueError)
    assert isinstance(wire.refusal("x", 500, b"oops"), ValueError)
    assert isinstance(wire.refusal("x", 400, b'{"message":"invalid filter"}'), ValueError)


def frame(data: bytes, stream: int = 1) -> bytes:
    return bytes([stream, 0, 0, 0]) + len(data).to_bytes(4, "big") + data


@pytest.mark.parametrize("size", [1, 2, 9, 100_000])
@pytest.mark.parametrize("early", [0, 5, 8, 11])
def test_frames_are_counted_however_they_come(size: int, early: int) -> None:
    text = frame(b"abc") + frame(b"") + frame(b"x" * 1000)
    here, there = socket.socketpair()
    rest = text[early:]

    def send() -> None:
        with there:
            for at in range(0, len(rest), size):
                there.sendall(rest[at : at + size])

    thread = threading.Thread(target=send)
    thread.start()
    with here:
        assert wire.drain(here, text[:early]) == 1003
    thread.join()


def test_frames_of_another_stream_and_halves_are_errors() -> None:
    for text, message in ((frame(b"abc", 2), "stream 2"), (frame(b"abc")[:-1], "inside a frame")):
        here, there = socket.socketpair()
        there.sendall(text)
        there.close()
        with here, pytest.raises(ValueError, match=message):
            wire.drain(here, b"")


def test_reading_ends_at_a_limit_while_the_stream_stays_open() -> None:
    here, there = socket.socketpair()
    with here, there:
        there.sendall(frame(b"abc") + frame(b"defg"))
        assert wire.drain(here, b"", 7) == 7
        there.sendall(frame(b"more"))
        there.shutdown(socket.SHUT_WR)
        assert wire.drain(here, b"") == 4
    here, there = socket.socketpair()
    with here, there:
        there.sendall(b"a~b~")
        assert wire.drain_raw(here, b"~", b"~", 3) == 3
        there.sendall(b"~")
        there.shutdown(socket.SHUT_WR)
        assert wire.drain_raw(here, b"", b"~") == 1
