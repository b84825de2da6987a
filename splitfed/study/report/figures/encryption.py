"""The plot of what encrypted runs cost beside runs in plain: utility, bytes and seconds, a row a setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from splitfed.drawing.figure import INK, MUTED, PALETTE, Panel, Series, draw_svg, row_height, wrap_label
from splitfed.study.report.data import NO_DEFENSE, interval_ends

LABEL = 20
"""Characters of a setting's name in a line: the figure stays readable on a telephone, 400 pixels wide."""


def plot_encrypted_costs(rows: Sequence[Mapping[str, Any]], metric: str, name: str) -> Markup:
    """Plot the settings `rows` (as `encryption_section` returns them), a panel each for utility, bytes and seconds.

    Bytes and seconds are on logarithmic axes; bars are intervals. `metric`: what the utility is. `name` begins the ids
    of the SVG.
    """
    names = [wrap_label(row["name"], LABEL) for row in rows]
    titles = {"utility": f"test {metric}", "bytes": "bytes of training", "seconds": "seconds of training"}
    panels = [
        Panel(
            [
                Series([found["mean"]], [place], **_look(row), x_ends=[interval_ends(found)])
                for place, row in enumerate(rows)
                if (found := row["setting"][key])
            ],
            axes={"xlabel": title},
            x_axis="" if key == "utility" else "log",
            rows=names,
        )
        for key, title in titles.items()
    ]
    return draw_svg(panels if rows else [], name, 4.4, row_height(names), columns=1)


def _look(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return label and look: encrypted, defended, or neither."""
    label, colour, marker = "in plain, private", PALETTE[1] if row["setting"]["privacy"] else MUTED, "D"
    if row["batch"]:
        label, colour, marker = "encrypted", PALETTE[0], "s"
    elif row["setting"]["family"] == NO_DEFENSE:
        label, colour, marker = "in plain, undefended", INK, "o"
    return {"label": label, "look": {"color": colour, "marker": marker, "ls": "", "ms": 7}}
