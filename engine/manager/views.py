"""What the nodes are sent of the swarm's networks: endpoints, services, names and ports.

One `View` of a network is the same for all nodes that need it. So each change is encoded once, and
appended to a short log of the network; an agent is sent the entries of the log that it does not
have. A new agent is sent the whole view as it was encoded last, and the log since then.

An endpoint is a task that has an address and has not ended, or an attachment that has an address.
A node needs the networks of its endpoints, and always the ingress network.

A service is on the networks of its spec, and on those on which it has a virtual address or a live
task: an update that takes a network away replaces tasks one after another, and may pause.

Traffic is led to a task (`EndpointView.ready`) that its node has reported as ready, until it is
to be stopped. The tasks of nodes that are taken for lost get traffic only while their service has
no other ready task: the node may still run them, and only be cut off from the managers.

The marks of what has changed are made for each event, and `flush` works them off: a change of an
endpoint costs O(nodes of its network), and nothing in a swarm without networks.

Owns:    what it knows of each network, and the encoded views.
Threads: the event loop's.
Not here: who is connected and when something is sent (`dispatcher.py`), addresses of tasks
          (`allocator.py`), attachments' records (`attaching.py`).
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, cast

import msgspec

from engine.manager import records
from engine.manager import tasks as rules
from engine.manager.assignments import task_name
from engine.manager.records import AttachmentRecord, NetworkRecord, NodeData, ServiceRecord, Task
from engine.manager.store import Event, Store
from engine.swarm_session.clock import Clock
from engine.swarm_session.messages import EndpointView, NetworkView, PortView, ServiceView, View, Views
from engine.swarm_session.states import NodeState, Role, TaskState
from engine.wire.services import ServiceSpec, VirtualIP
from engine.wire.tasks import NetworkAttachmentConfig

PART = 500
"""Endpoints or services of one encoded part of a whole view."""
SLICE = 0.004
"""Seconds of encoding after which others are served."""
LEAST_LOG = 256 << 10
"""Bytes of a network's log that are kept; as many as its whole view, if that is larger."""
IDLE = 30.0
"""Seconds without a change after which a network's encoded views are dropped."""
MANY = 100
"""Nodes from which on the ones that come and go are collected for the ingress network."""
COLLECT = 1.0
"""Seconds for which they are: each of them would be sent to every node."""

_log = logging.getLogger(__name__)
_encode = msgspec.msgpack.Encoder().encode


class Feed:
    """What one agent has been sent: the version of each of its networks' views."""

    __slots__ = ("node", "versions")

    def __init__(self, node: str) -> None:
        self.node = node
        self.versions: dict[str, int] = {}


class Changes(NamedTuple):
    """What an agent is to be sent. `before` its assignments, and `after` them."""

    before: Views | None
    after: Views | None


class _Network:
    """One network. Its record may be missing: tasks or nodes can be known before it."""

    __slots__ = (
        "building",
        "changed",
        "endpoints",
        "first",
        "id",
        "lock",
        "log",
        "log_size",
        "new_endpoints",
        "new_nodes",
        "new_services",
        "nodes",
        "record",
        "services",
        "version",
        "whole",
        "whole_size",
        "whole_version",
    )

    def __init__(self, id: str) -> None:
        self.id = id
        self.record: NetworkRecord | None = None
        self.endpoints: set[str] = set()
        """Keys of tasks and attachments."""
        self.nodes: dict[str, int] = {}
        """Endpoints on each node."""
        self.services: set[str] = set()
        self.new_endpoints: set[str] = set()
        """Those that changed since the last entry of the log; services and nodes likewise."""
        self.new_services: set[str] = set()
        self.new_nodes: set[str] = set()
        self.version = 0
        """Counts the entries of the log."""
        self.first = 0
        """The version from which on the log is there."""
        self.log: list[bytes] = []
        self.log_size = 0
        self.whole: list[bytes] | None = None
        """The whole view in parts, as of `whole_version`."""
        self.whole_version = 0
        self.whole_size = 0
        self.building = False
        """The log is not trimmed meanwhile."""
        self.changed = 0.0
        self.lock = asyncio.Lock()

    @property
    def unused(self) -> bool:
        return self.record is None and not self.endpoints and not self.services

    def since(self, version: int) -> list[bytes]:
        return self.log[version - self.first :]

    def append(self, entry: bytes, now: float) -> None:
        self.version += 1
        self.changed = now
        self.log.append(entry)
        self.log_size += len(entry)
        if not self.building:
            self.trim()

    def trim(self) -> None:
        """Drop old entries of the log, and the whole view if the log does not reach back to it."""
        most = max(LEAST_LOG, self.whole_size)
        drop = 0
        while self.log_size > most and drop < len(self.log) - 1:
            self.log_size -= len(self.log[drop])
            drop += 1
        if drop:
            del self.log[:drop]
            self.first += drop
            if self.whole_version < self.first:
                self.forget_whole()

    def forget_whole(self) -> None:
        self.whole = None
        self.whole_size = 0

    def forget_encoded(self) -> None:
        """Agents that are behind, and new ones, get a whole view that is encoded again."""
        self.forget_whole()
        self.log.clear()
        self.log_size = 0
        self.first = self.version


class NetworkViews:
    """See above. `notify(nodes)` is called when there is something to send to these nodes; None for
    all of them. `changed` must be called with each event of the store from now on.
    """

    def __init__(self, store: Store, clock: Clock, notify: Callable[[Iterable[str] | None], None]) -> None:
        self._store = store
        self._clock = clock
        self._notify = notify
        self._networks: dict[str, _Network] = {}
        self._needs: dict[str, dict[str, int]] = {}
        """By node: its networks, and its endpoints on each of them."""
        self._ingress: set[str] = set()
        """Networks that all nodes need: one, or none."""
        self._live: dict[str, Task] = {}
        """Tasks that are endpoints, as they were when they were looked at last."""
        self._attached: dict[str, AttachmentRecord] = {}
        """Attachments that are endpoints."""
        self._sound: dict[str, set[str]] = {}
        """By service: its ready tasks on nodes that are there."""
        self._doubtful: dict[str, set[str]] = {}
        """By service: its ready tasks on nodes that are taken for lost."""
        self._of_service: dict[str, frozenset[str]] = {}
        """The networks of a service, if it has any."""
        self._on: dict[str, dict[str, int]] = {}
        """By service and network: live tasks that are endpoints."""
        self._addresses: dict[str, str] = {}
        """The data address of each node that has one."""
        self._lost: set[str] = set()
        self._new_tasks: set[str] = set()
        self._new_attachments: set[str] = set()
        self._new_services: set[str] = set()
        self._new_nodes: set[str] = set()
        """Whose address or presence has changed, for the networks of their endpoints."""
        self._collected: set[str] = set()
        """Nodes that came or went, for the ingress network."""
        self._due = 0.0
        """When they are sent."""
        self._dirty: dict[str, _Network] = {}
        self._fill()

    # --- events -----------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Take what the store has already. Nothing of it has been sent to an agent."""
        for id, entry in self._store.all(records.NETWORKS).items():
            self._defined(id, entry.record)
        for node in self._store.all(records.NODES):
            self._judge(node)
        for key, task in self._store.all(records.TASKS).items():
            if task.record.networks:
                self._place_task(key)
        for key in self._store.all(records.ATTACHMENTS):
            self._place_attachment(key)
        for key in self._store.all(records.SERVICES):
            self._place_service(key)
        for network in self._networks.values():
            network.new_endpoints.clear()
            network.new_services.clear()
            network.new_nodes.clear()
        self._dirty.clear()
        self._new_services.clear()
        self._new_nodes.clear()
        self._collected.clear()

    def changed(self, event: Event) -> None:
        """A record has changed. Returns soon: `flush` does the work."""
        kind, key = event.kind, event.key
        if kind is records.TASKS:
            if (event.new is not None and event.new.record.networks) or key in self._live:
                self._new_tasks.add(key)
                self._notify(())
        elif kind is records.TASK_STATUS:
            if _matters(event) and (task := self._store.record(records.TASKS, key)) is not None and task.networks:
                self._new_tasks.add(key)
                self._notify(())
        elif kind in {records.NODE_DATA, records.NODES, records.MANAGERS}:
            self._judge(key)
        elif kind is records.SERVICES or kind is records.SERVICE_STATUS:
            self._new_services.add(key)
            self._notify(())
        elif kind is records.ATTACHMENTS:
            self._new_attachments.add(key)
            self._notify(())
        elif kind is records.NETWORKS:
            self._defined(key, None if event.new is None else event.new.record)

    def _defined(self, id: str, record: NetworkRecord | None) -> None:
        """A network was made or removed."""
        network = self._network(id)
        network.record = record
        if record is not None and record.ingress:
            self._ingress.add(id)
        everywhere = id in self._ingress
        if everywhere:  # the services with ports come to it, or leave it
            self._new_services.update(
                key for key, entry in self._store.all(records.SERVICES).items() if entry.record.ports
            )
        if record is None:
            self._ingress.discard(id)
            network.forget_encoded()
        self._notify(None if everywhere else tuple(network.nodes))
        self._drop(network)

    def _judge(self, node: str) -> None:
        """A node's records, or its manager's presence, may have changed."""
        known = self._store.get(records.NODES, node) is not None
        data = self._store.record(records.NODE_DATA, node)
        before = self._addresses.get(node, "")
        address = data_address(data) if known else ""
        if address != before:
            if address:
                self._addresses[node] = address
            else:
                del self._addresses[node]
            self._new_nodes.add(node)
            if self._ingress:
                if not self._collected:
                    self._due = self._clock.monotonic() + (COLLECT if len(self._addresses) > MANY else 0.0)
                self._collected.add(node)
            self._notify(())
        lost = not known or (data is not None and self._is_lost(node, data))
        if lost != (node in self._lost):
            if lost:
                self._lost.add(node)
            else:
                self._lost.discard(node)
            if node in self._needs:
                self._new_tasks.update(key for key in self._store.tasks_on(node) if key in self._live)
                self._notify(())
        if not known and node not in self._needs:
            self._lost.discard(node)

    def _is_lost(self, node: str, data: NodeData) -> bool:
        """Its connection broke, or its own manager, which had its session, is gone with it."""
        if data.state in {NodeState.DOWN, NodeState.DISCONNECTED}:
            return True
        alone = data.role == Role.MANAGER and data.owner in {"", node}
        return alone and self._store.get(records.MANAGERS, node) is None

    # --- the indexes ------------------------------------------------------------------------------

    def _network(self, id: str) -> _Network:
        network = self._networks.get(id)
        if network is None:
            network = self._networks[id] = _Network(id)
        return network

    def nodes_on(self, network: str) -> list[str]:
        """The nodes with endpoints on a network."""
        found = self._networks.get(network)
        return [] if found is None else [*found.nodes]

    def _drop(self, network: _Network) -> None:
        if network.unused and self._networks.get(network.id) is network:
            del self._networks[network.id]
            self._dirty.pop(network.id, None)

    def _join(self, id: str, node: str, network_id: str) -> None:
        network = self._network(network_id)
        network.endpoints.add(id)
        count = network.nodes.get(node, 0)
        network.nodes[node] = count + 1
        if not count:
            network.new_nodes.add(node)
            self._needs.setdefault(node, {})[network_id] = 1
        network.new_endpoints.add(id)
        self._dirty[network_id] = network

    def _part(self, id: str, node: str, network_id: str) -> None:
        network = self._network(network_id)
        network.endpoints.discard(id)
        network.nodes[node] -= 1
        if not network.nodes[node]:
            del network.nodes[node]
            network.new_nodes.add(node)
            needs = self._needs[node]
            del needs[network_id]
            if not needs:
                del self._needs[node]
                if self._store.get(records.NODES, node) is None:
                    self._lost.discard(node)
            self._notify((node,))
        network.new_endpoints.add(id)
        self._dirty[network_id] = network

    def _place_task(self, key: str) -> None:
        """Enter a task where it belongs now."""
        old, new = self._live.get(key), self._store.record(records.TASKS, key)
        ready = False
        if new is not None:
            status = self._store.record(records.TASK_STATUS, key)
            if not new.networks or not new.assigned or not new.node or (status is not None and status.state.ended):
                new = None
            elif status is not None:
                ready = status.ready and status.state == TaskState.RUNNING and rules.live(new)
        if old is None and new is None:
            return
        moved = old is None or new is None or old.node != new.node or old.networks != new.networks
        if old is not None and moved:
            for each in old.networks:
                self._part(key, old.node, each.network)
        if new is None:
            del self._live[key]
        else:
            self._live[key] = new
            if moved:
                for each in new.networks:
                    self._join(key, new.node, each.network)
        task = new or old
        assert task is not None
        before = old.networks if old is not None and rules.live(old) else ()
        after = new.networks if new is not None and rules.live(new) else ()
        if before != after:
            for each in after:
                self._count(task.service, each.network, 1)
            for each in before:
                self._count(task.service, each.network, -1)
        self._set_ready(key, task, ready)

    def _count(self, service: str, network: str, change: int) -> None:
        """Count a live task of a service. The service may come to the network with the first one,
        and leave it with the last.
        """
        on = self._on.setdefault(service, {})
        before = on.get(network, 0)
        on[network] = before + change
        if not on[network]:
            del on[network]
            if not on:
                del self._on[service]
        elif before:
            return
        record = self._store.record(records.SERVICES, service)
        if record is not None:
            there = network in self._networks_of(service, record)
            if there != (network in self._of_service.get(service, _EMPTY)):
                self._new_services.add(service)

    def _set_ready(self, key: str, task: Task, ready: bool) -> None:
        """Count a task among those that traffic is led to."""
        service = task.service
        sound, doubtful = self._sound.get(service, _EMPTY), self._doubtful.get(service, _EMPTY)
        before = 1 if key in sound else 2 if key in doubtful else 0
        now = 0 if not ready else 2 if task.node in self._lost else 1
        if before == now:
            return
        had = bool(sound)
        for place, index in ((1, self._sound), (2, self._doubtful)):
            if before == place:
                index[service].discard(key)
                if not index[service]:
                    del index[service]
            elif now == place:
                index.setdefault(service, set()).add(key)
        self._endpoint_changed(key)
        if had != bool(self._sound.get(service)):  # tasks of lost nodes come in or go out
            for other in self._doubtful.get(service, ()):
                self._endpoint_changed(other)

    def _endpoint_changed(self, key: str) -> None:
        task = self._live.get(key)
        for each in () if task is None else task.networks:
            network = self._network(each.network)
            network.new_endpoints.add(key)
            self._dirty[each.network] = network

    def _is_ready(self, key: str, service: str) -> bool:
        return key in (self._sound.get(service) or self._doubtful.get(service) or _EMPTY)

    def _place_attachment(self, key: str) -> None:
        old, new = self._attached.get(key), self._store.record(records.ATTACHMENTS, key)
        if new is not None and (not new.address or new.error):
            new = None
        if old is not None and (new is None or new != old):
            self._part(key, old.node, old.network)
            del self._attached[key]
        if new is not None and new != old:
            self._attached[key] = new
            self._join(key, new.node, new.network)

    def _place_service(self, key: str) -> None:
        record = self._store.record(records.SERVICES, key)
        before = self._of_service.get(key, frozenset())
        now = frozenset() if record is None else self._networks_of(key, record)
        for id in before | now:
            network = self._network(id)
            if id in now:
                network.services.add(key)
            else:
                network.services.discard(key)
            network.new_services.add(key)
            self._dirty[id] = network
        if now:
            self._of_service[key] = now
        else:
            self._of_service.pop(key, None)

    def _networks_of(self, key: str, service: ServiceRecord) -> frozenset[str]:
        """Where a service is: as its spec says, and where it has a virtual address or tasks."""
        found = {each.target for each in _attachments(service.spec)}
        found |= self._on.get(key, {}).keys()
        found |= {each.network_id for each in _virtual_addresses(self._store, key)}
        if any(port.publish_mode in {"", "ingress"} for port in service.ports):
            found |= self._ingress
        return frozenset(found)

    # --- changes ----------------------------------------------------------------------------------

    def waits(self, tasks: Iterable[str]) -> bool:
        """One of these tasks has changed since the last `flush`."""
        return not self._new_tasks.isdisjoint(tasks)

    @property
    def due(self) -> bool:
        """`flush` should be called."""
        if self._new_tasks or self._new_services or self._new_attachments or self._dirty or self._new_nodes:
            return True
        return bool(self._collected) and self._clock.monotonic() >= self._due

    def flush(self) -> None:
        """Append what has changed to the logs."""
        tasks, self._new_tasks = self._new_tasks, set()
        for key in tasks:
            self._place_task(key)
        attachments, self._new_attachments = self._new_attachments, set()
        for key in attachments:
            self._place_attachment(key)
        services, self._new_services = self._new_services, set()
        for key in services:
            self._place_service(key)
        nodes, self._new_nodes = self._new_nodes, set()
        for node in nodes:
            for id in self._needs.get(node, ()):
                if id not in self._ingress:
                    self._node_changed(id, node)
        if self._collected and self._clock.monotonic() >= self._due:
            collected, self._collected = self._collected, set()
            for id in self._ingress:
                for node in collected:
                    self._node_changed(id, node)
        if not self._dirty:
            return
        dirty, self._dirty = self._dirty, {}
        now = self._clock.monotonic()
        for network in dirty.values():
            self._enter(network, now)
            self._drop(network)

    def _node_changed(self, id: str, node: str) -> None:
        network = self._network(id)
        network.new_nodes.add(node)
        self._dirty[id] = network

    def _enter(self, network: _Network, now: float) -> None:
        endpoints, network.new_endpoints = network.new_endpoints, set()
        services, network.new_services = network.new_services, set()
        nodes, network.new_nodes = network.new_nodes, set()
        if network.record is None:
            return  # no agent has been sent any of it
        addresses = self._nodes_of(network, nodes)
        view = View(
            network=network.id,
            endpoints=tuple(self._endpoints(network, endpoints)),
            endpoints_gone=tuple(endpoints - network.endpoints),
            services=tuple(self._services(network, services)),
            services_gone=tuple(services - network.services),
            nodes=addresses,
            nodes_gone=tuple(node for node in nodes if node not in addresses),
        )
        network.append(_encode(view), now)
        self._notify(None if network.id in self._ingress else network.nodes)

    def _nodes_of(self, network: _Network, nodes: Iterable[str]) -> dict[str, str]:
        """The data addresses of those of `nodes` that the network's view has."""
        everywhere = network.id in self._ingress
        return {
            node: self._addresses[node]
            for node in nodes
            if node in self._addresses and (everywhere or node in network.nodes)
        }

    def _endpoints(self, network: _Network, keys: Iterable[str]) -> Iterator[EndpointView]:
        for key in keys:
            if key not in network.endpoints:
                continue
            task = self._live.get(key)
            if task is None:
                record = self._attached[key]
                yield EndpointView(
                    id=key,
                    node=record.node,
                    address=record.address,
                    name=record.name,
                    aliases=record.aliases,
                    ready=True,
                )
                continue
            name = ""
            if network.id not in self._ingress:  # no name is looked up there
                service = self._store.record(records.SERVICES, task.service)
                name = "" if service is None else task_name(service.spec.name, key, task)
            yield EndpointView(
                id=key,
                node=task.node,
                address=next(each.address for each in task.networks if each.network == network.id),
                name=name,
                service=task.service,
                ready=self._is_ready(key, task.service),
            )

    def _services(self, network: _Network, keys: Iterable[str]) -> Iterator[ServiceView]:
        for key in keys:
            service = self._store.record(records.SERVICES, key)
            if service is None or key not in network.services:
                continue
            virtual = _virtual_addresses(self._store, key)
            address = next((each.addr for each in virtual if each.network_id == network.id), "")
            specs = (service.spec,) if service.previous is None else (service.spec, service.previous)
            attachments = (each for spec in specs for each in _attachments(spec))
            aliases = next((each.aliases for each in attachments if each.target == network.id), ())
            ports: tuple[PortView, ...] = ()
            if network.id in self._ingress:
                ports = tuple(
                    PortView(protocol=port.protocol or "tcp", published=port.published_port, target=port.target_port)
                    for port in service.ports
                    if port.publish_mode in {"", "ingress"} and port.published_port
                )
            yield ServiceView(
                id=key,
                name=service.spec.name,
                address=address.partition("/")[0],
                aliases=tuple(aliases),
                ports=ports,
            )

    def concerns(self, node: str) -> bool:
        """The node has endpoints."""
        return node in self._needs

    def elsewhere(self, id: str, node: str) -> bool:
        """The network has endpoints on other nodes than this one."""
        network = self._networks.get(id)
        return network is not None and any(other != node for other in network.nodes)

    # --- what an agent is sent --------------------------------------------------------------------

    def _wanted(self, node: str) -> list[_Network]:
        ids = [*self._needs.get(node, ()), *(id for id in self._ingress if id not in self._needs.get(node, ()))]
        networks = [self._networks[id] for id in ids if id in self._networks]
        return [network for network in networks if network.record is not None]

    def missing(self, feed: Feed) -> list[str]:
        """Networks that must be built before `changes` can be called."""
        return [
            network.id
            for network in self._wanted(feed.node)
            if network.whole is None and feed.versions.get(network.id, -1) < network.first
        ]

    async def build(self, id: str) -> None:
        """Encode the whole view of a network, in slices. What changes meanwhile is in the log."""
        network = self._networks.get(id)
        if network is None:
            return
        async with network.lock:
            if network.whole is not None or network.record is None:
                return
            network.building = True
            version = network.version
            whole: list[bytes] = []
            began = self._clock.monotonic()
            try:
                for view in self._parts(network, network.record):
                    whole.append(_encode(view))
                    if self._clock.monotonic() - began > SLICE:
                        await asyncio.sleep(0)
                        began = self._clock.monotonic()
            finally:
                network.building = False
            if network.record is not None:
                network.whole, network.whole_version = whole, version
                network.whole_size = sum(map(len, whole))
                network.changed = self._clock.monotonic()
            network.trim()

    def _parts(self, network: _Network, record: NetworkRecord) -> Iterator[View]:
        everywhere = network.id in self._ingress
        nodes = self._nodes_of(network, list(self._addresses if everywhere else network.nodes))
        services, endpoints = tuple(network.services), tuple(network.endpoints)
        yield View(
            network=network.id,
            definition=_definition(record),
            nodes=nodes,
            services=tuple(self._services(network, services[:PART])),
            endpoints=tuple(self._endpoints(network, endpoints[:PART])),
        )
        for start in range(PART, max(len(services), len(endpoints)), PART):
            yield View(
                network=network.id,
                services=tuple(self._services(network, services[start : start + PART])),
                endpoints=tuple(self._endpoints(network, endpoints[start : start + PART])),
            )

    def whole(self, feed: Feed) -> Views:
        """All views of a new session, none of which is `missing`."""
        feed.versions.clear()
        before = self.changes(feed).before
        return Views(of=() if before is None else before.of, whole=True)

    def changes(self, feed: Feed) -> Changes:
        """What the agent does not have of its networks, none of which is `missing`."""
        views: list[bytes] = []
        wanted = self._wanted(feed.node)
        for network in wanted:
            version = feed.versions.get(network.id, -1)
            if version == network.version:
                continue
            if version < network.first:
                assert network.whole is not None
                views += network.whole
                version = network.whole_version
            views += network.since(version)
            feed.versions[network.id] = network.version
        gone: list[bytes] = []
        if len(feed.versions) > len(wanted):
            kept = {network.id for network in wanted}
            for id in [id for id in feed.versions if id not in kept]:
                del feed.versions[id]
                gone.append(_encode(View(network=id, gone=True)))
        return Changes(_message(views), _message(gone))

    def tidy(self) -> None:
        """Drop the encoded views of networks that have not changed for some time."""
        now = self._clock.monotonic()
        for network in self._networks.values():
            if not network.building and (network.log or network.whole) and now - network.changed > IDLE:
                network.forget_encoded()


_EMPTY: frozenset[str] = frozenset()


def _matters(event: Event) -> bool:
    """A status shows another readiness than before, or the end of its task."""
    old, new = event.old, event.new
    if old is None or new is None:
        return True
    return bool(
        old.record.ready != new.record.ready
        or old.record.state.ended != new.record.state.ended
        or (new.record.ready and old.record.state != new.record.state)
    )


def _message(views: list[bytes]) -> Views | None:
    """A message of views that are encoded already."""
    return Views(of=cast(tuple[View, ...], tuple(map(msgspec.Raw, views)))) if views else None


def _definition(record: NetworkRecord) -> NetworkView:
    return NetworkView(
        name=record.name,
        vni=record.vni,
        subnets=tuple((each.subnet, each.gateway) for each in record.subnets),
        created=record.created,
        internal=record.internal,
        attachable=record.attachable,
        ingress=record.ingress,
        encrypted=record.encrypted,
        secret=record.secret,
        labels=record.labels,
        options=record.options,
    )


def _attachments(spec: ServiceSpec) -> list[NetworkAttachmentConfig]:
    return spec.task_template.networks or spec.networks


def _virtual_addresses(store: Store, key: str) -> list[VirtualIP]:
    status = store.record(records.SERVICE_STATUS, key)
    return [] if status is None or status.endpoint is None else status.endpoint.virtual_ips


def data_address(data: NodeData | None) -> str:
    """Where a node's VXLAN packets go to; "" if it has no IPv4 address."""
    address = "" if data is None else data.data_address or data.address
    try:
        return str(ipaddress.IPv4Address(address)) if address else ""
    except ValueError:
        return ""
