"""nfnetlink: elements of nftables sets and maps, notices of other people's changes, and entries of the connection table.

Rules are libnftables' business (`netfilter.py`): text that is read once. Elements come and go with containers, and as text they cost a
parser and a dump of what is there already; here a batch is bytes, and one transaction costs what it changes.

Rules: linux/netfilter/nf_tables.h, nfnetlink.h, nfnetlink_conntrack.h, nf_conntrack_tuple. Blocking. Owns: one socket each, which stays in
the namespace of the thread that opened it. Threads: one exchange at a time, a lock sees to it. Raises: NetlinkError with the kernel's errno.
"""

from __future__ import annotations

import errno
import functools
import socket
import struct
import threading
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from engine.system.netlink import (
    NetlinkError,
    arrived,
    as_loaded,
    attach_filter,
    attribute,
    read_attributes,
    read_messages,
    refusal,
)

_NFTABLES, _CONNTRACK = 10 << 8, 1 << 8
_GETTABLE, _GETRULE, _NEWSETELEM, _GETSETELEM, _DELSETELEM, _NEWGEN = 1, 7, 12, 13, 14, 15
_BATCH_BEGIN, _BATCH_END = 0x10, 0x11
_CT_GET, _CT_DELETE = 1, 2
_INET = 1
_NETLINK_NETFILTER = 12

_ERROR, _DONE = 2, 3
_REQUEST, _ACK, _CREATE, _DUMP, _DUMP_INTERRUPTED = 0x1, 0x4, 0x400, 0x300, 0x10
_NESTED = 0x8000

_TABLE_NAME, _TABLE_FLAGS, _TABLE_HANDLE = 1, 2, 4
_RULE_TABLE, _RULE_CHAIN, _RULE_HANDLE = 1, 2, 3
_LIST_TABLE, _LIST_SET, _LIST_ELEMENTS, _LIST_ELEMENT = 1, 2, 3, 1
_ELEMENT_KEY, _ELEMENT_DATA, _ELEMENT_KEY_END, _DATA_VALUE = 1, 2, 10, 1

_TUPLE_ORIGINAL, _TUPLE_REPLY, _CT_ID, _CT_ZONE, _CT_FILTER = 1, 2, 12, 18, 25
_TUPLE_IP, _TUPLE_PROTOCOL = 1, 2
_IP_SOURCE = {4: 1, 6: 3}
_PROTOCOL_NUMBER, _PROTOCOL_DESTINATION = 1, 3
_FILTER_ORIGINAL, _FILTER_REPLY = 1, 2
_BY_PROTOCOL, _BY_DESTINATION_PORT = 1 << 3, 1 << 5

_SOL_NETLINK, _ADD_MEMBERSHIP, _CAP_ACK, _EXT_ACK = 270, 1, 10, 11
_GROUP_NFTABLES = 7
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33
_BUFFER = 8 << 20
"""Bytes, at most, of one transaction and of its acknowledgements; taken only while in use."""
_LIST_SIZE = 60_000
"""Bytes of elements in one message: an attribute's length has 16 bits."""
_RECEIVE = 256 << 10

_HEADER = struct.Struct("=IHHII")
_FAMILY = struct.Struct(">BBH")


class Element(NamedTuple):
    """One element as the kernel has it: fields of a concatenation each padded to 4 bytes. `end` closes an interval, `data` is a map's."""

    key: bytes
    end: bytes = b""
    data: bytes = b""


class Nfnetlink:
    """A socket in the network namespace of the thread that makes it."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_NETFILTER)
        self._lock = threading.Lock()
        self._sequence = 0
        self._socket.setsockopt(_SOL_NETLINK, _EXT_ACK, 1)
        self._socket.setsockopt(_SOL_NETLINK, _CAP_ACK, 1)
        for option in (_SO_SNDBUFFORCE, _SO_RCVBUFFORCE):
            self._socket.setsockopt(socket.SOL_SOCKET, option, _BUFFER)
        self._socket.bind((0, 0))
        self.port: int = self._socket.getsockname()[0]
        """What the kernel knows this socket by: the author in notices of its changes."""

    def close(self) -> None:
        self._socket.close()

    # --- nftables ----------------------------------------------------------------------------------------------------

    def change(
        self, table: str, remove: Iterable[tuple[str, Element]], add: Iterable[tuple[str, Element]], what: str
    ) -> None:
        """Take elements, each with the name of its set, out of an `inet` table and put others in: one transaction, all or nothing."""
        bodies = [(_DELSETELEM, 0, body) for body in _lists(table, remove)]
        bodies += [(_NEWSETELEM, _CREATE, body) for body in _lists(table, add)]
        if not bodies:
            return
        with self._lock:
            first = self._sequence + 1
            self._sequence += len(bodies) + 2
            parts = [_message(_BATCH_BEGIN, 0, first, _FAMILY.pack(0, 0, _NFTABLES >> 8))]
            for sequence, (kind, flags, body) in enumerate(bodies, first + 1):
                parts.append(_message(_NFTABLES | kind, flags | _ACK, sequence, _FAMILY.pack(_INET, 0, 0) + body))
            parts.append(_message(_BATCH_END, 0, first + len(bodies) + 1, _FAMILY.pack(0, 0, _NFTABLES >> 8)))
            self._socket.send(b"".join(parts))
            waiting = set(range(first + 1, first + 1 + len(bodies)))
            refused: NetlinkError | None = None
            while waiting:
                for kind, flags, sequence, body in read_messages(self._socket.recv(_RECEIVE)):
                    if kind != _ERROR or not first <= sequence <= first + len(bodies) + 1:
                        continue
                    found = refusal(body, flags, what)
                    refused = refused or found
                    waiting.discard(sequence)
                    if found is not None and sequence in (first, first + len(bodies) + 1):
                        waiting.clear()  # the commit as a whole: nothing else will be said
        if refused is not None:
            raise refused

    def elements(self, table: str, name: str) -> dict[bytes, Element]:
        """What a set of an `inet` table holds, by key. While the kernel makes room for thousands that have just come, some may be missing.

        Raises NetlinkError ENOENT when there is no such table or set.
        """
        body = attribute(_LIST_TABLE, table.encode() + b"\0") + attribute(_LIST_SET, name.encode() + b"\0")
        found: dict[bytes, Element] = {}
        for answer in self._dump(_NFTABLES | _GETSETELEM, _INET, body, f"set {name}"):
            listed = read_attributes(answer, _FAMILY.size).get(_LIST_ELEMENTS, b"")
            for each in _list(listed):
                parts = read_attributes(each, 0)
                key = _value(parts.get(_ELEMENT_KEY, b""))
                found[key] = Element(
                    key, _value(parts.get(_ELEMENT_KEY_END, b"")), _value(parts.get(_ELEMENT_DATA, b""))
                )
        return found

    def layout(self, table: str) -> tuple[bytes, ...]:
        """What tells one laying out of an `inet` table from another: handle and flags, each rule's chain and handle. Empty: no such table."""
        try:
            return (*self._table(table), *self._rules(table))
        except NetlinkError as error:
            if error.errno == errno.ENOENT:
                return ()
            raise

    def _table(self, table: str) -> Iterator[bytes]:
        body = attribute(_TABLE_NAME, table.encode() + b"\0")
        for answer in self._ask(_NFTABLES | _GETTABLE, _INET, body, f"table {table}"):
            found = read_attributes(answer, _FAMILY.size)
            yield found.get(_TABLE_HANDLE, b"") + found.get(_TABLE_FLAGS, b"")

    def _rules(self, table: str) -> Iterator[bytes]:
        body = attribute(_RULE_TABLE, table.encode() + b"\0")
        for answer in self._dump(_NFTABLES | _GETRULE, _INET, body, f"rules of table {table}"):
            found = read_attributes(answer, _FAMILY.size)
            yield found.get(_RULE_CHAIN, b"") + found.get(_RULE_HANDLE, b"")

    # --- the connection table ------------------------------------------------------------------------------------------

    def forget_udp(self, version: int, ports: Collection[int], answered_by: Collection[bytes]) -> int:
        """Delete the UDP entries of an IP version that began for one of the ports, and either kept their source or are answered by one of the
        (packed) addresses; how many. So a connection that leaves the host by masquerade stays.

        The kernel walks its whole table for it, empty buckets too: milliseconds.
        """
        family = socket.AF_INET if version == 4 else socket.AF_INET6
        protocol, filtered = attribute(_PROTOCOL_NUMBER, bytes((socket.IPPROTO_UDP,))), _BY_PROTOCOL
        if len(ports) == 1:
            protocol += attribute(_PROTOCOL_DESTINATION, struct.pack(">H", *ports))
            filtered |= _BY_DESTINATION_PORT
        flags = attribute(_FILTER_ORIGINAL, struct.pack("=I", filtered)) + attribute(_FILTER_REPLY, bytes(4))
        body = _nest(_TUPLE_ORIGINAL, _nest(_TUPLE_PROTOCOL, protocol)) + _nest(_CT_FILTER, flags)
        forgotten = 0
        for answer in self._dump(_CONNTRACK | _CT_GET, family, body, "list of UDP connections"):
            entry = read_attributes(answer, _FAMILY.size)
            if not _concerns(entry, version, ports, answered_by):
                continue
            exact = attribute(_TUPLE_ORIGINAL | _NESTED, entry[_TUPLE_ORIGINAL])
            exact += b"".join(attribute(kind, entry[kind]) for kind in (_CT_ID, _CT_ZONE) if kind in entry)
            try:
                self._ask(_CONNTRACK | _CT_DELETE, family, exact, "removal of a UDP connection")
                forgotten += 1
            except NetlinkError as error:
                if error.errno != errno.ENOENT:
                    raise
        return forgotten

    # --- exchanges ---------------------------------------------------------------------------------------------------

    def _ask(self, kind: int, family: int, body: bytes, what: str) -> list[bytes]:
        with self._lock:
            self._sequence = sequence = self._sequence + 1
            self._socket.send(_message(kind, _ACK, sequence, _FAMILY.pack(family, 0, 0) + body))
            answers: list[bytes] = []
            while True:
                for kind_, flags, answered, answer in read_messages(self._socket.recv(_RECEIVE)):
                    if answered != sequence:
                        continue
                    if kind_ != _ERROR:
                        answers.append(answer)
                        continue
                    refused = refusal(answer, flags, what)
                    if refused is not None:
                        raise refused
                    return answers

    def _dump(self, kind: int, family: int, body: bytes, what: str) -> list[bytes]:
        """Again when the kernel says that what it listed has changed meanwhile."""
        while True:
            with self._lock:
                self._sequence = sequence = self._sequence + 1
                self._socket.send(_message(kind, _DUMP, sequence, _FAMILY.pack(family, 0, 0) + body))
                answers: list[bytes] = []
                interrupted = done = False
                while not done:
                    for kind_, flags, answered, answer in read_messages(self._socket.recv(_RECEIVE)):
                        if answered != sequence:
                            continue
                        interrupted = interrupted or bool(flags & _DUMP_INTERRUPTED)
                        if kind_ == _ERROR and (refused := refusal(answer, flags, what)):
                            raise refused
                        done = done or kind_ in (_DONE, _ERROR)
                        if kind_ == _DONE and len(answer) >= 4 and (number := -struct.unpack_from("=i", answer)[0]) > 0:
                            raise NetlinkError(number, what)
                        if not done:
                            answers.append(answer)
            if not interrupted:
                return answers


class Generations:
    """Notices that the rule set of this network namespace has changed, one a transaction; non-blocking, for an event loop to watch.

    The kernel filters: who listens to nftables is otherwise told of every element.
    """

    def __init__(self) -> None:
        self._socket = socket.socket(
            socket.AF_NETLINK,
            socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK,
            _NETLINK_NETFILTER,
        )
        self._socket.bind((0, 0))
        # The type of the first message is NEWGEN, or nothing of it is kept.
        attach_filter(
            self._socket,
            (0x28, 0, 0, 4),
            (0x15, 0, 1, as_loaded(_NFTABLES | _NEWGEN)),
            (0x06, 0, 0, 0xFFFF),
            (0x06, 0, 0, 0),
        )
        self._socket.setsockopt(_SOL_NETLINK, _ADD_MEMBERSHIP, _GROUP_NFTABLES)

    def fileno(self) -> int:
        return self._socket.fileno()

    def by_others(self, own: int) -> bool:
        """Take what has come; whether anybody but the socket `own` (Nfnetlink.port) has changed anything."""
        notices, lost = arrived(self._socket)
        return lost or any(_HEADER.unpack_from(each)[4] != own for each in notices)

    def close(self) -> None:
        self._socket.close()


# --- bytes -----------------------------------------------------------------------------------------------------------


def _message(kind: int, flags: int, sequence: int, body: bytes) -> bytes:
    return _HEADER.pack(_HEADER.size + len(body), kind, _REQUEST | flags, sequence, 0) + body + bytes(-len(body) & 3)


def _nest(kind: int, value: bytes) -> bytes:
    return attribute(kind | _NESTED, value)


def _lists(table: str, elements: Iterable[tuple[str, Element]]) -> Iterator[bytes]:
    """Bodies of messages that name these elements, set by set."""
    by_set: dict[str, list[bytes]] = {}
    for name, element in elements:
        by_set.setdefault(name, []).append(_element(element))
    for name, encoded in by_set.items():
        head = attribute(_LIST_TABLE, table.encode() + b"\0") + attribute(_LIST_SET, name.encode() + b"\0")
        several = max(1, _LIST_SIZE // len(max(encoded, key=len)))
        for start in range(0, len(encoded), several):
            yield head + _nest(_LIST_ELEMENTS, b"".join(encoded[start : start + several]))


def _element(element: Element) -> bytes:
    key, end, data = element
    before_key, before_end, before_data, behind = _form(len(key), len(end), len(data))
    return before_key + key + before_end + end + before_data + data + behind


@functools.cache
def _form(*sizes: int) -> tuple[bytes, ...]:
    """What stands before, between and behind the three parts of an element of these sizes: it is the same for thousands."""
    kinds = _ELEMENT_KEY, _ELEMENT_KEY_END, _ELEMENT_DATA
    values = [
        _nest(kind, attribute(_DATA_VALUE, bytes(size))) if size else b""
        for kind, size in zip(kinds, sizes, strict=True)
    ]
    parts, padding = [], b""
    head = _nest(_LIST_ELEMENT, b"".join(values))[:4]
    for size, value in zip(sizes, values, strict=True):
        parts.append(head + padding + value[:8])
        head, padding = b"", value[8 + size :]
    return (*parts, padding)


def _list(data: bytes) -> Iterator[bytes]:
    """The values of attributes that all have the same type."""
    position = 0
    while position + 4 <= len(data):
        (size,) = struct.unpack_from("=H", data, position)
        if size < 4:
            return
        yield data[position + 4 : position + size]
        position += size + 3 & ~3


def _value(nested: bytes) -> bytes:
    return read_attributes(nested, 0).get(_DATA_VALUE, b"")


def _concerns(entry: dict[int, bytes], version: int, ports: Collection[int], answered_by: Collection[bytes]) -> bool:
    """Whether an entry is what was asked for; the kernel's own filter does not tell it all."""
    original = read_attributes(entry.get(_TUPLE_ORIGINAL, b""), 0)
    protocol = read_attributes(original.get(_TUPLE_PROTOCOL, b""), 0)
    if protocol.get(_PROTOCOL_NUMBER) != bytes((socket.IPPROTO_UDP,)):
        return False
    if int.from_bytes(protocol.get(_PROTOCOL_DESTINATION, b""), "big") not in ports:
        return False
    source, destination = _IP_SOURCE[version], _IP_SOURCE[version] + 1
    asked = read_attributes(original.get(_TUPLE_IP, b""), 0)
    reply = read_attributes(read_attributes(entry.get(_TUPLE_REPLY, b""), 0).get(_TUPLE_IP, b""), 0)
    return reply.get(destination) == asked.get(source) or reply.get(source) in answered_by
