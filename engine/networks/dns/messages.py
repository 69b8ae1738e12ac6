"""DNS messages as a forwarding resolver needs them: the question of a query, and the engine's own
answers.

Written by hand because it is the resolver's inner loop: dnslib takes some 16 times as long for a
question and its answer (bench/micro/test_names.py). Forwarded messages stay bytes: records of other
servers are not decoded, no compression pointer followed. A name is held as in a message, in lower
case, without the root's zero octet: `\\x03web\\x05mynet`.

Rules: RFC 1035 (messages, 4.1), RFC 6891 (EDNS), RFC 4343 (case), RFC 3596 (AAAA, ip6.arpa). Pure.
Tested against dnslib. Raises: Malformed.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

A, PTR, AAAA, OPT, ANY = 1, 12, 28, 41, 255
IN = 1

NO_ERROR, FORMAT_ERROR, SERVER_FAILURE, NAME_ERROR, NOT_IMPLEMENTED, REFUSED = range(6)
BAD_VERSION = 16

SMALLEST, LARGEST = 512, 4096
"""Bounds for the size of datagram that a client says it accepts."""

_QR, _OPCODE, _AA, _TC, _RD, _RA, _CD = 0x8000, 0x7800, 0x0400, 0x0200, 0x0100, 0x0080, 0x0010
_DO = 0x8000

_HEADER = struct.Struct("!6H")
_TYPE_CLASS = struct.Struct("!HH")
_RECORD = struct.Struct("!HHIH")
_QUESTION_AT = _HEADER.size
_NAME_OF_QUESTION = b"\xc0\x0c"
SHORTEST_RECORD = len(_NAME_OF_QUESTION) + _RECORD.size + 4
"""Octets of an A record for the name of the question."""
LONGEST_NAME = 254
_IN_ADDR, _IP6 = b"\x07in-addr\x04arpa", b"\x03ip6\x04arpa"


class Malformed(Exception):
    """A query that cannot be parsed. `reply` is the answer to send; None for none."""

    def __init__(self, reply: bytes | None) -> None:
        super().__init__()
        self.reply = reply


class Query(NamedTuple):
    """One question.

    `section` is the question's bytes as they came. `edns` is the flags of OPT, None without it.
    """

    id: int
    flags: int
    name: bytes
    type: int
    class_: int
    section: bytes
    edns: int | None
    size: int
    """Size of an answer in octets that the client accepts in a datagram."""


def parse(message: bytes) -> Query:
    """Parse a datagram or frame. Raises Malformed."""
    if len(message) < _QUESTION_AT:
        raise Malformed(None)
    number, flags, questions, *others = _HEADER.unpack_from(message)
    if flags & _QR:
        raise Malformed(None)
    if flags & _OPCODE:
        raise Malformed(_bare(number, flags, NOT_IMPLEMENTED))
    try:
        if questions != 1:
            raise ValueError
        end = _QUESTION_AT
        while size := message[end]:
            if size > 63:
                raise ValueError
            end += size + 1
        if end - _QUESTION_AT > LONGEST_NAME:
            raise ValueError
        kind, class_ = _TYPE_CLASS.unpack_from(message, end + 1)
        # Octets that count labels are below 64 and so no letters: `lower` leaves them alone.
        name = message[_QUESTION_AT:end].lower()
        end += 5
        edns, largest = _options(message, end, *others) if any(others) else (None, SMALLEST)
    except (IndexError, ValueError, struct.error):
        raise Malformed(_bare(number, flags, FORMAT_ERROR)) from None
    query = Query(number, flags, name, kind, class_, message[_QUESTION_AT:end], edns, largest)
    if edns is not None and edns >> 16 & 0xFF:
        raise Malformed(answer(query, (), rcode=BAD_VERSION))
    return query


def _options(message: bytes, position: int, answers: int, authorities: int, additional: int) -> tuple[int | None, int]:
    """EDNS flags and size from the OPT record.

    Raises IndexError, ValueError or struct.error for missing records.
    """
    found: tuple[int | None, int] = (None, SMALLEST)
    for _ in range(answers + authorities + additional):
        root = message[position] == 0
        while size := message[position]:
            if size > 63:
                if size < 0xC0:
                    raise ValueError
                position += 1
                break
            position += size + 1
        kind, class_, rest, length = _RECORD.unpack_from(message, position + 1)
        position += 1 + _RECORD.size + length
        if position > len(message):
            raise ValueError
        if kind == OPT:
            if found[0] is not None or not root:
                raise ValueError
            found = rest, min(max(class_, SMALLEST), LARGEST)
    return found


def answer(
    query: Query, records: Sequence[bytes], *, limit: int = 0, rcode: int = NO_ERROR, authoritative: bool = True
) -> bytes:
    """A reply with these records of at most `limit` octets (0 for any), cut off with TC set
    beyond.
    """
    options = b""
    if query.edns is not None:
        extended = (rcode >> 4) << 24 | query.edns & _DO
        options = b"\0" + _RECORD.pack(OPT, LARGEST, extended, 0)
    flags = _QR | query.flags & (_RD | _CD) | _RA | rcode & 15
    if authoritative:
        flags |= _AA
    body = b"".join(records)
    room = limit - _QUESTION_AT - len(query.section) - len(options)
    if limit and len(body) > room:
        flags |= _TC
        kept: list[bytes] = []
        for record in records:
            room -= len(record)
            if room < 0:
                break
            kept.append(record)
        records, body = kept, b"".join(kept)
    return _HEADER.pack(query.id, flags, 1, len(records), 0, 1 if options else 0) + query.section + body + options


def _bare(number: int, flags: int, rcode: int) -> bytes:
    return _HEADER.pack(number, _QR | flags & (_OPCODE | _RD) | _RA | rcode, 0, 0, 0, 0)


def address_record(address: bytes, ttl: int) -> bytes:
    """An A or AAAA record for the name of the question; `address` is 4 or 16 octets."""
    kind = A if len(address) == 4 else AAAA
    return _NAME_OF_QUESTION + _RECORD.pack(kind, IN, ttl, len(address)) + address


def pointer_record(name: bytes, ttl: int) -> bytes:
    """A PTR record for the name of the question."""
    return _NAME_OF_QUESTION + _RECORD.pack(PTR, IN, ttl, len(name) + 1) + name + b"\0"


# --- passing on -----------------------------------------------------------------------------------


def with_id(message: bytes, number: int) -> bytes:
    """The same message under another id."""
    return number.to_bytes(2, "big") + message[2:]


def answers(reply: bytes, number: int, query: Query) -> bool:
    """True if this is a reply under that id to that very question.

    Servers may change the case of letters.
    """
    if len(reply) < _QUESTION_AT:
        return False
    found, flags, questions, _, _, _ = _HEADER.unpack_from(reply)
    if found != number or not flags & _QR or flags & _OPCODE:
        return False
    if questions == 0:  # some servers refuse without repeating the question
        return flags & 15 in (FORMAT_ERROR, SERVER_FAILURE, NOT_IMPLEMENTED, REFUSED)
    length = len(query.name) + 1
    section = reply[_QUESTION_AT : _QUESTION_AT + length + 4]
    return (
        questions == 1 and section[:length].lower() == query.name + b"\0" and section[length:] == query.section[length:]
    )


def rcode(reply: bytes) -> int:
    """The lower four bits of the response code."""
    return reply[3] & 15


# --- names ----------------------------------------------------------------------------------------


def encoded(text: str) -> bytes | None:
    """`web.mynet` in the form held here; None for a name that a message cannot carry.

    Such a name has an empty label, a label above 63 octets, or more than 254 octets in all.
    """
    labels = text.rstrip(".").lower().encode().split(b".")
    if not all(0 < len(label) <= 63 for label in labels):
        return None
    name = b"".join(bytes((len(label),)) + label for label in labels)
    return name if len(name) <= LONGEST_NAME else None


def address_of(name: bytes) -> bytes | None:
    """The packed address of a name below in-addr.arpa or ip6.arpa; None for other names."""
    if name.endswith(_IN_ADDR):
        labels = _labels(name[: -len(_IN_ADDR)])
        if len(labels) != 4 or not all(label.isdigit() and int(label) < 256 for label in labels):
            return None
        return bytes(int(label) for label in reversed(labels))
    if name.endswith(_IP6):
        nibbles = _labels(name[: -len(_IP6)])
        if len(nibbles) != 32 or not all(len(each) == 1 and each in b"0123456789abcdef" for each in nibbles):
            return None
        return bytes.fromhex(b"".join(reversed(nibbles)).decode())
    return None


def _labels(name: bytes) -> list[bytes]:
    found = []
    position = 0
    while position < len(name):
        end = position + 1 + name[position]
        found.append(name[position + 1 : end])
        position = end
    return found
