"""Connections that a loop forwards, over loopback."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator

import pytest

from engine._fast.pump import Loop
from engine._fast.relay import Relay, Room
from tests.support import PATIENCE

FAMILIES = {"127.0.0.1": socket.AF_INET, "::1": socket.AF_INET6}
WAIT = 20 * PATIENCE
LONG = os.urandom(3 << 20)
"""More than the buffers of both sockets hold."""


class Running:
    """A loop in a thread of its own."""

    def __init__(self) -> None:
        self.loop = Loop()
        self._thread = threading.Thread(target=self.loop.run)
        self._waking, waker = socket.socketpair()
        self._waker = waker
        self._watch = self.loop.watch(self._waking.fileno(), lambda _: self.loop.stop())

    def __enter__(self) -> Running:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._waker.send(b"x")
        self._thread.join()
        self._watch.cancel()
        self._waking.close()
        self._waker.close()


@pytest.fixture
def running() -> Running:
    return Running()


def echoing(host: str) -> tuple[socket.socket, threading.Thread]:
    """A service that sends everything back, for one connection after the other."""
    server = socket.create_server((host, 0), family=FAMILIES[host])

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = server.accept()
                threading.Thread(target=echo, args=(connection,)).start()

    def echo(connection: socket.socket) -> None:
        with connection:
            while data := connection.recv(1 << 16):
                connection.sendall(data)

    thread = threading.Thread(target=serve)
    thread.start()
    return server, thread


@contextlib.contextmanager
def relayed(running: Running, listens: str, target: str, most: int = 8) -> Iterator[tuple[int, Room, Relay]]:
    """The port of a relay to an echoing service."""
    server, thread = echoing(target)
    listener = socket.create_server((listens, 0), family=FAMILIES[listens])
    listener.setblocking(False)
    room, port = Room(most), listener.getsockname()[1]
    address = socket.inet_pton(FAMILIES[target], target)
    relay = Relay(running.loop, listener.detach(), address, room, server.getsockname()[1])
    with running:
        yield port, room, relay
    relay.close()
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    thread.join()


def echoed(connection: socket.socket, data: bytes) -> bytes:
    sending = threading.Thread(target=lambda: (connection.sendall(data), connection.shutdown(socket.SHUT_WR)))
    sending.start()
    received = bytearray()
    while piece := connection.recv(1 << 16):
        received += piece
    sending.join()
    return bytes(received)


@pytest.mark.parametrize("target", FAMILIES)
@pytest.mark.parametrize("listens", FAMILIES)
def test_to_another_port(running: Running, listens: str, target: str) -> None:
    with relayed(running, listens, target) as (port, _, _):
        for data in (b"", b"short", LONG):
            with socket.create_connection((listens, port), WAIT) as connection:
                assert echoed(connection, data) == data


def test_nothing_listens_there(running: Running) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        listener.setblocking(False)
        room, port = Room(8), listener.getsockname()[1]
        relay = Relay(running.loop, listener.detach(), socket.inet_aton("127.0.0.1"), room, free.getsockname()[1])
        with (
            running,
            pytest.raises(ConnectionResetError),
            socket.create_connection(("127.0.0.1", port), WAIT) as connection,
        ):
            connection.recv(1)
        relay.close()
        assert room.count == 0


def test_without_room_connections_wait(running: Running) -> None:
    with relayed(running, "127.0.0.1", "127.0.0.1", most=1) as (port, room, _):
        with socket.create_connection(("127.0.0.1", port), WAIT) as first:
            first.sendall(b"1")
            assert first.recv(1) == b"1" and room.count == 1
            second = socket.create_connection(("127.0.0.1", port), WAIT)
            second.sendall(b"2")
            second.settimeout(0.2)  # seconds: nothing may come
            with pytest.raises(TimeoutError):
                second.recv(1)
            second.settimeout(WAIT)
            assert echoed(first, b"") == b""
        with second:
            assert second.recv(1) == b"2"


def test_connections_survive_the_relay(running: Running) -> None:
    with relayed(running, "127.0.0.1", "127.0.0.1") as (port, _, relay):
        with socket.create_connection(("127.0.0.1", port), WAIT) as connection:
            connection.sendall(b"1")
            assert connection.recv(1) == b"1"
            relay.close()
            assert echoed(connection, LONG) == LONG
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), WAIT)


def test_addresses() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(ValueError, match="not an address"):
        Relay(Loop(), os.dup(listener.fileno()), b"12345", Room(1), 80)
