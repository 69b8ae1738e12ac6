"""Handlers of connections that become HTTP/2: sessions of clients, and BuildKit's API. All versions
serve them.
"""

from __future__ import annotations

from engine.api.engine import Engine
from engine.errors import InvalidParameter, words
from engine.http.head import HTTP2, HTTP2_HEAD
from engine.http.hijack import HijackReply
from engine.http.messages import Request

H2C = "h2c"


async def open_session(engine: Engine, request: Request) -> HijackReply:
    """The client serves gRPC on this connection from now on, and the daemon calls it."""
    _check_upgrade(request)
    headers = request.headers
    await engine.sessions.load()
    offer = engine.sessions.offered(
        headers.get("x-docker-expose-session-uuid"),
        headers.get("x-docker-expose-session-sharedkey"),
        headers.get_all("x-docker-expose-session-grpc-method"),
        request.peer,
    )
    hijack = await request.hijack("", H2C)
    descriptor = hijack.descriptor()
    try:
        await engine.sessions.open(offer, descriptor, hijack.head, hijack.early)
    except OSError as error:
        raise InvalidParameter(f"session {offer.id}: {words(error)}") from error
    return hijack.release()


async def serve_buildkit(engine: Engine, request: Request) -> HijackReply:
    """BuildKit's API: the client calls the daemon with gRPC on this connection from now on. It has
    upgraded the connection, or has begun it with HTTP/2.
    """
    prior = request.method == HTTP2
    if not prior:
        _check_upgrade(request)
    control = await engine.buildkit.load()
    hijack = await request.hijack("", H2C)
    descriptor = hijack.descriptor()
    head, early = (b"", HTTP2_HEAD + hijack.early) if prior else (hijack.head, hijack.early)
    try:
        await control.serve(descriptor, head, early, request.peer)
    except OSError as error:
        raise InvalidParameter(f"{request.path}: {words(error)}") from error
    return hijack.release()


def _check_upgrade(request: Request) -> None:
    """Raises InvalidParameter."""
    protocol = request.headers.get("upgrade")
    if not request.upgrade or protocol.lower() != H2C:
        raise InvalidParameter(f"{request.path} needs the header Upgrade: {H2C}, not {protocol!r}")


__all__ = ["open_session", "serve_buildkit"]
