"""Answers: structs to JSON for the client's version, error kinds to status codes. The only place that knows the
numbers.

Not here: bytes on the wire (`engine/http`).
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterable, AsyncIterator
from typing import Any

import msgspec

from engine.errors import (
    Conflict,
    EngineError,
    Forbidden,
    InvalidParameter,
    NotAcceptable,
    NotFound,
    NotModified,
    ServerError,
)
from engine.http.messages import Reply, Request, StreamReply

log = logging.getLogger(__name__)

STATUS: dict[type[EngineError], int] = {
    NotModified: 304,
    InvalidParameter: 400,
    Forbidden: 403,
    NotFound: 404,
    NotAcceptable: 406,
    Conflict: 409,
    ServerError: 500,
}

_encode = msgspec.json.Encoder().encode


class Message(msgspec.Struct, frozen=True):
    """Body of every error, at every version."""

    message: str


def encode(value: Any, request: Request, of: type | None = None) -> bytes:
    """`value` as JSON in the shape of the request's version, without the newline.

    `of` is the struct whose changes count: for a list the type of its elements, and by default the type of `value`.
    """
    downs = request.version.downs(of or type(value)) if request.version is not None else ()
    if not downs:
        return _encode(value)
    shape = msgspec.to_builtins(value)
    for item in shape if isinstance(shape, list) else (shape,):
        for down in downs:
            down(item)
    return _encode(shape)


def json_reply(
    request: Request, value: Any, of: type | None = None, headers: tuple[tuple[str, str], ...] = ()
) -> Reply:
    """A success with the route's status. `value`: a struct, or a list of structs of type `of`."""
    return Reply(request.status, encode(value, request, of) + b"\n", headers=headers)


def encoded_reply(request: Request, body: bytes) -> Reply:
    """A success whose JSON (with its newline) was encoded before, for a version to which `request.version.downs(type)`
    is empty.
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
    """A success that grows; see `StreamReply` for what happens to `chunks`."""
    return StreamReply(request.status, chunks, content_type, headers)


async def json_lines(values: AsyncIterable[Any], request: Request) -> AsyncIterator[bytes]:
    """Progress objects and the like: one JSON object a line, each sent as it comes (docker CLI wants "\\r\\n" after
    each).

    An error after the first object can have no status any more: it becomes a last object
    `{"errorDetail":{"message"},"error"}`. Before the first object it is raised, which cuts the connection: check first,
    stream then.
    """
    try:
        async for value in values:
            yield encode(value, request) + b"\r\n"
    except EngineError as error:
        yield _encode({"errorDetail": {"message": error.message}, "error": error.message}) + b"\r\n"


def error_reply(error: BaseException) -> Reply:
    """The answer to an exception. What is none of the kinds is a bug: 500, and the traceback goes to the log."""
    if isinstance(error, NotModified):
        return Reply(304)
    if isinstance(error, EngineError):
        for kind in type(error).__mro__:
            status = STATUS.get(kind)
            if status is not None:
                return Reply(status, _encode(Message(error.message)) + b"\n")
    log.error("a bug met while answering a request", exc_info=(type(error), error, error.__traceback__))
    return Reply(500, _encode(Message(f"internal error: {type(error).__name__}: {error}")) + b"\n")
