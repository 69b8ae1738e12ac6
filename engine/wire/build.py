"""Image builds on the wire: the objects that a build streams, and the report of a prune."""

from __future__ import annotations

import msgspec

from engine.wire.images import ProgressDetail


class BuiltImage(msgspec.Struct, frozen=True, kw_only=True):
    """The image that a stage made. Of several the last one is the result."""

    id: str = msgspec.field(name="ID")


class BuildMessage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """One object of a build's stream: a piece of output in `stream`, the progress of a download, or
    an image in `aux`.

    Failures are not messages: `api/replies.py` writes them.
    """

    stream: str = ""
    status: str = ""
    progress_detail: ProgressDetail | None = None
    progress: str = ""
    id: str = ""
    aux: BuiltImage | None = None


class PruneReport(msgspec.Struct, frozen=True, kw_only=True, rename="pascal"):
    """POST /build/prune. `space_reclaimed` in bytes."""

    caches_deleted: list[str] | None = None
    space_reclaimed: int = 0
