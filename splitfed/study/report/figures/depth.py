"""The plot of leakage against the depth of the cut, where a study's settings differ by it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from markupsafe import Markup

from splitfed.drawing.figure import Panel, Series, draw_svg, numbered_look, wrap_label
from splitfed.study.report.data import Summary, group_by, interval_ends
from splitfed.study.report.figures.style import baseline_rules, metric_title

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


def plot_leakage_by_depth(summary: Summary, attack: str, metrics: Sequence[str], name: str) -> Markup:
    """Plot what `attack` recovered against the depth of the cut, a panel a metric; empty where cuts do not differ."""
    found = depth_lines(summary, attack)
    cuts = {depth_of(s, attack): cut_of(s) for line in reversed(found) for s in line.settings}
    names = {float(place): wrap_label(cuts[depth], 24, 2) for place, depth in enumerate(sorted(cuts))}
    panels = []
    for metric in metrics if found else ():
        lines, every = [], []
        for number, line in enumerate(found):
            scores = [s["attacks"][attack]["scores"].get(metric) or {} for s in line.settings]
            places = [sorted(cuts).index(depth_of(s, attack)) for s in line.settings]
            points = [(place, one["attack"]) for place, one in zip(places, scores, strict=True) if one.get("attack")]
            look = numbered_look(number) | {"lw": 1.6}
            ends = [interval_ends(one) for _, one in points]
            xs, ys = [place for place, _ in points], [one["mean"] for _, one in points]
            lines.append(Series(xs, ys, line.name, look, y_ends=ends))
            every += scores
        titles = {"xlabel": "cut, from shallow to deep", "ylabel": metric_title(metric)}
        panels.append(Panel([s for s in lines if s.x], baseline_rules(every), titles, x_names=names))
    return draw_svg(panels, name, 5.3, 3.6)
