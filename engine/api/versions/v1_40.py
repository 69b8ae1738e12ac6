"""What API 1.40 changed."""

from __future__ import annotations

from engine.api.versions.change import Change, Flag

CHANGES = (
    Change("1.40", "the default IpcMode is private", flag=Flag.IPC_PRIVATE),
    Change("1.40", "build takes outputs", flag=Flag.BUILD_OUTPUTS, down_to="1.25"),
)
