"""What API 1.34 changed."""

from __future__ import annotations

from engine.api.versions.change import Change, Flag

CHANGES = (Change("1.34", "wait reports a removal that failed", flag=Flag.WAIT_ERROR),)
