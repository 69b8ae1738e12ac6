"""`make chart JSON=bench/results/X.json`: the figures that docs/ shows, made from one run's document.

Writes docs/performance.json (the document itself), docs/performance.svg (its chart) and the block of docs/PERFORMANCE.md between the two
marks (its table). A quick run is refused: its figures say nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

from bench import chart, report

DOCS = Path(__file__).resolve().parent.parent / "docs"
BEGIN = "<!-- figures: written by `make chart`, from docs/performance.json -->\n"
END = "<!-- end of figures -->\n"


def with_block(text: str, block: str) -> str:
    """`text` with `block` between the marks; ValueError unless each mark is there once, in order."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"the document must have once each, in this order: {BEGIN.strip()} and {END.strip()}")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{block}{END}{after}"


def block(document: report.Document) -> str:
    return f"\n{report.markdown(document)}\n"


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m bench.publish RESULT.json", file=sys.stderr)
        return 2
    try:
        document = report.load(arguments[0])
        if document.quick:
            raise ValueError(f"{arguments[0]}: a quick run has no figures to show")
        page = with_block((DOCS / "PERFORMANCE.md").read_text(), block(document))
    except (OSError, ValueError) as error:
        print(f"bench.publish: {error}", file=sys.stderr)
        return 1
    (DOCS / "performance.json").write_bytes(document.encode())
    (DOCS / "performance.svg").write_text(chart.svg(document))
    (DOCS / "PERFORMANCE.md").write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
