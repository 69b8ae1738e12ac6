"""The files of an image for a client: the exporters `local` and `tar`.

For `local` this side sends as in FileSync (see `filesync.py`), and the client requests the files
that it wants. For `tar` it sends the bytes of an archive. Both use the client's service FileSend.

Owns: the descriptor of the image's root, while it sends.
Threads: the event loop's; files are read in threads.
Raises:  Unimplemented when the client offers no such service, ServerError with its reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterable

from engine.builder.buildkit import filesync
from engine.builder.buildkit.messages import DATA, FAILURE, FINISH, REQUEST, BytesMessage, Packet, Stat
from engine.builder.buildkit.services import Session
from engine.builder.trees import BLOCK, CHARACTER, DIRECTORY, FIFO, LINK, DirectoryTree, Entry
from engine.errors import InvalidParameter, ServerError
from engine.rpc import grpc, protobuf
from engine.storage.snapshots import Snapshots
from engine.system.threads import uninterrupted

LOCAL, TAR = "local", "tar"

_PIECE = 1 << 20
"""Bytes that are read at a time."""
_PACKET = 32 << 10
_KINDS = {
    DIRECTORY: filesync.DIRECTORY,
    LINK: filesync.LINK,
    CHARACTER: filesync.DEVICE | filesync.CHARACTER,
    BLOCK: filesync.DEVICE,
    FIFO: filesync.PIPE,
}


async def export(kind: str, number: int, session: Session, snapshots: Snapshots, top: str) -> None:
    """Send the files of an image. `number`: of the exporter in the client's request. `top`: the
    chain_id of its topmost layer, which the caller keeps; empty if it has none.
    """
    stream = session.file_send([("buildkit-attachable-exporter-id", str(number))])
    try:
        async with _root(snapshots, top) as root:
            tree = DirectoryTree(root) if root >= 0 else None
            files = await asyncio.to_thread(listed, tree) if tree is not None else []
            if kind == TAR:
                await _send_archive(stream, tree, files)
            else:
                await _send_files(stream, tree, files)
    finally:
        stream.cancel()


@contextlib.asynccontextmanager
async def _root(snapshots: Snapshots, top: str) -> AsyncIterator[int]:
    """A descriptor of the image's root; -1 if it has no layer."""
    if not top:
        yield -1
        return
    descriptor = await snapshots.open_content(top)
    try:
        yield descriptor
    finally:
        await asyncio.to_thread(os.close, descriptor)


def listed(tree: DirectoryTree) -> list[tuple[Entry, Stat]]:
    """Every file below the root, in the order that clients demand: by the bytes of each name in the
    path. Blocking.
    """
    entries = sorted((entry for _, entry in tree.walk("")), key=lambda entry: os.fsencode(entry.path).split(b"/"))
    first: dict[int, str] = {}
    return [(entry, described(entry, first)) for entry in entries]


def described(entry: Entry, first: dict[int, str]) -> Stat:
    """An entry in the client's terms. `first`: path of the first entry with each inode."""
    mode = entry.mode & 0o777 | _KINDS.get(entry.kind, 0)
    for bit, theirs in filesync.SPECIAL_BITS:
        mode |= theirs if entry.mode & bit else 0
    target = entry.target
    if entry.inode and entry.kind not in (DIRECTORY, LINK):
        earlier = first.setdefault(entry.inode, entry.path)
        target = earlier if earlier != entry.path else target
    return Stat(
        path=entry.path,
        mode=mode,
        uid=entry.uid,
        gid=entry.gid,
        size=entry.size if not target else 0,
        modified=entry.mtime,
        target=target,
        major=entry.major,
        minor=entry.minor,
        xattrs={os.fsdecode(name): value for name, value in entry.xattrs},
    )


def _pieces(tree: DirectoryTree, entry: Entry) -> Generator[bytes, None, None]:
    """A file's content. It is closed before the last piece. Raises ServerError when its size has
    changed. Blocking.
    """
    left = entry.size
    file = tree.reader(entry)
    try:
        while left:
            buffer = bytearray(min(left, _PIECE))
            count = file.readinto(memoryview(buffer))
            if not count:
                raise ServerError(f"{entry.path}: shorter than it was")
            left -= count
            if not left:
                file.close()
            yield bytes(buffer[:count])
    finally:
        file.close()


def archived(tree: DirectoryTree | None, files: Iterable[tuple[Entry, Stat]]) -> Generator[bytes, None, None]:
    """The bytes of an archive, in large pieces: small files share one. Blocking."""
    gathered = bytearray()
    for entry, stat in files:
        gathered += filesync.header(stat)
        if stat.size and tree is not None:
            for piece in _pieces(tree, entry):
                gathered += piece
                if len(gathered) >= _PIECE:
                    yield bytes(gathered)
                    gathered.clear()
            gathered += bytes(-stat.size % 512)
    yield bytes(gathered) + bytes(1024)


async def _in_threads(pieces: Generator[bytes, None, None]) -> AsyncGenerator[bytes, None]:
    """The pieces, each made in a thread."""
    try:
        while piece := await uninterrupted(asyncio.to_thread(next, pieces, b"")):
            yield piece
    finally:
        await uninterrupted(asyncio.to_thread(pieces.close))


async def _content(tree: DirectoryTree, entry: Entry) -> AsyncGenerator[bytes, None]:
    """A file's content. Most files are small: one turn of a thread is enough for them."""
    if entry.size <= _PIECE:
        yield await uninterrupted(asyncio.to_thread(lambda: b"".join(_pieces(tree, entry))))
        return
    async with contextlib.aclosing(_in_threads(_pieces(tree, entry))) as pieces:
        async for piece in pieces:
            yield piece


async def _send_archive(stream: grpc.Stream, tree: DirectoryTree | None, files: list[tuple[Entry, Stat]]) -> None:
    async with contextlib.aclosing(_in_threads(archived(tree, files))) as pieces:
        async for piece in pieces:
            await stream.send(protobuf.encode(BytesMessage(data=piece)))
    await stream.end()
    while await stream.receive() is not None:
        pass


async def _send_files(stream: grpc.Stream, tree: DirectoryTree | None, files: list[tuple[Entry, Stat]]) -> None:
    async def list_files() -> None:
        for _, stat in files:
            await stream.send(protobuf.encode(Packet(stat=stat)))
        await stream.send(protobuf.encode(Packet()))

    listing = asyncio.ensure_future(list_files())
    try:
        while True:
            message = await stream.receive()
            if message is None:
                raise ServerError("the client ended the export too early")
            packet = protobuf.decode(message, Packet)
            if packet.type == FINISH:
                break
            if packet.type == FAILURE:
                raise ServerError(packet.data.decode(errors="replace"))
            if packet.type != REQUEST or packet.id >= len(files) or tree is None:
                raise InvalidParameter("the client requested a file that is not in the list")
            entry, stat = files[packet.id]
            if stat.size:
                async with contextlib.aclosing(_content(tree, entry)) as pieces:
                    async for piece in pieces:
                        for begin in range(0, len(piece), _PACKET):
                            data = piece[begin : begin + _PACKET]
                            await stream.send(protobuf.encode(Packet(type=DATA, id=packet.id, data=data)))
            await stream.send(protobuf.encode(Packet(type=DATA, id=packet.id)))
        await listing
    finally:
        listing.cancel()
        await asyncio.gather(listing, return_exceptions=True)
    await stream.send(protobuf.encode(Packet(type=FINISH)))
    await stream.end()
    while await stream.receive() is not None:
        pass


__all__ = ["LOCAL", "TAR", "archived", "described", "export", "listed"]
