"""What API 1.44 changed."""

from __future__ import annotations

from engine.api.versions.change import Change, ignoring
from engine.api.versions.endpoints import mac_of_container, one_endpoint, without
from engine.api.versions.mounts import flat_read_only, option, refusing
from engine.common import times
from engine.wire.containers import CreateBody
from engine.wire.images import ImageInspect, ImageSummary
from engine.wire.system import Runtime

CHANGES = (
    Change("1.44", "info shows the status of runtimes", of=Runtime, downgrade={"status": None}),
    Change(
        "1.44",
        "images have no VirtualSize",
        of=ImageSummary,
        downgrade={"VirtualSize": lambda image: image.size},
    ),
    Change(
        "1.44",
        "inspect of an image shows no VirtualSize, and Created only if the image has it",
        of=ImageInspect,
        downgrade={
            "VirtualSize": lambda image: image.size,
            "Created": lambda image: image.created or times.ZERO,
        },
    ),
    Change(
        "1.44",
        "read-only binds are read-only with the mounts below them",
        of=CreateBody,
        upgrade=flat_read_only,
    ),
    Change(
        "1.44",
        "health checks take StartInterval",
        of=CreateBody,
        upgrade=ignoring("Healthcheck.StartInterval"),
        down_to="1.25",
    ),
    Change("1.44", "create takes several endpoints", of=CreateBody, upgrade=one_endpoint),
    # The last row is applied first.
    Change("1.44", "a MAC address is one endpoint's", of=CreateBody, upgrade=mac_of_container),
    Change("1.44", "endpoints take MacAddress", of=CreateBody, upgrade=without("MacAddress"), down_to="1.25"),
    Change(
        "1.44",
        "create takes ReadOnlyForceRecursive of binds in Mounts",
        of=CreateBody,
        upgrade=refusing(
            option("BindOptions", "ReadOnlyForceRecursive"),
            "BindOptions.ReadOnlyForceRecursive needs API v1.44 or newer",
        ),
        down_to="1.25",
    ),
)
