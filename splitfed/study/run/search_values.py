"""What a trial is worth: the metrics of its search, over its seeds, read off the results of its runs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from splitfed.core.errors import SplitfedError
from splitfed.study.config.search_metrics import SearchMetric
from splitfed.study.report.data import Json, bounds_of, estimate
from splitfed.study.report.metrics import METRICS
from splitfed.study.results import RunResult
from splitfed.study.run.results_csv import table_rows


class MissingMetric(SplitfedError):
    """A finished run has no number where the search needs one."""


def measure_metric(results: Sequence[RunResult], metric: SearchMetric) -> Json:
    """Return mean, interval and count of `metric` over the `results` of a trial; no mean: there is no bound.

    Of epsilon it is the largest over the seeds, not the mean. Runs that an attack hijacked count for that attack alone.
    Raises `MissingMetric`.
    """
    if metric.attack is None:
        honest = [one for one in results if not one.training_attack] or results
        rows = [next(table_rows(one)) for one in honest]
        bounds = bounds_of(honest) if metric.column.startswith("utility") else (-math.inf, math.inf)
        over = "rows"
    else:
        rows = [row for one in results for row in table_rows(one) if row.get("attack") == metric.attack]
        bounds, over = METRICS[metric.column].bounds, "victims"
    if metric.without_bound:
        values = [row.get(metric.column) for row in rows]
        known = [float(value) for value in values if value is not None]
        largest = max(known) if len(known) == len(values) else None
        return {"mean": largest, "low": None, "high": None, "n": len(values), "over": "nothing"}
    numbers, own = [], []
    for row in rows:
        value = row.get(metric.column)
        if value is None or not math.isfinite(value):
            there = ", ".join(key for key, one in row.items() if isinstance(one, (int, float)))
            raise MissingMetric(f"run {row['run']} has no {metric.name}; it has {there}")
        own.append({side: row.get(f"{metric.column}_{side}") for side in ("low", "high")})
        numbers.append(float(value))
    if not numbers:
        raise MissingMetric(f"no run was attacked by {metric.attack}")
    centre = None if metric.attack is None else METRICS[metric.column].centre
    if centre is not None:
        numbers = [METRICS[metric.column].leak(value) for value in numbers]
    # The interval of one score turned over is not that of the score.
    found = estimate(numbers, own if centre is None else (), bounds, over)
    assert found is not None
    return {key: getattr(found, key) for key in ("mean", "low", "high", "n", "over")}
