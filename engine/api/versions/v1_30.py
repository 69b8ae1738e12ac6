"""What API 1.30 changed. The version itself is not served yet; builds behave as before it."""

from __future__ import annotations

from engine.api.versions.change import Change, Flag

CHANGES = (Change("1.30", "build streams the image's id in aux", flag=Flag.BUILD_AUX),)
