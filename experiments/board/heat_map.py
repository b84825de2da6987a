"""A table of coloured cells as SVG: a row a defense, a column a quantity, darker where it is worse.

Narrow enough to be read on a telephone; it fetches nothing, and its numbers are text.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import groupby
from typing import NamedTuple

ROW, LABEL, CELL, MARGIN = 24.0, 166.0, 48.0, 6.0
SIZE = 12.5
INK, MUTED, RULE = "#1f2933", "#66727f", "#d5dbe1"
LEAK, PRICE = (213, 94, 0), (0, 114, 178)
"""What leaks is drawn in orange, what a defense costs in blue: two of Okabe and Ito's colours."""
FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"


class HeatCell(NamedTuple):
    """A cell: its `text`, and how bad it is, from 0 (good) to 1; None without a colour. `leak`: orange, else blue."""

    text: str
    bad: float | None = None
    leak: bool = False


class HeatSection(NamedTuple):
    """Rows under a `title` of their own, "" for none; each a label and its cells."""

    title: str
    rows: Sequence[tuple[str, Sequence[HeatCell]]]


def draw_heat_map(title: str, columns: Sequence[tuple[str, str]], sections: Sequence[HeatSection]) -> str:
    """Return the table as one SVG element; `columns`: two lines of a heading each.

    A first line that is the same for columns side by side stands once, above their middle.
    """
    width = 2 * MARGIN + LABEL + CELL * len(columns)
    y, parts = MARGIN + 2 * SIZE + 8, list[str]()
    for line, several in groupby(range(len(columns)), lambda i: columns[i][0]):
        places = list(several)
        parts.append(_heading(sum(places) / len(places), 1, line))
    parts += [_heading(i, 2, line) for i, (_, line) in enumerate(columns)]
    for section in sections:
        if section.title:
            parts.append(_text(MARGIN, y + ROW * 0.7, section.title, "start", INK, bold=True))
            y += ROW
        for label, cells in section.rows:
            if len(cells) != len(columns):
                raise ValueError(f"row {label!r} has {len(cells)} cells, the head {len(columns)}")
            parts.append(f'<path d="M{MARGIN:g} {y:g}H{width - MARGIN:g}" stroke="{RULE}" stroke-width="0.6"/>')
            parts.append(_text(MARGIN, y + ROW * 0.68, label, "start", INK))
            for i, cell in enumerate(cells):
                parts += _cell(MARGIN + LABEL + i * CELL, y, cell)
            y += ROW
        y += 6
    height = y + MARGIN
    return "\n".join([*open_svg(title, width, height), *parts, "</svg>\n"])


def _heading(column: float, line: int, text: str) -> str:
    return _text(MARGIN + LABEL + (column + 0.5) * CELL, MARGIN + line * (SIZE + 2), text, "middle", MUTED)


def open_svg(title: str, width: float, height: float) -> list[str]:
    """Return the opening of an SVG element of this size, with its title and a white ground."""
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" role="img" font-family="{FONT}" font-size="{SIZE:g}">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width:g}" height="{height:g}" fill="#ffffff"/>',
    ]


def shade(bad: float, leak: bool) -> tuple[str, str]:
    """Return the colour of a cell that is `bad` from 0 to 1, and that of the text on it."""
    share = min(max(bad, 0.0), 1.0)
    red, green, blue = (round(255 + (c - 255) * share) for c in (LEAK if leak else PRICE))
    return f"#{red:02x}{green:02x}{blue:02x}", "#ffffff" if share > 0.62 else INK


def _cell(x: float, y: float, cell: HeatCell) -> list[str]:
    fill, ink = ("", MUTED) if cell.bad is None else shade(cell.bad, cell.leak)
    ground = f'<rect x="{x + 1:g}" y="{y + 1:g}" width="{CELL - 2:g}" height="{ROW - 2:g}" rx="3" fill="{fill}"/>'
    return [*([ground] if fill else []), _text(x + CELL / 2, y + ROW * 0.68, cell.text, "middle", ink)]


def _text(x: float, y: float, text: str, anchor: str, ink: str, *, bold: bool = False) -> str:
    weight = ' font-weight="600"' if bold else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{ink}"{weight}>{escape(text)}</text>'
