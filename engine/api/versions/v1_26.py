"""What API 1.26 changed."""

from __future__ import annotations

from engine.api.versions.change import Change, without
from engine.wire.plugins import PluginInspect

CHANGES = (Change("1.26", "plugins show PluginReference", of=PluginInspect, downgrade=without("PluginReference")),)
