"""What API 1.44 changed."""

from __future__ import annotations

from typing import Any

from engine.api.versions.change import Change, Flag
from engine.errors import InvalidParameter
from engine.wire.containers import CreateBody
from engine.wire.images import ImageSummary


def _one_endpoint(request: dict[str, Any]) -> None:
    config = request.get("NetworkingConfig")
    endpoints = config.get("EndpointsConfig") if isinstance(config, dict) else None
    if isinstance(endpoints, dict) and len(endpoints) > 1:
        raise InvalidParameter(
            f"Container cannot be connected to network endpoints: {', '.join(endpoints)}: several take API 1.44"
        )


CHANGES = (
    Change(
        "1.44",
        "images have no VirtualSize",
        of=ImageSummary,
        downgrade={"VirtualSize": lambda image: image.size},
    ),
    Change("1.44", "read-only binds are read-only with the mounts below them", flag=Flag.RECURSIVE_READ_ONLY),
    Change("1.44", "create takes several endpoints", of=CreateBody, upgrade=_one_endpoint),
)
