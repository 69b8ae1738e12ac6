"""The build context that a client sends: a tar archive, kept in one unnamed file with an index.

Nothing of it is ever written to disk under its name. COPY reads members from the file. The digest
of each member is computed while the archive arrives.

Not here: contexts from elsewhere (remote.py, git.py), the choice of files (copying.py).
Owns: the unnamed file, until `close`.
Threads: `receive` works in threads of its own. A `Context` does not change afterwards; its methods
may be called in any thread, and only `read`, readers and `close` use the disk.
Raises: InvalidParameter for a bad archive, after the whole body was read: a client that is still
sending would not read the reply. ServerError when the disk is full.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from engine.build.ignore import Patterns
from engine.build.trees import DirectoryTree, Entry, File
from engine.images import layers


class Context:
    """A received context (`trees.Tree`)."""

    where = "file not found in build context or excluded by .dockerignore: stat "
    size: int
    """Bytes of the archive, uncompressed."""

    def drop_ignored(self, dockerfile: str) -> None:
        """Leave out the instruction file and `.dockerignore` if `.dockerignore` excludes them.

        The client has left out everything else already.
        """
        raise NotImplementedError

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

    async def close(self) -> None:
        """Free the file. Readers must be closed."""
        raise NotImplementedError


async def receive(
    body: AsyncIterator[bytes], directory: Path, making: layers.Layers, *, links_out: bool = False
) -> Context:
    """Receive a context, compressed or not, into an unnamed file of `directory`.

    `links_out`: allow relative links that lead out of the context, as BuildKit does and Docker's
    classic builder does not. They are never followed out of it.
    """
    raise NotImplementedError


def of_directory(root: int, dockerfile: str) -> DirectoryTree:
    """The context in a directory that the engine fetched, without the files that its
    `<dockerfile>.dockerignore` or `.dockerignore` excludes. Blocking.
    """
    return DirectoryTree(root, ignore=Patterns())


__all__ = ["Context", "of_directory", "receive"]
