"""One request and the shapes of its answer, as the application sees them.

Not here: bytes on the wire (`protocol.py`), routes (`router.py`). A request exists until its answer
is written, and belongs to one connection. Nothing here is shared between threads.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Protocol, TypeVar, overload

from engine.errors import InvalidParameter, RequestTimeout, ServerError, TooLarge
from engine.http.borrowed import BorrowedBody
from engine.http.budget import FREE, Budget, Room
from engine.http.hijack import Hijack, HijackReply
from engine.http.peers import Certificate

T = TypeVar("T")

BODY_WAITING = 256 * 1024
"""Bytes of a request body that wait for the handler before reading from the socket is paused."""

_HEX = {f"{octet:02x}".encode(): bytes((octet,)) for octet in range(256)}


def percent_decode(text: bytes, what: str) -> str:
    """Percent-decoding (RFC 3986, 2.1). `what` names the part of the target in the error. Refuses a
    `%` without two hex digits, bytes that are not UTF-8, and NUL.
    """
    if b"%" in text:
        first, *rest = text.split(b"%")
        parts = [first]
        for piece in rest:
            octet = _HEX.get(piece[:2].lower())
            if octet is None:
                raise InvalidParameter(f"bad percent-encoding in {what}: %{piece[:2].decode('latin-1')}")
            parts.append(octet)
            parts.append(piece[2:])
        text = b"".join(parts)
    try:
        decoded = text.decode()
    except UnicodeDecodeError:
        raise InvalidParameter(f"{what} is not UTF-8: {text.decode(errors='replace')}") from None
    if "\0" in decoded:
        raise InvalidParameter(f"{what} contains a NUL")
    return decoded


class Query(Mapping[str, str]):
    """Query parameters, decoded. For a repeated name the first value counts; `get_all` returns all
    of them, in order. Immutable: requests with the same head share one.
    """

    __slots__ = ("_values",)

    def __init__(self, text: bytes = b"") -> None:
        self._values: dict[str, list[str]] = {}
        if text:
            for pair in text.replace(b"+", b" ").split(b"&"):
                if pair:
                    name, _, value = pair.partition(b"=")
                    self._values.setdefault(percent_decode(name, "the query"), []).append(
                        percent_decode(value, "the query")
                    )

    def __getitem__(self, name: str) -> str:
        return self._values[name][0]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    @overload
    def get(self, name: str) -> str | None: ...
    @overload
    def get(self, name: str, default: T) -> str | T: ...

    def get(self, name: str, default: Any = None) -> Any:
        """Most parameters are absent from most requests, and `Mapping.get` would raise and catch
        for each.
        """
        values = self._values.get(name)
        return default if values is None else values[0]

    def get_all(self, name: str) -> tuple[str, ...]:
        return tuple(self._values.get(name, ()))


class Headers:
    """Header fields by lower-case name; values are latin-1 text without surrounding blanks.
    Immutable: requests with the same head share one.
    """

    __slots__ = ("_fields",)

    def __init__(self, fields: Iterable[tuple[bytes, bytes]]) -> None:
        self._fields = tuple(fields)

    def get(self, name: str, default: str = "") -> str:
        """First value of `name`, whatever its case on the wire."""
        wanted = name.lower().encode("latin-1")
        for key, value in self._fields:
            if key.lower() == wanted:
                return value.decode("latin-1").strip()
        return default

    def get_all(self, name: str) -> list[str]:
        wanted = name.lower().encode("latin-1")
        return [value.decode("latin-1").strip() for key, value in self._fields if key.lower() == wanted]

    def __iter__(self) -> Iterator[tuple[bytes, bytes]]:
        """Every field as it was sent."""
        return iter(self._fields)

    def __contains__(self, name: str) -> bool:
        wanted = name.lower().encode("latin-1")
        return any(key.lower() == wanted for key, _ in self._fields)


class Source(Protocol):
    """The interface of a connection that a body uses."""

    @property
    def budget(self) -> Budget:
        """Bounds the bodies that are read whole."""

    @property
    def owner(self) -> str:
        """The client's process or host: see `budget.Upload`."""

    def body_wanted(self) -> None:
        """The handler waits for bytes: send `100 Continue` if it is due, and watch the idle
        limit.
        """

    def body_taken(self) -> None:
        """Fewer than `BODY_WAITING` bytes wait now: reading may continue."""

    def body_borrowed(self, early: Iterable[bytes]) -> BorrowedBody | None:
        """See `Body.borrow`. `early`: bytes that were received already."""


class Body:
    """A request's body: an async iterator of bytes for one reader.

    Raises RequestTimeout when the client stalls, and InvalidParameter when it disconnects or breaks
    the rules of the coding. Each raise makes a new exception: the traceback of a kept one would
    refer to the frames of its readers, and so to their bytes.
    """

    __slots__ = (
        "_announced",
        "_chunks",
        "_kind",
        "_room",
        "_source",
        "_waiter",
        "ended",
        "failure",
        "received",
        "started",
        "waiting",
        "withheld",
    )

    def __init__(self, source: Source | None = None, content: bytes = b"", announced: int | None = None) -> None:
        """Without `source` the body is `content`. `announced`: its Content-Length."""
        self._announced = announced or 0
        self._source = source
        self._chunks: deque[bytes] = deque((content,) if content else ())
        self._waiter: asyncio.Future[None] | None = None
        self._kind: type[InvalidParameter] = InvalidParameter
        self._room: Room | None = None
        """See `read`."""
        self.failure = ""
        """The reason why the body is incomplete; empty when there is none."""
        self.received = len(content)
        """Number of bytes received."""
        self.waiting = len(content)
        """Bytes received and not yet taken."""
        self.ended = source is None
        """The last byte was received, or the body failed."""
        self.started = False
        """The handler asked for the body."""
        self.withheld = False
        """See `withhold`."""

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        self.started = True
        if self.withheld:
            raise ServerError("the body of this request may not be read")
        while not self._chunks:
            if self.failure:
                raise self.error()
            if self.ended:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            if self._source is not None:
                self._source.body_wanted()
            try:
                await self._waiter
            finally:
                self._waiter = None
        chunk = self._chunks.popleft()
        before, self.waiting = self.waiting, self.waiting - len(chunk)
        if before > BODY_WAITING >= self.waiting and self._source is not None:
            self._source.body_taken()
        return chunk

    def borrow(self) -> BorrowedBody | None:
        """Lend the unread part of the body to a worker thread, until `BorrowedBody.give_back`.

        Returns None when the body is complete, and with TLS, because only the loop can read it
        then.
        """
        if self._source is None or self.ended or self.withheld:
            return None
        self.started = True
        borrowed = self._source.body_borrowed(self._chunks)
        if borrowed is not None:
            self._chunks = deque()
            self.waiting = 0
        return borrowed

    async def read(self, limit: int, *, hold: bool = False) -> bytes:
        """The whole body. Raises TooLarge as soon as it is known to be larger than `limit` bytes,
        Unavailable when too many large bodies are being read. `hold`: it counts as being read until
        `release`.
        """
        if self._announced > limit:
            raise TooLarge(f"request body is larger than {limit} bytes")
        budget = self._source.budget if self._source is not None and not self.ended else None
        try:
            if budget is not None and self._announced > FREE:
                self._room = await budget.reserve(self._announced, self)
            content = await self._all(limit, budget)
        except BaseException:
            self.release()
            raise
        if not hold:
            self.release()
        return content

    def release(self) -> None:
        """See `read`."""
        if self._room is not None and self._source is not None:
            self._source.budget.release(self._room)
            self._room = None

    def put_back(self, content: bytes) -> None:
        """Give the bytes, which are the whole body, to the next reader again."""
        if content:
            self._chunks = deque((content,))
            self.waiting = len(content)

    def withhold(self) -> None:
        """Let every reader of the body fail, unless it is empty."""
        self.withheld = bool(self._chunks) or not self.ended

    async def _all(self, limit: int, budget: Budget | None) -> bytes:
        """With a budget, reserve `limit` bytes of it once the body proves to be large."""
        chunks: list[bytes] = []
        size = 0
        async for chunk in self:
            size += len(chunk)
            if size > limit:
                raise TooLarge(f"request body is larger than {limit} bytes")
            chunks.append(chunk)
            if size > FREE and budget is not None and self._room is None:
                self._room = await budget.reserve(limit, self)
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def feed(self, chunk: bytes) -> None:
        """Called by the connection: bytes have arrived."""
        size = len(chunk)
        self._chunks.append(chunk)
        self.received += size
        self.waiting += size
        self._wake()

    def end(self, failure: str = "", *, late: bool = False) -> None:
        """Called by the connection: no more bytes will come, because the body is complete or
        because of `failure`. `late`: the failure is that bytes did not arrive in time. Received
        bytes can still be read.
        """
        if not self.ended:
            self.ended = True
            self.failure = failure
            self._kind = RequestTimeout if late else InvalidParameter
            self._wake()

    def error(self) -> InvalidParameter:
        """A new exception for `failure`."""
        return self._kind(self.failure)

    # for the budget (`budget.Upload`)

    @property
    def owner(self) -> str:
        return self._source.owner if self._source is not None else ""

    def too_slow(self, failure: str) -> None:
        self.end(failure, late=True)

    def discard(self) -> None:
        """Called by the connection: drop waiting bytes, which nothing will read."""
        self._chunks.clear()
        self.waiting = 0

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


_NO_QUERY = Query()

NO_PARAMETERS: Mapping[str, str] = MappingProxyType({})
"""Path parameters of a route without any."""

NO_BODY = Body()
"""The body of requests without one: always empty and complete."""


class Link(Protocol):
    """The interface of a connection that a request uses."""

    def hijack(self, request: Request, content_type: str, protocol: str) -> Hijack:
        """See `Request.hijack`."""

    def certificate(self) -> Certificate | None:
        """See `Request.certificate`."""

    @property
    def owner(self) -> str:
        """See `Request.peer`."""


class Authorization(Protocol):
    """The decision about a request, which others than the handler take (`api/authorization.py`)."""

    async def before_hijack(self, status: int, content_type: str) -> None:
        """Called before the head of a hijacked connection is made. Raises an error that refuses
        it.
        """


class Request:
    """A request whose head has arrived. `path` is percent-decoded. The application handles version
    prefixes.
    """

    __slots__ = (
        "_connection",
        "authorization",
        "body",
        "cancellable",
        "headers",
        "keep",
        "method",
        "parameters",
        "path",
        "query",
        "status",
        "target",
        "upgrade",
        "version",
    )

    def __init__(
        self,
        method: str,
        path: str,
        query: Query = _NO_QUERY,
        headers: Headers | None = None,
        body: Body | None = None,
        *,
        target: bytes = b"",
        keep: bool = True,
        upgrade: bool = False,
        connection: Link | None = None,
    ) -> None:
        self.method = method
        self.path = path
        self.query = query
        self.headers = headers if headers is not None else Headers([])
        self.body = body if body is not None else NO_BODY
        self.target = target
        """Path and query as they were sent."""
        self.keep = keep
        """The client keeps the connection open for another request.
        """
        self.upgrade = upgrade
        """The client asked to upgrade the connection (header Upgrade)."""
        self._connection = connection
        self.authorization: Authorization | None = None
        """Set by an application whose requests are authorized."""
        # Set by the application while it finds the handler:
        self.parameters: Mapping[str, str] = NO_PARAMETERS
        """Path parameters by name."""
        self.version: Any = None
        """`api.versions.Version`; this package knows nothing of it."""
        self.status = 200
        """Status of a success, from the route table."""
        self.cancellable = False
        """True: the handler is cancelled when the client disconnects. False: it runs to its end.
        """

    @property
    def certificate(self) -> Certificate | None:
        """The client's certificate. None without TLS."""
        return self._connection.certificate() if self._connection is not None else None

    @property
    def peer(self) -> str:
        """The client's process or host: see `peers.owner`."""
        return self._connection.owner if self._connection is not None else ""

    async def hijack(self, content_type: str, protocol: str = "tcp") -> Hijack:
        """Stop reading here: the following bytes are a stream of the given type, or of the protocol
        to which the client upgrades. The handler ends with `Hijack.release()` or an error.
        """
        if self.authorization is not None:
            await self.authorization.before_hijack(101 if self.upgrade else 200, content_type)
        if self._connection is None:
            raise ServerError("this request has no connection to hijack")
        return self._connection.hijack(self, content_type, protocol)


class Reply:
    """A complete answer. No Content-Type is sent with an empty body of the default type; no body
    with 204 and 304.
    """

    __slots__ = ("body", "content_type", "headers", "status")

    def __init__(
        self,
        status: int = 200,
        body: bytes = b"",
        content_type: str = "application/json",
        headers: tuple[tuple[str, str], ...] = (),
    ) -> None:
        self.status = status
        self.body = body
        self.content_type = content_type
        self.headers = headers


class StreamReply:
    """A streamed answer: chunked at HTTP/1.1, until the end of the connection at 1.0. The head is
    written before the first chunk is requested.

    `chunks` is read only as fast as the client reads. Its `aclose()`, if it has one, is always
    called, even if the client disconnects first. A generator that never started does not run its
    `finally`. So clean-up belongs into an object with an `aclose` of its own. An error in the
    middle of the stream aborts the connection, so that the client notices it.
    """

    __slots__ = ("chunks", "content_type", "headers", "status")

    def __init__(
        self,
        status: int,
        chunks: AsyncIterator[bytes],
        content_type: str = "application/json",
        headers: tuple[tuple[str, str], ...] = (),
    ) -> None:
        self.status = status
        self.chunks = chunks
        self.content_type = content_type
        self.headers = headers


AnyReply = Reply | StreamReply | HijackReply
Application = Callable[[Request], AnyReply | Awaitable[AnyReply]]
"""Finds and runs the handler. An answer that needs no waiting is returned directly, and written in
the same turn of the loop.
"""
