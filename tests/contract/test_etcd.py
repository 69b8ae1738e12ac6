"""The suite of the interface of etcd (engine/manager/kv.py), run on a real member and on the fake
of the unit tests; and the store over both.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from engine.manager import etcd as etcd_client
from engine.manager.kv import (
    FIRST,
    LAST,
    Batch,
    Compacted,
    DeleteKey,
    Etcd,
    EtcdError,
    Gone,
    Guard,
    InDoubt,
    Item,
    LeaseGone,
    PutKey,
)
from engine.manager.records import CLAIMS, TASKS, Claim, Task
from engine.manager.store import Compare, Put, Stale, Store
from engine.swarm_session.clock import SystemClock
from tests.support import PATIENCE
from tests.support.fakes.etcd import FakeEtcd
from tests.support.swarm.members import Swarm

Run = Callable[[Callable[[Etcd], Awaitable[None]]], None]


@pytest.fixture(params=["fake", "real"])
def run(request: pytest.FixtureRequest) -> Run:
    async def with_fake(work: Callable[[Etcd], Awaitable[None]]) -> None:
        await work(FakeEtcd())

    async def with_real(work: Callable[[Etcd], Awaitable[None]]) -> None:
        swarm = Swarm()
        try:
            member = swarm.member("n1")
            await work(await member.start())
        finally:
            await swarm.close()

    whole = with_fake if request.param == "fake" else with_real
    return lambda work: asyncio.run(asyncio.wait_for(whole(work), 50))


async def until(condition: Callable[..., object], *arguments: object) -> None:
    async with asyncio.timeout(20 * PATIENCE):
        while not condition(*arguments):  # noqa: ASYNC110 - of a process
            await asyncio.sleep(0.01)


async def changes(watch: AsyncIterator[Batch], count: int) -> list[Item | Gone]:
    """The next `count` changes of a watch."""
    found: list[Item | Gone] = []
    async with asyncio.timeout(5 * PATIENCE):
        while len(found) < count:
            found += (await anext(watch)).puts_and_deletes
    return found


def test_keys(run: Run) -> None:
    async def work(etcd: Etcd) -> None:
        first = await etcd.commit([], [PutKey("/a", b"1"), PutKey("/b", b"2"), PutKey("/c", b"\0\xff")])
        assert first.done
        second = await etcd.commit([], [PutKey("/a", b"3"), DeleteKey("/b"), DeleteKey("/absent")])
        assert second.revision == first.revision + 1
        found = await etcd.range(FIRST, LAST)
        assert found.items == [
            Item("/a", b"3", first.revision, second.revision),
            Item("/c", b"\0\xff", first.revision, first.revision),
        ]
        assert (found.revision, found.more) == (second.revision, False)
        assert (await etcd.range("/a")).items == found.items[:1]
        assert (await etcd.range("/a", keys_only=True)).items[0].value == b""
        assert (await etcd.range("/b", serializable=True)).items == []
        page = await etcd.range(FIRST, LAST, limit=2, revision=first.revision)
        assert [(item.key, item.value) for item in page.items] == [("/a", b"1"), ("/b", b"2")]
        assert page.more
        rest = await etcd.range(page.items[-1].key + "\0", LAST, limit=2, revision=first.revision)
        assert [item.key for item in rest.items] == ["/c"]
        assert not rest.more
        nothing = await etcd.commit([], [DeleteKey("/absent")])
        assert (nothing.done, nothing.revision) == (True, second.revision)

    run(work)


def test_guards(run: Run) -> None:
    async def work(etcd: Etcd) -> None:
        made = (await etcd.commit([Guard("/a", 0)], [PutKey("/a", b"1")])).revision
        changed = (await etcd.commit([Guard("/a", made)], [PutKey("/a", b"2")])).revision
        right = [Guard("/a", changed), Guard("/a", made, by_creation=True), Guard("/none", 0, by_creation=True)]
        assert (await etcd.commit(right, [PutKey("/b", b"")])).done
        wrong = [Guard("/a", changed), Guard("/a", made), Guard("/a", 0, by_creation=True), Guard("/none", 7)]
        refused = await etcd.commit(wrong, [PutKey("/a", b"3"), PutKey("/d", b"")])
        assert (refused.done, refused.failed) == (False, (1, 2, 3))
        assert refused.revision == changed + 1
        assert [item.key for item in (await etcd.range(FIRST, LAST)).items] == ["/a", "/b"]

    run(work)


def test_a_key_is_written_once_in_a_transaction(run: Run) -> None:
    async def work(etcd: Etcd) -> None:
        with pytest.raises(EtcdError, match="duplicate key"):
            await etcd.commit([], [PutKey("/a", b"1"), PutKey("/a", b"2")])
        assert (await etcd.range(FIRST, LAST)).items == []

    run(work)


def test_watch(run: Run) -> None:
    async def work(etcd: Etcd) -> None:
        first = (await etcd.commit([], [PutKey("/a", b"1")])).revision
        async with contextlib.aclosing(etcd.watch(FIRST, LAST, first)) as watch:  # type: ignore[type-var]
            assert await changes(watch, 1) == [Item("/a", b"1", first, first)]
            second = (await etcd.commit([], [PutKey("/a", b"2"), PutKey("/b", b"")])).revision
            await etcd.commit([], [PutKey("0outside", b"")])
            third = (await etcd.commit([], [DeleteKey("/a")])).revision
            assert await changes(watch, 3) == [
                Item("/a", b"2", first, second),
                Item("/b", b"", second, second),
                Gone("/a", third),
            ]

    run(work)


def test_watch_from_a_later_revision(run: Run) -> None:
    async def work(etcd: Etcd) -> None:
        first = (await etcd.commit([], [PutKey("/a", b"1")])).revision
        async with contextlib.aclosing(etcd.watch(FIRST, LAST, first + 1)) as watch:  # type: ignore[type-var]
            assert (await anext(watch)).puts_and_deletes == []
            await etcd.commit([], [PutKey("/a", b"2")])
            assert [change.revision for change in await changes(watch, 1)] == [first + 1]

    run(work)


def test_compaction(run: Run) -> None:
    async def work(etcd: Etcd) -> None:
        for number in range(5):
            last = (await etcd.commit([], [PutKey("/a", b"%d" % number)])).revision
        await etcd.compact(last - 1)
        with pytest.raises(Compacted):
            await etcd.range("/a", revision=last - 2)
        assert (await etcd.range("/a", revision=last - 1)).items[0].value == b"3"
        with pytest.raises(Compacted):
            await changes(etcd.watch(FIRST, LAST, last - 2), 1)
        with pytest.raises(Compacted):
            await etcd.compact(last - 2)
        with pytest.raises(EtcdError, match="future"):
            await etcd.compact(last + 100)
        await etcd.defragment()
        assert (await etcd.range("/a")).items[0].value == b"4"

    run(work)


def test_leases(run: Run) -> None:
    async def work(etcd: Etcd) -> None:
        lease = await etcd.grant(60)
        await etcd.commit([], [PutKey("/a", b"", lease), PutKey("/b", b"", lease)])
        assert [item.lease for item in (await etcd.range(FIRST, LAST)).items] == [lease, lease]
        await etcd.keep_alive(lease)
        await etcd.commit([], [PutKey("/b", b"")])  # not under the lease any more
        await etcd.revoke(lease)
        assert [(item.key, item.lease) for item in (await etcd.range(FIRST, LAST)).items] == [("/b", 0)]
        with pytest.raises(LeaseGone):
            await etcd.keep_alive(lease)
        with pytest.raises(LeaseGone):
            await etcd.revoke(lease)
        with pytest.raises(LeaseGone):
            await etcd.commit([], [PutKey("/c", b"", lease)])

    run(work)


def test_members(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    # a disk may be busy for seconds
    monkeypatch.setattr(etcd_client, "CHANGE", etcd_client.CHANGE * PATIENCE)

    async def work(etcd: Etcd) -> None:
        status = await etcd.status()
        members = await etcd.members()
        assert [(member.id, member.learner) for member in members] == [(status.member, False)]
        assert status.leader == status.member
        assert not status.learner and status.term >= 1 and status.version.startswith("3.")
        learner = await etcd.add_learner("https://127.0.0.1:1")
        assert (learner.name, learner.peer_url, learner.learner) == ("", "https://127.0.0.1:1", True)
        assert sorted(await etcd.members()) == sorted([*members, learner])
        with pytest.raises(EtcdError):
            await etcd.add_learner("https://127.0.0.1:1")
        with pytest.raises(EtcdError, match="learner"):
            await etcd.add_learner("https://127.0.0.1:2")
        await etcd.update_member(learner.id, "https://127.0.0.1:3")
        assert {member.peer_url for member in await etcd.members()} >= {"https://127.0.0.1:3"}
        await etcd.remove_member(learner.id)
        assert await etcd.members() == members
        with pytest.raises(EtcdError, match="not found"):
            await etcd.remove_member(learner.id)
        assert await etcd.alarms() == []

    run(work)


def test_the_store(run: Run) -> None:
    async def work(etcd: Etcd) -> None:
        store, other = Store(etcd, SystemClock()), Store(etcd, SystemClock())
        await store.load()
        await other.load()
        revision = await store.commit([Put(CLAIMS, "service/web", Claim("a"))], [Compare(CLAIMS, "service/web")])
        assert await other.current() == ""
        assert other.get(CLAIMS, "service/web") == store.get(CLAIMS, "service/web")
        with pytest.raises(Stale):
            await other.commit([Put(CLAIMS, "service/web", Claim("b"))], [Compare(CLAIMS, "service/web")])
        await other.commit([Put(CLAIMS, "service/web", Claim("b"))], [Compare(CLAIMS, "service/web", revision)])
        groups = [([Put(TASKS, f"t{n}", Task(service="s", version=1))], [Compare(TASKS, f"t{n}")]) for n in range(3000)]
        assert all(await store.commit_many(groups))
        assert not any(await store.commit_many(groups))
        await other.current()
        assert len(other.all(TASKS)) == 3000 == len(other.tasks_of("s"))
        late = Store(etcd, SystemClock())
        await late.load()
        assert late.all(TASKS) == store.all(TASKS)
        assert late.revision == store.revision
        for each in (store, other, late):
            await each.close()

    run(work)


def test_the_store_after_a_compaction(run: Run) -> None:
    """A watch that starts below the compacted revision is refused, and the cache is loaded
    again.
    """

    async def work(etcd: Etcd) -> None:
        store = Store(etcd, SystemClock())
        await store.load()
        await store.commit([Put(CLAIMS, "a", Claim("1")), Put(CLAIMS, "b", Claim("1"))])
        behind = store.revision
        await store.close()
        for number in range(5):
            await etcd.commit([], [PutKey("/x/a", b"\x91\xa1%d" % number), DeleteKey("/x/b")])
        await etcd.compact((await etcd.range("/x/a")).revision)
        assert store.revision == behind
        await store.load()
        assert store.record(CLAIMS, "a") == Claim("4")
        assert store.get(CLAIMS, "b") is None
        await store.commit([Put(CLAIMS, "c", Claim("1"))])
        await store.close()

    run(work)


def test_a_closed_client() -> None:
    """Requests under way, streams and later requests raise InDoubt."""

    async def work() -> None:
        swarm = Swarm()
        try:
            member = swarm.member("n1")
            etcd = await member.start()
            watch = etcd.watch(FIRST, LAST, 1)
            await anext(watch)
            watching = asyncio.ensure_future(anext(watch))
            os.kill(member.pid, signal.SIGSTOP)
            await asyncio.sleep(0.2)
            asking = asyncio.ensure_future(etcd.range("/a", timeout=10 * PATIENCE))
            await asyncio.sleep(0.2)
            await etcd.close()
            later = (
                asyncio.ensure_future(etcd.range("/a")),
                asyncio.ensure_future(etcd.keep_alive(1)),
                asyncio.ensure_future(anext(etcd.watch(FIRST, LAST, 1))),
            )
            for waiting in (watching, asking, *later):
                with pytest.raises(InDoubt):
                    async with asyncio.timeout(5 * PATIENCE):
                        await waiting
        finally:
            os.kill(member.pid, signal.SIGCONT)
            await swarm.close()

    asyncio.run(work())


def test_a_member_that_is_killed_and_started_again() -> None:
    """The same client goes on: nothing that was written is lost, no change is watched twice, leases
    live, and what was under way is in doubt.
    """

    async def work() -> None:
        swarm = Swarm()
        try:
            member = swarm.member("n1")
            etcd = await member.start()
            lease = await etcd.grant(60)
            kept = (await etcd.commit([], [PutKey("/leased", b"", lease)])).revision
            watched: list[Item | Gone] = []
            written: dict[str, int] = {}
            doubtful: set[str] = set()

            async def watch() -> None:
                revision = kept + 1
                while True:
                    try:
                        async for batch in etcd.watch(FIRST, LAST, revision):
                            watched.extend(batch.puts_and_deletes)
                            if batch.puts_and_deletes:
                                revision = batch.puts_and_deletes[-1].revision + 1
                    except InDoubt:
                        await asyncio.sleep(0.02)

            async def write() -> None:
                for number in range(10**6):
                    key = f"/k{number:06}"
                    try:
                        written[key] = (await etcd.commit([Guard(key, 0)], [PutKey(key, b"x")])).revision
                    except InDoubt:
                        doubtful.add(key)
                        await asyncio.sleep(0.02)

            def have_written(count: int) -> bool:
                return len(written) > count

            def runs_again(before: int) -> bool:
                return member.pid not in (0, before)

            working = [asyncio.ensure_future(watch()), asyncio.ensure_future(write())]
            for kills in range(1, 5):
                await until(have_written, 20 * kills)
                if kills < 4:
                    killed = member.pid
                    os.kill(killed, signal.SIGKILL)
                    await until(runs_again, killed)
            working[1].cancel()
            last = (await etcd.commit([], [PutKey("/last", b"")])).revision
            await until(lambda: watched and watched[-1].revision >= last)
            working[0].cancel()
            await etcd.keep_alive(lease)
            found = {item.key: item.revision for item in (await etcd.range("/k", "/l")).items}
            assert doubtful, "no request was under way"
            assert written.items() <= found.items()
            assert found.keys() - written.keys() <= doubtful | {max(found)}
            assert [change.revision for change in watched] == list(range(kept + 1, last + 1))
            assert {change.key for change in watched} == {*found, "/last"}
        finally:
            await swarm.close()

    asyncio.run(asyncio.wait_for(work(), 100 * PATIENCE))
