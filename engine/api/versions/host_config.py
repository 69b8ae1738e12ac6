"""HostConfig of inspect as versions below 1.25 show it.

Fields that these versions lack are shown only if they were given, since such a request was obeyed.
"""

from __future__ import annotations

from typing import Any

from msgspec import UNSET

from engine.api.versions.change import Change, Source
from engine.wire.containers import ContainerInspect


def _given(field: str) -> Source:
    def source(found: Any) -> Any:
        return getattr(found.host_config, field) or UNSET

    return source


def _swappiness(found: ContainerInspect) -> int:
    swappiness = found.host_config.memory_swappiness
    return -1 if swappiness is None else swappiness


def _ipc_mode(found: ContainerInspect) -> str:
    mode = found.host_config.ipc_mode
    return "" if mode == "shareable" else mode


SINCE_1_25 = (
    Change(
        "1.25",
        "inspect shows AutoRemove, NanoCpus, Runtime and further fields of HostConfig",
        of=ContainerInspect,
        downgrade={
            "HostConfig.AutoRemove": _given("auto_remove"),
            "HostConfig.NanoCpus": _given("nano_cpus"),
            "HostConfig.DeviceCgroupRules": _given("device_cgroup_rules"),
            "HostConfig.DeviceRequests": _given("device_requests"),
            "HostConfig.Runtime": None,
            "HostConfig.CgroupnsMode": None,
            "HostConfig.MaskedPaths": None,
            "HostConfig.ReadonlyPaths": None,
            "HostConfig.CpuRealtimePeriod": None,
            "HostConfig.CpuRealtimeRuntime": None,
        },
    ),
    Change(
        "1.25",
        "inspect shows limits that are not set as null, and the default IpcMode by its name",
        of=ContainerInspect,
        downgrade={
            "HostConfig.PidsLimit": lambda found: found.host_config.pids_limit or 0,
            "HostConfig.MemorySwappiness": _swappiness,
            "HostConfig.OomKillDisable": lambda found: bool(found.host_config.oom_kill_disable),
            "HostConfig.IpcMode": _ipc_mode,
        },
    ),
)
