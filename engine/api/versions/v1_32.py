"""What API 1.32 changed."""

from __future__ import annotations

from engine.api.versions.change import Change, Flag

CHANGES = (Change("1.32", "pull, import and build take platform", flag=Flag.PULL_PLATFORM, down_to="1.25"),)
