"""Disk space that state.db keeps for itself, so that removals are recorded on a full disk.

A full disk can only be freed if `rm`, `rmi` and exits can still be written. SQLite needs space in
two places, and both are allocated in advance:

- The write-ahead log has `LOG` bytes of blocks. After a checkpoint SQLite writes the log from its
  start again. When the database is closed, SQLite deletes the log. So the file gets a second name
  first (state.db-room), and becomes the log of the next start.
- The database has `PAGES` free pages. Records that grow take them instead of new blocks.

While the free pages cannot be restored (`low`), records.py refuses new rows, so that the rest
serves changes and removals. File systems that never overwrite in place (btrfs) do not guarantee
this.

Owns: state.db-room, a descriptor of state.db. Closing any descriptor of that file drops SQLite's
POSIX locks (fcntl(2)), so it stays open until the connection is closed.
Threads: the records' writer alone, after `__init__`.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sqlite3
import time
from pathlib import Path

LOG = 6 << 20
"""Bytes. A checkpoint begins at 1,000 pages (4 MiB), and the transaction that reaches this size may
exceed it.
"""
PAGES = 128
RETRY = 1.0
"""Seconds between attempts to restore the free pages on a full disk."""

_FULL = (errno.ENOSPC, errno.EDQUOT)
_HEADER = 32
"""Bytes of a log's header (SQLite, "Write-Ahead Logging", file format). SQLite ignores a log whose
header has no magic number.
"""

_log = logging.getLogger(__name__)


class Room:
    """Made before the connection is opened, and closed after it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._wal = path.with_name(path.name + "-wal")
        self._kept = path.with_name(path.name + "-room")
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._tried = 0.0
        self.low = False
        """True if the disk is full and the rest of the reserve is kept for changes and removals."""
        if self._wal.exists():  # the last engine was killed, and its log still has its blocks
            self._kept.unlink(missing_ok=True)
        elif self._kept.exists():
            with open(self._kept, "r+b", buffering=0) as kept:
                kept.write(bytes(_HEADER))
            self._kept.rename(self._wal)

    def opened(self, connection: sqlite3.Connection) -> None:
        """Allocate the missing space, now that the log exists."""
        try:
            descriptor = os.open(self._wal, os.O_RDWR | os.O_CLOEXEC)
            try:
                if os.fstat(descriptor).st_blocks * 512 < LOG:
                    os.posix_fallocate(descriptor, 0, LOG)
            finally:
                os.close(descriptor)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            self._exhausted()
        self.refill(connection)

    def refill(self, connection: sqlite3.Connection) -> None:
        """Restore the free pages if half of them are used. Call it outside of a transaction."""
        free = _pragma(connection, "freelist_count")
        if free >= PAGES // 2 and not self.low:
            return
        if self.low and time.monotonic() - self._tried < RETRY:
            return
        self._tried = time.monotonic()
        try:
            self._grow(connection, PAGES - free)
        except (OSError, sqlite3.OperationalError) as error:
            if not is_full(error):
                raise
            self._exhausted()
        else:
            if self.low:
                _log.info("%s: there is space on the disk again", self._path)
            self.low = False

    def _grow(self, connection: sqlite3.Connection, pages: int) -> None:
        if pages > 0:
            size = _pragma(connection, "page_size")
            # Allocate the blocks first, because SQLite extends the file without allocating any.
            os.posix_fallocate(self._file, 0, (_pragma(connection, "page_count") + pages + 2) * size)
            connection.execute("BEGIN IMMEDIATE")
            try:
                connection.execute("INSERT INTO record VALUES('', '', zeroblob(?), 0)", (pages * (size - 4),))
                connection.execute("DELETE FROM record WHERE kind = ''")
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
            connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
        size = _pragma(connection, "page_count") * _pragma(connection, "page_size")
        os.posix_fallocate(self._file, 0, size)

    def _exhausted(self) -> None:
        if not self.low:
            _log.error("%s: the disk is full: only removals and changes are recorded until there is space", self._path)
        self.low = True

    def closing(self) -> None:
        """Keep the log's blocks under a second name, before SQLite removes the first one."""
        with contextlib.suppress(FileNotFoundError):
            self._kept.unlink(missing_ok=True)
            os.link(self._wal, self._kept)

    def close(self) -> None:
        os.close(self._file)


def is_full(error: BaseException) -> bool:
    """True if an error means that there is no space on the disk."""
    if isinstance(error, OSError):
        return error.errno in _FULL
    return isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_FULL


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    found: int = connection.execute(f"PRAGMA {name}").fetchone()[0]
    return found
