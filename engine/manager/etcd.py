"""etcd's member over gRPC: the interface of `kv.py` on a Unix socket.

A request that gets no answer in time raises `InDoubt`; the callers decide whether it is repeated.

Owns:    one connection, which the next request makes anew when the member has ended it.
Threads: the event loop's. Not here: the messages (`etcd_messages.py`), HTTP/2 (`rpc/grpc.py`).
Raises:  the kinds of `kv.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Sequence
from typing import NoReturn, TypeVar

import msgspec

from engine.errors import EngineError
from engine.manager import etcd_messages as messages
from engine.manager.etcd_messages import Compare, RequestOp
from engine.manager.kv import (
    ATTEMPT,
    Alarm,
    Batch,
    Compacted,
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
from engine.rpc import grpc, protobuf
from engine.rpc.protobuf import UInt64

T = TypeVar("T", bound=msgspec.Struct)

SOCKET = "etcd:0"
"""Name of the client socket: etcd 3.4 wants the form host:port also for Unix sockets."""
CHANGE = 5.0
"""Seconds for changes of members, which raft carries out one at a time."""

FEW = 16
"""Guards whose values are asked for in the transaction itself, in case that one fails. A
transaction with more of them is repeated for that: it is large, and seldom fails.
"""

_TERMS = grpc.Terms(other="member", message_limit=1 << 30)
"""A range may have any size."""

_ALARMS = {1: "nospace", 2: "corrupt"}

_DOUBTFUL = frozenset((
    grpc.CANCELLED, grpc.UNKNOWN, grpc.DEADLINE_EXCEEDED, grpc.ABORTED, grpc.INTERNAL, grpc.UNAVAILABLE,
))  # fmt: skip

_WORDS: tuple[tuple[str, type[EtcdError]], ...] = (
    ("has been compacted", Compacted),
    ("database space exceeded", NoSpace),
    ("lease not found", LeaseGone),
    ("too many requests", InDoubt),
)


def _raise(error: EngineError, status: int) -> NoReturn:
    for words, kind in _WORDS:
        if words in error.message:
            raise kind(error.message) from error
    raise (InDoubt if status in _DOUBTFUL else EtcdError)(error.message) from error


class EtcdClient:
    """`path`: of the member's client socket."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._connection: grpc.Connection | None = None
        self._connecting = asyncio.Lock()
        self._closed = False

    async def close(self) -> None:
        """End the connection and all requests. Those that come later raise InDoubt."""
        self._closed = True
        if self._connection is not None:
            self._connection.close()

    # --- calls ------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _call(self, method: str, request: msgspec.Struct, *, last: bool) -> AsyncIterator[grpc.Stream]:
        """One call, which ends with the context. Raises the kinds of `kv.py` for gRPC's."""
        connection = await self._connected()
        stream: grpc.Stream | None = None
        try:
            stream = connection.call(f"/etcdserverpb.{method}")
            await stream.send(protobuf.encode(request), last=last)
            yield stream
        except EtcdError:
            raise
        except EngineError as error:
            _raise(error, stream.status if stream is not None else grpc.UNAVAILABLE)
        finally:
            if stream is not None:
                stream.cancel()

    async def _connected(self) -> grpc.Connection:
        async with self._connecting:
            if self._closed:
                raise InDoubt("the connection to etcd is closed")
            if self._connection is None or not self._connection.open:
                self._connection = await self._connect()
            return self._connection

    async def _connect(self) -> grpc.Connection:
        end = socket.socket(socket.AF_UNIX)
        try:
            end.setblocking(False)
            end.connect(self._path)  # at once, or not at all: unix(7)
            return await grpc.join(end.detach(), b"", b"", None, lambda: None, terms=_TERMS)
        except OSError as error:
            end.close()
            raise InDoubt(f"etcd cannot be reached: {error.strerror or error}") from error

    async def _ask(self, method: str, request: msgspec.Struct, of: type[T], timeout: float) -> T:
        """One request and its answer."""
        try:
            async with asyncio.timeout(timeout), self._call(method, request, last=True) as stream:
                answer = await stream.receive()
                await stream.receive()  # the status
                return protobuf.decode(answer or b"", of)
        except TimeoutError as error:
            raise InDoubt(f"etcd has not answered within {timeout:g} s") from error

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
        request = messages.RangeRequest(start.encode(), end.encode(), limit, revision, serializable, keys_only)
        answer = await self._ask("KV/Range", request, messages.RangeResponse, timeout)
        return Range([_item(found) for found in answer.kvs], answer.header.revision, answer.more)

    async def commit(
        self, guards: Sequence[Guard], operations: Sequence[Operation], *, timeout: float = ATTEMPT
    ) -> Outcome:
        answer = await self._transaction(guards, operations, timeout, explain=len(guards) <= FEW)
        if not answer.succeeded and len(guards) > FEW:
            answer = await self._transaction(guards, operations, timeout, explain=True)
        if answer.succeeded:
            return Outcome(True, answer.header.revision)
        failed = []
        for position, (guard, response) in enumerate(zip(guards, answer.responses, strict=True)):
            found = response.response_range.kvs
            actual = 0 if not found else found[0].create_revision if guard.by_creation else found[0].mod_revision
            if actual != guard.revision:
                failed.append(position)
        return Outcome(False, answer.header.revision, tuple(failed))

    async def _transaction(
        self, guards: Sequence[Guard], operations: Sequence[Operation], timeout: float, *, explain: bool
    ) -> messages.TxnResponse:
        """With `explain`, the answer of a failure has what the guards compared."""
        request = messages.TxnRequest(
            compare=[_compare(guard) for guard in guards],
            success=[_operation(operation) for operation in operations],
            failure=[
                RequestOp(request_range=messages.RangeRequest(guard.key.encode(), keys_only=True))
                for guard in (guards if explain else ())
            ],
        )
        return await self._ask("KV/Txn", request, messages.TxnResponse, timeout)

    async def watch(self, start: str, end: str, revision: int) -> AsyncIterator[Batch]:
        create = messages.WatchCreateRequest(start.encode(), end.encode(), revision)
        async with self._call("Watch/Watch", messages.WatchRequest(create), last=False) as stream:
            while (message := await stream.receive()) is not None:
                answer = protobuf.decode(message, messages.WatchResponse)
                if answer.compact_revision:
                    raise Compacted(f"revision {revision} has been compacted")
                if answer.canceled:
                    raise EtcdError(f"the watch was refused: {answer.cancel_reason}")
                if answer.created or answer.events:
                    yield Batch([_event(event) for event in answer.events])
        raise InDoubt("the watch has ended")

    # --- leases -----------------------------------------------------------------------------------

    async def grant(self, seconds: int) -> int:
        request = messages.LeaseGrantRequest(seconds)
        return (await self._ask("Lease/LeaseGrant", request, messages.LeaseGrantResponse, ATTEMPT)).id

    async def keep_alive(self, lease: int) -> None:
        request = messages.LeaseRequest(lease)
        answer = await self._ask("Lease/LeaseKeepAlive", request, messages.LeaseKeepAliveResponse, ATTEMPT)
        if answer.ttl <= 0:
            raise LeaseGone("requested lease not found")

    async def revoke(self, lease: int) -> None:
        await self._ask("Lease/LeaseRevoke", messages.LeaseRequest(lease), messages.Empty, ATTEMPT)

    # --- members ----------------------------------------------------------------------------------

    async def members(self) -> list[Member]:
        answer = await self._ask("Cluster/MemberList", messages.Empty(), messages.MemberListResponse, ATTEMPT)
        return [_member(member) for member in answer.members]

    async def add_learner(self, peer_url: str) -> Member:
        request = messages.MemberAddRequest([peer_url], True)
        return _member((await self._ask("Cluster/MemberAdd", request, messages.MemberAddResponse, CHANGE)).member)

    async def promote(self, member: int) -> None:
        await self._change("Cluster/MemberPromote", messages.MemberRequest(UInt64(member)))

    async def remove_member(self, member: int) -> None:
        await self._change("Cluster/MemberRemove", messages.MemberRequest(UInt64(member)))

    async def update_member(self, member: int, peer_url: str) -> None:
        await self._change("Cluster/MemberUpdate", messages.MemberUpdateRequest(UInt64(member), [peer_url]))

    async def status(self) -> Status:
        answer = await self._ask("Maintenance/Status", messages.Empty(), messages.StatusResponse, ATTEMPT)
        return Status(
            answer.header.member_id,
            answer.leader,
            answer.raft_term,
            answer.header.revision,
            answer.version,
            answer.db_size,
            answer.db_size_in_use,
            answer.is_learner,
            answer.raft_applied_index,
            tuple(answer.errors),
        )

    async def move_leader(self, member: int) -> None:
        await self._change("Maintenance/MoveLeader", messages.MemberRequest(UInt64(member)))

    async def compact(self, revision: int) -> None:
        await self._change("KV/Compact", messages.CompactionRequest(revision, physical=True), 30.0)

    async def defragment(self, *, timeout: float = 60.0) -> None:
        await self._change("Maintenance/Defragment", messages.Empty(), timeout)

    async def alarms(self) -> list[Alarm]:
        answer = await self._ask("Maintenance/Alarm", messages.AlarmRequest(), messages.AlarmResponse, ATTEMPT)
        return [Alarm(alarm.member_id, _ALARMS.get(alarm.alarm, "")) for alarm in answer.alarms]

    async def disarm(self, alarm: Alarm) -> None:
        numbers = {kind: number for number, kind in _ALARMS.items()}
        request = messages.AlarmRequest(messages.DEACTIVATE, UInt64(alarm.member), numbers[alarm.kind])
        await self._change("Maintenance/Alarm", request)

    async def _change(self, method: str, request: msgspec.Struct, timeout: float = CHANGE) -> None:
        await self._ask(method, request, messages.Empty, timeout)


def _item(found: messages.KeyValue) -> Item:
    return Item(found.key.decode(), found.value, found.create_revision, found.mod_revision, found.lease)


def _event(event: messages.Event) -> Item | Gone:
    return Gone(event.kv.key.decode(), event.kv.mod_revision) if event.deleted else _item(event.kv)


def _member(found: messages.ClusterMember) -> Member:
    return Member(found.id, found.name, found.peer_urls[0] if found.peer_urls else "", found.is_learner)


def _compare(guard: Guard) -> Compare:
    key = guard.key.encode()
    if guard.by_creation:
        return Compare(messages.CREATE, key, create_revision=guard.revision)
    return Compare(messages.MOD, key, mod_revision=guard.revision)


def _operation(operation: Operation) -> RequestOp:
    key = operation.key.encode()
    if isinstance(operation, PutKey):
        return RequestOp(request_put=messages.PutRequest(key, operation.value, operation.lease))
    return RequestOp(request_delete_range=messages.DeleteRangeRequest(key))
