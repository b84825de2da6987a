"""Linear gradient inversion: solves for a linear layer's inputs from the gradients of its weights and of its outputs.

Paper: none; after Zhu, Blaschko, "R-GAP: recursive gradient attack on privacy", ICLR 2021, applied to the published
protocols of encrypted split learning: Khan, Nguyen, Michalas, "Split ways: privacy-preserving training of encrypted
data using split learning", 2023 ("plain_gradient"), and the same authors' "Split without a leak", 2023
("constant_mask").

The server's layer computes o = z W' + b on encrypted z (rows, features). It reads g = dL/do (rows, results), and dL/dW
= g' z: directly under "plain_gradient", and under "constant_mask" as the difference of two successive weights over the
rate. So z = pinv(g') dL/dW: exact where g has as many independent rows as the step has victims. The gradients of
softmax and cross-entropy add up to zero in each row, so that a step must have fewer victims than classes. In a larger
step only the component of z in the row space of g' is determined; the prediction is the minimum-norm least squares
solution, without a stated error.

Error: dL/dW is known up to e a number, by rounding to float32 (24 bits), and under "constant_mask" by the noise of
CKKS, over the rate. A number of z is then known up to sqrt(results) e / s, s the smallest singular value of g.
Directions whose error could exceed the declared bound of z are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from splitfed.attacks.base import (
    Attack,
    DefenseEffect,
    Knowledge,
    Needs,
    Outcome,
    Phase,
    Progress,
    Target,
    unwrap,
)
from splitfed.attacks.encrypted_layer import EncryptedLayer
from splitfed.core.errors import InvalidInput, require_count
from splitfed.core.messages import Message, View

ROUNDING = 2.0**-24
"""Largest relative error of a number that is rounded to float32."""


class _LayerStep(NamedTuple):
    """One step: gradients of outputs (rows, results) and of weights (results, features), the latter up to `error`."""

    results: Tensor
    weights: Tensor
    error: float


@dataclass(frozen=True)
class LinearGradientInversion(Attack):
    """Reconstructs the encrypted inputs of a linear layer from its weight gradient.

    `step_rows`: victims in one training step, 4 as published; 0: the batch size of the run.
    """

    target: ClassVar[Target] = Target.RELEASES
    phase: ClassVar[Phase] = Phase.STEP
    requires: ClassVar[frozenset[Needs]] = frozenset({Needs.GRADIENTS, Needs.ENCRYPTED_LAYER})
    adapts_to = frozenset[DefenseEffect]()

    step_rows: int = field(default=4, metadata=require_count("linear_gradient_inversion step_rows"))

    def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Outcome:
        """Return the releases, (victims, features), and the largest absolute error of each, (victims,)."""
        layer = unwrap(knowledge.encrypted_layer)
        steps = list(_steps(view, layer))
        if not steps:
            raise InvalidInput(f"linear_gradient_inversion reads the gradient of {layer.result!r}; none has arrived")
        solved = []
        for number, step in enumerate(steps, 1):
            solved.append(solve(step.results, step.weights, step.error, layer.bound))
            progress(number, len(steps))
        releases, bounds = zip(*solved, strict=True)
        return Outcome(torch.cat(releases).float(), error_bound=torch.cat(bounds))


def solve(results: Tensor, weights: Tensor, error: float, bound: float) -> tuple[Tensor, Tensor]:
    """Return z (rows, features) with results' z = weights, and the largest absolute error in each row, (rows,).

    `results`: (rows, results), gradient of a linear layer's outputs; `weights`: (results, features), gradient of its
    weights, each number up to `error`; `bound`: the largest magnitude of z. If the rows of `results` are linearly
    dependent, or so nearly that the error of some direction of z may exceed the bound, z is the minimum-norm solution
    in the other directions, and the largest errors are infinite.
    """
    rows, columns = results.shape
    left, values, right = torch.linalg.svd(results.double(), full_matrices=False)
    column_error = math.sqrt(columns) * error
    # A direction of z has at most the norm of a column of z, bound * sqrt(rows).
    kept = values * bound * math.sqrt(rows) > column_error
    solution: Tensor = (left[:, kept] / values[kept]) @ (right[kept] @ weights.double())
    stated = column_error / float(values.min()) if int(kept.sum()) == rows else math.inf
    return solution, torch.full((rows,), stated, dtype=torch.float64)


def _steps(view: View, layer: EncryptedLayer) -> Iterator[_LayerStep]:
    """Yield the gradients of each step, in the order of its victims."""
    after = {m.stamp: m.tensors[layer.weight] for m in view.messages if m.kind == layer.masked}
    for message in view.select(kind="gradient").messages:
        if layer.result not in message.tensors:
            continue
        results = message.tensors[layer.result].flatten(1).double().cpu()
        if layer.masked is None:
            yield _plain_step(layer, results, message)
        else:
            yield _masked_step(view, layer, results, after[message.stamp].double().cpu())


def _plain_step(layer: EncryptedLayer, results: Tensor, message: Message) -> _LayerStep:
    """Return a step whose weight gradient was received, as a sum over rows in float32."""
    largest = layer.bound * float(results.abs().sum(0).max())
    return _LayerStep(results, message.tensors[layer.weight].double().cpu(), (len(results) + 1) * ROUNDING * largest)


def _masked_step(view: View, layer: EncryptedLayer, results: Tensor, after: Tensor) -> _LayerStep:
    """Return a step whose weight gradient is the difference of successive weights over the rate.

    `after`: weights after the step, plus the mask.
    """
    (before,) = (m.weight for m in view.segments[layer.segment].modules() if isinstance(m, nn.Linear))
    difference = before.detach().double().cpu() - (after - layer.mask)
    error = layer.weight_error(results) + ROUNDING * float(after.abs().max())
    return _LayerStep(results, difference / layer.rate, error / layer.rate)
