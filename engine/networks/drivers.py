"""The drivers of networks: which driver makes what on this host, opened and closed together; and
the threads in which they run.

`Drivers` blocks on the kernel in every method that says nothing else, and is called in the threads
of `Workers`, several at once. A new driver is a line in `Drivers.open`.

Owns: the netlink socket, the nftables table of the engine, the socket of the IPv6 relay, the
threads. Not here: the links of one kind of network (`bridge.py`, `macvlan.py`), which networks
there are (`networks.py`), which container is on them (`attachments.py`).
Raises: the error kinds and OSErrors of `driver.py`; errors of an endpoint are ServerErrors that
name network and container. A failure leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import TYPE_CHECKING, TypeVar

import msgspec

from engine.common.network_rules import OVERLAY, Pool, Subnet, span
from engine.config import FIREWALL_MARK
from engine.errors import EngineError, Forbidden, InvalidParameter, ServerError, words
from engine.networks import endpoints, host, sandboxes
from engine.networks.bridge.default import DefaultNetwork
from engine.networks.bridge.driver import BridgeDriver
from engine.networks.driver import Driver, Gateways, SubnetContested
from engine.networks.endpoints import Network
from engine.networks.filter import NO_ENTRIES, BridgeRules, Entries, Filter
from engine.networks.firewall import Firewall
from engine.networks.ipam import BRIDGE_POOLS, NETWORK_POOLS, UNIQUE_LOCAL_PREFIX, choose, unique_local_subnet
from engine.networks.ipvlan import IpvlanDriver
from engine.networks.macvlan import MacvlanDriver
from engine.networks.network import BRIDGE, NO_IPAM, NetworkRecord, Overlay, with_gateways, with_pool, without_sizes
from engine.networks.ports import relay_socket
from engine.networks.sandboxes import BareStock, BridgeFull, Interface, ReadySandbox
from engine.system import netfilter
from engine.system.netlink.rtnl import RouteSocket
from engine.system.threads import Threads, uninterrupted
from engine.system.user_namespaces import IdMap
from engine.wire.containers import EndpointSettings

if TYPE_CHECKING:
    from engine.networks.overlay.driver import OverlayDriver

_log = logging.getLogger(__name__)

T = TypeVar("T")

WORKERS = 4
"""Threads that wait for the kernel; more would only queue for its single network lock."""

_TRIES = 16
"""Subnets that are tried for a new network while other engines of this host take the same ones."""


class Workers:
    """The threads that wait for the kernel."""

    def __init__(self) -> None:
        self._pool = Threads(WORKERS, ready=True)

    async def run(self, function: Callable[..., T], *arguments: object) -> T:
        """Run the function in a thread.

        A caller that is cancelled meanwhile waits for its end, so that it can undo it.
        """
        return await uninterrupted(self._pool.run(function, *arguments))

    async def undone_if_cancelled(self, undo: Callable[[T], None], function: Callable[..., T], *arguments: object) -> T:
        """As `run`. If the caller is cancelled, the result is undone in a thread first."""
        running = self._pool.run(function, *arguments)
        try:
            return await uninterrupted(running)
        except asyncio.CancelledError:
            if not running.cancelled() and running.exception() is None:
                await self.run(undo, running.result())
            raise

    def close(self) -> None:
        """End the threads. Nothing runs in them any more."""
        self._pool.close()


class PoolsExhausted(ServerError):
    """No subnet is free for a network."""

    def __init__(self, record: NetworkRecord, version: int) -> None:
        super().__init__(
            f"network {record.name}: could not find an available, non-overlapping IPv{version} address pool: all "
            "predefined address pools have been fully subnetted: give the network a subnet, or the engine other "
            "pools by --default-address-pool"
        )


class Drivers:
    """One engine's."""

    def __init__(
        self,
        default: DefaultNetwork,
        pools: Sequence[Pool] = (),
        mark: int = FIREWALL_MARK,
        *,
        own_rules: bool = False,
        no_rules: bool = False,
        forwards: bool = True,
        entries: Entries = NO_ENTRIES,
        trunks: bool = True,
        ids: IdMap | None = None,
    ) -> None:
        """`pools` are those of the operator, of both IP versions. `mark`, `own_rules`: see
        `Firewall`. `no_rules`: write none. `forwards`: switch on forwarding for the host.
        `entries`: see `Filter`. `trunks`: let networks have more endpoints than their bridges have
        ports. `ids`: see `namespaces.new_network`.
        """
        self.ids = ids
        self._trunks = trunks
        self._default = default
        self._default_bridge = default.options.bridge
        self._forwards = forwards
        self._pools = {version: [pool for pool in pools if pool.base.version == version] for version in (4, 6)}
        # nftables takes the same letters as bridge names have
        self.filter = Filter(f"engined-{default.key}", mark, entries, off=no_rules)
        self.firewall = Firewall(self.filter, mark, own=own_rules)
        self.relay: socket.socket | None = None
        """Accepts connections by IPv6 to published ports, for the monitor to pass on to
        `filter.RELAYED`.

        None on a host without IPv6.
        """
        self._engine_id = ""
        self._kernel: RouteSocket | None = None
        self._bridges: BridgeDriver | None = None
        self._overlays: OverlayDriver | None = None
        self._by_name: dict[str, Driver] = {}
        self._bare: BareStock | None = None
        self._making = threading.Lock()

    def open(self, engine_id: str) -> None:
        """`engine_id` is the default bridge's network id, which the records keep."""
        self._engine_id = engine_id
        links = self._kernel = RouteSocket()
        parts = links, self.filter, self.alias, self._default, self._pools[4] or BRIDGE_POOLS
        empty = self._empty if self._trunks else None
        self._bridges = BridgeDriver(*parts, self._default_subnet6, self._forward, empty, self.ids)
        self._by_name = {
            "bridge": self._bridges,
            "macvlan": MacvlanDriver(links, self.alias, self.ids),
            "ipvlan": IpvlanDriver(links, self.alias, self.ids),
        }

    def close(self, networks: Iterable[Network], remove: bool) -> None:
        """With `remove` also delete the rules, and the links that the engine made."""
        for stock in (self._bridges, self._bare):
            if stock is not None:
                stock.close()
        if self._kernel is None:
            return
        self.firewall.close(remove)
        try:
            self.filter.close(remove)
        except netfilter.NetfilterError as error:
            _log.warning("bridge %s: cannot remove its rules: %s", self._default_bridge, error)
        if remove:
            known = [each for each in networks if each.record.driver in self.names()]
            host.sweep(self._kernel, self._kernel.links(), self.alias, self._names_of_links(known))
            for each in known:
                self.of(each).unmake(each)
        if self._overlays is not None:
            self._overlays.close()
        if self.relay is not None:
            self.relay.close()
        self._kernel.close()
        self._kernel = None

    @property
    def kernel(self) -> RouteSocket:
        """The links of the host."""
        assert self._kernel is not None, "the drivers are open"
        return self._kernel

    @property
    def alias(self) -> str:
        """ifalias of links that the engine makes for user-defined networks."""
        return f"{host.ALIAS} {self._engine_id[:12]}"

    @property
    def bridges(self) -> BridgeDriver:
        assert self._bridges is not None, "the drivers are open"
        return self._bridges

    @property
    def overlays(self) -> OverlayDriver:
        """The driver of a swarm's networks, loaded when the first one is adopted."""
        if self._overlays is None:
            from engine.networks.overlay.driver import OverlayDriver
            from engine.networks.overlay.encryption import Encryption

            assert self._kernel is not None, "the drivers are open"
            self._overlays = OverlayDriver(self._kernel, self.filter, self.alias, Encryption(self.filter), self.ids)
        return self._overlays

    def mtu(self, meant: Overlay, kept: int = -1) -> int:
        """The MTU of an overlay whose creator chose none; as `OverlayDriver.mtu`."""
        return self.overlays.mtu(meant, kept)

    def names(self) -> list[str]:
        """Drivers by name. Does not block."""
        return [*self._by_name, OVERLAY]

    def of(self, network: Network) -> Driver:
        """The network's driver. Does not block."""
        return self.overlays if network.record.driver == OVERLAY else self._by_name[network.record.driver]

    def routes(self, name: str) -> bool:
        """True if there is such a driver and the host is the router of its networks. Does not
        block.
        """
        return name in self._by_name and self._by_name[name].routes

    # --- networks ---------------------------------------------------------------------------------

    def restore(self, networks: Sequence[Network]) -> None:
        """Find or recreate the links of all networks at start, sweep those that a crash left, and
        enable outgoing traffic.
        """
        assert self._kernel is not None
        for network in networks:
            if network.record.remote:
                network.fill()
        known = [network for network in networks if network.record.driver in self._by_name]
        default = next((network for network in known if network.record.name == BRIDGE), None)
        users = [network for network in known if network is not default]
        if default is not None:
            self.bridges.restore(default)
        for network in users:
            network.fill()
        present = self._kernel.links()
        self.bridges.trunks.adopt(known, present)
        host.sweep(self._kernel, present, self.alias, self._names_of_links(known))
        for network in users:
            try:
                self.of(network).restore(network)
            except (EngineError, OSError) as error:
                _log.error("network %s: its link: %s", network.record.name, words(error))
        everything = [default, *users] if default is not None else users
        self._warn_of_routes(everything)
        self._forward(self._kernel, ipv6=any(6 in network.pools for network in everything if network.routes))
        rules = [network.rules for network in everything if network.routes]
        if self.filter.off:
            self.filter.open(rules)
            self.firewall.clear()
        else:
            self._open_rules(rules)
        self.bridges.open_stock(default)

    def _open_rules(self, rules: Sequence[BridgeRules]) -> None:
        try:
            self.relay = relay_socket()
            port = self.relay.getsockname()[1] if self.relay is not None else 0
            self.filter.open(rules, port)
            self.firewall.open()
        except netfilter.NetfilterError as error:
            _log.warning(
                "bridge %s: no masquerade, containers do not reach beyond this host: %s", self._default_bridge, error
            )

    def _forward(self, links: RouteSocket, *, ipv6: bool = False) -> None:
        if self._forwards:
            host.forward(links, ipv6=ipv6)

    def _default_subnet6(self, default: Network) -> Subnet:
        """The IPv6 subnet of the default network: that of its bridge, or a free one."""
        index = self.kernel.link(default.bridge)
        here = [span for span in self.kernel.address_spans(6) if index is not None and span[2] == index.ifindex]
        for first, last, _ in here:
            subnet = IPv6Network((first, 129 - (last - first + 1).bit_length()))
            if any(subnet.subnet_of(pool.base) for pool in self._pools[6] if isinstance(pool.base, IPv6Network)):
                return subnet
        return self._subnet6(default.record, (), 0)

    def _warn_of_routes(self, networks: Sequence[Network]) -> None:
        """A network keeps its subnet, whatever has become of the host since it was made."""
        occupied = {version: host.occupied(self.kernel, version) for version in (4, 6)}
        for each in networks:
            for pool, _ in each.subnets:
                if occupied[pool.subnet.version].hides(pool.subnet):
                    _log.warning(
                        "network %s: a route of this host hides a part of its subnet %s",
                        each.record.name,
                        pool.subnet,
                    )

    def _names_of_links(self, known: Iterable[Network]) -> set[str]:
        return {name for each in known for name in self.of(each).links(each)}

    def replug(self, networks: Iterable[Network]) -> None:
        """Attach containers that ran on without a daemon to their bridges, which may have been made
        again. The host forgets the addresses of those that have ended meanwhile.
        """
        networks = [*networks]
        for network in networks:
            if network.link is not None:
                self.bridges.replug(network, network.link, restarted=True)
        self.bridges.forget_ended(networks)

    def local_subnets(self) -> list[IPv4Network]:
        """Subnets of this host's links, and those that it has routes to. Wide ones are left out,
        which are routes of a whole site: of links a /8, behind a gateway what is wider than a /16.
        """
        assert self._kernel is not None
        found = set()
        for first, last in host.occupied(self._kernel).spans(16):
            size = last - first + 1
            subnet = IPv4Network((first, 33 - size.bit_length()))
            if 8 < subnet.prefixlen < 31 and not (subnet.is_link_local or subnet.is_loopback or subnet.is_multicast):
                found.add(subnet)
        return sorted(found)

    def make(self, made: Network, subnets: list[Subnet]) -> None:
        """The links of a new network, with a free subnet unless it has one. A plugin makes its own
        links later.

        `subnets` are those of the other networks.
        """
        record = made.record
        if record.ipam.driver == NO_IPAM:
            return
        make = (lambda _: None) if record.remote else self.of(made).make
        record, sizes = (record, {}) if record.ipam_pools else without_sizes(record)
        for configured in map(ip_network, (config.subnet for config in record.ipam.config)):
            if any(configured.version == other.version and configured.overlaps(other) for other in subnets):
                raise Forbidden(
                    f"network {record.name}: subnet {configured}: Pool overlaps with other one on this address space"
                )
        if 6 in record.versions and not any(":" in config.subnet for config in record.ipam.config):
            record = with_pool(record, self._subnet6(record, subnets, sizes.get(6, 0)))
        if 4 in record.imposed or 4 not in record.versions:
            made.record = with_gateways(record)
            made.fill()
            make(made)
            return
        assert self._kernel is not None
        avoided = [span(each) for each in subnets if each.version == 4]
        for _ in range(_TRIES):
            subnet = choose(self._pools[4] or NETWORK_POOLS, host.occupied(self._kernel), avoided, sizes.get(4, 0))
            if subnet is None:
                break
            made.record = with_gateways(with_pool(record, subnet))
            made.fill()
            try:
                make(made)
                return
            except SubnetContested:
                avoided.append(span(subnet))
        raise PoolsExhausted(record, 4)

    def _subnet6(self, record: NetworkRecord, subnets: Iterable[Subnet], size: int) -> Subnet:
        """`size`: the prefix length that was asked for, or 0."""
        if not self._pools[6]:
            if 0 < size < UNIQUE_LOCAL_PREFIX:
                raise InvalidParameter(
                    f"network {record.name}: subnet ::/{size}: the engine chooses none larger than a "
                    f"/{UNIQUE_LOCAL_PREFIX}"
                )
            return unique_local_subnet(self._engine_id, record.id, size or UNIQUE_LOCAL_PREFIX)
        avoided = [span(each) for each in subnets if each.version == 6]
        subnet = choose(self._pools[6], host.occupied(self.kernel, 6), avoided, size)
        if subnet is None:
            raise PoolsExhausted(record, 6)
        return subnet

    def unmake(self, network: Network) -> None:
        """Remove everything that `make` made. Failures are logged."""
        self.of(network).unmake(network)

    # --- endpoints --------------------------------------------------------------------------------

    def bare(self) -> int:
        """A namespace with nothing but its loopback.

        Returns its descriptor, owned by the caller.
        """
        return self._empty().detach()

    def _empty(self) -> ReadySandbox:
        with self._making:
            if self._bare is None:
                self._bare = BareStock(self.kernel, self.ids)
        return self._bare.take()

    def new_sandbox(
        self, container_id: str, plans: Sequence[tuple[Network, EndpointSettings]], gateways: Gateways
    ) -> tuple[int, list[str]]:
        """A namespace with all these endpoints, and default routes by these gateways.

        Returns its descriptor, owned by the caller, and the endpoint ids.
        """
        networks = [network for network, _ in plans]
        first, *others = networks
        prefixes = [network.options.prefix for network in networks]
        interfaces = _named([_interface(container_id, *plan) for plan in plans], prefixes)
        with error_context(first, container_id):
            namespace, endpoint_id = self.of(first).new_sandbox(first, interfaces[0], () if others else gateways)
        ids = [endpoint_id]
        try:
            for network, interface in zip(others, interfaces[1:], strict=True):
                with error_context(network, container_id):
                    ids.append(self.of(network).plug(network, namespace, interface.name, interface))
            if gateways and others:
                with error_context(first, container_id):
                    sandboxes.route(namespace, gateways)
        except BaseException:
            self.close_sandbox(plans, namespace, ids)
            raise
        return namespace, ids

    def close_sandbox(
        self, plans: Sequence[tuple[Network, EndpointSettings]], namespace: int, ids: Sequence[str]
    ) -> None:
        """Undo `new_sandbox`. Without ids for the last plans, these have no endpoints. Failures are
        logged.
        """
        for (network, given), endpoint_id in zip(plans, ids, strict=False):
            settings = msgspec.structs.replace(given, endpoint_id=endpoint_id)
            try:
                self.of(network).unplug(network, namespace, settings)
            except (EngineError, OSError) as error:
                _log.warning("network %s: undoing an endpoint: %s", network.record.name, words(error))
        sandboxes.close(namespace)

    def plug(self, container_id: str, network: Network, namespace: int, given: EndpointSettings) -> str:
        """Add an endpoint to a sandbox in use; returns its id."""
        with error_context(network, container_id):
            interface = _interface(container_id, network, given)
            present = sandboxes.macs(namespace)
            if interface.name in present:
                raise InvalidParameter(f"the container has an interface {interface.name} already")
            name = interface.name or sandboxes.next_name(network.options.prefix, present)
            return self.of(network).plug(network, namespace, name, interface)

    def unplug(
        self, container_id: str, network: Network, namespace: int, given: EndpointSettings, endpoint_id: str
    ) -> None:
        """Remove an endpoint from a sandbox that stays in use."""
        settings = msgspec.structs.replace(given, endpoint_id=endpoint_id)
        with error_context(network, container_id):
            self.of(network).unplug(network, namespace, settings)

    def route(self, container_id: str, network: Network, namespace: int, gateways: Gateways) -> None:
        """Replace a sandbox's default routes, because its endpoint on this network changed."""
        with error_context(network, container_id):
            sandboxes.route(namespace, gateways)

    def reflect(self, endpoint_id: str) -> None:
        """Let the bridge send frames back through the port that they came from."""
        self.bridges.reflect(endpoint_id)


def _interface(container_id: str, network: Network, settings: EndpointSettings) -> Interface:
    own_port = network.sandboxes[container_id].changes_links
    return endpoints.interface(network, settings)._replace(own_port=own_port)


def _named(interfaces: Sequence[Interface], prefixes: Sequence[str]) -> list[Interface]:
    """The interfaces of a new sandbox with names: the requested one, or the next free one of the
    prefix.

    Raises InvalidParameter for a name that is requested twice.
    """
    taken = {"lo"}
    for each in interfaces:
        if each.name in taken:
            raise InvalidParameter(f"endpoint.ifname: two interfaces of a container cannot be named {each.name}")
        taken |= {each.name} if each.name else set()
    named = []
    for each, prefix in zip(interfaces, prefixes, strict=True):
        name = each.name or sandboxes.next_name(prefix, taken)
        taken.add(name)
        named.append(each._replace(name=name))
    return named


@contextlib.contextmanager
def error_context(network: Network, container_id: str) -> Iterator[None]:
    """Add the names of network and container to the kernel's refusals."""
    where = f"network {network.record.name}, container {container_id}"
    try:
        yield
    except InvalidParameter as error:
        raise InvalidParameter(f"{where}: {error.message}") from error
    except BridgeFull as error:
        raise ServerError(f"{where}: {error.strerror}; the bridge is full") from error
    except OSError as error:
        raise ServerError(f"{where}: {error.strerror or error}") from error
    except netfilter.NetfilterError as error:
        raise ServerError(f"{where}: {error}") from error
