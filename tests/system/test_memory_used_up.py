"""A daemon that gets no more memory: no thread can be started, or it ends before its first line.
The event loop goes on.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path

import pytest

from tests.support.engine import client, harness
from tests.support.engine.harness import TempEngine, busybox_archive

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

BESIDE = 64
"""Requests at a time."""


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[TempEngine]:
    # What fails for lack of memory fails in the middle of anything, and asyncio says so.
    monkeypatch.setattr(harness, "_LOST", ())
    with TempEngine() as engine:
        engine.load_busybox()
        yield engine


def size_of(pid: int) -> int:
    """Bytes of its address space."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()


def requests(engine: TempEngine, container: str, number: int) -> Iterator[client.Answer]:
    """One of each kind that needs threads or memory."""
    name, host = f"v{number}", {"NetworkMode": "bridge", "Binds": [f"v{number}:/v", "/tmp:/t"]}
    yield engine.request("GET", "/info")
    yield engine.request("POST", "/volumes/create", {"Name": name})
    yield engine.request("GET", f"/containers/{container}/archive?path=/bin")
    yield engine.request("GET", f"/containers/{container}/top")
    yield engine.request("GET", f"/containers/{container}/stats?stream=0")
    yield engine.request("GET", "/images/busybox/get")
    yield engine.request("POST", "/images/load", busybox_archive(), {"Content-Type": "application/x-tar"})
    body = {"Image": "busybox", "Cmd": ["true"], "HostConfig": host, "Labels": {"long": "x" * 20_000}}
    answer = engine.request("POST", "/containers/create", body)
    yield answer
    if answer.status == 201:
        made = answer.json()["Id"]
        yield engine.request("POST", f"/containers/{made}/start")
        yield engine.request("DELETE", f"/containers/{made}?force=1&v=1")


def failures(engine: TempEngine, container: str, number: int) -> list[str]:
    """Messages of those that fail, until an answer breaks off. Raises TimeoutError if one never
    comes.
    """
    found = []
    try:
        found = [answer.message for answer in requests(engine, container, number) if answer.status >= 400]
    except (ConnectionError, HTTPException) as error:
        found.append(repr(error))
    return found


@pytest.mark.parametrize("spare", [0, 3 << 20])
def test_requests_fail_or_succeed_and_nothing_hangs(engine: TempEngine, spare: int) -> None:
    container = engine.started("sleep", "1000")
    assert failures(engine, container, 0) == []
    whole = resource.prlimit(engine.pid, resource.RLIMIT_AS)
    with ThreadPoolExecutor(BESIDE) as pool:
        resource.prlimit(engine.pid, resource.RLIMIT_AS, (size_of(engine.pid) + spare, whole[1]))
        running = [pool.submit(failures, engine, container, number) for number in range(1, BESIDE + 1)]
        pings = 0
        while not all(each.done() for each in running):
            with contextlib.suppress(ConnectionError, HTTPException):  # but it does not time out
                pings += engine.request("GET", "/_ping", timeout=10).status == 200
        assert pings > 0
        assert any(each.result() for each in running), "memory was short"
    resource.prlimit(engine.pid, resource.RLIMIT_AS, whole)
    for number in range(3):
        assert failures(engine, container, number) == []
    assert engine.inspect(container)["State"]["Running"]
    engine.remove_all()
    engine.remove_volumes()
