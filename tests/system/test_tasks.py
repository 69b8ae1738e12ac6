"""Tasks of a swarm as containers: a real agent and executor in a daemon, and a fake manager."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import tempfile
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.cluster.agent import Agent
from engine.cluster.parts import Parts
from engine.cluster.state import Identity
from engine.config import Config as EngineConfig
from engine.containers.container import Container
from engine.containers.lifecycle import State
from engine.daemon import Daemon
from engine.manager.messages import Assigned
from engine.manager.states import TaskState
from engine.wire.services import ServiceSpec
from engine.wire.tasks import (
    ContainerSpec,
    TaskSpec,
)
from tests.fakes.manager import FakeManager
from tests.harness import busybox_archive

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

R = TaskState
SECOND = 1_000_000_000


class Site:
    """A daemon with an agent, and the manager that it talks to."""

    def __init__(self, daemon: Daemon, **identity: Any) -> None:
        self.daemon = daemon
        self.containers = daemon.containers
        swarm = daemon.config.root / "swarm"
        swarm.mkdir(exist_ok=True)
        self.manager = FakeManager(daemon.config.run / "swarm" / "manager.sock")
        self.identity = Identity(
            node="node1", swarm="swarm1", role="manager", directory=swarm, socket=self.manager.socket
        )
        self.sessions: list[Any] = []
        self.barred: list[str] = []
        self.agent = self.new_agent()

    def new_agent(self) -> Agent:
        daemon = self.daemon
        parts = Parts(
            config=daemon.config,
            records=daemon.records,
            containers=daemon.containers,
            images=daemon.images,
            remote=daemon.remote,
            networks=daemon.networks,
            volumes=daemon.volumes,
            events=daemon.events,
            host=daemon_host(daemon),
            counts=daemon._counts,
        )
        return Agent(parts, self.identity, on_session=self.sessions.append, on_barred=self.barred.append)

    async def begin(self) -> FakeManager:
        await self.manager.open()
        self.agent.start()
        await self.manager.session()
        return self.manager

    def container(self, task: str) -> Container | None:
        found = [each for each in self.containers if each.record.config.labels.get(TASK) == task]
        assert len(found) <= 1, f"task {task} has {len(found)} containers"
        return found[0] if found else None

    def present(self, task: str) -> Container:
        found = self.container(task)
        assert found is not None
        return found

    async def output(self, task: str) -> str:
        """What its process has written, when it has ended."""
        lines = [line.data.decode() async for line in self.manager.logs(task)]
        return "".join(lines)


TASK = "com.docker.swarm.task.id"


def daemon_host(daemon: Daemon) -> Any:
    from engine.facts import Host

    return Host(name="host1", cpus=2, memory=1 << 30)


def in_daemon(*stories: Callable[[Site], Awaitable[None]], keep: bool = False) -> None:
    """Run each story in a process with a daemon of its own, all on one root; the first ones are
    killed at their end. The last one leaves nothing behind.
    """
    base = Path(tempfile.mkdtemp(prefix="eng", dir="/tmp"))
    config = EngineConfig(sockets=(str(base / "s"),), root=base / "root", run=base / "run", bridge=f"e{base.name}"[:15])
    try:
        for number, story in enumerate(stories):
            last = number == len(stories) - 1
            child = os.fork()
            if not child:
                status = 1
                try:
                    asyncio.run(_main(config, story, last))
                    status = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(status)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        shutil.rmtree(base, ignore_errors=True)


async def _main(config: EngineConfig, story: Callable[[Site], Awaitable[None]], last: bool) -> None:
    async with contextlib.AsyncExitStack() as stack:
        daemon = Daemon(config)
        await daemon.open(stack)
        site = Site(daemon)
        try:
            if not len(daemon.images):
                async for _ in daemon.images.load(_archive()):
                    pass
            await story(site)
        except BaseException:
            traceback.print_exc()
            await daemon.stop_everything(0)
            raise
        if not last:
            os._exit(0)  # as kill -9
        await site.agent.leave()
        await site.manager.close()
        assert not list(site.containers)
        await daemon.stop_everything(0)


async def _archive() -> AsyncIterator[bytes]:
    yield busybox_archive()


_numbers = itertools.count(1)


def service(command: str = "sleep 1000", *, name: str = "web", **changes: Any) -> ServiceSpec:
    """A spec whose container runs a shell command; `changes` are fields of ContainerSpec."""
    template = changes.pop("template", {})
    endpoint = changes.pop("endpoint", None)
    container = ContainerSpec(image="busybox", command=["sh", "-c", command], **{"stop_grace_period": 0, **changes})
    return ServiceSpec(
        name=name,
        labels={"tier": "front"},
        task_template=TaskSpec(container_spec=container, **template),
        endpoint_spec=endpoint,
    )


def task(number: int = 1, desired: TaskState = R.RUNNING, **changes: Any) -> Assigned:
    fields: dict[str, Any] = {
        "id": f"task{number}",
        "service": "service1",
        "name": f"web.{number}.task{number}",
        "spec": "service1/1",
        "desired": int(desired),
        "slot": number,
    }
    return Assigned(**fields | changes)


def wanted(of: Assigned, desired: TaskState) -> Assigned:
    return msgspec.structs.replace(of, desired=int(desired))


def test_a_task_runs_and_ends() -> None:
    async def story(site: Site) -> None:
        manager = await site.begin()
        hello = manager.hellos[0]
        assert hello.description.hostname == "host1" and hello.description.resources.nano_cpus == 2 * SECOND
        await manager.put(task(1), spec=service())
        status = await manager.state("task1", R.RUNNING)
        container = site.present("task1")
        assert container.running and container.record.name == "web.1.task1"
        assert status.container == container.id and status.pid == container.record.status.pid and status.ready
        labels = container.record.config.labels
        assert {name: labels[name] for name in labels if name.startswith("com.docker.swarm.")} == {
            "com.docker.swarm.task": "",
            "com.docker.swarm.task.id": "task1",
            "com.docker.swarm.task.name": "web.1.task1",
            "com.docker.swarm.node.id": "node1",
            "com.docker.swarm.service.id": "service1",
            "com.docker.swarm.service.name": "web",
        }
        await manager.put(wanted(task(1), R.SHUTDOWN))
        status = await manager.state("task1", R.SHUTDOWN)
        assert container.record.status.state == State.EXITED and not status.ready
        await manager.remove("task1")
        await manager.until("its container is gone", lambda: site.container("task1") is None)
        assert manager.history["task1"] == sorted(manager.history["task1"])
        assert not site.daemon.records.rows("task") and not site.daemon.records.rows("task-spec")

    in_daemon(story)
