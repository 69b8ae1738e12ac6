"""The create's body of a task: each field of the spec has its place."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from engine.cluster.bodies import Node, create_body, grace, host_ports
from engine.errors import InvalidParameter
from engine.swarm_session.messages import Assigned
from engine.wire.containers import CreateBody, LogConfig, Mount, PortBinding, VolumeDriver, VolumeOptions
from engine.wire.nodes import DiscreteResource, GenericResource, NamedResource
from engine.wire.services import EndpointSpec, ServiceSpec
from engine.wire.swarm import Driver
from engine.wire.tasks import (
    AppArmorOptions,
    ContainerSpec,
    Limits,
    NetworkAttachmentConfig,
    PortConfig,
    Privileges,
    ResourceRequirements,
    SeccompOptions,
    SELinuxContext,
    TaskSpec,
)

NODE = Node(id="n1", hostname="host1", architecture="x86_64")
TASK = Assigned(id="t1", service="s1", name="web.2.t1", spec="s1/1", desired=512, slot=2)


def body(task: Assigned = TASK, more: dict[str, Any] | None = None, **fields: Any) -> CreateBody:
    """`fields` are of ContainerSpec; `template`, `endpoint` and `name_of` are not."""
    template = fields.pop("template", {})
    spec = ServiceSpec(
        name="web",
        labels={"tier": "front"},
        endpoint_spec=fields.pop("endpoint", None),
        networks=fields.pop("networks", []),
        task_template=TaskSpec(container_spec=ContainerSpec(image="busybox", **fields), **template),
    )
    return create_body(task, spec, NODE, **(more or {}))


def test_the_least() -> None:
    made = body()
    assert (made.image, made.cmd, made.entrypoint, made.stop_timeout) == ("busybox", None, None, 10)
    assert made.healthcheck is msgspec.UNSET and made.exposed_ports is msgspec.UNSET
    host = made.host_config
    assert host.restart_policy.name == "" and host.network_mode == "" and host.mounts is msgspec.UNSET
    assert host.log_config == LogConfig() and host.memory == 0 and host.pids_limit is None and not host.auto_remove


def test_command_and_args() -> None:
    made = body(command=["a", "b"], args=["c"])
    assert (made.entrypoint, made.cmd) == (["a", "b"], ["c"])


def test_templates_and_labels() -> None:
    made = body(
        hostname="{{.Node.Hostname}}-{{.Task.Slot}}",
        env=["A={{.Service.Labels.tier}}", "B={{.Task.ID}}"],
        labels={"own": "1", "com.docker.swarm.node.id": "no"},
        mounts=[
            Mount(
                type="volume",
                source="v{{.Task.Slot}}",
                target="/{{.Service.Name}}",
                volume_options=VolumeOptions(
                    labels={"n": "{{.Node.ID}}"},
                    driver_config=VolumeDriver(name="local", options={"o": "{{.Task.Name}}"}),
                ),
            )
        ],
    )
    assert made.hostname == "host1-2" and made.env == ["A=front", "B=t1"]
    assert made.labels == {
        "own": "1",
        "com.docker.swarm.task": "",
        "com.docker.swarm.task.id": "t1",
        "com.docker.swarm.task.name": "web.2.t1",
        "com.docker.swarm.node.id": "n1",
        "com.docker.swarm.service.id": "s1",
        "com.docker.swarm.service.name": "web",
    }
    (mount,) = made.host_config.mounts or ()
    assert (mount.source, mount.target) == ("v2", "/web")
    assert mount.volume_options is not None and mount.volume_options.labels == {"n": "n1"}
    assert mount.volume_options.driver_config is not None
    assert mount.volume_options.driver_config.options == {"o": "web.2.t1"}
    # A global service's slot is its node.
    assert body(msgspec.structs.replace(TASK, slot=0), hostname="{{.Task.Slot}}").hostname == "n1"
    with pytest.raises(InvalidParameter):
        body(env=["{{.Nothing}}"])


@pytest.mark.parametrize(
    ("memory", "swap", "expected"), [(0, None, 0), (64, None, 0), (64, 0, 64), (64, 36, 100), (64, -1, -1), (0, -1, -1)]
)
def test_swap(memory: int, swap: int | None, expected: int) -> None:
    resources = ResourceRequirements(
        limits=Limits(memory_bytes=memory, nano_cpus=5, pids=7), swap_bytes=swap, memory_swappiness=9
    )
    host = body(template={"resources": resources}).host_config
    assert (host.memory, host.memory_swap, host.memory_swappiness) == (memory, expected, 9)
    assert (host.nano_cpus, host.pids_limit) == (5, 7)


@pytest.mark.parametrize(
    ("privileges", "expected"),
    [
        (None, None),
        (Privileges(), None),
        (Privileges(no_new_privileges=True), ["no-new-privileges=true"]),
        (Privileges(seccomp=SeccompOptions(mode="default")), None),
        (Privileges(seccomp=SeccompOptions(mode="unconfined")), ["seccomp=unconfined"]),
        (Privileges(seccomp=SeccompOptions(mode="custom", profile=b"{}")), ["seccomp={}"]),
        (Privileges(app_armor=AppArmorOptions(mode="disabled")), ["apparmor=unconfined"]),
        (Privileges(app_armor=AppArmorOptions(mode="default")), None),
        (Privileges(selinux_context=SELinuxContext(disable=True)), ["label=disable"]),
        (Privileges(selinux_context=SELinuxContext(user="u", level="s0")), ["label=user:u", "label=level:s0"]),
    ],
)
def test_privileges(privileges: Privileges | None, expected: list[str] | None) -> None:
    assert body(privileges=privileges).host_config.security_opt == expected


def test_hosts() -> None:
    host = body(hosts=["10.0.0.1 a b", "::1\tc"]).host_config
    assert host.extra_hosts == ["a:10.0.0.1", "b:10.0.0.1", "c:::1"]
    with pytest.raises(InvalidParameter, match="Hosts"):
        body(hosts=["10.0.0.1"])


def test_ports() -> None:
    ports = [
        PortConfig(target_port=80, published_port=8080, publish_mode="host", protocol="tcp"),
        PortConfig(target_port=80, published_port=8081, publish_mode="host"),
        PortConfig(target_port=53, publish_mode="host", protocol="udp"),
        PortConfig(target_port=99, published_port=99, publish_mode="ingress"),
    ]
    made = body(endpoint=EndpointSpec(ports=ports))
    assert made.exposed_ports == {"80/tcp": {}, "53/udp": {}}
    assert made.host_config.port_bindings == {
        "80/tcp": [PortBinding(host_port="8080"), PortBinding(host_port="8081")],
        "53/udp": [PortBinding(host_port="")],
    }
    assert len(host_ports(ServiceSpec(endpoint_spec=EndpointSpec(ports=ports)))) == 3


@pytest.mark.parametrize("place", ["networks", "template"])
def test_networks(place: str) -> None:
    def networks(*targets: str) -> CreateBody:
        wanted = [NetworkAttachmentConfig(target=each, aliases=["db"], driver_opts={"a": "b"}) for each in targets]
        given: dict[str, Any] = {"networks": wanted} if place == "networks" else {"template": {"networks": wanted}}
        return body(
            more={"name_of": {"id1": "own"}.get} | {"name_of": lambda each: {"id1": "own"}.get(each, each)}, **given
        )

    assert networks("host").host_config.network_mode == "host"
    assert networks("none").networking_config.endpoints_config == {}
    made = networks("id1", "bridge")
    assert made.host_config.network_mode == "own"
    own, bridge = made.networking_config.endpoints_config["own"], made.networking_config.endpoints_config["bridge"]
    assert own is not None and own.aliases == ["db"] and own.driver_opts == {"a": "b"}
    assert bridge is not None and bridge.aliases is None


def test_networks_of_the_swarm() -> None:
    """Aliases there are names of the service; what serves published ports is on ingress besides."""

    def networks(*targets: str, addresses: dict[str, str]) -> CreateBody:
        wanted = [NetworkAttachmentConfig(target=each, aliases=["db"]) for each in targets]
        task = msgspec.structs.replace(TASK, addresses=addresses)
        names = {"id1": "shared", "id2": "ingress", "": "bridge"}
        return body(task, more={"name_of": lambda each: names.get(each, each)}, template={"networks": wanted})

    made = networks("id1", "own", addresses={"id2": "10.255.0.3", "id1": "10.0.0.3"})
    assert made.host_config.network_mode == "shared"
    found = made.networking_config.endpoints_config
    assert [*found] == ["shared", "own", "ingress"]
    shared, own = found["shared"], found["own"]
    assert shared is not None and shared.aliases is None and own is not None and own.aliases == ["db"]
    made = networks(addresses={"id2": "10.255.0.3"})
    assert made.host_config.network_mode == "" and [*made.networking_config.endpoints_config] == ["bridge", "ingress"]
    assert networks("host", addresses={}).host_config.network_mode == "host"
    ingress = made.networking_config.endpoints_config["ingress"]
    assert ingress is not None and ingress.driver_opts is None
    task = msgspec.structs.replace(TASK, addresses={"ingress": "10.255.0.3"})
    made = body(task, endpoint=EndpointSpec(ports=[PortConfig(protocol="udp", target_port=53, published_port=53)]))
    ingress = made.networking_config.endpoints_config["ingress"]
    assert ingress is not None and ingress.driver_opts == {"engine.network.endpoint.datagrams": "1"}


def test_logs_and_resources() -> None:
    swarms = Driver("none", {})
    own = Driver("json-file", {"max-size": "1m"})
    assert body(more={"log_driver": swarms}).host_config.log_config == LogConfig(type="none", config={})
    made = body(more={"log_driver": swarms}, template={"log_driver": own})
    assert made.host_config.log_config == LogConfig(type="json-file", config={"max-size": "1m"})
    resources = (
        GenericResource(named_resource_spec=NamedResource("gpu", "a")),
        GenericResource(named_resource_spec=NamedResource("gpu", "b")),
        GenericResource(discrete_resource_spec=DiscreteResource("SSD", 2)),
    )
    assert body(more={"resources": resources}).env == ["DOCKER_RESOURCE_GPU=a,b", "DOCKER_RESOURCE_SSD=2"]


@pytest.mark.parametrize(("given", "seconds"), [(None, 10.0), (0, 0.0), (1_500_000_000, 1.5), (-5, 0.0)])
def test_grace(given: int | None, seconds: float) -> None:
    spec = ServiceSpec(task_template=TaskSpec(container_spec=ContainerSpec(stop_grace_period=given)))
    assert grace(spec) == seconds


def test_tasks_that_are_no_containers() -> None:
    with pytest.raises(InvalidParameter, match="ContainerSpec"):
        create_body(TASK, ServiceSpec(name="x"), NODE)
