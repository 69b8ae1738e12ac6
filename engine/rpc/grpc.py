"""gRPC over HTTP/2 on a given socket, as client or as server.

h2 does the framing: 6 us for a small frame and 20 us for one of 16 KiB, in 1.4 MB of memory. DATA
frames are taken out before it (`_fast/h2data.pyx`). grpclib over it takes twice the memory and
wants a connection that it opens itself; grpcio takes 11 MB, and cannot use a socket that was an
HTTP/1.1 connection before.

Messages are bytes here. Each stream has its own receive window, so that a reader that is slow stops
its own stream alone; sending waits for the peer's windows and for the socket. All frames of one
round of the loop go out in one write: a write wakes the client, which answers most with two frames.

Owns:    the socket, until `close` or the peer's end; a task per call that is served.
Threads: the event loop's. Not here: the messages, the meaning of the calls.
Raises:  the kinds of `engine/errors.py` for a call's status. Unavailable when the connection ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast
from urllib.parse import quote, unquote

import msgspec
from h2 import events
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.exceptions import H2Error
from h2.settings import SettingCodes, Settings

from engine._fast.h2data import Scanner
from engine.errors import (
    BUG,
    Conflict,
    EngineError,
    Forbidden,
    InvalidParameter,
    NotFound,
    ServerError,
    Unauthorized,
    Unavailable,
    Unimplemented,
)
from engine.rpc import protobuf
from engine.system.tasks import spawn

T = TypeVar("T", bound=msgspec.Struct)

_log = logging.getLogger(__name__)

MESSAGE_LIMIT = 4 << 20
"""Bytes of a message, unless the terms of the connection name others."""
AHEAD = 1 << 20
"""Bytes that one stream may receive ahead of its reader, besides one message."""
TEXT_BYTES = 16 << 10
"""Bytes of a status's message."""
TOGETHER = 64 << 10
"""Bytes that wait for the end of the loop's round. More are written at once."""
CONNECTION_WINDOW = 16 << 20
"""This window is opened again as bytes arrive: it bounds only what is under way."""
ANSWER_SECONDS = 60.0
"""Seconds for the answer of a call with one message. Credential helpers may ask the user."""

OK, CANCELLED, UNKNOWN, INVALID_ARGUMENT, DEADLINE_EXCEEDED, NOT_FOUND, ALREADY_EXISTS = 0, 1, 2, 3, 4, 5, 6
PERMISSION_DENIED, RESOURCE_EXHAUSTED, ABORTED, UNIMPLEMENTED, INTERNAL, UNAVAILABLE = 7, 8, 10, 12, 13, 14
UNAUTHENTICATED = 16

_KINDS: dict[int, type[EngineError]] = {
    INVALID_ARGUMENT: InvalidParameter,
    NOT_FOUND: NotFound,
    ALREADY_EXISTS: Conflict,
    PERMISSION_DENIED: Forbidden,
    UNIMPLEMENTED: Unimplemented,
    UNAVAILABLE: Unavailable,
    UNAUTHENTICATED: Unauthorized,
}
_REFUSALS = (InvalidParameter, Forbidden)
"""Kinds whose status is UNKNOWN when they are answers: so BuildKit answers, and clients put the
name of any other status before the message.
"""
_PREFIX = struct.Struct(">BI")
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_WINDOW_UPDATE = struct.Struct(">3sBBII")
# The header fields that go out are valid and of the right form: they are made here.
_CLIENT, _SERVER = (
    H2Configuration(
        client_side=client,
        header_encoding=None,
        validate_outbound_headers=False,
        normalize_outbound_headers=False,
    )
    for client in (True, False)
)
_SETTINGS = {
    SettingCodes.ENABLE_PUSH: 0,
    SettingCodes.MAX_CONCURRENT_STREAMS: 100,
    SettingCodes.MAX_HEADER_LIST_SIZE: 64 << 10,
    SettingCodes.MAX_FRAME_SIZE: 1 << 20,
}

Metadata = Sequence[tuple[str, str]]


class Terms(NamedTuple):
    """How one connection is used."""

    other: str = "client"
    """What the peer is called in errors."""
    message_limit: int = MESSAGE_LIMIT
    """Bytes of a message. A longer one ends its call."""
    headers: Callable[[], Metadata] = tuple
    """More headers for each answer of this side."""

    @property
    def window(self) -> int:
        return self.message_limit + AHEAD

    @property
    def refused(self) -> str:
        return f"a gRPC message is compressed or too long: {self.message_limit} bytes are the most"


_USUAL = Terms()


class Detailed(EngineError):
    """A failure whose answer has more than a status and a message."""

    def details(self, status: int, message: str) -> str:
        """The value of the trailer `grpc-status-details-bin`; "" for none."""
        raise NotImplementedError


class TooLong(InvalidParameter):
    """A message that is longer than this side takes, or compressed."""


def status_of(error: EngineError) -> int:
    """The gRPC status of a kind of error."""
    if isinstance(error, TooLong):
        return RESOURCE_EXHAUSTED
    if isinstance(error, _REFUSALS):
        return UNKNOWN
    return next((status for status, kind in _KINDS.items() if isinstance(error, kind)), UNKNOWN)


def failure(status: int, message: str) -> EngineError:
    """The kind of error of a gRPC status."""
    return _KINDS.get(status, ServerError)(message or f"the peer answered with gRPC status {status}")


def shortened(text: str) -> str:
    """A text of at most TEXT_BYTES bytes. The middle of a longer one is left out: the end of an
    error has the exit code of a command, which can be as long as a Dockerfile.
    """
    data = text.encode(errors="replace")
    if len(data) <= TEXT_BYTES:
        return text
    half = TEXT_BYTES // 2 - 8
    return f"{data[:half].decode(errors='ignore')} … {data[-half:].decode(errors='ignore')}"


class Stream:
    """One call, seen from either side: messages in both directions."""

    def __init__(self, connection: Connection, number: int, headers: Mapping[str, list[str]]) -> None:
        self._connection = connection
        self._number = number
        self._buffer = bytearray()
        self._messages: deque[bytes] = deque()
        self._taken = 0
        """Bytes read since the window was last opened."""
        self._error: tuple[type[EngineError], str] | None = None
        self._ended = False
        """No more messages are read."""
        self.half_closed = False
        """The peer has ended its side of the stream."""
        self._readable: asyncio.Future[None] | None = None
        self._sending = asyncio.Lock()
        self.window_open = asyncio.Event()
        self.headers = headers
        """Metadata of a served call."""
        self.closed = False
        self.begun = False
        """A served call has sent its headers."""
        self.status = UNKNOWN
        """The peer's status of a call that this side made, once it has come."""

    @property
    def peer(self) -> str:
        """The process or host at the other end, as `join` was given it."""
        return self._connection.peer

    def metadata(self, name: str) -> str:
        """The first value of a header, or ""."""
        return next(iter(self.headers.get(name, ())), "")

    async def receive(self) -> bytes | None:
        """The next message. None after the last one of a call that succeeded.

        Raises the error of the call's status, Unavailable when the connection ends.
        """
        while not self._messages:
            if self._error is not None:
                kind, text = self._error
                raise kind(text)
            if self._ended:
                return None
            self._readable = asyncio.get_running_loop().create_future()
            try:
                await self._readable
            finally:
                self._readable = None
        return self.received()

    def received(self) -> bytes | None:
        """The next message, if it has arrived."""
        if not self._messages:
            return None
        message = self._messages.popleft()
        self._taken += len(message) + _PREFIX.size
        # Both sides would wait for ever in a window that is too small for the next message.
        if self._taken > AHEAD - _PREFIX.size:
            self._connection.open_window(self._number, self._taken)
            self._taken = 0
        return message

    def begin(self) -> None:
        """Send the headers of a served call, for a client that waits for them before the first
        message. A call that fails without them has its status in its headers.
        """
        if not self.begun and not self.closed:
            self.begun = True
            self._connection.send_headers(self._number, self._connection.answer_headers())

    async def send(self, message: bytes, *, last: bool = False) -> None:
        """Send a message, as fast as the peer reads. `last`: it is the client's last one."""
        if self._connection.serves:
            self.begin()
        async with self._sending:
            await self._connection.send(self, self._number, _PREFIX.pack(0, len(message)) + message, last)

    async def end(self) -> None:
        """As a client: send no more messages."""
        async with self._sending:
            await self._connection.send(self, self._number, b"", True)

    def cancel(self) -> None:
        """End the call without an answer. Does nothing when it has ended."""
        self._connection.reset(self._number)

    # for the connection

    def take_buffer(self) -> bytes:
        """The bytes of an incomplete message, which are taken in elsewhere from now on."""
        found = bytes(self._buffer)
        self._buffer.clear()
        return found

    def arrived(self, message: bytes) -> None:
        """A whole message."""
        self._messages.append(message)
        self._wake()

    @property
    def receiving(self) -> bool:
        """More messages of the peer are read."""
        return not self._ended and self._error is None

    def feed(self, data: bytes) -> None:
        """Raises TooLong for a message that is too long or compressed."""
        if not self.receiving:
            return
        buffer = self._buffer
        buffer += data
        place = 0
        while len(buffer) - place >= _PREFIX.size:
            compressed, size = _PREFIX.unpack_from(buffer, place)
            if compressed or size > self._connection.terms.message_limit:
                raise TooLong(self._connection.terms.refused)
            end = place + _PREFIX.size + size
            if end > len(buffer):
                break
            self._messages.append(bytes(buffer[place + _PREFIX.size : end]))
            place = end
        if place:
            del buffer[:place]
            self._wake()

    def finish(self, error: tuple[type[EngineError], str] | None = None) -> None:
        """The peer's side has ended, with an error or without."""
        if self.receiving:
            incomplete = self._connection.pass_data(self._number) or self._buffer
            if error is None and incomplete:
                error = (InvalidParameter, "a gRPC message is incomplete")
            self._error = error
            self._ended = True
            self._wake()

    def lost(self, error: tuple[type[EngineError], str]) -> None:
        """The call is over on both sides."""
        self.closed = True
        self.finish(error)
        self.window_open.set()

    def _wake(self) -> None:
        if self._readable is not None and not self._readable.done():
            self._readable.set_result(None)


Handler = Callable[[Stream], Awaitable[bytes | None]]
"""Serves one call; a result is sent as the last message. An EngineError becomes the status."""


class Connection(asyncio.Protocol):
    """One HTTP/2 connection. Made by `connect` and `serve`."""

    def __init__(
        self,
        handlers: Mapping[str, Handler] | None,
        head: bytes,
        early: bytes,
        on_lost: Callable[[], object],
        peer: str = "",
        terms: Terms = _USUAL,
    ) -> None:
        """With `handlers`, by path, it is the server. `head` is sent before HTTP/2 begins; `early`
        bytes were received already.
        """
        self.terms = terms
        self._left = f"the {terms.other} has closed its connection"
        self._first = bytearray(head)
        """Bytes that go before those of h2."""
        self._waiting = 0
        """Bytes of messages that have not been written."""
        self._due = False
        """A write is to come in this round of the loop."""
        self._early = early
        self._handlers = handlers
        self._on_lost = on_lost
        self.peer = peer
        client = handlers is None
        self._h2 = H2Connection(_CLIENT if client else _SERVER)
        self._h2.local_settings = Settings(client, {SettingCodes.INITIAL_WINDOW_SIZE: terms.window, **_SETTINGS})
        # h2 reads it from settings that change, and these are the first ones.
        self._h2.max_inbound_frame_size = _SETTINGS[SettingCodes.MAX_FRAME_SIZE]
        preface = 0 if client else len(_PREFACE)
        self._scanner = Scanner(preface, _SETTINGS[SettingCodes.MAX_FRAME_SIZE], terms.message_limit)
        self._begun: list[int] = []
        """Streams whose DATA the scanner takes from the next bytes on."""
        self._streams: dict[int, Stream] = {}
        self._serving: dict[int, asyncio.Task[None]] = {}
        self._received = 0
        """Bytes that h2 has received since the connection's window was last opened."""
        self._taken = 0
        """The same of those that the scanner has taken."""
        self._writable = asyncio.Event()
        self._writable.set()
        self._transport: asyncio.Transport | None = None
        self._gone = asyncio.Event()

    # --- the socket -------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._h2.initiate_connection()
        self._h2.increment_flow_control_window(CONNECTION_WINDOW - 65_535)
        # the window of a stream may open below, and SETTINGS are the first frame (RFC 9113, 3.4)
        self._write()
        if self._early:
            self.data_received(self._early)

    def data_received(self, data: bytes) -> None:
        place = 0
        while place < len(data):
            try:
                rest, taken, size, place = self._scanner.feed(data, place)
                # DATA first: on its stream, headers after it end the call.
                self._take(taken)
                happened = self._h2.receive_data(rest) if rest else ()
            except (H2Error, OverflowError) as error:
                _log.info("an HTTP/2 connection was closed: %s", error)
                self.close()
                return
            for event in happened:
                self._handle(event)
            if not self.open:
                return
            self._register()
            self._taken += size
        if self._received >= CONNECTION_WINDOW // 4:
            self._h2.increment_flow_control_window(self._received)
            self._received = 0
        self._flush()
        if self._taken >= CONNECTION_WINDOW // 4:
            self._update_window(0, self._taken)
            self._taken = 0

    def _register(self) -> None:
        """Have the scanner take the DATA of calls that have begun."""
        begun, self._begun = self._begun, []
        for number in begun:
            stream = self._streams.get(number)
            if stream is None or not stream.receiving:
                continue
            if self._scanner.passing(number):
                self._begun.append(number)
            else:
                self._take(self._scanner.register(number, self.terms.window, stream.take_buffer()))

    def _take(self, taken: Iterable[tuple[int, bytes | int | None]]) -> None:
        """Take in what the scanner has found."""
        for number, found in taken:
            stream = self._streams.get(number)
            if isinstance(found, int):
                self.open_window(number, found)
            elif stream is not None and found is not None:
                stream.arrived(found)
            elif stream is not None:
                self._refuse(number, stream)

    def pass_data(self, number: int) -> bool:
        """h2 gets the DATA of a stream again. True if a message is incomplete."""
        return self._scanner.forget(number)

    def _update_window(self, number: int, size: int) -> None:
        """Open a window of which h2 knows nothing."""
        self._first += _WINDOW_UPDATE.pack(b"\0\0\4", 8, 0, number, size)
        self._flush()

    def _flush(self) -> None:
        """Send what is ready, with all else of this round of the loop."""
        if self._waiting > TOGETHER:
            self._write()
        elif not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._write)

    def _write(self) -> None:
        self._due, self._waiting = False, 0
        data = bytes(self._first) + self._h2.data_to_send()
        self._first.clear()
        if data and self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, _error: Exception | None) -> None:
        self._transport = None
        self._gone.set()
        self._writable.set()
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.lost((Unavailable, self._left))
        for task in self._serving.values():
            task.cancel()
        self._on_lost()

    def close(self) -> None:
        """End the connection and every call."""
        if self._transport is not None and not self._transport.is_closing():
            with contextlib.suppress(H2Error):
                self._h2.close_connection()
            self._write()
            self._transport.close()

    async def closed(self) -> None:
        """Wait until the connection has ended and no call is served any more."""
        await self._gone.wait()
        if self._serving:
            await asyncio.wait(list(self._serving.values()))

    @property
    def serves(self) -> bool:
        """This side is the server."""
        return self._handlers is not None

    def send_headers(self, number: int, headers: Metadata, *, last: bool = False) -> None:
        """Send headers or trailers of a call, unless the peer has ended it already."""
        with contextlib.suppress(H2Error):
            self._h2.send_headers(number, headers, end_stream=last)
            self._flush()

    @property
    def open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    # --- events of HTTP/2 -------------------------------------------------------------------------

    def _handle(self, event: Any) -> None:
        if isinstance(event, events.DataReceived):
            self._received += event.flow_controlled_length
            stream = self._streams.get(event.stream_id)
            if stream is not None:
                padding = event.flow_controlled_length - len(event.data)
                if padding:
                    self.open_window(event.stream_id, padding)
                try:
                    stream.feed(event.data)
                except TooLong:
                    self._refuse(event.stream_id, stream)
        elif isinstance(event, events.StreamEnded):
            stream = self._streams.get(event.stream_id)
            if stream is not None:
                stream.half_closed = True
                # a client's call ends with the status in its headers or trailers
                missing = (ServerError, "the call has ended without a status")
                stream.finish(missing if self._handlers is None else None)
        elif isinstance(event, events.WindowUpdated):
            for number in (event.stream_id,) if event.stream_id else tuple(self._streams):
                if (stream := self._streams.get(number)) is not None:
                    stream.window_open.set()
        elif isinstance(event, events.RemoteSettingsChanged):
            for stream in self._streams.values():
                stream.window_open.set()
        elif isinstance(event, events.RequestReceived):
            headers = _grouped(event.headers)
            self._begin_call(event.stream_id, headers)
            self._begin_data(event.stream_id, headers)
        elif isinstance(event, (events.ResponseReceived, events.TrailersReceived)):
            headers = _grouped(event.headers)
            self._answered(event.stream_id, headers)
            self._begin_data(event.stream_id, headers)
        elif isinstance(event, events.StreamReset):
            self._forget(event.stream_id, (ServerError, f"the peer has cancelled the call ({event.error_code})"))
        elif isinstance(event, events.ConnectionTerminated):
            self.close()

    def _refuse(self, number: int, stream: Stream) -> None:
        """A message cannot be taken. A call that is served ends with a status, when it reads it."""
        if self.serves:
            stream.finish((TooLong, self.terms.refused))
        else:
            self.reset(number, (TooLong, self.terms.refused))

    def _begin_data(self, number: int, headers: Mapping[str, list[str]]) -> None:
        if "content-length" not in headers:  # h2 would compare it with the DATA that it sees
            self._begun.append(number)

    def _answered(self, number: int, headers: dict[str, list[str]]) -> None:
        """Headers or trailers of a call that this side made."""
        stream = self._streams.get(number)
        if stream is None:
            return
        code = _first(headers, ":status")
        status = _first(headers, "grpc-status")
        if code not in ("", "200"):
            stream.finish((ServerError, f"the peer answered with HTTP status {code}"))
        elif status == "0":
            stream.status = OK
            stream.finish()
        elif status:
            message = unquote(_first(headers, "grpc-message"), errors="replace")
            stream.status = int(status) if status.isascii() and status.isdigit() else UNKNOWN
            error = failure(stream.status, message)
            stream.finish((type(error), error.message))

    # --- calls of this side -----------------------------------------------------------------------

    def call(self, path: str, metadata: Metadata = ()) -> Stream:
        """Begin a call. Raises Unavailable when the connection has ended."""
        if not self.open:
            raise Unavailable(self._left)
        try:
            number = self._h2.get_next_available_stream_id()
            self._h2.send_headers(number, [*_REQUEST, (":path", path), *_ABOUT, *metadata])
        except H2Error as error:
            raise Unavailable(f"the {self.terms.other} takes no more calls") from error
        stream = self._streams[number] = Stream(self, number, {})
        self._flush()
        return stream

    async def ask(self, path: str, request: msgspec.Struct, of: type[T], metadata: Metadata = ()) -> T:
        """A call with one message in each direction.

        Raises the error of its status, Unavailable without an answer in time.
        """
        stream = self.call(path, metadata)
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await stream.send(protobuf.encode(request), last=True)
                answer = await stream.receive()
                if answer is None:
                    raise ServerError(f"the answer of {path} is empty")
                await stream.receive()  # the status
        except TimeoutError:
            raise Unavailable(f"the {self.terms.other} did not answer {path} within {ANSWER_SECONDS:g} s") from None
        finally:
            stream.cancel()
        return protobuf.decode(answer, of)

    def answer_headers(self) -> list[tuple[str, str]]:
        """The headers of an answer of this side."""
        return [(":status", "200"), ("content-type", "application/grpc"), *self.terms.headers()]

    async def send(self, stream: Stream, number: int, data: bytes, last: bool) -> None:
        """Send a stream's bytes. Raises Unavailable when the call is over."""
        view = memoryview(data)
        while True:
            if stream.closed:
                raise Unavailable("the call is over")
            if not self._writable.is_set():
                await self._writable.wait()
                continue
            stream.window_open.clear()
            try:
                room = min(self._h2.local_flow_control_window(number), self._h2.max_outbound_frame_size)
                if len(view) <= room:
                    self._h2.send_data(number, bytes(view), end_stream=last)
                    self._waiting += len(view)
                    self._flush()
                    return
                if room > 0:
                    self._h2.send_data(number, bytes(view[:room]))
                    self._waiting += room
                    self._flush()
                    view = view[room:]
                    continue
            except H2Error as error:
                raise Unavailable("the call is over") from error
            await stream.window_open.wait()

    def open_window(self, number: int, size: int) -> None:
        """A reader has taken `size` bytes of a stream."""
        if self._scanner.open(number, size):
            self._update_window(number, size)
            return
        with contextlib.suppress(H2Error):  # the stream has ended
            self._h2.increment_flow_control_window(size, number)
            self._flush()

    def reset(
        self, number: int, error: tuple[type[EngineError], str] = (Unavailable, "the call was cancelled")
    ) -> None:
        """End a stream on both sides, if it has not ended."""
        if number in self._streams:
            with contextlib.suppress(H2Error):
                self._h2.reset_stream(number, ErrorCodes.CANCEL)
                self._flush()
            self._forget(number, error)

    def _forget(self, number: int, error: tuple[type[EngineError], str]) -> None:
        stream = self._streams.pop(number, None)
        if stream is not None:
            stream.lost(error)
        if number in self._serving:
            self._serving[number].cancel()

    # --- calls of the peer ------------------------------------------------------------------------

    def _begin_call(self, number: int, headers: dict[str, list[str]]) -> None:
        assert self._handlers is not None
        path = _first(headers, ":path")
        stream = self._streams[number] = Stream(self, number, headers)
        handler = self._handlers.get(path)
        if not _first(headers, "content-type").startswith("application/grpc"):
            self.send_headers(number, [(":status", "415")], last=True)
            self._streams.pop(number)
            return
        task = spawn(self._serve(stream, number, path, handler), f"serving {path}")
        self._serving[number] = task
        task.add_done_callback(lambda _: self._serving.pop(number, None))

    async def _serve(self, stream: Stream, number: int, path: str, handler: Handler | None) -> None:
        status, message, more = OK, "", ""
        limit = asyncio.timeout(None)
        try:
            if handler is None:
                raise Unimplemented(self._unknown(path))
            encoding = stream.metadata("grpc-encoding")
            if encoding not in ("", "identity"):
                raise Unimplemented(f'grpc: Decompressor is not installed for grpc-encoding "{encoding[:50]}"')
            limit = asyncio.timeout(_seconds(stream.metadata("grpc-timeout")))
            async with limit:
                answer = await handler(stream)
                if answer is not None:
                    await stream.send(answer)
        except EngineError as error:
            status, message = status_of(error), error.message
            if isinstance(error, Detailed):
                more = error.details(status, shortened(message))
        except Exception as error:
            if isinstance(error, TimeoutError) and limit.expired():
                status, message = DEADLINE_EXCEEDED, "context deadline exceeded"
            else:
                _log.exception("%s failed", path)
                status, message = INTERNAL, BUG
        if not stream.closed:
            text = quote(shortened(message), safe=" !\"#$&'()*+,-./:;<=>?@[\\]^_`{|}~")
            trailers = [("grpc-status", str(status)), *([("grpc-message", text)] if text else [])]
            trailers += [("grpc-status-details-bin", more)] if more else []
            self.send_headers(number, trailers if stream.begun else [*self.answer_headers(), *trailers], last=True)
            if not stream.half_closed:
                with contextlib.suppress(H2Error):
                    self._h2.reset_stream(number, ErrorCodes.NO_ERROR)
                    self._flush()
            self._streams.pop(number, None)
            stream.lost((Unavailable, "the call is over"))

    def _unknown(self, path: str) -> str:
        """Why no handler serves a path."""
        service, slash, method = path[1:201].rpartition("/")
        if not slash:
            return f'malformed method name: "{path[:200]}"'
        if any(each.startswith(f"/{service}/") for each in self._handlers or ()):
            return f"unknown method {method} for service {service}"
        return f"unknown service {service}"


_UNITS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}


def _seconds(text: str) -> float | None:
    """The value of `grpc-timeout`; None without one. Raises InvalidParameter."""
    if not text:
        return None
    if not re.fullmatch("[0-9]{1,8}[HMSmun]", text, re.ASCII):
        raise InvalidParameter(f'malformed grpc-timeout: "{text[:50]}"')
    return int(text[:-1]) * _UNITS[text[-1]]


async def request(stream: Stream, of: type[T]) -> T:
    """The only message of a served call. Raises InvalidParameter."""
    message = await stream.receive()
    if message is None:
        raise InvalidParameter("the call has no message")
    return protobuf.decode(message, of)


async def join(
    descriptor: int,
    head: bytes,
    early: bytes,
    handlers: Mapping[str, Handler] | None,
    on_lost: Callable[[], object],
    peer: str = "",
    terms: Terms = _USUAL,
) -> Connection:
    """Speak HTTP/2 on a hijacked stream: with `handlers` as the server, else as the client.

    `descriptor` belongs to the connection from now on. `peer`: the process or host at the other
    end. Raises OSError when the peer has left.
    """
    connection = Connection(handlers, head, early, on_lost, peer, terms)
    end = socket.socket(fileno=descriptor)
    end.setblocking(False)
    loop = asyncio.get_running_loop()
    try:
        # uvloop's create_connection closes the descriptor twice if the peer leaves meanwhile.
        await loop.connect_accepted_socket(lambda: connection, end)
    except BaseException:
        end.close()
        raise
    return connection


_REQUEST = ((":method", "POST"), (":scheme", "http"), (":authority", "localhost"))
_ABOUT = (("content-type", "application/grpc"), ("user-agent", "engined"), ("te", "trailers"))


def _grouped(fields: Iterable[tuple[Any, Any]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, value in fields:
        found.setdefault(name.decode("latin-1"), []).append(value.decode("latin-1"))
    return found


def _first(headers: Mapping[str, list[str]], name: str) -> str:
    return next(iter(headers.get(name, ())), "")
