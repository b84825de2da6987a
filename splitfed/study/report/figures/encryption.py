"""The plot of what encrypted runs cost beside runs in plain: utility, bytes and seconds, a row a setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from splitfed.study.report.data import NO_DEFENSE, error_bars
from splitfed.study.report.figures.style import INK, MUTED, PALETTE, as_svg, canvas, wrap_label

LABEL = 20
"""Characters of a setting's name in a line: the figure stays readable on a telephone, 400 pixels wide."""


def plot_encrypted_costs(rows: Sequence[Mapping[str, Any]], metric: str, name: str) -> str:
    """Plot the settings `rows` (as `encryption_section` returns them), a panel each for utility, bytes and seconds.

    Bytes and seconds are on logarithmic axes; bars are intervals. `metric`: what the utility is. `name` begins the ids
    of the SVG.
    """
    names = [wrap_label(row["name"], LABEL) for row in rows]
    lines = sum(label.count("\n") + 1 for label in names)
    panels = (("utility", f"test {metric}"), ("bytes", "bytes of training"), ("seconds", "seconds of training"))
    with canvas(len(panels), 4.4, 0.9 + 0.19 * lines + 0.1 * len(names), columns=1) as (figure, axes):
        for axis, (key, title) in zip(axes, panels, strict=True):
            for place, row in enumerate(reversed(rows)):
                if not (found := row["setting"][key]):
                    continue
                look = {**_look(row), "label": None}
                axis.errorbar(found["mean"], place, xerr=error_bars([found]), ms=7, capsize=3, ls="", **look)
            axis.set_yticks(range(len(names)), list(reversed(names)))
            axis.set(ylim=(-0.6, len(names) - 0.4), xlabel=title)
            if key != "utility":
                axis.set_xscale("log")
        # One entry of the legend for each look, not one for each row.
        for look in {_look(row)["label"]: _look(row) for row in rows}.values():
            axes[1].plot([], [], ls="", ms=7, **look)
        return as_svg(figure, name, axes[0])


def _look(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return colour, marker and label: encrypted, defended, or neither."""
    if row["batch"]:
        return {"color": PALETTE[0], "marker": "s", "label": "encrypted"}
    if row["setting"]["family"] == NO_DEFENSE:
        return {"color": INK, "marker": "o", "label": "in plain, undefended"}
    return {"color": PALETTE[1] if row["setting"]["privacy"] else MUTED, "marker": "D", "label": "in plain, private"}
