"""MID: a variational information bottleneck at the cut, which limits what a release can tell of the input.

Paper: Zou, Liu, Zhang, "Mutual information regularization for vertical federated learning", 2023; the bound is that of
Alemi, Fischer, Dillon, Murphy, "Deep variational information bottleneck", ICLR 2017.

Behind the value stands a layer of the sender's segment that makes a mean mu and a standard deviation s of it, number by
number; mu + s e is released, with e drawn afresh for every release, in training and at inference. The loss gets
weight KL(N(mu, s^2) || N(0, 1)), summed over the numbers of a row, averaged over rows: `weight` times an upper bound
on the mutual information of input and release, in nats.

With h what its layer gives, s = softplus(h - 5), as in Alemi et al., so that it starts with little noise.

Deviations: mu and h are one linear layer each (a 1x1 convolution for images), of the value's own size, and no other
layer stands before the cut; the authors widen and narrow again. Theirs may also stand at the party
that holds the labels, before its top model, to guard labels: that place is not here. Whoever imitates the party without
its layers knows mu, not s. The bound holds for inputs from the distribution that the bottleneck was trained on, and is
no formal guarantee. Where a defense guards several edges the penalties are averaged.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from splitfed.defense import Context, Defense
from splitfed.defenses.fitted import Layer, behind, check_all_guarded, layer_of, layers_on
from splitfed.errors import InvalidInput, check_number
from splitfed.graph import Topology
from splitfed.probe import Facts


@dataclass(frozen=True)
class Mid(Defense):
    """Weigh the divergence by `weight` >= 0."""

    weight: float = 1e-3

    def __post_init__(self) -> None:
        """Refuse a negative weight."""
        check_number("mid weight", self.weight, low=0.0)

    def fit(self, topology: Topology, facts: Facts, seed: int) -> Topology:
        """Return `topology` with a bottleneck behind every value that is guarded."""
        edges = self.edges(topology)
        check_all_guarded("mid", topology, edges)
        return behind("mid", topology, edges, facts, seed, Variational)

    @property
    def peeks(self) -> bool:
        """Its deviation is made from the row itself."""
        return True

    def release(self, name: str, z: Tensor, context: Context) -> Tensor:
        """Return a sample around the mean `z`: same shape."""
        layer = layer_of(context.module, Variational, name)
        if layer is None:
            return z
        _, spread = layer.kept
        drawn = torch.randn(z.shape, generator=context.generator(name, z.device), device=z.device, dtype=z.dtype)
        return z + spread * drawn

    def expected(self, name: str, z: Tensor, context: Context) -> Tensor:
        """The mean is what the segment makes."""
        return z

    def penalty(self, z: Tensor, context: Context) -> Tensor:
        """Return `weight` times the divergence of all values on the edge."""
        layers = layers_on(context.module, Variational, context.edge)
        return self.weight * torch.stack([divergence(*layer.kept) for layer in layers]).sum()


class Variational(Layer):
    """Makes mean and standard deviation of (batch, channels, ...), returns the mean and keeps both."""

    def __init__(self, value: str, shape: tuple[int, ...]) -> None:
        super().__init__(value)
        if len(shape) not in (1, 3):
            raise InvalidInput(
                f"mid cannot guard {value!r} of shape {shape} a row: expected (features,) or (channels, height, width)"
            )
        size = shape[0]
        self.mean, self.spread = (
            nn.Linear(size, size) if len(shape) == 1 else nn.Conv2d(size, size, 1) for _ in range(2)
        )

    def forward(self, z: Tensor) -> Tensor:
        """Return the mean of the release: same shape."""
        self.kept = (self.mean(z), functional.softplus(self.spread(z) - 5).clamp_min(1e-6))
        return self.kept[0]


def divergence(mean: Tensor, spread: Tensor) -> Tensor:
    """Return KL(N(mean, spread^2) || N(0, 1)) in nats, summed over a row's numbers, averaged over rows."""
    terms = mean.square() + spread.square() - 2 * spread.log() - 1
    return terms.flatten(1).sum(1).mean() / 2
