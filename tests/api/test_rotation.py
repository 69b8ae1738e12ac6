"""A log whose small files are rotated while it is read: nothing is lost, repeated or out of order,
and afterwards it is as small as requested."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import client
from tests.support.engine.client import hijack, payload, read_to_end
from tests.support.engine.harness import TempEngine, until

LINES = 150_000


def small(size: str, files: int) -> dict[str, Any]:
    return {"LogConfig": {"Type": "json-file", "Config": {"max-size": size, "max-file": str(files)}}}


def waiting(
    engine: TempEngine, size: str, files: int, lines: int = LINES, then: str = ":"
) -> tuple[str, socket.socket]:
    """A container that prints numbers as fast as it can once the socket is closed."""
    identifier = engine.started(
        "sh", "-c", f"echo 0; cat; seq {lines}; {then}", OpenStdin=True, StdinOnce=True, host=small(size, files)
    )
    stdin, _ = hijack(engine.socket, f"/v1.24/containers/{identifier}/attach?stream=1&stdin=1")
    until("it is there", lambda: engine.logs(identifier) == b"0\n")
    return identifier, stdin


def numbers(received: bytes) -> list[int]:
    return [int(line) for line in payload(received).split()]


@pytest.mark.own  # dockerd 20.10 loses lines
@pytest.mark.parametrize(("size", "files"), [("1k", 1), ("1k", 2), ("10k", 3)])
def test_followers_at_full_speed_see_every_line(engine: TempEngine, size: str, files: int) -> None:
    identifier, stdin = waiting(engine, size, files)
    target = f"/v1.24/containers/{identifier}/logs?follow=1&stdout=1"
    streams = [hijack(engine.socket, target, method="GET") for _ in range(3)]
    stdin.close()
    for stream, early in streams:
        assert numbers(read_to_end(stream, early)) == list(range(LINES + 1))
    assert engine.wait(identifier) == 0
    kept = numbers_kept(engine, identifier)
    assert kept == list(range(kept[0], LINES + 1))


def numbers_kept(engine: TempEngine, identifier: str) -> list[int]:
    return [int(line) for line in engine.logs(identifier).split()]


@pytest.mark.own  # dockerd 20.10 loses lines between log and stream
def test_logs_then_stream_while_the_log_is_rotated(engine: TempEngine) -> None:
    identifier, stdin = waiting(engine, "1k", 2, then="until [ -e /attached ]; do sleep 0.1; done")
    stdin.close()
    target = f"/v1.24/containers/{identifier}/attach?logs=1&stream=1&stdout=1"
    # concurrently: a client that does not read stalls the container
    with ThreadPoolExecutor(5) as readers:
        results = []
        for _ in range(5):
            stream = hijack(engine.socket, target)
            results.append(readers.submit(read_to_end, *stream))
        engine.client().containers.get(identifier).exec_run(["touch", "/attached"])
        for result in results:
            found = numbers(result.result())
            assert found == list(range(found[0], LINES + 1))


@pytest.mark.own
def test_a_log_is_read_in_order_while_it_is_rotated(engine: TempEngine) -> None:
    """Each response is the complete log at one moment, in order, although its files are renamed
    meanwhile."""
    identifier = engine.started(
        "sh", "-c", "i=0; while :; do seq $i $((i+99)); i=$((i+100)); done", host=small("2k", 4)
    )
    until("files have been rotated", lambda: numbers_kept(engine, identifier)[:1] > [0])
    for _ in range(20):
        kept = numbers_kept(engine, identifier)
        assert kept == list(range(kept[0], kept[0] + len(kept)))
        tail = [int(line) for line in engine.logs(identifier, "stdout=1&tail=20").split()]
        assert tail == list(range(tail[0], tail[0] + len(tail))) and len(tail) == 20, tail


@pytest.mark.own
def test_a_follower_that_takes_nothing_costs_no_more_than_its_bound(engine: TempEngine) -> None:
    """When the log has grown by 32 MiB because of a slow reader, rotation no longer waits for it.
    Then the log is small again.
    """
    identifier, stdin = waiting(engine, "10k", 2, 600_000)
    stuck = client.connect(engine.socket)
    stuck.sendall(f"GET /v1.24/containers/{identifier}/logs?follow=1&stdout=1 HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    assert stuck.recv(4096).startswith(b"HTTP/1.1 200")
    stdin.close()
    assert engine.wait(identifier) == 0
    log = Path(engine.inspect(identifier)["LogPath"])
    assert engine.logs(identifier, "stdout=1&tail=1") == b"600000\n"
    assert sum(file.stat().st_size for file in log.parent.glob("*-json.log*")) < 2 * (32 << 20) + (1 << 20)
    stuck.close()
