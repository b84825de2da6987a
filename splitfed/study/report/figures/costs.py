"""The plots of what training costs: split against federated bytes, accuracy against simulated time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from splitfed.core.errors import InvalidInput
from splitfed.costs.singh import Crossover
from splitfed.drawing.figure import DASHES, MARKERS, PALETTE, Panel, Rule, Series, draw_svg

Line = tuple[Sequence[float], Sequence[float]]  # times, accuracies
Curve = tuple[str, Sequence[float], Sequence[float]]  # label, times, accuracies
_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "bytes"))
_SPANS = ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))


def plot_crossovers(found: Sequence[Crossover], name: str) -> Markup:
    """Plot bytes of an epoch of split and federated learning, a panel each, with the threshold between them.

    `name` begins the ids of the SVG. `InvalidInput` without a panel.
    """
    if not found:
        raise InvalidInput("there is no crossover to plot; expected at least one")
    return draw_svg([_crossover_panel(one) for one in found], name)


def plot_accuracy_over_time(
    curves: Sequence[Curve], metric: str, name: str, seeds: Sequence[Sequence[Line]] = ()
) -> Markup:
    """Plot a utility against simulated time, a line for each of `curves` (label, seconds, values).

    `metric`: what the values are, for the axis; `seeds`: for each curve, the lines it is the mean of, drawn thin.
    `InvalidInput` without a curve, or where times and values differ in number.
    """
    for label, times, values in curves:
        if len(times) != len(values) or not len(times):
            raise InvalidInput(f"curve {label!r} has {len(times)} times and {len(values)} values; expected as many")
    if not curves:
        raise InvalidInput("there is no curve to plot; expected at least one")
    scale, unit = _largest_unit(max(t for _, times, _ in curves for t in times), _SPANS)
    series = []
    for i, (label, times, values) in enumerate(curves):
        look: dict[str, Any] = {"color": PALETTE[i % len(PALETTE)], "ls": DASHES[i % len(DASHES)]}
        for when, one in seeds[i] if seeds else ():
            series.append(Series([t / scale for t in when], list(one), None, look | {"lw": 0.6}))
        look |= {"marker": MARKERS[i % len(MARKERS)], "lw": 1.8, "ms": 4}
        series.append(Series([t / scale for t in times], list(values), label, look))
    axes = {"xlim": (0, None), "xlabel": f"simulated time in {unit}", "ylabel": metric}
    return draw_svg([Panel(series, axes=axes)], name, 7.0)


def _crossover_panel(one: Crossover) -> Panel:
    scale, unit = _largest_unit(max(*one.split, *one.federated), _UNITS)
    lines = [
        Series(one.values, [v / scale for v in values], label, {"color": colour, "ls": dashes, "lw": 2})
        for values, label, colour, dashes in (
            (one.split, "split learning", PALETTE[0], "-"),
            (one.federated, "federated learning", PALETTE[1], "--"),
        )
    ]
    # Where the lines cross is marked if it is within what is plotted.
    crossing, title = [], "federated learning sends less throughout"
    if one.threshold <= min(one.values):
        title = "split learning sends less throughout"
    elif one.threshold <= max(one.values):
        crossing = [Rule(one.threshold, None, {"ls": ":", "lw": 1.4}, upright=True)]
        title = f"split learning sends less from {math.ceil(one.threshold):,} clients on"
    titles = {"title": title, "xlabel": "number of clients", "ylabel": f"{unit} an epoch, all clients"}
    return Panel(lines, crossing, {"yscale": "log", **titles}, x_axis="log")


def _largest_unit(largest: float, units: Sequence[tuple[float, str]]) -> tuple[float, str]:
    return next((entry for entry in units if largest >= entry[0]), units[-1])
