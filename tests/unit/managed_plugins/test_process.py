from __future__ import annotations

import asyncio
import datetime
import json
import os
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.managed_plugins import process
from tests.support import PATIENCE

NOW = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)


@pytest.mark.parametrize(
    ("path", "directory", "expected"),
    [
        ("/data/v", "/data", "v"),
        ("/data", "/data", ""),
        ("data/v/", "/data/", "v"),
        ("//data/./v/../w", "/data", "w"),
        ("/database", "/data", None),
        ("/data/../etc", "/data", None),
        ("/etc", "/data", None),
        ("/etc", "", None),
    ],
)
def test_below(path: str, directory: str, expected: str | None) -> None:
    assert process._below(path, directory) == expected


@given(st.text("/.ad"), st.text("/.ad", min_size=1))
def test_below_is_relative(path: str, directory: str) -> None:
    found = process._below(path, directory)
    if found is not None:
        assert not found.startswith("/")
        assert ".." not in found.split("/")
        assert os.path.normpath(f"///{directory}/{found}") == os.path.normpath(f"///{path}")


def line(text: str, seconds: int) -> str:
    when = (NOW + datetime.timedelta(seconds=seconds)).isoformat().replace("+00:00", ".123456789Z")
    return json.dumps({"log": text, "stream": "stdout", "time": when}) + "\n"


def test_output(tmp_path: Path) -> None:
    log = tmp_path / "output.log"
    assert process._output(log, NOW) == ""
    log.write_text(line("of the run before\n", -5) + line("one\n", 0) + line("two\n", 1) + '{"log": "cut')
    assert process._output(log, NOW) == "one\ntwo"


def test_output_is_bounded(tmp_path: Path) -> None:
    log = tmp_path / "output.log"
    log.write_text("".join(line(f"{number}\n", 1) for number in range(100_000)))
    found = process._output(log, NOW)
    assert found.endswith("99999")
    assert len(found) <= 2000


def test_a_link_is_no_socket(tmp_path: Path) -> None:
    path = tmp_path / "p.sock"
    assert not process._is_socket(str(path))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "other.sock"))
        path.symlink_to("other.sock")
        assert not process._is_socket(str(path))
        assert process._is_socket(str(tmp_path / "other.sock"))


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


@pytest.mark.parametrize("cancel", [False, True])
def test_a_descriptor_that_comes_late_is_closed(tmp_path: Path, cancel: bool) -> None:
    async def main() -> None:
        answer = asyncio.Event()
        late: list[int] = []

        async def opening() -> int:
            await answer.wait()
            late.append(os.open(tmp_path, os.O_PATH))
            return late[0]

        waiting = asyncio.create_task(process._within(1000 if cancel else 0.001, opening()))
        if cancel:
            await asyncio.sleep(0)
            waiting.cancel()
        with pytest.raises(asyncio.CancelledError if cancel else TimeoutError):
            await waiting
        answer.set()
        while not late or is_open(late[0]):  # noqa: ASYNC110 (closed in a thread)
            await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(main(), 30 * PATIENCE))


def test_a_descriptor_in_time(tmp_path: Path) -> None:
    async def opening() -> int:
        return os.open(tmp_path, os.O_PATH)

    found = asyncio.run(process._within(10, opening()))
    assert is_open(found)
    os.close(found)


def test_sweep(tmp_path: Path) -> None:
    for name in ("a" * 64, "b" * 64, "flocker.sock", "netns"):
        (tmp_path / name).mkdir()
    process._sweep(tmp_path, {"a" * 64})
    assert {*os.listdir(tmp_path)} == {"a" * 64, "flocker.sock", "netns"}
    process._sweep(tmp_path / "none", ())
