"""Utility against leakage as SVG: a panel a topology and cut, a numbered point a defense, with its intervals."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from experiments.board.heat_map import INK, MUTED, RULE, SIZE, open_svg
from splitfed.drawing.figure import PALETTE
from splitfed.study.report.data import Estimate

WIDTH, PANEL, LEFT, BOTTOM, TOP, RIGHT = 490.0, 230.0, 44.0, 40.0, 26.0, 12.0
RADIUS = 7.5


class Point(NamedTuple):
    """A defense by its `number` in the legend: what it `leaks` (across) and its `utility` (up)."""

    number: int
    leaks: Estimate
    utility: Estimate


class Panel(NamedTuple):
    """The points of a place; `floor` and `ceiling` are drawn as lines."""

    title: str
    across: str
    up: str
    points: Sequence[Point]
    floor: float | None
    ceiling: float | None


def draw_scatter(title: str, panels: Sequence[Panel], names: Sequence[str]) -> str:
    """Return the panels, two in a row, with a legend of the `names` below: that of number 1 first."""
    columns = 1 if len(panels) == 1 else 2
    wide = WIDTH / columns
    rows = -(-len(panels) // columns)
    lines = -(-len(names) // 2)
    height = rows * PANEL + lines * (2 * RADIUS + 4) + 14
    parts = []
    for i, panel in enumerate(panels):
        parts += _panel(panel, (i % columns) * wide, (i // columns) * PANEL, wide)
    for i, name in enumerate(names):
        x, y = 14 + (i // lines) * WIDTH / 2, rows * PANEL + 12 + (i % lines) * (2 * RADIUS + 4)
        parts += [*_marker(x, y, i + 1), _text(x + 14, y + 4, name, "start", INK)]
    return "\n".join([*open_svg(title, WIDTH, height), *parts, "</svg>\n"])


def scale(values: Sequence[float]) -> tuple[float, float]:
    """Return an axis that holds all `values`, with a little room; never of no length."""
    low, high = min(values), max(values)
    room = 0.06 * (high - low) or 0.5
    return low - room, high + room


def _panel(panel: Panel, left: float, top: float, wide: float) -> list[str]:
    x0, x1, y0, y1 = left + LEFT, left + wide - RIGHT, top + PANEL - BOTTOM, top + TOP
    parts = [_text(x0, top + 16, panel.title, "start", INK, bold=True)]
    parts.append(f'<path d="M{x0:g} {y1:g}V{y0:g}H{x1:g}" fill="none" stroke="{MUTED}"/>')
    parts.append(_text((x0 + x1) / 2, y0 + 32, panel.across, "middle", MUTED))
    if not panel.points:
        return [*parts, _text((x0 + x1) / 2, (y0 + y1) / 2, "to do", "middle", MUTED)]
    marks = [value for value in (panel.floor, panel.ceiling) if value is not None]
    low_x, high_x = scale([*marks, *(bound for point in panel.points for bound in _bounds(point.leaks))])
    low_y, high_y = scale([bound for point in panel.points for bound in _bounds(point.utility)])

    def across(value: float) -> float:
        return x0 + (value - low_x) / (high_x - low_x) * (x1 - x0)

    def up(value: float) -> float:
        return y0 - (value - low_y) / (high_y - low_y) * (y0 - y1)

    for value, named in ((panel.floor, "floor"), (panel.ceiling, "no defense")):
        if value is not None:
            x = across(value)
            parts.append(
                f'<path d="M{x:g} {y1:g}V{y0:g}" stroke="{RULE}" stroke-dasharray="4 3"><title>{named}</title></path>'
            )
    parts += [_text(across(v), y0 + 15, f"{v:g}", "middle", MUTED) for v in _ticks(low_x, high_x)]
    parts += [_text(x0 - 5, up(v) + 4, f"{v:g}", "end", MUTED) for v in _ticks(low_y, high_y)]
    for point in panel.points:
        x, y = across(point.leaks.mean), up(point.utility.mean)
        (a, b), (c, d) = _bounds(point.leaks), _bounds(point.utility)
        bars = f"M{across(a):.1f} {y:.1f}H{across(b):.1f}M{x:.1f} {up(c):.1f}V{up(d):.1f}"
        parts.append(f'<path d="{bars}" stroke="{_colour(point.number)}" stroke-width="1.2" opacity="0.55"/>')
    for point in panel.points:
        said = f"{point.number}: {panel.across} {point.leaks.mean:.4g}, {panel.up} {point.utility.mean:.4g}"
        parts += _marker(across(point.leaks.mean), up(point.utility.mean), point.number, said)
    return parts


def _marker(x: float, y: float, number: int, said: str = "") -> list[str]:
    told = f"<title>{escape(said)}</title>" if said else ""
    circle = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{RADIUS:g}" fill="{_colour(number)}">{told}</circle>'
    return [circle, _text(x, y + 3.6, str(number), "middle", "#ffffff", size=10)]


def _colour(number: int) -> str:
    return INK if number == 1 else PALETTE[(number - 2) % len(PALETTE)]


def _bounds(value: Estimate) -> tuple[float, float]:
    return (value.mean if value.low is None else value.low), (value.mean if value.high is None else value.high)


def _ticks(low: float, high: float) -> list[float]:
    """Return some three round numbers between `low` and `high`."""
    step = next(s for s in _steps() if (high - low) / s <= 4)
    first = -(-low // step)
    return [round(k * step, 10) for k in range(int(first), int(high // step) + 1)]


def _steps() -> Sequence[float]:
    return [base * 10.0**power for power in range(-6, 8) for base in (1, 2, 5)]


def _text(x: float, y: float, text: str, anchor: str, ink: str, *, bold: bool = False, size: float = SIZE - 1) -> str:
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{ink}" font-size="{size:g}"{weight}>'
        f"{escape(text)}</text>"
    )
