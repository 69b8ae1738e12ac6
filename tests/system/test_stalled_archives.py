"""Clients that stop reading an archive of a container hold no thread that others need."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.support.engine import client
from tests.support.engine.harness import TempEngine

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

STALLED = 70
"""More than threads for the files of containers."""
SIZE = 16 << 20
"""Bytes: more than a socket and the engine buffer."""


@pytest.fixture
def container(file_engine: TempEngine) -> Iterator[str]:
    command = f"dd if=/dev/urandom of=/large bs=1M count={SIZE >> 20}; sleep 1000"
    container = file_engine.started("sh", "-c", command)
    file_engine.docker("exec", container, "sh", "-c", f"until [ $(stat -c %s /large) = {SIZE} ]; do sleep 0.1; done")
    yield container
    file_engine.remove_all()


def test_others_read_copy_and_create(file_engine: TempEngine, container: str) -> None:
    engine, target = file_engine, f"/containers/{container}/archive?path=/large"
    with ExitStack() as stack:
        stalled = []
        for _ in range(STALLED):
            reader = stack.enter_context(client.connect(engine.socket))
            reader.sendall(f"GET {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            stalled.append(reader)
        for reader in stalled:  # each has its first chunk, so that the next one is made
            assert reader.recv(12, socket.MSG_WAITALL) == b"HTTP/1.1 200"
        for _ in range(3):
            assert engine.request("HEAD", target, timeout=10).status == 200
            assert len(engine.request("GET", target, timeout=20).body) > SIZE
            made = engine.create("true", host={"Binds": ["/tmp:/t"]})
            engine.post(f"/containers/{made}/start")
            assert engine.wait(made) == 0
            assert engine.request("GET", f"/containers/{container}/top", timeout=10).status == 200
        for reader in stalled:  # and goes on when it reads again
            size = 12
            while size < SIZE:
                got = len(reader.recv(1 << 20))
                assert got
                size += got
