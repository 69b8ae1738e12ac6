"""Draws a document as an SVG chart: for each row, how many times better engined is than each peer,
on a logarithmic scale.

Pure. The colours suit light and dark backgrounds, or follow the reader's colour scheme. The
background is transparent.
"""

from __future__ import annotations

import math
from xml.sax.saxutils import escape

from bench.report import OURS, Document, Row, number

LINE = 20
LEFT, WIDTH, RIGHT = 190, 520, 200
TOP, BOTTOM = 78, 16
LEAST, MOST = 0.25, 1000.0
"""The ends of the scale. Values beyond are drawn at the end."""
TICKS = (0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)
SHAPES = {"dockerd": "circle", "podman": "diamond"}

STYLE = """
text { font: 12px system-ui, sans-serif; fill: #24292f }
.title { font-weight: 600; font-size: 14px }
.faint { fill: #656d76 }
.grid { stroke: #8c959f; stroke-opacity: .3 }
.one { stroke: #8c959f; stroke-width: 1.5 }
.target { stroke: #9a6700; stroke-width: 2.5 }
.dockerd { fill: #0969da }
.podman { fill: #8250df }
.missed { fill: #cf222e }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 }
  .faint { fill: #8d96a0 }
  .target { stroke: #d29922 }
  .dockerd { fill: #4493f8 }
  .podman { fill: #ab7df8 }
  .missed { fill: #f85149 }
}
"""


def svg(document: Document) -> str:
    """The chart of all rows whose target is a multiple of a peer. If there are none, of all
    comparable rows.
    """
    peers = document.peers()
    shown = [row for row in document.rows if any(row.times(peer) is not None for peer in peers)]
    aimed = [row for row in shown if row.target and any(times > 1 for times in row.target.times.values())]
    rows = aimed or shown
    height = TOP + LINE * len(rows) + BOTTOM
    width = LEFT + WIDTH + RIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        ' role="img">',
        f"<title>How many times better {OURS} is</title>",
        f"<style>{STYLE}</style>",
        f'<text class="title" x="8" y="20">How many times better {escape(document.versions.get(OURS, OURS))} is</text>',
        f'<text class="faint" x="8" y="38">{escape(document.heading())}, {escape(document.time[:10])}</text>',
        *_legend(document, peers),
        *_scale(height),
    ]
    for at, row in enumerate(rows):
        parts += _row(row, peers, TOP + LINE * at + LINE / 2)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _x(times: float) -> float:
    bounded = min(max(times, LEAST), MOST)
    return LEFT + WIDTH * math.log(bounded / LEAST) / math.log(MOST / LEAST)


def _scale(height: float) -> list[str]:
    parts = []
    for tick in TICKS:
        x = _x(tick)
        kind = "one" if tick == 1 else "grid"
        parts.append(f'<line class="{kind}" x1="{x:.1f}" y1="{TOP - 4}" x2="{x:.1f}" y2="{height - BOTTOM}"/>')
        parts.append(f'<text class="faint" x="{x:.1f}" y="{TOP - 8}" text-anchor="middle">{number(tick)}x</text>')
    return parts


def _legend(document: Document, peers: list[str]) -> list[str]:
    parts, x = [], 8.0
    for peer in peers:
        label = f"than {document.versions[peer]}"
        parts += [_mark(peer, x + 6, 52), f'<text x="{x + 16}" y="56">{escape(label)}</text>']
        x += 40 + 7 * len(label)
    parts.append(f'<line class="target" x1="{x + 6}" y1="45" x2="{x + 6}" y2="59"/>')
    parts.append(f'<text x="{x + 16}" y="56">to reach</text>')
    return parts


def _mark(peer: str, x: float, y: float) -> str:
    if SHAPES.get(peer, "circle") == "circle":
        return f'<circle class="{escape(peer)}" cx="{x:.1f}" cy="{y:.1f}" r="5"/>'
    points = f"{x:.1f},{y - 6:.1f} {x + 6:.1f},{y:.1f} {x:.1f},{y + 6:.1f} {x - 6:.1f},{y:.1f}"
    return f'<polygon class="{escape(peer)}" points="{points}"/>'


def _row(row: Row, peers: list[str], y: float) -> list[str]:
    missed = ' class="missed"' if row.misses() else ""
    parts = [f'<text{missed} x="{LEFT - 10}" y="{y + 4:.1f}" text-anchor="end">{escape(row.name)}</text>']
    if row.target and (wanted := max(row.target.times.values(), default=0)) > 1:
        x = _x(wanted)
        parts.append(f'<line class="target" x1="{x:.1f}" y1="{y - 7:.1f}" x2="{x:.1f}" y2="{y + 7:.1f}"/>')
    said = []
    for peer in peers:
        times = row.times(peer)
        if times is not None:
            parts.append(_mark(peer, _x(times), y))
            said.append(f"{number(times)}x")
        else:
            said.append("-")
    text = f"{row.cell(OURS)} {row.unit} ({', '.join(said)})"
    parts.append(f'<text class="faint" x="{LEFT + WIDTH + 10}" y="{y + 4:.1f}">{escape(text)}</text>')
    return parts
