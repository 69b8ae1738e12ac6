"""Datagrams passed on by a real loop, over loopback."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from engine._fast.pump import Loop
from engine._fast.relay import Room
from engine.monitor import datagrams
from engine.monitor.datagrams import Datagrams, is_stream


class Relayed:
    """A container's socket that echoes, and the relay of a port to it."""

    def __init__(self, most: int) -> None:
        self.room = Room(most)
        self.loop = Loop()
        self.container = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.container.bind(("127.0.0.1", 0))
        listener = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, False)
        listener.bind(("::", 0))
        self.port = listener.getsockname()[1]
        target = socket.inet_aton("127.0.0.1"), self.container.getsockname()[1]
        self.relay = Datagrams(self.loop, listener.detach(), target[0], self.room, target[1])
        self.sources: list[int] = []
        self._threads = [threading.Thread(target=each) for each in (self._echo, self.loop.run)]
        for each in self._threads:
            each.start()

    def _echo(self) -> None:
        while (received := self.container.recvfrom(70_000))[0] != b"end":
            self.sources.append(received[1][1])
            self.container.sendto(*received)

    def close(self) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ending:
            ending.sendto(b"end", self.container.getsockname())
        self.loop.call_later(0, self.loop.stop)
        with client(self, "127.0.0.1") as waking:
            waking.send(b"x")
        for each in self._threads:
            each.join()
        self.relay.close()
        self.container.close()


@pytest.fixture
def relayed() -> Iterator[Relayed]:
    made = Relayed(2)
    yield made
    made.close()
    assert made.room.count == 0


def client(made: Relayed, host: str) -> socket.socket:
    asking = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM)
    asking.settimeout(5)  # seconds: it only says that it did not hang
    asking.connect((host, made.port))
    return asking


def asked(asking: socket.socket, data: bytes) -> bytes:
    asking.send(data)
    return asking.recv(70_000)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1"])
def test_answers_come_from_the_address_that_was_asked(relayed: Relayed, host: str) -> None:
    """A connected socket takes no others."""
    with client(relayed, host) as asking:
        for data in (b"", b"small", bytes(60_000)):
            assert asked(asking, data) == data


def test_each_client_has_its_own_socket(relayed: Relayed) -> None:
    with client(relayed, "127.0.0.1") as one, client(relayed, "127.0.0.1") as two:
        assert [asked(one, b"1"), asked(two, b"2"), asked(one, b"1")] == [b"1", b"2", b"1"]
        first, second, third = relayed.sources
        assert first == third != second
        assert relayed.room.count == 2
        with client(relayed, "127.0.0.1") as three:
            three.settimeout(0.2)  # seconds: nothing may come
            with pytest.raises(TimeoutError):
                asked(three, b"3")


def test_silent_clients_are_forgotten(relayed: Relayed, monkeypatch: pytest.MonkeyPatch) -> None:
    with client(relayed, "127.0.0.1") as one:
        asked(one, b"1")
        monkeypatch.setattr(datagrams, "IDLE", -1.0)
        relayed.relay._sweep()
        assert relayed.room.count == 0
        monkeypatch.undo()
        assert asked(one, b"1") == b"1"


def test_kinds_of_sockets() -> None:
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        with socket.socket(socket.AF_INET, kind) as made:
            assert is_stream(made.fileno()) == (kind == socket.SOCK_STREAM)
