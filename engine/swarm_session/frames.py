"""Framed connections: 4 bytes of length, big endian, then one MessagePack value of `messages.py`.

Used on three paths: the daemon's requests to its own manager (a Unix socket), an agent's session
with a manager (mutual TLS, or the Unix socket on managers), and requests between managers (mutual
TLS). Both sides may ask: a request carries `seq`, positive from the side that connected and
negative from the other, and is answered by one or several messages of the same `seq`.

Bounds. No peer makes this side's memory grow without limit: a message has a longest length, a
connection a largest number of requests that are served at once and of reports that wait, a stream
of answers a window (`Credit`). A peer that sends part of a message and stops, or does not read what
it is sent, loses the connection after `STALL`. The kernel ends connections of peers that have
vanished (`_watch_peer`).

Messages of a later version are refused by name, and the connection goes on.

Owns:    one transport, its reading task, the tasks that serve the peer's requests, and the answers
         that are waited for.
Threads: the event loop's.
Raises:  ConnectionError when the connection is lost, the kinds of `errors` for `Refused` answers.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import struct
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import msgspec

from engine import errors
from engine.errors import BUG, EngineError, ServerError, Unavailable, decoding_reason, words
from engine.swarm_session import messages
from engine.swarm_session.messages import Message, Refused
from engine.system.tasks import spawn

LONGEST = 64 << 20
"""Bytes of the longest message: a whole set of assignments."""
UNIDENTIFIED_LONGEST = 64 << 10
"""Bytes of the longest message of a peer that has shown no certificate."""
HIGH_WATER = 1 << 20
"""Unsent bytes above which `send` waits."""
STALL = 30.0
"""Seconds that a peer may take for the next part of a message, or to make room for one."""
CLOSING = 5.0
"""Seconds for what was written before `close`."""
MOST_REQUESTS = 1024
"""Requests of the peer that are served at once. More are refused."""
MOST_REPORTS = 10_000
"""Reports that wait to be served. The connection ends when there are more: reading must go on, as
a report that is being served may itself wait for an answer of this peer."""
WINDOW = 64
"""Answers of a stream that its reader has not read yet, when `stream` waits."""
MOST_LINES = 10
LONGEST_LINE = 300
"""Lines in the log about messages of one connection, and characters of one: no peer fills it."""

ALPN = "engined-swarm/1"

_LAST_RECEIVED = struct.Struct("=52xII")
"""tcpi_last_data_recv and tcpi_last_ack_recv of struct tcp_info (linux/tcp.h): milliseconds."""

Serve = Callable[["Connection", Message], Awaitable[None]]

_log = logging.getLogger(__name__)
_decode = msgspec.msgpack.Decoder(messages.ANY).decode
_encode = msgspec.msgpack.Encoder().encode
_SLICE = 64
"""Messages after which the reader gives way: a flood must not hold the event loop."""


class _Head(msgspec.Struct):
    """What can be read of any message."""

    tag: str = msgspec.field(name="!")
    seq: int = 0


_decode_head = msgspec.msgpack.Decoder(_Head).decode


class _Serving:
    """A request of the peer that is being served."""

    __slots__ = ("room", "task", "unread")

    def __init__(self, task: asyncio.Task[None]) -> None:
        self.task = task
        self.unread = 0
        self.room = asyncio.Event()


class Connection:
    """One connection, from either side.

    `serve(connection, message)` is called as a task for each request, and in order for each report
    (a message without `seq`) of the peer. What it raises for a request is answered as `Refused`. It
    never sees `Beat`, `Cancel` and `Credit`. `on_beat` is called at once, without a task.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        serve: Serve,
        *,
        dialled: bool,
        longest: int = LONGEST,
        most_requests: int = MOST_REQUESTS,
        peer: str = "",
    ) -> None:
        """`peer`: the peer's address, where it is known: a connection that has ended already, as
        its peer has reset it, does not have it any more.
        """
        self.reader, self.writer = reader, writer
        self.longest = longest
        self.most_requests = most_requests
        self.on_beat: Callable[[], None] | None = None
        self.closed = asyncio.Event()
        self._serve = serve
        self._dialled = dialled
        self._numbers = itertools.count(1) if dialled else itertools.count(-1, -1)
        self._asked: dict[int, asyncio.Future[Message | None]] = {}
        self._streams: dict[int, asyncio.Queue[Message | None]] = {}
        self._serving: dict[int, _Serving] = {}
        self._reports: asyncio.Queue[Message] = asyncio.Queue()
        self._lines = 0
        """In the log, about messages of the peer."""
        writer.transport.set_write_buffer_limits(high=HIGH_WATER)
        self._peer = _plain(peer) or self._address("peername")
        self._local = self._address("sockname")
        _watch_peer(self._known("socket"))

    def _known(self, name: str) -> Any:
        """What the transport knows; None when it has ended."""
        with suppress(OSError, ValueError, AttributeError):  # uvloop asks a socket that is gone
            return self.writer.get_extra_info(name)
        return None

    def _address(self, name: str) -> str:
        found = self._known(name)
        return _plain(found[0]) if isinstance(found, tuple) else ""

    @property
    def certificate(self) -> bytes | None:
        """The peer's certificate, DER, that TLS has verified; None without one."""
        session = self._known("ssl_object")
        return None if session is None else session.getpeercert(binary_form=True)

    @property
    def peer(self) -> str:
        """The peer's address without port; "" on a Unix socket."""
        return self._peer

    @property
    def local(self) -> str:
        """The own address of this connection; "" on a Unix socket."""
        return self._local

    @property
    def backlog(self) -> int:
        """Bytes that are written and not sent."""
        return 0 if self.closed.is_set() else self.writer.transport.get_write_buffer_size()

    @property
    def silence(self) -> float:
        """Seconds since the kernel has heard of the peer's host, be it an acknowledgement alone; 0
        on a Unix socket, and when the connection has ended. See `watch_closely`.
        """
        if self.closed.is_set():
            return 0.0
        sock = self._known("socket")
        if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
            return 0.0
        try:
            info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_RECEIVED.size)
        except (OSError, ValueError):  # it has ended
            return 0.0
        since: tuple[int, int] = _LAST_RECEIVED.unpack(info)
        return min(since) / 1000

    def watch_closely(self) -> None:
        """Have the kernel ask for an acknowledgement each second, so that `silence` shows a lost
        link. That costs the kernel a packet, and this process nothing.
        """
        sock = self._known("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            with suppress(OSError, ValueError):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)

    # --- reading ----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Read until the connection ends. Reports are served one after another, in their order;
        requests at once, side by side.
        """
        reports = spawn(self._serve_reports(), "manager: reports of a connection")
        try:
            for count in itertools.count(1):
                size = int.from_bytes(await self.reader.readexactly(4), "big")
                if size > self.longest:
                    self._lost(f"a message of {size} bytes, at most {self.longest} are allowed")
                    return
                self._take(await self._body(size))
                if not count % _SLICE:
                    await asyncio.sleep(0)
        except asyncio.IncompleteReadError:
            pass
        except TimeoutError:
            self._lost("the rest of a message did not come")
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self._lost(words(error))
        finally:
            reports.cancel()
            self._end()

    async def _body(self, size: int) -> bytes:
        if size <= HIGH_WATER:
            async with asyncio.timeout(STALL):
                return await self.reader.readexactly(size)
        body = bytearray()
        while len(body) < size:
            async with asyncio.timeout(STALL):
                part = await self.reader.read(min(size - len(body), HIGH_WATER))
            if not part:
                raise asyncio.IncompleteReadError(bytes(body), size)
            body += part
        return bytes(body)

    def _take(self, body: bytes) -> None:
        try:
            message = _decode(body)
        except msgspec.ValidationError as error:
            self._not_understood(body, decoding_reason(error))
            return
        match message:
            case messages.Beat():
                if self.on_beat is not None:
                    self.on_beat()
                return
            case messages.Cancel(of=number):
                if (serving := self._serving.get(number)) is not None:
                    serving.task.cancel()
                return
            case messages.Credit(of=number, answers=answers):
                if (serving := self._serving.get(number)) is not None:
                    serving.unread = max(0, serving.unread - max(0, answers))
                    serving.room.set()
                return
        seq: int = getattr(message, "seq", 0)
        if seq == 0:
            if self._reports.qsize() >= MOST_REPORTS:
                raise ConnectionError(f"{MOST_REPORTS} reports wait to be served")
            self._reports.put_nowait(message)
        elif (seq > 0) == self._dialled:
            if isinstance(message, messages.ANSWERS):
                self._answered(seq, message)
        else:
            self._begin(message, seq)

    def _not_understood(self, body: bytes, why: str) -> None:
        """A message of another version, or a wrong one. Raises ValidationError when it is none at
        all.
        """
        head = _decode_head(body)
        text = f"the message {head.tag[:64]!r} is not understood: {why[:LONGEST_LINE]}"
        self._warn(text)
        if head.seq == 0:
            return
        if (head.seq > 0) == self._dialled:
            self._answered(head.seq, Refused(seq=head.seq, kind="ServerError", message=text))
        else:
            self.write(Refused(seq=head.seq, kind="InvalidParameter", message=text))

    def _warn(self, text: str) -> None:
        """Log a message that cannot be served, the first ones of a connection."""
        self._lines += 1
        if self._lines <= MOST_LINES:
            _log.warning("%s: %s", self.peer or "local", " ".join(text[:LONGEST_LINE].split()))

    # --- requests of the peer ---------------------------------------------------------------------

    async def _serve_reports(self) -> None:
        while True:
            message = await self._reports.get()
            try:
                await self._serve(self, message)
            except (EngineError, ConnectionError) as error:
                if not self.closed.is_set():
                    self._warn(f"{type(message).__name__}: {words(error)}")
            except Exception:
                _log.exception("%s: %s failed", self.peer or "local", type(message).__name__)

    def _begin(self, message: Message, seq: int) -> None:
        if seq in self._serving:
            raise ConnectionError(f"the request {seq} came twice")
        if len(self._serving) >= self.most_requests:
            text = f"{self.most_requests} requests of this connection are being served"
            self.write(Refused(seq=seq, kind=Unavailable.__name__, message=text))
            return
        task = spawn(self._answer(message, seq), f"manager: {type(message).__name__}")
        self._serving[seq] = _Serving(task)
        task.add_done_callback(lambda _: self._serving.pop(seq, None))

    async def _answer(self, message: Message, seq: int) -> None:
        try:
            await self._serve(self, message)
        except EngineError as error:
            self.write(Refused(seq=seq, kind=type(error).__name__, message=error.message))
        except ConnectionError as error:
            if not self.closed.is_set():  # another one, which this request needed
                self.write(Refused(seq=seq, kind=Unavailable.__name__, message=words(error)))
        except Exception:
            self.write(Refused(seq=seq, kind=ServerError.__name__, message=BUG))
            raise

    # --- writing ----------------------------------------------------------------------------------

    def write(self, message: Message) -> None:
        """Send without waiting for room. Does nothing after the end. Raises ServerError for a
        message that is too long.
        """
        if self.closed.is_set() or self.writer.is_closing():
            return
        body = _encode(message)
        if len(body) > LONGEST:
            raise ServerError(f"a message of {len(body)} bytes is too long: {type(message).__name__}")
        self.writer.write(len(body).to_bytes(4, "big") + body)
        if self.writer.transport.get_write_buffer_size() > 2 * LONGEST:
            self.abort("it does not read")

    async def send(self, message: Message) -> None:
        """Send, and wait while much is unsent. Raises ConnectionError."""
        if self.closed.is_set() or self.writer.is_closing():
            raise ConnectionError("the connection has ended")
        self.write(message)
        if self.backlog <= HIGH_WATER:
            return
        try:
            async with asyncio.timeout(STALL):
                await self.writer.drain()
        except TimeoutError:
            self.abort("it does not read")
            raise ConnectionError("the peer does not read") from None

    async def stream(self, message: Any) -> None:
        """Send one of many answers to a request, and wait while its reader has not read `WINDOW` of
        them. Raises ConnectionError.
        """
        serving = self._serving.get(message.seq)
        if serving is not None:
            while serving.unread >= WINDOW:
                serving.room.clear()
                await serving.room.wait()
            serving.unread += 1
        await self.send(message)

    # --- asking -----------------------------------------------------------------------------------

    def number(self) -> int:
        """The `seq` of the next request of this side."""
        return next(self._numbers)

    def _answered(self, seq: int, message: Message) -> None:
        if (asked := self._asked.pop(seq, None)) is not None:
            if not asked.done():
                asked.set_result(message)
        elif (stream := self._streams.get(seq)) is not None:
            if stream.qsize() >= MOST_REPORTS:
                raise ConnectionError(f"{MOST_REPORTS} answers wait to be read")
            stream.put_nowait(message)

    async def ask(self, message: Any, *, timeout: float | None = None) -> Any:
        """Send a request, whose `seq` is set here, and return its answer.

        Raises the kind that the peer refused with, ConnectionError, TimeoutError.
        """
        seq = self.number()
        asked: asyncio.Future[Message | None] = asyncio.get_running_loop().create_future()
        self._asked[seq] = asked
        try:
            async with asyncio.timeout(timeout):
                await self.send(msgspec.structs.replace(message, seq=seq))
                answer = await asked
        finally:
            self._asked.pop(seq, None)
        if answer is None:
            raise ConnectionError("the connection has ended")
        if isinstance(answer, Refused):
            raise refusal(answer)
        return answer

    async def ask_for_many(self, message: Any) -> AsyncGenerator[Any, None]:
        """Send a request, and yield every answer until the caller stops, or until `Ended`. The peer
        is sent `Cancel` when the caller stops before: use `contextlib.aclosing`.

        Raises the kind that the peer refused with, ConnectionError.
        """
        seq = self.number()
        answers: asyncio.Queue[Message | None] = asyncio.Queue()
        self._streams[seq] = answers
        ended = False
        read = 0
        try:
            await self.send(msgspec.structs.replace(message, seq=seq))
            while True:
                answer = await answers.get()
                ended = answer is None or isinstance(answer, Refused | messages.Ended)
                if answer is None:
                    raise ConnectionError("the connection has ended")
                if isinstance(answer, Refused):
                    raise refusal(answer)
                if isinstance(answer, messages.Ended):
                    return
                yield answer
                read += 1
                if read == WINDOW // 2:
                    self.write(messages.Credit(of=seq, answers=read))
                    read = 0
        finally:
            del self._streams[seq]
            if not ended:
                self.write(messages.Cancel(of=seq))

    # --- the end ----------------------------------------------------------------------------------

    def _lost(self, why: str) -> None:
        if not self.closed.is_set():
            _log.info("the connection of %s ends: %s", self.peer or "a local process", why)

    def _end(self) -> None:
        self.closed.set()
        for asked in self._asked.values():
            if not asked.done():
                asked.set_result(None)
        for stream in self._streams.values():
            stream.put_nowait(None)
        this = asyncio.current_task()
        for serving in list(self._serving.values()):
            if serving.task is not this:
                serving.task.cancel()
        self.writer.close()

    def abort(self, why: str) -> None:
        """End the connection at once. What was written is lost."""
        self._lost(why)
        self._end()
        self.writer.transport.abort()

    async def close(self) -> None:
        """End the connection. What was written is sent first, for `CLOSING` at most."""
        self._end()
        try:
            async with asyncio.timeout(CLOSING):
                await self.writer.wait_closed()
        except TimeoutError:
            self.writer.transport.abort()
        except OSError:
            pass


def refusal(answer: Refused) -> EngineError:
    """The error that a peer's `Refused` stands for."""
    kind = getattr(errors, answer.kind, ServerError)
    if not (isinstance(kind, type) and issubclass(kind, EngineError)):
        kind = ServerError
    return kind(answer.message)


def _plain(address: str) -> str:
    """An IPv4 address that came over an IPv6 socket, as IPv4."""
    return address.removeprefix("::ffff:") if "." in address else address


def _watch_peer(sock: Any) -> None:
    """Let the kernel end the connection when the peer's host is silent for about 30 s: idle ones by
    keepalive, and those with unacknowledged data by TCP_USER_TIMEOUT (tcp(7)).
    """
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    with suppress(OSError, ValueError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            (socket.TCP_KEEPIDLE, 15),
            (socket.TCP_KEEPINTVL, 5),
            (socket.TCP_KEEPCNT, 3),
            (socket.TCP_USER_TIMEOUT, int(STALL * 1000)),
        ):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
