"""aiodocker in swarm mode, at the version that it negotiates and at an older one."""

from __future__ import annotations

import asyncio

import aiodocker
import pytest

from tests.support import PATIENCE
from tests.support.engine.harness import until
from tests.support.swarm.clusters import Cluster, Node

pytestmark = pytest.mark.nightly


@pytest.mark.parametrize("version", ["auto", "v1.30"])
def test_a_swarm(version: str) -> None:
    with Cluster(1) as cluster:
        asyncio.run(asyncio.wait_for(_swarm(cluster[0], version), 60 * PATIENCE))


async def _swarm(node: Node, version: str) -> None:
    async with aiodocker.Docker(url=f"unix://{node.socket}", api_version=version) as docker:
        made = await docker.swarm.init(advertise_addr="eth0")
        assert (await docker.swarm.inspect())["Spec"]["Name"] == "default"
        [found] = await docker.nodes.list()
        assert found["ID"] == made and (await docker.nodes.inspect(node_id=made))["Status"]["State"] == "ready"
        secret = await docker.secrets.create("key", "hidden")
        config = await docker.configs.create("settings", "shown")
        template = {
            "ContainerSpec": {
                "Image": "busybox",
                "Command": ["sh", "-c", "echo said; exec sleep 99999"],
                "StopGracePeriod": 0,
                "Secrets": [
                    {
                        "SecretID": secret["ID"],
                        "SecretName": "key",
                        "File": {"Name": "key", "UID": "0", "GID": "0", "Mode": 256},
                    }
                ],
            }
        }
        service = await docker.services.create(template, name="web", labels={"tier": "front"})
        assert [each["ID"] for each in await docker.services.list(filters={"label": "tier=front"})] == [service["ID"]]
        node.until_running("web", 1)
        tasks = await docker.tasks.list(filters={"service": "web", "desired-state": "running"})
        assert [task["Status"]["State"] for task in tasks] == ["running"]
        assert (await docker.tasks.inspect(tasks[0]["ID"]))["NodeID"] == made
        until("it is logged", lambda: node.request("GET", "/v1.44/services/web/logs?stdout=1").body)
        assert await docker.services.logs("web", stdout=True) == ["said\n"]
        version_now = (await docker.services.inspect("web"))["Version"]["Index"]
        assert await docker.services.update("web", version=version_now, image="busybox:latest")
        assert await docker.services.delete("web")
        for of, created in ((docker.secrets, secret), (docker.configs, config)):
            assert len(await of.list()) == 1 and await of.delete(created["ID"])
        assert await docker.swarm.leave(force=True)
