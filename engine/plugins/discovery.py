"""Where the plugins of this host listen that it has by a socket or a file (Docker's documentation,
"Docker Plugin API", section "Plugin discovery").

The plugin NAME is defined by the first of these files that exists:
- `NAME.sock` or `NAME/NAME.sock` in a directory of sockets;
- `NAME.spec` (one line, a URL) or `NAME.json` (`Addr` and `TLSConfig`), or the same below `NAME/`,
  in a directory of specifications.

Not here: plugins that the engine installs and runs itself (`managed/`).
Threads: blocks on files, so it is called in threads, but for `known`.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from engine.errors import decoding_reason
from engine.system import files
from engine.system.directory_watch import DirectoryWatch
from engine.wire import folded

LONGEST_FILE = 1 << 20

TRUSTED = 5.0
"""Seconds for which the names are trusted while no directory has changed. inotify(7) reports
neither a mount over a directory nor what another host does to a shared one.
"""

_log = logging.getLogger(__name__)
_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]{0,249}")


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Where a plugin listens: a Unix socket's path, or the base of a URL."""

    socket: str = ""
    url: str = "http://plugin"
    ca: str = ""
    certificate: str = ""
    key: str = ""
    insecure: bool = False
    hostile: bool = False
    """The plugin may replace the socket by a link, which is not followed."""


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
        try:
            return endpoint(text.decode())
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
    try:
        found = folded.decode(text, _Specification)
        return endpoint(found.addr, found.tls_config)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: {decoding_reason(error)}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


class Discovery:
    """The directories of one engine, in search order."""

    def __init__(self, sockets: Sequence[Path], specifications: Sequence[Path]) -> None:
        self._sockets = sockets
        self._specifications = specifications
        self._watch = DirectoryWatch((*sockets, *specifications))
        self._looking = threading.Lock()
        self._looked = -TRUSTED
        self._found: list[str] = []

    def find(self, name: str) -> Endpoint | None:
        """The plugin's endpoint; None when there is none of that name.

        Raises ValueError or OSError for a file that is invalid.
        """
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

    def known(self) -> list[str] | None:
        """What `names` would find, if that is known without reading directories. Does not
        block.
        """
        if not self._looking.acquire(blocking=False):
            return None
        try:
            if time.monotonic() - self._looked > TRUSTED or self._watch.changed():
                return None
            return self._found
        finally:
            self._looking.release()

    def names(self) -> list[str]:
        """Names of all plugins, whether they answer or not."""
        with self._looking:
            self._looked = time.monotonic()
            try:
                self._watch.begin()
            except OSError as error:
                self._watch.close()
                _log.debug("directories of plugins cannot be watched: %s", error)
            self._found = self._read()
            return self._found

    def close(self) -> None:
        """Stop watching."""
        with self._looking:
            self._watch.close()

    def _read(self) -> list[str]:
        found: set[str] = set()
        for directory, suffixes in (
            *((each, (".sock",)) for each in self._sockets),
            *((each, (".spec", ".json")) for each in self._specifications),
        ):
            found.update(_stems(directory, suffixes))
        return sorted(found)


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
