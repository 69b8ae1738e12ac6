"""The networks of a swarm on this node: adopted, filled and dropped as the cluster says.

This is all that `engine/cluster` calls. A network here is like any other for containers
(`Networks.by_id`), with the driver `overlay` (`driver.py`), but it is not stored: the swarm's
managers keep it, and the cluster's part of the daemon keeps their view of it on disk. Every call is
idempotent, so that a whole view may be applied again after any failure.

A task needs a network that this node does not have. Its part of the view is applied in an order in
which no traffic is led to what cannot be reached yet::

    await overlays.adopt(record, meant)                # a namespace with bridge and VXLAN device
    await overlays.set_peers(id, {endpoint: node}, ()) # where frames to each endpoint are sent
    await overlays.set_services(id, {virtual: backends}, ())  # addresses that are balanced
    overlays.set_names(id, {service: names}, ())       # what DNS answers
    await overlays.set_ports(ports)                    # of the network `ingress` alone

Later calls have what has changed. The route to an endpoint that has left goes last. When the last
task has gone, `drop` removes the network, and refuses while a container is on it.

A daemon that starts again finds the namespaces with the monitor (`Keeper`). It adopts with `keep`,
so that containers keep their traffic if that fails, and calls `settle` when all views are applied
and all running containers are known. `mend` repairs what other programs have changed in the kernel.

Owns: which networks are adopted, their endpoints on other nodes, services and names as last set.
Runs on the event loop; kernel work goes to threads (`drivers.Workers`). Locks: `_Adopted.lock`, for
the changes of one network; `Network` and locks of `driver.py` as there.
Raises: ServerError that names the network; Forbidden for `drop` of a network with containers.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Collection, Coroutine, Iterable, Mapping, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address
from typing import Any, Protocol

import msgspec

from engine.errors import EngineError, NotFound, ServerError, words
from engine.networks import endpoints, sandboxes
from engine.networks.dns.names import Names, NameTable
from engine.networks.drivers import Drivers, Workers
from engine.networks.endpoints import Network, Sandbox
from engine.networks.filter import OVERLAY_LINK
from engine.networks.network import NetworkRecord, NetworkStore, Overlay, options
from engine.networks.overlay import driver as overlay
from engine.networks.overlay.balance import Balance
from engine.networks.overlay.driver import Space
from engine.networks.overlay.ingress import Ingress, Port, Ports, answer_datagrams, remove_leftovers
from engine.system.netfilter import NetfilterError
from engine.system.netlink.rtnl import Disturbances
from engine.system.tasks import spawn
from engine.system.threads import cancelled, uninterrupted

LOOK = 120.0
"""Seconds between two comparisons of all networks with the kernel: not every change causes a
notice.
"""
PAUSE = 0.2
"""Seconds between a notice about a change by another program and the repair."""

_log = logging.getLogger(__name__)

RETRY = 5.0
"""Seconds between two attempts to take a published port that another program has."""
ANSWER, UNANSWERED = 0.1, 1.0
"""Seconds that a withdrawn backend has to answer the datagrams that it has got, and new
connections.
"""


class Keeper(Protocol):
    """Holds descriptors for the next daemon: the monitor."""

    @property
    def held(self) -> Mapping[str, int]:
        """By name, those of an earlier daemon as well."""
        ...

    def hold(self, name: str, descriptor: int) -> None:
        """Hold a duplicate. It replaces the one of that name."""
        ...

    def let_go(self, name: str) -> None:
        """Close the one of that name, if there is one."""
        ...


class _Adopted:
    """One network of the swarm on this node."""

    __slots__ = ("balance", "disturbances", "lock", "name", "network")

    def __init__(self, network: Network, name: str, balance: Balance, disturbances: Disturbances) -> None:
        self.network = network
        self.balance = balance
        self.disturbances = disturbances
        self.name = name
        """Under which the keeper holds its namespace."""
        self.lock = asyncio.Lock()


class Overlays:
    """One engine's."""

    def __init__(
        self,
        store: NetworkStore,
        by_id: dict[str, Network],
        drivers: Drivers,
        workers: Workers,
        names: NameTable,
        keeper: Keeper | None,
    ) -> None:
        """`store` and `by_id` get the adopted networks, for lookups. Without a `keeper`, containers
        lose their networks when the daemon is killed.
        """
        self._store = store
        self._by_id = by_id
        self._drivers = drivers
        self._in_thread = workers.run
        self._names = names
        self._forgetting: set[asyncio.Task[None]] = set()
        """Connections of backends that have gone are being forgotten."""
        self._unanswered: dict[Balance | Ingress, set[IPv4Address]] = {}
        """Withdrawn backends, by what led to them."""
        self._all: dict[str, _Adopted] = {}
        self._awaited: dict[str, Network] = {}
        """Networks that could not be adopted when the daemon started, by id."""
        self._adopting = asyncio.Lock()
        self._ingress: tuple[Network, Ingress] | None = None
        """The network by which the nodes reach tasks, if there is one on this node."""
        self._answering: set[str] = set()
        """Ids of endpoints whose containers answer datagrams."""
        self._retrying: asyncio.Task[None] | None = None
        self._ports = asyncio.Lock()
        """Held for changes of published ports, in their order."""
        self._disturbed_ones: set[str] = set()
        self._mending: asyncio.Task[None] | None = None
        self._features: tuple[str, ...] | None = None
        self._released = 0
        self._clearing: asyncio.TimerHandle | None = None
        self._looking: asyncio.Task[None] | None = None
        self.keeper = keeper

    async def adopt(self, record: NetworkRecord, meant: Overlay, *, keep: bool = False) -> Network:
        """Make the network on this node, or find it after a restart of the daemon.

        `record` has the driver "overlay", the scope "swarm", a subnet and a gateway. Raises
        ServerError; nothing is left then. With `keep` a failure leaves what an earlier daemon has
        made, and the endpoints of containers that ran on, for the next attempt or `drop`.
        """
        return await uninterrupted(self._adopt(record, meant, keep))

    async def _adopt(self, record: NetworkRecord, meant: Overlay, keep: bool) -> Network:
        async with self._adopting:
            known = self._all.get(record.id)
            if known is not None:
                async with known.lock:
                    before = known.network.record, known.network.overlay
                    if before != (record, meant):
                        known.network.record, known.network.overlay = record, meant
                        try:
                            await self._in_thread(self._made, known.network, -1)
                        except BaseException:
                            known.network.record, known.network.overlay = before
                            raise
                        self._store.show(record)
                        await self._move_ingress(known.network, meant)
                    return known.network
            network = self._awaited.get(record.id)
            if network is None:
                own = msgspec.structs.replace(options(record), bridge=f"{OVERLAY_LINK}{record.id[:12]}")
                network = Network(record, own, routes=not record.internal)
                network.fill()
            network.record, network.overlay = record, meant
            name = _name(network)
            if self.keeper is not None:
                # of another swarm, whose number would be in use
                for other in [*self.keeper.held]:
                    if other.startswith(f"overlay {meant.vni} ") and other != name:
                        self.keeper.let_go(other)
            kept = self.keeper.held.get(name, -1) if self.keeper is not None else -1
            try:
                space = await self._in_thread(self._made, network, kept)
            except BaseException:
                if keep:
                    self._await(network)
                raise
            if self.keeper is not None and kept < 0:
                self.keeper.hold(name, space.descriptor)
            self._drivers.overlays.lingers = self._lingers
            balance = Balance(space.descriptor, overlay.gateway(network))
            adopted = self._all[record.id] = _Adopted(network, name, balance, space.disturbances)
            space.disturbances.take()  # of the links that were just made
            asyncio.get_running_loop().add_reader(space.disturbances.fileno(), self._disturbed, adopted)
            late = self._awaited.pop(record.id, None) is not None
            self._by_id[record.id] = network
            self._store.show(record)
            if self._looking is None:
                self._looking = spawn(self._look(), "comparing the swarm's networks with the kernel")
            if meant.ingress:
                await self._open_ingress(network)
            if late:
                await self._attach(network)
            return network

    def _await(self, network: Network) -> None:
        self._awaited[network.record.id] = self._by_id[network.record.id] = network
        self._store.show(network.record)
        self._drivers.filter.awaited.add(network.bridge)

    async def _attach(self, network: Network) -> None:
        """Attach containers again whose link is gone."""
        try:
            await self._rerouted(network, await self._in_thread(self._drivers.overlays.replug, network))
        except (EngineError, NetfilterError, OSError) as error:
            _log.error("network %s: %s", network.record.name, words(error))

    async def _open_ingress(self, network: Network) -> None:
        """What fails here is tried again by `mend`."""
        if self._drivers.filter.off:
            _log.warning(
                "network %s: published ports of services are not served on this node, as --firewall none writes no "
                "rules",
                network.record.name,
            )
            return
        async with self._ports:
            assert network.overlay is not None
            subnet = network.pools[4].subnet
            assert isinstance(subnet, IPv4Network)
            driver = self._drivers.overlays
            made = Ingress(
                self._drivers.filter, driver.namespace(network), network.bridge, subnet, network.overlay.local
            )
            self._ingress = network, made
            try:
                await self._in_thread(driver.lead, network, subnet)
                await self._in_thread(made.open)
            except (EngineError, NetfilterError, OSError) as error:
                _log.error("network %s: published ports of services do not work: %s", network.record.name, words(error))

    async def _move_ingress(self, network: Network, meant: Overlay) -> None:
        """This node may have another address now. What fails here is tried again by `mend`."""
        async with self._ports:
            if self._ingress is not None and network is self._ingress[0]:
                try:
                    await self._in_thread(self._ingress[1].moved, meant.local)
                except (NetfilterError, OSError) as error:
                    _log.error(
                        "network %s: published ports of services do not work: %s", network.record.name, words(error)
                    )

    async def _close_ingress(self, network: Network | None, *, remove: bool) -> None:
        async with self._ports:
            if self._ingress is None or network not in (None, self._ingress[0]):
                return
            _, ingress = self._ingress
            self._ingress = None
            try:
                await self._in_thread(ingress.close, remove)
            except (NetfilterError, OSError) as error:
                _log.warning("cannot remove the rules of published ports of services: %s", words(error))

    def _made(self, network: Network, kept: int) -> Space:
        """In a thread."""
        try:
            assert network.overlay is not None
            mtu = options(network.record).mtu or self._drivers.mtu(network.overlay, kept)
            network.options = msgspec.structs.replace(network.options, mtu=mtu)
            return self._drivers.overlays.adopt(network, kept)
        except OSError as error:
            raise ServerError(f"network {network.record.name}: {error.strerror or error}") from error

    async def drop(self, network_id: str) -> None:
        """Remove the network from this node, with all that belongs to it. An unknown one is fine.

        Raises Forbidden while containers are on it.
        """
        await uninterrupted(self._drop(network_id))

    async def _drop(self, network_id: str) -> None:
        async with self._adopting:
            known = self._all.get(network_id)
            if known is None:
                await self._drop_awaited(network_id)
                return
            async with known.lock:
                known.network.check_empty()
                del self._all[network_id]
                asyncio.get_running_loop().remove_reader(known.disturbances.fileno())
                self._names.take_all(network_id)
                await self._in_thread(known.balance.close)
                self._by_id.pop(network_id, None)
                self._store.hide(network_id)
                await self._close_ingress(known.network, remove=True)
                try:
                    await self._in_thread(self._drivers.unmake, known.network)
                finally:
                    if self.keeper is not None:
                        self.keeper.let_go(known.name)

    async def _drop_awaited(self, network_id: str) -> None:
        network = self._awaited.get(network_id)
        if network is None:
            return
        network.check_empty()
        del self._awaited[network_id], self._by_id[network_id]
        self._store.hide(network_id)
        await self._let_go(_name(network))
        await self._in_thread(self._drivers.overlays.decrypt, network)
        await self._in_thread(self._drivers.unmake, network)
        try:
            await self._in_thread(self._drivers.filter.remove_network, network.bridge)
            if network.overlay is not None and network.overlay.ingress:
                await self._in_thread(remove_leftovers, self._drivers.filter)
        except NetfilterError as error:
            _log.warning("network %s: removing its rules: %s", network.record.name, error)

    async def close(self, remove: bool) -> None:
        """Forget the networks. Those of running containers stay in the kernel, and so do published
        ports unless `remove` is given.
        """
        if self._clearing is not None:
            self._clearing.cancel()
        for known in self._all.values():
            asyncio.get_running_loop().remove_reader(known.disturbances.fileno())
        for task in (*self._forgetting, self._mending, self._looking):
            if task is not None:
                await cancelled(task)
        if self._retrying is not None:
            await cancelled(self._retrying)
        await self._close_ingress(None, remove=remove)
        for known in self._all.values():
            await self._in_thread(known.balance.close)
        if remove and self.keeper is not None:
            for name in self._names_of_spaces():
                self.keeper.let_go(name)
        self._all.clear()
        self._awaited.clear()

    def held(self, network_id: str) -> bool:
        """True if an earlier daemon has left the network's namespace."""
        held = self.keeper.held if self.keeper is not None else ()
        return any(name.startswith("overlay ") and name.endswith(f" {network_id[:12]}") for name in held)

    def adopted(self) -> list[Network]:
        """The networks of the swarm that are on this node."""
        return [each.network for each in self._all.values()]

    async def settle(self) -> None:
        """Every running container has been restored, and all views were applied: attach containers
        again whose link is gone, and give up what an earlier daemon has left and this one does not
        need. Networks that are yet to be adopted keep theirs.
        """
        self._drivers.overlays.settled = True
        for known in [*self._all.values()]:
            try:
                await self._rerouted(known.network, await self._in_thread(self._drivers.overlays.settle, known.network))
            except (EngineError, NetfilterError, OSError) as error:
                _log.error("network %s: %s", known.network.record.name, words(error))
        needed = self._names_of_spaces()
        for name in [*self.keeper.held] if self.keeper is not None else ():
            if name.startswith("overlay ") and name not in needed:
                await self._let_go(name)
        try:
            await self._in_thread(self._drivers.overlays.settle_encryption, [*self._awaited.values()])
        except (EngineError, OSError) as error:
            _log.error("%s", words(error))

    async def _let_go(self, name: str) -> None:
        """Give a namespace up that an earlier daemon has left."""
        kept = self.keeper.held.get(name) if self.keeper is not None else None
        if self.keeper is None or kept is None:
            return
        try:
            await self._in_thread(self._drivers.overlays.discard, kept)
        except OSError as error:
            _log.warning("%s: removing its VXLAN: %s", name, words(error))
        self.keeper.let_go(name)

    def _names_of_spaces(self) -> set[str]:
        return {*(each.name for each in self._all.values()), *map(_name, self._awaited.values())}

    async def set_peers(
        self, network_id: str, put: Mapping[IPv4Address, IPv4Address], gone: Collection[IPv4Address]
    ) -> None:
        """`put`: endpoints on other nodes → the data address of the node. Raises NotFound."""
        known = self._known(network_id)
        async with known.lock:
            try:
                await self._in_thread(self._drivers.overlays.set_peers, known.network, put, gone)
            except OSError as error:
                raise ServerError(f"network {known.network.record.name}: {words(error)}") from error
            ended = [each for each in gone if each not in put]
            if ended:
                await self._end(known, ended)
        if ended and self._ingress is not None and known.network is self._ingress[0]:
            await self._end_connections(self._ingress[1], ended)

    async def set_services(
        self, network_id: str, put: Mapping[IPv4Address, Sequence[IPv4Address]], gone: Collection[IPv4Address]
    ) -> None:
        """`put`: a service's virtual address → its ready backends.

        The first call after `adopt` has all services; others that an earlier daemon left end.
        Raises NotFound, ServerError. After a failure the next call or `mend` writes what is
        missing.
        """
        known = self._known(network_id)
        async with known.lock:
            try:
                withdrawn = await self._in_thread(known.balance.set, put, gone)
            except NetfilterError as error:
                raise ServerError(f"network {known.network.record.name}: {error}") from error
        if withdrawn:
            self._withdrawn(known.balance, withdrawn)

    def _withdrawn(self, of: Balance | Ingress, backends: Collection[IPv4Address]) -> None:
        """No new connections are led to these backends."""
        self._soon(self._move_datagrams(of, backends))
        waiting = self._unanswered.get(of)
        if waiting is not None:
            waiting |= {*backends}
        else:
            self._unanswered[of] = {*backends}
            self._soon(self._move_unanswered(of))

    async def _move_unanswered(self, of: Balance | Ingress) -> None:
        """At most once in `UNANSWERED`, as it takes a walk through the connection table."""
        try:
            while backends := self._unanswered[of]:
                self._unanswered[of] = set()
                await asyncio.sleep(UNANSWERED)
                await self._in_thread(of.forget_unanswered, backends)
        finally:
            del self._unanswered[of]

    async def _move_datagrams(self, of: Balance | Ingress, withdrawn: Collection[IPv4Address]) -> None:
        await asyncio.sleep(ANSWER)  # for what the backends have got already
        await self._in_thread(of.forget_datagrams, withdrawn)

    async def _end_connections(self, ingress: Ingress, ended: Collection[IPv4Address | IPv6Address]) -> None:
        try:
            await self._in_thread(ingress.forget, ended)
        except NetfilterError as error:
            _log.warning("connections to tasks that have ended: %s", error)

    def ended(self, network_id: str, addresses: Iterable[IPv4Address | IPv6Address]) -> None:
        """A container of this host has left the network: connections to it end soon, instead of
        waiting for answers.
        """
        known = self._all.get(network_id)
        if known is not None and known.balance.balances:
            self._soon(self._end(known, [*addresses]))
        if known is not None and self._ingress is not None and known.network is self._ingress[0]:
            self._soon(self._end_connections(self._ingress[1], [*addresses]))

    async def _end(self, known: _Adopted, addresses: Collection[IPv4Address | IPv6Address]) -> None:
        try:
            await self._in_thread(known.balance.end, addresses)
        except NetfilterError as error:
            _log.warning("network %s: open connections to containers that have gone: %s", known.name, error)

    def _soon(self, work: Coroutine[Any, Any, None]) -> None:
        task = spawn(work, "swarm: connections to endpoints that have gone")
        self._forgetting.add(task)
        task.add_done_callback(self._forgetting.discard)

    def set_names(self, network_id: str, put: Mapping[str, Names], gone: Collection[str]) -> None:
        """`put`: the id of a service, task or attachment → its names on the network.

        A service that has a virtual address needs a second key for the addresses of its tasks.
        """
        name = self._known(network_id).network.record.name
        for key in gone:
            self._names.take(network_id, key)
        for key, names in put.items():
            self._names.put(network_id, name, key, names)

    async def set_ports(self, ports: Ports) -> dict[Port, str]:
        """All ports that the swarm publishes: (protocol, port) → (target port, ready backends on
        the ingress network).

        Returns those that are in use on this host, with the reason. Raises ServerError; the next
        call does what is missing.
        """
        async with self._ports:
            try:
                if self._ingress is not None:
                    network, ingress = self._ingress
                    await self._answer_datagrams(network, ports)
                    busy, withdrawn = await self._in_thread(ingress.set_ports, ports)
                    if withdrawn:
                        self._withdrawn(ingress, withdrawn)
                    if busy and self._retrying is None:
                        self._retrying = spawn(self._retry(), "taking published ports")
                    return busy
                if not ports:
                    await self._in_thread(remove_leftovers, self._drivers.filter)
                return dict.fromkeys(ports, "there is no ingress network on this node")
            except (NetfilterError, OSError) as error:
                raise ServerError(f"published ports of services: {words(error)}") from error

    async def _retry(self) -> None:
        """Take ports that other programs of this host have, once they give them up."""
        try:
            while self._ingress is not None:
                await asyncio.sleep(RETRY)
                async with self._ports:
                    try:
                        if self._ingress is None or not await self._in_thread(self._ingress[1].retry):
                            return
                    except (NetfilterError, OSError) as error:
                        _log.error("published ports of services: %s", words(error))
        finally:
            self._retrying = None

    async def _answer_datagrams(self, network: Network, ports: Ports) -> None:
        """Prepare containers of this node for ports of UDP and SCTP that their service has got
        since they began.
        """
        served = {each for (protocol, _), (_, backends) in ports.items() if protocol != "tcp" for each in backends}
        if not served:
            return
        present = [(each, each.endpoints.get(network.record.id)) for each in network.sandboxes.values()]
        self._answering &= {settings.endpoint_id for _, settings in present if settings is not None}
        for sandbox, settings in present:
            if settings is None or settings.endpoint_id in self._answering or sandbox.namespace < 0:
                continue
            address = IPv4Address(settings.ip_address)
            if address in served:
                try:
                    await self._in_thread(answer_datagrams, os.dup(sandbox.namespace), address)
                except (NetfilterError, OSError) as error:
                    _log.error("container %s cannot answer datagrams: %s", sandbox.container_id, words(error))
                else:
                    self._answering.add(settings.endpoint_id)

    async def set_nodes(self, nodes: Mapping[str, IPv4Address]) -> None:
        """The data addresses of all nodes of the swarm, by id."""
        async with self._ports:
            if self._ingress is None:
                return
            network, ingress = self._ingress
            assert network.overlay is not None
            others = {*nodes.values()} - {network.overlay.local}
            try:
                await self._in_thread(self._drivers.overlays.set_nodes, network, others)
                await self._in_thread(ingress.set_nodes, others)
            except (NetfilterError, OSError) as error:
                raise ServerError(f"network {network.record.name}: {words(error)}") from error

    async def features(self) -> tuple[str, ...]:
        """What of a swarm's networks this host can do (`overlay.features`), tried once."""
        if self._features is None:
            self._features = await self._in_thread(overlay.features)
        return self._features

    async def mend(self) -> bool:
        """Compare with the kernel, and put back what other programs removed. Returns True if
        anything was missing.
        """
        return await self._mend([*self._all])

    async def _mend(self, ids: Iterable[str]) -> bool:
        changed = False
        for known in [self._all[each] for each in ids if each in self._all]:
            async with known.lock:
                if known.network.record.id not in self._all:
                    continue
                try:
                    missing, plugged = await self._in_thread(self._drivers.overlays.mend, known.network)
                    if missing:
                        changed = True
                        _log.warning(
                            "network %s: parts of it were missing and have been restored", known.network.record.name
                        )
                    await self._rerouted(known.network, plugged)
                    changed |= await self._in_thread(known.balance.mend)
                except Exception as error:  # whatever it is, repairs go on
                    bug = not isinstance(error, (EngineError, NetfilterError, OSError))
                    _log.error(
                        "network %s: cannot restore it: %s", known.network.record.name, words(error), exc_info=bug
                    )
        return changed | await self._mend_ingress()

    async def _mend_ingress(self) -> bool:
        async with self._ports:
            if self._ingress is None:
                return False
            network, ingress = self._ingress
            try:
                await self._in_thread(self._drivers.overlays.lead, network, network.pools[4].subnet)
                changed = await self._in_thread(ingress.mend)
            except Exception as error:
                bug = not isinstance(error, (EngineError, NetfilterError, OSError))
                _log.error("published ports of services: cannot restore them: %s", words(error), exc_info=bug)
                return False
        if changed:
            _log.warning("published ports of services: parts were missing and have been restored")
        return changed

    async def _rerouted(self, network: Network, plugged: Iterable[Sandbox]) -> None:
        for each in plugged:
            if network.sandboxes.get(each.container_id) is not each:
                continue  # it has ended meanwhile
            gateways = endpoints.default_gateways(each.endpoints.values(), self._by_id)
            await self._in_thread(self._drivers.route, each.container_id, network, each.namespace, gateways)

    # --- repair -----------------------------------------------------------------------------------

    def links_removed(self, indexes: Collection[int] | None) -> None:
        """Links of the host were removed; None: perhaps any."""
        spaces = self._drivers.overlays
        for known in self._all.values():
            if indexes is None or spaces.space(known.network).uplink in indexes:
                self._mend_soon(known)

    def _disturbed(self, known: _Adopted) -> None:
        if known.disturbances.take():
            self._mend_soon(known)

    def _mend_soon(self, known: _Adopted) -> None:
        self._disturbed_ones.add(known.network.record.id)
        if self._mending is None:
            self._mending = spawn(self._mend_disturbed(), "repairing the swarm's networks")

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK)
            await self.mend()

    async def _mend_disturbed(self) -> None:
        try:
            while self._disturbed_ones:
                await asyncio.sleep(PAUSE)  # more notices follow, of one program's work
                ids, self._disturbed_ones = self._disturbed_ones, set()
                await self._mend(ids)
        finally:
            self._mending = None

    def _lingers(self) -> None:
        """An endpoint was released (`OverlayDriver.clear`)."""
        self._released += 1
        if self._clearing is None:
            self._clearing = asyncio.get_running_loop().call_later(sandboxes.LINGER, self._clear)

    def _clear(self) -> None:
        count, self._released, self._clearing = self._released, 0, None
        spawn(self._in_thread(self._drivers.overlays.clear, count), "links of ended containers")

    def _known(self, network_id: str) -> _Adopted:
        known = self._all.get(network_id)
        if known is None:
            raise NotFound(f"network {network_id} is not on this node")
        return known


def _name(network: Network) -> str:
    """Under which the keeper holds its namespace."""
    assert network.overlay is not None
    return f"overlay {network.overlay.vni} {network.record.id[:12]}"
