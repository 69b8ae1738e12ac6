"""What API 1.55 changed."""

from __future__ import annotations

from engine.api.versions.change import Change, ignoring
from engine.wire.containers import UpdateBody

CHANGES = (
    Change(
        "1.55",
        "update takes limits of block devices",
        of=UpdateBody,
        upgrade=ignoring(
            "BlkioWeightDevice",
            "BlkioDeviceReadBps",
            "BlkioDeviceWriteBps",
            "BlkioDeviceReadIOps",
            "BlkioDeviceWriteIOps",
        ),
    ),
)
