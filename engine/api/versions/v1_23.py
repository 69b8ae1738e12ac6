"""What API 1.23 changed."""

from __future__ import annotations

from engine.api.versions.change import Change, ignoring, without
from engine.wire.networks import Network, NetworkCreate, NetworkInspect

CHANGES = (
    Change("1.23", "networks have EnableIPv6 and Labels", of=NetworkCreate, upgrade=ignoring("EnableIPv6", "Labels")),
    *(
        Change(
            "1.23",
            "a network shows Internal, EnableIPv6 and Labels",
            of=kind,
            downgrade=without("Internal", "EnableIPv6", "Labels"),
        )
        for kind in (Network, NetworkInspect)
    ),
)
