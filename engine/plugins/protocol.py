"""Plugins: separate programs, which are found by a socket or a file and called with JSON over HTTP.

The plugin NAME is defined by the first of these files that exists:
- `NAME.sock` or `NAME/NAME.sock` in a directory of sockets;
- `NAME.spec` (one line, a URL) or `NAME.json` (`Addr` and `TLSConfig`), or the same below `NAME/`,
  in a directory of specifications.

It is activated on first use (POST /Plugin.Activate) and names the kinds of driver it implements.
Rules: Docker's documentation, "Docker Plugin API". Plugins run as root beside the engine, so their
answers are trusted, but the size and the duration of an answer are limited.

Not here: the calls to one kind of driver (volumes/plugin.py).
Owns: the HTTP sessions. aiohttp is imported with the first plugin that is called: it takes 15 MB.
Raises: NotFound for a plugin that does not exist or does not implement the kind, ServerError for
one that fails.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import re
import ssl
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from engine.errors import NotFound, ServerError, decoding_reason
from engine.system import files
from engine.wire.plugins import Activation, PluginAnswer

if TYPE_CHECKING:
    import aiohttp

A = TypeVar("A", bound=PluginAnswer)

LONGEST_ANSWER = 16 << 20
"""Bytes of an answer. A volume plugin's List may be long."""
LONGEST_FILE = 1 << 20
RETRY_DELAYS = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8)
"""Seconds between attempts while the connection is refused, since the plugin may still be starting.
The time limit of the call includes them."""

_ACCEPT = "application/vnd.docker.plugins.v1.2+json"
_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]{0,249}")


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Where a plugin listens: a Unix socket's path, or the base of a URL."""

    socket: str = ""
    url: str = "http://plugin"
    ca: str = ""
    certificate: str = ""
    key: str = ""
    insecure: bool = False


class _TlsConfig(msgspec.Struct, rename="pascal", frozen=True):
    insecure_skip_verify: bool = False
    ca_file: str = msgspec.field(default="", name="CAFile")
    cert_file: str = ""
    key_file: str = ""


class _Specification(msgspec.Struct, rename="pascal", frozen=True):
    addr: str
    name: str = ""
    tls_config: _TlsConfig | None = msgspec.field(default=None, name="TLSConfig")


def endpoint(address: str, tls: _TlsConfig | None = None) -> Endpoint:
    """`unix:///path`, `tcp://HOST:PORT`, `http(s)://…`. Raises ValueError."""
    parts = urlsplit(address.strip())
    if parts.scheme == "unix":
        if not parts.path.startswith("/"):
            raise ValueError(f"{address!r} is not an absolute path")
        return Endpoint(socket=parts.path)
    if parts.scheme not in ("tcp", "http", "https") or not parts.hostname:
        raise ValueError(
            f"{address!r} is not a plugin address: unix:///PATH, tcp://HOST:PORT, http:// or https:// expected"
        )
    secure = parts.scheme == "https" or (tls is not None and parts.scheme == "tcp")
    url = f"{'https' if secure else 'http'}://{parts.netloc}{parts.path.rstrip('/')}"
    if tls is None:
        return Endpoint(url=url)
    return Endpoint(
        url=url, ca=tls.ca_file, certificate=tls.cert_file, key=tls.key_file, insecure=tls.insecure_skip_verify
    )


def read_specification(path: Path) -> Endpoint:
    """A .spec or .json file. Raises ValueError or OSError."""
    text = files.read_file(path, LONGEST_FILE)
    if path.suffix == ".spec":
        return endpoint(text.decode())
    found = msgspec.json.decode(text, type=_Specification)
    return endpoint(found.addr, found.tls_config)


class Plugin:
    """One plugin. `implements`: the kinds of driver that it named when it was activated."""

    def __init__(self, name: str, session: aiohttp.ClientSession, base: str, timeout: float) -> None:
        self.name = name
        self.implements: frozenset[str] = frozenset()
        self._session = session
        self._base = base
        self._timeout = timeout

    async def call(self, method: str, answer: type[A], body: Mapping[str, object] | None = None) -> A:
        """POST /`method`. Raises ServerError in Docker's words, within the time limit."""
        try:
            async with asyncio.timeout(self._timeout):
                return await self._call(method, answer, msgspec.json.encode(body) if body is not None else b"")
        except TimeoutError as error:
            raise ServerError(
                f'{method}: plugin "{self.name}" did not answer within {self._timeout:g} seconds'
            ) from error

    async def _call(self, method: str, answer: type[A], body: bytes) -> A:
        client = await _aiohttp()
        for delay in (*RETRY_DELAYS, None):
            try:
                return await self._post(method, answer, body)
            # the request was not sent: it may be repeated
            except client.ClientConnectorError as error:
                if delay is None:
                    raise ServerError(f'{method}: plugin "{self.name}": {error}') from error
                await asyncio.sleep(delay)
            except (client.ClientError, OSError) as error:
                raise ServerError(f'{method}: plugin "{self.name}": {error}') from error
        raise AssertionError("unreachable")

    async def _post(self, method: str, answer: type[A], body: bytes) -> A:
        headers = {"Accept": _ACCEPT, "Content-Type": "application/json"}
        text = bytearray()
        async with self._session.post(f"{self._base}/{method}", data=body, headers=headers) as response:
            async for chunk in response.content.iter_any():
                text += chunk
                if len(text) > LONGEST_ANSWER:
                    raise ServerError(f'{method}: plugin "{self.name}" sent more than {LONGEST_ANSWER} bytes')
            status = response.status
        if status != 200:
            reason = _reason(text)
            if status == 404 and not reason:
                raise NotFound(f'{method}: plugin "{self.name}" does not implement this call')
            raise ServerError(f"{method}: {reason or f'status {status}'}")
        try:
            found = msgspec.json.decode(text if text.strip() else b"{}", type=answer)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ServerError(
                f'{method}: plugin "{self.name}" sent an invalid reply: {decoding_reason(error)}'
            ) from error
        if found.err:
            raise ServerError(found.err)
        return found

    async def activate(self) -> None:
        self.implements = frozenset((await self.call("Plugin.Activate", Activation)).implements or ())

    async def close(self) -> None:
        await self._session.close()


def _reason(text: bytearray) -> str:
    """The reason of a failed call: `Err` of a JSON answer, or the text itself."""
    try:
        return msgspec.json.decode(text, type=PluginAnswer).err or ""
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return text[:1000].decode(errors="replace").strip()


class Plugins:
    """The plugins of this host, activated on first use."""

    def __init__(self, sockets: Sequence[Path], specifications: Sequence[Path], timeout: float) -> None:
        """Directories in search order; `timeout`: seconds that one call may take."""
        self._sockets = sockets
        self._specifications = specifications
        self._timeout = timeout
        self._active: dict[str, tuple[Endpoint, Plugin]] = {}
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()
        """By name, held during activation: a plugin that is in use must not be replaced by a
        second activation.
        """

    async def get(self, name: str, kind: str) -> Plugin:
        """The plugin, activated.

        Raises NotFound in Docker's words when it does not exist or does not implement `kind`,
        ServerError when its file is invalid or it does not answer.
        """
        try:
            found = await asyncio.to_thread(self._endpoint, name)
        except (OSError, ValueError) as error:
            raise ServerError(str(error)) from error
        if found is None:
            raise NotFound(f'plugin "{name[:200]}" not found')
        async with self._locks.setdefault(name, asyncio.Lock()):
            active = self._active.get(name)
            if active is not None and active[0] == found and kind in active[1].implements:
                return active[1]
            plugin = await self._activated(name, found)
            self._active[name] = (found, plugin)
            if active is not None:
                await active[1].close()
        if kind not in plugin.implements:
            raise NotFound(f"plugin {name} does not implement the requested interface: {kind}")
        return plugin

    async def _activated(self, name: str, found: Endpoint) -> Plugin:
        plugin = Plugin(name, await self._session(found), found.url, self._timeout)
        try:
            await plugin.activate()
        except BaseException:
            await plugin.close()
            raise
        return plugin

    async def _session(self, found: Endpoint) -> aiohttp.ClientSession:
        client = await _aiohttp()
        connector: aiohttp.BaseConnector
        if found.socket:
            connector = client.UnixConnector(found.socket)
        else:
            connector = client.TCPConnector(ssl=_tls(found)) if found.url.startswith("https") else client.TCPConnector()
        session: aiohttp.ClientSession = client.ClientSession(
            connector=connector,
            timeout=client.ClientTimeout(total=None),
            auto_decompress=False,
            cookie_jar=client.DummyCookieJar(),
        )
        return session

    def _endpoint(self, name: str) -> Endpoint | None:
        if not _NAME.fullmatch(name):
            return None
        for directory in self._sockets:
            for path in (directory / f"{name}.sock", directory / name / f"{name}.sock"):
                if path.is_socket():
                    return Endpoint(socket=str(path))
        for directory in self._specifications:
            for suffix in ("spec", "json"):
                for path in (directory / f"{name}.{suffix}", directory / name / f"{name}.{suffix}"):
                    if path.is_file():
                        return read_specification(path)
        return None

    def active(self, kind: str) -> list[str]:
        """Names of the plugins of this kind that have been used."""
        return sorted(name for name, (_, plugin) in self._active.items() if kind in plugin.implements)

    async def names(self) -> list[str]:
        """Names of all plugins on this host, whether they answer or not."""
        return await asyncio.to_thread(self._names)

    def _names(self) -> list[str]:
        found: set[str] = set()
        for directory, suffixes in (
            *((each, (".sock",)) for each in self._sockets),
            *((each, (".spec", ".json")) for each in self._specifications),
        ):
            found.update(_stems(directory, suffixes))
        return sorted(found)

    async def close(self) -> None:
        for _, plugin in self._active.values():
            await plugin.close()
        self._active.clear()


def _stems(directory: Path, suffixes: tuple[str, ...]) -> Iterator[str]:
    try:
        names = os.listdir(directory)
    except OSError:
        return
    for name in names:
        stem, suffix = os.path.splitext(name)
        if suffix in suffixes and _NAME.fullmatch(stem):
            yield stem
        elif _NAME.fullmatch(name) and any((directory / name / f"{name}{each}").exists() for each in suffixes):
            yield name


def _tls(found: Endpoint) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=found.ca or None)
        if found.insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if found.certificate:
            context.load_cert_chain(found.certificate, found.key or None)
    except (OSError, ssl.SSLError) as error:
        files = ", ".join(filter(None, (found.ca, found.certificate, found.key)))
        raise ServerError(f"plugin at {found.url}: TLS files {files}: {error}") from error
    return context


async def _aiohttp() -> Any:
    return await asyncio.to_thread(importlib.import_module, "aiohttp")
