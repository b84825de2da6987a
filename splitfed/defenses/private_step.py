"""One party's private step: clip every row's gradient, add them up, add Gaussian noise, and only then step.

Paper: Abadi, Chu, Goodfellow, McMahan, Mironov, Talwar, Zhang, "Deep learning with differential privacy", CCS 2016.

The rows' gradients are those of the party's own weights; the factor that clips a row may count in what the row's
gradient measures at other parties, who tell it as a squared norm. Noise is drawn from the seed by party and step, so a
resumed run draws the same; it is a pseudo-random sequence for research, not one that withstands an adversary who knows
the seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from splitfed.defense import Holder
from splitfed.defenses.per_example import Call, Samples, Used, noting, squared_norms, weighted
from splitfed.errors import InvalidInput
from splitfed.seeding import wide_generator
from splitfed.view import Stamp


@dataclass
class _Step:
    """What is kept of one step: the uses of layers whose gradient is to come, and those whose gradient is there."""

    rows: int
    divisor: float
    stamp: Stamp
    calls: list[Call] = field(default_factory=list)
    used: list[Used] = field(default_factory=list)
    measured: tuple[Tensor, Callable[[Tensor], Samples]] | None = None
    others: Tensor | None = None


class PrivateStep:
    """Clips to `max_norm`, > 0, and adds noise of `noise_multiplier` x `max_norm` to each coordinate of the sum."""

    def __init__(self, holder: Holder, max_norm: float, noise_multiplier: float) -> None:
        self.active = False
        self.tells = holder.tells
        self._holder, self._max_norm, self._noise_multiplier = holder, max_norm, noise_multiplier
        found = {id(p): p for m in holder.modules.values() for p in m.parameters() if p.requires_grad}
        self._weights: list[nn.Parameter] = list(found.values())
        self._layers = {id(m): tuple(weighted(m).values()) for m in holder.modules.values()}
        self._step: _Step | None = None

    def begin(self, rows: int, divisor: float, stamp: Stamp, active: bool) -> None:
        """Start a step of `rows` rows whose losses are summed and divided by `divisor`."""
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
        """Take note of what goes through the weights of `module` inside the block."""
        with noting(self._layers[id(module)], self._now.calls):
            yield

    def backward(self, roots: Sequence[Tensor], gradients: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
        """Send `gradients` back from `roots` to the `leaves`, and keep what reaches the layers; no weight gets any."""
        step = self._now
        calls, step.calls = step.calls, []
        places: list[Any] = [*(call.edge for call in calls), *leaves]
        if not places:
            return
        found: Sequence[Tensor | None] = torch.autograd.grad(roots, places, gradients, allow_unused=True)
        for call, g in zip(calls, found, strict=False):
            if g is None:
                step.calls.append(call)  # of a segment whose turn is yet to come
            else:
                # That of the sum of the losses, in which every row has a term of its own.
                step.used.append(Used(call.layer, call.x, g * step.divisor))
        for leaf, g in zip(leaves, found[len(calls) :], strict=True):
            if g is not None:
                leaf.grad = g if leaf.grad is None else leaf.grad + g

    def total(self) -> float:
        """Return the sum of the squared norms of all rows' gradients."""
        return float(self.norms().sum())

    def norms(self) -> Tensor:
        """Return the squared norm of every row's own gradient: (rows,)."""
        return self._measure(self._now)[0]

    def hear(self, norms: Tensor) -> None:
        """Take the squared norms of the same rows' gradients at another party: (rows,)."""
        step = self._now
        step.others = norms if step.others is None else step.others + norms

    def finish(self) -> None:
        """Leave in the weights' `grad`: (sum of the clipped rows + noise) / divisor."""
        step, holder = self._step, self._holder
        if step is None:
            return
        sums = self._clipped(step) if step.rows else {}
        words = (holder.party, holder.role, holder.position, *step.stamp)
        drawn = wide_generator(holder.seed, "dp_sgd", *words, device=holder.device)
        for weight in self._weights:
            noise = torch.randn(weight.shape, generator=drawn, device=weight.device, dtype=weight.dtype)
            noise *= self._noise_multiplier * self._max_norm
            weight.grad = (noise if weight not in sums else noise + sums[weight]) / step.divisor

    def drop(self) -> None:
        """Forget the step."""
        self._step = None

    @property
    def _now(self) -> _Step:
        assert self._step is not None
        return self._step

    def _clipped(self, step: _Step) -> Samples:
        norms, add_up = self._measure(step)
        length = (norms if step.others is None else norms + step.others.to(norms)).sqrt()
        # As Opacus does it: a little below one, so that rounding cannot lift a row above the bound.
        return add_up((self._max_norm / (length + 1e-6)).clamp(max=1.0))

    def _measure(self, step: _Step) -> tuple[Tensor, Callable[[Tensor], Samples]]:
        if step.measured is None:
            step.measured = squared_norms(step.used, step.rows)
            step.used = []
        return step.measured
