"""nfnetlink for nftables: elements of sets and maps, the layout of a table, notices of changes.

The rules of a table are text, which libnftables reads once (`netfilter.py`). Elements change with
every container. As text, each change would need a parser and a dump of the table; here a
transaction is a batch of bytes, and its cost depends only on the elements that it changes.

Rules: linux/netfilter/nf_tables.h, nfnetlink.h. Blocking: see `transport.py`, also for threads,
ownership and what is raised.
"""

from __future__ import annotations

import errno
import functools
import struct
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from engine.system.netlink.codec import (
    ACK,
    CREATE,
    HEADER,
    NetlinkError,
    Request,
    attribute,
    nest,
    read_attributes,
    read_list,
    read_text,
    text,
)
from engine.system.netlink.transport import DUMPS, Listener, NetlinkSocket, as_loaded

NETLINK_NETFILTER = 12
FAMILY = struct.Struct(">BBH")
"""struct nfgenmsg: address family, version, resource id."""

_SUBSYSTEM = 10
_GETTABLE, _GETCHAIN, _GETRULE, _NEWSETELEM, _GETSETELEM, _DELSETELEM, _NEWGEN = (
    _SUBSYSTEM << 8 | each for each in (1, 4, 7, 12, 13, 14, 15)
)
_BATCH_BEGIN, _BATCH_END = 0x10, 0x11
_GROUP_NFTABLES = 7

INET, IPV4, NETDEV, IPV6 = 1, 2, 5, 10
"""Families of tables: for IPv4 and IPv6 (NFPROTO_INET), for IPv4 alone, for what devices receive
and send, for IPv6 alone.
"""

_TABLE_NAME, _TABLE_FLAGS, _TABLE_HANDLE = 1, 2, 4
_CHAIN_TABLE, _CHAIN_HANDLE, _CHAIN_NAME = 1, 2, 3
_RULE_TABLE, _RULE_CHAIN, _RULE_HANDLE, _RULE_EXPRESSIONS, _EXPRESSION_NAME = 1, 2, 3, 4, 1
_LIST_TABLE, _LIST_SET, _LIST_ELEMENTS, _LIST_ELEMENT = 1, 2, 3, 1
_ELEMENT_KEY, _ELEMENT_DATA, _ELEMENT_KEY_END, _DATA_VALUE, _DATA_VERDICT = 1, 2, 10, 1, 2
_VERDICT_CODE, _VERDICT_CHAIN, _JUMP = 1, 2, -3

_BUFFER = 8 << 20
"""Largest size in bytes of one transaction and of its acknowledgements. The kernel allocates only
what is used.
"""
_LIST_SIZE = 60_000
"""Bytes of elements in one message: an attribute's length has 16 bits."""


class Element(NamedTuple):
    """One element in the kernel's format: each field of a concatenation is padded to 4 bytes.

    `end` closes an interval, `data` is a map's value. In a verdict map `chain` is the value: the
    chain to jump to.
    """

    key: bytes
    end: bytes = b""
    data: bytes = b""
    chain: str = ""


class NftSocket(NetlinkSocket):
    """A socket for the nftables of the network namespace of the thread that makes it."""

    def __init__(self) -> None:
        super().__init__(NETLINK_NETFILTER, buffer=_BUFFER, receive=256 << 10)

    def change(
        self,
        table: str,
        remove: Iterable[tuple[str, Element]],
        add: Iterable[tuple[str, Element]],
        what: str,
        family: int = INET,
    ) -> None:
        """Remove and add elements of a table, each with the name of its set, in one transaction.

        Raises the first error that the kernel reports; nothing has changed then.
        """
        changes = transaction(table, remove, add, what, family)
        if not changes:
            return
        failure = next((each.error for each in self.exchange(changes, 0) if each.error is not None), None)
        if failure is not None:
            raise failure

    def elements(self, table: str, name: str, family: int = INET) -> dict[bytes, Element]:
        """The elements of a table's set, by key.

        The kernel resizes a large set in the background after additions, and does not report that
        to a reader. Elements that move behind the reader's place are missed, and as many others are
        read twice; then the set is read again. An element can be missed only if packets add to the
        set during such a resize.

        Raises NetlinkError: ENOENT when there is no such table or set, EINTR after `DUMPS` reads.
        """
        body = FAMILY.pack(family, 0, 0) + text(_LIST_TABLE, table) + text(_LIST_SET, name)
        for _ in range(DUMPS):
            read = [*self._elements(Request(_GETSETELEM, 0, body, f"set {name}"))]
            found = {each.key: each for each in read}
            if len(found) == len(read):
                return found
        raise NetlinkError(errno.EINTR, f"set {name}: the kernel resized it during each of {DUMPS} reads")

    def _elements(self, request: Request) -> Iterator[Element]:
        for answer in self.dump(request):
            listed = read_attributes(answer, FAMILY.size).get(_LIST_ELEMENTS, b"")
            for each in read_list(listed):
                parts = read_attributes(each)
                key = _value(parts.get(_ELEMENT_KEY, b""))
                end = _value(parts.get(_ELEMENT_KEY_END, b""))
                yield Element(key, end, *_data(parts.get(_ELEMENT_DATA, b"")))

    def layout(self, table: str, family: int = INET) -> tuple[bytes, ...]:
        """Identifies one version of the rules of a table: its handle and flags, each rule's chain
        and handle.

        Empty when there is no such table.
        """
        try:
            return (*self._table(table, family), *self._rules(table, family))
        except NetlinkError as error:
            if error.errno == errno.ENOENT:
                return ()
            raise

    def chain(self, table: str, chain: str, family: int) -> tuple[bytes, ...] | None:
        """Identifies one version of the rules of a chain: its handle, each rule's handle. None when
        there is no such chain.
        """
        body = FAMILY.pack(family, 0, 0) + text(_CHAIN_TABLE, table) + text(_CHAIN_NAME, chain)
        (answer,) = self.exchange((Request(_GETCHAIN, 0, body, f"chain {chain}"),))
        if answer.error is not None:
            if answer.error.errno == errno.ENOENT:
                return None
            raise answer.error
        handles = [read_attributes(each, FAMILY.size).get(_CHAIN_HANDLE, b"") for each in answer.bodies]
        return (*handles, *self._rules(table, family, chain))

    def uses(self, table: str, chain: str, expression: str) -> bool:
        """True if a rule of the chain has an expression that the kernel calls so."""
        found = self._attributes(table, INET, chain)
        parts = (each for rule in found for each in read_list(rule.get(_RULE_EXPRESSIONS, b"")))
        return any(read_text(read_attributes(each)[_EXPRESSION_NAME]) == expression for each in parts)

    def _table(self, table: str, family: int) -> Iterator[bytes]:
        body = FAMILY.pack(family, 0, 0) + text(_TABLE_NAME, table)
        (answer,) = self.exchange((Request(_GETTABLE, 0, body, f"table {table}"),))
        if answer.error is not None:
            raise answer.error
        for each in answer.bodies:
            found = read_attributes(each, FAMILY.size)
            yield found.get(_TABLE_HANDLE, b"") + found.get(_TABLE_FLAGS, b"")

    def _rules(self, table: str, family: int, chain: str = "") -> Iterator[bytes]:
        for found in self._attributes(table, family, chain):
            yield found.get(_RULE_CHAIN, b"") + found.get(_RULE_HANDLE, b"")

    def _attributes(self, table: str, family: int, chain: str = "") -> Iterator[dict[int, bytes]]:
        """Those of each rule."""
        body = FAMILY.pack(family, 0, 0) + text(_RULE_TABLE, table)
        if chain:
            body += text(_RULE_CHAIN, chain)
        for answer in self.dump(Request(_GETRULE, 0, body, f"rules of table {table}")):
            yield read_attributes(answer, FAMILY.size)


class Generations(Listener):
    """Notices that the rule set of this network namespace has changed, one per transaction.

    The kernel also sends one notice per changed element; a filter drops those.
    """

    def __init__(self) -> None:
        # Drops every notice whose first message is not of type NEWGEN.
        program = (
            (0x28, 0, 0, 4),
            (0x15, 0, 1, as_loaded(_NEWGEN)),
            (0x06, 0, 0, 0xFFFF),
            (0x06, 0, 0, 0),
        )
        super().__init__(NETLINK_NETFILTER, program, _GROUP_NFTABLES)

    def by_others(self, own: Collection[int]) -> bool:
        """Take the waiting notices.

        Returns True if a notice was lost, or is about a change by another socket than those with
        the ports `own`.
        """
        notices, lost = self._arrived()
        return lost or any(HEADER.unpack_from(each)[4] not in own for each in notices)


# --- bytes ----------------------------------------------------------------------------------------


def transaction(
    table: str,
    remove: Iterable[tuple[str, Element]],
    add: Iterable[tuple[str, Element]],
    what: str,
    family: int = INET,
) -> list[Request]:
    """The batch that removes and adds these elements; empty when there are none."""
    head, frame = FAMILY.pack(family, 0, 0), FAMILY.pack(0, 0, _SUBSYSTEM)
    requests = [Request(_DELSETELEM, ACK, head + body, what) for body in _lists(table, remove)]
    requests += [Request(_NEWSETELEM, CREATE | ACK, head + body, what) for body in _lists(table, add)]
    if requests:
        requests = [Request(_BATCH_BEGIN, 0, frame, what), *requests, Request(_BATCH_END, 0, frame, what)]
    return requests


def _lists(table: str, elements: Iterable[tuple[str, Element]]) -> Iterator[bytes]:
    """Bodies of messages that name these elements, set by set."""
    by_set: dict[str, list[bytes]] = {}
    for name, element in elements:
        by_set.setdefault(name, []).append(_element(element))
    for name, encoded in by_set.items():
        head = attribute(_LIST_TABLE, table.encode() + b"\0") + attribute(_LIST_SET, name.encode() + b"\0")
        several = max(1, _LIST_SIZE // len(max(encoded, key=len)))
        for start in range(0, len(encoded), several):
            yield head + nest(_LIST_ELEMENTS, b"".join(encoded[start : start + several]))


def _element(element: Element) -> bytes:
    key, end, data, chain = element
    if chain:
        verdict = attribute(_VERDICT_CODE, struct.pack(">i", _JUMP)) + text(_VERDICT_CHAIN, chain)
        value = nest(_ELEMENT_DATA, nest(_DATA_VERDICT, verdict))
        return nest(_LIST_ELEMENT, nest(_ELEMENT_KEY, attribute(_DATA_VALUE, key)) + value)
    before_key, before_end, before_data, behind = _form(len(key), len(end), len(data))
    return before_key + key + before_end + end + before_data + data + behind


@functools.cache
def _form(*sizes: int) -> tuple[bytes, ...]:
    """The bytes before, between and after the three parts of an element. They depend only on the
    sizes of the parts, so thousands of elements share them.
    """
    kinds = _ELEMENT_KEY, _ELEMENT_KEY_END, _ELEMENT_DATA
    values = [
        nest(kind, attribute(_DATA_VALUE, bytes(size))) if size else b""
        for kind, size in zip(kinds, sizes, strict=True)
    ]
    parts, padding = [], b""
    head = nest(_LIST_ELEMENT, b"".join(values))[:4]
    for size, value in zip(sizes, values, strict=True):
        parts.append(head + padding + value[:8])
        head, padding = b"", value[8 + size :]
    return (*parts, padding)


def _data(nested: bytes) -> tuple[bytes, str]:
    """A map's value, and the chain of one that is a verdict."""
    found = read_attributes(nested)
    verdict = read_attributes(found.get(_DATA_VERDICT, b""))
    return found.get(_DATA_VALUE, b""), read_text(verdict.get(_VERDICT_CHAIN, b""))


def _value(nested: bytes) -> bytes:
    return read_attributes(nested).get(_DATA_VALUE, b"")
