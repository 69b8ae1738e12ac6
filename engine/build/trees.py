"""Trees of files that COPY and ADD read: what all of them offer, directories, and files in memory.

Paths are relative to the tree's root, without empty parts, `.` and `..`; "" is the root. A tree may
come from a client or a container, so links are followed inside it and nothing else is trusted.

Not here: the context that a client sends (context.py), the choice of files (copying.py).
Owns: nothing; a directory's descriptor stays the caller's.
Threads: one at a time. A `DirectoryTree` reads the disk, so it is used in threads only.
Raises: InvalidParameter for what a tree may not contain, ServerError with the kernel's reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import msgspec

from engine.build.ignore import Patterns

FILE, DIRECTORY, LINK, CHARACTER, BLOCK, FIFO = "0", "5", "2", "3", "4", "6"
"""Kinds of entries: the type flags of tar."""


class Entry(msgspec.Struct, frozen=True, gc=False):
    """A file, directory, link, device or FIFO of a tree."""

    path: str
    kind: str = FILE
    mode: int = 0o644
    """Permissions with setuid, setgid and sticky bits."""
    uid: int = 0
    gid: int = 0
    size: int = 0
    mtime: int = 0
    """Nanoseconds."""
    target: str = ""
    """Of a symbolic link."""
    xattrs: tuple[tuple[bytes, bytes], ...] = ()
    major: int = 0
    minor: int = 0
    inode: int = 0
    """Entries of a tree with the same inode are names of one file. 0: the only name."""


class File(Protocol):
    """An open file of a tree."""

    def readinto(self, buffer: memoryview, /) -> int:
        """Read up to the whole buffer; 0 at the end."""

    def close(self) -> None: ...


class Tree(Protocol):
    """Files to copy."""

    where: str
    """Begins the message about a missing file: empty, or `file not found in build context …: `."""

    def find(self, path: str) -> Entry | None:
        """The entry at a path. A link is not followed; None if a parent is one."""

    def resolve(self, path: str) -> Entry | None:
        """The entry at a path, with links followed inside the root; never a link. None if there is
        none.
        """

    def children(self, path: str) -> list[str]:
        """Names in a directory, sorted."""

    def walk(self, path: str) -> Iterator[tuple[str, Entry]]:
        """Everything below a directory, by its path relative to the directory: sorted, a directory
        before its entries.
        """

    def read(self, path: str, limit: int) -> bytes:
        """The content of a regular file, links followed.

        Raises NotFound, and InvalidParameter for another kind or more than `limit` bytes.
        """

    def reader(self, entry: Entry) -> File:
        """The content of a regular file. The caller closes it."""

    def digest(self, entry: Entry) -> bytes:
        """A sha256 of a regular file's content."""


class DirectoryTree:
    """The files below a directory: a stage's root, or a checkout of a repository."""

    where = ""

    def __init__(self, root: int, *, ignore: Patterns | None = None) -> None:
        """`ignore`: entries that match are left out."""
        self._root = root
        self._ignore = ignore

    def find(self, path: str) -> Entry | None:
        raise NotImplementedError

    def resolve(self, path: str) -> Entry | None:
        raise NotImplementedError

    def children(self, path: str) -> list[str]:
        raise NotImplementedError

    def walk(self, path: str) -> Iterator[tuple[str, Entry]]:
        raise NotImplementedError

    def read(self, path: str, limit: int) -> bytes:
        raise NotImplementedError

    def reader(self, entry: Entry) -> File:
        raise NotImplementedError

    def digest(self, entry: Entry) -> bytes:
        raise NotImplementedError


class MemoryTree:
    """Regular files in memory, in the root: here-documents."""

    where = ""

    def __init__(self, contents: Mapping[str, bytes], *, mode: int = 0o644, mtime: int = 0) -> None:
        self._contents = contents

    def find(self, path: str) -> Entry | None:
        raise NotImplementedError

    def resolve(self, path: str) -> Entry | None:
        raise NotImplementedError

    def children(self, path: str) -> list[str]:
        raise NotImplementedError

    def walk(self, path: str) -> Iterator[tuple[str, Entry]]:
        raise NotImplementedError

    def read(self, path: str, limit: int) -> bytes:
        raise NotImplementedError

    def reader(self, entry: Entry) -> File:
        raise NotImplementedError

    def digest(self, entry: Entry) -> bytes:
        raise NotImplementedError


__all__ = [
    "BLOCK",
    "CHARACTER",
    "DIRECTORY",
    "FIFO",
    "FILE",
    "LINK",
    "DirectoryTree",
    "Entry",
    "File",
    "MemoryTree",
    "Tree",
]
