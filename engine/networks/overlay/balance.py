"""Virtual addresses of services in the namespace of one network: which backend a connection gets.

The first packet of a connection to a virtual address picks a slot by a random number, and a map
leads from the slot to a backend that is ready (`slots.py`). This holds for every protocol and port,
ping too. The connection table keeps the choice. The number of rules is constant: a verdict map
leads from a virtual address to the chain of its number of slots. A change writes the slots that
differ, in one transaction.

- The rules look up twice. If a service loses slots between the look-ups for one packet, the second
  attempt finds the new ones.
- A service without a backend refuses connections at once.
- A backend that connects to its own service and gets itself is answered through the gateway's
  address; otherwise it would get packets from its own address.
- A withdrawn backend keeps its TCP connections, so that it can finish them. When it has gone
  (`end`) the next packet of such a connection is answered with a reset. UDP clients move when the
  backend is withdrawn, or else they would never know: `forget_datagrams` deletes their entries from
  the connection table. That takes a walk through the table, so a set has the backends that ever got
  datagrams.

The state is in the kernel: the next daemon reads it and goes on with it.

Owns: one table in the namespace, and a socket there. Threads: blocking, any thread; one lock for
      each network. Raises:
NetfilterError; a later call writes what is missing then. Not here: names (`common/names.py`),
routes (`overlay.py`), ports of the host (`ingress.py`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from ipaddress import IPv4Address, IPv6Address

from engine.errors import words
from engine.networks.overlay import slots
from engine.system import namespaces, netfilter, sysctls
from engine.system.netfilter import NetfilterError
from engine.system.netlink.conntrack import ConntrackSocket
from engine.system.netlink.nft import Element, NftSocket

_log = logging.getLogger(__name__)

TABLE = "engined-services"

_LARGEST = 60_000
"""Elements that are written in one transaction, unless one service has more."""

_LIBERAL = {"netfilter/nf_conntrack_tcp_be_liberal": "1"}
"""A late packet of a backend is still one of its connection. Otherwise it would reach the client
with the backend's own address, and the client would reset the connection.
"""

_SETS = ("services", "addresses", "slots", "self", "ended")

_ENDED = 10_000
"""Backends that are remembered when they have gone. An address is given again earlier."""

# Existing sets keep their elements; the rules are replaced. `addresses` has the keys of `services`:
# the kernel does not let a filter chain look up a map that leads to chains with NAT.
_RULES = """
add table inet {table}
{declared}
add map inet {table} services {{ type ipv4_addr : verdict; }}
add set inet {table} addresses {{ type ipv4_addr; }}
add map inet {table} slots {{ typeof ip daddr . numgen random mod 64 : ip daddr; }}
add set inet {table} self {{ typeof ip saddr . ip daddr; }}
add set inet {table} ended {{ type ipv4_addr; }}
add set inet {table} datagrams {{ type ipv4_addr; size 65536; flags dynamic; }}
flush table inet {table}
table inet {table} {{
{chains}
    chain prerouting {{
        type nat hook prerouting priority dstnat; policy accept;
        ip daddr vmap @services
        ip daddr vmap @services
    }}
    chain refuse {{
        meta l4proto tcp reject with tcp reset
        reject with icmp port-unreachable
    }}
    chain led {{
        meta l4proto tcp ip daddr @ended reject with tcp reset
        meta l4proto udp ct state new add @datagrams {{ ip daddr }}
    }}
    chain checked {{
        type filter hook prerouting priority -90; policy accept;
        ct state new ip daddr @addresses jump refuse
        ct status dnat ct direction original jump led
    }}
    chain postrouting {{
        type nat hook postrouting priority srcnat; policy accept;
        ct status dnat ip saddr . ip daddr @self snat ip to {gateway}
    }}
}}
"""

NamedElement = tuple[str, Element]
Change = tuple[list[NamedElement], list[NamedElement]]
"""What goes and what comes."""


class Balance:
    """The services of one network on this node.

    The namespace's descriptor is the caller's and stays open while this object is used.
    """

    def __init__(self, namespace: int, gateway: IPv4Address) -> None:
        self._namespace = namespace
        self._gateway = gateway
        self._lock = threading.Lock()
        self._kernel: NftSocket | None = None
        self._closed = False
        self._layout: tuple[bytes, ...] = ()
        self._begun = False
        """True when `_slots` is what the kernel should have."""
        self._written = False
        """False if a failure left the kernel without some of it."""
        self._slots: dict[bytes, list[bytes]] = {}
        self._uses: Counter[bytes] = Counter()
        """How many services have this backend."""
        self._ended: dict[bytes, None] = {}
        """Backends that have gone, the oldest first."""
        self._ending: set[bytes] = set()
        """Those that services still lead to."""

    def set(
        self, put: Mapping[IPv4Address, Sequence[IPv4Address]], gone: Collection[IPv4Address] = ()
    ) -> set[IPv4Address]:
        """Lead these virtual addresses to their ready backends; those in `gone` are no longer any.

        The first call has all services of the network: others, which an earlier daemon left, end.
        Returns the backends that no service has any more. They still get the packets of their
        connections, until `forget_datagrams` and `end`.
        """
        wanted = {address.packed: [each.packed for each in backends] for address, backends in put.items()}
        with self._lock:
            ending = [each.packed for each in gone]
            withdrawn = self._change(wanted, ending) if self._begun else self._begin(wanted)
        return {IPv4Address(each) for each in withdrawn}

    def forget_datagrams(self, backends: Iterable[IPv4Address]) -> None:
        """Forget the UDP connections of those backends that are still withdrawn: their clients move
        to others.

        Kernel errors are logged.
        """
        try:
            with self._lock:
                if self._closed or not self._layout:
                    return
                withdrawn = self._still_withdrawn(backends)
                with self._inside() as kernel:
                    there = kernel.elements(TABLE, "datagrams")
                    led = [("datagrams", Element(each)) for each in withdrawn if each in there]
                    kernel.change(TABLE, led, (), f"table {TABLE}")
                if not led:
                    return
                namespace = os.dup(self._namespace)
            _forget(namespace, withdrawn, socket.IPPROTO_UDP)
        except (NetfilterError, OSError) as error:
            _log.warning("cannot remove UDP connections of backends that have gone: %s", words(error))

    def forget_unanswered(self, backends: Iterable[IPv4Address]) -> None:
        """Forget the TCP connections that those backends have never answered which are still
        withdrawn: they may be on a lost node, and the client's next attempt goes to another one.

        Call it some time after the withdrawal, so that answers are not just under way. Kernel
        errors are logged.
        """
        try:
            with self._lock:
                withdrawn = self._still_withdrawn(backends)
                if self._closed or not self._layout or not withdrawn:
                    return
                namespace = os.dup(self._namespace)
            _forget(namespace, withdrawn, socket.IPPROTO_TCP, unanswered=True)
        except OSError as error:
            _log.warning("cannot remove connections to backends that have gone: %s", words(error))

    def _still_withdrawn(self, backends: Iterable[IPv4Address]) -> frozenset[bytes]:
        return frozenset(each.packed for each in backends if not self._uses[each.packed])

    @property
    def balances(self) -> bool:
        """True if there are services."""
        return bool(self._slots)

    def end(self, addresses: Iterable[IPv4Address | IPv6Address]) -> None:
        """These endpoints have gone: reset what is left of their connections, of a backend when it
        is withdrawn.

        Holds until an address is a backend again. Raises NetfilterError; `mend` writes what is
        missing then.
        """
        with self._lock:
            if self._closed or not self._layout:
                return
            gone = {each.packed: None for each in addresses if each.version == 4}
            self._ending |= {each for each in gone if self._uses[each]}
            change = self._end([each for each in gone if not self._uses[each]])
            if any(change):
                self._apply([change])

    def mend(self) -> bool:
        """Put back what other programs changed in the table. Returns True if anything differed.

        Before the first `set` nothing is known, so nothing is changed.
        """
        with self._lock:
            return self._begun and not self._closed and self._repair()

    def close(self) -> None:
        """Close the socket, which would keep the namespace; the other calls do nothing from now on
        or raise. The table stays as long as the namespace.
        """
        with self._lock:
            self._closed = True
            if self._kernel is not None:
                self._kernel.close()
                self._kernel = None

    # --- with the lock held -----------------------------------------------------------------------

    def _end(self, addresses: Iterable[bytes]) -> Change:
        new = [each for each in addresses if each not in self._ended][-_ENDED:]
        old = [*self._ended][: max(0, len(self._ended) + len(new) - _ENDED)]
        for each in old:
            del self._ended[each]
        self._ended |= dict.fromkeys(new)
        return [_gone(each) for each in old], [_gone(each) for each in new]

    @contextlib.contextmanager
    def _inside(self) -> Iterator[NftSocket]:
        """The calling thread in the namespace, for libnftables; the socket there."""
        if self._closed:
            raise NetfilterError("services: the network is not on this node any more")
        try:
            with namespaces.inside_network(self._namespace):
                # Kept open, because closing one waits for the kernel to free what was removed:
                # 10 ms.
                if self._kernel is None:
                    self._kernel = NftSocket()
                yield self._kernel
        except OSError as error:
            raise NetfilterError(f"services: {words(error)}") from error

    def _begin(self, wanted: Mapping[bytes, Sequence[bytes]]) -> Collection[bytes]:
        """Install the rules and go on from the slots that an earlier daemon left."""
        before: dict[bytes, list[bytes]] = {}
        there: dict[str, dict[bytes, Element]] = {}
        try:
            with self._inside() as kernel:
                if not wanted and not kernel.layout(TABLE):
                    return ()  # a network without services needs no table
                self._install(kernel)
                there = self._read(kernel)
                before = _read_slots(there["slots"].values())
        finally:
            self._begun = True
            self._slots = {each: slots.fill(before.get(each, ()), backends) for each, backends in wanted.items()}
            self._uses = Counter(each for filled in self._slots.values() for each in set(filled))
            self._ended = {each: None for each in there.get("ended", ()) if each not in self._uses}
        with self._inside() as kernel:
            self._reconcile(kernel, there)
        return {each for filled in before.values() for each in filled} - self._uses.keys()

    def _change(self, wanted: Mapping[bytes, Sequence[bytes]], gone: Iterable[bytes]) -> Collection[bytes]:
        after: dict[bytes, list[bytes] | None] = {each: None for each in gone if each in self._slots}
        for address, backends in wanted.items():
            before = self._slots.get(address)
            filled = slots.fill(before or (), backends)
            if filled != before:
                after[address] = filled
        changes: list[Change] = []
        uses: Counter[bytes] = Counter()
        for address, to in after.items():
            before = self._slots.get(address)
            changes.append(_change(address, before, to))
            uses.subtract(set(before or ()))
            uses.update(set(to or ()))
        added = [each for each, more in uses.items() if more > 0 and not self._uses[each]]
        withdrawn = [each for each, more in uses.items() if more < 0 and self._uses[each] == -more]
        self._uses.update(uses)
        for each in withdrawn:
            del self._uses[each]
        changes = [([], [_own(each) for each in added]), *changes, ([_own(each) for each in withdrawn], [])]
        for address, to in after.items():
            if to is None:
                del self._slots[address]
            else:
                self._slots[address] = to
        back = [each for each in added if each in self._ended]
        for each in back:
            del self._ended[each]
        changes.append(([_gone(each) for each in back], []))
        ended = [each for each in withdrawn if each in self._ending]
        self._ending.difference_update(ended)
        changes.append(self._end(ended))
        self._apply(changes)
        return withdrawn

    def _apply(self, changes: list[Change]) -> None:
        """Write the changes. If the table is not as it was left, reconcile all of it instead."""
        if self._written:
            self._written = False
            try:
                if any(remove or add for remove, add in changes):
                    with self._inside() as kernel:
                        _write(kernel, changes)
                self._written = True
                return
            except NetfilterError as error:
                _log.warning("%s: reconciling the table", error)
        self._repair()

    def _repair(self) -> bool:
        if not self._slots and not self._layout:
            return False
        with self._inside() as kernel:
            missing = not self._layout or kernel.layout(TABLE) != self._layout
            if missing:
                self._install(kernel)
            return self._reconcile(kernel, self._read(kernel)) or missing

    def _install(self, kernel: NftSocket) -> None:
        chains = "\n".join(
            f"    chain of{each} {{\n        dnat ip to ip daddr . numgen random mod {each} map @slots\n    }}"
            for each in slots.SIZES
        )
        declared = "\n".join(f"add chain inet {TABLE} of{each}" for each in slots.SIZES)
        text = _RULES.format(table=TABLE, declared=declared, chains=chains, gateway=self._gateway)
        try:
            netfilter.run(text)
        except NetfilterError:
            # Perhaps the sets are those of another version of this engine.
            netfilter.run(f"add table inet {TABLE}\ndelete table inet {TABLE}\n{text}")
        self._layout = kernel.layout(TABLE)
        with contextlib.suppress(OSError):
            sysctls.write(_LIBERAL)

    def _read(self, kernel: NftSocket) -> dict[str, dict[bytes, Element]]:
        return {name: kernel.elements(TABLE, name) for name in _SETS}

    def _reconcile(self, kernel: NftSocket, there: Mapping[str, Mapping[bytes, Element]]) -> bool:
        """Reconcile the table with the expected elements.

        Returns True if anything was corrected.
        """
        found: dict[bytes, list[NamedElement]] = {}
        for name in ("services", "addresses", "slots"):
            for key, element in there[name].items():
                found.setdefault(key[:4], []).append((name, element))
        own = {each + each for each in self._uses}
        changes: list[Change] = [([], [_own(each) for each in self._uses if each + each not in there["self"]])]
        for address in found.keys() | self._slots.keys():
            changes.append(_difference(found.get(address, ()), _service(address, self._slots.get(address))))
        changes.append(([("self", each) for key, each in there["self"].items() if key not in own], []))
        changes.append(
            (
                [("ended", each) for key, each in there["ended"].items() if key not in self._ended],
                [_gone(each) for each in self._ended if each not in there["ended"]],
            )
        )
        _write(kernel, changes)
        self._written = True
        return any(remove or add for remove, add in changes)


def _forget(namespace: int, backends: Collection[bytes], protocol: int, *, unanswered: bool = False) -> None:
    """Call without the lock, so that no other change waits for the walk. Closes the descriptor."""
    try:
        with namespaces.inside_network(namespace), ConntrackSocket() as connections:
            connections.forget_answers(backends, protocol, unanswered=unanswered)
    finally:
        os.close(namespace)


# --- elements, as the kernel has them -------------------------------------------------------------


def _service(address: bytes, filled: Sequence[bytes] | None) -> Iterator[NamedElement]:
    """The elements of a service; none if there is no service. One without backends has its
    address.
    """
    yield from _head(address, filled)
    for at, backend in enumerate(filled or ()):
        yield _slot(address, at, backend)


def _head(address: bytes, filled: Sequence[bytes] | None) -> Iterator[NamedElement]:
    if filled is not None:
        yield "addresses", Element(address)
    if filled:
        yield "services", Element(address, chain=f"of{len(filled)}")


def _slot(address: bytes, at: int, backend: bytes) -> NamedElement:
    # A number of `numgen` has the byte order of the host.
    return "slots", Element(address + struct.pack("=I", at), b"", backend)


def _change(address: bytes, before: Sequence[bytes] | None, to: Sequence[bytes] | None) -> Change:
    """The same as the difference of both services' elements; makes only elements that differ."""
    remove = list(_head(address, before))
    add = list(_head(address, to))
    if remove == add:
        remove, add = [], []
    old, new = before or (), to or ()
    for at, (was, is_) in enumerate(zip(old, new, strict=False)):
        if was != is_:
            remove.append(_slot(address, at, was))
            add.append(_slot(address, at, is_))
    remove += [_slot(address, at, old[at]) for at in range(len(new), len(old))]
    add += [_slot(address, at, new[at]) for at in range(len(old), len(new))]
    return remove, add


def _own(backend: bytes) -> NamedElement:
    return "self", Element(backend + backend)


def _gone(backend: bytes) -> NamedElement:
    return "ended", Element(backend)


def _read_slots(elements: Iterable[Element]) -> dict[bytes, list[bytes]]:
    """The slots of each virtual address, in their order."""
    found: dict[bytes, list[tuple[int, bytes]]] = {}
    for each in elements:
        found.setdefault(each.key[:4], []).append((struct.unpack_from("=I", each.key, 4)[0], each.data))
    return {address: [backend for _, backend in sorted(numbered)] for address, numbered in found.items()}


def _difference(before: Iterable[NamedElement], after: Iterable[NamedElement]) -> Change:
    old, new = set(before), set(after)
    return list(old - new), list(new - old)


def _write(kernel: NftSocket, changes: Iterable[Change]) -> None:
    """Write these changes in their order, in as few transactions as possible. A change is never
    split.
    """
    remove: list[NamedElement] = []
    add: list[NamedElement] = []
    for less, more in changes:
        if (remove or add) and len(remove) + len(add) + len(less) + len(more) > _LARGEST:
            kernel.change(TABLE, remove, add, f"table {TABLE}")
            remove, add = [], []
        remove += less
        add += more
    if remove or add:
        kernel.change(TABLE, remove, add, f"table {TABLE}")
