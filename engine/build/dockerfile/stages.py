"""The stages of a Dockerfile: their bases, names, and which of them a target needs.

Pure. Not here: running them (build/plan.py).
Raises: InvalidParameter that names the line and the instruction.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from engine.build.dockerfile.lines import Document
from engine.build.dockerfile.scope import Arguments, Platforms
from engine.images.instructions.records import Arg, Instruction


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """`base`: an image, `scratch`, or what `parent` names. `parent`: the index of the earlier stage
    that this one continues. `platform`: empty for the target's. `text`: of the FROM line.
    """

    index: int
    name: str = ""
    base: str
    parent: int | None = None
    platform: str = ""
    text: str
    line: int
    instructions: tuple[Instruction, ...] = ()


class Dockerfile(msgspec.Struct, frozen=True, kw_only=True):
    """`arguments` is for the scopes of its stages."""

    stages: tuple[Stage, ...]
    escape: str
    warnings: tuple[str, ...]
    global_arguments: tuple[Arg, ...]
    arguments: Arguments


def read(document: Document, scope_arguments: Mapping[str, str | None], platforms: Platforms) -> Dockerfile:
    """All stages, checked."""
    raise NotImplementedError


def referred(dockerfile: Dockerfile, stage: Stage, name: str) -> Stage | None:
    """The stage that `--from=name` in `stage` means. None: an image of that name."""
    raise NotImplementedError


def needed(dockerfile: Dockerfile, target: str) -> tuple[Stage, ...]:
    """The stages that the target needs, in the order of the file; the target is the last one. An
    empty target is the last stage of the file.
    """
    raise NotImplementedError
