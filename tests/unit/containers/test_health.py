"""The health check that a container gets, and the effect of results on its health: Docker's rules
as a table."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import msgspec
import pytest

from engine.containers.exec import Outcome
from engine.containers.health import (
    KEPT_RESULTS,
    OUTPUT_LIMIT,
    HealthChecks,
    Probe,
    following,
    probe_of,
    shown_output,
)
from engine.containers.lifecycle import State
from engine.containers.store import Health, HealthResult, Status
from engine.errors import ServerError, words
from engine.wire.containers import Config, Healthcheck
from tests.support import PATIENCE

SECOND = 1_000_000_000


def probe(**changes: int) -> Probe:
    fields = {"interval": SECOND, "timeout": SECOND, "start_period": 0, "retries": 3} | changes
    fields.setdefault("start_interval", fields["interval"])
    return Probe(command=("true",), **fields)


def result(exit_code: int, start: int = 0) -> HealthResult:
    return HealthResult(start=start, end=start + 1, exit_code=exit_code, output="")


@pytest.mark.parametrize("test", [None, [], ["NONE"], ["CMD"], ["CMD-SHELL"]])
def test_no_test(test: list[str] | None) -> None:
    assert probe_of(Config(healthcheck=Healthcheck(test=test))) is None
    assert probe_of(Config()) is None


def test_zero_is_the_default() -> None:
    found = probe_of(Config(healthcheck=Healthcheck(test=["CMD", "a", "b"])))
    assert found == Probe(
        command=("a", "b"),
        interval=30 * SECOND,
        timeout=30 * SECOND,
        start_period=0,
        start_interval=5 * SECOND,
        retries=3,
    )


def test_the_start_interval() -> None:
    def of(**changes: int) -> int:
        found = probe_of(Config(healthcheck=Healthcheck(test=["CMD", "a"], **changes)))
        assert found is not None
        return found.start_interval

    assert of(interval=SECOND) == SECOND
    assert of(interval=60 * SECOND) == 5 * SECOND
    assert of(interval=SECOND, start_interval=7 * SECOND) == 7 * SECOND


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
    assert shown_output(Outcome(timed_out=True, output=b"a\n"), probe(timeout=300 * 1_000_000)) == (
        "Health check exceeded timeout (300ms): a\n"
    )


class ProbedContainer:
    """A running container with a health check."""

    id = "c" * 64
    running = True

    def __init__(self) -> None:
        check = Healthcheck(test=["CMD", "true"], interval=1_000_000)
        self.lock = asyncio.Lock()
        self.record = SimpleNamespace(
            config=Config(healthcheck=check), status=Status(state=State.RUNNING, started_at=1, pid=7)
        )
        self.published: list[str] = []
        self.healthy = asyncio.Event()

    def move(self, *, health: Health) -> None:
        self.record.status = msgspec.structs.replace(self.record.status, health=health)

    async def save(self) -> None:
        assert self.lock.locked()

    def publish(self, action: str) -> None:
        self.published.append(action)
        self.healthy.set()


@pytest.mark.parametrize(
    "failure", [OSError(24, "Too many open files"), ServerError("the host allows no more threads")]
)
def test_checks_go_on_after_one_that_could_not_be_run(failure: Exception) -> None:
    """Neither a lack of descriptors nor of threads stops the checks permanently."""

    class FailingExecs:
        tried = 0

        async def probe(self, container: object, command: object, timeout: float, most: int) -> Outcome:
            self.tried += 1
            if self.tried < 3:
                raise failure
            return Outcome(exit_code=0, output=b"fine")

    async def scenario() -> None:
        container, execs = ProbedContainer(), FailingExecs()
        checks = HealthChecks(execs)  # type: ignore[arg-type]
        checks.changed(container, True)  # type: ignore[arg-type]
        async with asyncio.timeout(5 * PATIENCE):
            await container.healthy.wait()
        await checks.close()
        log = container.record.status.health.log
        assert [(each.exit_code, each.output) for each in log[:3]] == [(-1, words(failure))] * 2 + [(0, "fine")]
        assert container.published == ["health_status: healthy"]

    asyncio.run(scenario())
