"""Processes of a container over HTTP, as ps(1) of the host shows them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.engine.harness import TempEngine, until


def top(engine: TempEngine, identifier: str, query: str = "") -> list[dict[str, str]]:
    answer = engine.request("GET", f"/v1.24/containers/{identifier}/top{query}")
    assert answer.status == 200, answer
    found: Any = answer.json()
    assert all(len(row) == len(found["Titles"]) for row in found["Processes"])
    return [dict(zip(found["Titles"], row, strict=True)) for row in found["Processes"]]


@pytest.fixture
def family(engine: TempEngine) -> str:
    identifier = engine.started("sh", "-c", "sleep 611 & sleep 612 & wait", User="1:2")
    grown = {"sh -c sleep 611 & sleep 612 & wait", "sleep 611", "sleep 612"}
    until("both are what they shall be", lambda: {row["CMD"] for row in top(engine, identifier)} == grown)
    return identifier


def test_by_default(engine: TempEngine, family: str) -> None:
    rows = top(engine, family)
    assert list(rows[0]) == ["UID", "PID", "PPID", "C", "STIME", "TTY", "TIME", "CMD"]
    init = str(engine.inspect(family)["State"]["Pid"])
    assert [row["CMD"] for row in rows if row["PID"] == init] == ["sh -c sleep 611 & sleep 612 & wait"]
    children = {row["CMD"]: row for row in rows if row["PPID"] == init}
    assert sorted(children) == ["sleep 611", "sleep 612"]
    for row in rows:
        assert row["UID"] == "daemon", "uid 1 by the host's name"
        assert Path(f"/proc/{row['PID']}").exists(), "the host's pid"


def test_with_arguments(engine: TempEngine, family: str) -> None:
    rows = top(engine, family, "?ps_args=aux")
    assert list(rows[0])[:2] == ["USER", "PID"] and list(rows[0])[-1] == "COMMAND"
    rows = top(engine, family, "?ps_args=-o+pid,uid,args")
    assert list(rows[0]) == ["PID", "UID", "COMMAND"]
    assert {(row["UID"], row["COMMAND"].split()[0]) for row in rows} == {("1", "sh"), ("1", "sleep")}
    answer = engine.request("GET", f"/v1.24/containers/{family}/top?ps_args=--nothing")
    assert answer.status in (400, 500)
    assert "--nothing" in answer.message or "option" in answer.message


def test_an_exec_is_among_them(engine: TempEngine, family: str) -> None:
    made = engine.request("POST", f"/v1.24/containers/{family}/exec", {"Cmd": ["sleep", "613"], "User": "0"}).json()[
        "Id"
    ]
    assert engine.request("POST", f"/v1.24/exec/{made}/start", {"Detach": True}).status == 200
    until("it is there", lambda: ("root", "sleep 613") in {(row["UID"], row["CMD"]) for row in top(engine, family)})


def test_of_what_does_not_run(engine: TempEngine, family: str) -> None:
    engine.post(f"/containers/{family}/pause")
    assert len(top(engine, family)) == 3
    engine.post(f"/containers/{family}/unpause")
    engine.post(f"/containers/{family}/kill")
    answer = engine.request("GET", f"/v1.24/containers/{family}/top")
    assert answer.status in (500, 409)  # as documented, and as dockerd 20.10
    assert answer.message == f"Container {family} is not running"


def test_docker_top(engine: TempEngine, family: str) -> None:
    lines = engine.docker("top", family, "-o", "pid,args").out.splitlines()
    assert lines[0].split() == ["PID", "COMMAND"] and len(lines) == 4
