"""Which node a task is placed on: each rule, and random swarms compared with the plain search of
all nodes.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import msgspec
import pytest

from engine.manager.placement import FAILURES, FAILURES_WITHIN, Demand, Placement, demand_of
from engine.manager.records import NodeData, NodeRecord
from engine.swarm_session.states import Availability, NodeState
from engine.wire.nodes import NodeDescription
from tests.support.fakes.swarm import spec

GIB = 1 << 30


def record(labels: dict[str, str] | None = None, availability: Availability = Availability.ACTIVE) -> NodeRecord:
    return NodeRecord(created=0, updated=0, labels=labels or {}, availability=availability)


def data(state: NodeState = NodeState.READY, *, cpus: float = 4, memory: int = 8 * GIB, **more: Any) -> NodeData:
    document = {
        "Platform": {"OS": "linux", "Architecture": "x86_64"},
        "Resources": {"NanoCPUs": int(cpus * 1e9), "MemoryBytes": memory, "GenericResources": more.pop("generic", [])},
        **more,
    }
    return NodeData(description=msgspec.convert(document, NodeDescription), state=state)


def placement(count: int = 3, **more: Any) -> Placement:
    made = Placement()
    for number in range(1, count + 1):
        made.node(f"n{number}", record(), data(**more))
    return made


_numbers = itertools.count()


def place(where: Placement, service: str, count: int, now: float = 0.0, **fields: Any) -> list[str]:
    """The nodes of so many new tasks."""
    tasks = [f"{service}.{next(_numbers)}" for _ in range(count)]
    return [placed.node for placed in where.place(service, demand_of(spec(service, **fields)), tasks, now)]


def test_tasks_of_a_service_are_spread() -> None:
    assert sorted(place(placement(), "a", 7)) == ["n1", "n1", "n1", "n2", "n2", "n3", "n3"]


def test_a_service_is_spread_before_all_tasks_are() -> None:
    where = placement(2)
    where.node("n2", None, None)
    place(where, "a", 5)
    where.node("n2", record(), data())
    assert place(where, "b", 2) == ["n2", "n1"]
    assert place(where, "b", 2) == ["n2", "n1"]


def test_the_node_with_fewest_tasks_is_first() -> None:
    where = placement(10)
    assert place(where, "a", 4) == ["n1", "n10", "n2", "n3"]
    assert place(where, "b", 3) == ["n4", "n5", "n6"]
    assert place(where, "c", 3) == ["n7", "n8", "n9"]


@pytest.mark.parametrize(
    ("wish", "state", "open_"),
    [
        (Availability.ACTIVE, NodeState.READY, True),
        (Availability.PAUSE, NodeState.READY, False),
        (Availability.DRAIN, NodeState.READY, False),
        (Availability.ACTIVE, NodeState.DOWN, False),
        (Availability.ACTIVE, NodeState.UNKNOWN, False),
        (Availability.ACTIVE, NodeState.DISCONNECTED, False),
    ],
)
def test_only_ready_and_active_nodes(wish: Availability, state: NodeState, open_: bool) -> None:
    where = Placement()
    where.node("n1", record(availability=wish), data(state))
    assert place(where, "a", 1) == (["n1"] if open_ else [])
    if not open_:
        assert where.explain("a", Demand()) == "no suitable node (not available for new tasks: 1 node)"


def test_reservations_are_subtracted_and_given_back() -> None:
    where = placement(1, cpus=2, memory=4 * GIB)
    demand = demand_of(spec(reservations={"NanoCPUs": 1_000_000_000, "MemoryBytes": GIB}))
    assert len(where.place("a", demand, ["t1", "t2", "t3"])) == 2
    assert where.explain("a", demand) == "no suitable node (insufficient resources (CPU) on 1 node)"
    assert where.untrack("t1")
    assert len(where.place("a", demand, ["t3"])) == 1
    large = demand_of(spec(reservations={"MemoryBytes": 3 * GIB}))
    assert not where.place("b", large, ["t4"])
    assert where.explain("b", large) == "no suitable node (insufficient resources (memory) on 1 node)"


def test_generic_resources_are_named_or_counted() -> None:
    generic = [
        {"NamedResourceSpec": {"Kind": "GPU", "Value": "uuid2"}},
        {"NamedResourceSpec": {"Kind": "GPU", "Value": "uuid1"}},
        {"DiscreteResourceSpec": {"Kind": "SSD", "Value": 3}},
    ]
    where = placement(1, generic=generic)

    def wants(**kinds: int) -> Demand:
        wanted = [{"DiscreteResourceSpec": {"Kind": kind, "Value": value}} for kind, value in kinds.items()]
        return demand_of(spec(reservations={"GenericResources": wanted}))

    (first,) = where.place("a", wants(GPU=1, SSD=2), ["t1"])
    assert list(msgspec.to_builtins(first.generic)) == [
        {"NamedResourceSpec": {"Kind": "GPU", "Value": "uuid1"}},
        {"DiscreteResourceSpec": {"Kind": "SSD", "Value": 2}},
    ]
    assert not where.place("a", wants(SSD=2), ["t2"])
    assert not where.place("a", wants(GPU=2), ["t2"])
    assert where.explain("a", wants(GPU=2)) == "no suitable node (insufficient resources (generic) on 1 node)"
    (second,) = where.place("a", wants(GPU=1, SSD=1), ["t2"])
    assert second.generic[0].named_resource_spec is not None
    assert second.generic[0].named_resource_spec.value == "uuid2"
    where.untrack("t1")
    assert len(where.place("a", wants(GPU=1, SSD=2), ["t3"])) == 1
    assert not where.place("a", wants(TPU=1), ["t4"])


def test_host_ports_are_free_once_on_a_node() -> None:
    ports = [{"TargetPort": 80, "PublishedPort": 80, "PublishMode": "host"}]
    where = placement(2)
    assert sorted(place(where, "a", 3, ports=ports)) == ["n1", "n2"]
    demand = demand_of(spec(ports=ports))
    assert where.explain("b", demand) == "no suitable node (host-mode port already in use on 2 nodes)"
    udp = [{"Protocol": "udp", "TargetPort": 80, "PublishedPort": 80, "PublishMode": "host"}]
    assert len(place(where, "c", 2, ports=udp)) == 2
    chosen_later = [{"TargetPort": 80, "PublishMode": "host"}]
    assert len(place(where, "d", 4, ports=chosen_later)) == 4


def test_max_replicas_per_node() -> None:
    where = placement(2)
    assert len(place(where, "a", 5, placement={"MaxReplicas": 2})) == 4
    demand = demand_of(spec(placement={"MaxReplicas": 2}))
    assert where.explain("a", demand) == "no suitable node (max replicas per node limit reached on 2 nodes)"
    assert len(place(where, "b", 5, placement={"MaxReplicas": 2})) == 4


def test_platforms() -> None:
    where = placement(1)
    where.node("arm", record(), data(Platform={"OS": "linux", "Architecture": "aarch64"}))
    wants = {"Platforms": [{"OS": "linux", "Architecture": "arm64"}]}
    assert set(place(where, "a", 2, placement=wants)) == {"arm"}
    assert set(place(where, "b", 2, placement={"Platforms": [{"OS": "linux"}]})) == {"arm", "n1"}
    windows = demand_of(spec(placement={"Platforms": [{"OS": "windows", "Architecture": "amd64"}]}))
    assert not where.place("c", windows, ["t1"])
    assert where.explain("c", windows) == "no suitable node (unsupported platform on 2 nodes)"


def test_plugins() -> None:
    where = placement(1)
    plugins = [{"Type": "Volume", "Name": "nfs"}, {"Type": "Log", "Name": "gelf"}]
    where.node("n2", record(), data(Engine={"Plugins": plugins}))
    mount = {"Type": "volume", "Target": "/x", "VolumeOptions": {"DriverConfig": {"Name": "nfs"}}}
    wants = {"Mounts": [mount]}
    assert set(place(where, "a", 3, container=wants)) == {"n2"}
    other = demand_of(spec(container={"Mounts": [{**mount, "VolumeOptions": {"DriverConfig": {"Name": "ceph"}}}]}))
    assert where.explain("b", other) == "no suitable node (missing plugin on 2 nodes)"
    where.node("n3", record(), data(Engine={"Plugins": [{"Type": "Volume", "Name": "ceph:latest"}]}))
    short = {**mount, "VolumeOptions": {"DriverConfig": {"Name": "ceph"}}}
    assert set(place(where, "d", 2, container={"Mounts": [short]})) == {"n3"}
    local = {**mount, "VolumeOptions": {"DriverConfig": {"Name": "local"}}}
    assert len(place(where, "c", 3, container={"Mounts": [local]})) == 3


def test_preferences_spread_over_values_first() -> None:
    where = Placement()
    for number in range(1, 5):
        where.node(f"a{number}", record({"dc": "a"}), data())
    where.node("b1", record({"dc": "b"}), data())
    wants = {"Preferences": [{"Spread": {"SpreadDescriptor": "node.labels.dc"}}]}
    nodes = place(where, "s", 8, placement=wants)
    assert nodes.count("b1") == 4
    assert sorted(node for node in nodes if node != "b1") == ["a1", "a2", "a3", "a4"]
    where.node("c1", record(), data())
    assert place(where, "s", 4, placement=wants) == ["c1"] * 4, "nodes without the label are one more value"


def test_preferences_below_preferences() -> None:
    where = Placement()
    for dc, rack in itertools.product("ab", "xyz"):
        where.node(f"{dc}{rack}", record({"dc": dc, "rack": rack}), data())
    wants = {
        "Preferences": [{"Spread": {"SpreadDescriptor": f"node.labels.{label}"}} for label in ("dc", "rack")],
    }
    nodes = place(where, "s", 12, placement=wants)
    assert {node: nodes.count(node) for node in nodes} == dict.fromkeys(["ax", "ay", "az", "bx", "by", "bz"], 2)


def test_a_full_value_is_left_out() -> None:
    where = Placement()
    where.node("a1", record({"dc": "a"}), data(cpus=1))
    where.node("b1", record({"dc": "b"}), data(cpus=4))
    wants = {"Preferences": [{"Spread": {"SpreadDescriptor": "node.labels.dc"}}]}
    nodes = place(where, "s", 9, placement=wants, reservations={"NanoCPUs": 1_000_000_000})
    assert nodes == ["a1", "b1", "b1", "b1", "b1"]


def test_a_node_that_fails_often_is_last_for_the_service() -> None:
    where = placement(3)
    for time in range(FAILURES):
        assert "n1" in place(where, f"probe{time}", 3)
        where.failed("a", "n1", float(time))
    assert set(place(where, "a", 6, now=10.0)) == {"n2", "n3"}
    assert set(place(where, "b", 3, now=10.0)) == {"n1", "n2", "n3"}
    where.node("n2", None, None)
    where.node("n3", None, None)
    assert place(where, "a", 1, now=11.0) == ["n1"], "it is better than none"
    where.node("n2", record(), data())
    assert "n1" in place(where, "a", 8, now=FAILURES_WITHIN + FAILURES + 1)


def test_constraints_of_a_later_version_fit_nowhere() -> None:
    demand = demand_of(spec(constraints=["node.labels.x >= 3"]))
    assert not placement().place("a", demand, ["t1"])
    assert "cannot read" in placement().explain("a", demand)


def test_a_node_that_changes_becomes_usable() -> None:
    where = Placement()
    assert not where.node("n1", record(), data(NodeState.DOWN))
    assert where.node("n1", record(), data())
    assert not where.node("n1", record(), data()), "nothing has changed"
    assert where.node("n1", record({"x": "1"}), data())
    assert where.node("n1", record({"x": "1"}), data(cpus=8))
    assert not where.node("n1", record({"x": "1"}, Availability.DRAIN), data(cpus=8))


class Plain:
    """The same rules by looking at each node for each task."""

    def __init__(self) -> None:
        self.nodes: dict[str, tuple[int, str, bool]] = {}
        """CPUs, label, open."""
        self.tasks: dict[str, tuple[str, str, int]] = {}
        """Service, node, CPUs."""

    def place(self, service: str, cpus: int, label: str, most: int) -> str | None:
        def rank(node: str) -> tuple[int, int, str]:
            on_it = [task for task in self.tasks.values() if task[1] == node]
            return sum(task[0] == service for task in on_it), len(on_it), node

        def fits(node: str) -> bool:
            has, labelled, open_ = self.nodes[node]
            used = sum(task[2] for task in self.tasks.values() if task[1] == node)
            if not open_ or (label and labelled != label) or used + cpus > has:
                return False
            return not most or rank(node)[0] < most

        return min(filter(fits, self.nodes), key=rank, default=None)


@pytest.mark.parametrize("seed", range(40))
def test_random_swarms_place_as_the_plain_search_does(seed: int) -> None:
    dice = random.Random(seed)
    plain, where = Plain(), Placement()
    size = dice.choice([3, 10, 40])
    services = [
        (f"s{number}", dice.choice([0, 0, 1, 2]), dice.choice(["", "", "x", "y"]), dice.choice([0, 0, 1, 3]))
        for number in range(6)
    ]
    demands = {
        name: demand_of(
            spec(
                name,
                constraints=[f"node.labels.l=={label}"] if label else [],
                placement={"MaxReplicas": most},
                reservations={"NanoCPUs": cpus * 1_000_000_000},
            )
        )
        for name, cpus, label, most in services
    }

    def describe(node: str) -> None:
        cpus, label, open_ = plain.nodes[node]
        state = NodeState.READY if open_ else NodeState.DOWN
        where.node(node, record({"l": label}), data(state, cpus=cpus))

    for number in range(size):
        plain.nodes[f"n{number:02}"] = (dice.randrange(1, 9), dice.choice("xyz"), dice.random() < 0.9)
        describe(f"n{number:02}")
    for turn in range(60):
        event = dice.random()
        if event < 0.6:
            name, cpus, label, most = dice.choice(services)
            tasks = [f"t{turn}.{number}" for number in range(dice.choice([1, 1, 2, 5, 20]))]
            placed = [found.node for found in where.place(name, demands[name], tasks)]
            for number, task in enumerate(tasks):
                node = plain.place(name, cpus, label, most)
                assert (placed[number] if number < len(placed) else None) == node
                if node is None:
                    break
                plain.tasks[task] = (name, node, cpus)
        elif event < 0.85 and plain.tasks:
            for task in dice.sample(sorted(plain.tasks), min(len(plain.tasks), dice.choice([1, 3, 10]))):
                del plain.tasks[task]
                assert where.untrack(task)
        else:
            node = dice.choice(sorted(plain.nodes))
            cpus, label, open_ = plain.nodes[node]
            plain.nodes[node] = (dice.choice([cpus, 8]), dice.choice([label, "x"]), not open_)
            describe(node)
