"""Compression of rotated log files: of the drivers `local`, `json-file` with `compress`, and of the
spools of remote drivers (`cache-compress`).

The monitor reports that a log was rotated. The daemon compresses the file beside it, in a thread,
and the monitor, which alone renames the files of a running container, puts it into its place
(`PackedLog.replace`). A file of a spool stays as it is until the target has acknowledged all of it.
Without a daemon files stay uncompressed, and the next daemon makes up for it.

Not here: the format (`_fast/packed`), rotation (`_fast/spool`).

Owns:    one task, which works on one file at a time, and the temporary files `.*.packing`.
Locks:   the container's, while a file of one that does not run is replaced.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from engine._fast import packed
from engine.containers import log_plan
from engine.containers.container import Container
from engine.errors import EngineError, words
from engine.logs import cursor
from engine.logs.targets import JsonFile, Spool
from engine.system import threads
from engine.system.tasks import spawn
from engine.system.threads import Threads

_log = logging.getLogger(__name__)

TEMPORARY = ".packing"
PAUSE = 1.0
"""Seconds between a rotation and the compression."""


class Rotated(NamedTuple):
    """A file to be compressed."""

    path: Path
    inode: int


class Packing:
    """The compression of one engine's logs. `find` gives the container of an id, or None."""

    def __init__(self, find: Callable[[str], Container | None]) -> None:
        self._find = find
        self._queue: dict[str, None] = {}
        self._task: asyncio.Task[None] | None = None
        self._reported = False
        self._threads = Threads(1, batch=True)

    def rotated(self, container_id: str) -> None:
        """The log may have files to be compressed."""
        container = self._find(container_id)
        if container is None or not log_plan.may_compress(container.record):
            return
        self._queue[container_id] = None
        if self._task is None:
            self._task = spawn(self._work(), "compress logs")

    async def close(self) -> None:
        """End the work. A file that is being compressed is left as it is."""
        self._queue.clear()
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _work(self) -> None:
        try:
            while self._queue:
                # A log that rotates faster is compressed in steps of several files.
                await asyncio.sleep(PAUSE)
                due, self._queue = self._queue, {}
                for container_id in due:
                    container = self._find(container_id)
                    if container is None or container.removed:
                        continue
                    try:
                        await self._pack(container)
                    except EngineError as error:
                        _log.warning("log of container %s: cannot be compressed: %s", container_id, error.message)
        finally:
            self._task = None

    async def _pack(self, container: Container) -> None:
        try:
            target = log_plan.plan(container.parts.config, container.record).target
        except EngineError:  # its options no longer fit to the host
            return
        if target is None or not target.compress:
            return
        newest = Path(target.path) if isinstance(target, JsonFile) else Path(target.directory) / log_plan.SPOOL
        try:
            await asyncio.to_thread(remove_temporary, newest)
            for each in await asyncio.to_thread(packable, newest, spool=isinstance(target, Spool)):
                temporary = await threads.abandonable(self._threads.run, _compress, each)
                if temporary is not None:
                    await _put(container, newest, each.inode, temporary)
        except FileNotFoundError:  # it has never run, or the log was removed meanwhile
            return
        except OSError as error:
            if not self._reported:  # a full disk would repeat it with every rotation
                _log.warning("log of container %s: cannot be compressed: %s", container.id, words(error))
            self._reported = True
        else:
            self._reported = False


def packable(newest: Path, *, spool: bool = False) -> list[Rotated]:
    """The files of a log that can be compressed, newest first: the oldest may soon be removed. Of a
    `spool` those are meant whose lines are delivered. Raises OSError.
    """
    files = _rotated(newest)
    return (_delivered(newest, files) if spool else files)[::-1]


def _rotated(newest: Path) -> list[Rotated]:
    """All rotated files that are not compressed, oldest first."""
    found = []
    with os.scandir(newest.parent) as entries:
        for entry in entries:
            name, _, number = entry.name.rpartition(".")
            if name == newest.name and number.isdecimal():
                found.append((int(number), Rotated(Path(entry.path), entry.inode())))
    return [each for _, each in sorted(found, reverse=True)]


def remove_temporary(newest: Path) -> None:
    """Remove what an earlier daemon has left. Raises OSError."""
    for each in newest.parent.glob(f".{newest.name}.*{TEMPORARY}"):
        each.unlink(missing_ok=True)


def _delivered(newest: Path, files: list[Rotated]) -> list[Rotated]:
    """The oldest of the files, up to the acknowledged position."""
    try:
        known = cursor.decode((newest.parent / "cursor").read_bytes())
    except FileNotFoundError:
        return []
    if known is None:
        return []
    inodes = [each.inode for each in files]
    if known.inode in inodes:
        at = inodes.index(known.inode)
        with suppress(FileNotFoundError):
            whole = files[at].path.stat().st_size <= known.offset
            return files[: at + whole]
        return []
    with suppress(FileNotFoundError):
        if newest.stat().st_ino == known.inode:
            return files
    return []


def _compress(file: Rotated) -> Path | None:
    """The compressed file, beside the other one; None if that has been renamed or removed."""
    temporary = file.path.with_name(f".{file.path.name}.{file.inode}{TEMPORARY}")
    flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        source = os.open(file.path, os.O_RDONLY | flags)
    except FileNotFoundError:
        return None
    try:
        if os.fstat(source).st_ino != file.inode:
            return None
        into = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | flags, 0o640)
        try:
            packed.pack(source, into, threads.checkpoint)
        except BaseException:
            os.unlink(temporary)
            raise
        finally:
            os.close(into)
    finally:
        os.close(source)
    return temporary


async def _put(container: Container, newest: Path, inode: int, temporary: Path) -> None:
    """Have the compressed file take the place of the rotated one, which may have another number by
    now."""
    async with container.lock:
        if container.removed:
            return
        if container.id not in container.parts.monitor.processes:
            await asyncio.to_thread(_replace, newest, inode, temporary)
            return
    try:
        await container.parts.monitor.compressed(container.id, inode, str(temporary))
    except EngineError as error:
        _log.debug("log of container %s: %s", container.id, error.message)
        await asyncio.to_thread(temporary.unlink, missing_ok=True)


def _replace(newest: Path, inode: int, temporary: Path) -> None:
    """As the monitor does, for a container without a process."""
    made = temporary.stat()
    for each in _rotated(newest):
        # The number may be another file's by now. The compressed file has the original's time.
        if each.inode == inode and each.path.stat().st_mtime_ns == made.st_mtime_ns:
            temporary.rename(each.path.with_name(each.path.name + ".gz"))
            each.path.unlink()
            return
    temporary.unlink(missing_ok=True)
