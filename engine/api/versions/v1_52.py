"""What API 1.52 changed."""

from __future__ import annotations

from msgspec import UNSET

from engine.api.versions.change import Change, Flag, without
from engine.api.versions.endpoints import mac_with_warning
from engine.api.versions.images import complete_config
from engine.api.versions.network_settings import with_bridge
from engine.containers.body import EMPTY_BINDINGS
from engine.wire.containers import ContainerInspect, ContainerSummary, CreateBody, Created
from engine.wire.events import Message
from engine.wire.images import ImageInspect
from engine.wire.networks import NetworkInspect
from engine.wire.system import DiskUsage

_NAMED = ("container", "image")
"""The types of events that have `status` and `id`."""

CHANGES = (
    Change(
        "1.52",
        "inspect of an image shows what is set alone",
        of=ImageInspect,
        downgrade={
            "Parent": lambda image: image.parent or "",
            "Comment": lambda image: image.comment or "",
            "DockerVersion": lambda image: image.docker_version or "",
            "EngineVersion": lambda image: image.engine_version or "",
            "Author": lambda image: image.author or "",
            "Config": complete_config,
        },
    ),
    Change("1.52", "inspect of a network counts its addresses", flag=Flag.NETWORK_STATUS),
    Change(
        "1.52",
        "create warns of empty lists of port bindings",
        of=Created,
        downgrade={"Warnings": lambda created: [each for each in created.warnings if EMPTY_BINDINGS not in each]},
    ),
    Change("1.52", "a MAC address is one endpoint's alone", of=CreateBody, upgrade=mac_with_warning),
    Change("1.52", "inspect of a container has no MacAddress in Config", flag=Flag.NO_REQUESTED_MAC),
    Change(
        "1.52",
        "inspect shows the endpoint on the default bridge in Networks alone",
        of=ContainerInspect,
        downgrade={"NetworkSettings": with_bridge},
    ),
    Change("1.52", "the list shows Health", of=ContainerSummary, downgrade=without("Health")),
    Change("1.52", "inspect of a network shows Status", of=NetworkInspect, downgrade=without("Status")),
    Change("1.52", "system/df takes verbose", flag=Flag.DF_VERBOSE, down_to="1.25"),
    Change(
        "1.52",
        "system/df shows totals by kind",
        of=DiskUsage,
        downgrade=without("ImageUsage", "ContainerUsage", "VolumeUsage", "BuildCacheUsage"),
    ),
    Change("1.52", "events are application/jsonl", flag=Flag.EVENTS_LINES),
    Change(
        "1.52",
        "events of containers and images have no status, id and from",
        of=Message,
        downgrade={
            "status": lambda event: event.action if event.type in _NAMED else UNSET,
            "id": lambda event: event.actor.id if event.type in _NAMED else UNSET,
            "from": lambda event: event.actor.attributes.get("image", "") if event.type == "container" else UNSET,
        },
    ),
)
