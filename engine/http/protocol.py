"""One client's connection: bytes to requests, answers to bytes, and the hand-over of hijacked
streams.

A connection answers one request at a time, in the order of arrival. Bytes after the end of the
current request are kept until it is answered, because only then is it known whether they are
another request or the beginning of a hijacked stream. `phases.py` has the table of a connection's
phases. An answer that the handler returns directly is written within `data_received`, without a
task. Memory per connection is bounded: body bytes that wait for the handler, input that waits for
its turn, and output that waits for the client each pause reading from the socket.

Owns:    the transport, until it is lost or handed over. No exception, future or finished task may
         keep a reference to a body. Otherwise the memory of aborted requests would be freed only by
         the garbage collector.
Threads: the event loop's.
Not here: heads (`head.py`), the receiving of a body (`upload.py`), bytes of answers (`answer.py`),
the hand-over (`hijack.py`), the client's process or host (`peers.py`), listeners and deadlines
(`server.py`), TLS (`tls.py`), the meaning of a request (the application).
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from engine.errors import EngineError, InvalidParameter, RequestTimeout, ServerError
from engine.http import peers
from engine.http.answer import CONTINUE, JOIN_LIMIT, LAST_CHUNK, chunk_pieces
from engine.http.borrowed import BorrowedBody
from engine.http.budget import Budget
from engine.http.head import KNOWN_HEAD, Head, HeadReader
from engine.http.hijack import Hijack, HijackReply
from engine.http.messages import BODY_WAITING, NO_BODY, AnyReply, Body, Reply, Request, StreamReply
from engine.http.phases import (
    COMPLETE,
    DRAINING,
    FOLLOWS,
    GONE,
    HANDLING,
    HEAD,
    HELD,
    HIJACKED,
    LINGER,
    STREAMING,
    Incoming,
    Phase,
)
from engine.http.tls import TlsTransport
from engine.http.upload import Upload

if TYPE_CHECKING:
    from engine.http.server import Application, Server

_log = logging.getLogger(__name__)

INPUT_WAITING = 64 * 1024
"""Bytes of later requests that are kept before reading is paused."""

DRAIN_LIMIT = 256 * 1024
"""Bytes of an unread body that are received and dropped to keep the connection. If more are
outstanding, the connection is closed.
"""

HIJACK_BODY_LIMIT = 128 * 1024
"""Largest body of a request to hijack. Less than `BODY_WAITING`, because it is kept whole.
"""

TOGETHER, PIECES = 8 * 1024, 16
"""Bytes and number of pieces of a streamed answer that are written at once. Others wait for the end
of the loop's turn.
"""

_CLIENT_LEFT = "the client left in the middle of its request"
_SHUT_DOWN = "the connection was shut down in the middle of a request's body"


class Connection(asyncio.Protocol):
    """See the module."""

    __slots__ = (
        "_absorb",
        "_application",
        "_consuming",
        "_drained",
        "_eof",
        "_guard",
        "_heads",
        "_hijack",
        "_http10",
        "_input",
        "_lines",
        "_loop",
        "_paused",
        "_phase",
        "_pieces",
        "_request",
        "_server",
        "_task",
        "_transport",
        "_unsent",
        "_upload",
        "_write_blocked",
        "budget",
        "deadline",
    )

    def __init__(self, server: Server, guard: Callable[[Request], None] | None = None) -> None:
        """`guard` raises an error for a request that must not be handled."""
        self._server = server
        self._guard = guard
        self._application = server.application
        self._heads = server.heads
        self._loop = asyncio.get_running_loop()
        # asyncio.Transport, or TlsTransport, which has the same interface
        self._transport: Any = None
        self._phase = HEAD
        self._lines = HeadReader(server.limits.head)
        self.budget: Budget = server.budget
        """See `upload.Carrier`."""
        self.deadline = 0.0
        """Of the loop's clock, while `server.timed` has this connection."""
        # the current request
        self._request: Request | None = None
        self._http10 = False
        self._upload: Upload | None = None  # None when the request has no body
        self._absorb = 0  # bytes of the body that may still be dropped in DRAINING
        self._task: asyncio.Task[None] | None = None
        self._hijack: Hijack | None = None
        # flow
        self._input = b""  # input that waits until the current request is answered
        # within `_consume`: its data, and the end of the request in it
        self._consuming: tuple[bytes, int] | None = None
        self._paused = False
        self._eof = False
        self._unsent = 0
        self._pieces: list[bytes] = []  # of a streamed answer, for this turn of the loop (`_put`)
        self._write_blocked = False
        self._drained: asyncio.Future[None] | None = None

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def incoming(self) -> Incoming:
        """The state of the current request's body."""
        return self._upload.incoming if self._upload is not None else COMPLETE

    @property
    def _arriving(self) -> bool:
        """Bytes of the current request's body are still to come."""
        return self._upload is not None and not self._upload.done

    def _enter(self, phase: Phase) -> None:
        """Enter another phase. Nothing else changes the phase. Raises RuntimeError for a phase that
        may not follow, which is a bug of this module.
        """
        if phase not in FOLLOWS[self._phase]:
            raise RuntimeError(f"a connection in {self._phase} cannot enter {phase}")
        self._phase = phase

    def serve(self, application: Application) -> None:
        """Requests that begin from now on are this application's."""
        self._application = application

    # --- asyncio.Protocol -------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._server.opened(self)
        if self._server.closing:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        if self._input:
            self._input += data
            self.regulate()
            return
        fresh = self._phase is HEAD and not self._lines.size and not self._write_blocked
        known = self._server.known_heads.get(data) if fresh and len(data) <= KNOWN_HEAD else None
        if known is None:
            self._consume(data)
            return
        self._begin(known)
        if self._phase is HELD:
            self._release_held()
        else:
            self._dispatch()

    def eof_received(self) -> bool:
        """The client has sent its EOF.

        Returns True to keep the connection, because an answer may still be due.
        """
        self._eof = True
        if self._phase is LINGER or (self._phase is HEAD and not self._lines.size and not self._input):
            return False
        self._after_eof()
        return True

    def _after_eof(self) -> None:
        """All bytes that the client has sent were read, or wait in `_input`."""
        if self._input or self._phase is HIJACKED:
            return
        if self._phase is HEAD:
            if self._lines.size:
                self._refuse(InvalidParameter("the connection was shut down in the middle of a request's head"))
            else:
                self._close()
        elif self._phase.active and self._arriving:
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
        if self._request is not None:
            self._request.body.end(_CLIENT_LEFT)
        if self._upload is not None:
            self._upload.cut()
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        if self._task is None:
            self._forget()
        elif streaming or (self._request is not None and self._request.cancellable):
            self._task.cancel()

    def _forget(self) -> None:
        """Break the reference cycles with request and body, so that their memory is freed at
        once.
        """
        if self._request is not None:
            self._request.body.discard()
        if self._hijack is not None:
            self._hijack.cancel()
        self._request = self._upload = self._task = self._hijack = None

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
        """Parse as much as the phase allows, and keep the rest."""
        start, size = 0, len(data)
        while start < size:
            if self._phase is HEAD and not self._write_blocked:
                self._consuming = data, size
                start = self._read_head(data, start)
            elif self._phase.active and self._arriving:
                self._consuming = data, size
                start = self._read_body(data, start)
            elif self._phase is LINGER or self._phase is GONE:
                break
            else:
                self._input = data[start:]
                break
        self._consuming = None
        self.regulate()

    def _continue_input(self) -> None:
        if self._input and (self._phase is HEAD or (self._phase.active and self._phase is not HIJACKED)):
            data, self._input = self._input, b""
            self._consume(data)
            if self._eof:
                self._after_eof()

    def regulate(self) -> None:
        """Read from the socket only while there is room for more input."""
        if self._upload is not None and self._upload.lent:
            return
        request = self._request
        full = len(self._input) > INPUT_WAITING or (request is not None and request.body.waiting > BODY_WAITING)
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
        if head.repeatable and fresh and not start and end == len(data):
            self._server.known_heads.keep(data, head)
        if self._upload is not None:
            end = self._read_body(data, end)
            if not self._phase.active:
                return len(data)
            if self._request is not None and self._request.body.failure:
                self._refuse(self._request.body.error())
                return len(data)
        self._consuming = data, end
        if not held:
            self._dispatch()
        elif head.reader is None:
            self._release_held()
        elif self._arriving:
            self.watch_body()
        return end

    def _begin(self, head: Head) -> None:
        """A head is complete.

        The part of the body that was received with it is read before the handler runs.
        """
        reader = head.reader
        self._http10 = head.http10
        if reader is None:
            body = NO_BODY
        else:
            self._upload = Upload(self, reader, head.expects)
            body = Body(self._upload, announced=reader.left)
        self._request = Request(
            head.method,
            head.path,
            head.query,
            head.headers,
            body,
            target=head.target,
            keep=head.keep,
            upgrade=head.upgrade,
            connection=self,
        )
        # A request to hijack runs when its body is complete and all earlier answers are written.
        # Other requests need no such wait.
        waits = reader is not None or self._transport.get_write_buffer_size()
        self._enter(HELD if waits and self._application.is_hijack(head.method, head.path) else HANDLING)

    def _release_held(self) -> None:
        """Run the handler of a request to hijack, once the connection can be hijacked."""
        if self._arriving:
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
        upload, request = self._upload, self._request
        assert upload is not None and request is not None
        body = request.body
        draining = self._phase is DRAINING
        try:
            end = upload.read(data, start, None if draining else body)
        except InvalidParameter as error:
            self._fail_body(error.message)
            return len(data)
        if not draining and end > start and self._phase is not HELD:
            self._unwatch()
        if draining:
            self._absorb -= end - start
            if self._absorb < 0 and not upload.done:
                self._close()
                return len(data)
        elif self._phase is HELD and body.waiting > HIJACK_BODY_LIMIT:
            self._refuse(InvalidParameter(f"the body of this request is larger than {HIJACK_BODY_LIMIT} bytes"))
            return len(data)
        if upload.done:
            self._unwatch()
            body.end()
            if draining:
                self._finish()
            elif self._phase is HELD:
                self._release_held()
        elif draining or self._phase is HELD:
            self._watch(self._server.limits.body_seconds)
        return end

    def _fail_body(self, failure: str, *, late: bool = False) -> None:
        """The body is cut off or malformed: its reader gets the failure, or the client when there
        is no reader. `late`: bytes did not arrive in time.
        """
        if self._phase is DRAINING:
            self._close()
            return
        assert self._request is not None
        body = self._request.body
        body.end(failure, late=late)
        if self._phase is HELD:
            self._refuse(body.error())
        else:
            self._input = b""

    # the upload's carrier (`upload.Carrier`)

    @property
    def owner(self) -> str:
        return peers.owner(self._transport)

    @property
    def body_seconds(self) -> float:
        return self._server.limits.body_seconds

    def watch_body(self) -> None:
        if self._phase.active and self._upload is not None:
            self._upload.send_continue()
            self._watch(self._server.limits.body_seconds)

    def send_continue(self) -> None:
        self._transport.write(CONTINUE)

    def lend(self) -> int | None:
        connection = self._transport.get_extra_info("socket")
        if (
            (self._phase is not HANDLING and self._phase is not STREAMING)
            or self._eof
            or connection is None
            or isinstance(self._transport, TlsTransport)
            or self._transport.is_closing()
        ):
            return None
        try:
            descriptor = os.dup(connection.fileno())
        except OSError:  # no descriptor is free: the body goes through the loop, which needs none
            return None
        self._unwatch()
        if not self._paused:
            self._paused = True
            self._transport.pause_reading()
        return descriptor

    def take_back(self, loan: BorrowedBody) -> None:
        unread = loan.close()
        if not self._phase.active:
            return
        assert self._request is not None
        if loan.failure:
            self._fail_body(loan.failure, late=loan.late)
            unread = b""
        elif not self._arriving:
            self._request.body.end()
        self._consume(unread)

    # --- answers ----------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        request = self._request
        assert request is not None
        try:
            if self._guard is not None:
                self._guard(request)
            result = self._application(request)
        except Exception as error:
            self._answer(self._application.error_reply(error))
            return
        # Not `tasks.spawn`: both report their own failures, and most requests make one of them.
        if isinstance(result, Reply):
            self._answer(result)
        elif isinstance(result, StreamReply):
            # first, so that chunks that are there already are written together with the head
            self._task = self._loop.create_task(self._stream(result))
            self._begin_stream(result)
        elif not isinstance(result, HijackReply):
            self._task = self._loop.create_task(self._run(result))

    async def _run(self, awaitable: Awaitable[AnyReply]) -> None:
        """Run a handler that waits."""
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
            self._answer(result)

    def _cut_off(self) -> None:
        """The task that answers was cancelled."""
        if self._phase is GONE:
            self._forget()
        elif self._phase.active:
            self._transport.abort()

    def _answer(self, reply: Reply) -> None:
        """Write a complete answer. One that cannot be written ends the connection."""
        request = self._request
        assert request is not None
        try:
            if self._phase is HIJACKED:
                self._cancel_hijack()
            keep = self._may_keep()
            head, body = self._heads.reply(reply, keep=keep, http10=self._http10, only_head=request.method == "HEAD")
            if len(body) <= JOIN_LIMIT:
                self._transport.write(head + body)
            else:
                self._transport.writelines((head, body))
            self._answered(keep)
        except Exception:
            self._give_up(request)

    def _give_up(self, request: Request) -> None:
        """An answer could not be encoded, which is a bug."""
        _log.exception("%s %s: the answer could not be written", request.method, request.path)
        self._transport.abort()

    def _may_keep(self, *, later: bool = False) -> bool:
        """True if the connection can take another request after this answer. `later`: the handler
        may still read the body.
        """
        request, upload = self._request, self._upload
        if request is None or not request.keep or self._server.closing:
            return False
        if upload is None or upload.done:
            return True
        if upload.continue_due or request.body.ended:
            return False
        return later or upload.at_most(DRAIN_LIMIT)

    def _answered(self, keep: bool) -> None:
        """The answer is written. The request's body may not have arrived completely."""
        if not keep:
            self._close()
        elif self._upload is None or self._upload.done:
            self._finish()
        else:
            assert self._request is not None
            self._request.body.discard()
            self._absorb = DRAIN_LIMIT
            self._enter(DRAINING)
            self._watch(self._server.limits.body_seconds)
            self.regulate()

    def _finish(self) -> None:
        """Ready for the next request."""
        self._request = self._upload = None
        self._lines.first = False
        self._enter(HEAD)
        if self._consuming is not None:
            return  # the next request is read in the same turn
        if self._input:
            self._continue_input()
        elif self._eof:
            self._after_eof()
        elif self._paused:
            self.regulate()

    # streams

    def _begin_stream(self, reply: StreamReply) -> None:
        """Write the head of a streamed answer."""
        request = self._request
        assert request is not None
        try:
            if self._phase is HIJACKED:
                self._cancel_hijack()
            if self._upload is not None:
                # now, because the chunks may be made from the body: later it would be in the middle
                # of them
                self._upload.send_continue()
            keep = not self._http10 and self._may_keep(later=True)
            head = self._heads.stream(reply, keep=keep, http10=self._http10)
            self._enter(STREAMING)
            self._put((head,))
            request.keep = keep
        except Exception:
            self._give_up(request)  # `_stream` closes the chunks

    async def _stream(self, reply: StreamReply) -> None:
        """Write chunks as fast as the client reads them. Ends with the chunks, the client's
        connection, or the server.
        """
        request, chunked = self._request, not self._http10
        try:
            if request is not None and request.method != "HEAD" and self._phase is STREAMING:
                async for chunk in reply.chunks:
                    if self._phase is not STREAMING:
                        break
                    if chunk:
                        self._put(chunk_pieces(chunk) if chunked else (chunk,))
                        if self._write_blocked:
                            await self._drain()
                else:
                    if chunked and self._phase is STREAMING:
                        self._put((LAST_CHUNK,))
        except Exception as error:
            # The head is written, so the client can only be shown that the stream is incomplete.
            if self._phase is STREAMING:
                # not a bug: the client has disconnected
                known = isinstance(error, EngineError)
                _log.log(
                    logging.WARNING if known else logging.ERROR,
                    "%s %s: the answer broke off: %s",
                    request and request.method,
                    request and request.path,
                    str(error),
                    exc_info=not known,
                )
                self._put_out()
                self._transport.abort()
        except asyncio.CancelledError:
            self._cut_off()
            raise
        finally:
            await _close_chunks(reply)
        self._put_out()
        self._task = None
        if self._phase is GONE:
            self._forget()
        elif self._phase is STREAMING and not self._transport.is_closing():
            self._answered(self._may_keep() and chunked)

    def _put(self, pieces: tuple[bytes, ...]) -> None:
        """Write these pieces of a streamed answer in this turn of the loop, together with others.
        Each write is a system call, and may wake the client for a head or an end alone.
        """
        if not self._pieces:
            self._loop.call_soon(self._put_out)
        self._pieces += pieces
        if len(self._pieces) > PIECES or sum(map(len, self._pieces)) > TOGETHER:
            self._put_out()

    def _put_out(self) -> None:
        pieces, self._pieces = self._pieces, []
        if pieces and self._phase is STREAMING and not self._transport.is_closing():
            self._transport.write(pieces[0]) if len(pieces) == 1 else self._transport.writelines(pieces)

    async def _drain(self) -> None:
        self._drained = self._loop.create_future()
        try:
            await self._drained
        finally:
            self._drained = None

    # --- hijacking --------------------------------------------------------------------------------

    def hijack(self, request: Request, content_type: str, protocol: str = "tcp") -> Hijack:
        """See `Request.hijack`."""
        if request is not self._request or not self._phase.active or self._transport.is_closing():
            raise ServerError("the client has left")
        if self._phase is not HANDLING or self._arriving or self._transport.get_write_buffer_size():
            raise ServerError(f"{request.method} {request.path}: the connection cannot be hijacked now")
        self._enter(HIJACKED)
        if not self._paused and not self._eof:
            self._transport.pause_reading()
        self._hijack = Hijack(self, self._heads.hijacked(content_type, request.upgrade, protocol), self._input)
        return self._hijack

    def certificate(self) -> peers.Certificate | None:
        """See `Request.certificate`."""
        return peers.certificate(self._transport)

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
            # The duplicate keeps the client's socket open: closing this descriptor does not shut it
            # down.
            transport.abort()

    def _cancel_hijack(self) -> None:
        """The handler failed: continue with HTTP, unless bytes of the stream have arrived, which
        look like a request.
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
        """Answer a malformed request, and close, because the end of that request is unknown."""
        self._unwatch()
        only_head = self._request is not None and self._request.method == "HEAD"
        reply = self._application.error_reply(error)
        self._transport.write(b"".join(self._heads.reply(reply, keep=False, http10=False, only_head=only_head)))
        self._close(unread=True)

    def _close(self, unread: bool = False) -> None:
        """Close in such a way that the client gets the whole answer: closing with unread input
        would reset the connection.
        """
        unread = (unread or self._arriving or bool(self._input)) and not self._eof
        self._enter(LINGER)
        if self._request is not None:
            self._request.body.discard()
        self._request = None
        if self._upload is not None and not self._upload.lent:
            self._upload = None
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
        """Called by the server: the deadline has passed."""
        self._unwatch()
        limits = self._server.limits
        if self._phase is HEAD:
            self._refuse(RequestTimeout(f"the request's head was not complete within {limits.head_seconds:g} s"))
        elif self._phase.active and self._arriving:
            self._fail_body(f"no byte of the request's body came for {limits.body_seconds:g} s", late=True)
        elif self._phase is LINGER:
            unsent = self._transport.get_write_buffer_size()
            if unsent and unsent != self._unsent:
                self._unsent = unsent  # the client is slow, but it still reads its answer
                self._watch(limits.body_seconds)
            else:
                self._transport.abort()

    def check_hangup(self) -> None:
        """After EOF, while the answer has no end of its own: check whether the client has only
        half-closed the connection or has closed it. On a Unix socket the two differ (POLLHUP). On
        TCP they do not, and EOF counts as closed, as in Go's server.
        """
        if not self._phase.active or self._transport.is_closing():
            self._server.half_open.discard(self)
            return
        if peers.hung_up(self._transport) is False:
            self._server.watch_half_open(self)
        else:
            self._transport.abort()

    def shut(self) -> None:
        """Called by the server when it closes. Idle connections and endless answers end now, others
        with their answer.
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
        """Called by the server: the grace period is over."""
        if self._task is not None:
            self._task.cancel()
        self._transport.abort()

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
