"""The swarm's networks on this node: what the managers say of them (views), kept on disk, and put
into the kernel by `Networks.overlays`.

A view is what one network consists of: its definition, its endpoints on all nodes, its services,
and the nodes' addresses. It comes whole with a session and then by changes. The records have it
too, so a daemon that starts has all networks again before any manager is reached.

`Reconciler` drives each network while kernel and view differ. Changes are marked by the ids of
endpoints and services; a step handles all marks at once, so many changes that arrive while the
kernel is slow become one. It compares with what it has put into the kernel, and passes on
differences alone.

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
from dataclasses import dataclass, field
from ipaddress import IPv4Address
from typing import Generic, TypeVar

import msgspec

from engine.cluster.parts import Parts
from engine.common.network_rules import OVERLAY, SWARM
from engine.errors import EngineError, NotFound, ServerError, words
from engine.networks.dns.names import Names
from engine.networks.endpoints import Network
from engine.networks.network import NetworkRecord, Overlay
from engine.storage.records import Change
from engine.swarm_session.messages import EndpointView, NetworkView, ServiceView, View, Views
from engine.system.reconcile import Backoff, Reconciler, either, first_of
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

V = TypeVar("V")

Backends = tuple[IPv4Address, ...]
Entries = dict[str, tuple[IPv4Address, V] | None]
"""By endpoint or service: its address, and what belongs to it; None for one that has none."""


class NetworkRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A network on disk. Its endpoints and services are rows of their own."""

    definition: NetworkView
    nodes: dict[str, str] = {}
    port: int = PORT
    local: str = ""
    """This node's data address when the network was made."""


@dataclass(slots=True)
class _Marks:
    """What of a view has changed since it was passed on: ids, and whether nodes have."""

    endpoints: set[str] = field(default_factory=set)
    services: set[str] = field(default_factory=set)
    nodes: bool = False

    def __bool__(self) -> bool:
        return bool(self.endpoints or self.services or self.nodes)

    def add(self, other: _Marks) -> None:
        self.endpoints |= other.endpoints
        self.services |= other.services
        self.nodes |= other.nodes


class _View:
    """One network, as the managers describe it."""

    def __init__(self, definition: NetworkView) -> None:
        self.definition = definition
        self.endpoints: dict[str, EndpointView] = {}
        self.services: dict[str, ServiceView] = {}
        self.nodes: dict[str, IPv4Address] = {}
        """Data addresses. A node that is taken for lost keeps the last one: whether traffic is led
        to its endpoints is the managers' decision.
        """
        self.addresses: dict[str, IPv4Address] = {}
        """By endpoint."""
        self.of_service: dict[str, set[str]] = {}
        """Endpoint ids by service."""
        self.of_node: dict[str, set[str]] = {}
        self.changed = _Marks()

    def mark_all(self) -> None:
        self.changed = _Marks({*self.endpoints}, {*self.services}, True)

    def put_endpoint(self, endpoint: EndpointView) -> None:
        self.remove_endpoint(endpoint.id)
        self.endpoints[endpoint.id] = endpoint
        address = _address(endpoint.address)
        if address is not None:
            self.addresses[endpoint.id] = address
        self.of_node.setdefault(endpoint.node, set()).add(endpoint.id)
        if endpoint.service:
            self.of_service.setdefault(endpoint.service, set()).add(endpoint.id)
            self.changed.services.add(endpoint.service)

    def remove_endpoint(self, endpoint_id: str) -> None:
        self.changed.endpoints.add(endpoint_id)
        self.addresses.pop(endpoint_id, None)
        before = self.endpoints.pop(endpoint_id, None)
        if before is not None:
            _discard(self.of_node, before.node, endpoint_id)
            if before.service:
                _discard(self.of_service, before.service, endpoint_id)
                self.changed.services.add(before.service)

    def put_service(self, service: ServiceView) -> None:
        self.services[service.id] = service
        self.changed.services.add(service.id)

    def remove_service(self, service_id: str) -> None:
        self.services.pop(service_id, None)
        self.changed.services.add(service_id)

    def put_node(self, node: str, text: str) -> None:
        """The node's data address; "" when it is taken for lost."""
        address = _address(text)
        if address is not None and self.nodes.get(node) != address:
            self.nodes[node] = address
            self._mark_node(node)

    def remove_node(self, node: str) -> None:
        if self.nodes.pop(node, None) is not None:
            self._mark_node(node)

    def _mark_node(self, node: str) -> None:
        self.changed.nodes = True
        self.changed.endpoints |= self.of_node.get(node, set())


class _ByAddress(Generic[V]):
    """What was put into the kernel under addresses: endpoints, or services.

    An address may pass from one of them to another; the last one that was put has it.
    """

    def __init__(self) -> None:
        self._entries: dict[str, tuple[IPv4Address, V]] = {}
        self._owners: dict[IPv4Address, str] = {}

    def differences(self, expected: Entries[V]) -> Entries[V]:
        """Those that are not in the kernel as they should be."""
        return {key: entry for key, entry in expected.items() if self._entries.get(key) != entry}

    def left(self, differences: Entries[V]) -> set[IPv4Address]:
        """The addresses whose owner leaves them by these differences."""
        entries = ((key, self._entries.get(key)) for key in differences)
        return {entry[0] for key, entry in entries if entry is not None and self._owners.get(entry[0]) == key}

    def update(self, differences: Entries[V]) -> None:
        """They are in the kernel now."""
        for address in self.left(differences):
            del self._owners[address]
        for key, entry in differences.items():
            if entry is None:
                self._entries.pop(key, None)
            else:
                self._entries[key] = entry
                self._owners[entry[0]] = key

    def __contains__(self, address: IPv4Address) -> bool:
        return address in self._owners


class _Passed:
    """What of one network was passed on to the kernel."""

    def __init__(self) -> None:
        self.peers: _ByAddress[IPv4Address] = _ByAddress()
        """Endpoints on other nodes, with the address of their node."""
        self.left: set[IPv4Address] = set()
        """Addresses whose endpoint is gone, and which still have a route."""
        self.services: _ByAddress[Backends] = _ByAddress()
        """By virtual address, with their ready endpoints."""
        self.balances = False
        """The services were set once: what an earlier daemon left has ended."""
        self.names: dict[str, Names] = {}
        self.ports: dict[tuple[str, int], tuple[int, Backends]] | None = None
        """None before the first call, which is made also without ports."""
        self.nodes: dict[str, IPv4Address] = {}


class _Network:
    """One network of the swarm on this node."""

    def __init__(self, network_id: str, definition: NetworkView) -> None:
        self.id = network_id
        self.view = _View(definition)
        self.gone = False
        """The managers say that this node does not need it any more."""
        self.asked = False
        """A task or container here waits for it."""
        self.ready: dict[str, Backends] = {}
        """By service, as far as they were asked for: endpoints that traffic may be led to."""
        self.adopted: Network | None = None
        """Since it is made."""
        self.made = asyncio.Event()
        """Set while `adopted` is there."""
        self.trouble = ""
        """Why it cannot be made or kept as it should be; "" when it is."""
        self.failed = asyncio.Event()
        """Set while there is `trouble`."""
        self.applied = asyncio.Event()
        """Set while the kernel has all of the view."""
        self.forget()

    @property
    def name(self) -> str:
        return self.view.definition.name

    @property
    def ingress(self) -> bool:
        return self.view.definition.ingress

    def show(self, adopted: Network | None) -> None:
        """It is made, or it is not there any more: who needs it then waits for another one."""
        self.adopted = adopted
        (self.made.clear if adopted is None else self.made.set)()

    def forget(self) -> None:
        """Nothing of it is in the kernel."""
        self.show(None)
        self.passed = _Passed()
        self.view.mark_all()

    def record(self) -> NetworkRecord:
        """The network, as the engine's own networks are described."""
        definition = self.view.definition
        return NetworkRecord(
            id=self.id,
            name=definition.name,
            driver=OVERLAY,
            created=definition.created,
            scope=SWARM,
            internal=definition.internal,
            attachable=definition.attachable,
            ingress=definition.ingress,
            options=definition.options | {VNI: str(definition.vni)},
            labels=dict(definition.labels),
            ipam=IPAM(config=[IPAMConfig(subnet=subnet, gateway=gateway) for subnet, gateway in definition.subnets]),
            chosen_by_user=(4,),
        )

    def overlay(self, port: int, local: IPv4Address) -> Overlay:
        definition = self.view.definition
        return Overlay(
            vni=definition.vni,
            port=port,
            local=local,
            encrypted=definition.encrypted,
            secret=definition.secret,
            ingress=definition.ingress,
        )


def _discard(index: dict[str, set[str]], key: str, value: str) -> None:
    index[key].discard(value)
    if not index[key]:
        del index[key]


def _put(differences: Entries[V]) -> dict[IPv4Address, V]:
    return dict(entry for entry in differences.values() if entry is not None)


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
        self._work = Reconciler(
            self._reconcile,
            self._step_failed,
            what=lambda network: f"network {network.name}",
            backoff=lambda: Backoff(*AGAIN),
        )
        self._withdrawn: set[str] = set()
        """Tasks of this node to which no traffic is led any more, before the managers know it."""
        self._is_held: Callable[[str], bool] = lambda network_id: False
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
            for name, text in row.nodes.items():
                network.view.put_node(name, text)
        for key, endpoint in self._endpoint_rows.load().items():
            if (known := self._all.get(key.partition("/")[0])) is not None:
                known.view.put_endpoint(endpoint)
        for key, service in self._service_rows.load().items():
            if (known := self._all.get(key.partition("/")[0])) is not None:
                known.view.put_service(service)
        overlays = self._networks.overlays
        # Containers may be on one that the rows, which are written a moment later, do not ask for.
        present = [network for network in self._all.values() if self._needed(network) or overlays.held(network.id)]
        for network in present:
            try:
                await self._make(network, keep=True)
                await self._apply(network)
                network.applied.set()
            except (EngineError, OSError) as error:
                _log.error("network %s: %s", network.name, words(error))
        if not any(network.ingress for network in present):
            await overlays.set_ports({})  # those that a daemon before may have left

    def keep_while(self, is_held: Callable[[str], bool]) -> None:
        """Networks that the managers gave up stay while `is_held(network_id)`: a container here is
        about to be on it, or may be again.
        """
        self._is_held = is_held

    def open(self, node: str, address: str) -> None:
        """An agent begins. `address`: the node's data address; "" for what the managers see."""
        self.node = node
        self.address = address or self.address
        self._work.open()
        for network in self._all.values():
            self._wake(network)

    async def close(self) -> None:
        """The daemon ends, or another agent follows. What is in the kernel stays."""
        await self._work.close()
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
                if network.adopted is not None:
                    await self._drop(network)
                else:
                    await self._networks.overlays.drop(network.id)
            except (EngineError, OSError) as error:
                _log.error("network %s: it is not removed: %s", network.name, words(error))
        for network in self._all.values():
            self._forget_rows(network)
        self._all.clear()
        rows = [self._changed_row(*key) for key in self._unsaved]
        self._unsaved.clear()
        self._withdrawn.clear()
        self.address, self.synchronized = "", False
        await self._records.commit(*rows)

    # --- from managers ----------------------------------------------------------------------------

    async def update(self, message: Views) -> None:
        """Accept all views, or changes. New networks are on disk when this returns, and are being
        made. Raises ServerError when they cannot be written; the session must bring all again.
        """
        new = []
        present = set()
        for view in message.of:
            network = self._all.get(view.network)
            if view.gone:
                if network is not None:
                    network.gone = True
                continue
            present.add(view.network)
            if network is None:
                if view.definition is None:
                    raise ServerError(f"changes of the network {view.network} came before the network")
                network = self._all[view.network] = _Network(view.network, view.definition)
                new.append(network)
            elif network.gone:
                network.gone = False
                self._wake(network)  # it may be going just now
            self._merge(network, view)
        if message.whole:
            for network_id in self._all.keys() - present:
                self._all[network_id].gone = True
            self.synchronized = True
        if new:
            await self._records.commit(*(self._row_of(network) for network in new))
        for network in self._all.values():
            if network.gone or network.view.changed or self._needed(network) != (network.adopted is not None):
                self._wake(network)
        self._changed.set()
        self._changed = asyncio.Event()
        self._save_soon()

    def _merge(self, network: _Network, update: View) -> None:
        view = network.view
        if update.definition is not None:  # it is whole
            if view.definition != update.definition:
                view.definition = update.definition
                self._unsaved["network", network.id, ""] = None
            endpoints_gone = [*view.endpoints.keys() - {endpoint.id for endpoint in update.endpoints}]
            services_gone = [*view.services.keys() - {service.id for service in update.services}]
            nodes_gone = [*view.nodes.keys() - update.nodes.keys()]
        else:
            endpoints_gone, services_gone = [*update.endpoints_gone], [*update.services_gone]
            nodes_gone = [*update.nodes_gone]
        for node, text in update.nodes.items():
            view.put_node(node, text)
        for endpoint_id in endpoints_gone:
            view.remove_endpoint(endpoint_id)
            self._unsaved["endpoint", network.id, endpoint_id] = None
        for endpoint in update.endpoints:
            if view.endpoints.get(endpoint.id) != endpoint:
                view.put_endpoint(endpoint)
                self._unsaved["endpoint", network.id, endpoint.id] = None
        for service_id in services_gone:
            view.remove_service(service_id)
            self._unsaved["service", network.id, service_id] = None
        for service in update.services:
            if view.services.get(service.id) != service:
                view.put_service(service)
                self._unsaved["service", network.id, service.id] = None
        for node in nodes_gone:
            view.remove_node(node)
        if update.nodes or nodes_gone:
            self._unsaved["network", network.id, ""] = None

    # --- from this node ---------------------------------------------------------------------------

    def withdrawn(self, task: str, yes: bool) -> None:
        """Lead no traffic of this node to a task of its own, or do so again."""
        if yes == (task in self._withdrawn):
            return
        (self._withdrawn.add if yes else self._withdrawn.discard)(task)
        for network in self._all.values():
            endpoint = network.view.endpoints.get(task)
            if endpoint is not None and endpoint.service:
                network.view.changed.services.add(endpoint.service)
                self._wake(network)

    async def withdrawal_seen(self, task: str) -> None:
        """Wait until the managers' views have the task as not ready. They send them to all nodes
        at the same time. Of a network that was removed they send nothing more: all tasks on it end.
        """
        while any(
            (endpoint := network.view.endpoints.get(task)) is not None and endpoint.ready and not network.gone
            for network in self._all.values()
        ):
            await self._changed.wait()

    async def need(self, network_id: str) -> Network:
        """The network, as soon as it is made.

        Raises NotFound if the managers have sent no view of it, ServerError if it cannot be made.
        """
        while (network := self._all.get(network_id)) is None or (network.gone and network.adopted is None):
            if self.synchronized:
                raise NotFound(f"network {network_id} not found")
            await self._changed.wait()
        network.asked = True
        if network.adopted is None:
            network.failed.clear()
            self._wake(network, urgent=True)
            await first_of(network.made.wait(), network.failed.wait())
        if network.adopted is not None:
            # Then its first packets have routes. One that the kernel refuses is tried again later.
            await either(network.applied, APPLY_LIMIT)
        if network.adopted is None:
            raise ServerError(f"network {network.name}: {network.trouble or 'it is gone'}")
        return network.adopted

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
        present = (network for network in self._all.values() if not network.gone)
        return next((network.id for network in present if network.name == text), "")

    def trouble(self, network_id: str) -> str:
        """Why a network cannot be used yet."""
        network = self._all.get(network_id)
        if network is None or network.gone:
            return "the managers have not sent its view"
        return network.trouble or "it is still being made"

    def occupants(self) -> list[tuple[str, str]]:
        """The ids of containers of this node, each with that of a network that it is on."""
        return [
            (container, network.id)
            for network in self._all.values()
            if network.adopted is not None
            for container in network.adopted.sandboxes
        ]

    def records(self) -> list[NetworkRecord]:
        """All that this node knows."""
        return [network.record() for network in self._all.values() if not network.gone]

    # --- from the view into the kernel ------------------------------------------------------------

    def _wake(self, network: _Network, *, urgent: bool = False) -> None:
        if not self._work.closed:
            network.applied.clear()
            self._work.mark(network, urgent=urgent)

    async def _reconcile(self, network: _Network) -> float | None:
        seconds = await self._step(network)
        network.trouble = ""
        network.failed.clear()
        if not self._work.marked(network):
            network.applied.set()
        return seconds

    def _step_failed(self, network: _Network, error: Exception, _seconds: float) -> None:
        reason = words(error)
        if reason != network.trouble:
            bug = not isinstance(error, (EngineError, OSError))
            _log.error("network %s: %s; trying again", network.name, reason, exc_info=bug)
        network.trouble = reason
        network.failed.set()

    async def _step(self, network: _Network) -> float | None:
        if self._needed(network):
            if network.adopted is None or self._moved(network):
                await self._make(network)
            await self._apply(network)
        elif network.adopted is None:
            await self._networks.overlays.drop(network.id)  # it may be kept from an earlier daemon
        elif network.adopted.sandboxes or self._is_held(network.id):
            return DROP_PAUSE  # the last containers are just ending
        else:
            await self._drop(network)
        if network.gone and network.adopted is None and self._all.get(network.id) is network:
            del self._all[network.id]
            self._forget_rows(network)
            self._save_soon()
        return None

    async def _drop(self, network: _Network) -> None:
        adopted = network.adopted
        network.show(None)
        try:
            if network.ingress:
                await self._networks.overlays.set_ports({})
            await self._networks.overlays.drop(network.id)
        except BaseException:
            network.show(adopted)
            raise
        network.forget()

    def _needed(self, network: _Network) -> bool:
        if network.gone:
            return False
        if not network.ingress or network.asked:
            return True
        ports = any(service.ports for service in network.view.services.values())
        return ports or self.node in network.view.of_node

    def _local(self, network: _Network) -> IPv4Address | None:
        """This node's data address: as others know it, by preference."""
        known = (network, *(other for other in self._all.values() if other.ingress))
        addresses = (each.view.nodes.get(self.node) for each in known)
        return next((address for address in addresses if address is not None), _address(self.address))

    def _moved(self, network: _Network) -> bool:
        """This node has another data address than when the network was made."""
        made = network.adopted.overlay if network.adopted is not None else None
        return made is not None and self._local(network) not in (None, made.local)

    async def _make(self, network: _Network, *, keep: bool = False) -> None:
        local = self._local(network)
        if local is None:
            raise ServerError("the data address of this node is not known yet, or is not IPv4")
        overlay = network.overlay(self.port, local)
        network.show(await self._networks.overlays.adopt(network.record(), overlay, keep=keep))
        if self.address != str(local):
            self.address = str(local)
            self._unsaved["network", network.id, ""] = None

    async def _apply(self, network: _Network) -> None:
        """Pass on what has changed since the last time. What fails stays marked."""
        marks, network.view.changed = network.view.changed, _Marks()
        for service in marks.services:
            network.ready.pop(service, None)
        if marks or network.passed.left:
            try:
                await self._pass_on(network, marks)
            except BaseException:
                network.view.changed.add(marks)
                raise

    async def _pass_on(self, network: _Network, marks: _Marks) -> None:
        overlays, passed = self._networks.overlays, network.passed
        if network.ingress and marks.nodes and network.view.nodes != passed.nodes:
            nodes = dict(network.view.nodes)
            await overlays.set_nodes(nodes)
            passed.nodes = nodes
        # A route to an endpoint comes before traffic is led there, and goes after.
        await self._pass_peers(network, marks.endpoints)
        if not network.ingress:  # no container asks for a virtual address there
            await self._pass_services(network, marks.services)
        self._pass_names(network, marks)
        if network.ingress:
            await self._pass_ports(network)
        passed.left = {address for address in passed.left if address not in passed.peers}
        if passed.left:
            await overlays.set_peers(network.id, {}, passed.left)
            passed.left = set()

    async def _pass_peers(self, network: _Network, endpoints: Iterable[str]) -> None:
        passed = network.passed
        differences = passed.peers.differences({each: self._peer(network, each) for each in endpoints})
        if put := _put(differences):
            await self._networks.overlays.set_peers(network.id, put, ())
        passed.left |= passed.peers.left(differences)
        passed.peers.update(differences)

    def _peer(self, network: _Network, endpoint_id: str) -> tuple[IPv4Address, IPv4Address] | None:
        """Address and node of an endpoint on another node."""
        view = network.view
        endpoint = view.endpoints.get(endpoint_id)
        if endpoint is None or endpoint.node == self.node:
            return None
        address, via = view.addresses.get(endpoint_id), view.nodes.get(endpoint.node)
        return None if address is None or via is None else (address, via)

    def _ready(self, network: _Network, service: str) -> Backends:
        """The endpoints of a service that traffic may be led to, in the order of their
        addresses.
        """
        backends = network.ready.get(service)
        if backends is None:
            of, addresses = network.view.endpoints, network.view.addresses
            ready = [
                addresses[endpoint_id]
                for endpoint_id in network.view.of_service.get(service, ())
                if of[endpoint_id].ready and endpoint_id not in self._withdrawn and endpoint_id in addresses
            ]
            backends = network.ready[service] = tuple(sorted(ready, key=int))
        return backends

    def _balanced(self, network: _Network, service_id: str) -> tuple[IPv4Address, Backends] | None:
        """Virtual address and ready endpoints of a service."""
        service = network.view.services.get(service_id)
        virtual = None if service is None else _address(service.address)
        return None if virtual is None else (virtual, self._ready(network, service_id))

    async def _pass_services(self, network: _Network, services: Iterable[str]) -> None:
        passed = network.passed
        differences = passed.services.differences({each: self._balanced(network, each) for each in services})
        put = _put(differences)
        left = passed.services.left(differences) - put.keys()
        if put or left or not passed.balances:
            await self._networks.overlays.set_services(network.id, put, left)
            passed.balances = True
        passed.services.update(differences)

    def _pass_names(self, network: _Network, marks: _Marks) -> None:
        expected: dict[str, Names | None] = {}
        for service in marks.services:
            expected |= self._service_names(network, service)
        for endpoint in marks.endpoints:
            expected[endpoint] = self._endpoint_names(network, endpoint)
        passed = network.passed.names
        put = {key: names for key, names in expected.items() if names is not None and passed.get(key) != names}
        left = [key for key, names in expected.items() if names is None and key in passed]
        if put or left:
            self._networks.overlays.set_names(network.id, put, left)
        passed.update(put)
        for key in left:
            del passed[key]

    def _service_names(self, network: _Network, service_id: str) -> dict[str, Names | None]:
        """A service has its virtual address, or its ready tasks; `tasks.NAME` are these always."""
        service = network.view.services.get(service_id)
        tasks = f"{service_id}/tasks"
        if service is None or network.ingress:
            return {service_id: None, tasks: None}
        ready, virtual = self._ready(network, service_id), _address(service.address)
        own = (service.name, *service.aliases)
        return {
            service_id: Names(own, ready if virtual is None else (virtual,), virtual is None),
            tasks: Names(tuple(f"tasks.{name}" for name in own), ready, True),
        }

    def _endpoint_names(self, network: _Network, endpoint_id: str) -> Names | None:
        """Those of containers on other nodes: this node's containers have theirs themselves."""
        endpoint = network.view.endpoints.get(endpoint_id)
        if endpoint is None or endpoint.node == self.node or not endpoint.name or network.ingress:
            return None
        address = network.view.addresses.get(endpoint_id)
        return None if address is None else Names((endpoint.name, *endpoint.aliases), (address,), False)

    async def _pass_ports(self, network: _Network) -> None:
        ports = {
            (port.protocol, port.published): (port.target, self._ready(network, service.id))
            for service in network.view.services.values()
            for port in service.ports
        }
        passed = network.passed.ports
        if ports == passed:
            return
        busy = await self._networks.overlays.set_ports(ports)
        for (protocol, port), reason in busy.items():
            if passed is None or (protocol, port) not in passed:
                _log.warning("published port %d/%s is not served on this node: %s", port, protocol, reason)
        network.passed.ports = ports

    # --- on disk ----------------------------------------------------------------------------------

    def _row_of(self, network: _Network) -> Change:
        shown = {node: str(address) for node, address in network.view.nodes.items()}
        row = NetworkRow(definition=network.view.definition, nodes=shown, port=self.port, local=self.address)
        return self._rows.put(network.id, row)

    def _save_soon(self) -> None:
        if self._unsaved and self._saving is None and not self._work.closed:
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

    def _forget_rows(self, network: _Network) -> None:
        self._unsaved["network", network.id, ""] = None
        self._unsaved |= dict.fromkeys(("endpoint", network.id, key) for key in network.view.endpoints)
        self._unsaved |= dict.fromkeys(("service", network.id, key) for key in network.view.services)

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
            endpoint = None if network is None else network.view.endpoints.get(key)
            return self._endpoint_rows.delete(row) if endpoint is None else self._endpoint_rows.put(row, endpoint)
        service = None if network is None else network.view.services.get(key)
        return self._service_rows.delete(row) if service is None else self._service_rows.put(row, service)


__all__ = ["NodeNetworks"]
