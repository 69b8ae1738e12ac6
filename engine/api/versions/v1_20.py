"""What API 1.20 changed."""

from __future__ import annotations

from engine.api.versions.change import Change, Flag
from engine.api.versions.created import created_with
from engine.wire.containers import ContainerInspect

CHANGES = (
    Change(
        "1.20",
        "inspect shows Mounts where it showed Volumes and VolumesRW",
        of=ContainerInspect,
        downgrade={
            "Volumes": lambda found: {mount.destination: mount.source for mount in found.mounts},
            "VolumesRW": lambda found: {mount.destination: mount.rw for mount in found.mounts},
        },
    ),
    Change(
        "1.20",
        "inspect shows Memory, MemorySwap, CpuShares and Cpuset in HostConfig alone",
        of=ContainerInspect,
        downgrade={
            "Config.Memory": lambda found: found.host_config.memory,
            "Config.MemorySwap": lambda found: found.host_config.memory_swap,
            "Config.CpuShares": lambda found: found.host_config.cpu_shares,
            "Config.Cpuset": lambda found: found.host_config.cpuset_cpus,
        },
    ),
    Change("1.20", "kill of a stopped container is an error", flag=Flag.KILL_NEEDS_A_PROCESS),
    *created_with(
        "1.20", "create takes GroupAdd, MemorySwappiness", "HostConfig.GroupAdd", "HostConfig.MemorySwappiness"
    ),
)
