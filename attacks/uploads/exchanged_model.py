"""What an aggregation server knows of a client's model: the exchanged segments round by round, and public scores.

If weights, or changes of them, are exchanged, the server holds the segments as they were sent and as they came back. If
clients score shared public rows, it holds the rows and the scores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call

from splitfed.attacks.networks.frozen_copy import run_segments
from splitfed.core.payload import copy_modules
from splitfed.core.topology import Segment, weights

GRADIENT_STEP = 1e-2
"""Step along a gradient that was sent instead of weights, relative to the norm of the weights."""


class ExchangedRound(NamedTuple):
    """The weights sent to a client in round `number` and those it returned, as `segment/name` -> tensor."""

    number: int
    before: Mapping[str, Tensor]
    after: Mapping[str, Tensor]


@dataclass(frozen=True)
class ExchangedModel:
    """The segments that an aggregation server can run with the weights it exchanges with a client.

    `segments`: those from raw rows to `out`, in order, with modules of the first weights; `feed(x)`: the inputs for
    rows x. `scores`: whether `out` are scores of classes, (n, classes); else they are features, (n, ...), of a head
    that never leaves the client. `rounds`: in order, at least one. `others`: the rounds of every other client with the
    same exchanged weights, if `out` are features.
    """

    segments: tuple[Segment, ...]
    feed: Callable[[Tensor], Mapping[str, Tensor]]
    out: str
    scores: bool
    rounds: tuple[ExchangedRound, ...]
    others: tuple[tuple[ExchangedRound, ...], ...] = ()

    def run(self, x: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return `out` for rows x (n, *shape), differentiable in both; `tensors`: `segment/name` -> weight or buffer.

        In evaluation mode. Weights missing in `tensors` are those before the first round.
        """

        def call(segment: Segment, *inputs: Tensor) -> Any:
            prefix = f"{segment.name}/"
            own = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
            return functional_call(segment.module, own, inputs)

        return run_segments(self.segments, {s.name: partial(call, s) for s in self.segments}, self.feed(x))[self.out]

    def last_layer(self) -> list[str]:
        """Return the names of the weights of the last layer with weights."""
        names = [f"{s.name}/{name}" for s in self.segments for name in weights(s.module)]
        layer = names[-1].rpartition(".")[0]
        return [name for name in names if name.rpartition(".")[0] == layer]

    def copy(self) -> ExchangedModel:
        """Return a copy with modules and tensors of its own."""
        modules = copy_modules({s.name: s.module for s in self.segments})
        segments = tuple(replace(s, module=modules[s.name].eval(), original=None) for s in self.segments)
        others = tuple(_copy_rounds(rounds) for rounds in self.others)
        return replace(self, segments=segments, rounds=_copy_rounds(self.rounds), others=others)


@dataclass(frozen=True)
class PublicScores:
    """The newest class probabilities of public rows by a client, and by all others on average.

    `x`: (m, *shape) rows scored by the client, `own`: (m, classes) its scores; `others_x` (k, *shape), `others` (k,
    classes): rows scored by any other client, and their mean scores.
    """

    x: Tensor
    own: Tensor
    others_x: Tensor
    others: Tensor

    def copy(self) -> PublicScores:
        """Return a copy with tensors of its own."""
        return PublicScores(*(t.clone() for t in (self.x, self.own, self.others_x, self.others)))


def _copy_rounds(rounds: tuple[ExchangedRound, ...]) -> tuple[ExchangedRound, ...]:
    return tuple(ExchangedRound(one.number, _copy(one.before), _copy(one.after)) for one in rounds)


def _copy(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def move_along(before: Mapping[str, Tensor], gradient: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights `before`, those with a `gradient` moved against it by `GRADIENT_STEP` of their norm."""
    lengths = [
        torch.stack([t.double().square().sum() for t in part]).sum().sqrt()
        for part in ([before[n] for n in gradient], list(gradient.values()))
    ]
    rate = float(GRADIENT_STEP * lengths[0] / lengths[1].clamp_min(1e-300))
    return {n: t - rate * gradient[n] if n in gradient else t for n, t in before.items()}


def midpoint(one: ExchangedRound) -> dict[str, Tensor]:
    """Return the means of the weights sent and returned; whole numbers are those returned."""
    return {
        name: torch.lerp(one.before[name], after, 0.5) if name in one.before and after.is_floating_point() else after
        for name, after in one.after.items()
    }
