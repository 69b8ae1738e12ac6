"""What the manager asks of etcd, in plain types: keys, transactions, watches, leases, members.

`etcd.py` speaks it to a real member by gRPC, and the fake of the tests keeps it in memory. The
contract tests run on both.

Not here: records (`records.py`), the cache and retries (`store.py`), the child process
(`member.py`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple, Protocol

from engine.errors import ServerError

ATTEMPT = 1.0
"""Seconds of one attempt. A request that is in flight when the raft leader dies hangs for 7 s in
etcd, though the next leader is there after 1 to 2 s: a short attempt and another one are faster.
"""

FIRST, LAST = "/", "0"
"""The range that holds every record."""


class EtcdError(ServerError):
    """etcd refused, or failed. Nothing was changed."""


class InDoubt(EtcdError):
    """No answer came in time: the request may have been carried out, or may yet be."""


class Compacted(EtcdError):
    """The revision that was asked for has been compacted."""


class NoSpace(EtcdError):
    """The database has reached its quota: the alarm must be disarmed after a compaction."""


class LeaseGone(EtcdError):
    """The lease has expired, or was revoked."""


class Item(NamedTuple):
    """One key."""

    key: str
    value: bytes
    created: int
    revision: int
    """ModRevision."""
    lease: int = 0


class Range(NamedTuple):
    items: list[Item]
    revision: int
    """Of the whole store, when it was read."""
    more: bool


class PutKey(NamedTuple):
    key: str
    value: bytes
    lease: int = 0


class DeleteKey(NamedTuple):
    key: str


Operation = PutKey | DeleteKey


class Guard(NamedTuple):
    """The key's ModRevision (or CreateRevision) is this; 0 for an absent key."""

    key: str
    revision: int
    by_creation: bool = False


class Outcome(NamedTuple):
    done: bool
    revision: int
    """Of the whole store: of this transaction, when it changed anything."""
    failed: tuple[int, ...] = ()
    """Positions of the guards that did not hold."""


class Batch(NamedTuple):
    """What a watch delivers: whole revisions, in their order."""

    puts_and_deletes: list[Item | Gone]


class Gone(NamedTuple):
    """A deleted key."""

    key: str
    revision: int


class Member(NamedTuple):
    id: int
    name: str
    """"" until the member has started for the first time."""
    peer_url: str
    learner: bool


class Status(NamedTuple):
    """Of the member that is asked."""

    member: int
    leader: int
    """Id of the raft leader; 0 when there is none."""
    term: int
    revision: int
    version: str
    size: int
    """Bytes of the database file."""
    size_in_use: int
    learner: bool
    applied: int = 0
    """Raft index that it has applied."""
    errors: tuple[str, ...] = ()


class Alarm(NamedTuple):
    member: int
    kind: str
    """nospace or corrupt."""


class Etcd(Protocol):
    """One member. All raise `InDoubt` when no answer comes within the attempt, and `EtcdError`."""

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
        """The key `start`, or the keys from `start` to before `end`, in the order of their names.
        Linearizable, unless `serializable`.

        Raises `Compacted`.
        """

    async def commit(
        self, guards: Sequence[Guard], operations: Sequence[Operation], *, timeout: float = ATTEMPT
    ) -> Outcome:
        """One transaction: all `operations` when all `guards` hold, otherwise nothing. No key may
        be written twice.

        Raises `NoSpace`, `LeaseGone`.
        """

    def watch(self, start: str, end: str, revision: int) -> AsyncIterator[Batch]:
        """Every change from `revision` on. Yields an empty batch when the watch stands.

        Raises `Compacted`, and `InDoubt` when the stream breaks.
        """

    async def grant(self, seconds: int) -> int:
        """A lease; returns its id."""

    async def keep_alive(self, lease: int) -> None:
        """Let the lease live for its whole time again. Raises `LeaseGone`."""

    async def revoke(self, lease: int) -> None: ...

    async def members(self) -> list[Member]: ...

    async def add_learner(self, peer_url: str) -> Member: ...

    async def promote(self, member: int) -> None:
        """Let a learner vote. Raises `EtcdError` while it is behind."""

    async def remove_member(self, member: int) -> None: ...

    async def update_member(self, member: int, peer_url: str) -> None: ...

    async def status(self) -> Status: ...

    async def move_leader(self, member: int) -> None:
        """Only at the raft leader."""

    async def compact(self, revision: int) -> None: ...

    async def defragment(self, *, timeout: float = 60.0) -> None: ...

    async def alarms(self) -> list[Alarm]: ...

    async def disarm(self, alarm: Alarm) -> None: ...

    async def close(self) -> None: ...
