"""The plot of a search's trials: every pair of objectives against each other, the front marked."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from splitfed.study.report.data import group_by, interval_ends
from splitfed.study.report.figures.style import INK, MARKERS, MUTED, PALETTE, as_svg, canvas, wrap_label
from splitfed.study.report.search_data import SearchOutcome, metric_label

PANELS = 6
"""Pairs of objectives that are drawn; of more, the pairs with the first objective come first."""

Records = Sequence[Mapping[str, Any]]


def plot_trials(outcome: SearchOutcome, name: str) -> str | None:
    """Plot the trials that have values, a panel a pair of objectives; one objective against the number of the trial.

    Colours are families of defenses, crosses trials outside the constraints. None where no trial has values.
    """
    scored = [record for record in outcome.records if record["state"] == "complete"]
    if not scored:
        return None
    goals = list(outcome.directions)
    pairs: list[tuple[str | None, str]] = [*itertools.islice(itertools.combinations(goals, 2), PANELS)]
    pairs = pairs or [(None, goals[0])]
    with canvas(len(pairs)) as (figure, axes):
        for axis, (across, up) in zip(axes, pairs, strict=True):
            _draw_trials(axis, scored, across, up)
            _draw_front(axis, outcome, across, up)
            axis.set(
                xlabel="trial" if across is None else _axis_title(outcome, across), ylabel=_axis_title(outcome, up)
            )
        return as_svg(figure, name, axes[0])


def _draw_trials(axis: Any, scored: Records, across: str | None, up: str) -> None:
    """Draw every trial: filled where it holds to the constraints, a cross where it does not."""
    kept = [record for record in scored if record["feasible"]]
    left = [record for record in scored if not record["feasible"]]
    families = group_by(kept, lambda record: str(record["setting"]["family"]))
    every = sorted({str(record["setting"]["family"]) for record in scored})
    for family, members in families.items():
        number = every.index(family)
        axis.plot(
            *_places(members, across, up),
            color=PALETTE[number % len(PALETTE)],
            marker=MARKERS[number % len(MARKERS)],
            ls="",
            ms=6,
            mec="white",
            label="undefended" if family == "none" else family,
            zorder=3,
        )
    if left:
        axis.plot(*_places(left, across, up), color=MUTED, marker="x", ls="", ms=5, label="outside the constraints")


def _draw_front(axis: Any, outcome: SearchOutcome, across: str | None, up: str) -> None:
    """Ring and number the trials on the front, with their intervals; of two objectives it is a staircase."""
    best = outcome.best
    if not best:
        return
    xs, ys = _places(best, across, up)
    if across is not None and len(outcome.directions) == 2:
        # The step goes to the next point at the value that both reach.
        minimized = outcome.directions[across] == "minimize"
        steps = sorted(zip(xs, ys, strict=True), reverse=not minimized)
        axis.step(*zip(*steps, strict=True), where="post", color="#c3cad1", lw=6, alpha=0.55)
    for record, x, y in zip(best, xs, ys, strict=True):
        if across is not None and (ends := _ends(record, across)) is not None:
            axis.plot(ends, [y, y], color=INK, lw=1.0, alpha=0.6)
        if (ends := _ends(record, up)) is not None:
            axis.plot([x, x], ends, color=INK, lw=1.0, alpha=0.6)
        axis.annotate(str(record["trial"]), (x, y), (6, 5), textcoords="offset points", color=INK, fontsize=8.5)
    axis.plot(xs, ys, color=INK, marker="o", ls="", ms=10, mfc="none", mew=1.4, label="front", zorder=4)


def _ends(record: Mapping[str, Any], goal: str) -> tuple[float, float] | None:
    """Return the interval of what counts, None where there is none, and where a cap counts in place of the value."""
    found = record["metrics"][goal]
    same = found["mean"] is not None and found["mean"] == record["objectives"][goal]
    return interval_ends(found) if same and found["low"] is not None else None


def _places(records: Records, across: str | None, up: str) -> tuple[list[float], list[float]]:
    xs = [float(record["trial"] if across is None else record["objectives"][across]) for record in records]
    return xs, [float(record["objectives"][up]) for record in records]


def _axis_title(outcome: SearchOutcome, goal: str) -> str:
    better = "less" if outcome.directions[goal] == "minimize" else "more"
    cap = outcome.table["objectives"][goal]
    capped = f", counted up to {cap['cap']:g}" if isinstance(cap, Mapping) and "cap" in cap else ""
    return wrap_label(f"{metric_label(goal)}: {better} is better{capped}", 46)
