"""Volumes on the wire, as the newest API version documents them (Docker Engine API, "Volume").

Structs name the fields and have no behaviour.
"""

from __future__ import annotations

import msgspec

from engine.wire.plugins import PluginAnswer


class UsageData(msgspec.Struct, rename="pascal", kw_only=True, frozen=True):
    """The use of a volume, which /system/df alone shows. -1: not available."""

    ref_count: int = -1
    """Containers that use it, running or not."""
    size: int = -1


class Volume(msgspec.Struct, rename="pascal", kw_only=True, frozen=True):
    """One volume. `status`: information from its driver, absent if the driver gives none."""

    name: str
    driver: str
    mountpoint: str
    created_at: str | msgspec.UnsetType = msgspec.UNSET
    """RFC 3339, absent if it is not known."""
    status: dict[str, object] | msgspec.UnsetType = msgspec.UNSET
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    scope: str = "local"
    options: dict[str, str] | None = None
    """Options of the driver, null if there are none."""
    usage_data: UsageData | msgspec.UnsetType = msgspec.UNSET


class VolumeList(msgspec.Struct, rename="pascal", frozen=True):
    volumes: list[Volume]
    warnings: list[str]


class VolumeCreate(msgspec.Struct, rename="pascal", kw_only=True, frozen=True):
    """POST /volumes/create."""

    name: str = ""
    driver: str = ""
    driver_opts: dict[str, str] = msgspec.field(default_factory=dict)
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    cluster_volume_spec: dict[str, object] | None = None
    """Of a volume in a swarm: refused unless it is empty."""


class VolumesPruned(msgspec.Struct, rename="pascal", frozen=True):
    """POST /volumes/prune."""

    volumes_deleted: list[str]
    space_reclaimed: int


# --- the protocol of volume plugins ---------------------------------------------------------------


class PluginVolume(msgspec.Struct, rename="pascal", kw_only=True, frozen=True):
    name: str = ""
    mountpoint: str | None = None
    created_at: str | None = None
    status: dict[str, object] | None = None


class PluginCapabilities(msgspec.Struct, rename="pascal", frozen=True):
    scope: str = ""


class VolumeAnswer(PluginAnswer, rename="pascal", kw_only=True, frozen=True):
    """Every answer of a volume plugin; each call fills some of the fields."""

    mountpoint: str | None = None
    volume: PluginVolume | None = None
    volumes: list[PluginVolume] | None = None
    capabilities: PluginCapabilities | None = None
