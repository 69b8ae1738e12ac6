"""docker-py at every version from its oldest to the engine's newest.

docker-py takes any version that /version names; its own default is in the middle of the range.
"""

from __future__ import annotations

import contextlib
import io
import tarfile
from collections.abc import Iterator
from typing import Any

import docker
import docker.errors
import pytest
from docker.constants import DEFAULT_DOCKER_API_VERSION, MINIMUM_DOCKER_API_VERSION
from docker.types import Healthcheck, IPAMConfig, IPAMPool, LogConfig, Mount, Ulimit

from tests.support import PATIENCE
from tests.support.engine.harness import TempEngine, until
from tests.support.nightly import nightly

MINORS = range(24, 56)
assert f"1.{MINORS[0]}" == MINIMUM_DOCKER_API_VERSION and int(DEFAULT_DOCKER_API_VERSION.split(".")[1]) in MINORS


@contextlib.contextmanager
def connected(engine: TempEngine, version: str | None) -> Iterator[docker.DockerClient]:
    client = docker.DockerClient(base_url=f"unix://{engine.socket}", version=version, timeout=int(60 * PATIENCE))
    try:
        yield client
    finally:
        client.close()


@pytest.mark.parametrize("version", [None, "auto"])
def test_the_version_it_takes(engine: TempEngine, version: str | None) -> None:
    with connected(engine, version) as client:
        assert client.api.api_version == "1.55"
        assert client.ping() is True and client.info()["ServerVersion"]


@pytest.mark.parametrize("minor", [24, 25, *nightly(*MINORS[2:20]), 44, *nightly(*MINORS[21:-1]), 55])
def test_each_version(bare: TempEngine, minor: int) -> None:
    assert (
        bare.request("POST", "/v1.44/build/prune?all=1").status == 200
    )  # what builds of other tests have left in this engine
    with connected(bare, f"1.{minor}") as client:
        assert client.version()["ApiVersion"] == "1.55"
        network = client.networks.create(
            "lan",
            driver="bridge",
            labels={"a": "b"},
            ipam=IPAMConfig(pool_configs=[IPAMPool(subnet="10.211.10.0/24", gateway="10.211.10.1")]),
        )
        client.volumes.create("data", labels={"a": "b"})
        container = client.containers.run(
            "busybox",
            ["sh", "-c", "echo out; echo err >&2; exec sleep 600"],
            detach=True,
            name="one",
            hostname="host",
            environment={"A": "b"},
            labels={"k": "v"},
            network="lan",
            ports={"80/tcp": ("127.0.0.1", None)},
            mem_limit="64m",
            pids_limit=50,
            ulimits=[Ulimit(name="nofile", soft=100, hard=200)],
            log_config=LogConfig(type="json-file", config={"max-size": "1m"}),
            stop_signal="SIGKILL",
            restart_policy={"Name": "on-failure", "MaximumRetryCount": 1},
            **_newer(minor),
        )
        until("it has printed", lambda: sorted(container.logs().split()) == [b"err", b"out"])
        assert container.logs(stdout=False, stderr=True, tail=2) == b"err\n"
        status, words = container.exec_run(
            ["sh", "-c", "cat /proc/1/comm; hostname; echo $B; pwd; exit 3"],
            environment={"B": "c"} if minor >= 25 else None,
            workdir="/data" if minor >= 35 else None,
        )
        first, *rest = words.decode().splitlines()
        assert status == 3 and rest == ["host", "c" if minor >= 25 else "", "/data" if minor >= 35 else "/"]
        assert (first not in ("sh", "sleep")) == (minor >= 25), "its init"
        if minor >= 29:
            until("it is healthy", lambda: client.containers.get("one").health == "healthy")
            assert client.containers.list(filters={"label": "k=v", "health": "healthy"}) == [container]
        container.reload()
        assert container.ports["80/tcp"][0]["HostIp"] == "127.0.0.1"
        assert container.attrs["NetworkSettings"]["Networks"]["lan"]["IPAddress"].startswith("10.211.10.")
        assert {mount["Destination"] for mount in container.attrs["Mounts"]} >= {"/data"}

        assert container.put_archive("/data", _tar("file", b"text"))
        chunks, stat = container.get_archive("/data/file")
        assert stat["size"] == 4 and b"text" in b"".join(chunks)
        assert {"Path": "/data", "Kind": 1} in container.diff() or container.diff() == []
        assert (
            container.top()["Titles"] and container.stats(stream=False, one_shot=True if minor >= 41 else None)["read"]
        )
        container.update(mem_limit="32m", memswap_limit="32m")
        network.disconnect(container)
        network.connect(container, aliases=["again"])
        container.pause()
        container.unpause()
        container.restart(timeout=0)
        image = container.commit("made", "1")
        assert client.images.get("made:1").id == image.id and image.history()
        assert {tag for each in client.images.list() for tag in each.tags} >= {"made:1", "busybox:latest"}
        saved = b"".join(image.save(named=True))
        container.stop(timeout=0)
        assert container.wait(**({"condition": "not-running"} if minor >= 30 else {}))["StatusCode"] == 137
        container.remove(v=True)
        client.images.remove("made:1")
        assert client.images.load(saved)[0].tags == ["made:1"]
        client.images.remove("made:1")
        with pytest.raises(docker.errors.ContainerError) as raised:
            client.containers.run("busybox", "sh -c 'exit 4'", remove=True, network_mode="none")
        assert raised.value.exit_status == 4
        _prunes(client, minor)
        assert client.containers.list(all=True) == [] and bare.networks() == {}
        assert client.volumes.list() == []


def _newer(minor: int) -> dict[str, Any]:
    """Options of a container that docker-py refuses at older versions."""
    found: dict[str, Any] = {}
    if minor >= 25:
        found |= {"init": True, "nano_cpus": 500_000_000}
    if minor >= 29:
        found["healthcheck"] = Healthcheck(test=["CMD", "true"], interval=10**8)
    if minor >= 30:
        found["mounts"] = [Mount("/data", "data"), Mount("/scratch", None, type="tmpfs", tmpfs_size="1m")]
    else:
        found |= {"volumes": ["data:/data"], "tmpfs": {"/scratch": "size=1m"}}
    if minor >= 41:
        found["cgroupns"] = "private"
    return found


def _tar(name: str, data: bytes) -> bytes:
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w") as archive:
        info = tarfile.TarInfo(name)
        info.size = len(data)
        archive.addfile(info, io.BytesIO(data))
    return held.getvalue()


def _prunes(client: docker.DockerClient, minor: int) -> None:
    """What prunes leave: named volumes from 1.42 on. docker-py has them from 1.25 on."""
    if minor < 25:
        client.networks.get("lan").remove()
        client.volumes.get("data").remove()
        return
    assert client.df()["Volumes"][0]["Name"] == "data"
    client.containers.create("busybox", "true", network_mode="none")
    assert len(client.containers.prune()["ContainersDeleted"]) == 1
    assert client.networks.prune()["NetworksDeleted"] == ["lan"]
    assert client.volumes.prune()["VolumesDeleted"] == (["data"] if minor < 42 else [])
    if minor >= 42:
        assert client.volumes.prune(filters={"all": True})["VolumesDeleted"] == ["data"]
    assert client.images.prune()["SpaceReclaimed"] == 0
    if minor >= 31:
        assert client.api.prune_builds()["SpaceReclaimed"] == 0
    if minor >= 30:
        with pytest.raises(docker.errors.APIError):
            client.images.get_registry_data("127.0.0.1:1/nothing")


def test_events(bare: TempEngine) -> None:
    with connected(bare, "auto") as client:
        events = client.events(decode=True, filters={"type": "container"})
        client.containers.run("busybox", "true", remove=True, network_mode="none")
        seen = []
        for event in events:
            assert event["scope"] == "local" and "status" not in event
            seen.append(event["Action"])
            if event["Action"] == "destroy":
                break
        events.close()
        assert [action for action in seen if action in ("create", "start", "die", "destroy")] == [
            *("create", "start", "die", "destroy")
        ]
