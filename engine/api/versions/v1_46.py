"""What API 1.46 changed."""

from __future__ import annotations

from engine.api.versions.change import Change, Flag, without
from engine.wire.containers import ContainerSummary

CHANGES = (
    Change(
        "1.46",
        "the list shows Annotations in HostConfig",
        of=ContainerSummary,
        downgrade=without("HostConfig.Annotations"),
    ),
    Change("1.46", "push takes platform", flag=Flag.PUSH_PLATFORM, down_to="1.25"),
    Change("1.46", "events report new images", flag=Flag.IMAGE_CREATE_EVENTS),
)
