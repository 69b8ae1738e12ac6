"""Secrets and configs on the wire, as the newest API version documents them (Docker Engine API,
"Secret", "Config").

Structs name the fields and their defaults and have no behaviour. `data` is base64 on the wire.
"""

from __future__ import annotations

import msgspec

from engine.wire.fields import shown
from engine.wire.swarm import Driver, Version


class SecretSpec(msgspec.Struct, rename="pascal", omit_defaults=True, kw_only=True, frozen=True, gc=False):
    """The body of POST /secrets/create and /secrets/{id}/update. Replies have no data."""

    name: str = ""
    labels: dict[str, str] = shown({})
    data: bytes = b""
    driver: Driver | None = None
    """Where the content comes from, if not from `data`."""
    templating: Driver | None = None
    """The name `golang` makes the content a template."""


class ConfigSpec(msgspec.Struct, rename="pascal", omit_defaults=True, kw_only=True, frozen=True, gc=False):
    """The body of POST /configs/create and /configs/{id}/update."""

    name: str = ""
    labels: dict[str, str] = shown({})
    data: bytes = b""
    templating: Driver | None = None


class Secret(msgspec.Struct, rename="pascal", kw_only=True, frozen=True, gc=False):
    """One element of GET /secrets."""

    id: str = msgspec.field(name="ID")
    version: Version = Version()
    created_at: str
    updated_at: str
    spec: SecretSpec


class Config(msgspec.Struct, rename="pascal", kw_only=True, frozen=True, gc=False):
    """One element of GET /configs, whose spec has the data."""

    id: str = msgspec.field(name="ID")
    version: Version = Version()
    created_at: str
    updated_at: str
    spec: ConfigSpec


class ObjectCreated(msgspec.Struct, rename="pascal", frozen=True):
    """The reply of POST /secrets/create and /configs/create."""

    id: str = msgspec.field(name="ID")
