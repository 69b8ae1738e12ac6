"""The board of monitor and shipper. Budget: 100 ns for what the monitor does per flush; a flush
itself takes microseconds.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from engine._fast.board import Board

CALLS = 10_000


def test_wrote(benchmark: Any, tmp_path: Path) -> None:
    """One flush: the totals, the bit, a look at the sleeping word, and the unacknowledged bytes."""
    board = Board(os.fsencode(tmp_path / "shipper"), monitor=True)
    slot = board.open("c" * 64, (0, 0, 0, 0), 0)
    wrote, unacked = board.wrote, board.unacked

    def run() -> int:
        for _ in range(CALLS):
            wrote(slot, 100, 1)
            left = unacked(slot)
        return left

    before = board.unacked(slot)
    assert run() == before + 100 * CALLS
    benchmark(run)
    benchmark.extra_info["ns/call"] = round(benchmark.stats["min"] / CALLS * 1e9)


def test_changed(benchmark: Any, tmp_path: Path) -> None:
    """The shipper's turn when 10 of 1,000 spools have grown."""
    monitor = Board(os.fsencode(tmp_path / "shipper"), monitor=True)
    shipper = Board(os.fsencode(tmp_path / "shipper"), monitor=False)
    names = {monitor.open(f"{index:064}", (0, 0, 0, 0), 0): f"{index:064}" for index in range(1000)}
    shipper.changed()

    def run() -> int:
        for slot in range(0, 1000, 100):
            monitor.wrote(slot, 100, 1)
        count = 0
        for slot in shipper.changed():
            name, _, written, lines = shipper.slot(slot)
            count += shipper.ack(slot, name, 1, written, written, lines)
        return count

    assert run() == 10 and shipper.slot(100)[0] == names[100]
    benchmark(run)
