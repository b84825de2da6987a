"""The plot of utility against leakage as inline SVG, and what the plots of leakage share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from splitfed.study.report.data import Summary, group_by, interval_ends
from splitfed.study.report.figures.style import MUTED, SeriesStyles, as_svg, canvas, wrap_label
from splitfed.study.report.metrics import METRICS, TARGETS

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
NUMBER_OFFSETS = ((7, 5), (7, -14), (-22, 5), (-22, -14))  # points by which a family's numbers stand off


class Point(NamedTuple):
    """A setting in a plot: `x` what the attack reached (an estimate), `y` the utility, and the baselines.

    `reversed`: whether the score was on the other side of the metric's centre, and `x` is what turning it over gives.
    """

    setting: Mapping[str, Any]
    x: Mapping[str, Any]
    y: Mapping[str, Any]
    scores: Mapping[str, Any]
    reversed: bool = False


def plot_tradeoff(summary: Summary, attack: str, looks: SeriesStyles, name: str) -> str:
    """Plot utility against what `attack` recovered, a panel for PSNR and one for SSIM (tabular data: R2).

    Of an attack on labels or membership, the first two metrics that it has.
    """
    target, metrics = summary["targets"][attack], scored_metrics(summary, attack)
    what = f" of the {TARGETS[target].title}" if target in ("inputs", "representatives") else ""
    metrics = TARGETS[target].order(metrics)
    metrics = ([m for m in metrics if METRICS[m].up] or metrics)[:2]
    with canvas(len(metrics)) as (figure, axes):
        for axis, metric in zip(axes, metrics, strict=True):
            points = points_of(summary["settings"], attack, metric)
            draw_baselines(axis.axvline, [p.scores for p in points])
            _draw_front(axis, [p for p in points if metric in p.setting["attacks"][attack]["front"]], metric)
            _draw_families(axis, points, looks)
            leaks = f"{'more' if METRICS[metric].up else 'less'} is more leakage"
            title = metric_title(metric, any(p.reversed for p in points))
            hijacked = ", hijacked training" if all(p.setting["training_attack"] for p in points) else ""
            axis.set(
                xlabel=wrap_label(f"{title}{what}: {leaks}", 60),
                ylabel=wrap_label(f"test {summary['utility']['metric']}{hijacked}", 42),
            )
            if target not in ("inputs", "representatives"):
                axis.locator_params(axis="x", nbins=5)  # shares differ in late digits, whose labels are long
        return as_svg(figure, name, axes[0])


def scored_metrics(summary: Summary, attack: str) -> list[str]:
    """Return the metrics in which `attack` was scored."""
    return [m for m in summary["metrics"] if points_of(summary["settings"], attack, m)]


def points_of(settings: Sequence[Mapping[str, Any]], attack: str, metric: str) -> list[Point]:
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


def draw_baselines(draw: Any, scores: Sequence[Mapping[str, Any]]) -> None:
    """Draw the baselines that see nothing: the mean of each over the `scores` of several settings, by who has them."""
    for who in BASELINE_STYLES:
        draw_baseline(draw, who, [one[who]["mean"] for one in scores if one.get(who)])


def draw_baseline(draw: Any, who: str, values: Sequence[float]) -> None:
    """Draw the mean of `values`, which the baseline `who` reached; nothing where there are none."""
    if values:
        label, dashes = BASELINE_STYLES[who]
        draw(sum(values) / len(values), color=MUTED, ls=dashes, lw=1.2, label=f"baseline: {label}")


def _draw_front(axis: Any, points: Sequence[Point], metric: str) -> None:
    """Draw the front as a staircase: the most utility that was reached at a leakage no greater."""
    steps = sorted(((p.x["mean"], p.y["mean"]) for p in points), reverse=not METRICS[metric].up)
    if len(steps) > 1:
        axis.step(*zip(*steps, strict=True), where="post", color="#c3cad1", lw=6, alpha=0.55, label="Pareto front")


def _draw_families(axis: Any, points: Sequence[Point], looks: SeriesStyles) -> None:
    """Draw a family's settings in its colour, joined in the order of strength, each with its strength beside it."""

    def name_series(point: Point) -> tuple[str, str, str]:
        setting = point.setting
        what = "" if setting["strength"] is None else f": {setting['measure']['title']}"
        return setting["family"], setting["place"], what

    # Settings come in the order of their strength.
    for (family, place, what), members in group_by(points, name_series).items():
        axis.plot(
            [p.x["mean"] for p in members],
            [p.y["mean"] for p in members],
            color=looks.colours[family],
            marker=looks.markers[place],
            ms=7,
            mec="white",
            lw=1.4,
            ls=looks.dashes[place],
            label=looks.label(family, place) + what,
            zorder=3,
        )
    limits = axis.get_xlim(), axis.get_ylim()
    for point in points:
        colour, x, y = looks.colours[point.setting["family"]], point.x, point.y
        axis.plot(interval_ends(x), [y["mean"]] * 2, color=colour, lw=1.1, alpha=0.7)
        axis.plot([x["mean"]] * 2, interval_ends(y), color=colour, lw=1.1, alpha=0.7)
        strength = point.setting["strength"]
        if said := [*([] if strength is None else [f"{strength:g}"]), *(["reversed"] if point.reversed else [])]:
            aside = NUMBER_OFFSETS[list(looks.colours).index(point.setting["family"]) % len(NUMBER_OFFSETS)]
            axis.annotate(" ".join(said), (x["mean"], y["mean"]), aside, textcoords="offset points", color=colour)
    # An interval can be far wider than all that is to be seen: it runs out of the frame.
    for (low, high), narrow in zip(limits, (axis.set_xlim, axis.set_ylim), strict=True):
        narrow(low - 0.15 * (high - low), high + 0.15 * (high - low))


def metric_title(metric: str, reversed_too: bool = False) -> str:
    """Return the name of a metric with its unit, for an axis; of one turned over where it was reversed, it says so."""
    known = METRICS[metric]
    unit = f" [{known.unit.strip()}]" if known.unit else ""
    return f"{known.title}{unit}{f' (1 - {known.title} where reversed)' if reversed_too else ''}"
