"""Every verb against every other, at every await; every fault at every await; cancellation; the
death of the daemon.

A case begins in one state. The first verb is held at its n-th await point while the second runs as
far as it can; then both continue. Afterwards the API, the rows of state.db and the fake kernel must
agree, and a new daemon must show the same. `Container`, `Containers`, `launch`, `create` and the
store are the real ones; tests/support/fakes/world.py has the fakes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from engine.containers import removal, settings
from engine.containers.container import Container
from engine.containers.lifecycle import State
from engine.containers.store import Health
from engine.errors import EngineError, ServerError
from engine.runtime.cgroups import Support
from engine.wire.containers import EndpointSettings, HostConfig, RestartPolicy, UpdateBody
from tests.support.fakes.world import Engine, Killed, World, check, no_descriptor, run, world

__all__ = ["world"]

Verb = Callable[[Engine, Container], Awaitable[object]]


async def _end_by_itself(engine: Engine, container: Container) -> None:
    with contextlib.suppress(KeyError):
        engine.world.host.end(container.id, 3)


async def _health(engine: Engine, container: Container) -> None:
    async with container.lock:
        if container.running:
            container.move(health=Health(status="unhealthy"))
            await container.save()


VERBS: dict[str, Verb] = {
    "create": lambda engine, container: engine.create("renamed"),  # the name that `rename` wants
    "start": lambda engine, container: container.start(),
    "stop": lambda engine, container: container.stop(1),
    "kill": lambda engine, container: container.kill(9),
    "signal": lambda engine, container: container.kill(1),
    "restart": lambda engine, container: container.restart(1),
    "pause": lambda engine, container: container.pause(),
    "unpause": lambda engine, container: container.unpause(),
    "update": lambda engine, container: settings.update(
        container, UpdateBody(memory=64 << 20, memory_swap=-1, restart_policy=RestartPolicy(name="always")), Support()
    ),
    "set host": lambda engine, container: settings.set_host(container, HostConfig(memory=64 << 20), Support()),
    "resize": lambda engine, container: settings.resize(container, 30, 90),
    "rename": lambda engine, container: engine.containers.rename(container, "renamed"),
    "connect": lambda engine, container: settings.connect(container, "mynet", EndpointSettings()),
    "disconnect": lambda engine, container: settings.disconnect(container, "bridge"),
    "remove": lambda engine, container: removal.remove(container, force=False),
    "remove by force": lambda engine, container: removal.remove(container, force=True),
    "health": _health,
    "exit": _end_by_itself,
    "relink": lambda engine, container: settings.relink(container),
}

STATES = ("created", "running", "paused", "restarting", "exited")


async def _in_state(world: World, state: str, policy: str = "", **host: object) -> tuple[Engine, Container]:
    engine = await world.boot()
    wanted = "always" if state == "restarting" else policy or "no"
    container = engine.containers.get(await engine.create(policy=wanted, **host))
    if state != "created":
        await container.start()
    if state == "paused":
        await container.pause()
    if state == "restarting":
        container.planned.delay = 30.0  # so that it does not end on its own during the test
        engine.world.host.end(container.id, 1)
        await _as_far_as_it_can()
    if state == "exited":
        await container.kill(9)
    await container.settled()
    await asyncio.sleep(0)
    return engine, container


async def _outcome(verb: Awaitable[object]) -> BaseException | None:
    """The engine's own error, or None. Any other exception is a bug of the engine and is raised."""
    try:
        await verb
    except EngineError as error:
        return error
    except asyncio.CancelledError as error:
        return error
    return None


async def _quiet(engine: Engine) -> None:
    """Wait until only timers far in the future are left."""
    engine.world.decide = None
    await _as_far_as_it_can()
    for _ in range(20):
        if all(each._unsaved is None and not 0 < each.planned.delay < 20 for each in engine.containers):
            break
        await asyncio.sleep(1)
    await _as_far_as_it_can()


async def _agree(engine: Engine, planned: bool = False) -> None:
    check(engine)
    before = engine.shown()
    engine.world.crash()
    after = await engine.world.boot()
    if any(State.RESTARTING in shown for shown in before.values()):
        return  # it is due at once
    await _quiet(after)
    check(after)
    always = {each.id for each in after.containers if each.record.host.restart_policy.name == "always"}
    for key, shown in after.shown().items():
        if key not in always:
            assert shown == before[key]
    assert after.shown().keys() == before.keys()


class Hold:
    """Counts the await points, and acts at one of them."""

    def __init__(self, world: World, at: int, act: Callable[[str], Awaitable[None]]) -> None:
        self.passed = 0
        self.at = at
        self.act = act
        world.decide = self.point

    @property
    def reached(self) -> bool:
        return self.passed > self.at

    async def point(self, name: str) -> None:
        self.passed += 1
        if self.passed == self.at + 1:
            await self.act(name)


async def _as_far_as_it_can() -> None:
    await asyncio.sleep(1e-6)  # time passes when nothing is ready


async def _pair(world: World, state: str, first: Verb, second: Verb, at: int) -> bool:
    """Run the case. Returns False if there is no such await point."""
    engine, container = await _in_state(world, state)
    released = asyncio.Event()

    async def act(name: str) -> None:
        await released.wait()

    hold = Hold(world, at, act)
    one = asyncio.ensure_future(_outcome(first(engine, container)))
    await _as_far_as_it_can()
    if not hold.reached:
        return False
    two = asyncio.ensure_future(_outcome(second(engine, container)))
    await _as_far_as_it_can()
    released.set()
    await one
    await two
    await _quiet(engine)
    await _agree(engine)
    return True


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("first", VERBS)
def test_every_verb_within_every_other(world: World, first: str, state: str) -> None:
    for name, second in VERBS.items():
        at = 0
        while True:
            try:
                if not run(_pair(world.fresh(), state, VERBS[first], second, at)):
                    break
            except BaseException as error:
                raise AssertionError(f"{state}: {name} at await {at} of {first}: {error}") from error
            at += 1


def _fault(world: World, name: str) -> BaseException | None:
    """The failure to inject at a point of that name; None if the real call cannot fail."""
    if name.startswith("commit"):
        return None  # `disk_full`
    if name == "thread":
        return ServerError("the host allows no more threads")
    if name.startswith("monitor"):
        return ServerError("the monitor refused") if name.endswith("sent") else None
    if name in ("mount root", "show root", "join networks"):
        return no_descriptor()
    if name in (
        "prepare",
        "open ports",
        "mount volumes",
        "runtime pause",
        "runtime update",
        "claim volumes",
        "connect",
    ):
        return ServerError("no")
    return None


async def _faulty(world: World, state: str, verb: Verb, at: int, kind: str, auto_remove: bool = False) -> bool:
    engine, container = await _in_state(world, state, "no", auto_remove=auto_remove)
    task: asyncio.Task[Any] | None = None

    async def act(name: str) -> None:
        if kind == "cancel":
            assert task is not None
            task.cancel()
            await asyncio.sleep(0)
        elif kind == "disk full":
            world.disk_full = True
        elif (fault := _fault(world, name)) is not None:
            raise fault

    hold = Hold(world, at, act)
    task = asyncio.ensure_future(_outcome(verb(engine, container)))
    await _as_far_as_it_can()
    if not hold.reached:
        return False
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await _as_far_as_it_can()
    world.disk_full = False
    await asyncio.sleep(3)
    await _quiet(engine)
    if auto_remove:
        await _removed(engine)
    else:
        await _agree(engine)
    return True


async def _removed(engine: Engine) -> None:
    """A container that has ended is gone, at the latest with the next daemon."""
    check(engine)
    engine.world.crash()
    after = await engine.world.boot()
    await _quiet(after)
    check(after)
    assert all(each.record.status.state != State.EXITED for each in after.containers)


@pytest.mark.parametrize("kind", ["cancel", "disk full", "fault"])
@pytest.mark.parametrize("state", ("created", "running", "paused"))
def test_every_fault_in_every_verb_with_autoremove(world: World, state: str, kind: str) -> None:
    for name, verb in VERBS.items():
        at = 0
        while True:
            try:
                if not run(_faulty(world.fresh(), state, verb, at, kind, auto_remove=True)):
                    break
            except BaseException as error:
                raise AssertionError(f"{state}: {kind} at await {at} of {name}: {error}") from error
            at += 1


@pytest.mark.parametrize("kind", ["cancel", "disk full", "fault"])
@pytest.mark.parametrize("state", STATES)
def test_every_fault_in_every_verb(world: World, state: str, kind: str) -> None:
    for name, verb in VERBS.items():
        at = 0
        while True:
            try:
                if not run(_faulty(world.fresh(), state, verb, at, kind)):
                    break
            except BaseException as error:
                raise AssertionError(f"{state}: {kind} at await {at} of {name}: {error}") from error
            at += 1


async def _killed(world: World, state: str, verb: Verb, at: int, auto_remove: bool) -> bool:
    """SIGKILL of the daemon at an await of the verb: the next daemon recovers."""
    engine, container = await _in_state(world, state, auto_remove=auto_remove)

    killed = asyncio.Event()

    async def act(name: str) -> None:
        await killed.wait()

    hold = Hold(world, at, act)
    one = asyncio.ensure_future(_outcome(verb(engine, container)))
    await _as_far_as_it_can()
    if not hold.reached:
        return False
    world.crash()
    world.decide = None
    killed.set()
    with contextlib.suppress(Killed):
        await one
    after = await world.boot()
    # The daemon's work besides containers: directories and roots without a row are removed.
    world.layers &= {each.id for each in after.containers}
    await _quiet(after)
    if auto_remove:
        await _removed(after)
    else:
        check(after)
    return True


@pytest.mark.parametrize(
    ("state", "auto_remove"),
    [*((state, False) for state in STATES), ("created", True), ("running", True), ("paused", True)],
)
def test_the_daemon_is_killed_in_every_verb(world: World, state: str, auto_remove: bool) -> None:
    for name, verb in VERBS.items():
        at = 0
        while True:
            try:
                if not run(_killed(world.fresh(), state, verb, at, auto_remove)):
                    break
            except BaseException as error:
                raise AssertionError(f"{state}: killed at await {at} of {name}: {error}") from error
            at += 1
