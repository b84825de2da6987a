"""MID: a variational information bottleneck at the cut that limits the information a release has about the input.

Paper: Zou, Liu, Zhang, "Mutual information regularization for vertical federated learning", 2023; the bound is that of
Alemi, Fischer, Dillon, Murphy, "Deep variational information bottleneck", ICLR 2017.

A layer added to the sender's segment behind the value computes a mean mu and a standard deviation s for each of its
numbers; mu + s e is released, with e drawn afresh for every release, in training and at inference. The loss gets weight
KL(N(mu, s^2) || N(0, 1)), summed over the numbers of a row, averaged over rows: `weight` times an upper bound on the
mutual information of input and release, in nats.

With h the layer's output, s = softplus(h - 5), as in Alemi et al., so that it starts with little noise. `weight` is a
number or a schedule over epochs (`splitfed.core.annealing`).

Deviations: mu and h are one linear layer each (a 1x1 convolution for images), of the value's own size, and no other
layer is added before the cut; the authors widen and narrow again. Theirs may also be at the party that holds the
labels, before its top model, to guard labels: that is `mid_labels`. An attack that imitates the party without its
layers knows mu, but not s. The bound holds for inputs from the distribution that the bottleneck was trained on, and is
no formal guarantee. If the defense guards several edges, the penalties are averaged.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from splitfed.core.annealing import Annealing, number_at, number_or_annealing
from splitfed.core.defense import LayerDefense, PenaltyDefense, ReleaseDefense, as_strength
from splitfed.core.defense_context import Context
from splitfed.core.topology import Topology
from splitfed.core.topology_facts import TopologyFacts
from splitfed.defenses.fitted_layers import append_layers, check_all_guarded, layer_of, layers_on
from splitfed.defenses.variational_encoder import Variational, divergence


@dataclass(frozen=True)
class Mid(ReleaseDefense, PenaltyDefense, LayerDefense):
    """Adds a bottleneck whose divergence has the weight `weight` >= 0, a number or a schedule over epochs."""

    weight: float | Annealing = field(default=1e-3, metadata=as_strength("per nat"))

    def __post_init__(self) -> None:
        """Raise `InvalidInput` for a weight that is negative in any epoch."""
        object.__setattr__(self, "weight", number_or_annealing("mid weight", self.weight, low=0.0))

    def fit(self, topology: Topology, facts: TopologyFacts, seed: int) -> Topology:
        """Return `topology` with a bottleneck behind every guarded value."""
        edges = self.edges(topology)
        check_all_guarded("mid", topology, edges, facts)
        return append_layers("mid", topology, edges, facts, seed, Variational)

    peeks = True
    """The release reads the deviation, which a layer computes from the row."""

    def release(self, name: str, z: Tensor, context: Context) -> Tensor:
        """Return a sample around the mean `z`: same shape."""
        layer = layer_of(context.module, Variational, name)
        if layer is None:
            return z
        _, spread = layer.kept
        drawn = torch.randn(z.shape, generator=context.generator(name, z.device), device=z.device, dtype=z.dtype)
        return z + spread * drawn

    def expected(self, name: str, z: Tensor, context: Context) -> Tensor:
        """Return `z`, the mean that the segment computes."""
        return z

    penalty_reads_layers = True
    """The penalty reads the deviation that a layer has computed."""

    def penalty(self, z: Tensor, context: Context) -> Tensor:
        """Return `weight` times the divergence of all values on the edge, a scalar in nats."""
        layers = layers_on(context.module, Variational, context.edge)
        return number_at(self.weight, context.epoch) * torch.stack([divergence(*layer.kept) for layer in layers]).sum()
