"""docker-py's swarm mode on a swarm of one, in versions from the oldest to the newest."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import docker
import docker.errors
import pytest
from docker.types import (
    ConfigReference,
    EndpointSpec,
    Resources,
    RestartPolicy,
    SecretReference,
    ServiceMode,
    UpdateConfig,
)

from tests.support import PATIENCE
from tests.support.engine.harness import until
from tests.support.nightly import nightly
from tests.support.swarm.clusters import NET, Cluster, Node

MINORS = (24, 25, 26, 28, 29, 30, 32, 37, 40, 41, 44, 52, 55)


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with Cluster(1) as cluster:
        yield cluster[0]


@contextlib.contextmanager
def connected(node: Node, minor: int) -> Iterator[docker.DockerClient]:
    client = docker.DockerClient(base_url=f"unix://{node.socket}", version=f"1.{minor}", timeout=int(60 * PATIENCE))
    try:
        yield client
    finally:
        client.close()


def running(service: Any, count: int) -> list[Any]:
    def found() -> list[Any]:
        tasks = service.tasks(filters={"desired-state": "running"})
        runs = [task for task in tasks if task["Status"]["State"] == "running"]
        return runs if len(runs) == len(tasks) == count else []

    return until(f"{count} tasks run", found, 60)  # type: ignore[no-any-return]


@pytest.mark.parametrize("minor", [MINORS[0], *nightly(*MINORS[1:-1]), MINORS[-1]])
def test_each_version(node: Node, minor: int) -> None:
    with connected(node, minor) as client:
        with pytest.raises(docker.errors.APIError, match="not a swarm manager") as outside:
            client.services.list()
        assert outside.value.status_code == (406 if minor == 24 else 503)
        options = {"default_addr_pool": ["10.55.0.0/16"], "subnet_size": 24} if minor >= 39 else {}
        made = client.swarm.init(advertise_addr="eth0", task_history_retention_limit=2, **options)
        try:
            _objects(client, node, minor, made)
        finally:
            assert client.swarm.leave(force=True)
        until("no task is left", lambda: not node.task_containers())


def _objects(client: docker.DockerClient, node: Node, minor: int, made: str) -> None:
    client.swarm.reload()
    assert client.swarm.attrs["Spec"]["Orchestration"]["TaskHistoryRetentionLimit"] == 2
    before = client.swarm.attrs["JoinTokens"]
    client.swarm.update(rotate_worker_token=True, name="default")
    client.swarm.reload()
    after = client.swarm.attrs["JoinTokens"]
    assert before["Worker"] != after["Worker"] and before["Manager"] == after["Manager"]

    [found] = client.nodes.list(filters={"role": "manager"})
    assert found.id == made and found.attrs["Status"]["State"] == "ready"
    found.update(found.attrs["Spec"] | {"Labels": {"zone": "a"}})
    assert client.nodes.get(made).attrs["Spec"]["Labels"] == {"zone": "a"}

    references: dict[str, Any] = {}
    # an update is complete after it; 5 s without
    soon = {"monitor": 5 * 10**8} if minor >= 25 else {}
    if minor >= 25:
        secret = client.secrets.create(name="key", data=b"hidden", labels={"a": "b"})
        assert client.secrets.get(secret.id).name == "key" and len(client.secrets.list()) == 1
        references["secrets"] = [SecretReference(secret.id, "key", uid="7", mode=0o400)]
    if minor >= 30:
        config = client.configs.create(name="settings", data=b"shown")
        references["configs"] = [ConfigReference(config.id, "settings", filename="/etc/settings")]
    service = client.services.create(
        "busybox:latest",
        ["sh", "-c", "echo said; exec sleep 99999"],
        name="web",
        env=["A=b"],
        labels={"tier": "front"},
        container_labels={"c": "d"},
        constraints=["node.labels.zone==a"],
        mode=ServiceMode("replicated", 2),
        resources=Resources(mem_limit=32 << 20, cpu_limit=500_000_000),
        restart_policy=RestartPolicy(condition="any", delay=10**9),
        update_config=UpdateConfig(parallelism=2, delay=0, failure_action="pause", **soon),
        endpoint_spec=EndpointSpec(mode="dnsrr"),
        stop_grace_period=0,
        **references,
    )
    tasks = running(service, 2)
    assert {task["Slot"] for task in tasks} == {1, 2} and all(task["NodeID"] == made for task in tasks)
    container = client.containers.get(tasks[0]["Status"]["ContainerStatus"]["ContainerID"])
    assert container.labels["c"] == "d" and container.attrs["HostConfig"]["Memory"] == 32 << 20
    for path, content in {"secrets": ("/run/secrets/key", b"hidden"), "configs": ("/etc/settings", b"shown")}.items():
        if path in references:
            assert container.exec_run(["cat", content[0]]).output == content[1]
    assert [each.name for each in client.services.list(filters={"label": "tier=front"})] == ["web"]
    if minor >= 29:
        until("both said it", lambda: b"".join(service.logs(stdout=True)) == b"said\nsaid\n")
    with pytest.raises(docker.errors.APIError, match="name conflicts with an existing object"):
        client.services.create("busybox", name="web")

    service.reload()
    service.update(env=["A=c"], fetch_current_spec=True)
    until(
        "it is updated",
        lambda: service.reload() or service.attrs.get("UpdateStatus", {}).get("State") == "completed",
        60,
    )
    service.reload()
    assert service.attrs["Spec"]["TaskTemplate"]["ContainerSpec"]["Env"] == ["A=c"]
    service.scale(1)
    running(service, 1)
    with pytest.raises(docker.errors.APIError, match="out of sequence"):
        client.api.update_service(service.id, 1, name="web", task_template=service.attrs["Spec"]["TaskTemplate"])
    assert service.remove()
    with pytest.raises(docker.errors.NotFound, match="not found"):
        client.services.get(service.id)
    until("the tasks have gone", lambda: not node.task_containers())
    for each in [*(client.secrets.list() if minor >= 25 else ()), *(client.configs.list() if minor >= 30 else ())]:
        assert each.remove()


def test_join_token_of_another(node: Node) -> None:
    with connected(node, 55) as client:
        with pytest.raises(docker.errors.APIError, match="token"):
            client.swarm.join(remote_addrs=[f"{NET}.7:2377"], join_token="SWMTKN-1-bad")
        begun = time.monotonic()
        token = f"SWMTKN-1-{'0' * 50}-{'0' * 25}"
        with pytest.raises(docker.errors.APIError):
            client.swarm.join(remote_addrs=[f"{NET}.1:1"], join_token=token)
        assert time.monotonic() - begun < 25 * PATIENCE
        client.swarm.leave(force=True)
