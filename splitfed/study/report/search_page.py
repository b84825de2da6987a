"""What a search has found, in the report and on the terminal: what its choice is worth, its trials, and the front."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from splitfed.study.report.data import Json, make_visible
from splitfed.study.report.figures.search import plot_trials
from splitfed.study.report.search_data import (
    SearchOutcome,
    metric_label,
    search_sentences,
    setting_label,
    varied_parts,
)


def search_content(outcome: SearchOutcome | None) -> Json:
    """Return what the template shows of a search, under "search"; None there for a grid."""
    if outcome is None:
        return {"search": None}
    return {
        "search": {
            "said": make_visible(search_sentences(outcome)),
            "figure": plot_trials(outcome, "search"),
            "columns": [make_visible(metric_label(name)) for name in metric_names(outcome)],
            "front": make_visible(front_rows(outcome)),
            "without": make_visible(
                [
                    {"trial": record["trial"], "state": record["state"], "reason": record["reason"]}
                    for record in outcome.records
                    if record["state"] != "complete"
                ]
            ),
        }
    }


def front_rows(outcome: SearchOutcome) -> list[Json]:
    """Return a row a trial on the front: number, setting, metrics with their intervals as text, runs."""
    several = varied_parts(outcome.records)
    return [
        {
            "trial": record["trial"],
            "setting": setting_label(record, several),
            "metrics": [format_metric(record["metrics"].get(name)) for name in metric_names(outcome)],
            "runs": record["runs"],
        }
        for record in outcome.best
    ]


def format_metric(found: Mapping[str, Any] | None) -> tuple[str, str]:
    """Return the mean of a metric and its interval, as text; "none" where there is no bound."""
    if found is None or found["mean"] is None:
        return ("-" if found is None else "none"), ""
    if found["low"] is None:
        return f"{found['mean']:.4g}", ""
    over = "" if found["over"] == "seeds" else f" ({found['over']})"
    return f"{found['mean']:.4g}", f"{found['low']:.4g} to {found['high']:.4g}{over}"


def metric_names(outcome: SearchOutcome) -> list[str]:
    """Return the objectives, then what the constraints are about."""
    return list(dict.fromkeys([*outcome.directions, *(name for one in outcome.best for name in one["metrics"])]))


def print_front(outcome: SearchOutcome, console: Console) -> None:
    """Print the front of a search, and what is to be known of it."""
    titles = [metric_label(name) for name in metric_names(outcome)]
    table = Table(
        Column("trial", justify="right"),
        Column("setting", overflow="fold"),
        *(Column(title, justify="right", overflow="fold") for title in titles),
        box=None,
        header_style="bold",
        pad_edge=False,
    )
    for row in front_rows(outcome):
        cells = [f"{mean}\n{interval}" if interval else mean for mean, interval in row["metrics"]]
        table.add_row(str(row["trial"]), row["setting"], *cells)
    if outcome.front:
        console.print(table, markup=False)
    for sentence in search_sentences(outcome):
        console.print(sentence, highlight=False, markup=False)
