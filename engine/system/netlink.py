"""rtnetlink: links, addresses, routes. A request is bytes; a batch of them is one send, answered by one acknowledgement each.

Why not pyroute2, which this engine's tests read the kernel with: importing any of its message classes costs 11 MB of private memory of the 60
that the whole engine may have at rest, and encoding one veth request 135 us (here 3 us) under the GIL. What is needed of the protocol is
small, and frozen by the kernel's ABI.

Rules: netlink(7), rtnetlink(7), linux/if_link.h, linux/rtnetlink.h. Blocking: sends wait for the kernel's network lock, up to many
milliseconds while namespaces are torn down. Owns: one socket, which stays in the namespace of the thread that opened it.
Threads: one batch at a time, a lock sees to it. Raises: NetlinkError (an OSError) with the kernel's errno and own words.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import ipaddress
import os
import socket
import struct
import threading
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_NEWLINK, _DELLINK, _GETLINK = 16, 17, 18
_NEWADDR, _DELADDR, _GETADDR = 20, 21, 22
_NEWROUTE, _GETROUTE = 24, 26
_ERROR, _DONE = 2, 3

_REQUEST, _ACK, _REPLACE, _EXCL, _CREATE, _DUMP = 0x1, 0x4, 0x100, 0x200, 0x400, 0x300
_ACK_TLVS = 0x200
_CAPPED = 0x100

_IFLA_ADDRESS, _IFLA_IFNAME, _IFLA_MTU, _IFLA_LINK, _IFLA_MASTER, _IFLA_LINKINFO, _IFLA_NET_NS_FD = (
    1,
    3,
    4,
    5,
    10,
    18,
    28,
)
_IFLA_IFALIAS, _IFLA_AF_SPEC, _IFLA_GROUP, _IFLA_EXT_MASK = 20, 26, 27, 29
_IFLA_INFO_KIND, _IFLA_INFO_DATA, _VETH_INFO_PEER = 1, 2, 1
_IFLA_INFO_SLAVE_KIND, _IFLA_INFO_SLAVE_DATA, _IFLA_BRPORT_MODE, _IFLA_BRPORT_ISOLATED = 4, 5, 4, 33
_IFLA_INET6_ADDR_GEN_MODE, _ADDR_GEN_NONE = 8, 1
_IFLA_MACVLAN_MODE = 1
_IFLA_VLAN_ID = 1
_MACVLAN_MODES = {"private": 1, "vepa": 2, "bridge": 4, "passthru": 8}
_IFA_ADDRESS, _IFA_LOCAL, _IFA_BROADCAST = 1, 2, 4
_IFA_F_NODAD = 2
_RTA_DST, _RTA_OIF, _RTA_GATEWAY = 1, 4, 5
_NLMSGERR_ATTR_MSG = 1
_SKIP_STATISTICS = 8
_NESTED = 0x8000

_IFF_UP = 1
_RT_TABLE_MAIN, _RTPROT_BOOT, _RT_SCOPE_UNIVERSE, _RTN_UNICAST = 254, 3, 0, 1
_RT_SCOPE_LINK = 253

_SOL_NETLINK, _NETLINK_CAP_ACK, _NETLINK_EXT_ACK, _NETLINK_GET_STRICT_CHK = 270, 10, 11, 12
_BUFFER = 256 << 10
_BATCH = 64
"""Requests in one send: their acknowledgements all wait in the socket's buffer until the send returns."""
_RECEIVE = 64 << 10

_GROUP_LINK = 1
_SO_ATTACH_FILTER = 26

_HEADER = struct.Struct("=IHHII")
_LINK = struct.Struct("=BxHiII")
_ADDRESS = struct.Struct("=BBBBI")
_ROUTE = struct.Struct("=BBBBBBBBI")
_ATTRIBUTE = struct.Struct("=HH")


class NetlinkError(OSError):
    """A request that the kernel refused."""


class Request(NamedTuple):
    """One message without its header. `what` goes into the error."""

    type: int
    flags: int
    body: bytes
    what: str


class Link(NamedTuple):
    ifindex: int
    name: str
    kind: str
    master: int
    up: bool
    alias: str
    address: str


Interface = ipaddress.IPv4Interface | ipaddress.IPv6Interface
IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


class Address(NamedTuple):
    ifindex: int
    interface: ipaddress.IPv4Interface


class Netlink:
    """A socket in the network namespace of the thread that makes it."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE)
        self._lock = threading.Lock()
        self._sequence = 0
        self._socket.setsockopt(_SOL_NETLINK, _NETLINK_EXT_ACK, 1)
        self._socket.setsockopt(_SOL_NETLINK, _NETLINK_CAP_ACK, 1)
        self._socket.setsockopt(_SOL_NETLINK, _NETLINK_GET_STRICT_CHK, 1)  # the kernel filters what is dumped
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
        self._socket.bind((0, 0))

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Netlink:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def apply(self, *requests: Request) -> None:
        """Carry the requests out in order, in one send. Raises the first one's error; the kernel goes on with those after it."""
        failure = next((error for error in self.outcomes(requests) if error is not None), None)
        if failure is not None:
            raise failure

    def outcomes(self, requests: Iterable[Request]) -> list[NetlinkError | None]:
        """As `apply`, with each request's own error or None."""
        waiting = [*requests]
        found: list[NetlinkError | None] = []
        with self._lock:
            for start in range(0, len(waiting), _BATCH):
                found += self._batch(waiting[start : start + _BATCH])
        return found

    def _batch(self, requests: list[Request]) -> list[NetlinkError | None]:
        pending = {self._sequence + number & 0xFFFFFFFF: request for number, request in enumerate(requests, 1)}
        self._sequence = self._sequence + len(requests) & 0xFFFFFFFF
        self._socket.send(b"".join(_message(request, sequence, _ACK) for sequence, request in pending.items()))
        found: dict[int, NetlinkError | None] = {}
        while len(found) < len(pending):
            for kind, flags, sequence, body in read_messages(self._socket.recv(_RECEIVE)):
                if kind == _ERROR and sequence in pending:
                    found[sequence] = refusal(body, flags, pending[sequence].what)
        return [found[sequence] for sequence in pending]

    def _dump(self, request: Request) -> Iterator[bytes]:
        with self._lock:
            self._sequence = sequence = self._sequence + 1 & 0xFFFFFFFF
            self._socket.send(_message(request, sequence, _DUMP))
            bodies: list[bytes] = []
            while True:
                for kind, flags, answered, body in read_messages(self._socket.recv(_RECEIVE)):
                    if answered != sequence:
                        continue
                    if kind == _ERROR and (failure := refusal(body, flags, request.what)):
                        raise failure
                    if kind == _DONE:
                        if failure := refusal(body, 0, request.what):
                            raise failure
                        return iter(bodies)
                    bodies.append(body)

    def links(self) -> list[Link]:
        """Every link of the namespace."""
        body = _LINK.pack(socket.AF_UNSPEC, 0, 0, 0, 0) + _u32(_IFLA_EXT_MASK, _SKIP_STATISTICS)
        return [_link(each) for each in self._dump(Request(_GETLINK, 0, body, "list of links"))]

    def link(self, name: str) -> Link | None:
        """The link of this name, or None. Costs the same however many links the host has."""
        body = (
            _LINK.pack(socket.AF_UNSPEC, 0, 0, 0, 0)
            + _text(_IFLA_IFNAME, name)
            + _u32(_IFLA_EXT_MASK, _SKIP_STATISTICS)
        )
        request = Request(_GETLINK, 0, body, f"link {name}")
        with self._lock:
            self._sequence = sequence = self._sequence + 1 & 0xFFFFFFFF
            self._socket.send(_message(request, sequence, 0))
            while True:
                for kind, flags, answered, answer in read_messages(self._socket.recv(_RECEIVE)):
                    if answered != sequence:
                        continue
                    if kind != _ERROR:
                        return _link(answer)
                    failure = refusal(answer, flags, request.what)
                    if failure is not None and failure.errno != errno.ENODEV:
                        raise failure
                    return None

    def addresses(self, index: int = 0) -> list[Address]:
        """IPv4 addresses of the namespace, or of one link."""
        request = Request(_GETADDR, 0, _ADDRESS.pack(socket.AF_INET, 0, 0, 0, index), "list of addresses")
        found = []
        for body in self._dump(request):
            _, prefix, _, _, owner = _ADDRESS.unpack_from(body)
            local = read_attributes(body, _ADDRESS.size).get(_IFA_LOCAL)
            if local is not None and (not index or owner == index):
                found.append(Address(owner, ipaddress.IPv4Interface((local, prefix))))
        return found

    def address_spans(self) -> list[tuple[int, int, int]]:
        """First and last number of the subnet of every IPv4 address, and its link's index: numbers alone, for hosts with thousands of them."""
        request = Request(_GETADDR, 0, _ADDRESS.pack(socket.AF_INET, 0, 0, 0, 0), "list of addresses")
        found = []
        for body in self._dump(request):
            _, prefix, _, _, owner = _ADDRESS.unpack_from(body)
            first, last = _span(_number(body, _ADDRESS.size, _IFA_LOCAL), prefix)
            found.append((first, last, owner))
        return found

    def route_spans(self) -> list[tuple[int, int]]:
        """First and last number of the IPv4 destinations that lead to other hosts, in every table; a default route is all numbers."""
        request = Request(
            _GETROUTE, 0, _ROUTE.pack(socket.AF_INET, 0, 0, 0, 0, 0, 0, _RTN_UNICAST, 0), "list of routes"
        )
        found = []
        for body in self._dump(request):
            _, prefix, _, _, _, _, _, kind, _ = _ROUTE.unpack_from(body)
            if kind == _RTN_UNICAST:
                found.append(_span(_number(body, _ROUTE.size, _RTA_DST), prefix))
        return found


# --- requests --------------------------------------------------------------------------------------------------------


def create_bridge(name: str, *, mac: str, mtu: int = 0) -> Request:
    """With an address of its own, so that it does not change with the ports. `mtu` 0: the kernel's 1500."""
    body = _LINK.pack(socket.AF_UNSPEC, 0, 0, 0, 0) + _text(_IFLA_IFNAME, name) + _mac(mac)
    if mtu:
        body += _u32(_IFLA_MTU, mtu)
    body += _nest(_IFLA_LINKINFO, _text(_IFLA_INFO_KIND, "bridge"))
    return Request(_NEWLINK, _CREATE | _EXCL, body, f"bridge {name}")


def create_veth(name: str, peer: str, peer_namespace: int, *, mtu: int = 0) -> Request:
    """A pair of links: `name` here, `peer` at once in the namespace of that descriptor."""
    size = _u32(_IFLA_MTU, mtu) if mtu else b""
    inside = _LINK.pack(0, 0, 0, 0, 0) + _text(_IFLA_IFNAME, peer) + _u32(_IFLA_NET_NS_FD, peer_namespace) + size
    information = _text(_IFLA_INFO_KIND, "veth") + _nest(_IFLA_INFO_DATA, _nest(_VETH_INFO_PEER, inside))
    body = _LINK.pack(socket.AF_UNSPEC, 0, 0, 0, 0) + _text(_IFLA_IFNAME, name) + size
    return Request(_NEWLINK, _CREATE | _EXCL, body + _nest(_IFLA_LINKINFO, information), f"veth {name}")


def create_vlan(name: str, *, parent: int, number: int) -> Request:
    """What the link of index `parent` receives and sends with that VLAN tag (802.1Q), 1 to 4094."""
    data = _nest(_IFLA_INFO_DATA, attribute(_IFLA_VLAN_ID, struct.pack("=H", number)))
    body = _LINK.pack(socket.AF_UNSPEC, 0, 0, 0, 0) + _text(_IFLA_IFNAME, name) + _u32(_IFLA_LINK, parent)
    body += _nest(_IFLA_LINKINFO, _text(_IFLA_INFO_KIND, "vlan") + data)
    return Request(_NEWLINK, _CREATE | _EXCL, body, f"vlan {name}")


def create_dummy(name: str) -> Request:
    """A link that leads nowhere."""
    body = _LINK.pack(socket.AF_UNSPEC, 0, 0, 0, 0) + _text(_IFLA_IFNAME, name)
    body += _nest(_IFLA_LINKINFO, _text(_IFLA_INFO_KIND, "dummy"))
    return Request(_NEWLINK, _CREATE | _EXCL, body, f"dummy {name}")


def create_macvlan(name: str, *, parent: int, namespace: int, mode: str, mac: str, mtu: int = 0) -> Request:
    """A link of its own MAC over the link of index `parent`, at once in the namespace of that descriptor. `mode`: bridge, private, vepa, passthru."""
    data = _nest(_IFLA_INFO_DATA, _u32(_IFLA_MACVLAN_MODE, _MACVLAN_MODES[mode]))
    body = _LINK.pack(socket.AF_UNSPEC, 0, 0, 0, 0) + _text(_IFLA_IFNAME, name) + _mac(mac)
    body += _u32(_IFLA_LINK, parent) + _u32(_IFLA_NET_NS_FD, namespace)
    if mtu:
        body += _u32(_IFLA_MTU, mtu)
    body += _nest(_IFLA_LINKINFO, _text(_IFLA_INFO_KIND, "macvlan") + data)
    return Request(_NEWLINK, _CREATE | _EXCL, body, f"macvlan {name}")


def change_link(
    name: str,
    *,
    up: bool | None = None,
    master: int | None = None,
    mac: str = "",
    mtu: int = 0,
    alias: str = "",
    without_ipv6_address: bool = False,
) -> Request:
    """Change the link of this name. `alias` is free text; `without_ipv6_address`: it makes itself no link-local one."""
    flags, mask = (_IFF_UP if up else 0, _IFF_UP) if up is not None else (0, 0)
    body = _LINK.pack(socket.AF_UNSPEC, 0, 0, flags, mask) + _text(_IFLA_IFNAME, name)
    if mac:
        body += _mac(mac)
    if mtu:
        body += _u32(_IFLA_MTU, mtu)
    if alias:
        body += _text(_IFLA_IFALIAS, alias)
    if master is not None:
        body += _u32(_IFLA_MASTER, master)
    if without_ipv6_address:
        mode = attribute(_IFLA_INET6_ADDR_GEN_MODE, bytes((_ADDR_GEN_NONE,)))
        body += _nest(_IFLA_AF_SPEC, _nest(socket.AF_INET6, mode))
    return Request(_NEWLINK, 0, body, f"link {name}")


def change_port(name: str, *, hairpin: bool | None = None, isolated: bool | None = None) -> Request:
    """A bridge's port: `hairpin` sends frames back by where they came from, `isolated` ports do not reach each other."""
    data = b""
    if hairpin is not None:
        data += attribute(_IFLA_BRPORT_MODE, bytes((hairpin,)))
    if isolated is not None:
        data += attribute(_IFLA_BRPORT_ISOLATED, bytes((isolated,)))
    kind = _text(_IFLA_INFO_SLAVE_KIND, "bridge") + _nest(_IFLA_INFO_SLAVE_DATA, data)
    body = _LINK.pack(socket.AF_UNSPEC, 0, 0, 0, 0) + _text(_IFLA_IFNAME, name) + _nest(_IFLA_LINKINFO, kind)
    return Request(_NEWLINK, 0, body, f"bridge port {name}")


def set_group(name: str, group: int) -> Request:
    body = _LINK.pack(socket.AF_UNSPEC, 0, 0, 0, 0) + _text(_IFLA_IFNAME, name) + _u32(_IFLA_GROUP, group)
    return Request(_NEWLINK, 0, body, f"group of link {name}")


def delete_group(group: int) -> Request:
    """Every link of the group at once: the kernel waits for its readers once, not for each link."""
    body = _LINK.pack(socket.AF_UNSPEC, 0, 0, 0, 0) + _u32(_IFLA_GROUP, group)
    return Request(_DELLINK, 0, body, f"removal of links of group {group}")


def delete_link(name: str) -> Request:
    body = _LINK.pack(socket.AF_UNSPEC, 0, 0, 0, 0) + _text(_IFLA_IFNAME, name)
    return Request(_DELLINK, 0, body, f"removal of link {name}")


def add_address(index: int, interface: Interface) -> Request:
    """IPv4 with the subnet's broadcast address; IPv6 without asking first who has it. One that is there already is an error (EEXIST)."""
    address, network = interface.ip.packed, interface.network
    if interface.version == 6:
        body = _ADDRESS.pack(socket.AF_INET6, network.prefixlen, _IFA_F_NODAD, 0, index)
        body += attribute(_IFA_ADDRESS, address)
    else:
        body = _ADDRESS.pack(socket.AF_INET, network.prefixlen, 0, 0, index)
        body += attribute(_IFA_LOCAL, address) + attribute(_IFA_ADDRESS, address)
        if network.prefixlen < 31:
            body += attribute(_IFA_BROADCAST, network.broadcast_address.packed)
    return Request(_NEWADDR, _CREATE | _EXCL, body, f"address {interface}")


def delete_address(index: int, interface: Interface) -> Request:
    """One that is not there is an error (EADDRNOTAVAIL)."""
    family = socket.AF_INET6 if interface.version == 6 else socket.AF_INET
    body = _ADDRESS.pack(family, interface.network.prefixlen, 0, 0, index)
    body += attribute(_IFA_LOCAL, interface.ip.packed) + attribute(_IFA_ADDRESS, interface.ip.packed)
    return Request(_DELADDR, 0, body, f"removal of address {interface}")


def add_default_route(gateway: IPAddress, index: int = 0, *, replace: bool = False) -> Request:
    """By the link of that index, or (0) by the one whose subnet the gateway is in. `replace`: in the place of the one there is."""
    family = socket.AF_INET6 if gateway.version == 6 else socket.AF_INET
    body = _ROUTE.pack(*(family, 0, 0, 0, _RT_TABLE_MAIN, _RTPROT_BOOT, _RT_SCOPE_UNIVERSE, _RTN_UNICAST, 0))
    body += attribute(_RTA_GATEWAY, gateway.packed)
    if index:
        body += _u32(_RTA_OIF, index)
    flags = _CREATE | (_REPLACE if replace else _EXCL)
    return Request(_NEWROUTE, flags, body, f"default route by {gateway}")


class Removals:
    """Notices that links of this network namespace are gone, but those whose name begins with `veth`; non-blocking, for an event loop to watch.

    The kernel filters: where containers come and go nobody is woken.
    """

    def __init__(self) -> None:
        self._socket = socket.socket(
            socket.AF_NETLINK,
            socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK,
            socket.NETLINK_ROUTE,
        )
        # The header, the link's fixed part, then its first attribute, which is its name.
        family, kind, name = _HEADER.size, _HEADER.size + _LINK.size + 2, _HEADER.size + _LINK.size + 4
        attach_filter(
            self._socket,
            (0x28, 0, 0, 4),
            (0x15, 0, 7, as_loaded(_DELLINK)),
            (0x30, 0, 0, family),
            (0x15, 0, 5, socket.AF_UNSPEC),
            (0x28, 0, 0, kind),
            (0x15, 0, 2, as_loaded(_IFLA_IFNAME)),
            (0x20, 0, 0, name),
            (0x15, 1, 0, int.from_bytes(b"veth", "big")),
            (0x06, 0, 0, 0xFFFF),
            (0x06, 0, 0, 0),
        )
        self._socket.bind((0, 1 << _GROUP_LINK - 1))

    def fileno(self) -> int:
        return self._socket.fileno()

    def take(self) -> set[int] | None:
        """Indexes of the links that are gone since; None: some notices were lost."""
        notices, lost = arrived(self._socket)
        return None if lost else {_LINK.unpack_from(each, _HEADER.size)[2] for each in notices}

    def close(self) -> None:
        self._socket.close()


def arrived(listener: socket.socket) -> tuple[list[bytes], bool]:
    """The messages that wait in a non-blocking socket, and whether there was no room for others."""
    messages: list[bytes] = []
    lost = False
    with contextlib.suppress(BlockingIOError):
        while True:
            try:
                messages.append(listener.recv(4096))
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise
                lost = True
    return messages, lost


def attach_filter(listener: socket.socket, *program: tuple[int, int, int, int]) -> None:
    """Have the kernel run a program of classic BPF (linux/filter.h) on each message; what it returns 0 for is not kept, and wakes nobody."""
    instructions = b"".join(struct.pack("=HBBI", *each) for each in program)
    kept = ctypes.create_string_buffer(instructions, len(instructions))
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("@HP", len(program), ctypes.addressof(kept)))


def as_loaded(number: int) -> int:
    """A 16-bit number of a message as classic BPF loads it: netlink has this host's byte order, the program thinks in the network's."""
    return int.from_bytes(struct.pack("=H", number), "big")


# --- bytes -----------------------------------------------------------------------------------------------------------


def _message(request: Request, sequence: int, flags: int) -> bytes:
    size = _HEADER.size + len(request.body)
    return (
        _HEADER.pack(size, request.type, _REQUEST | flags | request.flags, sequence, 0)
        + request.body
        + bytes(-size & 3)
    )


def read_messages(data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
    """(type, flags, sequence, body) of each message in what one recv gave."""
    position = 0
    while position + _HEADER.size <= len(data):
        size, kind, flags, sequence, _ = _HEADER.unpack_from(data, position)
        if size < _HEADER.size or position + size > len(data):
            raise NetlinkError(errno.EBADMSG, "netlink: the kernel's message is cut off")
        yield kind, flags, sequence, data[position + _HEADER.size : position + size]
        position += size + 3 & ~3


def refusal(body: bytes, flags: int, what: str) -> NetlinkError | None:
    """What an NLMSG_ERROR says: an errno, the request's header (or the whole request), then the kernel's words, when it has any."""
    number = -struct.unpack_from("=i", body)[0]
    if number == 0:
        return None
    words = ""
    if flags & _ACK_TLVS:
        length = struct.unpack_from("=I", body, 4)[0]
        start = 4 + (_HEADER.size if flags & _CAPPED else length + 3 & ~3)
        words = read_attributes(body, start).get(_NLMSGERR_ATTR_MSG, b"").rstrip(b"\0").decode(errors="replace")
    reason = os.strerror(number)
    return NetlinkError(number, f"{what}: {reason} ({words})" if words else f"{what}: {reason}")


def read_attributes(body: bytes, position: int) -> dict[int, bytes]:
    found = {}
    while position + 4 <= len(body):
        size, kind = _ATTRIBUTE.unpack_from(body, position)
        if size < 4:
            break
        found[kind & 0x3FFF] = body[position + 4 : position + size]
        position += size + 3 & ~3
    return found


def _number(body: bytes, position: int, kind: int) -> int:
    """An attribute of a network-order number; 0 when it is not there."""
    while position + 4 <= len(body):
        size, found = _ATTRIBUTE.unpack_from(body, position)
        if found == kind:
            return int.from_bytes(body[position + 4 : position + size], "big")
        if size < 4:
            break
        position += size + 3 & ~3
    return 0


def _span(address: int, prefix: int) -> tuple[int, int]:
    rest = (1 << 32 - prefix) - 1
    return address & ~rest, address | rest


def _link(body: bytes) -> Link:
    _, _, index, flags, _ = _LINK.unpack_from(body)
    attributes = read_attributes(body, _LINK.size)
    kind = read_attributes(attributes.get(_IFLA_LINKINFO, b""), 0).get(_IFLA_INFO_KIND, b"")
    return Link(
        index,
        _string(attributes.get(_IFLA_IFNAME, b"")),
        _string(kind),
        int.from_bytes(attributes.get(_IFLA_MASTER, b""), "little"),
        bool(flags & _IFF_UP),
        _string(attributes.get(_IFLA_IFALIAS, b"")),
        attributes.get(_IFLA_ADDRESS, b"").hex(":"),
    )


def _string(value: bytes) -> str:
    return value.split(b"\0", 1)[0].decode(errors="replace")


def attribute(kind: int, value: bytes) -> bytes:
    size = 4 + len(value)
    return _ATTRIBUTE.pack(size, kind) + value + bytes(-size & 3)


def _nest(kind: int, value: bytes) -> bytes:
    return attribute(kind | _NESTED, value)


def _text(kind: int, value: str) -> bytes:
    return attribute(kind, value.encode() + b"\0")


def _u32(kind: int, value: int) -> bytes:
    return attribute(kind, struct.pack("=I", value))


def _mac(address: str) -> bytes:
    return attribute(_IFLA_ADDRESS, bytes.fromhex(address.replace(":", "")))
