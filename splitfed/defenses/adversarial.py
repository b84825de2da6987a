"""Adversarial training with a bottleneck (ResSFL): the client is trained against a decoder that inverts its releases.

Paper: Li, Rakin, Chen, He, Fan, Chakrabarti, "ResSFL: a resistance transfer framework for defending model inversion
attack in split federated learning", CVPR 2022.

At every step the decoder D learns min MSE(D(z), x), and the segments before the cut min CE + weight max(SSIM(D(z), x) -
threshold, 0), with the mean SSIM of the batch. A 3x3 convolution to `bottleneck` channels with a ReLU (8 at stride 1 is
their C8S1) is added before the cut, to the sender's segment, and one back to the original channels, with a ReLU, behind
it, to the receivers' segments. `bottleneck=0` adds none.

Deviations: the decoder is a small one of ours, and learns from the same pass as the segments, before their step. Their
framework trains the resistant segments once, at an expert, which the clients start from; here every client trains
against a decoder of its own. SSIM needs the width of the pixels' value range, `data_range`. If the defense guards
several edges, the penalties are averaged. No formal guarantee.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from splitfed.core.defense import LayerDefense, LearnedDefense, PenaltyDefense, as_strength
from splitfed.core.defense_context import Context, DefenseSite
from splitfed.core.errors import InvalidInput, require_count, require_number
from splitfed.core.random import derive
from splitfed.core.topology import Topology
from splitfed.core.topology_facts import TopologyFacts
from splitfed.defenses.adversary import Adversary, check_raw, concatenate_inputs
from splitfed.defenses.fitted_layers import Layer, append_layers, check_readers, prepend_layers, values_of
from splitfed.stats.structural_similarity import similarity_map


@dataclass(frozen=True)
class Adversarial(PenaltyDefense, LearnedDefense, LayerDefense):
    """Penalises the structural similarity of a decoder's reconstructions above a threshold.

    `weight` >= 0 of the penalty; `threshold` in [-1, 1]; `bottleneck`: channels of the layer added to the client, 0 for
    none. `data_range`: width of the pixels' value range, > 0. `width` and `lr`: of the decoder.
    """

    weight: float = field(
        default=0.3, metadata=require_number("adversarial weight", low=0.0) | as_strength("against the task")
    )
    threshold: float = field(default=0.5, metadata=require_number("adversarial threshold", low=-1.0, high=1.0))
    bottleneck: int = field(default=8, metadata=require_count("adversarial bottleneck"))
    data_range: float = field(default=1.0, metadata=require_number("adversarial data_range", low=0.0, open_low=True))
    width: int = field(default=32, metadata=require_count("adversarial width", low=1))
    lr: float = field(default=1e-3, metadata=require_number("adversarial lr", low=0.0, open_low=True))

    def check(self, topology: Topology, facts: TopologyFacts) -> None:
        """Raise `InvalidInput` for a sender without image inputs, and a bottleneck on a release that is no image."""
        edges = self.edges(topology)
        check_raw("adversarial", topology, edges, facts)
        for name in edges:
            role = topology.role_of(topology.edge(name).source)
            owned = [facts.shapes[value] for value, owner in topology.inputs.items() if owner == role]
            if len(owned) != 1 or len(owned[0]) != 3:
                raise InvalidInput(
                    f"adversarial compares images, and role {role!r} has rows of {', '.join(map(str, owned))}; "
                    "expected one (channels, height, width)"
                )
        for value in values_of(topology, edges, facts) if self.bottleneck else ():
            if len(facts.shapes[value]) != 3:
                raise InvalidInput(
                    f"adversarial has no bottleneck for {value!r} of shape {facts.shapes[value]} a row: cut where an "
                    "image leaves, or give bottleneck=0"
                )

    def fit(self, topology: Topology, facts: TopologyFacts, seed: int) -> Topology:
        """Return `topology` with both halves of the bottleneck around every guarded value."""
        self.check(topology, facts)
        if not self.bottleneck:
            return topology
        edges = self.edges(topology)
        check_readers("adversarial narrows {value!r}", topology, edges, facts, ", or give bottleneck=0")

        def narrow(value: str, shape: tuple[int, ...]) -> Narrow:
            return Narrow(value, shape[0], self.bottleneck)

        def widen(value: str) -> nn.Module:
            convolution = nn.Conv2d(self.bottleneck, facts.shapes[value][0], 3, padding=1)
            return nn.Sequential(convolution, nn.ReLU()).to(facts.dtypes[value])

        narrowed = append_layers("adversarial", topology, edges, facts, seed, narrow)
        guarded = values_of(topology, edges, facts)
        segments = tuple(
            prepend_layers(s, guarded, derive(seed, "adversarial", "wide", s.name), widen) for s in narrowed.segments
        )
        return replace(narrowed, segments=segments)

    def start(self, place: DefenseSite) -> Adversary | None:
        """Return the decoder; None at the other end of the edge, where there is no raw input."""
        return Adversary(place, self.width, self.lr) if place.inputs else None

    def learn(self, state: Any) -> None:
        """Take one step of the decoder."""
        if state is not None:
            state.step()

    def penalty(self, z: Tensor, context: Context) -> Tensor:
        """Return `weight` times the excess of the decoder's mean SSIM over the threshold, a scalar >= 0."""
        adversary: Adversary = context.state
        adversary.accumulate_gradient(z, context)
        similarity = similarity_map(adversary.decode(z), concatenate_inputs(context.inputs), self.data_range).mean()
        return self.weight * torch.relu(similarity - self.threshold)


class Narrow(Layer):
    """The bottleneck before the cut: maps (batch, channels, h, w) to (batch, `left`, h, w)."""

    def __init__(self, value: str, channels: int, left: int) -> None:
        super().__init__(value)
        self.net = nn.Sequential(nn.Conv2d(channels, left, 3, padding=1), nn.ReLU())

    def forward(self, z: Tensor) -> Tensor:
        """Return the bottleneck's output: (batch, left, h, w)."""
        found: Tensor = self.net(z)
        return found
