"""Attach by websocket, with a client library that follows RFC 6455, and with raw bytes that violate
it."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import socket
import time
from collections.abc import Iterator

import pytest
import websocket

from tests.support import PATIENCE
from tests.support.engine import client
from tests.support.engine.harness import BREATH, COUNT_TO_STOP, TempEngine, until

ALL = "stream=1&stdin=1&stdout=1&stderr=1"


@contextlib.contextmanager
def attached(
    engine: TempEngine, identifier: str, query: str = ALL, version: str = "/v1.24"
) -> Iterator[websocket.WebSocket]:
    connection = websocket.create_connection(
        f"ws://localhost{version}/containers/{identifier}/attach/ws?{query}", socket=client.connect(engine.socket)
    )
    try:
        yield connection
    finally:
        connection.shutdown()


def data(message: str | bytes) -> bytes:
    return message.encode() if isinstance(message, str) else bytes(message)


def to_end(connection: websocket.WebSocket) -> tuple[bytes, int]:
    """All data until the Close, and its code."""
    received = b""
    while True:
        opcode, content = connection.recv_data()
        if opcode == websocket.ABNF.OPCODE_CLOSE:
            return received, int.from_bytes(content[:2], "big")
        received += content


@pytest.mark.parametrize(
    ("origin", "status"), [("http://evil.example", 403), ("null", 403), ("http://localhost:81", 403), (None, 101)]
)
def test_pages_of_other_sites_attach_to_nothing(engine: TempEngine, origin: str | None, status: int) -> None:
    identifier = engine.started("cat", OpenStdin=True)
    url = f"ws://localhost/v1.44/containers/{identifier}/attach/ws?{ALL}"
    with client.connect(engine.socket) as connection:
        try:
            found = websocket.create_connection(url, socket=connection, origin=origin).getstatus()
        except websocket.WebSocketBadStatusException as refused:
            found = refused.status_code
            assert b"pages of other web sites" in refused.resp_body
    assert found == status


def test_talk(engine: TempEngine) -> None:
    identifier = engine.started("cat", OpenStdin=True, StdinOnce=True)
    with attached(engine, identifier) as connection:
        assert connection.getstatus() == 101
        connection.send("hello\n")
        assert data(connection.recv()) == b"hello\n"
        connection.send_binary(b"\x00\xff\n")
        assert data(connection.recv()) == b"\x00\xff\n"
        connection.close(timeout=10 * PATIENCE)
    assert engine.wait(identifier) == 0


def test_both_streams_without_headers_then_a_normal_close(engine: TempEngine) -> None:
    # two pipes are not ordered between each other
    script = "echo out; read word; echo err >&2; read word; seq 3000"
    identifier = engine.create("sh", "-c", script, OpenStdin=True)
    with attached(engine, identifier) as connection:
        engine.post(f"/containers/{identifier}/start")
        for said in (b"out\n", b"err\n"):
            assert data(connection.recv()) == said
            connection.send("go on\n")
        received, code = to_end(connection)
    assert received == b"".join(b"%d\n" % number for number in range(1, 3001))
    assert code == 1000


@pytest.mark.parametrize(
    ("version", "opcode"),
    [
        ("/v1.24", websocket.ABNF.OPCODE_TEXT),
        ("/v1.27", websocket.ABNF.OPCODE_TEXT),
        ("/v1.28", websocket.ABNF.OPCODE_BINARY),
        ("", websocket.ABNF.OPCODE_BINARY),
    ],
)
def test_messages_are_binary_from_1_28_on(engine: TempEngine, version: str, opcode: int) -> None:
    identifier = engine.started("cat", OpenStdin=True)
    with attached(engine, identifier, version=version) as connection:
        connection.send("hello\n")
        assert connection.recv_data() == (opcode, b"hello\n")


@pytest.mark.parametrize(
    ("version", "expected"),
    [("", [b"err\n"]), ("/v1.42", [b"err\n"]), ("/v1.41", [b"out\n", b"err\n"]), ("/v1.25", [b"out\n", b"err\n"])],
)
def test_streams_are_chosen_from_1_42_on(engine: TempEngine, version: str, expected: list[bytes]) -> None:
    """Older clients of 1.25 to 1.41 get all streams, whatever they ask for."""
    identifier = engine.create("sh", "-c", "echo out; sleep 0.3; echo err >&2; sleep 0.3; read word", OpenStdin=True)
    with attached(engine, identifier, "stream=1&stdin=1&stderr=1", version) as connection:
        engine.post(f"/containers/{identifier}/start")
        assert [data(connection.recv()) for _ in expected] == expected
        connection.send("go on\n")
        assert to_end(connection) == (b"", 1000)


def test_text_is_always_valid_and_nothing_is_lost(engine: TempEngine) -> None:
    """Bytes that are not UTF-8 are sent as binary messages, because the client would refuse them as
    text."""
    identifier = engine.create(
        "sh", "-c", "printf 'gr\\303\\274n\\n'; sleep 0.1; head -c 300000 /dev/urandom | tee /copy; cat /copy"
    )
    with attached(engine, identifier) as connection:
        engine.post(f"/containers/{identifier}/start")
        received, _ = to_end(connection)
    text = "grün\n".encode()
    assert received.startswith(text)
    noise = received[len(text) :]
    assert len(noise) == 600_000
    assert noise[:300_000] == noise[300_000:]


def test_large_and_fragmented_messages(engine: TempEngine) -> None:
    """8 MB in one message and in many frames: processed as they arrive, never buffered whole."""
    identifier = engine.started("sh", "-c", "md5sum | cut -c1-32", OpenStdin=True, StdinOnce=True)
    blob = os.urandom(1 << 20) * 4
    with attached(engine, identifier) as connection:
        connection.send_binary(blob)
        frame = websocket.ABNF.create_frame(blob[: 2 << 20], websocket.ABNF.OPCODE_BINARY, 0)
        connection.send_frame(frame)
        connection.ping("between the fragments")
        frame = websocket.ABNF.create_frame(blob[2 << 20 :], websocket.ABNF.OPCODE_CONT, 1)
        connection.send_frame(frame)
        assert memory(engine) < 300 << 20
        connection.close(timeout=10 * PATIENCE)
    assert engine.wait(identifier, 60) == 0
    assert engine.logs(identifier) == hashlib.md5(blob * 2).hexdigest().encode() + b"\n"


def memory(engine: TempEngine) -> int:
    with open(f"/proc/{engine.pid}/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS:")) << 10


def test_ping_is_answered(engine: TempEngine) -> None:
    identifier = engine.started("sleep", "600")
    with attached(engine, identifier) as connection:
        connection.ping("are you there")
        opcode, content = connection.recv_data(control_frame=True)
        assert (opcode, content) == (websocket.ABNF.OPCODE_PONG, b"are you there")


def test_stdin_only_when_asked_for(engine: TempEngine) -> None:
    identifier = engine.started("cat", OpenStdin=True)
    with attached(engine, identifier, "stream=1&stdout=1") as silent, attached(engine, identifier) as talker:
        silent.send("not for you\n")
        silent.ping("x")
        silent.recv_data(control_frame=True)
        talker.send("for you\n")
        assert data(talker.recv()) == b"for you\n"
        assert data(silent.recv()) == b"for you\n"


def test_logs_then_stream_without_gap_or_repeat(engine: TempEngine) -> None:
    identifier = engine.started("sh", "-c", COUNT_TO_STOP)
    until("it prints", lambda: len(engine.logs(identifier)) > 1000)
    with attached(engine, identifier, "logs=1&stream=1&stdout=1") as connection:
        engine.touch(identifier, "/stop")
        received, _ = to_end(connection)
    assert received == engine.logs(identifier)
    assert received == b"".join(b"%d\n" % number for number in range(received.count(b"\n")))


def test_logs_of_what_has_ended(engine: TempEngine) -> None:
    identifier = engine.started("sh", "-c", "echo bye")
    engine.wait(identifier)
    with attached(engine, identifier, "logs=1&stdout=1") as connection:
        assert to_end(connection) == (b"bye\n", 1000)


def test_detach_keys(engine: TempEngine) -> None:
    identifier = engine.started("cat", OpenStdin=True, Tty=True)
    with attached(engine, identifier, ALL + "&detachKeys=ctrl-a,x") as connection:
        connection.send("\x01y\n")
        echoed = b""
        while b"y" not in echoed:
            echoed += data(connection.recv())
        connection.send("\x01")
        connection.send("x")
        _, code = to_end(connection)
        assert code == 1000
    assert engine.inspect(identifier)["State"]["Running"]

    def told() -> list[str]:
        events = engine.request("GET", f"/v1.24/events?since=0&until={time.time():.9f}").body.splitlines()
        return [event["status"] for event in map(json.loads, events) if event.get("id") == identifier]

    # The monitor closes the stream first and reports the detach to the daemon afterwards.
    until("the events of attach and detach", lambda: told()[-2:] == ["attach", "detach"])


def test_older_versions_know_no_detach_keys(engine: TempEngine) -> None:
    identifier = engine.started("sleep", "600")
    bad = f"/containers/{identifier}/attach/ws?{ALL}&detachKeys=ctrl-"
    assert engine.send(handshake(f"/v1.22{bad}")).startswith(b"HTTP/1.1 400 ")
    with client.connect(engine.socket) as connection:
        connection.sendall(handshake(f"/v1.21{bad}"))
        assert connection.recv(4096).startswith(b"HTTP/1.1 101 ")


def test_a_terminal(engine: TempEngine) -> None:
    identifier = engine.started("sh", "-c", "tty; read word; echo got $word", OpenStdin=True, Tty=True)
    with attached(engine, identifier, ALL + "&logs=1") as connection:
        told = b""
        while not told.endswith(b"\n"):  # earlier input is echoed before it
            told += data(connection.recv())
        connection.send("word\n")
        received, _ = to_end(connection)
    assert told == b"/dev/pts/0\r\n"
    assert b"got word\r\n" in received


def handshake(target: str, **changes: str) -> bytes:
    fields = {
        "Host": "x",
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": base64.b64encode(bytes(16)).decode(),
    } | {name.replace("_", "-"): value for name, value in changes.items()}
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items() if value)
    return f"GET {target} HTTP/1.1\r\n{lines}\r\n".encode()


@pytest.mark.parametrize(
    "changes",
    [
        {"Upgrade": ""},
        {"Upgrade": "tcp"},
        {"Connection": ""},
        {"Sec_WebSocket_Version": "12"},
        {"Sec_WebSocket_Version": ""},
        {"Sec_WebSocket_Key": ""},
    ],
)
def test_no_proper_handshake(engine: TempEngine, changes: dict[str, str]) -> None:
    identifier = engine.started("sleep", "600")
    answer = engine.send(handshake(f"/v1.24/containers/{identifier}/attach/ws?{ALL}", **changes))
    assert answer.startswith(b"HTTP/1.1 400 "), answer
    assert b"websocket" in answer


def test_refusals(engine: TempEngine) -> None:
    identifier = engine.started("sleep", "600")
    engine.post(f"/containers/{identifier}/pause")
    assert engine.send(handshake(f"/v1.24/containers/{identifier}/attach/ws?{ALL}")).startswith(b"HTTP/1.1 409 ")
    assert engine.send(handshake(f"/v1.24/containers/nobody/attach/ws?{ALL}")).startswith(b"HTTP/1.1 404 ")
    bad = f"/v1.24/containers/{identifier}/attach/ws?detachKeys=ctrl-A"
    assert engine.send(handshake(bad)).startswith(b"HTTP/1.1 400 ")


def test_frames_in_the_segment_of_the_handshake(engine: TempEngine) -> None:
    identifier = engine.started("cat", OpenStdin=True)
    frame = websocket.ABNF.create_frame(b"early\n", websocket.ABNF.OPCODE_TEXT, 1).format()
    with client.connect(engine.socket) as connection:
        connection.sendall(handshake(f"/v1.24/containers/{identifier}/attach/ws?{ALL}") + frame)
        received = b""
        while b"early\n" not in received:
            chunk = connection.recv(4096)
            assert chunk, received
            received += chunk
    assert received.startswith(b"HTTP/1.1 101 ")
    assert b"Server: engined/" in received or b"server: engined/" in received


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (b"\x81\x05hello", 1002),  # not masked
        (b"\xf1\x80\0\0\0\0", 1002),  # reserved bits
        (b"\x83\x80\0\0\0\0", 1002),  # unknown kind
        (b"\x81\x82\0\0\0\0\xff\xfe", 1007),  # text that is not UTF-8
    ],
)
def test_what_breaks_the_protocol(engine: TempEngine, frame: bytes, code: int) -> None:
    identifier = engine.started("cat", OpenStdin=True)
    with client.connect(engine.socket) as connection:
        connection.sendall(handshake(f"/v1.24/containers/{identifier}/attach/ws?{ALL}"))
        head = b""
        while b"\r\n\r\n" not in head:
            head += connection.recv(4096)
        connection.sendall(frame)
        with contextlib.suppress(BrokenPipeError):
            connection.shutdown(socket.SHUT_WR)
        answer = client.read_to_end(connection, head.partition(b"\r\n\r\n")[2])
    assert answer[:1] == b"\x88", answer
    assert int.from_bytes(answer[2:4], "big") == code
    assert engine.inspect(identifier)["State"]["Running"]


def test_clients_that_vanish_leave_nothing(engine: TempEngine) -> None:
    identifier = engine.started("cat", OpenStdin=True)
    before = engine.descriptors()
    for number in range(20):
        with attached(engine, identifier) as connection:
            if number % 2:
                connection.send("x\n")
            connection.sock.shutdown(socket.SHUT_RDWR)
    until("descriptors are given back", lambda: engine.descriptors() <= before + BREATH)
    assert engine.inspect(identifier)["State"]["Running"]


@pytest.mark.own
def test_the_daemon_says_good_bye(own_engine: TempEngine) -> None:
    identifier = own_engine.started("sleep", "600")
    with attached(own_engine, identifier) as connection:
        own_engine.terminate()
        frame = connection.recv_frame()
        assert (frame.opcode, frame.data) == (websocket.ABNF.OPCODE_CLOSE, (1001).to_bytes(2, "big"))
    own_engine.start()
    assert own_engine.inspect(identifier)["State"]["Running"]


@pytest.mark.own
def test_a_slow_client_loses_nothing(engine: TempEngine) -> None:
    identifier = engine.create("sh", "-c", "seq 600000")
    with attached(engine, identifier) as connection:
        engine.post(f"/containers/{identifier}/start")
        time.sleep(1)
        assert memory(engine) < 300 << 20
        received, code = to_end(connection)
    assert received == b"".join(b"%d\n" % number for number in range(1, 600_001))
    assert code == 1000
