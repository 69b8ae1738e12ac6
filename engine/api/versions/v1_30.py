"""What API 1.30 changed."""

from __future__ import annotations

from engine.api.versions.change import Change, Flag

CHANGES = (
    Change("1.30", "build streams the image's id in aux", flag=Flag.BUILD_AUX),
    Change("1.30", "wait takes condition and sends its head at once", flag=Flag.WAIT_CONDITION),
)
