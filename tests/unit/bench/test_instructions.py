"""How counts of instructions are compared with those that were accepted."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.micro import instructions
from bench.micro.instructions import Accepted


@pytest.mark.parametrize(
    ("found", "spread", "worse", "said"),
    [
        (1000, {}, 0, ""),
        (1030, {}, 0, ""),
        (1031, {}, 1, "x: 1,031 instructions, 1,000 accepted: +3.1%, limit 3.0%"),
        (900, {}, 0, "x: 900 instructions, 1,000 accepted: -10.0%, limit 3.0%"),
        (1100, {"x": 0.06}, 0, ""),
        (1130, {"x": 0.06}, 1, "+13.0%, limit 12.0%"),
    ],
)
def test_a_row(capsys: pytest.CaptureFixture[str], found: int, spread: dict[str, float], worse: int, said: str) -> None:
    assert Accepted({}, {"x": 1000}, spread).compare({"x": found}) == worse
    *lines, last = capsys.readouterr().out.splitlines()
    assert said in "".join(lines) and bool(said) == bool(lines)
    assert last == f"1 rows counted, {worse} beyond their limit"


def test_rows_of_one_side(capsys: pytest.CaptureFixture[str]) -> None:
    """A new row needs a count, and one that is gone must be taken out; not where only some run."""
    assert Accepted({}, {"old": 1}, {}).compare({"new": 1}) == 2
    assert capsys.readouterr().out.startswith("new: has no accepted count\nold: was not counted\n")
    assert Accepted({}, {"old": 1, "new": 1}, {}).compare({"new": 1}, whole=False) == 0


def test_what_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instructions, "ACCEPTED", tmp_path / "instructions.json")
    accepted = Accepted({}, {"old": 1}, {"old": 0.5})
    accepted.take({"even": [1000, 1001, 1010], "odd": [1000, 1050]}, whole=True)
    assert Accepted.read() == accepted
    assert accepted.instructions == {"even": 1000, "odd": 1000} and accepted.spread == {"odd": 0.05}
    assert accepted.host == instructions.host()
    accepted.take({"odd": [999]}, whole=False)
    assert accepted.instructions == {"even": 1000, "odd": 999} and accepted.spread == {"odd": 0.05}
    accepted.take({"odd": [999, 1000]}, whole=True)
    assert accepted.instructions == {"odd": 999} and accepted.spread == {}


def test_the_accepted_counts_name_their_host() -> None:
    assert Accepted.read().host.keys() == instructions.host().keys()


def test_a_dump(tmp_path: Path) -> None:
    dump = tmp_path / "out.1.1"
    dump.write_text("version: 1\ndesc: Trigger: Client Request: test_x.py::test_y[a b]\nevents: Ir\ntotals: 123\n")
    assert instructions.read(dump) == ("test_x.py::test_y[a b]", 123)
    dump.write_text("version: 1\ndesc: Trigger: Program termination\ntotals: 123\n")
    with pytest.raises(ValueError, match="no dump of a row"):
        instructions.read(dump)


def test_a_row_has_grown_only_beyond_its_limit() -> None:
    accepted = Accepted({}, {"x": 1000, "wide": 1000}, {"wide": 0.05})
    assert accepted.has_grown("x", 1031) and not accepted.has_grown("x", 1030)
    assert accepted.has_grown("wide", 1101) and not accepted.has_grown("wide", 1100)
    assert not accepted.has_grown("unknown", 1)
