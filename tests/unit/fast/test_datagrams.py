"""sendmmsg(2), on sockets of this host."""

from __future__ import annotations

import errno
import os
import socket
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine._fast.datagrams import send


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    right.setblocking(False)
    yield left, right
    left.close()
    right.close()


def received(sock: socket.socket) -> list[bytes]:
    found = []
    while True:
        try:
            found.append(sock.recv(1 << 20))
        except BlockingIOError:
            return found


def udp() -> tuple[socket.socket, socket.socket]:
    """A socket and its peer, on the loopback interface."""
    peer = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    peer.bind(("127.0.0.1", 0))
    peer.setblocking(False)
    sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sender.connect(peer.getsockname())
    return sender, peer


def test_messages(pair: tuple[socket.socket, socket.socket]) -> None:
    """In an array or in a list, from any of them on, and an empty one."""
    left, right = pair
    for ends in (array("I", [1, 3, 3, 6]), [1, 3, 3, 6], array("Q", [1, 3, 3, 6])):
        assert send(left.fileno(), b"abbccc", ends, 0) == 4
        assert received(right) == [b"a", b"bb", b"", b"ccc"]
    assert send(left.fileno(), b"abbccc", [1, 3, 6], 2) == 1
    assert received(right) == [b"ccc"]
    assert send(left.fileno(), b"abbccc", [1, 3, 6], 3) == 0
    assert send(left.fileno(), b"", [], 0) == 0


def test_more_than_a_batch() -> None:
    sender, peer = udp()
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
    messages = [b"%d" % number for number in range(150)]
    ends, at = [], 0
    for message in messages:
        at += len(message)
        ends.append(at)
    assert send(sender.fileno(), b"".join(messages), ends, 0) == 150
    assert received(peer) == messages
    sender.close()
    peer.close()


def test_full_socket(pair: tuple[socket.socket, socket.socket]) -> None:
    """The kernel takes some messages, then none, and the others once there is room."""
    left, right = pair
    wire, ends = b"x" * 100_000, [1000 * number for number in range(1, 101)]
    found, done = [], 0
    while done < len(ends):
        sent = send(left.fileno(), wire, ends, done)
        assert sent > 0
        done += sent
        if done < len(ends):
            assert send(left.fileno(), wire, ends, done) == 0
        found += received(right)
    assert found == [b"x" * 1000] * 100


def test_message_that_is_too_large(pair: tuple[socket.socket, socket.socket]) -> None:
    """The messages before it are sent, then it raises until the caller skips it."""
    left, right = pair
    left.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
    wire, ends = b"a" + b"x" * 100_000 + b"b", [1, 100_001, 100_002]
    assert send(left.fileno(), wire, ends, 0) == 1
    for _ in range(2):
        with pytest.raises(OSError) as error:
            send(left.fileno(), wire, ends, 1)
        assert error.value.errno == errno.EMSGSIZE
    assert send(left.fileno(), wire, ends, 2) == 1
    assert received(right) == [b"a", b"b"]


def test_udp_without_a_receiver() -> None:
    """Each ICMP error is reported once, so the message is sent again."""
    sender, peer = udp()
    peer.close()
    for _ in range(5):
        assert send(sender.fileno(), b"abc", [1, 2, 3], 0) == 3
    sender.close()


def test_unix_socket_without_a_receiver(tmp_path: Path) -> None:
    path = str(tmp_path / "log")
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    peer.bind(path)
    sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    sender.connect(path)
    assert send(sender.fileno(), b"a", [1], 0) == 1
    peer.close()
    with pytest.raises(ConnectionRefusedError):
        send(sender.fileno(), b"a", [1], 0)
    sender.close()


def test_no_socket() -> None:
    reader, writer = os.pipe()
    with pytest.raises(OSError) as error:
        send(writer, b"a", [1], 0)
    assert error.value.errno == errno.ENOTSOCK
    os.close(reader)
    os.close(writer)
    with pytest.raises(OSError) as error:
        send(-1, b"a", [1], 0)
    assert error.value.errno == errno.EBADF


@pytest.mark.parametrize("ends", [[2, 1], [4], [1, 5, 3]])
@pytest.mark.parametrize("first", [0, -1, 9])
def test_ends_that_are_none(pair: tuple[socket.socket, socket.socket], ends: list[int], first: int) -> None:
    with pytest.raises(ValueError):
        send(pair[0].fileno(), b"abc", ends, first)
    assert received(pair[1]) == []
    with pytest.raises(OverflowError):
        send(pair[0].fileno(), b"abc", [-1], 0)
