"""All networks of the engine, and the sandboxes of containers on them. This is the package's
interface for `containers` and the API.

A container that runs has a `Sandbox`: its namespace and an endpoint on each of its networks.
Settings of endpoints are derived (`endpoints.py`): pools are filled from the endpoints of running
containers, at start from their records.

Everything runs on the event loop except what waits for the kernel, which goes to a few threads.
`_appeared` and `_disappeared` are the one place where endpoints come and go.

Locks, in the order in which they are taken; a container's own lock comes before all of them:
1. `Sandbox.lock`: endpoints of one sandbox (leave, connect, disconnect, restore).
2. `_changing`: the set of networks (create, remove, a deleted bridge that is made again).
3. `_taking_down`: one removed network's links at a time. Threads then take
   `BridgeDriver._putting_back`, `Filter._lock` and a netlink socket's lock, in this order. No
   coroutine waits for a sandbox's lock while it holds `_changing`. `join` and `connect` may be
   cancelled: what was made is undone before they raise. `create`, `remove`, `leave` and
   `disconnect` are finished even if the caller is cancelled.

Not here: the rules of a body (`network.py`), links (`driver.py`), namespaces (`sandboxes.py`),
rules (`filter.py`). Raises: error kinds that name network and container; a failure undoes all.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import secrets
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from ipaddress import IPv4Address, ip_network
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from engine.config import Config
from engine.errors import EngineError, Forbidden, InvalidParameter, NotFound, ServerError
from engine.events import EventLog
from engine.networks import bridge, endpoints, host, network, sandboxes
from engine.networks.bridge import BridgeDriver
from engine.networks.driver import Driver, SubnetContested
from engine.networks.endpoints import Assigned, Network, Sandbox
from engine.networks.filter import Filter
from engine.networks.ipam import NETWORK_POOLS, NETWORK_PREFIX, Address, Subnet, free_subnet, span, unique_local_subnet
from engine.networks.macvlan import MacvlanDriver
from engine.networks.names import NameTable
from engine.networks.network import BRIDGE, HOST, NONE, NetworkStore
from engine.networks.ports import Published, relay_socket
from engine.networks.publishing import Publishing, Request
from engine.networks.repair import Repair
from engine.networks.resolver import Resolver
from engine.networks.sandboxes import BridgeFull
from engine.storage.records import Records
from engine.system import namespaces, netfilter
from engine.system.netlink.rtnl import RouteSocket
from engine.system.tasks import spawn
from engine.system.threads import uninterrupted
from engine.wire import networks as wire
from engine.wire.containers import EndpointSettings
from engine.wire.networks import IPAM, IPAMConfig, NetworkCreate, NetworkCreated

_log = logging.getLogger(__name__)

_T = TypeVar("_T")

_NO_PORTS = Request()
_NOT_ASSIGNED: Mapping[str, Assigned] = {}

WORKERS = 4
"""Threads that wait for the kernel; more would only queue for its single network lock."""

_TRIES = 16
"""Subnets that are tried for a new network while other engines of this host take the same ones."""


class Process(Protocol):
    """A container's process, held by its pidfd."""

    pid: int
    pidfd: int


class Joined(NamedTuple):
    """The result of a join."""

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
        # nftables takes the same letters as bridge names have
        self._filter = Filter(f"engined-{config.bridge}")
        self._publishing = Publishing(self._filter, self._in_thread, self._reflect)
        self._workers = ThreadPoolExecutor(WORKERS, thread_name_prefix="network")
        self._all: dict[str, Network] = {}
        self._sandboxes: dict[str, Sandbox] = {}
        self._changing = asyncio.Lock()
        self._going: dict[str, tuple[Network, asyncio.Task[None]]] = {}
        """Removed networks, by id, whose bridge the kernel is still taking down."""
        self._taking_down = asyncio.Lock()
        self._names = NameTable()
        self._resolver = Resolver(self._names)
        self.relay: socket.socket | None = None
        """Accepts connections by IPv6 to published ports, for the monitor to pass on to
        `filter.RELAYED`.

        None on a host without IPv6.
        """
        self._kernel: RouteSocket | None = None
        self._drivers: dict[str, Driver] = {}
        self._bridges: BridgeDriver | None = None
        self._repair: Repair | None = None

    async def open(self) -> None:
        """Create or find the bridges, enable outgoing traffic.

        Raises ServerError with the kernel's reason.
        """
        await self._store.open()
        try:
            await self._in_thread(self._open)
        except OSError as error:
            raise ServerError(f"bridge {self._default_bridge}: {error.strerror or error}") from error
        await self._publishing.watch()
        assert self._bridges is not None
        try:
            self._repair = Repair(self._bridges, self._all, self._changing, self._in_thread)
        except OSError as error:
            _log.warning("a deleted bridge will be restored only when a container needs it: %s", error)

    async def settle(self) -> None:
        """Every running container has been restored: close ports without an owner."""
        await self._in_thread(self._plug_again)
        await self._publishing.settle()

    async def close(self, remove: bool) -> None:
        """Release the namespaces; with `remove` also delete the rules and the bridges that the
        engine made.
        """
        if self._repair is not None:
            await self._repair.close()
        for sandbox in self._sandboxes.values():
            sandboxes.close(sandbox.namespace)
        await self._resolver.close()
        await self._publishing.close()
        # other bridges that still exist are swept now, or by the next daemon
        for _, going in self._going.values():
            going.cancel()
        await asyncio.gather(*(going for _, going in self._going.values()), return_exceptions=True)
        await self._in_thread(self._close, remove)
        if self.relay is not None:
            self.relay.close()
        self._sandboxes.clear()
        self._workers.shutdown()

    # --- networks ---------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Network]:
        return iter(self._all.values())

    def get(self, text: str) -> Network:
        """By name, id or unique id prefix.

        Raises NotFound in Docker's words, InvalidParameter when more than one matches.
        """
        return self._all[self._store.get(text).id]

    def drivers(self) -> list[str]:
        """Names of the drivers as Docker counts them: `null` is the network of containers without
        one.
        """
        return sorted((*self._drivers, "host", "null"))

    def select(self, filters: Mapping[str, list[str]]) -> list[Network]:
        """The networks that match these filters. Raises InvalidParameter."""
        if not filters:
            return [*self._all.values()]
        return [each for each in self._all.values() if network.matches(each.record, filters, bool(each.sandboxes))]

    def name_of(self, mode: str) -> str:
        """The network name of a NetworkMode or an id; `mode` itself when there is none."""
        if mode in network.DEFAULT_MODES:
            return BRIDGE
        try:
            return self._store.get(mode).name
        except EngineError:
            return mode

    async def create(self, body: NetworkCreate) -> NetworkCreated:
        """A new network.

        Raises InvalidParameter, Forbidden (predefined; overlap), NotFound (driver), Conflict
        (name); a failure leaves nothing behind.
        """
        return await uninterrupted(self._create(body))

    async def _create(self, body: NetworkCreate) -> NetworkCreated:
        record = network.checked(body)
        async with self._changing:
            if body.check_duplicate:
                self._store.check_duplicate(record.name)
            warning = self._store.warning(record.name)
            made = Network(record, network.options(record), routes=self._drivers[record.driver].routes)
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
                await self._in_thread(self._drivers[record.driver].unmake, made)
                raise
            self._all[record.id] = made
        self._publish(made, "create")
        return NetworkCreated(record.id, warning)

    async def _out_of_the_way(self, made: Network) -> None:
        """Wait for removed networks whose bridge is not down yet and has the new one's name or
        overlaps its subnets.
        """
        asked = [ip_network(config.subnet) for config in made.record.ipam.config]
        for found, going in [*self._going.values()]:
            held = [pool.subnet for pool in found.pools.values()]
            if found.bridge == made.bridge or any(
                one.version == other.version and one.overlaps(other) for one in asked for other in held
            ):
                await asyncio.wait([going])

    async def _take_down(self, found: Network) -> None:
        """One at a time: the kernel takes 20 to 40 ms under a lock that every start of a container
        needs, too.
        """
        try:
            async with self._taking_down:
                await self._in_thread(self._drivers[found.record.driver].unmake, found)
        finally:
            del self._going[found.record.id]

    async def remove(self, text: str) -> None:
        """Remove a network.

        Its links may be deleted a moment after the return; the next daemon sweeps those that
        remain.

        Raises NotFound, Forbidden (predefined, or containers are on it).
        """
        await uninterrupted(self._remove(text))

    async def _remove(self, text: str) -> None:
        async with self._changing:
            found = self.get(text)
            record = found.record
            if record.predefined:
                raise Forbidden(f"{record.name} is a pre-defined network and cannot be removed")
            if found.sandboxes:
                raise Forbidden(f"network {record.name} id {record.id} has active endpoints")
            del self._all[record.id]
            try:
                await self._store.remove(record)
            except BaseException:
                self._all[record.id] = found
                raise
            driver = self._drivers[record.driver]
            if driver.slow_to_unmake(found):
                task = spawn(self._take_down(found), f"network {record.name}: removal of its links")
                self._going[record.id] = found, task
            else:
                await self._in_thread(driver.unmake, found)
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
                sandbox.container_id: _resource(sandbox.name, sandbox.endpoints[record.id])
                for sandbox in found.sandboxes.values()
                if record.id in sandbox.endpoints
            },
            options=options,
            labels=record.labels,
        )

    @property
    def gateway(self) -> IPv4Address:
        """The default bridge's own address."""
        found = self.get(BRIDGE).gateways[4].ip
        assert isinstance(found, IPv4Address)
        return found

    def _publish(self, found: Network, action: str, **attributes: str) -> None:
        record = found.record
        self._events.publish("network", action, record.id, {**attributes, "name": record.name, "type": record.driver})

    # --- sandboxes --------------------------------------------------------------------------------

    def check(self, container_id: str, name: str, wanted: EndpointSettings, among: Iterable[str]) -> EndpointSettings:
        """Check that a container on the networks `among` may join one more; returns the settings to
        keep.

        Raises as `connect` does for a running container.
        """
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
        return endpoints.intent(wanted, record, container_id)

    async def join(
        self,
        container_id: str,
        name: str,
        wanted: Mapping[str, EndpointSettings],
        primary: str,
        mac: str = "",
        servers: Sequence[str] = (),
        request: Request = _NO_PORTS,
        assigned: Mapping[str, Assigned] = _NOT_ASSIGNED,
    ) -> Joined:
        """Namespace and endpoints for a container that starts.

        `mac` is for its endpoint on the network `primary`, which comes first. `servers` are the
        container's own name servers, for names that are not a container's. `assigned`: addresses
        chosen by an allocator outside of the engine, by the keys of `wanted`.

        Published ports open in the background while the rest of the start is prepared. Await
        `opened` before the container runs.

        Raises NotFound for a missing network, InvalidParameter and Forbidden for addresses,
        ServerError when they or the ports of a bridge are exhausted or the kernel refuses.
        """
        if container_id in self._sandboxes:
            await self.leave(container_id)
        order = sorted(wanted.items(), key=lambda item: item[0] != primary)
        chosen = [(self._meant(key, settings), settings, assigned.get(key, {})) for key, settings in order]
        sandbox = Sandbox(container_id, name, servers)
        async with contextlib.AsyncExitStack() as undo:
            plans = []
            for found, settings, addresses in chosen:
                own_mac = mac if found.record.name == primary else ""
                given = endpoints.allocate(found, settings, container_id, own_mac, addresses)
                undo.callback(endpoints.release, found, given)
                found.sandboxes[container_id] = sandbox
                undo.callback(found.sandboxes.pop, container_id, None)
                plans.append((found, given))
            linked = [(found, given) for found, given in plans if found.pools]
            if linked:
                with _error_context(plans[0][0], container_id):
                    sandbox.namespace, ids = await self._undone_if_cancelled(_close_built, self._build, linked)
                undo.callback(sandboxes.close, sandbox.namespace)
            else:
                ids = []
            numbers = iter(ids)
            for found, given in plans:
                endpoint_id = next(numbers) if found.pools else secrets.token_hex(32)
                sandbox.endpoints[found.record.id] = msgspec.structs.replace(given, endpoint_id=endpoint_id)
            sandbox.request = request
            sandbox.target = endpoints.target(sandbox.endpoints.values(), self._all)
            await self._serve_names(sandbox)
            self._sandboxes[container_id] = sandbox
            if sandbox.target is not None:
                publishing = self._publishing.publish(container_id, name, sandbox.target, request)
                # awaited by `opened` or `leave`
                sandbox.opening = asyncio.ensure_future(publishing)
            undo.pop_all()
        for found, _ in plans:
            self._appeared(found, sandbox)
        path = None if any(found.record.name == HOST for found, _ in plans) else _path(sandbox.namespace)
        return Joined(path, {found.record.name: sandbox.endpoints[found.record.id] for found, _ in plans})

    async def opened(self, container_id: str) -> tuple[Published, ...]:
        """Wait until the published ports of a container that has joined are open.

        Raises ServerError when one is taken.
        """
        sandbox = self._sandboxes.get(container_id)
        if sandbox is None or sandbox.opening is None:
            return ()
        ports = await asyncio.shield(sandbox.opening)
        sandbox.opening = None
        return ports

    async def leave(self, container_id: str) -> None:
        """Release a container's sandbox, with its endpoints and ports.

        A container without one is fine.
        """
        await uninterrupted(self._leave(container_id))

    async def _leave(self, container_id: str) -> None:
        sandbox = self._sandboxes.get(container_id)
        if sandbox is None:
            return
        async with sandbox.lock:
            if self._sandboxes.pop(container_id, None) is None:
                return
            if sandbox.opening is not None:
                await asyncio.gather(sandbox.opening, return_exceptions=True)
            # before another one can have its addresses
            await self._publishing.withdraw(container_id)
            made = sandbox.namespace >= 0
            sandboxes.close(sandbox.namespace)
            self._resolver.close_for(container_id)
            for network_id, settings in sandbox.endpoints.items():
                found = self._all.get(network_id)
                if found is not None:
                    self._disappeared(found, sandbox, settings)
                    if made and found.pools:
                        self._drivers[found.record.driver].released(settings.endpoint_id)

    async def connect(
        self,
        container_id: str,
        text: str,
        wanted: EndpointSettings,
        process: Process,
        assigned: Assigned | None = None,
    ) -> EndpointSettings:
        """One more endpoint for a container that runs; `assigned` as for `join`.

        Raises as `check` and `join` do; NotFound when it has no networks of its own.
        """
        sandbox = self._sandbox(container_id)
        async with sandbox.lock:
            self._sandbox(container_id)
            found = self.get(text)
            record = found.record
            self.check(container_id, record.id, wanted, self._network_names(sandbox))
            given = endpoints.allocate(found, wanted, container_id, "", assigned or {})
            async with contextlib.AsyncExitStack() as undo:
                undo.callback(endpoints.release, found, given)
                found.sandboxes[container_id] = sandbox
                undo.callback(found.sandboxes.pop, container_id, None)
                endpoint_id = secrets.token_hex(32)
                if found.pools:
                    with _error_context(found, container_id):
                        self._find_namespace(sandbox, process)
                        unplug = functools.partial(self._unplug, found, sandbox.namespace, given)
                        endpoint_id = await self._undone_if_cancelled(
                            unplug, self._plug, found, sandbox.namespace, given
                        )
                        given = msgspec.structs.replace(given, endpoint_id=endpoint_id)
                        undo.push_async_callback(self._leave_again, sandbox, found, given)
                        await self._reroute(sandbox, [*sandbox.endpoints.values(), given])
                given = msgspec.structs.replace(given, endpoint_id=endpoint_id)
                sandbox.endpoints[record.id] = given
                undo.callback(sandbox.endpoints.pop, record.id)
                await self._serve_names(sandbox)
                undo.pop_all()
            self._appeared(found, sandbox)
            await uninterrupted(self._republish(sandbox))
            return given

    async def _leave_again(self, sandbox: Sandbox, found: Network, given: EndpointSettings) -> None:
        """Undo a connect that failed half-way: remove its link, restore the routes of the earlier
        endpoints.
        """
        await self._in_thread(self._unplug, found, sandbox.namespace, given, given.endpoint_id)
        await self._reroute(sandbox, sandbox.endpoints.values())

    async def disconnect(self, container_id: str, text: str) -> None:
        """Remove one endpoint from a running container. Raises Forbidden when it has none there."""
        await uninterrupted(self._disconnect(container_id, text))

    async def _disconnect(self, container_id: str, text: str) -> None:
        sandbox = self._sandbox(container_id)
        async with sandbox.lock:
            self._sandbox(container_id)
            found = self.get(text)
            settings = sandbox.endpoints.get(found.record.id)
            self.check_connected(container_id, found.record.id, self._network_names(sandbox))
            assert settings is not None
            if found.pools:
                left = [each for each in sandbox.endpoints.values() if each is not settings]
                with _error_context(found, container_id):
                    await self._in_thread(self._unplug, found, sandbox.namespace, settings, settings.endpoint_id)
                del sandbox.endpoints[found.record.id]
                try:
                    await self._republish(sandbox)
                finally:
                    self._disappeared(found, sandbox, settings)
                self._resolver.forward(container_id, self._leads_out(sandbox))
                with _error_context(found, container_id):
                    await self._reroute(sandbox, left)
            else:
                del sandbox.endpoints[found.record.id]
                self._disappeared(found, sandbox, settings)

    def check_connected(self, container_id: str, text: str, among: Iterable[str]) -> str:
        """The network's name.

        Raises Forbidden unless a container on the networks `among` can leave it.
        """
        record = self.get(text).record
        if record.name == HOST:
            raise Forbidden(
                f"container {container_id} cannot be disconnected from host network or connected to host network"
            )
        if record.name not in among:
            raise Forbidden(f"container {container_id} is not connected to the network {record.name}")
        return record.name

    async def _republish(self, sandbox: Sandbox) -> None:
        """Move published ports to the endpoint of the default route; without one publish none."""
        target = endpoints.target(sandbox.endpoints.values(), self._all)
        if target == sandbox.target:
            return
        await self._publishing.withdraw(sandbox.container_id)
        sandbox.target = target
        if target is not None:
            try:
                await self._publishing.publish(sandbox.container_id, sandbox.name, target, sandbox.request)
            except ServerError as error:  # the change of the network itself succeeded
                _log.warning("container %s: %s", sandbox.container_id, error.message)

    def ports_of(self, container_id: str) -> tuple[Published, ...]:
        """The published ports of a running container."""
        return self._publishing.of(container_id)

    async def restore(
        self,
        container_id: str,
        name: str,
        kept: Mapping[str, EndpointSettings],
        process: Process,
        servers: Sequence[str] = (),
        request: Request = _NO_PORTS,
        ports: Sequence[Published] = (),
    ) -> None:
        """Restore the sandbox of a container that ran on without a daemon.

        It keeps its addresses, even outside of the present subnet.
        """
        if container_id in self._sandboxes:
            return
        sandbox = Sandbox(container_id, name, servers)
        for settings in kept.values():
            found = self._all.get(settings.network_id)
            if found is None or not settings.endpoint_id:
                continue
            for address in endpoints.addresses(settings):
                try:
                    if address.version in found.pools:
                        found.pools[address.version].claim(address)
                except EngineError as error:
                    _log.warning(
                        "container %s: cannot claim its address, which it keeps: %s", container_id, error.message
                    )
            sandbox.endpoints[found.record.id] = settings
            found.sandboxes[container_id] = sandbox
            if found.pools and sandbox.namespace < 0:
                try:
                    sandbox.namespace = namespaces.of_process(process.pid, process.pidfd, "net")
                except OSError as error:  # the process has ended; its exit will undo all this
                    _log.info("container %s: its namespace: %s", container_id, error)
        if not sandbox.endpoints:
            return
        self._sandboxes[container_id] = sandbox
        for network_id in sandbox.endpoints:
            self._add_names(self._all[network_id], sandbox)
        sandbox.request = request
        sandbox.target = endpoints.target(sandbox.endpoints.values(), self._all)
        if sandbox.target is not None:
            self._publishing.restore(container_id, sandbox.target, ports)
        async with sandbox.lock:
            try:
                await self._serve_names(sandbox, again=True)
            except ServerError as error:
                _log.warning("%s", error.message)

    def renamed(self, container_id: str, name: str) -> None:
        """Update the name under which networks show a running container."""
        sandbox = self._sandboxes.get(container_id)
        if sandbox is not None:
            sandbox.name = name
            for network_id in sandbox.endpoints:
                self._all[network_id].generation += 1
                self._add_names(self._all[network_id], sandbox)

    def reserve(self, wanted: Mapping[str, EndpointSettings]) -> None:
        """Keep the static addresses of a container's settings for its next start.

        Other containers get them only by asking for them, or when no other address is free.
        """
        for found, version, address in self._static(wanted):
            found.pools[version].reserve(address)

    def unreserve(self, wanted: Mapping[str, EndpointSettings]) -> None:
        """Undo one `reserve` with these settings."""
        for found, version, address in self._static(wanted):
            found.pools[version].unreserve(address)

    def _static(self, wanted: Mapping[str, EndpointSettings]) -> Iterator[tuple[Network, int, Address]]:
        """Static addresses with their networks and IP versions; settings that are no longer valid
        have none.
        """
        for key, settings in wanted.items():
            if settings.ipam_config is None:
                continue
            try:
                found = self._meant(key, settings)
                static = network.wanted_addresses(found.record, settings)
            except EngineError:
                continue
            for version, address in static.items():
                yield found, version, address

    def _appeared(self, found: Network, sandbox: Sandbox) -> None:
        """Record a configured endpoint: of a container whose process does not run yet, or that was
        connected while it runs.
        """
        found.generation += 1
        self._add_names(found, sandbox)
        self._publish(found, "connect", container=sandbox.container_id)

    def _disappeared(self, found: Network, sandbox: Sandbox, settings: EndpointSettings) -> None:
        """Forget an endpoint that is gone, or is about to go with its namespace."""
        found.sandboxes.pop(sandbox.container_id, None)
        self._names.remove(settings.endpoint_id)
        endpoints.release(found, settings)
        found.generation += 1
        self._publish(found, "disconnect", container=sandbox.container_id)

    # --- names ------------------------------------------------------------------------------------

    def _add_names(self, found: Network, sandbox: Sandbox) -> None:
        """Containers on a user-defined network find one another by name and aliases.

        Predefined networks have no names.
        """
        settings = sandbox.endpoints[found.record.id]
        if found.record.predefined:
            return
        links = (text.partition(":") for text in settings.links or ())
        self._names.add(
            settings.endpoint_id,
            network_id=found.record.id,
            network=found.record.name,
            container_id=sandbox.container_id,
            names=[sandbox.name, *(settings.aliases or ())],
            addresses=endpoints.addresses(settings),
            links={alias or target: target for target, _, alias in links},
        )

    async def _serve_names(self, sandbox: Sandbox, *, again: bool = False) -> None:
        """Open the resolver of a container on a user-defined network; `again` after a restart of
        the daemon.

        Raises ServerError.
        """
        named = any(not self._all[each].record.predefined for each in sandbox.endpoints)
        if named and sandbox.namespace >= 0:
            await self._resolver.open_for(
                sandbox.container_id,
                sandbox.namespace,
                servers=sandbox.servers,
                forward=self._leads_out(sandbox),
                again=again,
            )

    def _leads_out(self, sandbox: Sandbox) -> bool:
        return any(not self._all[each].closed for each in sandbox.endpoints)

    # --- looking up -------------------------------------------------------------------------------

    def _meant(self, key: str, settings: EndpointSettings) -> Network:
        """The network of an entry in a container's settings: by its id, otherwise by its name.

        Raises NotFound.

        Found by name when a network was removed and another one created under its name.
        """
        if settings.network_id in self._all:
            return self._all[settings.network_id]
        return self.get(self.name_of(key))

    def _sandbox(self, container_id: str) -> Sandbox:
        sandbox = self._sandboxes.get(container_id)
        if sandbox is None:
            raise NotFound(f"container {container_id} has left its networks")
        return sandbox

    def _network_names(self, sandbox: Sandbox) -> list[str]:
        return [self._all[each].record.name for each in sandbox.endpoints]

    def _find_namespace(self, sandbox: Sandbox, process: Process) -> None:
        """The namespace that the runtime made (NetworkMode none), or that is unknown after a
        restart of the daemon.
        """
        if sandbox.namespace < 0:
            sandbox.namespace = namespaces.of_process(process.pid, process.pidfd, "net")

    async def _reroute(self, sandbox: Sandbox, left: Iterable[EndpointSettings]) -> None:
        gateways = endpoints.default_gateways(left, self._all)
        if gateways:
            await self._in_thread(sandboxes.route, sandbox.namespace, gateways)

    # --- in threads -------------------------------------------------------------------------------

    async def _in_thread(self, function: Callable[..., _T], *arguments: object) -> _T:
        """Run the function in a thread.

        A caller that is cancelled meanwhile waits for its end, so that it can undo it.
        """
        running = asyncio.get_running_loop().run_in_executor(self._workers, function, *arguments)
        return await uninterrupted(running)

    async def _undone_if_cancelled(
        self, undo: Callable[[_T], None], function: Callable[..., _T], *arguments: object
    ) -> _T:
        """As `_in_thread`. If the caller is cancelled, the result is undone in a thread first."""
        running = asyncio.get_running_loop().run_in_executor(self._workers, function, *arguments)
        try:
            return await uninterrupted(running)
        except asyncio.CancelledError:
            if not running.cancelled() and running.exception() is None:
                await self._in_thread(undo, running.result())
            raise

    def _build(self, plans: list[tuple[Network, EndpointSettings]]) -> tuple[int, list[str]]:
        """A namespace with all these endpoints; returns its descriptor, owned by the caller, and
        the endpoint ids.
        """
        gateways = endpoints.default_gateways((settings for _, settings in plans), self._all)
        (first, settings), *others = plans
        driver = self._drivers[first.record.driver]
        interface = endpoints.interface(first, settings)
        namespace, endpoint_id = driver.new_sandbox(first, interface, () if others else gateways)
        ids = [endpoint_id]
        try:
            for number, (found, given) in enumerate(others, 1):
                ids.append(self._plug(found, namespace, given, f"eth{number}"))
            if gateways and others:
                sandboxes.route(namespace, gateways)
        except BaseException:
            sandboxes.close(namespace)
            raise
        return namespace, ids

    def _plug(self, found: Network, namespace: int, given: EndpointSettings, name: str = "") -> str:
        name = name or sandboxes.free_name(namespace)
        return self._drivers[found.record.driver].plug(found, namespace, name, endpoints.interface(found, given))

    def _unplug(self, found: Network, namespace: int, given: EndpointSettings, endpoint_id: str) -> None:
        settings = msgspec.structs.replace(given, endpoint_id=endpoint_id)
        self._drivers[found.record.driver].unplug(found, namespace, settings)

    def _reflect(self, endpoint_id: str) -> None:
        assert self._bridges is not None
        self._bridges.reflect(endpoint_id)

    def _plug_again(self) -> None:
        """Attach containers that ran on without a daemon to their bridges, which may have been made
        again.
        """
        assert self._bridges is not None
        for found in [*self._all.values()]:
            if found.link is not None:
                self._bridges.replug(found, found.link)

    @property
    def _alias(self) -> str:
        """ifalias of links that the engine makes for user-defined networks: its id, which is kept
        in the records.
        """
        return f"{host.ALIAS} {self._store.get(BRIDGE).id[:12]}"

    def _open(self) -> None:
        links = self._kernel = RouteSocket()
        self._bridges = BridgeDriver(links, self._filter, self._alias, self._configured)
        self._drivers = {"bridge": self._bridges, "macvlan": MacvlanDriver(links, self._alias)}
        for record in self._store:
            driver = self._drivers.get(record.driver)
            self._all[record.id] = Network(record, network.options(record), routes=driver is not None and driver.routes)
        default = self.get(BRIDGE)
        default.options = msgspec.structs.replace(default.options, bridge=self._default_bridge)
        self._bridges.restore(default)
        users = [each for each in self._all.values() if each.record.driver in self._drivers and each is not default]
        for each in users:
            each.fill()
        host.sweep(links, self._alias, self._names_of_links())
        for each in users:
            try:
                self._drivers[each.record.driver].restore(each)
            except (EngineError, OSError) as error:
                _log.error("network %s: its link: %s", each.record.name, error)
        host.forward(links, ipv6=any(6 in each.pools for each in users if each.routes))
        try:
            self.relay = relay_socket()
            port = self.relay.getsockname()[1] if self.relay is not None else 0
            self._filter.open((each.rules for each in (default, *users) if each.routes), port)
        except netfilter.NetfilterError as error:
            _log.warning(
                "bridge %s: no masquerade, containers do not reach beyond this host: %s", self._default_bridge, error
            )
        self._bridges.open_stock(default)

    def _names_of_links(self) -> set[str]:
        return {
            name
            for each in self._all.values()
            if each.record.driver in self._drivers
            for name in self._drivers[each.record.driver].links(each)
        }

    def _make(self, made: Network, subnets: list[Subnet]) -> None:
        """The links of a new network, with a free subnet unless the user gave one.

        A failure leaves nothing behind.
        """
        record, driver = made.record, self._drivers[made.record.driver]
        for given in map(ip_network, (config.subnet for config in record.ipam.config)):
            if any(given.version == other.version and given.overlaps(other) for other in subnets):
                raise Forbidden(
                    f"network {record.name}: subnet {given}: Pool overlaps with other one on this address space"
                )
        if record.enable_ipv6 and not any(":" in config.subnet for config in record.ipam.config):
            record = network.with_pool(record, unique_local_subnet(self._store.get(BRIDGE).id, record.id))
        if 4 in record.chosen_by_user:
            made.record = network.with_gateways(record)
            made.fill()
            driver.make(made)
            return
        assert self._kernel is not None
        avoided = [span(each) for each in subnets if each.version == 4]
        for _ in range(_TRIES):
            subnet = free_subnet([*avoided, *host.taken(self._kernel)], NETWORK_POOLS, NETWORK_PREFIX)
            if subnet is None:
                break
            made.record = network.with_gateways(network.with_pool(record, subnet))
            made.fill()
            try:
                driver.make(made)
                return
            except SubnetContested:
                avoided.append(span(subnet))
        raise ServerError(
            f"network {record.name}: could not find an available, non-overlapping IPv4 address pool among the defaults"
        )

    def _close(self, remove: bool) -> None:
        if self._bridges is not None:
            self._bridges.close()
        if self._kernel is None:
            return
        try:
            self._filter.close(remove)
        except netfilter.NetfilterError as error:
            _log.warning("bridge %s: cannot remove its rules: %s", self._default_bridge, error)
        if remove:
            host.sweep(self._kernel, self._alias, self._names_of_links())
            for each in self._all.values():
                if each.record.driver in self._drivers:
                    self._drivers[each.record.driver].unmake(each)
        self._kernel.close()
        self._kernel = None


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


@contextlib.contextmanager
def _error_context(found: Network, container_id: str) -> Iterator[None]:
    """Add the names of network and container to the kernel's refusals."""
    where = f"network {found.record.name}, container {container_id}"
    try:
        yield
    except BridgeFull as error:
        raise ServerError(f"{where}: {error.strerror}; a bridge takes no more containers than that") from error
    except OSError as error:
        raise ServerError(f"{where}: {error.strerror or error}") from error


def _path(namespace: int) -> str:
    """The namespace for the OCI runtime, which another process starts: valid while the descriptor
    is open.
    """
    return f"/proc/{os.getpid()}/fd/{namespace}" if namespace >= 0 else ""


def _close_built(built: tuple[int, list[str]]) -> None:
    sandboxes.close(built[0])
