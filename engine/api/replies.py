"""Replies: structs to JSON for the client's version, error kinds to status codes. No other module
knows the codes.

Not here: bytes on the wire (`engine/http`).
"""

from __future__ import annotations

import errno
import logging
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator
from typing import Any

import msgspec

from engine.api.versions import Flag, Version
from engine.errors import (
    BUG,
    Conflict,
    EngineError,
    Forbidden,
    InvalidParameter,
    NotAcceptable,
    NotFound,
    NotModified,
    RequestTimeout,
    ServerError,
    TooLarge,
    Unauthorized,
    Unavailable,
    Unimplemented,
    words,
)
from engine.http.messages import Reply, Request, StreamReply

_log = logging.getLogger(__name__)

STATUS: dict[type[EngineError], int] = {
    NotModified: 304,
    InvalidParameter: 400,
    Unauthorized: 401,
    Forbidden: 403,
    NotFound: 404,
    NotAcceptable: 406,
    RequestTimeout: 408,
    Conflict: 409,
    TooLarge: 413,
    ServerError: 500,
    Unimplemented: 501,
    Unavailable: 503,
}

_encode = msgspec.json.Encoder().encode


class Message(msgspec.Struct, frozen=True):
    """Body of every error, at every version."""

    message: str


def encode(value: Any, request: Request, of: type | None = None) -> bytes:
    """`value` as JSON in the shape of the request's version, without the newline.

    `of`: the struct whose version changes apply, which for a list is the type of its elements.
    Default: the type of `value`.
    """
    version: Version | None = request.version
    if version is None:
        return _encode(value)
    encoded: bytes = version.shape(of or type(value)).encode(value)
    return encoded


RAW_STREAM = "application/vnd.docker.raw-stream"
FRAMED_STREAM = "application/vnd.docker.multiplexed-stream"


def stream_type(request: Request, *, framed: bool) -> str:
    """The media type of a container's output, which has frame headers if `framed`."""
    return FRAMED_STREAM if framed and request.version.has(Flag.STREAM_TYPES) else RAW_STREAM


def hijack_type(request: Request, *, framed: bool) -> str:
    """The same for a hijacked connection. Without an upgrade it is always the raw type, as in
    Docker.
    """
    return stream_type(request, framed=framed and request.upgrade)


def json_reply(
    request: Request, value: Any, of: type | None = None, headers: tuple[tuple[str, str], ...] = ()
) -> Reply:
    """A success with the route's status. `value`: a struct, or a list of structs of type `of`."""
    return Reply(request.status, encode(value, request, of) + b"\n", headers=headers)


def encoded_reply(request: Request, body: bytes) -> Reply:
    """A success whose JSON, with its newline, was encoded before in the shape of the request's
    version.
    """
    return Reply(request.status, body)


def empty_reply(request: Request, content_type: str = "application/json") -> Reply:
    """A success without a body, with the route's status."""
    return Reply(request.status, b"", content_type)


def stream_reply(
    request: Request,
    chunks: AsyncIterator[bytes],
    content_type: str = "application/json",
    headers: tuple[tuple[str, str], ...] = (),
) -> StreamReply:
    """A success whose body is sent in chunks; `StreamReply` says how `chunks` is used."""
    return StreamReply(request.status, chunks, content_type, headers)


async def json_lines(
    values: AsyncIterable[Any], request: Request, *, busy: bool = False
) -> AsyncGenerator[bytes, None]:
    """Progress objects: one JSON object per line, each sent at once. The docker CLI expects CR LF
    after each.

    The status line is sent before the first object, so a failure becomes a last object
    `{"errorDetail":{"message"},"error"}`, whose `errorDetail` has the exit code of a program that
    failed. Errors that have a status code must be raised before the stream is made. `busy`: raise
    Unavailable, as long as nothing was yielded.
    """
    try:
        async for value in values:
            busy = False
            yield encode(value, request) + b"\r\n"
    except Exception as error:
        kind = as_kind(error)
        if kind is None or (busy and isinstance(kind, Unavailable)):
            raise
        detail: dict[str, Any] = {"code": kind.exit_code} if kind.exit_code else {}
        yield _encode({"errorDetail": detail | {"message": kind.message}, "error": kind.message}) + b"\r\n"
    finally:
        # If the client disconnects, end the reporting work now, not when garbage is collected.
        close = getattr(values, "aclose", None)
        if close is not None:
            await close()


class Begun:
    """A stream whose first chunk is already available. An object, not a generator: see
    `StreamReply`.
    """

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None]) -> None:
        self._first: bytes | None = first
        self._rest = rest

    def __aiter__(self) -> Begun:
        return self

    async def __anext__(self) -> bytes:
        first, self._first = self._first, None
        return await anext(self._rest) if first is None else first

    async def aclose(self) -> None:
        await self._rest.aclose()


async def upload_reply(request: Request, values: AsyncIterable[Any]) -> StreamReply:
    """A success that reports on the request's body. Nothing is sent before the first report.

    Go clients (skopeo) stop sending the body as soon as they see a status line. So none may be sent
    while the body is read, unless the client requested progress reports. So a lack of room for the
    body becomes the reply's status.
    """
    lines = json_lines(values, request, busy=True)
    try:
        first = await anext(lines, b"")
    except BaseException:
        await lines.aclose()
        raise
    return StreamReply(request.status, Begun(first, lines))


async def started(values: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    """The same values, of which the first is already available. Raises the error that comes before
    it, so that it becomes the reply's status.
    """
    try:
        first = await anext(values, None)
    except BaseException:
        await values.aclose()
        raise
    return _again(first, values)


async def _again(first: Any, rest: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    try:
        if first is not None:
            yield first
        async for value in rest:
            yield value
    finally:
        await rest.aclose()


def as_kind(error: BaseException) -> EngineError | None:
    """The kind of an exception. None when it is a bug.

    OSError should have become a kind where it was raised. Here it gets a plain message, and the
    traceback is logged.
    """
    if isinstance(error, EngineError):
        return error
    used_up = _USED_UP.get(error.errno or 0) if isinstance(error, OSError) else None
    if isinstance(error, OSError):
        kind: EngineError = Unavailable(f"the engine has {used_up}") if used_up else ServerError(words(error))
    elif isinstance(error, MemoryError):
        kind = Unavailable("the host has no more memory for the engine")
    else:
        return None
    _log.error(
        "a request failed with an unexpected error: %s",
        words(error),
        exc_info=(type(error), error, error.__traceback__),
    )
    return kind


_USED_UP = {errno.EMFILE: "no more file descriptors", errno.ENFILE: "no more file descriptors on this host"}


def error_reply(error: BaseException) -> Reply:
    """The reply to an exception. An exception of no kind is a bug: 500, and the traceback goes to
    the log.
    """
    kind = as_kind(error)
    if isinstance(kind, NotModified):
        return Reply(304)
    if kind is not None:
        for base in type(kind).__mro__:
            status = STATUS.get(base)
            if status is not None:
                later = (("Retry-After", "1"),) if isinstance(kind, Unavailable) else ()
                return Reply(status, _encode(Message(kind.message)) + b"\n", headers=later)
    _log.error(
        "a request failed with an internal error: %s", words(error), exc_info=(type(error), error, error.__traceback__)
    )
    return Reply(500, _encode(Message(BUG)) + b"\n")
