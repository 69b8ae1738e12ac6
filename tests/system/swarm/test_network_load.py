"""500 requests in a second through a virtual address and through published ports. None fails while
the service is scaled and updated, with servers that drain on SIGTERM.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine.harness import until
from tests.support.swarm.clusters import SECOND, Cluster, Node
from tests.support.swarm.load import Load
from tests.support.swarm.networks import answered_by, host_names, overlay, published, tidy, web

pytestmark = pytest.mark.nightly

NODES, MANAGERS = 5, 3
PORT = 8080


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(NODES) as made:
        made.form(MANAGERS)
        yield made


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program, which all containers can be given: their hosts have one file system."""
    made = tmp_path_factory.mktemp("server") / "server"
    source = Path(__file__).parent.parent.parent / "data" / "server.c"
    subprocess.run(["gcc", "-O2", "-static", "-Wall", "-Werror", "-o", made, source], check=True)
    return made


@pytest.fixture
def first(cluster: Cluster) -> Iterator[Node]:
    yield cluster[0]
    tidy(cluster)


def until_updated(first: Node, service: str) -> None:
    def ended() -> bool:
        state = (first.ask("GET", f"/services/{service}").get("UpdateStatus") or {}).get("State", "")
        assert state in ("", "updating", "completed"), state
        return bool(state == "completed")

    until(f"{service} is updated", ended, 120)


@pytest.mark.parametrize("order", ["stop-first", "start-first"])
def test_no_request_fails(cluster: Cluster, first: Node, server: Path, order: str) -> None:
    """Scaled from 5 to 20 and back, then updated."""
    network = first.network("net")
    container = {
        "StopGracePeriod": 20 * SECOND,
        "Mounts": [{"Type": "bind", "Source": str(server), "Target": "/server", "ReadOnly": True}],
    }
    web(
        first, "web", "net", replicas=5, command=("/server", "80", "1000"), container=container,
        EndpointSpec=published((PORT, 80)),
        UpdateConfig={"Parallelism": 2, "Order": order, "Monitor": SECOND // 2},
    )  # fmt: skip
    first.service("client", replicas=1, template=overlay("net"))
    (client,) = first.until_running("client", 1)
    tasks = first.until_running("web", 5)
    virtual = first.virtual_address("web", network)
    inside, outside = cluster.node_of(client).place_of(client), cluster.outside().place
    answered_by(inside, virtual, host_names(cluster, tasks))
    for node in cluster.nodes:
        answered_by(outside, node.address, host_names(cluster, tasks), PORT)
    everywhere = [f"{node.address}:{PORT}" for node in cluster.nodes]
    with (
        Load(inside, "get", f"{virtual}:80", rate=250) as through_address,
        Load(outside, "get", *everywhere, rate=250) as through_ports,
    ):
        began, phases = time.monotonic(), {}

        def begins(phase: str) -> None:
            phases[phase] = round(time.monotonic() - began, 3)

        time.sleep(1)  # a quiet second to compare with
        begins("20")
        scale(first, "web", 20)
        answered_by(inside, virtual, host_names(cluster, first.until_running("web", 20)), seconds=20)
        time.sleep(1)  # each serves some
        begins("5")
        scale(first, "web", 5)
        until("the others have ended", lambda: sum(len(node.task_containers()) for node in cluster.nodes) == 6)
        begins("update")

        def change(spec: Any) -> None:
            spec["TaskTemplate"]["ContainerSpec"]["Env"] = ["A=1"]

        first.update_service("web", change)
        until_updated(first, "web")
        begins("end")
        time.sleep(2)  # the last draining servers end
    print(order, phases, through_address.result, through_ports.result)
    through_address.assert_none_failed()
    through_ports.assert_none_failed()
    for load in (through_address, through_ports):
        assert load.result["rate"] > 225, load.result
        assert len(load.result["answers"]) >= 25, "each task served"


def scale(first: Node, service: str, replicas: int) -> None:
    first.update_service(service, lambda spec: spec["Mode"]["Replicated"].update(Replicas=replicas))
