"""How many managers answer, with an etcd that answers, one without a leader, and one that is
dead.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import pytest

from engine.manager import quorum
from engine.manager.kv import EtcdError, Member, Status
from engine.manager.quorum import Quorum
from engine.manager.tls import Credentials
from tests.support.fakes.clock import FakeClock

PEERS = [Member(number, f"n{number}", f"https://10.0.0.{number}:7946", learner=number == 4) for number in (1, 2, 3, 4)]
LISTENERS = ["10.0.0.2:2377", "[fd00::3]:2377", ""]


class Etcd:
    """The member of node 1."""

    def __init__(self, *, lists: bool, runs: bool) -> None:
        self.lists, self.runs = lists, runs

    async def members(self) -> list[Member]:
        if not self.lists:
            raise EtcdError("it does not answer")
        return PEERS

    async def status(self) -> Status:
        if not self.runs:
            raise EtcdError("it does not answer")
        return Status(1, 0, 1, 1, "3.4.23", 0, 0, False)


@pytest.mark.parametrize(
    ("lists", "runs", "up", "expected"),
    [
        (True, True, {("10.0.0.2", 7946)}, (2, 3)),
        (True, True, set(), (1, 3)),
        (False, True, {("10.0.0.2", 2377)}, (2, 4)),
        (False, False, {("10.0.0.2", 2377), ("fd00::3", 2377)}, (2, 4)),
        (False, False, set(), (0, 4)),
    ],
)
async def test_reachable(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    lists: bool,
    runs: bool,
    up: set[tuple[str, int]],
    expected: tuple[int, int],
) -> None:
    async def answers(place: tuple[str, int], context: object) -> bool:
        return place in up

    context: Any = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    monkeypatch.setattr(quorum, "_answers", answers)
    monkeypatch.setattr(Quorum, "_context", lambda self: context)
    monkeypatch.setattr(Credentials, "client", lambda self: context)
    etcd: Any = Etcd(lists=lists, runs=runs)
    assert await Quorum(etcd, FakeClock(), Credentials(tmp_path), lambda: LISTENERS).reachable() == expected
