"""Restart policies and the doubling delay."""

import pytest

from engine.containers import restart
from engine.wire.containers import RestartPolicy


@pytest.mark.parametrize(
    ("name", "limit", "code", "restarts", "by_user", "again", "at_boot"),
    [
        ("no", 0, 1, 0, False, False, False),
        ("always", 0, 0, 0, False, True, True),
        ("always", 0, 0, 0, True, False, True),
        ("unless-stopped", 0, 0, 7, False, True, True),
        ("unless-stopped", 0, 0, 0, True, False, False),
        ("on-failure", 0, 0, 0, False, False, False),
        ("on-failure", 0, 1, 99, False, True, True),
        ("on-failure", 3, 1, 2, False, True, True),
        ("on-failure", 3, 1, 3, False, False, False),
        ("on-failure", 3, 1, 0, True, False, False),
    ],
)
def test_policies(name: str, limit: int, code: int, restarts: int, by_user: bool, again: bool, at_boot: bool) -> None:
    policy = RestartPolicy(name=name, maximum_retry_count=limit)
    assert restart.wanted(policy, code, restarts, by_user) is again
    assert restart.wanted_at_boot(policy, code, restarts, by_user) is at_boot


def test_the_delay_doubles_from_100_ms_to_a_minute_and_begins_anew_after_ten_steady_seconds() -> None:
    delays = [0.0]
    for _ in range(12):
        delays.append(restart.delay(delays[-1], 0.5))
    assert delays[1:6] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6]) and delays[-1] == 60.0
    assert restart.delay(25.6, 10.0) == 0.1
