"""What API 1.44 changed."""

from __future__ import annotations

from engine.api.versions.change import Change, Flag

CHANGES = (
    Change("1.44", "read-only binds are read-only with the mounts below them", flag=Flag.RECURSIVE_READ_ONLY),
    Change("1.44", "create takes several endpoints", flag=Flag.MANY_ENDPOINTS),
)
