"""What API 1.34 changed."""

from __future__ import annotations

from engine.api.versions import VERSIONS, Flag


def test_wait_tells_of_a_removal_that_failed() -> None:
    assert [VERSIONS[name].has(Flag.WAIT_ERROR) for name in ("1.33", "1.34")] == [False, True]
