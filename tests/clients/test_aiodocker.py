"""aiodocker at the version that it negotiates, and at two older ones."""

from __future__ import annotations

import asyncio
import gzip
import io
import tarfile
from typing import Any

import aiodocker
import pytest

from tests.support import PATIENCE
from tests.support.builds.building import context
from tests.support.engine.harness import TempEngine

pytestmark = pytest.mark.nightly


@pytest.mark.parametrize("version", ["auto", "v1.44", "v1.30"])
def test_a_life(bare: TempEngine, version: str) -> None:
    asyncio.run(asyncio.wait_for(_life(bare, version), 60 * PATIENCE))


async def _life(engine: TempEngine, version: str) -> None:
    async with aiodocker.Docker(url=f"unix://{engine.socket}", api_version=version) as docker:
        assert (await docker.version())["ApiVersion"] == "1.55"
        assert (await docker.system.info())["OSType"] == "linux"
        events = docker.events.subscribe()
        network = await docker.networks.create({"Name": "lan", "Labels": {"a": "b"}})
        volume = await docker.volumes.create({"Name": "data", "Labels": {"a": "b"}})
        container = await docker.containers.create_or_replace(
            "one",
            {
                "Image": "busybox",
                "Cmd": ["sh", "-c", "echo out; exec cat"],
                "OpenStdin": True,
                "ExposedPorts": {"80/tcp": {}},
                "HostConfig": {
                    "NetworkMode": "lan",
                    "PortBindings": {"80/tcp": [{"HostIp": "127.0.0.1", "HostPort": ""}]},
                    "Mounts": [{"Type": "volume", "Source": "data", "Target": "/data"}],
                    "Init": True,
                },
            },
        )
        async with container.attach(stdin=True, stdout=True, stderr=True) as stream:
            await container.start()
            assert (await _read(stream)) == b"out\n"
            await stream.write_in(b"through\n")
            assert (await _read(stream)) == b"through\n"
        shown = await container.show()
        assert shown["State"]["Running"] and shown["NetworkSettings"]["Networks"]["lan"]["IPAddress"]
        assert (await container.port(80))[0]["HostIp"] == "127.0.0.1"
        assert await container.log(stdout=True) == ["out\n", "through\n"]
        execution = await container.exec(["sh", "-c", "echo $A; exit 3"], environment={"A": "b"})
        async with execution.start() as stream:
            assert await _read(stream) == b"b\n"
            assert await stream.read_out() is None
        assert (await execution.inspect())["ExitCode"] == 3
        await container.put_archive("/data", _tar("file", b"text"))
        archive = await container.get_archive("/data/file")
        assert archive.extractfile("file").read() == b"text"
        assert [each["name"].lstrip("/") for each in await container.stats(stream=False)] == ["one"]
        assert [each.id for each in await docker.containers.list(filters={"label": [], "name": ["one"]})] == [
            container.id
        ]
        await container.pause()
        await container.unpause()
        await container.restart(timeout=0)
        await container.commit(repository="made", tag="1")
        assert (await docker.images.inspect("made:1"))["RepoTags"] == ["made:1"]
        await container.kill()
        assert (await container.wait())["StatusCode"] == 137
        await container.delete(v=True)
        await docker.images.delete("made:1")

        packed = io.BytesIO(gzip.compress(context("FROM busybox\nRUN touch /made\n")))
        async for step in docker.images.build(fileobj=packed, tag="b:1", encoding="gzip", stream=True):
            assert "error" not in step
        assert {tag for each in await docker.images.list() for tag in each["RepoTags"]} >= {"b:1", "busybox:latest"}
        await docker.images.delete("b:1")
        with pytest.raises(aiodocker.DockerError) as raised:
            await docker.containers.get("one")
        assert raised.value.status == 404
        await network.delete()
        await volume.delete()
        assert await _actions(events, "one") >= {"create", "start", "die", "destroy"}


async def _read(stream: Any) -> bytes:
    message = await stream.read_out()
    assert message is not None
    return bytes(message.data)


async def _actions(events: Any, name: str) -> set[str]:
    """What happened to a container until it was removed."""
    found: set[str] = set()
    while "destroy" not in found:
        event = await events.get()
        if event["Type"] == "container" and event["Actor"]["Attributes"]["name"] == name:
            found.add(event["Action"])
    return found


def _tar(name: str, data: bytes) -> bytes:
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w") as archive:
        info = tarfile.TarInfo(name)
        info.size = len(data)
        archive.addfile(info, io.BytesIO(data))
    return held.getvalue()
