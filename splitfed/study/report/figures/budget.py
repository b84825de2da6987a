"""The plot of what an attack that chooses among several achieved on rows held out, over the time that it took."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from splitfed.drawing.figure import Panel, Series, draw_svg, numbered_look, staircase
from splitfed.study.report.data import Setting, group_by
from splitfed.study.report.figures.style import SeriesStyles

UNITS = {"mse": "MSE [dB]", "auc": "1 - AUC", "accuracy": "1 - accuracy"}
Attempts = Sequence[Mapping[str, Any]]


def plot_budget(settings: Sequence[Setting], attack: str, looks: SeriesStyles, name: str) -> Markup:
    """Plot the error of the attack labelled `attack` on rows it knows (MSE in dB, 1 - AUC or 1 - accuracy), a panel a
    setting.

    A line joins a member's sizes: each point has twice the work of the one before it. The grey staircase is the least
    error so far. Of the first seed; empty where the attack chose among none.
    """
    told = [(s, found) for s in settings if (found := _attempts(s, attack))]
    panels = [
        Panel(
            _lines(attempts),
            axes={
                "title": looks.label(setting.defense, setting.place),
                "xlabel": "seconds of the attack",
                "ylabel": f"{UNITS[_selection(told[0][0], attack)['metric']]} on its own rows (less leaks more)",
            },
            x_axis="powers of ten",
        )
        for setting, attempts in told
    ]
    return draw_svg(panels, name, 5.3, 3.6)


def _attempts(setting: Setting, attack: str) -> list[Mapping[str, Any]]:
    """Return the attempts of the first seed in their order, each with the `seconds` that had passed when it ended."""
    passed, selection = 0.0, _selection(setting, attack)
    found: list[Mapping[str, Any]] = []
    for attempt in selection["tried"]:
        passed += attempt["seconds"]
        # Without rows to judge by there is no error, and none at all has no decibels.
        if attempt["error"] or (attempt["error"] == 0 and selection["metric"] != "mse"):
            error = 10 * math.log10(attempt["error"]) if selection["metric"] == "mse" else attempt["error"]
            found.append({**attempt, "seconds": passed, "error": error})
    return found


def _selection(setting: Setting, attack: str) -> Mapping[str, Any]:
    """Return what the attack told of its choice in the first seed; without attempts where it chose among none."""
    found = setting.runs[0].attack(attack)
    return found.selection if found is not None and found.selection else {"tried": [], "metric": "mse"}


def _lines(attempts: Attempts) -> list[Series]:
    least = [(a["seconds"], min(b["error"] for b in attempts[: i + 1])) for i, a in enumerate(attempts)]
    kinds = group_by(attempts, lambda a: a["member"].partition(",")[0])
    members = [
        Series(
            [a["seconds"] for a in line],
            [a["error"] for a in line],
            kind,
            numbered_look(number) | {"lw": 1.4, "ms": 5},
        )
        for number, (kind, tried) in enumerate(kinds.items())
        for line in group_by(tried, lambda a: a["member"]).values()
    ]
    return [*staircase(least, "least"), *members]
