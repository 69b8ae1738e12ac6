"""The journal of exits: added entries survive, removed ones do not, and an incomplete end does no
harm.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


@pytest.mark.parametrize(
    ("at", "byte"), [(29, 1), (6, 0xFF)], ids=["a length beyond the end", "a name that is not UTF-8"]
)
def test_a_damaged_entry_ends_the_journal(tmp_path: Path, at: int, byte: int) -> None:
    path = tmp_path / "journal"
    journal = Journal(str(path))
    journal.add("a" * 20, 1, 2)
    journal.add("b" * 20, 3, 4)
    data = bytearray(path.read_bytes())
    data[at] = byte
    path.write_bytes(data)
    again = Journal(str(path))
    kept = dict(again.exits)
    assert len(kept) < 2
    again.add("new", 5, 6)
    assert Journal(str(path)).exits == {**kept, "new": (5, 6)}


@pytest.mark.parametrize("end", range(1, 13))
def test_a_full_disk_harms_no_other_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: int) -> None:
    """write(2) takes a part and then nothing: the entries before and after are read by the next
    monitor, and so is this one.
    """
    path = tmp_path / "journal"
    first = Journal(str(path))
    first.add("before", 1, 100)
    whole = os.write
    full = True

    def write(descriptor: int, data: bytes) -> int:
        return whole(descriptor, data[:end] if full else data)

    monkeypatch.setattr(journal.os, "write", write)
    first.add("torn", 2, 200)
    assert Journal(str(path)).exits == {"before": (1, 100)}
    full = False
    first.add("after", 3, 300)
    assert Journal(str(path)).exits == {"before": (1, 100), "torn": (2, 200), "after": (3, 300)}
    assert os.listdir(tmp_path) == ["journal"]


@given(st.binary(max_size=60))
def test_any_bytes_in_the_journal(noise: bytes) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "journal"
        first = Journal(str(path))
        first.add("whole", 7, 1)
        path.write_bytes(path.read_bytes() + noise)
        again = Journal(str(path))
        assert again.exits["whole"] == (7, 1) or noise
        again.add("next", 9, 3)
        assert Journal(str(path)).exits["next"] == (9, 3)
