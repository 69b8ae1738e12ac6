"""Which node a task is placed on: the nodes' free resources and tasks, kept up by events.

A task goes to a node that is ready and active, has the reserved resources free, passes the
constraints, platforms and plugins, and has its host ports free. Among these nodes the tasks of one
service are spread evenly: first over the values of the spread preferences, then over nodes by the
tasks of this service, then by all tasks. A node on which the service has failed often comes last.

For each distinct set of constraints, platforms and plugins there is a *pool*: the nodes that pass,
and a heap of them by their number of tasks. Numbers change without a search in the heaps: an entry
that is too small is corrected when it is popped, and a smaller number is pushed at once. So a group
of tasks is placed without looking at each node, unless the service is already on most of them.

Not here: the store, and when to try (`scheduler.py`).

Threads: the event loop's.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from engine.errors import InvalidParameter
from engine.manager import constraints
from engine.manager.constraints import Constraint
from engine.manager.records import NodeData, NodeRecord
from engine.manager.tasks import open_for_tasks
from engine.wire.nodes import DiscreteResource, GenericResource, NamedResource
from engine.wire.services import ServiceSpec

FAILURES = 5
"""So many failures of a service on a node within `FAILURES_WITHIN` seconds make the node the last
choice for this service.
"""
FAILURES_WITHIN = 300.0

POOLS = 512
"""Pools that are kept. The one that was not used for the longest time is dropped."""

NO_NODE = "no suitable node"


class Filters(NamedTuple):
    """What does not depend on the tasks of a node: the key of a pool."""

    constraints: tuple[Constraint, ...] = ()
    platforms: frozenset[tuple[str, str]] = frozenset()
    """Pairs of operating system and architecture; "" stands for any."""
    plugins: frozenset[tuple[str, str]] = frozenset()
    """Pairs of type and name."""
    features: frozenset[str] = frozenset()
    """Of the kernel (`NodeData.features`)."""


class Need(NamedTuple):
    """What a task takes from a node."""

    cpu: int = 0
    memory: int = 0
    generic: tuple[tuple[str, int], ...] = ()
    ports: frozenset[tuple[str, int]] = frozenset()


class Demand(NamedTuple):
    """What one spec asks of a node."""

    filters: Filters = Filters()
    need: Need = Need()
    max_replicas: int = 0
    spread: tuple[str, ...] = ()
    unparsable: bool = False
    """The constraints are those of a later version: no node passes."""


NOTHING = Need()
ANYWHERE = Demand()


class Placed(NamedTuple):
    node: str
    generic: tuple[GenericResource, ...] = ()


def demand_of(spec: ServiceSpec, features: frozenset[str] = frozenset()) -> Demand:
    """What tasks of this spec ask of a node. `features`: what their networks do."""
    template = spec.task_template
    placement = template.placement
    reservations = template.resources.reservations if template.resources is not None else None
    filters = Filters(plugins=_plugins(spec), features=features)
    spread: tuple[str, ...] = ()
    max_replicas, unparsable = 0, False
    if placement is not None:
        max_replicas = placement.max_replicas
        try:
            filters = filters._replace(
                constraints=tuple(sorted(set(constraints.parse_all(placement.constraints)))),
                platforms=frozenset(
                    (platform.os.lower(), constraints.architecture(platform.architecture))
                    for platform in placement.platforms
                ),
            )
            spread = tuple(
                constraints.spread_key(preference.spread.spread_descriptor)
                for preference in placement.preferences
                if preference.spread is not None
            )
        except InvalidParameter:
            unparsable = True
    need = Need(ports=_ports(spec))
    if reservations is not None:
        generic: dict[str, int] = {}
        for resource in reservations.generic_resources:
            if resource.discrete_resource_spec is not None:
                kind = resource.discrete_resource_spec.kind
                generic[kind] = generic.get(kind, 0) + resource.discrete_resource_spec.value
            elif resource.named_resource_spec is not None:
                kind = resource.named_resource_spec.kind
                generic[kind] = generic.get(kind, 0) + 1
        need = need._replace(
            cpu=reservations.nano_cpus,
            memory=reservations.memory_bytes,
            generic=tuple(sorted((kind, count) for kind, count in generic.items() if count > 0)),
        )
    return Demand(filters, NOTHING if need == NOTHING else need, max_replicas, spread, unparsable)


def _ports(spec: ServiceSpec) -> frozenset[tuple[str, int]]:
    endpoint = spec.endpoint_spec
    if endpoint is None or not endpoint.ports:
        return frozenset()
    return frozenset(
        (port.protocol or "tcp", port.published_port)
        for port in endpoint.ports
        if port.publish_mode == "host" and port.published_port
    )


def _plugins(spec: ServiceSpec) -> frozenset[tuple[str, str]]:
    """Drivers that are plugins: of volumes, and of logs."""
    found = set()
    container = spec.task_template.container_spec
    for mount in container.mounts if container is not None else ():
        options = mount.volume_options
        driver = options.driver_config if mount.type == "volume" and options is not None else None
        if driver is not None and driver.name not in {"", "local"}:
            found.add(("Volume", driver.name))
    log = spec.task_template.log_driver
    if log is not None and log.name not in {"", "none"}:
        found.add(("Log", log.name))
    return frozenset(found)


class _Held(msgspec.Struct, frozen=True, gc=False):
    """What a task has of its node. A node does not refer to it."""

    host: Host
    service: str
    need: Need
    live: bool
    generic: tuple[GenericResource, ...]


class Host:
    """One node: what it has, what tasks have taken of it, and how many it has."""

    __slots__ = (
        "cpu", "cpu_used", "data", "discrete", "discrete_used", "features", "id", "live", "memory", "memory_used",
        "named", "named_used", "open", "plugins", "pools", "ports", "record",
    )  # fmt: skip

    def __init__(self, node: str) -> None:
        self.id = node
        self.record: NodeRecord | None = None
        self.data: NodeData | None = None
        self.open = False
        self.cpu = self.memory = self.cpu_used = self.memory_used = 0
        self.live = 0
        self.named: dict[str, set[str]] = {}
        self.named_used: dict[str, set[str]] = {}
        self.discrete: dict[str, int] = {}
        self.discrete_used: dict[str, int] = {}
        self.plugins: frozenset[tuple[str, str]] = frozenset()
        self.features: frozenset[str] = frozenset()
        self.ports: dict[tuple[str, int], int] = {}
        self.pools: set[_Pool] = set()

    def describe(self, record: NodeRecord | None, data: NodeData | None) -> bool:
        """Take over what the records say. Returns True if tasks may fit now that did not before."""
        before = (
            self.open,
            self.cpu,
            self.memory,
            self.named,
            self.discrete,
            self.plugins,
            self.features,
            self._labels(),
        )
        self.record, self.data = record, data
        self.open = record is not None and open_for_tasks(record.availability, data)
        self.features = frozenset(data.features) if data is not None and data.features else frozenset()
        description = data.description if data is not None else None
        if description is not None:
            resources = description.resources
            self.cpu, self.memory = resources.nano_cpus, resources.memory_bytes
            named: dict[str, set[str]] = {}
            discrete: dict[str, int] = {}
            for resource in resources.generic_resources:
                if resource.named_resource_spec is not None:
                    spec = resource.named_resource_spec
                    named.setdefault(spec.kind, set()).add(spec.value)
                elif resource.discrete_resource_spec is not None:
                    kind = resource.discrete_resource_spec.kind
                    discrete[kind] = discrete.get(kind, 0) + resource.discrete_resource_spec.value
            self.named, self.discrete = named, discrete
            self.plugins = frozenset((plugin.type, plugin.name) for plugin in description.engine.plugins)
        after = (
            self.open,
            self.cpu,
            self.memory,
            self.named,
            self.discrete,
            self.plugins,
            self.features,
            self._labels(),
        )
        return self.open and before != after

    def _labels(self) -> object:
        description = self.data.description if self.data is not None else None
        return (
            None if self.record is None else (self.record.labels, self.record.role),
            None if description is None else (description.hostname, description.platform, description.engine.labels),
            None if self.data is None else self.data.address,
        )

    def fits(self, need: Need) -> bool:
        """True if the node has free what the task takes."""
        if need is NOTHING:
            return True
        cpu, memory, generic, ports = need
        if (cpu and cpu > self.cpu - self.cpu_used) or (memory and memory > self.memory - self.memory_used):
            return False
        if ports and not self.ports.keys().isdisjoint(ports):
            return False
        return all(self._has(kind, count) for kind, count in generic)

    def _has(self, kind: str, count: int) -> bool:
        named = self.named.get(kind)
        if named is not None:
            return len(named) - len(self.named_used.get(kind, ())) >= count
        return self.discrete.get(kind, 0) - self.discrete_used.get(kind, 0) >= count

    def choose(self, need: Need) -> tuple[GenericResource, ...]:
        """The generic resources that a task which fits gets."""
        chosen: list[GenericResource] = []
        for kind, count in need.generic:
            named = self.named.get(kind)
            if named is not None:
                free = sorted(named - self.named_used.get(kind, set()))
                chosen += [GenericResource(named_resource_spec=NamedResource(kind, value)) for value in free[:count]]
            else:
                chosen.append(GenericResource(discrete_resource_spec=DiscreteResource(kind, count)))
        return tuple(chosen)

    def take(self, need: Need, generic: tuple[GenericResource, ...], sign: int) -> None:
        """Count what one task takes (`sign` 1) or gives back (-1)."""
        self.cpu_used += sign * need.cpu
        self.memory_used += sign * need.memory
        for port in need.ports:
            count = self.ports.get(port, 0) + sign
            if count > 0:
                self.ports[port] = count
            else:
                self.ports.pop(port, None)
        for resource in generic:
            if resource.named_resource_spec is not None:
                spec = resource.named_resource_spec
                used = self.named_used.setdefault(spec.kind, set())
                (used.add if sign > 0 else used.discard)(spec.value)
            elif resource.discrete_resource_spec is not None:
                kind = resource.discrete_resource_spec.kind
                self.discrete_used[kind] = (
                    self.discrete_used.get(kind, 0) + sign * resource.discrete_resource_spec.value
                )

    def supports(self, platforms: frozenset[tuple[str, str]]) -> bool:
        if not platforms:
            return True
        description = self.data.description if self.data is not None else None
        if description is None:
            return False
        system = description.platform.os.lower()
        machine = constraints.architecture(description.platform.architecture)
        return any(wants in {"", system} and on in {"", machine} for wants, on in platforms)

    def has_plugins(self, plugins: frozenset[tuple[str, str]]) -> bool:
        """True if it has the plugins, of which the tag `latest` may be left out. One that names no
        log driver at all is taken to have all.
        """
        return all(
            (kind, name) in self.plugins
            or (kind, f"{name}:latest") in self.plugins
            or (kind == "Log" and not any(has == kind for has, _ in self.plugins))
            for kind, name in plugins
        )

    def passes(self, filters: Filters) -> bool:
        return (
            self.record is not None
            and constraints.matches(filters.constraints, self.id, self.record, self.data)
            and self.supports(filters.platforms)
            and self.has_plugins(filters.plugins)
            and filters.features <= self.features
        )


class _Pool:
    """The open nodes that pass one set of filters.

    Every member has at least one entry in the heap that is not larger than its number of tasks.
    """

    __slots__ = ("filters", "heap", "members")

    def __init__(self, filters: Filters) -> None:
        self.filters = filters
        self.members: dict[str, Host] = {}
        self.heap: list[tuple[int, str]] = []

    def consider(self, host: Host) -> None:
        """Add or drop a node that has changed."""
        if host.open and host.passes(self.filters):
            if host.id not in self.members:
                self.members[host.id] = host
                host.pools.add(self)
                self.push(host)
        elif self.members.pop(host.id, None) is not None:
            host.pools.discard(self)

    def push(self, host: Host) -> None:
        heapq.heappush(self.heap, (host.live, host.id))
        if len(self.heap) > 4 * len(self.members) + 64:
            self.heap = [(member.live, member.id) for member in self.members.values()]
            heapq.heapify(self.heap)

    def least_used(self) -> Iterator[Host]:
        """Members by their number of tasks. When the iteration ends, those that were taken are put
        back with their number of then.
        """
        taken: dict[str, Host] = {}
        try:
            while self.heap:
                live, node = heapq.heappop(self.heap)
                host = self.members.get(node)
                if host is None or node in taken:
                    continue
                if live < host.live:
                    heapq.heappush(self.heap, (host.live, node))
                    continue
                if live > host.live:
                    continue
                taken[node] = host
                yield host
        finally:
            for host in taken.values():
                heapq.heappush(self.heap, (host.live, host.id))


class _Branch:
    """The nodes with one value of a spread preference, by the value of the next one."""

    __slots__ = ("branches", "count", "hosts")

    def __init__(self) -> None:
        self.count = 0
        self.branches: dict[str, _Branch] = {}
        self.hosts: list[tuple[bool, int, int, str]] = []


class Placement:
    """All nodes and what tasks hold of them."""

    def __init__(self) -> None:
        self.hosts: dict[str, Host] = {}
        self._held: dict[str, _Held] = {}
        self._services: dict[str, dict[str, int]] = {}
        """Live tasks by service and node."""
        self._pools: dict[Filters, _Pool] = {}
        self._failures: dict[tuple[str, str], list[float]] = {}
        self._changes = 0
        """Counts what changes the order of nodes."""
        self._order: tuple[str, Demand, int, list[tuple[bool, int, int, str]]] | None = None
        """The nodes in the order for one service, and `_changes` when it was so: for the next slice
        of many tasks of one service.
        """

    # --- events -----------------------------------------------------------------------------------

    def node(self, node: str, record: NodeRecord | None, data: NodeData | None) -> bool:
        """The records of a node have changed. Returns True if waiting tasks may fit now."""
        self._changes += 1
        host = self._host(node)
        better = host.describe(record, data)
        for pool in self._pools.values():
            pool.consider(host)
        if record is None and data is None:
            self._forget_if_empty(host)
        return better

    def track(
        self, task: str, service: str, node: str, demand: Demand, live: bool, generic: tuple[GenericResource, ...]
    ) -> None:
        """The task holds its part of the node. It may be told again, with other values."""
        before = self._held.get(task)
        if before is not None:
            if (
                before.host.id == node
                and before.live == live
                and before.need == demand.need
                and before.generic == generic
            ):
                return
            self._release(task, before)
        self._changes += 1
        host = self._host(node)
        self._held[task] = _Held(host, service, demand.need, live, generic)
        if demand.need != NOTHING:
            host.take(demand.need, generic, 1)
        if live:
            host.live += 1
            counts = self._services.setdefault(service, {})
            counts[node] = counts.get(node, 0) + 1

    def untrack(self, task: str) -> bool:
        """The task holds nothing any more. Returns True if it held something."""
        held = self._held.pop(task, None)
        if held is None:
            return False
        self._release(task, held)
        return True

    def failed(self, service: str, node: str, at: float) -> None:
        """A task of the service has failed on the node."""
        self._changes += 1
        times = self._failures.setdefault((service, node), [])
        times.append(at)
        del times[:-FAILURES]
        if len(self._failures) > 10_000:
            self._failures = {key: last for key, last in self._failures.items() if at - last[-1] <= FAILURES_WITHIN}

    def _release(self, task: str, held: _Held) -> None:
        self._changes += 1
        self._held.pop(task, None)
        host = held.host
        if held.need != NOTHING:
            host.take(held.need, held.generic, -1)
        if held.live:
            host.live -= 1
            counts = self._services[held.service]
            counts[host.id] -= 1
            if not counts[host.id]:
                del counts[host.id]
                if not counts:
                    del self._services[held.service]
            for pool in host.pools:
                pool.push(host)
        self._forget_if_empty(host)

    def _host(self, node: str) -> Host:
        host = self.hosts.get(node)
        if host is None:
            host = self.hosts[node] = Host(node)
        return host

    def _forget_if_empty(self, host: Host) -> None:
        if host.record is None and host.data is None and not host.live and not host.cpu_used and not host.memory_used:
            self.hosts.pop(host.id, None)

    def _pool(self, filters: Filters) -> _Pool:
        pool = self._pools.pop(filters, None)
        if pool is None:
            pool = _Pool(filters)
            for host in self.hosts.values():
                pool.consider(host)
            while len(self._pools) >= POOLS:
                unused = self._pools.pop(next(iter(self._pools)))
                for host in unused.members.values():
                    host.pools.discard(unused)
        self._pools[filters] = pool
        return pool

    def _unreliable(self, service: str, node: str, now: float) -> bool:
        times = self._failures.get((service, node))
        if times is None:
            return False
        if now - times[-1] > FAILURES_WITHIN:
            del self._failures[service, node]
            return False
        return len(times) >= FAILURES and now - times[0] <= FAILURES_WITHIN

    # --- placing ----------------------------------------------------------------------------------

    def place(self, service: str, demand: Demand, tasks: Sequence[str], now: float = 0.0) -> list[Placed]:
        """Place equal tasks, as many as possible, and track them there. Returns the nodes of the
        first ones; there is none for the rest.
        """
        if demand.unparsable or not tasks:
            return []
        pool = self._pool(demand.filters)
        if demand.spread:
            return self._place_by_preferences(pool, service, demand, tasks, now)
        placed: list[Placed] = []
        counts: Mapping[str, int] = self._services.get(service, {})
        if 2 * (len(tasks) + len(counts)) <= len(pool.members):
            for host in (nodes := pool.least_used()):
                if host.id not in counts and host.fits(demand.need) and not self._unreliable(service, host.id, now):
                    placed.append(self._hold(tasks[len(placed)], service, host, demand))
                    counts = self._services[service]
                    if len(placed) == len(tasks):
                        break
            nodes.close()  # type: ignore[attr-defined]
        if len(placed) < len(tasks):
            placed += self._place_by_counts(pool, service, demand, tasks[len(placed) :], now)
        return placed

    def place_on(self, node: str, service: str, demand: Demand, task: str) -> Placed | None:
        """Place a task on the node that it is made for, if it fits there."""
        host = self.hosts.get(node)
        if host is None or not host.open or demand.unparsable:
            return None
        if not host.fits(demand.need) or not host.passes(demand.filters):
            return None
        return self._hold(task, service, host, demand)

    def suits(self, node: str, demand: Demand) -> bool:
        """True if the node passes the constraints, is of a platform, and has the features of the
        kernel, whatever is free on it.
        """
        host = self.hosts.get(node)
        if host is None or host.record is None or demand.unparsable:
            return False
        return (
            demand.filters.features <= host.features
            and host.supports(demand.filters.platforms)
            and constraints.matches(demand.filters.constraints, node, host.record, host.data)
        )

    def _hold(self, task: str, service: str, host: Host, demand: Demand) -> Placed:
        generic = host.choose(demand.need) if demand.need.generic else ()
        self.track(task, service, host.id, demand, True, generic)
        return Placed(host.id, generic)

    def _rank(self, host: Host, service: str, now: float) -> tuple[bool, int, int, str]:
        count = self._services.get(service, {}).get(host.id, 0)
        return (bool(self._failures) and self._unreliable(service, host.id, now), count, host.live, host.id)

    def _has_room(self, host: Host, count: int, demand: Demand) -> bool:
        return (not demand.max_replicas or count < demand.max_replicas) and host.fits(demand.need)

    def _place_by_counts(
        self, pool: _Pool, service: str, demand: Demand, tasks: Sequence[str], now: float
    ) -> list[Placed]:
        heap: list[tuple[bool, int, int, str]]
        if self._order is not None and self._order[:3] == (service, demand, self._changes):
            heap = self._order[3]
        else:
            heap = [
                rank
                for host in pool.members.values()
                if self._has_room(host, (rank := self._rank(host, service, now))[1], demand)
            ]
            heapq.heapify(heap)
        placed: list[Placed] = []
        for task in tasks:
            if not heap:
                break
            unreliable, count, live, node = heap[0]
            host = pool.members[node]
            placed.append(self._hold(task, service, host, demand))
            if self._has_room(host, count + 1, demand):
                heapq.heapreplace(heap, (unreliable, count + 1, live + 1, node))
            else:
                heapq.heappop(heap)
        self._order = (service, demand, self._changes, heap)
        return placed

    def _place_by_preferences(
        self, pool: _Pool, service: str, demand: Demand, tasks: Sequence[str], now: float
    ) -> list[Placed]:
        root = _Branch()
        counts = self._services.get(service, {})
        for host in pool.members.values():
            assert host.record is not None
            branch = root
            count = counts.get(host.id, 0)
            for key in demand.spread:
                value = constraints.label_value(key, host.record, host.data) or ""
                branch = branch.branches.setdefault(value, _Branch())
                branch.count += count
            if self._has_room(host, count, demand):
                branch.hosts.append(self._rank(host, service, now))
        _heapify(root)
        placed: list[Placed] = []
        for task in tasks:
            leaf = _descend(root)
            if leaf is None:
                break
            unreliable, count, live, node = heapq.heappop(leaf.hosts)
            host = pool.members[node]
            placed.append(self._hold(task, service, host, demand))
            if self._has_room(host, count + 1, demand):
                heapq.heappush(leaf.hosts, (unreliable, count + 1, live + 1, node))
        return placed

    # --- reasons ----------------------------------------------------------------------------------

    def explain(self, service: str, demand: Demand, node: str = "") -> str:
        """Why a task waits: the first obstacle of each node, counted. `node`: of this one alone."""
        if demand.unparsable:
            return f"{NO_NODE} (constraints that this version cannot read)"
        counts = self._services.get(service, {})
        obstacles: dict[str, int] = {}
        known = (self.hosts[node],) if node in self.hosts else () if node else self.hosts.values()
        for host in known:
            if host.record is None:
                continue
            obstacle = self._obstacle(host, demand, counts.get(host.id, 0))
            if obstacle:
                obstacles[obstacle] = obstacles.get(obstacle, 0) + 1
        words = [
            f"{words} {count} node{'s' if count > 1 else ''}"
            for words, count in sorted(obstacles.items(), key=lambda item: (-item[1], item[0]))
        ]
        return f"{NO_NODE} ({'; '.join(words)})" if words else NO_NODE

    def _obstacle(self, host: Host, demand: Demand, count: int) -> str:
        need, filters = demand.need, demand.filters
        assert host.record is not None
        if not host.open:
            return "not available for new tasks:"
        if not constraints.matches(filters.constraints, host.id, host.record, host.data):
            return "scheduling constraints not satisfied on"
        if not host.supports(filters.platforms):
            return "unsupported platform on"
        if not host.has_plugins(filters.plugins):
            return "missing plugin on"
        if not filters.features <= host.features:
            missing = min(filters.features - host.features, key="overlay esp".find)
            return "no overlay networks on" if missing == "overlay" else "no encrypted overlay networks (ESP) on"
        if need.cpu > host.cpu - host.cpu_used:
            return "insufficient resources (CPU) on"
        if need.memory > host.memory - host.memory_used:
            return "insufficient resources (memory) on"
        if not host.fits(need._replace(ports=frozenset())):
            return "insufficient resources (generic) on"
        if not host.fits(need):
            return "host-mode port already in use on"
        if demand.max_replicas and count >= demand.max_replicas:
            return "max replicas per node limit reached on"
        return ""


def _heapify(branch: _Branch) -> None:
    heapq.heapify(branch.hosts)
    for below in branch.branches.values():
        _heapify(below)


def _descend(branch: _Branch) -> _Branch | None:
    """The leaf that the next task goes to, by the fewest tasks at each step; None when there is no
    room left. The task is counted.
    """
    if branch.hosts:
        branch.count += 1
        return branch
    while branch.branches:
        value = min(branch.branches, key=lambda name: (branch.branches[name].count, name))
        leaf = _descend(branch.branches[value])
        if leaf is not None:
            branch.count += 1
            return leaf
        del branch.branches[value]
    return None
