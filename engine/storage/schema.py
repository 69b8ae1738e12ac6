"""The schema of state.db, its migrations and its integrity check.

`PRAGMA user_version` is the schema of a file. A newer one than `SCHEMA` is refused, an older one is
migrated step by step in one transaction, so a crash leaves the old file. Fields that are added to a
record with a default need no migration; renamed or reinterpreted fields do (`rewrite`).

Blocking, on the caller's connection. Raises: sqlite3.Error, and ServerError for damage and for a
file that this engine does not read.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from engine.errors import ServerError

SCHEMA = 3

_TABLE = (
    "CREATE TABLE record(kind TEXT NOT NULL, key TEXT NOT NULL, value BLOB NOT NULL, checksum INTEGER NOT NULL,"
    " PRIMARY KEY(kind, key)) WITHOUT ROWID"
)

LISTED = 10
"""Most damaged records that the message names."""


def checksum(kind: str, key: str, value: bytes) -> int:
    """CRC-32 of a whole row, so that damage to the key is detected too."""
    return zlib.crc32(value, zlib.crc32(f"{kind}\0{key}\0".encode(errors="surrogateescape")))


def prepare(connection: sqlite3.Connection, path: Path, used: str) -> None:
    """Create or migrate the schema, then check every record.

    `used`: evidence that this engine has had records, or "". With evidence an empty file is
    refused, because an engine without records would end its containers and delete their files.
    """
    found = connection.execute("PRAGMA user_version").fetchone()[0]
    if found > SCHEMA:
        raise ServerError(
            f"{path} was written by a newer engine (schema {found}; this engine knows {SCHEMA}): "
            "start that engine again"
        )
    if found == 0 and used:
        raise lost(path, used)
    if found < SCHEMA:
        connection.execute("BEGIN IMMEDIATE")
        try:
            if found == 0:
                connection.execute(_TABLE)
            for version in range(found or SCHEMA, SCHEMA):
                MIGRATIONS[version](connection)
            connection.execute(f"PRAGMA user_version={SCHEMA}")
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
    _check(connection, path)


def lost(path: Path, used: str) -> ServerError:
    """The error for missing records in a ROOT that was used."""
    return ServerError(
        f"{path} is missing or empty, but {used}: this engine has been used. Nothing was changed. Restore {path.name}"
        f" from a backup; or, to start with an empty engine, move {path.parent} away first"
    )


def _check(connection: sqlite3.Connection, path: Path) -> None:
    for (problem,) in connection.execute("PRAGMA quick_check(1)"):
        if problem != "ok":
            raise ServerError(f"{path} is damaged: {problem}. Nothing was changed. Restore the file from a backup")
    damaged = [
        (kind, key)
        for kind, key, value, expected in connection.execute("SELECT kind, key, value, checksum FROM record")
        # Damage may also have changed the type of a value.
        if not isinstance(value, bytes) or checksum(kind, key, value) != expected
    ]
    if damaged:
        names = ", ".join(f"{kind} {key}" for kind, key in damaged[:LISTED])
        more = f" and {len(damaged) - LISTED} more" if len(damaged) > LISTED else ""
        kind, key = damaged[0]
        raise ServerError(
            f"{path} is damaged: wrong checksum of {names}{more}. Nothing was changed. Restore the file from a backup;"
            " or give up a damaged object, whose files the next start then removes: "
            f"""sqlite3 {path} "DELETE FROM record WHERE kind = '{kind}' AND key = '{key}'\""""
        )


def rewrite(connection: sqlite3.Connection, kind: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """For migrations: replace every record of a kind by the result of `change`, which takes and
    returns a plain dict.
    """
    rows = connection.execute("SELECT key, value FROM record WHERE kind = ?", (kind,)).fetchall()
    for key, value in rows:
        changed = msgspec.msgpack.encode(change(msgspec.msgpack.decode(value, type=dict[str, Any])))
        connection.execute(
            "UPDATE record SET value = ?, checksum = ? WHERE kind = ? AND key = ?",
            (changed, checksum(kind, key, changed), kind, key),
        )


# --- migrations -----------------------------------------------------------------------------------


def _add_checksums(connection: sqlite3.Connection) -> None:
    connection.execute("ALTER TABLE record RENAME TO old_record")
    connection.execute(_TABLE)
    rows = connection.execute("SELECT kind, key, value FROM old_record").fetchall()
    connection.executemany(
        "INSERT INTO record VALUES(?, ?, ?, ?)",
        ((kind, key, value, checksum(kind, key, value)) for kind, key, value in rows),
    )
    connection.execute("DROP TABLE old_record")


def _take_limits_of_1_55(connection: sqlite3.Connection) -> None:
    """In HostConfig no limit is null, where it was 0 or -1, and the IpcMode is always given."""

    def change(record: dict[str, Any]) -> dict[str, Any]:
        host = record.get("host")
        if isinstance(host, dict):
            if host.get("PidsLimit", 0) <= 0:
                host["PidsLimit"] = None
            if host.get("MemorySwappiness", -1) < 0:
                host["MemorySwappiness"] = None
            if not host.get("KernelMemory"):
                host.pop("KernelMemory", None)
            host["IpcMode"] = host.get("IpcMode") or "shareable"
        return record

    rewrite(connection, "container", change)


MIGRATIONS: dict[int, Callable[[sqlite3.Connection], None]] = {1: _add_checksums, 2: _take_limits_of_1_55}
"""Schema → the function that migrates it to the next schema."""
