"""The table printed after a study: a row a setting, averaged over its seeds."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from splitfed.study.runner import Json

SHOWN = ("psnr", "ssim", "r2", "mse")
"""Metrics of an attack that are shown, the first two that it has."""


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
    """Print the table of `results`."""
    rows = settings(results)
    metric = next((row["metric"] for row in rows if "metric" in row), "utility")
    attacks = list(dict.fromkeys(name for row in rows for name in row.get("attacks", {})))
    table = Table("topology", "defense", metric, box=None, header_style="bold", pad_edge=False)
    for name in attacks:
        table.add_column(name, justify="right")
    baselines: dict[str, dict[str, float]] = {}
    for row in rows:
        cells = [row["topology"], row["defense"], _utility(row)]
        for name in attacks:
            scores = row.get("attacks", {}).get(name, {})
            chosen = [m for m in SHOWN if m in scores][:2]
            cells.append("  ".join(f"{m} {scores[m]['guess']:.3g}" for m in chosen))
            for m in chosen:
                baselines.setdefault(m, {who: v for who, v in scores[m].items() if who != "guess"})
        table.add_row(*cells)
    console.print(table)
    for who in ("mean_image", "random_pairing"):
        known = [f"{m} {scores[who]:.3g}" for m, scores in baselines.items() if who in scores]
        if known:
            console.print(f"baseline {who}: {', '.join(known)}", highlight=False)


def _utility(row: dict[str, Any]) -> str:
    lost = f" ({row['failed']} failed)" if row["failed"] else ""
    return f"{row['utility']:.3f}{lost}" if "utility" in row else f"failed ({row['failed']})"
