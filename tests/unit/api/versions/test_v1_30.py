"""API 1.30: each row at 1.30 and at 1.29; the newest version served is older."""

from __future__ import annotations

from engine.api.versions import CHANGES, VERSIONS, Flag, Table, Version


def test_flags() -> None:
    table = Table(CHANGES)
    assert Version("1.30", table).has(Flag.BUILD_AUX)
    assert not Version("1.29", table).has(Flag.BUILD_AUX) and not VERSIONS["1.24"].has(Flag.BUILD_AUX)
