"""The plots of predicted labels and membership: scores of all settings beside their baselines, and ROC curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup
from torch import Tensor

from splitfed.attacks.scoring.member_metrics import roc
from splitfed.drawing.figure import INK, MUTED, Panel, Series, draw_svg, numbered_look, row_height, wrap_label
from splitfed.study.report.data import NO_DEFENSE, Summary, interval_ends
from splitfed.study.report.figures.style import BASELINE_STYLES, SeriesStyles, metric_title
from splitfed.study.report.metrics import METRICS
from splitfed.study.report.text import name_of


def plot_scores(
    summary: Summary,
    settings: Sequence[Mapping[str, Any]],
    attack: str,
    metrics: Sequence[str],
    looks: SeriesStyles,
    name: str,
) -> Markup:
    """Plot what `attack` scored, a panel a metric and a row a setting, with intervals; baselines are dashes."""
    names = [wrap_label(name_of(summary, s), 34) for s in settings]
    panels = [
        Panel(
            [
                series
                for row, setting in enumerate(settings)
                for series in _row(row, setting, setting["attacks"][attack]["scores"].get(metric) or {}, looks)
            ],
            axes={
                "xlim": (-0.02, 1.02),
                "xlabel": metric_title(metric) + ("" if METRICS[metric].centre is None else " (below 0.5: reversed)"),
            },
            rows=[""] * len(names) if number else names,
        )
        for number, metric in enumerate(metrics)
    ]
    return draw_svg(panels, name, height=row_height(names))


def _row(row: int, setting: Mapping[str, Any], scores: Mapping[str, Any], looks: SeriesStyles) -> list[Series]:
    """Return the dashes of the baselines in a row, and the dot of the attack."""
    dashes = [
        Series(
            [scores[who]["mean"]] * 2,
            [row - 0.36, row + 0.36],
            f"baseline: {label}",
            {"color": MUTED, "ls": style, "lw": 1.4},
        )
        for who, (label, style) in BASELINE_STYLES.items()
        if scores.get(who)
    ]
    look = {"color": looks.colours[setting["family"]], "marker": looks.markers[setting["place"]]}
    look |= {"ls": "", "ms": 8, "mec": "white"}
    found = [scores["attack"]] if scores.get("attack") else []
    dots = [Series([one["mean"]], [row], None, look, x_ends=[interval_ends(one)]) for one in found]
    return [*dashes, *dots]


def roc_corners(scores: Tensor, member: Tensor) -> tuple[list[float], list[float]]:
    """Return the rates (false positives, true positives) at the corners of a ROC curve that are above 0."""
    found = roc(scores, member)
    seen = (found.fpr > 0) & (found.tpr > 0)
    return found.fpr[seen].tolist(), found.tpr[seen].tolist()


def plot_roc_curves(curves: Sequence[tuple[str, str, Tensor, Tensor]], name: str) -> Markup:
    """Plot the ROC of every (setting, family, scores (n,), member (n,) bool), both axes logarithmic; empty without any.

    An axis begins where the fewest non-members, or members, still resolve a rate; rates of 0 are left out.
    """
    if not curves:
        return Markup("")
    plain = next((i for i, (_, family, *_) in enumerate(curves) if family == NO_DEFENSE), None)
    lines = []
    for i, (label, _, scores, member) in enumerate(curves):
        # One undefended curve is black; those of other topologies have colours of their own.
        look = numbered_look(i - (plain is not None and i > plain)) | {"marker": None, "lw": 1.8}
        look |= {"color": INK, "ls": "-"} if i == plain else {}
        lines.append(Series(*roc_corners(scores, member), label, look))
    least = min(1 / int((~member).sum()) for *_, member in curves)
    chance = Series([least, 1], [least, 1], "chance", {"color": MUTED, "ls": (0, (5, 3)), "lw": 1.2})
    axes = {
        "yscale": "log",
        "xlim": (least, 1),
        "ylim": (least, 1.05),
        "xlabel": "false-positive rate: outsiders taken for members",
        "ylabel": "true-positive rate: members found",
    }
    return draw_svg([Panel([*lines, chance], axes=axes, x_axis="log")], name, 6.4, 4.6)
