"""Most or all managers are lost for ever. The operator makes a new swarm by force, or restores a
backup.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.engine.harness import until
from tests.support.swarm.clusters import VERSION, Cluster, Node


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster(3) as made:
        yield made


def engined(node: Node, *arguments: str, status: int = 0) -> str:
    """`engined swarm …` on this host."""
    command = ["nsenter", f"--net={node.place}", sys.executable, "-m", "engine", "swarm", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_new_swarm_by_force(cluster: Cluster) -> None:
    """Two of three managers are lost. The last one goes on alone with services and tokens. The
    others come back, leave and join again.
    """
    cluster.form(3)
    last = cluster[2]
    last.service("steady", replicas=3)
    last.until_running("steady", 3)
    tokens, own = last.tokens(), set(last.task_containers())
    version = last.ask("GET", "/services/steady")["Version"]["Index"]
    for node in cluster.nodes[:2]:
        node.unplug()
    body = {"ListenAddr": "0.0.0.0:2377", "AdvertiseAddr": last.address, "ForceNewCluster": True}
    assert last.ask("POST", "/swarm/init", body, timeout=60) == last.node_id
    assert last.tokens() == tokens
    assert set(last.task_containers()) >= own
    nodes = last.nodes()
    assert len(nodes) == 3
    assert [node["ID"] for node in nodes.values() if "ManagerStatus" in node] == [last.node_id]
    for node in cluster.nodes[:2]:
        assert nodes[node.node_id]["Spec"]["Role"] == "worker"
        assert nodes[node.node_id]["Status"]["State"] == "down"
    until("the tasks are here", lambda: len(last.until_running("steady", 3)) == 3, 40)
    assert last.ask("GET", "/services/steady")["Version"]["Index"] >= version
    for node in cluster.nodes[:2]:
        node.plug()
        node.leave(force=True)
    cluster[0].join(last, manager=True)
    cluster[1].join(last)
    managers = [node for node in last.nodes().values() if "ManagerStatus" in node]
    assert len(managers) == 2
    last.until_running("steady", 3)


def test_a_backup_is_restored(cluster: Cluster, tmp_path: Path) -> None:
    """On its own host, after the swarm's state is lost; and on another host."""
    first, worker, other = cluster.nodes
    first.init()
    worker.join(first)
    first.service("steady", replicas=4)
    first.until_running("steady", 4)
    first.ask("POST", "/secrets/create", {"Name": "word", "Data": "c2VjcmV0"})
    tokens = first.tokens()
    service = first.ask("GET", "/services/steady")
    file = tmp_path / "file"
    said = engined(first, "backup", str(file), "--run", str(first.run))
    assert first.ask("GET", "/swarm")["ID"] in said
    assert file.stat().st_mode & 0o777 == 0o600
    assert "is running" in engined(
        first, "restore", str(file), "--root", str(first.root), "--run", str(first.run), status=1
    )
    first.service("lost", replicas=1)
    first.stop()
    shutil.rmtree(first.root / "swarm" / "etcd")
    said = engined(first, "restore", str(file), "--root", str(first.root), "--run", str(first.run))
    assert first.node_id in said
    first.start()
    until("it manages", lambda: first.swarm_info()["ControlAvailable"], 30)
    first.until_running("steady", 4)
    assert first.tokens() == tokens
    again = first.ask("GET", "/services/steady")
    assert again["ID"] == service["ID"] and again["Spec"] == service["Spec"]
    assert again["Version"]["Index"] > service["Version"]["Index"]
    assert [each["Spec"]["Name"] for each in first.ask("GET", "/secrets")] == ["word"]
    assert [each["Spec"]["Name"] for each in first.ask("GET", "/services")] == ["steady"]
    answer = first.request(
        "POST", f"/v{VERSION}/services/steady/update?version={service['Version']['Index']}", service["Spec"]
    )
    assert answer.status >= 400 and b"out of sequence" in answer.body
    first.update_service("steady", lambda spec: spec["Mode"]["Replicated"].update(Replicas=2))
    until("the worker is back", lambda: first.nodes()[worker.node_id]["Status"]["State"] == "ready", 40)
    first.until_running("steady", 2)
    # on a host that was never part of it
    other.stop()
    wrong = engined(other, "restore", str(file), "--root", str(other.root), "--run", str(other.run), status=1)
    assert "--advertise-addr" in wrong
    where = ("--root", str(other.root), "--run", str(other.run), "--advertise-addr", other.address)
    engined(other, "restore", str(file), *where)
    first.unplug()
    other.start()
    until("it manages", lambda: other.swarm_info()["ControlAvailable"], 30)
    assert other.tokens() == tokens
    other.until_running("steady", 4)


def test_a_backup_that_is_none(cluster: Cluster, tmp_path: Path) -> None:
    node = cluster[0]
    assert "no manager of a swarm runs" in engined(
        node, "backup", str(tmp_path / "file"), "--run", str(node.run), status=1
    )
    (tmp_path / "file").write_bytes(b"not a backup")
    assert "no whole backup" in engined(
        node, "restore", str(tmp_path / "file"), "--root", str(node.root), "--run", str(node.run), status=1
    )
    assert not (node.root / "swarm").exists()
