"""Values of log options: the texts of `--log-opt`, parsed by the rules of dockerd's drivers.

Sizes are those of Docker's go-units, numbers and booleans those of Go's strconv, durations those of
Go's time. Pure. Not here: which options a driver has (`drivers/`).
Raises: InvalidParameter with the names of the driver and the option.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple
from urllib.parse import unquote

from engine.common import booleans, patterns
from engine.common.times import parse_duration
from engine.errors import InvalidParameter

BIGGEST = (1 << 62) - 1
"""Largest size in bytes."""
FILES_MAX = 1000
"""Most files of a log. They are limited because a reader holds every file of a log open. Docker has
no limit."""
PATH_MAX = 107
"""Bytes of a socket's path, unix(7)."""

_SIZE = re.compile(r"(\d{1,30}(?:\.\d{1,30})?) ?([kKmMgGtTpP])?[iI]?[bB]?", re.ASCII)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
_INTEGER = re.compile(r"[+-]?[0-9]{1,18}", re.ASCII)
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_HOST = re.compile(r"[^\s:/?#@\[\]\x00-\x1f\x7f]+")
_SHOWN_MAX = 200
_SECRETS = frozenset(("splunk-token",))
"""Options whose values no message quotes."""


class Missing(InvalidParameter):
    """An option that the driver cannot do without is not given; everything else is valid. The
    daemon's defaults may lack it, because each container can give it."""


class BadScheme(ValueError):
    """An address without a scheme, or with one that the driver does not have."""


class Address(NamedTuple):
    """Of a server: `host` (IPv6 without brackets; empty if not given) and `port` (0 if not given).
    Of a Unix socket: its absolute `path`."""

    scheme: str
    host: str = ""
    port: int = 0
    path: str = ""


class Options:
    """The options of one driver. A method returns the value of an option, or its default if the
    option is not given. With `empty`, an empty value counts as not given.
    """

    def __init__(self, driver: str, values: Mapping[str, str], *, empty: bool) -> None:
        self.driver = driver
        self._values = {name: value for name, value in values.items() if value or not empty}

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def only(self, names: Collection[str]) -> None:
        """Refuse options of other names."""
        for name in self._values:
            if name not in names:
                raise InvalidParameter(f"unknown log opt '{name[:_SHOWN_MAX]}' for {self.driver} log driver")

    def invalid(self, name: str, why: str) -> InvalidParameter:
        """The error for the value of an option."""
        value = "" if name in _SECRETS else f" '{self._values.get(name, '')[:_SHOWN_MAX]}'"
        return InvalidParameter(f"invalid value{value} for log opt '{name}' for {self.driver} log driver: {why}")

    def text(self, name: str, default: str = "") -> str:
        return self._values.get(name, default)

    def boolean(self, name: str, default: bool) -> bool:
        if name not in self._values:
            return default
        found = booleans.WORDS.get(self._values[name])
        if found is None:
            raise self.invalid(name, "neither true nor false")
        return found

    def integer(self, name: str, default: int, low: int, high: int, why: str = "") -> int:
        """From `low` to `high`. `why`: the reason for refusing another number."""
        if name not in self._values:
            return default
        text = self._values[name]
        if not _INTEGER.fullmatch(text):
            raise self.invalid(name, why or "not a number")
        number = int(text)
        if not low <= number <= high:
            raise self.invalid(name, why or f"must be from {low} to {high}")
        return number

    def size(self, name: str, default: int, *, binary: bool = False) -> int:
        """In bytes. `10m` is 10,000,000, or 10 MiB with `binary`."""
        if name not in self._values:
            return default
        try:
            return size(self._values[name], binary=binary)
        except ValueError as error:
            raise self.invalid(name, str(error)) from error

    def seconds(self, name: str, default: float) -> float:
        """A duration of 0 or more, such as `1m30s`."""
        if name not in self._values:
            return default
        try:
            found = parse_duration(self._values[name])
            if abs(found) >= 1 << 63:  # Go's longest
                raise ValueError
        except ValueError as error:
            raise self.invalid(name, "value must be a duration") from error
        if found < 0:
            raise self.invalid(name, "value must be a duration that is non-negative")
        return found / 1_000_000_000

    def expression(self, name: str) -> str:
        """A regular expression in RE2's syntax, which is Go's."""
        text = self._values.get(name, "")
        try:
            patterns.compiled(text)
        except ValueError as error:
            raise self.invalid(name, f"error parsing regexp: {error}") from error
        return text


def size(text: str, *, binary: bool = False) -> int:
    """Raises ValueError with the reason."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(f"invalid size: '{text[:_SHOWN_MAX]}'")
    found = int(float(match[1]) * (1024 if binary else 1000) ** _POWERS[(match[2] or "").lower()])
    if found > BIGGEST:
        raise ValueError(f"size is too large: '{text[:_SHOWN_MAX]}'")
    return found


def address(text: str, network: Sequence[str], sockets: Sequence[str] = ()) -> Address:
    """An address as `scheme://host:port` with one of the schemes `network`, or `scheme:///path`
    with one of `sockets`.

    Raises ValueError with the reason, in the words of Docker's drivers: BadScheme if that is it.
    """
    match = _ADDRESS.fullmatch(text)
    if match is None:
        raise BadScheme("should be in form proto://address")
    scheme, rest = match[1].lower(), match[2]
    if scheme in sockets:
        path = unquote(rest)
        if not path.strip("/"):
            raise ValueError("path is empty")
        if not path.startswith("/") or "\0" in path or len(path.encode()) > PATH_MAX:
            raise ValueError(f"must be an absolute path of at most {PATH_MAX} bytes")
        return Address(scheme, path=path)
    if scheme not in network:
        raise BadScheme(f"unsupported scheme: '{scheme}'")
    host, port = _host_and_port(rest.removesuffix("/"))
    return Address(scheme, host, port)


def _host_and_port(text: str) -> tuple[str, int]:
    if "/" in text:
        raise ValueError("should not contain a path element")
    bracketed = re.fullmatch(r"\[([^\]]*)\](?::(.*))?", text, re.DOTALL)
    if bracketed is not None:
        host, port = unquote(bracketed[1]), bracketed[2]
        try:
            if ipaddress.ip_address(host).version != 6:
                raise ValueError
        except ValueError as error:
            raise ValueError(f'invalid host "[{host[:_SHOWN_MAX]}]"') from error
    else:
        host, colon, port = text.partition(":")
        if ":" in port:
            raise ValueError("too many colons in address")
        if host and not _HOST.fullmatch(host):
            raise ValueError(f'invalid host "{host[:_SHOWN_MAX]}"')
        port = port if colon else None
    if port is None:
        return host, 0
    if not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) < 1 << 16:
        raise ValueError(f'invalid port "{port[:_SHOWN_MAX]}"')
    return host, int(port)


__all__ = ["BIGGEST", "FILES_MAX", "Address", "BadScheme", "Missing", "Options", "address", "size"]
