"""Encryption of overlays between nodes: ESP in transport mode around the VXLAN's UDP packets.

Each encrypted network has a secret, which the managers give to the nodes that are on it. The keys
follow from it: one for each direction between two nodes and each period of four hours. So nodes
change keys without a manager, and no two senders share one. A node sends with the key of its own
period, and receives with those of the periods before, now and after. Clocks may differ by hours.

A packet that leaves is marked with the number of its network, as only that tells it from a network
in the clear, and the mark leads to a policy for the receiving node. Packets of encrypted networks
are dropped if they would leave without a policy, or have come in the clear.

The numbers are elements of sets, which outlive the daemon. The next one keeps them until it has
adopted all networks, so that none of them sends in the clear meanwhile. If another program removes
the rules, they are put back with those of the bridges (`filter.py`).

Owns: the policies and associations of its networks in the namespace of the thread that makes the
first call, and one nftables table. Associations that a crash leaves expire. Threads: blocking, any
thread; one lock. Raises: ServerError that names the missing part; OSError. Then nothing is sent in
the clear.
"""

from __future__ import annotations

import errno
import hmac
import sys
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from ipaddress import IPv4Address

from engine.errors import ServerError, words
from engine.networks.filter import Filter
from engine.networks.network import Overlay
from engine.system import netfilter
from engine.system.netlink import xfrm
from engine.system.netlink.codec import NetlinkError
from engine.system.netlink.nft import Element, NftSocket
from engine.system.netlink.xfrm import KEY, Association, XfrmSocket

PERIOD = 4 * 3600
"""Seconds for which a key is used. The kernel numbers packets with 32 bits (RFC 4303, 2.2) and
stops after the last one: that is 298,000 packets a second, 3.4 Gbit/s. A shorter period would cut
off a node sooner whose daemon has stopped.
"""
_LIFE = 3 * PERIOD + 3600
"""Seconds after which an association expires: it is made for three periods at most."""
_MARK = 0x0E000000
"""Added to a network's number, which has 24 bits."""
_LEAST_NUMBER = 256
"""Smaller SPIs are reserved (RFC 4303, 2.1)."""

_SETS = ("networks", "numbers")

# Existing sets keep their elements; the rules are replaced. 96 bits: the header of UDP and the
# flags of VXLAN, then follows the network's number.
_RULES = """
add table inet {table}
add map inet {table} networks {{ typeof @th,96,24 : meta mark; }}
add set inet {table} numbers {{ typeof @th,96,24; }}
{elements}
flush table inet {table}
table inet {table} {{
    chain output {{
        type route hook output priority mangle; policy accept;
        udp dport {port} meta mark set @th,96,24 map @networks
    }}
    chain postrouting {{
        type filter hook postrouting priority filter; policy accept;
        udp dport {port} meta mark & 0xff000000 == {mark} rt ipsec missing drop
    }}
    chain input {{
        type filter hook input priority filter - 10; policy accept;
        udp dport {port} @th,96,24 @numbers meta ipsec missing drop
    }}
}}
"""


class _Encrypted:
    """One network."""

    def __init__(self, meant: Overlay) -> None:
        self.meant = meant
        self.associations: set[Association] = set()
        self.policies: dict[IPv4Address, Association] = {}


class Encryption:
    """One engine's."""

    def __init__(self, table: Filter) -> None:
        """When the rules of `table` are repaired, these are, too."""
        self._filter = table
        self._table = f"{table.name}-esp"
        self._lock = threading.Lock()
        self._kernel: XfrmSocket | None = None
        self._rules: NftSocket | None = None
        self._layout: tuple[bytes, ...] = ()
        self._port = 0
        """UDP port of VXLAN in the rules, known with the first network."""
        self._numbers: frozenset[int] = frozenset()
        """Those that were written to the kernel."""
        self._of: dict[int, _Encrypted] = {}
        self._kept: set[int] = set()
        """Numbers of an earlier daemon's networks that this one has not adopted."""

    def set(self, meant: Overlay, peers: Collection[IPv4Address], *, again: bool = False) -> None:
        """Encrypt the network's packets to and from these nodes. Before there is a route to a new
        one.

        With `again`, what is known to be in the kernel is put there once more.
        """
        if not meant.secret:
            raise ServerError(f"encryption of network {meant.vni}: there is no key")
        with self._lock:
            self._open()
            known = self._of.get(meant.vni)
            if known is None or known.meant != meant:
                if known is not None:
                    self._take(known)
                known = self._of[meant.vni] = _Encrypted(meant)
            self._kept.discard(meant.vni)
            if self._port != meant.port:
                self._port, self._layout = meant.port, ()
            self._install(again)
            if again:
                known.associations.clear()
                known.policies.clear()
            self._change(known, {*peers} - {meant.local}, int(time.time()) // PERIOD)

    def remove(self, number: int) -> None:
        """Undo `set`, also that of an earlier daemon. An unknown network is fine."""
        with self._lock:
            known = self._of.pop(number, None)
            if known is not None:
                self._take(known)
            if known is not None or number in self._kept:
                self._kept.discard(number)
                self._install(False)

    def settle(self, awaited: Collection[int]) -> None:
        """All networks have been adopted but these: others are not encrypted any more."""
        with self._lock:
            if netfilter.available() and not self._filter.off:
                self._open_rules()
                self._kept &= {*awaited}
                self._install(True)

    def mend(self, elements: bool) -> bool:
        """As `Filter.mend`, which calls this."""
        with self._lock:
            return self._rules is not None and self._install(elements)

    def close(self) -> None:
        """Close the sockets. What is in the kernel stays."""
        with self._lock:
            if self._kernel is not None:
                self._kernel.close()
                self._kernel = None
            if self._rules is not None:
                self._filter.companions.remove(self.mend)
                self._filter.authors.discard(self._rules.port)
                self._rules.close()
                self._rules = None

    # --- with the lock held -----------------------------------------------------------------------

    def _open(self) -> None:
        if self._filter.off:
            raise ServerError("encryption of networks needs rules of nftables, and --firewall none writes none")
        if not netfilter.available():
            raise ServerError("encryption of networks: libnftables.so.1 is not installed")
        try:
            self._kernel = self._kernel or XfrmSocket()
        except OSError as error:
            raise ServerError(f"encryption of networks: this kernel has no IPsec: {error.strerror}") from error
        self._open_rules()

    def _open_rules(self) -> None:
        if self._rules is not None:
            return
        rules = NftSocket()
        try:
            self._kept = {int.from_bytes(key, "big") for there in _read(rules, self._table).values() for key in there}
        except BaseException:
            rules.close()
            raise
        self._rules = rules
        self._filter.authors.add(rules.port)
        self._filter.companions.append(self.mend)

    def _change(self, known: _Encrypted, peers: Collection[IPv4Address], period: int) -> None:
        assert self._kernel is not None
        wanted: set[Association] = set()
        policies: dict[IPv4Address, Association] = {}
        for peer in peers:
            wanted.update(_receiving(known.meant, peer, period))
            policies[peer] = association(known.meant, known.meant.local, peer, period)
        wanted.update(policies.values())
        # before the policies that lead to them
        for each in wanted - known.associations:
            self._add(each)
            known.associations.add(each)
        for peer, each in policies.items():
            if known.policies.get(peer) != each:
                mark = _MARK | known.meant.vni
                self._kernel.apply(xfrm.set_policy(each, port=known.meant.port, mark=mark))
                known.policies[peer] = each
        self._leave(known, known.policies.keys() - policies.keys(), known.associations - wanted)

    def _add(self, each: Association) -> None:
        assert self._kernel is not None
        try:
            self._kernel.apply(xfrm.add_association(each, life=_LIFE))
        except OSError as error:
            if error.errno == errno.EEXIST:
                return  # an earlier daemon's
            raise ServerError(f"encryption of networks: ESP with AES-GCM: {words(error)}") from error

    def _take(self, known: _Encrypted) -> None:
        self._leave(known, [*known.policies], {*known.associations})

    def _leave(self, known: _Encrypted, peers: Collection[IPv4Address], gone: Collection[Association]) -> None:
        if self._kernel is None:
            return
        mark = _MARK | known.meant.vni
        for peer in [*peers]:
            policy = known.policies.pop(peer)
            self._kernel.apply(xfrm.delete_policy(policy, port=known.meant.port, mark=mark), missing=True)
        for each in gone:
            self._kernel.apply(xfrm.delete_association(each), missing=True)
            known.associations.discard(each)

    def _install(self, compare: bool) -> bool:
        """Put the rules and their elements there, as far as they are missing. Returns True if
        anything differed. Without `compare`, elements are read only if rules are missing or the
        networks are others.
        """
        if self._rules is None:
            return False
        numbers = frozenset((*self._of, *self._kept))
        layout = self._rules.layout(self._table)
        try:
            if not numbers:
                if layout:
                    netfilter.run(f"add table inet {self._table}\ndelete table inet {self._table}")
                self._layout, self._numbers = (), numbers
                return bool(layout)
            # those of an earlier daemon stay as they are until a network is adopted
            missing = self._port != 0 and (not self._layout or layout != self._layout)
            if missing:
                self._replace(numbers)
                self._layout = self._rules.layout(self._table)
            if not (missing or compare or numbers != self._numbers):
                return False
            return self._reconcile(numbers) or missing
        except netfilter.NetfilterError as error:
            raise ServerError(f"encryption of networks: installing its rules: {error}") from error

    def _replace(self, numbers: Collection[int]) -> None:
        text = rules(self._table, self._port, numbers)
        try:
            netfilter.run(text)
        except netfilter.NetfilterError:
            # Perhaps the sets are those of another version of this engine.
            netfilter.run(f"add table inet {self._table}\ndelete table inet {self._table}\n{text}")

    def _reconcile(self, numbers: frozenset[int]) -> bool:
        """Returns True if any element was corrected."""
        assert self._rules is not None
        there = {(name, each) for name, found in _read(self._rules, self._table).items() for each in found.values()}
        wanted = {each for number in numbers for each in _elements(number)}
        if self._port == 0:
            wanted &= there
        self._rules.change(self._table, there - wanted, wanted - there, f"table {self._table}")
        self._numbers = numbers
        return there != wanted


def rules(table: str, port: int, numbers: Iterable[int]) -> str:
    """The text for nft, with the networks of these numbers."""
    listed = [*numbers]
    marks = ", ".join(f"{each} : {_MARK | each:#x}" for each in listed)
    elements = f"add element inet {table} networks {{ {marks} }}\n"
    elements += f"add element inet {table} numbers {{ {', '.join(map(str, listed))} }}"
    return _RULES.format(table=table, port=port, mark=f"{_MARK:#x}", elements=elements)


def _read(kernel: NftSocket, table: str) -> dict[str, dict[bytes, Element]]:
    """What is in the sets; nothing if there is no table, or that of another version."""
    try:
        return {name: kernel.elements(table, name) for name in _SETS}
    except NetlinkError as error:
        if error.errno != errno.ENOENT:
            raise
        return {}


def _elements(number: int) -> Iterator[tuple[str, Element]]:
    key = number.to_bytes(3, "big")
    yield "networks", Element(key, b"", (_MARK | number).to_bytes(4, sys.byteorder))
    yield "numbers", Element(key)


def _receiving(meant: Overlay, peer: IPv4Address, period: int) -> Iterator[Association]:
    for each in (period - 1, period, period + 1):
        yield association(meant, peer, meant.local, each)


def association(meant: Overlay, source: IPv4Address, destination: IPv4Address, period: int) -> Association:
    """Both ends derive the same."""
    of = source.packed + destination.packed + period.to_bytes(8, "big")
    key = hmac.digest(meant.secret, b"engined overlay key" + of, "sha256")[:KEY]
    number = int.from_bytes(hmac.digest(meant.secret, b"engined overlay SPI" + of, "sha256")[:4], "big")
    spread = (1 << 32) - _LEAST_NUMBER
    return Association(source, destination, _LEAST_NUMBER + number % spread, meant.vni, key)
