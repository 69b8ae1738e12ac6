"""What API 1.48 changed."""

from __future__ import annotations

from engine.api.versions.change import Change, Flag, ignoring
from engine.api.versions.endpoints import interface_sysctls, without
from engine.api.versions.mounts import refusing, without_volume_driver_warning
from engine.wire.containers import CreateBody
from engine.wire.networks import NetworkCreate

CHANGES = (
    Change(
        "1.48",
        "create warns of a VolumeDriver beside volumes in Mounts",
        of=CreateBody,
        upgrade=without_volume_driver_warning,
    ),
    Change(
        "1.48",
        "sysctls of an interface are driver options of its endpoint alone",
        of=CreateBody,
        upgrade=interface_sysctls,
    ),
    Change("1.48", "networks take EnableIPv4", of=NetworkCreate, upgrade=ignoring("EnableIPv4"), down_to="1.25"),
    Change("1.48", "endpoints take GwPriority", of=CreateBody, upgrade=without("GwPriority"), down_to="1.25"),
    Change("1.48", "save, load and history take platform", flag=Flag.IMAGE_PLATFORM, down_to="1.25"),
    Change("1.48", "inspect of an image takes manifests", flag=Flag.INSPECT_MANIFESTS, down_to="1.25"),
    Change(
        "1.48",
        "build/prune takes reserved-space, max-used-space and min-free-space",
        flag=Flag.PRUNE_SPACE,
        down_to="1.25",
    ),
    Change(
        "1.48",
        "create takes images in Mounts",
        of=CreateBody,
        upgrade=refusing(lambda mount: mount.get("Type") == "image", 'Mount type "Image" needs API v1.48 or newer'),
        down_to="1.25",
    ),
)
