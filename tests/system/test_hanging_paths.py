"""Paths of clients on a file system whose server does not answer: they stop nothing else."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.engine.harness import TempEngine, until
from tests.support.fakes.dead_mount import dead_mount

HANGING = 8
"""More than asyncio's threads of two processors, and than those that mount."""


@pytest.fixture
def dead(tmp_path: Path) -> Iterator[Path]:
    with dead_mount(tmp_path / "dead"):
        yield tmp_path / "dead"


@pytest.fixture
def pool(dead: Path) -> Iterator[ThreadPoolExecutor]:
    """Ends with the mount: then what hangs has ended."""
    pool = ThreadPoolExecutor(HANGING)
    yield pool
    pool.shutdown(wait=False)


def assert_works(engine: TempEngine) -> None:
    """Requests of others are answered."""
    assert engine.request("GET", "/info", timeout=10).status == 200
    assert engine.request("POST", "/volumes/create", {"Name": "other"}, timeout=10).status == 201
    container = engine.create("true", host={"Binds": ["other:/v", "/tmp:/t"]})
    assert engine.request("POST", f"/containers/{container}/start", timeout=10).status == 204
    assert engine.wait(container) == 0
    assert engine.request("HEAD", f"/containers/{container}/archive?path=/bin", timeout=10).status == 200
    assert engine.request("DELETE", f"/containers/{container}?v=1", timeout=10).status == 204
    assert engine.request("DELETE", "/volumes/other", timeout=10).status == 204


def bind(path: Path) -> dict[str, object]:
    return {"Mounts": [{"Type": "bind", "Source": str(path), "Target": "/dead"}]}


def test_creates(file_engine: TempEngine, dead: Path, pool: ThreadPoolExecutor) -> None:
    body = {"Image": "busybox", "Cmd": ["true"], "HostConfig": bind(dead / "x")}
    calls = [pool.submit(file_engine.request, "POST", "/containers/create", body) for _ in range(HANGING)]
    assert_works(file_engine)
    assert not any(call.done() for call in calls)


def test_files_of_a_container(file_engine: TempEngine, tmp_path: Path) -> None:
    """`docker cp` of files that lie below a bind."""
    place = tmp_path / "later"
    container = file_engine.create("sleep", "1000", host={"Binds": [f"{tmp_path}:/t"]})
    with ThreadPoolExecutor(HANGING) as pool, dead_mount(place):
        target = f"/containers/{container}/archive?path=/t/later/x"
        calls = [pool.submit(file_engine.request, "HEAD", target) for _ in range(HANGING)]
        assert_works(file_engine)
        assert not any(call.done() for call in calls)
    file_engine.remove_all()


def test_engined_stop(dead: Path, pool: ThreadPoolExecutor) -> None:
    with TempEngine() as engine:
        engine.load_busybox()
        engine.started("sleep", "1000")
        call = pool.submit(engine.request, "POST", "/containers/create", {"Image": "busybox", "HostConfig": bind(dead)})
        assert_works(engine)
        engine.stop()
        engine.assert_gone()
        assert isinstance(call.exception(), ConnectionError | http.client.HTTPException)


def test_restart_policies_at_boot(tmp_path: Path) -> None:
    with TempEngine() as engine:
        engine.load_busybox()
        place = tmp_path / "dead"
        place.mkdir()
        for _ in range(HANGING):
            engine.started("sleep", "1000", host={"Binds": [f"{place}:/d"], "RestartPolicy": {"Name": "always"}})
        engine.stop()
        place.rmdir()
        with dead_mount(place):
            engine.start()
            assert_works(engine)
            engine.terminate()  # waits for none of them
        engine.start()
        containers = engine.containers()
        until("all run", lambda: all(engine.inspect(each)["State"]["Running"] for each in containers))
