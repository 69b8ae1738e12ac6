"""`make chart JSON=bench/results/X.json`: writes the figures of docs/ from one run's document.

Writes docs/performance.json (the document), docs/performance.svg (the chart) and the table of
docs/PERFORMANCE.md between its two markers. A quick run is refused, because its figures mean
nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

from bench import chart, report

DOCS = Path(__file__).resolve().parent.parent / "docs"
BEGIN = "<!-- figures: written by `make chart`, from docs/performance.json -->\n"
END = "<!-- end of figures -->\n"


def with_block(text: str, block: str) -> str:
    """`text` with `block` between the two markers. Raises ValueError unless each marker occurs
    once, in order.
    """
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
