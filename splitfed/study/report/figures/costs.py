"""The plots of what training costs, as inline SVG: split against federated bytes, accuracy against simulated time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from splitfed.core.errors import InvalidInput
from splitfed.costs.crossover import Crossover
from splitfed.study.report.figures.style import DASHES, INK, MARKERS, MUTED, PALETTE, as_svg, canvas

Line = tuple[Sequence[float], Sequence[float]]  # times, accuracies
Curve = tuple[str, Sequence[float], Sequence[float]]  # label, times, accuracies
_TITLES = {"clients": "number of clients", "parameters": "parameters of the model"}
_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "bytes"))
_SPANS = ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))


def plot_crossovers(found: Sequence[Crossover], name: str) -> str:
    """Plot bytes of an epoch of split and federated learning, a panel each, with the threshold between them.

    `name` begins the ids of the SVG. `InvalidInput` without a panel.
    """
    if not found:
        raise InvalidInput("there is no crossover to plot; expected at least one")
    with canvas(len(found)) as (figure, axes):
        for axis, one in zip(axes, found, strict=True):
            scale, unit = _largest_unit(max(*one.split, *one.federated), _UNITS)
            for values, label, look in (
                (one.split, "split learning", {"color": PALETTE[0], "ls": "-"}),
                (one.federated, "federated learning", {"color": PALETTE[1], "ls": "--"}),
            ):
                axis.plot(one.values, [v / scale for v in values], lw=2, label=label, **look)
            _mark_threshold(axis, one)
            axis.set(xscale="log", yscale="log", xlabel=_TITLES[one.over], ylabel=f"{unit} an epoch, all clients")
        return as_svg(figure, name, axes[0])


def plot_accuracy_over_time(
    curves: Sequence[Curve], metric: str, name: str, seeds: Sequence[Sequence[Line]] = ()
) -> str:
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
    looks = zip(itertools.cycle(PALETTE), itertools.cycle(MARKERS), itertools.cycle(DASHES))
    thin = itertools.chain(seeds, itertools.repeat(()))
    with canvas(1, width=7.0) as (figure, axes):
        for (label, times, values), each, (colour, marker, dashes) in zip(curves, thin, looks, strict=False):
            for when, one in each:
                axes[0].plot([t / scale for t in when], list(one), lw=0.6, color=colour, ls=dashes)
            axes[0].plot(
                [t / scale for t in times],
                list(values),
                lw=1.8,
                ms=4,
                label=label,
                color=colour,
                marker=marker,
                ls=dashes,
            )
        axes[0].set_xlim(left=0)
        axes[0].set(xlabel=f"simulated time in {unit}", ylabel=metric)
        return as_svg(figure, name, axes[0])


def _mark_threshold(axis: Any, one: Crossover) -> None:
    """Mark where the lines cross, if that is within what is plotted."""
    axis.set_title("federated learning sends less throughout")
    if one.threshold <= min(one.values):
        axis.set_title("split learning sends less throughout")
    elif one.threshold <= max(one.values):
        axis.axvline(one.threshold, color=MUTED, ls=":", lw=1.4)
        axis.set_title(f"split learning sends less from {math.ceil(one.threshold):,} {one.over} on", color=INK)


def _largest_unit(largest: float, units: Sequence[tuple[float, str]]) -> tuple[float, str]:
    return next((entry for entry in units if largest >= entry[0]), units[-1])
