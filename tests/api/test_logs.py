"""Logs over HTTP: the choice of entries and streams, the format, the end of the stream."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from tests.support import PATIENCE
from tests.support.engine.client import frames, hijack, read_to_end
from tests.support.engine.harness import TempEngine, until

STAMP = rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{9}Z"


@pytest.fixture
def ten(engine: TempEngine) -> str:
    """Ten lines of stdout, one of stderr between them. Two pipes are not ordered between each
    other, so each write waits for the one before."""
    script = "seq 5; read word; echo oh >&2; read word; seq 6 10"
    identifier = engine.started("sh", "-c", script, Labels={"tier": "back"}, OpenStdin=True)
    stdin, _ = hijack(engine.socket, f"/v1.24/containers/{identifier}/attach?stream=1&stdin=1")
    with stdin:
        for lines in (5, 6):
            until("so far", lambda lines=lines: engine.logs(identifier).count(b"\n") == lines)
            stdin.sendall(b"go on\n")
        engine.wait(identifier)
    return identifier


def test_streams(engine: TempEngine, ten: str) -> None:
    assert engine.logs(ten, "stdout=1") == b"".join(b"%d\n" % number for number in range(1, 11))
    assert engine.logs(ten, "stderr=1") == b"oh\n"
    assert engine.logs(ten) == b"1\n2\n3\n4\n5\noh\n6\n7\n8\n9\n10\n"
    body = engine.request("GET", f"/v1.24/containers/{ten}/logs?stdout=1&stderr=1").body
    assert [stream for stream, text in frames(body) if text == b"oh\n"] == [2]
    assert engine.request("GET", f"/v1.24/containers/{ten}/logs").status == 400


@pytest.mark.parametrize(
    ("tail", "lines"),
    [("3", b"8\n9\n10\n"), ("0", b""), ("6", b"oh\n6\n7\n8\n9\n10\n"), ("all", None), ("1000", None), ("-1", None)],
)
def test_tail(engine: TempEngine, ten: str, tail: str, lines: bytes | None) -> None:
    assert engine.logs(ten, f"stdout=1&stderr=1&tail={tail}") == (engine.logs(ten) if lines is None else lines)


def test_timestamps_and_since(engine: TempEngine) -> None:
    identifier = engine.started("sh", "-c", "echo old; cat; echo new", OpenStdin=True, StdinOnce=True)
    stdin, _ = hijack(engine.socket, f"/v1.24/containers/{identifier}/attach?stream=1&stdin=1")
    until("the first is there", lambda: engine.logs(identifier) == b"old\n")
    begin = time.time()
    until("the second has passed", lambda: int(time.time()) > int(begin))
    stdin.close()
    engine.wait(identifier)
    dressed = engine.logs(identifier, "stdout=1&timestamps=1").splitlines()
    assert [re.fullmatch(STAMP + rb" (old|new)", line) is not None for line in dressed] == [True, True]
    assert dressed == sorted(dressed)
    assert engine.logs(identifier, f"stdout=1&since={int(begin) + 1}") == b"new\n"
    assert engine.logs(identifier, f"stdout=1&since={begin:.9f}") == b"new\n"
    assert engine.logs(identifier, "stdout=1&since=0") == b"old\nnew\n"
    assert engine.logs(identifier, f"stdout=1&since={int(begin) + 1000}") == b""


@pytest.mark.own
def test_no_line_is_older_than_the_start(engine: TempEngine) -> None:
    """Clients read the log of a restarted container from its `StartedAt` on (Testcontainers)."""
    container = engine.create("echo", "first")
    for number in range(1, 6):
        engine.post(f"/containers/{container}/start")
        engine.wait(container)
        until("all runs are in the log", lambda n=number: engine.logs(container).count(b"first\n") == n)
        started = engine.inspect(container)["State"]["StartedAt"]
        log = engine.request("GET", f"/v1.55/containers/{container}/logs?stdout=1&since={started}").body
        assert [line for _, line in frames(log)] == [b"first\n"]


@pytest.mark.own
def test_since_comes_with_1_19(engine: TempEngine, ten: str) -> None:
    later = int(time.time()) + 1000
    answers = [
        engine.request("GET", f"/v{version}/containers/{ten}/logs?stdout=1&since={later}").body
        for version in ("1.18", "1.19")
    ]
    assert bool(answers[0]) and not answers[1]


def test_what_was_written_before_the_request_is_in_the_answer(engine: TempEngine, tmp_path: Path) -> None:
    """Also right after it was written, and by the next monitor."""
    os.mkfifo(tmp_path / "go")
    script = "exec </v/go; while read -r word; do echo $word; echo $word >/v/new; mv /v/new /v/written; done"
    container = engine.started("sh", "-c", script, host={"Binds": [f"{tmp_path}:/v"]})
    with open(tmp_path / "go", "w", buffering=1) as go:
        for number in range(60):
            if number % 10 == 5:
                engine.replace_monitor()
            go.write(f"{number}\n")
            end = time.monotonic() + 30 * PATIENCE
            while not (written := tmp_path / "written").exists() or written.read_text() != f"{number}\n":
                assert time.monotonic() < end
            wanted = [b"%d" % each for each in range(max(0, number - 2), number + 1)]
            assert engine.logs(container, "stdout=1&tail=3").split() == wanted
    engine.wait(container)


def test_details(engine: TempEngine) -> None:
    log = {"Type": "json-file", "Config": {"labels": "tier", "env": "COLOUR"}}
    identifier = engine.started("echo", "said", Labels={"tier": "back"}, Env=["COLOUR=red"], host={"LogConfig": log})
    engine.wait(identifier)
    assert engine.logs(identifier, "stdout=1&details=1") == b"COLOUR=red,tier=back said\n"
    assert engine.logs(identifier, "stdout=1") == b"said\n"


@pytest.mark.own  # dockerd 20.10 does not upgrade it
def test_following_ends_with_the_container_and_begins_with_its_tail(engine: TempEngine) -> None:
    identifier = engine.started("sh", "-c", "seq 3; cat; seq 4 5", OpenStdin=True, StdinOnce=True)
    stdin, _ = hijack(engine.socket, f"/v1.24/containers/{identifier}/attach?stream=1&stdin=1")
    until("three are there", lambda: engine.logs(identifier) == b"1\n2\n3\n")
    target = f"/v1.24/containers/{identifier}/logs?stdout=1&follow=1&tail=1"
    follower, early = hijack(engine.socket, target, method="GET")
    stdin.close()
    assert b"".join(text for _, text in frames(read_to_end(follower, early))) == b"3\n4\n5\n"


def test_the_driver_local_keeps_every_byte(engine: TempEngine) -> None:
    script = r"printf '\377\000\n\303\244\302'"
    container = engine.started("sh", "-c", script, host={"LogConfig": {"Type": "local"}})
    engine.wait(container)
    assert engine.logs(container) == b"\xff\0\n\xc3\xa4\xc2"


def test_a_terminal_s_log_has_no_frames(engine: TempEngine) -> None:
    identifier = engine.started("sh", "-c", "echo out; echo err >&2", Tty=True)
    engine.wait(identifier)
    assert engine.request("GET", f"/v1.24/containers/{identifier}/logs?stdout=1").body == b"out\r\nerr\r\n"


def test_no_log_to_read(engine: TempEngine) -> None:
    identifier = engine.started("echo", "unheard", host={"LogConfig": {"Type": "none"}})
    engine.wait(identifier)
    answer = engine.request("GET", f"/v1.24/containers/{identifier}/logs?stdout=1")
    assert "does not support reading" in (answer.message if answer.status == 500 else answer.body.decode())


@pytest.mark.own
def test_the_daemon_s_log_driver() -> None:
    """It is for containers that name none, or the same; others inherit nothing."""
    options = ("--log-driver", "local", "--log-opt", "max-size=1m", "--log-opt", "tag={{.Name}}")
    with TempEngine(*options) as engine:
        engine.load_busybox()
        assert engine.request("GET", "/v1.24/info").json()["LoggingDriver"] == "local"
        merged = {"max-size": "1m", "tag": "{{.Name}}"}
        for given, expected in (
            ({}, {"Type": "local", "Config": merged}),
            (
                {"Type": "local", "Config": {"max-size": "2m"}},
                {"Type": "local", "Config": {**merged, "max-size": "2m"}},
            ),
            ({"Type": "json-file"}, {"Type": "json-file", "Config": {}}),
            ({"Type": "none"}, {"Type": "none", "Config": {}}),
        ):
            identifier = engine.create("echo", "said", host={"LogConfig": given})
            assert engine.inspect(identifier)["HostConfig"]["LogConfig"] == expected
        identifier = engine.started("echo", "said", name="web")
        engine.wait(identifier)
        assert engine.logs(identifier, "stdout=1&details=1") == b"tag=web said\n"
        assert engine.inspect(identifier)["LogPath"] == ""


def test_attach_with_logs_alone(engine: TempEngine, ten: str) -> None:
    stream, early = hijack(engine.socket, f"/v1.24/containers/{ten}/attach?logs=1&stdout=1&stderr=1")
    assert b"".join(text for _, text in frames(read_to_end(stream, early))) == engine.logs(ten)


@pytest.mark.own  # dockerd 20.10 does not answer
def test_attach_with_logs_before_the_next_start(engine: TempEngine) -> None:
    """The stream has the log's content first, then the container's output when it runs again."""
    identifier = engine.started("sh", "-c", "echo run")
    engine.wait(identifier)
    until("it has ended", lambda: not engine.inspect(identifier)["State"]["Running"])
    stream, early = hijack(engine.socket, f"/v1.24/containers/{identifier}/attach?logs=1&stream=1&stdout=1")
    while len(early) < len(b"........run\n"):
        early += stream.recv(4096)
    engine.post(f"/containers/{identifier}/start")
    assert frames(read_to_end(stream, early)) == [(1, b"run\n"), (1, b"run\n")]
