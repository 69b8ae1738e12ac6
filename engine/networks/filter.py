"""The rules of all bridges in one own nftables table: what is let out and in, what stays apart, which ports lead to whom.

A handful of rules over maps and sets: a network more, a port more is an element more, and one transaction changes what belongs together. No other
table is touched; what another table drops stays dropped. What somebody takes out of this one is put back (`mend`).

- A packet for an address of this host whose protocol, address and port are in a map is rewritten, wherever it comes from but from an internal
  network; its source stays, but where the answer would not come back by here: from the host's loopback, and within one bridge.
- Into a bridge go answers, neighbours unless icc is off, and what was rewritten. Nothing leaves or enters an internal one.
- 127.0.0.0/8 comes and goes by lo alone: routing would drop such packets too, but only after they had been rewritten, and not on a bridge that
  has route_localnet.
- By IPv6 a container without such an address is reached by TCP: a connection that nothing has led to a container is given to one socket at ::1
  (`relay`), which so has the address and port that it was made for as its own (TPROXY: the packets stay as they are, and a host's own rules for
  what comes in see them so). Whoever serves the socket goes on to the same port of `RELAYED`, an address of 127.0.0.0/8, and from there it is led
  as any other. The same way goes all that is for ::1, from where the kernel routes nothing to a bridge. Datagrams do not go it: who sends them by
  IPv4 is heard.

Everything blocks on the kernel and is called in threads. Not here: which ports are given to whom (`ports.py`). Owns: the table, route_localnet of the
bridges. Raises: NetfilterError; nothing has changed then.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from pathlib import Path
from typing import NamedTuple

from engine.networks.ports import ANY, AT_LOOPBACK, PROTOCOLS, Published, Relayed
from engine.system import netfilter
from engine.system.netfilter import NetfilterError
from engine.system.netlink import NetlinkError
from engine.system.nfnetlink import Element, Nfnetlink

logger = logging.getLogger(__name__)

_OF_NETWORKS = ("bridges", "internal", "inside", "masqueraded", "hairpin4", "hairpin6")
_OF_PORTS = ("address4", "any4", "address6", "any6", "relayed_anywhere", "relayed_at_loopback")

RELAYED = IPv4Address("127.58.58.49")
"""Stands for ::1 among the addresses that IPv4 connections are made to; nobody else's, so that a port of ::1 alone can be had at it."""

# Sets and chains that are there already stay as they are, with their elements; rules are laid anew.
_RULES = """
add table inet {table}
add set inet {table} bridges {{ type ifname; }}
add set inet {table} internal {{ type ifname; }}
add set inet {table} inside {{ type ifname . ifname; }}
add set inet {table} masqueraded {{ type ifname; }}
add set inet {table} hairpin4 {{ type ipv4_addr . ifname; flags interval; }}
add set inet {table} hairpin6 {{ type ipv6_addr . ifname; flags interval; }}
add map inet {table} address4 {{ type inet_proto . ipv4_addr . inet_service : ipv4_addr . inet_service; }}
add map inet {table} any4 {{ type inet_proto . inet_service : ipv4_addr . inet_service; }}
add map inet {table} address6 {{ type inet_proto . ipv6_addr . inet_service : ipv6_addr . inet_service; }}
add map inet {table} any6 {{ type inet_proto . inet_service : ipv6_addr . inet_service; }}
add set inet {table} relayed_anywhere {{ type inet_service; size 65536; flags dynamic; }}
add set inet {table} relayed_at_loopback {{ type inet_service; size 65536; flags dynamic; }}
flush table inet {table}
table inet {table} {{
    chain loopback {{
        type filter hook prerouting priority raw; policy accept;
        ip daddr 127.0.0.0/8 iifname != "lo" drop
        ip saddr 127.0.0.0/8 iifname != "lo" drop
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
        type filter hook forward priority filter; policy accept;
        iifname . oifname @inside accept
        iifname @internal drop
        oifname @internal drop
        oifname @bridges ct state established,related accept
        oifname @bridges ct status dnat accept
        oifname @bridges drop
    }}
    chain into {{
        ip saddr 127.0.0.0/8 masquerade
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

# What the maps have led elsewhere is not local any more by then. What this host sends to a link-local address of its own comes by lo, where neither
# fib knows the address nor TPROXY the connection that is being made.
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

_NONE_RELAYED = Relayed()

_ROUTE_LOCALNET = "/proc/sys/net/ipv4/conf/{}/route_localnet"

NamedElement = tuple[str, Element]


class BridgeRules(NamedTuple):
    """What holds for the traffic of one bridge network."""

    bridge: str
    subnets: tuple[IPv4Network | IPv6Network, ...]
    internal: bool = False
    icc: bool = True
    masquerade: bool = True


class _Endpoint(NamedTuple):
    """Where the ports of one container lead to."""

    addresses: tuple[IPv4Address | None, IPv6Address | None]
    ports: tuple[Published, ...]
    relayed: Relayed = _NONE_RELAYED


class Filter:
    """The table of one engine. Its socket stays in the namespace of the thread that calls `open`."""

    def __init__(self, table: str) -> None:
        self._table = table
        self._lock = threading.Lock()
        self._kernel: Nfnetlink | None = None
        self._layout: tuple[bytes, ...] = ()
        self._settled = False
        self._relay = 0
        self._networks: dict[str, BridgeRules] = {}
        self._published: dict[str, _Endpoint] = {}
        self._outdated: dict[int, tuple[set[int], set[bytes]]] = {}

    @property
    def port(self) -> int:
        """Who changes elements of the table, as notices say it (`nfnetlink.Generations`)."""
        return self._kernel.port if self._kernel is not None else 0

    def open(self, rules: Iterable[BridgeRules], relay: int = 0) -> None:
        """Lay the rules anew, with these networks. Ports of a former daemon's containers stay open until `settle`.

        `relay`: the port at ::1 of the socket (`ports.relay_socket`) that is given connections which somebody passes on to `RELAYED`; 0: none is.
        """
        with self._lock:
            self._relay = relay
            self._networks = {each.bridge: each for each in rules}
            if self._kernel is None:
                self._kernel = Nfnetlink()
            for each in self._networks.values():
                _route_localnet(each)
            self._lay()
            self._match(_OF_NETWORKS)

    def settle(self) -> None:
        """Every container that runs has published its ports: whatever else is in the maps goes."""
        with self._lock:
            self._settled = True
            if self._kernel is not None:
                self._match(_OF_PORTS)

    def add_network(self, rules: BridgeRules) -> None:
        """Let the traffic of a bridge be as its rules say."""
        with self._lock:
            self._networks[rules.bridge] = rules
            try:
                self._change((), [*_of_network(rules)])
            except BaseException:
                del self._networks[rules.bridge]
                raise
            _route_localnet(rules)

    def returned(self, bridge: str) -> None:
        """A bridge was gone and is back: give it again what goes with a link."""
        with self._lock:
            rules = self._networks.get(bridge)
            if rules is not None:
                _route_localnet(rules)

    def remove_network(self, bridge: str) -> None:
        """One that is not there is fine."""
        with self._lock:
            rules = self._networks.pop(bridge, None)
            if rules is not None:
                self._change([*_of_network(rules)], ())
                _route_localnet(rules, "0")

    def publish(
        self,
        endpoint_id: str,
        addresses: tuple[IPv4Address | None, IPv6Address | None],
        ports: Iterable[Published],
        relayed: Relayed = _NONE_RELAYED,
    ) -> None:
        """Lead these ports of the host to a container's addresses; those of them that are `relayed` also by IPv6, though it may have none."""
        endpoint = _Endpoint(addresses, tuple(ports), relayed)
        if not endpoint.ports:
            return
        with self._lock:
            self._published[endpoint_id] = endpoint
            try:
                self._change((), [*_of_endpoint(endpoint)])
            except BaseException:
                del self._published[endpoint_id]
                raise
            self._outdate(endpoint)

    def unpublish(self, endpoint_id: str) -> None:
        """One without ports is fine."""
        with self._lock:
            endpoint = self._published.pop(endpoint_id, None)
            if endpoint is None or self._kernel is None:
                return
            self._change([*_of_endpoint(endpoint)], ())
            self._outdate(endpoint)

    def forget_outdated(self) -> None:
        """Forget UDP connections of ports that have been published or taken back since: their clients would go on to where it led before."""
        with self._lock:
            kernel, outdated, self._outdated = self._kernel, self._outdated, {}
        for version, (ports, addresses) in outdated.items():
            try:
                if kernel is not None:
                    kernel.forget_udp(version, ports, addresses)
            except OSError as error:
                logger.warning("UDP connections that were there before stay: %s", error)

    @property
    def has_outdated(self) -> bool:
        """Whether `forget_outdated` has something to do; it walks the whole table of connections, once for all ports."""
        return bool(self._outdated)

    def mend(self, elements: bool = True) -> bool:
        """Put back whatever somebody has taken out of the table; whether anything was missing.

        Without `elements` they are compared only when rules are missing: reading them takes 5 us each.
        """
        with self._lock:
            if self._kernel is None:
                return False
            missing = self._kernel.layout(self._table) != self._layout
            if missing:
                self._lay()
            return ((elements or missing) and self._match((*_OF_NETWORKS, *_OF_PORTS))) or missing

    def close(self, remove: bool) -> None:
        """With `remove` the table goes; else it stays for the containers that run on."""
        with self._lock:
            if self._kernel is None:
                return
            self._kernel.close()
            self._kernel = None
            if remove:
                for rules in self._networks.values():
                    _route_localnet(rules, "0")
                netfilter.run(f"add table inet {self._table}\ndelete table inet {self._table}")

    # --- with the lock held --------------------------------------------------------------------------------------------

    def _lay(self) -> None:
        assert self._kernel is not None
        relay = _RELAY.format(port=self._relay) if self._relay else ""
        text = _RULES.format(table=self._table, relay=relay)
        try:
            netfilter.run(text)
        except NetfilterError:
            # Sets of another version of this engine, perhaps: then all of it goes, and is there again in the same transaction.
            try:
                netfilter.run(f"add table inet {self._table}\ndelete table inet {self._table}\n{text}")
            except NetfilterError as error:
                if not self._relay:
                    raise
                # A kernel without TPROXY, perhaps.
                self._relay = 0
                self._lay()
                logger.warning("by IPv6 only containers that have it will be reached, at ::1 none: %s", error)
                return
        self._layout = self._kernel.layout(self._table)

    def _change(self, remove: list[NamedElement] | tuple[()], add: list[NamedElement] | tuple[()]) -> None:
        """In one transaction. Where the table is not as it was left, everything is compared and put right instead."""
        if self._kernel is None:
            raise NetfilterError("libnftables.so.1 is not installed")
        try:
            self._kernel.change(self._table, remove, add, f"table {self._table}")
            return
        except NetlinkError as error:
            logger.warning("%s: putting the table in order", error)
        try:
            if self._kernel.layout(self._table) != self._layout:
                self._lay()
            self._match((*_OF_NETWORKS, *_OF_PORTS))
        except NetlinkError as error:
            raise NetfilterError(str(error)) from error

    def _match(self, names: Iterable[str]) -> bool:
        """Make these sets hold what they should; whether they did not. Before `settle` ports that nobody has claimed stay."""
        assert self._kernel is not None
        expected: dict[str, dict[bytes, Element]] = {name: {} for name in names}
        for name, element in self._elements():
            if name in expected:
                expected[name][element.key] = element
        remove: list[NamedElement] = []
        add: list[NamedElement] = []
        for name, elements in expected.items():
            there = self._kernel.elements(self._table, name)
            keep = name in _OF_PORTS and not self._settled
            remove += [
                (name, each)
                for key, each in there.items()
                if each != elements.get(key) and (key in elements or not keep)
            ]
            add += [(name, each) for key, each in elements.items() if each != there.get(key)]
        try:
            self._kernel.change(self._table, remove, add, f"table {self._table}")
        except NetlinkError as error:
            raise NetfilterError(str(error)) from error
        return bool(remove or add)

    def _elements(self) -> Iterator[NamedElement]:
        for rules in self._networks.values():
            yield from _of_network(rules)
        for endpoint in self._published.values():
            yield from _of_endpoint(endpoint)

    def _outdate(self, endpoint: _Endpoint) -> None:
        for each in endpoint.ports:
            if each.protocol == "udp":
                ports, addresses = self._outdated.setdefault(each.version, (set(), set()))
                ports.update(each.host_ports)
                if (address := endpoint.addresses[each.version == 6]) is not None:
                    addresses.add(address.packed)


# --- elements, as the kernel has them ----------------------------------------------------------------------------------


def _of_network(rules: BridgeRules) -> Iterator[NamedElement]:
    name = _interface(rules.bridge)
    yield "bridges", Element(name)
    if rules.icc:
        yield "inside", Element(name + name)
    if rules.internal:
        yield "internal", Element(name)
    elif rules.masquerade:
        yield "masqueraded", Element(name)
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


def _led(name: str, key: bytes, ports: Published, address: IPv4Address | IPv6Address | None) -> Iterator[NamedElement]:
    """Ports of the host that lead to a container's address; it may have none of that IP version."""
    if address is None:
        return
    for offset in range(ports.count):
        yield name, Element(key + _port(ports.host_port + offset), b"", address.packed + _port(ports.port + offset))


def _interface(name: str) -> bytes:
    """IFNAMSIZ bytes."""
    return name.encode().ljust(16, b"\0")


def _port(number: int) -> bytes:
    return number.to_bytes(2, "big") + b"\0\0"


def _route_localnet(rules: BridgeRules, switch: str = "1") -> None:
    """The answer to a rewritten packet from 127.0.0.1 comes in by the bridge for 127.0.0.1: routing shall take it.

    "0" is for a bridge that stays when the rules go, which keep others' 127.0.0.0/8 away from it.
    """
    if not rules.internal:
        try:
            Path(_ROUTE_LOCALNET.format(rules.bridge)).write_text(switch)
        except FileNotFoundError:
            pass  # the bridge has gone
        except OSError as error:
            logger.warning("bridge %s: no published port on 127.0.0.1: %s", rules.bridge, error)
