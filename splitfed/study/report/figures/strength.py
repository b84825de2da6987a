"""The plot of leakage against the strength of a defense, a panel for each parameter that is one's strength."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from splitfed.study.report.data import NO_DEFENSE, Summary, error_bars
from splitfed.study.report.figures.style import PALETTE, SeriesStyles, as_svg, canvas, wrap_label
from splitfed.study.report.figures.tradeoff_front import draw_baselines, metric_title, points_of, scored_metrics

Panel = tuple[str, str, bool]
"""Family, title of the parameter, and whether more of it is stronger."""


def strength_panels(summary: Summary) -> list[Panel]:
    """Return what has a strength to be set out by, in the order of the settings."""
    told = (s for s in summary["settings"] if s["family"] != NO_DEFENSE and s["strength"] is not None)
    return list(dict.fromkeys((s["family"], s["measure"]["title"], s["measure"]["rises"]) for s in told))


def families_without_strength(summary: Summary) -> list[str]:
    """Return the families of defenses that have no strength, and so no panel."""
    shown = {family for family, *_ in strength_panels(summary)}
    return list(dict.fromkeys(s["family"] for s in summary["settings"] if s["family"] not in {NO_DEFENSE, *shown}))


def plot_leakage_by_strength(summary: Summary, metric: str, target: str, looks: SeriesStyles, name: str) -> str | None:
    """Plot what attacks on `target` recovered against the strength of each family of defenses; None without any.

    Stronger is to the right. What is undefended stands at 0, or at the left end where less is stronger.
    """
    found = strength_panels(summary)
    attacks = [
        a for a in summary["attacks"] if summary["targets"][a] == target and metric in scored_metrics(summary, a)
    ]
    if not found or not attacks:
        return None
    palette = zip(summary["attacks"], itertools.cycle(PALETTE), strict=False)
    colours = {attack: colour for attack, colour in palette if attack in attacks}
    with canvas(len(found), 4.0, 3.4, 3) as (figure, axes):
        for axis, panel in zip(axes, found, strict=True):
            _draw_panel(axis, summary, panel, colours, metric, looks)
        return as_svg(figure, name, axes[0])


def _draw_panel(
    axis: Any, summary: Summary, panel: Panel, colours: Mapping[str, str], metric: str, looks: SeriesStyles
) -> None:
    family, title, rises = panel
    panel_settings = [s for s in summary["settings"] if s["family"] == NO_DEFENSE or _panel_of(s) == panel]
    values = sorted({float(s["strength"]) for s in panel_settings if s["family"] != NO_DEFENSE})
    left = 0.0 if rises else undefended_position(values)
    any_reversed = False
    for attack, place in itertools.product(colours, summary["places"]):
        points = points_of([s for s in panel_settings if s["place"] == place], attack, metric)
        if all(point.setting["family"] == NO_DEFENSE for point in points):
            continue  # this defense was not tried there
        positions = {id(p): left if p.setting["family"] == NO_DEFENSE else float(p.setting["strength"]) for p in points}
        points.sort(key=lambda p: positions[id(p)] if rises else -positions[id(p)])
        any_reversed = any_reversed or any(p.reversed for p in points)
        axis.errorbar(
            [positions[id(p)] for p in points],
            [p.x["mean"] for p in points],
            error_bars([p.x for p in points]),
            label=looks.label(attack, place),
            capsize=3,
            color=colours[attack],
            marker=looks.markers[place],
            ls=looks.dashes[place],
        )
    draw_baselines(axis.axhline, [p.scores for p in points_of(panel_settings, next(iter(colours)), metric)])
    if not rises:
        _reverse_axis(axis, values, left)
    axis.set(
        title=wrap_label(family, 30),
        xlabel=wrap_label(f"{title}{'; 0: undefended' if rises else ': less is stronger'}", 46),
        ylabel=metric_title(metric, any_reversed),
    )


def undefended_position(values: Sequence[float]) -> float:
    """Return where no defense stands on an axis of which less is stronger: a usual step above the greatest value."""
    step = (values[-1] / values[0]) ** (1 / (len(values) - 1)) if len(values) > 1 else 2.0
    return values[-1] * max(step, 1.5)


def _reverse_axis(axis: Any, values: Sequence[float], left: float) -> None:
    """Draw an axis of which less is stronger: a logarithmic one, that falls to the right."""
    axis.set_xscale("log")
    axis.set_xticks([*values, left], [*(f"{value:g}" for value in values), "undefended"])
    axis.minorticks_off()
    axis.invert_xaxis()


def _panel_of(setting: Mapping[str, Any]) -> Panel:
    return setting["family"], setting["measure"]["title"], setting["measure"]["rises"]
