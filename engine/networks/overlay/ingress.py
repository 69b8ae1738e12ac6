"""Published ports of a swarm's services: every node answers on them, and the service's task sees
the address of its client.

```
client ── any node: port 80 → slot → task's address on the ingress network ── its namespace there
       ── VXLAN ── namespace of the task's node ── eth1 of the task, port 8080
```

- The node that a client asks picks a slot by a random number, as for virtual addresses
  (`slots.py`), and rewrites the packet's destination. This is a table of its own on the host. The
  packet's source stays, so the answers have to come back by the same node.
- In the ingress network's namespace of the task's node, the connection is marked with the address
  of the node that the packet came from, which is in its source MAC. Answers of a marked connection
  go to the VXLAN, whatever their destination, by one rule and one route for all nodes. A hook at
  the end of the VXLAN's output gives them the MAC of the node. Without that hook (Linux before
  5.16) the answer is sent again by way of that node, which costs a copy of its header. Nothing
  here grows with the number of nodes but one map.
- A client that uses one port towards two nodes has two connections that are equal for the task. So
  each node's connections have a zone of their own, and the connection table gives the second one
  another source port.
- In the container, packets from its ingress address use a routing table of their own, as the other
  addresses have another way out. A server of datagrams often answers from an address that the
  kernel chooses. So these answers are found by a set of clients, and get back the source address
  that the client knows.
- While a port has no ready task, the connection table gets entries for its datagrams that lead
  nowhere. They are deleted when the first task is ready, or else a client that keeps sending would
  never reach it.
- Packets from the node's own loopback and from containers behind it get the node's address, since
  their own addresses mean nothing to other nodes. If that is an address of the loopback, as of a
  swarm of this host alone, they keep the one of the link: tasks drop packets from 127.0.0.0/8.

A socket is bound to each port as for containers (`ports.Listeners`), so that no other program gets
it. Where a program has it, other nodes serve the port.

Owns: a table on the host, two tables, a rule and a route in the namespace, the sockets. Threads:
blocking, any thread; one lock. The state is in the kernel: the next daemon reads it and goes on
with it. Raises: NetfilterError, OSError; a later call does what is missing then.
Not here: links, neighbours and routes of the network (`overlay.py`), which tasks are ready.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import socket
import struct
import sys
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address

from engine.errors import words
from engine.networks.filter import Filter
from engine.networks.ipam import mac_address
from engine.networks.overlay import slots
from engine.networks.ports import ANY, PROTOCOLS, Listeners, PortTaken, Published
from engine.system import namespaces, netfilter, sysctls
from engine.system.netfilter import NetfilterError
from engine.system.netlink import rtnl
from engine.system.netlink.codec import NetlinkError, Request
from engine.system.netlink.conntrack import ConntrackSocket
from engine.system.netlink.nft import INET, IPV4, NETDEV, Element, NftSocket
from engine.system.netlink.rtnl import Link, RouteSocket

_log = logging.getLogger(__name__)

Port = tuple[str, int]
"""Protocol and published port."""
Ports = Mapping[Port, tuple[int, Sequence[IPv4Address]]]
"""Published port → target port, ready backends."""
NamedElement = tuple[str, Element]

TABLE = "engined-ingress"
"""In the namespaces of the network and of containers."""
ROUTES = 100
"""The routing table for answers, and the priority of the rule that leads there."""
_NODES = 99
"""The same for packets that are sent again by way of a node: all nodes are neighbours there."""
VXLAN, UPLINK = "vxlan0", "host0"
"""Links in the network's namespace, as `overlay.py` names them."""

SINK = IPv4Address("192.0.0.8")
"""The gateway of marked answers, of which nothing but its MAC is used (RFC 7600)."""
_SINK_MAC = "02:42:00:00:00:00"
_MARK = 0x1E5
"""Mark of datagrams in a container that answer clients of a published port."""
_REMEMBERED = 180
"""Seconds after the last datagram for which its client is known, as for the connection table."""

_ANYWHERE = IPv4Network("0.0.0.0/0")
_SETS = ("services", "slots", "ended")
_KEPT = 3600.0
"""Seconds for which connections of a task that has ended are refused when they go on."""
_LIBERAL = {"netfilter/nf_conntrack_tcp_be_liberal": "1"}
"""Packets outside of a connection's window are still of the connection, and get its mark."""

# The table is replaced as a whole, with its elements, in one transaction: libnftables 1.0.6 cannot
# read the type of `slots` again, which keeping it takes. Two look-ups: if a port loses slots
# between the look-ups for one packet, the second attempt finds the new ones. A packet from the
# ingress network that is no answer of a known connection would keep its source, an address that
# means nothing to its receiver.
_HOST = """
add table inet {table}
delete table inet {table}
table inet {table} {{
    map services {{
        type inet_proto . inet_service : verdict
    }}
    map slots {{
        typeof meta l4proto . th dport . numgen random mod 64 : ip daddr . th dport
    }}
    set ended {{
        type ipv4_addr
    }}
{chains}
    chain published {{
        meta l4proto . th dport vmap @services
        meta l4proto . th dport vmap @services
    }}
    chain prerouting {{
        type nat hook prerouting priority dstnat; policy accept;
        meta nfproto ipv4 fib daddr type local jump published
    }}
    chain output {{
        type nat hook output priority -100; policy accept;
        meta nfproto ipv4 fib daddr type local jump published
    }}
    chain refuse {{
        meta l4proto tcp reject with tcp reset
        reject with icmp port-unreachable
    }}
    chain arriving {{
        type filter hook prerouting priority -90; policy accept;
        iifname "{uplink}" ip saddr {subnet} ct state invalid drop
        iifname "{uplink}" ip saddr {subnet} ct direction original drop
        ct status dnat ct direction original ip daddr @ended jump refuse
    }}
    chain leaving {{
        type filter hook output priority -90; policy accept;
        ct status dnat ct direction original ip daddr @ended jump refuse
    }}
}}
"""

# The mark is the address of the node, which its MAC ends with, and the zone the last two bytes of
# it. Packets between two addresses of the network need neither. A connection that the namespace
# only passes on is not marked: its answers come from an address of the network. The chain of the
# type nat has the connection table resolve equal connections, although it has no rule for most.
# libnftables 1.0.6 copies the bytes of the address to the mark as they are; 1.1.3 makes a number of
# them, by an expression `byteorder`.
_NAMESPACE = """
add table inet {table}
flush table inet {table}
table inet {table} {{
    chain zones {{
        type filter hook prerouting priority raw; policy accept;
        iifname "{vxlan}" ip daddr {subnet} ip saddr != {subnet} ct original zone set @ll,80,16
    }}
    chain marks {{
        type filter hook prerouting priority mangle; policy accept;
        iifname "{vxlan}" ip daddr {subnet} ip saddr != {subnet} ct mark set @ll,64,32
        iifname != "{vxlan}" ip saddr {subnet} ct state invalid drop
        iifname != "{vxlan}" meta mark set ct mark
    }}
    chain sources {{
        type nat hook postrouting priority srcnat; policy accept;
        {sources}
    }}
}}
"""

_SOURCES = 'iifname "{uplink}" ip saddr 169.254.0.0/16 ip daddr {subnet} snat ip to {own}'

_EGRESS = """
add table netdev {table}
add map netdev {table} nodes {{ type mark : ether_addr; }}
flush table netdev {table}
table netdev {table} {{
    chain answers {{
        type filter hook egress device "{vxlan}" priority 0; policy accept;
        ether daddr set meta mark map @nodes
    }}
}}
"""

# Where the kernel has no hook for what a device sends. A packet that is sent again by a gateway has
# left the connection table.
_DUPLICATES = """
add table ip {table}
add map ip {table} nodes {{ type mark : ipv4_addr; }}
flush table ip {table}
table ip {table} {{
    chain answers {{
        type filter hook forward priority filter; policy accept;
        iifname != "{vxlan}" ct mark != 0 dup to ct mark map @nodes device "{vxlan}" drop
    }}
}}
"""

_DATAGRAMS = """
create table ip {table}
table ip {table} {{
    set clients {{
        type inet_proto . ipv4_addr . inet_service . inet_service
        size 65536
        flags dynamic, timeout
        timeout {remembered}s
    }}
    chain asked {{
        type filter hook input priority filter; policy accept;
        iifname != "{link}" return
        meta l4proto {{ udp, sctp }} update @clients {{ meta l4proto . ip saddr . th sport . th dport }}
    }}
    chain answering {{
        type route hook output priority mangle; policy accept;
        ip saddr {address} return
        meta l4proto {{ udp, sctp }} meta l4proto . ip daddr . th dport . th sport @clients meta mark set {mark}
    }}
    chain answered {{
        type filter hook postrouting priority mangle; policy accept;
        meta mark {mark} oifname "{link}" ip saddr set {address}
    }}
}}
"""

_HOOK_MISSING = "this kernel has no hook for what a device sends (NETFILTER_EGRESS, Linux 5.16)"


class Ingress:
    """Published ports of the swarm on one node."""

    def __init__(self, table: Filter, namespace: int, uplink: str, subnet: IPv4Network, own: IPv4Address) -> None:
        """`namespace`: descriptor of the ingress network's namespace, which is the caller's and
        stays open. `uplink`: the host's link to it. `own`: this node's address towards the others.
        """
        self._filter = table
        self._table = _table(table)
        self._namespace = namespace
        self._uplink = uplink
        self._subnet = subnet
        self._own = own
        self._lock = threading.Lock()
        self._listeners = Listeners(resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8)
        self._held: dict[Port, frozenset[int]] = {}
        """Ports that are bound → ports of TCP that are relayed from IPv6."""
        self._asked: dict[Port, tuple[int, Sequence[IPv4Address]]] = {}
        self._busy: dict[Port, str] = {}
        self._begun = False
        """True when `_slots` is what the kernel should have."""
        self._written = False
        """False if a failure left the kernel without some of it."""
        self._slots: dict[bytes, list[bytes]] = {}
        self._served_by_udp: set[bytes] = set()
        self._opened: set[int] = set()
        """UDP ports that lead to a task for the first time, or again."""
        self._served: set[bytes] = set()
        """Addresses of tasks that were led to since the start, and have not ended."""
        self._ended: dict[bytes, float] = {}
        """Addresses of tasks that have ended, and when."""
        self._ending: set[bytes] = set()
        """Those that ports still lead to."""
        self._layout: tuple[bytes, ...] = ()
        self._kernel: NftSocket | None = None
        """Of the host, opened with the first ports."""
        self._nodes: frozenset[IPv4Address] | None = None
        """None until they are known: those of an earlier daemon stay."""
        self._family = NETDEV
        self._numbers = False
        """True if marks are numbers, in the order of the host's bytes."""
        self._layouts: dict[int, tuple[bytes, ...]] = {}
        """In the namespace, by family of the table."""

    # --- the namespace ----------------------------------------------------------------------------

    def open(self) -> None:
        """Install rules and routes in the namespace. Repeated calls put back what is missing."""
        with self._lock:
            self._complete()

    def moved(self, own: IPv4Address) -> None:
        """This node has another address towards the others."""
        with self._lock:
            self._own = own
            self._layouts.clear()
            self._complete()

    def set_nodes(self, nodes: Collection[IPv4Address]) -> None:
        """The addresses of all other nodes. The network's links know the way to each."""
        with self._lock:
            self._nodes = frozenset(nodes)
            self._complete()

    def _complete(self) -> bool:
        """Make what is missing in the namespace. Returns True if anything was."""
        try:
            with namespaces.inside_network(self._namespace), NftSocket() as kernel, RouteSocket() as routes:
                changed = self._complete_rules(kernel)
                changed |= self._complete_routes(routes)
                return self._complete_nodes(kernel) or changed
        except OSError as error:
            raise NetfilterError(f"ingress network: {words(error)}") from error

    def _complete_routes(self, routes: RouteSocket) -> bool:
        vxlan = routes.link(VXLAN)
        if vxlan is None:
            raise NetlinkError(errno.ENODEV, f"{VXLAN} is not in its namespace")
        routes.apply(
            rtnl.add_neighbour(vxlan.ifindex, SINK, _SINK_MAC),
            rtnl.add_route(_ANYWHERE, vxlan.ifindex, SINK, table=ROUTES),
        )
        rules = [rtnl.add_rule(table=ROUTES, priority=ROUTES, marked=None)]
        if self._family == IPV4:
            routes.apply(rtnl.add_route(_ANYWHERE, vxlan.ifindex, table=_NODES))
            rules.append(rtnl.add_rule(table=_NODES, priority=_NODES, by=VXLAN))
        return _add_rules(routes, rules)

    def _complete_rules(self, kernel: NftSocket) -> bool:
        names = {"table": TABLE, "vxlan": VXLAN, "uplink": UPLINK, "subnet": self._subnet, "own": self._own}
        names["sources"] = "" if self._own.is_loopback else _SOURCES.format(**names)
        changed = False
        if not self._layouts.get(INET) or kernel.layout(TABLE) != self._layouts[INET]:
            sysctls.write(_LIBERAL)
            netfilter.run(_NAMESPACE.format(**names))
            self._numbers = kernel.uses(TABLE, "marks", "byteorder")
            self._layouts[INET] = kernel.layout(TABLE)
            changed = True
        if not self._layouts.get(self._family) or kernel.layout(TABLE, self._family) != self._layouts[self._family]:
            if self._family == NETDEV:
                try:
                    netfilter.run(_EGRESS.format(**names))
                except NetfilterError as error:
                    _log.warning("published ports of services: answers are sent twice: %s: %s", _HOOK_MISSING, error)
                    self._family = IPV4
            if self._family == IPV4:
                netfilter.run(_DUPLICATES.format(**names))
            self._layouts[self._family] = kernel.layout(TABLE, self._family)
            changed = True
        return changed

    def _complete_nodes(self, kernel: NftSocket) -> bool:
        if self._nodes is None:
            return False
        wanted = {}
        for each in self._nodes:
            mark = int(each).to_bytes(4, sys.byteorder) if self._numbers else each.packed
            data = each.packed if self._family == IPV4 else bytes.fromhex(mac_address(each).replace(":", ""))
            wanted[mark] = Element(mark, b"", data)
        there = kernel.elements(TABLE, "nodes", self._family)
        remove = [("nodes", each) for key, each in there.items() if each != wanted.get(key)]
        add = [("nodes", each) for key, each in wanted.items() if each != there.get(key)]
        kernel.change(TABLE, remove, add, f"table {TABLE}", self._family)
        return bool(remove or add)

    # --- the host ---------------------------------------------------------------------------------

    def set_ports(self, ports: Ports) -> tuple[dict[Port, str], set[IPv4Address]]:
        """All ports that the swarm publishes. Returns those that are in use on this host, with the
        reason, and the backends that no port leads to any more. They still get the packets of their
        connections, until `forget_datagrams`; those of other protocols until `forget`.

        The first call removes others that an earlier daemon left.
        """
        with self._lock:
            self._asked = {port: (target, tuple(backends)) for port, (target, backends) in ports.items()}
            withdrawn = self._apply()
            busy = dict(self._busy)
        self._forget_untranslated()
        return busy, {IPv4Address(each) for each in withdrawn}

    def _apply(self) -> set[bytes]:
        self._hold()
        wanted = {
            _key(port): [each.packed + _number(target) for each in backends]
            for port, (target, backends) in self._asked.items()
            if port in self._held
        }
        withdrawn = self._change(wanted) if self._begun else self._begin(wanted)
        self._let_go()
        return withdrawn

    def retry(self) -> bool:
        """Try again the ports that were in use on this host. Returns True if some still are."""
        with self._lock:
            if self._busy:
                self._apply()
            busy = bool(self._busy)
        self._forget_untranslated()
        return busy

    def _forget_untranslated(self) -> None:
        """Call after rules were added, without the lock: this is a walk as for `forget_answers`."""
        with self._lock:
            ports, self._opened = self._opened, set()
        if ports:
            try:
                with ConntrackSocket() as connections:
                    connections.forget_untranslated(4, ports)
            except OSError as error:
                _log.warning("cannot remove UDP connections that were made without a task: %s", words(error))

    def forget_datagrams(self, backends: Collection[IPv4Address]) -> None:
        """Forget the UDP connections of these backends unless they are back. Errors are logged."""
        with self._lock:
            gone = {each.packed for each in backends} - _backends(self._slots.values())
            gone &= self._served_by_udp
            self._served_by_udp -= gone
        _forget(gone, socket.IPPROTO_UDP)

    def forget_unanswered(self, backends: Collection[IPv4Address]) -> None:
        """As `Balance.forget_unanswered`."""
        with self._lock:
            gone = {each.packed for each in backends} - _backends(self._slots.values())
        _forget(gone, socket.IPPROTO_TCP, unanswered=True)

    def forget(self, addresses: Iterable[IPv4Address | IPv6Address]) -> None:
        """These tasks have ended: the next packet of a connection to them is refused, until the
        address is in use again.

        Raises NetfilterError.
        """
        with self._lock:
            if not self._begun:
                return
            now, remove, add = time.monotonic(), list[NamedElement](), list[NamedElement]()
            for address in [address for address, since in self._ended.items() if since + _KEPT < now]:
                del self._ended[address]
                remove.append(_gone(address))
            ended = {each.packed for each in addresses} & self._served
            self._ending |= ended & _backends(self._slots.values())
            add += self._end(ended - self._ending)
            if remove or add:
                with self._on_host() as kernel:
                    self._write(kernel, remove, add)

    def _end(self, addresses: set[bytes]) -> list[NamedElement]:
        new = addresses - self._ended.keys()
        self._served.difference_update(addresses)
        self._ended.update(dict.fromkeys(addresses, time.monotonic()))
        return [_gone(each) for each in new]

    # --- sockets ----------------------------------------------------------------------------------

    def _hold(self) -> None:
        self._busy = {}
        for protocol, number in self._asked:
            port = (protocol, number)
            if port in self._held:
                continue
            try:
                relayed = self._listeners.hold(_owner(port), (Published(protocol, ANY[0], number, number),))
            except (PortTaken, OSError) as error:
                self._busy[port] = words(error)
            else:
                self._held[port] = relayed.anywhere
        self._relay()

    def _let_go(self) -> None:
        for port in self._held.keys() - self._asked.keys():
            del self._held[port]
            self._listeners.release(_owner(port))
        self._relay()

    def _relay(self) -> None:
        self._filter.relay(frozenset[int]().union(*self._held.values()))

    # --- the host's table -------------------------------------------------------------------------

    @contextlib.contextmanager
    def _on_host(self) -> Iterator[NftSocket]:
        try:
            if self._kernel is None:
                self._kernel = NftSocket()
                self._filter.authors.add(self._kernel.port)
            yield self._kernel
        except OSError as error:
            raise NetfilterError(f"published ports of services: {words(error)}") from error

    def _begin(self, wanted: Mapping[bytes, Sequence[bytes]]) -> set[bytes]:
        """Install the rules and go on from the slots that an earlier daemon left."""
        with self._on_host() as kernel:
            try:
                there = self._read(kernel)
            except NetlinkError as error:
                if error.errno != errno.ENOENT:
                    raise
                there = {}  # no table, or that of another version of this engine
            before = _read_slots(there.get("slots", {}).values())
            self._slots = {key: slots.fill(before.get(key, ()), backends) for key, backends in wanted.items()}
            led, now = _backends(self._slots.values()), time.monotonic()
            self._served = led | _backends(before.values())
            self._served_by_udp = _by_udp(before) | _by_udp(self._slots)
            self._ended = dict.fromkeys(there.get("ended", {}).keys() - led, now)
            self._begun = True
            self._filter.companions.append(self._mend_host)
            self._install(kernel)
            self._written = True
        return _backends(before.values()) - led

    def _change(self, wanted: Mapping[bytes, Sequence[bytes]]) -> set[bytes]:
        """Returns the backends that no port has any more."""
        before, remove, add = self._slots, list[NamedElement](), list[NamedElement]()
        self._slots = {key: slots.fill(before.get(key, ()), backends) for key, backends in wanted.items()}
        for key in before.keys() | self._slots.keys():
            old, new = before.get(key, []), self._slots.get(key, [])
            if old != new:
                less, more = set(_elements(key, old)), set(_elements(key, new))
                remove += less - more
                add += more - less
        self._opened |= _opened(before, self._slots)
        led = _backends(self._slots.values())
        self._served |= led
        self._served_by_udp |= _by_udp(self._slots)
        for address in self._ended.keys() & led:
            del self._ended[address]
            remove.append(_gone(address))
        add += self._end(self._ending - led)
        self._ending &= led
        if remove or add or not self._written:
            with self._on_host() as kernel:
                self._write(kernel, remove, add)
        return _backends(before.values()) - led

    def _write(self, kernel: NftSocket, remove: list[NamedElement], add: list[NamedElement]) -> None:
        if self._written:
            self._written = False
            try:
                kernel.change(self._table, remove, add, f"table {self._table}")
                self._written = True
                return
            except NetlinkError as error:
                _log.warning("%s: reconciling the table", error)
        if self._missing(kernel):
            self._install(kernel)
        self._reconcile(kernel, self._read(kernel))

    def _missing(self, kernel: NftSocket) -> bool:
        """True if the rules are not there as they were installed, or never were."""
        return not self._layout or kernel.layout(self._table) != self._layout

    def _install(self, kernel: NftSocket) -> None:
        """Put the table with its elements in place of what is there."""
        chains = "\n".join(
            f"    chain of{each} {{\n"
            f"        dnat ip to meta l4proto . th dport . numgen random mod {each} map @slots\n    }}"
            for each in slots.SIZES
        )
        text = _HOST.format(table=self._table, chains=chains, uplink=self._uplink, subnet=self._subnet)
        netfilter.run("\n".join((text, *_commands(self._table, self._slots, self._ended))))
        self._layout = kernel.layout(self._table)
        # Rules were missing, or a daemon may have been killed before it removed the entries.
        self._opened |= _opened({}, self._slots)

    def _read(self, kernel: NftSocket) -> dict[str, dict[bytes, Element]]:
        return {name: kernel.elements(self._table, name) for name in _SETS}

    def _reconcile(self, kernel: NftSocket, there: Mapping[str, Mapping[bytes, Element]]) -> bool:
        found = {(name, element) for name, elements in there.items() for element in elements.values()}
        wanted = {each for key, filled in self._slots.items() for each in _elements(key, filled)}
        wanted |= {_gone(address) for address in self._ended}
        kernel.change(self._table, [*(found - wanted)], [*(wanted - found)], f"table {self._table}")
        self._written = True
        if found != wanted:
            self._opened |= _opened({}, self._slots)
        return found != wanted

    # --- repair -----------------------------------------------------------------------------------

    def mend(self) -> bool:
        """Put back what other programs changed. Returns True if anything differed."""
        with self._lock:
            changed = self._complete()
            if self._begun:
                changed |= self._repair(True)
        self._forget_untranslated()
        return changed

    def _mend_host(self, elements: bool) -> bool:
        """As `Filter.mend`, which calls this."""
        with self._lock:
            changed = self._begun and self._repair(elements)
        self._forget_untranslated()
        return changed

    def _repair(self, elements: bool) -> bool:
        with self._on_host() as kernel:
            missing = self._missing(kernel)
            if missing:
                self._install(kernel)
            return ((elements or missing) and self._reconcile(kernel, self._read(kernel))) or missing

    def close(self, remove: bool) -> None:
        """Close the sockets. With `remove` delete the rules on the host; those in the namespace go
        with it.
        """
        with self._lock:
            self._listeners.close()
            self._held.clear()
            self._asked.clear()
            if self._begun:
                self._begun = False
                self._filter.companions.remove(self._mend_host)
            if self._kernel is not None:
                self._filter.authors.discard(self._kernel.port)
                self._kernel.close()
                self._kernel = None
            if remove:
                self._relay()
                remove_leftovers(self._filter)


def remove_leftovers(table: Filter) -> None:
    """Remove the table of published ports from the host. Raises NetfilterError."""
    name = _table(table)
    netfilter.run(f"add table inet {name}\ndelete table inet {name}")


# --- a container ----------------------------------------------------------------------------------


def answer_by(
    namespace: int, inside: RouteSocket, link: Link, address: IPv4Address, gateway: IPv4Address, *, datagrams: bool
) -> None:
    """Have a container answer from its address on the ingress network by this link of it.

    `inside`: a socket in its namespace. `datagrams`: it serves ports of UDP or SCTP there. Raises
    OSError, NetfilterError.
    """
    inside.apply(rtnl.add_route(_ANYWHERE, link.ifindex, gateway, table=ROUTES))
    rules = [rtnl.add_rule(table=ROUTES, priority=ROUTES, source=address)]
    if datagrams:
        rules.append(rtnl.add_rule(table=ROUTES, priority=ROUTES, marked=_MARK))
    _add_rules(inside, rules)
    with namespaces.inside_network(namespace):
        sysctls.write({f"ipv4/conf/{each}/rp_filter": "0" for each in ("all", link.name)})
        if datagrams:
            _answer_datagrams(link, address)


def answer_datagrams(namespace: int, address: IPv4Address) -> None:
    """Have a container that runs answer datagrams, too. One that does already is left as it is.

    Takes the descriptor over. Raises OSError, NetfilterError.
    """
    try:
        with namespaces.inside_network(namespace), NftSocket() as kernel, RouteSocket() as inside:
            index = inside.owner(address)
            link = next((link for link in inside.links() if link.ifindex == index), None)
            if link is not None and not kernel.layout(TABLE, IPV4):
                _add_rules(inside, [rtnl.add_rule(table=ROUTES, priority=ROUTES, marked=_MARK)])
                _answer_datagrams(link, address)
    finally:
        os.close(namespace)


def _answer_datagrams(link: Link, address: IPv4Address) -> None:
    text = _DATAGRAMS.format(table=TABLE, link=link.name, address=address, mark=_MARK, remembered=_REMEMBERED)
    try:
        netfilter.run(text)
    except NetfilterError:
        # A container that is attached again has the table. To remove it takes 10 ms.
        netfilter.run(f"add table ip {TABLE}\ndelete table ip {TABLE}\n{text}")


def _add_rules(kernel: RouteSocket, rules: Sequence[Request]) -> bool:
    """Returns True if any was missing."""
    failures = kernel.outcomes(rules)
    for failure in failures:
        if failure is not None and failure.errno != errno.EEXIST:
            raise failure
    return None in failures


# --- elements, as the kernel has them -------------------------------------------------------------


def _table(table: Filter) -> str:
    return f"{table.name}-ingress"


def _owner(port: Port) -> str:
    return f"{port[1]}/{port[0]}"


def _key(port: Port) -> bytes:
    protocol, number = port
    return bytes((PROTOCOLS[protocol], 0, 0, 0)) + _number(number)


def _number(port: int) -> bytes:
    return port.to_bytes(2, "big") + b"\0\0"


def _elements(key: bytes, filled: Sequence[bytes]) -> Iterator[NamedElement]:
    """The elements of a published port; none without backends."""
    if filled:
        yield "services", Element(key, chain=f"of{len(filled)}")
    for at, backend in enumerate(filled):
        # A number of `numgen` has the byte order of the host.
        yield "slots", Element(key + struct.pack("=I", at), b"", backend)


def _commands(table: str, filled: Mapping[bytes, Sequence[bytes]], ended: Iterable[bytes]) -> Iterator[str]:
    """The commands that add these elements to a new table."""
    names = {number: name for name, number in PROTOCOLS.items()}
    for key, backends in filled.items():
        port = f"{names[key[0]]} . {int.from_bytes(key[4:6], 'big')}"
        if backends:
            yield f"add element inet {table} services {{ {port} : jump of{len(backends)} }}"
            led = (
                f"{port} . {at} : {IPv4Address(each[:4])} . {int.from_bytes(each[4:6], 'big')}"
                for at, each in enumerate(backends)
            )
            yield f"add element inet {table} slots {{ {', '.join(led)} }}"
    if listed := ", ".join(str(IPv4Address(each)) for each in ended):
        yield f"add element inet {table} ended {{ {listed} }}"


def _gone(address: bytes) -> NamedElement:
    return "ended", Element(address)


def _forget(backends: Collection[bytes], protocol: int, *, unanswered: bool = False) -> None:
    if backends:
        try:
            with ConntrackSocket() as connections:
                connections.forget_answers(backends, protocol, unanswered=unanswered)
        except OSError as error:
            _log.warning("cannot remove connections of tasks that have gone: %s", words(error))


def _by_udp(filled: Mapping[bytes, Sequence[bytes]]) -> set[bytes]:
    return _backends(each for key, each in filled.items() if key[0] == socket.IPPROTO_UDP)


def _opened(before: Mapping[bytes, Sequence[bytes]], after: Mapping[bytes, Sequence[bytes]]) -> set[int]:
    """UDP ports that lead to a task, and did not before."""
    return {
        int.from_bytes(key[4:6], "big")
        for key, filled in after.items()
        if key[0] == socket.IPPROTO_UDP and filled and not before.get(key)
    }


def _read_slots(elements: Iterable[Element]) -> dict[bytes, list[bytes]]:
    """The slots of each published port, in their order."""
    found: dict[bytes, list[tuple[int, bytes]]] = {}
    for each in elements:
        found.setdefault(each.key[:8], []).append((struct.unpack_from("=I", each.key, 8)[0], each.data))
    return {key: [backend for _, backend in sorted(numbered)] for key, numbered in found.items()}


def _backends(filled: Iterable[Sequence[bytes]]) -> set[bytes]:
    """Their addresses."""
    return {each[:4] for one in filled for each in one}
