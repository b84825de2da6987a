"""The plot of utility against leakage, with the Pareto front as a staircase."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from splitfed.drawing.figure import Panel, Series, draw_svg, staircase, wrap_label
from splitfed.study.report.data import Summary, group_by, interval_ends
from splitfed.study.report.figures.style import (
    Point,
    SeriesStyles,
    baseline_rules,
    metric_title,
    points_of,
    scored_metrics,
)
from splitfed.study.report.metrics import METRICS, TARGETS

NUMBER_OFFSETS = ((7, 5), (7, -14), (-22, 5), (-22, -14))  # points by which a family's numbers stand off
PICTURED = ("inputs", "representatives")


def plot_tradeoff(summary: Summary, attack: str, looks: SeriesStyles, name: str) -> Markup:
    """Plot utility against what `attack` recovered, a panel for PSNR and one for SSIM (tabular data: R2).

    Of an attack on labels or membership, the first two metrics that it has.
    """
    metrics = TARGETS[summary["targets"][attack]].order(scored_metrics(summary, attack))
    metrics = [m for m in metrics if METRICS[m].up] or metrics
    return draw_svg([_panel(summary, attack, metric, looks) for metric in metrics[:2]], name)


def _panel(summary: Summary, attack: str, metric: str, looks: SeriesStyles) -> Panel:
    points, target = points_of(summary["settings"], attack, metric), summary["targets"][attack]
    what = f" of the {TARGETS[target].title}" if target in PICTURED else ""
    leaks = f"{'more' if METRICS[metric].up else 'less'} is more leakage"
    hijacked = ", hijacked training" if all(p.setting["training_attack"] for p in points) else ""
    return Panel(
        [*_front(points, attack, metric), *_families(points, looks)],
        baseline_rules([p.scores for p in points], upright=True),
        {
            "xlabel": wrap_label(f"{metric_title(metric, any(p.reversed for p in points))}{what}: {leaks}", 60),
            "ylabel": wrap_label(f"test {summary['utility']['metric']}{hijacked}", 42),
        },
        x_axis="" if target in PICTURED else "few ticks",  # shares differ in late digits, whose labels are long
        clipped=True,
    )


def _front(points: Sequence[Point], attack: str, metric: str) -> list[Series]:
    """Return the front as a staircase: the most utility that was reached at a leakage no greater."""
    front = [p for p in points if metric in p.setting["attacks"][attack]["front"]]
    steps = sorted(((p.x["mean"], p.y["mean"]) for p in front), reverse=not METRICS[metric].up)
    return staircase(steps, "Pareto front")


def _families(points: Sequence[Point], looks: SeriesStyles) -> list[Series]:
    """Return a family's settings in its colour, joined in the order of strength, each with its strength beside it."""

    def name_series(point: Point) -> tuple[str, str, str]:
        setting = point.setting
        what = "" if setting["strength"] is None else f": {setting['measure']['title']}"
        return setting["family"], setting["place"], what

    # Settings come in the order of their strength.
    return [
        Series(
            [p.x["mean"] for p in members],
            [p.y["mean"] for p in members],
            looks.label(family, place) + what,
            looks.line(family, place)
            | {"marker": looks.markers[place], "ms": 7, "mec": "white", "lw": 1.4, "zorder": 3},
            x_ends=[interval_ends(p.x) for p in members],
            y_ends=[interval_ends(p.y) for p in members],
            notes=[_note(p) for p in members],
            aside=NUMBER_OFFSETS[list(looks.colours).index(family) % len(NUMBER_OFFSETS)],
        )
        for (family, place, what), members in group_by(points, name_series).items()
    ]


def _note(point: Point) -> str:
    strength = point.setting["strength"]
    return " ".join([*([] if strength is None else [f"{strength:g}"]), *(["reversed"] if point.reversed else [])])
