"""Encryption of overlays between nodes: ESP in transport mode around the VXLAN's UDP packets.

Each encrypted network has a secret, which the managers give to the nodes that are on it. The keys
follow from it: one for each direction between two nodes and each period of 12 hours. So nodes
change keys without a manager, and no two senders share one. A node sends with the key of its own
period, and receives with those of the periods before, now and after. Clocks may differ by hours.

A packet that leaves is marked with the number of its network, as only that tells it from a network
in the clear, and the mark leads to a policy for the receiving node. Packets of encrypted networks
are dropped if they would leave without a policy, or have come in the clear.

Owns: the policies and associations of its networks in the namespace of the thread that makes the
first call, and one nftables table. Associations that a crash leaves expire. Threads: blocking, any
thread; one lock. Raises: ServerError that names the missing part; OSError. Then nothing is sent in
the clear.
"""

from __future__ import annotations

import errno
import hmac
import threading
import time
from collections.abc import Collection, Iterator
from ipaddress import IPv4Address

from engine.errors import ServerError
from engine.networks.network import Overlay
from engine.system import netfilter
from engine.system.netlink import xfrm
from engine.system.netlink.nft import NftSocket
from engine.system.netlink.xfrm import KEY, Association, XfrmSocket

PERIOD = 12 * 3600
"""Seconds for which a key is used."""
_LIFE = 3 * PERIOD + 3600
"""Seconds after which an association expires: it is made for three periods at most."""
_MARK = 0x0E000000
"""Added to a network's number, which has 24 bits."""
_LEAST_NUMBER = 256
"""Smaller SPIs are reserved (RFC 4303, 2.1)."""

# 96 bits: the header of UDP and the flags of VXLAN, then follows the network's number.
_RULES = """
add table inet {table}
flush table inet {table}
table inet {table} {{
    chain output {{
        type route hook output priority mangle; policy accept;
{marking}
    }}
    chain postrouting {{
        type filter hook postrouting priority filter; policy accept;
        udp dport {port} meta mark & 0xff000000 == {mark} rt ipsec missing drop
    }}
    chain input {{
        type filter hook input priority filter - 10; policy accept;
{received}
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

    def __init__(self, table: str) -> None:
        self._table = table
        self._lock = threading.Lock()
        self._kernel: XfrmSocket | None = None
        self._rules: NftSocket | None = None
        self._layout: tuple[bytes, ...] = ()
        self._ruled: list[Overlay] = []
        """The networks in the rules."""
        self._of: dict[int, _Encrypted] = {}

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
            self._install()
            if again:
                known.associations.clear()
                known.policies.clear()
            self._change(known, {*peers} - {meant.local}, int(time.time()) // PERIOD)

    def remove(self, number: int) -> None:
        """Undo `set`. An unknown network is fine."""
        with self._lock:
            known = self._of.pop(number, None)
            if known is not None:
                self._take(known)
                self._install()

    def close(self) -> None:
        """Close the sockets. What is in the kernel stays."""
        with self._lock:
            for each in (self._kernel, self._rules):
                if each is not None:
                    each.close()
            self._kernel = self._rules = None

    # --- with the lock held -----------------------------------------------------------------------

    def _open(self) -> None:
        if not netfilter.available():
            raise ServerError("encryption of networks: libnftables.so.1 is not installed")
        try:
            self._kernel = self._kernel or XfrmSocket()
            self._rules = self._rules or NftSocket()
        except OSError as error:
            raise ServerError(f"encryption of networks: this kernel has no IPsec: {error.strerror}") from error

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
            raise ServerError(f"encryption of networks: ESP with AES-GCM: {error}") from error

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

    def _install(self) -> None:
        """The rules for all networks, if they are not there."""
        if self._rules is None:
            return
        networks = [each.meant for each in self._of.values()]
        if not networks:
            netfilter.run(f"add table inet {self._table}\ndelete table inet {self._table}")
            self._layout = ()
            return
        layout = self._rules.layout(self._table)
        if layout and layout == self._layout and networks == self._ruled:
            return
        try:
            netfilter.run(rules(self._table, networks))
        except netfilter.NetfilterError as error:
            raise ServerError(f"encryption of networks: installing its rules: {error}") from error
        self._layout, self._ruled = self._rules.layout(self._table), networks


def rules(table: str, networks: Collection[Overlay]) -> str:
    """The text for nft."""
    number = "udp dport {0.port} @th,96,24 {0.vni}"
    marking = [f"ip saddr {each.local} {number.format(each)} meta mark set {_MARK | each.vni:#x}" for each in networks]
    received = [f"{number.format(each)} meta ipsec missing drop" for each in networks]
    (port,) = {each.port for each in networks}
    return _RULES.format(
        table=table, port=port, mark=f"{_MARK:#x}", marking="\n".join(marking), received="\n".join(received)
    )


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
