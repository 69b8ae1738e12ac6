"""A swarm's networks, of five engines in network namespaces on this host.

Throughput and connections are ratios to a direct route over the same VXLAN, taken in turns within
one run: all hosts share the cores of one machine, so the numbers themselves say little. Each way
begins on the same host and has as many links: from a container, or for ingress from the host.
"""

from __future__ import annotations

import calendar
import contextlib
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bench.engines import Engine
from bench.job import Figure, Job, Size
from bench.report import Target
from bench.rows.swarm import close, five
from tests.support.engine import packets
from tests.support.engine.harness import until
from tests.support.swarm.clusters import Cluster, Node, address_of
from tests.support.swarm.load import Load
from tests.support.swarm.networks import answered_by, host_names, overlay, published, vni_of, web

PORT = 8080
SECONDS = 2.0
"""Of each transfer."""
ROUNDS = 5
CHANGES = 25
"""Tasks that start and end for the times of propagation."""


@dataclass
class Site:
    """A service whose only task is on the last node, clients on the others, and one outside."""

    cluster: Cluster
    undo: contextlib.ExitStack
    network: str = ""
    task: Any = None
    virtual: str = ""
    clients: dict[str, str] = field(default_factory=dict)
    """Namespaces of the clients' tasks by node id."""


def site(engine: Engine) -> Site:
    made = five(engine)
    try:
        first = made.cluster[0]
        found = Site(made.cluster, made.undo)
        found.network = first.network("net", Attachable=True)
        home = made.cluster.nodes[-1]
        web(
            first, "web", "net",
            template={"Placement": {"Constraints": [f"node.id=={home.node_id}"]}},
            EndpointSpec=published((PORT, 80), (8082, 82)),
        )  # fmt: skip
        (found.task,) = first.until_running("web", 1)
        first.service("clients", replicas=None, template=overlay("net"))
        for task in first.until_running("clients", len(made.cluster.nodes)):
            found.clients[task["NodeID"]] = made.cluster.node_of(task).place_of(task)
        found.virtual = first.virtual_address("web", found.network)
        for place in found.clients.values():
            answered_by(place, found.virtual, host_names(made.cluster, [found.task]))
        for node in made.cluster.nodes:
            answered_by(made.cluster.outside().place, node.address, host_names(made.cluster, [found.task]), PORT)
        return found
    except BaseException:
        made.undo.close()
        raise


def ways(made: Site) -> dict[str, Callable[[int], tuple[str, str]]]:
    """Where each way begins, and its address, for a port of the server."""
    entry = made.cluster[1]
    client = made.clients[entry.node_id]
    direct = address_of(made.task, made.network)
    ports = {80: PORT, 82: 8082}
    return {
        "direct": lambda port: (client, f"{direct}:{port}"),
        "address": lambda port: (client, f"{made.virtual}:{port}"),
        "ingress": lambda port: (entry.place, f"{entry.address}:{ports[port]}"),
    }


def compared(made: Site, kind: str, port: int) -> tuple[float, float, float]:
    """The rate of the direct way, and how many times faster it is than the two others. Medians of
    `ROUNDS` in turns.
    """
    rates: dict[str, list[float]] = {}
    for turn in range(ROUNDS):
        order = list(ways(made).items())
        for name, way in order[turn % 3 :] + order[: turn % 3]:
            place, target = way(port)
            with Load(place, kind, target, seconds=SECONDS) as load:
                pass
            rates.setdefault(name, []).append(float(load.result["rate"]))
    direct = statistics.median(rates["direct"])
    return direct, direct / statistics.median(rates["address"]), direct / statistics.median(rates["ingress"])


def throughput(_: Engine, made: Site) -> tuple[float, float, float]:
    """Gbit/s directly, and the ratios."""
    rate, address, ingress = compared(made, "stream", 82)
    return rate * 8 / 1e9, address, ingress


def connections(_: Engine, made: Site) -> tuple[float, float, float]:
    return compared(made, "serial", 80)


def propagation(_: Engine, made: Site) -> tuple[float, float, float, float]:
    """Milliseconds from the start of a task's process, or its kill, until the rules of every node
    have its address, or have it no more: median and 99th percentile of nodes and changes.
    """
    first = made.cluster[0]
    vni = vni_of(first, made.network)
    first.service("changes", replicas=1, template=overlay("net"))
    (task,) = first.until_running("changes", 1)
    starts: list[float] = []
    ends: list[float] = []
    with contextlib.ExitStack() as opened:
        rules = [opened.enter_context(packets.Rules(node.overlays()[vni])) for node in made.cluster.nodes]
        for _number in range(CHANGES):
            node, address = made.cluster.node_of(task), address_of(task, made.network)
            settled(rules, address)
            container = node.task_containers()[task["ID"]]["Id"]
            killed = time.time()
            node.ask("POST", f"/containers/{container}/kill")
            ends += watched(rules, address, killed, present=False)
            task = until("its successor is there", lambda old=task: successor(first, old))
            home, address = made.cluster.node_of(task), address_of(task, made.network)
            seen = watched(rules, address, 0, present=True)
            started = began(home, task)
            starts += [each - started * 1000 for each in seen]
    first.ask("DELETE", "/services/changes")
    return (*spread(starts), *spread(ends))


def settled(rules: list[packets.Rules], address: str) -> None:
    until("all nodes lead to it", lambda: all(has(each, address) for each in rules))


def has(rules: packets.Rules, address: str) -> bool:
    """A slot of a virtual address leads to it: `10.0.0.2 . 0 : 10.0.0.9`."""
    return re.search(rf": {re.escape(address)}[ ,\n]", rules.text()) is not None


def watched(rules: list[packets.Rules], address: str, since: float, *, present: bool) -> list[float]:
    """Milliseconds since `since` at which each node's rules came to have the address, or lost
    it.
    """
    left, found = list(rules), []
    deadline = time.time() + 30
    while left:
        for each in list(left):
            if has(each, address) == present:
                found.append((time.time() - since) * 1000)
                left.remove(each)
        assert time.time() < deadline, f"{len(left)} nodes still: {address} {present}"
    return found


def successor(first: Node, old: Any) -> Any:
    """The task that follows, as soon as it has an address."""
    for task in first.tasks("changes"):
        if task["ID"] != old["ID"] and task.get("NodeID") and task.get("NetworksAttachments"):
            return task
    return None


def began(node: Node, task: Any) -> float:
    """When the container of a task was started, in seconds since the epoch."""
    container = node.task_containers()[task["ID"]]["Id"]
    text = str(node.inspect(container)["State"]["StartedAt"])
    whole, _, part = text.rstrip("Z").partition(".")
    return calendar.timegm(time.strptime(whole, "%Y-%m-%dT%H:%M:%S")) + float(f"0.{part or 0}")


def spread(times: list[float]) -> tuple[float, float]:
    ordered = sorted(times)
    return ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]


def start(_: Engine, made: Site) -> tuple[float, float, float]:
    """Median milliseconds of restarting a container on a bridge network, how much longer it takes
    on an attachable overlay, and how much longer its first start takes, for which the managers give
    an address.

    A task's address comes with its assignment, so its start is as that of a restart.
    """
    node = made.cluster[1]
    if "lan" not in {each["Name"] for each in node.ask("GET", "/networks")}:
        node.ask("POST", "/networks/create", {"Name": "lan"}, status=201)
    firsts: dict[str, list[float]] = {"lan": [], "net": []}
    restarts: dict[str, list[float]] = {"lan": [], "net": []}
    for _number in range(30):
        for network in firsts:
            container = node.create("sleep", "1000", network=network)
            for path, taken in (("start", firsts), ("restart?t=0", restarts)):
                started = time.perf_counter()
                node.post(f"/containers/{container}/{path}")
                taken[network].append((time.perf_counter() - started) * 1000)
            node.ask("DELETE", f"/containers/{container}?force=1")
    bridge, over = (statistics.median(restarts[network]) for network in ("lan", "net"))
    return bridge, over - bridge, statistics.median(firsts["net"]) - statistics.median(firsts["lan"])


def jobs(size: Size) -> list[Job]:
    ratio = Target(at_most=1 / 0.9)
    common: dict[str, Any] = {
        "prepare": site, "finish": close, "warm": False, "ours": True, "default": False, "rounds": size.rounds(1),
    }  # fmt: skip
    return [
        Job(
            "swarm-network-throughput",
            [
                Figure("swarm-network-throughput", "one stream between nodes over VXLAN", "Gbit/s", False),
                Figure("swarm-network-throughput-address", "times faster than by a virtual address", "x", target=ratio),
                Figure("swarm-network-throughput-ingress", "times faster than through ingress", "x", target=ratio),
            ],
            throughput,
            **common,
        ),
        Job(
            "swarm-network-connections",
            [
                Figure("swarm-network-connections", "requests in turn, a connection each, over VXLAN", "/s", False),
                Figure("swarm-network-connections-address", "times more than by a virtual address", "x", target=ratio),
                Figure("swarm-network-connections-ingress", "times more than through ingress", "x", target=ratio),
            ],
            connections,
            **common,
        ),
        Job(
            "swarm-network-propagation",
            [
                Figure(
                    "swarm-network-start-p50", "start of a task until a node leads to it, median", "ms",
                    target=Target(at_most=100),
                ),
                Figure("swarm-network-start-p99", "the same, 99th percentile", "ms", target=Target(at_most=400)),
                Figure(
                    "swarm-network-end-p50", "end of a task until no rule leads to it, median", "ms",
                    target=Target(at_most=100),
                ),
                Figure("swarm-network-end-p99", "the same, 99th percentile", "ms", target=Target(at_most=400)),
            ],
            propagation,
            **common,
        ),
        Job(
            "swarm-network-start",
            [
                Figure("swarm-network-start", "restart of a container on a bridge network", "ms"),
                Figure("swarm-network-start-more", "how much longer on an overlay", "ms", target=Target(at_most=5)),
                Figure("swarm-network-start-first", "how much longer the first start, with an address", "ms"),
            ],
            start,
            **common,
        ),
    ]  # fmt: skip
