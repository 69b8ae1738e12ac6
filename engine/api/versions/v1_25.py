"""What API 1.25 changed."""

from __future__ import annotations

import base64

from engine.api.versions.change import Change, Flag, without
from engine.containers.streams import spell_detach_keys
from engine.wire.exec import ExecInspect
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
    Change(
        "1.25",
        "start of an exec hijacks the connection although nothing is attached",
        flag=Flag.EXEC_ALWAYS_HIJACKS,
    ),
    Change(
        "1.25",
        "inspect of an exec shows the bytes of DetachKeys, not their names",
        of=ExecInspect,
        downgrade={"DetachKeys": lambda found: spell_detach_keys(base64.b64decode(found.detach_keys))},
    ),
    Change("1.25", "what needs a swarm answers 503 outside of one, not 406", flag=Flag.NO_SWARM_IS_503),
    Change("1.25", "volumes show CreatedAt and Options", of=Volume, downgrade=without("CreatedAt", "Options")),
)
