"""What the engine mounts over a container's root, as trees (system/trees.py) for whoever puts that root together again.

A bind's host path is looked up anew, since the container may be stopped. Where it runs, what is found must be what it has: it may write to the
directory that the path leads through (`-v /a:/a -v /a/b:/b`) and have put a link there. Else its own mount is taken. One whose file is gone
from its directory can't be mounted again: then what has replaced it on the host is, as in Docker, when no link leads there.

Blocking. Owns: nothing but the trees until they are returned. Raises: ServerError.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from engine.errors import EngineError, ServerError
from engine.monitor.client import Process
from engine.system import files, namespaces, trees


class Source(NamedTuple):
    """Something of the host for a place in the container: a path, or a descriptor."""

    source: Path | int
    destination: str
    writable: bool
    bind: str = ""
    """The host path of a bind."""


class Mounted(NamedTuple):
    """A tree to mount, and where. The tree is the receiver's to close."""

    tree: int
    destination: str
    writable: bool


def clone(sources: Iterable[Source], process: Process | None) -> list[Mounted]:
    """Trees of all the sources, outermost destination first. `process`: the container's, when it runs."""
    found: list[Mounted] = []
    try:
        for each in sorted(sources, key=lambda each: each.destination.count("/")):
            tree = _as_it_is_there(each, process) if each.bind and process is not None else _clone(each)
            if tree is not None:
                found.append(Mounted(tree, each.destination, each.writable))
    except BaseException:
        for mounted in found:
            os.close(mounted.tree)
        raise
    return found


def _clone(each: Source) -> int:
    try:
        return trees.clone(each.source, recursive=True)
    except FileNotFoundError as error:
        raise ServerError(f"mount source of {each.destination}: no such file or directory") from error


def _as_it_is_there(each: Source, process: Process) -> int | None:
    """A tree of the source if that is what the container has at the destination, else of what it has; None when there is no safe one."""
    with contextlib.ExitStack() as stack:
        try:
            root = os.open(f"/proc/{process.pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, root)
            # After the root was opened: it tells that the process still is the container's.
            namespace = namespaces.of_process(process.pid, process.pidfd, "mnt")
        except (OSError, EngineError):
            return _clone(each)  # it has just ended
        stack.callback(os.close, namespace)
        try:
            there = files.open_in_root(root, each.destination, os.O_PATH)
        except OSError as error:
            raise ServerError(f"{each.destination} is not in the container any more: {error.strerror}") from error
        stack.callback(os.close, there)
        own, other = os.fstat(there), os.stat(each.source)
        if (own.st_dev, own.st_ino) == (other.st_dev, other.st_ino):
            return _clone(each)
        if own.st_nlink:
            return trees.clone_within(namespace, there)
        top = files.open_directory("/")
        stack.callback(os.close, top)
        try:
            replaced = files.open_without_links(top, each.bind.lstrip("/"), os.O_PATH)
        except OSError:
            return None
        stack.callback(os.close, replaced)
        return trees.clone(replaced)


__all__ = ["Mounted", "Source", "clone"]
