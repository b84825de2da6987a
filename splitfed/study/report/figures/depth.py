"""The plot of leakage against the depth of the cut, where a study's settings differ by it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from splitfed.study.report.data import Summary, error_bars, group_by
from splitfed.study.report.figures.style import as_svg, canvas, numbered_look, wrap_label
from splitfed.study.report.figures.tradeoff_front import draw_baselines, metric_title

_CUT = re.compile(r"\bcuts?=([^,)]+)")


class DepthLine(NamedTuple):
    """Settings that differ by their cut alone, from the shallowest to the deepest."""

    name: str
    settings: tuple[Mapping[str, Any], ...]


def depth_lines(summary: Summary, attack: str) -> list[DepthLine]:
    """Return what can be set out by depth: settings of one builder, schedule, defense and training attack, by `attack`.

    A line has two depths or more. Results that say nothing of depth are left out.
    """
    keys = ("schedule", "method", "defense", "training_attack")
    groups = group_by(
        (s for s in summary["settings"] if s["attacks"].get(attack, {}).get("depth") is not None),
        lambda s: (s["topology"].partition("(")[0], *(s[key] for key in keys)),
    )
    names, found = summary["names"], []
    for (builder, schedule, method, defense, inside), members in groups.items():
        members.sort(key=lambda s: depth_of(s, attack))
        if depth_of(members[0], attack) < depth_of(members[-1], attack):
            parts = [
                builder,
                *([names[schedule]] if len(summary["schedules"]) > 1 else []),
                *([names[method]] if len(summary["methods"]) > 1 else []),
                names[defense],
                # What only its own hijacked training is asked needs no second name.
                *([f"{names.get(inside, inside)} inside"] if inside and inside != attack else []),
            ]
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
            scored = [
                [(places[depth_of(s, attack)], s["attacks"][attack]["scores"].get(metric) or {}) for s in line.settings]
                for line in found
            ]
            for i, (line, known) in enumerate(zip(found, scored, strict=True)):
                if points := [(place, scores["attack"]) for place, scores in known if scores.get("attack")]:
                    _draw(axis, points, i, line.name)
            draw_baselines(axis.axhline, [scores for known in scored for _, scores in known])
            cuts = [wrap_label(there[d], 24, 2) for d in sorted(there)]
            crowded = sum(map(len, cuts)) > 40
            axis.set_xticks(range(len(places)), cuts, **({"rotation": 30, "ha": "right"} if crowded else {}))
            axis.set(xlabel="cut, from shallow to deep", ylabel=metric_title(metric))
        return as_svg(figure, name, axes[0])


def _draw(axis: Any, points: Sequence[tuple[int, Mapping[str, Any]]], number: int, label: str) -> None:
    places, found = zip(*points, strict=True)
    values = [p["mean"] for p in found]
    axis.errorbar(places, values, error_bars(found), label=label, capsize=3, lw=1.6, **numbered_look(number))
