"""Transient containers: every end within every other verb, at every await; cancellation and the
death of the daemon.

The world is that of test_concurrency.py. Whatever happens, a run leaves nothing but its ingest, if
its caller got one, or an ordinary container, if it was kept.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from engine.containers import removal, settings
from engine.containers.container import Container
from engine.containers.extra_mounts import File
from engine.containers.store import ContainerRecord, ContainerStore
from engine.errors import Conflict, EngineError, NotFound, ServerError
from engine.storage.records import Records
from engine.storage.snapshots import Ingest
from engine.wire.containers import Config, CreateBody, EndpointSettings, HostConfig
from tests.support.fakes.world import Engine, Killed, World, check, run, world
from tests.unit.containers.test_concurrency import Hold, _as_far_as_it_can, _quiet

__all__ = ["world"]

Verb = Callable[[Engine, Container], Awaitable[Any]]


async def create(engine: Engine, name: str = "") -> Container:
    image: Any = SimpleNamespace(id="sha256:" + "1" * 64, chain_ids=(), config=SimpleNamespace(config=Config()))
    body = CreateBody(cmd=["true"], volumes={"/data": {}}, host_config=HostConfig())
    return await engine.containers.create_transient(body, image, name)


async def _exit(engine: Engine, container: Container) -> None:
    with contextlib.suppress(KeyError):
        engine.world.host.end(container.id, 3)


VERBS: dict[str, Verb] = {
    "start": lambda engine, container: container.start(),
    "stop": lambda engine, container: container.stop(1),
    "kill": lambda engine, container: container.kill(9),
    "restart": lambda engine, container: container.restart(1),
    "pause": lambda engine, container: container.pause(),
    "rename": lambda engine, container: engine.containers.rename(container, "renamed"),
    "connect": lambda engine, container: settings.connect(container, "mynet", EndpointSettings()),
    "remove": lambda engine, container: removal.remove(container, force=False),
    "remove by force": lambda engine, container: removal.remove(container, force=True),
    "exit": _exit,
    "take": lambda engine, container: engine.containers.take(container),
    "keep": lambda engine, container: engine.containers.keep(container),
}
STATES = ("created", "running", "exited")


async def _in_state(world: World, state: str) -> tuple[Engine, Container]:
    engine = await world.boot()
    container = await create(engine)
    if state != "created":
        await container.start()
    if state == "exited":
        await container.kill(9)
    await container.settled()
    await asyncio.sleep(0)
    return engine, container


async def _outcome(verb: Awaitable[Any]) -> Any:
    """Its result, or the engine's own error. Any other exception is a bug."""
    try:
        return await verb
    except (EngineError, asyncio.CancelledError) as error:
        return error


async def _agree(engine: Engine, *outcomes: Any) -> None:
    """What is there belongs to a container or to an ingest that a caller got."""
    world = engine.world
    await _quiet(engine)
    assert world.ingests == {each.path.name for each in outcomes if isinstance(each, Ingest)}
    rows = {key for kind, key in world.rows if kind == "container"}
    for container in list(engine.containers):
        kept = not engine.parts.store.transient(container.id)
        assert (container.id in rows) is kept
        if not kept:
            await removal.remove(container, force=True)
    await _quiet(engine)
    check(engine)


async def _pair(world: World, state: str, first: Verb, second: Verb, at: int) -> bool:
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
    await _agree(engine, await one, await two)
    return True


def _at_every_await(case: Callable[[int], Awaitable[bool]], what: str) -> None:
    at = 0
    while True:
        try:
            if not run(case(at)):  # type: ignore[arg-type]
                return
        except BaseException as error:
            raise AssertionError(f"{what} at await {at}: {error}") from error
        at += 1


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("first", ["take", "keep", "remove by force", "start", "exit"])
def test_every_verb_within_every_end(world: World, first: str, state: str) -> None:
    for name, second in VERBS.items():
        _at_every_await(
            lambda at, second=second: _pair(world.fresh(), state, VERBS[first], second, at),  # type: ignore[misc]
            f"{state}: {name} within {first}",
        )


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("kind", ["cancel", "disk full"])
def test_faults(world: World, state: str, kind: str) -> None:
    """A full disk keeps nothing from ending: nothing of a transient container is written."""

    async def case(at: int, verb: Verb) -> bool:
        engine, container = await _in_state(world.fresh(), state)
        task: asyncio.Task[Any] | None = None

        async def act(name: str) -> None:
            if kind == "disk full":
                engine.world.disk_full = True
            else:
                assert task is not None
                task.cancel()
                await asyncio.sleep(0)

        hold = Hold(engine.world, at, act)
        task = asyncio.ensure_future(_outcome(verb(engine, container)))
        await _as_far_as_it_can()
        if not hold.reached:
            return False
        outcome = await task
        engine.world.disk_full = False
        await _agree(engine, outcome)
        return True

    for name, verb in VERBS.items():
        _at_every_await(lambda at, verb=verb: case(at, verb), f"{state}: {kind} in {name}")  # type: ignore[misc]


def test_a_create_is_cancelled(world: World) -> None:
    async def case(at: int) -> bool:
        engine = await world.fresh().boot()
        task: asyncio.Task[Any] | None = None

        async def act(name: str) -> None:
            assert task is not None
            task.cancel()
            await asyncio.sleep(0)

        hold = Hold(engine.world, at, act)
        task = asyncio.ensure_future(_outcome(create(engine, "web")))
        await _as_far_as_it_can()
        if not hold.reached:
            return False
        outcome = await task
        await _quiet(engine)
        # Only the caller would remove a container that was left.
        assert [each for each in engine.containers if each is not outcome] == []
        await _agree(engine)
        await create(engine, "web")
        return True

    _at_every_await(case, "cancel")


def test_a_create_is_cancelled_when_the_container_is_there(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cancelled caller never gets the container, so the create removes it."""

    async def story() -> None:
        engine = await world.boot()
        add = ContainerStore.add

        async def and_cancel(self: ContainerStore, *record: Any, **transient: Any) -> None:
            await add(self, *record, **transient)
            task.cancel()
            await asyncio.sleep(0)

        monkeypatch.setattr(ContainerStore, "add", and_cancel)
        task = asyncio.ensure_future(create(engine, "web"))
        with pytest.raises(asyncio.CancelledError):
            await task
        await _quiet(engine)
        assert list(engine.containers) == []
        await _agree(engine)

    run(story())


@pytest.mark.parametrize("state", STATES)
def test_the_next_daemon_does_not_know_it(world: World, state: str) -> None:
    async def case(at: int, verb: Verb) -> bool:
        engine, container = await _in_state(world.fresh(), state)
        killed = asyncio.Event()

        async def act(name: str) -> None:
            await killed.wait()

        hold = Hold(engine.world, at, act)
        one = asyncio.ensure_future(_outcome(verb(engine, container)))
        await _as_far_as_it_can()
        if not hold.reached:
            return False
        engine.world.crash()
        engine.world.decide = None
        killed.set()
        with contextlib.suppress(Killed):
            await one
        after = await engine.world.boot()
        rows = {key for kind, key in engine.world.rows if kind == "container"}
        assert {each.id for each in after.containers} == rows
        return True

    for name in ("start", "take", "keep", "exit", "remove by force"):
        _at_every_await(lambda at, verb=VERBS[name]: case(at, verb), f"{state}: killed in {name}")  # type: ignore[misc]


def test_it_runs_once(world: World) -> None:
    """A second run would begin with the changes of the first."""

    async def story() -> None:
        engine, container = await _in_state(world, "created")
        await container.start()
        await _exit(engine, container)
        await _as_far_as_it_can()
        with pytest.raises(Conflict, match="was made for one run"):
            await container.start()
        assert isinstance(await engine.containers.take(container), Ingest)

    run(story())


@pytest.mark.parametrize("verb", ["stop", "kill"])
def test_a_run_that_a_client_has_stopped_makes_no_layer(world: World, verb: str) -> None:
    async def story() -> None:
        engine, container = await _in_state(world, "running")
        await VERBS[verb](engine, container)
        with pytest.raises(Conflict, match="was stopped by a client"):
            await engine.containers.take(container)
        await removal.remove(container, force=True)
        await _agree(engine)

    run(story())


def test_volumes_of_the_image_are_not_mounted(world: World) -> None:
    async def story() -> None:
        engine = await world.boot()
        container = await create(engine)
        assert container.record.mounts == () and container.record.config.volumes == {"/data": {}}
        assert container.record.config.image == "sha256:" + "1" * 64
        assert [event.action for event in engine.events.history(0)] == ["create"]

    run(story())


def test_secrets_are_not_shown() -> None:
    assert "hidden" not in repr(File(destination="/run/secrets/x", content=b"hidden"))


def _record() -> ContainerRecord:
    return ContainerRecord(
        id="a", name="a", created=1, image_id="", parent="", path="", args=(), config=Config(), host=HostConfig()
    )


def test_a_transient_record_is_not_written(tmp_path: Any) -> None:
    records = Records(tmp_path / "state.db")

    async def story() -> None:
        store = ContainerStore(records)
        await store.add(_record(), transient=True)
        await store.save(_record())
        assert "a" in store and store.transient("a") and records.rows("container") == []
        await store.delete("a")
        assert "a" not in store and not store.transient("a")
        with pytest.raises(NotFound):
            await store.save(_record())
        await store.add(_record(), transient=True)
        await store.keep(_record())
        assert [key for key, _ in records.rows("container")] == ["a"] and not store.transient("a")
        await store.delete("a")
        assert records.rows("container") == []

    asyncio.run(story())
    records.close()


def test_a_record_that_cannot_be_kept_stays_transient(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    records = Records(tmp_path / "state.db")

    async def fail(*_: object) -> None:
        raise ServerError("disk full")

    async def story() -> None:
        store = ContainerStore(records)
        await store.add(_record(), transient=True)
        with monkeypatch.context() as patch:
            patch.setattr(records, "commit", fail)
            with pytest.raises(ServerError):
                await store.keep(_record())
        assert store.transient("a")

    asyncio.run(story())
    records.close()
