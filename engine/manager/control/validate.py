"""The rules of specs: of services, of the swarm, of secrets and configs. Pure; what depends on
other records of the swarm (existing secrets, networks) is checked by the verbs.

Every refusal names the field and the value. Rules: Docker Engine API 1.24 to 1.55; swarmkit's
control API, whose words clients look for.
"""

from __future__ import annotations

import ipaddress
import posixpath
import re
from collections.abc import Iterable, Mapping
from typing import TypeVar

import msgspec

from engine.common.network_rules import check_hostname, is_word, parsed_address
from engine.common.signals import signal_number
from engine.common.templates import Value, expand
from engine.errors import InvalidParameter, Unimplemented
from engine.images import reference
from engine.logs import drivers
from engine.manager.constraints import parse_all, spread_key
from engine.swarm_session.clock import SECOND
from engine.swarm_session.states import Availability
from engine.wire.containers import Healthcheck, LogConfig, Mount, Ulimit, VolumeOptions
from engine.wire.nodes import GenericResource, Resources
from engine.wire.secrets import ConfigSpec, SecretSpec
from engine.wire.services import (
    EndpointSpec,
    ReplicatedJob,
    ReplicatedService,
    ServiceMode,
    ServiceSpec,
    UpdateConfig,
)
from engine.wire.swarm import (
    CAConfig,
    DispatcherConfig,
    Driver,
    InitRequest,
    OrchestrationConfig,
    RaftConfig,
    SwarmSpec,
)
from engine.wire.tasks import (
    ConfigReference,
    ContainerSpec,
    DNSConfig,
    FileTarget,
    Limits,
    NetworkAttachmentConfig,
    Placement,
    PortConfig,
    Privileges,
    ResourceRequirements,
    RestartPolicy,
    SecretReference,
    TaskSpec,
)

T = TypeVar("T")

MOST = (1 << 63) - 1
"""The largest number of the API's integers."""
MOST_TASKS = 100_000
"""Of one service. A mistyped number must not fill the managers' memory with tasks."""
MOST_PORTS = 1000
"""Of one service. An update that replaces all of them has two changes and two comparisons for each
in its transaction, of which etcd takes 4,096 (`member.py`).
"""
MILLISECOND = 1_000_000
HOUR = 3600 * SECOND

_SERVICE_NAME = re.compile(r"[a-zA-Z0-9]([a-zA-Z0-9_.-]*[a-zA-Z0-9])?", re.ASCII)
_DATA_NAME = re.compile(r"[a-zA-Z0-9]([a-zA-Z0-9_.-]*[a-zA-Z0-9])?", re.ASCII)
_VOLUME_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]*", re.ASCII)
_NUMBER = re.compile(r"\d{1,10}", re.ASCII)

_SECRET_LIMIT = 500 * 1024
_CONFIG_LIMIT = 1000 * 1024


def refuse(field: str, value: object, rule: str) -> InvalidParameter:
    """The refusal of one field. The value is shortened."""
    text = repr(value) if isinstance(value, str) else str(value)
    return InvalidParameter(f"{field}: invalid value {text[:200]}: {rule}")


def _one_of(field: str, value: str, *words: str) -> None:
    if value not in words:
        raise refuse(field, value, f"one of {', '.join(filter(None, words))} is expected")


def _range(field: str, value: int | None, low: int = 0, high: int = MOST, rule: str = "") -> None:
    if value is not None and not low <= value <= high:
        negative = value < 0 == low
        limits = f"at least {low}" if high == MOST else f"from {low} to {high}"
        raise refuse(field, value, rule or ("must not be negative" if negative else f"must be {limits}"))


def _no_nul(field: str, texts: Iterable[str]) -> None:
    for text in texts:
        if "\0" in text:
            raise refuse(field, text, "must not contain a NUL character")


# --- services -------------------------------------------------------------------------------------


def service_name(name: str) -> None:
    """Raises InvalidParameter unless it can be part of a DNS name."""
    if not name:
        raise InvalidParameter("Name: the name of the service must be provided")
    object_name("service", name)


def object_name(what: str, name: str) -> str:
    """The name, if it can be part of a DNS name. Raises InvalidParameter."""
    if len(name) > 63:
        raise refuse("Name", name, f"{what}: name must be 63 characters or fewer")
    if not _SERVICE_NAME.fullmatch(name):
        raise refuse("Name", name, f"{what}: name must be valid as a DNS name component")
    return name


def service_spec(spec: ServiceSpec) -> ServiceSpec:
    """The spec with what Docker fills in: one replica, the protocol of ports, the condition of
    restarts. Networks stand in the template.

    Raises InvalidParameter; Unimplemented for what this version does not have.
    """
    service_name(spec.name)
    labels("Labels", spec.labels)
    template = _task_spec(spec.task_template, spec.networks, _template_values(spec))
    mode = _mode(spec.mode)
    job = mode.replicated_job is not None or mode.global_job is not None
    if job and spec.update_config is not None:
        raise InvalidParameter("UpdateConfig: Jobs may not have an update config")
    endpoint = _endpoint_spec(spec.endpoint_spec)
    if endpoint is not None and any(port.publish_mode == "ingress" for port in endpoint.ports):
        for network in template.networks:
            if network.target in ("host", "none"):
                rule = "a service that publishes ports in the mode ingress cannot use it"
                raise refuse("TaskTemplate.Networks", network.target, rule)
    return msgspec.structs.replace(
        spec,
        task_template=template,
        mode=mode,
        networks=[],
        update_config=_update_config("UpdateConfig", spec.update_config, "pause", "continue", "rollback"),
        rollback_config=_update_config("RollbackConfig", spec.rollback_config, "pause", "continue"),
        endpoint_spec=endpoint,
    )


def _mode(mode: ServiceMode) -> ServiceMode:
    modes = [
        name
        for name, value in (
            ("Replicated", mode.replicated),
            ("Global", mode.global_),
            ("ReplicatedJob", mode.replicated_job),
            ("GlobalJob", mode.global_job),
        )
        if value is not None
    ]
    if len(modes) > 1:
        raise refuse("Mode", " and ".join(modes), "must specify only one service mode")
    if mode.global_ is not None or mode.global_job is not None:
        return mode
    if mode.replicated_job is not None:
        most, total = mode.replicated_job.max_concurrent, mode.replicated_job.total_completions
        _range("Mode.ReplicatedJob.MaxConcurrent", most, high=MOST_TASKS)
        _range("Mode.ReplicatedJob.TotalCompletions", total, high=MOST_TASKS)
        most = 1 if most is None else most
        total = most if total is None else total
        return ServiceMode(replicated_job=ReplicatedJob(max_concurrent=most, total_completions=total))
    replicas = None if mode.replicated is None else mode.replicated.replicas
    rule = f"Number of replicas must be non-negative, and at most {MOST_TASKS}"
    _range("Mode.Replicated.Replicas", replicas, high=MOST_TASKS, rule=rule)
    return ServiceMode(replicated=ReplicatedService(1 if replicas is None else replicas))


def _update_config(field: str, config: UpdateConfig | None, *actions: str) -> UpdateConfig | None:
    if config is None:
        return None
    _range(f"{field}.Parallelism", config.parallelism)
    _range(f"{field}.Delay", config.delay)
    _range(f"{field}.Monitor", config.monitor)
    _one_of(f"{field}.FailureAction", config.failure_action, "", *actions)
    _one_of(f"{field}.Order", config.order, "", "stop-first", "start-first")
    if not 0 <= config.max_failure_ratio <= 1:
        raise refuse(f"{field}.MaxFailureRatio", config.max_failure_ratio, "cannot be less than 0 or bigger than 1")
    return msgspec.structs.replace(
        config, failure_action=config.failure_action or "pause", order=config.order or "stop-first"
    )


def _endpoint_spec(spec: EndpointSpec | None) -> EndpointSpec | None:
    if spec is None:
        return None
    _one_of("EndpointSpec.Mode", spec.mode, "", "vip", "dnsrr")
    if len(spec.ports) > MOST_PORTS:
        raise InvalidParameter(f"EndpointSpec.Ports: {len(spec.ports)} ports, at most {MOST_PORTS} are allowed")
    ports = [_port(f"EndpointSpec.Ports[{number}]", port) for number, port in enumerate(spec.ports)]
    taken: set[tuple[str, int]] = set()
    for number, port in enumerate(ports):
        field = f"EndpointSpec.Ports[{number}]"
        key = port.protocol, port.published_port
        if port.published_port and key in taken:
            raise refuse(f"{field}.PublishedPort", port.published_port, "duplicate published ports provided")
        taken.add(key)
        if port.publish_mode == "ingress" and spec.mode == "dnsrr":
            rule = "EndpointSpec: port published with ingress mode can't be used with dnsrr mode"
            raise refuse(f"{field}.PublishMode", "ingress", rule)
    return msgspec.structs.replace(spec, mode=spec.mode or "vip", ports=ports)


def _port(field: str, port: PortConfig) -> PortConfig:
    _one_of(f"{field}.Protocol", port.protocol, "", "tcp", "udp", "sctp")
    _one_of(f"{field}.PublishMode", port.publish_mode, "", "ingress", "host")
    _range(f"{field}.TargetPort", port.target_port, 1, 65535)
    _range(f"{field}.PublishedPort", port.published_port, 0, 65535)
    return msgspec.structs.replace(port, protocol=port.protocol or "tcp", publish_mode=port.publish_mode or "ingress")


# --- task templates -------------------------------------------------------------------------------


def _template_values(spec: ServiceSpec) -> Mapping[str, Value]:
    """The names that a template may use, with values as on some node."""
    return {
        "Service": {"ID": "x", "Name": spec.name, "Labels": dict(spec.labels)},
        "Node": {"ID": "x", "Hostname": "x", "Platform": {"Architecture": "x86_64", "OS": "linux"}},
        "Task": {"ID": "x", "Name": f"{spec.name}.1.x", "Slot": "1"},
    }


def _expand(field: str, text: str, values: Mapping[str, Value]) -> str:
    """As on some node. Raises InvalidParameter for a template that no node can expand."""
    try:
        return expand(text, values)
    except InvalidParameter as error:
        raise InvalidParameter(f"{field}: {error.message}") from None


def _task_spec(spec: TaskSpec, networks: list[NetworkAttachmentConfig], values: Mapping[str, Value]) -> TaskSpec:
    if spec.runtime == "plugin" or spec.plugin_spec is not None:
        raise Unimplemented("TaskTemplate.Runtime: services of plugins are not supported by this version")
    if spec.runtime == "attachment" or spec.network_attachment_spec is not None:
        raise refuse("TaskTemplate.Runtime", "attachment", "a service cannot be an attachment of a container")
    _one_of("TaskTemplate.Runtime", spec.runtime, "", "container")
    if spec.container_spec is None:
        raise InvalidParameter("TaskTemplate.ContainerSpec: missing in service spec")
    if spec.networks and networks and spec.networks != networks:
        raise InvalidParameter("Networks: differs from TaskTemplate.Networks: only one of them may be given")
    attached = spec.networks or networks
    for number, network in enumerate(attached):
        if not network.target:
            raise refuse(f"TaskTemplate.Networks[{number}].Target", "", "the name or id of a network is expected")
    targets = [network.target for network in attached]
    if len(set(targets)) < len(targets):
        raise refuse("TaskTemplate.Networks", targets, "duplicate network")
    if len(targets) > 1 and not {"host", "none"}.isdisjoint(targets):
        raise refuse("TaskTemplate.Networks", targets, "the network host or none must be the only one")
    _resources(spec.resources)
    _placement(spec.placement)
    _range("TaskTemplate.ForceUpdate", spec.force_update, high=(1 << 64) - 1)
    _log_driver("TaskTemplate.LogDriver", spec.log_driver)
    return msgspec.structs.replace(
        spec,
        container_spec=_container_spec(spec.container_spec, values),
        restart_policy=_restart_policy(spec.restart_policy),
        networks=attached,
        runtime="container",
    )


def _restart_policy(policy: RestartPolicy | None) -> RestartPolicy | None:
    if policy is None:
        return None
    field = "TaskTemplate.RestartPolicy"
    _one_of(f"{field}.Condition", policy.condition, "", "none", "on-failure", "any")
    _range(f"{field}.Delay", policy.delay, rule="restart-delay cannot be negative")
    _range(f"{field}.Window", policy.window, rule="restart-window cannot be negative")
    _range(f"{field}.MaxAttempts", policy.max_attempts)
    return msgspec.structs.replace(policy, condition=policy.condition or "any", max_attempts=policy.max_attempts or 0)


def _placement(placement: Placement | None) -> None:
    if placement is None:
        return
    try:
        parse_all(placement.constraints)
    except InvalidParameter as error:
        raise InvalidParameter(f"TaskTemplate.Placement.Constraints: {error.message}") from None
    _range("TaskTemplate.Placement.MaxReplicas", placement.max_replicas)
    for number, preference in enumerate(placement.preferences):
        field = f"TaskTemplate.Placement.Preferences[{number}].Spread"
        if preference.spread is None:
            raise InvalidParameter(f"{field}: a preference needs the field Spread")
        try:
            spread_key(preference.spread.spread_descriptor)
        except InvalidParameter as error:
            raise InvalidParameter(f"{field}.SpreadDescriptor: {error.message}") from None


def _resources(resources: ResourceRequirements | None) -> None:
    if resources is None:
        return
    field = "TaskTemplate.Resources"
    if resources.limits is not None:
        _amounts(f"{field}.Limits", resources.limits)
        _range(f"{field}.Limits.Pids", resources.limits.pids)
    if resources.reservations is not None:
        _amounts(f"{field}.Reservations", resources.reservations)
        for number, item in enumerate(resources.reservations.generic_resources):
            _generic(f"{field}.Reservations.GenericResources[{number}]", item)
    _range(f"{field}.SwapBytes", resources.swap_bytes, -1)
    _range(f"{field}.MemorySwappiness", resources.memory_swappiness, -1, 100)
    if resources.swap_bytes is not None and not (resources.limits and resources.limits.memory_bytes):
        raise refuse(f"{field}.SwapBytes", resources.swap_bytes, "it needs Limits.MemoryBytes")


def _amounts(field: str, of: Limits | Resources) -> None:
    if of.nano_cpus and not 1_000_000 <= of.nano_cpus <= MOST:
        raise InvalidParameter(f"{field}.NanoCPUs: invalid cpu value {of.nano_cpus / SECOND:g}: Must be at least 0.001")
    if of.memory_bytes and not 4 << 20 <= of.memory_bytes <= MOST:
        raise InvalidParameter(f"{field}.MemoryBytes: invalid memory value {of.memory_bytes}: Must be at least 4MiB")


def _generic(field: str, item: GenericResource) -> None:
    named, discrete = item.named_resource_spec, item.discrete_resource_spec
    if (named is None) == (discrete is None):
        raise InvalidParameter(f"{field}: one of NamedResourceSpec and DiscreteResourceSpec is expected")
    if named is not None:
        raise refuse(
            f"{field}.NamedResourceSpec",
            f"{named.kind}={named.value}",
            "invalid generic-resource request: a service reserves a number, by DiscreteResourceSpec",
        )
    assert discrete is not None
    if not discrete.kind:
        raise refuse(f"{field}.DiscreteResourceSpec.Kind", discrete.kind, "it must not be empty")
    _range(f"{field}.DiscreteResourceSpec.Value", discrete.value, 1)


# --- containers -----------------------------------------------------------------------------------


def _container_spec(spec: ContainerSpec, values: Mapping[str, Value]) -> ContainerSpec:
    field = "TaskTemplate.ContainerSpec"
    _image(f"{field}.Image", spec.image)
    labels(f"{field}.Labels", spec.labels)
    for texts, name in (
        (spec.command, "Command"),
        (spec.args, "Args"),
        (spec.env, "Env"),
        ((spec.dir,), "Dir"),
        ((spec.user,), "User"),
        ((spec.hostname,), "Hostname"),
    ):
        _no_nul(f"{field}.{name}", texts)
    if hostname := _expand(f"{field}.Hostname", spec.hostname, values):
        try:
            check_hostname(hostname)
        except InvalidParameter as error:
            raise InvalidParameter(f"{field}.Hostname: {error.message}") from None
    for variable in spec.env:
        _expand(f"{field}.Env", variable, values)
        if not variable or variable.startswith("="):
            raise refuse(f"{field}.Env", variable, "NAME=value or NAME is expected")
    if spec.dir and not spec.dir.startswith("/"):
        raise refuse(f"{field}.Dir", spec.dir, "it must be an absolute path")
    _range(f"{field}.StopGracePeriod", spec.stop_grace_period)
    _range(f"{field}.OomScoreAdj", spec.oom_score_adj, -1000, 1000)
    if spec.stop_signal:
        try:
            signal_number(spec.stop_signal)
        except InvalidParameter:
            rule = "the name or number of a signal is expected"
            raise refuse(f"{field}.StopSignal", spec.stop_signal, rule) from None
    if spec.isolation not in ("", "default"):
        _one_of(f"{field}.Isolation", spec.isolation, "process", "hyperv")
        raise Unimplemented(f"{field}.Isolation: {spec.isolation!r} exists on Windows only")
    _privileges(f"{field}.Privileges", spec.privileges)
    _healthcheck(f"{field}.Healthcheck", spec.healthcheck)
    _dns(f"{field}.DNSConfig", spec.dns_config)
    for line in spec.hosts:
        words = [word for word in re.split("[ \t]", line) if word]
        if (
            len(words) < 2
            or not (_is_address(words[0]) or words[0] == "host-gateway")
            or not all(is_word(name) for name in words[1:])
        ):
            raise refuse(f"{field}.Hosts", line, "an address and a name are expected, as in /etc/hosts")
    for limit in spec.ulimits:
        _ulimit(f"{field}.Ulimits", limit)
    _mounts(f"{field}.Mounts", spec.mounts, values)
    _secrets(f"{field}.Secrets", spec.secrets)
    _configs(f"{field}.Configs", spec.configs)
    return spec


def _image(field: str, image: str) -> None:
    if not image:
        raise InvalidParameter(f"{field}: image reference must be provided")
    try:
        reference.parse(image)
    except InvalidParameter as error:
        raise refuse(field, image, f"not a valid repository/tag: {error.message}") from None


def _privileges(field: str, privileges: Privileges | None) -> None:
    if privileges is None:
        return
    if privileges.credential_spec is not None:
        raise Unimplemented(f"{field}.CredentialSpec: credential specs exist on Windows only")
    if (seccomp := privileges.seccomp) is not None:
        _one_of(f"{field}.Seccomp.Mode", seccomp.mode, "", "default", "unconfined", "custom")
        if seccomp.mode == "custom" and not seccomp.profile:
            raise refuse(f"{field}.Seccomp.Profile", "", "the mode custom needs a profile")
        if seccomp.mode != "custom" and seccomp.profile:
            raise refuse(f"{field}.Seccomp.Mode", seccomp.mode, "a profile needs the mode custom")
        if seccomp.profile:
            try:
                msgspec.json.decode(seccomp.profile, type=dict)
            except (msgspec.DecodeError, UnicodeError, RecursionError):
                raise InvalidParameter(f"{field}.Seccomp.Profile: a JSON object is expected") from None
    if privileges.app_armor is not None:
        _one_of(f"{field}.AppArmor.Mode", privileges.app_armor.mode, "", "default", "disabled")
    if (selinux := privileges.selinux_context) is not None and selinux.disable:
        others = selinux.user or selinux.role or selinux.type or selinux.level
        if others:
            raise refuse(f"{field}.SELinuxContext", others, "nothing else may be given when it is disabled")


def _healthcheck(field: str, check: Healthcheck | None) -> None:
    if check is None:
        return
    for value, name in (
        (check.interval, "Interval"),
        (check.timeout, "Timeout"),
        (check.start_period, "StartPeriod"),
        (check.start_interval, "StartInterval"),
    ):
        _range(f"{field}.{name}", value, rule=f"{name} in HealthConfig cannot be negative" if value < 0 else "")
        if value and value < MILLISECOND:
            raise refuse(f"{field}.{name}", value, f"{name} in HealthConfig cannot be less than 1ms")
    _range(f"{field}.Retries", check.retries, rule="Retries in HealthConfig cannot be negative")
    if check.test:
        _one_of(f"{field}.Test", check.test[0], "NONE", "CMD", "CMD-SHELL")


def _dns(field: str, config: DNSConfig | None) -> None:
    if config is None:
        return
    for address in config.nameservers:
        if not _is_address(address):
            raise refuse(f"{field}.Nameservers", address, "an IP address is expected")
    for name, words in (("Search", config.search), ("Options", config.options)):
        for word in words:
            if not is_word(word):
                raise refuse(f"{field}.{name}", word, "a word without blanks and control characters is expected")


def _is_address(text: str) -> bool:
    try:
        parsed_address(text, "", zone=True)
    except InvalidParameter:
        return False
    return True


def _ulimit(field: str, limit: Ulimit) -> None:
    if not limit.name:
        raise refuse(f"{field}.Name", limit.name, "the name of a limit is expected")
    _range(f"{field}.Soft", limit.soft, -1)
    _range(f"{field}.Hard", limit.hard, -1)
    if limit.hard != -1 and (limit.soft > limit.hard or limit.soft == -1):
        raise refuse(f"{field}.Soft", limit.soft, f"it is above the hard limit {limit.hard} of {limit.name}")


_PROPAGATIONS = ("", "private", "rprivate", "shared", "rshared", "slave", "rslave")


def _mounts(field: str, mounts: list[Mount], values: Mapping[str, Value]) -> None:
    targets: set[str] = set()
    for number, mount in enumerate(mounts):
        _mount(f"{field}[{number}]", mount, values)
        target = mount.target.rstrip("/")
        if target in targets:
            raise refuse(f"{field}[{number}].Target", mount.target, f"duplicate mount point: {mount.target}")
        targets.add(target)


def _mount(field: str, mount: Mount, values: Mapping[str, Value]) -> None:
    if mount.type == "cluster":
        raise Unimplemented(f"{field}.Type: cluster volumes (CSI) are not supported by this version")
    if mount.type not in ("bind", "volume", "tmpfs", "image"):
        raise refuse(f"{field}.Type", mount.type, "invalid MountType: one of bind, volume, tmpfs, image is expected")
    _no_nul(field, (mount.target, mount.source))
    target, source = _expand(f"{field}.Target", mount.target, values), _expand(f"{field}.Source", mount.source, values)
    if not target.startswith("/") or not target.strip("/"):
        raise refuse(f"{field}.Target", mount.target, "invalid mount target, must be an absolute path below /")
    for name, options, kind in (
        ("BindOptions", mount.bind_options, "bind"),
        ("VolumeOptions", mount.volume_options, "volume"),
        ("TmpfsOptions", mount.tmpfs_options, "tmpfs"),
        ("ImageOptions", mount.image_options, "image"),
    ):
        if mount.type != kind and options is not None:
            raise refuse(f"{field}.{name}", mount.type, f"only a mount of type {kind} has them")
    if mount.type == "bind":
        if not source.startswith("/"):
            raise refuse(f"{field}.Source", mount.source, "invalid bind mount source, must be an absolute path")
        if mount.bind_options is not None:
            _one_of(f"{field}.BindOptions.Propagation", mount.bind_options.propagation, *_PROPAGATIONS)
    elif mount.type == "volume":
        if source.startswith("/"):
            raise refuse(f"{field}.Source", mount.source, "invalid volume mount source, must not be an absolute path")
        if source and not _VOLUME_NAME.fullmatch(source):
            raise refuse(f"{field}.Source", mount.source, "not a valid name of a volume")
        _volume_options(f"{field}.VolumeOptions", mount.volume_options, values)
    elif mount.type == "tmpfs":
        if source:
            raise refuse(f"{field}.Source", mount.source, "invalid tmpfs source, source must be empty")
        if mount.tmpfs_options is not None:
            _range(f"{field}.TmpfsOptions.SizeBytes", mount.tmpfs_options.size_bytes)
            _range(f"{field}.TmpfsOptions.Mode", mount.tmpfs_options.mode, 0, (1 << 32) - 1)
    else:
        _image(f"{field}.Source", mount.source)


def _volume_options(field: str, options: VolumeOptions | None, values: Mapping[str, Value]) -> None:
    if options is None:
        return
    driver = options.driver_config
    for text in (options.labels or {}).values():
        _expand(f"{field}.Labels", text, values)
    for text in ((driver.options if driver is not None else None) or {}).values():
        _expand(f"{field}.DriverConfig.Options", text, values)


# --- references to secrets and configs ------------------------------------------------------------


def _secrets(field: str, references: list[SecretReference]) -> None:
    taken: dict[str, str] = {}
    for number, one in enumerate(references):
        here = f"{field}[{number}]"
        if not one.secret_id or not one.secret_name:
            raise InvalidParameter(f"{here}: malformed secret reference: SecretID and SecretName are required")
        if one.file is None:
            raise InvalidParameter(f"{here}.File: malformed secret reference, no target provided")
        _file_target(f"{here}.File", "secret", one.file, one.secret_name, taken)


def _configs(field: str, references: list[ConfigReference]) -> None:
    taken: dict[str, str] = {}
    for number, one in enumerate(references):
        here = f"{field}[{number}]"
        if not one.config_id or not one.config_name:
            raise InvalidParameter(f"{here}: malformed config reference: ConfigID and ConfigName are required")
        if one.file is not None and one.runtime is not None:
            raise InvalidParameter(f"{here}: cannot specify both File and Runtime")
        if one.file is None and one.runtime is None:
            raise InvalidParameter(f"{here}: malformed config reference, either File or Runtime should be set")
        if one.file is not None:
            _file_target(f"{here}.File", "config", one.file, one.config_name, taken)


def _file_target(field: str, what: str, target: FileTarget, name: str, taken: dict[str, str]) -> None:
    if not target.name.strip("/") or "\0" in target.name or ".." in target.name.split("/"):
        raise refuse(
            f"{field}.Name", target.name, f"malformed file {what} reference, invalid target file name provided"
        )
    path = posixpath.normpath(target.name)  # `a` and `./a` are one file
    if path in taken:
        raise InvalidParameter(
            f"{field}.Name: {what} references '{taken[path]}' and '{name}' have a conflicting target: '{target.name}'"
        )
    taken[path] = name
    for text, which in ((target.uid, "UID"), (target.gid, "GID")):
        if text and not (_NUMBER.fullmatch(text) and int(text) < 1 << 32):
            raise refuse(f"{field}.{which}", text, "a number is expected")
    _range(f"{field}.Mode", target.mode, 0, (1 << 32) - 1)


# --- secrets and configs --------------------------------------------------------------------------


def data_name(name: str) -> None:
    """The name of a secret or config."""
    if not name or len(name) > 64 or not _DATA_NAME.fullmatch(name):
        raise InvalidParameter(
            f"Name: invalid name {name[:100]!r}, only 64 [a-zA-Z0-9-_.] characters allowed, "
            "and the start and end character must be [a-zA-Z0-9]"
        )


def secret_spec(spec: SecretSpec) -> None:
    """Raises InvalidParameter, Unimplemented."""
    if spec.driver is not None and spec.driver.name:
        raise Unimplemented(f"Driver: secrets of the driver {spec.driver.name!r} are not supported by this version")
    data_name(spec.name)
    labels("Labels", spec.labels)
    _data("secret", spec, _SECRET_LIMIT)


def config_spec(spec: ConfigSpec) -> None:
    """Raises InvalidParameter."""
    data_name(spec.name)
    labels("Labels", spec.labels)
    _data("config", spec, _CONFIG_LIMIT)


def _data(what: str, spec: SecretSpec | ConfigSpec, limit: int) -> None:
    if not 0 < len(spec.data) < limit:
        raise InvalidParameter(
            f"Data: {what} data must be larger than 0 and less than {limit} bytes, not {len(spec.data)}"
        )
    if spec.templating is not None:
        _one_of("Templating.Name", spec.templating.name, "", "golang")


# --- the swarm ------------------------------------------------------------------------------------

DEFAULTS = SwarmSpec(
    name="default",
    orchestration=OrchestrationConfig(task_history_retention_limit=5),
    raft=RaftConfig(
        snapshot_interval=10_000,
        keep_old_snapshots=0,
        log_entries_for_slow_followers=500,
        election_tick=10,
        heartbeat_tick=1,
    ),
    dispatcher=DispatcherConfig(heartbeat_period=5 * SECOND),
    ca_config=CAConfig(node_cert_expiry=90 * 24 * HOUR),
)


def swarm_spec(spec: SwarmSpec, current: SwarmSpec | None = None) -> SwarmSpec:
    """The whole spec that a request means. A value of zero is the default of a new swarm, and means
    unchanged in an update, as clients send only what they set.

    Raises InvalidParameter; Unimplemented for autolock.
    """
    old = current or DEFAULTS
    _one_of("Name", spec.name, "", "default")
    labels("Labels", spec.labels)
    if spec.encryption_config.auto_lock_managers:
        raise Unimplemented("EncryptionConfig.AutoLockManagers: locked managers are not supported by this version")
    limit = spec.orchestration.task_history_retention_limit
    if limit is None or (limit == 0 and current is None):
        limit = old.orchestration.task_history_retention_limit
    _range("CAConfig.NodeCertExpiry", spec.ca_config.node_cert_expiry)
    expiry = spec.ca_config.node_cert_expiry or old.ca_config.node_cert_expiry
    if expiry < HOUR:
        raise refuse("CAConfig.NodeCertExpiry", expiry, "minimum certificate expiry time is: 1h0m0s")
    for number, ca in enumerate(spec.ca_config.external_cas):
        field = f"CAConfig.ExternalCAs[{number}]"
        _one_of(f"{field}.Protocol", ca.protocol.lower(), "", "cfssl")
        if not re.match(r"https?://[^/]", ca.url):
            raise refuse(f"{field}.URL", ca.url, "an http or https URL is expected")
    _range("CAConfig.ForceRotate", spec.ca_config.force_rotate, high=(1 << 64) - 1)
    _range("Dispatcher.HeartbeatPeriod", spec.dispatcher.heartbeat_period)
    period = spec.dispatcher.heartbeat_period or old.dispatcher.heartbeat_period
    _log_driver("TaskDefaults.LogDriver", spec.task_defaults.log_driver)
    return msgspec.structs.replace(
        spec,
        name="default",
        orchestration=OrchestrationConfig(task_history_retention_limit=limit),
        raft=_raft(spec.raft, old.raft),
        dispatcher=DispatcherConfig(heartbeat_period=period),
        ca_config=msgspec.structs.replace(spec.ca_config, node_cert_expiry=expiry),
    )


def _log_driver(field: str, driver: Driver | None) -> None:
    """Options are checked for the drivers of this engine. Nodes may have others."""
    if driver is None:
        return
    if not driver.name and driver.options:
        raise refuse(f"{field}.Name", "", "options need the name of a driver")
    if driver.name in drivers.DRIVERS:
        try:
            drivers.validate(LogConfig(type=driver.name, config=driver.options or {}))
        except InvalidParameter as error:
            raise InvalidParameter(f"{field}: {error.message}") from error


def availability(word: str) -> Availability:
    """Of a node that joins; active without a word. Raises InvalidParameter."""
    words = {one.label: one for one in Availability}
    _one_of("Availability", word.lower(), "", *words)
    return words[word.lower() or "active"]


def init_request(request: InitRequest) -> None:
    """The rules of the fields beside the spec, but for the addresses, which the daemon chooses.

    Raises InvalidParameter, Unimplemented.
    """
    availability(request.availability)
    if request.auto_lock_managers:
        raise Unimplemented("AutoLockManagers: locked managers are not supported by this version")
    if request.data_path_port:
        _range("DataPathPort", request.data_path_port, 1024, 49151)
    size = request.subnet_size or 24
    _range("SubnetSize", size, 1, 29)
    pools: list[ipaddress.IPv4Network] = []
    for text in request.default_addr_pool:
        try:
            pool = ipaddress.IPv4Network(text.strip(), strict=False)
        except ValueError:
            raise refuse("DefaultAddrPool", text, "an IPv4 subnet such as 10.0.0.0/8 is expected") from None
        if size < pool.prefixlen:
            raise refuse("SubnetSize", size, f"the pool {text} is smaller than one subnet")
        if any(pool.overlaps(other) for other in pools):
            raise refuse("DefaultAddrPool", text, "it overlaps another pool")
        pools.append(pool)


def _raft(raft: RaftConfig, old: RaftConfig) -> RaftConfig:
    for value, name in (
        (raft.snapshot_interval, "SnapshotInterval"),
        (raft.keep_old_snapshots, "KeepOldSnapshots"),
        (raft.log_entries_for_slow_followers, "LogEntriesForSlowFollowers"),
        (raft.election_tick, "ElectionTick"),
        (raft.heartbeat_tick, "HeartbeatTick"),
    ):
        _range(f"Raft.{name}", value, high=(1 << 32) - 1)
    election, heartbeat = raft.election_tick or old.election_tick, raft.heartbeat_tick or old.heartbeat_tick
    if election <= heartbeat:
        raise refuse("Raft.ElectionTick", election, f"it must be greater than HeartbeatTick ({heartbeat})")
    return RaftConfig(
        snapshot_interval=raft.snapshot_interval or old.snapshot_interval,
        keep_old_snapshots=(old.keep_old_snapshots if raft.keep_old_snapshots is None else raft.keep_old_snapshots),
        log_entries_for_slow_followers=raft.log_entries_for_slow_followers or old.log_entries_for_slow_followers,
        election_tick=election,
        heartbeat_tick=heartbeat,
    )


def labels(field: str, given: Mapping[str, str]) -> None:
    """Raises InvalidParameter for a label without a key."""
    if "" in given:
        raise refuse(field, given[""], "a label needs a key")


# --- what holds without a value -------------------------------------------------------------------

STOP_GRACE_PERIOD = 10 * SECOND
RESTART_POLICY = RestartPolicy(condition="any", delay=5 * SECOND, max_attempts=0)
NO_RESOURCES = ResourceRequirements(limits=Limits(), reservations=Resources())
NO_PLACEMENT = Placement()
NO_DNS = DNSConfig()
