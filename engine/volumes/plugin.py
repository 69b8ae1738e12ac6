"""Volume drivers that are programs of their own: found by a socket or a file, spoken to with JSON over HTTP.

A driver NAME is the first of: `NAME.sock` or `NAME/NAME.sock` in a directory of sockets; `NAME.spec` (one line, a URL) or `NAME.json` (`Addr`
and `TLSConfig`), likewise, in a directory of specifications. It is activated once (`/Plugin.Activate`) and must implement VolumeDriver.

Rules: Docker's documentation "Docker Plugin API" and "Volume plugins"; messages as its client words them. What a plugin says is believed:
it runs as root beside the engine. How long it takes and how much it says has limits.
Owns: the HTTP sessions. aiohttp is loaded with the first plugin that is spoken to: it takes 15 MB.
Raises: NotFound for a driver that is not there, ServerError for one that fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import re
import ssl
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from engine.errors import EngineError, InvalidParameter, NotFound, ServerError
from engine.system import files
from engine.volumes import local
from engine.wire.volumes import PluginAnswer, PluginVolume

if TYPE_CHECKING:
    import aiohttp

LONGEST_ANSWER = 16 << 20
"""Bytes: a List of very many volumes."""
LONGEST_FILE = 1 << 20
RETRY_DELAYS = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8)
"""Seconds between attempts while nobody answers at all: the plugin may just be starting. Within the time limit of the call, as all else."""

_ACCEPT = "application/vnd.docker.plugins.v1.2+json"
_DRIVER = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]*")
_KIND = "VolumeDriver"


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
            raise ValueError(f"{address!r} names no absolute path")
        return Endpoint(socket=parts.path)
    if parts.scheme not in ("tcp", "http", "https") or not parts.hostname:
        raise ValueError(f"{address!r} is no address of a plugin: unix:///PATH, tcp://HOST:PORT, http:// or https://")
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


# --- one driver --------------------------------------------------------------------------------------------------------


class PluginDriver:
    """One plugin that was activated."""

    def __init__(self, name: str, session: aiohttp.ClientSession, base: str, timeout: float) -> None:
        self.name = name
        self.scope = "local"
        self._session = session
        self._base = base
        self._timeout = timeout

    async def call(self, method: str, body: Mapping[str, object] | None = None) -> PluginAnswer:
        """POST /`method`. Raises ServerError in Docker's words, within the time limit."""
        try:
            async with asyncio.timeout(self._timeout):
                return await self._called(method, msgspec.json.encode(body) if body is not None else b"")
        except TimeoutError as error:
            raise ServerError(
                f'{method}: plugin "{self.name}" did not answer within {self._timeout:g} seconds'
            ) from error

    async def _called(self, method: str, body: bytes) -> PluginAnswer:
        client = await _aiohttp()
        for delay in (*RETRY_DELAYS, None):
            try:
                return await self._asked(method, body)
            except client.ClientConnectorError as error:  # nobody heard it: it may be asked again
                if delay is None:
                    raise ServerError(f'{method}: plugin "{self.name}": {error}') from error
                await asyncio.sleep(delay)
            except (client.ClientError, OSError) as error:
                raise ServerError(f'{method}: plugin "{self.name}": {error}') from error
        raise AssertionError("unreachable")

    async def _asked(self, method: str, body: bytes) -> PluginAnswer:
        headers = {"Accept": _ACCEPT, "Content-Type": "application/json"}
        async with self._session.post(f"{self._base}/{method}", data=body, headers=headers) as answer:
            text = b""
            async for chunk in answer.content.iter_any():
                text += chunk
                if len(text) > LONGEST_ANSWER:
                    raise ServerError(f'{method}: plugin "{self.name}" answers more than {LONGEST_ANSWER} bytes')
            status = answer.status
        try:
            found = msgspec.json.decode(text, type=PluginAnswer) if text.strip() else PluginAnswer()
        except msgspec.MsgspecError as error:
            if status == 200:
                raise ServerError(f'{method}: plugin "{self.name}" does not answer in JSON: {error}') from error
            found = PluginAnswer(err=text[:1000].decode(errors="replace").strip())
        if status == 404 and not found.err:
            raise NotFound(f'{method}: plugin "{self.name}" has no such call')
        if status != 200:
            raise ServerError(f"{method}: {found.err or f'status {status}'}")
        if found.err:
            raise ServerError(found.err)
        return found

    async def activate(self) -> None:
        """Raises ServerError when it is not a volume driver; learns its scope."""
        answer = await self.call("Plugin.Activate")
        if _KIND not in (answer.implements or ()):
            raise NotFound(f"plugin {self.name} does not implement the requested interface: {_KIND}")
        with contextlib.suppress(EngineError):  # Docker: a plugin without this call is a local one
            found = (await self.call(f"{_KIND}.Capabilities")).capabilities
            self.scope = "global" if found is not None and found.scope.lower() == "global" else "local"

    # --- as the store uses a driver ------------------------------------------------------------------------------------

    def check(self, name: str, options: Mapping[str, str]) -> None:
        if "\0" in name or len(name.encode()) > local.LONGEST_NAME:
            raise InvalidParameter(f"create {name[:40]!r}: not a volume's name")

    async def create(self, name: str, options: Mapping[str, str]) -> None:
        self.check(name, options)
        await self._about("create", name, "Create", Opts=dict(options))

    async def keep(self, name: str) -> None:
        """It is there already."""

    async def hide(self, name: str) -> None:
        await self._about("remove", name, "Remove")

    async def undo_create(self, name: str) -> None:
        await self._about("remove", name, "Remove")

    async def restore(self, name: str) -> None:
        """What it has removed is gone: the next call about it will say so."""

    async def discard(self, name: str) -> None:
        """It is gone already."""

    async def mount(self, name: str, options: Mapping[str, str], user: str) -> str:
        answer = await self._about("mount", name, "Mount", ID=user)
        if not answer.mountpoint or not answer.mountpoint.startswith("/"):
            raise ServerError(f'mount {name}: plugin "{self.name}" names no absolute path: {answer.mountpoint!r}')
        return answer.mountpoint

    async def unmount(self, name: str, user: str) -> None:
        await self._about("unmount", name, "Unmount", ID=user)

    async def path(self, name: str) -> str:
        """Where it would be found; empty when the plugin does not say."""
        return (await self._about("path", name, "Path")).mountpoint or ""

    async def get(self, name: str) -> PluginVolume:
        """What it tells of one volume. Raises NotFound when it has none of that name."""
        try:
            found = (await self._about("get", name, "Get")).volume
        except ServerError as error:
            raise NotFound(f"get {name}: no such volume: {error.message}") from error
        if found is None or found.name not in ("", name):
            raise NotFound(f"get {name}: no such volume")
        return found

    async def list(self) -> Sequence[PluginVolume]:
        """Its volumes. Raises ServerError `list DRIVER: reason`."""
        try:
            found = (await self.call(f"{_KIND}.List")).volumes or ()
        except EngineError as error:
            raise ServerError(f"list {self.name}: {error.message}") from error
        return [each for each in found if each.name]

    async def _about(self, verb: str, name: str, method: str, **more: object) -> PluginAnswer:
        try:
            return await self.call(f"{_KIND}.{method}", {"Name": name, **more})
        except EngineError as error:
            raise ServerError(f"{verb} {name}: {error.message}") from error

    async def close(self) -> None:
        await self._session.close()


# --- all of them -------------------------------------------------------------------------------------------------------


class Plugins:
    """The plugins of this host, activated when they are first asked for."""

    def __init__(self, sockets: Sequence[Path], specifications: Sequence[Path], timeout: float) -> None:
        """Directories, in the order in which they are looked through; `timeout`: seconds that one call may take."""
        self._sockets = sockets
        self._specifications = specifications
        self._timeout = timeout
        self._active: dict[str, tuple[Endpoint, PluginDriver]] = {}
        self._lock = asyncio.Lock()

    async def get(self, name: str) -> PluginDriver:
        """The driver, activated. Raises NotFound in Docker's words, ServerError when its file is bad or it does not answer."""
        words = f"error looking up volume plugin {name}"
        try:
            found = await asyncio.to_thread(self._endpoint, name)
        except (OSError, ValueError) as error:
            raise ServerError(f"{words}: {error}") from error
        if found is None:
            raise NotFound(f'{words}: plugin "{name[:200]}" not found')
        async with self._lock:
            active = self._active.get(name)
            if active is not None and active[0] == found:
                return active[1]
        driver = PluginDriver(name, await self._session(found), found.url, self._timeout)
        try:
            await driver.activate()
        except EngineError as error:
            await driver.close()
            raise type(error)(f"{words}: {error.message}") from error
        except BaseException:
            await driver.close()
            raise
        async with self._lock:
            old = self._active.get(name)
            self._active[name] = (found, driver)
        if old is not None:
            await old[1].close()
        return driver

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
        if not _DRIVER.fullmatch(name):
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

    def active(self) -> list[str]:
        """Those that have been used."""
        return sorted(self._active)

    async def names(self) -> list[str]:
        """Those that there are, whether they answer or not."""
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
        for _, driver in self._active.values():
            await driver.close()
        self._active.clear()


def _stems(directory: Path, suffixes: tuple[str, ...]) -> Iterator[str]:
    try:
        names = os.listdir(directory)
    except OSError:
        return
    for name in names:
        stem, suffix = os.path.splitext(name)
        if suffix in suffixes and _DRIVER.fullmatch(stem):
            yield stem
        elif _DRIVER.fullmatch(name) and any((directory / name / f"{name}{each}").exists() for each in suffixes):
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
        raise ServerError(f"plugin at {found.url}: {found.ca} {found.certificate} {found.key}: {error}") from error
    return context


async def _aiohttp() -> Any:
    return await asyncio.to_thread(importlib.import_module, "aiohttp")
