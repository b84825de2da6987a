"""The table printed after a study: a row a setting, averaged over its seeds."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from splitfed.attacks.scoring.label_metrics import EXCESS
from splitfed.attacks.threat_model import WHITE_BOX
from splitfed.core.grouping import group_pairs, nest
from splitfed.study.config.run_spec import COMPUTATION
from splitfed.study.report.data import as_json, call_defense, group_by, score, utility_of
from splitfed.study.report.metrics import FLOORS, LABEL_FLOORS, METRICS, ORACLES
from splitfed.study.report.remarks import remarks
from splitfed.study.report.units import format_bytes
from splitfed.study.results import RunResult, Scores

BASELINES = {
    "mean_image": "mean",
    "mean_release": "mean release",
    "frequent_token": "frequent token",
    "majority": "frequent label",
    "chance": "chance",
    "prior": "auxiliary shares",
    "random_pairing": "other victim",
    **FLOORS,
    **LABEL_FLOORS,
    EXCESS: "beyond own data",
    **ORACLES,
}


def setting_rows(results: Sequence[RunResult]) -> list[dict[str, Any]]:
    """Return a plain row a setting, means over the seeds that ended.

    A setting is a topology with a defense, with a schedule and a federated method where the study has several, and
    with the training attack that hijacked it.
    """
    secured = {found.computation for found in results} != {"none"}
    told = {"topology": True, "defense": True, COMPUTATION: secured}
    told |= {"schedule": len({found.schedule for found in results}) > 1}
    told |= {"method": {found.method for found in results} != {"none"}}
    rows = []
    for labels, group in group_by(results, lambda found: tuple(found.labels.items())).items():
        ended = [found for found in group if found.failed is None]
        shown: dict[str, Any] = {key: label for key, label in labels if told.get(key, label)}
        row = shown | {"seeds": len(ended), "failed": len(group) - len(ended)}
        rows.append(row | (_means_of(ended) if ended else {}) | (_costs_of(ended) if secured and ended else {}))
    return rows


def _means_of(ended: Sequence[RunResult]) -> dict[str, Any]:
    """Return what a row tells of the seeds that `ended`."""
    # One seed may have been attacked again.
    attacks = group_by((attack for found in ended for attack in found.attacks), lambda attack: attack.attack)
    private = any(found.ledger is not None for found in ended)
    return {
        "remarks": [*_merge_remarks(ended), *_privacy_notes(ended)],
        "metric": ended[0].utility.metric,
        "utility": fmean(found.utility.test for found in ended if found.utility.test is not None),
        **({"epsilon": _largest_epsilon(ended), "promises": _largest_promises(ended)} if private else {}),
        "attacks": {key: _mean_scores([one.scores for one in found]) for key, found in attacks.items()},
        "intervals": {
            "utility": as_json(utility_of(ended)),
            "attacks": {
                key: {metric: as_json(score(ended, found[0].label, metric)) for metric in METRICS}
                for key, found in attacks.items()
            },
        },
        "quick": [key for key, found in attacks.items() if found[0].quick],
        "white_box": [key for key, found in attacks.items() if found[0].threat_model == WHITE_BOX],
    }


def _merge_remarks(ended: Sequence[RunResult]) -> list[str]:
    """Return the remarks on all seeds; one that differs in its figures alone once, with those of its first seed."""
    pairs: list[tuple[tuple[str, int], tuple[str, str]]] = []
    for found in ended:
        met: Counter[str] = Counter()
        for said in remarks(found):
            words = re.sub(r"[0-9][0-9.e+-]*", "#", said)
            # Two remarks of one seed are two, though figures or numbers in names alone tell them apart.
            pairs.append(((words, met[words]), (str(found.seed), said)))
            met[words] += 1
    by_words = group_pairs(pairs)
    if len(ended) == 1:
        return [said for told in by_words.values() for _, said in told]
    merged = {told[0][1]: list(dict.fromkeys(seed for seed, _ in told)) for told in by_words.values()}
    return [f"{said} (seed {seeds[0]}; {len(seeds)} of {len(ended)} seeds)" for said, seeds in merged.items()]


def _totals(runs: Sequence[RunResult]) -> list[Mapping[str, Any]]:
    """Return what the ledgers of all seeds promise."""
    return [total for run in runs if run.ledger is not None for total in run.ledger["totals"]]


def _privacy_notes(ended: Sequence[RunResult]) -> list[str]:
    """Return what the figures of epsilon do not say by themselves, once."""
    return list(dict.fromkeys(f"epsilon for {t['protects']}: {t['note']}" for t in _totals(ended) if t.get("note")))


def _costs_of(ended: Sequence[RunResult]) -> dict[str, Any]:
    """Return the preset of the seeds that `ended`, None for runs in plain, and their mean bytes and seconds."""
    batch = (ended[0].predicted or {}).get(COMPUTATION) or {}
    costs = {key: fmean(getattr(found, key) for found in ended) for key in ("bytes", "seconds")}
    return {"preset": batch.get("parameters"), **costs}


def _largest_epsilon(runs: Sequence[RunResult]) -> float | None:
    """Return the largest epsilon over the seeds; None where one has none for all that crosses."""
    known = [run.ledger["epsilon"] for run in runs if run.ledger is not None and run.ledger["epsilon"] is not None]
    return max(known) if len(known) == len(runs) else None


def _largest_promises(runs: Sequence[RunResult]) -> dict[str, float]:
    """Return what is protected -> the largest epsilon over the seeds, infinity where it has no bound."""
    found = ((one["protects"], math.inf if one["epsilon"] is None else float(one["epsilon"])) for one in _totals(runs))
    epsilons = group_pairs(found)
    return {protects: max(found) for protects, found in epsilons.items()}


def _format_epsilon(row: dict[str, Any]) -> str:
    if "epsilon" not in row:
        return "-"
    if row["epsilon"] is not None:
        return f"{row['epsilon']:.3g}"
    # A promise for some of what crosses is never told without saying so.
    promises = " and ".join(f"{epsilon:.3g} for {protects}" for protects, epsilon in row["promises"].items())
    return f"{promises}, none for the rest" if promises else "none"


def _mean_scores(scores: Sequence[Scores]) -> dict[str, dict[str, float]]:
    """Average what the seeds have: metric -> who -> mean; nothing where a metric came out as no number."""
    means = group_pairs(
        ((metric, who), score.mean)
        for one in scores
        for metric, by in one.items()
        for who, score in by.items()
        if score.mean is not None
    )
    return nest((metric, who, fmean(values)) for (metric, who), values in means.items())


def print_table(results: Sequence[RunResult], console: Console) -> None:
    """Print the table of `results`, with what baselines, floors and oracles score.

    Those that score the same in every setting stand once, below the table; all others below each setting.
    """
    rows = [row | {"defense": call_defense(row["defense"])} for row in setting_rows(results)]
    metric = next((row["metric"] for row in rows if "metric" in row), "utility")
    attacks = _attack_metrics(rows)
    quick, white = ({name for row in rows for name in row.get(key, [])} for key in ("quick", "white_box"))
    several = len({row["topology"] for row in rows}) > 1
    names = [
        *(["topology"] if several else []),
        *(n for n in ("schedule", "method", COMPUTATION, "training_attack") if any(n in row for row in rows)),
    ]
    private = any("epsilon" in row for row in rows)
    secured = any(COMPUTATION in row for row in rows)
    numbers = [
        metric,
        *(["preset", "bytes", "seconds"] if secured else []),
        *(["epsilon"] if private else []),
        *(
            "\n".join(
                [
                    name,
                    *(["white box"] if name in white else []),
                    *(["quick look"] if name in quick else []),
                    " / ".join(metrics),
                ]
            )
            for name, metrics in attacks.items()
        ),
    ]
    table = Table(
        *(Column(title, overflow="fold") for title in (*names, "defense")),
        *(Column(title, justify="right", overflow="fold") for title in numbers),
        box=None,
        header_style="bold",
        pad_edge=False,
    )

    def add_reference(row: dict[str, Any], who: str, indent: str = "") -> None:
        kind = "floor: " if who in {*FLOORS, *LABEL_FLOORS} else "baseline: "
        kind = "" if who in {*ORACLES, EXCESS} else kind
        scores = [_format_scores(row, name, metrics, who) for name, metrics in attacks.items()]
        if any(scores):
            blank = [""] * (1 + 3 * secured + private)
            table.add_row(*("" for _ in names), f"{indent}{kind}{BASELINES[who]}", *blank, *scores, style="dim")

    shared = [who for who in BASELINES if _scores_alike(rows, attacks, who)]
    for row in rows:
        over, utility, *ends = _interval_cells(row, attacks)
        table.add_row(
            *(row.get(name, "") for name in names),
            row["defense"],
            _format_utility(row),
            *(_format_costs(row) if secured else []),
            *([_format_epsilon(row)] if private else []),
            *(_format_scores(row, name, metrics, "attack") for name, metrics in attacks.items()),
        )
        if over:
            blank = [""] * (3 * secured + private)
            table.add_row(*("" for _ in names), f"  95 % over {over}", utility, *blank, *ends, style="dim")
        for who in BASELINES:
            if who not in shared:
                add_reference(row, who, "  ")
    # Not every row has every attack: one that hijacks training has rows of its own.
    everything = {
        "attacks": {name: scores for row in reversed(rows) for name, scores in row.get("attacks", {}).items()}
    }
    for who in shared:
        add_reference(everything, who)
    if not several and rows:
        console.print(rows[0]["topology"], highlight=False, markup=False)
    console.print(table)
    for row in rows:
        for said in row.get("remarks", []):
            where = ", ".join(row[name] for name in (*names, "defense") if row.get(name))
            console.print(f"{where}: {said}", highlight=False, markup=False)


def _scores_alike(rows: Sequence[dict[str, Any]], attacks: dict[str, list[str]], who: str) -> bool:
    """Return whether `who` scores the same, as printed, beside each attack of every row that has it."""
    return all(
        len({_format_scores(row, name, metrics, who) for row in rows if name in row.get("attacks", {})}) == 1
        for name, metrics in attacks.items()
    )


def _format_costs(row: dict[str, Any]) -> list[str]:
    """Return the preset, bytes and seconds of a row; dashes where no seed ended."""
    if "bytes" not in row:
        return ["-"] * 3
    return [row["preset"] or "-", format_bytes(row["bytes"]), f"{row['seconds']:.3g}"]


def _attack_metrics(rows: Sequence[dict[str, Any]]) -> dict[str, list[str]]:
    """Return the first two metrics that each attack has."""
    return {
        name: [metric for metric in METRICS if metric in scores][:2]
        for row in rows
        for name, scores in row.get("attacks", {}).items()
    }


def _format_scores(row: dict[str, Any], attack: str, metrics: Sequence[str], who: str) -> str:
    scores = row.get("attacks", {}).get(attack, {})
    return " / ".join(f"{scores[metric][who]:#.3g}" for metric in metrics if who in scores.get(metric, {}))


def _interval_cells(row: dict[str, Any], attacks: dict[str, list[str]]) -> list[str]:
    """Return what the intervals of a row are over, "" where it has none, and those of its utility and each attack."""
    known = row.get("intervals", {"utility": None, "attacks": {}})
    cells = [[(known["utility"], ".3f")]]
    cells += [[(known["attacks"].get(name, {}).get(m), "#.3g") for m in metrics] for name, metrics in attacks.items()]
    shown = [[(one, form) for one, form in cell if one and one["low"] is not None] for cell in cells]
    over = " and ".join(dict.fromkeys(one["over"] for cell in shown for one, _ in cell))
    return [over, *("\n".join(f"{one['low']:{form}} to {one['high']:{form}}" for one, form in cell) for cell in shown)]


def _format_utility(row: dict[str, Any]) -> str:
    lost = f" ({row['failed']} failed)" if row["failed"] else ""
    return f"{row['utility']:.3f}{lost}" if "utility" in row else f"failed ({row['failed']})"
