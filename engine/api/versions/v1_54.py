"""What API 1.54 changed."""

from __future__ import annotations

from engine.api.versions.change import Change, Flag, ignoring
from engine.wire.networks import NetworkConnect

CHANGES = (
    Change("1.54", "the image list takes identity", flag=Flag.IMAGE_IDENTITY, down_to="1.25"),
    Change(
        "1.54",
        "connect takes MacAddress",
        of=NetworkConnect,
        upgrade=ignoring("EndpointConfig.MacAddress"),
        down_to="1.25",
    ),
)
