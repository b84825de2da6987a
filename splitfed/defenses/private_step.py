"""One party's private step: clips every row's gradient, sums them and adds Gaussian noise, before the optimizer step.

Paper: Abadi, Chu, Goodfellow, McMahan, Mironov, Talwar, Zhang, "Deep learning with differential privacy", CCS 2016.

The rows' gradients are those of the party's own weights; the clipping factor of a row may include the norms of its
gradient at other parties, which send their squares. A row whose gradient is not finite counts as zeros. Rows are added
up and noise is drawn in float64, on a grid (`splitfed.defenses.private_noise`), from the seed by party and step, so a
resumed run draws the same numbers; it does not protect from an adversary who knows the seed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from splitfed.core.errors import InvalidInput
from splitfed.core.gradient_privatizer import PrivatizedParty
from splitfed.core.messages import Stamp
from splitfed.core.random import wide_generator
from splitfed.defenses.per_example_gradients import (
    Call,
    LayerUse,
    RowGradients,
    Samples,
    layers_with_weights,
    measure_norms,
    record_calls,
)
from splitfed.defenses.private_noise import add_gaussian


@dataclass
class _Step:
    """State of one step: the uses of layers whose gradient is still missing, and those whose gradient has arrived."""

    rows: int
    divisor: float
    stamp: Stamp
    calls: list[Call] = field(default_factory=list)
    used: list[LayerUse] = field(default_factory=list)
    measured: RowGradients | None = None
    others: Tensor | None = None


class PrivateStep:
    """Clips to `max_norm` > 0 and adds noise of `noise_multiplier` x `max_norm` to each coordinate of the sum."""

    def __init__(self, holder: PrivatizedParty, max_norm: float, noise_multiplier: float) -> None:
        self.active = False
        self.tells = holder.tells
        self._holder, self._max_norm, self._noise_multiplier = holder, max_norm, noise_multiplier
        found = {id(p): p for m in holder.modules.values() for p in m.parameters() if p.requires_grad}
        self._weights: list[nn.Parameter] = list(found.values())
        self._layers = {id(m): tuple(layers_with_weights(m).values()) for m in holder.modules.values()}
        self._step: _Step | None = None

    def begin(self, rows: int, divisor: float, stamp: Stamp, active: bool) -> None:
        """Start a step of `rows` rows whose losses are summed and divided by `divisor`.

        Raises `InvalidInput` for a step on the rows of several clients.
        """
        if active and self._step is not None:
            raise InvalidInput(
                f"dp_sgd at {self._holder.party!r}: one step would take the rows of several clients, each of which "
                "would need noise of its own"
            )
        self.active = active
        if active:
            self._step = _Step(rows, divisor, stamp)

    @contextmanager
    def watching(self, module: nn.Module) -> Iterator[None]:
        """Record the inputs and outputs of the layers of `module` inside the block."""
        with record_calls(self._layers[id(module)], self._open_step.calls, self._open_step.rows):
            yield

    def backward(self, roots: Sequence[Tensor], gradients: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
        """Propagate `gradients` from `roots` to the `leaves`, and record them at layers; weights get no gradient."""
        step = self._open_step
        calls, step.calls = step.calls, []
        places: list[Any] = [*(call.edge for call in calls), *leaves]
        if not places:
            return
        gradients_found: Sequence[Tensor | None] = torch.autograd.grad(roots, places, gradients, allow_unused=True)
        for call, g in zip(calls, gradients_found, strict=False):
            if g is None:
                step.calls.append(call)  # of a segment whose turn is yet to come
            else:
                # That of the sum of the losses, in which every row has a term of its own.
                step.used.append(LayerUse(call.layer, call.x, g * step.divisor, call.more))
        for leaf, g in zip(leaves, gradients_found[len(calls) :], strict=True):
            if g is not None:
                leaf.grad = g if leaf.grad is None else leaf.grad + g

    def total(self) -> float:
        """Return the sum of the squared norms of all rows' gradients."""
        return float(self._measure(self._open_step).norms.sum())

    def norms(self) -> Tensor:
        """Return the squared L2 norm of every row's gradient at this party: (rows,), float32, as it is sent."""
        return self._measure(self._open_step).norms.float()

    def hear(self, norms: Tensor) -> None:
        """Add the squared norms of the same rows' gradients at another party: (rows,)."""
        step = self._open_step
        step.others = norms if step.others is None else step.others + norms

    def finish(self) -> int:
        """Set the weights' `grad` to (sum of clipped rows + noise) / divisor; return the number of rows not finite."""
        step, holder = self._step, self._holder
        if step is None:
            return 0
        sums = self._sum_clipped(step) if step.rows else {}
        random = wide_generator(
            holder.seed, "dp_sgd", holder.party, holder.role, holder.position, *step.stamp, device=holder.device
        )
        size = sum(weight.numel() for weight in self._weights)
        for weight in self._weights:
            total = sums.get(weight, torch.zeros(weight.shape, dtype=torch.float64)).to(weight.device)
            if self._noise_multiplier > 0:
                total = add_gaussian(total, self._max_norm, self._noise_multiplier, size, random)
            weight.grad = (total / step.divisor).to(weight.dtype)
        return self._measure(step).replaced

    def drop(self) -> None:
        """Discard the open step."""
        self._step = None

    @property
    def _open_step(self) -> _Step:
        assert self._step is not None
        return self._step

    def _sum_clipped(self, step: _Step) -> Samples:
        found = self._measure(step)
        length = (found.norms if step.others is None else found.norms + step.others.to(found.norms)).sqrt()
        # A little below the bound, so that the rounding of norms that were sent cannot lift a row above it.
        return found.add_up((self._max_norm / (length * (1 + 2.0**-22) + 1e-6)).clamp(max=1.0))

    def _measure(self, step: _Step) -> RowGradients:
        if step.measured is None:
            step.measured = measure_norms(step.used, step.rows)
            step.used = []
        return step.measured
