"""What API 1.55 changed."""

from __future__ import annotations

from engine.api.versions.change import Change

CHANGES: tuple[Change, ...] = ()
