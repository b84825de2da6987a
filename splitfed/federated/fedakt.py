"""FedAKT: a small adapter, averaged over the clients, and each client's own extractor learn from each other.

Paper: Liu, Jin, Tang, Zhai, Lu, Yu, Bai, "Adapter-guided knowledge transfer for heterogeneous federated learning",
Journal of Systems Architecture 159, 2025.

The extractor maps rows x to features h, the adapter to features h' of the same shape; one head scores both. The head
minimises the loss of h plus that of h', the extractor the loss of h plus `weight` times the mean squared difference of
h and h', the adapter the loss of h' plus the same. Only adapters are averaged, weighted by examples; extractor and head
make the predictions. The paper sets the weight (lambda) to 3 on CIFAR and to .5 on Tiny-ImageNet. Its ablations:
`dual_use=False`, the head serves the extractor alone, so that the adapter learns from the difference alone (as we read
it: the paper's code is not public); `weight=0`, no mutual distillation; `use_adapter=False`, no exchange.

Whole models (topology `local`, cut where the features are; schedule "independent"): the topology's model is extractor
and head; the adapter has the extractor's architecture with new random weights, or is a module, which clients of
different architectures need. Between split nodes the topology's client segment, cut and averaged by the schedule, is
the adapter and what follows is the head; the extractor is added at the client (the architecture of that segment with
new random weights, or a module, the same for all clients). So its features cross as well, and so do their gradients;
labels cross once for each of the two outputs. Segments of the head that a client holds (U-shaped) stay at the client.
All clients start from one adapter; private segments start as the run's `starts` says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from splitfed.aggregation.base import AggregationRule
from splitfed.aggregation.update_aggregation import UpdateAggregation, update_aggregation_of
from splitfed.core.errors import InvalidInput, require_number
from splitfed.core.messages import Stamp
from splitfed.core.private_values import FEATURES
from splitfed.core.random import derive
from splitfed.core.topology import Topology
from splitfed.core.topology_facts import TopologyFacts
from splitfed.federated.base import Method, MethodContext, MethodTraits, ObjectivePlacement, State
from splitfed.federated.distillation import score_second
from splitfed.federated.learner import Learner
from splitfed.federated.model_copy import Mirror, copy_segments, copy_with_modules, replace_segments
from splitfed.federated.objectives import NoObjective
from splitfed.federated.shared_weights import (
    average_weights,
    broadcast_current,
    check_aggregates,
    check_alike,
    check_unbound,
)
from splitfed.federated.topology_values import (
    clients_hold_all,
    embedding,
    made_of_own_data,
    makers,
    making_segment,
    only_client,
    only_head,
)
from splitfed.federated.uploads import open_round


@dataclass(frozen=True, kw_only=True)
class FedAKT(Method):
    """A small averaged adapter and each client's own extractor learn from each other.

    `weight` (lambda) >= 0 of the mutual distillation; `embedding`: the value that holds the features (default: see
    `topology_values`). `adapter`: the adapter's module, on whole models; `extractor`: the extractor's, between split
    nodes. Both take the inputs of the topology in order and return features. `aggregation`: of adapters on whole
    models, as in `Averaging`.
    """

    weight: float = field(default=3.0, metadata=require_number("fedakt weight", low=0.0))
    dual_use: bool = True
    use_adapter: bool = True
    embedding: str | None = None
    adapter: nn.Module | None = None
    extractor: nn.Module | None = None
    aggregation: str | Mapping[str, Any] | AggregationRule | UpdateAggregation | None = None

    def __post_init__(self) -> None:
        """Raise `InvalidInput` for a negative weight, and for settings under which no loss trains the adapter."""
        super().__post_init__()
        object.__setattr__(self, "aggregation", update_aggregation_of(self.aggregation))
        if self.use_adapter and not self.dual_use and self.weight == 0:
            raise InvalidInput(
                "fedakt with dual_use=False and weight=0 does not train the adapter: set dual_use=True or weight > 0"
            )

    def traits(self, topology: Topology) -> MethodTraits:
        """Return the traits: only the adapter leaves the client, sent by the method unless the schedule moves it."""
        adapter = self._adapter(topology) if self.use_adapter else ()
        sends = self.use_adapter and clients_hold_all(topology)
        own = [s.name for s in topology.segments if s.role in topology.data_roles]
        return replace(
            super().traits(topology),
            turned_off=None if self.use_adapter else "fedakt without an adapter exchanges nothing between clients",
            aggregation=update_aggregation_of(self.aggregation) if sends else None,
            message_values={"weights": FEATURES},
            returns_weights=sends and update_aggregation_of(self.aggregation).sum is None,
            private_segments=tuple(name for name in own if name not in adapter),
            broadcast_segments=adapter if sends else (),
            hidden_gradients=(self._features(topology)[1],) if sends else (),
        )

    def check(self, topology: Topology, clients: int) -> None:
        """Raise `InvalidInput` for a topology without features inside a client's model, and for an unused module."""
        only_client("fedakt", topology)
        if topology.forward_only:
            raise InvalidInput("fedakt needs gradients through the whole model; here a cut returns no gradient")
        only_head("fedakt", topology, classes=False)
        embedding("fedakt", topology, self.embedding)
        sends = self.use_adapter and clients_hold_all(topology)
        check_aggregates("fedakt", update_aggregation_of(self.aggregation), sends)
        wrong, where = ("extractor", "whole") if clients_hold_all(topology) else ("adapter", "split")
        if getattr(self, wrong) is not None:
            raise InvalidInput(f"fedakt takes no {wrong}= on {where} models: it is the topology's own segment")

    def check_run(self, context: MethodContext) -> None:
        """Raise `InvalidInput` for unequal feature shapes, or adapters that cannot be averaged or already are."""
        if not self.use_adapter:
            return
        for client, (topology, known) in enumerate(zip(context.topologies, context.facts, strict=True)):
            mine, others = (known.shapes[v] for v in self._features(topology))
            if mine != others:
                raise InvalidInput(f"fedakt: client {client} has features of shape {mine}, its second model {others}")
        if clients_hold_all(context.topologies[0]):
            check_unbound("fedakt", "the adapters", context.bound)
            check_alike("fedakt", "adapter", context.topologies, [self._adapter(t) for t in context.topologies])

    def fit(self, topology: Topology, facts: TopologyFacts, seed: int) -> Topology:
        """Return the topology with the second extractor at the client, and the head applied to both features."""
        if not self.use_adapter:
            return topology
        value, head = embedding("fedakt", topology, self.embedding), topology.heads[0]
        front = makers(topology, value)
        back = [s for s in topology.segments if s.name not in front]
        second = self._second(topology, front, value, derive(seed, "fedakt"))
        if self.dual_use:
            modules = {s.name: s.module for s in back}
            again = copy_with_modules(topology, list(modules), "again", None, modules, second.names)
            other = replace(head, value=again.names[head.value])
            new = (*second.segments, *again.segments)
            heads, training = ((head, other), new) if clients_hold_all(topology) else ((other, head), topology.segments)
            names = frozenset(s.name for s in training)
            return replace(topology, segments=(*topology.segments, *new), heads=heads, training_only=names)
        if clients_hold_all(topology):
            names = frozenset(s.name for s in second.segments)
            return replace(topology, segments=(*topology.segments, *second.segments), training_only=names)
        moved = [replace(s, inputs=tuple(second.names.get(v, v) for v in s.inputs)) for s in back]
        first = [topology.segment(name) for name in front]
        return replace(topology, segments=(*first, *second.segments, *moved), training_only=frozenset(front))

    def objective(self, placement: ObjectivePlacement) -> FeatureMatching | None:
        """Return the mean squared difference of the two features as a client's objective; None where none is needed."""
        if not self.use_adapter or self.weight == 0 or placement.replica is None:
            return None
        one, other = self._features(placement.topology)
        return FeatureMatching({v: making_segment(placement.topology, v).name for v in (one, other)}, self.weight)

    def start(self, clients: int) -> State:
        """Return the state before any client has sent an adapter."""
        return {"adapter": {}}

    def query(self, learners: Sequence[Learner], number: int, state: State) -> None:
        """Send the averaged adapter to every client, unless the schedule sends it."""
        if sent := self.traits(learners[0].topology).broadcast_segments:
            state["adapter"] = broadcast_current(learners, sent, number, state["adapter"])
            open_round(update_aggregation_of(self.aggregation), learners, number, state)

    def aggregate(self, learners: Sequence[Learner], shares: Mapping[int, float], number: int, state: State) -> None:
        """Average the clients' adapters, unless the schedule averages them."""
        if sent := self.traits(learners[0].topology).broadcast_segments:
            settings = update_aggregation_of(self.aggregation)
            state["adapter"] = average_weights(settings, learners, shares, sent, state["adapter"], number, state)

    def scores(self, learner: Learner, part: str, state: State) -> Mapping[str, float]:
        """Return the accuracy of the averaged adapter with the client's own head; empty unless a client holds both."""
        topology = learner.topology
        task = topology.heads[0].task
        if len(topology.heads) < 2 or task is None or task.name != "classification":
            return {}
        return score_second(learner, "adapter", 1, part, state)

    def _second(self, topology: Topology, front: Sequence[str], value: str, seed: int) -> Mirror:
        prefix, role = _prefix(topology), only_client("fedakt", topology)
        module = self.adapter if clients_hold_all(topology) else self.extractor
        if module is None:
            return copy_segments("fedakt", topology, front, prefix, role, seed)
        return replace_segments("fedakt", topology, front, prefix, role, module, value)

    def _features(self, topology: Topology) -> tuple[str, str]:
        """Return the names of the two features: the topology's own extractor's, after `fit`, and the second one's."""
        values = [v for s in topology.segments for v in s.outputs]
        twice = [v for v in values if f"{_prefix(topology)}_{v}" in values and made_of_own_data(topology, v)]
        value = self.embedding or twice[-1]
        return value, f"{_prefix(topology)}_{value}"

    def _adapter(self, topology: Topology) -> tuple[str, ...]:
        own, second = self._features(topology)
        return makers(topology, second if clients_hold_all(topology) else own)


@dataclass(frozen=True)
class FeatureMatching(NoObjective):
    """Adds `weight` times the mean squared difference of two features to the loss of both.

    `features`: name of each feature -> the segment that computes it.
    """

    features: Mapping[str, str]
    weight: float

    def terms(self, made: Mapping[str, Tensor], labels: Mapping[str, Tensor], stamp: Stamp) -> Mapping[str, Tensor]:
        """Return the weighted difference for each segment, with the other's features detached."""
        (one, first), (other, second) = self.features.items()
        return {
            first: self.weight * functional.mse_loss(made[one], made[other].detach()),
            second: self.weight * functional.mse_loss(made[other], made[one].detach()),
        }


def _prefix(topology: Topology) -> str:
    return "adapter" if clients_hold_all(topology) else "extractor"
