"""The program that measures lower bounds does the work that it times."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench.floors import Floors, volume
from bench.job import touch
from tests.support.images import archives


@pytest.fixture
def floors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Floors:
    monkeypatch.setattr("bench.floors.ROUNDS", 1)
    return Floors(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")
def test_files_in_an_overlay(floors: Floors, capsys: pytest.CaptureFixture[str]) -> None:
    archive = floors.base / "archive"
    archive.write_bytes(b"small" + b"large" * 200_000)
    floors.show("all", "put", "directory", "250", "1000000", archive)
    [upper] = floors.base.glob("*/upper")
    assert sorted(each.name for each in upper.iterdir()) == ["d0", "d1", "d2", "large"]
    assert sorted(len(os.listdir(upper / name)) for name in ("d0", "d1", "d2")) == [50, 100, 100]
    assert (upper / "d1/file123").stat().st_size == 223 and (upper / "large").read_bytes() == b"large" * 200_000
    floors.show("files", "files", "directory", "120", "2", overlay=False)
    assert len(list(floors.base.glob("*/d1/file119"))) == 1
    floors.show("received", "receive", archive)
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["all", "files", "received"]


def test_a_terminal_that_says_too_little(floors: Floors) -> None:
    floors.show("lines", "terminal", "100", str(archives.BUSYBOX), "seq", "100", size=1)
    with pytest.raises(Exception, match="non-zero exit status"):
        floors.show("lines", "terminal", "101", str(archives.BUSYBOX), "seq", "100")


def test_touched_memory_is_given_back() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1])

    before = resident()
    touch(64 << 20)
    touch(0)
    assert resident() - before < 4096


def test_parts_of_small_requests(floors: Floors, capsys: pytest.CaptureFixture[str]) -> None:
    volume(floors)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5 and all(" ms  load " in line for line in lines)
    assert len(list((floors.base / "volumes").iterdir())) == 100
