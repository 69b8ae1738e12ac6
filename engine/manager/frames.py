"""Framed connections: 4 bytes of length, big endian, then one MessagePack value of `messages.py`.

Used on three paths: the daemon's requests to its own manager (a Unix socket), an agent's session
with a manager (mutual TLS, or the Unix socket on managers), and requests between managers (mutual
TLS). Both sides may ask: a request carries `seq`, positive from the side that connected and
negative from the other, and is answered by one or several messages of the same `seq`.

Owns:    one transport, its reading task, and the answers that are waited for.
Threads: the event loop's.
Raises:  ConnectionError when the connection is lost, the kinds of `errors` for `Refused` answers.
"""

from __future__ import annotations

import asyncio
import itertools
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import msgspec

from engine import errors
from engine.errors import EngineError, ServerError
from engine.manager import messages
from engine.manager.messages import Message, Refused
from engine.system.tasks import spawn

LONGEST = 64 << 20
"""Bytes of the longest message: a whole set of assignments."""
UNIDENTIFIED_LONGEST = 64 << 10
"""Bytes of the longest message of a peer that has shown no certificate."""
HIGH_WATER = 4 << 20
"""Bytes that may wait to be sent before `send` waits."""

ALPN = "engined-swarm/1"

Serve = Callable[["Connection", Message], Awaitable[None]]

_decoder = msgspec.msgpack.Decoder(messages.ANY)
_encoder = msgspec.msgpack.Encoder()


class Connection:
    """One connection, from either side.

    `serve(connection, message)` is called as a task for each request and each report of the peer;
    what it raises is answered as `Refused`. `beats` are handled by `on_beat` at once, without a
    task.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        serve: Serve,
        *,
        dialled: bool,
        longest: int = LONGEST,
    ) -> None:
        self.reader, self.writer = reader, writer
        self.longest = longest
        self.on_beat: Callable[[], None] | None = None
        self.closed = asyncio.Event()
        self._serve = serve
        self._numbers = itertools.count(1) if dialled else itertools.count(-1, -1)
        self._answers: dict[int, asyncio.Queue[Message | None]] = {}
        self._serving: set[asyncio.Task[None]] = set()
        self._reports: asyncio.Queue[Message] | None = None

    @property
    def certificate(self) -> bytes | None:
        """The peer's certificate, DER, that TLS has verified; None without one."""
        session = self.writer.get_extra_info("ssl_object")
        return None if session is None else session.getpeercert(binary_form=True)

    @property
    def peer(self) -> str:
        """The peer's address without port; "" on a Unix socket."""
        name = self.writer.get_extra_info("peername")
        return name[0] if isinstance(name, tuple) else ""

    @property
    def local(self) -> str:
        """The own address of this connection; "" on a Unix socket."""
        name = self.writer.get_extra_info("sockname")
        return name[0] if isinstance(name, tuple) else ""

    async def run(self) -> None:
        """Read until the connection ends. Reports (messages without `seq`) are served one after
        another, in their order; requests at once, side by side.
        """
        reports: asyncio.Queue[Message] = asyncio.Queue()
        in_order = spawn(self._serve_reports(reports), "manager: reports of a connection")
        try:
            while True:
                size = int.from_bytes(await self.reader.readexactly(4), "big")
                if size > self.longest:
                    break
                message = _decoder.decode(await self.reader.readexactly(size))
                self._take(message, reports)
        except (asyncio.IncompleteReadError, ConnectionError, OSError, msgspec.DecodeError, ssl.SSLError):
            pass
        finally:
            in_order.cancel()
            self._end()

    def _take(self, message: Message, reports: asyncio.Queue[Message]) -> None:
        if isinstance(message, messages.Beat):
            if self.on_beat is not None:
                self.on_beat()
            return
        seq = getattr(message, "seq", 0)
        waiting = self._answers.get(seq)
        if waiting is not None:
            waiting.put_nowait(message)
        elif seq == 0:
            reports.put_nowait(message)
        elif not isinstance(message, messages.ANSWERS):
            task = spawn(self._answer(message, seq), f"manager: {type(message).__name__}")
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)

    async def _serve_reports(self, reports: asyncio.Queue[Message]) -> None:
        while True:
            message = await reports.get()
            try:
                await self._serve(self, message)
            except EngineError as error:
                await self.send(messages.Bye(reason=error.message))

    async def _answer(self, message: Message, seq: int) -> None:
        try:
            await self._serve(self, message)
        except EngineError as error:
            with suppress(ConnectionError):
                await self.send(Refused(seq=seq, kind=type(error).__name__, message=error.message))
        except ConnectionError:
            pass
        except Exception as error:
            with suppress(ConnectionError):
                await self.send(Refused(seq=seq, kind="ServerError", message=f"{type(error).__name__}: {error}"))
            raise

    def write(self, message: Message) -> None:
        """Send without waiting for room. Does nothing after the end."""
        if not self.closed.is_set():
            body = _encoder.encode(message)
            self.writer.write(len(body).to_bytes(4, "big") + body)

    async def send(self, message: Message) -> None:
        """Send, and wait while much is unsent. Raises ConnectionError."""
        if self.closed.is_set():
            raise ConnectionError("the connection has ended")
        self.write(message)
        await self.writer.drain()

    def number(self) -> int:
        """The `seq` of the next request of this side."""
        return next(self._numbers)

    async def ask(self, message: Any, *, timeout: float | None = None) -> Any:
        """Send a request, whose `seq` is set here, and return its answer.

        Raises the kind that the peer refused with, ConnectionError, TimeoutError.
        """
        async with asyncio.timeout(timeout):
            async for answer in self.ask_for_many(message):
                return answer
        raise ConnectionError("the connection has ended")

    async def ask_for_many(self, message: Any) -> AsyncIterator[Any]:
        """Send a request, and yield every answer until the caller stops, or until `Ended`. The peer
        is sent `Cancel` when the caller stops before.

        Raises the kind that the peer refused with, ConnectionError.
        """
        seq = self.number()
        answers: asyncio.Queue[Message | None] = asyncio.Queue()
        self._answers[seq] = answers
        ended = False
        try:
            await self.send(msgspec.structs.replace(message, seq=seq))
            while True:
                answer = await answers.get()
                if answer is None:
                    ended = True
                    raise ConnectionError("the connection has ended")
                if isinstance(answer, Refused):
                    ended = True
                    raise refusal(answer)
                if isinstance(answer, messages.Ended):
                    ended = True
                    return
                yield answer
        finally:
            del self._answers[seq]
            if not ended and isinstance(message, messages.STREAMED):
                self.write(messages.Cancel(of=seq))

    def _end(self) -> None:
        self.closed.set()
        for answers in self._answers.values():
            answers.put_nowait(None)
        for task in list(self._serving):
            task.cancel()
        self.writer.close()

    async def close(self) -> None:
        """End the connection. What was written is sent first."""
        self.writer.close()
        with suppress(ConnectionError, OSError, ssl.SSLError):
            await self.writer.wait_closed()


def refusal(answer: Refused) -> EngineError:
    """The error that a peer's `Refused` stands for."""
    kind = getattr(errors, answer.kind, ServerError)
    if not (isinstance(kind, type) and issubclass(kind, EngineError)):
        kind = ServerError
    return kind(answer.message)
