"""What API 1.47 changed."""

from __future__ import annotations

from engine.api.versions.change import Change
from engine.wire.system import RegistryConfig

CHANGES = (
    Change(
        "1.47",
        "registries have no lists of hosts that get nondistributable layers",
        of=RegistryConfig,
        downgrade={
            "AllowNondistributableArtifactsCIDRs": lambda registries: None,
            "AllowNondistributableArtifactsHostnames": lambda registries: None,
        },
    ),
)
