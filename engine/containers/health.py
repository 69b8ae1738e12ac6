"""Health checks: runs a container's own test periodically and derives its health (Docker Engine
API, HealthConfig).

Probes are exec instances. A running container with a test costs one timer of the loop, and a task
only while its probe runs. First probes are spread, so that containers started together are not
probed together. Docker's rules: the first probe comes an interval after the start, the next an
interval after the last has ended; failures in the start period do not count before the first
success.

A probe that cannot be run (no descriptor, no thread, the container is paused) counts as a failure,
and the next one is scheduled.

Owns: the timers and the probes under way. Not here: the health itself, which is part of the
      container's record; processes (`exec.py`).
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Iterable

import msgspec

from engine import metrics
from engine.containers.body import strings
from engine.containers.container import Container
from engine.containers.exec import Execs, Outcome
from engine.containers.lifecycle import State
from engine.containers.store import Health, HealthResult
from engine.errors import EngineError, words
from engine.system.tasks import spawn
from engine.wire.containers import Config

_log = logging.getLogger(__name__)

SECOND = 1_000_000_000
DEFAULT_INTERVAL = 30 * SECOND
DEFAULT_START_INTERVAL = 5 * SECOND
"""As in Docker, except that a shorter interval is not made longer by it."""
DEFAULT_TIMEOUT = 30 * SECOND
DEFAULT_RETRIES = 3
KEPT_RESULTS = 5
OUTPUT_LIMIT = 4096
"""Bytes of a probe's output that are kept, as in Docker."""
SPREAD = 0.1
"""The part of the first interval by which a container's first probe may be early."""

STARTING, HEALTHY, UNHEALTHY = "starting", "healthy", "unhealthy"

_DEFAULT_SHELL = ["/bin/sh", "-c"]


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """The command and its intervals; durations in nanoseconds, non-zero except `start_period`."""

    command: tuple[str, ...]
    interval: int
    timeout: int
    start_period: int
    start_interval: int
    """Between probes in the start period, before the first success."""
    retries: int


def probe_of(config: Config) -> Probe | None:
    """The test of a container's configuration.

    None without one, or when `NONE` disables the image's test.
    """
    check = config.healthcheck
    if check is msgspec.UNSET or not check.test:
        return None
    kind, *words = check.test
    if kind == "CMD-SHELL":
        shell = strings(config.shell) if config.shell is not msgspec.UNSET else None
        command = [*(shell or _DEFAULT_SHELL), *words]
    elif kind == "CMD":
        command = words
    else:
        return None
    if not words:
        return None
    return Probe(
        command=tuple(command),
        interval=check.interval or DEFAULT_INTERVAL,
        timeout=check.timeout or DEFAULT_TIMEOUT,
        start_period=check.start_period,
        start_interval=check.start_interval or min(check.interval or DEFAULT_INTERVAL, DEFAULT_START_INTERVAL),
        retries=check.retries or DEFAULT_RETRIES,
    )


def following(health: Health, probe: Probe, result: HealthResult, started_at: int) -> Health:
    """The health after one more result."""
    log = (*health.log, result)[-KEPT_RESULTS:]
    if result.exit_code == 0:
        return Health(status=HEALTHY, failing_streak=0, log=log)
    if health.status == STARTING and result.start - started_at < probe.start_period:
        return Health(status=STARTING, failing_streak=health.failing_streak, log=log)
    streak = health.failing_streak + 1
    return Health(status=UNHEALTHY if streak >= probe.retries else health.status, failing_streak=streak, log=log)


def shown_output(outcome: Outcome, probe: Probe) -> str:
    """The `Output` of a log entry: the probe's output, after the words that it timed out."""
    text = outcome.output[:OUTPUT_LIMIT].decode(errors="replace")
    if len(outcome.output) > OUTPUT_LIMIT:
        text += "..."
    if outcome.timed_out:
        words = f"Health check exceeded timeout ({_duration(probe.timeout)})"
        return f"{words}: {text}" if text else words
    return text


def _duration(nanoseconds: int) -> str:
    seconds = nanoseconds / SECOND
    if seconds >= 1:
        return f"{seconds:g}s"
    return f"{nanoseconds / 1e6:g}ms"


def _interval(probe: Probe, container: Container, now: int) -> int:
    """Nanoseconds until the next probe."""
    status = container.record.status
    starting = status.health is not None and status.health.status == STARTING
    return probe.start_interval if starting and now - status.started_at < probe.start_period else probe.interval


class HealthChecks:
    """The health checks of all running containers."""

    def __init__(self, execs: Execs) -> None:
        self._execs = execs
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._probing: dict[str, asyncio.Task[None]] = {}

    async def resume(self, containers: Iterable[Container]) -> None:
        """At the daemon's start: schedule probes of running containers.

        `Execs.open` ends probes of the last daemon.
        """
        for container in [*containers]:  # those with AutoRemove may be removed meanwhile
            # Others may be locked for as long as the clean-up of their last run hangs.
            if container.record.status.state == State.RUNNING and probe_of(container.record.config) is not None:
                async with container.lock:
                    if container.record.status.state == State.RUNNING:
                        self._begin(container, random.random())

    def changed(self, container: Container, runs: bool) -> None:
        """Its processes started or resumed (start, unpause), or stopped (exit, pause)."""
        if runs:
            self._begin(container, 1 - SPREAD * random.random())
            return
        timer = self._timers.pop(container.id, None)
        if timer is not None:
            timer.cancel()
        task = self._probing.pop(container.id, None)
        if task is not None:
            task.cancel()
        health = container.record.status.health
        if health is not None and not container.running:
            # As in Docker, a container that does not run is not healthy.
            container.move(health=msgspec.structs.replace(health, status=UNHEALTHY))

    async def close(self) -> None:
        """End all probes under way."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        tasks, self._probing = [*self._probing.values()], {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, container: Container, intervals: float) -> None:
        probe = probe_of(container.record.config)
        if probe is None:
            return
        if container.record.status.health is None:
            container.move(health=Health(status=STARTING))
        self._schedule(container, probe, _interval(probe, container, time.time_ns()) * intervals)

    def _schedule(self, container: Container, probe: Probe, delay: float) -> None:
        old = self._timers.pop(container.id, None)
        if old is not None:
            old.cancel()
        loop = asyncio.get_running_loop()
        self._timers[container.id] = loop.call_later(delay / SECOND, self._due, container, probe)

    def _due(self, container: Container, probe: Probe) -> None:
        self._timers.pop(container.id, None)
        if container.id not in self._probing:
            task = spawn(self._probe(container, probe), f"health check of container {container.id}")
            self._probing[container.id] = task

    async def _probe(self, container: Container, probe: Probe) -> None:
        run = container.record.status.started_at
        try:
            began = time.time_ns()
            outcome = await self._outcome(container, probe)
            metrics.HEALTH_CHECKS.add()
            metrics.HEALTH_CHECK_STARTS.add(max(0, outcome.started_at - began) / SECOND)
            if outcome.timed_out or outcome.exit_code:
                metrics.HEALTH_CHECKS_FAILED.add()
        finally:
            # otherwise it ended or was paused meanwhile
            current = self._probing.get(container.id) is asyncio.current_task()
            if current:
                del self._probing[container.id]
        if not current:
            return
        async with container.lock:
            status = container.record.status
            if status.state != State.RUNNING or status.started_at != run or status.health is None:
                return
            result = HealthResult(
                start=outcome.started_at,
                end=outcome.ended_at,
                exit_code=-1 if outcome.timed_out else outcome.exit_code,
                output=shown_output(outcome, probe),
            )
            health = following(status.health, probe, result, run)
            container.move(health=health)
            self._schedule(container, probe, _interval(probe, container, outcome.ended_at))
            if health.status != status.health.status:
                container.publish(f"health_status: {health.status}")
                await container.save()
                container.peers.lifecycle.health(container)

    async def _outcome(self, container: Container, probe: Probe) -> Outcome:
        try:
            return await self._execs.probe(container, probe.command, probe.timeout / SECOND, OUTPUT_LIMIT + 1)
        except EngineError as error:
            reason = error.message
        except OSError as error:  # no descriptor, no disk space
            reason = words(error)
            _log.warning("health check of container %s could not be run: %s", container.id, reason)
        return Outcome(exit_code=-1, output=reason.encode())
