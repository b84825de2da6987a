"""Figures of a run by matplotlib: scores and loss by round, what attacks reached, what crossed.

A figure is known to nobody but its owner: pyplot is not used, so that none has to be closed. Notebooks show it, and
`figure.savefig("name.svg")` writes it.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from splitfed.attacks.scoring.label_metrics import EXCESS
from splitfed.core.errors import InvalidInput
from splitfed.engines.base import FED
from splitfed.threats.attack_result import AttackResult
from splitfed.training.run_state import RunState

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANEL = (5.0, 3.6)
"""Width and height of a panel, in inches."""


class RunPlots:
    """The figures of one run; each method draws one anew."""

    def __init__(self, run: RunState) -> None:
        self._run = run

    def history(self) -> Figure:
        """Draw validation and test scores by round, beside a constant answer, and the training loss."""
        run = self._run
        if not run.history:
            raise InvalidInput("the run has no round yet: there is no history to plot")
        figure, (score, loss) = _panels(2)
        scored = [entry for entry in run.history if "test" in entry]
        for part in ("validation", "test"):
            known = {e["round"]: e[part]["union"] for e in scored if e[part]["union"] is not None}
            if known:
                score.plot(list(known), list(known.values()), marker=".", label=part)
        if (constant := run.constant) is not None:
            score.axhline(constant.score, color="grey", ls="--", lw=1, label="constant answer")
        if score.get_legend_handles_labels()[0]:
            score.legend()
        score.set(xlabel="round", ylabel=run.data.task.metric_name)
        losses = {e["round"]: e["loss"] for e in run.history if e["loss"] is not None}
        loss.plot(list(losses), list(losses.values()), marker=".", color="tab:red")
        loss.set(xlabel="round", ylabel="training loss")
        for axis in (score, loss):
            axis.xaxis.get_major_locator().set_params(integer=True)
        return figure

    def attacks(self, results: AttackResult | Sequence[AttackResult]) -> Figure:
        """Draw the scores of `results`, as `Run.attack` returns them, with intervals, beside their baselines.

        A panel a metric, a bar an attack; the baselines of each are ticks on its bar's place.
        """
        given = [results] if isinstance(results, AttackResult) else list(results)
        rows = [(number, row) for number, result in enumerate(given) for row in result.rows()]
        rows = [(number, row) for number, row in rows if not row["of"].startswith("stolen ")]
        metrics = list(dict.fromkeys(row["metric"] for _, row in rows))
        if not metrics:
            raise InvalidInput("there is no scored attack to plot; expected results of run.attack")
        figure, axes = _panels(len(metrics))
        for axis, metric in zip(axes, metrics, strict=True):
            _draw_metric(axis, [(n, row) for n, row in rows if row["metric"] == metric])
            axis.set_xticks(range(len(given)), [result.attack for result in given])
            axis.set_title(metric)
        return figure

    def traffic(self) -> Figure:
        """Draw the bytes that crossed in training: by kind of message, from whom to whom."""
        from matplotlib.ticker import EngFormatter

        totals: dict[tuple[str, str], dict[str, int]] = {}
        parties = self._run.engine.parties
        for flow, (_, nbytes) in self._run.engine.traffic.flows.items():
            if flow.phase == "train":
                # Clients of one role are one bar: there may be thousands.
                sender, receiver = (
                    "aggregation server" if end == FED else parties[end].role if end in parties else end
                    for end in (flow.sender, flow.receiver)
                )
                kinds = totals.setdefault((sender, receiver), {})
                kinds[flow.kind] = kinds.get(flow.kind, 0) + nbytes
        if not totals:
            raise InvalidInput("nothing crossed in training: there is no traffic to plot")
        figure, (axis,) = _panels(1)
        names = [f"{sender} to {receiver}" for sender, receiver in totals]
        left = [0] * len(totals)
        for kind in sorted({kind for kinds in totals.values() for kind in kinds}):
            widths = [kinds.get(kind, 0) for kinds in totals.values()]
            axis.barh(names, widths, left=left, label=kind)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        axis.xaxis.set_major_formatter(EngFormatter(unit="B"))
        axis.set(xlabel="crossed in training")
        axis.legend()
        return figure


def _draw_metric(axis: Any, rows: Sequence[tuple[int, Mapping[str, Any]]]) -> None:
    baselines = list(dict.fromkeys(row["of"] for _, row in rows if row["of"] not in ("attack", EXCESS)))
    for place, row in rows:
        if row["of"] == "attack":
            axis.bar(place, row["mean"], width=0.6, color="tab:blue")
            if row["low"] is not None:
                # A percentile interval need not hold its own mean.
                ends = [[max(0.0, row["mean"] - row["low"])], [max(0.0, row["high"] - row["mean"])]]
                axis.errorbar(place, row["mean"], yerr=ends, color="black", capsize=3)
    for number, who in enumerate(baselines):
        found = [(place, row["mean"]) for place, row in rows if row["of"] == who]
        look = {"color": f"C{number + 1}", "lw": 2, "ls": "--", "label": who}
        axis.hlines([y for _, y in found], [x - 0.4 for x, _ in found], [x + 0.4 for x, _ in found], **look)
    if baselines:
        axis.legend()


def _panels(count: int) -> tuple[Figure, list[Any]]:
    """Return a figure with `count` panels in rows of two, which a notebook shows."""
    from matplotlib import figure as figures

    across = min(2, count)
    down = -(-count // across)
    figure: Any = figures.Figure(figsize=(PANEL[0] * across, PANEL[1] * down), layout="constrained")
    axes = list(figure.subplots(down, across, squeeze=False).flat)
    for axis in axes[count:]:
        axis.remove()
    figure._repr_png_ = partial(_png, figure)
    return figure, axes[:count]


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
