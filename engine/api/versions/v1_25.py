"""What API 1.25 changed."""

from __future__ import annotations

from typing import Any

from engine.api.versions.change import Change, Flag, without
from engine.api.versions.endpoints import unchecked, without_host_bits
from engine.api.versions.host_config import SINCE_1_25
from engine.api.versions.network_settings import complete
from engine.api.versions.plugins import AS_IN_1_24
from engine.common.network_rules import check_rfc_1123
from engine.wire.containers import ContainerInspect, ContainerSummary, CreateBody, EndpointSettings
from engine.wire.events import Message
from engine.wire.exec import ExecCreated
from engine.wire.images import ImageInspect, ImageSummary
from engine.wire.networks import Network, NetworkCreate, NetworkInspect
from engine.wire.plugins import PluginInspect
from engine.wire.stats import Stats
from engine.wire.system import Info, RegistryConfig, VersionInfo
from engine.wire.volumes import Volume


def _names(info: Info) -> list[str]:
    """`name=seccomp,profile=builtin` as `seccomp`."""
    return [option.removeprefix("name=").partition(",")[0] for option in info.security_options]


def _rfc_1123_hostname(request: dict[str, Any]) -> None:
    hostname = request.get("Hostname")
    if isinstance(hostname, str) and hostname:
        check_rfc_1123(hostname)


def _dead(state: Any) -> Any:
    return "dead" if state == "removing" else state


CHANGES = (
    *SINCE_1_25,
    Change("1.25", "plugins show their settings and their config", of=PluginInspect, downgrade=AS_IN_1_24),
    Change(
        "1.25",
        "the image list shows SharedSize and Containers",
        of=ImageSummary,
        downgrade=without("SharedSize", "Containers"),
    ),
    Change(
        "1.25",
        "inspect of an image shows Metadata, Variant and OsVersion",
        of=ImageInspect,
        downgrade=without("Metadata", "Variant", "OsVersion"),
    ),
    Change("1.25", "pull answers 401 where a registry refuses credentials", flag=Flag.REFUSED_CREDENTIALS),
    Change("1.25", "an X-Registry-Auth that cannot be read means none", flag=Flag.UNREADABLE_AUTH),
    Change("1.25", "build numbers its steps as N/M", flag=Flag.NUMBERED_STEPS),
    Change("1.25", "build warns of unused build arguments", flag=Flag.UNUSED_ARGUMENTS_WARN),
    Change("1.25", "what the state of a container does not permit is a conflict", flag=Flag.STATE_CONFLICTS),
    Change(
        "1.25",
        "create of an exec answers with the id alone",
        of=ExecCreated,
        downgrade={"Warnings": lambda _: []},
    ),
    Change(
        "1.25",
        "start of an exec hijacks the connection although nothing is attached",
        flag=Flag.EXEC_ALWAYS_HIJACKS,
    ),
    Change(
        "1.25",
        "stats show preread, online_cpus and what systems other than Linux have",
        of=Stats,
        downgrade=without(
            *("os_type", "preread", "num_procs", "storage_stats", "cpu_stats.online_cpus", "precpu_stats.online_cpus")
        ),
    ),
    Change(
        "1.25",
        "a container that is being removed is removing, not dead",
        of=ContainerInspect,
        downgrade={"State.Status": lambda found: _dead(found.state.status)},
    ),
    Change(
        "1.25",
        "the list shows a container that is being removed as removing, not dead",
        of=ContainerSummary,
        downgrade={"State": lambda found: _dead(found.state)},
    ),
    Change("1.25", "inspect shows Platform", of=ContainerInspect, downgrade=without("Platform")),
    Change("1.25", Flag.LATER_ROUTES_NAMED.value, flag=Flag.LATER_ROUTES_NAMED),
    Change("1.25", "what needs a swarm answers 503 outside of one, not 406", flag=Flag.NO_SWARM_IS_503),
    Change("1.25", "names of networks are unique", flag=Flag.UNIQUE_NETWORK_NAMES),
    Change("1.25", "subnets have no host bits", of=NetworkCreate, upgrade=without_host_bits),
    *(
        Change(
            "1.25",
            "networks show Created, EnableIPv4, Attachable, Ingress and configuration networks",
            of=kind,
            downgrade=without("Created", "EnableIPv4", "Attachable", "Ingress", "ConfigFrom", "ConfigOnly"),
        )
        for kind in (Network, NetworkInspect)
    ),
    Change(
        "1.25",
        "networks of a swarm show Peers and Services",
        of=NetworkInspect,
        downgrade=without("Peers", "Services"),
    ),
    Change("1.25", "Hostname need not be an RFC 1123 name", of=CreateBody, upgrade=_rfc_1123_hostname),
    Change("1.25", "create checks what networks allow their endpoints", of=CreateBody, upgrade=unchecked),
    Change(
        "1.25",
        "endpoints show DriverOpts, GwPriority and DNSNames",
        of=EndpointSettings,
        downgrade=without("DriverOpts", "GwPriority", "DNSNames"),
    ),
    Change(
        "1.25",
        "inspect shows no fields of the default bridge that are always empty",
        of=ContainerInspect,
        downgrade={"NetworkSettings": complete},
    ),
    Change("1.25", "volumes show CreatedAt and Options", of=Volume, downgrade=without("CreatedAt", "Options")),
    Change("1.25", "events show scope", of=Message, downgrade=without("scope")),
    Change(
        "1.25", "version shows Platform and Components", of=VersionInfo, downgrade=without("Platform", "Components")
    ),
    Change("1.25", "SecurityOptions are key=value lists", of=Info, downgrade={"SecurityOptions": _names}),
    Change(
        "1.25",
        "info shows the versions of its programs, and what the host has",
        of=Info,
        downgrade=without(
            "CDISpecDirs",
            "CgroupVersion",
            "ContainerdCommit",
            "DefaultAddressPools",
            "FirewallBackend",
            "GenericResources",
            "InitBinary",
            "InitCommit",
            "OSVersion",
            "RuncCommit",
            "Warnings",
        ),
    ),
    Change(
        "1.25",
        "info has no ClusterStore, ClusterAdvertise and SystemStatus",
        of=Info,
        downgrade={
            "ClusterStore": lambda info: "",
            "ClusterAdvertise": lambda info: "",
            "SystemStatus": lambda info: None,
        },
    ),
    Change(
        "1.25",
        "registries have lists of hosts that get nondistributable layers",
        of=RegistryConfig,
        downgrade=without("AllowNondistributableArtifactsCIDRs", "AllowNondistributableArtifactsHostnames"),
    ),
)
