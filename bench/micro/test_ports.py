"""Reserving and releasing 200 ports of the host, beside Python's sockets. A container that
publishes a range needs this.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from engine._fast import ports
from engine.system import namespaces

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

FIRST, COUNT = 8000, 200


@pytest.fixture(autouse=True)
def own_network() -> Iterator[None]:
    """A network namespace, in which no other program uses a port."""
    with namespaces.new_network() as made:
        yield
    os.close(made)


def in_a_run() -> None:
    made, failure = ports.bind(socket.AF_INET6, socket.SOCK_STREAM, 0, bytes(16), FIRST, COUNT, both=True)
    assert (len(made), failure) == (COUNT, 0)
    ports.close_all(made)


def one_by_one() -> None:
    with contextlib.ExitStack() as stack:
        for port in range(FIRST, FIRST + COUNT):
            made = stack.enter_context(socket.socket(socket.AF_INET6, socket.SOCK_STREAM))
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(("::", port))
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)


@pytest.mark.parametrize("hold", [in_a_run, one_by_one])
def test_hold(benchmark: Any, hold: Callable[[], None]) -> None:
    benchmark(hold)
