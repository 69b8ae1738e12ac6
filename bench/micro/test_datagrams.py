"""Datagrams by sendmmsg(2), to a socket that is never read; beside sendto(2) from Python."""

from __future__ import annotations

import socket
from array import array
from typing import Any

import pytest

from engine._fast.datagrams import send

COUNT, SIZE = 1000, 150


@pytest.mark.parametrize("how", ["sendmmsg", "python"])
def test_send(benchmark: Any, how: str) -> None:
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as peer,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender,
    ):
        peer.bind(("127.0.0.1", 0))
        sender.connect(peer.getsockname())
        wire = b"x" * COUNT * SIZE
        ends = array("I", range(SIZE, COUNT * SIZE + 1, SIZE))

        def batches() -> int:
            return send(sender.fileno(), wire, ends, 0)

        def singly() -> int:
            return sum(sender.send(wire[end - SIZE : end]) for end in ends) // SIZE

        assert benchmark(batches if how == "sendmmsg" else singly) == COUNT
        benchmark.extra_info["µs/datagram"] = round(benchmark.stats["min"] / COUNT * 1e6, 3)
