"""What API 1.41 changed."""

from __future__ import annotations

from engine.api.versions.change import Change, Flag

CHANGES = (
    Change("1.41", "create takes platform", flag=Flag.CREATE_PLATFORM, down_to="1.25"),
    Change("1.41", "stats take one-shot", flag=Flag.STATS_ONE_SHOT, down_to="1.25"),
    Change("1.41", "the image list takes no filter, but filters", flag=Flag.IMAGES_WITHOUT_FILTER),
    Change("1.41", "the list of services takes status", flag=Flag.SERVICE_STATUS),
)
