"""Which test a container has, and what results make of its health: Docker's rules as a table."""

from __future__ import annotations

import pytest

from engine.containers.exec import Outcome
from engine.containers.health import KEPT_RESULTS, OUTPUT_LIMIT, Probe, following, probe_of, shown_output
from engine.containers.store import Health, HealthResult
from engine.wire.containers import Config, Healthcheck

SECOND = 1_000_000_000


def probe(**changes: int) -> Probe:
    fields = {"interval": SECOND, "timeout": SECOND, "start_period": 0, "retries": 3} | changes
    return Probe(command=("true",), **fields)


def result(exit_code: int, start: int = 0) -> HealthResult:
    return HealthResult(start=start, end=start + 1, exit_code=exit_code, output="")


@pytest.mark.parametrize("test", [None, [], ["NONE"], ["CMD"], ["CMD-SHELL"]])
def test_no_test(test: list[str] | None) -> None:
    assert probe_of(Config(healthcheck=Healthcheck(test=test))) is None
    assert probe_of(Config()) is None


def test_zero_is_the_default() -> None:
    found = probe_of(Config(healthcheck=Healthcheck(test=["CMD", "a", "b"])))
    assert found == Probe(command=("a", "b"), interval=30 * SECOND, timeout=30 * SECOND, start_period=0, retries=3)


def test_the_shell_is_the_container_s() -> None:
    check = Healthcheck(test=["CMD-SHELL", "x && y"])
    found = probe_of(Config(healthcheck=check))
    assert found is not None
    assert found.command == ("/bin/sh", "-c", "x && y")
    found = probe_of(Config(healthcheck=check, shell=["/bin/bash", "-ec"]))
    assert found is not None
    assert found.command == ("/bin/bash", "-ec", "x && y")


@pytest.mark.parametrize(
    ("codes", "status", "streak"),
    [
        ([0], "healthy", 0),
        ([1, 1], "starting", 2),
        ([1, 1, 1], "unhealthy", 3),
        ([1, 1, 0], "healthy", 0),
        ([0, 1, 1], "healthy", 2),
        ([0, 2, -1, 137], "unhealthy", 3),
        ([1, 1, 1, 0], "healthy", 0),
        ([1, 1, 1, 1], "unhealthy", 4),
    ],
)
def test_results_in_a_row(codes: list[int], status: str, streak: int) -> None:
    health = Health(status="starting")
    for code in codes:
        health = following(health, probe(), result(code), 0)
    assert (health.status, health.failing_streak) == (status, streak)


def test_the_start_period_counts_no_failure_before_the_first_success() -> None:
    slow = probe(start_period=10 * SECOND, retries=1)
    health = following(Health(status="starting"), slow, result(1, 9 * SECOND), 0)
    assert (health.status, health.failing_streak) == ("starting", 0)
    assert following(health, slow, result(1, 10 * SECOND), 0).status == "unhealthy"
    health = following(health, slow, result(0, 2 * SECOND), 0)
    assert following(health, slow, result(1, 3 * SECOND), 0).status == "unhealthy"


def test_the_log_keeps_the_last() -> None:
    health = Health(status="starting")
    for number in range(20):
        health = following(health, probe(), result(0, number), 0)
    assert [each.start for each in health.log] == [*range(20 - KEPT_RESULTS, 20)]


def test_output() -> None:
    assert shown_output(Outcome(output=b"fine \xff\n"), probe()) == "fine \ufffd\n"
    assert shown_output(Outcome(output=b"x" * OUTPUT_LIMIT), probe()) == "x" * OUTPUT_LIMIT
    assert shown_output(Outcome(output=b"x" * (OUTPUT_LIMIT + 1)), probe()) == "x" * OUTPUT_LIMIT + "..."
    assert shown_output(Outcome(timed_out=True), probe(timeout=1500 * 1_000_000)) == (
        "Health check exceeded timeout (1.5s)"
    )
