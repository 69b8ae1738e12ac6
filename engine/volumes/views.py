"""Volumes as records, and as answers show them.

Pure. Not here: what changes them (`store.py`).
Rules: Docker Engine API, Volume; the filters of VolumeList.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

import msgspec

from engine.common import labels as texts
from engine.common import patterns, times
from engine.volumes import local
from engine.wire.volumes import PluginVolume, Volume

FILTERS = frozenset(("name", "dangling", "driver", "label"))

ANONYMOUS = "com.docker.volume.anonymous"
"""The label of a volume that the engine named itself."""

_SECOND = 1_000_000_000


class VolumeRecord(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The record of one volume; its key is the name."""

    name: str
    driver: str = local.NAME
    options: dict[str, str] = {}
    labels: dict[str, str] = {}
    created: int = 0
    anonymous: bool = False
    """An anonymous volume of a container: the container's removal with v=1 deletes it."""
    path: str = ""
    """The path that a plugin last reported."""


def labels(record: VolumeRecord) -> dict[str, str]:
    """Its labels, with Docker's for an anonymous volume."""
    return record.labels | {ANONYMOUS: ""} if record.anonymous else record.labels


def is_anonymous(record: VolumeRecord) -> bool:
    """True if the engine named it, for a container or for a client that gave no name."""
    return record.anonymous or ANONYMOUS in record.labels


def is_plain(record: VolumeRecord) -> bool:
    """True if it is a directory of the local driver, without driver options. A prune and the disk
    usage leave out all others.
    """
    return record.driver == local.NAME and not record.options


def merged(record: VolumeRecord, mountpoint: str, listed: Volume | None) -> Volume:
    """A volume that has a record. `listed`: what its plugin reports."""
    created = times.rfc3339(record.created // _SECOND * _SECOND) if record.created else msgspec.UNSET
    return Volume(
        name=record.name,
        driver=record.driver,
        mountpoint=mountpoint or (listed.mountpoint if listed is not None else ""),
        created_at=created if listed is None or listed.created_at is msgspec.UNSET else listed.created_at,
        status=listed.status if listed is not None else msgspec.UNSET,
        labels=labels(record),
        scope=listed.scope if listed is not None else "local",
        options=record.options or None,
    )


def of_plugin(volume: PluginVolume, driver: str, scope: str) -> Volume:
    """A volume as its plugin reports it. A time that is not RFC 3339 is left out."""
    created = times.ZERO
    with contextlib.suppress(ValueError, OverflowError):
        created = times.rfc3339(times.parse_rfc3339(volume.created_at or times.ZERO))
    return Volume(
        name=volume.name,
        driver=driver,
        mountpoint=volume.mountpoint or "",
        created_at=msgspec.UNSET if created == times.ZERO else created,
        status=volume.status or msgspec.UNSET,
        scope=scope,
    )


def matches(name: str, driver: str, own: Mapping[str, str], filters: Mapping[str, Sequence[str]]) -> bool:
    """True if a volume with the labels `own` matches one of the values of each filter, and all
    labels. Not here: `dangling`.
    """
    names, drivers = filters.get("name"), filters.get("driver")
    return (
        (not names or patterns.match(names, name))
        and (not drivers or any(wanted and wanted in driver for wanted in drivers))
        and texts.have_all(own, filters.get("label", ()))
    )


__all__ = [
    "ANONYMOUS",
    "FILTERS",
    "VolumeRecord",
    "is_anonymous",
    "is_plain",
    "labels",
    "matches",
    "merged",
    "of_plugin",
]
