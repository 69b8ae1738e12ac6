"""Backups: all keys of the swarm at one revision, in one compressed file; and a swarm made of one.

A manager writes one each hour into ROOT/swarm/backup, and on demand (`engined swarm backup FILE`).
`restore` makes a new etcd of one member of it, on a host whose daemon is stopped. The revisions
that clients know go on growing (`store.BASE`), the cluster's epoch rises, tokens and services stay.
The other managers of the time of the backup become workers that are down, until they join again.

```
file: zstd( header · [key, value] … · end )        MessagePack values, one after another
```

A backup holds the key of the root certificate and the secrets of the swarm: its mode is 0600.

Owns:    ROOT/swarm/backup.
Threads: the event loop's; compression and files in worker threads.
Raises:  InvalidParameter for a file that is no whole backup, ServerError when etcd or the disk
         fails.
"""

from __future__ import annotations

import asyncio
import datetime
import io
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import zstandard

from engine import __version__
from engine.errors import EngineError, InvalidParameter, ServerError, reason_with_file, words
from engine.manager.kv import Compacted, Etcd, Guard, Item, PutKey
from engine.manager.records import CLUSTER, TURNS, Cluster
from engine.manager.store import BASE, OPERATIONS, SIZE, base_of, read_all
from engine.swarm_session.clock import SECOND, Clock
from engine.system.files import sync_directory, write_atomically

FORMAT = 1
DIRECTORY = "backup"
"""In ROOT/swarm."""
SUFFIX = ".backup"
PERIOD = 3600.0
FIRST_AFTER = 300.0
"""Seconds from the start of a manager to its first backup."""
KEEP = 1

_TRIES = 5
_log = logging.getLogger(__name__)


class Header(msgspec.Struct, frozen=True, kw_only=True):
    format: int
    swarm: str
    revision: int
    """As clients know it: etcd's, and the base."""
    time: int
    node: str = ""
    """Whose backup it is."""
    version: str = ""
    """Of the engine."""


class End(msgspec.Struct, frozen=True, kw_only=True):
    keys: int


class Backup(msgspec.Struct, frozen=True):
    header: Header
    keys: list[tuple[str, bytes]]

    @property
    def cluster(self) -> Cluster:
        found = next((value for key, value in self.keys if key == CLUSTER.path("")), None)
        if found is None:
            raise InvalidParameter("the backup has no swarm")
        return CLUSTER.decode(found)


# --- files ----------------------------------------------------------------------------------------


def pack(header: Header, items: Sequence[Item]) -> bytes:
    """The file of these keys.

    Keys under a lease are left out, as they are the presence of processes, and so are turns.
    """
    encoder = msgspec.msgpack.Encoder()
    output = io.BytesIO()
    kept = [item for item in items if not item.lease and item.key != BASE and not item.key.startswith(TURNS.prefix)]
    compressor = zstandard.ZstdCompressor(level=3, write_checksum=True)
    with compressor.stream_writer(output, closefd=False) as stream:
        stream.write(_framed(encoder.encode(header)))
        for item in kept:
            stream.write(_framed(encoder.encode((item.key, item.value))))
        stream.write(_framed(encoder.encode(End(keys=len(kept)))))
    return output.getvalue()


def _framed(document: bytes) -> bytes:
    return len(document).to_bytes(4, "big") + document


def unpack(data: bytes) -> Backup:
    """The content of a file. Raises InvalidParameter unless it is whole."""
    try:
        frame = zstandard.ZstdDecompressor().decompressobj()
        body = memoryview(frame.decompress(data))
        if not frame.eof or frame.unused_data:
            raise EOFError("it ends too early, or too late")
        return _read(body)
    except (zstandard.ZstdError, msgspec.MsgspecError, UnicodeDecodeError, EOFError) as error:
        raise InvalidParameter(f"the file is no whole backup of a swarm: {words(error)}") from error


def _read(body: memoryview) -> Backup:
    place = 0

    def document() -> memoryview:
        nonlocal place
        start = place + 4
        place = start + int.from_bytes(body[place:start], "big")
        if place > len(body) or start > len(body):
            raise EOFError("a record is cut")
        return body[start:place]

    header = msgspec.msgpack.decode(document(), type=Header)
    if header.format != FORMAT:
        raise InvalidParameter(f"the backup has the format {header.format}; this version reads {FORMAT}")
    pair = msgspec.msgpack.Decoder(tuple[str, bytes] | End)
    keys: list[tuple[str, bytes]] = []
    while not isinstance(found := pair.decode(document()), End):
        keys.append(found)
    if found.keys != len(keys) or place != len(body):
        raise InvalidParameter(f"the backup is not whole: it has {len(keys)} keys of {found.keys}")
    return Backup(header, keys)


def load(path: Path) -> Backup:
    """Raises InvalidParameter for a file that is no whole backup, ServerError when it cannot be
    read.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ServerError(f"the backup cannot be read: {reason_with_file(error)}") from error
    return unpack(data)


# --- writing --------------------------------------------------------------------------------------


async def take(etcd: Etcd, clock: Clock, node: str) -> tuple[Header, bytes]:
    """All keys at one revision, as this member has them: also without quorum."""
    for attempt in range(_TRIES):
        try:
            items, revision = await read_all(etcd, serializable=True)
            break
        except Compacted:
            if attempt == _TRIES - 1:
                raise
    base = next((int(item.value) for item in items if item.key == BASE), 0)
    found = next((item for item in items if item.key == CLUSTER.path("")), None)
    if found is None:
        raise ServerError("etcd has no swarm")
    header = Header(
        format=FORMAT,
        swarm=CLUSTER.decode(found.value).id,
        revision=revision + base,
        time=clock.now(),
        node=node,
        version=__version__,
    )
    return header, await asyncio.to_thread(pack, header, items)


async def save(etcd: Etcd, clock: Clock, node: str, path: Path) -> Header:
    """Write a backup to a file, whole or not at all."""
    header, data = await take(etcd, clock, node)
    try:
        await asyncio.to_thread(write_atomically, path, data, 0o600, durable=True)
    except OSError as error:
        raise ServerError(f"the backup cannot be written: {reason_with_file(error)}") from error
    return header


class Backups:
    """The hourly backups of one manager. `keep()`: how many old ones stay (KeepOldSnapshots)."""

    def __init__(self, root: Path, etcd: Etcd, clock: Clock, *, node: str, keep: Callable[[], int]) -> None:
        self._directory = root / DIRECTORY
        self._etcd, self._clock, self._node = etcd, clock, node
        self._keep = keep
        self._revision = 0

    async def run(self) -> None:
        """Write one each hour in which something has changed, until cancelled."""
        await self._clock.sleep(FIRST_AFTER)
        while True:
            try:
                await self.write()
            except (EngineError, OSError) as error:
                _log.warning("the hourly backup of the swarm failed: %s", words(error))
            except Exception:  # the next one may succeed
                _log.exception("the hourly backup of the swarm failed")
            await self._clock.sleep(PERIOD)

    async def write(self) -> Path | None:
        """Write a backup, and remove the oldest.

        Returns its path; None when nothing has changed.
        """
        current = (await self._etcd.range(CLUSTER.path(""), keys_only=True, serializable=True)).revision
        if current == self._revision:
            return None
        await asyncio.to_thread(self._directory.mkdir, 0o700, parents=True, exist_ok=True)
        moment = datetime.datetime.fromtimestamp(self._clock.now() // SECOND, datetime.UTC)
        path = self._directory / f"{moment:%Y%m%dT%H%M%SZ}{SUFFIX}"
        await save(self._etcd, self._clock, self._node, path)
        self._revision = current
        await asyncio.to_thread(self._remove_old)
        return path

    def _remove_old(self) -> None:
        present = sorted(path for path in self._directory.iterdir() if path.name.endswith(SUFFIX))
        for path in present[: -(KEEP + max(0, self._keep()))]:
            path.unlink(missing_ok=True)
        sync_directory(self._directory)


# --- restoring ------------------------------------------------------------------------------------


async def fill(etcd: Etcd, backup: Backup) -> None:
    """Write the keys into an empty etcd. The swarm's own record comes last: without it there is no
    swarm, so a restore that was cut is none.

    Raises ServerError unless etcd is empty.
    """
    if await base_of(etcd) or (await etcd.range(CLUSTER.path(""), timeout=5.0)).items:
        raise ServerError("etcd's data directory belongs to another swarm already")
    last = CLUSTER.path("")
    batch: list[PutKey] = [PutKey(BASE, str(backup.header.revision).encode())]
    size = 0
    for key, value in backup.keys:
        if key == last:
            continue
        batch.append(PutKey(key, value))
        size += len(key) + len(value)
        if len(batch) >= OPERATIONS or size > SIZE:
            await etcd.commit([], batch, timeout=30.0)
            batch, size = [], 0
    if batch:
        await etcd.commit([], batch, timeout=30.0)
    value = next(value for key, value in backup.keys if key == last)
    outcome = await etcd.commit([Guard(last, 0)], [PutKey(last, value)], timeout=30.0)
    if not outcome.done:
        raise ServerError("etcd's data directory belongs to another swarm already")
