"""A listener whose process runs out of descriptors: no connection is reset, no loop spins, and
requests can open files."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.http.messages import Reply, Request
from engine.http.server import Server
from tests.unit.http.harness import App, serve, until

CLIENTS = """
import resource, socket, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
path, count = sys.argv[1], int(sys.argv[2])
connections = [socket.socket(socket.AF_UNIX) for _ in range(count)]
for each in connections:
    each.connect(path)
    each.sendall(b"GET /open HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n")
print("connected", flush=True)
sys.stdin.readline()
good = 0
for each in connections:  # in the order in which they came: each leaves when it is answered
    good += each.recv(4096).startswith(b"HTTP/1.1 200")
    each.close()
print("good", good, flush=True)
"""
COUNT = 300


@pytest.fixture
def few_descriptors() -> Iterator[int]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = len(os.listdir("/proc/self/fd")) + 120
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    yield limit
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def opens(request: Request) -> Reply:
    """A handler's work while accepting pauses: it opens a file."""
    os.close(os.open("/dev/null", os.O_RDONLY))
    return Reply(200, b"{}")


def test_connections_wait_for_descriptors(
    tmp_path: Path, few_descriptors: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(app: App, path: str, server: Server) -> None:
        app.extra["open"] = opens
        clients = subprocess.Popen(  # noqa: ASYNC220
            [sys.executable, "-c", CLIENTS, path, str(COUNT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert clients.stdin is not None and clients.stdout is not None
        try:
            assert await asyncio.to_thread(clients.stdout.readline) == "connected\n"
            (listener,) = server._listeners
            await until(lambda: listener.paused)
            await asyncio.sleep(0.1)
            served = len(server.connections)
            assert 40 < served < 120, "as many as the limit allows, less a reserve"
            used, begin = time.process_time(), time.monotonic()
            await asyncio.sleep(1)
            busy = (time.process_time() - used) / (time.monotonic() - begin)
            assert busy < 0.2, "it waits, and does not spin"  # seconds: a share of them
            assert len(server.connections) == served
            clients.stdin.write("go\n")
            clients.stdin.flush()
            assert await asyncio.to_thread(clients.stdout.readline) == f"good {COUNT}\n"
        finally:
            clients.kill()
            await asyncio.to_thread(clients.wait)
            clients.stdin.close()
            clients.stdout.close()
        await until(lambda: not listener.paused)

    with caplog.at_level(logging.WARNING):
        serve(scenario, str(tmp_path / "s"))
    lines = [record for record in caplog.records if "accepting connections is paused" in record.message]
    assert len(lines) == 1 and lines[0].levelno == logging.WARNING


def test_a_burst_is_accepted_whole(tmp_path: Path) -> None:
    async def scenario(app: App, path: str, server: Server) -> None:
        connections = []
        for _ in range(200):
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(path)
            connections.append(connection)
        await until(lambda: len(server.connections) == 200)
        for connection in connections:
            connection.close()
        await until(lambda: not server.connections)

    serve(scenario, str(tmp_path / "s"))
