"""The authorization plugins of one engine: each of them must allow every request and every reply
(Docker's documentation, "Access authorization plugin").

They are asked in the order of the options; the first that denies ends it. A plugin that cannot be
reached, is slow, reports an error or does not answer in JSON counts as one that denies.

Not here: what is asked about a request (`api/authorization.py`).
Owns:    a client of each plugin. They are found once, at start: a plugin that is installed later
         cannot take the place of one of them while this daemon runs.
Raises:  Denied and Failed, in Docker's words.
"""

from __future__ import annotations

import asyncio
import binascii
import logging
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from engine.errors import EngineError, Forbidden, ServerError
from engine.plugins.client import Plugin, connect
from engine.plugins.registry import Plugins
from engine.wire.authz import AuthzAnswer, AuthzRequest, AuthzResponse

KIND = "authz"
OPTION = "--authorization-plugin"

SECONDS = 10.0
"""Time limit of one call."""
CALLS = 64
"""Calls at a time. More of them wait, so that a plugin that hangs does not use up memory and
descriptors."""

_REQUEST = "AuthZPlugin.AuthZReq"
_RESPONSE = "AuthZPlugin.AuthZRes"
_PIECE = 96 * 1024
"""Bytes that are encoded in base64 at a time: 0.1 ms."""

_log = logging.getLogger(__name__)


class Denied(Forbidden):
    """A plugin has denied the request or its reply."""


class Failed(ServerError):
    """A plugin could not be asked, or could not decide."""


class Chain:
    """The plugins, in their order."""

    def __init__(self, members: Sequence[Plugin]) -> None:
        self._members = members
        self._turns = asyncio.Semaphore(CALLS)

    @classmethod
    async def open(cls, names: Iterable[str], plugins: Plugins, seconds: float = SECONDS) -> Chain:
        """Find and activate the plugins. Raises ServerError that names one that is missing,
        disabled or of another kind.
        """
        members: list[Plugin] = []
        chain = cls(members)
        try:
            for name in names:
                found = await plugins.get(name, KIND)
                if found.name in chain.names:
                    continue
                # a client of its own: that of the registry is replaced when the plugin is used as
                # another kind
                member = await connect(found.name, found.endpoint, seconds)
                member.managed = found.managed
                members.append(member)
        except EngineError as error:
            await chain.close()
            raise ServerError(f"{OPTION} {name}: {error.message}") from error
        plugins.users.append(chain.users)
        plugins.needed.update(chain.names)
        _log.info("every request needs the permission of %s", ", ".join(chain.names))
        return chain

    def retire(self, plugins: Plugins, other: Chain | None) -> None:
        """New requests are for `other`, which keeps its plugins.

        Requests under way still ask these.
        """
        plugins.users.remove(self.users)
        plugins.needed.difference_update({*self.names} - {*(other.names if other is not None else ())})

    @property
    def names(self) -> list[str]:
        return [member.name for member in self._members]

    def users(self, name: str) -> list[str]:
        """See `registry.Users`."""
        return [f"the option {OPTION}"] if name in self.names else []

    async def begin(self, request: AuthzRequest, body: bytes) -> Exchange:
        """Ask about a request. `body`: as its handler will read it; empty for an upload.

        Raises Denied or Failed.
        """
        exchange = Exchange(self, msgspec.json.encode(request), body)
        await exchange.begin()
        return exchange

    async def ask(self, method: str, fields: bytes, bodies: Mapping[str, bytes]) -> None:
        """Ask all, with these members of an object and further ones in base64. Raises Denied or
        Failed.
        """
        try:
            async with asyncio.timeout(SECONDS if self._turns.locked() else None):
                await self._turns.acquire()
        except TimeoutError:
            raise Failed(f"{method}: {CALLS} other requests wait for authorization plugins") from None
        try:
            pieces = [fields[:-1]]
            for name, body in bodies.items():
                if body:
                    pieces += [b',"%b":"' % name.encode(), *await _base64(body), b'"']
            pieces.append(b"}")
            for member in self._members:
                await _ask(member, method, pieces)
        finally:
            self._turns.release()

    async def close(self) -> None:
        for member in self._members:
            await member.close()


class Exchange:
    """One request and its reply."""

    __slots__ = ("_body", "_chain", "_fields")

    def __init__(self, chain: Chain, fields: bytes, body: bytes) -> None:
        self._chain = chain
        self._fields = fields
        self._body = body

    async def begin(self) -> None:
        """Ask about the request."""
        await self._chain.ask(_REQUEST, self._fields, {"RequestBody": self._body})

    async def end(self, response: AuthzResponse, body: bytes = b"") -> None:
        """Ask about the reply. `body` is empty for a stream. Raises Denied or Failed."""
        fields = self._fields[:-1] + b"," + msgspec.json.encode(response)[1:]
        await self._chain.ask(_RESPONSE, fields, {"RequestBody": self._body, "ResponseBody": body})


async def _ask(member: Plugin, method: str, pieces: Sequence[bytes]) -> None:
    try:
        # A second call does no harm, and a plugin may have been restarted since the last one.
        answer = await member.post(method, AuthzAnswer, pieces, repeat=True)
    except EngineError as error:
        words = error.message if error.message.startswith(method) else f"{method}: {error.message}"
        raise Failed(f"plugin {member.name} failed with error: {words}") from error
    if not answer.allow:
        raise Denied(f"authorization denied by plugin {member.name}: {answer.msg or ''}")


async def _base64(data: bytes) -> list[bytes]:
    """In pieces. The loop serves others in between."""
    pieces = [binascii.b2a_base64(data[:_PIECE], newline=False)]
    for at in range(_PIECE, len(data), _PIECE):
        await asyncio.sleep(0)
        pieces.append(binascii.b2a_base64(data[at : at + _PIECE], newline=False))
    return pieces
