"""Exec and media types of streams as API 1.25 and later have them."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from tests.api.test_exec import created, inspected, opened, run, start
from tests.support.engine import client
from tests.support.engine.client import payload, read_to_end
from tests.support.engine.harness import TempEngine, until

FRAMED = "application/vnd.docker.multiplexed-stream"
RAW = "application/vnd.docker.raw-stream"
NOTHING = {"AttachStdout": False, "AttachStderr": False}


@pytest.fixture
def box(engine: TempEngine) -> str:
    return engine.started("sleep", "6000")


# --- sizes of terminals ---------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["", "/v1.42", "/v1.24"])
def test_the_size_of_the_terminal_when_it_begins(engine: TempEngine, box: str, version: str) -> None:
    """crun sets the size while the program begins, so the program waits for it."""

    def check(size: str, at_create: Any, **body: Any) -> None:
        script = f"until [ \"$(stty size 2>&1)\" = '{size}' ]; do sleep 0.02; done; echo sized"
        exec_id = created(engine, box, "sh", "-c", script, version=version, Tty=True, ConsoleSize=at_create)
        assert read_to_end(*opened(engine, exec_id, version=version, Tty=True, **body)) == b"sized\r\n"

    check("33 77", [33, 77])
    check("44 88", [33, 77], ConsoleSize=[44, 88])
    check("33 77", [33, 77], ConsoleSize=[0, 0])
    check("44 88", None, ConsoleSize=[44, 88])


_UNSIZED = 'sleep 0.3; case "$(stty size 2>&1)" in *33*|*44*) echo sized;; *) echo unsized; esac'


@pytest.mark.parametrize("version", ["/v1.25", "/v1.41"])
def test_below_1_42_the_size_is_ignored(engine: TempEngine, box: str, version: str) -> None:
    exec_id = created(engine, box, "sh", "-c", _UNSIZED, version=version, Tty=True, ConsoleSize=[33, 77])
    stream = opened(engine, exec_id, version=version, Tty=True, ConsoleSize=[44, 88])
    assert read_to_end(*stream) == b"unsized\r\n"


def test_sizes_that_are_refused(engine: TempEngine, box: str) -> None:
    for size in ([1], [1, 2, 3], [-1, 2], [1, 70000]):
        assert "ConsoleSize" in created(engine, box, "true", version="", Tty=True, ConsoleSize=size, status=400)
    exec_id = created(engine, box, "stty", "size", version="", Tty=True)
    answer = engine.request("POST", f"/exec/{exec_id}/start", {"Tty": True, "ConsoleSize": [1]})
    assert (answer.status, "ConsoleSize" in answer.message) == (400, True)
    assert start(engine, exec_id).status == 200


# --- detach keys ----------------------------------------------------------------------------------


def test_inspect_shows_the_bytes_of_the_keys(engine: TempEngine, box: str) -> None:
    """In base64 at every version: Go clients fail at anything else."""
    exec_id = created(engine, box, "true", Tty=True, DetachKeys="ctrl-x,a")
    for version in ("", "/v1.25", "/v1.24"):
        assert base64.b64decode(inspected(engine, exec_id, version)["DetachKeys"]) == b"\x18a"
    assert inspected(engine, created(engine, box, "true"), "")["DetachKeys"] == ""


# --- nothing attached -----------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["", "/v1.25"])
def test_a_start_that_is_not_detached_hijacks(engine: TempEngine, box: str, version: str) -> None:
    """Go clients that asked for an upgrade refuse any other reply than 101."""
    exec_id = created(engine, box, "sh", "-c", "echo lost; touch /ran", version=version, **NOTHING)
    assert read_to_end(*opened(engine, exec_id, version=version)) == b""
    until("it ran", lambda: run(engine, box, "test", "-e", "/ran")[0] == 0)
    assert inspected(engine, exec_id)["ExitCode"] == 0


def test_a_start_that_fails_says_so_in_the_stream(engine: TempEngine, box: str) -> None:
    exec_id = created(engine, box, "/nothere", version="", **NOTHING)
    assert b"no such file" in read_to_end(*opened(engine, exec_id, version=""))
    assert inspected(engine, exec_id)["ExitCode"] == 127


# --- media types ----------------------------------------------------------------------------------


def _head(engine: TempEngine, target: str, body: Any = None, *, upgrade: bool = True) -> str:
    """The Content-Type of a hijacked reply."""
    content = json.dumps(body).encode() if body is not None else b""
    headers = "Connection: Upgrade\r\nUpgrade: tcp\r\n" if upgrade else ""
    with client.connect(engine.socket) as connection:
        connection.sendall(
            f"POST {target} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{headers}"
            f"Content-Length: {len(content)}\r\n\r\n".encode()
            + content
        )
        answer = b""
        while b"\r\n\r\n" not in answer:
            chunk = connection.recv(65536)
            assert chunk, answer
            answer += chunk
    head = answer.partition(b"\r\n\r\n")[0].decode()
    assert head.startswith("HTTP/1.1 101 UPGRADED" if upgrade else "HTTP/1.1 200 OK"), head
    (found,) = [line.partition(": ")[2] for line in head.splitlines() if line.lower().startswith("content-type:")]
    return found


@pytest.mark.parametrize(("version", "framed"), [("", FRAMED), ("/v1.42", FRAMED), ("/v1.41", RAW), ("/v1.24", RAW)])
def test_media_types(engine: TempEngine, version: str, framed: str) -> None:
    plain, tty = engine.started("sleep", "600"), engine.started("sleep", "600", Tty=True)
    query = "stream=1&stdout=1&stderr=1"
    for container, expected in ((plain, framed), (tty, RAW)):
        assert _head(engine, f"{version}/containers/{container}/attach?{query}") == expected
        assert _head(engine, f"{version}/containers/{container}/attach?{query}", upgrade=False) == RAW
        answer = engine.request("GET", f"{version}/containers/{container}/logs?stdout=1")
        assert answer.headers["content-type"] == expected
    for terminal, expected in ((False, framed), (True, RAW)):
        for upgrade in (True, False):
            exec_id = created(engine, plain, "true", version=version, Tty=terminal)
            found = _head(engine, f"{version}/exec/{exec_id}/start", {"Tty": terminal}, upgrade=upgrade)
            assert found == (expected if upgrade else RAW)


# --- signals of stop and restart ------------------------------------------------------------------

_TRAPS = "trap 'echo usr1; exit 3' USR1; trap 'echo term; exit 4' TERM; echo ready; while :; do sleep 0.05; done"


def _trapping(engine: TempEngine) -> str:
    identifier = engine.started("sh", "-c", _TRAPS)
    until("ready", lambda: b"ready" in engine.logs(identifier))
    return identifier


@pytest.mark.parametrize(("version", "code"), [("", 3), ("/v1.42", 3), ("/v1.41", 4), ("/v1.25", 4), ("/v1.24", 3)])
def test_the_signal_of_a_stop(engine: TempEngine, version: str, code: int) -> None:
    identifier = _trapping(engine)
    assert engine.request("POST", f"{version}/containers/{identifier}/stop?signal=SIGUSR1").status == 204
    assert engine.wait(identifier) == code


def test_the_signal_of_a_restart(engine: TempEngine) -> None:
    identifier = _trapping(engine)
    assert engine.request("POST", f"/containers/{identifier}/restart?signal=10").status == 204
    assert payload(engine.request("GET", f"/containers/{identifier}/logs?stdout=1").body).startswith(b"ready\nusr1\n")
    assert engine.inspect(identifier)["State"]["Running"]


def test_a_paused_container_is_stopped_by_any_signal(engine: TempEngine) -> None:
    identifier = _trapping(engine)
    engine.post(f"/containers/{identifier}/pause")
    assert engine.request("POST", f"/containers/{identifier}/stop?signal=USR1").status == 204
    assert engine.wait(identifier) == 3


def test_a_signal_that_there_is_not(engine: TempEngine) -> None:
    identifier = engine.started("sleep", "600")
    for verb in ("stop", "restart"):
        answer = engine.request("POST", f"/containers/{identifier}/{verb}?signal=SIGNOTHING")
        assert (answer.status, answer.message) == (400, "Invalid signal: SIGNOTHING")
    assert engine.inspect(identifier)["State"]["Running"]


def test_warnings_of_a_create_below_1_25(engine: TempEngine, box: str) -> None:
    for version, more in (("v1.24", {"Warnings"}), ("v1.25", set()), ("v1.55", set())):
        answer = engine.request("POST", f"/{version}/containers/{box}/exec", {"Cmd": ["true"]})
        assert answer.status == 201 and answer.json().keys() == {"Id"} | more
