"""The paths of a context that a build reads, so that a client need not send the others.

They are those that COPY, ADD and mounts of the target's stages name, and the ONBUILD triggers of
their bases. Wrong are only too few: where the paths are not certain, all files are asked for.

Pure. Source: BuildKit's `dockerfile2llb` (paths of a context), `fsutil` (links and wildcards, which
the client resolves).
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from engine.build.dockerfile import stages
from engine.build.dockerfile.scope import Scope
from engine.build.dockerfile.stages import Dockerfile, Stage
from engine.build.git import source_of_add
from engine.build.remote import is_url
from engine.errors import InvalidParameter
from engine.images.instructions import records
from engine.images.instructions.records import Add, Arg, Copy, Env, Instruction, OnBuild, Run

MOST = 1000
"""Paths that are worth naming."""


class Base(NamedTuple):
    """What a build must know of an image that a stage begins with."""

    env: Sequence[str]
    triggers: Sequence[str]


class _State(NamedTuple):
    scope: Scope
    env: dict[str, str]
    triggers: list[str]


def paths(file: Dockerfile, target: str, base: Callable[[Stage], Base | None]) -> tuple[str, ...] | None:
    """Sorted paths and patterns, relative to the context; None for all its files.

    `base`: the image of a stage that begins with none of the others; None if it is not known yet.
    """
    found: set[str] = set()
    states: dict[int, _State] = {}
    try:
        for stage in stages.needed(file, target):
            state = _begun(file, stage, states, base)
            if state is None:
                return None
            triggers = [records.read_text(trigger) for trigger in state.triggers]
            state.triggers.clear()
            for instruction in (*triggers, *stage.instructions):
                found.update(_read(file, instruction, state))
            states[stage.index] = state
    except InvalidParameter:  # the build will say it
        return None
    if not found.isdisjoint(("", ".")) or len(found) > MOST:
        return None
    return tuple(sorted(found))


def _begun(
    file: Dockerfile, stage: Stage, states: dict[int, _State], base: Callable[[Stage], Base | None]
) -> _State | None:
    if stage.parent is not None:
        before = states[stage.parent]
        return _State(before.scope.following(), dict(before.env), [*before.triggers])
    if stage.base == stages.SCRATCH:
        return _State(Scope(file.arguments), {}, [])
    image = base(stage)
    if image is None:
        return None
    env = dict(line.partition("=")[::2] for line in image.env)
    return _State(Scope(file.arguments), env, [*image.triggers])


def _read(file: Dockerfile, instruction: Instruction, state: _State) -> list[str]:
    """The paths that an instruction reads; it may change the variables of those that follow."""
    if not isinstance(instruction, Arg | Env | Copy | Add | Run | OnBuild):
        return []
    variables = state.scope.variables([f"{name}={value}" for name, value in state.env.items()])
    expanded = file.arguments.expand(instruction, variables, file.escape)
    match expanded:
        case Arg():
            state.scope.declare(expanded)
        case Env():
            state.env.update(expanded.pairs)
            state.scope.set_by_env(name for name, _ in expanded.pairs)
        case OnBuild():
            state.triggers.append(expanded.trigger)
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
