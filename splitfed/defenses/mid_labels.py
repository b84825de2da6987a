"""MID for labels: a variational information bottleneck at the label holder, between a received value and its model.

Paper: Zou, Liu, Zhang, "Mutual information regularization for vertical federated learning", 2023; the bound is that of
Alemi, Fischer, Dillon, Murphy, "Deep variational information bottleneck", ICLR 2017.

A party that knows labels passes each value z, for which it returns a gradient to a party that does not, through a layer
of its own: a mean mu and a standard deviation s for each number. In training its model reads t = mu + s e, with e drawn
afresh in every step, and the loss gets weight KL(N(mu, s^2) || N(0, 1)), summed over the numbers of a row and averaged
over rows: `weight` times an upper bound on the mutual information of z and t, in nats. So the returned gradient is that
of a loss which may depend on few nats of z, and the sender's segment learns less of what separates the labels.

The bound is on the information of t about z, for inputs from the training distribution. It reduces what the sender's
segment learns of labels if the loss does not need z, as with columns of the label party's own (a test measures model
completion there); otherwise accuracy falls. The information of one gradient about its row's label is not bounded: it
may be small and noisy, but gradients of a class still share a direction, which `direction` and `direct_label` read, up
to a sign that the layer may reverse. No formal guarantee.

Deviations: the encoder is one linear layer of the value's own size for mu and one for s (see
`splitfed.defenses.variational_encoder`), and t goes straight to the model; the authors' code has a ReLU behind the
encoder, and layers of more width behind t. Theirs draws at inference too; here the model reads the mean then, as no
gradient is sent. `weight` is a number or a schedule over epochs (`splitfed.core.annealing`). If the defense guards
several edges, the penalties are averaged.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from splitfed.core.annealing import Annealing, number_at, number_or_annealing
from splitfed.core.defense import LayerDefense, ReceiverPenaltyDefense, as_strength
from splitfed.core.defense_context import Context
from splitfed.core.errors import InvalidInput
from splitfed.core.random import derive
from splitfed.core.topology import Segment, Topology
from splitfed.core.topology_facts import TopologyFacts
from splitfed.defenses.fitted_layers import layer_of, layers_on, prepend_layers
from splitfed.defenses.label_edges import LabelGuard
from splitfed.defenses.variational_encoder import Variational, divergence


@dataclass(frozen=True)
class MidLabels(LabelGuard, ReceiverPenaltyDefense, LayerDefense):
    """Adds a bottleneck whose divergence has the weight `weight` >= 0, a number or a schedule over epochs."""

    weight: float | Annealing = field(default=1e-3, metadata=as_strength("per nat"))

    def __post_init__(self) -> None:
        """Raise `InvalidInput` for a weight that is negative in any epoch."""
        object.__setattr__(self, "weight", number_or_annealing("mid_labels weight", self.weight, low=0.0))

    def fit(self, topology: Topology, facts: TopologyFacts, seed: int) -> Topology:
        """Return `topology` with a bottleneck before every value that arrives on a guarded edge."""
        edges = [topology.edge(name) for name in self.edges(topology)]
        segments = []
        for segment in topology.segments:
            arriving = {v: edge.name for edge in edges if edge.target == segment.name for v in facts.data(edge.values)}
            for value in arriving:
                _check_only_reader(topology, segment, value)
            segments.append(_prepend_bottlenecks(segment, arriving, facts, seed))
        return replace(topology, segments=tuple(segments))

    def penalty_at_receiver(self, context: Context) -> Tensor:
        """Return `weight` times the divergence of all values that arrived on the edge, a scalar in nats."""
        layers = layers_on(context.module, SampledBottleneck, context.edge)
        return number_at(self.weight, context.epoch) * torch.stack([divergence(*layer.kept) for layer in layers]).sum()


class SampledBottleneck(Variational):
    """Samples around the mean in training, from torch's default generator, which its party seeds in every step."""

    name = "mid_labels"

    def forward(self, z: Tensor) -> Tensor:
        """Return mu + s e in training, mu otherwise: same shape."""
        mean = super().forward(z)
        return mean + self.kept[1] * torch.randn_like(mean) if self.training else mean


def _prepend_bottlenecks(segment: Segment, arriving: dict[str, str], facts: TopologyFacts, seed: int) -> Segment:
    """Return `segment` with a layer before each of its inputs in `arriving`: value -> the edge on which it arrives."""

    def bottleneck(value: str) -> SampledBottleneck:
        if layer_of(segment.module, SampledBottleneck, value) is not None:
            raise InvalidInput(f"mid_labels guards value {value!r} twice; expected once")
        layer = SampledBottleneck(value, facts.shapes[value]).to(facts.dtypes[value])
        layer.edges = (arriving[value],)
        return layer

    return prepend_layers(segment, arriving, derive(seed, "mid_labels", segment.name), bottleneck)


def _check_only_reader(topology: Topology, segment: Segment, value: str) -> None:
    """Raise `InvalidInput` for a value that another segment of its receiver reads without the bottleneck."""
    readers = [s.name for s in topology.segments_of(segment.role) for read in s.inputs if read == value]
    if len(readers) > 1:
        raise InvalidInput(
            f"mid_labels cannot guard {value!r}: role {segment.role!r} reads it in {' and in '.join(readers)}; one of "
            "them would bypass the bottleneck"
        )
