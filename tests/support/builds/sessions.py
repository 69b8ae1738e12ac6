"""A client with a session (BuildKit): it sends `POST /session`, and then serves gRPC calls of the
daemon on that connection, with h2 and threads. It shares no code with the engine.
"""

from __future__ import annotations

import base64
import fnmatch
import hashlib
import json
import queue
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import unquote

import h2.config
import h2.connection
import h2.events
import h2.exceptions

from tests.support import PATIENCE
from tests.support.engine import client

GET_SECRET = "/moby.buildkit.secrets.v1.Secrets/GetSecret"
READ_CONTENT = "/containerd.services.content.v1.Content/Read"
WRITE_CONTENT = "/containerd.services.content.v1.Content/Write"
CONTENT_INFO = "/containerd.services.content.v1.Content/Info"
CHECK_AGENT = "/moby.sshforward.v1.SSH/CheckAgent"
FORWARD_AGENT = "/moby.sshforward.v1.SSH/ForwardAgent"
CREDENTIALS = "/moby.filesync.v1.Auth/Credentials"
FILE_SEND = "/moby.filesync.v1.FileSend/DiffCopy"
DIFF_COPY = "/moby.filesync.v1.FileSync/DiffCopy"


def varint(value: int) -> bytes:
    found = b""
    while value >= 0x80:
        found += bytes((value & 0x7F | 0x80,))
        value >>= 7
    return found + bytes((value,))


def field(number: int, value: int | bytes | str) -> bytes:
    """One protobuf field."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    data = value.encode(errors="surrogateescape") if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def mapping(number: int, values: Mapping[str, str]) -> bytes:
    """A protobuf field that is a map of strings."""
    return b"".join(field(number, field(1, key) + field(2, value)) for key, value in values.items())


def fields(data: bytes) -> dict[int, Any]:
    """The last value of each protobuf field, int or bytes."""
    return dict(every(data))


def every(data: bytes) -> list[tuple[int, Any]]:
    """Number and value of every protobuf field, int or bytes."""
    found: list[tuple[int, Any]] = []
    place = 0

    def number() -> int:
        nonlocal place
        value = shift = 0
        while True:
            byte = data[place]
            place += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while place < len(data):
        tag = number()
        if tag & 7 == 0:
            found.append((tag >> 3, number()))
        else:
            assert tag & 7 == 2, data
            size = number()
            found.append((tag >> 3, data[place : place + size]))
            place += size
    return found


class Failed(Exception):
    """A handler's gRPC status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.places: list[tuple[int, int]] = []
        """First and last lines of the Dockerfile that its details name."""


class Call:
    """One call of the daemon, in its own thread."""

    def __init__(self, peer: Peer, number: int, headers: list[tuple[str, str]]) -> None:
        self._peer = peer
        self._number = number
        self.headers = headers
        self.inbox: queue.Queue[bytes | None] = queue.Queue()
        """Messages; None after the last one or when the call was cancelled."""
        self.buffer = b""

    def values(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key == name]

    def receive(self) -> bytes | None:
        return self.inbox.get(timeout=30 * PATIENCE)

    def send(self, message: bytes) -> None:
        self._peer.send(self._number, struct.pack(">BI", 0, len(message)) + message)


Handler = Callable[[Call], bytes | None]
"""Serves a call; a result is sent as its last message."""


class Peer:
    """Serves gRPC on a socket until `close`. `frame`: the most bytes that it sends at once."""

    def __init__(self, stream: socket.socket, handlers: Mapping[str, Handler], early: bytes = b"", frame: int = 0):
        self._stream = stream
        self._handlers = handlers
        self._frame = frame
        self._h2 = h2.connection.H2Connection(
            h2.config.H2Configuration(client_side=False, header_encoding="utf-8", validate_inbound_headers=True)
        )
        self._lock = threading.Condition()
        self._calls: dict[int, Call] = {}
        self.cancelled: list[str] = []
        """Paths of calls that the daemon has reset."""
        self.ended = threading.Event()
        """The daemon has closed the connection."""
        stream.settimeout(None)
        with self._lock:
            self._h2.initiate_connection()
            self._flush()
        self._thread = threading.Thread(target=self._read, args=(early,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        with suppress(OSError):
            self._stream.shutdown(socket.SHUT_RDWR)
        self._thread.join(30 * PATIENCE)
        self._stream.close()

    def send(self, number: int, data: bytes) -> None:
        while data:
            with self._lock:
                room = 0
                while not room:
                    room = min(self._h2.local_flow_control_window(number), self._h2.max_outbound_frame_size)
                    if not room and not self._lock.wait(30 * PATIENCE):
                        raise AssertionError("the daemon does not read")
                room = min(room, self._frame or room)
                self._h2.send_data(number, data[:room])
                data = data[room:]
                self._flush()

    def _flush(self) -> None:
        try:
            self._stream.sendall(self._h2.data_to_send())
        except OSError:
            self.ended.set()

    def _read(self, data: bytes) -> None:
        while True:
            if data:
                with self._lock:
                    for event in self._h2.receive_data(data):
                        self._handle(event)
                    self._flush()
                    self._lock.notify_all()
            try:
                data = self._stream.recv(65536)
            except OSError:
                data = b""
            if not data:
                break
        self.ended.set()
        with self._lock:
            for call in self._calls.values():
                call.inbox.put(None)

    def _handle(self, event: Any) -> None:
        if isinstance(event, h2.events.RequestReceived):
            call = self._calls[event.stream_id] = Call(self, event.stream_id, list(event.headers))
            threading.Thread(target=self._serve, args=(call, event.stream_id), daemon=True).start()
        elif isinstance(event, h2.events.DataReceived):
            self._h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            call = self._calls[event.stream_id]
            call.buffer += event.data
            while len(call.buffer) >= 5:
                _, size = struct.unpack_from(">BI", call.buffer)
                if len(call.buffer) < 5 + size:
                    break
                call.inbox.put(call.buffer[5 : 5 + size])
                call.buffer = call.buffer[5 + size :]
        elif isinstance(event, (h2.events.StreamEnded, h2.events.StreamReset)):
            call = self._calls[event.stream_id]
            call.inbox.put(None)
            if isinstance(event, h2.events.StreamReset):
                self.cancelled.append(call.values(":path")[0])

    def _serve(self, call: Call, number: int) -> None:
        status, message = 0, ""
        path = call.values(":path")[0]
        with self._lock:
            self._h2.send_headers(number, [(":status", "200"), ("content-type", "application/grpc")])
            self._flush()
        try:
            handler = self._handlers.get(path)
            if handler is None:
                raise Failed(12, f"unknown method {path}")
            answer = handler(call)
            if answer is not None:
                call.send(answer)
        except Failed as error:
            status, message = error.status, error.message
        except h2.exceptions.ProtocolError:
            return  # the call was cancelled
        with self._lock:
            trailers = [("grpc-status", str(status)), ("grpc-message", message)]
            try:
                self._h2.send_headers(number, trailers, end_stream=True)
            except h2.exceptions.ProtocolError:
                return
            self._flush()


def of_secrets(known: Mapping[str, bytes]) -> dict[str, Handler]:
    """The secrets service."""

    def get(call: Call) -> bytes:
        name = fields(call.receive() or b"").get(1, b"").decode()
        if name not in known:
            raise Failed(5, f"not found: {name}")
        return field(1, known[name])

    return {GET_SECRET: get}


def of_layout(name: str, blobs: Mapping[str, bytes]) -> dict[str, Handler]:
    """The content of one image layout. `blobs`: by digest."""
    return of_content(f"oci:{name}", blobs)


def of_content(store: str, blobs: Mapping[str, bytes]) -> dict[str, Handler]:
    """containerd's content service, for one store. `blobs`: by digest."""

    def read(call: Call) -> None:
        assert call.values("buildkit-attachable-store-id") == [store]
        digest = fields(call.receive() or b"")[1].decode()
        if digest not in blobs:
            raise Failed(5, f"content {digest}: not found")
        content = blobs[digest]
        for begin in range(0, len(content), 1 << 20):
            call.send((field(1, begin) if begin else b"") + field(2, content[begin : begin + (1 << 20)]))

    return {READ_CONTENT: read}


def of_directory(store: str, blobs: dict[str, bytes]) -> dict[str, Handler]:
    """As `of_content`, for a store that takes blobs, too."""

    def info(call: Call) -> bytes:
        assert call.values("buildkit-attachable-store-id") == [store]
        digest = fields(call.receive() or b"")[1].decode()
        if digest not in blobs:
            raise Failed(5, f"content {digest}: not found")
        return field(1, field(1, digest) + field(2, len(blobs[digest])))

    def write(call: Call) -> None:
        assert call.values("buildkit-attachable-store-id") == [store]
        content, ref = b"", b""
        while (message := call.receive()) is not None:
            request = fields(message)
            ref = ref or request[2]
            assert request[2] == ref and request.get(5, 0) == len(content)
            content += request.get(6, b"")
            if request[1] == 2:
                digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
                assert (request[3], request[4]) == (len(content), digest.encode())
                if digest in blobs:
                    raise Failed(6, f"content {digest}: already exists")
                blobs[digest] = content
            call.send(field(1, request[1]) + field(4, len(content)))

    return of_content(store, blobs) | {CONTENT_INFO: info, WRITE_CONTENT: write}


def of_agent(agent: str, name: str = "default") -> dict[str, Handler]:
    """The SSH service: forwards to the Unix socket `agent`."""

    def check(call: Call) -> bytes:
        if fields(call.receive() or b"").get(1, b"default").decode() != name:
            raise Failed(2, "unset ssh forward key")
        return b""

    def forward(call: Call) -> None:
        assert call.values("buildkit.ssh.id") == [name]
        with client.connect(agent) as stream:

            def outward() -> None:
                while chunk := stream.recv(8192):
                    call.send(field(1, chunk))

            thread = threading.Thread(target=outward, daemon=True)
            thread.start()
            while (message := call.receive()) is not None:
                stream.sendall(fields(message).get(1, b""))
            stream.shutdown(socket.SHUT_WR)
            thread.join(30 * PATIENCE)

    return {CHECK_AGENT: check, FORWARD_AGENT: forward}


def of_credentials(known: Mapping[str, tuple[str, str]]) -> dict[str, Handler]:
    """The service of registry credentials, by host."""

    def get(call: Call) -> bytes:
        name, secret = known.get(fields(call.receive() or b"").get(1, b"").decode(), ("", ""))
        return field(1, name) + field(2, secret)

    return {CREDENTIALS: get}


def head(session_id: str, handlers: Mapping[str, Handler], upgrade: str = "h2c") -> bytes:
    """The request that opens a session."""
    lines = [
        "POST /session HTTP/1.1",
        "Host: localhost",
        "Connection: Upgrade",
        f"Upgrade: {upgrade}",
        f"X-Docker-Expose-Session-Uuid: {session_id}",
        "X-Docker-Expose-Session-Name: test",
        "X-Docker-Expose-Session-Sharedkey: ",
        *(f"X-Docker-Expose-Session-Grpc-Method: {path}" for path in handlers),
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


@contextmanager
def session(path: str, handlers: Mapping[str, Handler], session_id: str = "") -> Iterator[tuple[str, Peer]]:
    """Open a session at the engine's socket; its id, and the peer that serves it."""
    session_id = session_id or secrets.token_hex(16)
    stream = client.connect(path)
    stream.sendall(head(session_id, handlers))
    answer = b""
    while b"\r\n\r\n" not in answer:
        chunk = stream.recv(1)  # HTTP/2 follows
        assert chunk, answer
        answer += chunk
    assert answer.startswith(b"HTTP/1.1 101 "), answer
    assert b"\r\nupgrade: h2c\r\n" in answer.lower(), answer
    peer = Peer(stream, handlers)
    try:
        yield session_id, peer
    finally:
        peer.close()


# --- files ----------------------------------------------------------------------------------------

DIRECTORY, LINK, SOCKET = 1 << 31, 1 << 27, 1 << 24
"""Types of files in Go's os.FileMode."""


class Node:
    """A file of a client. `mode`: Go's os.FileMode."""

    def __init__(self, content: bytes = b"", mode: int = 0o644, target: str = "", **numbers: int) -> None:
        self.content = content
        self.mode = mode
        self.target = target
        self.numbers = numbers
        """`uid`, `gid`, `modified` (ns), `major`, `minor`; `size` if it is not that of the
        content.
        """
        self.xattrs: dict[str, bytes] = {}

    def stat(self, path: str) -> bytes:
        numbers = self.numbers
        found = field(1, path) + field(2, self.mode) + field(3, numbers.get("uid", 0)) + field(4, numbers.get("gid", 0))
        found += field(5, numbers.get("size", len(self.content))) + field(6, numbers.get("modified", 10**18))
        found += field(7, self.target) if self.target else b""
        found += field(8, numbers.get("major", 0)) + field(9, numbers.get("minor", 0))
        for name, value in self.xattrs.items():
            found += field(10, field(1, name) + field(2, value))
        return found


Directories = Mapping[str, Mapping[str, Node | bytes]]
"""Files by path, of directories by name."""

Order = Callable[[list[tuple[int, bytes]]], list[tuple[int, bytes]]]


def of_files(directories: Directories, *, together: int = 1, piece: int = 32768) -> dict[str, Handler]:
    """The FileSync service. The contents of `together` requested files are sent in turns of `piece`
    bytes. Patterns of `exclude-patterns` are exact paths. A path in `followpaths` may have
    wildcards, and stands for itself, what is below it, and the directories above. If there is a
    link on its way, everything is sent.
    """

    def followed(path: str, wanted: list[str]) -> bool:
        parts = path.split("/")
        for each in wanted:
            pattern = each.split("/")
            common = min(len(parts), len(pattern))
            if all(map(fnmatch.fnmatchcase, parts[:common], pattern[:common])):
                return True
        return False

    def copy(call: Call) -> None:
        name = call.values("dir-name")[0]
        if name not in directories:
            raise Failed(5, f"no access allowed to dir {name}")
        wanted, excluded = call.values("followpaths"), call.values("exclude-patterns")
        links = [path for path, node in directories[name].items() if isinstance(node, Node) and node.mode & LINK]
        if any(f"{each}/".startswith(f"{link}/") for each in wanted for link in links):
            wanted = []
        files = [
            (path, node if isinstance(node, Node) else Node(node))
            for path, node in sorted(directories[name].items(), key=lambda each: each[0].split("/"))
            if (not wanted or followed(path, wanted)) and path not in excluded
        ]
        for path, node in files:
            call.send(field(2, node.stat(path)))
        call.send(field(1, 0))
        queue: list[tuple[int, bytes]] = []
        while True:
            while queue and (len(queue) >= together or call.inbox.empty()):
                turn, queue[:] = queue[:together], queue[together:]
                while turn:
                    number, content = turn.pop(0)
                    call.send(field(1, 2) + field(3, number) + field(4, content[:piece]))
                    if content:
                        turn.append((number, content[piece:]))
            message = call.receive()
            if message is None:
                return
            packet = fields(message)
            if not packet:  # clients ignore it
                continue
            if packet[1] == 3:
                call.send(field(1, 3))
                return
            assert packet[1] == 1, packet
            number = packet.get(3, 0)
            queue.append((number, files[number][1].content))

    return {DIFF_COPY: copy}


class Received:
    """What a client receives of a build. Each call of FileSend replaces it."""

    def __init__(self) -> None:
        self.files: dict[str, tuple[int, bytes, str]] = {}
        """Of the exporter `local`: mode, content and target by path."""
        self.archive = b""
        """Of the exporter `tar`."""


def of_results(received: Received, *, archive: bool) -> dict[str, Handler]:
    """The service FileSend, for the exporter `local` or for `tar`."""

    def take_archive(call: Call) -> None:
        while (message := call.receive()) is not None:
            received.archive += fields(message).get(1, b"")

    def take_files(call: Call) -> None:
        listed = []
        while 2 in (packet := fields(call.receive() or b"")):
            listed.append(fields(packet[2]))
        for number, stat in enumerate(listed):
            content = b""
            if not stat.get(2, 0) & (DIRECTORY | LINK) and 7 not in stat:
                call.send(field(1, 1) + field(3, number))
                while data := fields(call.receive() or b"").get(4, b""):
                    content += data
            target = stat.get(7, b"").decode()
            received.files[stat[1].decode()] = (stat.get(2, 0), content, target)
        call.send(field(1, 3))
        assert fields(call.receive() or b"") == {1: 3}

    return {FILE_SEND: take_archive if archive else take_files}


# --- a caller -------------------------------------------------------------------------------------


class Failure(AssertionError):
    """A call's status, which is not 0."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = message


def _places(text: str) -> list[tuple[int, int]]:
    """Of google.rpc.Status in base64, with details that are BuildKit's."""
    if not text:
        return []
    status = base64.b64decode(text + "=" * (-len(text) % 4))
    found = [json.loads(fields(detail)[2]) for number, detail in every(status) if number == 3]
    return [(each["start"]["line"], each["end"]["line"]) for place in found for each in place.get("ranges", ())]


class Calling:
    """A call that this side makes."""

    def __init__(self, caller: Caller, number: int) -> None:
        self._caller = caller
        self._number = number
        self.inbox: queue.Queue[bytes | Failure | None] = queue.Queue()
        self.buffer = b""

    def send(self, message: bytes, *, last: bool = False) -> None:
        self._caller.send(self._number, struct.pack(">BI", 0, len(message)) + message, last)

    def end(self) -> None:
        self._caller.send(self._number, b"", True)

    def cancel(self) -> None:
        self._caller.cancel(self._number)
        self.inbox.put(Failure(1, "cancelled by this side"))

    def receive(self) -> bytes | None:
        """The next message; None after the last one. Raises Failure."""
        found = self.inbox.get(timeout=60 * PATIENCE)
        if isinstance(found, Failure):
            raise found
        return found

    def all(self) -> list[bytes]:
        return list(iter(self.receive, None))


class Caller:
    """A gRPC client on a connection that `POST /grpc` has turned into HTTP/2. `prior`: it begins
    with HTTP/2 instead.
    """

    def __init__(self, path: str, *, prior: bool = False) -> None:
        self._stream = client.connect(path)
        if not prior:
            self._upgrade()
        self._stream.settimeout(None)
        self._h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding="utf-8"))
        self._lock = threading.Condition()
        self._calls: dict[int, Calling] = {}
        with self._lock:
            self._h2.initiate_connection()
            self._flush()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _upgrade(self) -> None:
        self._stream.sendall(
            b"POST /grpc HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n"
            b"Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
        )
        answer = b""
        while b"\r\n\r\n" not in answer:
            chunk = self._stream.recv(1)
            assert chunk, answer
            answer += chunk
        assert answer.startswith(b"HTTP/1.1 101 ") and b"\r\nupgrade: h2c\r\n" in answer.lower(), answer

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        with suppress(OSError):
            self._stream.shutdown(socket.SHUT_RDWR)
        self._thread.join(30 * PATIENCE)
        self._stream.close()

    def call(self, path: str, metadata: Mapping[str, str] | None = None) -> Calling:
        with self._lock:
            number = self._h2.get_next_available_stream_id()
            headers = [(":method", "POST"), (":scheme", "http"), (":authority", "x"), (":path", path)]
            headers += [("content-type", "application/grpc"), ("te", "trailers"), *(metadata or {}).items()]
            self._h2.send_headers(number, headers)
            calling = self._calls[number] = Calling(self, number)
            self._flush()
        return calling

    def ask(self, path: str, message: bytes, metadata: Mapping[str, str] | None = None) -> bytes:
        """One message there and one back. Raises Failure."""
        calling = self.call(path, metadata)
        calling.send(message, last=True)
        (answer,) = calling.all()
        return answer

    def send(self, number: int, data: bytes, last: bool) -> None:
        # The daemon may have ended the call already. Then its answer is in the inbox, and the rest
        # of the request is dropped, as gRPC clients do.
        with self._lock, suppress(h2.exceptions.StreamClosedError):
            while True:
                room = min(self._h2.local_flow_control_window(number), self._h2.max_outbound_frame_size)
                if room or not data:
                    self._h2.send_data(number, data[:room], end_stream=last and len(data) <= room)
                    data = data[room:]
                    self._flush()
                    if not data:
                        return
                elif not self._lock.wait(30 * PATIENCE):
                    raise AssertionError("the daemon does not read")

    def cancel(self, number: int) -> None:
        with self._lock:
            self._h2.reset_stream(number, 8)
            self._flush()

    def _flush(self) -> None:
        with suppress(OSError):
            self._stream.sendall(self._h2.data_to_send())

    def _read(self) -> None:
        data = b"x"
        while data:
            try:
                data = self._stream.recv(65536)
            except OSError:
                data = b""
            with self._lock:
                for event in self._h2.receive_data(data) if data else ():
                    self._handle(event)
                self._flush()
                self._lock.notify_all()
        for calling in self._calls.values():
            calling.inbox.put(Failure(-1, "the daemon has closed the connection"))

    def _handle(self, event: Any) -> None:
        if isinstance(event, h2.events.DataReceived):
            self._h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            calling = self._calls[event.stream_id]
            calling.buffer += event.data
            while len(calling.buffer) >= 5:
                _, size = struct.unpack_from(">BI", calling.buffer)
                if len(calling.buffer) < 5 + size:
                    break
                calling.inbox.put(calling.buffer[5 : 5 + size])
                calling.buffer = calling.buffer[5 + size :]
        elif isinstance(event, (h2.events.ResponseReceived, h2.events.TrailersReceived)):
            headers = dict(event.headers)
            if "grpc-status" not in headers:
                return
            status = int(headers["grpc-status"])
            end = Failure(status, unquote(headers.get("grpc-message", ""))) if status else None
            if end is not None:
                end.places = _places(headers.get("grpc-status-details-bin", ""))
            self._calls[event.stream_id].inbox.put(end)
