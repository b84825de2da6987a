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

On groups of several parties that own rows the meme stands beside the topology's model as on whole models: every party
has a second copy of its own segments, with new random weights, and each role's copies are averaged with their like.
Both models teach each other at every head, where its scores are computed. What a party outside of the groups holds,
such as one server for all of them, is one model that serves both and moves as the schedule says.

The output of a binary task, the score z of a sigmoid, counts as the two class scores (0, z).

All clients start from the same meme. Their private weights, drawn from other seeds than the meme's, start as the run's
`starts` says; with one topology a client, private models may have any architecture and seed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from splitfed.aggregation.base import AggregationRule
from splitfed.aggregation.update_aggregation import UpdateAggregation, update_aggregation_of
from splitfed.core.errors import InvalidInput, require_number
from splitfed.core.initial_weights import redraw_weights
from splitfed.core.private_values import FEATURES
from splitfed.core.random import derive
from splitfed.core.topology import Head, Topology
from splitfed.core.topology_facts import TopologyFacts
from splitfed.federated.base import Method, MethodContext, MethodTraits, ObjectivePlacement, State
from splitfed.federated.distillation import MutualDistillation, TeachingPair, accuracy, check_class_scores, score_second
from splitfed.federated.learner import Learner
from splitfed.federated.model_copy import (
    Mirror,
    copied_value,
    copy_segments,
    copy_with_modules,
    deliver,
    replace_segments,
)
from splitfed.federated.shared_weights import (
    average_weights,
    broadcast_current,
    check_aggregates,
    check_alike,
    check_unbound,
)
from splitfed.federated.topology_values import averaging_roles, clients_hold_all, held_by, making_segment, only_head
from splitfed.federated.uploads import open_round


@dataclass(frozen=True, kw_only=True)
class FML(Method):
    """Federated mutual learning: a private model and a shared meme teach each other at every client.

    `alpha` and `beta`, in (0, 1]: the weight of its own loss for the private model and for the meme.

    `meme`: the shared model, on whole models; `private`: the private one, between split nodes. Both take the inputs of
    the topology in order and return class scores: (batch, classes). `aggregation`: how memes are aggregated on whole
    models and groups, as in `Averaging`.
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
        beside, meme = _meme_is_beside(topology), _held(topology, _memes(topology))
        return replace(
            super().traits(topology),
            turned_off=off if self.alpha == 1 and self.beta == 1 else None,
            role_federations=averaging_roles(topology, meme) if beside else (),
            aggregation=update_aggregation_of(self.aggregation) if beside else None,
            message_values={"weights": FEATURES},
            returns_weights=beside and update_aggregation_of(self.aggregation).sum is None,
            soft_labels=dict.fromkeys(_memes(topology), 1 - self.beta) if beside else {},
            private_segments=_held(topology, _privates(topology)),
            broadcast_segments=meme if beside else (),
        )

    def check(self, topology: Topology, clients: int) -> None:
        """Raise `InvalidInput` for a task without class scores, a single client, and a module that is not used."""
        if clients < 2:
            raise InvalidInput("fml exchanges a meme between clients and needs two or more; here is one")
        if topology.forward_only:
            raise InvalidInput("fml needs gradients through the whole meme; here a cut returns no gradient")
        beside = _meme_is_beside(topology)
        for head in topology.heads if beside else (only_head("fml", topology, classes=False),):
            check_class_scores("fml", head)
        check_aggregates("fml", update_aggregation_of(self.aggregation), beside)
        wrong, where = ("private", "whole models") if beside else ("meme", "split models")
        if getattr(self, wrong) is not None:
            raise InvalidInput(f"fml takes no {wrong}= on {where}: the topology's own model is that one")
        if self.meme is not None and len(topology.data_roles) > 1:
            raise InvalidInput("fml takes no meme= on groups: every party has a second copy of its own segments")

    def check_run(self, context: MethodContext) -> None:
        """Raise `InvalidInput` for memes that cannot be averaged, or that the schedule would average as well."""
        if _meme_is_beside(context.topologies[0]):
            check_unbound("fml", "the memes", context.bound)
            check_alike("fml", "meme", context.topologies, [_held(t, _memes(t)) for t in context.topologies])

    def fit(self, topology: Topology, facts: TopologyFacts, seed: int) -> Topology:
        """Return the topology with the second model, and edges for the class scores to be compared."""
        beside, second = _meme_is_beside(topology), self._second(topology, derive(seed, "fml"))
        own, other = (self.alpha, self.beta) if beside else (self.beta, self.alpha)
        roles = {value: s.role for s in second.segments for value in s.outputs}
        heads = (
            *(replace(head, weight=head.weight * own) for head in topology.heads),
            *(_second_head(head, second.names[head.value], roles, other) for head in topology.heads),
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
        if _meme_is_beside(learners[0].topology):
            state["meme"] = broadcast_current(learners, _shared_at(learners[0]), number, state["meme"])
            open_round(update_aggregation_of(self.aggregation), learners, number, state)

    def aggregate(self, learners: Sequence[Learner], shares: Mapping[int, float], number: int, state: State) -> None:
        """Average the memes, unless the schedule does."""
        if _meme_is_beside(learners[0].topology):
            settings, meme = update_aggregation_of(self.aggregation), _shared_at(learners[0])
            state["meme"] = average_weights(settings, learners, shares, meme, state["meme"], number, state)

    def scores(self, learner: Learner, part: str, state: State) -> Mapping[str, float]:
        """Return the accuracy of the averaged meme on whole models, of the private model on split ones."""
        topology = learner.topology
        if not _meme_is_beside(topology):
            (private,) = _privates(topology)
            return {"private": accuracy(learner, private, part)}
        # A party of a group cannot compute the scores of the meme by itself.
        return score_second(learner, "meme", 1, part, state) if clients_hold_all(topology) else {}

    def _second(self, topology: Topology, seed: int) -> Mirror:
        if len(topology.data_roles) > 1:
            drawn = {s.name: s.module for s in topology.segments if s.role in topology.data_roles}
            modules = {s.name: s.module for s in topology.segments} | redraw_weights("fml", drawn, seed)
            return copy_with_modules(topology, list(modules), "meme", None, modules)
        (role,), part = topology.data_roles, [s.name for s in topology.segments]
        name = "meme" if clients_hold_all(topology) else "private"
        if (module := getattr(self, name)) is None:
            return copy_segments("fml", topology, part, name, role, seed)
        return replace_segments("fml", topology, part, name, role, module, only_head("fml", topology, False).value)

    def _pairs(self, topology: Topology) -> Iterator[tuple[str, str, float]]:
        """Yield (student, teacher, weight of the student's own loss) for both directions, as names of outputs."""
        for private, meme in zip(_privates(topology), _memes(topology), strict=True):
            yield private, meme, self.alpha
            yield meme, private, self.beta


def _meme_is_beside(topology: Topology) -> bool:
    """Return whether the meme stands beside the topology's own model: for whole models, and for groups of parties."""
    return clients_hold_all(topology) or len(topology.data_roles) > 1


def _second_head(head: Head, value: str, roles: Mapping[str, str], weight: float) -> Head:
    """Return the head of the second model for `head`, on `value`, whose maker's role is in `roles`."""
    via = head.via if roles[value] == head.role else ()
    return replace(head, value=value, role=roles[value], weight=head.weight * weight, via=via)


def _privates(topology: Topology) -> tuple[str, ...]:
    """Return the outputs of the private model, of the topology that `fit` returned."""
    count = len(topology.heads) // 2
    return tuple(h.value for h in (topology.heads[:count] if _meme_is_beside(topology) else topology.heads[count:]))


def _memes(topology: Topology) -> tuple[str, ...]:
    """Return the outputs of the meme, in the order of `_privates`."""
    count = len(topology.heads) // 2
    return tuple(h.value for h in (topology.heads[count:] if _meme_is_beside(topology) else topology.heads[:count]))


def _held(topology: Topology, values: Sequence[str]) -> tuple[str, ...]:
    """Return the segments behind `values` that the client, or the parties of a group, hold."""
    return tuple(n for n in topology.makers(values) if topology.segment(n).role in topology.data_roles)


def _shared_at(learner: Learner) -> tuple[str, ...]:
    """Return the segments of the meme that the parties of `learner` hold."""
    topology = learner.topology
    return held_by(learner, _held(topology, _memes(topology)))
