"""What API 1.42 changed."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET

from engine.api.versions.change import Change, Flag, ignoring
from engine.api.versions.mounts import ignoring_foreign_options, ignoring_option
from engine.wire.containers import ContainerInspect, CreateBody
from engine.wire.exec import ExecCreate, ExecStart
from engine.wire.system import CacheRecord, DiskUsage
from engine.wire.volumes import VolumeCreate


def _builder_size(usage: DiskUsage) -> Any:
    return UNSET if usage.build_cache_usage is UNSET else usage.build_cache_usage.total_size


def _parent(record: CacheRecord) -> Any:
    return UNSET if record.parents is UNSET else record.parents[0]


CHANGES = (
    Change(
        "1.42",
        "create gives the terminal its ConsoleSize",
        of=CreateBody,
        upgrade=ignoring("HostConfig.ConsoleSize"),
        down_to="1.25",
    ),
    Change(
        "1.42",
        "inspect shows no KernelMemory",
        of=ContainerInspect,
        downgrade={"HostConfig.KernelMemory": lambda found: found.host_config.kernel_memory or 0},
    ),
    Change("1.42", "stop and restart take signal", flag=Flag.STOP_SIGNAL, down_to="1.25"),
    Change("1.42", "exec takes ConsoleSize", of=ExecCreate, upgrade=ignoring("ConsoleSize"), down_to="1.25"),
    Change("1.42", "start of an exec takes ConsoleSize", of=ExecStart, upgrade=ignoring("ConsoleSize"), down_to="1.25"),
    Change("1.42", "streams of frames have a media type of their own", flag=Flag.STREAM_TYPES),
    Change("1.42", "attach/ws takes stdin, stdout and stderr", flag=Flag.WEBSOCKET_STREAMS, down_to="1.25"),
    Change("1.42", "the image list takes shared-size", flag=Flag.SHARED_SIZE, down_to="1.25"),
    Change("1.42", "info has no KernelMemory", flag=Flag.NO_KERNEL_MEMORY),
    Change("1.42", "system/df takes type", flag=Flag.DF_TYPES, down_to="1.25"),
    Change("1.42", "system/df has no BuilderSize", of=DiskUsage, downgrade={"BuilderSize": _builder_size}),
    Change(
        "1.42",
        "a record of the build cache has Parents, not Parent",
        of=CacheRecord,
        downgrade={"Parents": None, " Parents": None, "Parent": _parent},
    ),
    Change("1.42", "a prune of volumes removes anonymous ones", flag=Flag.PRUNE_ANONYMOUS),
    Change(
        "1.42",
        "create of a volume takes ClusterVolumeSpec",
        of=VolumeCreate,
        upgrade=ignoring("ClusterVolumeSpec"),
        down_to="1.25",
    ),
    Change(
        "1.42",
        "create takes CreateMountpoint of binds in Mounts",
        of=CreateBody,
        upgrade=ignoring_option("BindOptions", "CreateMountpoint"),
        down_to="1.25",
    ),
    Change(
        "1.42",
        "options of another type of mount are refused",
        of=CreateBody,
        upgrade=ignoring_foreign_options,
        down_to="1.25",
    ),
)
