"""Records: one MessagePack value per object of the engine, in one SQLite file. After a crash the
file contains whole transactions only.

```
ROOT/
  state.db               this module: table record(kind, key, value, checksum), one row per
                         container, image, layer, snapshot, network, volume, plugin
  state.db-room          disk space of state.db while the engine is stopped (room.py)
  content/sha256/<hex>   blobs by digest: configs, manifests (content.py)
  layers/<n>/diff        an extracted image layer, or a container's upper directory (overlay.py)
  layers/<n>/work        the work directory that overlayfs needs beside an upper directory
  containers/<id>/       log, hosts, hostname, resolv.conf, OCI bundle (containers)
  volumes/<name>/_data   named volumes (volumes)
  plugins/<id>/          output, OCI bundle and PropagatedMount of managed plugins (managed_plugins)
  build/caches/<name>/   directories of RUN --mount=type=cache (builder/caches.py)
  build/contexts/<key>/  contents of clients' build contexts (builder/kept.py)
  build/history/<name>   logs of builds that have ended (builder/buildkit/history.py)
  tmp/                   bodies being received, as unnamed files if the file system has O_TMPFILE;
                         emptied at start
```

Writes are grouped: requests that arrive while a transaction runs go into the next one. The database
uses WAL with synchronous=NORMAL. A crash of the engine loses no change whose commit was awaited. A
power failure may lose the last transactions, but does not tear or reorder them. So the files that a
record describes must be on the disk before the record, or the record must be marked (`pending` in
overlay.py).

The lock on the file is exclusive: no second engine can use the same ROOT, and SQLite needs no
shared memory file.

Owns: the database, its only writer thread, the encoding. Not here: schema, migrations and damage
(schema.py), space on a full disk (room.py), the meaning of records, and caches of records (each
store has its own).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Generic, NamedTuple, TypeVar

import msgspec

from engine.errors import EngineError, ServerError, words
from engine.storage import schema
from engine.storage.room import Room, is_full
from engine.system.threads import surely

T = TypeVar("T", bound=msgspec.Struct)

BATCH = 512
"""Most callers in one transaction, which bounds the time that the first of them waits."""

_log = logging.getLogger(__name__)


class Change(NamedTuple):
    """One row to replace, or to remove when `value` is None.

    Made by a `Table`, given to `Records.commit`.
    """

    kind: str
    key: str
    value: bytes | None


class Table(Generic[T]):
    """The records of one kind."""

    def __init__(self, records: Records, kind: str, record_type: type[T]) -> None:
        self.kind = kind
        self._records = records
        self._decoder = msgspec.msgpack.Decoder(record_type)
        self._encoder = msgspec.msgpack.Encoder()

    def load(self) -> dict[str, T]:
        """Every record by key, in key order. Used at start.

        Raises ServerError that names the record if one cannot be decoded.
        """
        loaded = {}
        for key, value in self._records.rows(self.kind):
            try:
                loaded[key] = self._decoder.decode(value)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise ServerError(
                    f"record of {self.kind} {key} in {self._records.path} is corrupt: {words(error)}"
                ) from error
        return loaded

    def put(self, key: str, record: T) -> Change:
        return Change(self.kind, key, self._encoder.encode(record))

    def delete(self, key: str) -> Change:
        return Change(self.kind, key, None)


class _Request:
    """One call of `commit`. `error`: why its changes are not written."""

    __slots__ = ("changes", "done", "error", "first", "loop", "then")

    def __init__(
        self, changes: tuple[Change, ...], first: Callable[[], object] | None, then: Callable[[], object] | None
    ) -> None:
        self.changes = changes
        self.first = first
        self.then = then
        self.loop = asyncio.get_running_loop()
        self.done: asyncio.Future[None] = self.loop.create_future()
        self.error: Exception | None = None

    def begin(self) -> None:
        """In the writer's thread. A repetition does nothing."""
        first, self.first = self.first, None
        if first is not None:
            try:
                first()
            except Exception as error:  # the caller gets it; the thread must continue
                self.error = error


class Records:
    """The open database. `commit` may be called from any loop; `rows` reads at start."""

    def __init__(self, path: Path, used: str = "") -> None:
        """Open or create.

        `used`: evidence that there have been records. If it is given, a missing or empty file is
        refused. Raises ServerError if the file is no database, is damaged, comes from a newer
        engine or is used by another one. Nothing has been changed then.
        """
        self.path = path
        self._queue: SimpleQueue[_Request | None] = SimpleQueue()
        self._closed = False
        if used and not (path.exists() and path.stat().st_size):
            raise schema.lost(path, used)
        with contextlib.ExitStack() as undo:
            try:
                self._room = Room(path)
                undo.callback(self._room.close)
                # It contains environments of containers, so only root may read it. SQLite gives its
                # side files the same mode.
                os.chmod(path, 0o600)
                self._connection = sqlite3.connect(path, timeout=1, isolation_level=None, check_same_thread=False)
                undo.callback(self._connection.close)
                undo.callback(self._room.closing)
                self._prepare(used)
            except (OSError, sqlite3.Error) as error:
                raise ServerError(f"records in {path}: {_reason(error)}") from error
            undo.pop_all()
        # One connection serves both: rows() runs before the first commit or under this lock.
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._write, name="records", daemon=True)
        self._thread.start()

    @classmethod
    def in_root(cls, root: Path) -> Records:
        """Open ROOT/state.db. A missing file is created only if ROOT was never used."""
        return cls(root / "state.db", _used(root))

    def _prepare(self, used: str) -> None:
        self._connection.text_factory = lambda text: text.decode(errors="surrogateescape")
        for pragma in ("locking_mode=EXCLUSIVE", "journal_mode=WAL", "synchronous=NORMAL", "temp_store=MEMORY"):
            self._connection.execute(f"PRAGMA {pragma}")
        self._connection.execute("PRAGMA cache_size=-2048")
        schema.prepare(self._connection, self.path, used)
        self._room.opened(self._connection)

    def table(self, kind: str, record_type: type[T]) -> Table[T]:
        return Table(self, kind, record_type)

    def rows(self, kind: str) -> list[tuple[str, bytes]]:
        """Keys and values as stored. Raises ServerError when the file is damaged."""
        try:
            with self._lock:
                return self._connection.execute(
                    "SELECT key, value FROM record WHERE kind = ? ORDER BY key", (kind,)
                ).fetchall()
        except sqlite3.Error as error:
            raise ServerError(f"records of {kind} in {self.path}: {words(error)}") from error

    async def commit(
        self,
        *changes: Change,
        first: Callable[[], object] | None = None,
        then: Callable[[], object] | None = None,
    ) -> None:
        """Write all `changes` in one transaction; they are in the file when this returns. Raises
        ServerError with SQLite's reason.

        If the caller is cancelled, its changes are written nevertheless. `first` is called in the
        writer's thread before they are; if it raises, they are not, and this raises its error.
        `then` is called there when they are written, and raises nothing. Both are short: they save
        a change of files that belongs to the records its own turn of another thread.
        """
        if not changes:
            return
        if self._closed:
            raise ServerError(f"records in {self.path} are closed")
        request = _Request(changes, first, then)
        self._queue.put(request)
        await request.done

    def close(self) -> None:
        """Write the waiting changes, merge the log into the file, and close it. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._queue.put(None)
        self._thread.join()
        try:
            self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
            self._room.closing()
        except (OSError, sqlite3.Error) as error:
            _log.warning("records in %s: %s", self.path, _reason(error))
        self._connection.close()
        self._room.close()

    # --- the writer thread ------------------------------------------------------------------------

    def _write(self) -> None:
        open_ = True
        while open_:
            request = self._queue.get()
            batch: list[_Request] = []
            while request is not None:
                batch.append(request)
                if len(batch) == BATCH:
                    break
                try:
                    request = self._queue.get_nowait()
                except Empty:
                    break
            open_ = request is not None
            for each in batch:
                surely(each.begin)
            surely(self._write_all, [each for each in batch if each.error is None])
            surely(self._answer_all, batch)

    def _answer_all(self, batch: list[_Request]) -> None:
        loops: dict[asyncio.AbstractEventLoop, list[_Request]] = {}
        for request in batch:
            loops.setdefault(request.loop, []).append(request)
        for loop, requests in loops.items():
            try:
                loop.call_soon_threadsafe(self._answer, requests)
            except RuntimeError:  # the caller's loop is closed: nothing waits for the result
                _log.debug("records: %d answers dropped: their event loop is closed", len(requests))

    def _write_all(self, batch: list[_Request]) -> None:
        if not batch:
            return
        try:
            self._transact([change for request in batch for change in request.changes])
        except Exception as error:  # the callers get it; the thread must continue
            if len(batch) == 1:
                batch[0].error = error
                return
            for request in batch:
                self._write_all([request])
            return
        for request in batch:
            if request.then is not None:
                request.then()

    def _transact(self, changes: list[Change]) -> None:
        with self._lock:
            try:
                self._write_rows(changes)
            except sqlite3.Error as error:
                if not is_full(error):
                    raise
                # A checkpoint makes the blocks of the log available again.
                self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
                self._write_rows(changes)
            self._room.refill(self._connection)

    def _write_rows(self, changes: list[Change]) -> None:
        if self._room.low:
            self._room.refill(self._connection)
            if self._room.low and any(self._is_new(change) for change in changes):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            for kind, key, value in changes:
                if value is None:
                    self._connection.execute("DELETE FROM record WHERE kind = ? AND key = ?", (kind, key))
                else:
                    row = (kind, key, value, schema.checksum(kind, key, value))
                    self._connection.execute("REPLACE INTO record VALUES(?, ?, ?, ?)", row)
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise

    def _is_new(self, change: Change) -> bool:
        found = self._connection.execute("SELECT 1 FROM record WHERE kind = ? AND key = ?", (change.kind, change.key))
        return change.value is not None and found.fetchone() is None

    def _answer(self, requests: list[_Request]) -> None:
        for request in requests:
            error, request.error = request.error, None
            if request.done.done():
                continue
            if error is None:
                request.done.set_result(None)
            elif isinstance(error, EngineError):  # of `first`
                request.done.set_exception(error)
            else:
                failure = ServerError(f"records in {self.path}: {_reason(error)}")
                failure.__cause__ = error
                request.done.set_exception(failure)


def _reason(error: Exception) -> str:
    if is_full(error):
        return os.strerror(errno.ENOSPC).lower()
    if isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_BUSY:
        return "another engine uses this ROOT"
    return words(error)


def _used(root: Path) -> str:
    """A file in ROOT which shows that an engine has had records there; "" if there is none."""
    if (root / "engine-id").exists():
        return f"{root}/engine-id exists"
    for name in ("layers", "containers", "volumes", "content/sha256"):
        with contextlib.suppress(FileNotFoundError):
            found = [entry for entry in os.listdir(root / name) if entry != "init"]
            if found:
                return f"{root}/{name} has {len(found)} entries"
    return ""
