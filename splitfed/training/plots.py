"""Figures of a run by matplotlib: scores and loss by round, what attacks reached, what crossed.

A figure is known to nobody but its owner: pyplot is not used, so that none has to be closed. Notebooks show it, and
`figure.savefig("name.svg")` writes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from splitfed.attacks.scoring.label_metrics import EXCESS
from splitfed.core.errors import InvalidInput
from splitfed.core.grouping import total_pairs
from splitfed.data.dataset import Federation
from splitfed.drawing.figure import MUTED, PALETTE, Panel, Rule, Series, make_figure, numbered_look
from splitfed.engines.base import FED
from splitfed.engines.engine import Engine
from splitfed.threats.attack_result import AttackResult
from splitfed.training.evaluation import constant_answer

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class RunPlots:
    """The figures of one run; each method draws one anew."""

    def __init__(self, engine: Engine, data: Federation, history: Sequence[Mapping[str, Any]]) -> None:
        self._engine, self._data, self._history = engine, data, history

    def history(self) -> Figure:
        """Draw validation and test scores by round, beside a constant answer, and the training loss."""
        if not self._history:
            raise InvalidInput("the run has no round yet: there is no history to plot")
        scored = [entry for entry in self._history if "test" in entry]
        curves: dict[str | None, dict[int, float]] = {
            part: {e["round"]: e[part]["union"] for e in scored if e[part]["union"] is not None}
            for part in ("validation", "test")
        }
        scores = [_curve(known, PALETTE[i], part) for i, (part, known) in enumerate(curves.items()) if known]
        loss = _curve({e["round"]: e["loss"] for e in self._history if e["loss"] is not None}, PALETTE[3])
        constant = constant_answer(self._engine.topology, self._data)
        rules = [] if constant is None else [Rule(constant.score, "constant answer", {"ls": "--", "lw": 1})]
        return make_figure(
            [
                Panel(series, beside, {"xlabel": "round", "ylabel": title}, x_axis="whole numbers")
                for series, beside, title in (
                    (scores, rules, self._data.task.metric_name),
                    ([loss], [], "training loss"),
                )
            ]
        )

    def attacks(self, results: AttackResult | Sequence[AttackResult]) -> Figure:
        """Draw the scores of `results`, as `Run.attack` returns them, with intervals, beside their baselines.

        A panel a metric, a bar an attack; the baselines of each are ticks on its bar's place.
        """
        given = [results] if isinstance(results, AttackResult) else list(results)
        rows = [(number, row) for number, result in enumerate(given) for row in result.rows()]
        rows = [(number, row) for number, row in rows if not row["of"].startswith("stolen ")]
        panels = [
            Panel(
                _bars_and_baselines([(n, row) for n, row in rows if row["metric"] == metric]),
                axes={"title": metric},
                x_names=dict(enumerate(result.attack for result in given)),
            )
            for metric in dict.fromkeys(row["metric"] for _, row in rows)
        ]
        if not panels:
            raise InvalidInput("there is no scored attack to plot; expected results of run.attack")
        return make_figure(panels)

    def traffic(self) -> Figure:
        """Draw the bytes that crossed in training: by kind of message, from whom to whom."""
        from matplotlib.ticker import EngFormatter

        parties, flows = self._engine.parties, self._engine.traffic.flows

        def name(end: str) -> str:
            """Return the role of a party: clients of one role are one bar, as there may be thousands."""
            return "aggregation server" if end == FED else parties[end].role if end in parties else end

        sizes = total_pairs(
            ((f"{name(flow.sender)} to {name(flow.receiver)}", flow.kind), nbytes)
            for flow, (_, nbytes) in flows.items()
            if flow.phase == "train"
        )
        if not sizes:
            raise InvalidInput("nothing crossed in training: there is no traffic to plot")
        ways, kinds = list(dict.fromkeys(way for way, _ in sizes)), sorted({kind for _, kind in sizes})
        stacks = [
            Series(
                [sizes.get((way, kind), 0) for way in ways],
                range(len(ways)),
                kind,
                {"color": PALETTE[i % len(PALETTE)]},
                bars="wide",
                starts=[sum(sizes.get((way, below), 0) for below in kinds[:i]) for way in ways],
            )
            for i, kind in enumerate(kinds)
        ]
        figure = make_figure([Panel(stacks, axes={"xlabel": "crossed in training"}, rows=ways)])
        figure.axes[0].xaxis.set_major_formatter(EngFormatter(unit="B"))
        return figure


def _curve(known: Mapping[int, float], colour: str, label: str | None = None) -> Series:
    return Series(list(known), list(known.values()), label, {"marker": ".", "color": colour})


def _bars_and_baselines(rows: Sequence[tuple[int, Mapping[str, Any]]]) -> list[Series]:
    baselines = list(dict.fromkeys(row["of"] for _, row in rows if row["of"] not in ("attack", EXCESS)))
    bars = [
        Series(
            [place],
            [row["mean"]],
            None,
            {"width": 0.6, "color": MUTED},
            y_ends=[] if row["low"] is None else [(row["low"], row["high"])],
            bars="high",
        )
        for place, row in rows
        if row["of"] == "attack"
    ]
    ticks = [
        Series([place - 0.4, place + 0.4], [row["mean"]] * 2, who, numbered_look(number) | {"marker": None, "lw": 2})
        for number, who in enumerate(baselines)
        for place, row in rows
        if row["of"] == who
    ]
    return [*bars, *ticks]
