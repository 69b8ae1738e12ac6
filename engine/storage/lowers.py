"""Directories in the layers below an overlay's upper directory, as overlayfs merges them.

Blocking: run it in a thread. Follows no links. Not here: mounting (overlay.py).
Owns:   a descriptor of each layer's root, until `close`.
Raises: OSError with the kernel's errno.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from engine.system import files

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


class Lowers:
    """The layers, topmost first. Their roots are opened at the first search."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._roots: list[int] = []

    def __enter__(self) -> Lowers:
        return self

    def __exit__(self, *_: object) -> None:
        for root in self._roots:
            os.close(root)
        self._roots = []

    def find(self, name: bytes) -> int | None:
        """A descriptor of the directory `name` in the topmost layer that has it, for the caller to
        close. None if no layer has it, or a layer above that one hides it.
        """
        parts = name.split(b"/") if name else []
        for at, path in enumerate(self._paths):
            if at == len(self._roots):
                self._roots.append(files.open_directory(path))
            opaque = False
            for depth in range(len(parts) + 1):
                try:
                    found = files.open_in_root(self._roots[at], b"/".join(parts[:depth]), _DIRECTORY)
                except FileNotFoundError:
                    break
                except OSError:
                    return None  # a whiteout, a file or a link is in its place
                if depth == len(parts):
                    return found
                opaque = opaque or (depth > 0 and is_opaque(found))
                os.close(found)
            if opaque:
                return None
        return None


def is_opaque(directory: int) -> bool:
    """True if the directory hides those of the same name in the layers below."""
    try:
        return os.getxattr(directory, "trusted.overlay.opaque") == b"y"
    except OSError:
        return False


def attributes(directory: int) -> dict[str, bytes]:
    """The extended attributes of a directory without overlayfs's own."""
    return {
        name: os.getxattr(directory, name)
        for name in os.listxattr(directory)
        if not name.startswith("trusted.overlay.")
    }


def copy_attributes(model: int, target: int) -> None:
    """Give a directory the mode, owner, times and extended attributes of another one."""
    status = os.fstat(model)
    os.fchown(target, status.st_uid, status.st_gid)
    os.fchmod(target, status.st_mode & 0o7777)
    for name, value in attributes(model).items():
        os.setxattr(target, name, value)
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))


def looks_like(one: int, other: int) -> bool:
    """True if two directories have the same mode, owner and extended attributes."""
    first, second = os.fstat(one), os.fstat(other)
    return (first.st_mode, first.st_uid, first.st_gid) == (second.st_mode, second.st_uid, second.st_gid) and attributes(
        one
    ) == attributes(other)


def inherit(layer: int, lowers: Lowers, implied: Sequence[bytes]) -> None:
    """Give the directories of a layer that no tar entry described the mode, owner and times of the
    same directories in the layers below. Deepest first, because writing into a directory changes
    its time.
    """
    for name in sorted(implied, key=len, reverse=True):
        model = lowers.find(name)
        if model is not None:
            try:
                target = files.open_in_root(layer, name, _DIRECTORY)
                try:
                    copy_attributes(model, target)
                finally:
                    os.close(target)
            finally:
                os.close(model)


__all__ = ["Lowers", "attributes", "copy_attributes", "is_opaque", "looks_like"]
