"""Scores of single rows of a finished run: of every victim by the predictions that attacks left, and of test rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load
from torch import Tensor

from splitfed.attacks.scoring import reconstruction_metrics as metrics
from splitfed.core import digests
from splitfed.core.errors import InvalidInput
from splitfed.core.tasks import Task
from splitfed.study.results import AttackRecord
from splitfed.study.run.reattack import rebuild_run
from splitfed.study.trust import path_inside

_SAME = 1e-4  # relative: predictions are kept in float32, means of rows in float64


@dataclass(frozen=True)
class RowScores:
    """Scores of rows by metric, (n,) float64 each, in the order of `truth` (n, ...), by which rows are recognised."""

    truth: Tensor
    scores: Mapping[str, Tensor]


def score_victims(folder: Path, entry: AttackRecord) -> RowScores:
    """Return the scores of every victim of the attack `entry` of the run in `folder`.

    They are computed anew from the prediction and the truth that the run kept. A metric whose mean over victims is not
    the score that was kept is left out: it is no mean over rows (an AUC), or not of all of each row. Raises
    `InvalidInput` for a file that leads out of the folder, and `Damaged` for a changed one.
    """
    path = path_inside(folder, entry.file)
    if path is None:
        raise InvalidInput(f"{str(folder)!r}: the predictions of {entry.label!r} lie outside of its folder")
    digests.check_file(path, entry.sha256, digests.REMEASURE)
    tensors = load(path.read_bytes())
    # Earlier versions called what an attack predicts its guess.
    truth, prediction = tensors["truth"], tensors.get("prediction", tensors.get("guess"))
    if prediction is None:
        raise digests.Damaged(path, digests.REMEASURE, "it holds no prediction")
    kept = {name: by["attack"].mean for name, by in entry.scores.items() if "attack" in by}
    found = _SCORERS[entry.target](truth, prediction, kept) if entry.target in _SCORERS else {}
    same = {name: rows for name, rows in found.items() if (mean := kept.get(name)) is not None and _agrees(rows, mean)}
    return RowScores(truth, same)


def score_test_rows(folder: Path, *, trust: bool) -> RowScores:
    """Return how the run in `folder` does on every test row of its clients, rebuilt from its newest checkpoint.

    "accuracy": 1 for the right class, else 0; of a regression "squared_error", its mean over the targets. Defenses draw
    anew, with the draws of the first call. Raises `InvalidInput` for any other task, and where the run may not be
    rebuilt (`splitfed.study.run.reattack.load_finished_run`).
    """
    run = rebuild_run(folder, trust=trust)
    head = run.engine.topology.scored[0]
    assert head.task is not None
    x, score = [], []
    for client, data in enumerate(run.data.clients):
        if len(data.test):
            output = run.predict(data.test.x, client, number=0, head=head.value)
            x.append(data.test.x)
            score.append(_score_output(head.task, output.detach().cpu(), data.test.label(head.target).cpu()))
    if not x:
        raise InvalidInput(f"run {str(folder)!r} has no test rows")
    name = "squared_error" if head.task.name == "regression" else "accuracy"
    return RowScores(torch.cat(x).cpu(), {name: torch.cat(score)})


def mean_over_runs(rows: Sequence[tuple[Tensor, Tensor]], whole: bool) -> Tensor:
    """Return one value a distinct row: the mean of the values (n,) that the runs have for it, (rows,).

    `rows`: truth (n, ...) and values, a run. `whole`: whether the truth is the row itself, so that equal ones are the
    same row; else every row of every run is one of its own.
    """
    if not whole:
        return torch.cat([values for _, values in rows])
    by_row: dict[bytes, list[float]] = {}
    for truth, values in rows:
        for row, value in zip(truth.flatten(1), values.tolist(), strict=True):
            by_row.setdefault(row.contiguous().numpy().tobytes(), []).append(value)
    return torch.tensor([math.fsum(values) / len(values) for values in by_row.values()], dtype=torch.float64)


def _score_output(task: Task, output: Tensor, y: Tensor) -> Tensor:
    match task.name:
        case "classification":
            return (output.argmax(1) == y).double()
        case "binary":
            return ((output.reshape(-1) > 0) == (y > 0.5)).double()
        case "regression":
            return (output.double().reshape(len(y), -1) - y.double().reshape(len(y), -1)).square().mean(1)
    raise InvalidInput(f"test rows of the task {task.name!r} have no score of their own; leave them out")


def _score_inputs(truth: Tensor, prediction: Tensor, kept: Mapping[str, Any]) -> dict[str, Tensor]:
    if truth.shape != prediction.shape:
        return {}
    found = {"mse": metrics.mse(truth, prediction)}
    if "r2" in kept:
        found["r2"] = metrics.r2(truth, prediction)
    if kept.get("psnr") is not None:
        width = _find_range(found["mse"], float(kept["psnr"]))
        found["psnr"] = metrics.psnr(truth, prediction, width)
        if "ssim" in kept and truth.dim() == 4:
            found["ssim"] = metrics.ssim(truth, prediction, width)
    return found


def _find_range(errors: Tensor, mean: float) -> float:
    """Return the width of the range by which rows with these squared errors have this mean PSNR, in dB."""
    if _agrees(10 * -errors.clamp_min(10 ** (-metrics.PSNR_CAP / 10)).log10(), mean):
        return 1.0
    return 10 ** ((mean + 10 * float(errors.clamp_min(1e-30).log10().mean())) / 20)


def _score_labels(truth: Tensor, prediction: Tensor, kept: Mapping[str, Any]) -> dict[str, Tensor]:
    said = (prediction > 0).long() if prediction.dim() == 1 else prediction.argmax(1)
    return {"accuracy": (said == truth.long()).double()}


def _score_tokens(truth: Tensor, prediction: Tensor, kept: Mapping[str, Any]) -> dict[str, Tensor]:
    return {"token_accuracy": (truth == prediction).flatten(1).double().mean(1)}


_SCORERS: dict[str, Callable[[Tensor, Tensor, Mapping[str, Any]], dict[str, Tensor]]] = {
    "inputs": _score_inputs,
    "labels": _score_labels,
    "tokens": _score_tokens,
}
WHOLE_ROWS = ("inputs", "tokens")
"""Targets whose truth is the row itself."""


def _agrees(rows: Tensor, mean: float) -> bool:
    return math.isclose(float(rows.mean()), mean, rel_tol=_SAME, abs_tol=1e-9)
