"""The protobuf messages of BuildKit's build history, and of the content service that serves its
blobs.

Sources: moby/buildkit api/services/control/control.proto; containerd
api/services/content/v1/content.proto.
Not here: the calls (`history_calls.py`), what is kept (`history.py`).
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from engine.builder.buildkit.control_messages import Exporter, RpcStatus, Time

STARTED, COMPLETE, DELETED = range(3)
"""Types of a BuildHistoryEvent."""


class BuildHistoryRequest(msgspec.Struct):
    active_only: Annotated[bool, 1] = False
    ref: Annotated[str, 2] = ""
    early_exit: Annotated[bool, 3] = False
    """The call ends with the events of now."""
    filters: Annotated[list[str], 4] = []
    limit: Annotated[int, 5] = 0


class UpdateBuildHistoryRequest(msgspec.Struct):
    ref: Annotated[str, 1] = ""
    pinned: Annotated[bool, 2] = False
    delete: Annotated[bool, 3] = False
    finalize: Annotated[bool, 4] = False


class Blob(msgspec.Struct):
    """Descriptor: a blob that the content service has."""

    media_type: Annotated[str, 1] = ""
    digest: Annotated[str, 2] = ""
    size: Annotated[int, 3] = 0
    annotations: Annotated[dict[str, str], 5] = {}


class NumberedBlob(msgspec.Struct):
    """An entry of the map `BuildResultInfo.Results`, by the exporter's number."""

    number: Annotated[int, 1] = 0
    blob: Annotated[Blob | None, 2] = None


class BuildResultInfo(msgspec.Struct):
    result: Annotated[Blob | None, 1] = None
    """Of older clients."""
    attestations: Annotated[list[Blob], 2] = []
    results: Annotated[list[NumberedBlob], 3] = []


class BuildHistoryRecord(msgspec.Struct):
    ref: Annotated[str, 1] = ""
    frontend: Annotated[str, 2] = ""
    attributes: Annotated[dict[str, str], 3] = {}
    exporters: Annotated[list[Exporter], 4] = []
    error: Annotated[RpcStatus | None, 5] = None
    created: Annotated[Time | None, 6] = None
    completed: Annotated[Time | None, 7] = None
    logs: Annotated[Blob | None, 8] = None
    response: Annotated[dict[str, str], 9] = {}
    result: Annotated[BuildResultInfo | None, 10] = None
    generation: Annotated[int, 12] = 0
    pinned: Annotated[bool, 14] = False
    cached_steps: Annotated[int, 15] = 0
    total_steps: Annotated[int, 16] = 0
    completed_steps: Annotated[int, 17] = 0
    external_error: Annotated[Blob | None, 18] = None
    warnings: Annotated[int, 19] = 0


class BuildHistoryEvent(msgspec.Struct):
    type: Annotated[int, 1] = STARTED
    record: Annotated[BuildHistoryRecord | None, 2] = None


# --- containerd.services.content.v1 ---------------------------------------------------------------


class InfoRequest(msgspec.Struct):
    digest: Annotated[str, 1] = ""


class ContentInfo(msgspec.Struct):
    digest: Annotated[str, 1] = ""
    size: Annotated[int, 2] = 0
    created: Annotated[Time | None, 3] = None
    updated: Annotated[Time | None, 4] = None


class InfoResponse(msgspec.Struct):
    info: Annotated[ContentInfo | None, 1] = None


class ReadRequest(msgspec.Struct):
    digest: Annotated[str, 1] = ""
    offset: Annotated[int, 2] = 0
    size: Annotated[int, 3] = 0
    """0: up to the end."""
