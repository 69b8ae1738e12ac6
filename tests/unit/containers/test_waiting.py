"""Waits for a container's end and for its removal, on a host in memory; and prunes."""

from __future__ import annotations

import asyncio

import pytest

from engine.common.pruning import Selection
from engine.containers import prune, removal
from engine.containers.container import Container
from engine.containers.waiting import Condition
from engine.errors import Conflict, ServerError
from tests.support.fakes.world import Engine, World, check, run, world

__all__ = ["world"]


async def _created(world: World, policy: str = "no") -> tuple[Engine, Container]:
    engine = await world.boot()
    return engine, engine.containers.get(await engine.create(policy=policy))


def test_the_next_exit_is_that_of_a_later_start(world: World) -> None:
    async def story() -> None:
        _, container = await _created(world)
        assert await container.wait() == (0, "")
        end, gone = container.wait(Condition.NEXT_EXIT), container.wait(Condition.REMOVED)
        await container.start()
        await asyncio.sleep(1)
        assert not end.done()
        world.host.end(container.id, 3)
        assert await end == (3, "")
        assert await container.wait() == (3, "")
        assert not container.wait(Condition.NEXT_EXIT).done()
        assert not gone.done()
        await removal.remove(container, force=False)
        assert await gone == (3, "")

    run(story())


def test_a_removal_ends_every_wait(world: World) -> None:
    async def story() -> None:
        _, container = await _created(world)
        ends = [container.wait(condition) for condition in (Condition.NEXT_EXIT, Condition.REMOVED)]
        await removal.remove(container, force=False)
        assert [await end for end in ends] == [(0, "")] * 2

    run(story())


def test_a_removal_that_fails_ends_the_wait_for_it(world: World) -> None:
    async def story() -> None:
        engine, container = await _created(world)
        gone, end = container.wait(Condition.REMOVED), container.wait(Condition.NEXT_EXIT)
        world.disk_full = True
        with pytest.raises(ServerError):
            await removal.remove(container, force=False)
        world.disk_full = False
        code, why = await gone
        assert code == 0
        assert "disk is full" in why
        assert not end.done()
        gone = container.wait(Condition.REMOVED)
        await removal.remove(container, force=False)
        assert await gone == (0, "")
        check(engine)

    run(story())


def test_a_wait_that_is_given_up_is_forgotten(world: World) -> None:
    async def story() -> None:
        _, container = await _created(world)
        for condition in (Condition.NEXT_EXIT, Condition.REMOVED):
            container.wait(condition).cancel()
        await asyncio.sleep(0)
        assert not container._ends._waiting
        assert not container._removals._waiting

    run(story())


def test_each_exit_before_a_restart_counts(world: World) -> None:
    async def story() -> None:
        _, container = await _created(world, "always")
        await container.start()
        for code in (1, 2):
            end = container.wait()
            world.host.end(container.id, code)
            assert await end == (code, "")
            await asyncio.sleep(1)
            assert container.running

    run(story())


# --- prune ----------------------------------------------------------------------------------------


def test_a_prune_takes_what_does_not_run(world: World) -> None:
    async def story() -> None:
        engine = await world.boot()
        created, running, paused, ended = [
            engine.containers.get(await engine.create(name)) for name in ("created", "running", "paused", "ended")
        ]
        for each in (running, paused, ended):
            await each.start()
        await paused.pause()
        world.host.end(ended.id, 0)
        await ended.wait()
        before = Selection(until_ns=created.record.created)
        assert (await prune.prune(engine.containers, before)).containers_deleted is None
        report = await prune.prune(engine.containers, Selection())
        assert sorted(report.containers_deleted or ()) == sorted((created.id, ended.id))
        assert {each.id for each in engine.containers} == {running.id, paused.id}
        assert (await prune.prune(engine.containers, Selection())).containers_deleted is None
        check(engine)

    run(story())


def test_one_prune_at_a_time(world: World) -> None:
    async def story() -> None:
        engine, _ = await _created(world)
        first = asyncio.ensure_future(prune.prune(engine.containers, Selection()))
        await asyncio.sleep(0)
        with pytest.raises(Conflict, match="a prune operation is already running"):
            await prune.prune(engine.containers, Selection())
        assert (await first).containers_deleted

    run(story())


def test_a_prune_skips_what_cannot_be_removed(world: World) -> None:
    async def story() -> None:
        engine, container = await _created(world)
        world.disk_full = True
        assert (await prune.prune(engine.containers, Selection())).containers_deleted is None
        world.disk_full = False
        assert container.id in engine.containers
        check(engine)

    run(story())
