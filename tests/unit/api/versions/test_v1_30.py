"""What API 1.30 changed."""

from __future__ import annotations

from engine.api.versions import VERSIONS, Flag


def test_wait_takes_condition() -> None:
    """Clients of 1.24 and older that send one are obeyed."""
    assert [VERSIONS[name].has(Flag.WAIT_CONDITION) for name in ("1.24", "1.25", "1.29", "1.30", "1.55")] == [
        *(True, False, False, True, True)
    ]


def test_wait_sends_its_head_at_once() -> None:
    assert [VERSIONS[name].has(Flag.WAIT_HEAD) for name in ("1.24", "1.29", "1.30")] == [False, False, True]
