"""Messages that every plugin understands (Docker's documentation, "Docker Plugin API"). Structs
name the fields and have no behaviour.
"""

from __future__ import annotations

import msgspec


class PluginAnswer(msgspec.Struct, rename="pascal", kw_only=True, frozen=True):
    """The base of every answer. `err` is empty when the call succeeded."""

    err: str | None = None


class Activation(PluginAnswer, rename="pascal", kw_only=True, frozen=True):
    """POST /Plugin.Activate: the driver kinds that the plugin implements."""

    implements: list[str] | None = None
