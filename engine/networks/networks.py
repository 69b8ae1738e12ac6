"""The networks of the engine: which there are, created and removed, found and shown.

A `Network` (`endpoints.py`) is a record, its pools and its link on this host. It is in `by_id` from
the moment its row is written until its row is deleted. Its link is made before, and removed after.

Owns: `by_id`, the drivers and their threads (`drivers.py`), the tasks that take removed links down.
Runs on the event loop, except what waits for the kernel.
Locks, in the order in which they are taken:
1. `_changing`: the set of networks (create, remove, a deleted bridge that is made again).
2. `_taking_down`: one removed network's links at a time. Threads then take
   `BridgeDriver._putting_back`, `Filter._lock` and a netlink socket's lock, in this order. No
   coroutine waits for a sandbox's lock while it holds `_changing`. `create` and `remove` are
   finished even if the caller is cancelled.

Not here: containers on networks (`attachments.py`), the rules of a body (`network.py`), links
(`drivers.py`). Raises: error kinds that name the network; a failure undoes all.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection, Iterator, Mapping
from ipaddress import ip_network
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from engine.common import network_rules
from engine.common.network_rules import Pool, Subnet, parsed_mark
from engine.common.pruning import OnlyOne, Selection
from engine.common.times import rfc3339
from engine.config import Config
from engine.errors import Conflict, EngineError, Forbidden, InvalidParameter, NotFound, ServerError, words
from engine.events import EventLog
from engine.networks import endpoints, requested
from engine.networks import network as rules
from engine.networks.bridge.default import configured, default_options
from engine.networks.bridge.repair import Repair
from engine.networks.dns.forwarding import HostServers
from engine.networks.dns.names import NameTable
from engine.networks.drivers import Drivers, PoolsExhausted, Workers
from engine.networks.endpoints import Network
from engine.networks.filter import Entries
from engine.networks.firewalld import Firewalld
from engine.networks.network import BRIDGE, NONE, NetworkRecord, NetworkStore
from engine.networks.remote.driver import RemoteDriver
from engine.networks.remote.endpoints import RemoteEndpoints
from engine.networks.remote.ipam import RemoteIpam
from engine.networks.serving import Serving
from engine.plugins.client import Refused
from engine.plugins.registry import Plugins
from engine.storage.records import Records
from engine.system.system_bus import SystemBus
from engine.system.tasks import spawn
from engine.system.threads import uninterrupted
from engine.system.user_namespaces import IdMap
from engine.wire import networks as wire
from engine.wire.containers import EndpointSettings
from engine.wire.networks import (
    ConfigReference,
    IPAMStatus,
    NetworkCreate,
    NetworkCreated,
    NetworkStatus,
    SubnetStatus,
)

if TYPE_CHECKING:
    from engine.monitor.client import Monitor
    from engine.networks.overlay.overlays import Keeper, Overlays

_log = logging.getLogger(__name__)

_MOST = (1 << 64) - 1
"""The largest number of addresses that replies have."""


class Networks:
    """One engine's."""

    def __init__(
        self,
        config: Config,
        records: Records,
        events: EventLog,
        plugins: Plugins,
        bus: SystemBus,
        ids: IdMap | None = None,
        monitor: Monitor | None = None,
    ) -> None:
        """`bus`: for firewalld. `ids`: see `namespaces.new_network`. `monitor`: holds what is to
        outlive this daemon; it is open before containers are restored.
        """
        if not rules.BRIDGE_NAME.fullmatch(config.bridge):
            raise InvalidParameter(
                f"bridge {config.bridge!r}: the name must be 1 to 15 letters, digits, '_', '.' or '-'"
            )
        self.default = configured(config)
        self._default_bridge = config.bridge
        self._host_gateways = config.host_gateways
        self._default_options = default_options(config.network_opts)
        self.host_servers = HostServers(Path(config.resolv_conf)) if config.resolv_conf else HostServers()
        """For this package, too."""
        self._store = NetworkStore(records)
        self._events = events
        self.workers = Workers()
        pools = [Pool.parse(each) for each in config.address_pools]
        self.drivers = Drivers(
            *(self.default, pools, config.firewall_mark),
            own_rules=config.firewall == "own",
            no_rules=config.firewall == "none",
            forwards=config.ip_forward,
            trunks=config.bridge_trunks,
            entries=Entries(config.allow_direct_routing, *parsed_mark(config.bridge_accept_mark)),
            ids=ids,
        )
        self.serving = Serving(monitor, active=config.firewall == "none")
        """For this package, too."""
        self._leaves_firewalls = config.firewall != "auto"
        self._firewalld = Firewalld(bus, lambda: self.drivers.filter.bridges, self.drivers.firewall.told_of_firewalld)
        self.by_id: dict[str, Network] = {}
        """For this package to read."""
        plugins.users.append(self.users)
        self.remote = RemoteDriver(plugins)
        self.ipam = RemoteIpam(plugins)
        self.remote_endpoints = RemoteEndpoints(
            *(self.remote, self.ipam, records, self.workers.run),
            *(lambda: self.drivers.kernel, config.run / "netns"),
        )
        """For this package, too."""
        self._between: dict[str, Network] = {}
        """Networks that a plugin is making or deleting, by id: no list has them, but their names
        and subnets are taken. The plugin is called without `_changing`, as it may hang.
        """
        self.names = NameTable()
        """For this package, too."""
        self.keeper: Keeper | None = monitor
        """Holds the namespaces of a swarm's networks for the next daemon."""
        self._overlays: Overlays | None = None
        self._changing = asyncio.Lock()
        self._going: dict[str, tuple[Network, asyncio.Task[None]]] = {}
        """Removed networks, by id, whose bridge the kernel is still taking down."""
        self._taking_down = asyncio.Lock()
        self._pruning = OnlyOne()
        self._repair: Repair | None = None

    async def open(self) -> None:
        """Create or find the bridges, enable outgoing traffic.

        Raises ServerError with the kernel's reason.
        """
        await self._store.open()
        loop = asyncio.get_running_loop()
        if not self._leaves_firewalls:
            self.drivers.firewall.on_firewalld = lambda: loop.call_soon_threadsafe(self._firewalld.look)
            self.drivers.filter.changed = lambda: loop.call_soon_threadsafe(self._firewalld.changed)
        try:
            await self.workers.run(self._open)
        except OSError as error:
            raise ServerError(f"bridge {self._default_bridge}: {error.strerror or error}") from error
        try:
            self._repair = Repair(
                self.drivers.bridges, self.by_id, self._changing, self.workers.run, self._links_removed
            )
        except OSError as error:
            _log.warning("a deleted bridge will be restored only when a container needs it: %s", words(error))
        await self._firewalld.settled()

    @property
    def overlays(self) -> Overlays:
        """The networks of the swarm on this node. An engine outside of a swarm does not load
        them.
        """
        if self._overlays is None:
            from engine.networks.overlay.overlays import Overlays

            parts = self._store, self.by_id, self.drivers, self.workers, self.names
            self._overlays = Overlays(*parts, self.keeper)
        return self._overlays

    def _links_removed(self, indexes: Collection[int] | None) -> None:
        if self._overlays is not None:
            self._overlays.links_removed(indexes)

    def _open(self) -> None:
        """In a thread; nothing else runs yet."""
        default_id = self._store.get(BRIDGE).id
        self.drivers.open(default_id)
        if self.default.absent:
            self._store.hide(default_id)
        for record in self._store:
            routes = self.drivers.routes(record.driver)
            self.by_id[record.id] = Network(record, _options_on_load(record), routes=routes)
            if record.name == BRIDGE:
                self.by_id[record.id].options = self.default.options
        self.remote_endpoints.load()
        self.drivers.restore([*self.by_id.values()])

    async def settle(self) -> None:
        """Every running container has been restored: attach it to its bridges."""
        await self.workers.run(self.drivers.replug, [*self.by_id.values()])
        if self._overlays is not None or (self.keeper is not None and self.keeper.held):
            await self.overlays.settle()

    async def close(self, remove: bool) -> None:
        """With `remove` also delete the rules and the bridges that the engine made.

        Sandboxes have been released.
        """
        if self._repair is not None:
            await self._repair.close()
        if self._overlays is not None:
            await self._overlays.close(remove)
        # other bridges that still exist are swept now, or by the next daemon
        for _, going in self._going.values():
            going.cancel()
        await asyncio.gather(*(going for _, going in self._going.values()), return_exceptions=True)
        await self.remote_endpoints.close(remove)
        await self._firewalld.close(remove)
        await self.workers.run(self.drivers.close, [*self.by_id.values()], remove)
        self.workers.close()

    # --- looking up -------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Network]:
        return iter(self.by_id.values())

    def get(self, text: str) -> Network:
        """By name, id or unique id prefix.

        Raises NotFound in Docker's words, InvalidParameter when more than one matches.
        """
        return self.by_id[self._store.get(text).id]

    def select(self, filters: Mapping[str, list[str]]) -> list[Network]:
        """The networks that match these filters. Raises InvalidParameter."""
        if not filters:
            return [*self.by_id.values()]
        return [
            each for each in self.by_id.values() if network_rules.matches(each.record, filters, bool(each.sandboxes))
        ]

    def name_of(self, mode: str) -> str:
        """The network name of a NetworkMode or an id; `mode` itself when there is none."""
        if mode in rules.DEFAULT_MODES:
            return NONE if self.default.absent else BRIDGE
        try:
            return self._store.get(mode).name
        except EngineError:
            return mode

    def is_shared(self, network_id: str, name: str) -> bool:
        """True if a network of a swarm that is on this host has this id and name."""
        network = self.by_id.get(network_id)
        return network is not None and network.overlay is not None and network.record.name == name

    def check_endpoint(self, text: str, wanted: EndpointSettings) -> None:
        """Raises InvalidParameter for settings that a network does not allow its endpoints,
        Forbidden if it has none. One that does not exist is fine.
        """
        try:
            network = self.get(text)
        except EngineError:
            return
        endpoints.check_usable(network)
        for address in requested.wanted_addresses(network.record, wanted).values():
            network.place(address)[0].check(address)

    def shown(self, network: Network) -> wire.Network:
        """The network as lists show it."""
        return wire.Network(**self._fields(network))

    def inspected(self, network: Network) -> wire.NetworkInspect:
        """The network with its endpoints and its numbers of addresses."""
        record = network.record
        counts = {str(pool.subnet): pool.counts() for pool, _ in network.subnets}
        subnets = {
            subnet: SubnetStatus(ips_in_use=min(used, _MOST), dynamic_ips_available=min(free, _MOST))
            for subnet, (used, free) in counts.items()
        }
        return wire.NetworkInspect(
            **self._fields(network),
            containers={
                sandbox.container_id: _resource(sandbox.name, sandbox.endpoints[record.id])
                for sandbox in network.sandboxes.values()
                if record.id in sandbox.endpoints
            },
            status=NetworkStatus(ipam=IPAMStatus(subnets=subnets)) if subnets else msgspec.UNSET,
        )

    def absent(self, record: NetworkRecord) -> Network:
        """A network of the swarm that is not on this host now, to be shown."""
        return Network(record, _options_on_load(record), routes=False)

    def _fields(self, network: Network) -> dict[str, Any]:
        record = network.record
        options = self.default.shown_options() if record.name == BRIDGE else record.options
        return {
            "name": record.name,
            "id": record.id,
            "created": rfc3339(record.created),
            "scope": record.scope,
            "driver": record.driver,
            "enable_ipv4": record.enable_ipv4,
            "enable_ipv6": record.enable_ipv6,
            "ipam": record.ipam,
            "internal": record.internal,
            "attachable": record.attachable,
            "ingress": record.ingress,
            "config_from": ConfigReference(network=record.config_from),
            "config_only": record.config_only,
            "options": options,
            "labels": record.labels,
        }

    @property
    def host_gateway(self) -> str:
        """The first of `host_gateways`; empty if there is none."""
        return next(iter(self.host_gateways()), "")

    def host_gateways(self) -> list[str]:
        """Addresses of this host as its containers see it: what `host-gateway` means in
        ExtraHosts. None without a default network, unless the operator names them.
        """
        if self._host_gateways or self.default.absent:
            return [*self._host_gateways]
        return [str(each.ip) for _, each in sorted(self.get(BRIDGE).gateways.items())]

    async def local_subnets(self) -> tuple[str, ...]:
        """IPv4 subnets of this host, other engines' and programs' too, without those of a swarm;
        and the host's name servers.
        """
        shared = [pool.subnet for each in self.by_id.values() if each.overlay for pool, _ in each.subnets]
        found = await self.workers.run(self.drivers.local_subnets)
        servers = [ip_network(server.address) for server in await self.workers.run(self.host_servers.read)]
        return (
            *(str(each) for each in found if not any(other.overlaps(each) for other in shared)),
            *(str(each) for each in servers if each.version == 4 and not each.is_loopback),
        )

    def driver_names(self) -> list[str]:
        """The drivers as Docker counts them: `null` is the network of containers without one. Of
        the plugins those that are in use.
        """
        return sorted((*self.drivers.names(), "host", "null", *self.remote.active()))

    def users(self, plugin: str) -> Iterator[str]:
        """The networks that use the plugin of this name, for people."""
        for each in (*self.by_id.values(), *self._between.values()):
            record = each.record
            if (record.remote and record.driver == plugin) or (record.ipam_pools and record.ipam.driver == plugin):
                yield f"network {record.name}"

    # --- create and remove ------------------------------------------------------------------------

    async def create(self, body: NetworkCreate, unique: bool = True) -> NetworkCreated:
        """A new network; `unique` refuses a name in use.

        Raises InvalidParameter, Forbidden (predefined; overlap), NotFound (driver; configuration
        network), Conflict (name); a failure leaves nothing behind.
        """
        return await uninterrupted(self._create(body, unique))

    async def _create(self, body: NetworkCreate, unique: bool) -> NetworkCreated:
        if body.config_from.network and not body.config_only:
            body = rules.configured_by(body, self._configuration(body.config_from.network))
        elif options := self._default_options.get(body.driver or "bridge"):
            body = msgspec.structs.replace(body, options={**options, **body.options})
        driver, ipam = rules.plugins(body)
        try:
            driver = (await self.remote.get(driver)).name if driver else ""
            ipam = (await self.ipam.get(ipam)).name if ipam else ""
        except EngineError as error:
            raise type(error)(f"network {body.name[:100]}: {error.message}") from error
        record = rules.checked(body, driver, ipam)
        async with contextlib.AsyncExitStack() as undo:
            space = "LocalDefault"
            if ipam:
                record, space = await self.ipam.request_pools(record, undo)
            async with self._changing:
                if unique:
                    self._check_duplicate(record.name)
                warning = "" if record.config_only else self._store.warning(record.name)
                made = Network(record, rules.options(record), routes=self.drivers.routes(record.driver))
                if not record.config_only:
                    await self._make(made)
                if record.remote:
                    self._between[record.id] = made
                    undo.callback(self._between.pop, record.id)
                else:
                    await self._add(made)
            await self._firewalld.settled()
            if record.remote:
                await self._create_remote(made, space)
                del self._between[record.id]
            undo.pop_all()
        self.publish(made, "create")
        return NetworkCreated(record.id, warning)

    def _check_duplicate(self, name: str) -> None:
        """Raises Conflict."""
        self._store.check_duplicate(name)
        if any(each.record.name == name for each in self._between.values()):
            raise Conflict(f"network with name {name} already exists")

    async def _make(self, made: Network) -> None:
        """Choose what its record lacks, and make its links."""
        record = made.record
        if made.options.bridge and any(made.bridge == each.bridge for each in self.by_id.values()):
            raise Forbidden(f"network {record.name}: bridge name {made.bridge} is already used by another network")
        for each in self.by_id.values():
            if made.options.parent and made.options.parent == each.options.parent:
                raise Forbidden(
                    f"network {record.name}: network {each.record.name} is already using parent interface "
                    f"{made.options.parent}"
                )
        await self._out_of_the_way(made)
        try:
            # they may be gone at the failure
            leaving = [going for _, going in self._going.values()]
            try:
                await self.workers.run(self.drivers.make, made, self._subnets(record))
            except PoolsExhausted:
                if not leaving:
                    raise
                await asyncio.wait(leaving)  # these free some
                await self.workers.run(self.drivers.make, made, self._subnets(record))
        except OSError as error:
            raise ServerError(f"network {record.name}: {error.strerror or error}") from error

    def _subnets(self, record: NetworkRecord) -> list[Subnet]:
        """The subnets that those of the network must not overlap."""
        if _apart(record):
            return []
        # those of a swarm's networks are never routed by the host, as in Docker
        local = [
            each
            for each in (*self.by_id.values(), *self._between.values())
            if each.overlay is None and not _apart(each.record)
        ]
        return [pool.subnet for each in local for pool in each.pools.values()]

    async def _add(self, made: Network) -> None:
        """Let lookups find a network that was made; a failure unmakes it."""
        try:
            await self._store.add(made.record)
        except BaseException:
            if not made.record.config_only:
                await self.workers.run(self.drivers.unmake, made)
            raise
        self.by_id[made.record.id] = made

    async def _create_remote(self, made: Network, space: str) -> None:
        """Have the network's plugin make it, without `_changing`."""
        try:
            await self.remote.create_network(made.record, space)
            async with self._changing:
                await self._store.add(made.record)
                self.by_id[made.record.id] = made
        except Refused:
            raise
        except BaseException:  # the plugin may have made it
            await self._delete_remote(made.record)
            raise

    async def _delete_remote(self, record: NetworkRecord) -> None:
        """Have the plugin delete a network. A failure is logged, as in Docker."""
        try:
            await self.remote.delete_network(record)
        except EngineError as error:
            _log.warning("%s", error.message)

    def _configuration(self, name: str) -> NetworkRecord:
        """Raises NotFound."""
        for each in self.by_id.values():
            if each.record.name == name and each.record.config_only:
                return each.record
        raise NotFound(f"configuration network {name!r} not found")

    async def _out_of_the_way(self, made: Network) -> None:
        """Wait for removed networks whose bridge is not down yet and has the new one's name or
        overlaps its subnets.
        """
        asked = [ip_network(config.subnet) for config in made.record.ipam.config]
        for network, going in [*self._going.values()]:
            held = [pool.subnet for pool in network.pools.values()]
            if network.bridge == made.bridge or any(
                one.version == other.version and one.overlaps(other) for one in asked for other in held
            ):
                await asyncio.wait([going])

    async def _take_down(self, network: Network) -> None:
        """One at a time: the kernel takes 20 to 40 ms under a lock that every start of a container
        needs, too.
        """
        try:
            async with self._taking_down:
                await self.workers.run(self.drivers.unmake, network)
        finally:
            del self._going[network.record.id]

    async def remove(self, text: str) -> None:
        """Remove a network.

        Its links may be deleted a moment after the return; the next daemon sweeps those that
        remain.

        Raises NotFound, Forbidden (predefined, or containers are on it).
        """
        await uninterrupted(self._remove(text))

    async def _remove(self, text: str) -> None:
        network = self._removable(text)
        await self._check_plugins(network.record)
        async with self._changing:
            network = self._removable(text)
            record = network.record
            del self.by_id[record.id]
            try:
                await self._store.remove(record)
            except BaseException:
                self.by_id[record.id] = network
                raise
            if record.config_only:
                self.publish(network, "destroy")
                return
            if record.remote:
                self._between[record.id] = network
            elif (driver := self.drivers.of(network)).slow_to_unmake(network):
                task = spawn(self._take_down(network), f"network {record.name}: removal of its links")
                self._going[record.id] = network, task
            else:
                await self.workers.run(driver.unmake, network)
        try:
            if record.remote or record.ipam_pools:
                await self.remote_endpoints.give_up(record.id)
            if record.remote:
                await self._delete_remote(record)
        finally:
            self._between.pop(record.id, None)
        if record.ipam_pools:
            await self.ipam.release_pools(record)
        self.publish(network, "destroy")

    def _removable(self, text: str) -> Network:
        """Raises NotFound, Forbidden."""
        network = self.get(text)
        record = network.record
        if record.predefined:
            raise Forbidden(f"{record.name} is a pre-defined network and cannot be removed")
        if network.overlay is not None:
            raise Forbidden(f"network {record.name} is the swarm's: its managers remove it")
        network.check_empty()
        if self._configures(record):
            raise Forbidden(f"configuration network {record.name!r} is in use")
        return network

    async def _check_plugins(self, record: NetworkRecord) -> None:
        """A network whose plugin does not exist, or is disabled, is not removed, as in Docker: the
        plugin would keep what it has for it.

        Raises ServerError: clients take 404 for a network that does not exist.
        """
        try:
            if record.remote:
                await self.remote.get(record.driver)
            if record.ipam_pools:
                await self.ipam.get(record.ipam.driver)
        except EngineError as error:
            raise ServerError(f"network {record.name} cannot be removed: {error.message}") from error

    def _configures(self, record: NetworkRecord) -> bool:
        """True if another network has its configuration from this one."""
        return record.config_only and any(each.record.config_from == record.name for each in self.by_id.values())

    async def prune(self, selection: Selection) -> list[Network]:
        """Remove the user-defined networks that no running container is on, as far as the selection
        matches them. Returns those that are gone.

        A network that cannot be removed is logged and stays. Raises Conflict while another prune
        runs.
        """
        gone: list[Network] = []
        with self._pruning:
            for network in [*self.by_id.values()]:
                record = network.record
                used = record.predefined or record.config_only or record.scope == "swarm" or network.sandboxes
                if used or not selection.matches(record.created, record.labels):
                    continue
                try:
                    await self.remove(record.id)
                except (NotFound, Forbidden):
                    continue  # a client has just removed it, or connected a container
                except EngineError as error:
                    _log.warning("prune: %s", error.message)
                    continue
                gone.append(network)
        self._events.publish("network", "prune", "", {"reclaimed": "0"})
        return gone

    def publish(self, network: Network, action: str, **attributes: str) -> None:
        """An event of this network, with Docker's attributes."""
        record = network.record
        self._events.publish("network", action, record.id, {**attributes, "name": record.name, "type": record.driver})


def _apart(record: NetworkRecord) -> bool:
    """True if the host has neither links nor addresses of the network: its subnets may overlap
    others.
    """
    return record.remote and bool(record.ipam_pools)


def _resource(name: str, settings: EndpointSettings) -> wire.EndpointResource:
    def shown(address: str, prefix: int) -> str:
        return f"{address}/{prefix}" if address else ""

    return wire.EndpointResource(
        name=name,
        endpoint_id=settings.endpoint_id,
        mac_address=settings.mac_address,
        ipv4_address=shown(settings.ip_address, settings.ip_prefix_len),
        ipv6_address=shown(settings.global_ipv6_address, settings.global_ipv6_prefix_len),
    )


def _options_on_load(record: NetworkRecord) -> rules.Options:
    """The options of a network that exists. An earlier version of this engine may have ignored one
    whose value this version refuses: it still has no effect.
    """
    valid: dict[str, str] = {}
    for key, value in record.options.items():
        try:
            rules.options(msgspec.structs.replace(record, options={key: value}))
            valid[key] = value
        except EngineError as error:
            _log.warning("%s: ignored", error.message)
    return rules.options(msgspec.structs.replace(record, options=valid))
