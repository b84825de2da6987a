"""Channel pruning (DISCO): a learned pruner hides the channels of a release that reveal its input.

Paper: Singh, Chopra, Garza, Zhang, Vepakomma, Sharma, Raskar, "DISCO: dynamic and invariant sensitive channel
obfuscation for deep neural networks", CVPR 2021.

For each row the pruner gives every channel a score s and multiplies it by sigmoid((s - t) / T), T = 1/30, where t is
the score at rank floor(ratio C) from below, so that about ratio C channels go to zero. Three parts are trained in every
step:

the adversary, a decoder D of the pruned release min MSE(D(z'), x), Adam at rate `lr` the pruner min (1 - alpha) CE -
alpha MSE(D(z'), x) the segments before it min CE

So the gradient of the penalty reaches the pruner alone, and the pruner gets 1 - alpha of the task's gradient, the
segments all of it. The pruner is part of the sender's segment and is trained by its party's optimizer; the authors' is
Adam at 3e-4 throughout.

Deviations: the pruner is a convolution, a mean over the places and a linear layer, where theirs is the rest of a
ResNet-18; the adversary is a small decoder of ours; all three learn from one pass, where their client's segments step
before the adversary's error is back-propagated. A vector's features are its channels. If the defense guards several
edges, the penalties are averaged. No formal guarantee.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from splitfed.core.defense import LayerDefense, LearnedDefense, PenaltyDefense, as_strength, concatenate_values
from splitfed.core.defense_context import Context, DefenseSite
from splitfed.core.errors import InvalidInput, require_count, require_number
from splitfed.core.topology import Topology
from splitfed.core.topology_facts import TopologyFacts
from splitfed.defenses.adversary import Adversary, check_raw
from splitfed.defenses.fitted_layers import Layer, append_layers, layers_on, values_of

TEMPERATURE = 1 / 30


@dataclass(frozen=True)
class ChannelPruning(PenaltyDefense, LearnedDefense, LayerDefense):
    """Hides the share `ratio` of the channels, in [0, 1); `alpha` in [0, 1] weighs privacy against the task.

    `hard`: whether masks are exactly 0 or 1 outside training. `width` and `lr`: of the adversary.
    """

    ratio: float = field(
        default=0.5,
        metadata=require_number("channel_pruning ratio", low=0.0, high=1.0, open_high=True)
        | as_strength("of the channels hidden"),
    )
    alpha: float = field(default=0.5, metadata=require_number("channel_pruning alpha", low=0.0, high=1.0))
    hard: bool = False
    width: int = field(default=32, metadata=require_count("channel_pruning width", low=1))
    lr: float = field(default=3e-4, metadata=require_number("channel_pruning lr", low=0.0, open_low=True))

    def check(self, topology: Topology, facts: TopologyFacts) -> None:
        """Raise `InvalidInput` for a sender without raw input, and for a release of fewer than two channels."""
        edges = self.edges(topology)
        check_raw("channel_pruning", topology, edges, facts)
        for value in values_of(topology, edges, facts):
            shape = facts.shapes[value]
            if len(shape) not in (1, 3) or shape[0] < 2:
                raise InvalidInput(
                    f"channel_pruning cannot guard {value!r} of shape {shape} a row: expected two channels or more, "
                    "(channels, height, width) or (features,)"
                )

    def fit(self, topology: Topology, facts: TopologyFacts, seed: int) -> Topology:
        """Return `topology` with a pruning layer after every guarded value, at its sender."""
        self.check(topology, facts)

        def pruner(value: str, shape: tuple[int, ...]) -> Pruner:
            return Pruner(value, shape, self.ratio, 1 - self.alpha, self.hard)

        return append_layers("channel_pruning", topology, self.edges(topology), facts, seed, pruner)

    def start(self, place: DefenseSite) -> Adversary | None:
        """Return the adversary; None at the other end of the edge, where there is no raw input."""
        return Adversary(place, self.width, self.lr) if place.inputs else None

    def learn(self, state: Any) -> None:
        """Take one step of the adversary."""
        if state is not None:
            state.step()

    penalty_reads_layers = True
    """The pruner is a layer of the segment."""

    def penalty(self, z: Tensor, context: Context) -> Tensor:
        """Return -alpha times the adversary's error, a scalar whose gradient reaches the pruners alone."""
        adversary: Adversary = context.state
        pruners = layers_on(context.module, Pruner, context.edge)
        again = concatenate_values([m.prune(m.kept[0], m.scores(m.kept[0])) for m in pruners])
        adversary.accumulate_gradient(again, context)
        return -self.alpha * adversary.error(again, context)


class Pruner(Layer):
    """Multiplies the channels of (batch, channels, ...) by learned masks; see the head of this module.

    `share`: factor of the gradient through the mask for the pruner's weights.
    """

    def __init__(self, value: str, shape: tuple[int, ...], ratio: float, share: float, hard: bool = False) -> None:
        super().__init__(value)
        channels = shape[0]
        width = max(channels, 16)
        self.rank, self.share, self.hard = int(ratio * channels), share, hard
        first = nn.Linear(channels, width) if len(shape) == 1 else nn.Conv2d(channels, width, 3, padding=1)
        pool = nn.Identity() if len(shape) == 1 else nn.AdaptiveAvgPool2d(1)
        self.scores = nn.Sequential(first, nn.ReLU(), pool, nn.Flatten(), nn.Linear(width, channels))

    def forward(self, z: Tensor) -> Tensor:
        """Return `z` with the channels of the lowest scores hidden."""
        self.kept = (z.detach(),)
        weights: dict[str, Tensor] = {
            name: _Share.apply(p, self.share)  # type: ignore[no-untyped-call]
            for name, p in self.scores.named_parameters()
        }
        return self.prune(z, functional_call(self.scores, weights, (z,)))

    def prune(self, z: Tensor, scores: Tensor) -> Tensor:
        """Return `z` times the mask computed from `scores` (batch, channels)."""
        threshold = scores.sort(1).values[:, self.rank : self.rank + 1]
        hard = self.hard and not self.training
        mask = (scores >= threshold).to(z.dtype) if hard else torch.sigmoid((scores - threshold) / TEMPERATURE)
        return z * mask.view(*mask.shape, *[1] * (z.dim() - 2))


class _Share(torch.autograd.Function):
    """Identity whose gradient is multiplied by a share."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: float) -> Tensor:
        ctx.share = share
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g * ctx.share, None
