"""Results derived from the figures of a run: medians, ratios, missed targets; the tables, the
comparison, and the chart."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench import chart, compare, publish, report
from bench.report import Document, Row, Target

VERSIONS = {"engined": "engined 0.1.0", "dockerd": "dockerd 20.10", "podman": "podman 4.3"}


def document(*rows: Row, quick: bool = False, commit: str = "abc") -> Document:
    machine = {"cpu": "A <fast> & cheap one", "cores": 2, "memory": 24 << 30, "kernel": "6.1"}
    return Document(report.FORMAT, "2026-01-02T03:04:05+00:00", commit, quick, machine, VERSIONS, list(rows))


def row(name: str = "run", target: Target | None = None, less: bool = True, **samples: list[float]) -> Row:
    return Row(name, f"what {name} is", "ms", less, target, samples)


def test_the_median_is_shown_and_the_ratio_is_of_medians() -> None:
    one = row(engined=[3, 1, 2], dockerd=[20, 10, 1000])
    assert one.median("engined") == 2
    assert one.times("dockerd") == 10
    assert one.times("podman") is None
    assert row(less=False, engined=[100], dockerd=[10]).times("dockerd") == 10


def test_a_ratio_to_nothing() -> None:
    assert row(engined=[0], dockerd=[5]).times("dockerd") == float("inf")
    assert row(engined=[0], dockerd=[0]).times("dockerd") == 1


@pytest.mark.parametrize(
    ("target", "samples", "misses"),
    [
        (None, {"engined": [1.0], "dockerd": [1.0]}, []),
        (Target({"dockerd": 8}), {"engined": [1.0], "dockerd": [8.0]}, []),
        (Target({"dockerd": 8}), {"engined": [1.0], "dockerd": [7.9]}, ["7.9x dockerd, not 8x"]),
        (Target({"dockerd": 8}), {"engined": [1.0]}, []),
        (Target({"dockerd": 8}), {"dockerd": [1.0]}, []),
        (Target({"podman": 1}, 5), {"engined": [6.0], "podman": [3.0]}, ["0.5x podman, not 1x", "6 ms, not 5"]),
        (Target(at_most=0), {"engined": [0.0]}, []),
    ],
)
def test_what_is_missed(target: Target | None, samples: dict[str, list[float]], misses: list[str]) -> None:
    assert Row("run", "a run", "ms", target=target, samples=samples).misses() == misses


def test_a_row_is_judged_when_all_that_its_target_needs_is_there() -> None:
    target = Target({"dockerd": 8})
    assert row(target=target, engined=[1], dockerd=[9]).judged()
    assert not row(target=target, engined=[1]).judged()
    both = Target({"dockerd": 8, "podman": 1})
    assert not row(target=both, engined=[1], dockerd=[9]).judged()
    assert row(target=both, engined=[1], dockerd=[7]).judged(), "missed, whatever podman takes"
    assert not row(engined=[1], dockerd=[9]).judged()


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.01234, "0.0123"), (1.5, "1.5"), (99.94, "99.9"), (99.96, "100"), (456.7, "457"), (12345.6, "12,346")],
)
def test_three_digits(value: float, text: str) -> None:
    assert report.number(value) == text


def test_an_engine_without_a_figure_says_why() -> None:
    one = Row("copy", "a copy", "ms", samples={"dockerd": [2.0]}, lacking={"engined": "404"}, wrong={"podman": "lost"})
    line = report.table_line(one, list(VERSIONS))
    assert "lacks" in line and "WRONG" in line and "MISSED" not in line
    assert [text.split() for text in report.reasons(one)] == [
        ["engined", "lacks", "it:", "404"],
        ["podman", "is", "WRONG:", "lost"],
    ]


def test_a_missed_row_is_marked() -> None:
    one = row(target=Target({"dockerd": 8}), engined=[1], dockerd=[2])
    assert "MISSED" in report.table_line(one, list(VERSIONS))
    assert "**missed**" in report.markdown(document(one))


def test_a_document_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    one = document(
        row(target=Target({"dockerd": 8}, 60), engined=[1.5, 2], dockerd=[3]),
        Row("copy", "a copy", "ms", less_is_better=False, lacking={"engined": "404"}),
    )
    path = tmp_path / "run.json"
    path.write_bytes(one.encode())
    assert report.load(path) == one


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 1}', '{"format": 2, "rows": 3}', "{"])
def test_what_is_no_document_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"run\.json"):
        report.load(path)


def test_two_runs_side_by_side() -> None:
    before = document(row("a", engined=[10, 11], dockerd=[10, 30]), row("gone", engined=[1]))
    after = document(row("a", engined=[5, 6], dockerd=[20, 21]), row("new", less=False, engined=[1]), commit="def")
    lines = [line.split() for line in report.comparison(before, after).splitlines()[3:]]
    assert lines == [
        ["a", "engined", "10.5", "5.5", "1.91x", "better", "ms"],
        ["a", "dockerd", "20", "20.5", "0.976x", "ms"],
        ["gone", "engined", "1", "-", "ms"],
        ["new", "engined", "-", "1", "ms"],
    ]


def test_more_a_second_is_better() -> None:
    before = document(row(less=False, engined=[10, 11]))
    after = document(row(less=False, engined=[5, 6]))
    assert report.comparison(before, after).splitlines()[3].split()[4:6] == ["0.524x", "worse"]


def test_the_comparison_is_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(document(row(engined=[1])).encode())
    assert compare.main([str(path), str(path)]) == 0
    assert "engined" in capsys.readouterr().out
    assert compare.main([str(path)]) == 2
    assert compare.main([str(path), str(tmp_path / "none.json")]) == 1


def test_the_chart_is_well_formed_and_has_a_line_for_each_row_that_is_compared() -> None:
    rows = [
        row("run", Target({"dockerd": 8, "podman": 1}), engined=[1], dockerd=[20], podman=[1e9]),
        row("<odd> & name", Target({"dockerd": 8}), engined=[1], dockerd=[0.001]),
        row("without a target", engined=[1], dockerd=[2]),
        row("alone", Target(at_most=1), engined=[1]),
    ]
    root = ElementTree.fromstring(chart.svg(document(*rows)))
    texts = ["".join(element.itertext()) for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "run" in texts and "<odd> & name" in texts
    assert "without a target" not in texts and "alone" not in texts
    width = float(root.attrib["width"])
    for element in root.iter("{http://www.w3.org/2000/svg}circle"):
        assert 0 <= float(element.attrib["cx"]) <= width


def test_a_chart_of_nothing_is_well_formed_too() -> None:
    assert ElementTree.fromstring(chart.svg(document())).tag == "{http://www.w3.org/2000/svg}svg"


def test_the_block_of_figures_is_replaced_and_nothing_else() -> None:
    text = f"above\n{publish.BEGIN}old\n{publish.END}below\n"
    assert publish.with_block(text, "new\n") == f"above\n{publish.BEGIN}new\n{publish.END}below\n"
    for wrong in ("", publish.END + publish.BEGIN, text + publish.END):
        with pytest.raises(ValueError, match="must have once"):
            publish.with_block(wrong, "new\n")


def test_what_the_documentation_shows_is_what_its_run_found() -> None:
    page = (publish.DOCS / "PERFORMANCE.md").read_text()
    stored = publish.DOCS / "performance.json"
    found = report.load(stored)
    assert publish.with_block(page, publish.block(found)) == page
    assert (publish.DOCS / "performance.svg").read_text() == chart.svg(found)
