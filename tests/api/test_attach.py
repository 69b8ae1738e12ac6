"""Attach on the wire: the upgrade, frames, half-close, early bytes, and the effect of a slow or
absent reader."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import struct
import threading

import pytest

from tests.support import PATIENCE
from tests.support.engine import client
from tests.support.engine.client import frames, hijack, payload, read_to_end
from tests.support.engine.harness import COUNT_TO_STOP, TempEngine, until

ALL = "stream=1&stdin=1&stdout=1&stderr=1"


def target(identifier: str, query: str = ALL) -> str:
    return f"/v1.24/containers/{identifier}/attach?{query}"


def test_before_start_sees_everything(engine: TempEngine) -> None:
    identifier = engine.create("sh", "-c", "echo first; echo second >&2; seq 2000")
    stream, early = hijack(engine.socket, target(identifier))
    engine.post(f"/containers/{identifier}/start")
    received = read_to_end(stream, early)
    assert payload(received, 1) == b"first\n" + b"".join(b"%d\n" % number for number in range(1, 2001))
    assert payload(received, 2) == b"second\n"


def test_the_container_has_ended_when_the_stream_ends(engine: TempEngine) -> None:
    """A short process may end before its start has been answered."""
    for _ in range(8):
        identifier = engine.create("true")
        stream, early = hijack(engine.socket, target(identifier))
        with client.connect(engine.socket) as connection:
            connection.sendall(
                f"POST /v1.24/containers/{identifier}/start HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n".encode()
            )
            assert read_to_end(stream, early) == b""
            assert engine.inspect(identifier)["State"]["Status"] == "exited"


def test_without_upgrade_is_200_with_the_same_frames(engine: TempEngine) -> None:
    identifier = engine.create("echo", "plain")
    with client.connect(engine.socket) as connection:
        connection.sendall(f"POST {target(identifier)} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        head = b""
        while b"\r\n\r\n" not in head:
            head += connection.recv(4096)
        first, _, early = head.partition(b"\r\n\r\n")
        assert first.startswith(b"HTTP/1.1 200 OK")
        assert b"content-length" not in first.lower()
        assert b"raw-stream" in first
        engine.post(f"/containers/{identifier}/start")
        assert frames(read_to_end(connection, early)) == [(1, b"plain\n")]


@pytest.mark.own
def test_a_json_body_with_the_upgrade_is_not_stdin(engine: TempEngine) -> None:
    """dockerode sends a body; only the bytes after it are the stream."""
    identifier = engine.create("cat", OpenStdin=True, StdinOnce=True)
    engine.post(f"/containers/{identifier}/start")
    with client.connect(engine.socket) as connection:
        connection.sendall(
            f"POST {target(identifier)} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 2\r\n"
            "Connection: Upgrade\r\nUpgrade: tcp\r\n\r\n{}early ".encode()
        )
        received = b""
        while b"\r\n\r\n" not in received:
            received += connection.recv(4096)
        connection.sendall(b"late")
        connection.shutdown(socket.SHUT_WR)
        first, _, early = received.partition(b"\r\n\r\n")
        assert first.startswith(b"HTTP/1.1 101 UPGRADED\r\n")
        assert payload(read_to_end(connection, early)) == b"early late"


def test_half_close_is_the_end_of_stdin_alone(engine: TempEngine) -> None:
    identifier = engine.create("sh", "-c", "cat; sleep 0.2; echo after; exit 3", OpenStdin=True, StdinOnce=True)
    stream, early = hijack(engine.socket, target(identifier))
    engine.post(f"/containers/{identifier}/start")
    stream.sendall(b"input ")
    stream.shutdown(socket.SHUT_WR)
    assert payload(read_to_end(stream, early)) == b"input after\n"
    assert engine.wait(identifier) == 3


def test_the_end_of_stdin_ends_the_attach_alone(engine: TempEngine) -> None:
    """For containers whose stdin a half-close does not close: the stream of a client that pipes
    into a console ends, and the console continues.
    """
    script = "while read l; do echo got $l; done"
    for config in ({"OpenStdin": True}, {"OpenStdin": True, "StdinOnce": True, "Tty": True}):
        identifier = engine.started("sh", "-c", script, **config)
        stream, early = hijack(engine.socket, target(identifier))
        stream.sendall(b"hello\n")
        stream.shutdown(socket.SHUT_WR)
        read_to_end(stream, early)
        logs = f"/v1.24/containers/{identifier}/logs?stdout=1"
        until("the line is read", lambda logs=logs: b"got hello" in engine.request("GET", logs).body)
        assert engine.inspect(identifier)["State"]["Running"]


@pytest.mark.own
def test_bytes_in_the_segment_of_the_request_are_stdin(engine: TempEngine) -> None:
    identifier = engine.create("cat", OpenStdin=True, StdinOnce=True)
    engine.post(f"/containers/{identifier}/start")
    stream, early = hijack(engine.socket, target(identifier), head=b"with the head ")
    stream.sendall(b"and after")
    stream.shutdown(socket.SHUT_WR)
    assert payload(read_to_end(stream, early)) == b"with the head and after"


def test_only_the_streams_asked_for(engine: TempEngine) -> None:
    identifier = engine.create("sh", "-c", "echo out; echo err >&2")
    out, early_out = hijack(engine.socket, target(identifier, "stream=1&stdout=1"))
    err, early_err = hijack(engine.socket, target(identifier, "stream=1&stderr=1"))
    engine.post(f"/containers/{identifier}/start")
    assert frames(read_to_end(out, early_out)) == [(1, b"out\n")]
    assert frames(read_to_end(err, early_err)) == [(2, b"err\n")]


@pytest.mark.own  # dockerd 20.10 loses lines between log and stream
def test_logs_then_stream_without_gap_or_repeat(engine: TempEngine) -> None:
    """`logs=1&stream=1` on a container that prints all the time: each line once, in order."""
    identifier = engine.started("sh", "-c", COUNT_TO_STOP)
    until("it prints", lambda: len(engine.logs(identifier)) > 1000)
    stream, early = hijack(engine.socket, target(identifier, "logs=1&stream=1&stdout=1"))
    engine.touch(identifier, "/stop")
    received = payload(read_to_end(stream, early))
    assert received == engine.logs(identifier)
    assert received == b"".join(b"%d\n" % number for number in range(received.count(b"\n")))


def test_terminal_is_raw_and_resizes(engine: TempEngine) -> None:
    script = (
        "stty size; until [ \"$(stty size)\" = '50 120' ]; do sleep 0.05; done; echo resized; read word; echo got $word"
    )
    identifier = engine.create("sh", "-c", script, Tty=True, OpenStdin=True)
    engine.request("POST", f"/v1.24/containers/{identifier}/resize?h=20&w=40")
    stream, received = hijack(engine.socket, target(identifier))
    engine.post(f"/containers/{identifier}/start")
    assert engine.request("POST", f"/v1.24/containers/{identifier}/resize?h=50&w=120").status == 200
    while b"resized\r\n" not in received:
        chunk = stream.recv(4096)
        assert chunk, received
        received += chunk
    stream.sendall(b"word\r")
    assert b"got word\r\n" in read_to_end(stream, received)


@pytest.mark.own
def test_size_given_before_start_is_the_first_size(engine: TempEngine) -> None:
    identifier = engine.create("stty", "size", Tty=True)
    # kept
    assert engine.request("POST", f"/v1.24/containers/{identifier}/resize?h=20&w=40").status == 500
    stream, early = hijack(engine.socket, target(identifier, "stream=1&stdout=1"))
    engine.post(f"/containers/{identifier}/start")
    assert read_to_end(stream, early) == b"20 40\r\n"


def test_resize_without_a_terminal_does_nothing(engine: TempEngine) -> None:
    identifier = engine.started("sleep", "600")
    assert engine.request("POST", f"/v1.24/containers/{identifier}/resize?h=20&w=40").status == 200
    engine.post(f"/containers/{identifier}/kill")
    assert engine.request("POST", f"/v1.24/containers/{identifier}/resize?h=20&w=40").status == 500


def test_detach_keys_of_the_request(engine: TempEngine) -> None:
    identifier = engine.started("sh", "-c", "read word; echo got $word", Tty=True, OpenStdin=True)
    stream, early = hijack(engine.socket, target(identifier, ALL + "&detachKeys=ctrl-a,x"))
    stream.sendall(b"\x01x")
    read_to_end(stream, early)
    assert engine.inspect(identifier)["State"]["Running"]
    stream, early = hijack(engine.socket, target(identifier))
    stream.sendall(b"\x01yes\r")
    assert b"yes" in read_to_end(stream, early)
    assert engine.wait(identifier) == 0


def test_two_clients_see_the_same(engine: TempEngine) -> None:
    identifier = engine.create("seq", "20000")
    both = [hijack(engine.socket, target(identifier, "stream=1&stdout=1")) for _ in range(2)]
    results: list[bytes] = [b"", b""]

    def collect(number: int) -> None:
        results[number] = payload(read_to_end(*both[number]))

    readers = [threading.Thread(target=collect, args=(number,)) for number in range(2)]
    for reader in readers:
        reader.start()
    engine.post(f"/containers/{identifier}/start")
    for reader in readers:
        reader.join(30 * PATIENCE)
    assert results[0] == results[1] == b"".join(b"%d\n" % number for number in range(1, 20001))


@pytest.mark.own
def test_a_client_that_vanishes_disturbs_nobody(engine: TempEngine) -> None:
    """One attached client resets its connection while output flows: the other client and the log
    lose nothing."""
    identifier = engine.create("sh", "-c", "read word; seq 200000", OpenStdin=True)
    rude, _ = hijack(engine.socket, target(identifier))
    kept, early = hijack(engine.socket, target(identifier, "stream=1&stdout=1"))
    engine.post(f"/containers/{identifier}/start")
    rude.sendall(b"go\n")
    rude.recv(1)
    rude.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    rude.close()
    expected = b"".join(b"%d\n" % number for number in range(1, 200001))
    assert payload(read_to_end(kept, early)) == expected
    assert engine.logs(identifier, "stdout=1") == expected


@pytest.mark.own
def test_a_slow_client_loses_nothing_and_stalls_its_own_container_alone(engine: TempEngine) -> None:
    size = 8 << 20
    slow = engine.create("sh", "-c", f"yes | head -c {size}", host={"LogConfig": {"Type": "none"}})
    stream, early = hijack(engine.socket, target(slow, "stream=1&stdout=1"))
    engine.post(f"/containers/{slow}/start")
    other = engine.started("seq", "1000")  # while the slow container's client reads nothing
    assert engine.wait(other) == 0
    assert engine.logs(other).endswith(b"1000\n")
    assert engine.inspect(slow)["State"]["Running"]  # 8 MB exceed every buffer on the way
    received = hashlib.sha256(payload(read_to_end(stream, early))).hexdigest()
    assert received == hashlib.sha256(b"y\n" * (size // 2)).hexdigest()
    assert engine.wait(slow) == 0


@pytest.mark.own
def test_64_megabytes_logged_and_attached_are_the_same(engine: TempEngine) -> None:
    """Attached output and the log afterwards are the same byte sequence, with lines of all lengths
    and binary data."""
    identifier = engine.create("sh", "-c", "cat", OpenStdin=True, StdinOnce=True)
    stream, early = hijack(engine.socket, target(identifier))
    engine.post(f"/containers/{identifier}/start")
    block = b"".join(bytes((32 + number % 90,)) * (number * 37 % 40000) + b"\n" for number in range(200))
    sent = block * ((8 << 20) // len(block))

    def feed() -> None:
        with contextlib.suppress(BrokenPipeError):
            stream.sendall(sent)
            stream.shutdown(socket.SHUT_WR)

    feeder = threading.Thread(target=feed)
    feeder.start()
    received = bytearray(early)
    buffer = bytearray(1 << 20)
    while count := stream.recv_into(buffer):
        received += buffer[:count]
    feeder.join()
    stream.close()
    assert payload(bytes(received)) == sent
    assert engine.logs(identifier) == sent


@pytest.mark.own
def test_stdin_that_nobody_reads_is_taken_when_it_is_read(engine: TempEngine) -> None:
    """Input beyond the pipe's capacity stays with the client. A container that exits without
    reading it still exits.
    """
    identifier = engine.started("sleep", "600", OpenStdin=True)
    stream, _ = hijack(engine.socket, target(identifier))
    stream.setblocking(False)
    sent = 0
    with contextlib.suppress(BlockingIOError):
        while sent < 64 << 20:
            sent += stream.send(bytes(65536))
    assert sent < 64 << 20
    assert engine.request("GET", "/_ping").status == 200
    engine.post(f"/containers/{identifier}/kill")
    assert engine.wait(identifier) == 137
    stream.setblocking(True)
    stream.settimeout(30 * PATIENCE)
    with contextlib.suppress(ConnectionResetError):
        while stream.recv(65536):
            pass
    stream.close()


@pytest.mark.own
def test_attach_to_a_stopped_container_gives_its_logs(engine: TempEngine) -> None:
    identifier = engine.started("echo", "before")
    assert engine.wait(identifier) == 0
    stream, early = hijack(engine.socket, target(identifier, "logs=1&stdout=1"))
    assert frames(read_to_end(stream, early)) == [(1, b"before\n")]


@pytest.mark.own
def test_a_failed_start_lets_the_waiting_client_go(engine: TempEngine) -> None:
    """docker run attaches first: when start fails for good and the container is removed, its
    stream ends.
    """
    identifier = engine.create(os.fsdecode(b"/no/such/program"))
    stream, early = hijack(engine.socket, target(identifier))
    answer = engine.request("POST", f"/v1.24/containers/{identifier}/start")
    assert answer.status == 404, answer
    assert "no such file or directory" in answer.message or "not found" in answer.message
    state = engine.inspect(identifier)["State"]
    assert (state["Running"], state["ExitCode"]) == (False, 127)
    assert state["Error"]
    assert engine.request("DELETE", f"/v1.24/containers/{identifier}").status == 204
    assert read_to_end(stream, early) == b""


def test_logs_with_the_upgrade_are_a_raw_stream(engine: TempEngine) -> None:
    identifier = engine.create("sh", "-c", "echo out; echo err >&2")
    engine.post(f"/containers/{identifier}/start")
    engine.post(f"/containers/{identifier}/wait", status=200)
    query = f"/v1.24/containers/{identifier}/logs?stdout=1&stderr=1&follow=1"
    with client.connect(engine.socket) as connection:
        connection.sendall(f"GET {query} HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n".encode())
        answer = read_to_end(connection)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 101 UPGRADED") and b"raw-stream" in head
    assert sorted(frames(body)) == [(1, b"out\n"), (2, b"err\n")]
