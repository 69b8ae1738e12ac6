"""nfnetlink for the connection table: deletes entries that a changed port mapping, or a backend
that has gone, makes wrong.

Rules: linux/netfilter/nfnetlink_conntrack.h, nf_conntrack_tuple_common.h. Blocking: see
`transport.py`, also for threads, ownership and what is raised.
"""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Collection

from engine.system.netlink.codec import Request, attribute, nest, read_attributes
from engine.system.netlink.nft import FAMILY, NETLINK_NETFILTER
from engine.system.netlink.transport import NetlinkSocket

_SUBSYSTEM = 1
_GET, _DELETE = _SUBSYSTEM << 8 | 1, _SUBSYSTEM << 8 | 2

_TUPLE_ORIGINAL, _TUPLE_REPLY, _CT_STATUS, _CT_ID, _CT_ZONE, _CT_FILTER, _CT_STATUS_MASK = 1, 2, 3, 12, 18, 25, 26
_SEEN_REPLY, _TRANSLATED = 1 << 1, 1 << 5
_TUPLE_IP, _TUPLE_PROTOCOL = 1, 2
_IP_SOURCE = {4: 1, 6: 3}
_PROTOCOL_NUMBER, _PROTOCOL_DESTINATION = 1, 3
_FILTER_ORIGINAL, _FILTER_REPLY = 1, 2
_BY_PROTOCOL, _BY_DESTINATION_PORT = 1 << 3, 1 << 5

_BUFFER = 1 << 20

_FEW = 16
"""Addresses whose connections the kernel deletes by a filter."""


class ConntrackSocket(NetlinkSocket):
    """A socket for the connection table of the network namespace of the thread that makes it."""

    def __init__(self) -> None:
        super().__init__(NETLINK_NETFILTER, buffer=_BUFFER, receive=256 << 10)

    def forget_udp(self, version: int, ports: Collection[int], answered_by: Collection[bytes]) -> int:
        """Delete UDP entries of an IP version that began for one of the ports; returns how many.

        Deletes only entries that kept their source, or that are answered by one of the (packed)
        addresses, so a masqueraded connection that leaves the host stays. The kernel walks its
        whole table for this, empty buckets too, which takes milliseconds.
        """
        forgotten = 0
        for each in self.dump(udp_list(version, ports)):
            entry = read_attributes(each, FAMILY.size)
            if not _concerns(entry, version, ports, answered_by):
                continue
            (done,) = self.exchange((removal(version, entry),))
            if done.error is None:
                forgotten += 1
            elif done.error.errno != errno.ENOENT:
                raise done.error
        return forgotten

    def forget_untranslated(self, version: int, ports: Collection[int]) -> None:
        """Delete UDP entries that began for one of the ports and kept source and destination.

        They were made while no rule led the port elsewhere. Rules that are added later are not
        asked for them, and a client that keeps sending keeps them for ever.
        """
        for each in self.dump(udp_list(version, ports)):
            entry = read_attributes(each, FAMILY.size)
            translated = int.from_bytes(entry.get(_CT_STATUS, b""), "big") & _TRANSLATED
            if not translated and _concerns(entry, version, ports, ()):
                self._remove(entry, version)

    def forget_answers(self, sources: Collection[bytes], protocol: int, *, unanswered: bool = False) -> None:
        """Delete the entries of connections of a protocol, such as IPPROTO_UDP, that one of these
        (packed IPv4) addresses answers; or would answer, as it has never done if `unanswered`.

        This is one walk through the table. It takes 15 ms and more, as a table of the usual size
        has 262,144 buckets, and all namespaces share it.
        """
        for each in self.dump(answered(protocol, unanswered=unanswered)):
            entry = read_attributes(each, FAMILY.size)
            if unanswered and int.from_bytes(entry.get(_CT_STATUS, b""), "big") & _SEEN_REPLY:
                continue  # a kernel without that filter
            reply = read_attributes(read_attributes(entry.get(_TUPLE_REPLY, b"")).get(_TUPLE_IP, b""))
            if reply.get(_IP_SOURCE[4]) in sources:
                self._remove(entry)

    def _remove(self, entry: dict[int, bytes], version: int = 4) -> None:
        (done,) = self.exchange((removal(version, entry),))
        if done.error is not None and done.error.errno != errno.ENOENT:
            raise done.error


def answered(protocol: int, *, unanswered: bool) -> Request:
    """The request that lists the IPv4 entries of a protocol; with `unanswered` those alone whose
    destination was rewritten and that have seen no answer.
    """
    flags = attribute(_FILTER_ORIGINAL, bytes(4)) + attribute(_FILTER_REPLY, struct.pack("=I", _BY_PROTOCOL))
    reply = nest(_TUPLE_PROTOCOL, attribute(_PROTOCOL_NUMBER, bytes((protocol,))))
    body = nest(_TUPLE_REPLY, reply) + nest(_CT_FILTER, flags)
    if unanswered:
        body += attribute(_CT_STATUS, struct.pack(">I", _TRANSLATED))
        body += attribute(_CT_STATUS_MASK, struct.pack(">I", _TRANSLATED | _SEEN_REPLY))
    return Request(_GET, 0, FAMILY.pack(_family(4), 0, 0) + body, "list of connections")


def udp_list(version: int, ports: Collection[int]) -> Request:
    """The request that lists UDP entries. With a single port the kernel filters by it."""
    protocol, filtered = attribute(_PROTOCOL_NUMBER, bytes((socket.IPPROTO_UDP,))), _BY_PROTOCOL
    if len(ports) == 1:
        protocol += attribute(_PROTOCOL_DESTINATION, struct.pack(">H", *ports))
        filtered |= _BY_DESTINATION_PORT
    flags = attribute(_FILTER_ORIGINAL, struct.pack("=I", filtered)) + attribute(_FILTER_REPLY, bytes(4))
    body = nest(_TUPLE_ORIGINAL, nest(_TUPLE_PROTOCOL, protocol)) + nest(_CT_FILTER, flags)
    return Request(_GET, 0, FAMILY.pack(_family(version), 0, 0) + body, "list of UDP connections")


def removal(version: int, entry: dict[int, bytes]) -> Request:
    """The request that deletes exactly this entry."""
    body = nest(_TUPLE_ORIGINAL, entry[_TUPLE_ORIGINAL])
    body += b"".join(attribute(kind, entry[kind]) for kind in (_CT_ID, _CT_ZONE) if kind in entry)
    return Request(_DELETE, 0, FAMILY.pack(_family(version), 0, 0) + body, "removal of a connection")


def _family(version: int) -> int:
    return socket.AF_INET if version == 4 else socket.AF_INET6


def _concerns(entry: dict[int, bytes], version: int, ports: Collection[int], answered_by: Collection[bytes]) -> bool:
    """True if an entry matches the request; the kernel's own filter cannot check all of it."""
    original = read_attributes(entry.get(_TUPLE_ORIGINAL, b""))
    protocol = read_attributes(original.get(_TUPLE_PROTOCOL, b""))
    if protocol.get(_PROTOCOL_NUMBER) != bytes((socket.IPPROTO_UDP,)):
        return False
    if int.from_bytes(protocol.get(_PROTOCOL_DESTINATION, b""), "big") not in ports:
        return False
    source, destination = _IP_SOURCE[version], _IP_SOURCE[version] + 1
    asked = read_attributes(original.get(_TUPLE_IP, b""))
    reply = read_attributes(read_attributes(entry.get(_TUPLE_REPLY, b"")).get(_TUPLE_IP, b""))
    return reply.get(destination) == asked.get(source) or reply.get(source) in answered_by
