"""etcd in memory: the interface of `engine/manager/kv.py`, with its order of events.

`FakeEtcd` is one cluster as one member sees it; `peer()` is another member of the same cluster, for
tests with several stores. A change appears in each watch with the next turn of the event loop.

Faults: `down` makes every request fail as without quorum; `lose_answers` carries out that many
commits without an answer; `lose_requests` drops that many; `break_watches()`; `before_commit` is
called before each commit and may change the state, as another manager would.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence

from engine.manager.kv import (
    ATTEMPT,
    Alarm,
    Batch,
    Compacted,
    DeleteKey,
    EtcdError,
    Gone,
    Guard,
    InDoubt,
    Item,
    LeaseGone,
    Member,
    NoSpace,
    Operation,
    Outcome,
    PutKey,
    Range,
    Status,
)
from tests.support.fakes.clock import FakeClock


class _Lease:
    def __init__(self, seconds: int, ends: float) -> None:
        self.seconds = seconds
        self.ends = ends
        self.keys: set[str] = set()


class Cluster:
    """What the members share."""

    def __init__(self, clock: FakeClock | None) -> None:
        self.clock = clock
        self.revision = 1
        self.compacted = 0
        self.items: dict[str, Item] = {}
        self.history: list[list[Item | Gone]] = []
        """Changes by revision, from 2 on."""
        self.leases: dict[int, _Lease] = {}
        self.numbers = itertools.count(1000)
        self.watches: list[tuple[str, str, asyncio.Queue[Batch | EtcdError]]] = []
        self.members: list[Member] = [Member(1, "node1", "https://10.77.0.1:7946", False)]
        self.leader = 1
        self.term = 2
        self.alarms: list[Alarm] = []

    def time(self) -> float:
        return 0.0 if self.clock is None else self.clock.monotonic()

    def change(self, operations: Sequence[Operation]) -> None:
        """Carry out operations as one revision."""
        keys = [operation.key for operation in operations]
        if len(set(keys)) != len(keys):
            raise EtcdError("etcdserver: duplicate key given in txn request")
        for operation in operations:
            if isinstance(operation, PutKey) and operation.lease and operation.lease not in self.leases:
                raise LeaseGone("etcdserver: requested lease not found")
        revision = self.revision + 1
        changes: list[Item | Gone] = []
        for operation in operations:
            old = self.items.get(operation.key)
            if old is not None and old.lease in self.leases:
                self.leases[old.lease].keys.discard(old.key)
            if isinstance(operation, DeleteKey):
                if old is not None:
                    del self.items[operation.key]
                    changes.append(Gone(operation.key, revision))
                continue
            created = revision if old is None else old.created
            item = Item(operation.key, operation.value, created, revision, operation.lease)
            self.items[item.key] = item
            if item.lease:
                self.leases[item.lease].keys.add(item.key)
            changes.append(item)
        if changes:
            self.revision = revision
            self.history.append(changes)
            for start, end, queue in self.watches:
                if within := [change for change in changes if start <= change.key < end]:
                    queue.put_nowait(Batch(within))

    def expire(self) -> None:
        for number, lease in list(self.leases.items()):
            if lease.ends <= self.time():
                del self.leases[number]
                self.change([DeleteKey(key) for key in sorted(lease.keys)])

    def schedule(self, lease: _Lease) -> None:
        lease.ends = self.time() + lease.seconds
        if self.clock is not None:
            self.clock.call_at(lease.ends, self.expire)


class FakeEtcd:
    def __init__(self, clock: FakeClock | None = None, *, of: Cluster | None = None, member: int = 1) -> None:
        self.cluster = of or Cluster(clock)
        self.member = member
        self.down = False
        self.lose_answers = 0
        self.lose_requests = 0
        self.delay_requests = 0
        """So many commits are given up by their clients, and carried out by `deliver`."""
        self.delayed: list[tuple[Sequence[Guard], Sequence[Operation]]] = []
        self.before_commit: Callable[[], None] | None = None
        self.commits: list[tuple[tuple[Guard, ...], tuple[Operation, ...]]] = []
        """Every commit that was asked for, for tests of how writes are packed."""
        self.closed = False

    def peer(self, member: int = 2) -> FakeEtcd:
        """Another member of the same cluster."""
        if all(known.id != member for known in self.cluster.members):
            self.cluster.members.append(Member(member, f"node{member}", f"https://10.77.0.{member}:7946", False))
        return FakeEtcd(of=self.cluster, member=member)

    async def _answer(self, timeout: float = ATTEMPT) -> None:
        await asyncio.sleep(0)
        if self.down:
            if self.cluster.clock is not None:
                await self.cluster.clock.sleep(timeout)
            raise InDoubt("etcdserver: request timed out")

    # --- keys -------------------------------------------------------------------------------------

    async def range(
        self,
        start: str,
        end: str = "",
        *,
        limit: int = 0,
        revision: int = 0,
        serializable: bool = False,
        keys_only: bool = False,
        timeout: float = ATTEMPT,
    ) -> Range:
        if not serializable:
            await self._answer(timeout)
        cluster = self.cluster
        if revision and revision < cluster.compacted:
            raise Compacted("etcdserver: mvcc: required revision has been compacted")
        items = cluster.items if revision in (0, cluster.revision) else self._at(revision)
        found = [items[key] for key in sorted(items) if (start <= key < end if end else key == start)]
        if keys_only:
            found = [item._replace(value=b"") for item in found]
        return Range(found[:limit] if limit else found, cluster.revision, bool(limit) and len(found) > limit)

    def _at(self, revision: int) -> dict[str, Item]:
        items: dict[str, Item] = {}
        for changes in self.cluster.history[: revision - 1]:
            for change in changes:
                if isinstance(change, Gone):
                    items.pop(change.key, None)
                else:
                    items[change.key] = change
        return items

    async def commit(
        self, guards: Sequence[Guard], operations: Sequence[Operation], *, timeout: float = ATTEMPT
    ) -> Outcome:
        await self._answer(timeout)
        if self.before_commit is not None:
            self.before_commit()
        self.commits.append((tuple(guards), tuple(operations)))
        if self.lose_requests:
            self.lose_requests -= 1
            raise InDoubt("Deadline Exceeded")
        if self.delay_requests:
            self.delay_requests -= 1
            self.delayed.append((guards, operations))
            raise InDoubt("Deadline Exceeded")
        puts = any(isinstance(operation, PutKey) for operation in operations)
        if puts and any(alarm.kind == "nospace" for alarm in self.cluster.alarms):
            raise NoSpace("etcdserver: mvcc: database space exceeded")
        outcome = self._commit(guards, operations)
        if self.lose_answers:
            self.lose_answers -= 1
            raise InDoubt("Deadline Exceeded")
        return outcome

    def deliver(self) -> list[Outcome]:
        """Carry out the requests that were delayed."""
        delayed, self.delayed = self.delayed, []
        return [self._commit(guards, operations) for guards, operations in delayed]

    def _commit(self, guards: Sequence[Guard], operations: Sequence[Operation]) -> Outcome:
        cluster = self.cluster
        failed = []
        for position, guard in enumerate(guards):
            item = cluster.items.get(guard.key)
            actual = 0 if item is None else item.created if guard.by_creation else item.revision
            if actual != guard.revision:
                failed.append(position)
        if failed:
            return Outcome(False, cluster.revision, tuple(failed))
        cluster.change(operations)
        return Outcome(True, cluster.revision)

    def put_now(self, key: str, value: bytes) -> int:
        """Write as another manager would, at once. Returns the revision."""
        self.cluster.change([PutKey(key, value)])
        return self.cluster.revision

    def delete_now(self, key: str) -> int:
        self.cluster.change([DeleteKey(key)])
        return self.cluster.revision

    async def watch(self, start: str, end: str, revision: int) -> AsyncIterator[Batch]:
        await asyncio.sleep(0)
        cluster = self.cluster
        if self.down:
            raise InDoubt("the watch is broken")
        if revision and revision <= cluster.compacted:
            raise Compacted("etcdserver: mvcc: required revision has been compacted")
        queue: asyncio.Queue[Batch | EtcdError] = asyncio.Queue()
        past = cluster.history[max(0, revision - 2) :] if revision else []
        row = (start, end, queue)
        cluster.watches.append(row)
        try:
            yield Batch([])
            for changes in past:
                if within := [change for change in changes if start <= change.key < end]:
                    yield Batch(within)
            while True:
                batch = await queue.get()
                if isinstance(batch, EtcdError):
                    raise batch
                yield batch
        finally:
            cluster.watches.remove(row)

    def break_watches(self) -> None:
        for _, _, queue in self.cluster.watches:
            queue.put_nowait(InDoubt("the watch is broken"))

    # --- leases -----------------------------------------------------------------------------------

    async def grant(self, seconds: int) -> int:
        await self._answer()
        number = next(self.cluster.numbers)
        lease = self.cluster.leases[number] = _Lease(seconds, 0)
        self.cluster.schedule(lease)
        return number

    async def keep_alive(self, lease: int) -> None:
        await self._answer()
        found = self.cluster.leases.get(lease)
        if found is None:
            raise LeaseGone("etcdserver: requested lease not found")
        self.cluster.schedule(found)

    async def revoke(self, lease: int) -> None:
        await self._answer()
        found = self.cluster.leases.pop(lease, None)
        if found is None:
            raise LeaseGone("etcdserver: requested lease not found")
        self.cluster.change([DeleteKey(key) for key in sorted(found.keys)])

    # --- members ----------------------------------------------------------------------------------

    async def members(self) -> list[Member]:
        return list(self.cluster.members)

    async def add_learner(self, peer_url: str) -> Member:
        await self._answer()
        if any(member.peer_url == peer_url for member in self.cluster.members):
            raise EtcdError("etcdserver: Peer URLs already exists")
        if any(member.learner for member in self.cluster.members):
            raise EtcdError("etcdserver: too many learner members in cluster")
        member = Member(next(self.cluster.numbers), "", peer_url, True)
        self.cluster.members.append(member)
        return member

    def _member(self, number: int) -> Member:
        for member in self.cluster.members:
            if member.id == number:
                return member
        raise EtcdError("etcdserver: member not found")

    def _change_member(self, old: Member, new: Member | None) -> None:
        position = self.cluster.members.index(old)
        self.cluster.members[position : position + 1] = [] if new is None else [new]

    async def promote(self, member: int) -> None:
        await self._answer()
        found = self._member(member)
        if not found.learner:
            raise EtcdError("etcdserver: can only promote a learner member")
        self._change_member(found, found._replace(learner=False))

    async def remove_member(self, member: int) -> None:
        await self._answer()
        self._change_member(self._member(member), None)

    async def update_member(self, member: int, peer_url: str) -> None:
        await self._answer()
        found = self._member(member)
        self._change_member(found, found._replace(peer_url=peer_url))

    async def status(self) -> Status:
        await asyncio.sleep(0)
        cluster = self.cluster
        leader = 0 if self.down else cluster.leader
        learner = any(member.id == self.member and member.learner for member in cluster.members)
        return Status(self.member, leader, cluster.term, cluster.revision, "3.4.23", 20480, 16384, learner, 10)

    async def move_leader(self, member: int) -> None:
        await self._answer()
        if self.cluster.leader != self.member:
            raise EtcdError("etcdserver: not leader")
        self.elect(self._member(member).id)

    def elect(self, member: int) -> None:
        """Make this member the raft leader of a new term."""
        self.cluster.leader = member
        self.cluster.term += 1

    async def compact(self, revision: int) -> None:
        await self._answer()
        if revision <= self.cluster.compacted:
            raise Compacted("etcdserver: mvcc: required revision has been compacted")
        if revision > self.cluster.revision:
            raise EtcdError("etcdserver: mvcc: required revision is a future revision")
        self.cluster.compacted = revision

    async def defragment(self, *, timeout: float = 60.0) -> None:
        await asyncio.sleep(0)

    async def alarms(self) -> list[Alarm]:
        await self._answer()
        return list(self.cluster.alarms)

    async def disarm(self, alarm: Alarm) -> None:
        await self._answer()
        self.cluster.alarms = [each for each in self.cluster.alarms if each != alarm]

    async def close(self) -> None:
        self.closed = True
