"""What API 1.24 changed."""

from __future__ import annotations

from engine.api.versions.change import Change, Flag, ignoring, without
from engine.api.versions.created import created_with
from engine.wire.containers import ContainerInspect, ContainerSummary, UpdateBody
from engine.wire.stats import Stats
from engine.wire.system import Info

CHANGES = (
    Change("1.24", "info shows SecurityOptions and Swarm", of=Info, downgrade=without("SecurityOptions", "Swarm")),
    Change(
        "1.24",
        "info has no ExecutionDriver",
        of=Info,
        downgrade={"ExecutionDriver": lambda info: info.default_runtime},
    ),
    *created_with(
        "1.24",
        "create takes Healthcheck, CpuPercent, IOMaximumBandwidth, IOMaximumIOps, PidsLimit, UsernsMode, Sysctls, "
        "StorageOpt",
        "Healthcheck",
        "HostConfig.CpuPercent",
        "HostConfig.IOMaximumBandwidth",
        "HostConfig.IOMaximumIOps",
        "HostConfig.PidsLimit",
        "HostConfig.UsernsMode",
        "HostConfig.Sysctls",
        "HostConfig.StorageOpt",
    ),
    Change("1.24", "start takes no HostConfig", flag=Flag.START_TAKES_NO_HOST_CONFIG),
    Change("1.24", "inspect shows State.Health", of=ContainerInspect, downgrade=without("State.Health")),
    Change("1.24", "update takes RestartPolicy", of=UpdateBody, upgrade=ignoring("RestartPolicy")),
    Change("1.24", "stats show pids_stats", of=Stats, downgrade=without("pids_stats")),
    Change("1.24", "the list shows State and Mounts", of=ContainerSummary, downgrade=without("State", "Mounts")),
)
