"""Tasks at every await of their way: the daemon is killed, the managers change their mind, the
container ends, a client removes it, the disk is full. Whatever happens, a task has one container at
most, and in the end what the managers want.

`Executor`, `TaskSet`, `Pulls` and `Containers` are the real ones; tests/support/fakes/world.py has
the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from ipaddress import IPv4Address
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from engine.cluster import executor as module
from engine.cluster.bodies import TASK_LABEL, Node
from engine.cluster.executor import Executor
from engine.cluster.views import NodeNetworks
from engine.containers import removal
from engine.containers.container import Container
from engine.containers.lifecycle import State
from engine.errors import EngineError, ServerError, WrongState
from engine.swarm_session.messages import (
    Assigned,
    Assignments,
    Delivery,
    EndpointView,
    NetworkView,
    ServiceView,
    View,
    Views,
)
from engine.swarm_session.states import TaskState
from engine.wire.services import ServiceSpec
from engine.wire.tasks import ContainerSpec, SecretReference, TaskSpec
from tests.support import PATIENCE
from tests.support.fakes.overlays import fake_networks
from tests.support.fakes.world import Engine, Killed, Records, World, check, run, world

__all__ = ["world"]

R = TaskState
SPEC = ServiceSpec(
    name="web", task_template=TaskSpec(container_spec=ContainerSpec(image="busybox", stop_grace_period=0))
)
TASK = Assigned(id="t1", service="s", name="web.1.t1", spec="s/1", desired=int(R.RUNNING), slot=1)


class Site:
    """A daemon with an executor, and what it reports."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.seen: list[TaskState] = []
        life: Any = engine.life

        async def pull(*_: object) -> None:
            await life.point("pull")
            raise ServerError("no registry here")

        parts: Any = SimpleNamespace(
            records=Records(life),
            containers=engine.containers,
            images=engine.parts.images,
            remote=SimpleNamespace(pull=pull, loaded=True),
            config=engine.parts.config,
            networks=engine.networks,
        )
        shared: Any = SimpleNamespace(networks=fake_networks(), records=parts.records)
        self.networks = NodeNetworks(shared)
        self.networks.node = "n1"
        node = Node(id="n1", hostname="h", architecture="x86_64")
        self.executor = Executor(parts, node, self.networks, self.changed, self.stored)
        self.stored_ready: list[bool] = []
        """What the managers have stored while a task waited for them."""

    def changed(self, task: str, urgent: bool) -> None:
        (status,) = self.executor.statuses([task])
        self.seen.append(TaskState(status.state))

    async def stored(self, task: str) -> None:
        (status,) = self.executor.statuses([task])
        self.stored_ready.append(status.ready)

    @property
    def container(self) -> Container | None:
        found = [each for each in self.engine.containers if each.record.config.labels.get(TASK_LABEL) == "t1"]
        assert len(found) <= 1, "a task with two containers"
        return found[0] if found else None

    @property
    def state(self) -> TaskState | None:
        found = self.executor.statuses(["t1"])
        return TaskState(found[0].state) if found else None

    async def assign(self, desired: TaskState | None, *, whole: bool = False) -> None:
        """None: the managers have forgotten it."""
        if desired is None:
            await self.executor.assign(Assignments(whole=whole, remove=() if whole else ("t1",)))
            return
        task = msgspec.structs.replace(TASK, desired=int(desired))
        await self.executor.assign(Assignments(whole=whole, put=(task,), specs={"s/1": SPEC}))


async def _boot(world: World) -> Site:
    site = Site(await world.boot())
    site.executor.open()
    return site


async def _running(world: World) -> Site:
    """A daemon whose task runs."""
    site = await _boot(world)
    await site.assign(R.RUNNING)
    await _quiet()
    return site


async def _quiet() -> None:
    """Until nothing is to be done; tries that failed are made again."""
    for _ in range(6):
        await asyncio.sleep(20)


async def _as_far_as_it_can() -> None:
    await asyncio.sleep(1e-6)


def _agree(site: Site, wanted: TaskState | None) -> None:
    """Executor, containers and fake kernel are as the managers want."""
    check(site.engine)
    container, state = site.container, site.state
    assert site.seen == sorted(site.seen), f"states go forward only: {site.seen}"
    if wanted is None:
        assert container is None and state is None and not len(site.executor)
        assert not [kind for kind, _ in site.engine.world.rows if kind.startswith("task")]
        return
    assert state is not None
    if wanted == R.READY:
        assert state == R.READY and container is not None and container.record.status.state == State.CREATED, state
    elif wanted == R.RUNNING:
        assert state == R.RUNNING or state.ended, state
        if state == R.RUNNING:
            assert container is not None and container.running
            assert site.executor.statuses()[0].container == container.id
    elif wanted >= R.SHUTDOWN:
        assert state.ended, state
    assert not state.ended or container is None or not container.running


PATHS: dict[str, tuple[TaskState | None, ...]] = {
    "run": (R.RUNNING,),
    "ready, run": (R.READY, R.RUNNING),
    "run, shut down": (R.RUNNING, R.SHUTDOWN),
    "run, shut down, forget": (R.RUNNING, R.SHUTDOWN, None),
    "run, forget": (R.RUNNING, None),
    "ready, forget": (R.READY, None),
}


class Hold:
    """Acts at one await point."""

    def __init__(self, world: World, at: int, act: Callable[[], Awaitable[None]]) -> None:
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
            await self.act()


def _at_every_await(case: Callable[[int], Any], most: int = 400) -> None:
    for at in range(most):
        try:
            if not run(case(at)):
                assert at > 5, "the case has no awaits"
                return
        except BaseException as error:
            raise AssertionError(f"at await {at}: {error!r}") from error
    raise AssertionError("it does not end")


@pytest.mark.parametrize("path", PATHS)
def test_undisturbed(world: World, path: str) -> None:
    async def case() -> None:
        site = await _boot(world)
        for wanted in PATHS[path]:
            await site.assign(wanted)
            await _quiet()
            _agree(site, wanted)
            if wanted == R.RUNNING:
                assert site.state == R.RUNNING
            if wanted == R.SHUTDOWN:
                assert site.state == R.SHUTDOWN

    run(case())


@pytest.mark.parametrize("path", PATHS)
def test_the_daemon_is_killed_at_every_await(world: World, path: str) -> None:
    """The next daemon first goes on without a manager, then gets the whole set."""

    async def case(at: int) -> bool:
        this = world.fresh()
        site = await _boot(this)
        killed = asyncio.Event()
        hold = Hold(this, at, killed.wait)  # type: ignore[arg-type]
        wanted = None
        for wanted in PATHS[path]:
            with contextlib.suppress(EngineError):
                one = asyncio.ensure_future(site.assign(wanted))
                await asyncio.sleep(30)
                if hold.reached:
                    break
                await one
        else:
            this.decide = None
            return False
        this.crash()
        this.decide = None
        killed.set()
        with contextlib.suppress(Killed, EngineError):
            await one
        await _as_far_as_it_can()
        this.layers &= {key for kind, key in this.rows if kind == "container"}  # the daemon's sweep
        after = await _boot(this)
        await _quiet()
        check(after.engine)
        assert after.container is None or after.container.record.name == TASK.name
        await after.assign(wanted, whole=True)
        await _quiet()
        _agree(after, wanted)
        if wanted == R.RUNNING:
            assert after.state == R.RUNNING, "it was not disturbed otherwise"
        return True

    _at_every_await(case)


async def _exit(site: Site) -> None:
    if (container := site.container) is not None:
        with contextlib.suppress(KeyError):
            site.engine.world.host.end(container.id, 3)


async def _remove(site: Site) -> None:
    if (container := site.container) is not None:
        with contextlib.suppress(EngineError):
            await removal.remove(container, force=True)


async def _stop(site: Site) -> None:
    if (container := site.container) is not None:
        with contextlib.suppress(EngineError):
            await container.stop(1)


async def _restart(site: Site) -> None:
    if (container := site.container) is not None:
        with contextlib.suppress(EngineError):
            await container.restart(1)


async def _start(site: Site) -> None:
    if (container := site.container) is not None:
        with contextlib.suppress(EngineError):
            await container.start()


DISTURBANCES: dict[str, tuple[Callable[[Site], Awaitable[None]], TaskState | None]] = {
    "shut down": (lambda site: site.assign(R.SHUTDOWN), R.SHUTDOWN),
    "remove": (lambda site: site.assign(R.REMOVE), R.REMOVE),
    "forget": (lambda site: site.assign(None), None),
    "exit": (_exit, R.RUNNING),
    "a client removes it": (_remove, R.RUNNING),
    "a client stops it": (_stop, R.RUNNING),
    "a client restarts it": (_restart, R.RUNNING),
    "a client starts it": (_start, R.RUNNING),
}


@pytest.mark.parametrize("name", DISTURBANCES)
def test_disturbed_at_every_await(world: World, name: str) -> None:
    disturb, wanted = DISTURBANCES[name]

    async def case(at: int) -> bool:
        this = world.fresh()
        site = await _boot(this)
        released = asyncio.Event()
        hold = Hold(this, at, released.wait)  # type: ignore[arg-type]
        one = asyncio.ensure_future(site.assign(R.RUNNING))
        await _as_far_as_it_can()
        if not hold.reached:
            released.set()
            await one
            return False
        if not one.done():  # messages of a manager are served one after the other
            released.set()
            await one
        two = asyncio.ensure_future(disturb(site))
        await _as_far_as_it_can()
        released.set()
        await two
        this.decide = None
        await _quiet()
        _agree(site, wanted)
        if wanted is None:
            return True
        # In the end the managers forget it, whatever became of it.
        await site.assign(None)
        await _quiet()
        _agree(site, None)
        return True

    _at_every_await(case)


@pytest.mark.parametrize("path", PATHS)
def test_the_disk_is_full_at_every_await(world: World, path: str) -> None:
    async def case(at: int) -> bool:
        this = world.fresh()
        site = await _boot(this)

        async def full() -> None:
            this.disk_full = True

        hold = Hold(this, at, full)
        for wanted in PATHS[path]:
            with contextlib.suppress(EngineError):
                await site.assign(wanted)
            await asyncio.sleep(5)
        reached = hold.reached
        this.decide, this.disk_full = None, False
        await _quiet()
        # What could not be kept comes again with the next session.
        await site.assign(PATHS[path][-1], whole=True)
        await _quiet()
        _agree(site, PATHS[path][-1])
        return reached

    _at_every_await(case)


def test_forgotten_and_assigned_again(world: World) -> None:
    """A manager that lost it for a moment: at every await of the removal it comes back."""

    async def case(at: int) -> bool:
        this = world.fresh()
        site = await _boot(this)
        await site.assign(R.RUNNING)
        await _quiet()
        released = asyncio.Event()
        hold = Hold(this, at, released.wait)  # type: ignore[arg-type]
        one = asyncio.ensure_future(site.assign(None))
        await _as_far_as_it_can()
        if not hold.reached:
            released.set()
            await one
            return False
        two = asyncio.ensure_future(site.assign(R.RUNNING))
        await _as_far_as_it_can()
        released.set()
        await one
        await two
        this.decide = None
        site.seen.clear()
        await _quiet()
        check(site.engine)
        assert site.state == R.RUNNING and site.container is not None and site.container.running
        return True

    _at_every_await(case)


def test_a_stop_that_fails_is_tried_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def case() -> None:
        site = await _running(world)
        tries = 0
        stop = Container.stop

        async def failing(self: Container, *arguments: Any) -> None:
            nonlocal tries
            tries += 1
            if tries < 3:
                raise ServerError("it did not exit")
            await stop(self, *arguments)

        monkeypatch.setattr(Container, "stop", failing)
        await site.assign(R.SHUTDOWN)
        await _as_far_as_it_can()
        assert site.state == R.RUNNING
        await _quiet()
        assert tries == 3 and site.state == R.SHUTDOWN

    run(case())


def test_an_end_without_a_daemon_is_reported_with_its_time(world: World) -> None:
    """A rolling update asks how long the task had run."""

    async def case() -> None:
        site = await _running(world)
        (running,) = site.executor.statuses()
        await site.executor.save(["t1"])
        container = site.container
        assert container is not None and running.ran == running.since > 0
        world.crash()
        world.host.end(container.id, 3)
        after = await _boot(world)
        await _quiet()
        assert after.container is not None
        finished = after.container.record.status.finished_at
        (ended,) = after.executor.statuses()
        assert (ended.state, ended.ran, ended.since) == (R.FAILED, running.ran, finished) and finished > 0

    run(case())


def test_starts_are_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PARALLEL", 3)

    async def case() -> None:
        site = await _boot(world)
        at_once = most = 0
        start = Container.start

        async def counting(self: Container, **more: Any) -> None:
            nonlocal at_once, most
            at_once += 1
            most = max(most, at_once)
            await start(self, **more)
            at_once -= 1

        monkeypatch.setattr(Container, "start", counting)
        tasks = tuple(msgspec.structs.replace(TASK, id=f"t{n}", name=f"web.{n}.t{n}") for n in range(20))
        await site.executor.assign(Assignments(put=tasks, specs={"s/1": SPEC}))
        await _quiet()
        assert most == 3 and {status.state for status in site.executor.statuses()} == {int(R.RUNNING)}
        await site.executor.end()
        check(site.engine)
        assert not list(site.engine.containers)

    run(case())


def test_a_closed_executor_leaves_everything(world: World) -> None:
    async def case() -> None:
        site = await _running(world)
        await site.executor.close()
        assert site.container is not None
        site.engine.world.host.end(site.container.id, 3)
        await _quiet()
        assert site.state == R.RUNNING, "it observes no more"

    run(case())


@pytest.mark.parametrize("path", ["run", "run, shut down"])
def test_tasks_that_come_while_the_node_leaves(world: World, path: str) -> None:
    """The last state that the managers want is still written when the node begins to leave."""
    *before, last = PATHS[path]

    async def case(at: int) -> bool:
        this = world.fresh()
        site = await _boot(this)
        for wanted in before:
            await site.assign(wanted)
            await _quiet()
        released = asyncio.Event()
        hold = Hold(this, at, released.wait)  # type: ignore[arg-type]
        taking = asyncio.ensure_future(site.assign(last))
        await _as_far_as_it_can()
        leaving = asyncio.ensure_future(site.executor.end())
        await _as_far_as_it_can()
        reached = hold.reached
        released.set()
        this.decide = None
        await taking
        await leaving
        await _quiet()
        _agree(site, None)
        return reached

    _at_every_await(case)


def test_content_that_comes_while_another_task_is_forgotten(world: World) -> None:
    """The managers send content once, so it must not be forgotten with that of the other task."""

    def task(number: int) -> Assigned:
        return msgspec.structs.replace(
            TASK, id=f"t{number}", name=f"web.1.t{number}", spec=f"s/{number}", secrets=(f"x{number}",)
        )

    def message(number: int) -> Assignments:
        container = msgspec.structs.replace(
            SPEC.task_template.container_spec,  # type: ignore[type-var]
            secrets=[SecretReference(secret_id=f"x{number}", secret_name="key")],
        )
        spec = msgspec.structs.replace(SPEC, task_template=TaskSpec(container_spec=container))
        secret = Delivery(id=f"x{number}", name="key", data=b"1")
        return Assignments(whole=number == 1, put=(task(number),), specs={f"s/{number}": spec}, secrets=(secret,))

    async def case() -> None:
        site = await _boot(world)
        await site.executor.assign(message(1))
        await _quiet()
        assert site.state == R.RUNNING
        await site.executor.assign(Assignments(remove=("t1",)))
        taking = asyncio.ensure_future(site.executor.assign(message(2)))
        written = asyncio.Event()

        async def point(name: str) -> None:
            if asyncio.current_task() is taking:
                await written.wait()

        world.decide = point
        await asyncio.sleep(30)
        assert len(site.executor) == 0, "the first task is forgotten"
        assert not taking.done(), "the second one comes meanwhile"
        world.decide = None
        written.set()
        await taking
        await _quiet()
        (status,) = site.executor.statuses()
        assert TaskState(status.state) == R.RUNNING, status.error

    run(case())


def _wrong(*_: object, **__: object) -> None:
    raise KeyError("a bug")


def test_a_bug_ends_the_task(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def case() -> None:
        site = await _boot(world)
        with monkeypatch.context() as patch:
            patch.setattr(module, "create_body", _wrong)
            await site.assign(R.RUNNING)
            await _quiet()
        assert site.state == R.REJECTED
        await site.assign(None)
        await _quiet()
        _agree(site, None)

    run(case())


def test_a_bug_while_the_container_runs_is_not_its_end(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def case() -> None:
        site = await _boot(world)
        with monkeypatch.context() as patch:
            patch.setattr(module, "_published", _wrong)
            await site.assign(R.RUNNING)
            await _quiet()
            assert site.state == R.STARTING
        await _quiet()
        assert site.state == R.RUNNING

    run(case())


def test_closing_ends_the_removal_of_a_record(world: World) -> None:
    """Another executor follows, with records of its own."""

    async def case() -> None:
        site = await _running(world)
        await site.assign(None)
        released = asyncio.Event()

        async def point(name: str) -> None:
            if not len(site.executor):
                await released.wait()

        world.decide = point
        await asyncio.sleep(30)
        assert not len(site.executor), "its record alone is left"
        drivers = {task for task in asyncio.all_tasks() if task.get_name() == "task t1"}
        assert drivers
        await site.executor.close()
        assert all(task.done() for task in drivers)
        world.decide = None
        released.set()

    run(case())


# --- tasks on networks of the swarm ---------------------------------------------------------------

NET = NetworkView(name="net", vni=4097, subnets=(("10.0.0.0/20", "10.0.0.1"),))
ON_NET = msgspec.structs.replace(TASK, addresses={"n1": "10.0.0.5"})


def _view(*, ready: bool = False) -> Views:
    endpoint = EndpointView(id="t1", node="n1", address="10.0.0.5", service="s", ready=ready)
    service = ServiceView(id="s", name="web", address="10.0.0.2")
    view = View(network="n1", definition=NET, endpoints=(endpoint,), services=(service,), nodes={"n1": "192.168.7.1"})
    return Views(whole=True, of=(view,))


async def _on_net(world: World) -> Site:
    site = await _boot(world)
    site.networks.open("n1", "192.168.7.1")
    await site.networks.update(_view())
    await site.executor.assign(Assignments(put=(ON_NET,), specs={"s/1": SPEC}))
    await _quiet()
    assert site.state == R.RUNNING and site.executor.statuses()[0].ready
    await site.networks.update(_view(ready=True))
    await _quiet()
    return site


def test_traffic_ends_before_the_signal(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The managers have stored that the task is not ready, and the nodes had time to see it."""

    async def case() -> None:
        site = await _on_net(world)
        overlays = site.networks._networks.overlays
        virtual, own = IPv4Address("10.0.0.2"), IPv4Address("10.0.0.5")
        assert overlays.services["n1"][virtual] == (own,)
        container = site.container
        assert container is not None
        loop = asyncio.get_running_loop()
        seen: list[tuple[str, float]] = []

        async def stored(task: str) -> None:
            (status,) = site.executor.statuses([task])
            assert not status.ready and status.state == R.RUNNING
            await asyncio.sleep(1)
            seen.append(("stored", loop.time()))

        async def stop(seconds: float | None) -> None:
            seen.append(("stop", loop.time()))
            assert overlays.services["n1"][virtual] == ()
            await real(seconds)

        site.executor._stored = stored
        real = container.stop
        monkeypatch.setattr(Container, "stop", lambda self, seconds: stop(seconds))
        await site.executor.assign(Assignments(put=(msgspec.structs.replace(ON_NET, desired=int(R.SHUTDOWN)),)))
        await _quiet()
        (_, first), (_, second) = seen
        assert second - first >= module.WITHDRAWAL
        assert site.state == R.SHUTDOWN and not container.running

    run(case())


def test_managers_that_do_not_answer_delay_a_stop_for_a_moment_only(world: World) -> None:
    async def case() -> None:
        site = await _on_net(world)
        never = asyncio.Event()

        async def stored(task: str) -> None:
            await never.wait()

        site.executor._stored = stored
        await site.executor.assign(Assignments(put=(msgspec.structs.replace(ON_NET, desired=int(R.SHUTDOWN)),)))
        async with asyncio.timeout((module.WITHDRAWAL_LIMIT + 2) * PATIENCE):
            while site.state != R.SHUTDOWN:  # noqa: ASYNC110
                await asyncio.sleep(0.1)

    run(case())


def test_a_task_waits_for_its_network(world: World) -> None:
    async def case() -> None:
        site = await _boot(world)
        site.networks.open("n1", "192.168.7.1")
        await site.executor.assign(Assignments(put=(ON_NET,), specs={"s/1": SPEC}))
        await _quiet()
        assert site.state == R.PREPARING and site.container is None
        await site.networks.update(_view())
        await _quiet()
        assert site.state == R.RUNNING
        assert site.container is not None and "n1" in site.container.record.networks

    run(case())


def test_a_network_that_cannot_be_made_rejects_the_task(world: World) -> None:
    async def case() -> None:
        site = await _boot(world)
        site.networks.open("n1", "192.168.7.1")
        site.networks._networks.overlays.trouble = ServerError("this kernel has no vxlan links")
        await site.networks.update(_view())
        await site.executor.assign(Assignments(put=(ON_NET,), specs={"s/1": SPEC}))
        await asyncio.sleep(5)
        assert site.state == R.REJECTED and "no vxlan" in site.executor.statuses()[0].error
        await site.networks.close()

    run(case())


def test_a_task_that_is_not_wanted_any_more_waits_no_longer(world: World) -> None:
    async def case() -> None:
        site = await _boot(world)
        site.networks.open("n1", "192.168.7.1")
        await site.executor.assign(Assignments(put=(ON_NET,), specs={"s/1": SPEC}))
        await _quiet()
        await site.executor.assign(Assignments(put=(msgspec.structs.replace(ON_NET, desired=int(R.SHUTDOWN)),)))
        await _quiet()
        assert site.state == R.SHUTDOWN and site.container is None

    run(case())


def test_a_container_whose_task_has_ended_gets_no_address(world: World) -> None:
    """The address may be another task's by now."""

    async def case() -> None:
        site = await _on_net(world)
        container = site.container
        assert container is not None
        assert site.executor.task_of(container.id) == ON_NET and site.executor.task_of("other") is None
        await site.executor.assign(Assignments(put=(msgspec.structs.replace(ON_NET, desired=int(R.SHUTDOWN)),)))
        await _quiet()
        with pytest.raises(WrongState):
            site.executor.task_of(container.id)

    run(case())
