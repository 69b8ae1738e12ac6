"""The messages of etcd's API that a manager sends and reads.

Pure. Source: etcd's `rpc.proto` and `kv.proto` (etcdserverpb, mvccpb), which 3.4, 3.5 and 3.6
share. Left out are fields that are neither set nor read.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from engine.rpc.protobuf import UInt64


class Header(msgspec.Struct):
    """ResponseHeader"""

    member_id: Annotated[UInt64, 2] = UInt64(0)
    revision: Annotated[int, 3] = 0


class KeyValue(msgspec.Struct):
    key: Annotated[bytes, 1] = b""
    create_revision: Annotated[int, 2] = 0
    mod_revision: Annotated[int, 3] = 0
    value: Annotated[bytes, 5] = b""
    lease: Annotated[int, 6] = 0


class Event(msgspec.Struct):
    deleted: Annotated[bool, 1] = False
    """EventType: PUT is 0 and DELETE is 1."""
    kv: Annotated[KeyValue, 2] = msgspec.field(default_factory=KeyValue)


# --- KV -------------------------------------------------------------------------------------------


class RangeRequest(msgspec.Struct):
    key: Annotated[bytes, 1]
    range_end: Annotated[bytes, 2] = b""
    limit: Annotated[int, 3] = 0
    revision: Annotated[int, 4] = 0
    serializable: Annotated[bool, 7] = False
    keys_only: Annotated[bool, 8] = False


class RangeResponse(msgspec.Struct):
    header: Annotated[Header, 1] = msgspec.field(default_factory=Header)
    kvs: Annotated[list[KeyValue], 2] = []
    more: Annotated[bool, 3] = False


class PutRequest(msgspec.Struct):
    key: Annotated[bytes, 1]
    value: Annotated[bytes, 2] = b""
    lease: Annotated[int, 3] = 0


class DeleteRangeRequest(msgspec.Struct):
    key: Annotated[bytes, 1]


CREATE, MOD = 1, 2
"""Compare.CompareTarget: the revision of the key's creation, or of its last change."""


class Compare(msgspec.Struct):
    """Whether a revision of a key is equal: `result` stays 0."""

    target: Annotated[int, 2]
    key: Annotated[bytes, 3]
    create_revision: Annotated[int | None, 5] = None
    mod_revision: Annotated[int | None, 6] = None


class RequestOp(msgspec.Struct):
    """One of them."""

    request_range: Annotated[RangeRequest | None, 1] = None
    request_put: Annotated[PutRequest | None, 2] = None
    request_delete_range: Annotated[DeleteRangeRequest | None, 3] = None


class TxnRequest(msgspec.Struct):
    compare: Annotated[list[Compare], 1] = []
    success: Annotated[list[RequestOp], 2] = []
    failure: Annotated[list[RequestOp], 3] = []


class ResponseOp(msgspec.Struct):
    response_range: Annotated[RangeResponse, 1] = msgspec.field(default_factory=RangeResponse)


class TxnResponse(msgspec.Struct):
    header: Annotated[Header, 1] = msgspec.field(default_factory=Header)
    succeeded: Annotated[bool, 2] = False
    responses: Annotated[list[ResponseOp], 3] = []


class CompactionRequest(msgspec.Struct):
    revision: Annotated[int, 1]
    physical: Annotated[bool, 2] = False


# --- Watch ----------------------------------------------------------------------------------------


class WatchCreateRequest(msgspec.Struct):
    key: Annotated[bytes, 1]
    range_end: Annotated[bytes, 2] = b""
    start_revision: Annotated[int, 3] = 0


class WatchRequest(msgspec.Struct):
    create_request: Annotated[WatchCreateRequest | None, 1]


class WatchResponse(msgspec.Struct):
    created: Annotated[bool, 3] = False
    canceled: Annotated[bool, 4] = False
    compact_revision: Annotated[int, 5] = 0
    cancel_reason: Annotated[str, 6] = ""
    events: Annotated[list[Event], 11] = []


# --- Lease ----------------------------------------------------------------------------------------


class LeaseGrantRequest(msgspec.Struct):
    ttl: Annotated[int, 1]


class LeaseGrantResponse(msgspec.Struct):
    id: Annotated[int, 2] = 0


class LeaseRequest(msgspec.Struct):
    """LeaseKeepAliveRequest and LeaseRevokeRequest"""

    id: Annotated[int, 1]


class LeaseKeepAliveResponse(msgspec.Struct):
    ttl: Annotated[int, 3] = 0


# --- Cluster --------------------------------------------------------------------------------------


class ClusterMember(msgspec.Struct):
    """Member"""

    id: Annotated[UInt64, 1] = UInt64(0)
    name: Annotated[str, 2] = ""
    peer_urls: Annotated[list[str], 3] = []
    is_learner: Annotated[bool, 5] = False


class MemberAddRequest(msgspec.Struct):
    peer_urls: Annotated[list[str], 1]
    is_learner: Annotated[bool, 2] = False


class MemberAddResponse(msgspec.Struct):
    member: Annotated[ClusterMember, 2] = msgspec.field(default_factory=ClusterMember)


class MemberRequest(msgspec.Struct):
    """MemberRemoveRequest, MemberPromoteRequest and MoveLeaderRequest"""

    id: Annotated[UInt64, 1]


class MemberUpdateRequest(msgspec.Struct):
    id: Annotated[UInt64, 1]
    peer_urls: Annotated[list[str], 2]


class MemberListResponse(msgspec.Struct):
    members: Annotated[list[ClusterMember], 2] = []


# --- Maintenance ----------------------------------------------------------------------------------


class Empty(msgspec.Struct):
    """StatusRequest, DefragmentRequest, MemberListRequest, and answers that say only that all is
    well
    """


class StatusResponse(msgspec.Struct):
    header: Annotated[Header, 1] = msgspec.field(default_factory=Header)
    version: Annotated[str, 2] = ""
    db_size: Annotated[int, 3] = 0
    leader: Annotated[UInt64, 4] = UInt64(0)
    raft_term: Annotated[int, 6] = 0
    raft_applied_index: Annotated[int, 7] = 0
    errors: Annotated[list[str], 8] = []
    db_size_in_use: Annotated[int, 9] = 0
    is_learner: Annotated[bool, 10] = False


DEACTIVATE = 2
"""AlarmRequest.AlarmAction; 0 asks for the alarms."""


class AlarmRequest(msgspec.Struct):
    action: Annotated[int, 1] = 0
    member_id: Annotated[UInt64, 2] = UInt64(0)
    alarm: Annotated[int, 3] = 0


class AlarmMember(msgspec.Struct):
    member_id: Annotated[UInt64, 1] = UInt64(0)
    alarm: Annotated[int, 2] = 0


class AlarmResponse(msgspec.Struct):
    alarms: Annotated[list[AlarmMember], 2] = []
