"""Reads subject and validity of a certificate (RFC 5280), which the daemon needs of its own one.

The daemon does not load a library for certificates: TLS verifies them, the manager's process signs
them, and a short-lived child makes keys. These five values are all that is left.

Pure. Raises: ValueError for a document that is no certificate.
"""

from __future__ import annotations

import base64
import binascii
import calendar
import re
from typing import NamedTuple

_SEQUENCE, _SET, _OID, _VERSION = 0x30, 0x31, 0x06, 0xA0
_UTC_TIME, _GENERALIZED_TIME = 0x17, 0x18
_ORGANIZATION, _UNIT, _NAME = b"\x55\x04\x0a", b"\x55\x04\x0b", b"\x55\x04\x03"
_PEM = re.compile(r"-----BEGIN CERTIFICATE-----\s+([A-Za-z0-9+/=\s]+?)\s*-----END CERTIFICATE-----")

ROLE_PREFIX = "swarm-"


class Certificate(NamedTuple):
    """A node's certificate. Times are seconds since the epoch."""

    node: str
    role: str
    """worker or manager."""
    swarm: str
    begins: int
    ends: int


def read(pem: str) -> Certificate:
    """The first certificate of a PEM document."""
    found = _PEM.search(pem)
    if found is None:
        raise ValueError("it has no PEM certificate")
    try:
        return read_der(base64.b64decode(found[1]))
    except (binascii.Error, IndexError) as error:
        raise ValueError("its certificate is cut") from error


def read_der(data: bytes) -> Certificate:
    """The same of the certificate itself. Raises IndexError when it is cut."""
    certificate, _ = _element(data, 0, _SEQUENCE)
    body, _ = _element(certificate, 0, _SEQUENCE)
    at = _element(body, 0, _VERSION)[1] if body[0] == _VERSION else 0
    at = _element(body, at)[1]  # serial number
    at = _element(body, at, _SEQUENCE)[1]  # signature algorithm
    at = _element(body, at, _SEQUENCE)[1]  # issuer
    validity, at = _element(body, at, _SEQUENCE)
    subject, _ = _element(body, at, _SEQUENCE)
    begins, rest = _time(validity, 0)
    ends, _ = _time(validity, rest)
    names = _names(subject)
    role = names.get(_UNIT, "")
    return Certificate(
        node=names.get(_NAME, ""),
        role=role.removeprefix(ROLE_PREFIX),
        swarm=names.get(_ORGANIZATION, ""),
        begins=begins,
        ends=ends,
    )


def _names(subject: bytes) -> dict[bytes, str]:
    """The attributes of a distinguished name, by type."""
    names: dict[bytes, str] = {}
    at = 0
    while at < len(subject):
        attributes, at = _element(subject, at, _SET)
        inner = 0
        while inner < len(attributes):
            attribute, inner = _element(attributes, inner, _SEQUENCE)
            kind, rest = _element(attribute, 0, _OID)
            value, _ = _element(attribute, rest)
            names.setdefault(kind, value.decode("utf-8", "replace"))
    return names


def _time(data: bytes, at: int) -> tuple[int, int]:
    """A UTCTime or GeneralizedTime (RFC 5280, 4.1.2.5), and where the next element is."""
    kind = data[at]
    text, rest = _element(data, at)
    digits = text.decode("ascii", "replace")
    if kind == _UTC_TIME and re.fullmatch(r"[0-9]{12}Z", digits):
        year = int(digits[:2])
        digits = f"{1900 + year if year >= 50 else 2000 + year}{digits[2:]}"
    elif kind != _GENERALIZED_TIME or not re.fullmatch(r"[0-9]{14}Z", digits):
        raise ValueError(f"its time {digits!r} is not valid")
    fields = (int(digits[:4]), *(int(digits[place : place + 2]) for place in range(4, 14, 2)))
    try:
        return calendar.timegm((*fields, 0, 0, 0)), rest
    except (ValueError, OverflowError) as error:
        raise ValueError(f"its time {digits!r} is not valid") from error


def _element(data: bytes, at: int, kind: int = 0) -> tuple[bytes, int]:
    """The content of the element at `at`, and where the next one begins (X.690, definite lengths).

    Raises ValueError when it is not of `kind`, IndexError when it is cut.
    """
    if kind and data[at] != kind:
        raise ValueError(f"element of type {data[at]:#x} where {kind:#x} is expected")
    size = data[at + 1]
    begin = at + 2
    if size & 0x80:
        count = size & 0x7F
        if not 1 <= count <= 4:
            raise ValueError("it has a length that DER does not allow")
        if begin + count > len(data):
            raise IndexError(begin)
        size = int.from_bytes(data[begin : begin + count], "big")
        begin += count
    end = begin + size
    if end > len(data):
        raise IndexError(end)
    return data[begin:end], end
