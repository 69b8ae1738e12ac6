"""The document of a run (JSON), what is derived from it, and the tables that show it. Pure;
measures nothing.

The document has a format number, the time, the commit, the machine, the engines' versions, and each
row's samples by engine. Medians, ratios and missed targets are derived here whenever they are
shown.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

FORMAT = 2
OURS = "engined"


class Target(msgspec.Struct, frozen=True, omit_defaults=True):
    """Target of a row: a multiple of a peer in the same run, and a bound in the row's unit."""

    times: dict[str, float] = {}
    at_most: float | None = None

    def text(self) -> str:
        words = [f"{number(value)}x {peer}" for peer, value in self.times.items()]
        if self.at_most is not None:
            words.append(f"<= {number(self.at_most)}")
        return ", ".join(words)


class Row(msgspec.Struct, frozen=True, omit_defaults=True):
    """One figure, with the samples of each engine."""

    name: str
    what: str
    unit: str
    less_is_better: bool = True
    target: Target | None = None
    samples: dict[str, list[float]] = {}
    lacking: dict[str, str] = {}
    """By engine: what it lacks, or why it was not measured."""
    wrong: dict[str, str] = {}
    """By engine: how its answer was wrong, which fails the row."""

    def median(self, engine: str) -> float | None:
        values = self.samples.get(engine)
        return statistics.median(values) if values else None

    def times(self, peer: str) -> float | None:
        """How many times better engined is than `peer`. None unless both have the figure."""
        ours, theirs = self.median(OURS), self.median(peer)
        if ours is None or theirs is None:
            return None
        good, bad = (ours, theirs) if self.less_is_better else (theirs, ours)
        if good == 0:
            return 1.0 if bad == 0 else float("inf")
        return bad / good

    def misses(self) -> list[str]:
        """The parts of the target that are missed.

        Empty without a target or without the figures to judge it.
        """
        if self.target is None or self.median(OURS) is None:
            return []
        found = [
            f"{number(times)}x {peer}, not {number(wanted)}x"
            for peer, wanted in self.target.times.items()
            if (times := self.times(peer)) is not None and times < wanted
        ]
        ours, bound = self.median(OURS), self.target.at_most
        if bound is not None and ours is not None and (ours > bound if self.less_is_better else ours < bound):
            found.append(f"{number(ours)} {self.unit}, not {number(bound)}")
        return found

    def judged(self) -> bool:
        """Returns True if there is a target and every figure that it needs, or if what is there
        misses it.
        """
        if self.target is None:
            return False
        return bool(self.misses()) or all(self.median(engine) is not None for engine in (OURS, *self.target.times))

    def cell(self, engine: str) -> str:
        """The engine's figure, or the reason why there is none."""
        if engine in self.wrong:
            return "WRONG"
        value = self.median(engine)
        return "lacks" if engine in self.lacking else "-" if value is None else number(value)


class Document(msgspec.Struct, frozen=True):
    """A run."""

    format: int
    time: str
    commit: str
    quick: bool
    machine: dict[str, Any]
    versions: dict[str, str]
    rows: list[Row]

    def peers(self) -> list[str]:
        return [name for name in self.versions if name != OURS]

    def encode(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"

    def heading(self) -> str:
        """The engines and the machine that were measured."""
        machine = self.machine
        size = f"{machine['memory'] / (1 << 30):.0f} GiB"
        versions = ", ".join(self.versions.values())
        text = f"{versions} on {machine['cpu']}, {machine['cores']} cores, {size}, Linux {machine['kernel']}"
        return text + (" (quick: it works; not how fast it is)" if self.quick else "")


def load(path: str | Path) -> Document:
    """Read a document. Raises ValueError that names the file if it is not one of this format."""
    try:
        found = json.loads(Path(path).read_bytes())
        if not isinstance(found, dict):
            raise ValueError("not a document of the benchmark")
        if found.get("format") != FORMAT:
            raise ValueError(f"format {found.get('format')}, not {FORMAT}: measure again")
        return msgspec.convert(found, Document)
    except ValueError as error:  # includes msgspec's and json's own errors
        raise ValueError(f"{path}: {error}") from None


def number(value: float) -> str:
    """Three significant digits, without an exponent."""
    if value == float("inf"):
        return "inf"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if abs(value) >= 99.95:
        return f"{value:.0f}"
    return f"{value:.3g}"


# --- tables ---------------------------------------------------------------------------------------


def table_head(names: Sequence[str]) -> str:
    return f"{'':<24}" + f"{names[0]:>10}" + "".join(f"{name:>12} {'':>7}" for name in names[1:])


def table_line(row: Row, names: Sequence[str]) -> str:
    """A row for a terminal: each engine's figure, the ratios, and a mark where the target is
    missed.
    """
    cells = [f"{row.name:<24}{row.cell(names[0]):>10}"]
    for name in names[1:]:
        times = row.times(name)
        cells.append(f"{row.cell(name):>10} {f'({number(times)}x)' if times is not None else '':>9}")
    mark = "  MISSED " if row.misses() else "  "
    target = f"   [{row.target.text()}]" if row.target else ""
    return "".join(cells) + f"{mark}{row.unit:<11} {row.what}{target}"


def reasons(row: Row) -> Iterator[str]:
    """A line for each engine without a figure."""
    for engine, reason in row.lacking.items():
        yield f"{'':<24}{engine} lacks it: {reason}"
    for engine, reason in row.wrong.items():
        yield f"{'':<24}{engine} is WRONG: {reason}"


def markdown(document: Document) -> str:
    """The whole document as a Markdown table, with the machine above it."""
    names = [OURS, *document.peers()]
    lines = [
        f"{document.heading()}; {document.time[:10]}, commit `{document.commit}`. "
        "Medians; in brackets, how many times better engined is.",
        "",
        "| row | unit | " + " | ".join(names) + " | to reach | |",
        "|---|---|" + "---:|" * len(names) + "---|---|",
    ]
    for row in document.rows:
        cells = [row.cell(OURS)]
        for name in names[1:]:
            times = row.times(name)
            cells.append(row.cell(name) + (f" ({number(times)}x)" if times is not None else ""))
        verdict = "" if not row.judged() else "**missed**" if row.misses() else "reached"
        target = row.target.text() if row.target else ""
        lines.append(f"| {row.name}: {row.what} | {row.unit} | {' | '.join(cells)} | {target} | {verdict} |")
    notes = [f"- {row.name}, {engine}: {reason}" for row in document.rows for engine, reason in row.lacking.items()]
    return "\n".join(lines + (["", *notes] if notes else [])) + "\n"


def comparison(before: Document, after: Document) -> str:
    """Two runs, every row and engine of either: medians, their ratio, and whether the samples
    overlap.
    """
    lines = [
        f"A: {before.heading()}; commit {before.commit}, {before.time}",
        f"B: {after.heading()}; commit {after.commit}, {after.time}",
        f"{'':<24}{'engine':<10}{'A':>10}{'B':>10}{'B better':>10}",
    ]
    known: Mapping[str, Row] = {row.name: row for row in before.rows}
    fresh: Mapping[str, Row] = {row.name: row for row in after.rows}
    for name in [*known, *(name for name in fresh if name not in known)]:
        old, new = known.get(name), fresh.get(name)
        either = new or old
        assert either is not None
        for engine in dict.fromkeys([*before.versions, *after.versions]):
            cells = [row.cell(engine) if row else "-" for row in (old, new)]
            if cells == ["-", "-"]:
                continue
            times, apart = "", ""
            if old and new and old.samples.get(engine) and new.samples.get(engine):
                times, apart = _change(old, new, engine)
            lines.append(f"{name:<24}{engine:<10}{cells[0]:>10}{cells[1]:>10}{times:>10}  {apart:<7}{either.unit}")
    return "\n".join(lines) + "\n"


def _change(old: Row, new: Row, engine: str) -> tuple[str, str]:
    """How many times better the new median is, and `better` or `worse` when the samples do not
    overlap.
    """
    one, two = old.samples[engine], new.samples[engine]
    good, bad = (statistics.median(two), statistics.median(one))
    if not new.less_is_better:
        good, bad = bad, good
    times = f"{number(bad / good)}x" if good else "-"
    if len(one) < 2 or len(two) < 2:
        return times, ""
    if max(two) < min(one):
        return times, "better" if new.less_is_better else "worse"
    if min(two) > max(one):
        return times, "worse" if new.less_is_better else "better"
    return times, ""
