"""What the tests of a swarm's networks share: hosts, and services with names and addresses."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from tests.support.engine import packets
from tests.support.engine.harness import until
from tests.support.swarm.clusters import LISTENS, SECOND, SERVER, VERSION, Cluster, Node, address_of

INGRESS_VNI = 4096


def overlay(*networks: str, **fields: Any) -> dict[str, Any]:
    """TaskTemplate of a service on these networks, whose tasks are replaced at once."""
    return {
        "Networks": [{"Target": name, **fields} for name in networks],
        "RestartPolicy": {"Delay": 0},
    }


def published(*ports: tuple[int, int] | tuple[int, int, str], mode: str = "ingress") -> dict[str, Any]:
    """EndpointSpec with (published, target) or (published, target, protocol)."""
    return {
        "Ports": [
            {"Protocol": (*port, "tcp")[2], "PublishedPort": port[0], "TargetPort": port[1], "PublishMode": mode}
            for port in ports
        ]
    }


def web(first: Node, name: str, *networks: str, replicas: int | None = 1, **fields: Any) -> str:
    """Create a service of web servers that are running when they listen; returns its id."""
    container = {"Healthcheck": LISTENS} | fields.pop("container", {})
    command = fields.pop("command", SERVER)
    template = overlay(*networks) | fields.pop("template", {})
    return first.service(name, *command, replicas=replicas, container=container, template=template, **fields)


def host_names(cluster: Cluster, tasks: list[Any]) -> set[str]:
    """The host names of tasks: what their web servers answer with."""
    return {str(task["Status"]["ContainerStatus"]["ContainerID"])[:12] for task in tasks}


def answered_by(place: str, address: str, expected: set[str], port: int = 80, seconds: float = 10.0) -> None:
    """Wait until requests are answered by each of these hosts, and by no other one."""

    def same() -> bool:
        with contextlib.suppress(OSError):
            return packets.sweep(place, address, port, 8 * len(expected)) == expected
        return False

    try:
        until(f"{address}:{port} is answered by {expected}", same, seconds)
    except AssertionError as error:
        seen = [packets.got(place, address, port, seconds=1) for _ in range(4)]
        raise AssertionError(f"{error}; answers: {seen}") from None


def tidy(cluster: Cluster) -> None:
    """Remove all services, containers and networks; nothing of them must be left on any node."""
    first = cluster[0]
    for service in first.ask("GET", "/services"):
        first.ask("DELETE", f"/services/{service['ID']}", timeout=60)
    for node in cluster.nodes:
        for container in node.ask("GET", "/containers/json?all=1"):
            if "com.docker.swarm.task.id" not in container["Labels"]:
                node.ask("DELETE", f"/containers/{container['Id']}?force=1")
    until("no task is left", lambda: not any(node.task_containers() for node in cluster.nodes), 60)
    until("no record of a task is left", lambda: not first.tasks(desired=""), 60)
    for network in first.ask("GET", "/networks"):
        if network["Scope"] == "swarm" and not network.get("Ingress"):
            # an address is kept for a container that may only be restarted
            until(f"{network['Name']} is removed", lambda id=network["Id"]: removed(first, id), 20)
    for node in cluster.nodes:
        until_overlays(node, set())


def removed(first: Node, network: str) -> bool:
    answer = first.request("DELETE", f"/v{VERSION}/networks/{network}")
    assert answer.status in (204, 404) or b"in use" in answer.body, answer
    return answer.status in (204, 404)


def until_overlays(node: Node, vnis: set[int], seconds: float = 20.0) -> None:
    """Wait until a node has namespaces of these networks, and perhaps of the ingress network."""
    try:
        until(f"networks {vnis} are on the node", lambda: set(node.overlays()) - {INGRESS_VNI} == vnis, seconds)
    except AssertionError as error:
        raise AssertionError(f"{error}: {node.overlays()} at {node.address}\n{node.log()[-4000:]}") from None


def vni_of(node: Node, network: str) -> int:
    """The VNI of a network, as its inspection at a manager shows it."""
    options = node.ask("GET", f"/networks/{network}")["Options"]
    return int(options["com.docker.network.driver.overlay.vxlanid_list"].partition(",")[0])


def expected_routes(cluster: Cluster, node: Node, network: str, tasks: list[Any]) -> dict[str, str]:
    """Address of each task on a network → its node's address; "" for a task of this node."""
    return {
        address_of(task, network): "" if task["NodeID"] == node.node_id else cluster.node_of(task).address
        for task in tasks
    }


def kernel_routes(node: Node, vni: int) -> dict[str, str]:
    """The same, as the kernel has it: /32 routes of a network's namespace."""
    found = {}
    overlays = node.overlays()
    if vni not in overlays:
        return {}
    for destination, route in packets.routes(overlays[vni]).items():
        if (
            destination != "default"
            and "/" not in destination
            and not destination.startswith("169.254.")
            and "local" not in route.get("type", "")
        ):
            found[destination] = str(route.get("gateway", ""))
    return found


def until_routed(cluster: Cluster, network: str, tasks: Callable[[], list[Any]], seconds: float = 20.0) -> None:
    """Wait until each node with tasks on the network has exactly their routes."""
    vni = vni_of(cluster[0], network)
    wrong: dict[str, Any] = {}

    def right() -> bool:
        wrong.clear()
        now = tasks()
        for node in cluster.nodes:
            expected = expected_routes(cluster, node, network, now)
            if node.process is not None and "" in expected.values():
                kernel = kernel_routes(node, vni)
                if {address: gateway for address, gateway in kernel.items() if address in expected} != expected:
                    wrong[node.address] = {"kernel": kernel, "expected": expected}
                elif surplus := {each for each in kernel if each not in expected}:
                    wrong[node.address] = {"surplus": surplus}
        return not wrong

    try:
        until("the kernel has the routes", right, seconds)
    except AssertionError as error:
        raise AssertionError(f"{error}: {wrong}") from None


__all__ = [
    "INGRESS_VNI",
    "SECOND",
    "answered_by",
    "expected_routes",
    "host_names",
    "kernel_routes",
    "overlay",
    "published",
    "tidy",
    "until_overlays",
    "until_routed",
    "vni_of",
    "web",
]
