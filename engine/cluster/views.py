"""The swarm's networks on this node: what the managers say of them (views), kept on disk, and put
into the kernel by `Networks.overlays`.

A view is what one network consists of: its definition, its endpoints on all nodes, its services,
and the nodes' addresses. It comes whole with a session and then by changes. The records have it
too, so a daemon that starts has all networks again before any manager is reached.

Each network has one driver at most, an asyncio task that is there only while kernel and view differ
(`_drive`). Changes are marked by the ids of endpoints and services; the driver takes all marks at
once, so many changes that arrive while the kernel is slow become one. It compares with what it
has put into the kernel, and passes on differences alone.

A network is made when its first view comes, and removed when the managers say that it is not needed
any more and no container is on it. The network ingress is there on every node, but is made only
when a port is published or a task here is on it.

Owns:    the views; the records of kinds `swarm-network`, `swarm-endpoint` and `swarm-service`.
Threads: the event loop's.
Raises:  ServerError when the definition of a new network cannot be written.
Not here: plain containers on these networks (`attaching.py`), devices and rules
(`networks/overlay/overlays.py`), the session (`agent.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable
from ipaddress import IPv4Address

import msgspec

from engine.cluster.parts import Parts
from engine.common.network_rules import OVERLAY, SWARM
from engine.errors import EngineError, NotFound, ServerError, words
from engine.networks.dns.names import Names
from engine.networks.endpoints import Network
from engine.networks.network import NetworkRecord, Overlay
from engine.storage.records import Change
from engine.swarm_session.messages import EndpointView, NetworkView, ServiceView, View, Views
from engine.system.tasks import spawn
from engine.system.threads import cancelled
from engine.wire.networks import IPAM, IPAMConfig

VNI = "com.docker.network.driver.overlay.vxlanid_list"
"""The option that shows the VNI."""
PORT = 4789
"""UDP port of VXLAN, until a session names another one."""
SAVE_PAUSE = 0.5
"""Seconds in which changes of endpoints and services are collected before they are written."""
AGAIN = 1.0, 30.0
"""Seconds until what the kernel has refused is tried again: at first, and at most."""
DROP_PAUSE = 0.5
"""Seconds between looks whether the last container has left a network that is not needed."""

APPLY_LIMIT = 1.0
"""Seconds that a start waits for the routes to all endpoints."""

_log = logging.getLogger(__name__)

Backends = tuple[IPv4Address, ...]


class NetworkRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A network on disk. Its endpoints and services are rows of their own."""

    definition: NetworkView
    nodes: dict[str, str] = {}
    port: int = PORT
    local: str = ""
    """This node's data address when the network was made."""


class _Network:
    """One network of the swarm, as this node knows it, and what of it the kernel has."""

    def __init__(self, network_id: str, definition: NetworkView) -> None:
        self.id = network_id
        self.definition = definition
        self.endpoints: dict[str, EndpointView] = {}
        self.services: dict[str, ServiceView] = {}
        self.nodes: dict[str, IPv4Address] = {}
        """Data addresses. A node that is taken for lost keeps the last one: whether traffic is led
        to its endpoints is the managers' decision.
        """
        self.addresses: dict[str, IPv4Address] = {}
        """By endpoint."""
        self.ready: dict[str, Backends] = {}
        """By service, as far as they were asked for: endpoints that traffic may be led to."""
        self.of_service: dict[str, set[str]] = {}
        """Endpoint ids by service."""
        self.of_node: dict[str, set[str]] = {}
        self.gone = False
        """The managers say that this node does not need it any more."""
        self.asked = False
        """A task or container here waits for it."""
        # --- what is made of it
        self.found: Network | None = None
        """Since it is made."""
        self.made = asyncio.Event()
        """Set while `found` is there."""
        self.trouble = ""
        """Why it cannot be made or kept as it should be; "" when it is."""
        self.failed = asyncio.Event()
        """Set while there is `trouble`."""
        self.urged = asyncio.Event()
        """Set when the driver shall try again at once."""
        self.driver: asyncio.Task[None] | None = None
        self.again = False
        """The driver has something to do; `woken` is set then, and `applied` when it has not."""
        self.woken = asyncio.Event()
        self.applied = asyncio.Event()
        self.changed_endpoints: set[str] = set()
        self.changed_services: set[str] = set()
        self.changed_nodes = False
        self.forget()

    def forget(self) -> None:
        """Nothing of it is in the kernel."""
        self.found = None
        self.made.clear()
        self.peers: dict[str, tuple[IPv4Address, IPv4Address]] = {}
        """By endpoint: its address, and that of its node."""
        self.peer_of: dict[IPv4Address, str] = {}
        self.left: set[IPv4Address] = set()
        """Addresses whose endpoint is gone, and which still have a route."""
        self.balanced: dict[str, tuple[IPv4Address, Backends]] = {}
        """By service: its virtual address, and its ready endpoints."""
        self.balanced_of: dict[IPv4Address, str] = {}
        self.balances = False
        """The services were set once: what an earlier daemon left has ended."""
        self.named: dict[str, Names] = {}
        self.ports: dict[tuple[str, int], tuple[int, Backends]] | None = None
        """None before the first call, which is made also without ports."""
        self.shown_nodes: dict[str, IPv4Address] = {}
        self.changed_endpoints = {*self.endpoints}
        self.changed_services = {*self.services}
        self.changed_nodes = True

    # --- the view ---------------------------------------------------------------------------------

    def put_endpoint(self, each: EndpointView) -> None:
        self.remove_endpoint(each.id)
        self.endpoints[each.id] = each
        address = _address(each.address)
        if address is not None:
            self.addresses[each.id] = address
        self.of_node.setdefault(each.node, set()).add(each.id)
        if each.service:
            self.of_service.setdefault(each.service, set()).add(each.id)
            self.changed_services.add(each.service)

    def remove_endpoint(self, endpoint: str) -> None:
        self.changed_endpoints.add(endpoint)
        self.addresses.pop(endpoint, None)
        before = self.endpoints.pop(endpoint, None)
        if before is not None:
            _discard(self.of_node, before.node, endpoint)
            if before.service:
                _discard(self.of_service, before.service, endpoint)
                self.changed_services.add(before.service)

    def put_service(self, each: ServiceView) -> None:
        self.services[each.id] = each
        self.changed_services.add(each.id)

    def remove_service(self, service: str) -> None:
        self.services.pop(service, None)
        self.changed_services.add(service)

    def put_node(self, node: str, text: str) -> None:
        """The node's data address; "" when it is taken for lost."""
        address = _address(text)
        if address is not None and self.nodes.get(node) != address:
            self.nodes[node] = address
            self._node_changed(node)

    def remove_node(self, node: str) -> None:
        if self.nodes.pop(node, None) is not None:
            self._node_changed(node)

    def _node_changed(self, node: str) -> None:
        self.changed_nodes = True
        self.changed_endpoints |= self.of_node.get(node, set())

    @property
    def changed(self) -> bool:
        return bool(self.changed_endpoints or self.changed_services or self.changed_nodes)

    def record(self) -> NetworkRecord:
        """The network, as the engine's own networks are described."""
        given = self.definition
        return NetworkRecord(
            id=self.id,
            name=given.name,
            driver=OVERLAY,
            created=given.created,
            scope=SWARM,
            internal=given.internal,
            attachable=given.attachable,
            ingress=given.ingress,
            options=given.options | {VNI: str(given.vni)},
            labels=dict(given.labels),
            ipam=IPAM(config=[IPAMConfig(subnet=subnet, gateway=gateway) for subnet, gateway in given.subnets]),
            chosen_by_user=(4,),
        )

    def overlay(self, port: int, local: IPv4Address) -> Overlay:
        given = self.definition
        return Overlay(
            vni=given.vni,
            port=port,
            local=local,
            encrypted=given.encrypted,
            secret=given.secret,
            ingress=given.ingress,
        )


def _discard(index: dict[str, set[str]], key: str, value: str) -> None:
    index[key].discard(value)
    if not index[key]:
        del index[key]


def _address(text: str) -> IPv4Address | None:
    """None for one that is missing or is not IPv4."""
    try:
        return IPv4Address(text)
    except ValueError:
        return None


class NodeNetworks:
    """The swarm's networks on this node."""

    def __init__(self, parts: Parts) -> None:
        self._networks = parts.networks
        self._records = parts.records
        self._rows = parts.records.table("swarm-network", NetworkRow)
        self._endpoint_rows = parts.records.table("swarm-endpoint", EndpointView)
        self._service_rows = parts.records.table("swarm-service", ServiceView)
        self._all: dict[str, _Network] = {}
        self._unsaved: dict[tuple[str, str, str], None] = {}
        """Kind, network, and id within it, of the rows to be written."""
        self._saving: asyncio.Task[None] | None = None
        self._drivers: set[asyncio.Task[None]] = set()
        self._withdrawn: set[str] = set()
        """Tasks of this node to which no traffic is led any more, before the managers know it."""
        self._closed = False
        self.held: Callable[[str], bool] = lambda network: False
        """True if a container here is about to be on the network, or may be again."""
        self.node = ""
        self.address = ""
        """This node's data address, if it was given; the managers know the one that others use."""
        self.port = PORT
        self.synchronized = False
        """A manager has sent all views to this daemon."""
        self._changed = asyncio.Event()
        """Set, and replaced, when views come."""

    def __len__(self) -> int:
        return len(self._all)

    # --- life -------------------------------------------------------------------------------------

    async def restore(self, node: str) -> None:
        """At the daemon's start, before containers are restored: all networks as the last daemon
        knew them. One that the kernel refuses is logged, and tried again by `open`; containers keep
        their endpoints on it.
        """
        self.node = node
        for network_id, row in self._rows.load().items():
            network = self._all[network_id] = _Network(network_id, row.definition)
            self.port, self.address = row.port, row.local or self.address
            for each, text in row.nodes.items():
                network.put_node(each, text)
        for key, endpoint in self._endpoint_rows.load().items():
            if (known := self._all.get(key.partition("/")[0])) is not None:
                known.put_endpoint(endpoint)
        for key, service in self._service_rows.load().items():
            if (known := self._all.get(key.partition("/")[0])) is not None:
                known.put_service(service)
        overlays = self._networks.overlays
        # Containers may be on one that the rows, which are written a moment later, do not ask for.
        present = [each for each in self._all.values() if self._wanted(each) or overlays.held(each.id)]
        for network in present:
            try:
                await self._make(network, keep=True)
                await self._apply(network)
                network.applied.set()
            except (EngineError, OSError) as error:
                _log.error("network %s: %s", network.definition.name, words(error))
        if not any(each.definition.ingress for each in present):
            await overlays.set_ports({})  # those that a daemon before may have left

    def open(self, node: str, address: str) -> None:
        """An agent begins. `address`: the node's data address; "" for what the managers see."""
        self.node = node
        self.address = address or self.address
        self._closed = False
        for network in self._all.values():
            self._wake(network)

    async def close(self) -> None:
        """The daemon ends, or another agent follows. What is in the kernel stays."""
        self._closed = True
        for driver in [*self._drivers]:
            driver.cancel()
        if self._drivers:
            await asyncio.wait([*self._drivers])
        if self._saving is not None:
            await cancelled(self._saving)
            self._saving = None
        with contextlib.suppress(ServerError):
            await self._save()

    async def clear(self) -> None:
        """This node has left the swarm: remove all networks and their records."""
        await self.close()
        for network in [*self._all.values()]:
            try:
                if network.found is not None and network.definition.ingress:
                    await self._networks.overlays.set_ports({})
                await self._networks.overlays.drop(network.id)
            except (EngineError, OSError) as error:
                _log.error("network %s: it is not removed: %s", network.definition.name, words(error))
        rows = [
            *(self._rows.delete(each) for each in self._all),
            *(self._endpoint_rows.delete(f"{each.id}/{key}") for each in self._all.values() for key in each.endpoints),
            *(self._service_rows.delete(f"{each.id}/{key}") for each in self._all.values() for key in each.services),
        ]
        self._all.clear()
        self._unsaved.clear()
        self._withdrawn.clear()
        self.address, self.synchronized = "", False
        await self._records.commit(*rows)

    # --- from managers ----------------------------------------------------------------------------

    async def take(self, message: Views) -> None:
        """Take all views, or changes. New networks are on disk when this returns, and are being
        made. Raises ServerError when they cannot be written; the session must bring all again.
        """
        new = []
        present = set()
        for view in message.of:
            known = self._all.get(view.network)
            if view.gone:
                if known is not None:
                    known.gone = True
                continue
            present.add(view.network)
            if known is None:
                if view.definition is None:
                    raise ServerError(f"changes of the network {view.network} came before the network")
                known = self._all[view.network] = _Network(view.network, view.definition)
                new.append(known)
            elif known.gone:
                known.gone = False
                self._wake(known)  # it may be going just now
            self._merge(known, view)
        if message.whole:
            for network_id in self._all.keys() - present:
                self._all[network_id].gone = True
            self.synchronized = True
        if new:
            await self._records.commit(*(self._row_of(network) for network in new))
        for network in self._all.values():
            if network.gone or network.changed or self._wanted(network) != (network.found is not None):
                self._wake(network)
        self._changed.set()
        self._changed = asyncio.Event()
        self._save_soon()

    def _merge(self, network: _Network, view: View) -> None:
        if view.definition is not None:  # it is whole
            if network.definition != view.definition:
                network.definition = view.definition
                self._unsaved["network", network.id, ""] = None
            kept = {each.id for each in view.endpoints}
            gone = [each for each in network.endpoints if each not in kept]
            served = {each.id for each in view.services}
            unserved = [each for each in network.services if each not in served]
            absent = [each for each in network.nodes if each not in view.nodes]
        else:
            gone, unserved, absent = [*view.endpoints_gone], [*view.services_gone], [*view.nodes_gone]
        for node, text in view.nodes.items():
            network.put_node(node, text)
        for endpoint in gone:
            network.remove_endpoint(endpoint)
            self._unsaved["endpoint", network.id, endpoint] = None
        for each in view.endpoints:
            if network.endpoints.get(each.id) != each:
                network.put_endpoint(each)
                self._unsaved["endpoint", network.id, each.id] = None
        for service in unserved:
            network.remove_service(service)
            self._unsaved["service", network.id, service] = None
        for served_one in view.services:
            if network.services.get(served_one.id) != served_one:
                network.put_service(served_one)
                self._unsaved["service", network.id, served_one.id] = None
        for node in absent:
            network.remove_node(node)
        if view.nodes or absent:
            self._unsaved["network", network.id, ""] = None

    # --- from this node ---------------------------------------------------------------------------

    def withdrawn(self, task: str, yes: bool) -> None:
        """Lead no traffic of this node to a task of its own, or do so again."""
        if yes == (task in self._withdrawn):
            return
        (self._withdrawn.add if yes else self._withdrawn.discard)(task)
        for network in self._all.values():
            found = network.endpoints.get(task)
            if found is not None and found.service:
                network.changed_services.add(found.service)
                self._wake(network)

    async def withdrawal_seen(self, task: str) -> None:
        """Wait until the managers' views have the task as not ready. They send them to all nodes
        at the same time. Of a network that was removed they send nothing more: all tasks on it end.
        """
        while any(
            (found := network.endpoints.get(task)) is not None and found.ready and not network.gone
            for network in self._all.values()
        ):
            await self._changed.wait()

    async def need(self, network_id: str) -> Network:
        """The network, as soon as it is made.

        Raises NotFound if the managers have sent no view of it, ServerError if it cannot be made.
        """
        while (network := self._all.get(network_id)) is None or (network.gone and network.found is None):
            if self.synchronized:
                raise NotFound(f"network {network_id} not found")
            await self._changed.wait()
        network.asked = True
        if network.found is None:
            network.failed.clear()
            network.urged.set()
            self._wake(network)
            outcomes = [asyncio.ensure_future(each.wait()) for each in (network.made, network.failed)]
            try:
                await asyncio.wait(outcomes, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for each in outcomes:
                    each.cancel()
        if network.found is not None:
            # Then its first packets have routes. One that the kernel refuses is tried again later.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(APPLY_LIMIT):
                    await network.applied.wait()
        if network.found is None:
            raise ServerError(f"network {network.definition.name}: {network.trouble or 'it is gone'}")
        return network.found

    def knows(self, network_id: str) -> bool:
        """A view of it has come."""
        return network_id in self._all and not self._all[network_id].gone

    async def arrives(self, network_id: str) -> None:
        """Wait for the network's first view."""
        while not self.knows(network_id):
            await self._changed.wait()

    def named(self, text: str) -> str:
        """The id of the network of this id or name; "" when this node knows none."""
        if self.knows(text):
            return text
        return next((each.id for each in self._all.values() if each.definition.name == text and not each.gone), "")

    def trouble(self, network_id: str) -> str:
        """Why a network cannot be used yet."""
        known = self._all.get(network_id)
        if known is None or known.gone:
            return "the managers have not sent its view"
        return known.trouble or "it is still being made"

    def occupants(self) -> list[tuple[str, str]]:
        """The ids of containers of this node, each with that of a network that it is on."""
        return [
            (container, network.id)
            for network in self._all.values()
            if network.found is not None
            for container in network.found.sandboxes
        ]

    def records(self) -> list[NetworkRecord]:
        """All that this node knows."""
        return [each.record() for each in self._all.values() if not each.gone]

    # --- the driver -------------------------------------------------------------------------------

    def _wake(self, network: _Network) -> None:
        if self._closed:
            return
        network.again = True
        network.woken.set()
        network.applied.clear()
        if network.driver is None:
            network.driver = spawn(self._drive(network), f"network {network.definition.name}")
            self._drivers.add(network.driver)
            network.driver.add_done_callback(self._drivers.discard)

    async def _drive(self, network: _Network) -> None:
        pause, most = AGAIN
        try:
            while network.again:
                network.again = False
                network.woken.clear()
                network.urged.clear()
                try:
                    await self._step(network)
                except Exception as error:
                    why = words(error)
                    if why != network.trouble:
                        bug = not isinstance(error, (EngineError, OSError))
                        _log.error("network %s: %s; trying again", network.definition.name, why, exc_info=bug)
                    network.trouble = why
                    network.failed.set()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(pause):
                            await network.urged.wait()
                    pause = min(most, 2 * pause)
                    network.again = True
                else:
                    pause, _ = AGAIN
                    network.trouble = ""
                    network.failed.clear()
                    if not network.again:
                        network.applied.set()
        finally:
            network.driver = None

    async def _step(self, network: _Network) -> None:
        if self._wanted(network):
            if network.found is None or self._moved(network):
                await self._make(network)
            await self._apply(network)
        elif network.found is not None:
            # the last containers are just ending
            if network.found.sandboxes or self.held(network.id):
                network.applied.set()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(DROP_PAUSE):
                        await network.woken.wait()
                network.again = True
                return
            found, network.found = network.found, None  # who needs it now waits for another one
            network.made.clear()
            try:
                if network.definition.ingress:
                    await self._networks.overlays.set_ports({})
                await self._networks.overlays.drop(network.id)
            except BaseException:
                network.found = found
                network.made.set()
                raise
            network.forget()
        else:
            await self._networks.overlays.drop(network.id)  # it may be kept from an earlier daemon
        if network.gone and network.found is None and self._all.get(network.id) is network:
            del self._all[network.id]
            self._unsaved["network", network.id, ""] = None
            for endpoint in network.endpoints:
                self._unsaved["endpoint", network.id, endpoint] = None
            for service in network.services:
                self._unsaved["service", network.id, service] = None
            self._save_soon()

    def _wanted(self, network: _Network) -> bool:
        if network.gone:
            return False
        if not network.definition.ingress or network.asked:
            return True
        ports = any(each.ports for each in network.services.values())
        return ports or self.node in network.of_node

    def _local(self, network: _Network) -> IPv4Address | None:
        """This node's data address: as others know it, by preference."""
        known = (network, *(each for each in self._all.values() if each.definition.ingress))
        found = (each.nodes.get(self.node) for each in known)
        return next((each for each in found if each is not None), _address(self.address))

    def _moved(self, network: _Network) -> bool:
        """This node has another data address than when the network was made."""
        made = network.found.overlay if network.found is not None else None
        return made is not None and self._local(network) not in (None, made.local)

    async def _make(self, network: _Network, *, keep: bool = False) -> None:
        local = self._local(network)
        if local is None:
            raise ServerError("the data address of this node is not known yet, or is not IPv4")
        network.found = await self._networks.overlays.adopt(
            network.record(), network.overlay(self.port, local), keep=keep
        )
        network.made.set()
        if self.address != str(local):
            self.address = str(local)
            self._unsaved["network", network.id, ""] = None

    async def _apply(self, network: _Network) -> None:
        """Pass on what has changed since the last time. What fails stays marked."""
        endpoints, network.changed_endpoints = network.changed_endpoints, set()
        services, network.changed_services = network.changed_services, set()
        for each in services:
            network.ready.pop(each, None)
        nodes, network.changed_nodes = network.changed_nodes, False
        if not (endpoints or services or nodes or network.left):
            return
        try:
            await self._apply_these(network, endpoints, services, nodes)
        except BaseException:
            network.changed_endpoints |= endpoints
            network.changed_services |= services
            network.changed_nodes |= nodes
            raise

    async def _apply_these(
        self, network: _Network, endpoints: Iterable[str], services: Iterable[str], nodes: bool
    ) -> None:
        overlays = self._networks.overlays
        if network.definition.ingress and nodes:
            reachable = dict(network.nodes)
            if reachable != network.shown_nodes:
                await overlays.set_nodes(reachable)
                network.shown_nodes = reachable
        # A route to an endpoint comes before traffic is led there, and goes after.
        await self._apply_peers(network, endpoints)
        await self._apply_services(network, services)
        self._apply_names(network, endpoints, services)
        if network.definition.ingress:
            await self._apply_ports(network)
        network.left -= network.peer_of.keys()
        if network.left:
            await overlays.set_peers(network.id, {}, network.left)
            network.left = set()

    async def _apply_peers(self, network: _Network, endpoints: Iterable[str]) -> None:
        put: dict[IPv4Address, IPv4Address] = {}
        now: dict[str, tuple[IPv4Address, IPv4Address] | None] = {}
        for each in endpoints:
            before, wanted = network.peers.get(each), self._peer(network, each)
            if before == wanted:
                continue
            now[each] = wanted
            if wanted is not None:
                put[wanted[0]] = wanted[1]
        if put:
            await self._networks.overlays.set_peers(network.id, put, ())
        for each, wanted in now.items():
            before = network.peers.pop(each, None)
            if before is not None and network.peer_of.get(before[0]) == each:
                del network.peer_of[before[0]]
                network.left.add(before[0])
            if wanted is not None:
                network.peers[each] = wanted
        for each, wanted in now.items():
            if wanted is not None:
                network.peer_of[wanted[0]] = each

    def _peer(self, network: _Network, endpoint: str) -> tuple[IPv4Address, IPv4Address] | None:
        """Address and node of an endpoint on another node."""
        found = network.endpoints.get(endpoint)
        if found is None or found.node == self.node:
            return None
        address, via = network.addresses.get(endpoint), network.nodes.get(found.node)
        return None if address is None or via is None else (address, via)

    def _ready(self, network: _Network, service: str) -> Backends:
        """The endpoints of a service that traffic may be led to, in the order of their
        addresses.
        """
        known = network.ready.get(service)
        if known is None:
            of, addresses, withdrawn = network.endpoints, network.addresses, self._withdrawn
            found = [
                addresses[each]
                for each in network.of_service.get(service, ())
                if of[each].ready and each not in withdrawn and each in addresses
            ]
            known = network.ready[service] = tuple(sorted(found, key=int))
        return known

    async def _apply_services(self, network: _Network, services: Iterable[str]) -> None:
        """No container asks for a virtual address on the ingress network."""
        if network.definition.ingress:
            return
        put: dict[IPv4Address, Backends] = {}
        left: set[IPv4Address] = set()
        now: dict[str, tuple[IPv4Address, Backends] | None] = {}
        for each in services:
            found = network.services.get(each)
            virtual = None if found is None else _address(found.address)
            wanted = None if virtual is None else (virtual, self._ready(network, each))
            before = network.balanced.get(each)
            if before == wanted:
                continue
            now[each] = wanted
            if wanted is not None:
                put[wanted[0]] = wanted[1]
            if before is not None and network.balanced_of.get(before[0]) == each:
                left.add(before[0])
        left -= put.keys()
        if put or left or not network.balances:
            await self._networks.overlays.set_services(network.id, put, left)
            network.balances = True
        for each, wanted in now.items():
            before = network.balanced.pop(each, None)
            if before is not None and network.balanced_of.get(before[0]) == each:
                del network.balanced_of[before[0]]
            if wanted is not None:
                network.balanced[each] = wanted
        for each, wanted in now.items():
            if wanted is not None:
                network.balanced_of[wanted[0]] = each

    def _apply_names(self, network: _Network, endpoints: Iterable[str], services: Iterable[str]) -> None:
        wanted: dict[str, Names | None] = {}
        for each in services:
            wanted |= self._service_names(network, each)
        for each in endpoints:
            wanted[each] = self._endpoint_names(network, each)
        put = {key: names for key, names in wanted.items() if names is not None and network.named.get(key) != names}
        left = [key for key, names in wanted.items() if names is None and key in network.named]
        if put or left:
            self._networks.overlays.set_names(network.id, put, left)
        network.named.update(put)
        for key in left:
            del network.named[key]

    def _service_names(self, network: _Network, service: str) -> dict[str, Names | None]:
        """A service has its virtual address, or its ready tasks; `tasks.NAME` are these always."""
        found = network.services.get(service)
        tasks = f"{service}/tasks"
        if found is None or network.definition.ingress:
            return {service: None, tasks: None}
        ready, virtual = self._ready(network, service), _address(found.address)
        own = (found.name, *found.aliases)
        return {
            service: Names(own, ready if virtual is None else (virtual,), virtual is None),
            tasks: Names(tuple(f"tasks.{each}" for each in own), ready, True),
        }

    def _endpoint_names(self, network: _Network, endpoint: str) -> Names | None:
        """Those of containers on other nodes: this node's containers have theirs themselves."""
        found = network.endpoints.get(endpoint)
        if found is None or found.node == self.node or not found.name or network.definition.ingress:
            return None
        address = network.addresses.get(endpoint)
        return None if address is None else Names((found.name, *found.aliases), (address,), False)

    async def _apply_ports(self, network: _Network) -> None:
        wanted = {
            (port.protocol, port.published): (port.target, self._ready(network, service.id))
            for service in network.services.values()
            for port in service.ports
        }
        if wanted == network.ports:
            return
        busy = await self._networks.overlays.set_ports(wanted)
        for (protocol, port), why in busy.items():
            if network.ports is None or (protocol, port) not in network.ports:
                _log.warning("published port %d/%s is not served on this node: %s", port, protocol, why)
        network.ports = wanted

    # --- on disk ----------------------------------------------------------------------------------

    def _row_of(self, network: _Network) -> Change:
        shown = {node: str(address) for node, address in network.nodes.items()}
        row = NetworkRow(definition=network.definition, nodes=shown, port=self.port, local=self.address)
        return self._rows.put(network.id, row)

    def _save_soon(self) -> None:
        if self._unsaved and self._saving is None and not self._closed:
            self._saving = spawn(self._save_later(), "swarm: views of networks on disk")

    async def _save_later(self) -> None:
        try:
            while self._unsaved:
                await asyncio.sleep(SAVE_PAUSE)
                try:
                    await self._save()
                except ServerError as error:
                    _log.error("the swarm's networks cannot be written; trying again: %s", error.message)
        finally:
            self._saving = None

    async def _save(self) -> None:
        unsaved, self._unsaved = self._unsaved, {}
        try:
            await self._records.commit(*(self._changed_row(*key) for key in unsaved))
        except BaseException:
            self._unsaved = unsaved | self._unsaved
            raise

    def _changed_row(self, kind: str, network_id: str, key: str) -> Change:
        network = self._all.get(network_id)
        if kind == "network":
            return self._rows.delete(network_id) if network is None else self._row_of(network)
        row = f"{network_id}/{key}"
        if kind == "endpoint":
            endpoint = None if network is None else network.endpoints.get(key)
            return self._endpoint_rows.delete(row) if endpoint is None else self._endpoint_rows.put(row, endpoint)
        service = None if network is None else network.services.get(key)
        return self._service_rows.delete(row) if service is None else self._service_rows.put(row, service)


__all__ = ["NodeNetworks"]
