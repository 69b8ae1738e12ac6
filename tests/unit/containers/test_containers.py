"""Containers on a host in memory, case by case; test_concurrency.py has every verb in every
other.
"""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from engine.containers import removal, settings
from engine.containers.container import Container
from engine.containers.extra_mounts import Bind, Variable
from engine.containers.health import HealthChecks
from engine.containers.lifecycle import State
from engine.containers.waiting import Condition
from engine.errors import Conflict, EngineError, InvalidParameter, NotFound, ServerError
from engine.monitor.handles import LaunchFailed
from engine.system import tasks
from engine.wire.containers import EndpointSettings
from tests.support import PATIENCE
from tests.support.fakes.world import Cgroups, Engine, World, check, run, world

__all__ = ["world"]


async def _started(world: World, policy: str = "no", retries: int = 0, **host: object) -> tuple[Engine, Container]:
    engine = await world.boot()
    container = engine.containers.get(await engine.create(policy=policy, retries=retries, **host))
    await container.start()
    return engine, container


def test_a_record_is_changed_under_its_lock_alone(world: World) -> None:
    async def story() -> None:
        _, container = await _started(world)
        with pytest.raises(AssertionError):
            container.replace(name="other")

    run(story())


def test_a_start_whose_row_cannot_be_saved_takes_its_process_back(world: World) -> None:
    async def story() -> None:
        engine = await world.boot()
        container = engine.containers.get(await engine.create())

        async def fill(name: str) -> None:
            world.disk_full = world.disk_full or name == "monitor run answered"

        world.decide = fill
        waiting = container.wait(Condition.NEXT_EXIT)
        with pytest.raises(ServerError, match="disk is full"):
            await container.start()
        assert container.record.status.state == State.CREATED
        assert not world.host.processes
        world.disk_full, world.decide = False, None
        assert (await waiting).exit_code == container.record.status.exit_code
        await asyncio.sleep(5)  # the reason of the failure is saved when there is space
        check(engine)
        await container.start()
        check(engine)

    run(story())


def test_an_exit_is_saved_until_it_succeeds(world: World) -> None:
    async def story() -> None:
        engine, container = await _started(world)
        world.disk_full = True
        world.host.end(container.id, 5)
        assert await container.wait() == (5, "")
        await asyncio.sleep(3)
        assert container.id in world.host.journal, "a daemon that comes now still learns of it"
        world.disk_full = False
        await asyncio.sleep(3)
        check(engine)

    run(story())


def test_an_end_that_happened_is_seen_before_it_is_recorded(world: World) -> None:
    """The streams of clients end as soon as the exit is reported, and one may ask at once. A start
    may still hold the lock.
    """

    async def story() -> None:
        engine = await world.boot()
        container = engine.containers.get(await engine.create())
        seen: list[tuple[str, int]] = []

        async def ask() -> None:
            await container.end_recorded()
            status = container.record.status
            seen.append((status.state, status.exit_code))

        asking: list[asyncio.Task[None]] = []

        async def at(name: str) -> None:
            if container.ending and not asking:
                asking.append(asyncio.create_task(ask()))
                assert engine.containers.ending == {container}

        world.decide = at
        world.host.ends_at_once[container.id] = 3
        await container.start()
        await asking[0]
        assert seen == [(State.EXITED, 3)]
        world.decide = None

        await container.start()
        async with container.lock:
            world.host.end(container.id, 4)
            assert container.ending and container.running
            waiting = [
                asyncio.create_task(container.start()),
                asyncio.create_task(removal.remove(container, force=False)),
            ]
            await asyncio.sleep(0.1)
            assert engine.containers.ending == {container} and not any(task.done() for task in waiting)
        await waiting[0]  # neither is refused because it runs
        outcome = (await asyncio.gather(waiting[1], return_exceptions=True))[0]
        assert outcome is None or "container is running" in str(outcome), outcome
        assert not engine.containers.ending

    run(story())


def test_an_exit_counts_when_no_thread_can_ask_for_the_oom_killer(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> bool:
        raise ServerError("the host allows no more threads")

    async def story() -> None:
        engine, container = await _started(world, memory=64 << 20, memory_swap=-1)
        monkeypatch.setattr(Cgroups, "oom_killed", fail)
        await container.kill(9)
        assert container.record.status.exit_code == 137
        await container.settled()
        check(engine)

    run(story())


def test_a_policy_outlives_a_monitor_that_dies_during_the_restart(world: World) -> None:
    async def story() -> None:
        engine, container = await _started(world, "always")
        deaths = 0

        async def die(name: str) -> None:
            nonlocal deaths
            if name == "monitor run sent" and deaths < 3:
                deaths += 1
                world.host.kill_monitor()

        world.decide = die
        world.host.end(container.id, 1)
        await asyncio.sleep(20)
        assert deaths == 3
        assert container.running
        assert container.record.restart_count == 1
        check(engine)

    run(story())


def test_a_planned_restart_is_not_lost_with_the_daemon(world: World) -> None:
    """`on-failure:1`: the only attempt is counted when it is planned, and the next daemon makes
    it.
    """

    async def story() -> None:
        _, container = await _started(world, "on-failure", retries=1)
        world.host.end(container.id, 1)
        await asyncio.sleep(0.05)
        assert container.record.status.state == State.RESTARTING
        world.crash()
        after = await world.boot()
        await asyncio.sleep(0.01)
        (found,) = after.containers
        assert found.running
        assert found.record.restart_count == 1
        world.host.end(found.id, 1)
        await asyncio.sleep(5)
        assert found.record.status.state == State.EXITED
        check(after)

    run(story())


def test_an_exit_that_the_row_has_is_not_recorded_again(world: World) -> None:
    """The daemon died between the save and the monitor's confirmation."""

    async def story() -> None:
        _, container = await _started(world)
        world.host.end(container.id, 9)
        exit_record = world.host.journal[container.id]
        await container.wait()
        await container.settled()
        before = container.record
        world.crash()
        world.host.journal[container.id] = exit_record
        after = await world.boot()
        await asyncio.sleep(1)
        (found,) = after.containers
        assert found.record.status == before.status
        check(after)

    run(story())


def test_containers_that_build_on_each_other_do_not_wait_for_each_other(world: World) -> None:
    async def story() -> None:
        engine = await world.boot()
        with pytest.raises(InvalidParameter, match="PidMode: No such container: two"):
            await engine.create("one", pid_mode="container:two")
        first = await engine.create("one")
        two = engine.containers.get(await engine.create("two", ipc_mode="container:one"))
        await removal.remove(engine.containers.get(first), force=False)
        one = engine.containers.get(await engine.create("one", pid_mode="container:two"))
        async with asyncio.timeout(5 * PATIENCE):
            outcomes = await asyncio.gather(one.restart(0), two.restart(0), return_exceptions=True)
        assert all(isinstance(each, Exception) for each in outcomes), "neither runs, so neither can be joined"

    run(story())


def test_a_start_waits_for_the_restart_of_the_container_that_it_builds_on(world: World) -> None:
    async def story() -> None:
        engine = await world.boot()
        peer = engine.containers.get(await engine.create("peer"))
        await peer.start()
        released = asyncio.Event()

        async def slow(name: str) -> None:
            if name == "mount root" and not released.is_set():
                await released.wait()

        world.decide = slow
        restarting = asyncio.ensure_future(peer.restart(0))
        await asyncio.sleep(0.1)
        child = engine.containers.get(await engine.create("child", pid_mode="container:peer"))
        starting = asyncio.ensure_future(child.start())
        await asyncio.sleep(0.1)
        assert not starting.done()
        assert not child.lock.locked(), "it can be removed meanwhile"
        released.set()
        await restarting
        with pytest.raises(EngineError):  # the namespaces of this kernel are fakes
            await starting

    run(story())


def test_a_create_that_is_cancelled_behind_its_row_has_made_a_container(world: World) -> None:
    async def story() -> None:
        engine = await world.boot()
        at_row = asyncio.Event()

        async def note(name: str) -> None:
            if name == "commit: done":
                at_row.set()

        world.decide = note
        creating = asyncio.ensure_future(engine.create())
        await at_row.wait()
        creating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await creating
        check(engine)
        assert len(engine.containers) == 1

    run(story())


@pytest.mark.parametrize("at", range(6))
def test_a_create_that_is_cancelled_leaves_all_or_nothing(world: World, at: int) -> None:
    async def story() -> None:
        engine = await world.boot()
        passed = 0
        creating: asyncio.Future[str]

        async def cancel(name: str) -> None:
            nonlocal passed
            passed += 1
            if passed == at + 1:
                creating.cancel()
                await asyncio.sleep(0)

        world.decide = cancel
        creating = asyncio.ensure_future(engine.create())
        await asyncio.wait({creating})
        world.decide = None
        await asyncio.sleep(1)
        check(engine)
        if not len(engine.containers):
            await engine.create()  # its name is free again

    run(story())


def test_nothing_starts_again_while_the_engine_ends(world: World) -> None:
    async def story() -> None:
        engine, container = await _started(world, "always")
        await engine.containers.stop_all(1)
        await asyncio.sleep(100)
        assert container.record.status.state == State.EXITED
        world.crash()
        after = await world.boot()
        await asyncio.sleep(1)
        (found,) = after.containers
        assert found.running

    run(story())


def test_a_signal_to_a_process_that_has_just_ended_is_no_event(world: World) -> None:
    async def story() -> None:
        engine, container = await _started(world)
        published: list[str] = []
        publish = engine.events.publish
        engine.events.publish = lambda *args, **more: (published.append(args[1]), publish(*args, **more))  # type: ignore[method-assign,assignment]
        world.host.end(container.id, 0)
        await container.kill(9)
        await container.settled()
        assert published == ["die"]

    run(story())


def test_a_removed_container_is_not_found_by_a_verb_that_waited(world: World) -> None:
    async def story() -> None:
        engine, container = await _started(world)
        removing = asyncio.ensure_future(removal.remove(container, force=True))
        resizing = asyncio.ensure_future(settings.resize(container, 1, 2))
        connecting = asyncio.ensure_future(settings.connect(container, "mynet", EndpointSettings()))
        await removing
        for verb in (resizing, connecting):
            with pytest.raises(NotFound):
                await verb
        assert not world.rows
        check(engine)

    run(story())


def test_health_checks_resume_while_a_container_is_removed(world: World) -> None:
    """One with AutoRemove that has ended without a daemon is removed while the next one starts."""

    async def story() -> None:
        engine, container = await _started(world)
        await engine.create("other")
        removing = asyncio.ensure_future(removal.remove(container, force=True))
        for _ in range(2):  # the task of the removal, and the one that runs to its end
            await asyncio.sleep(0)
        assert container.lock.locked()
        checks = HealthChecks(None)  # type: ignore[arg-type]
        await checks.resume(engine.containers)
        await removing
        assert [each.record.name for each in engine.containers] == ["other"]
        await checks.close()

    run(story())


def test_a_name_is_of_one_container_after_two_renames_at_once(world: World) -> None:
    """The second rename takes the name that the first one has released."""

    async def story() -> None:
        engine = await world.boot()
        container = engine.containers.get(await engine.create("web"))
        await asyncio.gather(*(engine.containers.rename(container, name) for name in ("other", "web")))
        assert container.record.name == "web"
        with pytest.raises(Conflict):
            await engine.create("web")
        await engine.create("other")
        check(engine)

    run(story())


def test_of_two_rows_with_one_name_the_younger_container_is_renamed(world: World) -> None:
    """Earlier versions of the engine could write such rows."""

    async def story() -> None:
        engine = await world.boot()
        older, younger = [await engine.create(name) for name in ("web", "other")]
        record = world.record(younger)
        assert record is not None
        await engine.parts.store.save(msgspec.structs.replace(record, name="web"))
        world.crash()
        after = await world.boot()
        assert after.containers.get("web").id == older
        assert after.containers.get(f"web-{younger[:12]}").id == younger
        check(after)

    run(story())


# --- AutoRemove -----------------------------------------------------------------------------------


def _events(engine: Engine) -> list[str]:
    published: list[str] = []
    publish = engine.events.publish
    engine.events.publish = lambda *args, **more: (published.append(args[1]), publish(*args, **more))  # type: ignore[method-assign,assignment]
    return published


def test_a_container_with_autoremove_whose_start_fails_is_removed(world: World) -> None:
    async def story() -> None:
        engine = await world.boot()
        container = engine.containers.get(await engine.create(auto_remove=True))
        events = _events(engine)
        waiting = container.wait(Condition.NEXT_EXIT)
        world.host.refuse[container.id] = LaunchFailed("exec: no such file", 1)
        with pytest.raises(EngineError, match="no such file"):
            await container.start()
        assert len(engine.containers) == 0, "before the client has the error"
        assert events == ["die", "destroy"]
        assert (await waiting).exit_code == container.record.status.exit_code != 0
        assert not world.rows
        check(engine)

    run(story())


def test_a_restart_by_a_client_does_not_remove_it(world: World) -> None:
    async def story() -> None:
        engine, container = await _started(world, auto_remove=True)
        await container.restart(0)
        await asyncio.sleep(1)
        assert container.running
        check(engine)
        world.host.end(container.id, 0)
        assert await container.wait(Condition.REMOVED) == (0, "")
        assert len(engine.containers) == 0
        check(engine)

    run(story())


def test_a_restart_that_is_cancelled_at_the_exit_leaves_the_removal_to_autoremove(world: World) -> None:
    async def story() -> None:
        engine, container = await _started(world, auto_remove=True)
        ended = container.wait(Condition.NEXT_EXIT)
        restarting = asyncio.ensure_future(container.restart(0))
        ended.add_done_callback(lambda _: restarting.cancel())
        with pytest.raises(asyncio.CancelledError):
            await restarting
        await asyncio.sleep(1)
        assert len(engine.containers) == 0
        check(engine)

    run(story())


def test_a_second_start_does_not_get_the_mounts_of_a_first_one_that_failed(world: World) -> None:
    """Their descriptors may be those of other files by then."""

    async def story() -> None:
        engine = await world.boot()
        container = engine.containers.get(await engine.create())
        container.extra_mounts = (Bind(destination="/mnt", source=-1), Variable(name="TOKEN", value="secret"))
        world.host.refuse[container.id] = LaunchFailed("exec: no such file", 1)
        with pytest.raises(EngineError):
            await container.start()
        assert container.extra_mounts == ()

    run(story())


def test_a_failed_start_stays_when_its_row_cannot_be_deleted(world: World) -> None:
    async def story() -> None:
        engine = await world.boot()
        container = engine.containers.get(await engine.create(auto_remove=True))

        async def fill(name: str) -> None:
            world.disk_full = world.disk_full or name == "monitor run answered"

        world.decide = fill
        with pytest.raises(ServerError, match="disk is full"):
            await container.start()
        assert container.record.status.state == State.CREATED
        world.disk_full, world.decide = False, None
        await asyncio.sleep(3)
        check(engine)

    run(story())


def test_autoremove_of_a_run_that_ended_without_a_daemon(world: World) -> None:
    """What the run has is released before its files go."""

    async def story() -> None:
        _, container = await _started(world, auto_remove=True)
        world.crash()
        world.host.end(container.id, 0)
        steps: list[str] = []

        async def note(name: str) -> None:
            steps.append(name)

        world.decide = note
        after = await world.boot()
        await asyncio.sleep(1)
        assert len(after.containers) == 0
        assert steps.index("runtime discard") < steps.index("remove root")
        check(after)

    run(story())


def test_autoremove_of_an_ended_container_whose_daemon_died_first(world: World) -> None:
    async def story() -> None:
        engine, container = await _started(world, auto_remove=True)
        ended = await engine.create("other", auto_remove=True)

        async def die(name: str) -> None:
            if name == "leave volumes":
                world.crash()

        world.decide = die
        world.host.end(container.id, 0)
        await asyncio.sleep(1)
        world.decide = None
        row = world.record(container.id)
        assert row is not None and row.status.state == State.EXITED
        after = await world.boot()
        await asyncio.sleep(1)
        assert [each.id for each in after.containers] == [ended], "one that never ran is kept"
        check(after)

    run(story())


# --- what a failure must not leave ----------------------------------------------------------------


def test_a_frozen_process_that_a_signal_thaws_is_running_for_the_next_daemon(world: World) -> None:
    async def story() -> None:
        engine, container = await _started(world)
        world.host.processes[container.id].ignores = frozenset({15})
        await container.pause()
        await container.kill(15)
        assert container.record.status.state == State.RUNNING
        check(engine)
        world.crash()
        after = await world.boot()
        check(after)

    run(story())


def test_a_record_is_as_before_whatever_its_save_raises(world: World) -> None:
    async def story() -> None:
        engine, container = await _started(world)
        before = container.record

        async def fail(*_: object) -> None:
            raise KeyError("a fault of the engine")

        save, engine.parts.store.save = engine.parts.store.save, fail  # type: ignore[method-assign]
        with pytest.raises(KeyError):
            await settings.resize(container, 30, 90)
        with pytest.raises(KeyError):
            await settings.rename(container, "other")
        assert container.record == before
        engine.parts.store.save = save  # type: ignore[method-assign]
        engine.parts.store.delete = fail  # type: ignore[method-assign]
        await container.kill(9)
        await container.settled()
        with pytest.raises(KeyError):
            await removal.remove(container, force=True)
        assert container.record.status.state == State.EXITED, "not dead: a client may try again"
        check(engine)

    run(story())


def test_a_failed_exit_ends_the_daemon(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container that has ended must not be shown as running forever."""

    def fail(*_: object) -> None:
        raise KeyError("a fault of the engine")

    async def story() -> list[str]:
        told: list[str] = []
        tasks.when_fatal(told.append)
        _, container = await _started(world)
        monkeypatch.setattr(Container, "record_exit", fail)
        world.host.end(container.id, 0)
        await asyncio.sleep(0.1)
        tasks.when_fatal(None)
        return told

    (message,) = run(story())
    assert "record its exit" in message
