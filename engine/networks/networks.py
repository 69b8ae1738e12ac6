"""All networks of the engine, and the endpoints of containers on them: what `containers` and the API use of this package.

A container that runs has a `Member` here: its namespace and an endpoint on each of its networks. What an endpoint is given (addresses, MAC) is
derived: pools are filled from the endpoints of running containers, at start from what their records say.

Everything runs in the loop's thread but what waits for the kernel, which goes to a few threads; a change of one container's endpoints waits for
the one before it (`Member.lock`). `_appeared` and `_disappeared` are the one place where endpoints come and go.

Not here: what a body may say (`network.py`), links and namespaces (`bridge.py`, `macvlan.py`, `sandboxes.py`), rules (`filter.py`).
Raises: the kinds of the specification's table, naming network and container; a failure takes everything back.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from ipaddress import IPv4Address, IPv4Interface, IPv6Address, IPv6Interface, ip_address, ip_interface, ip_network
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from engine.config import Config
from engine.errors import EngineError, Forbidden, InvalidParameter, NotFound, ServerError
from engine.events import EventLog
from engine.networks import bridge, macvlan, network, sandboxes
from engine.networks.filter import BridgeRules, Filter
from engine.networks.ipam import (
    NETWORK_POOLS,
    NETWORK_PREFIX,
    Address,
    AddressPool,
    Subnet,
    free_subnet,
    mac_address,
    span,
    unique_local_subnet,
)
from engine.networks.names import NameTable
from engine.networks.network import BRIDGE, HOST, NONE, NetworkRecord, NetworkStore, Options
from engine.networks.ports import Published, relay_socket
from engine.networks.publishing import Publishing, Request, Target, bridges_call_netfilter
from engine.networks.resolver import Resolver
from engine.networks.sandboxes import BridgeFull, Interface, Stock
from engine.storage.records import Records
from engine.system import namespaces, netfilter, netlink
from engine.system.netlink import Link, Netlink
from engine.wire import networks as wire
from engine.wire.containers import EndpointSettings
from engine.wire.networks import IPAM, IPAMConfig, NetworkCreate, NetworkCreated

logger = logging.getLogger(__name__)

T = TypeVar("T")

_NO_PORTS = Request()

WORKERS = 4
"""Threads that wait for the kernel; more would only queue at its one network lock."""

_TRIES = 16
"""Subnets that are tried for a new network while other engines of this host take the same ones."""


class Process(Protocol):
    """A running container's, held by its pidfd."""

    pid: int
    pidfd: int


class Member:
    """A container that runs: its namespace and its endpoints."""

    __slots__ = ("container_id", "endpoints", "lock", "name", "namespace", "opening", "request", "servers", "target")

    def __init__(self, container_id: str, name: str, servers: Sequence[str]) -> None:
        self.container_id = container_id
        self.name = name
        self.servers = servers
        """Its own name servers; none: the host's."""
        self.namespace = -1
        """Descriptor, the member's own; -1: none was made here (NetworkMode host and none)."""
        self.endpoints: dict[str, EndpointSettings] = {}
        """By network id, in the order in which they came."""
        self.request = Request()
        """Ports that it wants to be reached at."""
        self.target: Target | None = None
        """Where they lead to now."""
        self.opening: asyncio.Future[tuple[Published, ...]] | None = None
        """While it starts: its ports on the way."""
        self.lock = asyncio.Lock()


class Network:
    """A network as it is now."""

    __slots__ = ("encoded", "link", "members", "options", "pools", "record")

    def __init__(self, record: NetworkRecord, options: Options) -> None:
        self.record = record
        self.options = options
        self.link: Link | None = None
        """The bridge, for those of that driver."""
        self.pools: dict[int, AddressPool] = {}
        """By IP version."""
        self.members: dict[str, Member] = {}
        """By container id: every endpoint, also one that is being made."""
        self.encoded: dict[object, bytes] = {}
        """Replies made of it, dropped when it changes; the API's to fill."""

    @property
    def bridge(self) -> str:
        """Name of its link."""
        return self.options.bridge or f"br-{self.record.id[:12]}"

    @property
    def closed(self) -> bool:
        """Whether it has no way out."""
        return self.record.internal or self.options.dummy

    @property
    def rules(self) -> BridgeRules:
        return BridgeRules(
            bridge=self.bridge,
            subnets=tuple(pool.subnet for pool in self.pools.values()),
            internal=self.record.internal,
            icc=self.options.icc,
            masquerade=self.options.masquerade,
        )

    def gateways(self) -> list[IPv4Interface | IPv6Interface]:
        """What the bridge itself is called in its subnets."""
        return [_interface(gateway, subnet.prefixlen) for subnet, gateway, _ in network.pools(self.record)]

    @property
    def lent(self) -> list[IPv4Interface | IPv6Interface]:
        """Addresses that its bridge gives back."""
        return [ip_interface(text) for text in self.record.lent]

    def fill(self) -> None:
        """Its pools, from its record."""
        for subnet, gateway, config in network.pools(self.record):
            reserved = [gateway, *(ip_address(text) for text in config.auxiliary_addresses.values())]
            given_from = ip_network(config.ip_range) if config.ip_range else None
            self.pools[subnet.version] = AddressPool(self.record.name, subnet, reserved, given_from)


class Joined(NamedTuple):
    """What a container that starts gets."""

    path: str | None
    """Its namespace for the OCI runtime; empty: a fresh one without links; None: the host's."""
    endpoints: dict[str, EndpointSettings]
    """By network name."""


class Networks:
    """One engine's."""

    def __init__(self, config: Config, records: Records, events: EventLog) -> None:
        if not network.BRIDGE_NAME.fullmatch(config.bridge):
            raise InvalidParameter(
                f"bridge {config.bridge!r}: the name must be 1 to 15 letters, digits, '_', '.' or '-'"
            )
        self._default_bridge = config.bridge
        self._configured = bridge.configured_subnet(config.bridge_subnet)
        self._store = NetworkStore(records)
        self._events = events
        self._filter = Filter(f"engined-{config.bridge}")  # the alphabet of bridge names is a part of nftables' own
        self._publishing = Publishing(self._filter, self._in_thread, self._reflect)
        self._workers = ThreadPoolExecutor(WORKERS, thread_name_prefix="network")
        self._all: dict[str, Network] = {}
        self._members: dict[str, Member] = {}
        self._changing = asyncio.Lock()
        self._going: dict[str, tuple[Network, asyncio.Task[None]]] = {}
        """Networks that are removed, by id, while the kernel still takes their bridges down."""
        self._taking_down = asyncio.Lock()
        self._called = NameTable()
        self._resolver = Resolver(self._called)
        self.relay: socket.socket | None = None
        """Where connections by IPv6 to published ports come to; the monitor shall pass them on to `filter.RELAYED`. None: this host has no IPv6."""
        self._kernel: Netlink | None = None
        self._putting_back = threading.Lock()
        self._removals: netlink.Removals | None = None
        self._gone: set[str] = set()
        """Networks, by id, whose bridge somebody has deleted."""
        self._returning: asyncio.Task[None] | None = None
        self._stock: Stock | None = None

    async def open(self) -> None:
        """Make or find the bridges, let traffic out. Raises ServerError with the kernel's reason."""
        await self._store.open()
        for record in self._store:
            self._all[record.id] = Network(record, network.options(record))
        default = self.get(BRIDGE)
        default.options = msgspec.structs.replace(default.options, bridge=self._default_bridge)
        try:
            await self._in_thread(self._open)
        except OSError as error:
            raise ServerError(f"bridge {self._default_bridge}: {error.strerror or error}") from error
        await self._publishing.watch()
        try:
            self._removals = netlink.Removals()
        except OSError as error:
            logger.warning("a bridge that somebody deletes will be back only when a container needs it: %s", error)
        else:
            asyncio.get_running_loop().add_reader(self._removals.fileno(), self._removed)

    async def settle(self) -> None:
        """Every container that runs has been restored: what belongs to none of them goes."""
        await self._in_thread(self._plug_again)
        await self._publishing.settle()

    async def close(self, remove: bool) -> None:
        """Let go of the namespaces; with `remove` also take down the bridges that the engine made, and the rules."""
        if self._removals is not None:
            asyncio.get_running_loop().remove_reader(self._removals.fileno())
            self._removals.close()
        self._gone.clear()
        if self._returning is not None:
            await self._returning
        for member in self._members.values():
            _close(member.namespace)
        await self._resolver.close()
        await self._publishing.close()
        for _, going in self._going.values():  # what is not down then is swept now, or by the next daemon
            going.cancel()
        await asyncio.gather(*(going for _, going in self._going.values()), return_exceptions=True)
        await self._in_thread(self._close, remove)
        if self.relay is not None:
            self.relay.close()
        self._members.clear()
        self._workers.shutdown()

    # --- networks -----------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Network]:
        return iter(self._all.values())

    def get(self, text: str) -> Network:
        """By name, id or unique id prefix. Raises NotFound in Docker's words, InvalidParameter when more than one is meant."""
        return self._all[self._store.get(text).id]

    def select(self, filters: Mapping[str, list[str]]) -> list[Network]:
        """Those that a list with these filters shows. Raises InvalidParameter."""
        if not filters:
            return [*self._all.values()]
        return [each for each in self._all.values() if network.matches(each.record, filters, bool(each.members))]

    def name_of(self, mode: str) -> str:
        """The name of the network that a NetworkMode or an id means; what is unknown is given back as it is."""
        if mode in network.DEFAULT_MODES:
            return BRIDGE
        try:
            return self._store.get(mode).name
        except EngineError:
            return mode

    async def create(self, body: NetworkCreate) -> NetworkCreated:
        """A new network. Raises InvalidParameter, Forbidden (predefined; overlap), NotFound (driver), Conflict (name); nothing is kept then."""
        record = network.checked(body)
        async with self._changing:
            if body.check_duplicate:
                self._store.check_duplicate(record.name)
            warning = self._store.warning(record.name)
            made = Network(record, network.options(record))
            if made.options.bridge and any(made.bridge == each.bridge for each in self._all.values()):
                raise Forbidden(f"network {record.name}: bridge name {made.bridge} is already used by another network")
            for each in self._all.values():
                if made.options.parent and made.options.parent == each.options.parent:
                    raise Forbidden(
                        f"network {record.name}: network {each.record.name} is already using parent interface "
                        f"{made.options.parent}"
                    )
            subnets = [pool.subnet for each in self._all.values() for pool in each.pools.values()]
            await self._out_of_the_way(made)
            try:
                await self._in_thread(self._make, made, subnets)
            except OSError as error:
                raise ServerError(f"network {record.name}: {error.strerror or error}") from error
            try:
                await self._store.add(made.record)
            except BaseException:
                await self._in_thread(self._unmake, made)
                raise
            self._all[record.id] = made
        self._publish(made, "create")
        return NetworkCreated(record.id, warning)

    async def _out_of_the_way(self, made: Network) -> None:
        """Wait for removed networks whose bridge is not down yet, when the new one would have its name or an address of its subnets."""
        asked = [ip_network(config.subnet) for config in made.record.ipam.config]
        for found, going in [*self._going.values()]:
            held = [pool.subnet for pool in found.pools.values()]
            if found.bridge == made.bridge or any(
                one.version == other.version and one.overlaps(other) for one in asked for other in held
            ):
                await asyncio.wait([going])

    async def _take_down(self, found: Network) -> None:
        """One at a time: it takes the kernel 20 to 40 ms under the lock that every start of a container needs, too."""
        try:
            async with self._taking_down:
                await self._in_thread(self._unmake, found)
        finally:
            del self._going[found.record.id]

    async def remove(self, text: str) -> None:
        """The network is gone when this returns; its bridge goes soon, and is swept by the next daemon should this one end before.

        Raises NotFound, Forbidden (predefined, or containers are on it).
        """
        async with self._changing:
            found = self.get(text)
            record = found.record
            if record.predefined:
                raise Forbidden(f"{record.name} is a pre-defined network and cannot be removed")
            if found.members:
                raise Forbidden(f"network {record.name} id {record.id} has active endpoints")
            del self._all[record.id]
            try:
                await self._store.remove(record)
            except BaseException:
                self._all[record.id] = found
                raise
            if record.driver == "bridge" and not record.lent:
                self._going[record.id] = found, asyncio.ensure_future(self._take_down(found))
            else:
                await self._in_thread(self._unmake, found)
        self._publish(found, "destroy")

    def shown(self, found: Network) -> wire.Network:
        """The network as clients see it."""
        record = found.record
        ipam, options = record.ipam, record.options
        if record.name == BRIDGE:
            pool = found.pools[4]
            ipam = IPAM(config=[IPAMConfig(subnet=str(pool.subnet), gateway=str(self.gateway))])
            options = _default_options(found.bridge)
        return wire.Network(
            name=record.name,
            id=record.id,
            scope=record.scope,
            driver=record.driver,
            enable_ipv6=record.enable_ipv6,
            ipam=ipam,
            internal=record.internal,
            containers={
                member.container_id: _resource(member.name, member.endpoints[record.id])
                for member in found.members.values()
                if record.id in member.endpoints
            },
            options=options,
            labels=record.labels,
        )

    @property
    def gateway(self) -> IPv4Address:
        """The default bridge's own address."""
        return self._interface.ip

    def _publish(self, found: Network, action: str, **attributes: str) -> None:
        record = found.record
        self._events.publish("network", action, record.id, {**attributes, "name": record.name, "type": record.driver})

    # --- endpoints ----------------------------------------------------------------------------------------------------

    def check(self, container_id: str, name: str, wanted: EndpointSettings, among: Iterable[str]) -> EndpointSettings:
        """What a container on the networks `among` may ask of one more; what is kept of it. Raises as `connect` does for a running one."""
        found = self.get(name)
        record = found.record
        names = {*among}
        if record.name == HOST or HOST in names:
            raise Forbidden(
                f"network {record.name}, container {container_id}: container cannot be disconnected from host network or "
                "connected to host network"
            )
        if (record.name == NONE and names) or NONE in names - {record.name}:
            raise Forbidden(
                f"network {record.name}, container {container_id}: container cannot be connected to multiple networks with one of "
                "the networks in private (none) mode"
            )
        if record.name in names:
            raise Forbidden(f"endpoint of container {container_id} already exists in network {record.name}")
        for version, address in network.wanted_addresses(record, wanted).items():
            found.pools[version].check(address)
        network.link_local_addresses(record, wanted)
        return _intent(wanted, record, container_id)

    async def join(
        self,
        container_id: str,
        name: str,
        wanted: Mapping[str, EndpointSettings],
        primary: str,
        mac: str = "",
        servers: Sequence[str] = (),
        request: Request = _NO_PORTS,
    ) -> Joined:
        """Namespace and endpoints for a container that starts; `mac` is for its endpoint on the network `primary`, which comes first.

        `servers`: the container's own name servers, asked for what is no container's name.

        Its published ports open behind this, while the rest of the start is prepared: `opened` waits for them, before the container runs.

        Raises NotFound for a network that is not there, InvalidParameter and Forbidden for addresses, ServerError when they or the
        ports of a bridge are exhausted or the kernel refuses.
        """
        if container_id in self._members:
            await self.leave(container_id)
        order = sorted(wanted.items(), key=lambda item: item[0] != primary)
        chosen = [(self._meant(key, settings), settings) for key, settings in order]
        member = Member(container_id, name, servers)
        async with contextlib.AsyncExitStack() as undo:
            plans = []
            for found, settings in chosen:
                given = self._given(found, settings, container_id, mac if found.record.name == primary else "")
                undo.callback(self._take_back, found, given)
                found.members[container_id] = member
                undo.callback(found.members.pop, container_id, None)
                plans.append((found, given))
            linked = [(found, given) for found, given in plans if found.pools]
            if linked:
                with _told(plans[0][0], container_id):
                    member.namespace, ids = await self._finished(_close_built, self._build, linked)
                undo.callback(_close, member.namespace)
            else:
                ids = []
            numbers = iter(ids)
            for found, given in plans:
                endpoint_id = next(numbers) if found.pools else secrets.token_hex(32)
                member.endpoints[found.record.id] = msgspec.structs.replace(given, endpoint_id=endpoint_id)
            member.request = request
            member.target = self._target(member.endpoints.values())
            await self._serve_names(member)
            self._members[container_id] = member
            if member.target is not None:
                publishing = self._publishing.publish(container_id, name, member.target, request)
                member.opening = asyncio.ensure_future(publishing)
            undo.pop_all()
        for found, _ in plans:
            self._appeared(found, member)
        path = None if any(found.record.name == HOST for found, _ in plans) else _path(member.namespace)
        return Joined(path, {found.record.name: member.endpoints[found.record.id] for found, _ in plans})

    async def opened(self, container_id: str) -> tuple[Published, ...]:
        """The published ports of a container that has joined, open: they are on the way since then. Raises ServerError when one can't be had."""
        member = self._members.get(container_id)
        if member is None or member.opening is None:
            return ()
        ports = await asyncio.shield(member.opening)
        member.opening = None
        return ports

    async def leave(self, container_id: str) -> None:
        """Take back what a container had here. One that has nothing is fine."""
        member = self._members.get(container_id)
        if member is None:
            return
        async with member.lock:
            if self._members.pop(container_id, None) is None:
                return
            if member.opening is not None:
                await asyncio.gather(member.opening, return_exceptions=True)
            await self._publishing.withdraw(container_id)  # before another one can have its addresses
            ids = []
            for network_id, settings in member.endpoints.items():
                found = self._all.get(network_id)
                if found is not None:
                    ids.append(settings.endpoint_id)
                    self._disappeared(found, member, settings)
            self._resolver.close_for(container_id)
            _close(member.namespace)
            if ids and member.namespace >= 0 and self._stock is not None:
                self._stock.released(ids)

    async def connect(
        self, container_id: str, text: str, wanted: EndpointSettings, process: Process
    ) -> EndpointSettings:
        """One more endpoint for a container that runs. Raises as `check` and `join` do; NotFound when it has no networks of its own."""
        member = self._member(container_id)
        async with member.lock:
            self._member(container_id)
            found = self.get(text)
            record = found.record
            self.check(container_id, record.id, wanted, self._names(member))
            given = self._given(found, wanted, container_id, "")
            async with contextlib.AsyncExitStack() as undo:
                undo.callback(self._take_back, found, given)
                found.members[container_id] = member
                undo.callback(found.members.pop, container_id, None)
                endpoint_id = secrets.token_hex(32)
                if found.pools:
                    with _told(found, container_id):
                        self._find_namespace(member, process)
                        endpoint_id = await self._in_thread(self._plug, member.namespace, found, given)
                        undo.push_async_callback(self._leave_again, member, found, endpoint_id, given.mac_address)
                        await self._reroute(member, [*member.endpoints.values(), given])
                member.endpoints[record.id] = given = msgspec.structs.replace(given, endpoint_id=endpoint_id)
                undo.callback(member.endpoints.pop, record.id)
                await self._serve_names(member)
                undo.pop_all()
            self._appeared(found, member)
            await self._republish(member)
            return given

    async def _leave_again(self, member: Member, found: Network, endpoint_id: str, mac: str) -> None:
        """A connect has failed half-way: its link goes, and the routes are those of the endpoints that there were."""
        await self._in_thread(self._unplug, member.namespace, found, endpoint_id, mac)
        await self._reroute(member, member.endpoints.values())

    async def disconnect(self, container_id: str, text: str) -> None:
        """Take one endpoint from a container that runs. Raises Forbidden when it has none there."""
        member = self._member(container_id)
        async with member.lock:
            self._member(container_id)
            found = self.get(text)
            settings = member.endpoints.get(found.record.id)
            self.check_connected(container_id, found.record.id, self._names(member))
            assert settings is not None
            if found.pools:
                left = [each for each in member.endpoints.values() if each is not settings]
                with _told(found, container_id):
                    await self._in_thread(
                        self._unplug, member.namespace, found, settings.endpoint_id, settings.mac_address
                    )
                del member.endpoints[found.record.id]
                try:
                    await self._republish(member)
                finally:
                    self._disappeared(found, member, settings)
                self._resolver.forward(container_id, self._leads_out(member))
                with _told(found, container_id):
                    await self._reroute(member, left)
            else:
                del member.endpoints[found.record.id]
                self._disappeared(found, member, settings)

    def check_connected(self, container_id: str, text: str, among: Iterable[str]) -> str:
        """The network's name. Raises Forbidden unless a container on the networks `among` can leave it."""
        record = self.get(text).record
        if record.name == HOST:
            raise Forbidden(
                f"container {container_id} cannot be disconnected from host network or connected to host network"
            )
        if record.name not in among:
            raise Forbidden(f"container {container_id} is not connected to the network {record.name}")
        return record.name

    async def _republish(self, member: Member) -> None:
        """Its ports follow the endpoint by which it reaches the world; without one it has none."""
        target = self._target(member.endpoints.values())
        if target == member.target:
            return
        await self._publishing.withdraw(member.container_id)
        member.target = target
        if target is not None:
            try:
                await self._publishing.publish(member.container_id, member.name, target, member.request)
            except ServerError as error:  # the network itself has changed as it was asked to
                logger.warning("container %s: %s", member.container_id, error.message)

    def ports_of(self, container_id: str) -> tuple[Published, ...]:
        """What a container that runs has published."""
        return self._publishing.of(container_id)

    async def restore(
        self,
        container_id: str,
        name: str,
        endpoints: Mapping[str, EndpointSettings],
        process: Process,
        servers: Sequence[str] = (),
        request: Request = _NO_PORTS,
        ports: Sequence[Published] = (),
    ) -> None:
        """Know again the endpoints of a container that ran on while no daemon was there. Its address is its own even outside today's subnet."""
        if container_id in self._members:
            return
        member = Member(container_id, name, servers)
        for settings in endpoints.values():
            found = self._all.get(settings.network_id)
            if found is None or not settings.endpoint_id:
                continue
            for address in _addresses(settings):
                try:
                    if address.version in found.pools:
                        found.pools[address.version].claim(address)
                except EngineError as error:
                    logger.warning("container %s keeps its address: %s", container_id, error.message)
            member.endpoints[found.record.id] = settings
            found.members[container_id] = member
            if found.pools and member.namespace < 0:
                try:
                    member.namespace = namespaces.of_process(process.pid, process.pidfd, "net")
                except OSError as error:  # its end is on the way, and takes all this back
                    logger.info("container %s: its namespace: %s", container_id, error)
        if not member.endpoints:
            return
        self._members[container_id] = member
        for network_id in member.endpoints:
            self._name(self._all[network_id], member)
        member.request = request
        member.target = self._target(member.endpoints.values())
        if member.target is not None:
            self._publishing.restore(container_id, member.target, ports)
        async with member.lock:
            try:
                await self._serve_names(member, again=True)
            except ServerError as error:
                logger.warning("%s", error.message)

    def renamed(self, container_id: str, name: str) -> None:
        """Networks show a running container by its name."""
        member = self._members.get(container_id)
        if member is not None:
            member.name = name
            for network_id in member.endpoints:
                self._all[network_id].encoded.clear()
                self._name(self._all[network_id], member)

    def spare(self, endpoints: Mapping[str, EndpointSettings], *, no_more: bool = False) -> None:
        """The static addresses of a container's settings are given to others only when they ask for them: it may start again."""
        for key, settings in endpoints.items():
            if settings.ipam_config is None:
                continue
            with contextlib.suppress(EngineError):
                found = self._meant(key, settings)
                for version, address in network.wanted_addresses(found.record, settings).items():
                    pool = found.pools[version]
                    (pool.spare_no_more if no_more else pool.spare)(address)

    def _appeared(self, found: Network, member: Member) -> None:
        """An endpoint is configured: of a container whose process does not run yet, or that was connected while it runs."""
        found.encoded.clear()
        self._name(found, member)
        self._publish(found, "connect", container=member.container_id)

    def _disappeared(self, found: Network, member: Member, settings: EndpointSettings) -> None:
        """An endpoint has gone, or goes with its namespace at once."""
        found.members.pop(member.container_id, None)
        self._called.remove(settings.endpoint_id)
        self._take_back(found, settings)
        found.encoded.clear()
        self._publish(found, "disconnect", container=member.container_id)

    # --- names --------------------------------------------------------------------------------------------------------

    def _name(self, found: Network, member: Member) -> None:
        """Others on this network find the container by its name and aliases. Predefined networks have no names."""
        settings = member.endpoints[found.record.id]
        if found.record.predefined:
            return
        links = (text.partition(":") for text in settings.links or ())
        self._called.add(
            settings.endpoint_id,
            network_id=found.record.id,
            network=found.record.name,
            container_id=member.container_id,
            names=[member.name, *(settings.aliases or ())],
            addresses=_addresses(settings),
            links={alias or target: target for target, _, alias in links},
        )

    async def _serve_names(self, member: Member, *, again: bool = False) -> None:
        """The resolver for a container on a user's network; `again`: it has run on without a daemon. Raises ServerError."""
        named = any(not self._all[each].record.predefined for each in member.endpoints)
        if named and member.namespace >= 0:
            await self._resolver.open_for(
                member.container_id,
                member.namespace,
                servers=member.servers,
                forward=self._leads_out(member),
                again=again,
            )

    def _leads_out(self, member: Member) -> bool:
        return any(not self._all[each].closed for each in member.endpoints)

    # --- what an endpoint is given --------------------------------------------------------------------------------------

    def _meant(self, key: str, settings: EndpointSettings) -> Network:
        """The network of an entry in a container's settings: by its id, else by its name, for one that was made anew. Raises NotFound."""
        if settings.network_id in self._all:
            return self._all[settings.network_id]
        return self.get(self.name_of(key))

    def _member(self, container_id: str) -> Member:
        member = self._members.get(container_id)
        if member is None:
            raise NotFound(f"container {container_id} has left its networks")
        return member

    def _names(self, member: Member) -> list[str]:
        return [self._all[each].record.name for each in member.endpoints]

    def _given(self, found: Network, wanted: EndpointSettings, container_id: str, mac: str) -> EndpointSettings:
        """Addresses out of the pools, and all that follows from them."""
        record = found.record
        static = network.wanted_addresses(record, wanted)
        network.link_local_addresses(record, wanted)
        taken: dict[int, Address] = {}
        try:
            for version, pool in found.pools.items():
                if version in static:
                    pool.claim(static[version])
                    taken[version] = static[version]
                else:
                    taken[version] = pool.take()
        except BaseException:
            for version, address in taken.items():
                found.pools[version].give(address)
            raise
        settings = _intent(wanted, record, container_id)
        if not taken:
            return settings
        gateways = {} if found.closed else self._gateways_of(found)
        first = taken[4]
        assert isinstance(first, IPv4Address)
        return msgspec.structs.replace(
            settings,
            gateway=gateways.get(4, ""),
            ip_address=str(first),
            ip_prefix_len=found.pools[4].subnet.prefixlen,
            ipv6_gateway=gateways.get(6, ""),
            global_ipv6_address=str(taken.get(6, "")),
            global_ipv6_prefix_len=found.pools[6].subnet.prefixlen if 6 in taken else 0,
            mac_address=mac.lower().replace("-", ":") or mac_address(first),
        )

    def _gateways_of(self, found: Network) -> dict[int, str]:
        if found.record.name == BRIDGE:
            return {4: str(self.gateway)}
        return {subnet.version: str(gateway) for subnet, gateway, _ in network.pools(found.record)}

    def _take_back(self, found: Network, settings: EndpointSettings) -> None:
        for address in _addresses(settings):
            if address.version in found.pools:
                found.pools[address.version].give(address)

    def _target(self, endpoints: Iterable[EndpointSettings]) -> Target | None:
        """The endpoint that published ports lead to: that of the network it reaches the world by, when the engine is the router there."""
        chosen = next((each for each in self._ranked(endpoints) if each.gateway), None)
        found = self._all.get(chosen.network_id) if chosen is not None else None
        if chosen is None or found is None or found.record.driver != "bridge":
            return None
        sixth = IPv6Address(chosen.global_ipv6_address) if chosen.global_ipv6_address else None
        return Target(chosen.endpoint_id, (IPv4Address(chosen.ip_address), sixth), found.options.host_binding)

    def _default_gateways(self, endpoints: Iterable[EndpointSettings]) -> list[Address]:
        ranked = self._ranked(endpoints)
        chosen = (
            next((each.gateway for each in ranked if each.gateway), ""),
            next((each.ipv6_gateway for each in ranked if each.ipv6_gateway), ""),
        )
        return [ip_address(text) for text in chosen if text]

    def _ranked(self, endpoints: Iterable[EndpointSettings]) -> list[EndpointSettings]:
        """Docker's rule: a network that leads out, rather one with both IP versions, else the first by name."""

        def rank(settings: EndpointSettings) -> tuple[bool, str]:
            found = self._all.get(settings.network_id)
            return not (settings.gateway and settings.ipv6_gateway), found.record.name if found is not None else ""

        return sorted(endpoints, key=rank)

    def _inner(self, found: Network, settings: EndpointSettings) -> Interface:
        addresses = [_interface(ip_address(settings.ip_address), settings.ip_prefix_len)]
        if settings.global_ipv6_address:
            addresses.append(_interface(ip_address(settings.global_ipv6_address), settings.global_ipv6_prefix_len))
        for address in network.link_local_addresses(found.record, settings):
            addresses.append(_interface(address, 16 if address.version == 4 else 64))
        return Interface(settings.mac_address, tuple(addresses), found.options.mtu)

    def _find_namespace(self, member: Member, process: Process) -> None:
        """The namespace that the runtime made (NetworkMode none), or that a restart of the daemon lost sight of."""
        if member.namespace < 0:
            member.namespace = namespaces.of_process(process.pid, process.pidfd, "net")

    async def _reroute(self, member: Member, endpoints: Iterable[EndpointSettings]) -> None:
        gateways = self._default_gateways(endpoints)
        if gateways:
            await self._in_thread(sandboxes.route, member.namespace, gateways)

    # --- bridges that somebody deletes ----------------------------------------------------------------------------------

    def _removed(self) -> None:
        """Links of this host are gone. Those of the engine's own making shall be back; what the host's owner lent is for him to make anew."""
        assert self._removals is not None
        indexes = self._removals.take()
        for found in self._all.values():
            link = found.link
            if (
                link is not None
                and (indexes is None or link.ifindex in indexes)
                and link.alias == self._alias_of(found)
            ):
                self._gone.add(found.record.id)
        if self._gone and self._returning is None:
            self._returning = asyncio.ensure_future(self._put_back())

    async def _put_back(self) -> None:
        try:
            while self._gone:
                async with self._changing:  # or one that is removed meanwhile would leave its bridge
                    found = self._all.get(self._gone.pop()) if self._gone else None
                    if found is not None:
                        try:
                            await self._in_thread(self._port, found)
                        except (EngineError, OSError) as error:
                            logger.error("network %s: its bridge is gone: %s", found.record.name, error)
        finally:
            self._returning = None

    # --- in threads ---------------------------------------------------------------------------------------------------

    async def _in_thread(self, function: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._workers, function, *arguments)

    async def _finished(self, unwanted: Callable[[T], None], function: Callable[..., T], *arguments: object) -> T:
        """`_in_thread`; when the caller is cancelled meanwhile, `unwanted` is given what the thread still brings."""
        running = asyncio.ensure_future(self._in_thread(function, *arguments))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:

            def drop(done: asyncio.Future[T]) -> None:
                if not done.cancelled() and done.exception() is None:
                    unwanted(done.result())

            running.add_done_callback(drop)
            raise

    @property
    def _links(self) -> Netlink:
        assert self._kernel is not None, "the networks are not open"
        return self._kernel

    def _build(self, plans: list[tuple[Network, EndpointSettings]]) -> tuple[int, list[str]]:
        """A namespace with all these endpoints; the caller's descriptor, and the endpoints' ids."""
        gateways = self._default_gateways(settings for _, settings in plans)
        first, settings = plans[0]
        assert self._stock is not None
        ids = []
        if first.record.driver == "bridge":
            interface = self._inner(first, settings)
            sandbox = self._stock.take(self._port(first), interface.mtu)
            try:
                sandbox.configure(interface, gateways if len(plans) == 1 else ())
            except BaseException:
                sandbox.close()
                raise
            namespace = sandbox.detach()
            ids.append(sandbox.endpoint_id)
            self._isolate(first, sandbox.endpoint_id)
        else:
            namespace = sandboxes.empty()
        try:
            for number, (found, given) in enumerate(plans):
                if number >= len(ids):
                    ids.append(self._plug(namespace, found, given, f"eth{number}"))
            if gateways and (len(plans) > 1 or first.record.driver != "bridge"):
                sandboxes.route(namespace, gateways)
        except BaseException:
            _close(namespace)
            raise
        return namespace, ids

    def _plug(self, namespace: int, found: Network, given: EndpointSettings, name: str = "") -> str:
        name = name or sandboxes.free_name(namespace)
        interface = self._inner(found, given)
        if found.record.driver == "bridge":
            endpoint_id = sandboxes.plug(self._links, namespace, self._port(found), name, interface)
            self._isolate(found, endpoint_id)
            return endpoint_id
        return macvlan.plug(self._links, namespace, found.record.name, found.options, name, interface)

    def _port(self, found: Network) -> Link:
        """The bridge that endpoints plug into: put back, with all that were on it, when somebody has deleted it.

        Raises OSError, ServerError, Forbidden when that can't be.
        """
        # Asked again in the end: the notice of one that went while it was put back named a link that nobody knew.
        while not _is_there(found.link):
            with self._putting_back:
                if not _is_there(found.link):
                    if found.record.name == BRIDGE:
                        link, _ = bridge.open_default(self._links, found.bridge, self._interface)
                    else:
                        interfaces, mtu = found.gateways(), found.options.mtu
                        link, _ = bridge.open_user(self._links, found.bridge, self._alias, interfaces, mtu)
                    self._filter.returned(found.bridge)
                    self._plug_members(found, link)
                    found.link = link  # from now on nobody waits for this one to be done
                    logger.warning("network %s: its bridge %s was gone and is back", found.record.name, found.bridge)
        assert found.link is not None
        return found.link

    def _plug_again(self) -> None:
        """Containers that ran on without a daemon are on their bridges, also on one that had to be made anew."""
        for found in [*self._all.values()]:
            if found.link is not None:
                self._plug_members(found, found.link)

    def _plug_members(self, found: Network, link: Link) -> None:
        endpoints = [member.endpoints.get(found.record.id) for member in [*found.members.values()]]
        ids = [settings.endpoint_id for settings in endpoints if settings is not None]
        changes = (netlink.change_link(sandboxes.host_end(each), master=link.ifindex) for each in ids)
        for endpoint_id, failure in zip(ids, self._links.outcomes(changes), strict=True):
            try:
                if failure is not None:
                    raise failure
                self._isolate(found, endpoint_id)
                if bridges_call_netfilter():
                    self._reflect(endpoint_id)
            except OSError as error:
                if error.errno != errno.ENODEV:  # its container has ended
                    logger.warning("network %s: %s", found.record.name, error)

    def _isolate(self, found: Network, endpoint_id: str) -> None:
        """Without icc neighbours are kept apart by the bridge itself, unless it asks the rules about every frame."""
        if not found.options.icc and not bridges_call_netfilter():
            self._links.apply(netlink.change_port(sandboxes.host_end(endpoint_id), isolated=True))

    def _reflect(self, endpoint_id: str) -> None:
        self._links.apply(netlink.change_port(sandboxes.host_end(endpoint_id), hairpin=True))

    def _unplug(self, namespace: int, found: Network, endpoint_id: str, mac: str) -> None:
        if found.record.driver == "bridge":
            sandboxes.unplug(self._links, endpoint_id)
        elif namespace >= 0:
            sandboxes.remove_by_mac(namespace, mac)

    def _alias_of(self, found: Network) -> str:
        """ifalias of its bridge, when that is of the engine's making."""
        return bridge.ALIAS if found.record.name == BRIDGE else self._alias

    @property
    def _alias(self) -> str:
        """ifalias of users' bridges: who made them, by an id that stays with the records."""
        return f"{bridge.ALIAS} {self._store.get(BRIDGE).id[:12]}"

    def _open(self) -> None:
        links = self._kernel = Netlink()
        default = self.get(BRIDGE)
        default.link, self._interface = bridge.open_default(links, self._default_bridge, self._configured)
        default.pools[4] = AddressPool(BRIDGE, self._interface.network, (self._interface.ip,))
        users = [each for each in self._all.values() if each.record.driver == "bridge" and each is not default]
        overlaid = [each for each in self._all.values() if each.record.parent_made]
        bridge.sweep(links, self._alias, {each.bridge for each in users} | {each.options.parent for each in overlaid})
        for each in self._all.values():
            each.fill()
        for each in users:
            try:
                each.link, _ = bridge.open_user(links, each.bridge, self._alias, each.gateways(), each.options.mtu)
            except (EngineError, OSError) as error:
                logger.error("network %s: its bridge %s: %s", each.record.name, each.bridge, error)
        for each in overlaid:
            try:
                macvlan.open_parent(links, each.record.name, each.options, self._alias)
            except (EngineError, OSError) as error:
                logger.error("%s", error)
        bridge.forward(ipv6=any(6 in each.pools for each in users))
        try:
            self.relay = relay_socket()
            port = self.relay.getsockname()[1] if self.relay is not None else 0
            self._filter.open((each.rules for each in (default, *users)), port)
        except netfilter.NetfilterError as error:
            logger.warning(
                "bridge %s: no masquerade, containers do not reach beyond this host: %s", self._default_bridge, error
            )
        self._stock = Stock(links, lambda: self._port(default))

    def _make(self, made: Network, subnets: list[Subnet]) -> None:
        """The link of a new network, with a free subnet where the user gave none. On failure nothing is left."""
        record = made.record
        for given in map(ip_network, (config.subnet for config in record.ipam.config)):
            if any(given.version == other.version and given.overlaps(other) for other in subnets):
                raise Forbidden(
                    f"network {record.name}: subnet {given}: Pool overlaps with other one on this address space"
                )
        if record.enable_ipv6 and not any(":" in config.subnet for config in record.ipam.config):
            made.record = network.with_pool(record, unique_local_subnet(self._store.get(BRIDGE).id, record.id))
        if 4 in record.chosen_by_user:
            self._check_host(made)
            self._make_with(network.with_gateways(made.record), made)
            return
        avoided = [span(each) for each in subnets if each.version == 4]
        for _ in range(_TRIES):
            subnet = free_subnet([*avoided, *bridge.taken(self._links)], NETWORK_POOLS, NETWORK_PREFIX)
            if subnet is None:
                break
            before = made.record
            self._make_with(network.with_gateways(network.with_pool(before, subnet)), made)
            if made.link is None or not self._taken_meanwhile(made.link, subnet):
                return
            # Another engine of this host chose the same one at this moment; the one whose link is older keeps it.
            self._unmake(made)
            made.record = before
            avoided.append(span(subnet))
        raise ServerError(
            f"network {record.name}: could not find an available, non-overlapping IPv4 address pool among the defaults"
        )

    def _make_with(self, record: NetworkRecord, made: Network) -> None:
        made.record = record
        made.pools.clear()
        made.fill()
        if record.driver == "macvlan":
            parent_made = macvlan.open_parent(self._links, record.name, made.options, self._alias)
            made.record = msgspec.structs.replace(record, parent_made=parent_made)
            return
        made.link, lent = bridge.open_user(self._links, made.bridge, self._alias, made.gateways(), made.options.mtu)
        made.record = msgspec.structs.replace(record, lent=tuple(map(str, lent)))
        try:
            if 6 in made.pools:
                bridge.forward(ipv6=True)
            if netfilter.available():
                self._filter.add_network(made.rules)
        except netfilter.NetfilterError as error:
            bridge.remove(self._links, made.bridge, self._alias, lent)
            raise ServerError(f"network {record.name}: its rules: {error}") from error
        except BaseException:
            bridge.remove(self._links, made.bridge, self._alias, lent)
            raise

    def _check_host(self, made: Network) -> None:
        """A user's subnet may be part of a wider route, but not the one of another link: that would cut the host off."""
        if made.record.driver != "bridge":
            return
        own = self._links.link(made.bridge)
        for config in made.record.ipam.config:
            subnet = ip_network(config.subnet)
            if subnet.version == 4 and self._on_other_link(subnet, lambda index: own is None or index != own.ifindex):
                raise Forbidden(
                    f"network {made.record.name}: subnet {subnet}: Pool overlaps with other one on this address space: a link "
                    "of this host has an address in it"
                )

    def _taken_meanwhile(self, link: Link, subnet: Subnet) -> bool:
        return self._on_other_link(subnet, lambda index: index < link.ifindex)

    def _on_other_link(self, subnet: Subnet, which: Callable[[int], bool]) -> bool:
        low, high = span(subnet)
        return any(first <= high and low <= last and which(index) for first, last, index in self._links.address_spans())

    def _unmake(self, found: Network) -> None:
        if found.record.driver == "macvlan":
            if found.record.parent_made:
                try:
                    macvlan.remove_parent(self._links, found.options.parent, self._alias)
                except OSError as error:
                    logger.warning("network %s: %s", found.record.name, error)
            return
        try:
            bridge.remove(self._links, found.bridge, self._alias, found.lent)
        except OSError as error:
            logger.warning("bridge %s: %s", found.bridge, error)
        if netfilter.available():
            try:
                self._filter.remove_network(found.bridge)
            except netfilter.NetfilterError as error:
                logger.warning("bridge %s: its rules stay: %s", found.bridge, error)

    def _close(self, remove: bool) -> None:
        if self._stock is not None:
            self._stock.close()
        if self._kernel is None:
            return
        if remove:
            alias = self._alias
            bridge.sweep(self._kernel, alias, {each.bridge for each in self._all.values()})
            for each in self._all.values():
                if each.record.parent_made:
                    self._unmake(each)
                if each.record.driver == "bridge":
                    try:
                        bridge.remove(self._kernel, each.bridge, self._alias_of(each), each.lent)
                    except OSError as error:
                        logger.warning("bridge %s: %s", each.bridge, error)
        try:
            self._filter.close(remove)
        except netfilter.NetfilterError as error:
            logger.warning("bridge %s: rules stay: %s", self._default_bridge, error)
        self._kernel.close()
        self._kernel = None


def _intent(wanted: EndpointSettings, record: NetworkRecord, container_id: str) -> EndpointSettings:
    """What was asked for and no more; on users' networks a container is known by the short form of its id, too."""
    aliases = wanted.aliases
    if not record.predefined and container_id[:12] not in (aliases or ()):
        aliases = [*(aliases or ()), container_id[:12]]
    return EndpointSettings(ipam_config=wanted.ipam_config, links=wanted.links, aliases=aliases, network_id=record.id)


def asked_for(settings: EndpointSettings) -> EndpointSettings:
    """What stays of an endpoint when its container has ended."""
    return EndpointSettings(
        ipam_config=settings.ipam_config,
        links=settings.links,
        aliases=settings.aliases,
        network_id=settings.network_id,
    )


def _resource(name: str, settings: EndpointSettings) -> wire.EndpointResource:
    return wire.EndpointResource(
        name=name,
        endpoint_id=settings.endpoint_id,
        mac_address=settings.mac_address,
        ipv4_address=f"{settings.ip_address}/{settings.ip_prefix_len}" if settings.ip_address else "",
        ipv6_address=f"{settings.global_ipv6_address}/{settings.global_ipv6_prefix_len}"
        if settings.global_ipv6_address
        else "",
    )


def _is_there(link: Link | None) -> bool:
    """Whether the link of that name is the one that it was, asked without the kernel's lock of links."""
    try:
        return link is not None and socket.if_nametoindex(link.name) == link.ifindex
    except OSError:
        return False


def _default_options(name: str) -> dict[str, str]:
    known = {
        "bridge.default_bridge": "true",
        "bridge.enable_icc": "true",
        "bridge.enable_ip_masquerade": "true",
        "bridge.host_binding_ipv4": "0.0.0.0",
        "bridge.name": name,
        "driver.mtu": "1500",
    }
    return {
        f"{prefix}.{key}": value for prefix in ("com.docker.network", "engine.network") for key, value in known.items()
    }


def _addresses(settings: EndpointSettings) -> list[Address]:
    return [ip_address(text) for text in (settings.ip_address, settings.global_ipv6_address) if text]


def _interface(address: IPv4Address | IPv6Address, prefix: int) -> IPv4Interface | IPv6Interface:
    return IPv4Interface((address, prefix)) if isinstance(address, IPv4Address) else IPv6Interface((address, prefix))


@contextlib.contextmanager
def _told(found: Network, container_id: str) -> Iterator[None]:
    """The kernel's refusals, with the names of network and container."""
    where = f"network {found.record.name}, container {container_id}"
    try:
        yield
    except BridgeFull as error:
        raise ServerError(f"{where}: {error.strerror}; a bridge takes no more containers than that") from error
    except OSError as error:
        raise ServerError(f"{where}: {error.strerror or error}") from error


def _path(namespace: int) -> str:
    """For the OCI runtime, which another process starts: valid while the descriptor is open."""
    return f"/proc/{os.getpid()}/fd/{namespace}" if namespace >= 0 else ""


def _close(namespace: int) -> None:
    if namespace >= 0:
        os.close(namespace)


def _close_built(built: tuple[int, list[str]]) -> None:
    _close(built[0])
