"""IPsec in the kernel: security associations and policies of ESP in transport mode, between two
IPv4 addresses.

Rules: linux/xfrm.h, RFC 4106 (AES-GCM). Blocking: see `transport.py`, also for threads, ownership
       and
what is raised.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from ipaddress import IPv4Address
from typing import NamedTuple

from engine.system import namespaces
from engine.system.netlink.codec import CREATE, EXCL, Request, attribute
from engine.system.netlink.transport import NetlinkSocket

_NETLINK_XFRM = 6
_NEWSA, _DELSA, _DELPOLICY, _UPDPOLICY = 0x10, 0x11, 0x14, 0x19
_TEMPLATE, _ALGORITHM, _MARK = 5, 18, 21
_ESP, _TRANSPORT = 50, 0
_OUT = 1
_REPLAY_WINDOW = 0
"""None: a sender that has been restarted counts from 1 again, and would not be heard."""
_UDP = 17
_FOREVER = (1 << 64) - 1
_ANY_ALGORITHM = 0xFFFFFFFF

_SELECTOR = struct.Struct("=16s16sHHHHHBBB3xiI")
_ID = struct.Struct("=16s4sB3x")
_STATE = struct.Struct("=12xIIHBBB7x")
_POLICY = struct.Struct("=IIBBBB4x")
_USER_TEMPLATE = struct.Struct("=24sHxx16sIBBBxIII")
_KEY = struct.Struct("=64sII")

_NAME = b"rfc4106(gcm(aes))"
KEY = 20
"""Bytes of a key: 16 of AES-128 and 4 of salt."""
_CHECK = 128
"""Bits of the integrity check."""


class Association(NamedTuple):
    """One direction between two hosts."""

    source: IPv4Address
    destination: IPv4Address
    number: int
    """The SPI, which the receiver knows the key by."""
    group: int
    """Of a policy and its associations (reqid)."""
    key: bytes


class XfrmSocket(NetlinkSocket):
    """A socket for the IPsec of the network namespace of the thread that makes it.

    Raises OSError (EPROTONOSUPPORT) on a kernel without it.
    """

    def __init__(self) -> None:
        super().__init__(_NETLINK_XFRM, buffer=64 << 10)

    def apply(self, *requests: Request, missing: bool = False) -> None:
        """Make all changes, in order, and raise the first error. With `missing` what does not exist
        is no error.
        """
        for answer in self.exchange(requests):
            if answer.error is not None and not (missing and answer.error.errno in (errno.ESRCH, errno.ENOENT)):
                raise answer.error


def add_association(of: Association, *, life: int = 0) -> Request:
    """An existing one with this number and destination is an error (EEXIST). It expires after
    `life` seconds unless that is 0.
    """
    body = _selector(None, None) + _id(of.destination, of.number) + _address(of.source) + _lifetime(life)
    body += _STATE.pack(0, of.group, socket.AF_INET, _TRANSPORT, _REPLAY_WINDOW, 0)
    key = _KEY.pack(_NAME, len(of.key) * 8, _CHECK) + of.key
    return Request(_NEWSA, CREATE | EXCL, body + attribute(_ALGORITHM, key), f"ESP {of.source} → {of.destination}")


def delete_association(of: Association) -> Request:
    """A missing one is an error (ESRCH)."""
    body = _address(of.destination) + of.number.to_bytes(4, "big") + struct.pack("=HBx", socket.AF_INET, _ESP)
    return Request(_DELSA, 0, body, f"removal of ESP {of.source} → {of.destination}")


def set_policy(of: Association, *, port: int, mark: int) -> Request:
    """Encrypt UDP packets to this port that have the mark by the associations of the group, with
    `of.number` if it is not 0. Without one they are dropped. Replaces an earlier policy.
    """
    body = _selector(of.source, of.destination, port) + _lifetime() + _POLICY.pack(0, 0, _OUT, 0, 0, 0)
    identity = _id(of.destination, of.number)
    template = _USER_TEMPLATE.pack(
        *(identity, socket.AF_INET, _address(of.source), of.group, _TRANSPORT, 0, 0),
        *(_ANY_ALGORITHM, _ANY_ALGORITHM, _ANY_ALGORITHM),
    )
    body += attribute(_TEMPLATE, template) + attribute(_MARK, struct.pack("=II", mark, 0xFFFFFFFF))
    return Request(_UPDPOLICY, 0, body, f"encryption {of.source} → {of.destination}")


def delete_policy(of: Association, *, port: int, mark: int) -> Request:
    """A missing one is an error (ENOENT)."""
    body = _selector(of.source, of.destination, port) + struct.pack("=IB3x", 0, _OUT)
    body += attribute(_MARK, struct.pack("=II", mark, 0xFFFFFFFF))
    return Request(_DELPOLICY, 0, body, f"removal of encryption {of.source} → {of.destination}")


def available() -> bool:
    """True if this kernel has ESP with AES-GCM: an association is added in a new namespace.

    Blocking; the thread is in that namespace meanwhile.
    """
    here, there = IPv4Address("192.0.2.1"), IPv4Address("192.0.2.2")
    try:
        with namespaces.new_network() as namespace, XfrmSocket() as kernel:
            kernel.apply(add_association(Association(here, there, 0x1000, 1, bytes(KEY))))
    except OSError:
        return False
    os.close(namespace)
    return True


def _lifetime(seconds: int = 0) -> bytes:
    """Limits of bytes, packets and time, and what is used of them."""
    return struct.pack("=8Q", _FOREVER, _FOREVER, _FOREVER, _FOREVER, 0, seconds, 0, 0) + bytes(32)


def _selector(source: IPv4Address | None, destination: IPv4Address | None, port: int = 0) -> bytes:
    """Packets between these addresses to this UDP port; all without them."""
    if source is None or destination is None:
        return _SELECTOR.pack(bytes(16), bytes(16), 0, 0, 0, 0, socket.AF_INET, 0, 0, 0, 0, 0)
    ends = _address(destination), _address(source)
    return _SELECTOR.pack(*ends, socket.htons(port), 0xFFFF, 0, 0, socket.AF_INET, 32, 32, _UDP, 0, 0)


def _id(destination: IPv4Address, number: int) -> bytes:
    return _ID.pack(_address(destination), number.to_bytes(4, "big"), _ESP)


def _address(address: IPv4Address) -> bytes:
    return address.packed.ljust(16, b"\0")
