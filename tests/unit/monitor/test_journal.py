"""The journal of exits: what is added survives, what is taken back does not, and a torn end harms nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.monitor import journal
from engine.monitor.journal import Journal


def test_entries_survive(tmp_path: Path) -> None:
    path = str(tmp_path / "journal")
    first = Journal(path)
    first.add("a", 1, 100)
    first.add("b", 137, 200)
    first.add("c", 0, 300)
    first.remove("b")
    first.add("a", 2, 400)
    assert Journal(path).exits == {"a": (2, 400), "c": (0, 300)}


def test_empty_again(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    first = Journal(str(path))
    for key in "abc":
        first.add(key, 0, 1)
    for key in "abc":
        first.remove(key)
        first.remove("unknown")
    assert path.stat().st_size == 0
    first.add("d", 3, 4)
    assert Journal(str(path)).exits == {"d": (3, 4)}


def test_torn_at_every_byte(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    first = Journal(str(path))
    first.add("whole", 7, 1)
    size = path.stat().st_size
    first.add("torn", 8, 2)
    data = path.read_bytes()
    for end in range(size, len(data)):
        path.write_bytes(data[:end])
        again = Journal(str(path))
        assert again.exits == {"whole": (7, 1)}
        again.add("next", 9, 3)
        assert Journal(str(path)).exits == {"whole": (7, 1), "next": (9, 3)}


def test_rewritten_when_mostly_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "LIMIT", 2000)
    path = tmp_path / "journal"
    first = Journal(str(path))
    first.add("stays", 5, 6)
    for number in range(500):
        first.add(f"key{number}", 0, number)
        first.remove(f"key{number}")
    assert path.stat().st_size <= 2100
    assert Journal(str(path)).exits == {"stays": (5, 6)}
