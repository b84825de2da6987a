"""The plot of leakage against the depth of the cut, where a study's settings differ by it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from splitfed.study.report.data import Summary, error_bars
from splitfed.study.report.figures.plots import BASELINE_STYLES, metric_title
from splitfed.study.report.figures.style import DASHES, MARKERS, MUTED, PALETTE, add_legend, as_svg, canvas, wrap_label

_CUT = re.compile(r"\bcuts?=([^,)]+)")


class DepthLine(NamedTuple):
    """Settings that differ by their cut alone, from the shallowest to the deepest."""

    name: str
    settings: tuple[Mapping[str, Any], ...]


def depth_lines(summary: Summary, attack: str) -> list[DepthLine]:
    """Return what can be set out by depth: settings of one builder, schedule, defense and training attack, by `attack`.

    A line has two depths or more. Results that say nothing of depth are left out.
    """
    groups: dict[tuple[str, str, str, str, str], list[Mapping[str, Any]]] = {}
    for setting in summary["settings"]:
        if setting["attacks"].get(attack, {}).get("depth") is not None:
            builder = setting["topology"].partition("(")[0]
            key = (builder, setting["schedule"], setting["method"], setting["defense"], setting["training_attack"])
            groups.setdefault(key, []).append(setting)
    several, layered = len(summary["schedules"]) > 1, len(summary["methods"]) > 1
    found = []
    for (builder, schedule, method, defense, inside), members in groups.items():
        members.sort(key=lambda s: depth_of(s, attack))
        if depth_of(members[0], attack) < depth_of(members[-1], attack):
            parts = [builder, *([summary["names"][schedule]] if several else [])]
            parts += [*([summary["names"][method]] if layered else []), summary["names"][defense]]
            # What only its own hijacked training is asked needs no second name.
            parts += [f"{summary['names'].get(inside, inside)} inside"] if inside and inside != attack else []
            found.append(DepthLine(", ".join(parts), tuple(members)))
    return found


def depth_of(setting: Mapping[str, Any], attack: str) -> int:
    """Return how many steps stand before the adversary of `attack` in `setting`."""
    return int(setting["attacks"][attack]["depth"])


def cut_of(setting: Mapping[str, Any]) -> str:
    """Return what a topology's label says of its cut: `pool1` of `vanilla(cut=pool1)`; all of it where nothing."""
    found = _CUT.search(setting["topology"])
    return found[1] if found else str(setting["topology"])


def plot_leakage_by_depth(summary: Summary, attack: str, metrics: Sequence[str], name: str) -> str | None:
    """Plot what `attack` recovered against the depth of the cut, a panel a metric; None where cuts do not differ."""
    found = depth_lines(summary, attack)
    if not found or not metrics:
        return None
    there = {depth_of(s, attack): cut_of(s) for line in reversed(found) for s in line.settings}
    places = {depth: i for i, depth in enumerate(sorted(there))}
    with canvas(len(metrics), 5.3, 3.6) as (figure, axes):
        for axis, metric in zip(axes, metrics, strict=True):
            blind: dict[str, list[float]] = {}
            for i, line in enumerate(found):
                points = []
                for setting in line.settings:
                    scores = setting["attacks"][attack]["scores"].get(metric) or {}
                    if scores.get("attack"):
                        points.append((places[depth_of(setting, attack)], scores["attack"]))
                    for who in BASELINE_STYLES:
                        if scores.get(who):
                            blind.setdefault(who, []).append(scores[who]["mean"])
                if points:
                    _draw(axis, points, i, line.name)
            for who, values in blind.items():
                label, dashes = BASELINE_STYLES[who]
                axis.axhline(sum(values) / len(values), color=MUTED, ls=dashes, lw=1.2, label=f"baseline: {label}")
            cuts = [wrap_label(there[d], 24, 2) for d in sorted(there)]
            crowded = sum(map(len, cuts)) > 40
            axis.set_xticks(range(len(places)), cuts, **({"rotation": 30, "ha": "right"} if crowded else {}))
            axis.set_xlabel("cut, from shallow to deep")
            axis.set_ylabel(metric_title(metric))
        add_legend(figure, axes[0])
        return as_svg(figure, name)


def _draw(axis: Any, points: Sequence[tuple[int, Mapping[str, Any]]], number: int, label: str) -> None:
    values = [p["mean"] for _, p in points]
    bars = error_bars([p for _, p in points])
    look = {
        "color": PALETTE[number % len(PALETTE)],
        "marker": MARKERS[number % len(MARKERS)],
        "ls": DASHES[number // len(PALETTE) % len(DASHES)],
    }
    axis.errorbar([place for place, _ in points], values, bars, label=label, capsize=3, lw=1.6, **look)
