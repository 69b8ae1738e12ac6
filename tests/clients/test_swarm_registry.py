"""Images of services in a registry with passwords: `--with-registry-auth`, and the digests that
docker CLIs, and the engine for older ones, record.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.clients import programs
from tests.support.engine.harness import until
from tests.support.images.archives import Image, busybox_layer
from tests.support.images.registry import PASSWORD, USER, Registry
from tests.support.swarm.clusters import NET, Cluster, Node, run

HOST = f"{NET}.254"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(2, "--insecure-registry", f"{NET}.0/24") as cluster:
        run("ip", "address", "add", f"{HOST}/24", "dev", cluster.bridge)
        cluster.form(1)
        cluster[0].update_node(cluster[0].node_id, Availability="drain")
        yield cluster


@pytest.fixture(scope="module")
def registry(cluster: Cluster) -> Iterator[Registry]:
    made = Registry(password=True)
    made.host = f"{HOST}:{made.port}"
    with made as registry:
        yield registry


def auth(registry: Registry, password: str) -> dict[str, str]:
    text = json.dumps({"username": USER, "password": password, "serveraddress": registry.host})
    return {"X-Registry-Auth": base64.urlsafe_b64encode(text.encode()).decode()}


def create(node: Node, name: str, image: str, headers: dict[str, str], version: str = "1.44") -> Any:
    template = {
        "ContainerSpec": {"Image": image, "Command": ["sleep", "99999"], "StopGracePeriod": 0},
        "RestartPolicy": {"Condition": "none"},
    }
    return node.ask(
        "POST", "/services/create", {"Name": name, "TaskTemplate": template}, headers=headers, version=version
    )


def ended(node: Node, service: str) -> Any:
    """The task of a service that was rejected."""
    [task] = until(
        f"{service} is rejected",
        lambda: [each for each in node.tasks(service, desired="") if each["Status"]["State"] == "rejected"],
    )
    return task


def test_a_cli_gives_its_login_to_the_nodes(cluster: Cluster, registry: Registry) -> None:
    manager, worker = cluster[0], cluster[1]
    put = registry.put("shop/web", "v1", Image([busybox_layer()]))
    image = f"{registry.host}/shop/web:v1"
    docker = programs.FORKY
    docker.run(manager, "login", "-u", USER, "--password-stdin", registry.host, input=PASSWORD)
    common = ("service", "create", "-d", "--stop-grace-period", "0s", "--restart-condition", "none")
    docker.run(manager, *common, "--name", "unknown", image, "sleep", "99999")
    assert "No such image" in ended(manager, "unknown")["Status"]["Err"]
    docker.run(manager, *common, "--with-registry-auth", "--name", "known", image, "sleep", "99999")
    [task] = manager.until_running("known", 1)
    assert task["NodeID"] == worker.node_id
    assert task["Spec"]["ContainerSpec"]["Image"] == f"{image}@{put.digest}", "the CLI found its digest"
    docker.run(manager, "service", "update", "-d", "--force", "known")
    until("another task runs", lambda: [each for each in manager.running("known") if each["ID"] != task["ID"]])
    shown = json.dumps([manager.ask("GET", path) for path in ("/services", "/tasks", "/swarm", "/info")])
    assert PASSWORD not in shown and base64.b64encode(PASSWORD.encode()).decode()[:-2] not in shown


def test_which_credentials_an_update_uses(cluster: Cluster, registry: Registry) -> None:
    manager = cluster[0]
    registry.put("shop/own", "v1", Image([busybox_layer()]))
    registry.put("shop/own", "v2", Image([busybox_layer()], config={"Env": ["TWO=2"]}))
    image = f"{registry.host}/shop/own"
    create(manager, "own", f"{image}:v1", auth(registry, PASSWORD))
    manager.until_running("own", 1)

    def update(tag: str, query: str = "", headers: dict[str, str] | None = None) -> str:
        now = manager.ask("GET", "/services/own")
        now["Spec"]["TaskTemplate"]["ContainerSpec"]["Image"] = f"{image}:{tag}"
        now["Spec"]["TaskTemplate"]["ForceUpdate"] = now["Spec"]["TaskTemplate"].get("ForceUpdate", 0) + 1
        path = f"/services/own/update?version={now['Version']['Index']}{query}"
        manager.ask("POST", path, now["Spec"], headers=headers or {})
        fresh = now["Spec"]["TaskTemplate"]["ForceUpdate"]

        def state() -> str:
            tasks = [each for each in manager.tasks("own", desired="") if each["Spec"]["ForceUpdate"] == fresh]
            states = {each["Status"]["State"] for each in tasks}
            return "running" if "running" in states else "rejected" if "rejected" in states else ""

        return str(until("the new task runs, or is rejected", state))

    assert update("v2") == "running", "with the stored credentials"
    cluster[1].docker("image", "rm", "-f", f"{image}:v1", f"{image}:v2", status=None)
    assert update("v3", headers=auth(registry, "wrong")) == "rejected"
    registry.put("shop/own", "v3", Image([busybox_layer()], config={"Env": ["THREE=3"]}))
    assert update("v3") == "rejected", "the wrong credentials were stored"
    assert update("v3", headers=auth(registry, PASSWORD)) == "running"
    registry.put("shop/own", "v4", Image([busybox_layer()], config={"Env": ["FOUR=4"]}))
    assert update("v4", "&registryAuthFrom=previous-spec") == "rejected", "the previous spec has the wrong ones"


def test_the_engine_records_digests_for_older_clients(cluster: Cluster, registry: Registry) -> None:
    manager = cluster[0]
    put = registry.put("shop/old", "v1", Image([busybox_layer()]))
    image = f"{registry.host}/shop/old:v1"
    for version, digest in (("1.24", ""), ("1.25", f"@{put.digest}"), ("1.29", f"@{put.digest}"), ("1.30", "")):
        name = f"old{version[2:]}"
        made = create(manager, name, image, auth(registry, PASSWORD), version)
        assert not made.get("Warnings")
        found = manager.ask("GET", f"/services/{name}")["Spec"]["TaskTemplate"]["ContainerSpec"]["Image"]
        assert found == image + digest
        manager.until_running(name, 1)
        manager.ask("DELETE", f"/services/{name}")
    made = create(manager, "refused", image, auth(registry, "wrong"), "1.29")
    assert "could not be accessed on a registry" in made["Warnings"][0]
