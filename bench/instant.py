"""An engine for `docker buildx` that does nothing: it answers each question at once, with what does
not depend on files. What a command takes with it, the client itself takes.

A build asks the client for the Dockerfile, its .dockerignore and the list of the files that are
copied, as engines do when all is cached. It answers one client at a time, and no other client than
buildx: it knows no flow control and no errors.
"""

from __future__ import annotations

import json
import selectors
import socket
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

from hpack import Decoder

from tests.support.builds.sessions import every, field, fields, mapping

HEADERS, RESET, SETTINGS, PING = 1, 3, 4, 6
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
WINDOW = 1 << 24
REQUEST, FINISH = 1, 3
"""Types of packets of a copy."""
IMAGE = f"sha256:{'1' * 64}"
WORKER = field(1, "instant") + field(3, field(1, "amd64") + field(2, "linux"))
CAPABILITIES = (
    *("solve.base", "solve.inlinereturn", "return", "returnmap", "proto.refarray"),
    *("frontend.caps", "frontend.inputs", "reference.output", "gateway.evaluate"),
)
CLEAN = {"result.json": '{"sources":[],"warnings":[]}', "result.txt": "Check complete, no warnings found.\n"}
HEADS = {
    b"/_ping": b"HTTP/1.1 200 OK\r\nApi-Version: 1.51\r\nBuilder-Version: 2\r\nContent-Length: 0\r\n\r\n",
    b"/grpc": b"HTTP/1.1 101 UPGRADED\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
    b"/session": b"HTTP/1.1 101 UPGRADED\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
}
VERSION = json.dumps(
    {"Version": "28.5.2", "ApiVersion": "1.51", "MinAPIVersion": "1.24", "Os": "linux", "Arch": "amd64"}
).encode()


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def message(stream: int, content: bytes, *, last: bool = False) -> bytes:
    return frame(0, last, stream, struct.pack(">BI", 0, len(content)) + content)


def headers(stream: int, values: Sequence[tuple[str, str]], *, last: bool = False) -> bytes:
    block = b"".join(
        b"\0" + bytes((len(name),)) + name.encode() + bytes((len(value),)) + value.encode() for name, value in values
    )
    return frame(HEADERS, 4 | last, stream, block)


def answer(stream: int, content: bytes | None) -> bytes:
    """The whole answer of a call."""
    begin = headers(stream, ((":status", "200"), ("content-type", "application/grpc")))
    return begin + (message(stream, content) if content is not None else b"") + end(stream)


def end(stream: int) -> bytes:
    return headers(stream, (("grpc-status", "0"),), last=True)


class _Connection:
    """One connection of the client, which begins with HTTP/1.1."""

    def __init__(self, stream: socket.socket, engine: Instant) -> None:
        self.stream = stream
        self.session = False
        self._engine = engine
        self._buffer = b""
        self._frames = False
        self._skipped = 0
        self._decoder = Decoder()

    def read(self) -> bool:
        """False at the end."""
        try:
            data = self.stream.recv(1 << 20)
            self._buffer += data
            while self._frame() if self._frames else self._request():
                pass
        except OSError:  # the client does not wait for all answers
            return False
        return bool(data)

    def _request(self) -> bool:
        head, ended, rest = self._buffer.partition(b"\r\n\r\n")
        if not ended:
            return False
        self._buffer = rest
        path = b"/" + head.split(b" ", 2)[1].rpartition(b"/")[2]
        found = HEADS.get(path, b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(VERSION), VERSION))
        if b"101" in found[:12]:
            self._frames, self.session = True, path == b"/session"
            self._skipped = 0 if self.session else len(PREFACE)
            found += PREFACE if self.session else b""
            found += frame(SETTINGS, 0, 0, struct.pack(">HI", 4, WINDOW)) + frame(8, 0, 0, struct.pack(">I", WINDOW))
        self.stream.sendall(found)
        if self.session:
            self._engine.opened(self, head.partition(b"Session-Uuid: ")[2].split(b"\r\n")[0])
        return True

    def _frame(self) -> bool:
        if len(self._buffer) < self._skipped + 9:
            return False
        buffer = self._buffer = self._buffer[self._skipped :]
        self._skipped = 0
        size = int.from_bytes(buffer[:3], "big")
        if len(buffer) < 9 + size:
            return False
        self._buffer = buffer[9 + size :]
        kind, flags, number, payload = buffer[3], buffer[4], int.from_bytes(buffer[5:9], "big"), buffer[9 : 9 + size]
        if kind in (SETTINGS, PING) and not flags & 1:
            self.stream.sendall(frame(kind, 1, 0, payload if kind == PING else b""))
        elif kind == HEADERS:
            found = dict(self._decoder.decode(payload))
            if not self.session:
                self._engine.called(self, number, found[":path"])
        elif kind == 0 and payload:
            if self.session:
                self._engine.copied(self, number, payload)
            else:
                self._engine.asked(self, number, payload[5:])
        return True


class Instant:
    """The engine. `serve` ends with its process."""

    def __init__(self, path: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(64)
        self._sessions: dict[bytes, _Connection] = {}
        self._build = self._session = b""
        """Reference and session of the last Solve. The client may open the session later."""
        self._pings: list[tuple[_Connection, int]] = []
        """Those of a build whose Solve has not come yet."""
        self._ended: set[bytes] = set()
        """Builds that have ended. The client may ask for their status later."""
        self._paths: dict[tuple[_Connection, int], str] = {}
        self._waiting: dict[str, tuple[_Connection, int]] = {}
        """Calls of Solve and Status that have not been answered."""
        self._buffers: dict[int, bytes] = {}
        self._copies: list[tuple[tuple[str, str], ...]] = []
        self._done: Callable[[], None] = self._end
        self._image = False

    def serve(self) -> None:
        selector = selectors.DefaultSelector()
        selector.register(self._listener, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is self._listener:
                    stream, _ = self._listener.accept()
                    selector.register(stream, selectors.EVENT_READ, _Connection(stream, self))
                elif not key.data.read():
                    selector.unregister(key.fileobj)
                    key.data.stream.close()

    def opened(self, connection: _Connection, session: bytes) -> None:
        """The client has opened a session."""
        self._sessions[session] = connection
        if self._copies and session == self._session:
            self._next(1)

    def called(self, connection: _Connection, number: int, path: str) -> None:
        self._paths[connection, number] = path.rpartition("/")[2]
        if path.endswith("Control/Solve"):
            self._paths[connection, number] = "Control/Solve"

    def asked(self, connection: _Connection, number: int, request: bytes) -> None:
        """The only message of a call."""
        name = self._paths.pop((connection, number))
        content: bytes | None = b""
        if name == "Status" and fields(request)[1] in self._ended:
            content = None
        elif name in ("Control/Solve", "Status"):
            self._waiting[name] = connection, number
            if name == "Control/Solve":
                self._build, self._session = fields(request)[1], fields(request)[5]
                self._image = 3 in fields(request)
                self._answer_pings()
            return
        elif name == "ListWorkers":
            content = field(1, WORKER)
        elif name == "Ping":
            self._pings.append((connection, number))
            if "Control/Solve" in self._waiting:
                self._answer_pings()
            return
        elif name == "ListenBuildHistory":
            content = None
        elif name == "Solve":
            options = {fields(each)[1]: fields(each)[2] for at, each in every(request) if at == 3}
            if b"requestid" in options:
                clean = b"".join(field(10, field(1, key) + field(2, value)) for key, value in CLEAN.items())
                self._copy(("Dockerfile",), lambda: connection.stream.sendall(answer(number, field(3, clean))))
                return
            content = field(3, field(3, field(1, "result") + field(2, field(1, b"\x1a\0"))))
        connection.stream.sendall(answer(number, content))
        if name == "Return":
            self._copy(("Dockerfile", "part"), self._end) if self._image else self._end()

    def _answer_pings(self) -> None:
        """A build's other calls follow its Ping. Its Solve may come after that one."""
        able = (field(2, field(1, each) + field(2, 1)) for each in ("source.local", "exporter.multiple"))
        content = b"".join(field(1, field(1, each) + field(2, 1)) for each in CAPABILITIES)
        content += b"".join(able) + field(3, WORKER)
        while self._pings:
            connection, number = self._pings.pop()
            connection.stream.sendall(answer(number, content))

    def _end(self) -> None:
        """The build has ended."""
        self._ended.add(self._build)
        for name, content in (("Status", self._status()), ("Control/Solve", self._response())):
            if name in self._waiting:
                connection, number = self._waiting.pop(name)
                connection.stream.sendall(answer(number, content))

    def _status(self) -> bytes | None:
        """Seven steps, all of them cached."""
        time = field(1, 1)
        digests = (f"sha256:{at:064}" for at in range(7))
        steps = (
            field(1, field(1, each) + field(3, "step") + field(4, 1) + field(5, time) + field(6, time))
            for each in digests
        )
        return b"".join(steps) if self._image else None

    def _response(self) -> bytes:
        return mapping(1, {"containerimage.digest": IMAGE, "image.name": "built"}) if self._image else b""

    # --- copies of the client's files -------------------------------------------------------------

    def _copy(self, follow: Sequence[str], done: Callable[[], None]) -> None:
        """Have the client send the Dockerfile, no .dockerignore, and list what is copied."""
        self._done = done
        self._copies = [
            (("dir-name", "dockerfile"), ("followpaths", follow[0])),
            (("dir-name", "context"), ("followpaths", ".dockerignore")),
            *((("dir-name", "context"), ("followpaths", each)) for each in follow[1:]),
        ]
        if self._session in self._sessions:
            self._next(1)

    def _next(self, number: int) -> None:
        about = ((":method", "POST"), (":scheme", "http"), (":authority", "localhost"))
        about += ((":path", "/moby.filesync.v1.FileSync/DiffCopy"), ("content-type", "application/grpc"))
        self._buffers = {number: b""}
        self._sessions[self._session].stream.sendall(
            headers(number, (*about, ("te", "trailers"), *self._copies.pop(0)))
        )

    def copied(self, connection: _Connection, number: int, data: bytes) -> None:
        """A part of the client's packets."""
        buffer = self._buffers[number] + data
        while len(buffer) >= 5 and len(buffer) >= 5 + (size := int.from_bytes(buffer[1:5], "big")):
            packet, buffer = fields(buffer[5 : 5 + size]), buffer[5 + size :]
            kind = packet.get(1, 0)
            if kind == FINISH:
                self._next(number + 2) if self._copies else self._done()
                return
            if kind == 0 and fields(packet.get(2, b"")).get(1) == b"Dockerfile":
                connection.stream.sendall(message(number, field(1, REQUEST)))
            elif (kind == 0 and 2 not in packet and number != 1) or (kind == 2 and not packet.get(4)):
                connection.stream.sendall(message(number, field(1, FINISH), last=True))
        self._buffers[number] = buffer


__all__ = ["Instant"]
