"""The batches that both sides of an equivalence test run: the modes, the rows, and random numbers for targets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from splitfed.core.equivalence_sides import Side, StepResult, Values
from splitfed.core.errors import NonFinite, describe_failure, others_code
from splitfed.core.model_snapshot import seed_generators
from splitfed.core.random import generator

Stage = tuple[str, int]


class SideFailed(Exception):
    """What the code of one of the two sides raised, the user's own, in one line."""


@dataclass(frozen=True)
class Batches:
    """What both sides run: the modes with how many rows, the rows, and the shapes of outputs without rows."""

    stages: tuple[Stage, ...]
    inputs: Values
    shapes: Mapping[str, tuple[int, ...]]


def run_batch(side: Side, step: int, batches: Batches) -> StepResult | None:
    """Run the batch of number `step`, towards random numbers; None where gradients are not finite."""
    stage, rows = batches.stages[step]
    draws = generator(step, "targets")
    targets = {name: torch.randn((rows, *shape), generator=draws) for name, shape in batches.shapes.items()}
    seed_generators(step)
    given = {n: first_rows(x, rows) for n, x in batches.inputs.items()}
    try:
        with others_code(_side_failed):
            result = side.run(stage, given, targets, step)
    except NonFinite:
        return None
    finite = all(_is_finite(t) for t in result.gradients.values() if t is not None)
    return result if finite else None


def _is_finite(tensor: Tensor) -> bool:
    """Return whether all numbers are finite. So is their sum, as a rule, which is found without a mask of them."""
    return (tensor.is_floating_point() and math.isfinite(tensor.sum().item())) or bool(tensor.isfinite().all())


def _side_failed(error: BaseException) -> BaseException:
    return error if isinstance(error, NonFinite) else SideFailed(describe_failure(error))


def first_rows(value: Tensor, rows: int) -> Tensor:
    """Return the first `rows` rows, from the start again where there are fewer."""
    if rows <= len(value) and value.is_contiguous():
        return value[:rows]
    return value[torch.arange(rows) % len(value)]
