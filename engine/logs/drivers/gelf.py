"""The driver gelf: a server of the Graylog Extended Log Format, over UDP or TCP."""

from __future__ import annotations

from typing import Literal

from engine.logs.deliveries import Gelf
from engine.logs.options import BadScheme, Missing, Options, address

NAME = "gelf"
OPTIONS = frozenset((
    "gelf-address", "gelf-compression-type", "gelf-compression-level", "gelf-tcp-max-reconnect",
    "gelf-tcp-reconnect-delay",
))  # fmt: skip

_COMPRESSION = ("gelf-compression-type", "gelf-compression-level")
_RECONNECTION = ("gelf-tcp-max-reconnect", "gelf-tcp-reconnect-delay")
_MOST = (1 << 31) - 1
_TYPES: dict[str, Literal["gzip", "zlib", "none"]] = {"gzip": "gzip", "zlib": "zlib", "none": "none"}


def parse(options: Options) -> Gelf:
    scheme, host, port = _address(options)
    for name in OPTIONS:
        if name in options and scheme == "tcp" and name in _COMPRESSION:
            raise options.invalid(name, "compression is only supported on UDP")
        if name in options and scheme == "udp" and name in _RECONNECTION:
            raise options.invalid(name, f'"{name}" is only valid for TCP')
    kind = options.text("gelf-compression-type", "gzip")
    if kind not in _TYPES:
        raise options.invalid("gelf-compression-type", "must be gzip, zlib or none")
    # Lines wait in the spool instead, as long as it takes.
    options.integer("gelf-tcp-max-reconnect", 3, 0, _MOST)
    found = Gelf(
        scheme or "udp",
        host,
        port,
        _TYPES[kind],
        options.integer("gelf-compression-level", 1, -1, 9),
        reconnect_delay=options.integer("gelf-tcp-reconnect-delay", 1, 0, _MOST),
    )
    if not scheme:
        raise Missing("gelf-address is a required parameter")
    return found


def _address(options: Options) -> tuple[Literal["", "udp", "tcp"], str, int]:
    text = options.text("gelf-address")
    if not text:
        return "", "", 0
    try:
        found = address(text, ("udp", "tcp"))
    except BadScheme as error:
        raise options.invalid("gelf-address", "gelf: endpoint needs to be TCP or UDP") from error
    except ValueError as error:
        raise options.invalid("gelf-address", str(error)) from error
    if not found.port:
        raise options.invalid("gelf-address", "gelf: please provide gelf-address as proto://host:port")
    return ("tcp" if found.scheme == "tcp" else "udp"), found.host or "127.0.0.1", found.port
