"""Upgrades of HostConfig.Mounts in the create bodies of older versions.

Pure. Not here: the rules of the newest version (`containers/mount_points.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from engine.api.versions.change import Upgrade, notes
from engine.errors import InvalidParameter

_OPTIONS = {"VolumeOptions": "volume", "TmpfsOptions": "tmpfs", "ImageOptions": "image"}
"""Options of a mount and the type that they belong to. Those of binds were always checked."""


def _mounts(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    host = request.get("HostConfig")
    mounts = host.get("Mounts") if isinstance(host, dict) else None
    if isinstance(mounts, list):
        yield from (mount for mount in mounts if isinstance(mount, dict))


def _options(mount: dict[str, Any], name: str) -> dict[str, Any]:
    options = mount.get(name)
    return options if isinstance(options, dict) else {}


def ignoring_option(options: str, name: str) -> Upgrade:
    """Ignores an option of a mount, such as `NonRecursive` of `BindOptions`."""

    def drop(request: dict[str, Any]) -> None:
        for mount in _mounts(request):
            _options(mount, options).pop(name, None)

    return drop


def ignoring_foreign_options(request: dict[str, Any]) -> None:
    """Ignores options that belong to another type of mount."""
    for mount in _mounts(request):
        for options, kind in _OPTIONS.items():
            if mount.get("Type") != kind:
                mount.pop(options, None)


def flat_read_only(request: dict[str, Any]) -> None:
    """Read-only mounts leave the mounts below them as they are."""
    notes(request)["flat_read_only"] = True


def without_volume_driver_warning(request: dict[str, Any]) -> None:
    """No warning of a VolumeDriver that does not apply to Mounts."""
    notes(request)["volume_driver_unnoticed"] = True


def refusing(has: Callable[[dict[str, Any]], Any], words: str) -> Upgrade:
    """Refuses a mount that has what only newer versions know."""

    def check(request: dict[str, Any]) -> None:
        if any(has(mount) for mount in _mounts(request)):
            raise InvalidParameter(words)

    return check


def option(options: str, name: str) -> Callable[[dict[str, Any]], Any]:
    """For `refusing`: this option is given and not empty."""
    return lambda mount: _options(mount, options).get(name)


__all__ = [
    "flat_read_only",
    "ignoring_foreign_options",
    "ignoring_option",
    "option",
    "refusing",
    "without_volume_driver_warning",
]
