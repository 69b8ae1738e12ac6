"""Contents of clients' directories that stay between builds: a client sends only what has changed.

```
ROOT/build/contexts/<key>/index      what is known of a directory's files: a header, and records
ROOT/build/contexts/<key>/<segment>  contents that one transfer has received, back to back
```

A transfer looks up each STAT of the client in the records. If an earlier transfer received the
same STAT, its content is read from a segment, and is not asked for. The other contents go to an
unnamed file, which becomes a segment when the transfer is complete. A segment never changes, and
the index is replaced whole. So a killed client, a killed daemon or a full disk leave the state
before the transfer. A build holds descriptors of its segments: their removal does not disturb it.

A STAT must identify a content. It has times and sizes, but no inode. Asked for again are:

- racy files (the term is git's): their time is less than RACY_NS before the transfer, so a later
  change may leave the time as it is;
- weak files: their time has no part below a millisecond, so a program has probably set it;
- twins: another file of the context has or had the same size and time, and other content. Renaming
  one to the other changes no STAT but that of the directory, which must be unchanged. Twins of
  one name are always asked for: renaming directories above them may change no STAT at all.

A file may change after the client has listed it, and before or while the client reads it. So the
files that were received are listed once more: those with another STAT are read again, and a file
that changes each time fails the build.

The key names the directory, and not only its last part: see `key_of`. An index from before the last
boot is dropped, because the blocks of its segments may not have reached the disk.

Owns:    that directory; per context a lock, which guards its files.
Threads: the event loop's; files in threads. A build waits for no other one, unless they have one
         session: then the second would ask for the files that the first is receiving.
Raises:  ServerError with the kernel's reason. What cannot be kept is logged, and fails no build.
Not here: the protocol (`buildkit/filesync.py`), which records are pruned (`prune.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import logging
import os
import posixpath
import re
import secrets
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Container, Iterable, Iterator, Sequence, Set
from pathlib import Path
from typing import NamedTuple, TypeAlias

import msgspec

from engine.builder.caches import NamedLock, named_lock
from engine.builder.context import OFFSET_BITS, Context, Index, no_room, room
from engine.builder.trees import DIRECTORY, FILE, Entry, Hashing, clean
from engine.errors import InvalidParameter, ServerError, reason, reason_with_file, words
from engine.system import files
from engine.system.tasks import spawn
from engine.system.threads import uninterrupted

_log = logging.getLogger(__name__)

RACY_NS = 3_000_000_000
"""A content is kept if its file's time is at least so long before the transfer."""
UNUSED_NS = 48 * 3600 * 10**9
"""Records that no transfer has listed for so long are dropped."""
SEGMENTS = 16
"""Segments of a context. When it has more, they are copied into one."""
BUDGET, SHARE = 2 << 30, 20
"""All contexts may take so many bytes, or the SHAREth part of the disk if that is more; one context
may take half of it.
"""
CONTEXTS = 1000
"""Contexts that are kept.

A client that builds in a new directory each time makes many small ones.
"""

READINGS = 5
"""Transfers within which a file must stay as it is."""
PAUSE = 0.05
"""Seconds between the first two of them, and more between later ones."""

_FORMAT = 1
_USED_NS = 3600 * 10**9
"""Steps in which the time of a record's last use is written."""
_BLOCK = 256
"""Records that are decoded at once: a thread holds the GIL for so long."""
_BATCH = 1 << 20
"""Bytes that are passed to a thread at once."""
_TICK_NS = 20_000_000
"""More than a step of a file system's clock: changes within it may leave one time."""
_STAT = 1000
"""Bytes of a STAT that need not be counted beside its file.

It may have fields without a meaning.
"""
_PATHS = 8 << 10
"""Characters of the paths by which files are listed alone."""
_LENGTH = struct.Struct("<I")


class Listed(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A file as a client lists it. The fields are those of `trees.Entry`; `kind` may also be "1",
    a hard link to `target`.
    """

    path: str
    kind: str
    mode: int
    uid: int
    gid: int
    size: int
    mtime: int
    target: str = ""
    xattrs: tuple[tuple[bytes, bytes], ...] = ()
    major: int = 0
    minor: int = 0


class Record(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What is known of a file."""

    stat: bytes
    """Its STAT as the client has sent it."""
    file: Listed
    used: int
    """When a transfer has listed it, in ns since the epoch."""
    segment: str = ""
    """Where its content is; "" without content."""
    offset: int = 0
    digest: bytes = b""
    twin: bool = False
    namesake: bool = False
    """It is a twin of a file with its name."""


class _Header(msgspec.Struct):
    format: int
    boot: str
    what: str
    segments: dict[str, int]
    """Sizes by name."""


class _Index(NamedTuple):
    what: str
    segments: dict[str, int]
    records: list[Record]


class KeptContext(NamedTuple):
    """A context as prune sees it. `used`: ns since the epoch."""

    key: str
    what: str
    size: int
    used: int
    in_use: bool


class _Held:
    """A context in memory."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.users = 0
        self.what = ""
        self.size = self.used = 0


def key_of(peer: str, shared_key: str, name: str, hint: str = "") -> str:
    """The key of a client's directory; "" if too little is known of it to keep its files. Blocking.

    `shared_key`: the last part of the directory's path, `:`, and an id of the client (X-Docker-
    Expose-Session-Sharedkey). Directories of different paths may share it, so the key also has the
    peer: its host, or the user of a local process, its mount namespace, its working directory, and
    the paths in its arguments that may be the directory. `name`: of the directory in the session.
    `hint`: the client's own key of a named context.
    """
    if not shared_key:
        return ""
    directory = shared_key.rpartition(":")[0] or shared_key
    if peer.startswith("unix:"):
        pid, _, uid = peer.removeprefix("unix:").partition("/")
        try:
            working = os.readlink(f"/proc/{pid}/cwd")
            namespace = os.readlink(f"/proc/{pid}/ns/mnt")
            arguments = files.read_file(f"/proc/{pid}/cmdline", _MAX_ARGUMENTS)
        except OSError:  # it has ended
            return ""
        if not arguments:
            return ""
        places = {*_places(working, arguments.decode("utf-8", "surrogateescape"), directory, name)}
        peer = "\0".join((uid, namespace, working, *sorted(places)))
    elif not peer:
        return ""
    whole = "\0\0".join((peer, shared_key, name, hint))
    return hashlib.sha256(whole.encode("utf-8", "surrogateescape")).hexdigest()[:32]


_MAX_ARGUMENTS = 4 << 20


def _places(working: str, arguments: str, directory: str, name: str) -> Iterator[str]:
    """The paths in a process's arguments that end with `directory`, up to that part, and those that
    follow `name=`.
    """
    for argument in arguments.split("\0"):
        for piece in argument.replace(",", "=").split("="):
            parts = posixpath.normpath(posixpath.join(working, piece)).split("/")
            if directory in parts:
                yield "/".join(parts[: len(parts) - parts[::-1].index(directory)])
        before, _, path = argument.partition("=")
        if before == name:
            yield posixpath.normpath(posixpath.join(working, path))


class KeptContexts:
    """See the module."""

    def __init__(self, root: Path, temporary: Path) -> None:
        self._directory = root / "build" / "contexts"
        self.temporary = temporary
        """The place for files that last as long as a build."""
        self._held: dict[str, _Held] = {}
        self._turns: dict[str, NamedLock] = {}
        self._keeping: set[asyncio.Task[None]] = set()
        self._boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()

    @contextlib.asynccontextmanager
    async def transfer(self, key: str, what: str, session_id: str) -> AsyncIterator[Transfer]:
        """A transfer that begins now. Its `receive` gives the context, which outlives it. `key`: ""
        keeps nothing. `what`: the directory in words.
        """
        async with contextlib.AsyncExitStack() as stack:
            if key:
                await stack.enter_async_context(named_lock(self._turns, f"{key} {session_id}"))
            made = await self._begin(key, what)
            try:
                yield made
            except BaseException:
                await made.discard()
                raise

    async def _begin(self, key: str, what: str) -> Transfer:
        held = self._hold(key) if key else None
        try:
            async with held.lock if held is not None else contextlib.nullcontext():
                opening = asyncio.ensure_future(asyncio.to_thread(self._opened, key))
                try:
                    opened = await uninterrupted(opening)
                except asyncio.CancelledError:
                    if opening.exception() is None:
                        opening.result().close()
                    raise
        except BaseException as error:
            self.release(key)
            if isinstance(error, OSError):
                raise ServerError(f"receiving a build context: {reason_with_file(error)}") from error
            raise
        return Transfer(self, key, what, opened)

    def _hold(self, key: str) -> _Held:
        """The context, with one user more. `release` ends that use."""
        held = self._held.setdefault(key, _Held())
        held.users += 1
        return held

    def release(self, key: str) -> None:
        """End a use of a context, and forget one that has no files. `key`: "" does nothing."""
        if key:
            held = self._held[key]
            held.users -= 1
            if not held.users and not held.size:
                del self._held[key]

    def _opened(self, key: str) -> _Opened:
        """Open what a transfer needs. In a thread, with the lock."""
        with contextlib.ExitStack() as undo:

            def opened(descriptor: int) -> int:
                undo.callback(os.close, descriptor)
                return descriptor

            passing = opened(files.temporary_file(self.temporary))
            if not key:
                undo.pop_all()
                return _Opened({}, [passing], [])
            directory = self._directory / key
            self._directory.mkdir(0o700, parents=True, exist_ok=True)
            index = self._read(key)
            fresh = opened(files.temporary_file(self._directory))
            segments = [opened(os.open(directory / name, os.O_RDONLY | os.O_CLOEXEC)) for name in index.segments]
            undo.pop_all()
            known = {record.stat: record for record in index.records}
            return _Opened(known, [passing, fresh, *segments], [*index.segments])

    # --- keeping ----------------------------------------------------------------------------------

    def keep(self, key: str, what: str, records: list[Record], begun: int, fresh: int, size: int) -> None:
        """Keep what a transfer that has `begun` then has listed and received, in the background.
        `records`: none of them if the transfer has found all of them as they are.
        `fresh`: the file with what it has received, which belongs to this from now on, and its
        size.
        """
        held = self._hold(key)

        async def work() -> None:
            try:
                async with held.lock:
                    kept = await uninterrupted(asyncio.to_thread(self._keep, key, what, records, begun, fresh, size))
                    held.what, held.size, held.used = what, kept.size, time.time_ns()
            except OSError as error:
                _log.warning("a build context is not kept: %s", reason_with_file(error))
                return
            finally:
                # In a thread: the last descriptor of an unnamed file frees its pages.
                await uninterrupted(asyncio.to_thread(os.close, fresh))
                self.release(key)
            await self._shrink(kept.budget)

        task = spawn(work(), "keeping a build context")
        self._keeping.add(task)
        task.add_done_callback(self._keeping.discard)

    def _keep(self, key: str, what: str, records: list[Record], begun: int, fresh: int, size: int) -> _Kept:
        """In a thread, with the lock."""
        disk = os.statvfs(self._directory)
        budget = max(BUDGET, disk.f_blocks * disk.f_frsize // SHARE)
        directory = self._directory / key
        if not records:
            with contextlib.suppress(FileNotFoundError):  # another build has removed it
                os.utime(directory / _INDEX)
            return _Kept(self._held[key].size, budget)
        index = self._read(key)
        now = time.time_ns()
        known = {record.file.path: record for record in index.records if now - record.used < UNUSED_NS}
        changed = len(known) != len(index.records)
        segments = {**index.segments}
        name = secrets.token_hex(8)
        for listed in records:
            if listed.segment not in ("", _FRESH, *segments):
                continue  # it is not kept, or another build has replaced it
            if not _is_text(listed.file):
                continue  # the index holds text only
            record = msgspec.structs.replace(listed, segment=name) if listed.segment == _FRESH else listed
            before = known.get(record.file.path)
            if before is None or before.stat != record.stat or before.digest != record.digest:
                known[record.file.path] = record
                changed = True
            elif begun - before.used > _USED_NS or before.file.mtime >= before.used - RACY_NS:
                known[record.file.path] = msgspec.structs.replace(before, used=begun)
                changed = True
        if not changed and segments:
            os.utime(directory / _INDEX)
            return _Kept(sum(segments.values()), budget)
        kept = [*_with_twins(known.values(), (*index.records, *records))]
        live = dict.fromkeys((*segments, name), 0)
        for record in kept:
            if record.segment:
                live[record.segment] += record.file.size
        total = sum(live.values())
        if not total or total > budget // 2:
            if total:
                _log.info("a build context of %d bytes is too large to be kept", total)
            self._remove(key)
            return _Kept(0, budget)
        try:
            directory.mkdir(0o700, exist_ok=True)
            if live[name]:
                _link(fresh, directory / name)
                segments[name] = size
            segments = {segment: length for segment, length in segments.items() if live[segment]}
            if len(segments) > SEGMENTS or sum(segments.values()) > 2 * total:
                name = secrets.token_hex(8)
                kept = _compacted(directory, kept, name)
                segments = {name: total}
            self._write(key, _Index(what, segments, kept))
        except OSError:
            self._clean(key, index.segments)
            raise
        self._clean(key, segments)
        return _Kept(sum(segments.values()), budget)

    def _write(self, key: str, index: _Index) -> None:
        header = _Header(_FORMAT, self._boot, index.what, index.segments)
        blocks = [msgspec.msgpack.encode(header)]
        for at in range(0, len(index.records), _BLOCK):
            blocks.append(msgspec.msgpack.encode(index.records[at : at + _BLOCK]))
        data = b"".join([_LENGTH.pack(len(block)) + block for block in blocks])
        files.write_atomically(self._directory / key / _INDEX, data, 0o600)

    def _read(self, key: str) -> _Index:
        """The index of a context, without what a crash has left beside it. An empty one if there is
        none, or none of this boot. In a thread, with the lock.
        """
        directory = self._directory / key
        try:
            index = self._decoded(directory)
        except FileNotFoundError:
            index = _Index("", {}, [])
        except (OSError, ValueError, LookupError, struct.error, msgspec.MsgspecError) as error:
            _log.info("the files of a build context are dropped: %s", words(error))
            index = _Index("", {}, [])
            with contextlib.suppress(FileNotFoundError):
                os.unlink(directory / _INDEX)
        self._clean(key, index.segments)
        return index

    def _decoded(self, directory: Path) -> _Index:
        """Raises OSError, ValueError, LookupError, struct.error and MsgspecError for what cannot be
        used.
        """
        data = memoryview((directory / _INDEX).read_bytes())
        blocks = []
        at = 0
        while at < len(data):
            (length,) = _LENGTH.unpack_from(data, at)
            blocks.append(data[at + _LENGTH.size : at + _LENGTH.size + length])
            at += _LENGTH.size + length
        header = msgspec.msgpack.decode(blocks[0], type=_Header)
        if header.format != _FORMAT or header.boot != self._boot:
            raise ValueError("they are of another boot or engine")
        for name, size in header.segments.items():
            if os.stat(directory / name).st_size != size:
                raise ValueError(f"the size of {name} is wrong")
        records = [record for block in blocks[1:] for record in msgspec.msgpack.decode(block, type=list[Record])]
        return _Index(header.what, header.segments, records)

    def _clean(self, key: str, segments: Iterable[str]) -> None:
        """Remove files that no index names."""
        with contextlib.suppress(FileNotFoundError):
            for name in {*os.listdir(self._directory / key)} - {_INDEX, *segments}:
                os.unlink(self._directory / key / name)

    def _remove(self, key: str) -> None:
        directory = self._directory / key
        with contextlib.suppress(FileNotFoundError):
            os.unlink(directory / _INDEX)  # first: a crash leaves no index without its segments
        files.remove_tree(directory)

    async def _shrink(self, budget: int) -> None:
        """Remove the contexts that were used the longest time ago, until the others are few and
        small enough.
        """
        contexts = self.all()
        number, size = len(contexts), sum(context.size for context in contexts)
        for context in contexts:
            if size <= budget and number <= CONTEXTS:
                break
            if await self.remove(context.key):
                number, size = number - 1, size - context.size

    # --- prune ------------------------------------------------------------------------------------

    def all(self) -> list[KeptContext]:
        """Every context that has files, the least recently used first."""
        found = [
            KeptContext(key, held.what, held.size, held.used, held.users > 0)
            for key, held in self._held.items()
            if held.size
        ]
        return sorted(found, key=lambda each: each.used)

    async def remove(self, key: str) -> bool:
        """Remove a context. False when a build uses it. Raises ServerError."""
        if key not in self._held or self._held[key].users:
            return False
        held = self._hold(key)
        try:
            async with held.lock:
                if held.users > 1:
                    return False
                await uninterrupted(asyncio.to_thread(self._remove, key))
                held.size = 0
        except OSError as error:
            raise ServerError(f"build context {key}: {reason_with_file(error)}") from error
        finally:
            self.release(key)
        return True

    async def sweep(self) -> None:
        """Find the contexts of earlier runs, and remove what a crash has left."""
        try:
            keys = await asyncio.to_thread(os.listdir, self._directory)
        except FileNotFoundError:
            return
        for key in keys:
            held = self._hold(key)
            try:
                async with held.lock:
                    size, held.what, held.used = await uninterrupted(asyncio.to_thread(self._swept, key))
                    held.size = size
            except OSError as error:
                _log.warning("build context %s: %s", key, reason_with_file(error))
            finally:
                self.release(key)

    def _swept(self, key: str) -> tuple[int, str, int]:
        """Size, words and time of a context; it is removed if it has no files."""
        index = self._read(key)
        if not index.segments:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._directory / key / _INDEX)
            with contextlib.suppress(OSError):  # a transfer has begun
                os.rmdir(self._directory / key)
            return 0, "", 0
        return sum(index.segments.values()), index.what, (self._directory / key / _INDEX).stat().st_mtime_ns

    async def close(self) -> None:
        """Wait for what is being kept."""
        while self._keeping:
            await asyncio.wait([*self._keeping])


_INDEX = "index"
_FRESH, _PASSING = ".", "/"
"""The segment that a transfer makes, which has no name yet, and the file for contents that are not
kept.
"""


class _Kept(NamedTuple):
    size: int
    budget: int


class _Opened(NamedTuple):
    known: dict[bytes, Record]
    """By STAT."""
    descriptors: list[int]
    """A file for contents that are not kept, one for those that are, and the segments."""
    segments: list[str]

    def close(self) -> None:
        _close(self.descriptors)


def _identifies(mtime: int, seen: int) -> bool:
    """True if a file that had this time at `seen` gets another one with each later change: it is
    neither racy nor weak.
    """
    return mtime % 1_000_000 != 0 and mtime < seen - RACY_NS


def _with_twins(records: Iterable[Record], seen: Iterable[Record]) -> Iterator[Record]:
    """The records; marked are those whose size and time one in `seen` had with other content."""
    digests: dict[tuple[int, int, str], bytes] = {}
    twins = set()
    for record in seen:
        if record.segment:
            for alike, marked in zip(_alike(record.file), (record.twin, record.namesake), strict=True):
                if marked or digests.setdefault(alike, record.digest) != record.digest:
                    twins.add(alike)
    for record in records:
        twin, namesake = (bool(record.segment) and alike in twins for alike in _alike(record.file))
        if (record.twin, record.namesake) == (twin, namesake):
            yield record
        else:
            yield msgspec.structs.replace(record, twin=twin, namesake=namesake)


def _alike(file: Listed) -> tuple[tuple[int, int, str], tuple[int, int, str]]:
    """What twins have in common, and what twins of one name have in common."""
    return (file.size, file.mtime, ""), (file.size, file.mtime, posixpath.basename(file.path))


def _link(descriptor: int, path: Path) -> None:
    """Give an unnamed file a name. Raises OSError where the file system cannot do so."""
    # makes Python call linkat(2) with AT_SYMLINK_FOLLOW
    anywhere = files.open_directory(path.parent)
    try:
        os.link(f"/proc/self/fd/{descriptor}", path, src_dir_fd=anywhere, follow_symlinks=True)
    finally:
        os.close(anywhere)


def _compacted(directory: Path, records: list[Record], name: str) -> list[Record]:
    """Copy the contents of all records into one new segment."""
    found = []
    at = 0
    with contextlib.ExitStack() as stack:

        def opened(descriptor: int) -> int:
            stack.callback(os.close, descriptor)
            return descriptor

        target = opened(os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        sources: dict[str, int] = {}
        for record in records:
            if not record.segment:
                found.append(record)
                continue
            if record.segment not in sources:
                sources[record.segment] = opened(os.open(directory / record.segment, os.O_RDONLY | os.O_CLOEXEC))
            size = record.file.size
            _copy(sources[record.segment], record.offset, target, at, size)
            found.append(msgspec.structs.replace(record, segment=name, offset=at))
            at += size
    return found


def _copy(source: int, begin: int, target: int, at: int, size: int) -> None:
    """Copy a range of one file into another."""
    done = 0
    while done < size:
        copied = os.copy_file_range(source, target, size - done, begin + done, at + done)
        if not copied:
            raise OSError(errno.EIO, "a segment is too short")
        done += copied


# --- a transfer -----------------------------------------------------------------------------------


class _Incoming:
    """A content that is being received."""

    __slots__ = ("file", "hashing", "inode", "stat", "written")

    def __init__(self, file: Listed, stat: bytes, inode: int) -> None:
        self.file = file
        self.stat = stat
        self.inode = inode
        self.hashing = Hashing(file.size)
        self.written = 0


Copy: TypeAlias = "Callable[[Transfer | _Look, Sequence[str]], Awaitable[None]]"
"""Copies the client's directory to a receiver, or what some paths in it name."""


def _is_text(file: Listed) -> bool:
    try:
        f"{file.path}{file.target}".encode()
    except UnicodeEncodeError:
        return False
    return True


class _Look:
    """Receives a list alone, and finds out which of some STATs it has."""

    def __init__(self, stats: Set[bytes], known: Container[bytes]) -> None:
        """`known`: further STATs that may be in the list."""
        self.missing = set(stats)
        self._known = known

    def recall(self, stat: bytes) -> bool:
        if stat in self.missing:
            self.missing.remove(stat)
            return True
        return stat in self._known

    def add(self, _number: int, _stat: bytes, _file: Listed) -> bool:
        return False

    def write(self, number: int, _data: bytes | memoryview) -> None:
        raise AssertionError(f"file {number} was not asked for")

    def complete(self, number: int, *, whole: bool) -> None:
        raise AssertionError(f"file {number} was not asked for: {whole}")

    def full(self) -> bool:
        return False

    async def drained(self) -> None:
        pass


def _alone(paths: Sequence[str]) -> Sequence[str]:
    """The paths, if a client can list these files alone. None of them if it is to list all."""
    return paths if sum(map(len, paths)) <= _PATHS and all(map(_PLAIN.fullmatch, paths)) else ()


_PLAIN = re.compile(r"(?![! ])[^*?\[\]\\\x00-\x1f\x7f-\U0010ffff]+(?<! )")
"""Names of files that clients find as they are.

A path is a pattern for them, of which `!` may be the first character, and without blanks around it.
Not every client decodes names that are not ASCII.
"""


class Transfer:
    """One transfer of a directory."""

    def __init__(self, contexts: KeptContexts, key: str, what: str, opened: _Opened) -> None:
        self._contexts = contexts
        self._key = key
        self._what = what
        self._begun = time.time_ns()
        self._known = opened.known
        self._descriptors = opened.descriptors
        self._slots = {name: slot for slot, name in enumerate((_PASSING, _FRESH, *opened.segments))}
        self._ends = [1, 0]
        """Ends of the two files for contents. An offset of 0 in the first would be no inode."""
        self._begin()

    def _begin(self) -> None:
        """Begin the list."""
        self._reading = time.time_ns()
        self._recent = self._reading - _USED_NS
        self._news = False
        """The records are not as they were: the next transfer should find what this one has."""
        self._index = Index(links_out=True)
        self._listed: list[Record] = []
        """Files whose content was not asked for."""
        self._unchanged: set[str] = set()
        """Directories in which nothing was renamed since the last transfer."""
        self._last = ""
        self._incoming: dict[int, _Incoming] = {}
        self._asked: dict[bytes, Listed] = {}
        """Files whose content was asked for, by their STATs."""
        self._broken: set[bytes] = set()
        """Those of them whose size was another one."""
        self._received: dict[bytes, Record] = {}
        """Those of them that have arrived."""
        self._batch: list[tuple[_Incoming, bytes | memoryview]] = []
        self._batched = 0
        self._writing: asyncio.Future[None] | None = None

    async def receive(self, copy: Copy) -> Context:
        """Receive the directory. Raises InvalidParameter for a file that changes each time while it
        is read, or that the client cannot read.
        """
        changed: dict[bytes, Listed] = {}
        for turn in range(READINGS):
            if turn:
                await asyncio.sleep(PAUSE * turn)
                await uninterrupted(asyncio.to_thread(self._begin_again, changed))
            await copy(self, ())
            if self._batch:
                await self._flush()
            await self._written()
            changed = await self._changed(copy)
            if not changed:
                return await self._finish()
        path = min(file.path for file in changed.values())
        raise InvalidParameter(
            f"build context: {path}: it changes while it is read, or the client cannot read it. "
            "Leave it out by .dockerignore if the build does not need it"
        )

    async def _changed(self, copy: Copy) -> dict[bytes, Listed]:
        """The files that may have changed while they were read."""
        if not self._asked:
            return {}
        read = time.time_ns()
        # In threads: there may be hundreds of thousands of files.
        look, paths = await asyncio.to_thread(self._look)
        await copy(look, paths)
        return await asyncio.to_thread(self._unlike, look, read)

    def _look(self) -> tuple[_Look, Sequence[str]]:
        """Finds out which files are still as they were listed; the paths that are to be listed."""
        look = _Look(self._asked.keys() - self._broken, self._known)
        return look, _alone([file.path for file in self._asked.values()])

    def _unlike(self, look: _Look, read: int) -> dict[bytes, Listed]:
        """The files that may have changed up to the time `read`."""
        return {
            stat: file
            for stat, file in self._asked.items()
            if stat in look.missing or stat in self._broken or self._reading - _TICK_NS <= file.mtime <= read
        }

    def _begin_again(self, changed: Collection[bytes]) -> None:
        """Prepare for another list of the same directory. It compares files with those that have
        arrived, except those that have `changed`. In a thread.
        """
        received = self._received.values()
        twins = {record.stat for record in _with_twins(received, received) if record.twin}
        self._known |= {
            stat: record for stat, record in self._received.items() if stat not in changed and stat not in twins
        }
        self._begin()
        self._news = True

    # --- in the order of the client's packets -----------------------------------------------------

    def recall(self, stat: bytes) -> bool:
        """Add the file of an encoded STAT if it is known with its content. False if it is not."""
        record = self._known.get(stat)
        if record is None:
            return False
        file = record.file
        if record.namesake or (record.twin and posixpath.dirname(file.path) not in self._unchanged):
            return False
        inode = self._slots[record.segment] << OFFSET_BITS | record.offset if record.segment else 0
        self._place(file, inode, record.digest)
        if file.kind == DIRECTORY and _identifies(file.mtime, record.used):
            self._unchanged.add(file.path)
        self._listed.append(record)
        if record.used < self._recent or file.mtime >= record.used - RACY_NS:
            self._news = True
        return True

    def add(self, number: int, stat: bytes, file: Listed) -> bool:
        """Add a file that is not known. True if its content is needed, as that of `number`."""
        if clean(file.path) != file.path or not file.path or "\0" in file.path:
            raise InvalidParameter(f"build context: {file.path[:200]!r} is no path in a directory")
        self._index.hold(max(0, len(stat) - _STAT))
        if file.kind != FILE or not file.size:
            self._place(file, 0, b"")
            self._listed.append(Record(stat, file, self._begun))
            self._news = True
            return False
        slot = 1 if self._key and _identifies(file.mtime, self._begun) else 0
        inode = slot << OFFSET_BITS | self._ends[slot]
        self._ends[slot] += file.size
        if self._ends[slot] >> OFFSET_BITS:
            raise InvalidParameter(f"build context: {file.path}: the files are too large")
        self._place(file, inode, b"")
        self._incoming[number] = _Incoming(file, stat, inode)
        self._asked[stat] = file
        self._news = True
        return True

    def _place(self, file: Listed, inode: int, digest: bytes) -> None:
        path = file.path
        order = path.replace("/", "\0")
        # The order is that of the bytes. Text has the same one; names that are no text have not.
        if (order <= self._last or not order.isascii()) and os.fsencode(order) <= os.fsencode(self._last):
            raise InvalidParameter(f"build context: {path} is not in the order of the list")
        self._last = order
        seconds = file.mtime // 10**9 * 10**9  # as in an archive
        numbers = file.major, file.minor
        entry = Entry(
            path, file.kind, file.mode, file.uid, file.gid, file.size, seconds, "", file.xattrs, *numbers, inode
        )
        if self._index.put(entry, digest):
            return
        parent, _, name = path.rpartition("/")
        whiteout = name.startswith(".wh.") or "/.wh." in path
        self._index.add(
            (
                *(path, parent, whiteout, file.kind, file.mode, file.uid, file.gid, file.size, seconds),
                *(file.target, file.xattrs, *numbers, inode, file.size, None, digest or None),
            )
        )

    def write(self, number: int, data: bytes | memoryview) -> None:
        """Some content of a file."""
        self._batch.append((self._incoming[number], data))
        self._batched += len(data)

    def complete(self, number: int, *, whole: bool) -> None:
        """Nothing more of a file follows."""
        incoming = self._incoming.pop(number)
        if not whole:
            self._broken.add(incoming.stat)

    def full(self) -> bool:
        """No more content may be written before `drained`."""
        return self._batched >= _BATCH

    async def drained(self) -> None:
        """Wait until the disk has taken what came before. Raises ServerError."""
        await self._flush()

    async def _flush(self) -> None:
        await self._written()
        batch, self._batch, self._batched = self._batch, [], 0
        self._writing = asyncio.ensure_future(asyncio.to_thread(self._write, batch))

    async def _written(self) -> None:
        writing = self._writing
        if writing is not None:
            await asyncio.wait([writing])
            self._writing = None
            try:
                writing.result()
            except OSError as error:
                where = self._contexts.temporary
                raise ServerError(f"receiving a build context into {where}: {reason(error)}") from error

    def _write(self, batch: list[tuple[_Incoming, bytes | memoryview]]) -> None:
        """In a thread."""
        if sum(len(data) for _, data in batch) > room(self._descriptors[0]):
            raise no_room(self._contexts.temporary)
        # Each system call and each digest releases the GIL, which takes long to get back.
        pieces: dict[_Incoming, list[bytes | memoryview]] = {}
        for incoming, data in batch:
            pieces.setdefault(incoming, []).append(data)
        for incoming, parts in pieces.items():
            self._append(incoming, parts[0] if len(parts) == 1 else b"".join(parts))

    def _append(self, incoming: _Incoming, data: bytes | memoryview) -> None:
        incoming.hashing.update(data)
        slot, offset = incoming.inode >> OFFSET_BITS, incoming.inode & (1 << OFFSET_BITS) - 1
        files.write_sparse(self._descriptors[slot], memoryview(data), offset + incoming.written)
        incoming.written += len(data)
        if incoming.written == incoming.file.size:
            digest = self._index.digests[incoming.inode] = incoming.hashing.digest()
            segment = _FRESH if slot else _PASSING
            self._received[incoming.stat] = Record(
                *(incoming.stat, incoming.file, self._begun, segment, offset, digest)
            )

    async def _finish(self) -> Context:
        # Zeros at the end were not written.
        await uninterrupted(asyncio.to_thread(self._extend))
        if self._key:
            fresh = os.dup(self._descriptors[1])
            records = [*self._listed, *self._received.values()] if self._news else []
            self._contexts.keep(self._key, self._what, records, self._begun, fresh, self._ends[1])
        key, self._key = self._key, ""
        descriptors, self._descriptors = self._descriptors, []
        return Context(
            *(descriptors[0], sum(self._ends), self._index, descriptors[1:]),
            closed=lambda: self._contexts.release(key),
        )

    def _extend(self) -> None:
        for descriptor, end in zip(self._descriptors, self._ends, strict=False):
            os.ftruncate(descriptor, end)

    async def discard(self) -> None:
        """Drop what has arrived."""
        await uninterrupted(self._discard())

    async def _discard(self) -> None:
        if self._writing is not None:
            await asyncio.wait([self._writing])
            self._writing.exception()  # mark it as retrieved
        descriptors, self._descriptors = self._descriptors, []
        key, self._key = self._key, ""
        try:
            await asyncio.to_thread(_close, descriptors)
        finally:
            self._contexts.release(key)


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


__all__ = ["KeptContext", "KeptContexts", "Listed", "Transfer", "key_of"]
