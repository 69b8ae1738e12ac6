"""Volumes on the wire, as API 1.24 documents them (specification, "Volume" and the endpoints of "Volumes"), and the messages of volume
plugins, as Docker's documentation of its plugin API has them. Structs name the fields and do nothing.
"""

from __future__ import annotations

import msgspec


class Volume(msgspec.Struct, rename="pascal", kw_only=True, frozen=True):
    """One volume; `status` is what its driver tells of it, absent when it tells nothing."""

    name: str
    driver: str
    mountpoint: str
    status: dict[str, object] | msgspec.UnsetType = msgspec.UNSET
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    scope: str = "local"


class VolumeList(msgspec.Struct, rename="pascal", frozen=True):
    volumes: list[Volume]
    warnings: list[str]


class VolumeCreate(msgspec.Struct, rename="pascal", kw_only=True, frozen=True):
    """POST /volumes/create."""

    name: str = ""
    driver: str = ""
    driver_opts: dict[str, str] = msgspec.field(default_factory=dict)
    labels: dict[str, str] = msgspec.field(default_factory=dict)


# --- the protocol of volume plugins ----------------------------------------------------------------------------------


class PluginVolume(msgspec.Struct, rename="pascal", kw_only=True, frozen=True):
    name: str = ""
    mountpoint: str | None = None
    status: dict[str, object] | None = None


class PluginCapabilities(msgspec.Struct, rename="pascal", frozen=True):
    scope: str = ""


class PluginAnswer(msgspec.Struct, rename="pascal", kw_only=True, frozen=True):
    """Every answer of a plugin: each call fills some of it. `err` is empty when it went well."""

    err: str | None = None
    implements: list[str] | None = None
    mountpoint: str | None = None
    volume: PluginVolume | None = None
    volumes: list[PluginVolume] | None = None
    capabilities: PluginCapabilities | None = None
