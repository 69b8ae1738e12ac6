"""What API 1.29 changed."""

from __future__ import annotations

from engine.api.versions.change import Change, Flag, without
from engine.wire.plugins import PluginInspect

CHANGES = (
    # 1.24 has a shape of its own
    Change(
        "1.29",
        "plugins show whether they see the host's processes and IPC",
        of=PluginInspect,
        downgrade=without("Config.IpcHost", "Config.PidHost"),
        down_to="1.25",
    ),
    Change("1.29", "the network ingress can be removed", flag=Flag.INGRESS_REMOVABLE),
    Change("1.29", "updates of services can change their networks", flag=Flag.NETWORKS_CHANGE),
)
