"""The plots of a report by round: utility, training loss, what training attacks recovered, and epsilon."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from splitfed.drawing.figure import INK, MARKERS, Panel, Rule, Series, draw_svg, numbered_look
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
from splitfed.study.report.figures.style import SeriesStyles, mean_rule
from splitfed.study.report.privacy import epsilon_per_round
from splitfed.study.results import RunResult

LabeledSettings = Sequence[tuple[str, Setting]]


def plot_training_curves(summary: Summary, settings: Sequence[Setting], looks: SeriesStyles, name: str) -> Markup:
    """Plot validation utility and training loss by round: the mean over seeds, and every seed as a thin line."""
    parts = {
        f"validation {summary['utility']['metric']}": lambda entry: (entry.get("validation") or {}).get("union"),
        "training loss": lambda entry: entry["loss"],
    }
    return draw_svg(
        [
            _panel(
                [
                    series
                    for setting, shade in zip(settings, _opacities(settings), strict=True)
                    for series in _mean_curve(
                        [by_round(run.history, read) for run in setting.runs], setting, looks, {"alpha": shade}
                    )
                ],
                title=title,
            )
            for title, read in parts.items()
        ],
        name,
    )


def plot_utility_by_round(named: LabeledSettings, metric: str, name: str, target: float | None = None) -> Markup:
    """Plot the utility by round for each of `named` (label, setting): the mean over seeds in its interval.

    On the union of the validation rows, of the test rows where a run has no other. `target`: a value to be marked.
    """
    curves = [
        Series(
            list(found),
            [e.mean for e in found.values()],
            label,
            numbered_look(i) | {"lw": 1.8, "ms": 4},
            y_ends=[(e.low, e.high) for e in found.values() if e.low is not None and e.high is not None],
            band=True,
        )
        for i, (label, setting) in enumerate(named)
        if (found := utility_by_round(setting))
    ]
    goal = [] if target is None else [Rule(target, f"target {target:g}", {"color": INK, "ls": (0, (1, 2))})]
    title = f"validation {metric}, all clients' rows"
    return draw_svg([_panel(curves, goal, ylabel=title)], name, 7.4, 4.2)


def utility_by_round(setting: Setting) -> dict[int, Estimate]:
    """Return round (from 1) -> the utility over seeds, for the rounds that were scored in every seed."""
    each = [by_round(run.history, scored_utility) for run in setting.runs]
    found = {r: estimate([one[r] for one in each], bounds=bounds_of(setting.runs)) for r in shared_rounds(each)}
    return {r: e for r, e in found.items() if e is not None}


def error_by_round(run: RunResult, attack: str, who: str = "attack") -> dict[int, float]:
    """Return round (from 1) -> mean squared error over the victims, where that labelled `attack` was scored."""
    party = next((a.adversary for a in run.attacks if a.label == attack and a.lives != "outside"), None)

    def read(entry: Mapping[str, Any]) -> Any:
        return (entry.get("training_attack_scores") or {}).get(party, {}).get("mse", {}).get(who)

    return by_round(run.history, read)


def plot_error_by_round(settings: Sequence[Setting], attack: str, looks: SeriesStyles, name: str) -> Markup:
    """Plot the mean squared error of the training attack labelled `attack`, by round; a line a setting.

    A thick line is the mean over seeds, thin ones are single seeds, the dashed one is the baseline that answers with
    the mean. Empty where no run was attacked while training went on.
    """
    every = [(setting, [error_by_round(run, attack) for run in setting.runs]) for setting in settings]
    curves = [(setting, seed_curves) for setting, seed_curves in every if all(seed_curves)]
    blind = [e for setting, _ in curves for e in error_by_round(setting.runs[0], attack, "mean_image").values()]
    lines = [series for setting, seed_curves in curves for series in _mean_curve(seed_curves, setting, looks)]
    title = "MSE over the victims: less is more leakage"
    panel = _panel(lines, mean_rule("mean_image", blind), yscale="log", ylabel=title)
    return draw_svg([panel] if curves else [], name, 6.4)


def plot_epsilon_by_round(settings: Sequence[Setting], looks: SeriesStyles, name: str) -> Markup:
    """Plot epsilon by round for each setting and each thing it protects; empty where nothing is promised."""
    told = [(setting, found) for setting in settings if (found := epsilon_per_round(setting.runs))]
    lines = [
        Series(
            rounds,
            epsilons,
            looks.label(setting.defense, setting.place) + (f": {protects}" if len(found) > 1 else ""),
            looks.line(setting.family, setting.place) | {"lw": 1.8, "marker": MARKERS[number % len(MARKERS)], "ms": 5},
        )
        for number, (setting, found) in enumerate(told)
        for protects, (rounds, epsilons) in found.items()
    ]
    return draw_svg([_panel(lines, yscale="log", ylabel="epsilon so far")] if told else [], name, 6.4, 3.4)


def _panel(series: Sequence[Series], rules: Sequence[Rule] = (), **axes: str) -> Panel:
    banded = any(one.band for one in series)
    return Panel(series, rules, {"xlabel": "round", **axes}, x_axis="whole numbers", clipped=banded)


def _mean_curve(
    each: Sequence[Mapping[int, float]], setting: Setting, looks: SeriesStyles, shade: Mapping[str, float] | None = None
) -> list[Series]:
    """Return every seed as a thin line, and the mean over seeds as a thick one."""
    look = looks.line(setting.family, setting.place) | dict(shade or {})
    shared = shared_rounds(each)
    mean = [sum(rounds[r] for rounds in each) / len(each) for r in shared]
    label = looks.label(setting.defense, setting.place)
    thin = [Series(list(one), list(one.values()), None, {"alpha": 0.6, **look, "lw": 0.6}) for one in each]
    return [*(thin if len(each) > 1 else []), Series(shared, mean, label, look | {"lw": 2, "marker": "."})]


def _opacities(settings: Sequence[Setting]) -> list[float]:
    """Return an opacity for each setting: within a family, the stronger the fuller."""
    ranks = {
        family: list(dict.fromkeys((s.measure, s.strength) for s in members))
        for family, members in group_by(settings, lambda s: s.family).items()
    }
    return [0.4 + 0.6 * (ranks[s.family].index((s.measure, s.strength)) + 1) / len(ranks[s.family]) for s in settings]
