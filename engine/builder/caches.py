"""Directories that RUN steps keep between builds: `RUN --mount=type=cache`.

```
ROOT/build/caches/<name>/data   the directory that RUN sees
ROOT/build/caches/<name>/id     its id in Dockerfiles; the time of the file is the last use
ROOT/build/caches/<name>/uses   how many steps have used it
ROOT/build/caches/.<name>       a cache that is being made
ROOT/build/caches/.<name>.gone  one that is being removed
```

Two caches of one id exist while two steps with `sharing=private` run at once; the second one is
found again by the next such pair. A crash leaves a cache as the killed program left it, which
package managers expect of their caches.

Owns:    that directory. Threads: the event loop's; files in threads.
Raises:  ServerError with the kernel's reason.
Not here: mounting (`steps/mounts.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from engine._fast import tree
from engine.errors import ServerError, reason_with_file
from engine.system import files
from engine.system.threads import uninterrupted

_GONE = ".gone"
_UNKNOWN: Mapping[str, int] = {}


class CacheDirectory(NamedTuple):
    """One cache as prune sees it. Times in ns since the epoch."""

    name: str
    id: str
    size: int
    created: int
    used: int
    uses: int
    in_use: bool


class Caches:
    """See the module."""

    def __init__(self, root: Path) -> None:
        self._directory = root / "build" / "caches"
        self._users: Counter[str] = Counter()
        self._locked: dict[str, NamedLock] = {}
        """Caches that one step at a time uses."""
        self._changing: dict[str, NamedLock] = {}
        """Directories that are made or removed."""

    @contextlib.asynccontextmanager
    async def turn(self, cache_ids: Iterable[str]) -> AsyncIterator[None]:
        """Waits until no other step is in a `turn` of these caches (`sharing=locked`). A step waits
        before it holds anything else that others wait for, and for all its caches in one order.
        """
        async with contextlib.AsyncExitStack() as stack:
            for name in sorted({_name(each) for each in cache_ids}):
                await stack.enter_async_context(named_lock(self._locked, name))
            yield

    @contextlib.asynccontextmanager
    async def use(self, cache_id: str, sharing: str, fill: Callable[[int], None], mode: int) -> AsyncIterator[Path]:
        """The directory of a cache, for the time of the context.

        `fill` gives a new one its content and owner: it gets a descriptor, in a thread. `mode`: of
        a new one. `sharing`: `shared`, `private` or `locked`, whose `turn` the caller is in
        (Dockerfile reference, RUN --mount).
        """
        base = name = _name(cache_id)
        if sharing == "private":
            turn = 0
            while self._users[name]:
                turn += 1
                name = f"{base}-{turn}"
        self._users[name] += 1
        try:
            try:
                async with named_lock(self._changing, name):
                    path = await uninterrupted(asyncio.to_thread(self._opened, name, cache_id, fill, mode))
            except OSError as error:
                raise ServerError(f"cache mount {cache_id}: {reason_with_file(error)}") from error
            yield path
        finally:
            self._users[name] -= 1
            if not self._users[name]:
                del self._users[name]

    def _opened(self, name: str, cache_id: str, fill: Callable[[int], None], mode: int) -> Path:
        place = self._directory / name
        data = place / "data"
        if not data.exists() or not (place / "id").exists():
            # Under another name until it is complete: a crash leaves nothing that looks whole.
            new = self._directory / f".{name}"
            files.remove_tree(new)
            (new / "data").mkdir(parents=True, mode=0o700)
            (new / "id").write_text(cache_id, errors="surrogateescape")
            (new / "uses").write_text("0")  # the time of the directory is that of its last new file
            directory = files.open_directory(new / "data")
            try:
                fill(directory)
                os.fchmod(directory, mode)
            except BaseException:
                files.remove_tree(new)
                raise
            finally:
                os.close(directory)
            files.remove_tree(place)
            new.rename(place)
        os.utime(place / "id")
        _count_use(place)
        return data

    # --- prune ------------------------------------------------------------------------------------

    def all(self, sizes: Mapping[str, int] = _UNKNOWN) -> list[CacheDirectory]:
        """Every cache, the least recently used first. The files of those in `sizes` are not counted
        again. Blocking.
        """
        found = []
        for name in os.listdir(self._directory) if self._directory.exists() else []:
            if name.startswith("."):
                continue
            with contextlib.suppress(FileNotFoundError):
                place = self._directory / name
                size = sizes[name] if name in sizes else _size(place / "data")
                used = (place / "id").stat().st_mtime_ns
                cache_id = (place / "id").read_text(errors="surrogateescape")
                created = os.stat(place).st_mtime_ns
                found.append(CacheDirectory(name, cache_id, size, created, used, _uses(place), name in self._users))
        return sorted(found, key=lambda each: each.used)

    async def remove(self, name: str) -> bool:
        """Remove a cache. False when a step uses it."""
        async with named_lock(self._changing, name):
            if name in self._users:
                return False
            await uninterrupted(asyncio.to_thread(self._removed, name))
        return True

    def _removed(self, name: str) -> None:
        gone = self._directory / f".{name}{_GONE}"
        files.remove_tree(gone)  # what a crash has left
        with contextlib.suppress(FileNotFoundError):
            (self._directory / name).rename(gone)
        files.remove_tree(gone)

    async def sweep(self) -> None:
        """Remove what a crash has left of caches that were being made or removed."""
        try:
            entries = await asyncio.to_thread(os.listdir, self._directory)
        except FileNotFoundError:
            return
        for entry in entries:
            if entry.startswith("."):
                async with named_lock(self._changing, entry[1:].removesuffix(_GONE)):
                    await uninterrupted(asyncio.to_thread(files.remove_tree, self._directory / entry))


class NamedLock(asyncio.Lock):
    """See `named_lock`."""

    users = 0


@contextlib.asynccontextmanager
async def named_lock(locks: dict[str, NamedLock], name: str) -> AsyncIterator[None]:
    """Holds the lock of that name, which exists while a task holds it or waits for it."""
    lock = locks.setdefault(name, NamedLock())
    lock.users += 1
    try:
        async with lock:
            yield
    finally:
        lock.users -= 1
        if not lock.users:
            del locks[name]


def _size(path: Path) -> int:
    """Bytes of the files in a directory."""
    directory = files.open_directory(path)
    try:
        return tree.usage(directory)[0]
    finally:
        os.close(directory)


def _uses(place: Path) -> int:
    """What the file says; 0 if it is not readable, or an older version has made the cache."""
    try:
        return int((place / "uses").read_bytes())
    except (OSError, ValueError):
        return 0


def _count_use(place: Path) -> None:
    """Add a use to the file. A failure, such as a full disk, loses this use alone: the count is
    only a statistic. The file is overwritten in place, since a count never becomes shorter.
    """
    count = b"%d" % (_uses(place) + 1)
    with contextlib.suppress(OSError):
        made = place.stat()
        file = os.open(place / "uses", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(file, count)
        finally:
            os.close(file)
        # In a cache of an older version the file is new, and the directory has the cache's age.
        os.utime(place, ns=(made.st_atime_ns, made.st_mtime_ns))


def _name(cache_id: str) -> str:
    return hashlib.sha256(os.fsencode(cache_id)).hexdigest()[:32]


__all__ = ["CacheDirectory", "Caches", "NamedLock", "named_lock"]
