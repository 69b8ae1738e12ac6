"""What API 1.29 changed."""

from __future__ import annotations

from engine.api.versions.change import Change, Flag

CHANGES = (
    Change("1.29", "the network ingress can be removed", flag=Flag.INGRESS_REMOVABLE),
    Change("1.29", "updates of services can change their networks", flag=Flag.NETWORKS_CHANGE),
)
