"""The plot of what an attack that chooses among several achieved on rows held out, over the time that it took."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from splitfed.study.report.data import Setting, group_by
from splitfed.study.report.figures.style import SeriesStyles, as_svg, canvas, numbered_look

UNITS = {"mse": "MSE [dB]", "auc": "1 - AUC", "accuracy": "1 - accuracy"}
Attempts = Sequence[Mapping[str, Any]]


def plot_budget(settings: Sequence[Setting], attack: str, looks: SeriesStyles, name: str) -> str | None:
    """Plot the error of the attack labelled `attack` on rows it knows (MSE in dB, 1 - AUC or 1 - accuracy), a panel a
    setting.

    A line joins a member's sizes: each point has twice the work of the one before it. The grey staircase is the least
    error so far. Of the first seed; None where the attack chose among none.
    """
    told = [(s, found) for s in settings if (found := _attempts(s, attack))]
    if not told:
        return None
    unit = UNITS[_selection(told[0][0], attack)["metric"]]
    with canvas(len(told), 5.3, 3.6) as (figure, axes):
        for axis, (setting, attempts) in zip(axes, told, strict=True):
            _draw(axis, attempts)
            axis.set_title(looks.label(setting.defense, setting.place))
            axis.set(xscale="log", xlabel="seconds of the attack", ylabel=f"{unit} on its own rows (less leaks more)")
            axis.xaxis.set_minor_formatter("")
        return as_svg(figure, name, axes[0])


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
    told = (a["selection"] for a in setting.runs[0]["attacks"] if a["label"] == attack and a.get("selection"))
    return next(told, {"tried": [], "metric": "mse"})


def _draw(axis: Any, attempts: Attempts) -> None:
    least = [min(a["error"] for a in attempts[: i + 1]) for i in range(len(attempts))]
    axis.step([a["seconds"] for a in attempts], least, where="post", color="#c3cad1", lw=6, alpha=0.55, label="least")
    for number, (kind, members) in enumerate(group_by(attempts, lambda a: a["member"].partition(",")[0]).items()):
        look = numbered_look(number)
        for i, line in enumerate(group_by(members, lambda a: a["member"]).values()):
            seconds, errors = [a["seconds"] for a in line], [a["error"] for a in line]
            axis.plot(seconds, errors, lw=1.4, ms=5, label=None if i else kind, **look)
