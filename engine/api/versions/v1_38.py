"""What API 1.38 changed."""

from __future__ import annotations

from engine.api.versions.change import Change, without
from engine.wire.plugins import PluginInspect

CHANGES = (
    # 1.24 has a shape of its own
    Change(
        "1.38",
        "plugins show the protocol of their interface",
        of=PluginInspect,
        downgrade=without("Config.Interface.ProtocolScheme"),
        down_to="1.25",
    ),
)
