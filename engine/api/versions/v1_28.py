"""What API 1.28 changed."""

from __future__ import annotations

from engine.api.versions.change import Change, Flag

CHANGES = (
    Change("1.28", "the list of networks has no Containers", flag=Flag.NETWORKS_LISTED_SHORT),
    Change("1.28", "disable of a plugin takes force", flag=Flag.PLUGIN_DISABLE_FORCE),
    Change("1.28", "attach/ws sends binary frames", flag=Flag.WEBSOCKET_BINARY),
)
