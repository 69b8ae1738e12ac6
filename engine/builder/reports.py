"""What a build reports while it works. Both renderings are made of these: the classic stream
(`classic.py`) and BuildKit's progress (`buildkit/progress.py`). Pure.

Not here: where reports are kept (`output.py`). The end of a build is no report: its generator ends,
or raises `errors.StepFailed` for a RUN whose command failed, or another EngineError.
"""

from __future__ import annotations

import msgspec

from engine.wire.images import ProgressDetail

STDOUT, STDERR = 1, 2

FIRST_LANE = -2
"""In place of a stage's number, and downwards: work before the stages that is done at one time."""


class StepBegun(msgspec.Struct, frozen=True, tag=True):
    """An instruction of the Dockerfile. What follows belongs to it, until the next one."""

    number: int
    total: int
    text: str
    vertex: str
    """Its name in BuildKit's progress; empty for one that has no line there."""
    lines: tuple[int, int] | None = None
    """First and last line in the Dockerfile; None for one that is not there."""


class CacheHit(msgspec.Struct, frozen=True, tag=True):
    """The result of the step is from the cache."""


class Output(msgspec.Struct, frozen=True, tag=True):
    """What the program of a RUN printed."""

    stream: int
    text: str


class Notice(msgspec.Struct, frozen=True, tag=True):
    """Words of the builder, with their line end."""

    text: str
    classic: bool = False
    """Only the classic stream has them."""


class Transfer(msgspec.Struct, frozen=True, tag=True, kw_only=True, omit_defaults=True):
    """The progress of a download, as pulls have it."""

    status: str
    id: str = ""
    progress: str = ""
    progress_detail: ProgressDetail | None = None


class ImageMade(msgspec.Struct, frozen=True, tag=True):
    """The image that a stage made. Of several the last one is the result."""

    id: str


class StepEnded(msgspec.Struct, frozen=True, tag=True):
    """A step has ended. `failed`: it is the one of which the build fails."""

    failed: bool = False


class OfStage(msgspec.Struct, frozen=True, tag=True):
    """A report of one stage, among those of others that are built beside it."""

    stage: int
    """Its number in the Dockerfile."""
    report: StepBegun | StepEnded | CacheHit | Output | Notice | Transfer | ImageMade


class CheckWarning(msgspec.Struct, frozen=True, tag=True):
    """A check of the Dockerfile that failed. Only BuildKit's progress has them."""

    short: str
    detail: str
    url: str
    lines: tuple[int, int]
    """First and last line in the Dockerfile."""


Report = CheckWarning | OfStage | StepEnded | StepBegun | CacheHit | Output | Notice | Transfer | ImageMade


def size(report: Report) -> int:
    """About how many characters it has."""
    if isinstance(report, StepBegun | Output | Notice):
        return len(report.text)
    return len(report.status) + len(report.progress) if isinstance(report, Transfer) else 0


__all__ = [
    "FIRST_LANE",
    "STDERR",
    "STDOUT",
    "CacheHit",
    "CheckWarning",
    "ImageMade",
    "Notice",
    "OfStage",
    "Output",
    "Report",
    "StepBegun",
    "StepEnded",
    "Transfer",
    "size",
]
