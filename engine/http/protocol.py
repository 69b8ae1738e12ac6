"""One client's connection: bytes to requests, answers to bytes, and the way out of HTTP.

A connection answers one request at a time, in the order of arrival. What came after the end of the current request is
kept as it is until its answer is out: only then is it known whether it is a pipelined request or the beginning of a
hijacked stream. That is why the end of each head is found here, and httptools is fed exactly the bytes of one head, and
body framing is ours (`framing.py`).

An answer that its handler gives at once is written within `data_received`, without a task. Memory per connection is
bounded: body bytes that wait for the handler, input that waits for its turn, and output that waits for the client each
pause the reading from the socket.

Not here: listeners and deadlines' clock (`server.py`), TLS (`tls.py`), what a request means (the application).
"""

from __future__ import annotations

import asyncio
import enum
import logging
import os
import re
import select
import socket
import struct
import time
from collections.abc import Awaitable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import httptools

from engine.errors import InvalidParameter, ServerError
from engine.http.framing import BodyReader, ChunkedReader, LengthReader, field_lines
from engine.http.messages import (
    BODY_WAITING,
    NO_BODY,
    AnyReply,
    Body,
    Headers,
    Hijack,
    HijackReply,
    Query,
    Reply,
    Request,
    StreamReply,
    percent_decode,
)
from engine.http.remainder import Remainder
from engine.http.tls import TlsTransport

if TYPE_CHECKING:
    from engine.http.server import Server

log = logging.getLogger(__name__)

INPUT_WAITING = 64 * 1024
"""Bytes of later requests that are kept before reading is paused."""

DRAIN_LIMIT = 256 * 1024
"""Bytes of a body that nobody reads, up to which they are read and dropped to keep the connection; beyond, it is
closed.
"""

HIJACK_BODY_LIMIT = 128 * 1024
"""Bytes of a body that comes with a request to hijack. Less than `BODY_WAITING`: it waits as a whole."""

KNOWN_HEAD = 1024
"""Bytes of a head up to which it is known again when the very same bytes come: clients that poll send nothing else."""

KNOWN_HEADS = 1024
"""How many such heads are remembered; then all are forgotten, and those in use come back at once."""

JOIN_LIMIT = 256 * 1024
"""Bytes up to which a head and its body are joined to go out in one piece."""

_ABSOLUTE = re.compile(rb"(?i:https?)://[^/?#]*")
_NO_BODY = (204, 304)
_FRAMING = frozenset((b"content-length", b"transfer-encoding", b"connection", b"expect", b"upgrade"))


class State(enum.Enum):
    """What the next byte from the client is."""

    HEAD = enum.auto()
    """Part of a head; between requests, its first byte."""
    ACTIVE = enum.auto()
    """Part of the current request's body, or later than that and kept."""
    LINGER = enum.auto()
    """Nothing any more: the last answer is out, and input is dropped until the client has seen it and closes."""
    GONE = enum.auto()
    """Not ours: lost, or handed over."""


class Connection(asyncio.Protocol):
    """See the module. Everything runs in the loop's thread."""

    __slots__ = (
        "_absorb",
        "_ahead",
        "_application",
        "_body",
        "_consuming",
        "_continue_due",
        "_drained",
        "_eof",
        "_fields",
        "_head_complete",
        "_head_size",
        "_held",
        "_hijack_end",
        "_hijacked",
        "_http10",
        "_input",
        "_lent",
        "_loop",
        "_parser",
        "_paused",
        "_reader",
        "_request",
        "_server",
        "_state",
        "_streaming",
        "_tail",
        "_task",
        "_transport",
        "_unsent",
        "_url",
        "_write_blocked",
        "deadline",
    )

    def __init__(self, server: Server) -> None:
        self._server = server
        self._application = server.application
        self._loop = asyncio.get_running_loop()
        self._transport: Any = None  # asyncio.Transport, or TlsTransport which is like one
        self._state = State.HEAD
        self.deadline = 0.0
        """Of the loop's clock, while `server.timed` has this connection."""
        # the head that is being read
        self._parser: Any = httptools.HttpRequestParser(self)
        self._head_size = 0
        self._tail = b""
        self._url = b""
        self._fields: list[tuple[bytes, bytes]] = []
        self._head_complete = False
        # the current request
        self._request: Request | None = None
        self._http10 = False
        self._body: Body | None = None
        self._reader: BodyReader | None = None  # None once the request is complete
        self._continue_due = False
        self._held = False  # its handler runs when body and earlier answers are through
        self._absorb: int | None = None  # the answer is out; so many bytes more of its body are read and dropped
        self._task: asyncio.Task[None] | None = None
        self._lent: Remainder | None = None  # a thread reads the body from the socket
        self._streaming = False
        self._hijacked = False
        self._hijack_end: socket.socket | None = None
        # flow
        self._input = b""
        self._ahead: tuple[bytes, int] | None = None  # what `_input` will be, while a handler runs within data_received
        self._consuming = False
        self._paused = False
        self._eof = False
        self._unsent = 0
        self._write_blocked = False
        self._drained: asyncio.Future[None] | None = None

    # --- asyncio.Protocol -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._server.opened(self)
        if self._server.closing:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        if self._input:
            self._input += data
            self._regulate()
            return
        fresh = self._state is State.HEAD and not self._head_size and not self._write_blocked
        known = self._server.known_heads.get(data) if fresh and len(data) <= KNOWN_HEAD else None
        if known is not None:
            self._begin_known(known)
        else:
            self._consume(data)

    def eof_received(self) -> bool:
        """The client sends no more. True keeps the connection, which may still owe it an answer."""
        self._eof = True
        if self._state is State.LINGER or (self._state is State.HEAD and not self._head_size and not self._input):
            return False
        self._after_eof()
        return True

    def _after_eof(self) -> None:
        """All that the client ever sent has been read, or waits in `_input`."""
        if self._input or self._hijacked:
            return
        if self._state is State.HEAD:
            if self._head_size:
                self._refuse(InvalidParameter("the connection was shut down in the middle of a request's head"))
            else:
                self._close()
        elif self._state is State.ACTIVE and self._reader is not None:
            self._fail_body(InvalidParameter("the connection was shut down in the middle of a request's body"))
        elif self._state is State.ACTIVE and self._request is not None and self._request.cancellable:
            self.check_hangup()

    def connection_lost(self, error: Exception | None) -> None:
        self._state = State.GONE
        self._server.lost(self)
        self._input = b""
        self._parser = None
        if self._body is not None:
            self._body.end(InvalidParameter("the client left in the middle of its request"))
        if self._lent is not None:
            self._lent.cut()
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        if self._task is not None and (self._streaming or (self._request is not None and self._request.cancellable)):
            self._task.cancel()

    def pause_writing(self) -> None:
        self._write_blocked = True

    def resume_writing(self) -> None:
        self._write_blocked = False
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        if self._held:
            self._release_held()
        self._continue_input()

    # --- httptools --------------------------------------------------------------------------------------------------

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields.append((name, value))

    def on_headers_complete(self) -> None:
        self._head_complete = True

    # --- input ------------------------------------------------------------------------------------------------------

    def _consume(self, data: bytes) -> None:
        """Read as far as may be read now; keep the rest."""
        start, size = 0, len(data)
        self._consuming = True
        while start < size:
            if self._state is State.HEAD and not self._write_blocked:
                start = self._read_head(data, start)
            elif self._state is State.ACTIVE and self._reader is not None:
                start = self._read_body(data, start)
            elif self._state in (State.LINGER, State.GONE):
                break
            else:
                self._input = data[start:]
                break
        self._consuming = False
        self._regulate()

    def _continue_input(self) -> None:
        if self._input and self._state in (State.HEAD, State.ACTIVE) and not self._hijacked:
            data, self._input = self._input, b""
            self._consume(data)
            if self._eof:
                self._after_eof()

    def _regulate(self) -> None:
        """Read from the socket exactly while there is room for what comes."""
        if self._lent is not None:
            return
        full = len(self._input) > INPUT_WAITING or (self._body is not None and self._body.waiting > BODY_WAITING)
        if full != self._paused and not self._hijacked and self._state is not State.GONE:
            self._paused = full
            if self._transport.is_closing():
                return
            if full:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    def _read_head(self, data: bytes, start: int) -> int:
        fresh = not self._head_size
        if fresh:
            while start < len(data) and data[start] in b"\r\n":  # RFC 9112, 2.2: empty lines before a request
                start += 1
            if start == len(data):
                return start
        end = _end_of_head(self._tail, data, start)
        whole = end >= 0
        if not whole:
            end = len(data)
        piece = data if end - start == len(data) else data[start:end]
        self._head_size += len(piece)
        limit = self._server.limits.head
        if self._head_size > limit:
            self._refuse(InvalidParameter(f"the request's head is larger than {limit} bytes"))
            return len(data)
        reusable = True
        try:
            self._parser.feed_data(piece)
        except httptools.HttpParserUpgrade:
            reusable = False
        except httptools.HttpParserError as error:
            self._refuse(InvalidParameter(f"malformed request: {error}"))
            return len(data)
        if not whole:
            self._tail = (self._tail + piece)[-2:]
            if fresh:
                self._watch(self._server.limits.head_seconds)
            return end
        if not self._head_complete:
            self._refuse(InvalidParameter("malformed request: the head has no end"))
            return len(data)
        if not fresh:
            self._unwatch()
        try:
            plain = self._begin(reusable)
        except InvalidParameter as error:
            self._refuse(error)
            return len(data)
        if plain and piece is data and len(data) <= KNOWN_HEAD and self._request is not None:
            known = self._server.known_heads
            if len(known) >= KNOWN_HEADS:
                known.clear()
            known[data] = Request(
                self._request.method, self._request.path, self._request.query, self._request.headers, NO_BODY
            )
        held, complete = self._held, self._reader is None
        if not complete:
            end = self._read_body(data, end)
            if self._state is not State.ACTIVE:
                return len(data)
            if self._body is not None and self._body.error is not None:
                self._refuse(self._body.error)
                return len(data)
        self._ahead = (data, end) if end < len(data) else None
        if not held:
            self._dispatch()
        elif complete:
            self._release_held()
        elif self._reader is not None:
            self.body_wanted()
        self._ahead = None
        return end

    def _begin_known(self, request: Request) -> None:
        """The very bytes of an earlier request: the same again, but for its answer."""
        self._request = Request(request.method, request.path, request.query, request.headers, NO_BODY, connection=self)
        self._body = NO_BODY
        self._http10 = False
        self._state = State.ACTIVE
        if self._transport.get_write_buffer_size():
            self._held = self._application.is_hijack(request.method, request.path)
        if self._held:
            self._release_held()
        else:
            self._dispatch()

    def _begin(self, reusable: bool) -> bool:
        """A head is complete: make the request and the reader of its body. Whether the head is all there is to the request."""
        parser = self._parser
        method, http = parser.get_method().decode("ascii"), parser.get_http_version()
        if http not in ("1.1", "1.0"):
            raise InvalidParameter(f"malformed request: HTTP version {http} is not spoken here")
        url, fields = self._url, self._fields
        self._url, self._fields, self._head_complete = b"", [], False
        self._head_size, self._tail = 0, b""
        self._http10 = http10 = http == "1.0"
        keep, expects, upgrade = not http10, False, False
        reader: BodyReader | None = None
        for name, value in fields:
            key = name.lower()
            if key not in _FRAMING:
                continue
            text = value.strip().lower()
            if key == b"connection":
                options = [option.strip() for option in text.split(b",")]
                if b"close" in options:
                    keep = False
                elif http10 and b"keep-alive" in options:
                    keep = True
            elif key == b"expect":
                expects = text == b"100-continue" and not http10
            elif key == b"upgrade":
                upgrade = True
            elif reader is not None:
                raise InvalidParameter("malformed request: its body's length is given twice")
            elif key == b"transfer-encoding":
                if text != b"chunked" or http10:
                    raise InvalidParameter(f"transfer coding {text.decode('latin-1')!r} is not spoken here, chunked is")
                reader = ChunkedReader()
            elif not text.isdigit() or len(text) > 18:
                raise InvalidParameter(f"malformed request: Content-Length {text.decode('latin-1')!r}")
            else:
                reader = LengthReader(int(text))
        if reader is not None and reader.done:
            reader = None
        if reader is not None or not reusable:
            # The parser has seen a head and now expects what it will not get.
            self._parser = httptools.HttpRequestParser(self)
        raw_path, raw_query = _target(url)
        path = percent_decode(raw_path, "the path")
        query = Query(raw_query) if raw_query else _NO_QUERY
        headers = Headers(fields)
        self._body = body = Body(self, announced=reader.left) if reader is not None else NO_BODY
        self._request = request = Request(method, path, query, headers, body, keep=keep, connection=self)
        request.upgrade = upgrade
        self._reader = reader
        self._continue_due = expects and reader is not None
        self._state = State.ACTIVE
        # Only these two make it matter, before the handler says so itself, that the request is one to hijack:
        if reader is not None or self._transport.get_write_buffer_size():
            self._held = self._application.is_hijack(method, path)
        return reader is None and reusable and keep and not (http10 or expects or upgrade)

    def _read_body(self, data: bytes, start: int) -> int:
        reader, body = self._reader, self._body
        assert reader is not None and body is not None
        absorbing = self._absorb is not None
        try:
            end = reader.read(data, start, None if absorbing else body)
        except InvalidParameter as error:
            self._fail_body(error)
            return len(data)
        if not absorbing and end > start:
            self._continue_due = False  # the client did not wait
            if not self._held:
                self._unwatch()
        if absorbing:
            assert self._absorb is not None
            self._absorb -= end - start
            if self._absorb < 0 and not reader.done:
                self._close()
                return len(data)
        elif self._held and body.waiting > HIJACK_BODY_LIMIT:
            self._refuse(InvalidParameter(f"the body of this request is larger than {HIJACK_BODY_LIMIT} bytes"))
            return len(data)
        if reader.done:
            self._reader = None
            self._unwatch()
            body.end()
            if absorbing:
                self._finish()
            elif self._held:
                self._release_held()
        elif self._held or absorbing:
            self._watch(self._server.limits.body_seconds)
        return end

    def _fail_body(self, error: InvalidParameter) -> None:
        """The body breaks off or breaks the rules: whoever reads it is told; if nobody does, the client."""
        if self._absorb is not None:
            self._close()
        elif self._held:
            self._refuse(error)
        else:
            assert self._body is not None
            self._body.end(error)
            self._input = b""

    def _release_held(self) -> None:
        """A request to hijack: run its handler as soon as its body is here and earlier answers are written out."""
        if self._reader is not None:
            return
        if self._transport.get_write_buffer_size():
            self._transport.set_write_buffer_limits(high=0)
            return
        self._held = False
        self._transport.set_write_buffer_limits()
        self._loop.call_soon(self._dispatch_held)

    def _dispatch_held(self) -> None:
        if self._state is State.ACTIVE and self._request is not None:
            self._dispatch()

    # Body's source

    def body_wanted(self) -> None:
        """The handler waits for bytes of the body."""
        if self._reader is None or self._state is not State.ACTIVE:
            return
        self._tell_to_continue()
        self._watch(self._server.limits.body_seconds)

    def body_taken(self) -> None:
        """There is room again."""
        self._regulate()

    def body_lent(self, early: Iterable[bytes]) -> Remainder | None:
        """See `Body.lend`."""
        connection = self._transport.get_extra_info("socket")
        if (
            self._reader is None
            or self._state is not State.ACTIVE
            or self._absorb is not None
            or self._eof
            or connection is None
            or isinstance(self._transport, TlsTransport)
            or self._transport.is_closing()
        ):
            return None
        try:
            descriptor = os.dup(connection.fileno())
        except OSError:  # there are no more: it goes the way that needs none
            return None
        self.body_wanted()
        self._unwatch()
        if not self._paused:
            self._paused = True
            self._transport.pause_reading()
        self._lent = Remainder(descriptor, self._reader, early, self._server.limits.body_seconds)
        return self._lent

    def body_returned(self) -> None:
        """See `Body.take_back`."""
        remainder, self._lent = self._lent, None
        assert remainder is not None
        unread = remainder.close()
        if self._state is not State.ACTIVE:
            return
        assert self._reader is not None and self._body is not None
        if remainder.error is not None:
            self._fail_body(remainder.error)
        elif self._reader.done:
            self._reader = None
            self._body.end()
        self._consume(unread if remainder.error is None else b"")

    def _tell_to_continue(self) -> None:
        """The interim answer that the client waits for, once, before anything of the final one (RFC 9110, 10.1.1)."""
        if self._continue_due:
            self._continue_due = False
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    # --- answers ----------------------------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        request = self._request
        assert request is not None
        try:
            result = self._application(request)
        except Exception as error:
            self._answer(self._application.error_reply(error))
            return
        if isinstance(result, Reply):
            self._answer(result)
        elif isinstance(result, StreamReply):
            self._begin_stream(result)
            self._task = self._loop.create_task(self._stream(result))
        elif not isinstance(result, HijackReply):
            self._task = self._loop.create_task(self._run(result))

    async def _run(self, awaitable: Awaitable[AnyReply]) -> None:
        """A handler that waits."""
        try:
            result = await awaitable
        except Exception as error:
            result = self._application.error_reply(error)
        except asyncio.CancelledError:
            if self._state is State.ACTIVE:
                self._transport.abort()
            raise
        if isinstance(result, StreamReply):
            if self._state is State.ACTIVE:
                self._begin_stream(result)
            await self._stream(result)
        elif isinstance(result, Reply):
            self._task = None
            if self._state is State.ACTIVE:
                self._answer(result)

    def _answer(self, reply: Reply) -> None:
        """Write a complete answer."""
        request = self._request
        assert request is not None
        if self._hijacked:
            self._cancel_hijack()
        keep = self._may_keep()
        body = reply.body
        head = self._start(reply.status, reply.content_type if body or reply.content_type != JSON else "")
        if reply.headers:
            head += field_lines(reply.headers)
        if not keep or self._http10:
            head += self._connection_line(keep)
        if reply.status in _NO_BODY:
            head += b"\r\n"
            body = b""
        else:
            head += b"Content-Length: %d\r\n\r\n" % len(body)
            if request.method == "HEAD":
                body = b""
        if len(body) <= JOIN_LIMIT:
            self._transport.write(head + body)
        else:
            self._transport.writelines((head, body))
        self._answered(keep)

    def _start(self, status: int, content_type: str) -> bytes:
        return self._server.heads.start(status, content_type, time.time())

    def _connection_line(self, keep: bool) -> bytes:
        if not keep:
            return b"Connection: close\r\n"
        return b"Connection: keep-alive\r\n" if self._http10 else b""

    def _may_keep(self) -> bool:
        """The connection can take another request after this answer."""
        request, reader, body = self._request, self._reader, self._body
        if request is None or not request.keep or self._server.closing:
            return False
        if reader is None:
            return True
        if self._continue_due or (body is not None and body.ended):
            return False
        return reader.left is None or reader.left <= DRAIN_LIMIT

    def _answered(self, keep: bool) -> None:
        """The answer is written. Its request's body may still be on the way."""
        if not keep:
            self._close()
        elif self._reader is None:
            self._finish()
        else:
            assert self._body is not None
            self._body.discard()
            self._absorb = DRAIN_LIMIT
            self._watch(self._server.limits.body_seconds)
            self._regulate()

    def _finish(self) -> None:
        """Ready for the next request."""
        self._request = self._body = None
        self._absorb = None
        self._continue_due = False
        self._state = State.HEAD
        if self._consuming:
            return  # the next request is read in the same turn
        if self._input:
            self._continue_input()
        elif self._eof:
            self._after_eof()
        elif self._paused:
            self._regulate()

    # streams

    def _begin_stream(self, reply: StreamReply) -> None:
        """Write the head of an answer that grows."""
        if self._hijacked:
            self._cancel_hijack()
        self._tell_to_continue()  # the chunks may be made of the body: later would be in the midst of them
        self._streaming = True
        keep = not self._http10 and self._may_keep()
        head = [self._start(reply.status, reply.content_type), field_lines(reply.headers), self._connection_line(keep)]
        if not self._http10:
            head.append(b"Transfer-Encoding: chunked\r\n")
        head.append(b"\r\n")
        self._transport.write(b"".join(head))
        if not keep and self._request is not None:
            self._request.keep = False

    async def _stream(self, reply: StreamReply) -> None:
        """Write chunks as the client takes them; ends with the chunks, the client, or the server."""
        request, chunked = self._request, not self._http10
        try:
            if request is not None and request.method != "HEAD" and self._state is State.ACTIVE:
                async for chunk in reply.chunks:
                    if self._state is not State.ACTIVE:
                        return
                    if chunk:
                        self._write_chunk(chunk, chunked)
                        if self._write_blocked:
                            await self._drain()
                if chunked and self._state is State.ACTIVE:
                    self._transport.write(b"0\r\n\r\n")
        except Exception:
            # The head is out: all that is left to tell the client is that the stream is not complete.
            if self._state is State.ACTIVE:
                log.exception("%s %s: the answer broke off", request and request.method, request and request.path)
                self._transport.abort()
                return
        except asyncio.CancelledError:
            if self._state is State.ACTIVE:
                self._transport.abort()
            raise
        finally:
            self._streaming = False
            await _close_chunks(reply)
        self._task = None
        if self._state is State.ACTIVE:
            self._answered(self._may_keep() and chunked)

    def _write_chunk(self, chunk: bytes, chunked: bool) -> None:
        if not chunked:
            self._transport.write(chunk)
        elif len(chunk) <= JOIN_LIMIT:
            self._transport.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
        else:
            self._transport.writelines((b"%x\r\n" % len(chunk), chunk, b"\r\n"))

    async def _drain(self) -> None:
        self._drained = self._loop.create_future()
        try:
            await self._drained
        finally:
            self._drained = None

    # --- the way out of HTTP ----------------------------------------------------------------------------------------

    def hijack(self, request: Request, content_type: str) -> Hijack:
        """See `Request.hijack`."""
        if request is not self._request or self._state is not State.ACTIVE or self._transport.is_closing():
            raise ServerError("the client has left")
        if self._hijacked or self._reader is not None or self._transport.get_write_buffer_size():
            raise ServerError(f"{request.method} {request.path}: the connection cannot be hijacked now")
        self._hijacked = True
        if not self._paused and not self._eof:
            self._transport.pause_reading()
        if self._ahead is not None:  # called by a handler that does not wait: the rest of this segment is not kept yet
            data, end = self._ahead
            self._input = data[end:]
        head = self._server.heads.hijacked(content_type, request.upgrade, time.time())
        return Hijack(self, head, self._input)

    def hijack_descriptor(self) -> int:
        """See `Hijack.descriptor`."""
        if not self._hijacked or self._state is not State.ACTIVE or self._transport.is_closing():
            raise ServerError("the client has left")
        if not isinstance(self._transport, TlsTransport):
            descriptor: int = self._transport.get_extra_info("socket").fileno()
            return os.dup(descriptor)
        if self._hijack_end is not None:
            raise ServerError("the connection's stream was handed over before")
        self._hijack_end, theirs = socket.socketpair()
        return theirs.detach()

    def hijack_release(self) -> None:
        """See `Hijack.release`."""
        self._task = None
        transport, end = self._transport, self._hijack_end
        if self._state is not State.ACTIVE:
            if end is not None:
                end.close()
            return
        self._state = State.GONE
        self._input = b""
        if isinstance(transport, TlsTransport) and end is not None:
            self._server.lost(self)
            self._hijack_end = None
            self._server.relay(transport, end, self._eof)
        else:
            # The client's socket lives on in its duplicate: closing this descriptor does not shut it down.
            transport.abort()

    def _cancel_hijack(self) -> None:
        """The handler thought better of it: this is HTTP again, unless bytes of the stream have come, which it cannot
        tell from requests.
        """
        self._hijacked = False
        if self._hijack_end is not None:
            self._hijack_end.close()
            self._hijack_end = None
        if self._request is not None and self._input:
            self._request.keep = False
        if not self._paused and not self._eof and not self._transport.is_closing():
            self._transport.resume_reading()

    # --- ends -------------------------------------------------------------------------------------------------------

    def _refuse(self, error: InvalidParameter) -> None:
        """Answer what is not a proper request, and close: what follows cannot be told apart from it."""
        self._unwatch()
        self._held = False
        reply = self._application.error_reply(error)
        head = self._start(reply.status, reply.content_type) + field_lines(reply.headers)
        length = b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(reply.body)
        body = b"" if self._request is not None and self._request.method == "HEAD" else reply.body
        self._transport.write(head + length + body)
        self._close(unread=True)

    def _close(self, unread: bool = False) -> None:
        """Close so that the client gets all of the answer: closing with unread input would reset the connection."""
        unread = (unread or self._reader is not None or bool(self._input)) and not self._eof
        self._state = State.LINGER
        self._request = self._body = None
        self._input = b""
        if self._transport.is_closing():
            return
        self._watch(self._server.limits.linger_seconds)
        if not unread:
            self._transport.close()
            return
        self._transport.write_eof()
        if self._paused:
            self._paused = False
            self._transport.resume_reading()

    def expired(self) -> None:
        """Server: the deadline has passed."""
        self._unwatch()
        limits = self._server.limits
        if self._state is State.HEAD:
            self._refuse(InvalidParameter(f"the request's head was not complete within {limits.head_seconds:g} s"))
        elif self._state is State.ACTIVE and self._reader is not None:
            self._fail_body(InvalidParameter(f"no byte of the request's body came for {limits.body_seconds:g} s"))
        elif self._state is State.LINGER:
            unsent = self._transport.get_write_buffer_size()
            if unsent and unsent != self._unsent:
                self._unsent = unsent  # a slow client, but it takes its answer
                self._watch(limits.body_seconds)
            else:
                self._transport.abort()

    def check_hangup(self) -> None:
        """After EOF, while an answer lasts as long as the client: find out whether it only half-closed or is gone.

        On a Unix socket the two differ (POLLHUP); on TCP they do not, and as in Go's server EOF counts as gone.
        """
        if self._state is not State.ACTIVE or self._transport.is_closing():
            self._server.half_open.discard(self)
            return
        connection = self._transport.get_extra_info("socket")
        if connection is not None and connection.family == socket.AF_UNIX:
            poll = select.poll()
            poll.register(connection.fileno(), 0)
            if not poll.poll(0):
                self._server.watch_half_open(self)
                return
        self._transport.abort()

    def shut(self) -> None:
        """Server: it closes. Idle connections and endless answers end now, others with their answer."""
        if self._state is State.HEAD and not self._input:
            self._transport.close()
        elif self._task is not None and (self._streaming or (self._request is not None and self._request.cancellable)):
            self._task.cancel()
            if not self._streaming:
                self._transport.abort()

    def abort(self) -> None:
        """Server: the time of grace is over."""
        if self._task is not None:
            self._task.cancel()
        self._transport.abort()

    def peer(self) -> str:
        """Who is at the other end; `` when that cannot be told any more."""
        connection = self._transport.get_extra_info("socket")
        try:
            if connection is not None and connection.family == socket.AF_UNIX:
                credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
                pid, uid, _ = struct.unpack("iII", credentials)
                return f"unix:{pid}/{uid}"
        except OSError:
            return ""
        address: Sequence[Any] = self._transport.get_extra_info("peername") or ()
        return f"{address[0]}:{address[1]}" if len(address) >= 2 else ""

    def _watch(self, seconds: float) -> None:
        self.deadline = self._loop.time() + seconds
        self._server.watch(self)

    def _unwatch(self) -> None:
        self._server.timed.discard(self)


JSON = "application/json"
_NO_QUERY = Query()


def _end_of_head(tail: bytes, data: bytes, start: int) -> int:
    """Position after the empty line that ends a head, or -1. `tail`: up to two bytes that came before `data[start]`."""
    if tail:
        found = (tail + data[start : start + 2]).find(b"\n\r\n")
        if found >= 0:
            return start + found + 3 - len(tail)
    found = data.find(b"\n\r\n", start)
    return found + 3 if found >= 0 else -1


def _target(url: bytes) -> tuple[bytes, bytes]:
    """Path and query of a request target (RFC 9112, 3.2): origin-form, absolute-form; others are paths that no route
    has.
    """
    if not url.startswith(b"/"):
        absolute = _ABSOLUTE.match(url)
        if absolute is not None:
            url = url[absolute.end() :]
            if not url.startswith(b"/"):
                url = b"/" + url
    path, _, query = url.partition(b"#")[0].partition(b"?")
    return path, query


async def _close_chunks(reply: StreamReply) -> None:
    close = getattr(reply.chunks, "aclose", None)
    if close is None:
        return
    try:
        await close()
    except Exception:
        log.exception("closing the source of an answer")
