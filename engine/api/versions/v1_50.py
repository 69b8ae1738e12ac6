"""What API 1.50 changed."""

from __future__ import annotations

from engine.api.versions.change import Change, Flag, without
from engine.api.versions.images import container_config
from engine.wire.images import ImageInspect
from engine.wire.system import Info

CHANGES = (
    Change(
        "1.50",
        "Config of an image has no fields of a container",
        of=ImageInspect,
        downgrade={"Config": container_config},
    ),
    Change("1.50", "delete of an image takes platforms", flag=Flag.DELETE_PLATFORMS, down_to="1.25"),
    Change("1.50", "info shows DiscoveredDevices", of=Info, downgrade=without("DiscoveredDevices")),
    Change("1.50", "info has no BridgeNfIptables and BridgeNfIp6tables", flag=Flag.NO_BRIDGE_NF),
)
