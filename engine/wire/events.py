"""An event on the wire."""

from __future__ import annotations

import msgspec


class Actor(msgspec.Struct, frozen=True):
    """The object that an event is about."""

    id: str = msgspec.field(name="ID")
    attributes: dict[str, str] = msgspec.field(name="Attributes")


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One line of GET /events."""

    type: str = msgspec.field(name="Type")
    action: str = msgspec.field(name="Action")
    actor: Actor = msgspec.field(name="Actor")
    scope: str = "local"
    time: int
    """Unix seconds."""
    time_nano: int = msgspec.field(name="timeNano")
