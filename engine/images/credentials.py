"""Registry credentials and the headers around them: X-Registry-Auth of a client, WWW-Authenticate
and Link of a registry.

Pure. Not here: requests (registry/session.py).
Raises: InvalidParameter, without the secret.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import re
from typing import NamedTuple

import msgspec

from engine.errors import InvalidParameter, decoding_reason

LONGEST = 64 << 10
"""Bytes of an X-Registry-Auth header that are parsed."""


class Credentials(msgspec.Struct, frozen=True, kw_only=True):
    """An AuthConfig: name and password, or a token from an earlier login.

    Its values are secrets, and never appear in logs or messages.
    """

    username: str = ""
    password: str = ""
    auth: str = ""
    """base64 of `username:password`, as some clients send it instead."""
    email: str = ""
    serveraddress: str = ""
    identitytoken: str = ""
    registrytoken: str = ""
    """A bearer token, to be used as it is."""

    def __repr__(self) -> str:
        return f"Credentials(username={self.username!r}, …)"

    def opened(self) -> Credentials:
        """With name and password taken from `auth`, if only that is given.

        Raises InvalidParameter.
        """
        if not self.auth or self.username:
            return self
        try:
            username, colon, password = _base64(self.auth).decode().partition(":")
        except (ValueError, UnicodeDecodeError):
            colon = ""
        if not colon:
            raise InvalidParameter("invalid credentials: auth is not base64 of username:password")
        return msgspec.structs.replace(self, username=username, password=password.rstrip("\0"), auth="")

    @property
    def given(self) -> bool:
        """True if there is anything to log in with."""
        return bool(self.username or self.password or self.identitytoken or self.registrytoken)

    @property
    def basic(self) -> str:
        """The value of an Authorization header."""
        return "Basic " + base64.b64encode(f"{self.username}:{self.password}".encode()).decode()


NOBODY = Credentials()


def registry_auth(header: str | None) -> Credentials:
    """X-Registry-Auth: base64 of either alphabet, with or without padding. Raises InvalidParameter,
    without the header's value.
    """
    if not header or not header.strip():
        return NOBODY
    if len(header) > LONGEST:
        raise InvalidParameter(f"invalid X-Registry-Auth header: longer than {LONGEST} bytes")
    try:
        document = msgspec.json.decode(_base64(header.strip()))
    except (ValueError, RecursionError):
        raise InvalidParameter("invalid X-Registry-Auth header: not base64 of a JSON object") from None
    return credentials(document, "X-Registry-Auth header")


def registry_config(header: str | None) -> dict[str, Credentials]:
    """X-Registry-Config: base64url of a JSON object, credentials by registry. The keys of the
    result are domains as in `Reference.domain`.

    As in Docker, a header that cannot be decoded is ignored; here also a single entry.
    """
    if not header or len(header) > LONGEST:
        return {}
    try:
        document = msgspec.json.decode(_base64(header.strip()))
    except (ValueError, RecursionError):
        return {}
    found: dict[str, Credentials] = {}
    for name, given in document.items() if isinstance(document, dict) else ():
        with contextlib.suppress(InvalidParameter):
            domain = _domain(name)
            # `host` counts before `https://host/v1/`, as in Docker.
            if domain not in found or domain == name:
                found[domain] = credentials(given, "X-Registry-Config header")
    return found


_HUB = frozenset(("index.docker.io", "registry-1.docker.io"))


def _domain(name: str) -> str:
    """The registry of a key in a credential file: `https://index.docker.io/v1/` is docker.io."""
    host = name.removeprefix("https://").removeprefix("http://").partition("/")[0]
    return "docker.io" if host in _HUB else host


def credentials(document: object, what: str) -> Credentials:
    """Credentials from a decoded AuthConfig; null means none. Raises InvalidParameter."""
    if document is None:
        return NOBODY
    if not isinstance(document, dict):
        raise InvalidParameter(f"invalid {what}: a JSON object is expected")
    fields = {str(key).lower(): value for key, value in document.items() if value is not None}
    try:
        return msgspec.convert(fields, Credentials).opened()
    except msgspec.ValidationError as error:
        raise InvalidParameter(f"invalid {what}: {decoding_reason(error)}") from None


def _base64(text: str) -> bytes:
    plain = text.replace("-", "+").replace("_", "/").rstrip("=")
    try:
        return base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
    except binascii.Error:
        raise ValueError("not base64") from None


class Challenge(NamedTuple):
    """One authentication method of a registry; the scheme and the names of parameters in lower
    case.
    """

    scheme: str
    parameters: dict[str, str]


_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_SPACE = re.compile(r"[ \t]*")
_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"', re.DOTALL)
_TOKEN68 = re.compile(r"[A-Za-z0-9._~+/-]+=*(?=[ \t]*(?:,|$))")


def challenges(headers: list[str]) -> list[Challenge]:
    """Every challenge in WWW-Authenticate headers. A syntax error ends its header; challenges
    before it count.
    """
    found: list[Challenge] = []
    for header in headers:
        _challenges(header, found)
    return found


def _challenges(text: str, offered: list[Challenge]) -> None:
    at = 0
    current: Challenge | None = None
    while at < len(text):
        at = _skip(text, at)
        word = _TOKEN.match(text, at)
        if word is None:
            return
        after = _SPACE.match(text, word.end())
        end = after.end() if after else word.end()
        if current is not None and text[end : end + 1] == "=":
            end = _skip_space(text, end + 1)
            quoted = _QUOTED.match(text, end)
            plain = None if quoted else _TOKEN.match(text, end)
            value = quoted or plain
            if value is None:
                return
            content = re.sub(r"\\(.)", r"\1", quoted[1], flags=re.DOTALL) if quoted else value[0]
            current.parameters.setdefault(word[0].lower(), content)
            at = value.end()
        else:
            current = Challenge(word[0].lower(), {})
            offered.append(current)
            at = end
            opaque = _TOKEN68.match(text, at)
            if opaque and at > word.end():
                at = opaque.end()


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t,":
        at += 1
    return at


def _skip_space(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t":
        at += 1
    return at


_LINK = re.compile(r'<([^>]*)>((?:\s*;\s*[A-Za-z*]+\s*=\s*(?:"[^"]*"|[^",;\s]+))*)')
_RELATION = re.compile(r';\s*rel\s*=\s*(?:"([^"]*)"|([^",;\s]+))', re.IGNORECASE)


def next_page(headers: list[str]) -> str:
    """The target of the link to the next page, as written; "" when there is none."""
    for header in headers:
        for target, parameters in _LINK.findall(header):
            relation = _RELATION.search(parameters)
            if relation and "next" in (relation[1] or relation[2] or "").lower().split():
                return str(target)
    return ""


__all__ = ["NOBODY", "Challenge", "Credentials", "challenges", "credentials", "next_page", "registry_auth"]
