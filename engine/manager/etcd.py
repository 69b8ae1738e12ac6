"""etcd's member over gRPC: the interface of `kv.py` on a Unix socket.

The messages and stubs are the generated ones of aetcd; its client is not used. A request that gets
no answer in time raises `InDoubt`; the callers decide whether it is repeated.

Owns:    one channel, which connects by itself whenever the member is back.
Threads: the event loop's.
Raises:  the kinds of `kv.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, NoReturn

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import grpc
import grpc.aio
from aetcd.rpc import rpc_pb2, rpc_pb2_grpc

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

SOCKET = "etcd:0"
"""Name of the client socket: etcd 3.4 wants the form host:port also for Unix sockets."""
CHANGE = 5.0
"""Seconds for changes of members, which raft carries out one at a time."""

FEW = 16
"""Guards whose values are asked for in the transaction itself, in case that one fails. A
transaction with more of them is repeated for that: it is large, and seldom fails.
"""

_OPTIONS = (
    ("grpc.default_authority", "localhost"),  # of a path it is none that Go accepts
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 1000),  # limit of an attempt: etcd accepts before it answers
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.enable_http_proxy", 0),
)

_ALARMS = {1: "nospace", 2: "corrupt"}

_DOUBTFUL = frozenset((
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
))  # fmt: skip

_WORDS: tuple[tuple[str, type[EtcdError]], ...] = (
    ("has been compacted", Compacted),
    ("database space exceeded", NoSpace),
    ("lease not found", LeaseGone),
    ("too many requests", InDoubt),
)


def _raise(error: grpc.aio.AioRpcError) -> NoReturn:
    message = error.details() or error.code().name.lower().replace("_", " ")
    for words, kind in _WORDS:
        if words in message:
            raise kind(message) from error
    raise (InDoubt if error.code() in _DOUBTFUL else EtcdError)(message) from error


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Raises the kinds of `kv.py` for gRPC's. A channel that is closed raises CancelledError in
    those that wait for it, who were not cancelled.
    """
    try:
        yield
    except grpc.aio.AioRpcError as error:
        _raise(error)
    except (grpc.aio.UsageError, asyncio.InvalidStateError) as error:
        raise InDoubt("the connection to etcd is closed") from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise InDoubt("the connection to etcd is closed") from error


async def _ask(method: Any, request: Any, timeout: float) -> Any:
    """One request and its answer."""
    with _refusals():
        return await method(request, timeout=timeout)


class EtcdClient:
    """`socket`: path of the member's client socket."""

    def __init__(self, socket: str) -> None:
        self._channel = grpc.aio.insecure_channel(f"unix:{socket}", options=_OPTIONS)
        self._keys = rpc_pb2_grpc.KVStub(self._channel)
        self._watches = rpc_pb2_grpc.WatchStub(self._channel)
        self._leases = rpc_pb2_grpc.LeaseStub(self._channel)
        self._cluster = rpc_pb2_grpc.ClusterStub(self._channel)
        self._maintenance = rpc_pb2_grpc.MaintenanceStub(self._channel)

    async def close(self) -> None:
        await self._channel.close(None)

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
        request = rpc_pb2.RangeRequest(
            key=start.encode(),
            range_end=end.encode(),
            limit=limit,
            revision=revision,
            serializable=serializable,
            keys_only=keys_only,
        )
        answer = await _ask(self._keys.Range, request, timeout)
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
    ) -> Any:
        """With `explain`, the answer of a failure has what the guards compared."""
        ranges = [
            rpc_pb2.RequestOp(request_range=rpc_pb2.RangeRequest(key=guard.key.encode(), keys_only=True))
            for guard in (guards if explain else ())
        ]
        request = rpc_pb2.TxnRequest(
            compare=[_compare(guard) for guard in guards],
            success=[_operation(operation) for operation in operations],
            failure=ranges,
        )
        return await _ask(self._keys.Txn, request, timeout)

    async def watch(self, start: str, end: str, revision: int) -> AsyncIterator[Batch]:
        create = rpc_pb2.WatchCreateRequest(key=start.encode(), range_end=end.encode(), start_revision=revision)
        with _refusals():
            call = self._watches.Watch()
        try:
            with _refusals():
                await call.write(rpc_pb2.WatchRequest(create_request=create))
            while True:
                with _refusals():
                    answer = await call.read()
                if answer is grpc.aio.EOF:
                    raise InDoubt(f"the watch has ended: {await call.details() or 'no reason'}")
                if answer.compact_revision:
                    raise Compacted(f"revision {revision} has been compacted")
                if answer.canceled:
                    raise EtcdError(f"the watch was refused: {answer.cancel_reason}")
                if answer.created or answer.events:
                    yield Batch([_event(event) for event in answer.events])
        finally:
            call.cancel()

    # --- leases -----------------------------------------------------------------------------------

    async def grant(self, seconds: int) -> int:
        answer = await _ask(self._leases.LeaseGrant, rpc_pb2.LeaseGrantRequest(TTL=seconds), ATTEMPT)
        return int(answer.ID)

    async def keep_alive(self, lease: int) -> None:
        with _refusals():
            call = self._leases.LeaseKeepAlive(timeout=ATTEMPT)
            try:
                await call.write(rpc_pb2.LeaseKeepAliveRequest(ID=lease))
                answer = await call.read()
                if answer is grpc.aio.EOF:
                    raise InDoubt(f"no answer about a lease: {await call.details() or 'no reason'}")
            finally:
                call.cancel()
        if answer.TTL <= 0:
            raise LeaseGone("requested lease not found")

    async def revoke(self, lease: int) -> None:
        await _ask(self._leases.LeaseRevoke, rpc_pb2.LeaseRevokeRequest(ID=lease), ATTEMPT)

    # --- members ----------------------------------------------------------------------------------

    async def members(self) -> list[Member]:
        answer = await _ask(self._cluster.MemberList, rpc_pb2.MemberListRequest(), ATTEMPT)
        return [_member(member) for member in answer.members]

    async def add_learner(self, peer_url: str) -> Member:
        request = rpc_pb2.MemberAddRequest(peerURLs=[peer_url], isLearner=True)
        answer = await _ask(self._cluster.MemberAdd, request, CHANGE)
        return _member(answer.member)

    async def promote(self, member: int) -> None:
        await _ask(self._cluster.MemberPromote, rpc_pb2.MemberPromoteRequest(ID=member), CHANGE)

    async def remove_member(self, member: int) -> None:
        await _ask(self._cluster.MemberRemove, rpc_pb2.MemberRemoveRequest(ID=member), CHANGE)

    async def update_member(self, member: int, peer_url: str) -> None:
        request = rpc_pb2.MemberUpdateRequest(ID=member, peerURLs=[peer_url])
        await _ask(self._cluster.MemberUpdate, request, CHANGE)

    async def status(self) -> Status:
        answer = await _ask(self._maintenance.Status, rpc_pb2.StatusRequest(), ATTEMPT)
        return Status(
            answer.header.member_id,
            answer.leader,
            answer.raftTerm,
            answer.header.revision,
            answer.version,
            answer.dbSize,
            answer.dbSizeInUse,
            answer.isLearner,
            answer.raftAppliedIndex,
            tuple(answer.errors),
        )

    async def move_leader(self, member: int) -> None:
        await _ask(self._maintenance.MoveLeader, rpc_pb2.MoveLeaderRequest(targetID=member), CHANGE)

    async def compact(self, revision: int) -> None:
        await _ask(self._keys.Compact, rpc_pb2.CompactionRequest(revision=revision, physical=True), 30.0)

    async def defragment(self, *, timeout: float = 60.0) -> None:
        await _ask(self._maintenance.Defragment, rpc_pb2.DefragmentRequest(), timeout)

    async def alarms(self) -> list[Alarm]:
        request = rpc_pb2.AlarmRequest(action=rpc_pb2.AlarmRequest.GET)
        answer = await _ask(self._maintenance.Alarm, request, ATTEMPT)
        return [Alarm(alarm.memberID, _ALARMS.get(alarm.alarm, "")) for alarm in answer.alarms]

    async def disarm(self, alarm: Alarm) -> None:
        numbers = {kind: number for number, kind in _ALARMS.items()}
        request = rpc_pb2.AlarmRequest(
            action=rpc_pb2.AlarmRequest.DEACTIVATE, memberID=alarm.member, alarm=numbers[alarm.kind]
        )
        await _ask(self._maintenance.Alarm, request, CHANGE)


def _item(found: Any) -> Item:
    return Item(found.key.decode(), found.value, found.create_revision, found.mod_revision, found.lease)


def _event(event: Any) -> Item | Gone:
    found = event.kv
    if event.type == 1:
        return Gone(found.key.decode(), found.mod_revision)
    return _item(found)


def _member(found: Any) -> Member:
    return Member(found.ID, found.name, found.peerURLs[0] if found.peerURLs else "", found.isLearner)


def _compare(guard: Guard) -> Any:
    key = guard.key.encode()
    if guard.by_creation:
        return rpc_pb2.Compare(
            result=rpc_pb2.Compare.EQUAL,
            target=rpc_pb2.Compare.CREATE,
            key=key,
            create_revision=guard.revision,
        )
    return rpc_pb2.Compare(
        result=rpc_pb2.Compare.EQUAL, target=rpc_pb2.Compare.MOD, key=key, mod_revision=guard.revision
    )


def _operation(operation: Operation) -> Any:
    key = operation.key.encode()
    if isinstance(operation, PutKey):
        put = rpc_pb2.PutRequest(key=key, value=operation.value, lease=operation.lease)
        return rpc_pb2.RequestOp(request_put=put)
    return rpc_pb2.RequestOp(request_delete_range=rpc_pb2.DeleteRangeRequest(key=key))
