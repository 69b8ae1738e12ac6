"""POST /images/prune through the API, the docker CLI and docker-py."""

from __future__ import annotations

import contextlib
import json
import subprocess
from typing import Any
from urllib.parse import quote

import docker

from tests.support.engine.harness import TempEngine
from tests.support.images.archives import Image, Node, docker_archive, tar

OLD = Image([tar([Node("old", b"o" * 100)])], ["old:latest"], {"Labels": {"keep": "no"}}, "2020-01-02T03:04:05Z")
NEW = Image([tar([Node("new", b"n" * 50)])], ["new:latest", "new:again"], {}, "2024-01-02T03:04:05Z")


PRUNES = quote(json.dumps({"event": ["prune"]}))


def load(engine: TempEngine, *images: Image) -> None:
    answer = engine.request("POST", "/images/load?quiet=1", docker_archive(*images))
    assert answer.status == 200 and "error" not in answer.body.decode(), answer


def prune(engine: TempEngine, **filters: Any) -> dict[str, Any]:
    answer = engine.request("POST", f"/v1.25/images/prune?filters={quote(json.dumps(filters))}")
    assert answer.status == 200, answer
    found: dict[str, Any] = answer.json()
    return found


def tags(engine: TempEngine) -> set[str]:
    return {tag for image in engine.request("GET", "/images/json").json() for tag in image["RepoTags"]}


def test_prune(own_engine: TempEngine) -> None:
    engine = own_engine
    load(engine, OLD, NEW)
    assert prune(engine) == {"ImagesDeleted": None, "SpaceReclaimed": 0}
    assert prune(engine, dangling=["false"], until=["2019-12-31"])["ImagesDeleted"] is None
    gone = prune(engine, dangling={"false": True}, until=["2021-01-01"], **{"label!": ["keep=yes"]})
    assert gone["SpaceReclaimed"] == 100 and {"Untagged": "old:latest"} in gone["ImagesDeleted"]
    assert {"Deleted": OLD.id} in gone["ImagesDeleted"]
    # an image with a container keeps its names
    container = engine.create("true")
    load(engine, OLD)
    assert prune(engine, dangling=["0"])["SpaceReclaimed"] == 150
    assert tags(engine) == {"busybox:latest"}
    (image,) = engine.request("GET", "/images/json?shared-size=1").json()
    assert (image["Containers"], image["SharedSize"]) == (1, 0)
    (image,) = engine.request("GET", "/v1.50/images/json").json()
    assert (image["Containers"], image["SharedSize"]) == (-1, -1)
    assert engine.request("DELETE", f"/containers/{container}").status == 204
    events = engine.request("GET", f"/v1.51/events?since=0&until=0s&filters={PRUNES}")
    last = json.loads(events.body.splitlines()[-1])
    assert last["Actor"] == {"ID": "", "Attributes": {"reclaimed": "150"}}
    for filters, words in ({"dangling": ["maybe"]}, "dangling=maybe"), ({"reference": ["x"]}, "reference"):
        answer = engine.request("POST", f"/images/prune?filters={quote(json.dumps(filters))}")
        assert answer.status == 400 and words in answer.message
    assert engine.request("POST", "/v1.24/images/prune").status == 404


def test_prune_by_the_cli(own_engine: TempEngine) -> None:
    engine = own_engine
    load(engine, OLD, NEW)
    environment = {name: value for name, value in engine.environment.items() if name != "DOCKER_API_VERSION"}
    command = ["docker", "image", "prune", "-af", "--filter", "until=2022-01-01T00:00:00Z"]
    shown = subprocess.run(command, env=environment, capture_output=True, check=True, timeout=60).stdout.decode()
    assert f"deleted: {OLD.id}" in shown and "Total reclaimed space: 100B" in shown


def test_prune_by_docker_py(own_engine: TempEngine) -> None:
    engine = own_engine
    load(engine, OLD, NEW)
    with contextlib.closing(docker.DockerClient(f"unix://{engine.socket}", version="auto")) as client:
        assert client.images.prune({"dangling": True}) == {"ImagesDeleted": None, "SpaceReclaimed": 0}
        assert client.images.prune({"dangling": False})["SpaceReclaimed"] > 150
        assert client.images.list() == []
