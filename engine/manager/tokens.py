"""Join tokens: `SWMTKN-1-<digest of the root certificate>-<secret>`.

The first part is the SHA-256 of the root certificate's PEM, 50 digits of base 36: a joining node
compares it with the root that a manager sends, before it sends the token. The second part is 128
random bits, 25 digits: the swarm compares it, in constant time. A swarm has two tokens, and the
secret decides about the role.

Pure. Raises InvalidParameter for a text that is no token. Messages never contain the secret.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from typing import NamedTuple

from engine.errors import InvalidParameter
from engine.manager.records import ID_LENGTH, base36, new_id

_DIGEST_LENGTH = 50
_FORM = re.compile(rf"SWMTKN-1-([0-9a-z]{{{_DIGEST_LENGTH}}})-([0-9a-z]{{{ID_LENGTH}}})", re.ASCII)

NECESSARY = "A valid join token is necessary to join this cluster"
"""Clients and tests search for a part of it."""


class Token(NamedTuple):
    digest: bytes
    """SHA-256 of the root certificate's PEM."""
    secret: str


def new_secret() -> str:
    return new_id()


def token(root: str, secret: str) -> str:
    """The token of the swarm whose root certificate is the PEM `root`."""
    digest = int.from_bytes(hashlib.sha256(root.encode()).digest(), "big")
    return f"SWMTKN-1-{base36(digest, _DIGEST_LENGTH)}-{secret}"


def parse(text: str) -> Token:
    """The parts of a token. Raises InvalidParameter."""
    found = _FORM.fullmatch(text)
    if found is None:
        raise InvalidParameter(
            f"{NECESSARY}: the form is SWMTKN-1-<{_DIGEST_LENGTH} characters>-<{ID_LENGTH} characters>; "
            "`docker swarm join-token` on a manager prints it"
        )
    digest = int(found[1], 36)
    if digest >> 256:
        raise InvalidParameter(f"{NECESSARY}: its first part is no SHA-256 in base 36")
    return Token(digest.to_bytes(32, "big"), found[2])


def pins(wanted: Token, root: str) -> bool:
    """Returns True if `root`, as a manager sent it, is the certificate that the token names."""
    return hmac.compare_digest(hashlib.sha256(root.encode()).digest(), wanted.digest)


def same(one: str, other: str) -> bool:
    """Compare two tokens or secrets in constant time. An empty one equals none."""
    return hmac.compare_digest(one.encode(), other.encode()) and one != ""
