"""Netlink messages and attributes as bytes, for every protocol family alike.

Rules: netlink(7), linux/netlink.h. Numbers are in the host's byte order unless a family says
otherwise. Pure: no socket here. Raises: NetlinkError for a truncated message.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterator
from typing import NamedTuple

ERROR, DONE = 2, 3
REQUEST, ACK, DUMP_INTERRUPTED, REPLACE, EXCL, CREATE, DUMP = 0x1, 0x4, 0x10, 0x100, 0x200, 0x400, 0x300
NESTED = 0x8000

_CAPPED, _ACK_TLVS = 0x100, 0x200
_ATTR_MSG = 1
_TYPE = 0x3FFF

HEADER = struct.Struct("=IHHII")
ATTRIBUTE = struct.Struct("=HH")


class NetlinkError(OSError):
    """A request that the kernel refused."""


class Request(NamedTuple):
    """One message without its header. `what` names it in errors."""

    type: int
    flags: int
    body: bytes
    what: str


def message(request: Request, sequence: int, flags: int) -> bytes:
    """The whole message, padded, with `flags` added to the request's own."""
    size = HEADER.size + len(request.body)
    return (
        HEADER.pack(size, request.type, REQUEST | flags | request.flags, sequence, 0) + request.body + bytes(-size & 3)
    )


def read_messages(data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
    """(type, flags, sequence, body) of each message in what one recv(2) returned."""
    position = 0
    while position + HEADER.size <= len(data):
        size, kind, flags, sequence, _ = HEADER.unpack_from(data, position)
        if size < HEADER.size or position + size > len(data):
            raise NetlinkError(errno.EBADMSG, "netlink: truncated message from the kernel")
        yield kind, flags, sequence, data[position + HEADER.size : position + size]
        position += size + 3 & ~3


def refusal(body: bytes, flags: int, what: str) -> NetlinkError | None:
    """The error in an NLMSG_ERROR or NLMSG_DONE; None for an acknowledgement.

    Such a message has an errno, the header of the request (or all of it) and, with extended
    acknowledgements, the kernel's words. Pass `flags` 0 for NLMSG_DONE, which lacks the request.
    """
    number = -struct.unpack_from("=i", body)[0]
    if number == 0:
        return None
    words = ""
    if flags & _ACK_TLVS:
        length = struct.unpack_from("=I", body, 4)[0]
        start = 4 + (HEADER.size if flags & _CAPPED else length + 3 & ~3)
        words = read_attributes(body, start).get(_ATTR_MSG, b"").rstrip(b"\0").decode(errors="replace")
    reason = os.strerror(number)
    return NetlinkError(number, f"{what}: {reason} ({words})" if words else f"{what}: {reason}")


def read_attributes(body: bytes, position: int = 0) -> dict[int, bytes]:
    """Values by attribute type, without the flags of the type.

    If a type occurs twice, the last value counts.
    """
    found = {}
    while position + 4 <= len(body):
        size, kind = ATTRIBUTE.unpack_from(body, position)
        if size < 4:
            break
        found[kind & _TYPE] = body[position + 4 : position + size]
        position += size + 3 & ~3
    return found


def read_list(body: bytes) -> Iterator[bytes]:
    """Values of attributes that all have the same type."""
    position = 0
    while position + 4 <= len(body):
        (size,) = struct.unpack_from("=H", body, position)
        if size < 4:
            return
        yield body[position + 4 : position + size]
        position += size + 3 & ~3


def read_number(body: bytes, position: int, kind: int) -> int:
    """An attribute that holds a number in network byte order; 0 when it is missing.

    Faster than `read_attributes` when thousands of messages are searched for one attribute.
    """
    while position + 4 <= len(body):
        size, found = ATTRIBUTE.unpack_from(body, position)
        if found == kind:
            return int.from_bytes(body[position + 4 : position + size], "big")
        if size < 4:
            break
        position += size + 3 & ~3
    return 0


def read_text(value: bytes) -> str:
    """A C string."""
    return value.split(b"\0", 1)[0].decode(errors="replace")


def attribute(kind: int, value: bytes) -> bytes:
    """An attribute, padded to 4 bytes."""
    size = 4 + len(value)
    return ATTRIBUTE.pack(size, kind) + value + bytes(-size & 3)


def nest(kind: int, value: bytes) -> bytes:
    """An attribute that contains attributes."""
    return attribute(kind | NESTED, value)


def text(kind: int, value: str) -> bytes:
    """A C string."""
    return attribute(kind, value.encode() + b"\0")


def u32(kind: int, value: int) -> bytes:
    """An attribute with a 32-bit number in the host's byte order."""
    return attribute(kind, struct.pack("=I", value))
