"""A task whose loss is the one that the model computes itself, from labels that its `forward` takes.

Many models return their loss beside their outputs when they are given labels. In split learning the loss is computed
where the outputs are made and the labels are known, by whom need not be the party that the rest of the model belongs
to. So the operations behind the outputs are taken out of the model's own `forward`, by the replay that cuts models
(`splitfed.core.replay`): they read the outputs and the labels, and nothing else.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from splitfed.core.errors import InvalidInput
from splitfed.core.model_snapshot import ModelSnapshot
from splitfed.core.replay import ReplayedSegment, replay
from splitfed.core.replay_plan import flatten_result
from splitfed.core.tasks import Task


def model_task(
    model: nn.Module,
    example: Mapping[str, Tensor],
    *,
    output: str = "logits",
    labels: str = "labels",
    loss: str = "loss",
    metric: Callable[[Tensor, Tensor], float] | None = None,
    metric_name: str = "loss",
    higher_is_better: bool = False,
) -> Task:
    """Return the task of learning by the loss that `model` computes itself, for data sets and topologies.

    example: argument of `forward` -> at least two rows, the argument `labels` among them. `output` and `loss`: what the
    model calls its outputs and its loss, keys or fields of what it returns, or places ("0"). `metric(outputs, labels)`
    is over all rows; by default the loss itself. The loss is compared with the model's own on the example, bit for bit,
    and so is its gradient. Raises `InvalidInput` where it reads anything but the outputs and the labels, draws random
    numbers, uses weights, or is no scalar.
    """
    kind = type(model).__name__
    if labels not in example or labels not in inspect.signature(model.forward).parameters:
        raise InvalidInput(f"labels={labels!r} is not allowed; expected an argument of {kind}.forward that example has")
    snapshot = ModelSnapshot(model)
    try:
        tail, inputs, _ = replay(model, (), example, loss, after=output).segments[-1]
        _check_reads(kind, tail, inputs, labels)
        found = _LossOfModel(tail, inputs.index(labels))
        snapshot.restore()
        _compare(model, example, output, labels, loss, found)
    finally:
        snapshot.restore()
    return Task("model", found, metric or found.value, metric_name, None, higher_is_better)


class _LossOfModel:
    """The loss as a function of outputs and labels."""

    def __init__(self, tail: ReplayedSegment, place: int) -> None:
        self._tail, self._place = tail.train(), place
        self._device = torch.device("cpu")

    def __call__(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the loss of a batch, a scalar."""
        if output.device != self._device:
            self._tail.to(output.device)
            self._device = output.device
        found: Tensor = self._tail(*((y, output) if self._place == 0 else (output, y)))
        return found

    def value(self, output: Tensor, y: Tensor) -> float:
        """Return the loss as a number."""
        with torch.no_grad():
            return float(self(output, y))


def _check_reads(kind: str, tail: ReplayedSegment, inputs: tuple[str, ...], labels: str) -> None:
    """Refuse a loss that needs more than the outputs and the labels."""
    own = "give a loss of your own as Task(loss=...)"
    for name, _ in tail.named_parameters():
        raise InvalidInput(f"the loss of {kind} uses weight {name!r}: {own}")
    way = tail.replay_plan.ways[True, True][0]
    received = way.received[-1]
    others = [n for n in inputs if n != labels and (n not in received or received[n].made != way.after)]
    if labels not in inputs or others or len(inputs) < 2:
        what = f"reads {others[0]!r} besides" if others else "does not read both"
        raise InvalidInput(f"the loss of {kind} {what} outputs and labels: {own}")
    if any(number >= way.ends[-1] for number in way.draws):
        raise InvalidInput(f"the loss of {kind} draws random numbers: {own}")


def _compare(
    model: nn.Module, example: Mapping[str, Tensor], output: str, labels: str, loss: str, found: _LossOfModel
) -> None:
    """Compare the loss and its gradient with the model's own."""
    result = model.train()(**example)
    outputs, whole = flatten_result(result, output)[output], flatten_result(result, loss)[loss]
    if whole.dim():
        raise InvalidInput(f"the loss {loss!r} of {type(model).__name__} has shape {tuple(whole.shape)}; expected ()")
    leaf = outputs.detach().requires_grad_()
    again = found(leaf, example[labels])
    (wanted,) = torch.autograd.grad(whole, outputs)
    (slope,) = torch.autograd.grad(again, leaf)
    if not (torch.equal(whole, again) and torch.equal(wanted, slope)):
        raise InvalidInput(
            f"the loss of {type(model).__name__} is another one outside of it ({float(again):.6g}, there "
            f"{float(whole):.6g}): give a loss of your own as Task(loss=...)"
        )
