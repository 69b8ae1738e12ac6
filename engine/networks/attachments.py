"""Containers on networks: a container that runs has a `Sandbox`, its network namespace with an
endpoint on each of its networks. `containers` uses the package through this module and
`networks.py`.

Settings of endpoints are derived (`endpoints.py`). Pools are filled from the endpoints of running
containers, at start from their records. `_appeared` and `_disappeared` are the one place where
endpoints come and go.

Owns: the sandboxes with their namespaces, the names that containers find one another by, published
ports. Runs on the event loop, except what waits for the kernel (`drivers.py`).
Locks: `Sandbox.lock`, while endpoints of one sandbox change. A container's own lock comes before
it. Nothing here takes the lock of `networks.py`. `join` may be cancelled: what was made is undone
before it raises. `leave`, `connect` and `disconnect` are finished even if the caller is cancelled.
Not here: which networks there are (`networks.py`), links (`drivers.py`), rules (`filter.py`).
Raises: error kinds that name network and container; a failure undoes all.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from ipaddress import IPv4Address
from typing import NamedTuple, Protocol

import msgspec

from engine import metrics
from engine.common.network_rules import SWARM, Address, is_swarm_id
from engine.errors import EngineError, Forbidden, NotFound, ServerError
from engine.networks import endpoints, requested, sandboxes
from engine.networks.dns.resolver import Resolver
from engine.networks.drivers import error_context
from engine.networks.endpoints import Assigned, Network, Process, Sandbox
from engine.networks.network import HOST, NONE
from engine.networks.networks import Networks
from engine.networks.ports import Published
from engine.networks.publishing import Publishing, Target
from engine.system import namespaces
from engine.system.tasks import shield
from engine.system.threads import uninterrupted
from engine.wire.containers import EndpointSettings

_log = logging.getLogger(__name__)

_SERVED_AT_ONCE = 64
"""Resolvers that are opened at a time after a restart of the daemon."""
_NONE_ASSIGNED: Assigned = {}
_NEW_IDS = iter(lambda: secrets.token_hex(32), "")
"""Ids of endpoints without links."""
_NO_MACS: Mapping[str, str] = {}
_NO_SYSCTLS: Mapping[str, str] = {}


class Joined(NamedTuple):
    """The result of a join."""

    path: str | None
    """Its namespace for the OCI runtime; empty: a fresh one without links; None: the host's."""
    endpoints: dict[str, EndpointSettings]
    """By network name."""


class Lent(NamedTuple):
    """What an endpoint gets on a network that several engines share."""

    network: Network
    addresses: Assigned


class Lender(Protocol):
    """Gives the endpoints of shared networks (those of a swarm) their addresses."""

    async def lend(self, container_id: str, name: str, key: str, settings: EndpointSettings) -> Lent:
        """For an endpoint that is about to be made; the network is among this engine's on return.
        `key`: name or id of the network, which may be unknown here. Raises NotFound, Forbidden,
        ServerError.
        """
        ...

    def release(self, container_id: str, network_id: str) -> None:
        """The endpoint was not made. Does not block."""
        ...

    async def give_back(self, container_id: str, network_id: str) -> None:
        """The endpoint was removed. Raises nothing."""
        ...

    def renamed(self, container_id: str) -> None:
        """The container has another name. Does not block."""
        ...


class Attachments:
    """One engine's."""

    def __init__(self, networks: Networks) -> None:
        self.lender: Lender | None = None
        """While this engine is part of a swarm."""
        self._networks = networks
        self._drivers = networks.drivers
        self._remote = networks.remote_endpoints
        self._in_thread = networks.workers.run
        self._sandboxes: dict[str, Sandbox] = {}
        """By container id."""
        self._unserved: list[tuple[int, Sandbox]] = []
        """Restored ones whose resolvers are not open yet, with the time of their start."""
        self._names = networks.names
        self._resolver = Resolver(self._names, networks.host_servers.read)
        drivers = networks.drivers
        self._publishing = Publishing(
            drivers.filter, drivers.firewall, networks.serving, networks.workers.run, drivers.reflect, self._lead
        )

    async def open(self) -> None:
        """Begin to repair the rules of published ports. The networks are open."""
        await self._publishing.watch()

    async def settle(self) -> None:
        """Every running container has been restored: close ports without an owner, give back the
        endpoints of plugins that have none.
        """
        await self._publishing.settle()
        live = {container_id: tuple(sandbox.endpoints) for container_id, sandbox in self._sandboxes.items()}
        await self._remote.settle(live, self._networks)

    async def close(self) -> None:
        """Release the namespaces. Containers that run keep theirs; their rules stay as they are."""
        for sandbox in self._sandboxes.values():
            sandbox.close()
        await self._resolver.close()
        await self._publishing.close()
        self._sandboxes.clear()

    # --- start and end of a container -------------------------------------------------------------

    async def join(
        self,
        sandbox: Sandbox,
        networks: Mapping[str, EndpointSettings],
        primary: str,
        macs: Mapping[str, str] = _NO_MACS,
        *,
        user: int = -1,
        sysctls: Mapping[str, str] = _NO_SYSCTLS,
    ) -> Joined:
        """Namespace and endpoints for a container that starts.

        `sandbox` is a new one, which this object owns from now on. The endpoint on the network
        `primary` comes first. `macs` are requested addresses, by network name. `user`: a descriptor
        of the user namespace that must own the namespace; -1: one of its own, or none. `sysctls`:
        of the namespace, by path below /proc/sys/net; not for one that the runtime makes.

        Published ports open in the background while the rest of the start is prepared. Await
        `opened` before the container runs.

        Raises NotFound for a missing network, InvalidParameter and Forbidden for addresses,
        ServerError when they or the ports of a bridge are exhausted or the kernel refuses.
        """
        began = time.monotonic()
        container_id = sandbox.container_id
        if container_id in self._sandboxes:
            await self.leave(container_id)
        if container_id in self._remote:
            await uninterrupted(self._remote.ready(container_id))
        order = sorted(networks.items(), key=lambda item: item[0] != primary)
        async with contextlib.AsyncExitStack() as undo:
            chosen = []
            for key, settings in order:
                network, addresses = await self._lent(container_id, sandbox.name, key, settings, undo)
                mac = macs.get(network.record.name, "")
                if network.record.ipam_pools:
                    lending = self._remote.lend(container_id, network, settings, mac, undo)
                    addresses, mac = await uninterrupted(lending)
                chosen.append((network, settings, mac, addresses))
            plans = []
            for network, settings, mac, addresses in chosen:
                endpoint = endpoints.allocate(network, settings, mac, addresses, ipv6=sandbox.ipv6)
                undo.callback(endpoints.release, network, endpoint)
                network.sandboxes[container_id] = sandbox
                undo.callback(network.sandboxes.pop, container_id, None)
                plans.append((network, _with_names(network, sandbox, endpoint)))
            linked = [(network, endpoint) for network, endpoint in plans if network.linked]
            ids: list[str] = []
            by_plugin = any(network.record.remote for network, _ in linked)
            if by_plugin or (linked and user >= 0):
                made = await uninterrupted(self._assemble(sandbox, linked, user, undo))
                plans = [(network, made.get(network.record.id, endpoint)) for network, endpoint in plans]
            elif linked:
                gateways = endpoints.default_gateways((endpoint for _, endpoint in linked), self._networks.by_id)
                sandbox.namespace, ids = await self._networks.workers.undone_if_cancelled(
                    lambda built: self._drivers.close_sandbox(linked, *built),
                    *(self._drivers.new_sandbox, container_id, linked, gateways),
                )
                undo.push_async_callback(self._in_thread, self._drivers.close_sandbox, linked, sandbox.namespace, ids)
            elif user < 0 and self._drivers.ids is None and all(network.record.name != HOST for network, _ in plans):
                sandbox.namespace = await self._networks.workers.undone_if_cancelled(
                    sandboxes.close, self._drivers.bare
                )
                undo.callback(sandboxes.close, sandbox.namespace)
            if sysctls and sandbox.namespace >= 0:
                await self._in_thread(sandboxes.set_sysctls, sandbox.namespace, sysctls.items())
            undo.callback(sandbox.endpoints.clear)  # or a repair would attach them again
            numbers = iter(ids)
            for network, endpoint in plans:
                endpoint_id = endpoint.endpoint_id or next(numbers if network.linked else _NEW_IDS)
                sandbox.endpoints[network.record.id] = msgspec.structs.replace(endpoint, endpoint_id=endpoint_id)
            sandbox.target = self._target(sandbox)
            await self._serve_names(sandbox)
            if by_plugin:
                await uninterrupted(self._remote.expose(container_id, self._outlet(sandbox), sandbox.request))
            self._sandboxes[container_id] = sandbox
            if sandbox.target is not None:
                publishing = self._publishing.publish(container_id, sandbox.name, sandbox.target, sandbox.request)
                # not `spawn`: its failure is raised by `opened`, or dropped by `leave`
                sandbox.opening = asyncio.ensure_future(publishing)
            undo.pop_all()
        for network, _ in plans:
            self._appeared(network, sandbox)
        path = None if any(network.record.name == HOST for network, _ in plans) else _path(sandbox.namespace)
        metrics.NETWORK_ACTIONS.since("allocate", began)
        return Joined(path, {network.record.name: sandbox.endpoints[network.record.id] for network, _ in plans})

    async def _assemble(
        self,
        sandbox: Sandbox,
        plans: Sequence[tuple[Network, EndpointSettings]],
        user: int,
        undo: contextlib.AsyncExitStack,
    ) -> dict[str, EndpointSettings]:
        """A namespace with all these endpoints where no ready one will do: a plugin makes one of
        them, or another container's user namespace owns it. They are made one by one, as the
        threads do not wait for plugins.

        Returns their settings by network id. Finished even if the caller is cancelled.
        """
        sandbox.namespace = await self._in_thread(sandboxes.empty, self._drivers.ids, user)
        undo.callback(sandboxes.close, sandbox.namespace)
        made = {}
        for network, endpoint in plans:
            made[network.record.id] = await self._plug(sandbox, network, endpoint)
            undo.push_async_callback(self._unplug, sandbox, network, made[network.record.id])
        await self._reroute(sandbox, plans[0][0], made.values())
        return made

    async def _plug(self, sandbox: Sandbox, network: Network, endpoint: EndpointSettings) -> EndpointSettings:
        """Make an endpoint in a namespace that exists; returns its settings."""
        container_id, namespace = sandbox.container_id, sandbox.namespace
        if network.record.remote:
            return await self._remote.attach(container_id, network, namespace, endpoint, sandbox.request)
        endpoint_id = await self._in_thread(self._drivers.plug, container_id, network, namespace, endpoint)
        return msgspec.structs.replace(endpoint, endpoint_id=endpoint_id)

    async def _lent(
        self, container_id: str, name: str, key: str, settings: EndpointSettings, undo: contextlib.AsyncExitStack
    ) -> tuple[Network, Assigned]:
        """The network of an entry in a container's settings, and the addresses that its lender has
        given if it is a shared one.
        """
        if self.lender is not None and is_swarm_id(settings.network_id):
            # perhaps not on this node now; this engine may have a network of the same name
            with contextlib.suppress(NotFound):
                return await self._lend(self.lender, container_id, name, key, settings, undo)
        try:
            network = self._meant(key, settings)
            if network.record.scope != SWARM:
                return network, _NONE_ASSIGNED
        except NotFound:
            if self.lender is None:
                raise
        if self.lender is None:
            raise ServerError(f"network {key}: it is a swarm's, and this node has left the swarm")
        return await self._lend(self.lender, container_id, name, key, settings, undo)

    async def _lend(
        self,
        lender: Lender,
        container_id: str,
        name: str,
        key: str,
        settings: EndpointSettings,
        undo: contextlib.AsyncExitStack,
    ) -> Lent:
        lent = await lender.lend(container_id, name, key, settings)
        undo.callback(lender.release, container_id, lent.network.record.id)
        return lent

    async def _give_back(self, container_id: str, network: Network) -> None:
        """Its endpoint on the network is gone."""
        await self._remote.release(container_id, network.record.id)
        if self.lender is not None and network.record.scope == SWARM:
            await self.lender.give_back(container_id, network.record.id)

    async def opened(self, container_id: str) -> tuple[Published, ...]:
        """Wait until the published ports of a container that has joined are open.

        Raises ServerError when one is taken.
        """
        sandbox = self._sandboxes.get(container_id)
        if sandbox is None or sandbox.opening is None:
            return ()
        ports = await shield(sandbox.opening)
        sandbox.opening = None
        return ports

    def runs(self, container_id: str) -> None:
        """The container's process holds its namespace from now on. One that has no link is not kept
        open.
        """
        sandbox = self._sandboxes.get(container_id)
        if sandbox is not None and not any(
            network.linked for key in sandbox.endpoints if (network := self._networks.by_id.get(key)) is not None
        ):
            sandbox.close()

    async def leave(self, container_id: str) -> None:
        """Release a container's sandbox, with its endpoints and ports.

        A container without one is fine.
        """
        await uninterrupted(self._leave(container_id))

    async def _leave(self, container_id: str) -> None:
        sandbox = self._sandboxes.get(container_id)
        if sandbox is None:
            return
        began = time.monotonic()
        async with sandbox.lock:
            if self._sandboxes.pop(container_id, None) is None:
                return
            if sandbox.opening is not None:
                await asyncio.gather(sandbox.opening, return_exceptions=True)
            try:
                # before another one can have its addresses
                await self._publishing.withdraw(container_id)
            finally:
                left = []
                for network_id in sandbox.endpoints:
                    await self._remote.detach(container_id, network_id)
                sandbox.close()
                self._resolver.close_for(container_id)
                for network_id, settings in sandbox.endpoints.items():
                    network = self._networks.by_id.get(network_id)
                    if network is not None:
                        self._disappeared(network, sandbox, settings)
                        if network.pools and not network.record.remote:
                            self._drivers.of(network).released(network, settings)
                        left.append(network)
                for network in left:
                    await self._give_back(container_id, network)
        metrics.NETWORK_ACTIONS.since("release", began)

    def restore(
        self,
        sandbox: Sandbox,
        networks: Mapping[str, EndpointSettings],
        process: Process,
        ports: Sequence[Published] = (),
        started_at: int = 0,
    ) -> None:
        """Restore the sandbox of a container that ran on without a daemon, since `started_at` (ns).

        It keeps its addresses, even outside of the present subnet. `serve_restored` opens its
        resolver.
        """
        container_id = sandbox.container_id
        if container_id in self._sandboxes:
            return
        for settings in networks.values():
            network = self._networks.by_id.get(settings.network_id)
            if network is None or not settings.endpoint_id:
                continue
            for address in endpoints.addresses(settings):
                try:
                    if address.version in network.pools:
                        network.place(address)[0].claim(address)
                except EngineError as error:
                    _log.warning(
                        "container %s: cannot claim its address, which it keeps: %s", container_id, error.message
                    )
            sandbox.endpoints[network.record.id] = settings
            network.sandboxes[container_id] = sandbox
            if network.linked:
                sandbox.process = process
        if not sandbox.endpoints:
            return
        self._sandboxes[container_id] = sandbox
        for network_id in sandbox.endpoints:
            self._add_names(self._networks.by_id[network_id], sandbox)
        sandbox.target = self._target(sandbox)
        if sandbox.target is not None:
            self._publishing.restore(container_id, sandbox.target, ports)
        if self._is_named(sandbox):
            self._unserved.append((started_at, sandbox))

    async def serve_restored(self) -> None:
        """Open the resolvers of restored containers, those that have started last before the
        others: they are the ones that still look for their peers.
        """
        waiting, self._unserved = self._unserved, []
        waiting.sort(key=lambda each: each[0], reverse=True)
        for begin in range(0, len(waiting), _SERVED_AT_ONCE):
            await asyncio.gather(*(self._serve_again(each) for _, each in waiting[begin : begin + _SERVED_AT_ONCE]))

    async def _serve_again(self, sandbox: Sandbox) -> None:
        async with sandbox.lock:
            if self._sandboxes.get(sandbox.container_id) is not sandbox:
                return  # it has ended meanwhile
            try:
                await self._serve_names(sandbox)
            except ServerError as error:
                _log.warning("%s", error.message)

    # --- connect and disconnect -------------------------------------------------------------------

    def check(self, container_id: str, name: str, settings: EndpointSettings, among: Iterable[str]) -> EndpointSettings:
        """Check that a container on the networks `among` may join one more; returns the settings to
        keep.

        Raises as `connect` does for a running container.
        """
        network = self._networks.get(name)
        record = network.record
        names = {*among}
        if record.name == HOST or HOST in names:
            raise Forbidden(
                f"network {record.name}, container {container_id}: "
                "container cannot be disconnected from host network or connected to host network"
            )
        if (record.name == NONE and names) or NONE in names - {record.name}:
            raise Forbidden(
                f"network {record.name}, container {container_id}: "
                "container cannot be connected to multiple networks with one of the networks in private (none) mode"
            )
        if record.name in names:
            raise Forbidden(f"endpoint of container {container_id} already exists in network {record.name}")
        for check in requested.checks(record.name, settings):
            check()
        self._networks.check_endpoint(record.id, settings)
        return endpoints.intent(settings, record)

    async def network_id(self, container_id: str, name: str, text: str, settings: EndpointSettings) -> str:
        """The id of a network that a container which does not run may join: one of this engine, or
        of its swarm.

        Raises NotFound, Forbidden, ServerError as `connect` does.
        """
        async with contextlib.AsyncExitStack() as undo:  # a shared network is only asked for
            network, _ = await self._lent(container_id, name, text, settings, undo)
            return network.record.id

    def check_connected(self, container_id: str, text: str, among: Mapping[str, EndpointSettings]) -> str:
        """The network's name.

        Raises Forbidden unless a container on the networks `among`, by their names, can leave it.
        """
        record = self._networks.get(text).record
        if record.name == HOST:
            raise Forbidden(
                f"container {container_id} cannot be disconnected from host network or connected to host network"
            )
        kept = among.get(record.name)
        # a swarm's network may have the name of one of this engine
        other = kept is not None and kept.network_id != record.id and kept.network_id in self._networks.by_id
        if kept is None or other:
            raise Forbidden(f"container {container_id} is not connected to the network {record.name}")
        return record.name

    async def connect(
        self, container_id: str, text: str, settings: EndpointSettings, process: Process
    ) -> EndpointSettings:
        """One more endpoint for a container that runs.

        Raises as `check` and `join` do; NotFound when it has no networks of its own.
        """
        began = time.monotonic()
        connected = await uninterrupted(self._connect(container_id, text, settings, process))
        metrics.NETWORK_ACTIONS.since("connect", began)
        return connected

    async def _connect(
        self, container_id: str, text: str, settings: EndpointSettings, process: Process
    ) -> EndpointSettings:
        sandbox = self._sandbox(container_id)
        async with sandbox.lock:
            self._sandbox(container_id)
            with contextlib.suppress(NotFound):  # a network that its lender has to find
                self.check(container_id, text, settings, self._network_names(sandbox))
            async with contextlib.AsyncExitStack() as undo:
                network, addresses = await self._lent(container_id, sandbox.name, text, settings, undo)
                record = network.record
                self.check(container_id, record.id, settings, self._network_names(sandbox))
                mac = requested.mac_address(settings.mac_address, f"network {record.name}")
                await self._remote.ready(container_id, record.id)
                if record.ipam_pools:
                    addresses, mac = await self._remote.lend(container_id, network, settings, mac, undo)
                endpoint = endpoints.allocate(network, settings, mac, addresses, ipv6=sandbox.ipv6)
                endpoint = _with_names(network, sandbox, endpoint)
                undo.callback(endpoints.release, network, endpoint)
                network.sandboxes[container_id] = sandbox
                undo.callback(network.sandboxes.pop, container_id, None)
                if network.linked:
                    self._find_namespace(sandbox, network, process)
                    endpoint = await self._plug(sandbox, network, endpoint)
                    undo.push_async_callback(self._leave_again, sandbox, network, endpoint)
                    await self._reroute(sandbox, network, [*sandbox.endpoints.values(), endpoint])
                else:
                    endpoint = msgspec.structs.replace(endpoint, endpoint_id=next(_NEW_IDS))
                sandbox.endpoints[record.id] = endpoint
                undo.callback(sandbox.endpoints.pop, record.id)
                await self._serve_names(sandbox)
                undo.pop_all()
            self._appeared(network, sandbox)
            await self._republish(sandbox)
            return endpoint

    async def _leave_again(self, sandbox: Sandbox, network: Network, endpoint: EndpointSettings) -> None:
        """Undo a connect that failed half-way: remove its link, restore the routes of the earlier
        endpoints.
        """
        await self._unplug(sandbox, network, endpoint)
        await self._reroute(sandbox, network, sandbox.endpoints.values())

    async def disconnect(self, container_id: str, text: str) -> None:
        """Remove one endpoint from a running container. Raises Forbidden when it has none there."""
        await uninterrupted(self._disconnect(container_id, text))

    async def _disconnect(self, container_id: str, text: str) -> None:
        sandbox = self._sandbox(container_id)
        async with sandbox.lock:
            self._sandbox(container_id)
            network = self._networks.get(text)
            connected = {self._networks.by_id[key].record.name: settings for key, settings in sandbox.endpoints.items()}
            self.check_connected(container_id, network.record.id, connected)
            settings = sandbox.endpoints[network.record.id]
            if not network.linked:
                del sandbox.endpoints[network.record.id]
                self._disappeared(network, sandbox, settings)
                return
            # First, or a repair would attach it again.
            before = sandbox.endpoints
            sandbox.endpoints = {key: other for key, other in before.items() if key != network.record.id}
            try:
                await self._unplug(sandbox, network, settings)
            except BaseException:
                sandbox.endpoints = before
                raise
            try:
                await self._republish(sandbox)
            finally:
                self._disappeared(network, sandbox, settings)
                await self._give_back(container_id, network)
            self._resolver.forward(container_id, self._leads_out(sandbox))
            try:
                await self._reroute(sandbox, network, sandbox.endpoints.values())
            except ServerError as error:  # the endpoint is gone, so the client is not refused
                _log.warning("default route after a disconnect: %s", error.message)

    async def _unplug(self, sandbox: Sandbox, network: Network, settings: EndpointSettings) -> None:
        if network.record.remote:
            await self._remote.detach(sandbox.container_id, network.record.id)
            return
        await self._in_thread(
            self._drivers.unplug, sandbox.container_id, network, sandbox.namespace, settings, settings.endpoint_id
        )

    def _find_namespace(self, sandbox: Sandbox, network: Network, process: Process) -> None:
        """The namespace of a container that has not been on a network with links."""
        if sandbox.namespace < 0:
            with error_context(network, sandbox.container_id):
                sandbox.namespace = namespaces.of_process(process.pid, process.pidfd, "net")

    async def _reroute(self, sandbox: Sandbox, network: Network, among: Iterable[EndpointSettings]) -> None:
        """Default routes by these endpoints, after the one on this network has changed."""
        gateways = endpoints.default_gateways(among, self._networks.by_id)
        if gateways:
            await self._in_thread(self._drivers.route, sandbox.container_id, network, sandbox.namespace, gateways)

    # --- published ports --------------------------------------------------------------------------

    def _lead(self, network_id: str, address: IPv4Address, there: bool) -> None:
        """In a thread: the host's route to an endpoint on a network of a swarm comes or goes."""
        network = self._networks.by_id.get(network_id)
        if network is not None:
            (self._drivers.overlays.lead if there else self._drivers.overlays.unlead)(network, address)

    def _target(self, sandbox: Sandbox) -> Target | None:
        return endpoints.target(sandbox.endpoints.values(), self._networks.by_id)

    def _outlet(self, sandbox: Sandbox) -> Network | None:
        """The network of the default route, if that leads out."""
        chosen = endpoints.outlet(sandbox.endpoints.values(), self._networks.by_id)
        network = self._networks.by_id[chosen.network_id] if chosen is not None else None
        return network if network is not None and not network.record.internal else None

    async def _republish(self, sandbox: Sandbox) -> None:
        """Move published ports to the endpoint of the default route; without one publish none."""
        try:
            await self._remote.expose(sandbox.container_id, self._outlet(sandbox), sandbox.request)
        except ServerError as error:  # as below
            _log.warning("container %s: %s", sandbox.container_id, error.message)
        target = self._target(sandbox)
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

    # --- static addresses of containers that do not run -------------------------------------------

    def reserve(self, networks: Mapping[str, EndpointSettings]) -> None:
        """Keep the static addresses of a container's settings for its next start.

        Other containers get them only by asking for them, or when no other address is free.
        """
        for network, address in self._static(networks):
            network.place(address)[0].reserve(address)

    def unreserve(self, networks: Mapping[str, EndpointSettings]) -> None:
        """Undo one `reserve` with these settings."""
        for network, address in self._static(networks):
            network.place(address)[0].unreserve(address)

    def _static(self, networks: Mapping[str, EndpointSettings]) -> Iterator[tuple[Network, Address]]:
        """Static addresses with their networks; settings that are no longer valid have none."""
        for key, settings in networks.items():
            if settings.ipam_config is None:
                continue
            try:
                network = self._meant(key, settings)
                static = requested.wanted_addresses(network.record, settings)
            except EngineError:
                continue
            for address in static.values():
                yield network, address

    # --- endpoints come and go --------------------------------------------------------------------

    def _appeared(self, network: Network, sandbox: Sandbox) -> None:
        """Record a configured endpoint: of a container whose process does not run yet, or that was
        connected while it runs.
        """
        network.generation += 1
        self._add_names(network, sandbox)
        self._networks.publish(network, "connect", container=sandbox.container_id)

    def _disappeared(self, network: Network, sandbox: Sandbox, settings: EndpointSettings) -> None:
        """Forget an endpoint that is gone, or is about to go with its namespace."""
        network.sandboxes.pop(sandbox.container_id, None)
        self._names.remove(settings.endpoint_id)
        if network.overlay is not None:
            self._networks.overlays.ended(network.record.id, endpoints.addresses(settings))
        endpoints.release(network, settings)
        network.generation += 1
        self._networks.publish(network, "disconnect", container=sandbox.container_id)

    def renamed(self, container_id: str, name: str) -> None:
        """Update the name under which networks show a running container."""
        sandbox = self._sandboxes.get(container_id)
        if sandbox is not None:
            sandbox.name = name
            for network_id, settings in sandbox.endpoints.items():
                network = self._networks.by_id[network_id]
                network.generation += 1
                sandbox.endpoints[network_id] = _with_names(network, sandbox, settings)
                self._add_names(network, sandbox)
        if self.lender is not None:
            self.lender.renamed(container_id)

    def _add_names(self, network: Network, sandbox: Sandbox) -> None:
        """Containers on a user-defined network find one another by name and aliases.

        Predefined networks and a swarm's ingress network have no names.
        """
        settings = sandbox.endpoints[network.record.id]
        if not _has_names(network):
            return
        links = (text.partition(":") for text in settings.links or ())
        self._names.add(
            settings.endpoint_id,
            network_id=network.record.id,
            network=network.record.name,
            container_id=sandbox.container_id,
            names=_with_names(network, sandbox, settings).dns_names or (),
            addresses=endpoints.addresses(settings),
            links={alias or target: target for target, _, alias in links},
        )

    async def _serve_names(self, sandbox: Sandbox) -> None:
        """Open the resolver of a container on a user-defined network. Raises ServerError."""
        if self._is_named(sandbox) and sandbox.namespace >= 0:
            await self._resolver.open_for(
                sandbox.container_id,
                sandbox.namespace,
                servers=sandbox.servers,
                forward=self._leads_out(sandbox),
                again=sandbox.process is not None,
            )

    def _is_named(self, sandbox: Sandbox) -> bool:
        return any(_has_names(self._networks.by_id[each]) for each in sandbox.endpoints)

    def _leads_out(self, sandbox: Sandbox) -> bool:
        return any(not self._networks.by_id[each].closed for each in sandbox.endpoints)

    # --- looking up -------------------------------------------------------------------------------

    def _meant(self, key: str, settings: EndpointSettings) -> Network:
        """The network of an entry in a container's settings: by its id, otherwise by its name.

        Raises NotFound.

        Found by name when a network was removed and another one created under its name.
        """
        if settings.network_id in self._networks.by_id:
            return self._networks.by_id[settings.network_id]
        return self._networks.get(self._networks.name_of(key))

    def _sandbox(self, container_id: str) -> Sandbox:
        sandbox = self._sandboxes.get(container_id)
        if sandbox is None:
            raise NotFound(f"container {container_id} has left its networks")
        return sandbox

    def _network_names(self, sandbox: Sandbox) -> list[str]:
        return [self._networks.by_id[each].record.name for each in sandbox.endpoints]


def _has_names(network: Network) -> bool:
    return not network.record.predefined and not (network.overlay is not None and network.overlay.ingress)


def _with_names(network: Network, sandbox: Sandbox, settings: EndpointSettings) -> EndpointSettings:
    """The settings with the names of the endpoint."""
    if not _has_names(network):
        return settings
    return endpoints.with_names(settings, sandbox.container_id, sandbox.name, sandbox.hostname)


def _path(namespace: int) -> str:
    """The namespace for the OCI runtime, which another process starts: valid while the descriptor
    is open.
    """
    return f"/proc/{os.getpid()}/fd/{namespace}" if namespace >= 0 else ""
