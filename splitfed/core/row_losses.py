"""Whether a loss is the mean over the rows of a batch of a term for each: tried out on outputs and labels.

A loss may divide by a number that the whole batch decides: the weights of its labels, how many of them are not left
out, how many rows are hard. Then a row changes the slopes of all others. So outputs and labels of half of the rows are
changed, from rows that are met with certainty to rows that are missed, and through all classes, each of which stands at
a changed row once, and the slopes of the others may not change; and the slope of each row has to be the one that it
has alone, over the number of rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum

import torch
from torch import Tensor

from splitfed.core.random import derive, generator, stream
from splitfed.core.tasks import Task
from splitfed.core.trial_rows import draw_half

TRIALS = 64
"""The most batches of the run's own size in which other classes stand at half of the rows."""
WIDE, NUMBERS = 256, 2**22
"""The most rows, and about the most numbers, of a batch for the classes that these leave out."""

FAILURES = (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, NotImplementedError)
"""What a module or a loss may raise on rows that are made up."""

_ALONE, _TRIED_ALONE = 3, 6
_CERTAIN = 12.0


class LossFault(Enum):
    """What is wrong with a loss: rows change each other's slopes, or a slope is not the row's own over the rows."""

    MIXED = "mixed"
    SCALED = "scaled"


def loss_fault(task: Task, outputs: Tensor, labels: Tensor | None) -> LossFault | None:
    """Return what keeps the loss of `task` from being the mean of the rows' own; None where nothing does.

    outputs: (rows, ...) of a model, `labels` (rows, ...) their own ones, None where they are not at hand: then zeros
    and ones, or the classes of the task, are.
    """
    if labels is None and task.name == "regression" and outputs.dim() == 2 and outputs.shape[1] == 1:
        # Labels of one number a row may have a dimension for it, or none, and a loss of one's own may take one of both.
        y = torch.randn(outputs.shape, generator=generator(derive(0, "labels of rows"))).to(outputs.dtype)
        return loss_fault(task, outputs, y) and loss_fault(task, outputs, y[:, 0])
    found = None
    for number, (one, y, other, new) in enumerate(_pairs(task, outputs, labels)):
        changed = _draw_changed(len(one), number)
        both = torch.where(_wide(changed, one), other, one), torch.where(_wide(changed, y), new, y)
        try:
            slopes = _slopes(task, one, y)
            if not rows_equal(slopes, _slopes(task, *both), ~changed):
                return LossFault.MIXED
            if number < _TRIED_ALONE and not _is_mean(task, one, y, slopes, _some(len(one), number)):
                found = LossFault.SCALED
        except Exception:  # the user's own loss may raise anything
            # It has to take what it is given in training, not all that is made up.
            if number == 0:
                raise
    return found


def rows_equal(one: Tensor, other: Tensor, kept: Tensor) -> bool:
    """Return whether the rows where `kept`, (rows,) bool, are equal in both, up to rounding."""
    if one.shape != other.shape or len(one) != len(kept):
        return False
    a, b = one[kept], other[kept]
    return torch.equal(a, b) or _nearly_equal(a, b)


def _nearly_equal(one: Tensor, other: Tensor) -> bool:
    a, b = one.double(), other.double()
    finite = a[torch.isfinite(a)]
    top = float(finite.abs().max()) if len(finite) else 0.0
    return torch.allclose(a, b, rtol=1e-4, atol=1e-5 * min(top, 1.0), equal_nan=True)


def _is_mean(task: Task, outputs: Tensor, labels: Tensor, slopes: Tensor, rows: Iterable[int]) -> bool:
    """Return whether the slopes of these `rows` are their own over the number of rows."""
    for row in rows:
        # Twice, for a loss may drop dimensions of size one.
        twice = torch.tensor([row, row])
        alone = 2 * _slopes(task, outputs[twice], labels[twice])[0]
        if not torch.allclose(slopes[row] * len(outputs), alone, rtol=1e-3, atol=1e-6, equal_nan=True):
            return False
    return True


def _slopes(task: Task, outputs: Tensor, labels: Tensor) -> Tensor:
    leaf = outputs.detach().clone().requires_grad_()
    with torch.enable_grad(), stream(derive(0, "loss of rows", task.name)):
        return torch.autograd.grad(task.loss(leaf, labels.clone()), leaf)[0]


def _pairs(task: Task, outputs: Tensor, labels: Tensor | None) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Yield outputs and labels of a batch, and what is to be put in the stead of some: see `_draw_changed`."""
    rows, random = len(outputs), generator(derive(0, "outputs of rows", task.name))
    outputs = outputs.detach()
    drawn = torch.randn(outputs.shape, generator=random, dtype=torch.float64).to(outputs.dtype)
    own = _made_up_labels(task, outputs) if labels is None else labels
    variants = [outputs, drawn, 10 * drawn]
    classes = _classes(task, outputs) if own.numel() == rows else None
    if classes is None:
        order = torch.randperm(rows, generator=random)
        values = own.unique()
        for number in range(2 * len(variants)):
            one, other = variants[number % 3], variants[(number + 1) % 3]
            yield one, own, other, own.roll(number + 1, 0) if number % 2 else own[order]
            # One label in the stead of all, and of some numbers of a row: what a loss leaves out is among them.
            value = values[number * len(values) // (2 * len(variants))]
            some = torch.rand(own.shape, generator=random) < 0.5
            yield one, own, one, torch.where(some, value, own)
        return
    met = torch.full_like(outputs, -_CERTAIN)
    if task.name == "binary":
        met = (2 * own.reshape(outputs.shape).to(outputs.dtype) - 1) * _CERTAIN
    else:
        met.scatter_(1, own.view(-1, 1).long(), _CERTAIN)
    variants += [met, -met]
    for number in range(len(variants)):
        yield variants[number], own, variants[number - 1], own
        yield variants[number], own, variants[number], own.roll(number + 1, 0)
    walk, number, count = torch.randperm(classes, generator=random), 2 * len(variants), 0
    while walk.numel() and rows > 1:
        wide = count == TRIALS
        if not wide:
            count, base, y = count + 1, variants[number // 2 % 3], own
        else:
            size = (max(2, min(WIDE, NUMBERS // max(outputs[0].numel(), 1))), *outputs.shape[1:])
            base = torch.randn(size, generator=random, dtype=torch.float64).to(outputs.dtype)
            y = walk.new_zeros(size[0]).reshape(-1, *own.shape[1:]).to(own.dtype)
        # Each class stands at a row that is changed, in both batches.
        places = [_draw_changed(len(base), number + step).nonzero()[:, 0] for step in range(2)]
        held = min(len(walk), *map(len, places))
        classes_here, walk = walk[:held], walk[held:]
        for step, beside in enumerate((y, classes_here[:1].to(own.dtype).reshape(-1, *own.shape[1:]).expand_as(y))):
            new = beside.clone()
            new[places[step][:held]] = classes_here.to(own.dtype).reshape(-1, *own.shape[1:])
            yield base, beside, base, new
        number += 2


def _draw_changed(rows: int, number: int) -> Tensor:
    """Return which rows are changed in the pair of this `number`, (rows,) bool."""
    return draw_half(rows, "labels", number)


def _classes(task: Task, outputs: Tensor) -> int | None:
    """Return how many classes the labels are of; None where they are anything else."""
    if task.name == "binary":
        return 2
    known = task.name == "classification" and task.outputs is not None and outputs.shape[1:] == (task.outputs,)
    return task.outputs if known else None


def _made_up_labels(task: Task, outputs: Tensor) -> Tensor:
    """Return labels that the built-in losses take; others get the same: zeros and ones in turn, where that can be."""
    rows = len(outputs)
    if task.name == "regression":
        return torch.randn(outputs.shape, generator=generator(derive(0, "labels of rows"))).to(outputs.dtype)
    labels = torch.zeros(rows, dtype=torch.int64)
    if task.name == "binary" or (outputs.dim() == 2 and outputs.shape[1] > 1):
        labels[1::2] = 1
    return labels


def _some(rows: int, number: int) -> list[int]:
    order = torch.randperm(rows, generator=generator(derive(0, "rows alone", number)))
    return order[:_ALONE].tolist()


def _wide(mask: Tensor, like: Tensor) -> Tensor:
    return mask.reshape(-1, *[1] * (like.dim() - 1))
