"""Contexts for TLS that verify certificates as Docker's programs do.

Owns nothing.
"""

from __future__ import annotations

import ssl


def verifying_context(*, authority: str = "", server: bool = False) -> ssl.SSLContext:
    """Python's default context, which verifies the peer by the certificates of `authority` (path of
    a PEM file), or by the system's. `server`: for a server, whose peers are clients. Raises
    OSError; ssl.SSLError is one.

    Since 3.13 Python refuses certificates without the key identifiers that RFC 5280 asks of an
    authority. Go, and thus Docker, takes them, and many private authorities make such.
    """
    purpose = ssl.Purpose.CLIENT_AUTH if server else ssl.Purpose.SERVER_AUTH
    made = ssl.create_default_context(purpose, cafile=authority or None)
    made.verify_flags &= ~ssl.VerifyFlags.VERIFY_X509_STRICT
    return made
