"""The plots of a report by round: utility, training loss, what training attacks recovered, and epsilon."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from splitfed.study.report.data import (
    Estimate,
    Setting,
    Summary,
    bounds_of,
    by_round,
    estimate,
    group_by,
    scored_utility,
    shared_rounds,
)
from splitfed.study.report.figures.style import (
    INK,
    MARKERS,
    SeriesStyles,
    as_svg,
    canvas,
    numbered_look,
)
from splitfed.study.report.figures.tradeoff_front import draw_baseline
from splitfed.study.report.privacy import epsilon_per_round

LabeledSettings = Sequence[tuple[str, Setting]]


def plot_training_curves(summary: Summary, settings: Sequence[Setting], looks: SeriesStyles, name: str) -> str:
    """Plot validation utility and training loss by round: the mean over seeds, and every seed as a thin line."""
    shades = _opacities(settings)
    parts = {
        f"validation {summary['utility']['metric']}": lambda entry: (entry.get("validation") or {}).get("union"),
        "training loss": lambda entry: entry["loss"],
    }
    with canvas(2) as (figure, axes):
        for axis, (title, read) in zip(axes, parts.items(), strict=True):
            for setting, shade in zip(settings, shades, strict=True):
                style = {"color": looks.colours[setting.family], "ls": looks.dashes[setting.place], "alpha": shade}
                each = [by_round(run["history"], read) for run in setting.runs]
                _draw_mean(axis, each, looks.label(setting.defense, setting.place), style)
            axis.set_title(title)
            _set_round_axis(axis)
        return as_svg(figure, name, axes[0])


def plot_utility_by_round(named: LabeledSettings, metric: str, name: str, target: float | None = None) -> str:
    """Plot the utility by round for each of `named` (label, setting): the mean over seeds in its interval.

    On the union of the validation rows, of the test rows where a run has no other. `target`: a value to be marked.
    """
    shaded: list[tuple[Any, ...]] = []
    with canvas(1, 7.4, 4.2) as (figure, (axis,)):
        for i, (label, setting) in enumerate(named):
            if not (found := utility_by_round(setting)):
                continue
            look = numbered_look(i)
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
        _set_round_axis(axis, f"validation {metric}, all clients' rows")
        return as_svg(figure, name, axis)


def utility_by_round(setting: Setting) -> dict[int, Estimate]:
    """Return round (from 1) -> the utility over seeds, for the rounds that were scored in every seed."""
    each = [by_round(run["history"], scored_utility) for run in setting.runs]
    found = {r: estimate([one[r] for one in each], bounds=bounds_of(setting.runs)) for r in shared_rounds(each)}
    return {r: e for r, e in found.items() if e is not None}


def error_by_round(run: Mapping[str, Any], attack: str, who: str = "attack") -> dict[int, float]:
    """Return round (from 1) -> mean squared error over the victims, where that labelled `attack` was scored."""
    party = next((a["adversary"] for a in run["attacks"] if a["label"] == attack and a.get("lives") != "outside"), None)

    def read(entry: Mapping[str, Any]) -> Any:
        return (entry.get("training_attack_scores") or {}).get(party, {}).get("mse", {}).get(who)

    return by_round(run["history"], read)


def plot_error_by_round(
    summary: Summary, settings: Sequence[Setting], attack: str, looks: SeriesStyles, name: str
) -> str | None:
    """Return an SVG of the mean squared error of the training attack labelled `attack`, by round; a line a setting.

    A thick line is the mean over seeds, thin ones are single seeds, the dashed one is the baseline that answers with
    the mean. None where no run was attacked while training went on.
    """
    every = [(setting, [error_by_round(run, attack) for run in setting.runs]) for setting in settings]
    if not (curves := [(setting, seed_curves) for setting, seed_curves in every if all(seed_curves)]):
        return None
    with canvas(1, 6.4, 3.9) as (figure, (axis,)):
        for setting, seed_curves in curves:
            style = {"color": looks.colours[setting.family], "ls": looks.dashes[setting.place]}
            _draw_mean(axis, seed_curves, looks.label(setting.defense, setting.place), style)
        blind = [error_by_round(setting.runs[0], attack, "mean_image").values() for setting, _ in curves]
        draw_baseline(axis.axhline, "mean_image", [error for errors in blind for error in errors])
        axis.set_yscale("log")
        _set_round_axis(axis, "MSE over the victims: less is more leakage")
        return as_svg(figure, name, axis)


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
        axis.set_yscale("log")
        _set_round_axis(axis, "epsilon so far")
        return as_svg(figure, name, axis)


def _draw_mean(axis: Any, each: Sequence[Mapping[int, float]], label: str, style: Mapping[str, Any]) -> None:
    """Draw the mean over seeds as a thick line, and every seed as a thin one."""
    for rounds in each if len(each) > 1 else []:
        axis.plot(list(rounds), list(rounds.values()), lw=0.6, **{"alpha": 0.6, **style})
    shared = shared_rounds(each)
    mean = [sum(rounds[r] for rounds in each) / len(each) for r in shared]
    axis.plot(shared, mean, lw=2, marker=".", label=label, **style)


def _set_round_axis(axis: Any, title: str = "") -> None:
    axis.set(xlabel="round", ylabel=title)
    axis.xaxis.get_major_locator().set_params(integer=True)


def _opacities(settings: Sequence[Setting]) -> list[float]:
    """Return an opacity for each setting: within a family, the stronger the fuller."""
    ranks = {
        family: list(dict.fromkeys((s.measure, s.strength) for s in members))
        for family, members in group_by(settings, lambda s: s.family).items()
    }
    return [0.4 + 0.6 * (ranks[s.family].index((s.measure, s.strength)) + 1) / len(ranks[s.family]) for s in settings]
