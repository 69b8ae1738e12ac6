"""The protobuf messages of BuildKit's own API, with the fields that this engine uses.

Sources: moby/buildkit api/services/control/control.proto, frontend/gateway/pb/gateway.proto,
api/types/worker.proto, util/apicaps/pb/caps.proto, solver/pb/ops.proto; google/rpc/status.proto,
google/protobuf/timestamp.proto; grpc/health/v1/health.proto.
Not here: the services that a client offers (`messages.py`), encoding (`rpc/protobuf.py`).
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from engine.builder.buildkit.messages import Stat


class Empty(msgspec.Struct):
    """A message whose fields do not matter."""


class Time(msgspec.Struct):
    """google.protobuf.Timestamp"""

    seconds: Annotated[int, 1] = 0
    nanoseconds: Annotated[int, 2] = 0


class RpcStatus(msgspec.Struct):
    """google.rpc.Status"""

    code: Annotated[int, 1] = 0
    message: Annotated[str, 2] = ""


class HealthCheckResponse(msgspec.Struct):
    status: Annotated[int, 1] = 0
    """1: serving."""


# --- workers --------------------------------------------------------------------------------------


class Platform(msgspec.Struct):
    architecture: Annotated[str, 1] = ""
    os: Annotated[str, 2] = ""
    variant: Annotated[str, 3] = ""


class BuildkitVersion(msgspec.Struct):
    package: Annotated[str, 1] = ""
    version: Annotated[str, 2] = ""
    revision: Annotated[str, 3] = ""


class GCPolicy(msgspec.Struct):
    all: Annotated[bool, 1] = False
    keep_duration: Annotated[int, 2] = 0
    reserved_space: Annotated[int, 3] = 0
    filters: Annotated[list[str], 4] = []
    max_used_space: Annotated[int, 5] = 0
    min_free_space: Annotated[int, 6] = 0


class WorkerRecord(msgspec.Struct):
    id: Annotated[str, 1] = ""
    labels: Annotated[dict[str, str], 2] = {}
    platforms: Annotated[list[Platform], 3] = []
    policies: Annotated[list[GCPolicy], 4] = []
    version: Annotated[BuildkitVersion | None, 5] = None


class ListWorkersResponse(msgspec.Struct):
    records: Annotated[list[WorkerRecord], 1] = []


class InfoResponse(msgspec.Struct):
    version: Annotated[BuildkitVersion | None, 1] = None


# --- solving --------------------------------------------------------------------------------------


class OperationMetadata(msgspec.Struct):
    """pb.OpMetadata"""

    description: Annotated[dict[str, str], 2] = {}


class Definition(msgspec.Struct):
    """pb.Definition: a graph in LLB."""

    operations: Annotated[list[bytes], 1] = []
    metadata: Annotated[dict[str, OperationMetadata], 2] = {}
    """By digest of an operation."""


class Input(msgspec.Struct):
    """pb.Input: a result of another operation."""

    digest: Annotated[str, 1] = ""
    index: Annotated[int, 2] = 0


class Source(msgspec.Struct):
    """pb.SourceOp"""

    identifier: Annotated[str, 1] = ""
    attributes: Annotated[dict[str, str], 2] = {}


class Operation(msgspec.Struct):
    """pb.Op. The fields without meaning here are there to be noticed."""

    inputs: Annotated[list[Input], 1] = []
    exec: Annotated[Empty | None, 2] = None
    source: Annotated[Source | None, 3] = None
    file: Annotated[Empty | None, 4] = None
    build: Annotated[Empty | None, 5] = None
    merge: Annotated[Empty | None, 6] = None
    diff: Annotated[Empty | None, 7] = None


class Exporter(msgspec.Struct):
    type: Annotated[str, 1] = ""
    attributes: Annotated[dict[str, str], 2] = {}


class CacheEntry(msgspec.Struct):
    type: Annotated[str, 1] = ""
    attributes: Annotated[dict[str, str], 2] = {}


class CacheOptions(msgspec.Struct):
    exports: Annotated[list[CacheEntry], 4] = []
    imports: Annotated[list[CacheEntry], 5] = []


class SolveRequest(msgspec.Struct):
    """Control/Solve"""

    ref: Annotated[str, 1] = ""
    definition: Annotated[Definition | None, 2] = None
    exporter: Annotated[str, 3] = ""
    """Of older clients, as are its attributes: they send one exporter."""
    exporter_attributes: Annotated[dict[str, str], 4] = {}
    session: Annotated[str, 5] = ""
    frontend: Annotated[str, 6] = ""
    attributes: Annotated[dict[str, str], 7] = {}
    cache: Annotated[CacheOptions | None, 8] = None
    entitlements: Annotated[list[str], 9] = []
    inputs: Annotated[dict[str, Definition], 10] = {}
    internal: Annotated[bool, 11] = False
    """It leaves no record in the build history."""
    exporters: Annotated[list[Exporter], 13] = []


class SolveResponse(msgspec.Struct):
    exporter_response: Annotated[dict[str, str], 1] = {}


class FrontendSolveRequest(msgspec.Struct):
    """LLBBridge/Solve"""

    definition: Annotated[Definition | None, 1] = None
    frontend: Annotated[str, 2] = ""
    options: Annotated[dict[str, str], 3] = {}
    allow_result_return: Annotated[bool, 5] = False
    allow_result_array: Annotated[bool, 6] = False
    imports: Annotated[list[CacheEntry], 12] = []
    inputs: Annotated[dict[str, Definition], 13] = {}
    evaluate: Annotated[bool, 14] = False


class Ref(msgspec.Struct):
    id: Annotated[str, 1] = ""
    definition: Annotated[Definition | None, 2] = None


class RefMap(msgspec.Struct):
    refs: Annotated[dict[str, Ref], 1] = {}


class Result(msgspec.Struct):
    old_ref: Annotated[str, 1] = ""
    """Of older clients."""
    ref: Annotated[Ref | None, 3] = None
    refs: Annotated[RefMap | None, 4] = None
    metadata: Annotated[dict[str, bytes], 10] = {}


class FrontendSolveResponse(msgspec.Struct):
    old_ref: Annotated[str, 1] = ""
    """Of older clients."""
    result: Annotated[Result | None, 3] = None


class ReturnRequest(msgspec.Struct):
    result: Annotated[Result | None, 1] = None
    error: Annotated[RpcStatus | None, 2] = None


class EvaluateRequest(msgspec.Struct):
    ref: Annotated[str, 1] = ""


class StatFileRequest(msgspec.Struct):
    ref: Annotated[str, 1] = ""
    path: Annotated[str, 2] = ""


class StatFileResponse(msgspec.Struct):
    stat: Annotated[Stat | None, 1] = None


class FileRange(msgspec.Struct):
    offset: Annotated[int, 1] = 0
    length: Annotated[int, 2] = 0
    """0 for all that follows."""


class ReadFileRequest(msgspec.Struct):
    ref: Annotated[str, 1] = ""
    path: Annotated[str, 2] = ""
    range: Annotated[FileRange | None, 3] = None


class ReadFileResponse(msgspec.Struct):
    data: Annotated[bytes, 1] = b""


class Capability(msgspec.Struct):
    id: Annotated[str, 1] = ""
    enabled: Annotated[bool, 2] = False


class PongResponse(msgspec.Struct):
    frontend: Annotated[list[Capability], 1] = []
    llb: Annotated[list[Capability], 2] = []
    workers: Annotated[list[WorkerRecord], 3] = []


# --- progress -------------------------------------------------------------------------------------


class StatusRequest(msgspec.Struct):
    ref: Annotated[str, 1] = ""


class Vertex(msgspec.Struct):
    digest: Annotated[str, 1] = ""
    inputs: Annotated[list[str], 2] = []
    name: Annotated[str, 3] = ""
    cached: Annotated[bool, 4] = False
    started: Annotated[Time | None, 5] = None
    completed: Annotated[Time | None, 6] = None
    error: Annotated[str, 7] = ""


class VertexStatus(msgspec.Struct):
    id: Annotated[str, 1] = ""
    vertex: Annotated[str, 2] = ""
    name: Annotated[str, 3] = ""
    current: Annotated[int, 4] = 0
    total: Annotated[int, 5] = 0
    timestamp: Annotated[Time | None, 6] = None
    started: Annotated[Time | None, 7] = None
    completed: Annotated[Time | None, 8] = None


class VertexLog(msgspec.Struct):
    vertex: Annotated[str, 1] = ""
    timestamp: Annotated[Time | None, 2] = None
    stream: Annotated[int, 3] = 0
    message: Annotated[bytes, 4] = b""


class SourceInfo(msgspec.Struct):
    """pb.SourceInfo: a file that a warning is about."""

    filename: Annotated[str, 1] = ""
    data: Annotated[bytes, 2] = b""
    language: Annotated[str, 4] = ""


class Position(msgspec.Struct):
    line: Annotated[int, 1] = 0


class Range(msgspec.Struct):
    """pb.Range: lines from 1, both included."""

    start: Annotated[Position | None, 1] = None
    end: Annotated[Position | None, 2] = None


class VertexWarning(msgspec.Struct):
    vertex: Annotated[str, 1] = ""
    level: Annotated[int, 2] = 0
    short: Annotated[bytes, 3] = b""
    detail: Annotated[list[bytes], 4] = []
    url: Annotated[str, 5] = ""
    info: Annotated[SourceInfo | None, 6] = None
    ranges: Annotated[list[Range], 7] = []


class StatusResponse(msgspec.Struct):
    vertexes: Annotated[list[Vertex], 1] = []
    statuses: Annotated[list[VertexStatus], 2] = []
    logs: Annotated[list[VertexLog], 3] = []
    warnings: Annotated[list[VertexWarning], 4] = []


# --- the cache ------------------------------------------------------------------------------------


class PruneRequest(msgspec.Struct):
    filters: Annotated[list[str], 1] = []
    all: Annotated[bool, 2] = False
    keep_duration: Annotated[int, 3] = 0
    """Nanoseconds."""
    reserved_space: Annotated[int, 4] = 0
    max_used_space: Annotated[int, 5] = 0
    min_free_space: Annotated[int, 6] = 0


class UsageRecord(msgspec.Struct):
    id: Annotated[str, 1] = ""
    mutable: Annotated[bool, 2] = False
    in_use: Annotated[bool, 3] = False
    size: Annotated[int, 4] = 0
    created: Annotated[Time | None, 6] = None
    used: Annotated[Time | None, 7] = None
    uses: Annotated[int, 8] = 0
    description: Annotated[str, 9] = ""
    kind: Annotated[str, 10] = ""
    shared: Annotated[bool, 11] = False
    parents: Annotated[list[str], 12] = []


class DiskUsageRequest(msgspec.Struct):
    filters: Annotated[list[str], 1] = []
    age_limit: Annotated[int, 2] = 0
    """Nanoseconds since the last use."""


class DiskUsageResponse(msgspec.Struct):
    records: Annotated[list[UsageRecord], 1] = []
