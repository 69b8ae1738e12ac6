"""An event on the wire: Type, Action and Actor, and the older fields status, id and from."""

from __future__ import annotations

import msgspec


class Actor(msgspec.Struct, frozen=True):
    """The object that an event is about."""

    id: str = msgspec.field(name="ID")
    attributes: dict[str, str] = msgspec.field(name="Attributes")


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One line of GET /events. `status`, `id` and `from` are sent for containers and images only,
    as in Docker.
    """

    status: str | msgspec.UnsetType = msgspec.UNSET
    id: str | msgspec.UnsetType = msgspec.UNSET
    image: str | msgspec.UnsetType = msgspec.field(default=msgspec.UNSET, name="from")
    type: str = msgspec.field(name="Type")
    action: str = msgspec.field(name="Action")
    actor: Actor = msgspec.field(name="Actor")
    time: int
    """Unix seconds."""
    time_nano: int = msgspec.field(name="timeNano")
