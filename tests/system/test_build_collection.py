"""Garbage collection of the build cache on a real engine: it removes what is too much after builds,
and never what a running build needs. Also the entitlements of builds."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from tests.support.builds.sessions import Caller, Failure, every, fields
from tests.support.builds.sessions import field as part
from tests.support.builds.table import TAR
from tests.support.engine.harness import TempEngine, until
from tests.support.images.archives import Node, tar

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

CONTROL = "/moby.buildkit.v1.Control/"
MEGABYTE = 1 << 20
LAYER = "RUN head -c 1048576 /dev/urandom >"
FEW = 4
"""Layers that may stay."""


def engine_of(builder: dict[str, Any], directory: Path) -> TempEngine:
    file = directory / "daemon.json"
    file.write_text(json.dumps({"builder": builder}))
    return TempEngine("--config", str(file))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TempEngine]:
    """An engine whose cache keeps `FEW` layers."""
    policy = {"maxUsedSpace": f"{FEW * MEGABYTE + MEGABYTE // 2}", "all": False}
    settings = {"gc": {"policy": [policy]}, "entitlements": {"network-host": False}}
    with engine_of(settings, tmp_path_factory.mktemp("small")) as engine:
        engine.load_busybox()
        yield engine


def build(engine: TempEngine, text: str, **query: str) -> str:
    """The build's output."""
    body = tar([Node("Dockerfile", text.encode())])
    answer = engine.request("POST", f"/v1.44/build?{urlencode(query)}", body, TAR, timeout=120)
    assert answer.status == 200, answer
    return "".join(json.loads(line).get("stream", "") or line.decode() for line in answer.body.splitlines())


def records(engine: TempEngine) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = engine.request("GET", "/v1.44/system/df?type=build-cache").json()["BuildCache"]
    return found or []


def size(engine: TempEngine) -> int:
    return sum(record["Size"] for record in records(engine) if not record["Shared"])


def test_what_is_too_much_goes_after_builds(small: TempEngine) -> None:
    for number in range(FEW + 3):
        said = build(small, f"FROM busybox\n{LAYER} /one-{number}\n")
        assert "Successfully built" in said, said
    until("a small cache", lambda: size(small) <= FEW * MEGABYTE + MEGABYTE // 2)
    assert size(small) >= (FEW - 1) * MEGABYTE
    last = build(small, f"FROM busybox\n{LAYER} /one-{FEW + 2}\n")
    assert "Using cache" in last, last


def test_what_an_image_with_a_name_needs_stays(small: TempEngine) -> None:
    text = "FROM busybox\n" + "".join(f"{LAYER} /named-{number}\n" for number in range(FEW + 2))
    build(small, text, t="named:1")
    build(small, f"FROM busybox\n{LAYER} /other\n")
    until("a small cache", lambda: size(small) <= FEW * MEGABYTE + MEGABYTE // 2)
    assert small.docker("run", "--rm", "--network", "none", "named:1", "ls", "/named-0").line == "/named-0"
    assert build(small, text).count("Using cache") == FEW + 2


def test_a_running_build_keeps_its_steps(small: TempEngine) -> None:
    """It has more layers than may stay, and collections run while it does."""
    text = "FROM busybox\n" + "".join(f"{LAYER} /long-{number}\n" for number in range(FEW + 2))
    text += "RUN sleep 3\nRUN ls /long-0 && sync\n"
    said: list[str] = []
    thread = threading.Thread(target=lambda: said.append(build(small, text)))
    thread.start()
    step = f"long-{FEW + 1}"
    until("the last layer", lambda: any(step in record["Description"] for record in records(small)))
    for number in range(3):
        build(small, f"FROM busybox\n{LAYER} /beside-{number}\n")
    thread.join()
    assert "Successfully built" in said[0] and "/long-0" in said[0], said[0]
    until("a small cache", lambda: size(small) <= FEW * MEGABYTE + MEGABYTE // 2)


def test_clients_see_the_policies(small: TempEngine) -> None:
    """`docker buildx inspect` shows them."""
    with Caller(small.socket) as caller:
        record = fields(caller.ask(f"{CONTROL}ListWorkers", b""))[1]
        policies = [fields(data) for kind, data in every(record) if kind == 4]
        assert policies == [{5: FEW * MEGABYTE + MEGABYTE // 2}]
        assert caller.ask(f"{CONTROL}DiskUsage", b"")


def test_the_network_of_the_host_may_be_forbidden(small: TempEngine) -> None:
    words = "granting entitlement network.host is not allowed by build daemon configuration"
    solve = part(1, "ref") + part(6, "dockerfile.v0")
    with Caller(small.socket) as caller:
        with pytest.raises(Failure, match=words):
            caller.ask(f"{CONTROL}Solve", solve + part(9, "network.host"))
        with pytest.raises(Failure, match=words):
            asked = part(7, part(1, "force-network-mode") + part(2, "host"))
            caller.ask(f"{CONTROL}Solve", solve + asked)


def test_without_collection_everything_stays(tmp_path: Path) -> None:
    with engine_of({"gc": {"enabled": False, "defaultMaxUsedSpace": "1MB"}}, tmp_path) as engine:
        engine.load_busybox()
        for number in range(3):
            build(engine, f"FROM busybox\n{LAYER} /kept-{number}\n")
        assert size(engine) >= 3 * MEGABYTE
        with Caller(engine.socket) as caller:
            record = fields(caller.ask(f"{CONTROL}ListWorkers", b""))[1]
            assert not [data for kind, data in every(record) if kind == 4]


def test_a_policy_without_limits_removes_what_it_chooses(tmp_path: Path) -> None:
    """Files of cache mounts alone."""
    with engine_of({"gc": {"policy": [{"filter": ["type=exec.cachemount"]}]}}, tmp_path) as engine:
        engine.load_busybox()
        build(engine, "FROM busybox\nRUN --mount=type=cache,target=/c head -c 1000000 /dev/urandom >/c/f; echo 1 >/x\n")
        until("no cache mount", lambda: {record["Type"] for record in records(engine)} == {"regular"})
