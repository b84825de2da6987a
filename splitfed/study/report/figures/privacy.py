"""The plot of what a run has cost in privacy so far: epsilon after every round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from splitfed.study.report.data import Setting
from splitfed.study.report.figures.style import MARKERS, SeriesStyles, add_legend, as_svg, canvas
from splitfed.study.report.privacy import epsilon_per_round


def plot_epsilon_by_round(settings: Sequence[Setting], looks: SeriesStyles, name: str) -> str | None:
    """Plot epsilon by round for each setting and each thing it protects; None where nothing is promised."""
    epsilons_by_setting = [(setting, found) for setting in settings if (found := epsilon_per_round(setting.runs))]
    if not epsilons_by_setting:
        return None
    with canvas(1, 6.4, 3.4) as (figure, (axis,)):
        for number, (setting, lines) in enumerate(epsilons_by_setting):
            style: dict[str, Any] = {"color": looks.colours[setting.family], "ls": looks.dashes[setting.place]}
            for protects, (rounds, epsilons) in lines.items():
                label = looks.label(setting.defense, setting.place) + (f": {protects}" if len(lines) > 1 else "")
                axis.plot(rounds, epsilons, lw=1.8, marker=MARKERS[number % len(MARKERS)], ms=5, label=label, **style)
        axis.set(yscale="log", xlabel="round", ylabel="epsilon so far")
        axis.xaxis.get_major_locator().set_params(integer=True)
        add_legend(figure, axis)
        return as_svg(figure, name)
