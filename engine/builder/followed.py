"""The paths of a context that a build reads, so that a client need not send the others.

They are those that COPY, ADD and mounts of the target's stages name, and the ONBUILD triggers of
their bases. Wrong are only too few: where the paths are not certain, all files are asked for.

Pure. Source: BuildKit's `dockerfile2llb` (paths of a context), `fsutil` (links and wildcards, which
the client resolves).
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator

from engine.builder.dockerfile import stages
from engine.builder.dockerfile.stages import Dockerfile, Stage
from engine.builder.dockerfile.walk import Base, Place, Walk
from engine.builder.git import source_of_add
from engine.builder.remote import is_url
from engine.errors import InvalidParameter
from engine.images.instructions.records import Add, Arg, Copy, Env, Instruction, OnBuild, Run

MOST = 1000
"""Paths that are worth naming."""


def paths(file: Dockerfile, target: str, base: Callable[[Stage], Base | None]) -> tuple[str, ...] | None:
    """Sorted paths and patterns, relative to the context; None for all its files.

    `base`: the image of a stage that begins with none of the others; None if it is not known yet.
    """
    found: set[str] = set()
    try:
        for place, instruction in _instructions(file, target, base):
            found.update(_read(instruction, place))
    except InvalidParameter:  # the build will say it
        return None
    if not found.isdisjoint(("", ".")) or len(found) > MOST:
        return None
    return tuple(sorted(found))


def names(file: Dockerfile, target: str, base: Callable[[Stage], Base | None]) -> set[str] | None:
    """Names of the images, named contexts and stages that the build uses; None if these are not
    certain. `base`: as for `paths`.
    """
    found: set[str] = set()
    try:
        found.update(stage.base for stage in stages.needed(file, target))
        for place, instruction in _instructions(file, target, base):
            found.update(stages.origins(instruction))
            if isinstance(instruction, Arg | Env | OnBuild):
                place.take(instruction)
    except InvalidParameter:  # the build will say it
        return None
    return found


def _instructions(
    file: Dockerfile, target: str, base: Callable[[Stage], Base | None]
) -> Iterator[tuple[Place, Instruction]]:
    """Each instruction of the build, at its place. Raises InvalidParameter where it is not certain
    which these are.
    """
    walk = Walk(file, base)
    needed = stages.needed(file, target)
    known = {stage.index for stage in needed}
    for stage in needed:
        place = walk.enter(stage)
        if place is None:
            raise InvalidParameter(f"{stage.base}: it is not known yet")
        for instruction in walk.instructions(stage, place):
            for name, other in stages.sources(file, stage, instruction):
                if other is not None and other.index not in known:  # a trigger names it
                    raise InvalidParameter(f"{name}: what it uses is not known yet")
            yield place, instruction


def _read(instruction: Instruction, place: Place) -> list[str]:
    """The paths that an instruction reads; it may change the variables of those that follow."""
    if not isinstance(instruction, Arg | Env | Copy | Add | Run | OnBuild):
        return []
    match expanded := place.take(instruction):
        case Run():
            return [_path(each.source) for each in expanded.mounts if each.type == "bind" and not each.from_]
        case Copy() | Add() if not expanded.from_:
            return [_path(each) for each in expanded.sources if isinstance(expanded, Copy) or not _is_remote(each)]
    return []


def _is_remote(source: str) -> bool:
    return is_url(source) or source_of_add(source) is not None


def _path(source: str) -> str:
    """The path without `/` and `..` at its begin. Empty for one that only the engine can
    understand: then all files are sent.
    """
    if "\\" in source or not source.isprintable():
        return ""
    path = posixpath.normpath(f"/{source}").lstrip("/")
    before = re.split(r"[*?[]", path)[0]
    if before == path or ("/" not in path and "**" not in path):
        return path
    # All of the directory: whether it exists decides between no match and an error.
    return posixpath.dirname(before)
