"""A client's directory: the receiving side of FileSync/DiffCopy.

The client sends one STAT per file in the order of its walk, then a STAT without content. This side
requests the files that it needs by their position in that list; the client answers with DATA
packets, the last of which is empty. FIN from both sides ends the copy. The client sends up to four
files at once, so packets of several files may alternate.

A client that fails in the middle of a file (one that has become a directory) sends no more, and
does not end the call before it receives a packet. So it gets an empty one, which has no meaning,
when nothing has arrived for SILENCE seconds.

Up to FILES_AHEAD files are requested before the first of them is complete, as long as their sizes
add up to BYTES_AHEAD.

Not here: what the files mean for a build (`builder/context.py`), which checks the names; where they
are kept (`builder/kept.py`).
Threads: the event loop's. Raises: InvalidParameter for a list or a file that breaks the protocol,
         ServerError with the client's reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import posixpath
import stat
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol
from urllib.parse import quote

from engine.builder.buildkit.messages import DATA, FAILURE, FINISH, REQUEST, STAT, Packet, Stat
from engine.builder.kept import Listed
from engine.builder.trees import BLOCK, FIFO, FILE
from engine.builder.trees import CHARACTER as CHARACTER_DEVICE
from engine.builder.trees import DIRECTORY as DIRECTORY_ENTRY
from engine.builder.trees import LINK as LINK_ENTRY
from engine.errors import EngineError, InvalidParameter, ServerError
from engine.rpc import grpc, protobuf

FILES_AHEAD = 64
BYTES_AHEAD = 4 << 20
SILENCE = 1.0
FILES_LIMIT = 1_000_000
"""Files in one list."""
_DATA_BEGINS, _ID_TAG, _DATA_TAG = b"\x08\x02", 0x18, 0x22
"""Type 2, and the tags of the two fields that follow."""
_TURN = 0.0005
"""Seconds of packets that have arrived, after which other tasks have a turn."""
_HARD_LINK = "1"

# Go's os.FileMode
DIRECTORY, LINK, DEVICE, PIPE, SOCKET, CHARACTER = 1 << 31, 1 << 27, 1 << 26, 1 << 25, 1 << 24, 1 << 21
SPECIAL_BITS = ((stat.S_ISUID, 1 << 23), (stat.S_ISGID, 1 << 22), (stat.S_ISVTX, 1 << 20))
"""Bits of the kernel's modes and those of Go's."""
_LINKS = 40
"""Links that are followed to a file in memory."""


def encoded(metadata: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Metadata in the client's encoding: if a value is not printable ASCII, all values of its name
    are percent-encoded, and NAME-encoded is 1.
    """
    found = list(metadata)
    unsafe = {name for name, value in found if not (value.isascii() and value.isprintable())}
    sent = [
        (name, quote(value, safe="", errors="surrogateescape") if name in unsafe else value) for name, value in found
    ]
    return sent + [(f"{name}-encoded", "1") for name in sorted(unsafe)]


class Receiver(Protocol):
    """What takes the files, in the order of the list."""

    def recall(self, stat: bytes, /) -> bool:
        """Add the file of an encoded STAT if it is known with its content. False if it is not."""

    def add(self, number: int, stat: bytes, file: Listed, /) -> bool:
        """Add a file that is not known. True if its content is needed, as that of `number`."""

    def write(self, number: int, data: bytes | memoryview, /) -> None:
        """Some content of a file, of all files in any order."""

    def complete(self, number: int, /, *, whole: bool) -> None:
        """Nothing more of a file follows. Unless it is `whole`, its size is not that of its STAT:
        it has changed, or the client cannot read it.
        """

    def full(self) -> bool:
        """No more content may be written before `drained`."""

    async def drained(self) -> None:
        """Wait until more content may be written."""


class InMemory:
    """A receiver of a few small files."""

    def __init__(self, limit: int, name: str) -> None:
        """`limit`: bytes of all files; more raise InvalidParameter, which gives the `name`."""
        self._left = limit
        self._limit, self._name = limit, name
        self._paths: dict[int, str] = {}
        self._contents: dict[str, bytearray] = {}
        self._links: dict[str, str] = {}

    def recall(self, _stat: bytes) -> bool:
        return False

    def add(self, number: int, _stat: bytes, file: Listed) -> bool:
        if file.kind == LINK_ENTRY:
            self._links[file.path] = file.target
        elif file.kind == _HARD_LINK:
            self._contents[file.path] = self._contents.get(file.target, bytearray())
        elif file.kind == FILE:
            self._paths[number] = file.path
            self._contents[file.path] = bytearray()
        return file.kind == FILE

    def write(self, number: int, data: bytes | memoryview) -> None:
        self._left -= len(data)
        if self._left < 0:
            raise InvalidParameter(f"{self._name}: larger than {self._limit} bytes")
        self._contents[self._paths[number]] += data

    def complete(self, number: int, *, whole: bool) -> None:
        if not whole:
            raise InvalidParameter(f"{self._name}: the size of {self._paths[number]} changed while it was read")

    def full(self) -> bool:
        return False

    async def drained(self) -> None:
        pass

    def content(self, name: str) -> bytes | None:
        """The content of a file; links are followed. None if there is no such file."""
        path = posixpath.normpath(name.lstrip("/"))
        for _ in range(_LINKS):
            if path not in self._links:
                break
            path = posixpath.normpath(posixpath.join(posixpath.dirname(path), self._links[path])).lstrip("/")
        content = self._contents.get(path)
        return None if content is None else bytes(content)


class _File:
    """A file whose content is needed and has not arrived."""

    __slots__ = ("left", "number", "size")

    def __init__(self, number: int, file: Listed) -> None:
        self.number = number
        self.size = self.left = file.size
        """`left` is negative after more bytes than the file should have."""


async def copy(
    stream: grpc.Stream, name: str, receiver: Receiver, received: Callable[[int], object] = lambda _: None
) -> None:
    """Copy a directory by a call of DiffCopy; `name` is for messages. `received`: is called with
    the size of each packet.
    """
    copying = _Copy(stream, name, receiver, received)
    waking = asyncio.create_task(copying.wake())
    try:
        await copying.run()
    finally:
        waking.cancel()
        stream.cancel()


class _Copy:
    """The state of one copy."""

    def __init__(self, stream: grpc.Stream, name: str, receiver: Receiver, received: Callable[[int], object]) -> None:
        self._stream = stream
        self._name = name
        self._receiver = receiver
        self._received = received
        self._packets = 0
        """Packets received."""
        self._listed = 0
        """STATs received."""
        self._all_listed = False
        self._unrequested: deque[_File] = deque()
        self._requested: dict[int, _File] = {}
        self._ahead = 0
        """Bytes of the requested files."""

    async def wake(self) -> None:
        """Make a client that has failed say so."""
        with contextlib.suppress(EngineError):  # the call is over
            while True:
                before = self._packets
                await asyncio.sleep(SILENCE)
                if self._packets == before and self._requested:
                    await self._stream.send(protobuf.encode(Packet()))

    async def run(self) -> None:
        begin = time.monotonic()
        while self._unrequested or self._requested or not self._all_listed:
            if self._unrequested:
                await self._request()
            if self._receiver.full():
                await self._receiver.drained()
            message = self._stream.received()
            if message is None:
                message = await self._next()
                begin = time.monotonic()
            self._received(len(message))
            self._take(message)
            self._packets += 1
            if time.monotonic() - begin > _TURN:
                await asyncio.sleep(0)
                begin = time.monotonic()
        await self._stream.send(protobuf.encode(Packet(type=FINISH)), last=True)
        while self._packet(await self._next()).type != FINISH:
            pass
        while await self._stream.receive() is not None:
            pass

    async def _request(self) -> None:
        """Request files until enough of them are under way."""
        while self._unrequested and len(self._requested) < FILES_AHEAD:
            size = self._unrequested[0].size
            if self._requested and self._ahead + size > BYTES_AHEAD:
                return
            file = self._unrequested.popleft()
            self._requested[file.number] = file
            self._ahead += size
            await self._stream.send(protobuf.encode(Packet(type=REQUEST, id=file.number)))

    async def _next(self) -> bytes:
        message = await self._stream.receive()
        if message is None:
            raise InvalidParameter(f"{self._name}: the client ended the copy too early")
        return message

    def _packet(self, message: bytes) -> Packet:
        packet = protobuf.decode(message, Packet)
        if packet.type == FAILURE:
            raise ServerError(f"{self._name}: {packet.data.decode(errors='replace')}")
        return packet

    def _take(self, message: bytes) -> None:
        """Take in one packet."""
        if not self._all_listed and self._receiver.recall(message):
            self._count()
            return
        if (data := _data(message)) is not None:
            self._add(*data)
            return
        packet = self._packet(message)
        if packet.type == STAT:
            self._list(message, packet.stat)
        elif packet.type == DATA:
            self._add(packet.id, packet.data)
        elif packet.type == FINISH:
            raise InvalidParameter(f"{self._name}: the client ended the copy too early")

    def _count(self) -> int:
        """The number of the next file in the list."""
        if self._listed >= FILES_LIMIT:
            raise InvalidParameter(f"{self._name}: more than {FILES_LIMIT} files")
        self._listed += 1
        return self._listed - 1

    def _list(self, message: bytes, described: Stat | None) -> None:
        if self._all_listed:
            raise InvalidParameter(f"{self._name}: a file was listed after the end of the list")
        if described is None:
            self._all_listed = True
            return
        number = self._count()
        if described.size < 0:
            raise InvalidParameter(f"{self._name}: the size of {described.path} is negative")
        if described.mode & SOCKET:
            return
        file = listed(described)
        if self._receiver.add(number, message, file):
            self._unrequested.append(_File(number, file))

    def _add(self, number: int, data: bytes | memoryview) -> None:
        file = self._requested.get(number)
        if file is None:
            raise InvalidParameter(f"{self._name}: content of file {number}, which was not requested")
        if not data:
            del self._requested[number]
            self._ahead -= file.size
            self._receiver.complete(number, whole=not file.left)
        elif len(data) <= file.left:
            file.left -= len(data)
            self._receiver.write(number, data)
        else:
            file.left = -1


def _data(message: bytes) -> tuple[int, memoryview] | None:
    """Number and content of a DATA packet as clients encode it, without a copy. None for all other
    messages, which `protobuf.decode` reads.
    """
    if message[:2] != _DATA_BEGINS:
        return None
    view = memoryview(message)
    number, place = 0, len(_DATA_BEGINS)
    try:
        if view[place] == _ID_TAG:
            number, place = protobuf.read_varint(view, place + 1)
        if view[place] != _DATA_TAG:
            return None
        size, place = protobuf.read_varint(view, place + 1)
    except (IndexError, ValueError):
        return None
    return (number, view[place:]) if len(view) - place == size else None


def listed(described: Stat) -> Listed:
    """The file that a STAT describes, which is no socket."""
    mode = described.mode
    kind = FILE
    if mode & DIRECTORY:
        kind = DIRECTORY_ENTRY
    elif mode & LINK:
        kind = LINK_ENTRY
    elif mode & PIPE:
        kind = FIFO
    elif mode & DEVICE:
        kind = CHARACTER_DEVICE if mode & CHARACTER else BLOCK
    elif described.target:
        kind = _HARD_LINK
    return Listed(
        *(described.path, kind, _permissions(mode), described.uid, described.gid),
        size=described.size if kind == FILE else 0,
        mtime=described.modified,
        target=described.target,
        xattrs=tuple(sorted((os.fsencode(key), value) for key, value in described.xattrs.items())),
        major=described.major if mode & DEVICE else 0,
        minor=described.minor if mode & DEVICE else 0,
    )


def _permissions(mode: int) -> int:
    """The kernel's bits of a mode of Go's."""
    found = mode & 0o777
    for bit, theirs in SPECIAL_BITS:
        found |= bit if mode & theirs else 0
    return found


# --- tar headers (POSIX.1-2001) -------------------------------------------------------------------

_HEADER = struct.Struct("100s8s8s8s12s12s8sc100s8s32s32s8s8s155s12x")
_BLANK = b" " * 8


def header(described: Stat) -> bytes:
    """The tar header of a file, after a pax header when ustar's fields are too small for it.
    Fractions of a second are dropped.
    """
    mode = described.mode
    name = described.path.encode("utf-8", "surrogateescape")
    target = described.target.encode("utf-8", "surrogateescape")
    size = 0
    if mode & DIRECTORY:
        kind, name = b"5", name.rstrip(b"/") + b"/"
    elif mode & LINK:
        kind = b"2"
    elif mode & PIPE:
        kind = b"6"
    elif mode & DEVICE:
        kind = b"3" if mode & CHARACTER else b"4"
    elif target:
        kind = b"1"
    else:
        kind, size = b"0", described.size
    permissions = _permissions(mode)
    modified = described.modified // 1_000_000_000
    uid, gid = described.uid, described.gid
    records: list[tuple[bytes, bytes]] = []
    if len(name) > 100:
        records.append((b"path", name))
    if len(target) > 100:
        records.append((b"linkpath", target))
    if size >= 1 << 33:
        records.append((b"size", b"%d" % size))
        size = 0
    if not 0 <= modified < 1 << 33:
        records.append((b"mtime", b"%d" % modified))
        modified = 0
    if uid >= 1 << 21:
        records.append((b"uid", b"%d" % uid))
        uid = 0
    if gid >= 1 << 21:
        records.append((b"gid", b"%d" % gid))
        gid = 0
    for key, value in sorted(described.xattrs.items()):
        records.append((b"SCHILY.xattr." + key.encode("utf-8", "surrogateescape"), value))
    before = _pax(records) if records else b""
    numbers = (permissions, uid, gid, size, modified, described.major, described.minor)
    return before + _block(name, kind, target, numbers)


def _block(name: bytes, kind: bytes, target: bytes, numbers: tuple[int, int, int, int, int, int, int]) -> bytes:
    mode, uid, gid, size, modified, major, minor = numbers
    block = _HEADER.pack(
        *(name[:100], b"%07o" % mode, b"%07o" % uid, b"%07o" % gid, b"%011o" % size, b"%011o" % modified, _BLANK),
        *(kind, target[:100], b"ustar\x0000", b"", b"", b"%07o" % (major & 0o7777777), b"%07o" % (minor & 0o7777777)),
        b"",
    )
    return block[:148] + b"%06o\0 " % sum(block) + block[156:]


def _pax(records: list[tuple[bytes, bytes]]) -> bytes:
    """An extended header with these records."""
    content = b"".join(_record(key, value) for key, value in records)
    head = _block(b"PaxHeaders/file", b"x", b"", (0o644, 0, 0, len(content), 0, 0, 0))
    return head + content + bytes(-len(content) % 512)


def _record(key: bytes, value: bytes) -> bytes:
    """`LENGTH KEY=VALUE\\n`, where LENGTH counts itself."""
    rest = len(key) + len(value) + 3
    length = rest + len(str(rest))
    if len(str(length)) > len(str(rest)):
        length = rest + len(str(length))
    return b"%d %s=%s\n" % (length, key, value)
