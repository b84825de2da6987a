"""The plots of predicted labels and membership: scores of all settings beside their baselines, and ROC curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from splitfed.attacks.scoring.member_metrics import roc
from splitfed.study.report.data import NO_DEFENSE, Summary, interval_ends
from splitfed.study.report.figures.style import INK, MUTED, SeriesStyles, as_svg, canvas, numbered_look, wrap_label
from splitfed.study.report.figures.tradeoff_front import BASELINE_STYLES, metric_title
from splitfed.study.report.metrics import METRICS
from splitfed.study.report.text import name_of


def plot_scores(
    summary: Summary,
    settings: Sequence[Mapping[str, Any]],
    attack: str,
    metrics: Sequence[str],
    looks: SeriesStyles,
    name: str,
) -> str:
    """Plot what `attack` scored, a panel a metric and a row a setting, with intervals; baselines are dashes."""
    rows = list(reversed(range(len(settings))))
    names = [wrap_label(name_of(summary, s), 34) for s in settings]
    row_height = max(0.34, 0.1 + 0.17 * max(name.count("\n") + 1 for name in names))
    with canvas(len(metrics), 5.3, 1.3 + row_height * len(settings)) as (figure, axes):
        for axis, metric in zip(axes, metrics, strict=True):
            named: set[str] = set()
            for row, setting in zip(rows, settings, strict=True):
                scores = setting["attacks"][attack]["scores"].get(metric) or {}
                for who, (label, dashes) in BASELINE_STYLES.items():
                    if scores.get(who):
                        # One entry in the legend is enough for all rows.
                        text = None if who in named else f"baseline: {label}"
                        axis.plot(
                            [scores[who]["mean"]] * 2,
                            [row - 0.36, row + 0.36],
                            color=MUTED,
                            ls=dashes,
                            lw=1.4,
                            label=text,
                        )
                        named.add(who)
                if score := scores.get("attack"):
                    colour, marker = looks.colours[setting["family"]], looks.markers[setting["place"]]
                    axis.plot(interval_ends(score), [row, row], color=colour, lw=2, alpha=0.6)
                    axis.plot([score["mean"]], [row], color=colour, marker=marker, ms=8, mec="white", ls="")
            axis.set_yticks(rows, names if axis is axes[0] else [""] * len(rows))
            reversible = "" if METRICS[metric].centre is None else " (below 0.5: reversed)"
            axis.set(ylim=(-0.6, len(settings) - 0.4), xlim=(-0.02, 1.02), xlabel=f"{metric_title(metric)}{reversible}")
            axis.grid(visible=False, axis="y")
        return as_svg(figure, name, axes[-1])


def roc_corners(scores: Tensor, member: Tensor) -> tuple[list[float], list[float]]:
    """Return the rates (false positives, true positives) at the corners of a ROC curve that are above 0."""
    found = roc(scores, member)
    seen = (found.fpr > 0) & (found.tpr > 0)
    return found.fpr[seen].tolist(), found.tpr[seen].tolist()


def plot_roc_curves(curves: Sequence[tuple[str, str, Tensor, Tensor]], name: str) -> str:
    """Plot the ROC of every (setting, family, scores (n,), member (n,) bool), both axes logarithmic.

    An axis begins where the fewest non-members, or members, still resolve a rate; rates of 0 are left out.
    """
    plain = next((i for i, (_, family, *_) in enumerate(curves) if family == NO_DEFENSE), None)
    with canvas(1, 6.4, 4.6) as (figure, (axis,)):
        for i, (label, _, scores, member) in enumerate(curves):
            # One undefended curve is black; those of other topologies have colours of their own.
            look = numbered_look(i - (plain is not None and i > plain)) | {"marker": None}
            if i == plain:
                look |= {"color": INK, "ls": "-"}
            axis.plot(*roc_corners(scores, member), lw=1.8, label=label, **look)
        least = min(1 / int((~member).sum()) for *_, member in curves)
        axis.plot([least, 1], [least, 1], color=MUTED, ls=(0, (5, 3)), lw=1.2, label="chance")
        axis.set(xscale="log", yscale="log", xlim=(least, 1), ylim=(least, 1.05))
        axis.set(xlabel="false-positive rate: outsiders taken for members", ylabel="true-positive rate: members found")
        return as_svg(figure, name, axis)
