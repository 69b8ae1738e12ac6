"""What API 1.52 changed."""

from __future__ import annotations

from engine.api.versions.change import Change, Flag

CHANGES = (
    Change("1.52", "create warns of empty lists of port bindings", flag=Flag.PORT_BINDINGS_WARNING),
    Change("1.52", "save and load take several platforms", flag=Flag.MANY_PLATFORMS),
    Change("1.52", "inspect of a network shows Status", flag=Flag.NETWORK_STATUS),
    Change("1.52", "system/df shows usage by kind and takes verbose", flag=Flag.DF_USAGE),
    Change("1.52", "events are application/jsonl", flag=Flag.EVENTS_LINES),
)
