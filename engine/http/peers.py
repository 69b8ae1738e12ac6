"""The peer of a connection: its process or host, its certificate, and whether it is still
connected. Functions of a transport, without state. Not here: the use of the results (`protocol.py`,
`tls.py`).
"""

from __future__ import annotations

import select
import socket
import ssl
import struct
from typing import Any, NamedTuple

_CREDENTIALS = struct.Struct("iII")
"""`struct ucred`: pid, uid, gid."""


class Certificate(NamedTuple):
    """The certificate of a client that TLS has verified."""

    name: str
    """Common name of its subject; the last one if there are several, as in Go."""
    pem: str


def certificate(transport: Any) -> Certificate | None:
    """The peer's certificate. None without TLS."""
    tls = transport.get_extra_info("ssl_object")
    encoded = tls.getpeercert(binary_form=True) if tls is not None else None
    if not encoded:
        return None
    subject = tls.getpeercert().get("subject", ())
    names = [value for attributes in subject for key, value in attributes if key == "commonName"]
    return Certificate(names[-1] if names else "", ssl.DER_cert_to_PEM_cert(encoded))


def owner(transport: Any) -> str:
    """`unix:PID/UID` of the process that connected (SO_PEERCRED, unix(7)), or the client's host.

    Empty when the connection is closed.
    """
    connection = transport.get_extra_info("socket")
    try:
        if connection is not None and connection.family == socket.AF_UNIX:
            found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            pid, uid, _ = _CREDENTIALS.unpack(found)
            return f"unix:{pid}/{uid}"
        address = transport.get_extra_info("peername")
    except (OSError, ValueError, AttributeError):  # uvloop asks a socket that it has not any more
        return ""
    return str(address[0]) if address else ""


def hung_up(transport: Any) -> bool | None:
    """Returns True if the peer of a Unix socket has closed it, and False if it has at most shut
    down one direction (POLLHUP, unix(7)). None for other sockets, where the two look the same.
    """
    connection = transport.get_extra_info("socket")
    if connection is None or connection.family != socket.AF_UNIX:
        return None
    descriptor = connection.fileno()
    if descriptor < 0:
        return True
    poll = select.poll()
    poll.register(descriptor, 0)
    return bool(poll.poll(0))
