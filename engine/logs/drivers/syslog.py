"""The driver syslog: a server over UDP, TCP, TLS or a Unix socket, or the syslog of this host."""

from __future__ import annotations

from typing import Literal

from engine.errors import InvalidParameter
from engine.logs.deliveries import Syslog, Tls
from engine.logs.options import Address, BadScheme, Options, address

NAME = "syslog"
OPTIONS = frozenset((
    "syslog-address", "address", "syslog-facility", "syslog-format", "syslog-tls-ca-cert", "syslog-tls-cert",
    "syslog-tls-key", "syslog-tls-skip-verify",
))  # fmt: skip
"""`address` is what API 1.19 calls `syslog-address`."""

_TLS = "tcp+tls"
_PORT = 514
_LOCALHOST = "127.0.0.1"
_FACILITIES = (
    "kern", "user", "mail", "daemon", "auth", "syslog", "lpr", "news", "uucp", "cron", "authpriv", "ftp",
)  # fmt: skip
"""By number; local0 to local7 are 16 to 23."""
_CODES = {name: code for code, name in enumerate(_FACILITIES)} | {f"local{number}": 16 + number for number in range(8)}
_FORMATS: dict[str, Literal["unix", "rfc3164", "rfc5424", "rfc5424micro"]] = {
    "": "unix",
    "rfc3164": "rfc3164",
    "rfc5424": "rfc5424",
    "rfc5424micro": "rfc5424micro",
}


def parse(options: Options) -> Syslog:
    found = _address(options)
    code = _CODES.get(options.text("syslog-facility") or "daemon")
    if code is None:
        code = options.integer("syslog-facility", 0, 0, 23, "invalid syslog facility")
    form = options.text("syslog-format")
    if form not in _FORMATS:
        raise options.invalid("syslog-format", "Invalid syslog format")
    return Syslog(
        scheme=found.scheme,  # type: ignore[arg-type]  # one of those that `_address` accepts
        host=found.host,
        port=found.port,
        path=found.path,
        facility=code,
        format=_FORMATS[form],
        tls=_tls(options) if found.scheme == _TLS else None,
    )


def _address(options: Options) -> Address:
    name = "syslog-address" if options.text("syslog-address") else "address"
    text = options.text(name)
    if options.text("address") not in ("", text):
        raise options.invalid("address", "conflicting options: syslog-address has another value")
    if not text:
        return Address("", port=_PORT)
    try:
        found = address(text, ("tcp", "udp", _TLS), ("unix", "unixgram"))
    except BadScheme as error:
        raise InvalidParameter(f"syslog-address should be in form proto://address, got {text}") from error
    except ValueError as error:
        raise options.invalid(name, str(error)) from error
    return found if found.path else found._replace(host=found.host or _LOCALHOST, port=found.port or _PORT)


def _tls(options: Options) -> Tls:
    return Tls(
        ca=options.text("syslog-tls-ca-cert"),
        cert=options.text("syslog-tls-cert"),
        key=options.text("syslog-tls-key"),
        skip_verify="syslog-tls-skip-verify" in options,  # whatever its value is, as in Docker
    )
