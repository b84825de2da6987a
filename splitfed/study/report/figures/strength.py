"""The plot of leakage against the strength of a defense, a panel for each parameter that is one's strength."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from splitfed.drawing.figure import PALETTE, Panel, Series, draw_svg, wrap_label
from splitfed.study.report.data import NO_DEFENSE, Summary, interval_ends
from splitfed.study.report.figures.style import SeriesStyles, baseline_rules, metric_title, points_of, scored_metrics

StrengthPanel = tuple[str, str, bool]
"""Family, title of the parameter, and whether more of it is stronger."""


def strength_panels(summary: Summary) -> list[StrengthPanel]:
    """Return what has a strength to be set out by, in the order of the settings."""
    told = (s for s in summary["settings"] if s["family"] != NO_DEFENSE and s["strength"] is not None)
    return list(dict.fromkeys(map(_panel_of, told)))


def families_without_strength(summary: Summary) -> list[str]:
    """Return the families of defenses that have no strength, and so no panel."""
    shown = {family for family, *_ in strength_panels(summary)}
    return list(dict.fromkeys(s["family"] for s in summary["settings"] if s["family"] not in {NO_DEFENSE, *shown}))


def plot_leakage_by_strength(summary: Summary, metric: str, target: str, looks: SeriesStyles, name: str) -> Markup:
    """Plot what attacks on `target` recovered against the strength of each family of defenses; empty without any.

    Stronger is to the right. What is undefended stands at 0, or at the left end where less is stronger.
    """
    colours = {
        attack: colour
        for attack, colour in zip(summary["attacks"], itertools.cycle(PALETTE), strict=False)
        if summary["targets"][attack] == target and metric in scored_metrics(summary, attack)
    }
    panels = strength_panels(summary) if colours else []
    return draw_svg([_draw_panel(summary, panel, colours, metric, looks) for panel in panels], name, 4.0, 3.4, 3)


def _draw_panel(
    summary: Summary, panel: StrengthPanel, colours: Mapping[str, str], metric: str, looks: SeriesStyles
) -> Panel:
    family, title, rises = panel
    settings = [s for s in summary["settings"] if s["family"] == NO_DEFENSE or _panel_of(s) == panel]
    values = sorted({float(s["strength"]) for s in settings if s["family"] != NO_DEFENSE})
    left = 0.0 if rises else undefended_position(values)

    def place_of(setting: Mapping[str, Any]) -> float:
        """Return where a setting stands: where less is stronger, on a logarithmic axis that falls to the right."""
        strength = left if setting["family"] == NO_DEFENSE else float(setting["strength"])
        return strength if rises else math.log(left / strength)

    series, any_reversed = [], False
    for attack, place in itertools.product(colours, summary["places"]):
        points = points_of([s for s in settings if s["place"] == place], attack, metric)
        if all(point.setting["family"] == NO_DEFENSE for point in points):
            continue  # this defense was not tried there
        points.sort(key=lambda p: place_of(p.setting))
        any_reversed = any_reversed or any(p.reversed for p in points)
        series.append(
            Series(
                [place_of(p.setting) for p in points],
                [p.x["mean"] for p in points],
                looks.label(attack, place),
                {"color": colours[attack], "marker": looks.markers[place], "ls": looks.dashes[place]},
                y_ends=[interval_ends(p.x) for p in points],
            )
        )
    return Panel(
        series,
        baseline_rules([p.scores for p in points_of(settings, next(iter(colours)), metric)]),
        {
            "title": wrap_label(family, 30),
            "xlabel": wrap_label(f"{title}{'; 0: undefended' if rises else ': less is stronger'}", 46),
            "ylabel": metric_title(metric, any_reversed),
        },
        x_names=None if rises else {0.0: "undefended", **{math.log(left / v): f"{v:g}" for v in reversed(values)}},
    )


def undefended_position(values: Sequence[float]) -> float:
    """Return where no defense stands on an axis of which less is stronger: a usual step above the greatest value."""
    step = (values[-1] / values[0]) ** (1 / (len(values) - 1)) if len(values) > 1 else 2.0
    return values[-1] * max(step, 1.5)


def _panel_of(setting: Mapping[str, Any]) -> StrengthPanel:
    return setting["family"], setting["measure"]["title"], setting["measure"]["rises"]
