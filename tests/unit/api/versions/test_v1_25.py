"""API 1.25: each row at 1.25 and at 1.24, which is the newest version served."""

from __future__ import annotations

from engine.api.versions import CHANGES, VERSIONS, Flag, Table, Version


def test_flags() -> None:
    table = Table(CHANGES)
    for flag in (Flag.NUMBERED_STEPS, Flag.UNUSED_ARGUMENTS_WARN):
        assert Version("1.25", table).has(flag) and not VERSIONS["1.24"].has(flag)
