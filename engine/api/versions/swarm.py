"""What versions changed in the objects of a swarm: swarm, nodes, services, tasks, secrets, configs.

These rows are one module, and not in the files of their versions, because an engine outside of a
swarm does not load them (`swarm_mode.py`). Newest first.

Fields that came with 1.25 to 1.38 are shown from 1.25 on, as Docker shows them. A client that reads
a spec, changes a field and sends the spec back would otherwise lose what it does not know. Fields
that came later are dropped from the requests of older versions, so they are not shown there either.

Requests of 1.24 that have a field with a meaning are obeyed or refused by name; nothing is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
from msgspec import UNSET

from engine.api.versions.change import Change, Upgrade, ignoring, without
from engine.errors import InvalidParameter
from engine.wire.nodes import NodeDescription, NodeStatus, Resources
from engine.wire.secrets import ConfigSpec, SecretSpec
from engine.wire.services import Service, ServiceCreated, ServiceMode, ServiceSpec, UpdateConfig
from engine.wire.swarm import CAConfig, ClusterInfo, ExternalCA, InitRequest, JoinRequest, Swarm, SwarmSpec
from engine.wire.tasks import (
    ConfigReference,
    ContainerSpec,
    CredentialSpec,
    Limits,
    Placement,
    PortConfig,
    Privileges,
    ResourceRequirements,
    Task,
    TaskSpec,
    TaskStatus,
)

CONTAINER = "TaskTemplate.ContainerSpec"


def values(request: Mapping[str, Any], path: str) -> Iterator[Any]:
    """What a body has at a path. A part of it that is a list yields the values of each element."""
    name, dot, below = path.partition(".")
    found = request.get(name)
    for each in found if isinstance(found, list) and dot else [found]:
        if not dot:
            if each is not None:
                yield each
        elif isinstance(each, dict):
            yield from values(each, below)


def dropping(lists: str, field: str) -> Upgrade:
    """Ignores a field of each element of a list."""

    def drop(request: dict[str, Any]) -> None:
        for elements in values(request, lists):
            for each in elements if isinstance(elements, list) else ():
                place, parent, name = each, *field.rpartition(".")[::2]
                if parent and isinstance(each, dict):
                    place = each.get(parent)
                if isinstance(place, dict):
                    place.pop(name, None)

    return drop


def refusing(path: str, version: str, means: Callable[[Any], bool] = bool) -> Upgrade:
    """Refuses a body whose field has a meaning there (`means`). Zero values have none."""

    def refuse(request: dict[str, Any]) -> None:
        for value in values(request, path):
            if means(value):
                shown = f": {value!r:.100}" if isinstance(value, (str, int)) else ""
                raise InvalidParameter(f"{path}{shown} needs API v{version} or newer")

    return refuse


def _networks_of_service(request: dict[str, Any]) -> None:
    """Networks of the service itself, when its tasks have none."""
    networks = request.pop("Networks", None)
    if networks:
        template = request.setdefault("TaskTemplate", {})
        if isinstance(template, dict) and not template.get("Networks"):
            template["Networks"] = networks


def _template_refused(what: str) -> Upgrade:
    def refuse(request: dict[str, Any]) -> None:
        if request.get("Templating"):
            raise InvalidParameter(f"Templating: {what} templating needs API v1.37 or newer")

    return refuse


def _ended(state: str) -> str:
    return "shutdown" if state in ("remove", "orphaned") else state


def _external_ca(ca: CAConfig) -> Any:
    """The one external CA of 1.24's document."""
    return msgspec.structs.replace(ca.external_cas[0], ca_cert="") if ca.external_cas else UNSET


def _of_swarm(since: str, words: str, *fields: str) -> tuple[Change, ...]:
    """Rows of GET /swarm, and of the same object in /info."""
    return tuple(Change(since, words, of=of, downgrade=without(*fields)) for of in (Swarm, ClusterInfo))


CHANGES = (
    # 1.52
    Change(
        "1.52",
        "services take SwapBytes and MemorySwappiness",
        of=ServiceSpec,
        upgrade=ignoring("TaskTemplate.Resources.SwapBytes", "TaskTemplate.Resources.MemorySwappiness"),
        down_to="1.25",
    ),
    Change(
        "1.52",
        "services show SwapBytes and MemorySwappiness",
        of=ResourceRequirements,
        downgrade=without("SwapBytes", "MemorySwappiness"),
    ),
    # 1.46
    Change(
        "1.46",
        "services take OomScoreAdj",
        of=ServiceSpec,
        upgrade=ignoring(f"{CONTAINER}.OomScoreAdj"),
        down_to="1.25",
    ),
    Change(
        "1.46",
        "services take TmpfsOptions.Options of mounts",
        of=ServiceSpec,
        upgrade=dropping(f"{CONTAINER}.Mounts", "TmpfsOptions.Options"),
        down_to="1.25",
    ),
    Change(
        "1.46",
        "services show OomScoreAdj and TmpfsOptions.Options",
        of=ContainerSpec,
        downgrade=without("OomScoreAdj", "Mounts.TmpfsOptions.Options"),
    ),
    # 1.44
    Change(
        "1.44",
        "the networks of a service are those of its tasks",
        of=ServiceSpec,
        upgrade=_networks_of_service,
    ),
    Change(
        "1.44",
        "services take Seccomp, AppArmor, NoNewPrivileges and StartInterval",
        of=ServiceSpec,
        upgrade=ignoring(
            f"{CONTAINER}.Privileges.Seccomp",
            f"{CONTAINER}.Privileges.AppArmor",
            f"{CONTAINER}.Privileges.NoNewPrivileges",
            f"{CONTAINER}.Healthcheck.StartInterval",
        ),
        down_to="1.25",
    ),
    Change(
        "1.44",
        "services show Seccomp, AppArmor and NoNewPrivileges",
        of=Privileges,
        downgrade=without("Seccomp", "AppArmor", "NoNewPrivileges"),
    ),
    Change(
        "1.44",
        "health checks of services show StartInterval",
        of=ContainerSpec,
        downgrade=without("Healthcheck.StartInterval"),
    ),
    # 1.41
    Change(
        "1.41",
        "services take jobs, capabilities, ulimits and a limit of processes",
        of=ServiceSpec,
        upgrade=ignoring(
            "Mode.ReplicatedJob",
            "Mode.GlobalJob",
            f"{CONTAINER}.CapabilityAdd",
            f"{CONTAINER}.CapabilityDrop",
            f"{CONTAINER}.Ulimits",
            "TaskTemplate.Resources.Limits.Pids",
        ),
        down_to="1.25",
    ),
    Change(
        "1.41",
        "services show capabilities and ulimits",
        of=ContainerSpec,
        downgrade=without("CapabilityAdd", "CapabilityDrop", "Ulimits"),
    ),
    Change("1.41", "services show a limit of processes", of=Limits, downgrade=without("Pids")),
    Change("1.41", "services can be jobs", of=ServiceMode, downgrade=without("ReplicatedJob", "GlobalJob")),
    Change("1.41", "services show their tasks", of=Service, downgrade=without("ServiceStatus", "JobStatus")),
    Change("1.41", "tasks show the iteration of a job", of=Task, downgrade=without("JobIteration")),
    # 1.40
    Change(
        "1.40",
        "services take Sysctls, MaxReplicas and configs that are not files",
        of=ServiceSpec,
        upgrade=ignoring(
            f"{CONTAINER}.Sysctls",
            f"{CONTAINER}.Privileges.CredentialSpec.Config",
            "TaskTemplate.Placement.MaxReplicas",
        ),
        down_to="1.25",
    ),
    Change(
        "1.40",
        "configs of services can be used without a file",
        of=ServiceSpec,
        upgrade=dropping(f"{CONTAINER}.Configs", "Runtime"),
        down_to="1.25",
    ),
    Change("1.40", "services show Sysctls", of=ContainerSpec, downgrade=without("Sysctls")),
    Change("1.40", "services show Config of a credential spec", of=CredentialSpec, downgrade=without("Config")),
    Change("1.40", "configs of services show Runtime", of=ConfigReference, downgrade=without("Runtime")),
    Change("1.40", "services show MaxReplicas", of=Placement, downgrade=without("MaxReplicas")),
    Change("1.40", "init takes DataPathPort", of=InitRequest, upgrade=ignoring("DataPathPort")),
    *_of_swarm("1.40", "a swarm shows DataPathPort", "DataPathPort"),
    # 1.39
    Change(
        "1.39",
        "init takes DefaultAddrPool and SubnetSize",
        of=InitRequest,
        upgrade=ignoring("DefaultAddrPool", "SubnetSize"),
    ),
    *_of_swarm("1.39", "a swarm shows DefaultAddrPool and SubnetSize", "DefaultAddrPool", "SubnetSize"),
    # 1.37
    Change("1.37", "secrets can be templates", of=SecretSpec, upgrade=_template_refused("secret")),
    Change("1.37", "configs can be templates", of=ConfigSpec, upgrade=_template_refused("config")),
    Change(
        "1.37",
        "tasks can be orphaned, or wait for their removal",
        of=TaskStatus,
        downgrade={"State": lambda status: _ended(status.state)},
    ),
    Change(
        "1.37",
        "tasks can be meant to be removed",
        of=Task,
        downgrade={"DesiredState": lambda task: _ended(task.desired_state)},
    ),
    # 1.25: what a client of 1.24 does not know
    *(
        Change("1.25", f"services take {words}", of=ServiceSpec, upgrade=refusing(path, version, means))
        for words, path, version, means in (
            ("ForceUpdate", "TaskTemplate.ForceUpdate", "1.25", bool),
            ("Secrets", f"{CONTAINER}.Secrets", "1.25", bool),
            ("Configs", f"{CONTAINER}.Configs", "1.30", bool),
            ("Runtime", "TaskTemplate.Runtime", "1.30", lambda value: value not in ("", "container")),
            ("Preferences", "TaskTemplate.Placement.Preferences", "1.28", bool),
            ("Order of updates", "UpdateConfig.Order", "1.29", lambda value: value not in ("", "stop-first")),
            ("PublishMode", "EndpointSpec.Ports.PublishMode", "1.25", lambda value: value not in ("", "ingress")),
        )
    ),
    Change(
        "1.25",
        "services show what their tasks have besides",
        of=ContainerSpec,
        downgrade=without(
            "Hostname",
            "Groups",
            "Privileges",
            "Init",
            "StopSignal",
            "TTY",
            "OpenStdin",
            "ReadOnly",
            "Healthcheck",
            "Hosts",
            "DNSConfig",
            "Secrets",
            "Configs",
            "Isolation",
        ),
    ),
    Change(
        "1.25",
        "templates show ForceUpdate, Runtime, PluginSpec and NetworkAttachmentSpec",
        of=TaskSpec,
        downgrade=without("ForceUpdate", "Runtime", "PluginSpec", "NetworkAttachmentSpec"),
    ),
    Change(
        "1.25", "placements show Preferences and Platforms", of=Placement, downgrade=without("Preferences", "Platforms")
    ),
    Change(
        "1.25",
        "updates show Monitor, MaxFailureRatio and Order",
        of=UpdateConfig,
        downgrade=without("Monitor", "MaxFailureRatio", "Order"),
    ),
    Change(
        "1.25",
        "services show RollbackConfig, and their networks in the template alone",
        of=ServiceSpec,
        downgrade={"RollbackConfig": None, "Networks": lambda spec: spec.task_template.networks},
    ),
    Change("1.25", "create of a service answers with warnings", of=ServiceCreated, downgrade=without("Warnings")),
    Change("1.25", "services show PreviousSpec", of=Service, downgrade=without("PreviousSpec")),
    Change("1.25", "ports show PublishMode", of=PortConfig, downgrade=without("PublishMode")),
    Change(
        "1.25",
        "reservations are NanoCPUs, and of generic resources",
        of=Resources,
        downgrade={"GenericResources": None, "NanoCPU": lambda each: each.nano_cpus or UNSET},
    ),
    Change("1.25", "limits are NanoCPUs", of=Limits, downgrade={"NanoCPU": lambda each: each.nano_cpus or UNSET}),
    Change("1.25", "nodes show their address", of=NodeStatus, downgrade=without("Addr")),
    Change("1.25", "nodes show TLSInfo", of=NodeDescription, downgrade=without("TLSInfo")),
    Change(
        "1.25",
        "tasks show their ports and generic resources",
        of=Task,
        downgrade=without("GenericResources", "AssignedGenericResources", "Status.PortStatus"),
    ),
    *_of_swarm("1.25", "a swarm shows TLSInfo and RootRotationInProgress", "TLSInfo", "RootRotationInProgress"),
    Change("1.25", "a swarm shows EncryptionConfig", of=SwarmSpec, downgrade=without("EncryptionConfig")),
    Change(
        "1.25",
        "a swarm shows its signing CA, and several external ones",
        of=CAConfig,
        downgrade={"SigningCACert": None, "ForceRotate": None, "ExternalCA": _external_ca},
    ),
    Change("1.25", "external CAs show CACert", of=ExternalCA, downgrade=without("CACert")),
    Change("1.25", "init takes DataPathAddr", of=InitRequest, upgrade=refusing("DataPathAddr", "1.30")),
    Change("1.25", "join takes DataPathAddr", of=JoinRequest, upgrade=refusing("DataPathAddr", "1.30")),
)
