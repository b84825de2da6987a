"""What the plots of a report share: a look for each family and place, and the baselines beside scores."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from splitfed.drawing.figure import DASHES, INK, MARKERS, PALETTE, Rule
from splitfed.study.report.data import NO_DEFENSE, Summary, interval_ends
from splitfed.study.report.metrics import METRICS

BASELINE_STYLES = {
    "mean_image": ("the mean", (0, (5, 3))),
    "mean_release": ("the mean", (0, (5, 3))),
    "frequent_token": ("the most frequent token", (0, (5, 3))),
    "own_features": ("the adversary's own data alone", (0, (5, 1))),
    "majority": ("the most frequent label", (0, (5, 3))),
    "chance": ("chance", (0, (5, 3))),
    "prior": ("the auxiliary rows' shares", (0, (5, 3))),
    "random_pairing": ("another victim", (0, (1, 2))),
}


class SeriesStyles:
    """Gives every family of defenses a colour, every place (topology, schedule) a marker and a dash, in all figures."""

    def __init__(self, summary: Summary) -> None:
        families = dict.fromkeys(s["family"] for s in summary["settings"] if s["family"] != NO_DEFENSE)
        self.names: Mapping[str, str] = summary["names"]
        self.colours = {NO_DEFENSE: INK, **dict(zip(families, itertools.cycle(PALETTE), strict=False))}
        self.markers = dict(zip(summary["places"], itertools.cycle(MARKERS), strict=False))
        self.dashes = dict(zip(summary["places"], itertools.cycle(DASHES), strict=False))

    def label(self, name: str, place: str) -> str:
        """Name a line: a family, a defense or an attack by its short name, and the place where there are several."""
        known = self.names.get(name, name)
        return known if len(self.markers) == 1 else f"{known}, {self.names[place]}"

    def line(self, family: str, place: str) -> dict[str, Any]:
        """Return the colour and dashes of a line."""
        return {"color": self.colours[family], "ls": self.dashes[place]}


class Point(NamedTuple):
    """A setting in a plot: `x` what the attack reached (an estimate), `y` the utility, and the baselines.

    `reversed`: whether the score was on the other side of the metric's centre, and `x` is what turning it over gives.
    """

    setting: Mapping[str, Any]
    x: Mapping[str, Any]
    y: Mapping[str, Any]
    scores: Mapping[str, Any]
    reversed: bool = False


def scored_metrics(summary: Summary, attack: str) -> list[str]:
    """Return the metrics in which `attack` was scored."""
    return [m for m in summary["metrics"] if points_of(summary["settings"], attack, m)]


def points_of(settings: Iterable[Mapping[str, Any]], attack: str, metric: str) -> list[Point]:
    """Return the settings in which the attack was scored in `metric` and the utility is known."""
    found = []
    for setting in settings:
        scores = setting["attacks"].get(attack, {}).get("scores", {}).get(metric) or {}
        if scores.get("attack") and setting["utility"]:
            score, turned = turn_over(metric, scores["attack"])
            found.append(Point(setting, score, setting["utility"], scores, turned))
    return found


def turn_over(metric: str, found: Mapping[str, Any]) -> tuple[Mapping[str, Any], bool]:
    """Return an estimate as far above the metric's centre as it is from it, and whether that turned it over.

    A metric without a centre is left as it is. An interval ends at the centre: nothing leaks less than nothing.
    """
    centre, mean = METRICS[metric].centre, found["mean"]
    if centre is None:
        return found, False
    low, high = interval_ends(found)
    if mean < centre:
        low, high = 2 * centre - high, 2 * centre - low
    known = {} if found["low"] is None else {"low": max(low, centre), "high": high}
    return {**found, "mean": METRICS[metric].leak(mean), **known}, mean < centre


def baseline_rules(scores: Sequence[Mapping[str, Any]], upright: bool = False) -> list[Rule]:
    """Return the baselines that see nothing: the mean of each over the `scores` of several settings that have it."""
    return [
        rule
        for who in BASELINE_STYLES
        for rule in mean_rule(who, [one[who]["mean"] for one in scores if one.get(who)], upright)
    ]


def mean_rule(who: str, values: Sequence[float], upright: bool = False) -> list[Rule]:
    """Return the line at the mean of `values`, which the baseline `who` reached; none where there are none."""
    label, dashes = BASELINE_STYLES[who]
    return [Rule(sum(values) / len(values), f"baseline: {label}", {"ls": dashes}, upright)] if values else []


def metric_title(metric: str, reversed_too: bool = False) -> str:
    """Return the name of a metric with its unit, for an axis; of one turned over where it was reversed, it says so."""
    known = METRICS[metric]
    unit = f" [{known.unit.strip()}]" if known.unit else ""
    return f"{known.title}{unit}{f' (1 - {known.title} where reversed)' if reversed_too else ''}"
