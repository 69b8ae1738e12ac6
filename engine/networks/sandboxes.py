"""Sandboxes: network namespaces with a veth pair into a bridge, some kept ready; links into
namespaces in use.

Creating a namespace takes the kernel 1.5 ms when it is idle, and many times that while it tears
others down, all under a single kernel lock. So a thread keeps a stock of ready ones: 8 at rest, up
to 64 after the stock ran empty, 8 again after some quiet seconds. A ready sandbox has its loopback
up and its host end on the default bridge, or in the namespace of an overlay (`overlay.py`). Address
and route come when it is used (`ReadySandbox.configure`, 0.2 ms). The one stock serves user-defined
networks too: a host end changes its bridge in one message.

Owns: the descriptors of ready sandboxes and the thread. The kernel removes a namespace with both
ends of its veth when its last descriptor and process are gone. Threads: any but the event loop's,
as they enter namespaces. Locks: `Stock._changed`, a condition; nothing else is locked under it.
Raises: OSError from the kernel; BridgeFull.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from ipaddress import IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface, IPv6Network
from typing import NamedTuple

from engine.errors import EngineError, InvalidParameter, words
from engine.networks import host
from engine.networks.requested import PLACE
from engine.system import namespaces, sysctls
from engine.system.netlink import rtnl
from engine.system.netlink.codec import NetlinkError, Request
from engine.system.netlink.rtnl import Link, RouteSocket
from engine.system.threads import Helper, surely
from engine.system.user_namespaces import IdMap

_log = logging.getLogger(__name__)

STOCK, MOST = 8, 64
QUIET = 10.0
"""Seconds without demand after which the stock is halved."""
REST = 0.05
"""Seconds after the last demand before the stock is filled again, unless it is half empty. Filling
competes with starts for the kernel's lock.
"""
LINGER = 5.0
"""Seconds after which the engine deletes the host end of a released sandbox itself.

The kernel does not while a process holds the namespace.
"""

INSIDE = "eth0"
BRIDGE_PORTS = 1023
"""Ports of one bridge (BR_MAX_PORTS of the kernel, without the one that it does not use)."""

SETTINGS = {"ipv4/ip_unprivileged_port_start": "0", "ipv4/ping_group_range": "0 2147483647"}
"""Docker's settings, below /proc/sys/net: a container needs no privilege for low ports and ping."""
_SETTINGS = SETTINGS | ({"ipv6/conf/all/disable_ipv6": "1", "ipv6/conf/lo/disable_ipv6": "0"} if host.HAS_IPV6 else {})
"""The loopback always has ::1, which hosts names; other links have IPv6 once they get an address of
it, as in Docker.
"""


class BridgeFull(OSError):
    """The bridge has no port left."""


Neighbour = tuple[IPv4Address | IPv6Address, str]
"""Address and MAC."""


class Interface(NamedTuple):
    """MAC, addresses and MTU of the inner end of an endpoint."""

    mac: str
    addresses: tuple[IPv4Interface | IPv6Interface, ...]
    mtu: int = 0
    """0: the kernel's 1500."""
    name: str = ""
    """Empty: the next free one."""
    sysctls: tuple[tuple[str, str], ...] = ()
    """As `DriverOptions.sysctls`."""
    datagrams: bool = False
    """As `DriverOptions.datagrams`."""
    neighbours: tuple[Neighbour, ...] = ()
    """Known in advance."""
    own_port: bool = False
    """As `Sandbox.changes_links`."""

    def changes(self, index: int) -> Iterator[Request]:
        """What gives the link with this index its addresses and neighbours."""
        for address in self.addresses:
            yield rtnl.add_address(index, address)
        for neighbour, mac in self.neighbours:
            yield rtnl.learn_neighbour(index, neighbour, mac)


class ReadySandbox:
    """A namespace with a veth pair to its network, on its way from the stock to a container.

    `endpoint_id` (64 hex digits) names the pair, and the host end's name is derived from it.
    """

    __slots__ = ("_inside", "bridge", "descriptor", "endpoint_id", "index")

    def __init__(self, descriptor: int, inside: RouteSocket, endpoint_id: str, bridge: int) -> None:
        self.descriptor = descriptor
        self.endpoint_id = endpoint_id
        self.bridge = bridge
        """ifindex of the bridge that it was made on; on an overlay that of its outer end."""
        self.index = 0
        self._inside: RouteSocket | None = inside

    def prepare(self) -> None:
        """Bring both links up; find the index of the inner end."""
        assert self._inside is not None
        self._inside.apply(rtnl.change_link("lo", up=True), rtnl.change_link(INSIDE, up=True))
        link = self._inside.link(INSIDE)
        if link is None:
            raise NetlinkError(errno.ENODEV, f"{INSIDE} is not in its namespace")
        self.index = link.ifindex

    def configure(self, interface: Interface, gateways: Iterable[IPv4Address | IPv6Address]) -> None:
        """Give the inner end its name, MAC, addresses and neighbours, and default routes by these
        gateways. Once.
        """
        assert self._inside is not None
        name = self.named(interface)
        # first: its link-local address is made of the MAC when IPv6 is switched on
        self._inside.apply(rtnl.change_link(name, mac=interface.mac, mtu=interface.mtu))
        settle(self.descriptor, name, interface)
        self._inside.apply(
            *interface.changes(self.index),
            *(rtnl.add_default_route(gateway, self.index) for gateway in gateways),
        )
        # The socket would keep the namespace alive.
        self._inside.close()
        self._inside = None

    def named(self, interface: Interface) -> str:
        """Give the inner end its name, which is returned."""
        assert self._inside is not None
        name = interface.name or INSIDE
        if name != INSIDE:
            # A link that is up has a new name only since Linux 6.2.
            self._inside.apply(
                rtnl.change_link(INSIDE, up=False), rtnl.rename_link(self.index, name), rtnl.change_link(name, up=True)
            )
        return name

    @property
    def inside(self) -> RouteSocket:
        """A socket in its namespace."""
        assert self._inside is not None
        return self._inside

    def detach(self) -> int:
        """Returns the descriptor of its namespace, which the caller then owns."""
        descriptor, self.descriptor = self.descriptor, -1
        self.close()
        return descriptor

    def close(self) -> None:
        """Release the namespace. Idempotent."""
        if self._inside is not None:
            self._inside.close()
            self._inside = None
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def settle(namespace: int, name: str, interface: Interface) -> None:
    """Write the sysctls of one link of a namespace.

    IPv6 is switched on for the link if it gets such an address.
    """
    settings: dict[str, str] = {}
    if any(address.version == 6 for address in interface.addresses):
        if not host.HAS_IPV6:
            raise NetlinkError(errno.EAFNOSUPPORT, "this kernel has no IPv6")
        settings = {f"ipv6/conf/{name}/disable_ipv6": "0"}
    if settings:
        with namespaces.inside_network(namespace):
            sysctls.write(settings)
    set_sysctls(namespace, interface.sysctls, name)


def set_sysctls(namespace: int, settings: Collection[tuple[str, str]], name: str = "") -> None:
    """Write sysctls of a namespace, by path below /proc/sys/net, where `PLACE` stands for the
    interface `name`. Raises InvalidParameter.
    """
    if not settings:
        return
    with namespaces.inside_network(namespace):
        for path, value in settings:
            try:
                sysctls.write({path.replace(PLACE, name): value})
            except OSError as error:
                setting = f"net.{path.replace('/', '.')}"
                raise InvalidParameter(f"sysctl {setting}={value}: {error.strerror}") from error


def bare(outside: int, ids: IdMap | None) -> ReadySandbox:
    """A new namespace without links, for an endpoint that is to come. `ids`: see
    `namespaces.new_network`.
    """
    with namespaces.new_network(ids) as descriptor:
        inside = RouteSocket()
        sysctls.write(_SETTINGS)
    return ReadySandbox(descriptor, inside, secrets.token_hex(32), outside)


def empty(ids: IdMap | None, user: int = -1) -> int:
    """A new namespace with its loopback up and nothing else. Returns its descriptor, owned by the
    caller. `ids`, `user`: see `namespaces.new_network`.
    """
    with namespaces.new_network(ids, user) as descriptor:
        sysctls.write(_SETTINGS)
        with RouteSocket() as inside:
            inside.apply(rtnl.change_link("lo", up=True))
    return descriptor


def plug(links: RouteSocket, namespace: int, bridge: Link, name: str, interface: Interface) -> str:
    """A veth pair from the bridge into a namespace in use, as `name` there. Returns the endpoint
    id.

    Raises OSError, BridgeFull; nothing is left then.
    """
    endpoint_id = secrets.token_hex(32)
    end = host_end(endpoint_id)
    _join(links, end, name, namespace, bridge, interface.mtu)
    try:
        finish(namespace, name, interface)
    except BaseException:
        links.outcomes([rtnl.delete_link(end)])
        raise
    return endpoint_id


def unplug(links: RouteSocket, endpoint_id: str) -> None:
    """Delete the veth pair of an endpoint. A missing one is fine."""
    failure = links.outcomes([rtnl.delete_link(host_end(endpoint_id))])[0]
    if failure is not None and failure.errno != errno.ENODEV:
        raise failure


def _join(links: RouteSocket, end: str, inner: str, namespace: int, bridge: Link, mtu: int = 0) -> None:
    """Make a veth pair and put its host end into the bridge."""
    links.apply(rtnl.create_veth(end, inner, namespace, mtu=mtu))
    try:
        host.ignore_router_advertisements(end)
        enslave = rtnl.change_link(end, master=bridge.ifindex, up=True, without_ipv6_address=host.has_ipv6(mtu))
        occupy(links, bridge, enslave)
    except OSError:
        links.outcomes([rtnl.delete_link(end)])
        raise


def occupy(links: RouteSocket, bridge: Link, enslave: Request) -> None:
    """Have the kernel put a link into a bridge. Raises BridgeFull, OSError."""
    failure = links.outcomes((enslave,))[0]
    if failure is not None and failure.errno == errno.EXFULL:
        raise BridgeFull(errno.EXFULL, f"all {BRIDGE_PORTS} ports of bridge {bridge.name} are in use") from failure
    if failure is not None:
        raise failure


def finish(namespace: int, name: str, interface: Interface) -> None:
    """Configure a link that has just come into a namespace, and bring it up."""
    with _inside(namespace) as inside:
        link = inside.link(name)
        if link is None:
            raise NetlinkError(errno.ENODEV, f"{name} is not in its namespace")
        inside.apply(rtnl.change_link(name, up=True, mac=interface.mac, mtu=interface.mtu))
        settle(namespace, name, interface)
        inside.apply(*interface.changes(link.ifindex))


def route(namespace: int, gateways: Iterable[IPv4Address | IPv6Address]) -> None:
    """Set the default routes of a namespace to these gateways, replacing those it has."""
    with _inside(namespace) as inside:
        inside.apply(*(rtnl.add_default_route(gateway, replace=True) for gateway in gateways))


def route_if_none(namespace: int, gateways: Iterable[IPv4Address | IPv6Address]) -> None:
    """Set the default routes of a namespace to these gateways where it has none."""
    with _inside(namespace) as inside:
        for failure in inside.outcomes(rtnl.add_default_route(gateway) for gateway in gateways):
            if failure is not None and failure.errno != errno.EEXIST:
                raise failure


def add_routes(
    namespace: int,
    name: str,
    routes: Iterable[tuple[IPv4Network | IPv6Network, IPv4Address | IPv6Address | None]],
) -> None:
    """Add routes by a link, which is up: destination, and next hop or None."""
    with _inside(namespace) as inside:
        link = inside.link(name)
        if link is None:
            raise NetlinkError(errno.ENODEV, f"{name} is not in its namespace")
        inside.apply(*(rtnl.add_route(to, link.ifindex, via) for to, via in routes))


def macs(namespace: int) -> dict[str, str]:
    """MACs of the links of a namespace by their names."""
    with _inside(namespace) as inside:
        return {link.name: link.address for link in inside.links()}


def next_name(prefix: str, taken: Collection[str]) -> str:
    """The first name of this prefix and a number that is not taken."""
    return next(name for name in (f"{prefix}{number}" for number in range(len(taken) + 1)) if name not in taken)


def remove_by_mac(namespace: int, mac: str) -> None:
    """Delete the link of this MAC in a namespace, if there is one."""
    with _inside(namespace) as inside:
        for link in inside.links():
            if link.address == mac:
                inside.outcomes([rtnl.delete_link(link.name)])


def remove(namespace: int, name: str) -> None:
    """Delete the link of this name in a namespace, if there is one."""
    with _inside(namespace) as inside:
        inside.outcomes([rtnl.delete_link(name)])


def remove_by_address(namespace: int, address: IPv4Address | IPv6Address) -> None:
    """Delete the link that has this address in a namespace, if there is one."""
    with _inside(namespace) as inside:
        index = inside.owner(address)
        for link in inside.links():
            if link.ifindex == index:
                inside.outcomes([rtnl.delete_link(link.name)])


def route_by_link(namespace: int, name: str, versions: Iterable[int]) -> None:
    """Default routes of these IP versions by a link, where the namespace has none."""
    with _inside(namespace) as inside:
        link = inside.link(name)
        if link is None:
            raise NetlinkError(errno.ENODEV, f"{name} is not in its namespace")
        for failure in inside.outcomes(rtnl.add_link_route(version, link.ifindex) for version in versions):
            if failure is not None and failure.errno != errno.EEXIST:
                raise failure


@contextlib.contextmanager
def _inside(namespace: int) -> Iterator[RouteSocket]:
    with namespaces.inside_network(namespace):
        inside = RouteSocket()
    with inside:
        yield inside


def close(namespace: int) -> None:
    """Close a namespace's descriptor; -1 is fine."""
    if namespace >= 0:
        os.close(namespace)


def host_end(endpoint_id: str) -> str:
    """Name of the veth's end on the host: 15 characters, the most that the kernel takes."""
    return f"veth{endpoint_id[:11]}"


class Stock:
    """Ready sandboxes, which the thread makes by `fresh`."""

    def __init__(self, links: RouteSocket, least: int = STOCK) -> None:
        """`least`: how many there are at rest."""
        self._links = links
        self._least = least
        self._ready: deque[ReadySandbox] = deque()
        self._lingering: deque[tuple[float, str]] = deque()
        self._later: list[Request] = []
        self._wanted = least
        self._demand = 0.0
        self._pause_until = 0.0
        self._closed = False
        self._changed = threading.Condition()
        # Where it cannot begin, the stock stays empty.
        self._thread = Helper(lambda: surely(self._keep))

    def fresh(self) -> ReadySandbox:
        """Make one. Called in any thread. Raises OSError, EngineError."""
        raise NotImplementedError

    def ready(self) -> ReadySandbox | None:
        """A ready one; None when the stock is empty. The caller makes its own then."""
        with self._changed:
            self._demand = time.monotonic()
            sandbox = self._ready.popleft() if self._ready else None
            if sandbox is None:
                self._wanted = min(MOST, self._wanted * 2)
            self._changed.notify()
        return sandbox

    def later(self, changes: Iterable[Request]) -> None:
        """Let the thread make these changes, in the order of the calls. Failures are ignored."""
        with self._changed:
            self._later += changes
            self._changed.notify()

    def released(self, endpoint_id: str) -> None:
        """Delete the host end of an endpoint after `LINGER`, if it still exists."""
        with self._changed:
            self._lingering.append((time.monotonic() + LINGER, host_end(endpoint_id)))
            self._changed.notify()

    def close(self) -> None:
        """End the thread, release the stock, delete the remaining host ends."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.joined()
        while self._ready:
            self._ready.popleft().close()
        self._links.outcomes(self._later)
        self._delete([name for _, name in self._lingering])
        self._lingering.clear()

    # --- the thread -------------------------------------------------------------------------------

    def _keep(self) -> None:
        while True:
            surplus: list[ReadySandbox] = []
            due: list[str] = []
            with self._changed:
                if self._closed:
                    return
                now = time.monotonic()
                if self._wanted > self._least and now - self._demand > QUIET:
                    self._wanted = max(self._least, self._wanted // 2)
                    self._demand = now
                while len(self._ready) > self._wanted:
                    surplus.append(self._ready.popleft())
                while self._lingering and self._lingering[0][0] <= now:
                    due.append(self._lingering.popleft()[1])
                changes, self._later = self._later, []
                short = now >= self._due_to_fill(now)
                if not (short or surplus or due or changes):
                    self._changed.wait(self._sleep(now))
                    continue
            for sandbox in surplus:
                sandbox.close()
            self._links.outcomes(changes)
            self._delete(due)
            if short:
                self._add()

    def _due_to_fill(self, now: float) -> float:
        """When to make the next sandbox; infinity while the stock is full."""
        if len(self._ready) >= self._wanted:
            return math.inf
        rested = now if len(self._ready) < self._wanted // 2 else self._demand + REST
        return max(rested, self._pause_until)

    def _sleep(self, now: float) -> float | None:
        """Seconds until the thread has work; None while only calls cause some."""
        due = self._due_to_fill(now)
        if self._lingering:
            due = min(due, self._lingering[0][0])
        if self._wanted > self._least:
            due = min(due, self._demand + QUIET)
        return None if due == math.inf else max(0.0, due - now) + 0.001

    def _add(self) -> None:
        try:
            sandbox = self.fresh()
        except (OSError, EngineError) as error:
            # BridgeFull persists until containers exit, so it is not logged. Log anything else; the
            # next start will hit it again.
            if not isinstance(error, BridgeFull):
                _log.warning("ready sandboxes: %s", words(error))
            with self._changed:
                self._pause_until = time.monotonic() + 1.0
            return
        with self._changed:
            if not self._closed:
                self._ready.append(sandbox)
                return
        sandbox.close()

    def _delete(self, names: list[str]) -> None:
        if not names:
            return
        for name, outcome in zip(names, self._links.outcomes(rtnl.delete_link(name) for name in names), strict=True):
            if outcome is not None and outcome.errno != errno.ENODEV:
                _log.warning("link %s: %s", name, words(outcome))


class BridgeStock(Stock):
    """Ready sandboxes on the default bridge."""

    def __init__(self, links: RouteSocket, bridge: Callable[[], Link] | None, ids: IdMap | None = None) -> None:
        """`bridge` returns the default bridge as it is now. It is called in any thread and may
        raise OSError or EngineError. None: there is no such bridge, and the stock stays empty.
        `ids`: see `namespaces.new_network`.
        """
        self._bridge = bridge
        self._ids = ids
        super().__init__(links, STOCK if bridge is not None else 0)

    def fresh(self) -> ReadySandbox:
        assert self._bridge is not None
        return self._make(self._bridge())

    def take(self, bridge: Link, mtu: int = 0) -> ReadySandbox:
        """A ready sandbox on that bridge; one is made when the stock is empty.

        Called in any thread but the event loop's, as it may wait for the kernel. Raises OSError;
        BridgeFull when the bridge has no port left.
        """
        sandbox = self.ready()
        if sandbox is None:
            return self._make(bridge, mtu)
        if bridge.ifindex != sandbox.bridge or mtu:
            change = rtnl.change_link(host_end(sandbox.endpoint_id), master=bridge.ifindex, mtu=mtu)
            try:
                occupy(self._links, bridge, change)
            except BaseException:
                sandbox.close()
                raise
        return sandbox

    def _make(self, bridge: Link, mtu: int = 0) -> ReadySandbox:
        sandbox = bare(bridge.ifindex, self._ids)
        try:
            _join(self._links, host_end(sandbox.endpoint_id), INSIDE, sandbox.descriptor, bridge, mtu)
            sandbox.prepare()
        except BaseException:
            sandbox.close()
            raise
        return sandbox


class BareStock(Stock):
    """Namespaces without links but the loopback, which is up.

    A runtime that makes one sets its sysctls through the host's /proc, which takes longer with each
    namespace that the host has had, for everybody (`system/sysctls.py`).
    """

    def __init__(self, links: RouteSocket, ids: IdMap | None) -> None:
        """`ids`: see `namespaces.new_network`."""
        self._ids = ids
        super().__init__(links, 1)

    def fresh(self) -> ReadySandbox:
        sandbox = bare(0, self._ids)
        try:
            sandbox.inside.apply(rtnl.change_link("lo", up=True))
        except BaseException:
            sandbox.close()
            raise
        return sandbox

    def take(self) -> ReadySandbox:
        """One of them. Called in any thread but the event loop's. Raises OSError."""
        return self.ready() or self.fresh()
