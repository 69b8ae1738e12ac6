"""What API 1.21 changed."""

from __future__ import annotations

import msgspec

from engine.api.versions.change import Change, Flag, without
from engine.api.versions.created import created_with
from engine.wire.containers import ContainerInspect, ContainerSummary
from engine.wire.stats import NetworkStats, Stats


def _sum_of_interfaces(stats: Stats) -> NetworkStats:
    interfaces = [] if stats.networks is msgspec.UNSET else stats.networks.values()
    names = NetworkStats.__struct_fields__
    return NetworkStats(*[sum(getattr(interface, name) for interface in interfaces) for name in names])


CHANGES = (
    *created_with(
        "1.21",
        "create takes StopSignal, MemoryReservation, KernelMemory, DnsOptions, VolumeDriver",
        "StopSignal",
        "HostConfig.MemoryReservation",
        "HostConfig.KernelMemory",
        "HostConfig.DnsOptions",
        "HostConfig.VolumeDriver",
    ),
    # Docker 1.13 added these fields to every API version from 1.21 on. Docker CLIs of that age
    # read them for the column NAME.
    Change("1.21", "stats show name and id", flag=Flag.STATS_NAMED),
    Change(
        "1.21",
        "stats show every network",
        of=Stats,
        downgrade={"networks": None, "network": _sum_of_interfaces},
    ),
    Change("1.21", "the list shows ImageID", of=ContainerSummary, downgrade=without("ImageID")),
    Change("1.21", "inspect takes size", flag=Flag.INSPECT_SIZE),
    Change("1.21", "inspect shows State.Status", of=ContainerInspect, downgrade=without("State.Status")),
    Change("1.21", "inspect shows every network", of=ContainerInspect, downgrade=without("NetworkSettings.Networks")),
    Change(
        "1.21",
        "inspect shows VolumeDriver in HostConfig, and the rest of Config only where it was given",
        of=ContainerInspect,
        downgrade={
            "Config.MacAddress": lambda found: found.config.mac_address or "",
            "Config.NetworkDisabled": lambda found: bool(found.config.network_disabled),
            "Config.ExposedPorts": lambda found: found.config.exposed_ports or {},
            "Config.VolumeDriver": lambda found: found.host_config.volume_driver,
        },
    ),
)
