"""Init, join, leave, promotion, demotion, force: each with the daemon killed at every effect."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from engine.cluster import credentials, membership
from engine.cluster.phases import Phase
from engine.cluster.state import Directory, State
from engine.errors import EngineError, InvalidParameter, NoSwarm, ServerError
from engine.swarm_session.messages import Peer
from engine.wire.swarm import InitRequest, JoinRequest
from tests.support import PATIENCE
from tests.unit.cluster.world import DIGEST, FakeAgent, FakeProcess, Killed, World, run, token, until


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


def init_request(*, force: bool = False) -> InitRequest:
    return InitRequest(listen_addr="0.0.0.0:2377", force_new_cluster=force)


def join_request(role: str) -> JoinRequest:
    return JoinRequest(remote_addrs=["10.0.0.9"], join_token=token(role))


async def init(world: World, *, force: bool = False) -> None:
    assert world.daemon is not None
    await world.daemon.init(init_request(force=force))


async def join(world: World, role: str) -> None:
    assert world.daemon is not None
    await world.daemon.join(join_request(role))


async def leave(world: World) -> None:
    assert world.daemon is not None
    await world.daemon.leave(force=True)


class Story(NamedTuple):
    """One change of membership, and where it may be after a crash in it."""

    before: Callable[[World], Awaitable[None]]
    change: Callable[[World], Awaitable[None]]
    """Repeated after the crash, where the phase permits it."""
    phases: tuple[Phase, ...]
    """One of which is reached by the next daemon alone."""
    after: Phase
    """Reached at last."""


async def nothing(world: World) -> None:
    pass


async def promoted(world: World) -> None:
    await world.wish(world.node(), "manager")


async def demoted(world: World) -> None:
    await world.wish(world.node(), "worker")


async def as_worker(world: World) -> None:
    await join(world, "worker")


async def as_manager(world: World) -> None:
    world.members.add("other")
    await join(world, "manager")


async def forced(world: World) -> None:
    await init(world, force=True)


N, W, M = Phase.NONE, Phase.WORKER, Phase.MANAGER
STORIES = {
    "init": Story(nothing, init, (N, M), M),
    "init by force outside of a swarm": Story(nothing, forced, (N, M), M),
    "join as worker": Story(nothing, as_worker, (N, W), W),
    "join as manager": Story(nothing, as_manager, (N, M), M),
    "promotion": Story(as_worker, promoted, (M,), M),
    "demotion": Story(as_manager, demoted, (W,), W),
    "leave as worker": Story(as_worker, leave, (N, W), N),
    "leave as manager": Story(as_manager, leave, (N, M), N),
    "leave as the only manager": Story(init, leave, (N, M), N),
    "force": Story(as_manager, forced, (M,), M),
}


@pytest.mark.parametrize("manager_too", [False, True], ids=["daemon", "daemon and manager"])
@pytest.mark.parametrize("name", STORIES)
def test_killed_at_every_effect(name: str, manager_too: bool, world: World) -> None:
    story = STORIES[name]

    async def test() -> None:
        for point in range(1, 200):
            await fresh(world)
            await story.before(world)
            if world.daemon is not None and world.daemon.phase is not Phase.NONE:
                await world.settled(world.daemon.phase)
            world.points, world.kill_at = 0, point
            change = asyncio.ensure_future(attempt(world, story))
            await until(lambda change=change: change.done() or world.dead)  # type: ignore[misc]
            if not world.dead:  # with this many effects it was done
                await change
                await world.settled(story.after)
                if not world.dead:
                    world.check()
                    assert point > 3, "hardly any effects"
                    return
            await world.restart(manager_too=manager_too)
            change.cancel()
            await arrived(world, story)
            world.check()
            with contextlib.suppress(NoSwarm):
                await story.change(world)
            await world.settled(story.after)
            world.check()
        raise AssertionError("it never ends")

    run(test)


async def attempt(world: World, story: Story) -> None:
    with contextlib.suppress(Killed, asyncio.CancelledError):
        await story.change(world)
        await world.settled(story.after)


async def arrived(world: World, story: Story) -> None:
    await until(lambda: world.daemon is not None and any(world.rests(phase) for phase in story.phases))


async def fresh(world: World) -> None:
    """A node outside of any swarm."""
    await world.bury()
    root = world.directory / "root" / "swarm"
    if root.exists():
        shutil.rmtree(root)
    world.wishes.clear()
    world.members.clear()
    world.down.clear()
    world.process = world.tasks = False
    world.start()


def test_the_answers_of_an_init(world: World) -> None:
    async def test() -> None:
        daemon = world.start()
        node = await daemon.init(init_request())
        assert len(node) == 25 and daemon.is_manager and daemon.state == "active"
        for refused in (daemon.init(init_request()), daemon.join(join_request("worker"))):
            with pytest.raises(NoSwarm, match="already part of a swarm"):
                await refused
        with pytest.raises(ServerError, match="attempting to leave the swarm"):
            await daemon.leave(force=False)
        await daemon.leave(force=True)
        with pytest.raises(NoSwarm, match="not part of a swarm"):
            await daemon.leave(force=True)
        world.check()

    run(test)


def test_a_failed_init_leaves_nothing(world: World) -> None:
    async def test() -> None:
        daemon = world.start()
        world.trouble = ServerError("etcd does not start")
        with pytest.raises(ServerError, match="etcd does not start"):
            await daemon.init(init_request())
        world.check()
        world.trouble = None
        await daemon.init(init_request())
        assert daemon.is_manager

    run(test)


def test_info_waits_for_a_manager_that_is_just_being_started(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that have seen the engine's socket would take the node for a worker."""

    async def connection(self: Any, seconds: float) -> Any:
        await until(lambda: self.serves)
        return self

    async def answer(connection: Any, trouble: str) -> dict[str, Any]:
        return {"Error": trouble}

    async def test() -> None:
        await world.start().init(init_request())
        again = await world.restart(manager_too=True)
        with monkeypatch.context() as patched:
            patched.setattr(type(again._process), "connection", connection)
            patched.setattr(membership.requests, "info", answer)
            shown = await again.info()
        assert shown["ControlAvailable"] and not shown["Error"], shown
        world.trouble = ServerError("etcd does not start")
        monkeypatch.setattr(membership, "INFO_WAIT", 0.0)
        shown = await (await world.restart(manager_too=True)).info()
        assert not shown["ControlAvailable"] and "still starting" in shown["Error"], shown

    run(test)


def test_a_full_disk_leaves_no_membership_and_ends_none(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise ServerError("no space left on device")

    async def test() -> None:
        daemon = world.start()
        for verb in (daemon.init(init_request()), daemon.join(join_request("worker"))):
            with monkeypatch.context() as patch:
                patch.setattr(Directory, "save", full)
                with pytest.raises(ServerError, match="no space"):
                    await verb
            assert daemon.phase is Phase.NONE
        await as_manager(world)
        await world.settled(Phase.MANAGER)
        for verb in (daemon.init(init_request(force=True)), daemon.leave(force=True)):
            with monkeypatch.context() as patch:
                patch.setattr(Directory, "save", full)
                with pytest.raises(ServerError, match="no space"):
                    await verb
            assert daemon.phase is Phase.MANAGER
            await world.settled(Phase.MANAGER)
        await world.wish(world.node(), "worker")
        await world.settled(Phase.WORKER)
        world.check()

    run(test)


def test_a_failed_init_that_cannot_be_undone_at_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    erase = Directory.erase
    tries = 0

    def failing(self: Directory) -> None:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise ServerError("the swarm's state cannot be removed")
        erase(self)

    async def test() -> None:
        daemon = world.start()
        world.trouble = ServerError("etcd does not start")
        monkeypatch.setattr(Directory, "erase", failing)
        with pytest.raises(ServerError, match="etcd does not start"):
            await daemon.init(init_request())
        await world.settled(Phase.NONE)
        assert tries >= 3, "it is tried until it succeeds"
        world.check()

    run(test)


def test_a_leave_that_is_repeated_has_one_agent(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """At boot the step makes the agent itself; it must not make another one beside it."""
    agents = []
    leave_once = FakeAgent.leave

    async def failing(self: FakeAgent, *, tell: bool) -> None:
        agents.append(self)
        if not self.running:
            self.start()
        if len(agents) < 3:
            raise ServerError("no space left on device")
        await leave_once(self, tell=tell)

    async def test() -> None:
        world.start()
        await as_worker(world)
        await world.settled(Phase.WORKER)
        await world.bury()
        directory = Directory(world.directory / "root" / "swarm")
        leaving = msgspec.structs.replace(directory.load(), phase=Phase.LEAVING)
        await asyncio.to_thread(directory.save, leaving)
        monkeypatch.setattr(FakeAgent, "leave", failing)
        await world.restart()
        await world.settled(Phase.NONE)
        assert len(agents) == 3 and len({id(each) for each in agents}) == 1
        world.check()

    run(test)


def test_a_worker_is_no_manager(world: World) -> None:
    async def test() -> None:
        daemon = world.start()
        with pytest.raises(NoSwarm, match="This node is not a swarm manager"):
            await daemon.call("swarm.inspect")
        await join(world, "worker")
        with pytest.raises(NoSwarm, match=r"This node is not a swarm manager\. Worker nodes can't"):
            await daemon.call("swarm.inspect")
        with pytest.raises(NoSwarm, match="not a swarm manager"):
            await daemon.init(init_request(force=True))

    run(test)


def test_a_wrong_token_leaves_nothing(world: World) -> None:
    async def test() -> None:
        daemon = world.start()
        with pytest.raises(InvalidParameter, match="join token is necessary"):
            await daemon.join(JoinRequest(remote_addrs=["10.0.0.9"], join_token=f"SWMTKN-1-{DIGEST}-{'x' * 25}"))
        assert daemon.phase is Phase.NONE, "it is answered before it is undone"
        world.check()
        for bad in ("", "x", f"SWMTKN-1-{DIGEST}-{'x' * 24}", f"SWMTKN-2-{DIGEST}-{'x' * 25}"):
            with pytest.raises(InvalidParameter, match="join token is necessary"):
                await daemon.join(JoinRequest(remote_addrs=["10.0.0.9"], join_token=bad))
        with pytest.raises(InvalidParameter, match="RemoteAddrs"):
            await daemon.join(JoinRequest(join_token=token("worker")))
        with pytest.raises(InvalidParameter, match="RemoteAddrs 'a:70000'"):
            await daemon.join(JoinRequest(remote_addrs=["a:70000"], join_token=token("worker")))

    run(test)


def test_no_manager_answers(world: World) -> None:
    async def test() -> None:
        daemon = world.start()
        world.reachable = False
        with pytest.raises(ServerError, match="connection refused"):
            await join(world, "worker")
        assert daemon.phase is Phase.NONE
        world.check()
        world.reachable = True
        await join(world, "worker")
        assert daemon.phase is Phase.WORKER

    run(test)


def test_a_join_goes_on_in_the_background(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        monkeypatch.setattr(membership, "JOIN_LIMIT", 0.05)
        monkeypatch.setattr(membership, "UNREACHABLE_TRIES", 10**9)
        daemon = world.start()
        world.reachable = False
        with pytest.raises(ServerError, match="Timeout was reached before node was joined"):
            await join(world, "worker")
        assert daemon.state == "pending"
        assert "connection refused" in (await daemon.info())["Error"]
        with pytest.raises(NoSwarm, match="already part of a swarm"):
            await join(world, "worker")
        daemon = await world.restart()
        assert daemon.state == "pending"
        world.reachable = True
        await world.settled(Phase.WORKER)
        world.check()

    run(test)


def test_a_pending_join_is_ended_by_a_leave(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        monkeypatch.setattr(membership, "UNREACHABLE_TRIES", 10**9)
        daemon = world.start()
        world.reachable = False
        joining = asyncio.ensure_future(join(world, "worker"))
        await until(lambda: daemon.phase is Phase.JOINING)
        await daemon.leave(force=False)
        with pytest.raises(NoSwarm):
            await joining
        world.check()

    run(test)


def test_a_join_that_times_out_while_the_swarm_is_left(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        monkeypatch.setattr(membership, "JOIN_LIMIT", 0.2)
        monkeypatch.setattr(membership, "UNREACHABLE_TRIES", 10**9)
        begun, go = threading.Event(), threading.Event()
        save, stop = Directory.save, FakeProcess.stop

        def slow_save(directory: Directory, state: State) -> None:
            if state.detached:
                begun.set()
                assert go.wait(10 * PATIENCE)
            save(directory, state)

        async def slow_stop(process: FakeProcess, **given: bool) -> None:
            await until(begun.is_set)
            asyncio.get_running_loop().call_later(0.1, go.set)
            await stop(process, **given)

        monkeypatch.setattr(Directory, "save", slow_save)
        monkeypatch.setattr(FakeProcess, "stop", slow_stop)
        daemon = world.start()
        world.reachable = False
        joining = asyncio.ensure_future(join(world, "worker"))
        await until(lambda: daemon.phase is Phase.JOINING)
        await daemon.leave(force=False)
        with pytest.raises(ServerError, match="Timeout was reached"):
            await joining
        assert daemon.phase is Phase.NONE
        world.check()

    run(test)


def test_a_background_join_that_is_refused_says_so(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        monkeypatch.setattr(membership, "JOIN_LIMIT", 0.05)
        monkeypatch.setattr(membership, "UNREACHABLE_TRIES", 10**9)
        daemon = world.start()
        world.reachable = False
        with pytest.raises(ServerError):
            await join(world, "worker")
        world.reachable, world.refusal = True, InvalidParameter("A valid join token is necessary")
        await world.settled(Phase.ERROR)
        assert daemon.state == "error"
        assert "join token is necessary" in (await daemon.info())["Error"]
        daemon = await world.restart()
        assert daemon.state == "error"
        await daemon.leave(force=False)
        world.check()

    run(test)


def test_a_removed_node_ends_its_tasks(world: World) -> None:
    async def test() -> None:
        daemon = world.start()
        await join(world, "worker")
        agent = world.agent()
        assert agent is not None
        agent.on_barred("node was removed from the swarm")
        await world.settled(Phase.ERROR)
        assert not world.tasks
        assert "removed" in (await daemon.info())["Error"]
        await daemon.leave(force=False)
        world.check()

    run(test)


def test_a_certificate_is_renewed_when_the_session_asks(world: World) -> None:
    async def test() -> None:
        world.start()
        await join(world, "worker")
        agent = world.agent()
        assert agent is not None
        world.reachable = True
        agent.tell(renew=True)
        await until(lambda: agent.renewals)
        world.check()

    run(test)


def test_what_a_session_brings_is_kept_on_disk(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The roots, managers and epoch that the daemon after the next crash begins with."""

    async def test() -> None:
        world.start()
        await as_worker(world)
        await world.settled(Phase.WORKER)
        directory = Directory(world.directory / "root" / "swarm")
        await until(lambda: directory.load().epoch == 2)
        new = Peer(node="new", address="10.0.0.7:2377")
        monkeypatch.setattr("tests.unit.cluster.world.OTHER", new)
        monkeypatch.setattr("tests.unit.cluster.world.ROOT", "another root")
        await world.tell()
        await until(lambda: directory.load().managers == (new,) and directory.roots() == "another root")

    run(test)


def test_a_renewal_waits_for_managers(world: World) -> None:
    async def test() -> None:
        daemon = world.start()
        await join(world, "worker")
        agent = world.agent()
        assert agent is not None
        agent.tell(renew=True)
        world.reachable = False
        await asyncio.sleep(0.05)
        assert "connection refused" in (await daemon.info())["Error"]
        world.reachable = True
        await until(lambda: agent.renewals)
        assert (await daemon.info())["Error"] == ""

    run(test)


def test_a_promotion_that_is_withdrawn(world: World) -> None:
    async def test() -> None:
        daemon = world.start()
        await join(world, "worker")
        world.trouble = ServerError("the leader cannot be reached")
        await promoted(world)
        await until(lambda: daemon.phase is Phase.PROMOTING and daemon._trouble)
        await demoted(world)
        await world.settled(Phase.WORKER)
        world.check()

    run(test)


def test_demoted_and_promoted_again_and_again(world: World) -> None:
    async def test() -> None:
        world.members.add("other")
        world.start()
        await join(world, "worker")
        for _ in range(5):
            await promoted(world)
            await world.settled(Phase.MANAGER)
            world.check()
            await demoted(world)
            await world.settled(Phase.WORKER)
            world.check()

    run(test)


def test_a_failed_force_serves_as_before(world: World) -> None:
    async def test() -> None:
        daemon = world.start()
        await as_manager(world)
        world.trouble = ServerError("etcd does not start")
        with pytest.raises(EngineError, match="etcd does not start"):
            await forced(world)
        world.trouble = None
        await world.settled(Phase.MANAGER)
        await forced(world)
        assert world.members == {daemon._state.node}

    run(test)


def test_a_refused_manager_makes_a_new_cluster_by_force(world: World) -> None:
    """The swarm refuses its certificate, and its data are there. A failure changes nothing."""

    async def test() -> None:
        daemon = world.start()
        await as_manager(world)
        agent = world.agent()
        assert agent is not None
        agent.on_barred("the certificate was not issued by this swarm's CA")
        await world.settled(Phase.ERROR)
        world.trouble = ServerError("etcd does not start")
        with pytest.raises(EngineError, match="etcd does not start"):
            await forced(world)
        world.trouble = None
        assert daemon.phase is Phase.ERROR
        assert "not issued by this swarm" in (await daemon.info())["Error"]
        daemon = await world.restart()
        await forced(world)
        assert daemon.phase is Phase.MANAGER and not daemon._state.error
        assert world.members == {daemon._state.node}
        await world.settled(Phase.MANAGER)

    run(test)


def test_a_refused_worker_has_nothing_to_make_a_new_cluster_of(world: World) -> None:
    async def test() -> None:
        world.start()
        await join(world, "worker")
        agent = world.agent()
        assert agent is not None
        agent.on_barred("the certificate was not issued by this swarm's CA")
        await world.settled(Phase.ERROR)
        with pytest.raises(EngineError, match="needs a manager's data"):
            await forced(world)
        assert world.daemon.phase is Phase.ERROR

    run(test)


def test_the_daemon_ends_without_a_word_to_the_swarm(world: World) -> None:
    async def test() -> None:
        daemon = world.start()
        await init(world)
        await daemon.close(stop=False)
        assert world.process and world.tasks
        daemon = await world.restart()
        await world.settled(Phase.MANAGER)
        await daemon.close(stop=True)
        assert not world.process
        assert (world.directory / "root" / "swarm" / "state.json").exists()
        await world.restart()
        await world.settled(Phase.MANAGER)
        world.check()

    run(test)


def test_a_state_that_cannot_be_read(world: World) -> None:
    async def test() -> None:
        root = world.directory / "root" / "swarm"
        root.mkdir(parents=True)
        (root / "state.json").write_text("{")
        daemon = world.start()
        assert daemon.state == "error"
        assert "state.json" in (await daemon.info())["Error"]
        await daemon.leave(force=False)
        world.check()

    run(test)


def test_the_digest_of_a_root_is_the_tokens() -> None:
    assert credentials.check_token(token("worker")) == DIGEST


@pytest.mark.parametrize("role", ["worker", "manager"])
def test_a_certificate_is_renewed_in_time(role: str, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between half and four fifths of its life, and at once when it has expired."""

    async def test() -> None:
        world.members.add("other")
        daemon = world.start()
        await join(world, role)
        certificate = daemon._directory.certificate()
        assert certificate is not None
        life = certificate.ends - certificate.begins
        agent = world.agent()
        assert agent is not None
        for part, renewed in ((0.49, False), (0.81, True), (1.5, True)):
            agent.renewals = 0
            now = certificate.begins + life * part
            monkeypatch.setattr(membership.time, "time", lambda now=now: now)  # type: ignore[attr-defined]
            agent.tell()
            if renewed:
                await until(lambda: agent.renewals)
            else:
                await asyncio.sleep(0.05)
                assert not agent.renewals
        monkeypatch.undo()

    run(test)


def test_the_address_that_a_manager_sees(world: World) -> None:
    async def test() -> None:
        daemon = world.start()
        await join(world, "worker")
        assert (await daemon.info())["NodeAddr"] == "10.0.0.1"
        agent = world.agent()
        assert agent is not None
        assert (agent.identity.advertise, agent.identity.manager_address) == ("", "10.0.0.1:2377")
        await leave(world)
        await daemon.join(JoinRequest(remote_addrs=["10.0.0.9"], join_token=token("worker"), advertise_addr="eth0:99"))
        agent = world.agent()
        assert agent is not None
        assert (agent.identity.advertise, agent.identity.manager_address) == ("10.0.0.1", "10.0.0.1:99")

    run(test)
