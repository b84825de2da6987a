"""The table that a search prints at its end: the trials on the front."""

from __future__ import annotations

from rich.console import Console
from rich.table import Column, Table

from splitfed.study.report.search_data import SearchOutcome, metric_label, search_sentences
from splitfed.study.report.search_page import front_rows, metric_names


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
