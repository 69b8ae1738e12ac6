"""Leadership over the fake etcd: raft's leader leads, leases, fences."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from engine.manager.leader import Leadership
from engine.manager.records import CLAIMS, LEADER, MANAGERS, Claim, Leader, ManagerPresence
from engine.manager.store import Compare, Fenced, Put, Store
from tests.support.fakes.clock import FakeClock
from tests.support.fakes.etcd import FakeEtcd


class Manager:
    """One manager of the fake cluster. `stop` and `go_on` are SIGSTOP and SIGCONT of its process,
    while its etcd goes on.
    """

    def __init__(self, etcd: FakeEtcd, clock: FakeClock) -> None:
        self.etcd, self.clock = etcd, clock
        self.node = f"n{etcd.member}"
        self.store = Store(etcd, clock)
        self.leadership = Leadership(self.store, etcd, clock, node=self.node, address=f"{self.node}:2377")
        self.fence: Compare | None = None
        self.terms = 0
        self.running: asyncio.Task[None] | None = None

    async def start(self) -> Manager:
        await self.store.load()
        self.running = asyncio.create_task(self.leadership.run(self.lead))
        await self.clock.advance(1)
        return self

    async def lead(self, fence: Compare) -> None:
        self.fence = fence
        self.terms += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.fence = None

    async def write(self, fence: Compare, text: str) -> None:
        await self.store.commit([Put(CLAIMS, "written", Claim(text))], [fence])

    async def kill(self) -> None:
        """The process ends, with its etcd, without a word."""
        self.etcd.down = True
        await self.end()

    async def end(self) -> None:
        assert self.running is not None
        self.running.cancel()
        await self.clock.advance(3)
        with contextlib.suppress(asyncio.CancelledError):
            await self.running
        await self.store.close()


async def three(etcd: FakeEtcd, clock: FakeClock) -> list[Manager]:
    return [await Manager(each, clock).start() for each in (etcd, etcd.peer(2), etcd.peer(3))]


def leaders(managers: list[Manager]) -> list[str]:
    return [manager.node for manager in managers if manager.fence is not None]


async def test_a_lone_manager_leads(etcd: FakeEtcd, clock: FakeClock) -> None:
    manager = await Manager(etcd, clock).start()
    assert manager.fence is not None and manager.leadership.leads
    assert manager.store.record(LEADER) == Leader("n1", 2)
    assert manager.store.record(MANAGERS, "n1") == ManagerPresence(address="n1:2377", member=1)
    await manager.write(manager.fence, "1")
    await clock.advance(600)
    assert manager.terms == 1
    await manager.write(manager.fence, "2")
    await manager.end()
    assert not etcd.cluster.leases
    assert "/leader" not in etcd.cluster.items and "/m/n1" not in etcd.cluster.items


async def test_rafts_leader_leads(etcd: FakeEtcd, clock: FakeClock) -> None:
    managers = await three(etcd, clock)
    assert leaders(managers) == ["n1"]
    old = managers[0].fence
    assert old is not None
    etcd.elect(3)
    await clock.advance(1)
    assert leaders(managers) == ["n3"]
    with pytest.raises(Fenced):
        await managers[0].write(old, "late")
    assert sorted(managers[1].store.all(MANAGERS)) == ["n1", "n2", "n3"]
    for manager in managers:
        await manager.end()


async def test_the_leader_dies_with_its_etcd(etcd: FakeEtcd, clock: FakeClock) -> None:
    managers = await three(etcd, clock)
    await managers[0].kill()
    etcd.elect(2)
    await clock.advance(0.5)
    assert leaders(managers) == ["n2"]
    await clock.advance(6)
    assert sorted(managers[1].store.all(MANAGERS)) == ["n2", "n3"]
    for manager in managers[1:]:
        await manager.end()


async def test_a_leader_that_hangs_while_its_etcd_leads(etcd: FakeEtcd, clock: FakeClock) -> None:
    managers = await three(etcd, clock)
    old = managers[0].fence
    assert old is not None
    etcd.down = True
    await clock.advance(7)
    others = leaders(managers[1:])
    assert len(others) == 1
    assert managers[0].fence is None  # it knows that its lease has run out
    etcd.down = False
    with pytest.raises(Fenced):
        await managers[0].write(old, "late")
    await clock.advance(20)
    assert leaders(managers) == others  # raft's term is the same: no change
    assert sorted(managers[1].store.all(MANAGERS)) == ["n1", "n2", "n3"]
    for manager in managers:
        await manager.end()


async def test_a_short_loss_of_quorum_changes_nothing(etcd: FakeEtcd, clock: FakeClock) -> None:
    manager = await Manager(etcd, clock).start()
    etcd.down = True
    await clock.advance(3)
    etcd.down = False
    await clock.advance(3)
    assert manager.terms == 1
    await manager.end()


async def test_the_process_of_a_node_is_started_again(etcd: FakeEtcd, clock: FakeClock) -> None:
    """The key is still there, under the lease of the process before."""
    first = await Manager(etcd, clock).start()
    await first.kill()
    etcd.down = False
    assert etcd.cluster.leases
    second = await Manager(etcd, clock).start()
    assert second.fence is not None
    await clock.advance(30)
    assert second.terms == 1
    assert sorted(second.store.all(MANAGERS)) == ["n1"]
    await second.end()


async def test_an_orderly_end_hands_over_at_once(etcd: FakeEtcd, clock: FakeClock) -> None:
    managers = await three(etcd, clock)
    assert managers[0].running is not None
    managers[0].running.cancel()
    await clock.advance(1)
    assert len(leaders(managers[1:])) == 1
    for manager in managers[1:]:
        await manager.end()


async def test_presence_that_is_deleted_comes_back(etcd: FakeEtcd, clock: FakeClock) -> None:
    manager = await Manager(etcd, clock).start()
    etcd.delete_now("/m/n1")
    await clock.advance(2)
    assert "n1" in manager.store.all(MANAGERS)
    await manager.end()


async def test_loops_that_fail_are_started_again(etcd: FakeEtcd, clock: FakeClock) -> None:
    store = Store(etcd, clock)
    await store.load()
    calls = 0

    async def lead(fence: Compare) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise RuntimeError("a bug")
        await asyncio.Event().wait()

    running = asyncio.create_task(Leadership(store, etcd, clock, node="n1", address="").run(lead))
    await clock.advance(5)
    assert calls == 2
    running.cancel()
    await clock.advance(1)
    await store.close()
