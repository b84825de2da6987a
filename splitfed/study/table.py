"""The table printed after a study: a row a setting, averaged over its seeds."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from splitfed.study.runner import Json

SHOWN = ("psnr", "ssim", "r_squared", "mse")
"""Metrics of an attack that are shown, the first two that it has."""

BASELINES = {"mean_image": "the mean of other rows", "random_pairing": "another victim"}


def settings(results: Sequence[Json]) -> list[dict[str, Any]]:
    """Return a plain row a setting (topology and defense), means over the seeds that ended."""
    groups: dict[tuple[str, str], list[Json]] = {}
    for found in results:
        groups.setdefault((found["topology"]["label"], found["defense"]["label"]), []).append(found)
    rows = []
    for (topology, defense), group in groups.items():
        ended = [found for found in group if "failed" not in found]
        row: dict[str, Any] = {"topology": topology, "defense": defense, "seeds": len(ended)}
        row["failed"] = len(group) - len(ended)
        if ended:
            row["metric"] = ended[0]["utility"]["metric"]
            row["utility"] = fmean(found["utility"]["test"] for found in ended)
            row["attacks"] = {
                attack["attack"]: _means([found["attacks"][i]["scores"] for found in ended])
                for i, attack in enumerate(ended[0]["attacks"])
            }
        rows.append(row)
    return rows


def _means(scores: Sequence[Json]) -> dict[str, dict[str, float]]:
    """Average what every seed has: metric -> who -> mean."""
    return {
        metric: {who: fmean(found[metric][who]["mean"] for found in scores) for who in scores[0][metric]}
        for metric in scores[0]
    }


def show(results: Sequence[Json], console: Console) -> None:
    """Print the table of `results`, with what two baselines score below it."""
    rows = settings(results)
    metric = next((row["metric"] for row in rows if "metric" in row), "utility")
    columns = _columns(rows)
    several = len({row["topology"] for row in rows}) > 1
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in (*(["topology"] if several else []), "defense"):
        table.add_column(title, overflow="fold")
    for title in (metric, *(f"{attack}\n{metric}" for attack, metric in columns)):
        table.add_column(title, justify="right", overflow="fold")
    for row in rows:
        scores = [_score(row, attack, metric, "guess") for attack, metric in columns]
        table.add_row(*([row["topology"]] if several else []), row["defense"], _utility(row), *scores)
    for who, title in BASELINES.items():
        scores = [_score(next(iter(rows)), attack, metric, who) for attack, metric in columns]
        if any(scores):
            table.add_row(*([""] if several else []), f"[dim]baseline: {title}[/dim]", "", *scores)
    if not several and rows:
        console.print(rows[0]["topology"], highlight=False)
    console.print(table)


def _columns(rows: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return (attack, metric) for every column of scores: the first two metrics that an attack has."""
    found: dict[tuple[str, str], None] = {}
    for row in rows:
        for attack, scores in row.get("attacks", {}).items():
            found.update({(attack, metric): None for metric in [m for m in SHOWN if m in scores][:2]})
    return list(found)


def _score(row: dict[str, Any], attack: str, metric: str, who: str) -> str:
    value = row.get("attacks", {}).get(attack, {}).get(metric, {}).get(who)
    return "" if value is None else f"{value:.3g}"


def _utility(row: dict[str, Any]) -> str:
    lost = f" ({row['failed']} failed)" if row["failed"] else ""
    return f"{row['utility']:.3f}{lost}" if "utility" in row else f"failed ({row['failed']})"
