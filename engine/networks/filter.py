"""The rules of all bridges, in one nftables table: filtering, NAT, published ports.

A handful of rules over maps and sets. A network or a port adds elements, and one transaction makes
changes that belong together. Elements and rules that other programs remove are put back (`mend`).

- A packet to an address of this host is rewritten if its protocol, address and port are in a map,
  whatever its source except internal networks. Its source address stays, unless the answer would
  not come back through this host: from the host's loopback, and within one bridge.
- A bridge accepts answers, neighbours unless icc is off, and rewritten packets. Nothing leaves or
  enters an internal one. An unprotected one accepts everything else, too.
- `accept` ends this table's chain alone: chains of other tables see the packet, too, and may drop
  it. So what is accepted here carries a bit of the packet's mark, from before their usual priority
  until it has been routed. `firewall.py` has them accept the bit.
- 127.0.0.0/8 is allowed on lo alone. Routing would drop such packets too, but only after they had
  been rewritten, and not on a bridge that has route_localnet.
- Router advertisements and redirects from bridges that the engine made do not reach the host, which
  would take addresses and routes from them (CVE-2020-13401). `host.py` has the links ignore them,
  too.
- By IPv6, TCP reaches containers without an IPv6 address through a relay. A connection that no map
  has led to a container is given to one socket at ::1 by TPROXY. The packets stay as they are, so
  the socket sees the original address and port, and the host's own input rules apply. The process
  that accepts there connects to the same port of `RELAYED`, an address of 127.0.0.0/8, and is led
  on by the IPv4 maps. Everything for ::1 goes this way, as the kernel routes nothing from there to
  a bridge. Datagrams do not.

Everything blocks on the kernel and is called in threads. Owns: the table, and route_localnet of the
bridges. Locks: `_lock` for every change; a netlink socket's own lock is taken under it, no other.
Not here: which ports a container gets (`ports.py`). Raises: NetfilterError; nothing has changed
then.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from pathlib import Path
from typing import NamedTuple

from engine.config import FIREWALL_MARK
from engine.errors import EngineError, words
from engine.networks.ports import ANY, AT_LOOPBACK, PROTOCOLS, Published, Relayed
from engine.system import netfilter
from engine.system.netfilter import NetfilterError
from engine.system.netlink.codec import NetlinkError
from engine.system.netlink.conntrack import ConntrackSocket
from engine.system.netlink.nft import Element, NftSocket

_log = logging.getLogger(__name__)

_OF_NETWORKS = (
    *("bridges", "made", "internal", "inside", "masqueraded", "entrances"),
    *("open4", "open6", "hairpin4", "hairpin6"),
)
_OF_DIRECT = ("direct4", "direct6")
_OF_PORTS = ("address4", "any4", "address6", "any6", "relayed_anywhere", "relayed_at_loopback")

OVERLAY_LINK = "ov-"
"""How the names of links to a swarm's networks begin."""
RELAYED = IPv4Address("127.58.58.49")
"""IPv4 alias for ::1, used only by the relay, so a port published on ::1 alone gets its own map
key.
"""

# Existing sets keep their elements; the rules are replaced.
_RULES = """
add table inet {table}
add set inet {table} bridges {{ type ifname; }}
add set inet {table} made {{ type ifname; }}
add set inet {table} internal {{ type ifname; }}
add set inet {table} inside {{ type ifname . ifname; }}
add set inet {table} masqueraded {{ type ifname; }}
add set inet {table} entrances {{ type ifname; }}
add set inet {table} open4 {{ type ifname; }}
add set inet {table} open6 {{ type ifname; }}
add set inet {table} hairpin4 {{ type ipv4_addr . ifname; flags interval; }}
add set inet {table} hairpin6 {{ type ipv6_addr . ifname; flags interval; }}
add map inet {table} address4 {{ type inet_proto . ipv4_addr . inet_service : ipv4_addr . inet_service; }}
add map inet {table} any4 {{ type inet_proto . inet_service : ipv4_addr . inet_service; }}
add map inet {table} address6 {{ type inet_proto . ipv6_addr . inet_service : ipv6_addr . inet_service; }}
add map inet {table} any6 {{ type inet_proto . inet_service : ipv6_addr . inet_service; }}
add set inet {table} relayed_anywhere {{ type inet_service; size 65536; flags dynamic; }}
add set inet {table} relayed_at_loopback {{ type inet_service; size 65536; flags dynamic; }}
{direct_sets}
flush table inet {table}
table inet {table} {{
    chain accepted {{
        meta mark set meta mark | {mark} accept
    }}
    chain loopback {{
        type filter hook prerouting priority raw; policy accept;
        ip daddr 127.0.0.0/8 iifname != "lo" drop
        ip saddr 127.0.0.0/8 iifname != "lo" drop
        icmpv6 type {{ nd-router-advert, nd-redirect }} iifname @made drop
    }}
    chain published {{
        dnat ip to meta l4proto . ip daddr . th dport map @address4
        dnat ip to meta l4proto . th dport map @any4
        dnat ip6 to meta l4proto . ip6 daddr . th dport map @address6
        dnat ip6 to meta l4proto . th dport map @any6
    }}
    chain prerouting {{
        type nat hook prerouting priority dstnat; policy accept;
        iifname @internal return
        fib daddr type local jump published
    }}
    chain output {{
        type nat hook output priority -100; policy accept;
        ip6 daddr ::1 return
        fib daddr type local jump published
    }}
{relay}
    chain forward {{
        type filter hook forward priority filter - 5; policy accept;
        iifname . oifname @inside goto accepted
        iifname @internal drop
        oifname @internal drop
        oifname @bridges ct state established,related goto accepted
        oifname @bridges ct status dnat goto accepted
        {direct_rules}
        {mark_rule}
        meta nfproto ipv4 oifname @open4 goto accepted
        meta nfproto ipv6 oifname @open6 goto accepted
        oifname @bridges drop
        iifname @bridges goto accepted
    }}
    chain forwarded {{
        type filter hook postrouting priority srcnat + 5; policy accept;
        meta mark & {mark} == {mark} meta mark set meta mark & {others}
    }}
    chain into {{
        ip saddr 127.0.0.0/8 masquerade
        oifname @entrances iifname @masqueraded masquerade
        ct status dnat ip saddr . oifname @hairpin4 masquerade
        ct status dnat ip6 saddr . oifname @hairpin6 masquerade
    }}
    chain postrouting {{
        type nat hook postrouting priority srcnat; policy accept;
        oifname @bridges goto into
        iifname @masqueraded masquerade
    }}
}}
"""

# Packets that the maps have rewritten are no longer local here. Packets of this host to one of its
# own link-local addresses arrive on lo, where fib does not know the address, and TPROXY does not
# know the new connection.
_RELAY = """
    chain relay {{
        iifname @internal return
        meta l4proto tcp fib daddr type local tproxy ip6 to [::1]:{port} accept
        iif lo ip6 daddr fe80::/10 tcp flags & (syn | ack) == syn tproxy ip6 to [::1]:{port} accept
    }}
    chain relayed {{
        type filter hook prerouting priority -90; policy accept;
        meta nfproto ipv4 return
        meta l4proto != tcp return
        tcp dport @relayed_anywhere goto relay
        ip6 daddr ::1 tcp dport @relayed_at_loopback goto relay
    }}
"""

_DIRECT_SETS = """
add set inet {table} direct4 {{ type inet_proto . ipv4_addr . inet_service; }}
add set inet {table} direct6 {{ type inet_proto . ipv6_addr . inet_service; }}
"""
_DIRECT_RULES = """
        oifname @bridges meta l4proto . ip daddr . th dport @direct4 goto accepted
        oifname @bridges meta l4proto . ip6 daddr . th dport @direct6 goto accepted
"""

_NONE_RELAYED = Relayed()

_IFNAMSIZ = 16
_MARKS = 0xFFFFFFFF

_ROUTE_LOCALNET = "/proc/sys/net/ipv4/conf/{}/route_localnet"

NamedElement = tuple[str, Element]


class BridgeRules(NamedTuple):
    """The rules for the traffic of one bridge network."""

    bridge: str
    subnets: tuple[IPv4Network | IPv6Network, ...]
    internal: bool = False
    icc: bool = True
    masquerade: bool = True
    unprotected: tuple[int, ...] = ()
    """IP versions by which other hosts reach every port of the containers."""
    adopted: bool = False
    """True if the engine did not make the bridge."""
    entrance: bool = False
    """True if it leads to other hosts, to which the addresses of this host's containers mean
    nothing.
    """


class Entries(NamedTuple):
    """What else enters a bridge."""

    direct: bool = False
    """Published ports at containers' own addresses."""
    mark: int = 0
    mask: int = 0
    """Packets whose mark, as far as the mask goes, is this one; no mask: none."""


NO_ENTRIES = Entries()


class _Endpoint(NamedTuple):
    """The addresses that the ports of one container lead to."""

    addresses: tuple[IPv4Address | None, IPv6Address | None]
    ports: tuple[Published, ...]
    relayed: Relayed = _NONE_RELAYED


class Filter:
    """The table of one engine.

    Its socket stays in the namespace of the thread that calls `open`.
    """

    def __init__(
        self, table: str, mark: int = FIREWALL_MARK, entries: Entries = NO_ENTRIES, *, off: bool = False
    ) -> None:
        """`mark`: the bit of packets' marks. `off`: write no rules; what an earlier daemon has left
        is removed.
        """
        self.off = off
        self._entries = entries
        self._of_ports = (*_OF_PORTS, *_OF_DIRECT) if entries.direct else _OF_PORTS
        self._table = table
        self._mark = mark
        self._lock = threading.Lock()
        self._kernel: NftSocket | None = None
        self._connections: ConntrackSocket | None = None
        self._layout: tuple[bytes, ...] = ()
        self._settled = False
        self._relay = 0
        self._networks: dict[str, BridgeRules] = {}
        self._published: dict[str, _Endpoint] = {}
        self._outdated: dict[int, tuple[set[int], set[bytes]]] = {}
        self._restored = False
        """True after elements were put back outside of `mend`."""
        self._relayed: frozenset[int] = frozenset()
        self.awaited: set[str] = set()
        """Links to networks of a swarm that are adopted after `settle`: they keep their
        elements.
        """
        self.authors: set[int] = set()
        """Netlink ports of the sockets that change tables of this engine (`nft.Generations`)."""
        self.changed: Callable[[], object] = lambda: None
        """Called in a thread when `bridges` has changed."""
        self.companions: list[Callable[[bool], bool]] = []
        """Called by `mend`, too, with the same argument: they mend other tables."""

    @property
    def name(self) -> str:
        """The name of the table."""
        return self._table

    @property
    def bridges(self) -> list[str]:
        """The links of the networks that have rules."""
        return [*self._networks]

    def open(self, rules: Iterable[BridgeRules], relay: int = 0) -> None:
        """Install the rules, with these networks. Those of a swarm, which are adopted later, and
        ports of a former daemon's containers stay as they are until `settle`.

        `relay` is the port of the socket at ::1 (`ports.relay_socket`) that gets connections for
        `RELAYED`; 0 for none.
        """
        with self._lock:
            self._relay = relay
            self._networks = {each.bridge: each for each in rules}
            if self.off:
                for each in self._networks.values():
                    _route_localnet(each, "0")
                self._remove_left()
                return
            if self._kernel is None:
                self._kernel = NftSocket()
                self.authors.add(self._kernel.port)
                self._connections = ConntrackSocket()
            for each in self._networks.values():
                _route_localnet(each)
            self._install()
            self._reconcile(_OF_NETWORKS)

    def settle(self) -> None:
        """All running containers have published their ports, and the swarm's networks are adopted:
        remove the elements that are left over.
        """
        with self._lock:
            self._settled = True
            if self._kernel is not None:
                self._reconcile((*_OF_NETWORKS, *self._of_ports))

    def add_network(self, rules: BridgeRules) -> None:
        """Install the rules for the traffic of a bridge."""
        with self._lock:
            self._networks[rules.bridge] = rules
            if self.off:
                return
            try:
                self._change((), [*_of_network(rules)])
            except BaseException:
                del self._networks[rules.bridge]
                raise
            self.awaited.discard(rules.bridge)
            _route_localnet(rules)
        self.changed()

    def returned(self, bridge: str) -> None:
        """A bridge was deleted and made again: repeat the settings of its link."""
        with self._lock:
            rules = self._networks.get(bridge)
            if rules is not None and not self.off:
                _route_localnet(rules)

    def remove_network(self, bridge: str) -> None:
        """Remove a bridge's rules. Unknown bridges are fine."""
        with self._lock:
            rules = self._networks.pop(bridge, None)
            if bridge in self.awaited:
                self.awaited.discard(bridge)
                if self._settled and self._kernel is not None:
                    self._reconcile(_OF_NETWORKS)
            if rules is not None and not self.off:
                self._change([*_of_network(rules)], ())
                _route_localnet(rules, "0")
        self.changed()

    def publish(
        self,
        endpoint_id: str,
        addresses: tuple[IPv4Address | None, IPv6Address | None],
        ports: Iterable[Published],
        relayed: Relayed = _NONE_RELAYED,
    ) -> None:
        """Lead these ports of the host to a container's addresses.

        Ports that are `relayed` are reached by IPv6 too, even if the container has no IPv6 address.
        """
        endpoint = _Endpoint(addresses, tuple(ports), relayed)
        if not endpoint.ports or self.off:
            return
        with self._lock:
            self._published[endpoint_id] = endpoint
            try:
                self._change((), [*self._of_endpoint(endpoint)])
            except BaseException:
                del self._published[endpoint_id]
                raise
            self._outdate(endpoint)

    def unpublish(self, endpoint_id: str) -> None:
        """Close an endpoint's ports. One without ports is fine."""
        with self._lock:
            endpoint = self._published.pop(endpoint_id, None)
            if endpoint is None or self._kernel is None:
                return
            self._change([*self._of_endpoint(endpoint)], ())
            self._outdate(endpoint)

    def relay(self, ports: frozenset[int]) -> None:
        """Relay connections by IPv6 to these TCP ports of the host, too, which no container has. It
        is the whole set of such ports.
        """
        with self._lock:
            before, self._relayed = self._relayed, ports
            if self._kernel is not None and before != ports:
                self._change([*_of_relayed(before - ports)], [*_of_relayed(ports - before)])

    def forget_outdated(self) -> None:
        """Forget UDP connections of ports that were published or closed since the last call.
        Otherwise their packets would still go to the former container.
        """
        with self._lock:
            connections, outdated, self._outdated = self._connections, self._outdated, {}
        for version, (ports, addresses) in outdated.items():
            try:
                if connections is not None:
                    connections.forget_udp(version, ports, addresses)
            except OSError as error:
                _log.warning("cannot remove outdated UDP connections: %s", words(error))

    @property
    def has_outdated(self) -> bool:
        """True if `forget_outdated` has work.

        It walks the whole connection table, once for all ports.
        """
        return bool(self._outdated)

    def mend(self, elements: bool = True) -> bool:
        """Put back what other programs removed from the table. Returns True if anything was
        missing.

        Without `elements` they are compared only when rules are missing, as reading them takes 5 us
        each. Raises the first error, after everything else was mended.
        """
        changed, failures = False, list[Exception]()
        for mend in (self._mend, *self.companions):
            try:
                changed |= mend(elements)
            except (EngineError, NetfilterError, OSError) as error:
                failures.append(error)
        if failures:
            raise failures[0]
        return changed

    def _mend(self, elements: bool) -> bool:
        with self._lock:
            if self._kernel is None:
                return False
            missing = self._kernel.layout(self._table) != self._layout
            if missing:
                self._install()
            changed = ((elements or missing) and self._reconcile((*_OF_NETWORKS, *self._of_ports))) or missing
            restored, self._restored = changed or self._restored, False
            connections = self._connections
            published = [port for endpoint in self._published.values() for port in endpoint.ports]
        if restored and connections is not None:
            _forget_untranslated(connections, published)
        return changed

    def close(self, remove: bool) -> None:
        """Close the sockets.

        With `remove` delete the table; otherwise it stays for running containers.
        """
        with self._lock:
            if self._kernel is None:
                return
            self.authors.discard(self._kernel.port)
            self._kernel.close()
            self._kernel = None
            if self._connections is not None:
                self._connections.close()
                self._connections = None
            if remove:
                for rules in self._networks.values():
                    _route_localnet(rules, "0")
                self._networks.clear()
                netfilter.run(f"add table inet {self._table}\ndelete table inet {self._table}")

    # --- with the lock held -----------------------------------------------------------------------

    def _remove_left(self) -> None:
        with contextlib.suppress(NetfilterError):  # there is none, or no nftables at all
            netfilter.run(f"list table inet {self._table}")
            netfilter.run(f"delete table inet {self._table}")
            _log.info("removed the table inet %s, as --firewall none says", self._table)

    def _install(self) -> None:
        assert self._kernel is not None
        relay = _RELAY.format(port=self._relay) if self._relay else ""
        direct, mark, mask = self._entries
        text = _RULES.format(
            table=self._table,
            relay=relay,
            mark=f"{self._mark:#x}",
            others=f"{_MARKS ^ self._mark:#x}",
            direct_sets=_DIRECT_SETS.format(table=self._table) if direct else "",
            direct_rules=_DIRECT_RULES if direct else "",
            mark_rule=f"oifname @bridges meta mark & {mask:#x} == {mark:#x} goto accepted" if mask else "",
        )
        try:
            netfilter.run(text)
        except NetfilterError:
            # Perhaps the sets are those of another version of this engine. Then replace the whole
            # table in one transaction.
            try:
                netfilter.run(f"add table inet {self._table}\ndelete table inet {self._table}\n{text}")
            except NetfilterError as error:
                if not self._relay:
                    raise
                # Perhaps a kernel without TPROXY.
                self._relay = 0
                self._install()
                _log.warning("containers without IPv6 cannot be reached by IPv6, and none at ::1: %s", error)
                return
        self._layout = self._kernel.layout(self._table)

    def _change(self, remove: list[NamedElement] | tuple[()], add: list[NamedElement] | tuple[()]) -> None:
        """Change elements in one transaction. If the table is not as it was left, reconcile all of
        it instead.
        """
        if self._kernel is None:
            raise NetfilterError("libnftables.so.1 is not installed")
        try:
            self._kernel.change(self._table, remove, add, f"table {self._table}")
            return
        except NetlinkError as error:
            _log.warning("%s: reconciling the table", error)
        self._restored = True
        try:
            if self._kernel.layout(self._table) != self._layout:
                self._install()
            self._reconcile((*_OF_NETWORKS, *self._of_ports))
        except NetlinkError as error:
            raise NetfilterError(words(error)) from error

    def _reconcile(self, names: Iterable[str]) -> bool:
        """Reconcile these sets with the expected elements. Returns True if anything was corrected.

        Until `settle`, unclaimed ports are kept, and what belongs to a swarm's networks.
        """
        assert self._kernel is not None
        expected: dict[str, dict[bytes, Element]] = {name: {} for name in names}
        for name, element in self._elements():
            if name in expected:
                expected[name][element.key] = element
        remove: list[NamedElement] = []
        add: list[NamedElement] = []
        for name, elements in expected.items():
            there = self._kernel.elements(self._table, name)
            remove += [
                (name, each)
                for key, each in there.items()
                if each != elements.get(key) and (key in elements or not self._kept(name, key))
            ]
            add += [(name, each) for key, each in elements.items() if each != there.get(key)]
        try:
            self._kernel.change(self._table, remove, add, f"table {self._table}")
        except NetlinkError as error:
            raise NetfilterError(words(error)) from error
        return bool(remove or add)

    def _kept(self, name: str, key: bytes) -> bool:
        """True for an element that an earlier daemon may have left for this one. Of networks, the
        keys end with the name of the link.
        """
        if name in self._of_ports:
            return not self._settled
        link = key[-_IFNAMSIZ:].rstrip(b"\0").decode(errors="replace")
        return link in self.awaited or (not self._settled and link.startswith(OVERLAY_LINK))

    def _elements(self) -> Iterator[NamedElement]:
        for rules in self._networks.values():
            yield from _of_network(rules)
        for endpoint in self._published.values():
            yield from self._of_endpoint(endpoint)
        yield from _of_relayed(self._relayed)

    def _of_endpoint(self, endpoint: _Endpoint) -> Iterator[NamedElement]:
        yield from _of_endpoint(endpoint)
        if self._entries.direct:
            yield from _of_direct(endpoint)

    def _outdate(self, endpoint: _Endpoint) -> None:
        for each in endpoint.ports:
            if each.protocol == "udp":
                ports, addresses = self._outdated.setdefault(each.version, (set(), set()))
                ports.update(each.host_ports)
                if (address := endpoint.addresses[each.version == 6]) is not None:
                    addresses.add(address.packed)


def _forget_untranslated(connections: ConntrackSocket, published: Iterable[Published]) -> None:
    """Forget UDP connections that were made while rules were missing: they lead nowhere, for as
    long as a client keeps sending.
    """
    ports: dict[int, set[int]] = {}
    for each in published:
        if each.protocol == "udp":
            ports.setdefault(each.version, set()).update(each.host_ports)
    for version, numbers in ports.items():
        try:
            connections.forget_untranslated(version, numbers)
        except OSError as error:
            _log.warning("cannot remove UDP connections that were made without rules: %s", words(error))


# --- elements, as the kernel has them -------------------------------------------------------------


def _of_network(rules: BridgeRules) -> Iterator[NamedElement]:
    name = _interface(rules.bridge)
    yield "bridges", Element(name)
    if not rules.adopted:
        yield "made", Element(name)
    if rules.icc:
        yield "inside", Element(name + name)
    if rules.internal:
        yield "internal", Element(name)
    elif rules.masquerade:
        yield "masqueraded", Element(name)
    if rules.entrance:
        yield "entrances", Element(name)
    for version in rules.unprotected:
        yield f"open{version}", Element(name)
    for subnet in rules.subnets:
        yield (
            f"hairpin{subnet.version}",
            Element(subnet.network_address.packed + name, subnet.broadcast_address.packed + name),
        )


def _of_endpoint(endpoint: _Endpoint) -> Iterator[NamedElement]:
    for each in endpoint.ports:
        version = each.version
        protocol = bytes((PROTOCOLS[each.protocol], 0, 0, 0))
        if each.host_ip in ANY:
            name, key = f"any{version}", protocol
        else:
            name, key = f"address{version}", protocol + ip_address(each.host_ip).packed
        yield from _led(name, key, each, endpoint.addresses[version == 6])
        if (
            version == 6
            and each.host_ip in AT_LOOPBACK
            and each.protocol == "tcp"
            and (each.host_port in endpoint.relayed.anywhere or each.host_port in endpoint.relayed.at_loopback)
        ):
            yield from _led("address4", protocol + RELAYED.packed, each, endpoint.addresses[0])
    for name, ports in zip(("relayed_anywhere", "relayed_at_loopback"), endpoint.relayed, strict=True):
        for port in ports:
            yield name, Element(port.to_bytes(2, "big"))


def _of_direct(endpoint: _Endpoint) -> Iterator[NamedElement]:
    """A port of the container may be published several times."""
    elements = {
        (version, bytes((PROTOCOLS[each.protocol], 0, 0, 0)) + address.packed + _port(each.port + offset))
        for version, address in zip((4, 6), endpoint.addresses, strict=True)
        if address is not None
        for each in endpoint.ports
        for offset in range(each.count)
    }
    yield from ((f"direct{version}", Element(key)) for version, key in sorted(elements))


def _of_relayed(ports: Iterable[int]) -> Iterator[NamedElement]:
    for port in ports:
        yield "relayed_anywhere", Element(port.to_bytes(2, "big"))


def _led(name: str, key: bytes, ports: Published, address: IPv4Address | IPv6Address | None) -> Iterator[NamedElement]:
    """Elements that lead ports of the host to a container's address; none without an address."""
    if address is None:
        return
    for offset in range(ports.count):
        yield name, Element(key + _port(ports.host_port + offset), b"", address.packed + _port(ports.port + offset))


def _interface(name: str) -> bytes:
    return name.encode().ljust(_IFNAMSIZ, b"\0")


def _port(number: int) -> bytes:
    return number.to_bytes(2, "big") + b"\0\0"


def _route_localnet(rules: BridgeRules, switch: str = "1") -> None:
    """Let routing accept answers to rewritten packets: they come from the bridge for 127.0.0.1.

    "0" is for a bridge that stays when its rules are removed, as they keep foreign 127.0.0.0/8
    packets away from it.
    """
    if not rules.internal:
        try:
            Path(_ROUTE_LOCALNET.format(rules.bridge)).write_text(switch)
        except FileNotFoundError:
            pass  # the bridge has gone
        except OSError as error:
            _log.warning("bridge %s: no published port on 127.0.0.1: %s", rules.bridge, words(error))
