"""The records of the swarm: a cache of all of them, and transactions.

One cache per manager. It is loaded at one revision and then follows one watch, so that it is always
a state that etcd had, never a mixture. Every write is a transaction of etcd with comparisons, from
any manager.

Revisions only grow, also when a backup is restored into a new etcd, whose own revisions begin at 1
again: the key `/base` has what is added to them. Everything outside this module sees the sums.

A write whose answer is missing is tried again, with the same comparisons, in a new turn
(`turns.py`): an earlier attempt is never carried out after that. Whether it was carried out before
is seen in the cache: the watch delivers every write, and so also the bytes of that attempt. So the
first record that a transaction puts is one that no other transaction puts with the same bytes.

Owns:    the cache, its indexes, the task that follows the watch.
Threads: the event loop's. A mapping or set that is returned is the cache's own: it changes with the
         next event, so copy it before an await.
Raises:  `Stale` and `Fenced` when a comparison fails; ServerError when etcd does not carry out a
         write in time.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from typing import Any, Generic, NamedTuple, TypeVar, cast

import msgspec

from engine.errors import ServerError, WrongState
from engine.manager.kv import (
    FIRST,
    LAST,
    Compacted,
    DeleteKey,
    Etcd,
    EtcdError,
    Gone,
    Guard,
    InDoubt,
    Item,
    NoSpace,
    PutKey,
)
from engine.manager.kv import Operation as KeyOperation
from engine.manager.records import KINDS, LEADER, TASKS, Kind, Task, encode, kind_of
from engine.manager.turns import Turns
from engine.swarm_session.clock import SECOND, Clock
from engine.system.reconcile import first_of
from engine.system.tasks import spawn

R = TypeVar("R", bound=msgspec.Struct)
C = TypeVar("C", bound=Item | Gone)

PAGE = 1000
"""Keys of one range while loading: 6 ms are the most that decoding may take at once."""
READ = 5.0
"""Seconds of one range of `PAGE` keys."""
LIMIT = 18.0
"""Seconds until a write is given up. To count the managers for its message takes up to 2 s more."""
RETRY = 0.1
"""Seconds between attempts."""
OPERATIONS = 1024
"""Changes of one transaction of `commit_many`; comparisons are limited to twice as many."""
SIZE = 1 << 20
"""Bytes of one transaction of `commit_many`."""
IN_FLIGHT = 4
"""Transactions of one `commit_many` at a time."""
SLICE = 0.005
"""Seconds of events after which the loop serves others."""

BASE = "/base"
"""Key of the number that is added to etcd's revisions, in decimal digits. Absent: 0."""

_log = logging.getLogger(__name__)


class Entry(msgspec.Struct, Generic[R], frozen=True, gc=False):
    """A record in the cache."""

    key: str
    record: R
    revision: int
    """ModRevision."""
    created: int
    """CreateRevision."""
    lease: int = 0


class Event(NamedTuple):
    """A record was put or deleted. `old` is what the cache had, `new` is None after a deletion."""

    kind: Kind[Any]
    key: str
    old: Entry[Any] | None
    new: Entry[Any] | None


class Put(NamedTuple):
    kind: Kind[Any]
    key: str
    record: msgspec.Struct
    lease: int = 0


class Delete(NamedTuple):
    kind: Kind[Any]
    key: str


Change = Put | Delete


class Compare(NamedTuple):
    """The record's ModRevision is `revision`, or its CreateRevision is; 0 for an absent one."""

    kind: Kind[Any]
    key: str
    revision: int = 0
    by_creation: bool = False


class Stale(WrongState):
    """A comparison failed: nothing was written."""

    def __init__(self, failed: Sequence[Compare]) -> None:
        names = ", ".join(compare.kind.path(compare.key) for compare in failed)
        super().__init__(f"update out of sequence: {names} has changed")
        self.failed = tuple(failed)


class Fenced(Stale):
    """This manager does not lead any more."""


class _Pending:
    """A transaction that is being written: its mark is the value of one of its changes."""

    __slots__ = ("key", "revision", "value")

    def __init__(self, operations: Sequence[KeyOperation]) -> None:
        mark = next((each for each in operations if isinstance(each, PutKey)), operations[0])
        self.key = mark.key
        self.value = mark.value if isinstance(mark, PutKey) else None
        self.revision = 0
        """Where the watch has shown it; 0 before."""


class Store:
    """See above. `load` first, `close` at the end.

    `reachable()` returns how many managers answer, and of how many, for the message of a write that
    was given up. `broken()` returns why the own member of etcd cannot run, "" if it can.
    """

    def __init__(
        self,
        etcd: Etcd,
        clock: Clock,
        *,
        node: str = "",
        reachable: Callable[[], Awaitable[tuple[int, int]]] | None = None,
        broken: Callable[[], str] = lambda: "",
    ) -> None:
        """`node`: of the manager; "" for a store whose writes have no turns."""
        self.etcd = etcd
        self._turns = Turns(etcd, clock, node) if node else None
        self.revision = 0
        self.reachable = reachable
        self._broken = broken
        self._base = 0
        self._clock = clock
        self._tables: dict[Kind[Any], dict[str, Entry[Any]]] = {kind: {} for kind in KINDS}
        self._of_service: defaultdict[str, set[str]] = defaultdict(set)
        self._on_node: defaultdict[str, set[str]] = defaultdict(set)
        self._subscribers: list[Callable[[Event], None]] = []
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self._pending: defaultdict[str, list[_Pending]] = defaultdict(list)
        self._following: asyncio.Task[None] | None = None
        self._watching = asyncio.Event()

    @property
    def connected(self) -> bool:
        """The watch stands."""
        return self._watching.is_set()

    # --- reading ----------------------------------------------------------------------------------

    def get(self, kind: Kind[R], key: str = "") -> Entry[R] | None:
        return self._tables[kind].get(key)

    def record(self, kind: Kind[R], key: str = "") -> R | None:
        entry = self._tables[kind].get(key)
        return None if entry is None else entry.record

    def all(self, kind: Kind[R]) -> Mapping[str, Entry[R]]:
        return self._tables[kind]

    def tasks_of(self, service: str) -> Set[str]:
        """Keys of the tasks of this service."""
        return self._of_service.get(service, frozenset())

    def tasks_on(self, node: str) -> Set[str]:
        """Keys of the tasks that this node has, or had."""
        return self._on_node.get(node, frozenset())

    def subscribe(self, callback: Callable[[Event], None]) -> Callable[[], None]:
        """Call `callback` for each change from now on, in the order of revisions, when the cache
        has it. Returns the function that ends it. The callback is quick and does not raise.
        """
        self._subscribers.append(callback)

        def unsubscribe() -> None:
            with contextlib.suppress(ValueError):
                self._subscribers.remove(callback)

        return unsubscribe

    def moment(self, at: int) -> float:
        """The time of a change, in `Clock.monotonic` seconds. `at`: its time by the clock of a
        node, which may differ from this one. So it counts only for records that this process finds
        when it starts; all other changes happen now.
        """
        now = self._clock.monotonic()
        return now if self.revision else now - max(0, self._clock.now() - at) / SECOND

    # --- following etcd ---------------------------------------------------------------------------

    async def load(self) -> None:
        """Fill the cache, then keep it up to date until `close`. Tries until etcd answers."""
        while True:
            try:
                if self._turns is not None:
                    await self._turns.begin()
                await self._read_all()
                break
            except EtcdError as error:
                _log.debug("load: %s", error.message)
                await self._clock.sleep(RETRY)
        if self._following is None:
            self._following = spawn(self._follow(), "manager: watch of etcd", fatal=True)
        await self._watching.wait()

    async def close(self) -> None:
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait([self._following])
            self._following = None
        for _, future in self._waiting:
            future.cancel()
        self._waiting.clear()

    async def _read_all(self) -> None:
        """All records at one revision; the difference to the cache becomes events."""
        self._base = await base_of(self.etcd)
        found, revision = await read_all(self.etcd)
        revision += self._base
        present = {item.key for item in found}
        for kind, table in self._tables.items():
            for key in [key for key in table if kind.path(key) not in present]:
                self._delete(kind, key, kind.path(key), revision)
        began = self._clock.monotonic()
        for item in sorted(found, key=lambda item: item.revision) if self.revision else found:
            self._put(self._counted(item))
            if self._clock.monotonic() - began > SLICE:
                await asyncio.sleep(0)
                began = self._clock.monotonic()
        self._reached(revision)

    async def _follow(self) -> None:
        while True:
            try:
                await self._watch()
            except Compacted:
                _log.warning("etcd has compacted revision %d: loading all records again", self.revision)
                with contextlib.suppress(EtcdError):
                    await self._read_all()
            except EtcdError as error:
                _log.debug("watch: %s", error.message)
            self._watching.clear()
            await self._clock.sleep(RETRY)

    async def _watch(self) -> None:
        began = self._clock.monotonic()
        async with contextlib.aclosing(self.etcd.watch(FIRST, LAST, self.revision + 1 - self._base)) as batches:  # type: ignore[type-var]
            async for batch in batches:
                self._watching.set()
                revision = 0
                for each in batch.puts_and_deletes:
                    change = self._counted(each)
                    if change.revision != revision:
                        if revision:
                            self._reached(revision)
                        if self._clock.monotonic() - began > SLICE:
                            await asyncio.sleep(0)
                            began = self._clock.monotonic()
                        revision = change.revision
                    if revision <= self.revision:
                        continue
                    if isinstance(change, Item):
                        self._put(change)
                    elif (found := kind_of(change.key)) is not None:
                        self._delete(*found, change.key, revision)
                if revision:
                    self._reached(revision)

    def _counted(self, change: C) -> C:
        """A change of etcd with revisions as the cache has them."""
        base = self._base
        if not base:
            return change
        counted: Item | Gone = change._replace(revision=change.revision + base)
        if isinstance(counted, Item):
            counted = counted._replace(created=counted.created + base)
        return cast(C, counted)

    def _put(self, item: Item) -> None:
        self._show(item.key, item.value, item.revision)
        found = kind_of(item.key)
        if found is None:
            return
        kind, key = found
        table = self._tables[kind]
        old = table.get(key)
        if old is not None and old.revision >= item.revision:
            return
        try:
            record = kind.decode(item.value)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            _log.error("record %s is not read: %s", item.key, error)
            if old is not None:
                self._delete(kind, key, item.key, item.revision)
            return
        new = Entry(key, record, item.revision, item.created, item.lease)
        if kind is TASKS:
            self._index(key, None if old is None else old.record, cast(Task, record))
        table[key] = new
        self._publish(Event(kind, key, old, new))

    def _delete(self, kind: Kind[Any], key: str, path: str, revision: int) -> None:
        self._show(path, None, revision)
        old = self._tables[kind].pop(key, None)
        if old is not None:
            if kind is TASKS:
                self._index(key, cast(Task, old.record), None)
            self._publish(Event(kind, key, old, None))

    def _index(self, key: str, old: Task | None, new: Task | None) -> None:
        if old is not None and new is not None and old.service == new.service and old.node == new.node:
            return
        if old is not None:
            for index, name in ((self._of_service, old.service), (self._on_node, old.node)):
                index[name].discard(key)
                if not index[name]:
                    del index[name]
        if new is not None:
            self._of_service[new.service].add(key)
            if new.node:
                self._on_node[new.node].add(key)

    def _publish(self, event: Event) -> None:
        for callback in tuple(self._subscribers):
            try:
                callback(event)
            except Exception:  # one faulty subscriber must not stop the cache
                _log.exception("subscriber failed at %s", event.kind.path(event.key))

    def _show(self, path: str, value: bytes | None, revision: int) -> None:
        """Resolve the transactions whose mark this is."""
        for pending in self._pending.get(path, ()):
            if not pending.revision and pending.value == value:
                pending.revision = revision

    def _reached(self, revision: int) -> None:
        self.revision = max(self.revision, revision)
        if self._waiting:
            left = []
            for wanted, future in self._waiting:
                if wanted > self.revision:
                    left.append((wanted, future))
                elif not future.done():
                    future.set_result(None)
            self._waiting = left

    async def reach(self, revision: int) -> None:
        """Wait until the cache has this revision."""
        if self.revision < revision:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((revision, future))
            await future

    async def current(self, timeout: float = 5.0) -> str:
        """Wait until the cache has everything that was committed before this call, at any manager,
        and until no earlier write of this one is in doubt. Returns "", or the reason why the cache
        may be old when that takes too long.
        """
        ends = self._clock.monotonic() + timeout
        reason = "etcd did not answer"
        while (left := ends - self._clock.monotonic()) > 0:
            try:
                if not await self._begin_turn(left):
                    break
                found = await self.etcd.range("/swarm", keys_only=True, timeout=min(1.0, left))
            except EtcdError as error:
                reason = error.message
                await self._clock.sleep(min(RETRY, max(0.0, ends - self._clock.monotonic())))
                continue
            revision = found.revision + self._base
            if self.revision >= revision:
                return ""
            if await first_of(self.reach(revision), self._clock.sleep(max(0.0, ends - self._clock.monotonic()))):
                return ""
            reason = f"the cache has revision {self.revision} of {revision}"
        return self.unavailable(reason) + await self._count()

    @property
    def broken(self) -> str:
        """Why this manager can do nothing, however the others are; "" if it can."""
        trouble = self._broken()
        return f"etcd does not run on this manager: {trouble}" if trouble else ""

    def unavailable(self, reason: str) -> str:
        """Why etcd has not answered. `reason`: what its client says."""
        return self.broken or f"the swarm has no leader or lost its quorum: {reason}"

    async def _count(self) -> str:
        if self.reachable is None:
            return ""
        answering, of = await self.reachable()
        return f"; {answering} of {of} managers reachable"

    # --- writing ----------------------------------------------------------------------------------

    async def commit(self, changes: Sequence[Change], compares: Sequence[Compare] = ()) -> int:
        """Write all of `changes` in one transaction, if all of `compares` hold. Of several changes
        of one record the last counts. Returns the revision, which the cache has reached.

        Raises `Stale` or `Fenced`, and ServerError after 20 s without quorum.
        """
        operations = _operations(changes)
        guards = [self._guard(compare) for compare in compares]
        failed, revision = await self._write(operations, guards)
        if failed:
            raise _stale([compares[position] for position in failed])
        return revision

    async def commit_many(
        self, groups: Sequence[tuple[Sequence[Change], Sequence[Compare]]], fences: Sequence[Compare] = ()
    ) -> list[bool]:
        """Write each group as a whole, several groups in a transaction and several transactions at
        a time. Groups that touch a record of an earlier group are written after it.

        Returns for each group whether its comparisons held. Raises `Fenced` when one of `fences`
        does not, and ServerError after 20 s without quorum; some groups may have been written then.
        """
        done = [False] * len(groups)
        fence = [self._guard(compare) for compare in fences]
        for wave in self._waves(groups):
            room = asyncio.Semaphore(IN_FLIGHT)
            try:
                async with asyncio.TaskGroup() as writing:
                    for batch in _batches(wave):
                        await room.acquire()
                        task = writing.create_task(self._write_batch(batch, fence, fences, done))
                        task.add_done_callback(lambda _, room=room: room.release())  # type: ignore[misc]
            except BaseExceptionGroup as failures:
                fenced, other = failures.split(Fenced)
                raise (fenced or other or failures).exceptions[0] from None
        return done

    async def _write_batch(
        self, batch: list[_Group], fence: list[Guard], fences: Sequence[Compare], done: list[bool]
    ) -> None:
        left = batch
        while left:
            guards = fence + [guard for group in left for guard in group.guards]
            owners = [None] * len(fence) + [group for group in left for _ in group.guards]
            operations = list(itertools.chain.from_iterable(group.operations for group in left))
            failed, _ = await self._write(operations, guards)
            if not failed:
                for group in left:
                    done[group.position] = True
                return
            if failed[0] < len(fence):
                raise Fenced([fences[position] for position in failed if position < len(fence)])
            lost = {owner.position for position in failed if (owner := owners[position]) is not None}
            left = [group for group in left if group.position not in lost]

    async def _write(self, operations: list[KeyOperation], guards: list[Guard]) -> tuple[tuple[int, ...], int]:
        """Positions of the guards that failed, and the revision, which the cache has reached."""
        if not operations:
            raise ValueError("a transaction without changes")
        pending = _Pending(operations)
        self._pending[pending.key].append(pending)
        ends = self._clock.monotonic() + LIMIT
        doubt = False
        reason = ""
        try:
            while (left := ends - self._clock.monotonic()) > 0:
                try:
                    if not await self._begin_turn(left):
                        break
                    if doubt and pending.revision:
                        await self.reach(pending.revision)
                        return (), pending.revision
                    turn = [] if self._turns is None else [self._turns.guard]
                    outcome = await self.etcd.commit(guards + turn, operations)
                except InDoubt as error:
                    doubt, reason = True, error.message
                    self._end_turn()
                    await self._clock.sleep(RETRY)
                    continue
                except NoSpace as error:
                    raise ServerError(f"etcd: {error.message}") from error
                except asyncio.CancelledError:
                    self._end_turn()
                    raise
                if len(guards) in outcome.failed:
                    # Usually because another write has begun a turn meanwhile.
                    if self._turns is not None and turn == [self._turns.guard]:
                        self._end_turn()
                    continue
                revision = outcome.revision + self._base
                left = max(0.0, ends - self._clock.monotonic())
                if self.revision < revision and not await first_of(self.reach(revision), self._clock.sleep(left)):
                    raise ServerError(
                        f"context deadline exceeded: revision {revision} is written, but the watch is behind"
                    )
                if not outcome.done and doubt and pending.revision:
                    return (), pending.revision
                return outcome.failed, revision
            why = self.broken or f"etcd: {reason or 'no answer'}"
            raise ServerError(f"context deadline exceeded: {why}{await self._count()}")
        finally:
            marks = self._pending[pending.key]
            marks.remove(pending)
            if not marks:
                del self._pending[pending.key]

    def _end_turn(self) -> None:
        if self._turns is not None:
            self._turns.over = True

    async def _begin_turn(self, seconds: float) -> bool:
        """Begin another turn, if this one is over. The cache has every earlier write then. Returns
        False if that takes longer. Raises EtcdError.
        """
        turns = self._turns
        if turns is None or not turns.over:
            return True

        async def begin() -> None:
            await self.reach(await turns.begin() + self._base)

        work = asyncio.ensure_future(begin())
        if not await first_of(work, self._clock.sleep(seconds)):
            return False
        work.result()
        return True

    def _guard(self, compare: Compare) -> Guard:
        revision = compare.revision
        if revision and self._base:
            # of before the restore: no record has it
            revision = revision - self._base if revision > self._base else -1
        return Guard(compare.kind.path(compare.key), revision, compare.by_creation)

    def _waves(self, groups: Sequence[tuple[Sequence[Change], Sequence[Compare]]]) -> Iterable[list[_Group]]:
        """The groups in their order, divided where one touches a record that an earlier one
        writes.
        """
        wave: list[_Group] = []
        written: set[str] = set()
        for position, (changes, compares) in enumerate(groups):
            operations = _operations(changes)
            if not operations:
                raise ValueError("a group without changes")
            guards = [self._guard(compare) for compare in compares]
            keys = {operation.key for operation in operations}
            if not written.isdisjoint(keys) or any(guard.key in written for guard in guards):
                yield wave
                wave, written = [], set()
            written |= keys
            size = sum(
                len(operation.key) + (len(operation.value) if isinstance(operation, PutKey) else 0)
                for operation in operations
            )
            wave.append(_Group(position, operations, guards, size))
        if wave:
            yield wave


class _Group(NamedTuple):
    position: int
    operations: list[KeyOperation]
    guards: list[Guard]
    size: int


def _operations(changes: Iterable[Change]) -> list[KeyOperation]:
    last: dict[str, KeyOperation] = {}
    for change in changes:
        path = change.kind.path(change.key)
        last[path] = PutKey(path, encode(change.record), change.lease) if isinstance(change, Put) else DeleteKey(path)
    return list(last.values())


def _stale(failed: list[Compare]) -> Stale:
    fenced = any(compare.kind is LEADER for compare in failed)
    return Fenced(failed) if fenced else Stale(failed)


def _batches(wave: list[_Group]) -> Iterable[list[_Group]]:
    batch: list[_Group] = []
    operations = guards = size = 0
    for group in wave:
        operations += len(group.operations)
        guards += len(group.guards)
        size += group.size
        if batch and (operations > OPERATIONS or guards > 2 * OPERATIONS or size > SIZE):
            yield batch
            batch = []
            operations, guards, size = len(group.operations), len(group.guards), group.size
        batch.append(group)
    if batch:
        yield batch


async def base_of(etcd: Etcd) -> int:
    """What is added to etcd's revisions."""
    found = (await etcd.range(BASE, timeout=READ)).items
    return int(found[0].value) if found else 0


async def read_all(etcd: Etcd, *, serializable: bool = False) -> tuple[list[Item], int]:
    """All keys at one revision, and that revision, as etcd counts. Raises `Compacted` when that is
    compacted meanwhile.
    """
    found: list[Item] = []
    start, revision = FIRST, 0
    while True:
        page = await etcd.range(start, LAST, limit=PAGE, revision=revision, serializable=serializable, timeout=READ)
        revision = revision or page.revision
        found += page.items
        if not page.more:
            return found, revision
        start = page.items[-1].key + "\0"
        await asyncio.sleep(0)
