"""Shredder: adds one of a set of noise tensors, learnt to keep the task's accuracy, to each row of a release.

Paper: Mireshghallah, Taram, Ramrakhyani, Jalali, Tullsen, Esmaeilzadeh, "Shredder: learning noise distributions to
protect inference privacy", ASPLOS 2020.

The segments before the cut are frozen, including batch norm, so they should be trained beforehand. A set of `members`
tensors, each of the size of a row's release, is initialised from a Laplace distribution of mean 0 and scale `scale` and
trained by min CE - weight sum|n|, averaged over members. Each row of each release gets a random member, drawn afresh in
training and at inference. The second term is switched off while Var(n) / E[z^2] over the set and the batch (the inverse
of the signal-to-noise ratio, their privacy in vivo) is at least `target`.

Deviations: theirs trains the tensors one after another, with the segments behind the cut frozen too, and decays the
weight at the target; here the whole set is trained together, and the segments behind the cut are trained as their owner
chooses. Some public code has 1/std(n) in place of the sum. The tensors belong to the segment: if clients' segments are
averaged, so are they, member by member. An adversary with the set and many releases can remove most of the noise: no
formal guarantee.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from splitfed.core.defense import LayerDefense, PenaltyDefense, ReleaseDefense, as_strength
from splitfed.core.defense_context import Context
from splitfed.core.errors import require_count, require_number
from splitfed.core.rows import flat_rows
from splitfed.core.topology import Topology
from splitfed.core.topology_facts import TopologyFacts
from splitfed.defenses.clipping import freeze_segments
from splitfed.defenses.fitted_layers import Layer, append_layers, check_all_guarded, layer_of, layers_on


@dataclass(frozen=True)
class Shredder(ReleaseDefense, PenaltyDefense, LayerDefense):
    """Adds one of `members` noise tensors, drawn from Laplace(0, `scale`) and trained, to each row.

    `weight` >= 0: of the term that enlarges the noise, until its strength reaches `target` > 0.
    """

    members: int = field(default=20, metadata=require_count("shredder members", low=1))
    scale: float = field(default=1.0, metadata=require_number("shredder scale", low=0.0, open_low=True))
    weight: float = field(default=1e-3, metadata=require_number("shredder weight", low=0.0))
    target: float = field(
        default=1.0,
        metadata=require_number("shredder target", low=0.0, open_low=True)
        | as_strength("noise power to release power"),
    )

    def fit(self, topology: Topology, facts: TopologyFacts, seed: int) -> Topology:
        """Return `topology` with all segments before the guarded edges frozen, and a noise set for every value."""
        edges = self.edges(topology)
        check_all_guarded("shredder", topology, edges, facts)

        def noises(value: str, shape: tuple[int, ...]) -> NoiseSet:
            return NoiseSet(value, self.members, shape, self.scale)

        return append_layers("shredder", freeze_segments(topology, edges), edges, facts, seed, noises)

    peeks = True
    """The release reads the noise tensors, which are trained on rows."""

    def release(self, name: str, z: Tensor, context: Context) -> Tensor:
        """Return `z` with a member of the set added to each row: same shape."""
        layer = layer_of(context.module, NoiseSet, name)
        if layer is None:
            return z
        drawn = torch.randint(self.members, (len(z),), generator=context.generator(name, z.device), device=z.device)
        return z + layer.noise[drawn]

    def expected(self, name: str, z: Tensor, context: Context) -> Tensor:
        """Return `z` plus the mean of the set."""
        layer = layer_of(context.module, NoiseSet, name)
        return z if layer is None else z + layer.noise.mean(0)

    penalty_reads_layers = True
    """The penalty reads the noise of a layer."""

    def penalty(self, z: Tensor, context: Context) -> Tensor:
        """Return -weight * sum|n|, mean over members, summed over the noise sets below the target: a scalar."""
        layers = layers_on(context.module, NoiseSet, context.edge)
        return -self.weight * torch.stack([layer.size(self.target) for layer in layers]).sum()


class NoiseSet(Layer):
    """Holds the tensors `noise` (members, ...) and is the identity; its defense adds one of them to each row."""

    def __init__(self, value: str, members: int, shape: tuple[int, ...], scale: float) -> None:
        super().__init__(value)
        # A Laplace variable is the difference of two exponential ones.
        first, second = (torch.empty(members, *shape).exponential_() for _ in range(2))
        self.noise = nn.Parameter(scale * (first - second))

    def forward(self, z: Tensor) -> Tensor:
        """Return `z` unchanged."""
        self.kept = (z.detach(),)
        return z

    def in_vivo(self) -> Tensor:
        """Return the strength of the noise relative to the batch being released: Var(n) / E[z^2]."""
        return self.noise.detach().var(correction=0) / self.kept[0].square().mean()

    def size(self, target: float) -> Tensor:
        """Return the mean over members of sum|n|, zero once `target` is reached."""
        return flat_rows(self.noise.abs()).sum(1).mean() * (self.in_vivo() < target)
