"""The host's limit of mappings is what it was when the last machine has ended."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.vm import uml

MEMORY = 1024
RAISED = "524288"
"""Two mappings for each page of MEMORY."""


@pytest.fixture
def limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = tmp_path / "max_map_count"
    made.write_text("65530")
    monkeypatch.setattr(uml, "MAPPINGS", made)
    monkeypatch.setattr(uml, "FOUND", tmp_path / "found")
    return made


def test_the_last_of_several_puts_it_back(limit: Path) -> None:
    first, second = ExitStack(), ExitStack()
    first.enter_context(uml.mappings(MEMORY))
    second.enter_context(uml.mappings(MEMORY))
    first.close()
    assert limit.read_text() == RAISED
    second.close()
    assert limit.read_text() == "65530"


def test_an_interrupt(limit: Path) -> None:
    with pytest.raises(KeyboardInterrupt), uml.mappings(MEMORY):
        assert limit.read_text() == RAISED
        raise KeyboardInterrupt
    assert limit.read_text() == "65530"


def test_after_a_kill_the_next_one_puts_it_back(limit: Path) -> None:
    limit.write_text(RAISED)
    uml.FOUND.write_text("65530")
    with uml.mappings(MEMORY):
        assert limit.read_text() == RAISED
    assert limit.read_text() == "65530"


@pytest.mark.parametrize("meanwhile", ["70000", "1048576"])
def test_what_others_set_meanwhile_stays(limit: Path, meanwhile: str) -> None:
    with uml.mappings(MEMORY):
        limit.write_text(meanwhile)
    assert limit.read_text() == meanwhile


def test_a_high_limit_stays(limit: Path) -> None:
    limit.write_text("1048576")
    with uml.mappings(MEMORY):
        assert limit.read_text() == "1048576"
    assert limit.read_text() == "1048576"
