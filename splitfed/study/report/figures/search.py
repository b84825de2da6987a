"""The plot of a search's trials: every pair of objectives against each other, the front marked."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from splitfed.drawing.figure import INK, MARKERS, MUTED, PALETTE, Panel, Series, draw_svg, staircase, wrap_label
from splitfed.study.report.data import call_defense, group_by, interval_ends
from splitfed.study.report.search_data import SearchOutcome, metric_label

PANELS = 6
"""Pairs of objectives that are drawn; of more, the pairs with the first objective come first."""

Records = Sequence[Mapping[str, Any]]


def plot_trials(outcome: SearchOutcome, name: str) -> Markup:
    """Plot the trials that have values, a panel a pair of objectives; one objective against the number of the trial.

    Colours are families of defenses, crosses trials outside the constraints. Empty where no trial has values.
    """
    scored = [record for record in outcome.records if record["state"] == "complete"]
    goals = list(outcome.directions)
    pairs = list(itertools.islice(itertools.combinations(goals, 2), PANELS)) or [("trial", goals[0])]
    return draw_svg([_panel(outcome, scored, *pair) for pair in pairs] if scored else [], name)


def _panel(outcome: SearchOutcome, scored: Records, across: str, up: str) -> Panel:
    every = sorted({str(record["setting"]["family"]) for record in scored})
    left = [record for record in scored if not record["feasible"]]
    kept = group_by((r for r in scored if r["feasible"]), lambda record: str(record["setting"]["family"]))
    trials = [
        Series(
            *_places(members, across, up),
            call_defense(family),
            {
                "color": PALETTE[every.index(family) % len(PALETTE)],
                "marker": MARKERS[every.index(family) % len(MARKERS)],
                "ls": "",
                "ms": 6,
                "mec": "white",
                "zorder": 3,
            },
        )
        for family, members in kept.items()
    ]
    crosses = {"color": MUTED, "marker": "x", "ls": "", "ms": 5}
    outside = [Series(*_places(left, across, up), "outside the constraints", crosses)] if left else []
    titles = {"xlabel": _axis_title(outcome, across), "ylabel": _axis_title(outcome, up)}
    return Panel([*trials, *outside, *_front(outcome, across, up)], axes=titles)


def _front(outcome: SearchOutcome, across: str, up: str) -> list[Series]:
    """Ring and number the trials on the front, with their intervals; of two objectives it is a staircase."""
    if not (best := outcome.best):
        return []
    xs, ys = _places(best, across, up)
    # The step goes to the next point at the value that both reach.
    steps = sorted(zip(xs, ys, strict=True), reverse=outcome.directions.get(across) != "minimize")
    stairs = staircase(steps) if len(outcome.directions) == 2 else []
    ring = Series(
        *(xs, ys, "front", {"color": INK, "marker": "o", "ls": "", "ms": 10, "mfc": "none", "mew": 1.4, "zorder": 4}),
        x_ends=[_ends(record, across, x) for record, x in zip(best, xs, strict=True)],
        y_ends=[_ends(record, up, y) for record, y in zip(best, ys, strict=True)],
        notes=[str(record["trial"]) for record in best],
    )
    return [*stairs, ring]


def _ends(record: Mapping[str, Any], goal: str, value: float) -> tuple[float, float]:
    """Return the interval of what counts; `value` twice without one, and where a cap counts in place of the value."""
    found = record["metrics"].get(goal, {"mean": None})
    same = found["mean"] is not None and found["mean"] == record["objectives"][goal]
    return interval_ends(found) if same else (value, value)


def _places(records: Records, across: str, up: str) -> tuple[list[float], list[float]]:
    xs = [float(record["objectives"].get(across, record["trial"])) for record in records]
    return xs, [float(record["objectives"][up]) for record in records]


def _axis_title(outcome: SearchOutcome, goal: str) -> str:
    if goal not in outcome.directions:
        return goal
    better = "less" if outcome.directions[goal] == "minimize" else "more"
    cap = outcome.table["objectives"][goal]
    capped = f", counted up to {cap['cap']:g}" if isinstance(cap, Mapping) and "cap" in cap else ""
    return wrap_label(f"{metric_label(goal)}: {better} is better{capped}", 46)
