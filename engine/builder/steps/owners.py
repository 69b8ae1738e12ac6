"""The owner that a step gives to the files it makes: of --chown, or USER's for WORKDIR.

Names are those of the image's own /etc/passwd and /etc/group. A name without a group means the
user's own group, a number the group of that number.
Rules: Dockerfile reference, COPY --chown.
"""

from __future__ import annotations

import asyncio
import contextlib
import os

from engine.builder.stage import StageBuild
from engine.builder.state import State
from engine.errors import InvalidParameter
from engine.runtime import users
from engine.system.threads import uninterrupted


async def find(
    stage: StageBuild, before: State, wanted: str, root: int, *, known: bool = True
) -> tuple[int, int] | None:
    """uid and gid of `user[:group]`; None for the empty text.

    `root`: a descriptor of the image before the step; -1: this opens it, if it has layers. Raises
    InvalidParameter for a name that the image does not list; unless it must be `known`, it is root.
    It never must be in a dialect of `lenient_owners`.
    """
    if not wanted:
        return None
    opened = -1
    if root < 0 and before.top:
        root = opened = await stage.site.parts.images.snapshots.open_content(before.top)
    try:
        known = known and not stage.site.options.dialect.lenient_owners
        return await asyncio.to_thread(_owner if known else _owner_or_root, root, wanted)
    finally:
        if opened >= 0:
            await uninterrupted(asyncio.to_thread(os.close, opened))


def _owner(root: int, wanted: str) -> tuple[int, int]:
    """Blocking."""
    user, _, group = wanted.partition(":")
    wanted = f"{user}:{group or user}" if group or user.isdecimal() else user or "0:0"
    if root >= 0:
        return users.owner(root, wanted)
    found = users.identity(wanted, (), b"", b"")
    return found.uid, found.gid


def _owner_or_root(root: int, wanted: str) -> tuple[int, int]:
    user, _, group = wanted.partition(":")
    uid = gid = 0
    with contextlib.suppress(InvalidParameter):
        uid, gid = _owner(root, user)
    if group:
        with contextlib.suppress(InvalidParameter):
            gid = _owner(root, f"0:{group}")[1]
    return uid, gid


__all__ = ["find"]
