"""Mounts of one run besides those of its record, as image builds need them for `RUN --mount`.

A source is a descriptor that the caller has opened (openat2), so a path that changes meanwhile does
not matter. The content of a file is in memory and on a tmpfs that ends with the run: never on a
disk, in a record, in inspect or in a log. All of them exist only in the runtime's own mount
namespace, so a crash leaves nothing.

Not here: the mounts of a record (mount_points.py).
"""

from __future__ import annotations

import msgspec


class Bind(msgspec.Struct, frozen=True, kw_only=True):
    """A directory, a file or a socket of the host or of the engine's mount namespace."""

    destination: str
    """Absolute."""
    source: int
    """Its descriptor (O_PATH will do), open until the start has returned. It stays the caller's."""
    writable: bool = False


class Tmpfs(msgspec.Struct, frozen=True, kw_only=True):
    """An empty file system in memory."""

    destination: str
    size: int = 0
    """Bytes; 0: the kernel's default."""


class File(msgspec.Struct, frozen=True, kw_only=True):
    """A file on a tmpfs, such as a secret."""

    destination: str
    content: bytes
    mode: int = 0o400
    uid: int = 0
    gid: int = 0

    def __repr__(self) -> str:
        """Without the content, which may be a secret."""
        return f"File({self.destination!r}, {len(self.content)} bytes)"


ExtraMount = Bind | Tmpfs | File

__all__ = ["Bind", "ExtraMount", "File", "Tmpfs"]
