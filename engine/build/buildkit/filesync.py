"""A client's directory as a tar stream: the receiving side of FileSync/DiffCopy.

The client sends one STAT per file in the order of its walk, then a STAT without content. This side
requests the files by their position in that list; the client answers with DATA packets, the last of
which is empty. FIN from both sides ends the copy. The client sends up to four files at once, so
packets of several files may alternate.

Files come out in the order of the list. Up to FILES_AHEAD files are requested before the first of
them is complete, as long as their sizes add up to BYTES_AHEAD: what is not at the head of the list
waits in memory.

Not here: what the files mean for a build (`build/context.py`), which checks the names.
Threads: the event loop's. Raises: InvalidParameter for a list or a file that breaks the protocol,
         ServerError with the client's reason.
"""

from __future__ import annotations

import stat
import struct
from collections import deque
from collections.abc import AsyncGenerator, Iterable
from urllib.parse import quote

from engine.build.buildkit import grpc, protobuf
from engine.build.buildkit.messages import DATA, FAILURE, FINISH, REQUEST, STAT, Packet, Stat
from engine.errors import InvalidParameter, ServerError

FILES_AHEAD = 64
BYTES_AHEAD = 4 << 20
FILES_LIMIT = 1_000_000
"""Files in one list."""
CHUNK = 256 << 10
"""Bytes that are gathered before they are passed on."""

# Go's os.FileMode
DIRECTORY, LINK, DEVICE, PIPE, SOCKET, CHARACTER = 1 << 31, 1 << 27, 1 << 26, 1 << 25, 1 << 24, 1 << 21
SPECIAL_BITS = ((stat.S_ISUID, 1 << 23), (stat.S_ISGID, 1 << 22), (stat.S_ISVTX, 1 << 20))
"""Bits of the kernel's modes and those of Go's."""
_TYPES = DIRECTORY | LINK | DEVICE | PIPE | SOCKET | CHARACTER | 1 << 19


def encoded(metadata: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Metadata in the client's encoding: if a value is not printable ASCII, all values of its name
    are percent-encoded, and NAME-encoded is 1.
    """
    found = list(metadata)
    unsafe = {name for name, value in found if not (value.isascii() and value.isprintable())}
    sent = [(name, quote(value, safe="") if name in unsafe else value) for name, value in found]
    return sent + [(f"{name}-encoded", "1") for name in sorted(unsafe)]


class _File:
    """A file of the list whose header or content has not been passed on."""

    __slots__ = ("chunks", "complete", "left", "number", "regular", "stat")

    def __init__(self, number: int, described: Stat) -> None:
        self.number = number
        self.stat = described
        self.regular = not described.mode & _TYPES and not described.target
        self.left = described.size if self.regular else 0
        """Bytes that the client still has to send."""
        self.chunks: list[bytes] = []
        self.complete = not self.regular


async def tar_stream(
    connection: grpc.Connection, method: str, metadata: list[tuple[str, str]], name: str
) -> AsyncGenerator[bytes, None]:
    """Copy the directory that `metadata` names; `name` is for messages."""
    stream = connection.call(method, metadata)
    try:
        gathered = bytearray()
        copy = _Copy(stream, name)
        while True:
            complete = copy.take(gathered)
            if complete or len(gathered) >= CHUNK:
                if gathered:
                    yield bytes(gathered)
                    gathered.clear()
                if complete:
                    break
            await copy.request()
            await copy.receive()
        await copy.finish()
        yield bytes(1024)
    finally:
        stream.cancel()


class _Copy:
    """The state of one copy."""

    def __init__(self, stream: grpc.Stream, name: str) -> None:
        self._stream = stream
        self._name = name
        self._listed = 0
        """STATs received."""
        self._all_listed = False
        self._waiting: deque[_File] = deque()
        """In the order of the list."""
        self._unrequested: deque[_File] = deque()
        """Regular files among them."""
        self._requested: dict[int, _File] = {}
        self._ahead = 0
        """Bytes of the requested files."""
        self._begun = False
        """The header of the first waiting file was passed on."""

    def take(self, into: bytearray) -> bool:
        """Append the tar stream as far as it has arrived. True when it is complete, without its
        last two blocks.
        """
        while self._waiting:
            file = self._waiting[0]
            if not self._begun:
                into += header(file.stat)
                self._begun = True
            for chunk in file.chunks:
                into += chunk
            file.chunks.clear()
            if not file.complete:
                return False
            if file.regular:
                into += bytes(-file.stat.size % 512)
            self._waiting.popleft()
            self._begun = False
        return self._all_listed

    async def request(self) -> None:
        """Request files until enough of them are under way."""
        while self._unrequested and len(self._requested) < FILES_AHEAD:
            size = self._unrequested[0].stat.size
            if self._requested and self._ahead + size > BYTES_AHEAD:
                return
            file = self._unrequested.popleft()
            self._requested[file.number] = file
            self._ahead += size
            await self._stream.send(protobuf.encode(Packet(type=REQUEST, id=file.number)))

    async def receive(self) -> None:
        """Take in one packet."""
        packet = await self._next()
        if packet.type == STAT:
            self._list(packet.stat)
        elif packet.type == DATA:
            self._add(packet.id, packet.data)
        elif packet.type == FINISH:
            raise InvalidParameter(f"{self._name}: the client ended the copy too early")

    async def _next(self) -> Packet:
        message = await self._stream.receive()
        if message is None:
            raise InvalidParameter(f"{self._name}: the client ended the copy too early")
        packet = protobuf.decode(message, Packet)
        if packet.type == FAILURE:
            raise ServerError(f"{self._name}: {packet.data.decode(errors='replace')}")
        return packet

    def _list(self, described: Stat | None) -> None:
        if self._all_listed:
            raise InvalidParameter(f"{self._name}: a file was listed after the end of the list")
        if described is None:
            self._all_listed = True
            return
        if self._listed >= FILES_LIMIT:
            raise InvalidParameter(f"{self._name}: more than {FILES_LIMIT} files")
        file = _File(self._listed, described)
        self._listed += 1
        if described.size < 0:
            raise InvalidParameter(f"{self._name}: the size of {described.path} is negative")
        if described.mode & SOCKET:
            return
        self._waiting.append(file)
        if file.regular:
            self._unrequested.append(file)

    def _add(self, number: int, data: bytes) -> None:
        file = self._requested.get(number)
        if file is None:
            raise InvalidParameter(f"{self._name}: content of file {number}, which was not requested")
        if data and len(data) <= file.left:
            file.left -= len(data)
            file.chunks.append(data)
        elif data or file.left:
            raise InvalidParameter(f"{self._name}: the size of {file.stat.path} changed while it was read")
        else:
            file.complete = True
            del self._requested[number]
            self._ahead -= file.stat.size

    async def finish(self) -> None:
        """Both sides are done."""
        await self._stream.send(protobuf.encode(Packet(type=FINISH)), last=True)
        while (await self._next()).type != FINISH:
            pass
        while await self._stream.receive() is not None:
            pass


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
    permissions = mode & 0o777
    for bit, theirs in SPECIAL_BITS:
        permissions |= bit if mode & theirs else 0
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
