"""Which managers are members of etcd: learners added and promoted, members removed.

etcd carries out a change when a quorum of the voters before it agrees, and does not look at the
quorum after it. So every change is guarded here, and the changes of all managers are made one after
another, under a lock in the store that ends with its holder.

A member is found by its name, which is its node's id. One that has not started yet has no name: the
claim `member/<node>` says whose it is, with the time at which its node was last heard of.

Threads: the event loop's. A change that has begun runs to its end although its node disconnects, as
         a node does whose member is removed.
Raises:  WrongState when a guard refuses, Unavailable when the same request may succeed later,
         ServerError from etcd.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator, Iterable
from typing import Any, NamedTuple

from engine.errors import Conflict, InvalidParameter, NotFound, ServerError, Unavailable, WrongState
from engine.manager import records
from engine.manager.kv import Etcd, EtcdError, InDoubt, LeaseGone, Member
from engine.manager.records import Claim
from engine.manager.store import Compare, Delete, Put, Stale, Store
from engine.swarm_session.clock import SECOND, Clock
from engine.system.tasks import spawn
from engine.system.threads import whole

LOCK = "lock/members"
LOCK_LIFE = 10
"""Seconds after which the lock of a manager that died is gone."""
LOCK_WAIT = 10.0
STUCK = 60 * SECOND
"""A learner whose node has not been heard of for this long is removed."""
HEARD = 10 * SECOND
"""How often the time in the claim of a learner is renewed."""

_URL = re.compile(r"https://(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9.-]{1,253}):[0-9]{1,5}", re.ASCII)


class Added(NamedTuple):
    member: int
    initial_cluster: str


class Members:
    """The members of etcd, as one manager sees and changes them. `node` is this manager's."""

    def __init__(self, store: Store, etcd: Etcd, clock: Clock, node: str) -> None:
        self._store = store
        self._etcd = etcd
        self._clock = clock
        self._node = node

    async def all(self) -> list[Member]:
        return await self._etcd.members()

    def owner(self, member: Member) -> str:
        """The node whose member it is; "" when that is unknown."""
        if member.name:
            return member.name
        for key, entry in self._store.all(records.CLAIMS).items():
            if key.startswith("member/") and _claimed(entry.record)[0] == member.id:
                return key.removeprefix("member/")
        return ""

    async def of(self, node: str) -> Member | None:
        """The member of a node; None when it has none."""
        return self._of(node, await self.all())

    def _of(self, node: str, members: Iterable[Member]) -> Member | None:
        return next((member for member in members if self.owner(member) == node), None)

    # --- joining ----------------------------------------------------------------------------------

    @whole
    async def add(self, node: str, peer_url: str) -> Added:
        """Add a learner for `node`. A member that it had before is removed.

        Raises InvalidParameter for a URL that is none, Conflict when it is another node's,
        Unavailable while another node joins.
        """
        if not _URL.fullmatch(peer_url) or not 0 < int(peer_url.rpartition(":")[2]) < 65536:
            raise InvalidParameter(f"peer URL: {peer_url[:300]}: not of the form https://host:port")
        async with self.exclusive():
            members = await self.all()
            for member in members:
                owner = self.owner(member)
                if owner == node:
                    await self._remove(member, members, force=False)
                elif member.peer_url == peer_url:
                    if owner and self._store.record(records.NODES, owner) is not None:
                        raise Conflict(f"address {peer_url} is in use by node {owner}")
                    await self._remove(member, members, force=False)
                elif member.learner:
                    await self._make_room(member, members)
            voters = [member for member in await self.all() if not member.learner]
            self._guard(voters, "add a manager")
            try:
                added = await self._etcd.add_learner(peer_url)
            except EtcdError as error:
                raise Unavailable(f"the manager cannot be added now: {error.message}") from error
            await self._hear(node, added.id)
            names = {member.id: self.owner(member) or f"{member.id:x}" for member in (*voters, added)}
            names[added.id] = node
            urls = {member.id: member.peer_url for member in voters} | {added.id: peer_url}
            return Added(added.id, ",".join(f"{names[member]}={url}" for member, url in urls.items()))

    async def _make_room(self, learner: Member, members: list[Member]) -> None:
        """etcd has one learner at a time. One whose node is heard of no more makes room."""
        if not self.stuck(learner):
            raise Unavailable(f"node {self.owner(learner) or 'unknown'} is becoming a manager now: one at a time")
        await self._remove(learner, members, force=False)

    @whole
    async def promote(self, node: str, member_id: int) -> None:
        """Let a node's learner vote. Raises Unavailable while it is behind, NotFound when it was
        removed.
        """
        member = next((each for each in await self.all() if each.id == member_id), None)
        if member is None or self.owner(member) != node:
            raise NotFound(f"node {node} has no member {member_id:x}: it was removed")
        if not member.learner:
            await self._forget(node)
            return
        try:
            await self._etcd.promote(member_id)
        except EtcdError as error:
            await self._hear(node, member_id)
            raise Unavailable(f"the member of node {node} cannot vote yet: {error.message}") from error
        await self._forget(node)

    def stuck(self, learner: Member) -> bool:
        """Returns True if the learner's node has not asked for it for long. One without a claim was
        added by a manager that died before it wrote the claim.
        """
        owner = self.owner(learner)
        claim = self._store.record(records.CLAIMS, f"member/{owner}") if owner else None
        if claim is None:
            return not owner
        return self._clock.now() - _claimed(claim)[1] > STUCK

    async def _hear(self, node: str, member: int) -> None:
        key, now = f"member/{node}", self._clock.now()
        claim = self._store.record(records.CLAIMS, key)
        if claim is None or _claimed(claim)[0] != member or now - _claimed(claim)[1] > HEARD:
            await self._store.commit([Put(records.CLAIMS, key, Claim(f"{member:x} {now}"))])

    async def _forget(self, node: str, *kinds: records.Kind[Any]) -> None:
        """Delete the claim of a node's learner, and the node's records of these kinds."""
        keys = [(records.CLAIMS, f"member/{node}"), *((kind, node) for kind in kinds)]
        changes = [Delete(kind, key) for kind, key in keys if self._store.record(kind, key) is not None]
        if changes:
            await self._store.commit(changes)

    # --- leaving ----------------------------------------------------------------------------------

    @whole
    async def remove(self, node: str, *, force: bool = False) -> None:
        """Remove the member of a node; nothing happens when it has none.

        Raises WrongState when too few voters would be left alive, unless `force`; Unavailable for
        the own one: its etcd ends when it is removed, so another manager must see it through.
        """
        async with self.exclusive():
            members = await self.all()
            member = self._of(node, members)
            if member is not None:
                await self._remove(member, members, force=force)

    @whole
    async def remove_unnamed(self, member_id: int) -> None:
        """Remove a learner that has not started, and of which no node is known."""
        async with self.exclusive():
            members = await self.all()
            for member in members:
                if member.id == member_id and member.learner and not self.owner(member):
                    await self._remove(member, members, force=False)

    async def _remove(self, member: Member, members: list[Member], *, force: bool) -> None:
        voters = [each for each in members if not each.learner]
        rest = [each for each in voters if each.id != member.id]
        owner = self.owner(member)
        if not member.learner:
            if not rest:
                raise WrongState(f"node {owner} is the last manager of the swarm")
            if not force:
                self._guard(rest, f"remove manager {owner}")
            if owner == self._node:
                await self.step_aside()
                raise Unavailable(f"manager {owner} does not remove itself: another one does")
        await self._etcd.remove_member(member.id)
        claim = Delete(records.CLAIMS, f"member/{owner}")
        gone = [Delete(records.MANAGERS, owner), claim]
        if found := [each for each in gone if self._store.get(each.kind, each.key) is not None]:
            await self._store.commit(found)

    async def step_aside(self) -> None:
        """Let another manager lead before this one goes.

        If its member is the raft leader, another voter becomes that: of a leader that is removed or
        killed, etcd elects another one in a second or two. If not, it may lead all the same, since
        the raft leader's process had hung or was away. No term of raft ends then, so it gives up
        the key.
        """
        status = await self._etcd.status()
        if status.leader == status.member:
            rest = [each for each in await self.all() if each.id != status.member and not each.learner]
            if healthy := [each for each in rest if self.alive(each)] or rest:
                await self._etcd.move_leader(healthy[0].id)
            return
        key = self._store.get(records.LEADER)
        if key is not None and key.record.node == self._node:
            with contextlib.suppress(Stale):
                await self._store.commit([Delete(records.LEADER, "")], [Compare(records.LEADER, "", key.revision)])

    def alive(self, member: Member) -> bool:
        """Returns True if the manager of this member has shown itself: its presence is a lease."""
        owner = self.owner(member)
        return owner == self._node or self._store.record(records.MANAGERS, owner) is not None

    async def why_not(self, node: str) -> str:
        """Why the member of a node cannot be removed now; "" when it can be."""
        members = await self.all()
        member = self._of(node, members)
        if member is None or member.learner:
            return ""
        rest = [each for each in members if not each.learner and each.id != member.id]
        return self._shortage(rest) if rest else f"node {node} is the last manager"

    def _guard(self, rest: list[Member], what: str) -> None:
        """Raises WrongState unless the voters alive are a quorum of `rest`."""
        if shortage := self._shortage(rest):
            raise WrongState(f"cannot {what}: it would result in a loss of quorum: {shortage}")

    def _shortage(self, rest: list[Member]) -> str:
        """Why these voters have no quorum; "" when they have."""
        dead = sorted(self.owner(each) for each in rest if not self.alive(each))
        alive = len(rest) - len(dead)
        if alive >= quorum(len(rest)):
            return ""
        return f"of {len(rest)} managers {alive} are reachable, {', '.join(dead)} not"

    # --- the lock ---------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        """Hold the lock of all changes of members. Raises Unavailable when another manager holds it
        for too long.
        """
        lease = await self._lock()
        keeping = spawn(self._keep(lease), "manager: lock of the members")
        try:
            yield
        finally:
            keeping.cancel()
            with contextlib.suppress(ServerError):
                await self._etcd.revoke(lease)

    async def _lock(self) -> int:
        """Take the lock. Returns the lease that holds it."""
        ends = self._clock.monotonic() + LOCK_WAIT
        while True:
            lease = await self._etcd.grant(LOCK_LIFE)
            try:
                lock = Put(records.CLAIMS, LOCK, Claim(self._node), lease)
                await self._store.commit([lock], [Compare(records.CLAIMS, LOCK)])
                return lease
            except Stale:
                await self._etcd.revoke(lease)
            while (holder := self._store.record(records.CLAIMS, LOCK)) is not None:
                if self._clock.monotonic() > ends:
                    raise Unavailable(f"manager {holder.holder} changes the set of managers: try again")
                await self._clock.sleep(0.1)
            await self._clock.sleep(0.02)

    async def _keep(self, lease: int) -> None:
        """Keep the lock as long as it is held: a change may take longer than its lease lives."""
        with contextlib.suppress(LeaseGone):
            while True:
                await self._clock.sleep(LOCK_LIFE / 4)
                with contextlib.suppress(InDoubt):
                    await self._etcd.keep_alive(lease)


def quorum(voters: int) -> int:
    return voters // 2 + 1


def _claimed(claim: Claim) -> tuple[int, int]:
    """Id of the member, and when its node was heard of."""
    member, _, heard = claim.holder.partition(" ")
    try:
        return int(member, 16), int(heard)
    except ValueError:
        return 0, 0
