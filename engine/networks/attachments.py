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
from engine.errors import EngineError, Forbidden, NotFound, ServerError, words
from engine.networks import endpoints, requested, sandboxes
from engine.networks.dns.resolver import Resolver
from engine.networks.drivers import error_context
from engine.networks.endpoints import Assigned, Network, Sandbox
from engine.networks.network import HOST, NONE
from engine.networks.networks import Networks
from engine.networks.ports import Published
from engine.networks.publishing import Publishing, Request, Target
from engine.system import namespaces
from engine.system.tasks import shield
from engine.system.threads import uninterrupted
from engine.wire.containers import EndpointSettings

_log = logging.getLogger(__name__)

_NO_PORTS = Request()
_NOT_ASSIGNED: Mapping[str, Assigned] = {}
_NONE_ASSIGNED: Assigned = {}
_NEW_IDS = iter(lambda: secrets.token_hex(32), "")
"""Ids of endpoints without links."""
_NO_MACS: Mapping[str, str] = {}
_NO_SYSCTLS: Mapping[str, str] = {}


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


class Lent(NamedTuple):
    """What an endpoint gets on a network that several engines share."""

    found: Network
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
            sandboxes.close(sandbox.namespace)
        await self._resolver.close()
        await self._publishing.close()
        self._sandboxes.clear()

    # --- start and end of a container -------------------------------------------------------------

    async def join(  # noqa: PLR0913 - all that a sandbox is made of
        self,
        container_id: str,
        name: str,
        wanted: Mapping[str, EndpointSettings],
        primary: str,
        macs: Mapping[str, str] = _NO_MACS,
        servers: Sequence[str] = (),
        request: Request = _NO_PORTS,
        assigned: Mapping[str, Assigned] = _NOT_ASSIGNED,
        hostname: str = "",
        *,
        ipv6: bool = True,
        user: int = -1,
        sysctls: Mapping[str, str] = _NO_SYSCTLS,
    ) -> Joined:
        """Namespace and endpoints for a container that starts.

        The endpoint on the network `primary` comes first. `macs` are requested addresses, by
        network name. `servers` are the container's own name servers, for names that are not a
        container's. `assigned`: addresses chosen by an allocator outside of the engine, by the keys
        of `wanted`. `ipv6`: False if its sysctls switch IPv6 off. `user`: a descriptor of the user
        namespace that must own the namespace; -1: one of its own, or none. `sysctls`: of the
        namespace, by path below /proc/sys/net; not for one that the runtime makes.

        Published ports open in the background while the rest of the start is prepared. Await
        `opened` before the container runs.

        Raises NotFound for a missing network, InvalidParameter and Forbidden for addresses,
        ServerError when they or the ports of a bridge are exhausted or the kernel refuses.
        """
        began = time.monotonic()
        if container_id in self._sandboxes:
            await self.leave(container_id)
        if container_id in self._remote:
            await uninterrupted(self._remote.ready(container_id))
        order = sorted(wanted.items(), key=lambda item: item[0] != primary)
        sandbox = Sandbox(container_id, name, servers, hostname, ipv6=ipv6)
        async with contextlib.AsyncExitStack() as undo:
            chosen = []
            for key, settings in order:
                found, lent = await self._lent(container_id, name, key, settings, undo)
                mac = macs.get(found.record.name, "")
                addresses = assigned.get(key, lent)
                if found.record.ipam_pools:
                    lending = self._remote.lend(container_id, found, settings, mac, undo)
                    addresses, mac = await uninterrupted(lending)
                chosen.append((found, settings, mac, addresses))
            plans = []
            for found, settings, mac, addresses in chosen:
                given = endpoints.allocate(found, settings, mac, addresses, ipv6=ipv6)
                undo.callback(endpoints.release, found, given)
                found.sandboxes[container_id] = sandbox
                undo.callback(found.sandboxes.pop, container_id, None)
                plans.append((found, _with_names(found, sandbox, given)))
            linked = [(found, given) for found, given in plans if found.linked]
            ids: list[str] = []
            sandbox.request = request
            by_plugin = any(found.record.remote for found, _ in linked)
            if by_plugin or (linked and user >= 0):
                made = await uninterrupted(self._assemble(sandbox, linked, user, undo))
                plans = [(found, made.get(found.record.id, given)) for found, given in plans]
            elif linked:
                gateways = endpoints.default_gateways((given for _, given in linked), self._networks.by_id)
                sandbox.namespace, ids = await self._networks.workers.undone_if_cancelled(
                    lambda built: self._drivers.close_sandbox(linked, *built),
                    *(self._drivers.new_sandbox, container_id, linked, gateways),
                )
                undo.push_async_callback(self._in_thread, self._drivers.close_sandbox, linked, sandbox.namespace, ids)
            elif user < 0 and self._drivers.ids is None and all(found.record.name != HOST for found, _ in plans):
                sandbox.namespace = await self._networks.workers.undone_if_cancelled(
                    sandboxes.close, self._drivers.bare
                )
                undo.callback(sandboxes.close, sandbox.namespace)
            if sysctls and sandbox.namespace >= 0:
                await self._in_thread(sandboxes.set_sysctls, sandbox.namespace, sysctls.items())
            undo.callback(sandbox.endpoints.clear)  # or a repair would attach them again
            numbers = iter(ids)
            for found, given in plans:
                endpoint_id = given.endpoint_id or next(numbers if found.linked else _NEW_IDS)
                sandbox.endpoints[found.record.id] = msgspec.structs.replace(given, endpoint_id=endpoint_id)
            sandbox.target = self._target(sandbox)
            await self._serve_names(sandbox)
            if by_plugin:
                await uninterrupted(self._remote.expose(container_id, self._outlet(sandbox), request))
            self._sandboxes[container_id] = sandbox
            if sandbox.target is not None:
                publishing = self._publishing.publish(container_id, name, sandbox.target, request)
                # not `spawn`: its failure is raised by `opened`, or dropped by `leave`
                sandbox.opening = asyncio.ensure_future(publishing)
            undo.pop_all()
        for found, _ in plans:
            self._appeared(found, sandbox)
        path = None if any(found.record.name == HOST for found, _ in plans) else _path(sandbox.namespace)
        metrics.NETWORK_ACTIONS.since("allocate", began)
        return Joined(path, {found.record.name: sandbox.endpoints[found.record.id] for found, _ in plans})

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
        for found, given in plans:
            made[found.record.id] = await self._plug(sandbox, found, given)
            undo.push_async_callback(self._unplug, sandbox, found, made[found.record.id])
        await self._reroute(sandbox, plans[0][0], made.values())
        return made

    async def _plug(self, sandbox: Sandbox, found: Network, given: EndpointSettings) -> EndpointSettings:
        """Make an endpoint in a namespace that exists; returns its settings."""
        container_id, namespace = sandbox.container_id, sandbox.namespace
        if found.record.remote:
            return await self._remote.attach(container_id, found, namespace, given, sandbox.request)
        endpoint_id = await self._in_thread(self._drivers.plug, container_id, found, namespace, given)
        return msgspec.structs.replace(given, endpoint_id=endpoint_id)

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
            found = self._meant(key, settings)
            if found.record.scope != SWARM:
                return found, _NONE_ASSIGNED
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
        undo.callback(lender.release, container_id, lent.found.record.id)
        return lent

    async def _give_back(self, container_id: str, found: Network) -> None:
        """Its endpoint on the network is gone."""
        await self._remote.release(container_id, found.record.id)
        if self.lender is not None and found.record.scope == SWARM:
            await self.lender.give_back(container_id, found.record.id)

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
            found.linked for key in sandbox.endpoints if (found := self._networks.by_id.get(key)) is not None
        ):
            sandboxes.close(sandbox.namespace)
            sandbox.namespace = -1

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
                sandboxes.close(sandbox.namespace)
                self._resolver.close_for(container_id)
                for network_id, settings in sandbox.endpoints.items():
                    found = self._networks.by_id.get(network_id)
                    if found is not None:
                        self._disappeared(found, sandbox, settings)
                        if found.pools and not found.record.remote:
                            self._drivers.of(found).released(found, settings)
                        left.append(found)
                for found in left:
                    await self._give_back(container_id, found)
        metrics.NETWORK_ACTIONS.since("release", began)

    async def restore(
        self,
        container_id: str,
        name: str,
        kept: Mapping[str, EndpointSettings],
        process: Process,
        servers: Sequence[str] = (),
        request: Request = _NO_PORTS,
        ports: Sequence[Published] = (),
        hostname: str = "",
        *,
        ipv6: bool = True,
    ) -> None:
        """Restore the sandbox of a container that ran on without a daemon.

        It keeps its addresses, even outside of the present subnet.
        """
        if container_id in self._sandboxes:
            return
        sandbox = Sandbox(container_id, name, servers, hostname, ipv6=ipv6)
        for settings in kept.values():
            found = self._networks.by_id.get(settings.network_id)
            if found is None or not settings.endpoint_id:
                continue
            for address in endpoints.addresses(settings):
                try:
                    if address.version in found.pools:
                        found.place(address)[0].claim(address)
                except EngineError as error:
                    _log.warning(
                        "container %s: cannot claim its address, which it keeps: %s", container_id, error.message
                    )
            sandbox.endpoints[found.record.id] = settings
            found.sandboxes[container_id] = sandbox
            if found.linked and sandbox.namespace < 0:
                try:
                    sandbox.namespace = namespaces.of_process(process.pid, process.pidfd, "net")
                except OSError as error:  # the process has ended; its exit will undo all this
                    _log.info("container %s: opening its network namespace: %s", container_id, words(error))
        if not sandbox.endpoints:
            return
        self._sandboxes[container_id] = sandbox
        for network_id in sandbox.endpoints:
            self._add_names(self._networks.by_id[network_id], sandbox)
        sandbox.request = request
        sandbox.target = self._target(sandbox)
        if sandbox.target is not None:
            self._publishing.restore(container_id, sandbox.target, ports)
        async with sandbox.lock:
            try:
                await self._serve_names(sandbox, again=True)
            except ServerError as error:
                _log.warning("%s", error.message)

    # --- connect and disconnect -------------------------------------------------------------------

    def check(self, container_id: str, name: str, wanted: EndpointSettings, among: Iterable[str]) -> EndpointSettings:
        """Check that a container on the networks `among` may join one more; returns the settings to
        keep.

        Raises as `connect` does for a running container.
        """
        found = self._networks.get(name)
        record = found.record
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
        for check in requested.checks(record.name, wanted):
            check()
        self._networks.check_endpoint(record.id, wanted)
        return endpoints.intent(wanted, record)

    async def found(self, container_id: str, name: str, text: str, wanted: EndpointSettings) -> str:
        """The id of a network that a container which does not run may join: one of this engine, or
        of its swarm.

        Raises NotFound, Forbidden, ServerError as `connect` does.
        """
        async with contextlib.AsyncExitStack() as undo:  # a shared network is only asked for
            found, _ = await self._lent(container_id, name, text, wanted, undo)
            return found.record.id

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
        began = time.monotonic()
        connected = await uninterrupted(self._connect(container_id, text, wanted, process, assigned or {}))
        metrics.NETWORK_ACTIONS.since("connect", began)
        return connected

    async def _connect(
        self, container_id: str, text: str, wanted: EndpointSettings, process: Process, assigned: Assigned
    ) -> EndpointSettings:
        sandbox = self._sandbox(container_id)
        async with sandbox.lock:
            self._sandbox(container_id)
            with contextlib.suppress(NotFound):  # a network that its lender has to find
                self.check(container_id, text, wanted, self._network_names(sandbox))
            async with contextlib.AsyncExitStack() as undo:
                found, lent = await self._lent(container_id, sandbox.name, text, wanted, undo)
                record = found.record
                self.check(container_id, record.id, wanted, self._network_names(sandbox))
                mac = requested.mac_address(wanted.mac_address, f"network {record.name}")
                await self._remote.ready(container_id, record.id)
                if record.ipam_pools:
                    lent, mac = await self._remote.lend(container_id, found, wanted, mac, undo)
                given = endpoints.allocate(found, wanted, mac, assigned or lent, ipv6=sandbox.ipv6)
                given = _with_names(found, sandbox, given)
                undo.callback(endpoints.release, found, given)
                found.sandboxes[container_id] = sandbox
                undo.callback(found.sandboxes.pop, container_id, None)
                if found.linked:
                    self._find_namespace(sandbox, found, process)
                    given = await self._plug(sandbox, found, given)
                    undo.push_async_callback(self._leave_again, sandbox, found, given)
                    await self._reroute(sandbox, found, [*sandbox.endpoints.values(), given])
                else:
                    given = msgspec.structs.replace(given, endpoint_id=next(_NEW_IDS))
                sandbox.endpoints[record.id] = given
                undo.callback(sandbox.endpoints.pop, record.id)
                await self._serve_names(sandbox)
                undo.pop_all()
            self._appeared(found, sandbox)
            await self._republish(sandbox)
            return given

    async def _leave_again(self, sandbox: Sandbox, found: Network, given: EndpointSettings) -> None:
        """Undo a connect that failed half-way: remove its link, restore the routes of the earlier
        endpoints.
        """
        await self._unplug(sandbox, found, given)
        await self._reroute(sandbox, found, sandbox.endpoints.values())

    async def disconnect(self, container_id: str, text: str) -> None:
        """Remove one endpoint from a running container. Raises Forbidden when it has none there."""
        await uninterrupted(self._disconnect(container_id, text))

    async def _disconnect(self, container_id: str, text: str) -> None:
        sandbox = self._sandbox(container_id)
        async with sandbox.lock:
            self._sandbox(container_id)
            found = self._networks.get(text)
            connected = {self._networks.by_id[key].record.name: each for key, each in sandbox.endpoints.items()}
            self.check_connected(container_id, found.record.id, connected)
            settings = sandbox.endpoints[found.record.id]
            if not found.linked:
                del sandbox.endpoints[found.record.id]
                self._disappeared(found, sandbox, settings)
                return
            # First, or a repair would attach it again.
            before = sandbox.endpoints
            sandbox.endpoints = {key: each for key, each in before.items() if key != found.record.id}
            try:
                await self._unplug(sandbox, found, settings)
            except BaseException:
                sandbox.endpoints = before
                raise
            try:
                await self._republish(sandbox)
            finally:
                self._disappeared(found, sandbox, settings)
                await self._give_back(container_id, found)
            self._resolver.forward(container_id, self._leads_out(sandbox))
            try:
                await self._reroute(sandbox, found, sandbox.endpoints.values())
            except ServerError as error:  # the endpoint is gone, so the client is not refused
                _log.warning("default route after a disconnect: %s", error.message)

    async def _unplug(self, sandbox: Sandbox, found: Network, settings: EndpointSettings) -> None:
        if found.record.remote:
            await self._remote.detach(sandbox.container_id, found.record.id)
            return
        await self._in_thread(
            self._drivers.unplug, sandbox.container_id, found, sandbox.namespace, settings, settings.endpoint_id
        )

    def _find_namespace(self, sandbox: Sandbox, found: Network, process: Process) -> None:
        """The namespace that the runtime made (NetworkMode none), or that is unknown after a
        restart of the daemon.
        """
        if sandbox.namespace < 0:
            with error_context(found, sandbox.container_id):
                sandbox.namespace = namespaces.of_process(process.pid, process.pidfd, "net")

    async def _reroute(self, sandbox: Sandbox, found: Network, left: Iterable[EndpointSettings]) -> None:
        """Default routes by these endpoints, after the one on the network `found` has changed."""
        gateways = endpoints.default_gateways(left, self._networks.by_id)
        if gateways:
            await self._in_thread(self._drivers.route, sandbox.container_id, found, sandbox.namespace, gateways)

    # --- published ports --------------------------------------------------------------------------

    def _lead(self, network_id: str, address: IPv4Address, there: bool) -> None:
        """In a thread: the host's route to an endpoint on a network of a swarm comes or goes."""
        found = self._networks.by_id.get(network_id)
        if found is not None:
            (self._drivers.overlays.lead if there else self._drivers.overlays.unlead)(found, address)

    def _target(self, sandbox: Sandbox) -> Target | None:
        return endpoints.target(sandbox.endpoints.values(), self._networks.by_id)

    def _outlet(self, sandbox: Sandbox) -> Network | None:
        """The network of the default route, if that leads out."""
        chosen = endpoints.outlet(sandbox.endpoints.values(), self._networks.by_id)
        found = self._networks.by_id[chosen.network_id] if chosen is not None else None
        return found if found is not None and not found.record.internal else None

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

    def reserve(self, wanted: Mapping[str, EndpointSettings]) -> None:
        """Keep the static addresses of a container's settings for its next start.

        Other containers get them only by asking for them, or when no other address is free.
        """
        for found, address in self._static(wanted):
            found.place(address)[0].reserve(address)

    def unreserve(self, wanted: Mapping[str, EndpointSettings]) -> None:
        """Undo one `reserve` with these settings."""
        for found, address in self._static(wanted):
            found.place(address)[0].unreserve(address)

    def _static(self, wanted: Mapping[str, EndpointSettings]) -> Iterator[tuple[Network, Address]]:
        """Static addresses with their networks; settings that are no longer valid have none."""
        for key, settings in wanted.items():
            if settings.ipam_config is None:
                continue
            try:
                found = self._meant(key, settings)
                static = requested.wanted_addresses(found.record, settings)
            except EngineError:
                continue
            for address in static.values():
                yield found, address

    # --- endpoints come and go --------------------------------------------------------------------

    def _appeared(self, found: Network, sandbox: Sandbox) -> None:
        """Record a configured endpoint: of a container whose process does not run yet, or that was
        connected while it runs.
        """
        found.generation += 1
        self._add_names(found, sandbox)
        self._networks.publish(found, "connect", container=sandbox.container_id)

    def _disappeared(self, found: Network, sandbox: Sandbox, settings: EndpointSettings) -> None:
        """Forget an endpoint that is gone, or is about to go with its namespace."""
        found.sandboxes.pop(sandbox.container_id, None)
        self._names.remove(settings.endpoint_id)
        if found.overlay is not None:
            self._networks.overlays.ended(found.record.id, endpoints.addresses(settings))
        endpoints.release(found, settings)
        found.generation += 1
        self._networks.publish(found, "disconnect", container=sandbox.container_id)

    def renamed(self, container_id: str, name: str) -> None:
        """Update the name under which networks show a running container."""
        sandbox = self._sandboxes.get(container_id)
        if sandbox is not None:
            sandbox.name = name
            for network_id, settings in sandbox.endpoints.items():
                found = self._networks.by_id[network_id]
                found.generation += 1
                sandbox.endpoints[network_id] = _with_names(found, sandbox, settings)
                self._add_names(found, sandbox)
        if self.lender is not None:
            self.lender.renamed(container_id)

    def _add_names(self, found: Network, sandbox: Sandbox) -> None:
        """Containers on a user-defined network find one another by name and aliases.

        Predefined networks and a swarm's ingress network have no names.
        """
        settings = sandbox.endpoints[found.record.id]
        if not _has_names(found):
            return
        links = (text.partition(":") for text in settings.links or ())
        self._names.add(
            settings.endpoint_id,
            network_id=found.record.id,
            network=found.record.name,
            container_id=sandbox.container_id,
            names=_with_names(found, sandbox, settings).dns_names or (),
            addresses=endpoints.addresses(settings),
            links={alias or target: target for target, _, alias in links},
        )

    async def _serve_names(self, sandbox: Sandbox, *, again: bool = False) -> None:
        """Open the resolver of a container on a user-defined network; `again` after a restart of
        the daemon.

        Raises ServerError.
        """
        named = any(_has_names(self._networks.by_id[each]) for each in sandbox.endpoints)
        if named and sandbox.namespace >= 0:
            await self._resolver.open_for(
                sandbox.container_id,
                sandbox.namespace,
                servers=sandbox.servers,
                forward=self._leads_out(sandbox),
                again=again,
            )

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


def _has_names(found: Network) -> bool:
    return not found.record.predefined and not (found.overlay is not None and found.overlay.ingress)


def _with_names(found: Network, sandbox: Sandbox, settings: EndpointSettings) -> EndpointSettings:
    """The settings with the names of the endpoint."""
    if not _has_names(found):
        return settings
    return endpoints.with_names(settings, sandbox.container_id, sandbox.name, sandbox.hostname)


def _path(namespace: int) -> str:
    """The namespace for the OCI runtime, which another process starts: valid while the descriptor
    is open.
    """
    return f"/proc/{os.getpid()}/fd/{namespace}" if namespace >= 0 else ""
