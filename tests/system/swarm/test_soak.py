"""Half a minute of random faults. `python -m tests.swarm_soak` does the same for longer."""

from __future__ import annotations

from tests.swarm_soak import soak


def test_random_faults() -> None:
    done: list[str] = []
    try:
        soak(0.5, 20_261_123, done.append)
    except AssertionError as error:
        raise AssertionError("\n".join([*done, str(error)])) from None
