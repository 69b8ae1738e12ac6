"""What API 1.19 changed."""

from __future__ import annotations

from engine.api.versions.change import Change, Flag, without
from engine.api.versions.created import created_with
from engine.wire.images import HistoryItem, ImageSummary
from engine.wire.stats import Stats
from engine.wire.system import Info

CHANGES = (
    *created_with(
        "1.19",
        "create takes CpuPeriod, CpuQuota, CpusetMems, BlkioWeight, OomKillDisable",
        "HostConfig.CpuPeriod",
        "HostConfig.CpuQuota",
        "HostConfig.CpusetMems",
        "HostConfig.BlkioWeight",
        "HostConfig.OomKillDisable",
    ),
    Change("1.19", "the image list shows Labels", of=ImageSummary, downgrade=without("Labels")),
    Change("1.19", "history shows Tags, Size, Comment", of=HistoryItem, downgrade=without("Tags", "Size", "Comment")),
    Change("1.19", "stats show precpu_stats", of=Stats, downgrade=without("precpu_stats")),
    Change("1.19", "stats show throttling_data", of=Stats, downgrade={"cpu_stats.throttling_data": lambda _: {}}),
    Change("1.19", "logs take since", flag=Flag.LOGS_SINCE),
    Change(
        "1.19",
        "Debug, IPv4Forwarding, MemoryLimit and SwapLimit become booleans",
        of=Info,
        downgrade={
            "Debug": lambda info: int(info.debug),
            "IPv4Forwarding": lambda info: int(info.ipv4_forwarding),
            "MemoryLimit": lambda info: int(info.memory_limit),
            "SwapLimit": lambda info: int(info.swap_limit),
        },
    ),
    Change(
        "1.19",
        "info shows CpuCfsPeriod, CpuCfsQuota, OomKillDisable",
        of=Info,
        downgrade=without("CpuCfsPeriod", "CpuCfsQuota", "OomKillDisable"),
    ),
)
