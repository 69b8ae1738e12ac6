"""HTTP proxies: the variables that name them, and which one a URL needs.

The configuration is put into the variables of this process, as dockerd does it, so that programs
which the engine runs (git) and libraries (botocore) use the same proxies.

Rules, also for what is an exception: Go's golang.org/x/net/http/httpproxy, which dockerd uses.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from typing import NamedTuple

_SPELLINGS = {name: (name, name.lower()) for name in ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")}
_PORTS = {"http": 80, "https": 443}
_PROXY = re.compile(
    r"(?:([A-Za-z][A-Za-z0-9+.-]*)://)?(?:([^/?#\s]*)@)?(\[[0-9A-Fa-f:.]+\]|[^/?#\s:@\[\]]+)(:\d{1,5})?/?"
)


class Proxy(NamedTuple):
    """A proxy."""

    url: str
    """Without user and password."""
    user: str
    """`USER:PASSWORD` as in a URL; empty for none."""


def export(http: str, https: str, no: str) -> list[str]:
    """Set the variables in all spellings where a value is not empty. Returns those that had another
    value.
    """
    replaced = []
    for name, value in (("HTTP_PROXY", http), ("HTTPS_PROXY", https), ("NO_PROXY", no)):
        for spelling in _SPELLINGS[name] if value else ():
            if os.environ.get(spelling, value) not in ("", value):
                replaced.append(spelling)
            os.environ[spelling] = value
    return replaced


def variable(name: str, environment: Mapping[str, str] = os.environ) -> str:
    """The value of HTTP_PROXY, HTTPS_PROXY or NO_PROXY in any spelling, capitals first."""
    return next(filter(None, (environment.get(spelling) for spelling in _SPELLINGS[name])), "")


def hidden(url: str) -> str:
    """A proxy's URL with another user and password, as Docker shows it."""
    scheme, separator, rest = url.partition("://") if "://" in url else ("", "", url)
    authority, slash, path = rest.partition("/")
    if "@" not in authority:  # or the password has a slash
        authority, slash, path = rest, "", ""
    user, _, host = authority.rpartition("@")
    return f"{scheme}{separator}xxxxx:xxxxx@{host}{slash}{path}" if user else url


def parse(text: str) -> Proxy:
    """Raises ValueError, which does not quote the text: it may have a password."""
    parts = _PROXY.fullmatch(text)
    if parts is None or (parts[4] and int(parts[4][1:]) > 65535):
        raise ValueError("must be an http or https URL")
    scheme = (parts[1] or "http").lower()
    if scheme not in _PORTS:
        raise ValueError("must be an http or https URL: other proxies are not supported")
    return Proxy(f"{scheme}://{parts[3]}{parts[4] or ''}", parts[2] or "")


def proxy_of(scheme: str, host: str, port: int | None, environment: Mapping[str, str] = os.environ) -> Proxy | None:
    """The proxy for a URL; None for none. Raises ValueError as `parse`."""
    text = variable("HTTPS_PROXY" if scheme == "https" else "HTTP_PROXY", environment)
    if not text or _is_excepted(host, port or _PORTS.get(scheme, 0), variable("NO_PROXY", environment)):
        return None
    return parse(text)


def _is_excepted(host: str, port: int, rules: str) -> bool:
    """True for a host that is reached without proxy: this host itself, or one of the rules."""
    host = host.strip("[]").lower()
    address = _address(host)
    if host == "localhost" or (address is not None and address.is_loopback):
        return True
    return any(_matches(rule.strip().lower(), host, port, address) for rule in rules.split(","))


def _matches(rule: str, host: str, port: int, address: ipaddress.IPv4Address | ipaddress.IPv6Address | None) -> bool:
    if rule == "*":
        return True
    if "/" in rule:
        try:
            return address is not None and address in ipaddress.ip_network(rule, strict=False)
        except ValueError:
            return False
    name, colon, digits = rule.rpartition(":")
    if not colon or _address(rule) is not None or name.endswith("]") != name.startswith("["):
        name, digits = rule, ""
    else:
        name = name.removeprefix("[").removesuffix("]")
    if not name or digits not in ("", str(port)):
        return False
    if (found := _address(name)) is not None:
        return found == address
    if name.startswith("*."):
        name = name[1:]
    return host.endswith(name) if name.startswith(".") else host == name or host.endswith(f".{name}")


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address, as IPv4 where it is a mapped one."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    return (address.version == 6 and address.ipv4_mapped) or address


__all__ = ["Proxy", "export", "hidden", "parse", "proxy_of", "variable"]
