"""One client's connection: bytes to requests, answers to bytes, and the way out of HTTP.

A connection answers one request at a time, in the order of arrival. Bytes after the end of the
current request are kept until it is answered: only then is it known whether they are another
request or the beginning of a hijacked stream. What a connection does at any moment, and what may
follow, is the table in `phases.py`.

An answer that its handler gives at once is written within `data_received`, without a task. Memory
per connection is bounded: body bytes that wait for the handler, input that waits for its turn, and
output that waits for the client each pause reading from the socket.

Owns:    the transport, until it is lost or handed over. No exception, future or finished task may
         keep a reference to a body: with one, the memory of aborted requests would wait for the
         garbage collector.
Threads: the event loop's.
Not here: heads (`head.py`), bytes of answers (`answer.py`), the hand-over (`hijack.py`), listeners
and the clock of deadlines (`server.py`), TLS (`tls.py`), what a request means (the application).
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import socket
import struct
from collections.abc import Awaitable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from engine.errors import EngineError, InvalidParameter, ServerError
from engine.http.answer import CONTINUE, JOIN_LIMIT, LAST_CHUNK
from engine.http.borrowed import BorrowedBody
from engine.http.budget import Budget
from engine.http.framing import BodyReader
from engine.http.head import Head, HeadReader
from engine.http.hijack import Hijack, HijackReply
from engine.http.messages import BODY_WAITING, NO_BODY, AnyReply, Body, Reply, Request, StreamReply
from engine.http.phases import (
    ARRIVING,
    COMPLETE,
    DRAINING,
    FOLLOWS,
    GONE,
    HANDLING,
    HEAD,
    HELD,
    HIJACKED,
    LENT,
    LINGER,
    STREAMING,
    Incoming,
    Phase,
)
from engine.http.tls import TlsTransport

if TYPE_CHECKING:
    from engine.http.server import Server

_log = logging.getLogger(__name__)

INPUT_WAITING = 64 * 1024
"""Bytes of later requests that are kept before reading is paused."""

DRAIN_LIMIT = 256 * 1024
"""Bytes of an unread body that are received and dropped to keep the connection. With more it is
closed.
"""

HIJACK_BODY_LIMIT = 128 * 1024
"""Bytes of a body that comes with a request to hijack. Less than `BODY_WAITING`: it waits as a
whole.
"""

KNOWN_HEAD = 1024
"""Bytes of a head up to which it is remembered.

Clients that poll send the very same bytes again.
"""

KNOWN_HEADS = 1024
"""How many such heads are remembered.

Then all are forgotten, and those in use come back at once.
"""

_CLIENT_LEFT = "the client left in the middle of its request"
_SHUT_DOWN = "the connection was shut down in the middle of a request's body"


class Connection(asyncio.Protocol):
    """See the module."""

    __slots__ = (
        "_absorb",
        "_application",
        "_body",
        "_borrowed",
        "_consuming",
        "_continue_due",
        "_drained",
        "_eof",
        "_heads",
        "_hijack",
        "_http10",
        "_input",
        "_lines",
        "_loop",
        "_paused",
        "_phase",
        "_reader",
        "_request",
        "_server",
        "_task",
        "_transport",
        "_unsent",
        "_write_blocked",
        "budget",
        "deadline",
    )

    def __init__(self, server: Server) -> None:
        self._server = server
        self._application = server.application
        self._heads = server.heads
        self._loop = asyncio.get_running_loop()
        self._transport: Any = None  # asyncio.Transport, or TlsTransport which is like one
        self._phase = HEAD
        self._lines = HeadReader(server.limits.head)
        self.budget: Budget = server.budget
        """Source: see `messages.Source`."""
        self.deadline = 0.0
        """Of the loop's clock, while `server.timed` has this connection."""
        # the current request
        self._request: Request | None = None
        self._http10 = False
        self._body: Body | None = None
        self._reader: BodyReader | None = None  # None once the request is complete
        self._continue_due = False
        self._absorb = 0  # bytes of the body that may still be dropped in DRAINING
        self._task: asyncio.Task[None] | None = None
        self._borrowed: BorrowedBody | None = None
        self._hijack: Hijack | None = None
        # flow
        self._input = b""  # what waits until the current request is answered
        # within `_consume`: its data, and how far the request goes
        self._consuming: tuple[bytes, int] | None = None
        self._paused = False
        self._eof = False
        self._unsent = 0
        self._write_blocked = False
        self._drained: asyncio.Future[None] | None = None

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def incoming(self) -> Incoming:
        """What is outstanding of the current request's body."""
        if self._borrowed is not None:
            return LENT
        return COMPLETE if self._reader is None else ARRIVING

    def _enter(self, phase: Phase) -> None:
        """The only way to another phase. Raises RuntimeError for one that may not follow: that is a
        bug here.
        """
        if phase not in FOLLOWS[self._phase]:
            raise RuntimeError(f"a connection in {self._phase} cannot enter {phase}")
        self._phase = phase

    # --- asyncio.Protocol -------------------------------------------------------------------------

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
        fresh = self._phase is HEAD and not self._lines.size and not self._write_blocked
        known = self._server.known_heads.get(data) if fresh and len(data) <= KNOWN_HEAD else None
        if known is not None:
            self._begin_known(known)
        else:
            self._consume(data)

    def eof_received(self) -> bool:
        """The client sends no more. True keeps the connection, which may still owe it an answer."""
        self._eof = True
        if self._phase is LINGER or (self._phase is HEAD and not self._lines.size and not self._input):
            return False
        self._after_eof()
        return True

    def _after_eof(self) -> None:
        """All that the client ever sent has been read, or waits in `_input`."""
        if self._input or self._phase is HIJACKED:
            return
        if self._phase is HEAD:
            if self._lines.size:
                self._refuse(InvalidParameter("the connection was shut down in the middle of a request's head"))
            else:
                self._close()
        elif self._phase.active and self._reader is not None:
            self._fail_body(_SHUT_DOWN)
        elif self._phase.active and self._request is not None and self._request.cancellable:
            self.check_hangup()

    def connection_lost(self, error: Exception | None) -> None:
        streaming = self._phase is STREAMING
        if self._phase is not GONE:
            self._enter(GONE)
        self._server.lost(self)
        self._input = b""
        self._lines.close()
        if self._body is not None:
            self._body.end(_CLIENT_LEFT)
        if self._borrowed is not None:
            self._borrowed.cut()
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        if self._task is None:
            self._forget()
        elif streaming or (self._request is not None and self._request.cancellable):
            self._task.cancel()

    def _forget(self) -> None:
        """Break the reference cycles with request and body: their memory is freed at once."""
        if self._body is not None:
            self._body.discard()
        if self._hijack is not None:
            self._hijack.cancel()
        self._request = self._body = self._reader = self._task = self._hijack = None

    def pause_writing(self) -> None:
        self._write_blocked = True

    def resume_writing(self) -> None:
        self._write_blocked = False
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        if self._phase is HELD:
            self._release_held()
        self._continue_input()

    # --- input ------------------------------------------------------------------------------------

    def _consume(self, data: bytes) -> None:
        """Read as far as may be read now, and keep the rest."""
        start, size = 0, len(data)
        while start < size:
            if self._phase is HEAD and not self._write_blocked:
                self._consuming = data, size
                start = self._read_head(data, start)
            elif self._phase.active and self._reader is not None:
                self._consuming = data, size
                start = self._read_body(data, start)
            elif self._phase is LINGER or self._phase is GONE:
                break
            else:
                self._input = data[start:]
                break
        self._consuming = None
        self._regulate()

    def _continue_input(self) -> None:
        if self._input and (self._phase is HEAD or (self._phase.active and self._phase is not HIJACKED)):
            data, self._input = self._input, b""
            self._consume(data)
            if self._eof:
                self._after_eof()

    def _regulate(self) -> None:
        """Read from the socket exactly while there is room for what comes."""
        if self._borrowed is not None:
            return
        full = len(self._input) > INPUT_WAITING or (self._body is not None and self._body.waiting > BODY_WAITING)
        if full != self._paused and self._phase is not HIJACKED and self._phase is not GONE:
            self._paused = full
            if self._transport.is_closing():
                return
            if full:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    def _read_head(self, data: bytes, start: int) -> int:
        fresh = not self._lines.size
        try:
            end, head = self._lines.read(data, start)
        except InvalidParameter as error:
            self._refuse(error)
            return len(data)
        if head is None:
            if fresh and self._lines.size:
                self._watch(self._server.limits.head_seconds)
            return end
        if not fresh:
            self._unwatch()
        self._begin(head)
        held = self._phase is HELD
        if head.repeatable and fresh and not start and end == len(data) <= KNOWN_HEAD:
            known = self._server.known_heads
            if len(known) >= KNOWN_HEADS:
                known.clear()
            known[data] = Request(head.method, head.path, head.query, head.headers, NO_BODY, target=head.target)
        if self._reader is not None:
            end = self._read_body(data, end)
            if not self._phase.active:
                return len(data)
            if self._body is not None and self._body.failure:
                self._refuse(InvalidParameter(self._body.failure))
                return len(data)
        self._consuming = data, end
        if not held:
            self._dispatch()
        elif head.reader is None:
            self._release_held()
        elif self._reader is not None:
            self.body_wanted()
        return end

    def _begin(self, head: Head) -> None:
        """A head is complete. What comes with it of the body is read before the handler runs."""
        reader = head.reader
        self._http10 = head.http10
        self._reader = reader
        self._body = body = Body(self, announced=reader.left) if reader is not None else NO_BODY
        self._request = request = Request(
            head.method,
            head.path,
            head.query,
            head.headers,
            body,
            target=head.target,
            keep=head.keep,
            connection=self,
        )
        request.upgrade = head.upgrade
        self._continue_due = head.expects and reader is not None
        self._enter(HELD if self._to_hold(reader) else HANDLING)

    def _begin_known(self, request: Request) -> None:
        """The very bytes of an earlier request."""
        self._request = Request(
            request.method,
            request.path,
            request.query,
            request.headers,
            NO_BODY,
            target=request.target,
            connection=self,
        )
        self._body = NO_BODY
        self._http10 = False
        if self._to_hold(None):
            self._enter(HELD)
            self._release_held()
        else:
            self._enter(HANDLING)
            self._dispatch()

    def _to_hold(self, reader: BodyReader | None) -> bool:
        """A request to hijack runs when its body has come and nothing of earlier answers waits to
        be written.

        A handler says itself that it hijacks, so that only these two make it matter before.
        """
        request = self._request
        assert request is not None
        return bool(reader is not None or self._transport.get_write_buffer_size()) and self._application.is_hijack(
            request.method, request.path
        )

    def _release_held(self) -> None:
        """Run the handler of a request to hijack as soon as it can be hijacked."""
        if self._reader is not None:
            return
        if self._transport.get_write_buffer_size():
            self._transport.set_write_buffer_limits(high=0)
            return
        self._transport.set_write_buffer_limits()
        self._enter(HANDLING)
        self._loop.call_soon(self._dispatch_held)

    def _dispatch_held(self) -> None:
        if self._phase is HANDLING and self._request is not None:
            self._dispatch()

    def _read_body(self, data: bytes, start: int) -> int:
        reader, body = self._reader, self._body
        assert reader is not None and body is not None
        draining = self._phase is DRAINING
        try:
            end = reader.read(data, start, None if draining else body)
        except InvalidParameter as error:
            self._fail_body(error.message)
            return len(data)
        if not draining and end > start:
            self._continue_due = False  # the client did not wait
            if self._phase is not HELD:
                self._unwatch()
        if draining:
            self._absorb -= end - start
            if self._absorb < 0 and not reader.done:
                self._close()
                return len(data)
        elif self._phase is HELD and body.waiting > HIJACK_BODY_LIMIT:
            self._refuse(InvalidParameter(f"the body of this request is larger than {HIJACK_BODY_LIMIT} bytes"))
            return len(data)
        if reader.done:
            self._reader = None
            self._unwatch()
            body.end()
            if draining:
                self._finish()
            elif self._phase is HELD:
                self._release_held()
        elif draining or self._phase is HELD:
            self._watch(self._server.limits.body_seconds)
        return end

    def _fail_body(self, failure: str) -> None:
        """The body breaks off or breaks the rules: its reader gets the failure, or the client when
        there is none.
        """
        if self._phase is DRAINING:
            self._close()
        elif self._phase is HELD:
            self._refuse(InvalidParameter(failure))
        else:
            assert self._body is not None
            self._body.end(failure)
            self._input = b""

    # Body's source

    def body_wanted(self) -> None:
        """See `messages.Source`."""
        if self._reader is None or not self._phase.active:
            return
        self._send_continue()
        self._watch(self._server.limits.body_seconds)

    def body_taken(self) -> None:
        """See `messages.Source`."""
        self._regulate()

    def body_borrowed(self, early: Iterable[bytes]) -> BorrowedBody | None:
        """See `messages.Source`."""
        connection = self._transport.get_extra_info("socket")
        if (
            self._reader is None
            or (self._phase is not HANDLING and self._phase is not STREAMING)
            or self._eof
            or connection is None
            or isinstance(self._transport, TlsTransport)
            or self._transport.is_closing()
        ):
            return None
        try:
            descriptor = os.dup(connection.fileno())
        except OSError:  # descriptors are used up: the body goes through the loop, which needs none
            return None
        self.body_wanted()
        self._unwatch()
        if not self._paused:
            self._paused = True
            self._transport.pause_reading()
        limit = self._server.limits.body_seconds
        self._borrowed = BorrowedBody(descriptor, self._reader, early, limit, self._body_returned)
        return self._borrowed

    def _body_returned(self, borrowed: BorrowedBody) -> None:
        """See `BorrowedBody.give_back`."""
        self._borrowed = None
        unread = borrowed.close()
        if not self._phase.active:
            return
        assert self._reader is not None and self._body is not None
        if borrowed.failure:
            self._fail_body(borrowed.failure)
        elif self._reader.done:
            self._reader = None
            self._body.end()
        self._consume(b"" if borrowed.failure else unread)

    def _send_continue(self) -> None:
        """The interim answer that the client waits for, once, before any byte of the final one (RFC
        9110, 10.1.1).
        """
        if self._continue_due:
            self._continue_due = False
            self._transport.write(CONTINUE)

    # --- answers ----------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        request = self._request
        assert request is not None
        try:
            result = self._application(request)
        except Exception as error:
            self._answer(self._application.error_reply(error))
            return
        if isinstance(result, Reply):
            try:
                self._answer(result)
            except Exception:
                _log.exception("an answer could not be written")
                self._transport.abort()
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
            self._cut_off()
            raise
        if isinstance(result, StreamReply):
            if self._phase.active:
                self._begin_stream(result)
            await self._stream(result)
            return
        self._task = None
        if self._phase is GONE:
            self._forget()
        elif isinstance(result, Reply) and self._phase.active:
            try:
                self._answer(result)
            except Exception:
                _log.exception("an answer could not be written")
                self._transport.abort()

    def _cut_off(self) -> None:
        """The task that answers is cancelled."""
        if self._phase is GONE:
            self._forget()
        elif self._phase.active:
            self._transport.abort()

    def _answer(self, reply: Reply) -> None:
        """Write a complete answer."""
        request = self._request
        assert request is not None
        if self._phase is HIJACKED:
            self._cancel_hijack()
        keep = self._may_keep()
        head, body = self._heads.reply(reply, keep=keep, http10=self._http10, only_head=request.method == "HEAD")
        if len(body) <= JOIN_LIMIT:
            self._transport.write(head + body)
        else:
            self._transport.writelines((head, body))
        self._answered(keep)

    def _may_keep(self, *, later: bool = False) -> bool:
        """The connection can take another request after this answer. `later`: its handler may still
        read the body.
        """
        request, reader, body = self._request, self._reader, self._body
        if request is None or not request.keep or self._server.closing:
            return False
        if reader is None:
            return True
        if self._continue_due or (body is not None and body.ended):
            return False
        if later:
            return True
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
            self._enter(DRAINING)
            self._watch(self._server.limits.body_seconds)
            self._regulate()

    def _finish(self) -> None:
        """Ready for the next request."""
        self._request = self._body = None
        self._continue_due = False
        self._enter(HEAD)
        if self._consuming is not None:
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
        if self._phase is HIJACKED:
            self._cancel_hijack()
        # the chunks may be made of the body: later it would be in the midst of them
        self._send_continue()
        keep = not self._http10 and self._may_keep(later=True)
        self._enter(STREAMING)
        self._transport.write(self._heads.stream(reply, keep=keep, http10=self._http10))
        if not keep and self._request is not None:
            self._request.keep = False

    async def _stream(self, reply: StreamReply) -> None:
        """Write chunks as fast as the client takes them. Ends with the chunks, the client, or the
        server.
        """
        request, chunked = self._request, not self._http10
        try:
            if request is not None and request.method != "HEAD" and self._phase is STREAMING:
                async for chunk in reply.chunks:
                    if self._phase is not STREAMING:
                        break
                    if chunk:
                        self._write_chunk(chunk, chunked)
                        if self._write_blocked:
                            await self._drain()
                else:
                    if chunked and self._phase is STREAMING:
                        self._transport.write(LAST_CHUNK)
        except Exception as error:
            # The head is out: all that can be reported to the client is that the stream is not
            # complete.
            if self._phase is STREAMING:
                # not a bug: a traceback would only say that the client left
                known = isinstance(error, EngineError)
                _log.log(
                    logging.WARNING if known else logging.ERROR,
                    "%s %s: the answer broke off: %s",
                    request and request.method,
                    request and request.path,
                    str(error),
                    exc_info=not known,
                )
                self._transport.abort()
        except asyncio.CancelledError:
            self._cut_off()
            raise
        finally:
            await _close_chunks(reply)
        self._task = None
        if self._phase is GONE:
            self._forget()
        elif self._phase is STREAMING and not self._transport.is_closing():
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

    # --- the way out of HTTP ----------------------------------------------------------------------

    def hijack(self, request: Request, content_type: str) -> Hijack:
        """See `Request.hijack`."""
        if request is not self._request or not self._phase.active or self._transport.is_closing():
            raise ServerError("the client has left")
        if self._phase is not HANDLING or self._reader is not None or self._transport.get_write_buffer_size():
            raise ServerError(f"{request.method} {request.path}: the connection cannot be hijacked now")
        self._enter(HIJACKED)
        if not self._paused and not self._eof:
            self._transport.pause_reading()
        # the handler runs in `data_received`: the rest of the segment is not kept yet
        if self._consuming is not None:
            data, end = self._consuming
            self._input = data[end:]
        self._hijack = Hijack(self, self._heads.hijacked(content_type, request.upgrade), self._input)
        return self._hijack

    def hijacked_transport(self) -> Any:
        """See `hijack.Hijackable`."""
        if self._phase is not HIJACKED or self._transport.is_closing():
            raise ServerError("the client has left")
        return self._transport

    def hand_over(self, end: socket.socket | None) -> None:
        """See `hijack.Hijackable`."""
        self._task = self._hijack = None
        transport = self._transport
        if self._phase is not HIJACKED:
            if end is not None:
                end.close()
            return
        self._enter(GONE)
        self._input = b""
        if isinstance(transport, TlsTransport) and end is not None:
            self._server.lost(self)
            self._server.relay(transport, end, self._eof)
            self._lines.close()
            self._forget()
        else:
            # The client's socket lives on in its duplicate: closing this descriptor does not shut
            # it down.
            transport.abort()

    def _cancel_hijack(self) -> None:
        """The handler failed: this is HTTP again, unless bytes of the stream have come, which look
        like a request.
        """
        self._enter(HANDLING)
        if self._hijack is not None:
            self._hijack.cancel()
            self._hijack = None
        if self._request is not None and self._input:
            self._request.keep = False
        if not self._paused and not self._eof and not self._transport.is_closing():
            self._transport.resume_reading()

    # --- ends -------------------------------------------------------------------------------------

    def _refuse(self, error: InvalidParameter) -> None:
        """Answer what is not a proper request, and close: what follows cannot be told apart from
        it.
        """
        self._unwatch()
        only_head = self._request is not None and self._request.method == "HEAD"
        reply = self._application.error_reply(error)
        self._transport.write(b"".join(self._heads.reply(reply, keep=False, http10=False, only_head=only_head)))
        self._close(unread=True)

    def _close(self, unread: bool = False) -> None:
        """Close so that the client gets all of the answer: closing with unread input would reset
        the connection.
        """
        unread = (unread or self._reader is not None or bool(self._input)) and not self._eof
        self._enter(LINGER)
        if self._body is not None:
            self._body.discard()
        self._request = self._body = self._reader = None
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
        if self._phase is HEAD:
            self._refuse(InvalidParameter(f"the request's head was not complete within {limits.head_seconds:g} s"))
        elif self._phase.active and self._reader is not None:
            self._fail_body(f"no byte of the request's body came for {limits.body_seconds:g} s")
        elif self._phase is LINGER:
            unsent = self._transport.get_write_buffer_size()
            if unsent and unsent != self._unsent:
                self._unsent = unsent  # a slow client, but it takes its answer
                self._watch(limits.body_seconds)
            else:
                self._transport.abort()

    def check_hangup(self) -> None:
        """After EOF, while an answer lasts as long as the client: find out whether it only
        half-closed or is gone.

        On a Unix socket the two differ (POLLHUP). On TCP they do not, and EOF counts as gone, as in
        Go's server.
        """
        if not self._phase.active or self._transport.is_closing():
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
        """Server: it closes. Idle connections and endless answers end now, others with their
        answer.
        """
        if self._phase is HEAD and not self._input:
            self._transport.close()
        elif self._task is not None:
            streaming = self._phase is STREAMING
            if streaming or (self._request is not None and self._request.cancellable):
                self._task.cancel()
                if not streaming:
                    self._transport.abort()

    def abort(self) -> None:
        """Server: the time of grace is over."""
        if self._task is not None:
            self._task.cancel()
        self._transport.abort()

    def peer(self) -> str:
        """See `Request.peer`. Empty when the client has left."""
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


async def _close_chunks(reply: StreamReply) -> None:
    close = getattr(reply.chunks, "aclose", None)
    if close is None:
        return
    try:
        await close()
    except Exception:
        _log.exception("closing the source of an answer")
