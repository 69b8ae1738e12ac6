"""What API 1.49 changed."""

from __future__ import annotations

from engine.api.versions.change import Change, Flag

CHANGES = (Change("1.49", "inspect of an image takes platform", flag=Flag.INSPECT_PLATFORM, down_to="1.25"),)
