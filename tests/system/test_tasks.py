"""Tasks of a swarm as containers: a real agent and executor in a daemon, and a fake manager."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import functools
import os
import shutil
import socket
import tempfile
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.cluster.agent import Agent
from engine.cluster.attaching import Attaching
from engine.cluster.pulling import FRESH
from engine.cluster.state import Identity
from engine.cluster.tasks import TaskRecord
from engine.cluster.views import NodeNetworks
from engine.common.facts import Host
from engine.config import Config as EngineConfig
from engine.containers import removal
from engine.containers.container import Container
from engine.containers.lifecycle import State
from engine.containers.listing import Selection, select
from engine.daemon import Daemon
from engine.swarm_session.messages import Assigned, Delivery
from engine.swarm_session.states import TaskState
from engine.wire.containers import CreateBody, Healthcheck, Mount, TmpfsOptions, Ulimit, VolumeOptions
from engine.wire.networks import NetworkCreate
from engine.wire.nodes import DiscreteResource, GenericResource, NamedResource
from engine.wire.services import EndpointSpec, ServiceSpec
from engine.wire.swarm import Driver
from engine.wire.tasks import (
    AppArmorOptions,
    ConfigReference,
    ContainerSpec,
    DNSConfig,
    FileTarget,
    Limits,
    NetworkAttachmentConfig,
    PortConfig,
    Privileges,
    ResourceRequirements,
    SeccompOptions,
    SecretReference,
    TaskSpec,
)
from tests.support.engine.harness import busybox_archive, contents
from tests.support.fakes.manager import FakeManager
from tests.support.forks import cancel_when_interrupted, engine_of_forks, run_in_fork
from tests.support.images.archives import busybox
from tests.support.images.registry import PASSWORD, USER, Registry

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
        parts = dataclasses.replace(self.daemon.cluster._parts, host=Host(name="host1", cpus=2, memory=1 << 30))
        networks = NodeNetworks(parts)
        return Agent(
            parts,
            self.identity,
            on_session=self.sessions.append,
            on_barred=self.barred.append,
            networks=networks,
            attaching=Attaching(parts, networks),
        )

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


def in_daemon(*stories: Callable[[Site], Awaitable[None]]) -> None:
    """Run each story in a process with a daemon of its own, all on one root; the first ones are
    killed at their end. The last one leaves nothing behind.
    """
    base = Path(tempfile.mkdtemp(prefix="eng", dir="/tmp"))
    config = EngineConfig(sockets=(str(base / "s"),), root=base / "root", run=base / "run", bridge=f"e{base.name}"[:15])
    try:
        with engine_of_forks(config.run):
            for number, story in enumerate(stories):
                last = number == len(stories) - 1
                run_in_fork(functools.partial(_main, config, story, last))
    finally:
        shutil.rmtree(base, ignore_errors=True)


async def _main(config: EngineConfig, story: Callable[[Site], Awaitable[None]], last: bool) -> None:
    async with contextlib.AsyncExitStack() as stack:
        daemon = Daemon(config)
        await daemon.open(stack)
        cancel_when_interrupted()
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


def service(command: str = "sleep 1000", *, name: str = "web", **changes: Any) -> ServiceSpec:
    """A spec whose container runs a shell command; `changes` are fields of ContainerSpec."""
    template = changes.pop("template", {})
    endpoint = changes.pop("endpoint", None)
    fields = {"image": "busybox", "command": ["sh", "-c", command], "stop_grace_period": 0} | changes
    container = ContainerSpec(**fields)
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
        labelled = CreateBody(image="busybox", labels=labels)
        await site.containers.create(labelled, "plain")
        for value, names in (("true", {"web.1.task1"}), ("false", {"plain"})):
            query = Selection(all=True, filters={"is-task": [value]})
            found = select(site.containers, site.daemon.images, query)
            assert {each.record.name for each in found} == names
        await removal.remove(site.containers.get("plain"), force=False)
        await manager.put(wanted(task(1), R.SHUTDOWN))
        status = await manager.state("task1", R.SHUTDOWN)
        assert container.record.status.state == State.EXITED and not status.ready
        await manager.remove("task1")
        await manager.until("its container is gone", lambda: site.container("task1") is None)
        assert manager.history["task1"] == sorted(manager.history["task1"])
        await manager.until("its rows are gone", lambda: not any(map(site.daemon.records.rows, ("task", "task-spec"))))

    in_daemon(story)


def test_ends_of_their_own() -> None:
    async def story(site: Site) -> None:
        manager = await site.begin()
        await manager.put(task(1, spec="s/1"), spec=service("exit 0"))
        await manager.put(task(2, spec="s/2"), spec=service("exit 3"))
        await manager.put(task(3, spec="s/3"), spec=service("sh -c 'kill -9 $$'; exit $?"))
        assert (await manager.state("task1", R.COMPLETE)).message == "finished"
        failed = await manager.state("task2", R.FAILED)
        assert (failed.exit_code, failed.error) == (3, "task: non-zero exit (3)")
        assert (await manager.state("task3", R.FAILED)).exit_code == 137
        # Their containers stay for `docker logs`, until the managers forget them.
        assert all(site.present(f"task{number}").record.status.state == State.EXITED for number in (1, 2, 3))
        await manager.put(wanted(task(1, spec="s/1"), R.SHUTDOWN))
        await asyncio.sleep(0.3)
        assert manager.statuses["task1"].state == R.COMPLETE, "a final state is final"

    in_daemon(story)


def test_rejected_and_failed() -> None:
    async def story(site: Site) -> None:
        manager = await site.begin()
        bind = Mount(type="bind", source="/nonexistent/x", target="/x")
        specs = {
            "image": (service(image="registry.invalid/none"), R.REJECTED, "No such image: registry.invalid/none"),
            "bind": (service(mounts=[bind]), R.REJECTED, "bind source path does not exist: /nonexistent/x"),
            "template": (service(env=["A={{.Task.Wrong}}"]), R.REJECTED, "can't evaluate field Wrong"),
            "network": (
                service(template={"networks": [NetworkAttachmentConfig(target="nowhere")]}), R.REJECTED, "nowhere",
            ),
            "program": (
                msgspec.structs.replace(service(), task_template=TaskSpec(
                    container_spec=ContainerSpec(image="busybox", command=["/no/program"]))),
                R.FAILED, "/no/program",
            ),
            "secret": (service(secrets=[secret("gone")]), R.REJECTED, "secret gone not found"),
        }  # fmt: skip
        for number, (name, (spec, _, _)) in enumerate(specs.items(), 1):
            await manager.put(task(number, spec=f"{name}/1"), spec=spec)
        for number, (_, state, words) in enumerate(specs.values(), 1):
            status = await manager.state(f"task{number}", state)
            assert words in status.error, status
        # A task that is not wanted any more is not tried.
        await manager.put(task(9, R.SHUTDOWN, spec="image/1"))
        await manager.state("task9", R.SHUTDOWN)
        assert site.container("task9") is None

    in_daemon(story)


def test_ready_waits_for_running() -> None:
    async def story(site: Site) -> None:
        manager = await site.begin()
        await manager.put(task(1, R.READY), spec=service())
        await manager.state("task1", R.READY)
        await asyncio.sleep(0.2)
        assert site.present("task1").record.status.state == State.CREATED
        await manager.put(task(1, R.RUNNING))
        await manager.state("task1", R.RUNNING)
        # Another one never runs.
        await manager.put(task(2, R.READY))
        await manager.state("task2", R.READY)
        await manager.put(task(2, R.SHUTDOWN))
        await manager.state("task2", R.SHUTDOWN)
        assert not site.present("task2").record.status.started_at

    in_daemon(story)


def test_fields_inside() -> None:
    """What the process sees of the fields of ContainerSpec."""

    async def story(site: Site) -> None:
        manager = await site.begin()
        (site.daemon.config.root / "bound").mkdir()
        (site.daemon.config.root / "bound" / "file").write_text("bound\n")
        script = (
            "echo $A $B; hostname; id -u; id -G; pwd; cat /bound/file; cat /etc/hosts | grep -c 10.9.8.7;"
            "cat /etc/resolv.conf | grep -c 192.0.2.53; ulimit -n; cat /proc/self/oom_score_adj;"
            "cat /proc/sys/net/ipv4/ip_unprivileged_port_start; touch /x 2>/dev/null || echo read-only;"
            "grep -q '^/dev\\|tmpfs /tmp ' /proc/mounts && echo tmpfs; test -w /data && echo data; nproc"
        )
        spec = service(
            script,
            env=["A={{.Task.Slot}}-{{.Service.Name}}", "B={{.Node.Hostname}}"],
            hostname="h-{{.Task.Slot}}",
            user="7",
            groups=["8"],
            dir="/tmp",
            read_only=True,
            hosts=["10.9.8.7 far faraway"],
            dns_config=DNSConfig(nameservers=["192.0.2.53"], search=["example.org"], options=["ndots:2"]),
            ulimits=[Ulimit(name="nofile", soft=99, hard=100)],
            oom_score_adj=77,
            sysctls={"net.ipv4.ip_unprivileged_port_start": "5"},
            mounts=[
                Mount(type="bind", source=str(site.daemon.config.root / "bound"), target="/bound", read_only=True),
                Mount(type="tmpfs", target="/tmp", tmpfs_options=TmpfsOptions(size_bytes=1 << 20, mode=0o1777)),
                Mount(
                    type="volume",
                    source="vol-{{.Task.Slot}}",
                    target="/data",
                    volume_options=VolumeOptions(labels={"slot": "{{.Task.Slot}}"}),
                ),
            ],
        )
        await manager.put(task(1), spec=spec)
        await manager.state("task1", R.COMPLETE)
        lines = (await site.output("task1")).splitlines()
        assert lines[:13] == [
            *("1-web host1", "h-1", "7", "7 8" if lines[3] == "7 8" else lines[3], "/tmp", "bound", "2", "1", "99"),
            *("77", "5", "read-only", "tmpfs"),
        ], lines
        assert "8" in lines[3].split()
        volume = await site.daemon.volumes.get("vol-1")
        assert volume.labels == {"slot": "1"}

    in_daemon(story)


def test_fields_of_the_container() -> None:
    """What inspect shows of fields whose effect is the engine's own matter."""

    async def story(site: Site) -> None:
        manager = await site.begin()
        container = ContainerSpec(
            image="busybox",
            args=["sleep", "1000"],
            labels={"a": "b", "com.docker.swarm.task.id": "false"},
            stop_signal="SIGUSR1",
            stop_grace_period=1_500_000_000,
            tty=True,
            open_stdin=True,
            init=False,
            capability_add=["CAP_SYS_TIME"],
            capability_drop=["CAP_CHOWN"],
            privileges=Privileges(
                no_new_privileges=True,
                seccomp=SeccompOptions(mode="unconfined"),
                app_armor=AppArmorOptions(mode="disabled"),
            ),
            healthcheck=Healthcheck(test=["NONE"]),
        )
        template = TaskSpec(
            container_spec=container,
            resources=ResourceRequirements(
                limits=Limits(nano_cpus=500_000_000, memory_bytes=64 << 20, pids=50), swap_bytes=0
            ),
            log_driver=Driver(name="json-file", options={"max-size": "1m"}),
        )
        gpu = GenericResource(named_resource_spec=NamedResource("gpu", "UUID1"))
        other = GenericResource(named_resource_spec=NamedResource("gpu", "UUID2"))
        disks = GenericResource(discrete_resource_spec=DiscreteResource("SSD", 3))
        manager.log_driver = {"Name": "none"}
        await manager.put(task(1, generic=(gpu, other, disks)), spec=ServiceSpec(name="web", task_template=template))
        await manager.state("task1", R.RUNNING)
        record = site.present("task1").record
        config, host = record.config, record.host
        assert record.path == "sleep" and config.tty and config.open_stdin
        assert config.labels["a"] == "b" and config.labels["com.docker.swarm.task.id"] == "task1"
        assert (config.stop_signal, config.stop_timeout) == ("SIGUSR1", 2)
        assert set(config.env or ()) >= {"DOCKER_RESOURCE_GPU=UUID1,UUID2", "DOCKER_RESOURCE_SSD=3"}
        assert host.restart_policy.name in ("", "no")
        assert (host.nano_cpus, host.memory, host.memory_swap, host.pids_limit) == (
            500_000_000, 64 << 20, 64 << 20, 50,
        )  # fmt: skip
        assert (host.init, host.cap_add, host.cap_drop) == (False, ["CAP_SYS_TIME"], ["CAP_CHOWN"])
        assert set(host.security_opt or ()) == {
            "no-new-privileges=true", "seccomp=unconfined", "apparmor=unconfined",
        }  # fmt: skip
        assert (host.log_config.type, host.log_config.config) == ("json-file", {"max-size": "1m"})
        # The swarm's log driver is for those that name none.
        await manager.put(task(2, spec="service1/2"), spec=service())
        await manager.state("task2", R.RUNNING)
        assert site.present("task2").record.host.log_config.type == "none"

    in_daemon(story)


def test_ports_of_mode_host() -> None:
    async def story(site: Site) -> None:
        manager = await site.begin()
        ports = [
            PortConfig(target_port=80, published_port=8765, publish_mode="host", protocol="tcp"),
            PortConfig(target_port=81, publish_mode="host", protocol="udp"),
        ]
        await manager.put(task(1), spec=service(endpoint=EndpointSpec(ports=ports)))
        status = await manager.state("task1", R.RUNNING)
        assert status.ports[0] == ports[0]
        assert status.ports[1].target_port == 81 and status.ports[1].published_port > 1024
        await manager.put(task(2))
        rejected = await manager.state("task2", R.FAILED)
        assert "8765" in rejected.error

    in_daemon(story)


def test_networks_of_the_node() -> None:
    async def story(site: Site) -> None:
        manager = await site.begin()
        created = await site.daemon.networks.create(NetworkCreate(name="own"))
        for number, target in enumerate(("host", "none", "bridge", created.id), 1):
            network = NetworkAttachmentConfig(target=target, aliases=["db"])
            await manager.put(task(number, spec=f"s/{number}"), spec=service(template={"networks": [network]}))
            await manager.state(f"task{number}", R.RUNNING)
        networks = [site.present(f"task{number}").record.networks for number in (1, 2, 3, 4)]
        assert [list(each) for each in networks] == [["host"], ["none"], ["bridge"], ["own"]]
        assert "db" in (networks[3]["own"].aliases or ())
        await manager.remove("task4")
        await manager.until("gone", lambda: site.container("task4") is None)
        await site.daemon.networks.remove("own")

    in_daemon(story)


def secret(name: str, file: str = "", **changes: Any) -> SecretReference:
    target = FileTarget(name=file or name, **{"uid": "0", "gid": "0", "mode": 0o444, **changes})
    return SecretReference(secret_id=f"id-{name}", secret_name=name, file=target)


def config(name: str, file: str, **changes: Any) -> ConfigReference:
    target = FileTarget(name=file, **{"uid": "0", "gid": "0", "mode": 0o444, **changes})
    return ConfigReference(config_id=f"id-{name}", config_name=name, file=target)


def test_secrets_and_configs() -> None:
    text = b"s3cr3t-" + os.urandom(8).hex().encode()

    async def story(site: Site) -> None:
        manager = await site.begin()
        manager.secrets["id-password"] = Delivery(id="id-password", name="password", data=text)
        manager.configs["id-conf"] = Delivery(
            id="id-conf",
            name="conf",
            data=b'{{.Service.Name}} {{secret "password"}} {{env "A"}}',
            template="golang",
        )
        spec = service(
            "cat /run/secrets/password; echo; stat -c '%a %u %g' /run/secrets/password /etc/web.conf;"
            "cat /etc/web.conf; echo; echo x 2>/dev/null > /run/secrets/password || echo refused;"
            "cat /run/secrets/again; echo; sleep 1000",
            env=["A=b"],
            secrets=[secret("password", uid="5", gid="6", mode=0o440), secret("password", "/run/secrets/again")],
            configs=[config("conf", "/etc/web.conf", mode=0o644)],
        )
        await manager.put(task(1, secrets=("id-password",), configs=("id-conf",)), spec=spec)
        await manager.state("task1", R.RUNNING)
        expected = [
            text.decode(), "440 5 6", "644 0 0", f"web {text.decode()} b", "refused", text.decode(),
        ]  # fmt: skip
        await manager.until("output", lambda: log(site, "task1").count("\n") >= len(expected))
        assert [line.split('"')[3].removesuffix("\\n") for line in log(site, "task1").splitlines()] == expected
        # Only the log of this container, which has printed it, has it on disk.
        holders = [path for path in holding(site.daemon.config.root, text) if not path.name.endswith("-json.log")]
        assert not holders, holders
        assert text not in repr(site.agent._executor._deliveries).encode()
        await manager.remove("task1")
        await manager.until("gone", lambda: site.container("task1") is None)
        await manager.until("its secret is gone", lambda: not site.agent._executor._deliveries._secrets)

    in_daemon(story)


def log(site: Site, task: str) -> str:
    path = site.present(task).log_path
    assert path is not None
    return path.read_text() if path.exists() else ""


def holding(directory: Path, text: bytes) -> list[Path]:
    return [path for path, held in contents(directory) if text in held]


async def container_of(site: Site, task: str, act: Callable[[Path], None], name: str) -> None:
    """Do something with a file of the task's container."""
    root = Path(f"/proc/{site.present(task).record.status.pid}/root")
    await asyncio.to_thread(act, root / name)


def test_health() -> None:
    async def story(site: Site) -> None:
        manager = await site.begin()
        check = Healthcheck(
            test=["CMD-SHELL", "cat /healthy"], interval=SECOND // 20, retries=2, start_period=600 * SECOND
        )
        await manager.put(task(1), spec=service("sleep 1000", healthcheck=check))
        await manager.state("task1", R.STARTING)
        await manager.until("its process runs", lambda: site.present("task1").running)
        assert manager.statuses["task1"].state == R.STARTING
        await container_of(site, "task1", Path.touch, "healthy")
        await manager.state("task1", R.RUNNING)
        await container_of(site, "task1", Path.unlink, "healthy")
        failed = await manager.state("task1", R.FAILED)
        assert "unhealthy container" in failed.error
        assert manager.history["task1"][-3:] == [R.STARTING, R.RUNNING, R.FAILED]
        never = Healthcheck(test=["CMD", "false"], interval=SECOND // 20, retries=2)
        await manager.put(task(2, spec="s/2"), spec=service(healthcheck=never))
        assert "unhealthy container" in (await manager.state("task2", R.FAILED)).error
        assert R.RUNNING not in manager.history["task2"]

    in_daemon(story)


def test_logs() -> None:
    async def story(site: Site) -> None:
        manager = await site.begin()
        spec = service("echo one; echo two >&2; head -c 40000 /dev/zero | tr '\\0' x; echo; printf end; sleep 0.2")
        await manager.put(task(1), spec=spec)
        await manager.state("task1", R.COMPLETE)
        lines = [line async for line in manager.logs("task1")]
        by_stream = {stream: [line.data for line in lines if line.stream == stream] for stream in (1, 2)}
        assert by_stream == {1: [b"one\n", b"x" * 40000 + b"\n", b"end"], 2: [b"two\n"]}
        assert all(abs(line.time - time.time_ns()) < 60 * SECOND for line in lines)
        assert [line.data async for line in manager.logs("task1", stdout=False)] == [b"two\n"]
        assert [line.data async for line in manager.logs("task1", tail=1)] == [b"end"]
        assert [line.data async for line in manager.logs("task1", tail=0)] == []
        last = max(line.time for line in lines)
        assert [line.data async for line in manager.logs("task1", since=last)] == [b"end"]
        assert [line async for line in manager.logs("task1", since=last + 1)] == []
        assert [line async for line in manager.logs("unknown")] == []
        # Two that run on, with their attributes; a third's log cannot be read.
        options = {"labels": "tier"}
        for number in (2, 3):
            await manager.put(
                task(number, spec="s/2"),
                spec=service(
                    "echo $NR; sleep 0.5; echo last; exit 0",
                    env=["NR={{.Task.Slot}}"],
                    labels={"tier": "front"},
                    template={"log_driver": Driver(name="json-file", options=options)},
                ),
            )
        await manager.put(task(4, spec="s/4"), spec=service("exit 0", template={"log_driver": Driver(name="none")}))

        def started(task: str) -> bool:
            container = site.container(task)
            return container is not None and container.record.status.started_at > 0

        # The log of a container that has not started has no lines, and its reading ends at once.
        await manager.until("both have started", lambda: started("task2") and started("task3"))
        await manager.state("task4", R.COMPLETE)
        lines = [line async for line in manager.logs("task2", "task3", "task4", follow=True, details=True)]
        assert [line.data for line in lines if line.task == "task2"] == [b"2\n", b"last\n"]
        assert [line.data for line in lines if line.task == "task3"] == [b"3\n", b"last\n"]
        assert lines[-1].details == {"tier": "front"} or lines[0].details == {"tier": "front"}
        (error,) = [line for line in lines if line.task == "task4"]
        assert error.stream == 3 and b"does not support reading" in error.data
        # A follower that leaves.
        await manager.put(task(5, spec="s/5"), spec=service("while :; do echo x; sleep 0.01; done", tty=True))
        await manager.state("task5", R.RUNNING)
        async for line in manager.logs("task5", follow=True):
            assert line.data == b"x\r\n"
            break

    in_daemon(story)


def test_clients_have_containers_of_tasks() -> None:
    """stop, rm and restart by clients end the task; no second run goes on."""

    async def story(site: Site) -> None:
        manager = await site.begin()
        for number in (1, 2, 3):
            await manager.put(task(number), spec=service())
            await manager.state(f"task{number}", R.RUNNING)
        await site.present("task1").stop(0)
        assert (await manager.state("task1", R.FAILED)).exit_code == 137
        await removal.remove(site.present("task2"), force=True)
        await manager.state("task2", R.FAILED)
        restarted = site.present("task3")
        await restarted.restart(0)
        await manager.state("task3", R.FAILED)
        await manager.until("the second run was ended", lambda: not restarted.running)
        await manager.remove("task1", "task2", "task3")
        await manager.until("all are gone", lambda: not list(site.containers))

    in_daemon(story)


def test_the_name_is_taken() -> None:
    async def story(site: Site) -> None:
        manager = await site.begin()
        await site.containers.create(CreateBody(image="busybox"), "web.1.task1")
        await manager.put(task(1), spec=service())
        assert "web.1.task1" in (await manager.state("task1", R.REJECTED)).error
        await manager.remove("task1")
        await asyncio.sleep(0.2)
        assert len(site.containers) == 1, "it is not the task's"
        await removal.remove(site.containers.get("web.1.task1"), force=True)

    in_daemon(story)


# --- without a manager, and over restarts of the daemon -------------------------------------------


def test_a_manager_that_goes_and_comes() -> None:
    async def story(site: Site) -> None:
        manager = await site.begin()
        await manager.put(task(1), task(2), spec=service("test -e /end && exit 5; sleep 1000"))
        await manager.state("task1", R.RUNNING)
        pid = site.present("task1").record.status.pid
        await manager.close()
        await manager.until("it knows", lambda: site.agent.reason)
        await site.present("task2").kill(9)  # while no manager listens
        await asyncio.sleep(0.3)
        await manager.open()
        await manager.session(2)
        assert manager.statuses["task2"].state == R.FAILED
        assert site.present("task1").record.status.pid == pid
        # It says goodbye, and another session follows.
        await manager.bye("elsewhere")
        await manager.session(3)
        await manager.until("it knows", lambda: not site.agent.reason)
        # An older cluster's manager is refused.
        manager.epoch = 7
        await manager.bye("newer")
        await manager.session(4)
        await manager.until("the epoch", lambda: site.agent._identity.epoch == 7)
        manager.epoch = 6
        await manager.bye("older")
        await manager.until("refused", lambda: "earlier cluster" in site.agent.reason)
        assert site.present("task1").record.status.pid == pid
        manager.epoch = 7
        await manager.until("back", lambda: not site.agent.reason)
        await manager.bye("removed", barred=True)
        await manager.until("barred", lambda: site.barred == ["removed"])

    in_daemon(story)


def test_a_silent_manager_is_left() -> None:
    async def story(site: Site) -> None:
        site.manager.period = 0.2
        manager = await site.begin()
        await manager.put(task(1), spec=service())
        await manager.state("task1", R.RUNNING)
        assert manager.connection is not None
        manager.connection.on_beat = None
        await manager.session(2)

    in_daemon(story)


WAITING = "until test -e /end; do sleep 0.1; done; exit 4"


def test_kill_9_of_the_daemon() -> None:
    """Tasks run on with their processes; what ended meanwhile is reported; secrets come again."""
    found: dict[str, Any] = {}
    path = Path(tempfile.mkdtemp(prefix="task", dir="/tmp"))

    async def first(site: Site) -> None:
        manager = await site.begin()
        manager.secrets["id-a"] = Delivery(id="id-a", name="a", data=b"top")
        await manager.put(task(1), task(2), spec=service("sleep 1000"))
        await manager.put(
            task(3, R.READY, spec="s/3", secrets=("id-a",)),
            spec=service("cat /run/secrets/a; echo; sleep 1000", secrets=[secret("a")]),
        )
        await manager.put(task(4, spec="s/4"), spec=service(WAITING))
        await manager.put(task(5, spec="s/5"), spec=service(image="registry.invalid/x"))
        for number, state in ((1, R.RUNNING), (2, R.RUNNING), (3, R.READY), (4, R.RUNNING), (5, R.REJECTED)):
            await manager.state(f"task{number}", state)
        await asyncio.sleep(0.3)
        (path / "pid").write_text(str(site.present("task1").record.status.pid))

    async def second(site: Site) -> None:
        await container_of(site, "task4", Path.touch, "end")
        await site.manager.until("task 4 has ended", lambda: not site.present("task4").running)
        # No manager yet: what runs goes on, what needs a secret waits.
        site.agent.start()
        await asyncio.sleep(0.5)
        assert site.present("task1").record.status.pid == int((path / "pid").read_text())
        assert site.present("task3").record.status.state == State.CREATED
        manager = site.manager
        manager.secrets["id-a"] = Delivery(id="id-a", name="a", data=b"top")
        manager.specs = {"service1/1": service("sleep 1000")}
        manager.specs["s/3"] = service("cat /run/secrets/a; echo; sleep 1000", secrets=[secret("a")])
        manager.specs["s/4"] = service(WAITING)
        manager.tasks = {
            "task1": task(1),
            "task3": task(3, R.RUNNING, spec="s/3", secrets=("id-a",)),
            "task4": task(4, spec="s/4"),
        }
        await manager.open()
        await manager.session()
        states = {status.task: (TaskState(status.state), status.exit_code) for status in manager.hellos[0].statuses}
        assert states == {
            "task1": (R.RUNNING, 0), "task2": (R.RUNNING, 0), "task3": (R.READY, 0), "task4": (R.FAILED, 4),
            "task5": (R.REJECTED, 0),
        }  # fmt: skip
        # Task 2 and 5 were forgotten while the node was away.
        await manager.state("task3", R.RUNNING)
        await manager.until("task 2 is gone", lambda: site.container("task2") is None)
        assert site.present("task1").record.status.pid == int((path / "pid").read_text())
        await manager.until("its secret", lambda: "top" in log(site, "task3"))

    try:
        in_daemon(first, second)
    finally:
        shutil.rmtree(path)
    assert not found


def test_a_container_that_the_last_daemon_could_not_record() -> None:
    """The daemon was killed after the create, or after the start, and before it knew: the container
    is found by its name. One whose task is unknown is removed."""

    async def first(site: Site) -> None:
        manager = await site.begin()
        await manager.put(task(1), task(2), task(3), spec=service())
        for number in (1, 2, 3):
            await manager.state(f"task{number}", R.RUNNING)
        await asyncio.sleep(0.3)
        table = site.daemon.records.table("task", TaskRecord)
        for number in (1, 2):
            await site.daemon.records.commit(table.put(f"task{number}", TaskRecord(assigned=task(number))))
        await site.daemon.records.commit(table.delete("task3"))

    async def second(site: Site) -> None:
        site.manager.tasks = {f"task{number}": task(number) for number in (1, 2)}
        site.manager.specs = {"service1/1": service()}
        before = {number: site.present(f"task{number}").id for number in (1, 2)}
        manager = await site.begin()
        for number in (1, 2):
            assert (await manager.state(f"task{number}", R.RUNNING)).container == before[number]
        await manager.until("task 3 is gone", lambda: site.container("task3") is None)
        assert len(site.containers) == 2

    in_daemon(first, second)


def test_leave() -> None:
    async def story(site: Site) -> None:
        manager = await site.begin()
        await site.containers.create(CreateBody(image="busybox", cmd=["true"]), "plain")
        await manager.put(
            task(1), task(2), spec=service(mounts=[Mount(type="volume", target="/data")], stop_grace_period=SECOND)
        )
        await manager.state("task1", R.RUNNING)
        await manager.state("task2", R.RUNNING)
        await site.agent.leave()
        assert manager.left
        assert [each.record.name for each in site.containers] == ["plain"]
        await manager.until("its rows are gone", lambda: not any(map(site.daemon.records.rows, ("task", "task-spec"))))
        assert not await site.daemon.volumes.usage(), "anonymous volumes go with their containers"
        await removal.remove(site.containers.get("plain"), force=False)
        site.agent = site.new_agent()

    in_daemon(story)


def test_many_at_once() -> None:
    async def story(site: Site) -> None:
        manager = await site.begin()
        begin = time.monotonic()
        await manager.put(*(task(number) for number in range(1, 61)), spec=service(stop_grace_period=0))
        for number in range(1, 61):
            await manager.state(f"task{number}", R.RUNNING, 60)
        print(f"60 tasks in {time.monotonic() - begin:.2f} s")
        await manager.put(*(task(number, R.SHUTDOWN) for number in range(1, 61)))
        for number in range(1, 61):
            await manager.state(f"task{number}", R.SHUTDOWN, 60)
        await manager.remove(*(f"task{number}" for number in range(1, 61)))
        await manager.until("all are gone", lambda: not list(site.containers), 60)

    in_daemon(story)


# --- images ---------------------------------------------------------------------------------------


def _auth(password: str, host: str) -> str:
    document = {"username": USER, "password": password, "serveraddress": host}
    return base64.urlsafe_b64encode(msgspec.json.encode(document)).decode()


def test_images_of_a_private_registry() -> None:
    """The image is pulled with the service's own credentials, and again when its tag has moved."""
    with Registry(password=True) as registry:
        first = registry.put("web", "v1", busybox())

        async def story(site: Site) -> None:
            manager = await site.begin()
            name = f"{registry.host}/web:v1"
            await manager.put(task(1, spec="none/1", service="none"), spec=service(image=name))
            assert "No such image" in (await manager.state("task1", R.REJECTED)).error
            manager.auths = {"wrong": _auth("wrong", registry.host), "right": _auth(PASSWORD, registry.host)}
            await manager.put(task(2, spec="wrong/1", service="wrong"), spec=service(image=name))
            assert "No such image" in (await manager.state("task2", R.REJECTED)).error
            await manager.put(task(3, spec="right/1", service="right"), spec=service(image=name))
            await manager.state("task3", R.RUNNING)
            old = site.present("task3").record.image_id
            # By digest too, whatever its tag is.
            pinned = f"{name}@{first.digest}"
            await manager.put(task(4, spec="right/2", service="right"), spec=service(image=pinned))
            await manager.state("task4", R.RUNNING)
            record = site.present("task4").record
            assert record.image_id == old and record.config.image == pinned
            await asyncio.to_thread(registry.put, "web", "v1", busybox(config={"Env": ["NEW=1"]}))
            await asyncio.sleep(FRESH)
            await manager.put(task(5, spec="right/1", service="right"))
            await manager.state("task5", R.RUNNING)
            assert site.present("task5").record.image_id != old
            assert "NEW=1" in (site.present("task5").record.config.env or ())

        in_daemon(story)


def test_a_pull_is_cancelled_when_the_task_is_not_wanted() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()

        async def story(site: Site) -> None:
            manager = await site.begin()
            image = f"127.0.0.1:{silent.getsockname()[1]}/x"
            await manager.put(task(1), spec=service(image=image))
            await manager.state("task1", R.PREPARING)
            await manager.put(task(1, R.SHUTDOWN))
            await manager.state("task1", R.SHUTDOWN, 5)
            await manager.put(task(2))
            await manager.state("task2", R.PREPARING)
            await manager.remove("task2")
            await manager.until("it is forgotten", lambda: "task2" not in dict(site.daemon.records.rows("task")))

        in_daemon(story)
