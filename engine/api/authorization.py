"""The API of an engine whose requests are authorized by plugins.

What the handler will read is what the plugins are shown:
- The target is routed as they see it. One that could be read in two ways is refused: double
  slashes, dot segments, an encoded slash, and encoded characters that need no encoding.
- A JSON body is read whole. One with a key twice, or in two spellings, is refused. The plugins and
  then the handler get the same bytes, whatever the header fields say.
- An upload (an archive, a build context) is not shown to them.
- The handlers of other routes cannot read a body.
They are asked about a reply before its head is sent; about a stream without its body.

Not here: the plugins (`plugins/authz.py`), which body a route has (`routes.py`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Awaitable, Iterable
from typing import Any

from engine.api import routes
from engine.api.application import Application
from engine.api.engine import Engine
from engine.api.parameters import BODY_LIMIT
from engine.api.versions import LATEST
from engine.errors import InvalidParameter
from engine.http.head import HTTP2
from engine.http.hijack import HijackReply
from engine.http.messages import AnyReply, Headers, Query, Reply, Request, StreamReply
from engine.plugins.authz import Chain, Denied, Exchange, Failed
from engine.wire.authz import AuthzRequest, AuthzResponse

LONGEST_REPLY = 16 << 20
"""Bytes of a whole reply."""

_SECRET = frozenset(("authorization", "x-registry-auth", "x-registry-config"))
"""Header fields with credentials, which the plugins are not shown."""

_SHOWN = ("application/json", "text/plain")
"""Media types of replies whose body they are shown. Others are archives, as streams are."""

_AT_ONCE = 16 * 1024
"""Bytes of a body whose keys are checked in less than a millisecond. Longer ones are checked in a
thread."""

_log = logging.getLogger(__name__)


def _no_options(engine: Engine, request: Request) -> Reply:
    return Reply(200)


_OPTIONS = routes.Route(
    method="OPTIONS",
    path="",
    handler=_no_options,
    status=200,
    mode=routes.PLAIN,
    body=routes.NONE,
    needs=routes.LISTENING,
    since=(0, 0),
    until=(0, 0),
)


class AuthorizedApplication(Application):
    """One engine's API, for those whom the plugins of `chain` allow it."""

    def __init__(self, engine: Engine, chain: Chain, table: Iterable[routes.Route] = routes.ROUTES) -> None:
        super().__init__(engine, table)
        self._chain = chain

    def __call__(self, request: Request) -> Awaitable[AnyReply]:
        """Answer a request. Raises as `Application` does: the plugins are asked about requests
        that have a route.
        """
        check_target(request.target)
        check_query(request.query)
        if request.method == "OPTIONS":
            route, request.version = _OPTIONS, LATEST
        else:
            route, request.version, request.parameters = self._find(request.method, request.path)
        request.status = route.status
        request.cancellable = route.mode is routes.STREAM
        return self._authorized(route, request)

    async def _authorized(self, route: routes.Route, request: Request) -> AnyReply:
        asked = _asked(request)
        try:
            exchange = await self._begin(route, request, asked)
            request.authorization = replies = _Replies(exchange, self.headers)
            reply = await self._handled(route, request)
            if isinstance(reply, Reply):
                await replies.whole(reply, shown=route.body is not routes.CREDENTIALS, sent=request.method != "HEAD")
            elif isinstance(reply, StreamReply):
                await replies.stream(reply)
            return reply
        except (Denied, Failed) as error:
            # without the query, which may have credentials of a build's source
            _log.warning("%s %s: %s", request.method, asked.request_uri.partition("?")[0], error.message)
            raise

    async def _begin(self, route: routes.Route, request: Request, asked: AuthzRequest) -> Exchange:
        """Ask about the request. Its body counts as being read meanwhile, so that a slow plugin
        does not fill the memory with bodies.
        """
        try:
            body = await read_body(route, request)
            return await self._chain.begin(asked, b"" if route.body is routes.CREDENTIALS else body)
        finally:
            request.body.release()

    async def _handled(self, route: routes.Route, request: Request) -> AnyReply:
        """The reply that the client would get, also for an error."""
        try:
            reply = route.handler(self._engine, request)
            return reply if isinstance(reply, Reply | StreamReply | HijackReply) else await reply
        except (Denied, Failed):
            raise  # of a hijack
        except Exception as error:
            return self.error_reply(error)


class _Replies:
    """Asks about the reply to one request."""

    def __init__(self, exchange: Exchange, constant: tuple[tuple[str, str], ...]) -> None:
        self._exchange = exchange
        self._constant = constant

    async def whole(self, reply: Reply, *, shown: bool, sent: bool) -> None:
        """`shown`: it has no credentials. `sent`: its body is sent."""
        body = reply.body if sent else b""
        if len(body) > LONGEST_REPLY:
            raise Failed(f"the reply is larger than the {LONGEST_REPLY} bytes that authorization plugins are shown")
        show = shown and reply.content_type.partition(";")[0] in _SHOWN
        await self._end(reply.status, reply.content_type if body else "", reply.headers, body if show else b"")

    async def stream(self, reply: StreamReply) -> None:
        try:
            await self._end(reply.status, reply.content_type, reply.headers)
        except BaseException:
            close = getattr(reply.chunks, "aclose", None)
            if close is not None:
                await close()
            raise

    async def before_hijack(self, status: int, content_type: str) -> None:
        """See `messages.Authorization`."""
        await self._end(status, content_type, ())

    async def _end(
        self, status: int, content_type: str, headers: tuple[tuple[str, str], ...], body: bytes = b""
    ) -> None:
        fields = dict((*self._constant, *headers))
        if content_type:
            fields["Content-Type"] = content_type
        await self._exchange.end(AuthzResponse(response_status_code=status, response_headers=fields), body)


def check_target(target: bytes) -> None:
    """Raises InvalidParameter for a target whose path a plugin could read in another way than the
    router does.
    """
    path, _, query = target.partition(b"?")
    found = _AMBIGUOUS.search(path)
    if found is not None:
        raise InvalidParameter(
            f"{path[:300].decode(errors='replace')}: authorization plugins are in use, so the path must not have "
            f"{found[0].decode(errors='replace')!r}: double slashes, dot segments, encoded slashes and encoded "
            "letters, digits, hyphens, dots, underscores and tildes are refused"
        )
    if b";" in query:
        # Go's parser drops a parameter that has one, so a plugin would not see it.
        raise InvalidParameter("authorization plugins are in use, so a semicolon in the query must be encoded as %3B")
    try:
        target.decode()
    except UnicodeDecodeError:
        raise InvalidParameter("authorization plugins are in use, so the request's target must be UTF-8") from None


def check_query(query: Query) -> None:
    """Raises InvalidParameter for a parameter that is JSON with a key twice."""
    for name in query:
        for value in query.get_all(name):
            if value.lstrip()[:1] in ("{", "["):
                try:
                    _decoder.decode(value.strip())
                except InvalidParameter as error:
                    raise InvalidParameter(f"{name}: {error.message}") from None
                except RecursionError:  # its reader may have more of the stack left
                    raise InvalidParameter(f"{name}: JSON that is nested too deeply") from None
                except ValueError:
                    continue  # it is not JSON


_AMBIGUOUS = re.compile(rb"//|/\.\.?(?=/|$)|%2[fF]|%(?:2[dDeE]|3[0-9]|[46][1-9a-fA-F]|[57][0-9aA]|5[fF]|7[eE])")


async def read_body(route: routes.Route, request: Request) -> bytes:
    """The body that the handler will read, if it is JSON, and make sure that it reads no other.

    Raises InvalidParameter for one that is too long, or that two parsers could read in two ways.
    """
    if route.body is routes.UPLOAD:
        return b""
    if route.body is routes.NONE:
        request.body.withhold()
        return b""
    body = await request.body.read(BODY_LIMIT, hold=True)
    request.body.put_back(body)
    if len(body) <= _AT_ONCE:
        check_keys(body)
    else:
        await asyncio.to_thread(check_keys, body)
    return body


def check_keys(body: bytes) -> None:
    """Raises InvalidParameter unless the body is empty or a JSON document in which no object has
    a key twice, or two that differ in case only.
    """
    try:
        text = body.strip().decode()
        if text:
            _decoder.decode(text)
    except InvalidParameter:
        raise
    except UnicodeDecodeError:
        raise InvalidParameter("invalid JSON body: it is not UTF-8") from None
    except RecursionError:
        raise InvalidParameter("invalid JSON body: it is nested too deeply") from None
    except ValueError as error:
        raise InvalidParameter(f"invalid JSON body: {_reason(error)}") from None


def _reason(error: ValueError) -> str:
    """What is wrong with a document, without Python's count of characters."""
    text = str(error).partition(" (char ")[0]
    return text[:1].lower() + text[1:]


def _check_pairs(pairs: list[tuple[str, Any]]) -> None:
    found: dict[str, str] = {}
    for key, _ in pairs:
        folded = key.casefold()
        other = found.get(folded)
        found[folded] = key
        if other is not None:
            how = "twice" if other == key else f"as {other[:100]!r} and as {key[:100]!r}"
            raise InvalidParameter(
                f"invalid JSON body: it has the key {key[:100]!r} {how}, which is refused while authorization "
                "plugins are in use"
            )


def _nothing(_: str) -> None:
    return None


_decoder = json.JSONDecoder(
    object_pairs_hook=_check_pairs, parse_int=_nothing, parse_float=_nothing, parse_constant=_nothing
)


def _asked(request: Request) -> AuthzRequest:
    certificate = request.certificate
    method, target = request.method, request.target.decode()
    if method == HTTP2:  # it opens the same services, which a plugin may not allow
        method, target = "POST", "/grpc"
    return AuthzRequest(
        user=certificate.name if certificate else "",
        user_auth_n_method="TLS" if certificate else "",
        request_method=method,
        request_uri=target,
        request_headers=shown_headers(request.headers),
        request_peer_certificates=[certificate.pem.encode()] if certificate else None,
    )


def shown_headers(headers: Headers) -> dict[str, str]:
    """Header fields by name, spelled as Go does, without Host and credentials. Values of one name
    are joined (RFC 9110, 5.2).
    """
    shown: dict[str, str] = {}
    for key, value in headers:
        name = "-".join(word.capitalize() for word in key.decode("latin-1").split("-"))
        if name.lower() in _SECRET or name == "Host":
            continue
        text = value.decode("latin-1").strip()
        shown[name] = f"{shown[name]}, {text}" if name in shown else text
    return shown
