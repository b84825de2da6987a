"""Losses that are the mean of the rows' own, and losses that a batch decides: found by their slopes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import splitfed as sf
from splitfed.core import row_losses
from splitfed.core.errors import InvalidInput
from splitfed.core.random import generator
from splitfed.core.row_losses import LossFault, loss_fault
from splitfed.core.tasks import Loss, Task, binary, classification, regression
from splitfed.data.dataset import Dataset
from splitfed.planning.validation import prepare
from splitfed.schedules.base import Training
from splitfed.topologies import vanilla
from tests.thinning import thin

ROWS, CLASSES = 12, 40
WEIGHTS = torch.ones(CLASSES)
WEIGHTS[37] = 9.0


def cross_entropy(**options: object) -> Loss:
    return lambda output, y: functional.cross_entropy(output, y, **options)  # type: ignore[arg-type]


def rows_of(output: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(output, y, reduction="none")


def hardest(output: Tensor, y: Tensor) -> Tensor:
    return rows_of(output, y).topk(max(1, len(y) // 4)).values.mean()


def above_a_threshold(output: Tensor, y: Tensor) -> Tensor:
    """OHEM: the mean of the rows whose probability is below 0.7, of two at least."""
    losses = rows_of(output, y).sort(descending=True).values
    kept = (losses > 0.357).sum().clamp_min(min(2, len(y)))
    return losses[: int(kept)].mean()


def focal_by_the_batch(output: Tensor, y: Tensor) -> Tensor:
    losses = rows_of(output, y)
    weights = (1 - torch.exp(-losses)).detach()
    return (weights * losses).sum() / weights.sum().clamp_min(1e-6)


def spread(output: Tensor, y: Tensor) -> Tensor:
    return rows_of(output, y).mean() + output.mean(0).square().sum()


MIXED: dict[str, Loss] = {
    "class weights": cross_entropy(weight=WEIGHTS),
    "class weights of smoothed labels": cross_entropy(weight=WEIGHTS, label_smoothing=0.1),
    "a class that is left out": cross_entropy(ignore_index=37),
    "hardest rows": hardest,
    "ohem": above_a_threshold,
    "weights over their sum": focal_by_the_batch,
    "mean of the outputs": spread,
}
MEANS: dict[str, Loss] = {
    "cross-entropy": functional.cross_entropy,
    "smoothed labels": cross_entropy(label_smoothing=0.1),
    "weights of a row's class": lambda output, y: (WEIGHTS[y] * rows_of(output, y)).mean(),
    "focal": lambda output, y: ((1 - torch.exp(-rows_of(output, y))) ** 2 * rows_of(output, y)).mean(),
    "hard rows by a threshold": lambda output, y: (rows_of(output, y) * (rows_of(output, y) > 0.357)).mean(),
    "constant weight": lambda output, y: 3 * rows_of(output, y).mean(),
}


def world(classes: int = CLASSES) -> tuple[Tensor, Tensor]:
    """Outputs of an untrained model, and labels of the first classes alone."""
    random = generator(5)
    return 0.1 * torch.randn(ROWS, classes, generator=random), torch.randint(min(classes, 4), (ROWS,), generator=random)


@pytest.mark.parametrize("loss", MIXED.values(), ids=list(MIXED))
@pytest.mark.parametrize("known", [True, False], ids=["labels of the run", "labels that are made up"])
def test_a_loss_that_the_batch_decides_is_found(loss: Loss, known: bool) -> None:
    output, y = world()
    assert loss_fault(classification(CLASSES).with_loss(loss), output, y if known else None) is LossFault.MIXED


@pytest.mark.parametrize("loss", MEANS.values(), ids=list(MEANS))
def test_a_mean_of_the_rows_own_passes(loss: Loss) -> None:
    output, y = world()
    assert loss_fault(classification(CLASSES).with_loss(loss), output, y) is None


@pytest.mark.parametrize("task", [classification(2), classification(CLASSES, [2.0] * CLASSES), binary(), regression(3)])
def test_losses_that_come_with_splitfed_pass(task: Task) -> None:
    output = world(task.outputs or 1)[0]
    assert loss_fault(task, output, None) is None


@pytest.mark.parametrize(
    "loss", [cross_entropy(reduction="sum"), lambda o, y: rows_of(o, y).sum() / 64], ids=["sum", "over 64"]
)
def test_a_sum_mixes_no_rows_but_is_no_mean(loss: Loss) -> None:
    """Its rows' gradients depend on how many there are: one that is added changes the bound of them all."""
    output, y = world()
    assert loss_fault(classification(CLASSES).with_loss(loss), output, y) is LossFault.SCALED


def test_every_class_is_tried_in_a_small_batch() -> None:
    """The one of forty whose weight differs, whichever it is."""
    output, y = world()
    for label in (0, 3, 4, 18, 39):
        weights = torch.ones(CLASSES)
        weights[label] = 9.0
        assert loss_fault(classification(CLASSES).with_loss(cross_entropy(weight=weights)), output, y), label


@pytest.mark.parametrize(("classes", "rows"), thin([(800, 8), (2000, 32), (3, 2)], 2))
def test_every_class_is_tried_however_many_there_are(classes: int, rows: int) -> None:
    """Beyond those that fit into some batches of the run's own size they were left out."""
    random = generator(3)
    output, y = torch.randn(rows, classes, generator=random), torch.randint(classes, (rows,), generator=random)
    task = classification(classes)
    for label in {0, classes - 1, *torch.randint(classes, (8,), generator=random).tolist()}:
        weights = torch.ones(classes)
        weights[label] = 1.5
        assert loss_fault(task.with_loss(cross_entropy(weight=weights)), output, y), label
    assert loss_fault(task, output, y) is None


def test_labels_of_another_kind_are_those_of_the_run() -> None:
    """Of each of ten positions; those labelled -100, which no class is, are left out of the mean of the batch."""
    random = generator(6)
    output, y = torch.randn(ROWS, 3, 10, generator=random), torch.randint(3, (ROWS, 10), generator=random)
    y[3:, 6:] = -100
    task = Task("words", functional.cross_entropy, lambda o, y: 0.0, "none", None)
    assert loss_fault(task, output, y) is LossFault.MIXED

    def by_row(output: Tensor, y: Tensor) -> Tensor:
        kept = (y != -100).sum(1).clamp_min(1)
        return (functional.cross_entropy(output, y, reduction="none").sum(1) / kept).mean()

    assert loss_fault(task.with_loss(by_row), output, y) is None


def test_a_loss_may_drop_dimensions_of_one() -> None:
    task = replace(binary(), loss=lambda o, y: functional.binary_cross_entropy_with_logits(o.squeeze(), y.float()))
    assert loss_fault(task, torch.randn(ROWS, 1), torch.arange(ROWS) % 2) is None


def test_slopes_of_others_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the comparison of a row with itself alone, what other rows do to it is still found, and only that."""
    output, y = world()
    monkeypatch.setattr(row_losses, "_is_mean", lambda *given: True)
    for loss in MIXED.values():
        assert loss_fault(classification(CLASSES).with_loss(loss), output, y) is LossFault.MIXED
    assert loss_fault(classification(CLASSES).with_loss(cross_entropy(reduction="sum")), output, y) is None


@pytest.mark.parametrize("loss", MIXED.values(), ids=list(MIXED))
def test_a_run_with_dp_sgd_is_refused(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    random = generator(2)
    x, y = torch.rand(80, 6, generator=random), torch.randint(CLASSES, (80,), generator=random)
    every = {"auxiliary": 0, "victims": 0, "validation": 0, "test": 0}
    data = Dataset("rows", x, y, classification(CLASSES).with_loss(loss)).clients(2, **every)  # type: ignore[arg-type]
    topology = vanilla(nn.Sequential(nn.Linear(6, 5), nn.Linear(5, CLASSES)), "0")
    text = "dp_sgd needs a loss that is the mean over the rows; that of 'classification' is not: one row changes"
    with pytest.raises(InvalidInput, match=text):
        prepare(
            topology,
            data,
            schedule="sequential",
            defenses=sf.defenses.DpSgd(noise_multiplier=1.0),
            optimizer=None,
            training=Training(16),
        )
