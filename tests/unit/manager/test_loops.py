"""The task that runs the leader's loops: the writes that it waits for, and loops that fail."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

import pytest

from engine.errors import ServerError
from engine.manager.kv import Batch
from engine.manager.loops import Acting, Loops
from engine.manager.records import CLAIMS, LEADER, Claim, encode
from engine.manager.store import Compare, Event, Store
from tests.support.fakes.clock import FakeClock
from tests.support.fakes.etcd import FakeEtcd


class Recorder:
    """A loop that records the claims in the store when it takes over and at each step."""

    name = "recorder"

    def __init__(self, store: Store, *, failures: int = 0, faulty: bool = False) -> None:
        self.store = store
        self.failures = failures
        self.faulty = faulty
        self.wanted = True
        self.claims: list[set[str]] = []
        self.events: list[str] = []

    def changed(self, event: Event) -> None:
        if self.faulty:
            raise RuntimeError("this loop is faulty")
        self.events.append(event.key)

    def take_over(self) -> None:
        self.claims.append(set(self.store.all(CLAIMS)))

    def due(self) -> float | None:
        return 0 if self.wanted else None

    async def step(self, acting: Acting) -> None:
        self.claims.append(set(self.store.all(CLAIMS)))
        if self.failures:
            self.failures -= 1
            raise ServerError("context deadline exceeded")
        self.wanted = False


@contextlib.asynccontextmanager
async def leading(loops: Loops) -> AsyncIterator[None]:
    task = asyncio.create_task(loops.lead(Compare(LEADER, "")))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


@contextlib.contextmanager
def late(etcd: FakeEtcd) -> Iterator[None]:
    """The watches deliver writes of the block only after it."""
    watches = etcd.cluster.watches
    rows, known = list(watches), len(etcd.cluster.history)
    watches.clear()
    yield
    watches.extend(rows)
    for changes in etcd.cluster.history[known:]:
        for _, _, queue in rows:
            queue.put_nowait(Batch(list(changes)))


async def test_a_leader_begins_when_the_cache_has_all_earlier_writes(
    store: Store, etcd: FakeEtcd, clock: FakeClock
) -> None:
    """A write of its earlier leadership may have been carried out after it was cancelled."""
    loop = Recorder(store)
    with late(etcd):
        etcd.put_now("/x/written", encode(Claim("")))
        async with leading(Loops([loop], store, clock)):
            await clock.advance(20)
            assert loop.claims == []
    async with leading(Loops([loop], store, clock)):
        await clock.advance(1)
    assert loop.claims == [{"written"}, {"written"}]


async def test_after_a_failure_a_step_waits_for_the_write_that_failed(
    store: Store, etcd: FakeEtcd, clock: FakeClock
) -> None:
    loop = Recorder(store, failures=1)
    async with leading(Loops([loop], store, clock)):
        with late(etcd):
            await clock.advance(0)
            assert loop.claims == [set(), set()]
            etcd.put_now("/x/written", encode(Claim("")))
            await clock.advance(20)
            assert len(loop.claims) == 2
        await clock.advance(10)
    assert loop.claims[2:] == [{"written"}]


async def test_a_faulty_loop_hides_no_event_from_the_others(
    store: Store, etcd: FakeEtcd, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    faulty, other = Recorder(store, faulty=True), Recorder(store)
    Loops([faulty, other], store, clock)
    etcd.put_now("/x/written", encode(Claim("")))
    await clock.advance(0)
    assert other.events == ["written"]
    assert "recorder failed at /x/written" in caplog.text
