"""The store over the fake etcd: cache, indexes, transactions, unknown outcomes, reloading."""

from __future__ import annotations

import asyncio
import random

import pytest

from engine.errors import ServerError
from engine.manager.records import CLAIMS, LEADER, TASKS, Claim, Leader, Task
from engine.manager.store import Compare, Delete, Event, Fenced, Put, Stale, Store
from engine.swarm_session.states import TaskState
from tests.support import PATIENCE
from tests.support.fakes.clock import FakeClock
from tests.support.fakes.etcd import FakeEtcd


def claim(holder: str = "a") -> Claim:
    return Claim(holder)


def task(service: str = "s", node: str = "") -> Task:
    return Task(service=service, version=1, node=node, desired=TaskState.RUNNING)


async def test_a_commit_is_in_the_cache_when_it_returns(store: Store) -> None:
    revision = await store.commit([Put(CLAIMS, "service/web", claim())])
    entry = store.get(CLAIMS, "service/web")
    assert entry is not None
    assert (entry.key, entry.record, entry.revision, entry.created) == ("service/web", claim(), revision, revision)
    assert store.revision == revision
    later = await store.commit([Put(CLAIMS, "service/web", claim("b"))])
    entry = store.get(CLAIMS, "service/web")
    assert entry is not None
    assert (entry.record, entry.revision, entry.created) == (claim("b"), later, revision)
    await store.commit([Delete(CLAIMS, "service/web")])
    assert store.get(CLAIMS, "service/web") is None
    assert not store.all(CLAIMS)


async def test_a_failed_comparison_names_itself_and_writes_nothing(store: Store) -> None:
    absent = Compare(CLAIMS, "x")
    revision = await store.commit([Put(CLAIMS, "x", claim())], [absent])
    right = Compare(CLAIMS, "x", revision)
    with pytest.raises(Stale, match=r"update out of sequence: /x/x") as refusal:
        await store.commit([Put(CLAIMS, "x", claim("b")), Put(CLAIMS, "y", claim())], [right, absent])
    assert refusal.value.failed == (absent,)
    assert not isinstance(refusal.value, Fenced)
    assert store.record(CLAIMS, "x") == claim()
    assert store.get(CLAIMS, "y") is None


async def test_the_fence(store: Store) -> None:
    revision = await store.commit([Put(LEADER, "", Leader("n1", 1))])
    fence = Compare(LEADER, "", revision, by_creation=True)
    await store.commit([Put(LEADER, "", Leader("n1", 2))])
    await store.commit([Put(CLAIMS, "x", claim())], [fence])
    await store.commit([Delete(LEADER, "")])
    await store.commit([Put(LEADER, "", Leader("n2", 3))])
    with pytest.raises(Fenced):
        await store.commit([Put(CLAIMS, "x", claim("b"))], [fence])
    with pytest.raises(Fenced):
        await store.commit_many([([Put(CLAIMS, "x", claim("b"))], [])], [fence])
    assert store.record(CLAIMS, "x") == claim()


async def test_an_answer_that_is_lost(store: Store, etcd: FakeEtcd, clock: FakeClock) -> None:
    """The comparison of the second attempt fails, because the first was carried out."""
    etcd.lose_answers = 1
    writing = asyncio.create_task(store.commit([Put(CLAIMS, "x", claim())], [Compare(CLAIMS, "x")]))
    await clock.advance(1)
    assert await writing == etcd.cluster.items["/x/x"].revision
    assert store.record(CLAIMS, "x") == claim()


async def test_a_request_that_is_lost(store: Store, etcd: FakeEtcd, clock: FakeClock) -> None:
    etcd.lose_requests = 2
    writing = asyncio.create_task(store.commit([Put(CLAIMS, "x", claim())], [Compare(CLAIMS, "x")]))
    await clock.advance(1)
    assert await writing == store.revision
    # The second request that is lost is the turn's.
    assert [operation.key for _, (operation,) in etcd.commits] == ["/w/node1", "/x/x", "/w/node1", "/w/node1", "/x/x"]


async def test_an_answer_that_is_lost_and_another_manager_that_wins(
    store: Store, etcd: FakeEtcd, clock: FakeClock
) -> None:
    etcd.lose_requests = 1
    writing = asyncio.create_task(store.commit([Put(CLAIMS, "x", claim())], [Compare(CLAIMS, "x")]))
    await clock.settle()
    other = Store(etcd.peer(), clock)
    await other.load()
    await other.commit([Put(CLAIMS, "x", claim("other"))])
    await clock.advance(1)
    with pytest.raises(Stale):
        await writing
    assert store.record(CLAIMS, "x") == claim("other")
    await other.close()


async def test_a_late_attempt_is_not_carried_out(store: Store, etcd: FakeEtcd, clock: FakeClock) -> None:
    """A stopped member of etcd has it in a queue. Its comparisons hold again."""
    etcd.delay_requests = 1
    await _advance(store.commit([Put(CLAIMS, "x", claim())], [Compare(CLAIMS, "x")]), clock, 2)
    await store.commit([Delete(CLAIMS, "x")])
    (late,) = etcd.deliver()
    assert not late.done
    await clock.settle()
    assert store.get(CLAIMS, "x") is None


async def test_a_late_attempt_of_a_write_that_was_given_up(store: Store, etcd: FakeEtcd, clock: FakeClock) -> None:
    etcd.delay_requests = 1000
    with pytest.raises(ServerError, match="context deadline exceeded"):
        await _advance(store.commit([Put(CLAIMS, "x", claim())]), clock, 20)
    etcd.delay_requests = 0
    assert await store.current() == ""
    assert etcd.delayed and not any(late.done for late in etcd.deliver())
    await store.commit([Put(CLAIMS, "y", claim())])
    assert store.get(CLAIMS, "x") is None


async def test_a_late_attempt_of_a_write_that_was_cancelled(store: Store, etcd: FakeEtcd, clock: FakeClock) -> None:
    etcd.delay_requests = 1
    writing = asyncio.create_task(store.commit([Put(CLAIMS, "x", claim())]))
    await clock.settle()
    assert etcd.delayed
    writing.cancel()
    await asyncio.wait([writing])
    assert await _advance(store.current(), clock, 1) == ""
    (late,) = etcd.deliver()
    assert not late.done


async def test_a_late_attempt_of_the_process_before(etcd: FakeEtcd, clock: FakeClock) -> None:
    before = Store(etcd, clock, node="node1")
    await before.load()
    etcd.delay_requests = 1
    writing = asyncio.create_task(before.commit([Put(CLAIMS, "x", claim())]))
    await clock.settle()
    assert etcd.delayed
    writing.cancel()
    await before.close()
    after = Store(etcd, clock, node="node1")
    await after.load()
    (late,) = etcd.deliver()
    assert not late.done
    await after.close()


@pytest.mark.parametrize("seed", range(20))
async def test_writes_side_by_side_with_answers_lost(store: Store, etcd: FakeEtcd, clock: FakeClock, seed: int) -> None:
    """Each is carried out once, whatever becomes of answers and requests, also of those of turns.
    Late ones change nothing.
    """
    chance = random.Random(seed)
    done: list[str] = []

    async def write(number: int) -> None:
        key = f"x{number}"
        for _ in range(3):
            await store.commit([Put(CLAIMS, key, claim())], [Compare(CLAIMS, key)])
            done.append(key)
            await store.commit([Delete(CLAIMS, key)])

    def disturb() -> None:
        etcd.lose_answers = chance.randrange(4) == 0
        etcd.delay_requests = chance.randrange(4) == 0

    etcd.before_commit = disturb
    work = [asyncio.create_task(write(number)) for number in range(5)]
    for _ in range(600):
        await clock.advance(0.1)
        if all(each.done() for each in work):
            break
        if chance.randrange(3) == 0:
            etcd.deliver()
    etcd.before_commit = None
    etcd.lose_answers = etcd.delay_requests = 0
    await asyncio.gather(*work)
    await store.current()
    etcd.deliver()
    await clock.settle()
    assert len(done) == 15
    assert not store.all(CLAIMS)


async def test_without_quorum_a_write_is_given_up(etcd: FakeEtcd, clock: FakeClock) -> None:
    async def reachable() -> tuple[int, int]:
        return 1, 3

    store = Store(etcd, clock, reachable=reachable)
    await store.load()
    etcd.down = True
    writing = asyncio.create_task(store.commit([Put(CLAIMS, "x", claim())]))
    await clock.advance(17)
    assert not writing.done()
    await clock.advance(3)
    with pytest.raises(ServerError, match=r"context deadline exceeded.*1 of 3 managers reachable"):
        await writing
    assert "1 of 3 managers reachable" in await asyncio.wait_for(_advance(store.current(), clock, 6), 5 * PATIENCE)
    etcd.down = False
    await store.commit([Put(CLAIMS, "x", claim())])
    assert await store.current() == ""
    await store.close()


async def test_a_manager_whose_etcd_cannot_run_says_why(etcd: FakeEtcd, clock: FakeClock) -> None:
    trouble = ""
    store = Store(etcd, clock, broken=lambda: trouble)
    await store.load()
    assert store.broken == ""
    etcd.down, trouble = True, "exit code 1; no space left on device"
    expected = f"etcd does not run on this manager: {trouble}"
    assert await asyncio.wait_for(_advance(store.current(), clock, 6), 5 * PATIENCE) == store.broken == expected
    with pytest.raises(ServerError, match=expected):
        await _advance(store.commit([Put(CLAIMS, "x", claim())]), clock, 21)
    await store.close()


async def _advance(coroutine, clock: FakeClock, seconds: float):  # type: ignore[no-untyped-def]
    work = asyncio.create_task(coroutine)
    await clock.advance(seconds)
    return await work


async def test_many_groups_in_few_transactions(store: Store, etcd: FakeEtcd) -> None:
    groups = [
        ([Put(TASKS, f"t{n}", task()), Put(CLAIMS, f"c{n}", claim())], [Compare(TASKS, f"t{n}")]) for n in range(3000)
    ]
    etcd.commits.clear()
    assert await store.commit_many(groups) == [True] * 3000
    assert len(etcd.commits) == 6
    assert len(store.all(TASKS)) == 3000
    assert store.tasks_of("s") == {f"t{n}" for n in range(3000)}


async def test_of_many_groups_those_are_left_out_whose_comparison_fails(store: Store) -> None:
    await store.commit([Put(CLAIMS, "c3", claim("held"))])
    groups = [([Put(CLAIMS, f"c{n}", claim("new"))], [Compare(CLAIMS, f"c{n}")]) for n in range(6)]
    assert await store.commit_many(groups) == [True, True, True, False, True, True]
    assert store.record(CLAIMS, "c3") == claim("held")
    assert store.record(CLAIMS, "c5") == claim("new")


async def test_groups_of_the_same_record_keep_their_order(store: Store) -> None:
    groups = [([Put(CLAIMS, "c", claim(str(n)))], []) for n in range(5)]
    assert await store.commit_many(groups) == [True] * 5
    assert store.record(CLAIMS, "c") == claim("4")


async def test_the_last_change_of_a_record_counts(store: Store) -> None:
    await store.commit([Put(CLAIMS, "c", claim("1")), Delete(CLAIMS, "c"), Put(CLAIMS, "c", claim("2"))])
    assert store.record(CLAIMS, "c") == claim("2")


async def test_indexes_follow_the_tasks(store: Store) -> None:
    await store.commit([Put(TASKS, "t1", task("s1")), Put(TASKS, "t2", task("s1", "n1"))])
    assert store.tasks_of("s1") == {"t1", "t2"}
    assert store.tasks_on("n1") == {"t2"}
    await store.commit([Put(TASKS, "t1", task("s1", "n2"))])
    assert store.tasks_on("n2") == {"t1"}
    await store.commit([Delete(TASKS, "t1"), Delete(TASKS, "t2")])
    assert not store.tasks_of("s1") and not store.tasks_on("n1") and not store.tasks_on("n2")


async def test_events_in_order_after_the_cache(store: Store, etcd: FakeEtcd, clock: FakeClock) -> None:
    seen: list[tuple[str, str | None, str | None]] = []

    def changed(event: Event) -> None:
        assert store.get(event.kind, event.key) == event.new
        old, new = event.old, event.new
        seen.append((event.key, old and old.record.holder, new and new.record.holder))

    end = store.subscribe(changed)
    await store.commit([Put(CLAIMS, "a", claim("1"))])
    etcd.put_now("/x/b", b"\x91\xa12")
    etcd.put_now("/unknown/key", b"of a later version")
    etcd.put_now("/x/broken", b"\xff")
    etcd.delete_now("/x/a")
    await clock.settle()
    assert seen == [("a", None, "1"), ("b", None, "2"), ("a", "1", None)]
    end()
    end()
    await store.commit([Put(CLAIMS, "a", claim("3"))])
    assert len(seen) == 3


async def test_load_passes_every_record(etcd: FakeEtcd, clock: FakeClock) -> None:
    etcd.put_now("/x/a", b"\x91\xa11")
    store = Store(etcd, clock)
    seen: list[Event] = []
    store.subscribe(seen.append)
    await store.load()
    assert [(event.key, event.old) for event in seen] == [("a", None)]
    assert store.revision == 2
    await store.close()


async def test_a_broken_watch_misses_nothing(store: Store, etcd: FakeEtcd, clock: FakeClock) -> None:
    etcd.break_watches()
    await clock.settle()
    etcd.put_now("/x/a", b"\x91\xa11")
    assert store.get(CLAIMS, "a") is None
    await clock.advance(1)
    assert store.record(CLAIMS, "a") == claim("1")


async def test_a_compacted_revision_loads_again(store: Store, etcd: FakeEtcd, clock: FakeClock) -> None:
    await store.commit([Put(CLAIMS, "a", claim("1")), Put(CLAIMS, "b", claim("1"))])
    etcd.break_watches()
    await clock.settle()
    etcd.put_now("/x/a", b"\x91\xa12")
    etcd.delete_now("/x/b")
    revision = etcd.put_now("/x/c", b"\x91\xa13")
    await etcd.compact(revision)
    seen: list[Event] = []
    store.subscribe(seen.append)
    await clock.advance(1)
    assert {(event.key, event.new and event.new.record.holder) for event in seen} == {
        ("a", "2"),
        ("b", None),
        ("c", "3"),
    }
    assert store.revision == revision
    await store.commit([Put(CLAIMS, "d", claim())])


async def test_current_waits_for_what_others_wrote(store: Store, etcd: FakeEtcd, clock: FakeClock) -> None:
    other = Store(etcd.peer(), clock)
    await other.load()
    await other.commit([Put(CLAIMS, "a", claim("1"))])
    assert await store.current() == ""
    assert store.record(CLAIMS, "a") == claim("1")
    await other.close()


async def test_a_lease_takes_its_records_along(store: Store, etcd: FakeEtcd, clock: FakeClock) -> None:
    lease = await etcd.grant(5)
    await store.commit([Put(CLAIMS, "a", claim(), lease)])
    entry = store.get(CLAIMS, "a")
    assert entry is not None and entry.lease == lease
    await clock.advance(4)
    await etcd.keep_alive(lease)
    await clock.advance(4)
    assert store.get(CLAIMS, "a") is not None
    await clock.advance(2)
    assert store.get(CLAIMS, "a") is None


async def test_nothing_to_write(store: Store) -> None:
    with pytest.raises(ValueError, match="without changes"):
        await store.commit([])
    assert await store.commit_many([]) == []


async def test_a_base_is_added_to_revisions(etcd: FakeEtcd, clock: FakeClock) -> None:
    etcd.put_now("/base", b"5000")
    etcd.put_now("/x/a", b"\x91\xa11")
    store = Store(etcd, clock)
    await store.load()
    entry = store.get(CLAIMS, "a")
    assert entry is not None
    assert (entry.revision, entry.created, store.revision) == (5003, 5003, 5003)
    revision = await store.commit([Put(CLAIMS, "a", claim("2"))], [Compare(CLAIMS, "a", 5003)])
    assert revision == store.revision == 5004
    entry = store.get(CLAIMS, "a")
    assert entry is not None
    assert (entry.revision, entry.created) == (5004, 5003)
    with pytest.raises(Stale):  # an index from before the restore
        await store.commit([Put(CLAIMS, "a", claim("3"))], [Compare(CLAIMS, "a", 4)])
    with pytest.raises(Stale):
        await store.commit([Put(CLAIMS, "b", claim("3"))], [Compare(CLAIMS, "b", 5000)])
    await store.commit([Delete(CLAIMS, "a")], [Compare(CLAIMS, "a", 5003, by_creation=True)])
    assert await store.commit_many([([Put(CLAIMS, "b", claim())], [Compare(CLAIMS, "b")])]) == [True]
    assert await store.current() == ""
    etcd.break_watches()
    etcd.put_now("/x/c", b"\x91\xa11")
    await clock.advance(1)
    entry = store.get(CLAIMS, "c")
    assert entry is not None and entry.revision == 5007
    etcd.lose_answers = 1
    writing = asyncio.create_task(store.commit([Put(CLAIMS, "d", claim())], [Compare(CLAIMS, "d")]))
    await clock.advance(1)
    assert await writing == 5008
    await store.close()
