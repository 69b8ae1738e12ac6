"""What API 1.25 changed."""

from __future__ import annotations

from engine.api.versions.change import Change, Flag, without
from engine.wire.images import ImageSummary
from engine.wire.volumes import Volume

CHANGES = (
    Change(
        "1.25",
        "the image list shows SharedSize and Containers",
        of=ImageSummary,
        downgrade=without("SharedSize", "Containers"),
    ),
    Change("1.25", "build numbers its steps as N/M", flag=Flag.NUMBERED_STEPS),
    Change("1.25", "build warns of unused build arguments", flag=Flag.UNUSED_ARGUMENTS_WARN),
    Change("1.25", "what needs a swarm answers 503 outside of one, not 406", flag=Flag.NO_SWARM_IS_503),
    Change("1.25", "volumes show CreatedAt and Options", of=Volume, downgrade=without("CreatedAt", "Options")),
)
