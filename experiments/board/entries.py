"""What the board keeps of a run, a line of JSON each: what its pages show, and neither weights nor predictions."""

from __future__ import annotations

import datetime
import json
import math
import platform
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from experiments.board.studies import BoardRun
from splitfed.attacks.scoring.label_metrics import EXCESS
from splitfed.study.report.metrics import FLOORS, LABEL_FLOORS, METRICS
from splitfed.study.results import AttackRecord, RunResult, to_json
from splitfed.study.run.results_csv import promised_epsilon
from splitfed.training.checkpoint import write_atomic
from splitfed.training.folder import environment

Json = dict[str, Any]
BESIDE = ("mean_image", *FLOORS, *LABEL_FLOORS, EXCESS, "majority", "chance")
"""Baselines and floors that are kept."""
DIGITS = 7
"""Significant digits that are kept."""


class Entries:
    """The entries of a study, by the keys of its runs, in the file at `path`; `put` writes it anew."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = path.read_text("utf-8").splitlines() if path.is_file() else []
        self._found: dict[str, Json] = {entry["key"]: entry for entry in map(json.loads, lines)}

    def get(self, key: str) -> Json | None:
        """Return what is known of the run with this key."""
        return self._found.get(key)

    def put(self, entry: Mapping[str, Any], order: Collection[str]) -> None:
        """Keep `entry`; the file then has the runs whose keys stand in `order`, in this order, and no others."""
        self._found[entry["key"]] = _rounded(entry)
        kept = [json.dumps(self._found[key], ensure_ascii=False) for key in order if key in self._found]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(self.path, "".join(f"{line}\n" for line in kept).encode())


def describe_refusal(run: BoardRun, why: str) -> Json:
    """Return the entry of a run that cannot be put together."""
    return {**_identity(run), "refused": why, "date": today()}


def describe_run(run: BoardRun, result: RunResult, cpu_seconds: float) -> Json:
    """Return the entry of a run that has ended, as it is before any attack.

    `result`: that of its folder. `cpu_seconds`: processor time of its training.
    """
    about = {**_identity(run), "date": today(), "versions": versions()}
    if result.failed is not None:
        return {**about, "failed": result.failed}
    utility, ledger = result.utility, result.ledger
    return {
        **about,
        "guarantee": result.defense.guarantee,
        "metric": utility.metric,
        "utility": utility.test,
        "interval": {key: (utility.interval or {}).get(key) for key in ("low", "high", "kind", "rows")},
        "constant": (utility.constant or {}).get("score"),
        "bytes": result.bytes,
        "rounds": result.rounds,
        "cpu_seconds": cpu_seconds,
        **({} if ledger is None else {"epsilon": promised_epsilon(ledger), "protects": _protected(ledger)}),
        "attacks": {},
    }


def describe_attack(found: AttackRecord, value_range: tuple[float, float] | None, cpu_seconds: float) -> Json:
    """Return what is kept of an attack's entry in the result of its run: scores by who predicted and by metric.

    `value_range`: of the data, which the error of images is held against.
    """
    known = {metric: by for metric, by in to_json(found)["scores"].items() if metric in METRICS}
    headline = next(metric for metric in METRICS if metric in known)
    scores = {
        who: {metric: _known_of(by[who]) for metric, by in known.items() if who in by}
        for who in ("attack", *BESIDE)
        if who in known[headline]
    }
    selection = found.selection or {}
    return {
        "target": found.target,
        "adversary": found.adversary,
        "victims": found.victims,
        "metric": headline,
        "scores": scores,
        **({} if value_range is None or headline != "psnr" else {"width": value_range[1] - value_range[0]}),
        "member": selection.get("member"),
        "converged": selection.get("converged"),
        "under_trained": list(found.under_trained),
        "cpu_seconds": cpu_seconds,
        "date": today(),
    }


def _known_of(score: Json) -> Json:
    """Return mean and interval of a score, and the figures that only reconstructions have where there are any."""
    return {key: value for key, value in score.items() if value is not None or key in ("mean", "low", "high")}


def versions() -> Json:
    """Return what the numbers rest on beside the configuration: versions, and the class of the processor."""
    found = environment()
    capability = torch.backends.cpu.get_cpu_capability()
    names = ("splitfed", "torch", "numpy")
    packages = {name: str(found["packages"][name]).split("+")[0] for name in names}
    return {**packages, "python": found["python"], "processor": f"{platform.machine()}, {capability}"}


def reason(error: Exception) -> str:
    """Return why something was refused, without the places in a study and the names that stand in front."""
    return re.sub(r"^(\w+(\[\d+\])?(\.\w+)*: )+", "", str(error))


def today() -> str:
    """Return the date, by universal time."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def _identity(run: BoardRun) -> Json:
    cell = run.cell
    return {"key": run.key, "run": cell.id, "place": run.place, "defense": cell.defense.label, "seed": cell.seed}


def _protected(ledger: Mapping[str, Any]) -> str:
    return " and ".join(dict.fromkeys(str(total["protects"]) for total in ledger["totals"]))


def _rounded(value: Any) -> Any:
    match value:
        case Mapping():
            return {key: _rounded(item) for key, item in value.items()}
        case list() | tuple():
            return [_rounded(item) for item in value]
        case float():
            return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    return value
