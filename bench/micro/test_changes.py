"""The changes that an upper directory of 20,000 paths makes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from engine._fast import changes
from engine.system import files


def test_changes(benchmark: Any, tmp_path: Path) -> None:
    """Half of the paths exist in the layer below."""
    count = 20_000
    lower, upper = tmp_path / "lower", tmp_path / "upper"
    for directory, first in ((lower, 0), (upper, count // 2)):
        for at in range(first, first + count):
            if at % 100 == 0:
                (directory / f"d{at // 100}").mkdir(parents=True)
            (directory / f"d{at // 100}/f{at}").touch()
    here, below = files.open_directory(upper), files.open_directory(lower)
    found = dict(changes.changes(here, [below]))
    assert len(found) == count + count // 100
    assert found[b"/d150/f15000"] == 0 and found[b"/d250/f25000"] == 1
    benchmark(changes.changes, here, [below])
    os.close(here)
    os.close(below)
