"""FML: each client's private model and a shared one, the meme, teach each other on the client's rows.

Paper: Shen, Zhang, Jia, Zhang, Huang, Zhou, Kuang, Wu, Wu, "Federated mutual learning", 2020.

The private model minimises `alpha` times its own loss plus (1 - alpha) KL(meme || private), the meme `beta` times its
own plus (1 - beta) KL(private || meme); teachers are detached, the divergence is summed over classes and averaged over
the batch. The meme alone is averaged, weighted by examples.

Whole models (topology `local`, schedule "independent"): the topology's model is the private one; the meme is added to
it, with the same architecture and new random weights, or as a given module. The method sends the meme down before a
round and averages it after. Between split nodes the topology's model, client and server segments, is the meme, and the
private model is added at the client, which it never leaves (the architecture of the whole model with new random
weights, or a module). Then the schedule shares the meme: "splitfed_v1" and "splitfed_v2" average it as the paper does,
"splitfed_v3" averages the server's part, the others hand it on or train a single one. Where a student's party does not
compute the teacher's logits, they are sent to it in training as messages of their own, on an edge that returns no
gradient: in a vanilla topology the private logits go up and the meme's come down. In a U-shaped one all logits are at
the client. The run predicts with and scores the topology's own model: the private one on whole models (score "meme":
the averaged one), the meme on split ones (score "private").

All clients start from the same meme. Their private weights, drawn from other seeds than the meme's, start as the run's
`starts` says; with one topology a client, private models may have any architecture and seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from splitfed.aggregation.base import AggregationRule
from splitfed.aggregation.update_aggregation import UpdateAggregation, update_aggregation_of
from splitfed.core.errors import InvalidInput, require_number
from splitfed.core.private_values import FEATURES
from splitfed.core.random import derive
from splitfed.core.topology import Topology
from splitfed.core.topology_facts import TopologyFacts
from splitfed.federated.base import Method, MethodContext, MethodTraits, ObjectivePlacement, State
from splitfed.federated.distillation import MutualDistillation, TeachingPair, accuracy, score_second
from splitfed.federated.learner import Learner
from splitfed.federated.model_copy import Mirror, copied_value, copy_segments, deliver, replace_segments
from splitfed.federated.shared_weights import (
    average_weights,
    broadcast_current,
    check_aggregates,
    check_alike,
    check_unbound,
)
from splitfed.federated.topology_values import clients_hold_all, makers, making_segment, only_client, only_head
from splitfed.federated.uploads import open_round


@dataclass(frozen=True, kw_only=True)
class FML(Method):
    """Federated mutual learning: a private model and a shared meme teach each other at every client.

    `alpha` and `beta`, in (0, 1]: the weight of its own loss for the private model and for the meme.

    `meme`: the shared model, on whole models; `private`: the private one, between split nodes. Both take the inputs of
    the topology in order and return class scores: (batch, classes). `aggregation`: how memes are aggregated on whole
    models, as in `Averaging`.
    """

    alpha: float = field(default=0.5, metadata=require_number("fml alpha", low=0.0, high=1.0, open_low=True))
    beta: float = field(default=0.5, metadata=require_number("fml beta", low=0.0, high=1.0, open_low=True))
    meme: nn.Module | None = None
    private: nn.Module | None = None
    aggregation: str | Mapping[str, Any] | AggregationRule | UpdateAggregation | None = None

    def __post_init__(self) -> None:
        """Raise `InvalidInput` for parameters out of range and unknown aggregation settings."""
        super().__post_init__()
        object.__setattr__(self, "aggregation", update_aggregation_of(self.aggregation))

    def traits(self, topology: Topology) -> MethodTraits:
        """Return the traits: the private model is never sent, the meme is, unless the schedule moves it."""
        off = "fml with alpha=1 and beta=1 lets no model learn from another; memes are only averaged"
        whole, meme = clients_hold_all(topology), makers(topology, _meme(topology))
        return replace(
            super().traits(topology),
            turned_off=off if self.alpha == 1 and self.beta == 1 else None,
            aggregation=update_aggregation_of(self.aggregation) if whole else None,
            message_values={"weights": FEATURES},
            returns_weights=whole and update_aggregation_of(self.aggregation).sum is None,
            soft_labels={_meme(topology): 1 - self.beta} if whole else {},
            private_segments=makers(topology, _private(topology)),
            broadcast_segments=meme if whole else (),
        )

    def check(self, topology: Topology, clients: int) -> None:
        """Raise `InvalidInput` for a task without class scores, a single client, and a module that is not used."""
        only_client("fml", topology)
        if clients < 2:
            raise InvalidInput("fml exchanges a meme between clients and needs two or more; here is one")
        if topology.forward_only:
            raise InvalidInput("fml needs gradients through the whole meme; here a cut returns no gradient")
        only_head("fml", topology)
        check_aggregates("fml", update_aggregation_of(self.aggregation), clients_hold_all(topology))
        wrong, where = ("private", "whole") if clients_hold_all(topology) else ("meme", "split")
        if getattr(self, wrong) is not None:
            raise InvalidInput(f"fml takes no {wrong}= on {where} models: the topology's own model is that one")

    def check_run(self, context: MethodContext) -> None:
        """Raise `InvalidInput` for memes that cannot be averaged, or that the schedule would average as well."""
        if clients_hold_all(context.topologies[0]):
            check_unbound("fml", "the memes", context.bound)
            check_alike("fml", "meme", context.topologies, [makers(t, _meme(t)) for t in context.topologies])

    def fit(self, topology: Topology, facts: TopologyFacts, seed: int) -> Topology:
        """Return the topology with the second model at the client, and edges for the logits to be compared."""
        head, role = topology.heads[0], only_client("fml", topology)
        own, other = (self.alpha, self.beta) if clients_hold_all(topology) else (self.beta, self.alpha)
        second = self._second(topology, role, derive(seed, "fml"))
        heads = (
            replace(head, weight=head.weight * own),
            replace(head, value=second.names[head.value], role=role, weight=head.weight * other, via=()),
        )
        with_meme = replace(
            topology,
            segments=(*topology.segments, *second.segments),
            heads=heads,
            training_only=topology.training_only | {s.name for s in second.segments},
        )
        taught = [(teacher, student) for student, teacher, weight in self._pairs(with_meme) if weight < 1]
        return deliver(with_meme, {value: making_segment(with_meme, other).role for value, other in taught})

    def objective(self, placement: ObjectivePlacement) -> MutualDistillation | None:
        """Return the mutual distillation losses of the models at a party; None at a party that has none."""
        found = []
        for student, teacher, weight in self._pairs(placement.topology):
            segment = making_segment(placement.topology, student)
            if segment.role == placement.role and weight < 1:
                there = making_segment(placement.topology, teacher).role == placement.role
                found.append(
                    TeachingPair(segment.name, student, teacher if there else copied_value(teacher), 1 - weight)
                )
        return MutualDistillation(tuple(found)) if found else None

    def start(self, clients: int) -> State:
        """Return the state before any client has sent a meme."""
        return {"meme": {}}

    def query(self, learners: Sequence[Learner], number: int, state: State) -> None:
        """Send the meme to every client, unless the schedule does."""
        topology = learners[0].topology
        if clients_hold_all(topology):
            state["meme"] = broadcast_current(learners, makers(topology, _meme(topology)), number, state["meme"])
            open_round(update_aggregation_of(self.aggregation), learners, number, state)

    def aggregate(self, learners: Sequence[Learner], shares: Mapping[int, float], number: int, state: State) -> None:
        """Average the memes, unless the schedule does."""
        topology = learners[0].topology
        if clients_hold_all(topology):
            settings, meme = update_aggregation_of(self.aggregation), makers(topology, _meme(topology))
            state["meme"] = average_weights(settings, learners, shares, meme, state["meme"], number, state)

    def scores(self, learner: Learner, part: str, state: State) -> Mapping[str, float]:
        """Return the accuracy of the averaged meme on whole models, of the private model on split ones."""
        topology = learner.topology
        if not clients_hold_all(topology):
            return {"private": accuracy(learner, _private(topology), part)}
        return score_second(learner, "meme", 1, part, state)

    def _second(self, topology: Topology, role: str, seed: int) -> Mirror:
        name = "meme" if clients_hold_all(topology) else "private"
        module, part = getattr(self, name), [s.name for s in topology.segments]
        if module is None:
            return copy_segments("fml", topology, part, name, role, seed)
        return replace_segments("fml", topology, part, name, role, module, topology.heads[0].value)

    def _pairs(self, topology: Topology) -> tuple[tuple[str, str, float], ...]:
        """Return (student, teacher, weight of the student's own loss) for both directions, as names of outputs."""
        private, meme = _private(topology), _meme(topology)
        return (private, meme, self.alpha), (meme, private, self.beta)


def _private(topology: Topology) -> str:
    return topology.heads[0 if clients_hold_all(topology) else 1].value


def _meme(topology: Topology) -> str:
    return topology.heads[1 if clients_hold_all(topology) else 0].value
