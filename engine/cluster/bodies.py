"""The container of a task: the body of its create, made of the task and its service's spec. Pure.

Every field of ContainerSpec, and those of the task's template and of the endpoint that concern a
container, have one place here. Rules that a create checks itself are left to it; what it refuses,
the task shows as its error.

Not here: the content of secrets and configs (`delivery.py`), pulling the image (`pulling.py`), the
container's life (`executor.py`).
Raises: InvalidParameter for a template or a value that cannot be expressed in a create.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import msgspec

from engine.common.templates import Value, expand
from engine.errors import InvalidParameter
from engine.networks.requested import DATAGRAMS_OPTION
from engine.swarm_session.messages import Assigned
from engine.wire.containers import (
    CreateBody,
    EndpointSettings,
    HostConfig,
    LogConfig,
    Mount,
    NetworkingConfig,
    PortBinding,
    RestartPolicy,
)
from engine.wire.nodes import GenericResource
from engine.wire.services import ServiceSpec
from engine.wire.swarm import Driver
from engine.wire.tasks import ContainerSpec, NetworkAttachmentConfig, PortConfig, Privileges, TaskSpec

SECOND = 1_000_000_000
DEFAULT_GRACE = 10 * SECOND
"""Nanoseconds between stop signal and SIGKILL when the spec names none."""

LABEL = "com.docker.swarm."
"""Prefix of the labels of task containers, by which tools recognize them."""
TASK_LABEL = LABEL + "task.id"

HOST = "host"
"""PublishMode of ports on the node's own addresses."""


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """This node, as templates see it."""

    id: str
    hostname: str
    architecture: str
    os: str = "linux"


def container_spec(spec: ServiceSpec) -> ContainerSpec:
    """Raises InvalidParameter when the service's tasks are no containers."""
    found = spec.task_template.container_spec
    if found is None:
        raise InvalidParameter("TaskTemplate.ContainerSpec: this node runs containers only")
    return found


def template_values(task: Assigned, spec: ServiceSpec, node: Node) -> dict[str, Value]:
    """The names that templates of this task may use. `Task.Slot` of a global service's task is its
    node, as in swarmkit.
    """
    return {
        "Service": {"ID": task.service, "Name": spec.name, "Labels": dict(spec.labels)},
        "Node": {
            "ID": node.id,
            "Hostname": node.hostname,
            "Platform": {"Architecture": node.architecture, "OS": node.os},
        },
        "Task": {"ID": task.id, "Name": task.name, "Slot": str(task.slot) if task.slot else node.id},
    }


def grace(spec: ServiceSpec) -> float:
    """Seconds between stop signal and SIGKILL."""
    container = spec.task_template.container_spec
    given = None if container is None else container.stop_grace_period
    return (DEFAULT_GRACE if given is None else max(0, given)) / SECOND


def host_ports(spec: ServiceSpec) -> list[PortConfig]:
    """The ports that each task publishes on its node."""
    endpoint = spec.endpoint_spec
    return [] if endpoint is None else [port for port in endpoint.ports if port.publish_mode == HOST]


def create_body(
    task: Assigned,
    spec: ServiceSpec,
    node: Node,
    *,
    log_driver: Driver | None = None,
    resources: tuple[GenericResource, ...] = (),
    name_of: Callable[[str], str] = str,
) -> CreateBody:
    """The body of the task's create.

    `log_driver`: the swarm's default for this task. `resources`: generic resources that the task
    was given. `name_of`: the name of a network of this node by its name or id.
    """
    container = container_spec(spec)
    values = template_values(task, spec, node)
    template = spec.task_template
    ports = host_ports(spec)
    networking, mode = _networks(task, spec, name_of)
    seconds = math.ceil(grace(spec))
    return CreateBody(
        image=container.image,
        hostname=expand(container.hostname, values),
        user=container.user,
        tty=container.tty,
        open_stdin=container.open_stdin,
        env=[*(expand(entry, values) for entry in container.env), *_resource_variables(resources)],
        cmd=list(container.args) or None,
        entrypoint=list(container.command) or None,
        working_dir=container.dir,
        labels={**container.labels, **_labels(task, spec, node)},
        stop_signal=container.stop_signal or msgspec.UNSET,
        stop_timeout=seconds,
        healthcheck=container.healthcheck if container.healthcheck is not None else msgspec.UNSET,
        exposed_ports={f"{port.target_port}/{port.protocol or 'tcp'}": {} for port in ports} or msgspec.UNSET,
        host_config=_host_config(
            container, template, values, _bindings(ports), mode, template.log_driver or log_driver
        ),
        networking_config=networking,
    )


def _labels(task: Assigned, spec: ServiceSpec, node: Node) -> dict[str, str]:
    return {
        LABEL + "task": "",
        TASK_LABEL: task.id,
        LABEL + "task.name": task.name,
        LABEL + "node.id": node.id,
        LABEL + "service.id": task.service,
        LABEL + "service.name": spec.name,
    }


def _resource_variables(resources: tuple[GenericResource, ...]) -> list[str]:
    """DOCKER_RESOURCE_<KIND>=values, by which a program learns what it was given."""
    found: dict[str, list[str]] = {}
    for each in resources:
        if each.named_resource_spec is not None:
            found.setdefault(each.named_resource_spec.kind, []).append(each.named_resource_spec.value)
        elif each.discrete_resource_spec is not None:
            found.setdefault(each.discrete_resource_spec.kind, []).append(str(each.discrete_resource_spec.value))
    return [f"DOCKER_RESOURCE_{kind.upper()}={','.join(words)}" for kind, words in found.items()]


def _bindings(ports: list[PortConfig]) -> dict[str, list[PortBinding] | None]:
    bindings: dict[str, list[PortBinding] | None] = {}
    for port in ports:
        chosen = PortBinding(host_port=str(port.published_port or ""))
        key = f"{port.target_port}/{port.protocol or 'tcp'}"
        bindings[key] = [*(bindings.get(key) or ()), chosen]
    return bindings


def wanted_networks(spec: ServiceSpec) -> list[NetworkAttachmentConfig]:
    """The networks that a service names."""
    return spec.task_template.networks or spec.networks


def _networks(task: Assigned, spec: ServiceSpec, name_of: Callable[[str], str]) -> tuple[NetworkingConfig, str]:
    """The endpoints of the service's networks, and NetworkMode. Without networks it is the default
    bridge. A task that serves published ports is on the network ingress besides.
    """
    attachments = wanted_networks(spec)
    names = [name_of(each.target) for each in attachments] or ["bridge"]
    if names[0] in ("host", "none"):
        return NetworkingConfig(), names[0]
    endpoints: dict[str, EndpointSettings | None] = {
        name: EndpointSettings(
            # Docker gives no aliases to endpoints of the default bridge. On networks of the swarm
            # they are names of the service.
            aliases=list(each.aliases) if each.aliases and name != "bridge" and not _is_shared(task, each) else None,
            driver_opts=dict(each.driver_opts) or None,
            # the node may have a network of its own with the same name
            network_id=each.target if each.target in task.addresses else "",
        )
        for name, each in zip(names, attachments, strict=False)
    }
    targets = {each.target for each in attachments}
    more = [network for network in task.addresses if network not in targets]
    if more or endpoints:
        endpoints = endpoints or {names[0]: EndpointSettings()}
        # The only other one is ingress.
        opts = {DATAGRAMS_OPTION: "1"} if _serves_datagrams(spec) else None
        endpoints |= {name_of(network): EndpointSettings(driver_opts=opts, network_id=network) for network in more}
    return NetworkingConfig(endpoints_config=endpoints), names[0] if attachments else ""


def _serves_datagrams(spec: ServiceSpec) -> bool:
    """True if it publishes a port of UDP or SCTP by the network ingress."""
    endpoint = spec.endpoint_spec
    return endpoint is not None and any(
        port.publish_mode != HOST and port.protocol not in ("", "tcp") for port in endpoint.ports
    )


def _is_shared(task: Assigned, each: NetworkAttachmentConfig) -> bool:
    return each.target in task.addresses


def _host_config(
    container: ContainerSpec,
    template: TaskSpec,
    values: Mapping[str, Value],
    bindings: dict[str, list[PortBinding] | None],
    mode: str,
    log: Driver | None,
) -> HostConfig:
    resources = template.resources
    limits = resources.limits if resources is not None else None
    memory = limits.memory_bytes if limits is not None else 0
    dns = container.dns_config
    return HostConfig(
        network_mode=mode,
        port_bindings=bindings,
        # Restarts are the leader's decision.
        restart_policy=RestartPolicy(),
        log_config=LogConfig(type=log.name, config=dict(log.options or {})) if log is not None else LogConfig(),
        mounts=[_mount(each, values) for each in container.mounts] or msgspec.UNSET,
        readonly_rootfs=container.read_only,
        group_add=list(container.groups) or None,
        init=container.init if container.init is not None else msgspec.UNSET,
        sysctls=dict(container.sysctls) or msgspec.UNSET,
        cap_add=list(container.capability_add) or None,
        cap_drop=list(container.capability_drop) or None,
        ulimits=list(container.ulimits) or None,
        oom_score_adj=container.oom_score_adj,
        isolation=container.isolation,
        dns=list(dns.nameservers) if dns is not None else [],
        dns_search=list(dns.search) if dns is not None else [],
        dns_options=list(dns.options) if dns is not None else [],
        extra_hosts=_extra_hosts(container.hosts) or None,
        security_opt=_security(container.privileges) or None,
        memory=memory,
        memory_swap=_swap(memory, resources.swap_bytes if resources is not None else None),
        memory_swappiness=resources.memory_swappiness if resources is not None else None,
        nano_cpus=limits.nano_cpus if limits is not None else 0,
        pids_limit=(limits.pids if limits is not None else 0) or None,
    )


def _swap(memory: int, swap: int | None) -> int:
    """MemorySwap counts memory and swap together; -1 is no limit, 0 the engine's default."""
    if swap is None:
        return 0
    return -1 if swap < 0 else memory + swap


def _mount(mount: Mount, values: Mapping[str, Value]) -> Mount:
    """With its templates expanded: source, target, labels and driver options of a new volume."""
    options = mount.volume_options
    if options is not None:
        driver = options.driver_config
        options = msgspec.structs.replace(
            options,
            labels=_expanded(options.labels, values),
            driver_config=driver and msgspec.structs.replace(driver, options=_expanded(driver.options, values)),
        )
    return msgspec.structs.replace(
        mount, source=expand(mount.source, values), target=expand(mount.target, values), volume_options=options
    )


def _expanded(options: dict[str, str] | None, values: Mapping[str, Value]) -> dict[str, str] | None:
    return options and {name: expand(text, values) for name, text in options.items()}


def _extra_hosts(lines: list[str]) -> list[str]:
    """ExtraHosts (`name:address`) of lines as hosts(5) has them: an address, then names."""
    found = []
    for line in lines:
        words = line.split()
        if len(words) < 2:
            raise InvalidParameter(f"ContainerSpec.Hosts: {line[:100]!r}: an address and a name are expected")
        found += [f"{name}:{words[0]}" for name in words[1:]]
    return found


def _security(privileges: Privileges | None) -> list[str]:
    if privileges is None:
        return []
    found = []
    if privileges.no_new_privileges:
        found.append("no-new-privileges=true")
    if (seccomp := privileges.seccomp) is not None:
        if seccomp.mode == "unconfined":
            found.append("seccomp=unconfined")
        elif seccomp.mode == "custom":
            try:
                found.append("seccomp=" + seccomp.profile.decode())
            except UnicodeDecodeError as error:
                raise InvalidParameter("Privileges.Seccomp.Profile: it is not UTF-8") from error
    if privileges.app_armor is not None and privileges.app_armor.mode == "disabled":
        found.append("apparmor=unconfined")
    if (context := privileges.selinux_context) is not None:
        if context.disable:
            found.append("label=disable")
        for name in ("user", "role", "type", "level"):
            if value := getattr(context, name):
                found.append(f"label={name}:{value}")
    return found


__all__ = [
    "HOST",
    "LABEL",
    "SECOND",
    "TASK_LABEL",
    "Node",
    "container_spec",
    "create_body",
    "grace",
    "host_ports",
    "template_values",
    "wanted_networks",
]
