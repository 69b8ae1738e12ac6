"""What API 1.51 changed."""

from __future__ import annotations

from engine.api.versions.change import Change, Flag

CHANGES = (Change("1.51", "the image list counts the containers of an image", flag=Flag.IMAGE_CONTAINERS),)
