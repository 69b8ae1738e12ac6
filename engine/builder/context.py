"""The build context that a client sends: a tar archive, kept in one unnamed file with an index.

Nothing of it is ever written to disk under its name. COPY reads members from the file. The digests
of its files are computed while the archive arrives, those of large files when they are needed.

Not here: contexts from elsewhere (remote.py, git.py), the choice of files (copying.py).
Owns: the unnamed file, until `close`.
Threads: `receive` works in threads of its own. A `Context` does not change afterwards; its methods
may be called in any thread, and only `read`, readers and `close` use the disk.
Raises: InvalidParameter for a bad archive, after the whole body was read: a client that is still
sending would not read the reply. ServerError when the disk is full.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import posixpath
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from engine._fast import members as _members
from engine._fast.tar import ArchiveError
from engine.builder.ignore import Patterns
from engine.builder.trees import (
    BLOCK,
    CHARACTER,
    DIRECTORY,
    FILE,
    LARGE,
    LINK,
    DirectoryTree,
    Entry,
    File,
    check_device,
    clean,
    digest_of,
    followed,
    read_regular,
)
from engine.errors import EngineError, InvalidParameter, ServerError, reason
from engine.images import layers
from engine.storage.compression import Source, content
from engine.system import files
from engine.system.feed import Feed, process
from engine.system.threads import Helper, become_batch, in_own_thread, opened, uninterrupted

MAX_MEMBERS = 500_000
"""Entries of a context, with the directories above them."""
MAX_INDEX = 256 << 20
"""Bytes of memory that the index of one context may take, roughly."""

OFFSET_BITS = 48
"""Bits of an entry's inode that are the offset of its content."""

_ENTRY = 300
"""Bytes of memory of an entry, without its names and attributes."""
_MAX_PATH = 4095
"""Of an entry, as in an archive."""
_IGNORE = ".dockerignore"
_MAX_IGNORE = 1 << 20
_BATCH = 256
"""Members that are read between two chances for other threads."""
_BUFFER = 512 * 1024
_EARLY = 1 << 20
"""Bytes after which a thread indexes what another one writes."""
_RESERVE = 512 << 20
"""Bytes that a context leaves free on the disk, or a twentieth of it if that is less."""
_CLOSING = 0.2
_LINK_KIND = "1"


class Index:
    """The entries of an archive, as its members leave them: a later member replaces an earlier one
    of its name.
    """

    where = ""

    def __init__(self, *, links_out: bool) -> None:
        self._links_out = links_out
        self.entries = {"": Entry("", DIRECTORY, 0o755)}
        self.children: dict[str, dict[str, None]] = {"": {}}
        """Names in each directory."""
        self.digests: dict[int, bytes] = {}
        """By the inode of a file that is not empty, which is the offset of its content; of a large
        one only when it was asked for.
        """
        self.sparse: dict[int, tuple[bytes, int]] = {}
        """Map and stored size of a sparse file, by its inode."""
        self._members = 0
        self._memory = 0
        self._detours = 0
        """Parts of the names that lead through links."""

    def find(self, path: str) -> Entry | None:
        return self.entries.get(path)

    def add(self, member: _members.Member) -> None:
        """Raises InvalidParameter for what a context may not contain."""
        (path, parent, whiteout, kind, mode, uid, gid, size, mtime, link) = member[:10]
        xattrs, major, minor, offset, stored, extents, digest = member[10:]
        self._charge(len(path) + len(link))
        if whiteout:
            raise InvalidParameter(f"build context: {path}: names that begin with .wh. are reserved for layers")
        if kind in (CHARACTER, BLOCK):
            check_device(f"build context: {path}", kind, major, minor)
        else:
            major = minor = 0
        if xattrs:
            self._memory += sum(len(name) + len(value) + 200 for name, value in xattrs)
        if not path:
            if kind != DIRECTORY:
                raise InvalidParameter("build context: its root is not a directory")
            self.entries[""] = Entry("", DIRECTORY, mode, uid, gid, 0, mtime, "", xattrs)
            return
        if parent not in self.children:
            parent = self._directory(parent)
            path = f"{parent}/{posixpath.basename(path)}" if parent else posixpath.basename(path)
            # Through links it may be far longer than it was written.
            if len(path) > _MAX_PATH:
                raise InvalidParameter(f"build context: {path[:200]}…: a name of more than {_MAX_PATH} bytes")
            self._memory += len(path)
        inode = offset if kind == FILE and size else 0
        if inode:
            if digest is not None:
                self.digests[inode] = digest
            if extents is not None:
                self._memory += len(extents)
                self.sparse[inode] = extents, stored
        if kind == LINK:
            self._check_link(path, link)
        elif kind != _LINK_KIND:
            link = ""
        entry = (
            self._linked(path, link)
            if kind == _LINK_KIND
            else Entry(path, kind, mode, uid, gid, size, mtime, link, xattrs, major, minor, inode)
        )
        if path in self.children:
            if kind != DIRECTORY:
                self.remove(path)
        elif kind == DIRECTORY:
            self.children[path] = {}
        self.children[parent][path[len(parent) + 1 if parent else 0 :]] = None
        self.entries[path] = entry

    def put(self, entry: Entry, digest: bytes) -> bool:
        """As `add`, for a file or a directory of a directory that was put before. False, without an
        effect, if it is anything else, or has a name already.
        """
        path = entry.path
        parent, _, name = path.rpartition("/")
        below = self.children.get(parent)
        if below is None or path in self.entries or entry.xattrs or ".wh." in path:
            return False
        if entry.kind == DIRECTORY:
            self.children[path] = {}
        elif entry.kind != FILE:
            return False
        elif entry.inode:
            self.digests[entry.inode] = digest
        self._charge(len(path))
        below[name] = None
        self.entries[path] = entry
        return True

    def _charge(self, size: int) -> None:
        self._members += 1
        if self._members > MAX_MEMBERS:
            raise InvalidParameter(f"build context: more than {MAX_MEMBERS} entries")
        self.hold(_ENTRY + size)

    def hold(self, size: int) -> None:
        """Count memory that is kept for the entries.

        Raises InvalidParameter when it is too much.
        """
        self._memory += size
        if self._memory > MAX_INDEX:
            raise InvalidParameter(f"build context: names and attributes take more than {MAX_INDEX >> 20} MiB")

    def _directory(self, path: str) -> str:
        """The path of a parent that is not a directory of the index itself: through links, or made
        because the archive has no entry for it.
        """
        done = ""
        for name in path.split("/"):
            at = f"{done}/{name}" if done else name
            if at not in self.children:
                entry = self.entries.get(at)
                if entry is None:
                    self._charge(len(at))
                    self.entries[at] = Entry(at, DIRECTORY, 0o755)
                    self.children[at] = {}
                    self.children[done][name] = None
                else:
                    self._detour(path)
                    entry = followed(self, at) if entry.kind == LINK else entry
                    if entry is None or entry.kind != DIRECTORY:
                        raise InvalidParameter(f"build context: {at}: not a directory, but another entry is below it")
                    at = entry.path
            done = at
        return done

    def _detour(self, path: str) -> None:
        self._detours += path.count("/") + 1
        if self._detours > MAX_MEMBERS:
            raise InvalidParameter(f"build context: {path}: too many entries are named through links")

    def _check_link(self, path: str, target: str) -> None:
        if not target:
            raise InvalidParameter(f"build context: {path}: a symbolic link to nothing")
        if not self._links_out and not target.startswith("/") and clean(posixpath.dirname(path) + "/" + target) is None:
            raise InvalidParameter(
                f'build context: invalid symlink "{path}" -> "{target}": it leads out of the context'
            )

    def _linked(self, path: str, link: str) -> Entry:
        """The entry of a hard link."""
        target = clean(link)
        if target is None:
            raise InvalidParameter(f'build context: invalid hardlink "{path}" -> "{link}": it leads out of the context')
        found = self.entries.get(target)
        if found is None:
            self._detour(target)
            above = followed(self, posixpath.dirname(target))
            name = posixpath.basename(target)
            if above is not None:
                found = self.entries.get(f"{above.path}/{name}" if above.path else name)
        if found is None or found.kind == DIRECTORY:
            raise InvalidParameter(f'build context: invalid hardlink "{path}" -> "{link}": no such file in the context')
        return msgspec.structs.replace(found, path=path)

    def remove(self, path: str) -> None:
        """Remove an entry and everything below it."""
        parent, _, name = path.rpartition("/")
        del self.children[parent][name]
        waiting = [path]
        while waiting:
            at = waiting.pop()
            del self.entries[at]
            waiting += [f"{at}/{below}" for below in self.children.pop(at, ())]

    def names(self, path: str) -> list[str]:
        return sorted(self.children.get(path, ()))


class _Range:
    """A range of the spool file."""

    def __init__(self, descriptor: int, offset: int, size: int) -> None:
        self._descriptor = descriptor
        self._at = offset
        self._end = offset + size

    def readinto(self, buffer: memoryview) -> int:
        got = os.preadv(self._descriptor, [buffer[: self._end - self._at]], self._at)
        self._at += got
        return got

    def close(self) -> None:
        pass


class _Sparse:
    """A sparse file, with its holes."""

    def __init__(self, descriptor: int, offset: int, size: int, extents: bytes) -> None:
        self._descriptor = descriptor
        self._stored = offset
        """Offset of the next stored byte."""
        numbers = memoryview(extents).cast("q").tolist()
        self._extents = [(at, length) for at, length in zip(numbers[::2], numbers[1::2], strict=True) if length][::-1]
        self._at = 0
        self._size = size

    def readinto(self, buffer: memoryview) -> int:
        room = min(len(buffer), self._size - self._at)
        if not self._extents or self._extents[-1][0] > self._at:
            got = min(room, self._extents[-1][0] - self._at) if self._extents else room
            buffer[:got] = bytes(got)
        else:
            at, length = self._extents[-1]
            got = os.preadv(self._descriptor, [buffer[: min(room, at + length - self._at)]], self._stored)
            self._stored += got
            if self._at + got == at + length:
                self._extents.pop()
        self._at += got
        return got

    def close(self) -> None:
        pass


class Stored(NamedTuple):
    """Where a content is: a range of a file."""

    descriptor: int
    offset: int
    size: int
    extents: bytes | None = None
    """The map of a sparse file."""


class Context:
    """A received context (`trees.Tree`)."""

    where = "file not found in build context or excluded by .dockerignore: stat "

    def __init__(
        self,
        spool: int,
        size: int,
        index: Index,
        others: Sequence[int] = (),
        *,
        closed: Callable[[], object] = lambda: None,
    ) -> None:
        """`spool`: the file with the archive, uncompressed. `others`: files with more contents; the
        inode of an entry has the number of its file above OFFSET_BITS, and the spool is number 0.
        `closed`: is called by `close`.
        """
        self._files = [spool, *others]
        self._closed = closed
        self.size = size
        self._index = index

    def __len__(self) -> int:
        """The number of entries, without the root."""
        return len(self._index.entries) - 1

    def drop_ignored(self, dockerfile: str) -> None:
        """Leave out the instruction file and `.dockerignore` if `.dockerignore` excludes them.

        The client has left out everything else already. Call it before anything is copied.
        """
        if self.resolve(_IGNORE) is None:
            return
        patterns = Patterns.parse(self.read(_IGNORE, _MAX_IGNORE))
        for path in (_IGNORE, clean(dockerfile)):
            if path and self.find(path) is not None and patterns.excluded(path):
                self._index.remove(path)

    def find(self, path: str) -> Entry | None:
        return self._index.entries.get(path)

    def resolve(self, path: str) -> Entry | None:
        return followed(self, path)

    def children(self, path: str) -> list[str]:
        return self._index.names(path)

    def walk(self, path: str) -> Iterator[tuple[str, Entry]]:
        entries, children = self._index.entries, self._index.children
        start = len(path) + 1 if path else 0
        prefix = f"{path}/" if path else ""
        waiting = [prefix + name for name in sorted(children.get(path, ()), reverse=True)]
        while waiting:
            at = waiting.pop()
            yield at[start:], entries[at]
            if at in children:
                prefix = at + "/"
                waiting += [prefix + name for name in sorted(children[at], reverse=True)]

    def read(self, path: str, limit: int) -> bytes:
        return read_regular(self, path, limit)

    def stored(self, entry: Entry) -> Stored:
        """Where a regular file's content is."""
        descriptor, offset = self._files[entry.inode >> OFFSET_BITS], entry.inode & (1 << OFFSET_BITS) - 1
        if entry.inode in self._index.sparse:
            extents, size = self._index.sparse[entry.inode]
            return Stored(descriptor, offset, size, extents)
        return Stored(descriptor, offset, entry.size)

    def reader(self, entry: Entry) -> File:
        descriptor, offset, size, extents = self.stored(entry)
        if extents is not None:
            return _Sparse(descriptor, offset, entry.size, extents)
        return _Range(descriptor, offset, size)

    def digest(self, entry: Entry) -> bytes:
        if not entry.size:
            return _EMPTY
        digest = self._index.digests.get(entry.inode)
        if digest is None:
            descriptor, offset, _, _ = self.stored(entry)
            try:
                digest = self._index.digests[entry.inode] = digest_of(descriptor, offset, entry.size)
            except OSError as error:
                raise ServerError(f"{entry.path}: {reason(error)}") from error
        return digest

    async def close(self) -> None:
        """Free the files. Readers must be closed. Idempotent.

        The kernel drops pages of an unnamed file that it has not written yet, so close a context
        before the disk is synchronized. Pages that it is writing now take as long as the disk
        needs; after `_CLOSING` seconds that goes on without the caller. A build that received
        nothing has no such pages.
        """
        descriptors, self._files = self._files, []
        if not descriptors:
            return

        def close() -> None:
            for descriptor in descriptors:
                os.close(descriptor)

        self._closed()
        if not any(_has_own_pages(descriptor) for descriptor in descriptors):
            close()
            return
        try:
            closing = in_own_thread(close)
        except ServerError:  # the host allows no more threads
            close()
            return
        closing.add_done_callback(lambda done: done.exception())
        await asyncio.wait([closing], timeout=_CLOSING)


def _has_own_pages(descriptor: int) -> bool:
    """True if pages are freed with the descriptor. Those that the disk does not have yet count as
    blocks, too.
    """
    found = os.fstat(descriptor)
    return not found.st_nlink and found.st_blocks > 0


_EMPTY = hashlib.sha256(b"").digest()


async def receive(
    body: AsyncIterator[bytes], directory: Path, making: layers.Layers, *, links_out: bool = False
) -> Context:
    """Receive a context, compressed or not, into an unnamed file of `directory`.

    `links_out`: allow relative links that lead out of the context, as BuildKit does and Docker's
    classic builder does not. They are never followed out of it.
    """
    feed = Feed(making.processors)  # one body too many is refused before anything is done
    try:
        spool = await opened(asyncio.to_thread(files.temporary_file, directory))
        try:
            receiving = _Receiving(making.processors, spool, directory, links_out=links_out)
            size = await process(feed, body, receiving.run)
        except BaseException:
            await uninterrupted(asyncio.to_thread(os.close, spool))
            raise
    except OSError as error:
        raise ServerError(f"receiving a build context into {directory}: {reason(error)}") from error
    return Context(spool, size, receiving.index)


def room(descriptor: int) -> int:
    """The bytes that contexts may still take on the disk of a file. Blocking."""
    found = os.fstatvfs(descriptor)
    return found.f_bavail * found.f_frsize - min(_RESERVE, found.f_blocks * found.f_frsize // 20)


def no_room(directory: Path) -> ServerError:
    """The error for a context that finds no `room` below a directory."""
    return ServerError(f"build context: there is not enough space for it on the disk of {directory}")


class _Behind:
    """What one thread has written to a file, for another one to read."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._changed = threading.Condition()
        self._written = 0
        self._ended = self._cut = False
        self._at = 0

    def advance(self, written: int) -> None:
        if written - self._written >= _BUFFER:
            with self._changed:
                self._written = written
                if self._at < written:
                    self._changed.notify()

    def end(self, written: int) -> None:
        with self._changed:
            self._written = written
            self._ended = True
            self._changed.notify()

    def cut(self) -> None:
        """End the reading: its result is not needed any more."""
        self._cut = True

    def skip(self, size: int) -> None:
        """Leave out bytes, which need not be written yet."""
        with self._changed:
            self._at += size

    def readinto(self, buffer: memoryview) -> int:
        if self._cut:
            raise ArchiveError("truncated archive")
        if self._at >= self._written:
            with self._changed:
                while self._at >= self._written and not self._ended:
                    self._changed.wait()
            if self._at > self._written:
                raise ArchiveError("truncated archive")
        got = os.preadv(self._descriptor, [buffer[: self._written - self._at]], self._at)
        self._at += got
        return got


class _Receiving:
    """The work of the threads: one writes the archive to the file, and after `_EARLY` bytes another
    one reads it there, for the index and the digests.
    """

    def __init__(self, processors: threading.Semaphore, spool: int, directory: Path, *, links_out: bool) -> None:
        """`directory`: of the spool, for messages."""
        self._directory = directory
        self._processors = processors
        self._spool = spool
        self._behind = _Behind(spool)
        self._failure: BaseException | None = None
        """Of the index."""
        self._indexed = False
        """True if the end of the archive was found."""
        self.index = Index(links_out=links_out)

    def run(self, feed: Feed) -> int:
        """Receive the whole archive. Returns its size, uncompressed."""
        with self._processors:
            try:
                return self._receive(content(feed))
            except (EngineError, OSError):
                with contextlib.suppress(EngineError):
                    feed.skip()
                raise

    def _receive(self, source: Source) -> int:
        reader: Helper[None] | None = None
        at = 0
        limit = room(self._spool)
        try:
            with memoryview(bytearray(_BUFFER)) as buffer:
                while got := source.readinto(buffer):
                    if self._failure is not None:
                        raise self._failure
                    if self._indexed:
                        continue  # bytes after the end of the archive
                    if at + got > limit:
                        raise no_room(self._directory)
                    written = files.write_sparse(self._spool, buffer[:got], at)
                    at += got
                    if not written:
                        os.ftruncate(self._spool, at)
                    self._behind.advance(at)
                    if reader is None and at > _EARLY:
                        reader = Helper(self._follow)
        except BaseException:
            self._behind.cut()
            raise
        finally:
            self._behind.end(at)
            followed = reader is not None and reader.joined()
        if not followed:
            self._walk()
        if self._failure is not None:
            raise self._failure
        return at

    def _follow(self) -> None:
        become_batch()
        self._walk()

    def _walk(self) -> None:
        try:
            members = _members.Members(self._behind)
            while batch := members.take(_BATCH, LARGE):
                for member in batch:
                    self.index.add(member)
            self._indexed = True
        except ArchiveError as error:
            self._failure = InvalidParameter(f"build context: {error}")
        except BaseException as error:
            self._failure = error


def of_directory(root: int, dockerfile: str) -> DirectoryTree:
    """The context in a directory that the engine fetched, without the files that its
    `<dockerfile>.dockerignore` or `.dockerignore` excludes. Blocking.
    """
    tree = DirectoryTree(root)
    for name in (f"{dockerfile}{_IGNORE}", _IGNORE):
        if tree.resolve(name) is not None:
            return DirectoryTree(root, ignore=Patterns.parse(tree.read(name, _MAX_IGNORE)))
    return tree


__all__ = ["OFFSET_BITS", "Context", "Index", "Stored", "no_room", "of_directory", "receive", "room"]
