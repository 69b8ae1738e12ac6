"""Records: one MessagePack value per object of the engine, in one SQLite file. Survives any crash with whole transactions.

```
ROOT/
  state.db               this module: table record(kind, key, value), one row per container, image, layer, snapshot, tag, network, volume
  content/sha256/<hex>   blobs by digest: configs, manifests                                  (content.py)
  layers/<n>/diff        an extracted image layer, or the upper directory of a container      (overlay.py)
  layers/<n>/work        the work directory that overlayfs wants beside an upper directory
  containers/<id>/       log, hosts, hostname, resolv.conf, OCI bundle                        (containers)
  volumes/<name>/_data   named volumes                                                        (volumes)
  tmp/                   bodies being received; nameless files where the file system has O_TMPFILE; emptied at start
```

Owns: the database, its one writer thread, the encoding. Not here: what a record means, and any cache of records (each store holds its own).

Writes are grouped: what waits while one transaction runs goes into the next one. WAL with synchronous=NORMAL: a crash of the engine loses
nothing that was awaited; a power failure may lose the last moments of transactions, never tear one and never reorder them. So what a
record speaks of (a layer's files) must be on the disk before the record, or the record must say that it is not (`pending` in overlay.py).
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import threading
from collections.abc import Iterable
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Generic, NamedTuple, TypeVar

import msgspec

from engine.errors import ServerError

T = TypeVar("T", bound=msgspec.Struct)

SCHEMA = 1
"""`PRAGMA user_version` of the files this engine writes; a newer one is refused, an older one is migrated in `_migrate`."""

BATCH = 512
"""Callers in one transaction at most: bounds the time for which the first of them waits."""

_log = logging.getLogger(__name__)


class Change(NamedTuple):
    """One row to be replaced, or removed when `value` is None. Made by a `Table`, given to `Records.commit`."""

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
        """Every record by key, in key order; at start. Raises ServerError that names a record which does not decode."""
        loaded = {}
        for key, value in self._records.rows(self.kind):
            try:
                loaded[key] = self._decoder.decode(value)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise ServerError(f"record of {self.kind} {key} in {self._records.path} is corrupt: {error}") from error
        return loaded

    def put(self, key: str, record: T) -> Change:
        return Change(self.kind, key, self._encoder.encode(record))

    def delete(self, key: str) -> Change:
        return Change(self.kind, key, None)


class _Request(NamedTuple):
    changes: tuple[Change, ...]
    loop: asyncio.AbstractEventLoop
    done: asyncio.Future[None]


class Records:
    """The open database. `commit` may be called from any loop; `rows` reads at start."""

    def __init__(self, path: Path) -> None:
        """Open or create. Raises ServerError when the file is no database, is damaged, or comes from a newer engine."""
        self.path = path
        self._queue: SimpleQueue[_Request | None] = SimpleQueue()
        self._closed = False
        try:
            # Environments of containers are in it: root's alone, and SQLite gives its side files the same mode.
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            os.chmod(path, 0o600)
            self._connection = sqlite3.connect(path, timeout=10, isolation_level=None, check_same_thread=False)
            self._prepare()
        except (OSError, sqlite3.Error) as error:
            raise ServerError(f"records in {path}: {error}") from error
        # One connection serves both: rows() runs before the first commit or under this lock.
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._write, name="records", daemon=True)
        self._thread.start()

    def _prepare(self) -> None:
        for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "temp_store=MEMORY", "cache_size=-2048"):
            self._connection.execute(f"PRAGMA {pragma}")
        found = self._connection.execute("PRAGMA user_version").fetchone()[0]
        if found > SCHEMA:
            raise sqlite3.DatabaseError(f"written by a newer engine (schema {found}, this one knows {SCHEMA})")
        if found < SCHEMA:
            self._connection.executescript(
                "BEGIN IMMEDIATE;"
                "CREATE TABLE IF NOT EXISTS record(kind TEXT NOT NULL, key TEXT NOT NULL, value BLOB NOT NULL,"
                " PRIMARY KEY(kind, key)) WITHOUT ROWID;"
                f"PRAGMA user_version={SCHEMA};"
                "COMMIT;"
            )

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
            raise ServerError(f"records of {kind} in {self.path}: {error}") from error

    async def commit(self, *changes: Change) -> None:
        """One transaction of all `changes`; they are in the file when this returns. Raises ServerError with SQLite's reason.

        A cancelled caller's changes are written all the same: they were handed over.
        """
        if not changes:
            return
        if self._closed:
            raise ServerError(f"records in {self.path} are closed")
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        self._queue.put(_Request(changes, loop, done))
        await done

    def close(self) -> None:
        """Write what waits, fold the log into the file, close. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._queue.put(None)
        self._thread.join()
        try:
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        except sqlite3.Error as error:
            _log.warning("records in %s: %s", self.path, error)
        self._connection.close()

    # --- the writer thread ------------------------------------------------------------------------------------------

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
            if batch:
                self._settle(batch)

    def _settle(self, batch: list[_Request]) -> None:
        errors = self._errors_of(batch)
        loops: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[None], sqlite3.Error | None]]] = {}
        for request, error in zip(batch, errors, strict=True):
            loops.setdefault(request.loop, []).append((request.done, error))
        for loop, answers in loops.items():
            try:
                loop.call_soon_threadsafe(self._answer, answers)
            except RuntimeError:  # the caller's loop is closed: nobody waits
                _log.debug("records: %d answers to a closed loop", len(answers))

    def _errors_of(self, batch: list[_Request]) -> list[sqlite3.Error | None]:
        try:
            self._transact(change for request in batch for change in request.changes)
        except sqlite3.Error as error:
            if len(batch) == 1:
                return [error]
            return [self._errors_of([request])[0] for request in batch]
        return [None] * len(batch)

    def _transact(self, changes: Iterable[Change]) -> None:
        with self._lock:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                for kind, key, value in changes:
                    if value is None:
                        self._connection.execute("DELETE FROM record WHERE kind = ? AND key = ?", (kind, key))
                    else:
                        self._connection.execute("REPLACE INTO record VALUES(?, ?, ?)", (kind, key, value))
                self._connection.execute("COMMIT")
            except sqlite3.Error:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def _answer(self, answers: list[tuple[asyncio.Future[None], sqlite3.Error | None]]) -> None:
        for done, error in answers:
            if done.done():
                continue
            if error is None:
                done.set_result(None)
            else:
                failure = ServerError(f"records in {self.path}: {error}")
                failure.__cause__ = error
                done.set_exception(failure)
