"""Calls to one plugin: JSON over HTTP (Docker's documentation, "Docker Plugin API").

Plugins run as root beside the engine, so their answers are trusted, but the size and the duration
of an answer are limited.

Not here: HTTP (`connection.py`), where a plugin listens (`discovery.py`), the calls to one kind of
driver.
Owns: the connections to each plugin.
Raises: NotFound for a call that the plugin does not have, ServerError for one that fails.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

import msgspec

from engine.errors import NotFound, ServerError, decoding_reason, words
from engine.plugins.connection import Broken, Connections, TooLong, Unreachable
from engine.plugins.discovery import Endpoint
from engine.system.tls import verifying_context
from engine.wire import folded
from engine.wire.plugins import Activation, PluginAnswer

A = TypeVar("A", bound=PluginAnswer)

LONGEST_ANSWER = 8 << 20
"""Bytes of an answer. A volume plugin's List may be long."""
RETRY_DELAYS = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8)
"""Seconds between attempts while the connection is refused, since the plugin may still be starting.
The time limit of the call includes them."""
FEW_DELAYS = RETRY_DELAYS[:3]
"""For a call that asks every plugin, so that one that has ended does not delay the answer of the
others for long."""

_FIELDS = "Accept: application/vnd.docker.plugins.v1.2+json\r\nContent-Type: application/json\r\n"


class Refused(ServerError):
    """The plugin has answered that it did not do what a call asked for. After any other failure it
    may have done it."""


class Unanswered(ServerError):
    """The plugin did not answer within the time limit."""


class Cut(ServerError):
    """The connection ended before the answer was complete: the plugin may have ended."""


class Managed(Protocol):
    """A plugin that the engine has installed and runs (`managed/`), as its users see it."""

    @property
    def id(self) -> str:
        """The id of its object, which it keeps over an upgrade."""

    @property
    def name(self) -> str:
        """`NAME:TAG`, as objects that use it show it."""

    @property
    def enabled(self) -> bool: ...

    @property
    def endpoint(self) -> Endpoint:
        """Where it listens while it is enabled."""

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of driver in its manifest, in lower case: `volumedriver`."""

    async def tree(self, path: str) -> int:
        """A detached copy of the mounts at a path of the plugin's own file system, for a
        container. The caller closes the descriptor.

        Raises ServerError, also when the plugin does not run.
        """


class Plugin:
    """One plugin."""

    def __init__(self, name: str, endpoint: Endpoint, connections: Connections, timeout: float) -> None:
        self.name = name
        self.endpoint = endpoint
        self.implements: frozenset[str] = frozenset()
        """The kinds of driver that it named when it was activated, in lower case."""
        self.managed: Managed | None = None
        """What the engine knows of it if it runs it; None for a program that runs beside the
        engine."""
        self._connections = connections
        self.timeout = timeout
        """Seconds that one call may take."""
        self._limits: set[asyncio.Timeout] = set()
        """Those of the calls under way."""
        self._silent: set[str] | None = None
        """While the engine stops: the names of plugins that have not answered since. They are not
        called again, so that each delays the stop once.
        """

    async def call(
        self, method: str, answer: type[A], body: Mapping[str, object] | None = None, *, patient: bool = True
    ) -> A:
        """POST /`method`. `patient`: False gives up soon while the connection is refused.

        Raises ServerError in Docker's words, within the time limit.
        """
        pieces = (msgspec.json.encode(body),) if body is not None else ()
        return await self.post(method, answer, pieces, patient=patient)

    async def post(
        self, method: str, answer: type[A], pieces: Sequence[bytes], *, repeat: bool = False, patient: bool = True
    ) -> A:
        """`call` with a body that is JSON already. `repeat`: see `Connections.post`."""
        if self._silent and self.name in self._silent:
            raise Unanswered(f'{method}: plugin "{self.name}" has not answered since the engine began to stop')
        unreachable = ""
        seconds = self.timeout
        limit = asyncio.timeout(seconds)
        self._limits.add(limit)
        try:
            async with limit:
                for delay in (*(RETRY_DELAYS if patient else FEW_DELAYS), None):
                    try:
                        return await self._post(method, answer, pieces, repeat)
                    except Unreachable as error:  # nothing was sent: it may be repeated
                        unreachable = f": {error}"
                        if delay is None:
                            raise
                        await asyncio.sleep(delay)
        except TimeoutError as error:
            if self._silent is not None:
                self._silent.add(self.name)
            when = f"within {seconds:g} seconds" if seconds == self.timeout else "before the engine stopped"
            raise Unanswered(f'{method}: plugin "{self.name}" did not answer {when}{unreachable}') from error
        except Broken as error:
            raise Cut(f'{method}: plugin "{self.name}": {error}') from error
        except Unreachable as error:
            raise ServerError(f'{method}: plugin "{self.name}": {error}') from error
        except TooLong as error:
            raise ServerError(f'{method}: plugin "{self.name}" sent more than {LONGEST_ANSWER} bytes') from error
        finally:
            self._limits.discard(limit)
        raise AssertionError("unreachable")

    def hurry(self, seconds: float, silent: set[str]) -> None:
        """The engine stops: no call takes longer from now on. `silent`: plugins that are not called
        again.
        """
        self.timeout = min(self.timeout, seconds)
        self._silent = silent
        end = asyncio.get_running_loop().time() + self.timeout
        for limit in self._limits:
            when = limit.when()
            if when is not None and when > end:
                limit.reschedule(end)

    async def _post(self, method: str, answer: type[A], pieces: Sequence[bytes], repeat: bool) -> A:
        status, text = await self._connections.post(f"/{method}", _FIELDS, pieces, repeat=repeat)
        if status != 200:
            reason = _reason(text)
            if status == 404:
                raise NotFound(f'{method}: plugin "{self.name}" does not implement this call: {reason or "status 404"}')
            raise Refused(f"{method}: {reason or f'status {status}'}")
        try:
            found = _answer(text, answer)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ServerError(
                f'{method}: plugin "{self.name}" sent an invalid reply: {decoding_reason(error)}'
            ) from error
        if found.err:
            raise Refused(found.err)
        return found

    async def activate(self, *, patient: bool = True) -> None:
        """Ask what it implements. `patient`: as in `call`. A managed plugin that does not serve the
        call has the kinds of its config: Docker does not activate managed plugins.
        """
        try:
            named = (await self.call("Plugin.Activate", Activation, patient=patient)).implements or ()
        except NotFound:
            if self.managed is None:
                raise
            self.implements = self.managed.kinds
        else:
            self.implements = frozenset(kind.lower() for kind in named)

    async def close(self) -> None:
        self._connections.close()


def _answer(text: bytearray, of: type[A]) -> A:
    """As Docker's client reads it: an empty answer and `null` are an empty object."""
    empty = not text.strip() or text.strip() == b"null"
    return folded.decode(b"{}" if empty else text, of)


def _reason(text: bytearray) -> str:
    """The reason of a failed call: `Err` of a JSON answer, or the text itself."""
    try:
        return folded.decode(text, PluginAnswer).err or ""
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return text[:1000].decode(errors="replace").strip()


async def connect(name: str, found: Endpoint, timeout: float) -> Plugin:
    """A client of the plugin that listens there. Nothing is sent yet.

    `timeout`: seconds that one call may take. Raises ServerError for TLS files that are invalid.
    """
    tls = await asyncio.to_thread(_tls, found) if found.url.startswith("https") else None
    return Plugin(name, found, Connections(found, tls, LONGEST_ANSWER), timeout)


def _tls(found: Endpoint) -> ssl.SSLContext:
    try:
        context = verifying_context(authority=found.ca)
        if found.insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if found.certificate:
            context.load_cert_chain(found.certificate, found.key or None)
    except (OSError, ssl.SSLError) as error:
        files = ", ".join(filter(None, (found.ca, found.certificate, found.key)))
        raise ServerError(f"plugin at {found.url}: TLS files {files}: {words(error)}") from error
    return context
