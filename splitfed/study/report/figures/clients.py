"""The plots of a study of several clients: the utility by round with intervals over seeds, and every client's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from splitfed.study.report.data import Estimate, Setting, bounds_of, estimate
from splitfed.study.report.figures.style import (
    DASHES,
    GRID,
    INK,
    MARKERS,
    PALETTE,
    add_legend,
    as_svg,
    canvas,
    wrap_label,
)

LabeledSettings = Sequence[tuple[str, Setting]]


def plot_utility_by_round(named: LabeledSettings, metric: str, name: str, target: float | None = None) -> str:
    """Plot the utility by round for each of `named` (label, setting): the mean over seeds in its interval.

    On the union of the validation rows, of the test rows where a run has no other. `target`: a value to be marked.
    """
    shaded: list[tuple[Any, ...]] = []
    with canvas(1, 7.4, 4.2) as (figure, (axis,)):
        for i, (label, setting) in enumerate(named):
            found = utility_by_round(setting)
            if not found:
                continue
            look = _line_style(i)
            axis.plot(list(found), [e.mean for e in found.values()], lw=1.8, ms=4, label=label, **look)
            bounds = {r: (e.low, e.high) for r, e in found.items() if e.low is not None and e.high is not None}
            if bounds:
                shaded.append((list(bounds), *zip(*bounds.values(), strict=True), look["color"]))
        # An interval can be far wider than all that is to be seen: it runs out of the frame.
        low, high = axis.get_ylim()
        for there, below, above, colour in shaded:
            axis.fill_between(there, below, above, color=colour, alpha=0.14, lw=0)
        axis.set_ylim(low - 0.25 * (high - low), high + 0.25 * (high - low))
        if target is not None:
            axis.axhline(target, color=INK, ls=(0, (1, 2)), lw=1.2, label=f"target {target:g}")
        axis.set_xlabel("round")
        axis.set_ylabel(f"validation {metric}, all clients' rows")
        axis.xaxis.get_major_locator().set_params(integer=True)
        add_legend(figure, axis)
        return as_svg(figure, name)


def plot_client_scores(named: LabeledSettings, metric: str, name: str) -> str:
    """Plot each client's test utility on its own rows, a row a setting: every seed a dot, the mean over all a bar."""
    names = [wrap_label(label, 40) for label, _ in named]
    row_height = max(0.42, 0.12 + 0.17 * max(name.count("\n") + 1 for name in names))
    with canvas(1, 7.4, 1.1 + row_height * len(named)) as (figure, (axis,)):
        for i, (_, setting) in enumerate(named):
            scores = [s for run in setting.runs for s in run["utility"]["clients"] if s is not None]
            if not scores:
                continue
            place, colour = len(named) - 1 - i, PALETTE[i % len(PALETTE)]
            axis.plot([min(scores), max(scores)], [place, place], color=GRID, lw=5, zorder=1)
            axis.plot(scores, [place] * len(scores), ls="", marker="o", ms=5, color=colour, alpha=0.45, zorder=2)
            mean = sum(scores) / len(scores)
            axis.plot([mean, mean], [place - 0.28, place + 0.28], color=INK, lw=2, zorder=3)
        axis.set_yticks(range(len(named)), list(reversed(names)))
        axis.set_ylim(-0.6, len(named) - 0.4)
        axis.set_xlabel(f"test {metric} of a client on its own rows (bar: the mean)")
        return as_svg(figure, name)


def utility_by_round(setting: Setting) -> dict[int, Estimate]:
    """Return round (from 1) -> the utility over seeds, for the rounds that were scored in every seed."""
    each = [_utility_of_run(run["history"]) for run in setting.runs]
    shared = [r for r in each[0] if all(r in one for one in each)] if each else []
    found = {r: estimate([one[r] for one in each], bounds=bounds_of(setting.runs)) for r in shared}
    return {r: e for r, e in found.items() if e is not None}


def _utility_of_run(history: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    found = {}
    for entry in history:
        scores = [(entry.get(part) or {}).get("union") for part in ("validation", "test")]
        value = next((score for score in scores if score is not None), None)
        if value is not None:
            found[int(entry["round"]) + 1] = float(value)
    return found


def _line_style(number: int) -> dict[str, Any]:
    turn = number // len(PALETTE)
    return {
        "color": PALETTE[number % len(PALETTE)],
        "ls": DASHES[turn % len(DASHES)],
        "marker": MARKERS[number % len(MARKERS)],
    }
