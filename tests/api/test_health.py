"""Health checks, seen from outside: which command is probed and when, what inspect, the list and
the events report, and the leftovers of a probe."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine.harness import BREATH, TempEngine, until

MS = 1_000_000


def check(*test: str, **more: int) -> dict[str, Any]:
    return {"Test": list(test), "Interval": 100 * MS, "Timeout": 5000 * MS, "Retries": 2} | more


def health(engine: TempEngine, identifier: str) -> Any:
    return engine.inspect(identifier)["State"].get("Health")


def status(engine: TempEngine, identifier: str) -> str:
    [entry] = engine.request("GET", f'/v1.24/containers/json?filters={{"id":["{identifier}"]}}').json()
    return str(entry["Status"])


def events(engine: TempEngine, identifier: str, since: float) -> list[Any]:
    filters = json.dumps({"container": [identifier]}).replace('"', "%22").replace(" ", "")
    body = engine.request("GET", f"/v1.24/events?since={since:.9f}&until={time.time():.9f}&filters={filters}").body
    return [json.loads(line) for line in body.splitlines()]


def processes(engine: TempEngine, identifier: str) -> list[str]:
    answer = engine.request("GET", f"/v1.24/containers/{identifier}/top?ps_args=-eo+pid,args")
    return [row[-1] for row in answer.json()["Processes"]]


PATIENT = 3_600_000 * MS
"""A timeout that no probe of a test reaches."""


def test_starting_healthy_unhealthy_and_back(engine: TempEngine) -> None:
    begin = time.time()
    probe = "until [ -e /tmp/go ]; do sleep 0.01; done; cat /tmp/state; found=$?; echo to stderr >&2; exit $found"
    identifier = engine.started("sleep", "600", Healthcheck=check("CMD-SHELL", probe, Timeout=PATIENT))
    assert health(engine, identifier) == {"Status": "starting", "FailingStreak": 0, "Log": []}
    assert status(engine, identifier).endswith(" (health: starting)")
    engine.docker("exec", identifier, "touch", "/tmp/go")
    until("unhealthy", lambda: health(engine, identifier)["Status"] == "unhealthy")
    shown = health(engine, identifier)
    assert shown["FailingStreak"] >= 2
    assert shown["Log"][0]["ExitCode"] == 1
    assert "No such file" in shown["Log"][0]["Output"]
    assert status(engine, identifier).endswith(" (unhealthy)")

    engine.docker("exec", identifier, "sh", "-c", "echo fine >/tmp/new; mv /tmp/new /tmp/state")
    until("healthy", lambda: health(engine, identifier)["Status"] == "healthy")
    shown = health(engine, identifier)
    assert shown["FailingStreak"] == 0
    assert shown["Log"][-1]["ExitCode"] == 0
    assert shown["Log"][-1]["Output"] == "fine\nto stderr\n"
    assert shown["Log"][-1]["Start"] < shown["Log"][-1]["End"]
    assert status(engine, identifier).endswith(" (healthy)")
    said = [event["status"] for event in events(engine, identifier, begin)]
    assert [each for each in said if each.startswith("health_status")] == [
        "health_status: unhealthy",
        "health_status: healthy",
    ]
    until("five results", lambda: len(health(engine, identifier)["Log"]) == 5)
    time.sleep(0.3)
    assert len(health(engine, identifier)["Log"]) == 5
    assert engine.docker("ps", "--format", "{{.Status}}").line.endswith("(healthy)")
    assert engine.docker("inspect", "-f", "{{.State.Health.Status}}", identifier).line == "healthy"


def test_older_versions_do_not_have_it(engine: TempEngine) -> None:
    identifier = engine.started("sleep", "600", Healthcheck=check("CMD", "true"))
    assert "Health" not in engine.request("GET", f"/v1.23/containers/{identifier}/json").json()["State"]


def test_no_test_no_health(engine: TempEngine) -> None:
    for wanted in (None, {"Test": ["NONE"]}, {"Test": []}, {"Interval": 100 * MS}):
        identifier = engine.started("sleep", "600", **({"Healthcheck": wanted} if wanted else {}))
        assert health(engine, identifier) is None
        assert "health" not in status(engine, identifier)


def test_the_start_period_forgives(engine: TempEngine) -> None:
    identifier = engine.started("sleep", "600", Healthcheck=check("CMD", "false", StartPeriod=3_600_000 * MS))
    until("five failures", lambda: len(health(engine, identifier)["Log"]) == 5)
    assert health(engine, identifier)["Status"] == "starting"
    assert health(engine, identifier)["FailingStreak"] == 0


def test_probes_come_at_the_start_interval_until_the_first_success(engine: TempEngine) -> None:
    rare = check("CMD", "test", "-e", "/ready", Interval=3_600_000 * MS, StartPeriod=3_600_000 * MS)
    identifier = engine.started("sleep", "600", Healthcheck={**rare, "StartInterval": 100 * MS})
    until("two failures", lambda: len(health(engine, identifier)["Log"]) == 2)
    engine.docker("exec", identifier, "touch", "/ready")
    until("healthy", lambda: health(engine, identifier)["Status"] == "healthy")


def test_a_timeout_kills_the_probe_and_what_it_started(engine: TempEngine) -> None:
    identifier = engine.started(
        "sleep",
        "600",
        Healthcheck=check(
            "CMD-SHELL", "echo begun; sleep 77 & sleep 88; true", Timeout=1500 * MS, Interval=1500 * MS, Retries=1
        ),
    )
    until("the probe runs", lambda: {"sleep 77", "sleep 88"} <= {*processes(engine, identifier)})
    until("unhealthy", lambda: health(engine, identifier)["Status"] == "unhealthy")
    entry = health(engine, identifier)["Log"][0]
    assert entry["ExitCode"] == -1
    assert entry["Output"] == "Health check exceeded timeout (1.5s): begun\n"
    # the next probe runs as soon, and succeeds too
    until("what it started is gone", lambda: processes(engine, identifier) == ["sleep 600"])
    until("so is it", lambda: engine.inspect(identifier)["ExecIDs"] is None)


def test_a_missing_program_is_a_failure(engine: TempEngine) -> None:
    identifier = engine.started("sleep", "600", Healthcheck=check("CMD", "/no/such/probe", Retries=1))
    until("unhealthy", lambda: health(engine, identifier)["Status"] == "unhealthy")
    entry = health(engine, identifier)["Log"][0]
    assert entry["ExitCode"] == -1
    assert "no such file or directory" in entry["Output"]


def test_output_is_bounded(engine: TempEngine) -> None:
    identifier = engine.started("sleep", "600", Healthcheck=check("CMD-SHELL", "yes | head -c 5000000"))
    until("healthy", lambda: health(engine, identifier)["Status"] == "healthy")
    assert health(engine, identifier)["Log"][0]["Output"] == "y\n" * 2048 + "..."


def test_it_runs_as_the_container_does(engine: TempEngine) -> None:
    identifier = engine.started(
        "sleep",
        "600",
        User="1234:5678",
        Env=["WORD=known"],
        WorkingDir="/tmp",
        Healthcheck=check("CMD-SHELL", 'echo "$(id -u):$(id -g) $WORD $PWD"'),
    )
    until("healthy", lambda: health(engine, identifier)["Status"] == "healthy")
    assert health(engine, identifier)["Log"][0]["Output"] == "1234:5678 known /tmp\n"


def test_nothing_while_paused(engine: TempEngine) -> None:
    identifier = engine.started("sleep", "600", Healthcheck=check("CMD", "true"))
    until("healthy", lambda: health(engine, identifier)["Status"] == "healthy")
    engine.post(f"/containers/{identifier}/pause")
    before = health(engine, identifier)
    time.sleep(0.5)
    assert health(engine, identifier) == before
    assert status(engine, identifier).endswith(" (Paused)")
    engine.post(f"/containers/{identifier}/unpause")
    until("probed again", lambda: health(engine, identifier)["Log"][-1]["Start"] > before["Log"][-1]["Start"])


def test_it_ends_with_the_container(engine: TempEngine, tmp_path: Path) -> None:
    gate = tmp_path / "go"
    gate.touch()
    identifier = engine.started(
        "sleep",
        "600",
        Healthcheck=check("CMD-SHELL", "until [ -e /gate/go ]; do sleep 0.01; done", Timeout=PATIENT),
        host={"Binds": [f"{tmp_path}:/gate"]},
    )
    until("healthy", lambda: health(engine, identifier)["Status"] == "healthy")
    gate.unlink()
    engine.post(f"/containers/{identifier}/stop?t=0")
    stopped = health(engine, identifier)
    assert stopped["Status"] == "unhealthy"
    time.sleep(0.4)
    assert health(engine, identifier) == stopped
    engine.post(f"/containers/{identifier}/start")
    assert health(engine, identifier)["Status"] == "starting"
    gate.touch()
    until("healthy again", lambda: health(engine, identifier)["Status"] == "healthy")


@pytest.mark.own
def test_it_survives_the_daemon(own_engine: TempEngine) -> None:
    """State and probing continue after kill -9; the probe in progress is not left behind."""
    engine = own_engine
    identifier = engine.started("sleep", "600", Healthcheck=check("CMD", "true"))
    slow = engine.started("sleep", "600", Healthcheck=check("CMD", "sleep", "99", Timeout=PATIENT))
    until("healthy", lambda: health(engine, identifier)["Status"] == "healthy")
    until("the slow probe runs", lambda: "sleep 99" in processes(engine, slow))
    pid = engine.inspect(identifier)["State"]["Pid"]
    engine.restart()
    assert engine.inspect(identifier)["State"]["Pid"] == pid
    shown = health(engine, identifier)
    assert shown["Status"] == "healthy"
    latest = shown["Log"][-1]["Start"] if shown["Log"] else ""
    until("probed again", lambda: [e for e in health(engine, identifier)["Log"] if e["Start"] > latest])
    until("one slow probe at most", lambda: processes(engine, slow).count("sleep 99") <= 1)
    until("one directory of each at most", lambda: len(list((Path(engine.run) / "exec").iterdir())) <= 2)


@pytest.mark.own
def test_probes_leave_nothing(engine: TempEngine) -> None:
    engine.started("sleep", "600")
    before = engine.descriptors()
    identifier = engine.started("sleep", "600", Healthcheck=check("CMD", "true", Interval=1 * MS))
    until("healthy", lambda: health(engine, identifier)["Status"] == "healthy")
    time.sleep(1)
    engine.request("DELETE", f"/v1.24/containers/{identifier}?force=1")
    until("descriptors are given back", lambda: engine.descriptors() <= before + BREATH)
    until("no directory of a probe", lambda: not list((Path(engine.run) / "exec").iterdir()))


def test_docker_health_flags(engine: TempEngine) -> None:
    result = engine.docker(
        *("run", "-d", "--health-cmd", "test -e /tmp/x", "--health-interval", "100ms", "--health-retries", "1"),
        *("--health-timeout", "2s", "busybox", "sleep", "600"),
    )
    identifier = result.line
    assert engine.inspect(identifier)["Config"]["Healthcheck"] == {
        "Test": ["CMD-SHELL", "test -e /tmp/x"],
        "Interval": 100 * MS,
        "Timeout": 2000 * MS,
        "Retries": 1,
    }
    until("unhealthy", lambda: health(engine, identifier)["Status"] == "unhealthy")
    quiet = engine.docker("run", "-d", "--no-healthcheck", "busybox", "sleep", "600").line
    assert health(engine, quiet) is None
