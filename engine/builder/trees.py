"""Trees of files that COPY and ADD read: what all of them offer, directories, and files in memory.

Paths are relative to the tree's root, without empty parts, `.` and `..`; "" is the root. A tree may
come from a client or a container, so links are followed inside it and nothing else is trusted.

Not here: the context that a client sends (context.py), the choice of files (copying.py).
Owns: nothing; a directory's descriptor stays the caller's.
Threads: one at a time. A `DirectoryTree` reads the disk, so it is used in threads only.
Raises: InvalidParameter for what a tree may not contain, ServerError with the kernel's reason.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import posixpath
import stat
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

import msgspec

from engine.builder.ignore import Patterns
from engine.errors import InvalidParameter, NotFound, ServerError, reason, reason_with_file
from engine.system import files
from engine.system.threads import Helper, become_batch, checkpoint

FILE, DIRECTORY, LINK, CHARACTER, BLOCK, FIFO = "0", "5", "2", "3", "4", "6"
"""Kinds of entries: the type flags of tar."""

_KINDS = {
    stat.S_IFREG: FILE,
    stat.S_IFDIR: DIRECTORY,
    stat.S_IFLNK: LINK,
    stat.S_IFCHR: CHARACTER,
    stat.S_IFBLK: BLOCK,
    stat.S_IFIFO: FIFO,
}
_MISSING = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV, errno.ENAMETOOLONG)
_NO_ATTRIBUTES = (errno.EOPNOTSUPP, errno.EPERM, errno.EACCES, errno.ENOENT, errno.ENODATA)
_LINKS = 255
"""Links that are followed in one path, as in Docker."""
_PARTS = 16384
_MAX_MAJOR, _MAX_MINOR = 0xFFF, 0xFFFFF
"""Of Linux's device numbers."""
_CHUNK = 512 << 10
LARGE = 8 << 20
"""Bytes of content above which its digest is computed in several threads, when it is needed."""
_HASHED = 4 << 20
"""Bytes that a thread hashes at a time."""


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
        """The digest of a regular file's content, as `digest_of` computes it."""


def clean(path: str) -> str | None:
    """A path without empty parts, `.` and `..`; None if it leads above the root."""
    done: list[str] = []
    for name in path.split("/"):
        if name == "..":
            if not done:
                return None
            done.pop()
        elif name not in ("", "."):
            done.append(name)
    return "/".join(done)


def source_path(source: str, *, rooted: bool) -> str:
    """The path in a tree that a source names. `rooted`: as at `/`, `..` of the root is the root.
    Otherwise InvalidParameter is raised for a source that leads above the root.
    """
    path = posixpath.normpath("/" + source).lstrip("/") if rooted else clean(source)
    if path is None:
        raise InvalidParameter(f"Forbidden path outside the build context: {source} ()")
    return path


def check_device(path: str, kind: str, major: int, minor: int) -> None:
    """Raises InvalidParameter for a device that a layer cannot have. `kind`: of an Entry."""
    if kind == CHARACTER and not major and not minor:
        raise InvalidParameter(f"{path}: the device 0/0 is reserved for layers")
    if not (0 <= major <= _MAX_MAJOR and 0 <= minor <= _MAX_MINOR):
        # The kernel would take the low bits, and those may be 0/0.
        raise InvalidParameter(f"{path}: there is no device {major}/{minor}")


class _Found(Protocol):
    def find(self, path: str, /) -> Entry | None: ...


def followed(tree: _Found, path: str) -> Entry | None:
    """`Tree.resolve` by `Tree.find`: follow links as if the tree's root were `/`."""
    entry = tree.find(path) if clean(path) == path else None
    if entry is not None and entry.kind != LINK:
        return entry
    waiting = path.split("/")[::-1]
    done: list[str] = []
    links = steps = 0
    while waiting:
        steps += 1
        if steps > _PARTS:
            raise InvalidParameter(f"{path}: the targets of its links are too long")
        name = waiting.pop()
        if name in ("", "."):
            continue
        if name == "..":
            del done[-1:]
            continue
        at = "/".join((*done, name))
        entry = tree.find(at)
        if entry is None:
            return None
        if entry.kind != LINK:
            if entry.kind != DIRECTORY and any(name not in ("", ".") for name in waiting):
                return None
            done.append(name)
            continue
        links += 1
        if links > _LINKS:
            raise InvalidParameter(f"{path}: too many levels of symbolic links")
        if entry.target.startswith("/"):
            done = []
        waiting += entry.target.split("/")[::-1]
    return tree.find("/".join(done))


def read_regular(tree: Tree, path: str, limit: int) -> bytes:
    """`Tree.read` by `Tree.resolve` and `Tree.reader`."""
    entry = tree.resolve(path)
    if entry is None:
        raise NotFound(f"{tree.where}{path}: no such file or directory")
    if entry.kind != FILE:
        raise InvalidParameter(f"{path}: not a regular file")
    if entry.size > limit:
        raise InvalidParameter(f"{path}: {entry.size} bytes, and at most {limit} are allowed")
    buffer = bytearray(entry.size)
    filled = 0
    file = tree.reader(entry)
    try:
        with memoryview(buffer) as view:
            while filled < len(buffer) and (got := file.readinto(view[filled:])):
                filled += got
    finally:
        file.close()
    return bytes(buffer[:filled])


def digest_of(descriptor: int, offset: int, size: int) -> bytes:
    """The digest of content in a file: a sha256, or of a large one the sha256 of the digests of its
    chunks, which several threads compute. Raises OSError.
    """
    if size <= LARGE:
        return _hashed(descriptor, offset, size)
    end = offset + size
    begins = range(offset, end, _HASHED)
    left = iter(begins)  # all threads take from it
    digests: dict[int, bytes] = {}

    def hash_next() -> bool:
        at = next(left, end)
        if at < end:
            digests[at] = _hashed(descriptor, at, min(_HASHED, end - at))
        return at < end

    def help_out() -> None:
        become_batch()
        while hash_next():
            pass

    with contextlib.ExitStack() as stack:
        for _ in range(min(4, os.cpu_count() or 1) - 1):
            stack.callback(Helper(help_out).joined)
        stack.callback(deque, left, 0)  # after a failure nothing is left
        while hash_next():
            checkpoint()
    return _of_chunks(size, (digests[at] for at in begins))


def _hashed(descriptor: int, offset: int, size: int) -> bytes:
    """The sha256 of a range, or of what the file has of it."""
    hashed = hashlib.sha256()
    with memoryview(bytearray(min(size, _CHUNK))) as buffer:
        while size and (got := os.preadv(descriptor, [buffer[:size]], offset)):
            hashed.update(buffer[:got])
            offset, size = offset + got, size - got
    return hashed.digest()


class Hashing:
    """`digest_of` content that arrives in pieces."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._hashed = hashlib.sha256()
        self._left = _HASHED
        """Bytes until the end of a large content's chunk."""
        self._digests: list[bytes] = []

    def update(self, data: bytes | memoryview) -> None:
        """The next piece."""
        if self._size <= LARGE:
            self._hashed.update(data)
            return
        view = memoryview(data)
        while view:
            piece, view = view[: self._left], view[self._left :]
            self._hashed.update(piece)
            self._left -= len(piece)
            if not self._left:
                self._digests.append(self._hashed.digest())
                self._hashed, self._left = hashlib.sha256(), _HASHED

    def digest(self) -> bytes:
        """The digest when all pieces have arrived."""
        if self._size <= LARGE:
            return self._hashed.digest()
        digests = [*self._digests, *([self._hashed.digest()] if self._left < _HASHED else [])]
        return _of_chunks(self._size, digests)


def _of_chunks(size: int, digests: Iterable[bytes]) -> bytes:
    return hashlib.sha256(b"chunks %d " % size + b"".join(digests)).digest()


class _Opened:
    """A file by its descriptor."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def readinto(self, buffer: memoryview) -> int:
        return os.readv(self.descriptor, [buffer])

    def close(self) -> None:
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class DirectoryTree:
    """The files below a directory: a stage's root, or a checkout of a repository.

    Sockets are left out, as tar has no type for them.
    """

    where = "stat "

    def __init__(self, root: int, *, ignore: Patterns | None = None) -> None:
        """`ignore`: entries that match are left out."""
        self.root = root
        """The directory's descriptor, which stays the caller's."""
        self._ignore = ignore if ignore else None

    def find(self, path: str) -> Entry | None:
        if self._ignore is not None and self._ignore.excluded(path) and not self._kept(path):
            return None
        return self._find(path)

    def _find(self, path: str) -> Entry | None:
        above, _, name = path.rpartition("/")
        try:
            directory = files.open_without_links(self.root, above, os.O_PATH | os.O_DIRECTORY)
            try:
                return self._entry(directory, name or ".", path)
            finally:
                os.close(directory)
        except OSError as error:
            if error.errno in _MISSING:
                return None
            raise ServerError(f"{path}: {reason(error)}") from error

    def _kept(self, path: str) -> bool:
        """True if an excluded directory has files that are included again."""
        assert self._ignore is not None
        if not self._ignore.again:
            return False
        entry = self._find(path)
        return entry is not None and entry.kind == DIRECTORY and next(self.walk(path), None) is not None

    def _entry(self, directory: int, name: str, path: str) -> Entry | None:
        """The entry called `name` in an open directory. Raises OSError."""
        found = os.stat(name, dir_fd=directory, follow_symlinks=False)
        kind = _KINDS.get(stat.S_IFMT(found.st_mode))
        if kind is None:
            return None
        return Entry(
            path,
            kind,
            stat.S_IMODE(found.st_mode),
            found.st_uid,
            found.st_gid,
            found.st_size if kind == FILE else 0,
            found.st_mtime_ns,
            os.readlink(name, dir_fd=directory) if kind == LINK else "",
            _attributes(f"/proc/self/fd/{directory}/{name}"),
            os.major(found.st_rdev) if kind in (CHARACTER, BLOCK) else 0,
            os.minor(found.st_rdev) if kind in (CHARACTER, BLOCK) else 0,
            # In a merged root, files of two layers may have one inode number on two devices.
            (found.st_dev << 64 | found.st_ino) if found.st_nlink > 1 and kind != DIRECTORY else 0,
        )

    def children(self, path: str) -> list[str]:
        return [name for name, entry in self._listed(path) if self._included(entry)]

    def _included(self, entry: Entry) -> bool:
        return self._ignore is None or not self._ignore.excluded(entry.path) or self._kept(entry.path)

    def _listed(self, path: str) -> list[tuple[str, Entry]]:
        """The entries of a directory, sorted by name."""
        found: list[tuple[str, Entry]] = []
        try:
            directory = files.open_without_links(self.root, path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                for name in sorted(os.listdir(directory)):
                    entry = self._entry(directory, name, f"{path}/{name}" if path else name)
                    if entry is not None:
                        found.append((name, entry))
            finally:
                os.close(directory)
        except OSError as error:
            raise ServerError(f"{path or '/'}: {reason_with_file(error)}") from error
        return found

    def walk(self, path: str) -> Iterator[tuple[str, Entry]]:
        start = len(path) + 1 if path else 0
        waiting = [entry for _, entry in reversed(self._listed(path))]
        held: list[Entry] = []
        """Excluded directories above the next entry, which are copied if it is included."""
        while waiting:
            checkpoint()
            entry = waiting.pop()
            while held and not entry.path.startswith(held[-1].path + "/"):
                held.pop()
            if self._ignore is not None and self._ignore.excluded(entry.path):
                if entry.kind == DIRECTORY and self._ignore.again:
                    held.append(entry)
                    waiting.extend(below for _, below in reversed(self._listed(entry.path)))
                continue
            for above in held:
                yield above.path[start:], above
            held.clear()
            yield entry.path[start:], entry
            if entry.kind == DIRECTORY:
                waiting.extend(below for _, below in reversed(self._listed(entry.path)))

    def resolve(self, path: str) -> Entry | None:
        return followed(self, path)

    def read(self, path: str, limit: int) -> bytes:
        return read_regular(self, path, limit)

    def reader(self, entry: Entry) -> _Opened:
        try:
            descriptor = files.open_without_links(
                self.root, entry.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
            )
        except OSError as error:
            raise ServerError(f"{entry.path}: {reason(error)}") from error
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise ServerError(f"{entry.path}: not a regular file any more")
        return _Opened(descriptor)

    def digest(self, entry: Entry) -> bytes:
        checkpoint()
        file = self.reader(entry)
        try:
            return digest_of(file.descriptor, 0, entry.size)
        except OSError as error:
            raise ServerError(f"{entry.path}: {reason(error)}") from error
        finally:
            file.close()


def _attributes(path: str) -> tuple[tuple[bytes, bytes], ...]:
    """Extended attributes, except overlayfs's and the kernel's `system.`. `path`: through the
    descriptor of its directory. Raises OSError.
    """
    try:
        names = os.listxattr(path, follow_symlinks=False)
    except OSError as error:
        if error.errno in _NO_ATTRIBUTES:
            return ()
        raise
    found: list[tuple[bytes, bytes]] = []
    for name in names:
        if name.startswith(("trusted.overlay.", "system.")) or "=" in name:
            continue
        with contextlib.suppress(OSError):  # removed meanwhile, or not readable
            found.append((os.fsencode(name), os.getxattr(path, name, follow_symlinks=False)))
    return tuple(sorted(found))


class _InMemory:
    def __init__(self, content: bytes) -> None:
        self._left = memoryview(content)

    def readinto(self, buffer: memoryview) -> int:
        size = min(len(buffer), len(self._left))
        buffer[:size] = self._left[:size]
        self._left = self._left[size:]
        return size

    def close(self) -> None:
        self._left = memoryview(b"")


class MemoryTree:
    """Regular files in memory, in the root: here-documents."""

    where = "stat "

    def __init__(self, contents: Mapping[str, bytes], *, mode: int = 0o644, mtime: int = 0) -> None:
        self._contents = contents
        self._mode = mode
        self._mtime = mtime

    def find(self, path: str) -> Entry | None:
        if not path:
            return Entry("", DIRECTORY, 0o755)
        content = self._contents.get(path)
        return None if content is None else Entry(path, FILE, self._mode, size=len(content), mtime=self._mtime)

    def resolve(self, path: str) -> Entry | None:
        return self.find(posixpath.normpath("/" + path).lstrip("/"))

    def children(self, path: str) -> list[str]:
        return [] if path else sorted(self._contents)

    def walk(self, path: str) -> Iterator[tuple[str, Entry]]:
        for name in self.children(path):
            entry = self.find(name)
            assert entry is not None
            yield name, entry

    def read(self, path: str, limit: int) -> bytes:
        return read_regular(self, path, limit)

    def reader(self, entry: Entry) -> _InMemory:
        return _InMemory(self._contents[entry.path])

    def digest(self, entry: Entry) -> bytes:
        return hashlib.sha256(self._contents[entry.path]).digest()


__all__ = [
    "BLOCK",
    "CHARACTER",
    "DIRECTORY",
    "FIFO",
    "FILE",
    "LARGE",
    "LINK",
    "DirectoryTree",
    "Entry",
    "File",
    "Hashing",
    "MemoryTree",
    "Tree",
    "check_device",
    "clean",
    "digest_of",
    "followed",
    "read_regular",
    "source_path",
]
