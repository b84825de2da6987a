"""FedKD: a large private mentor and a small shared mentee teach each other; the mentee's updates are sent compressed.

Paper: Wu, Wu, Lyu, Huang, Xie, "Communication-efficient federated learning via knowledge distillation", Nature
Communications 13, 2022.

With CE and CE_g the cross-entropies of mentor and mentee on a batch, the mentor steps on
CE + (KL(mentee || mentor) + MSE(h, W h_g)) / (CE + CE_g), the mentee on
CE_g + (KL(mentor || mentee) + MSE(W h_g, h)) / (CE + CE_g); h and h_g are their hidden values, W a matrix that is the
client's own and learns with the mentee. Teachers are detached, and so is the sum below the line, which the authors'
code leaves in the slope: there it pushes both cross-entropies up. Attention is not compared.

After a round each client sends the change of its mentee, matrices as the singular values that carry `energy` of their
squares, with their vectors; the server averages by examples, compresses the mean in the same way, and sends it to the
clients of the next round, which add it to the mentee they had; who was not there for the last one gets the mentee whole
(at first everybody). The share of energy after round t of T is energy + (last_energy - energy) t / T: it rises with the
run, and reaches `last_energy` in its last round (or in round `over`). How many numbers that is depends on the weights:
a plan counts every matrix whole, an upper bound. With `rank` the number of singular values is fixed, and so is the
plan.

Whole models: the topology's is the mentor, which the run scores (score "mentee": the shared one); the mentee is its
layout drawn anew, or a topology of whole models, cut where its hidden values are. On a split replica the topology's
model is the mentee, which the run scores, and the mentor stands whole at the client (score "mentor"), its layout drawn
anew or a topology of whole models. Of the mentee the method averages what the client holds; other parties' part of it
goes as the schedule says. Scores cross in training to the party that lacks them, as under `fml`. All clients start from
one mentee; mentors and the matrices between start as the run's `starts` says.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import torch
from torch import Tensor, nn
from torch.nn import functional

from splitfed.aggregation.running_mean import RunningMean
from splitfed.core.errors import InvalidInput, require_count, require_number
from splitfed.core.example_pass import pass_example
from splitfed.core.grouping import total_pairs
from splitfed.core.messages import Stamp
from splitfed.core.private_values import BOTH
from splitfed.core.random import derive, stream
from splitfed.core.topology import Segment, Topology
from splitfed.core.topology_facts import TopologyFacts
from splitfed.federated.averaging import check_whole
from splitfed.federated.base import Method, MethodContext, MethodTraits, ObjectivePlacement, State
from splitfed.federated.distillation import accuracy, divergence, score_second
from splitfed.federated.learner import Learner
from splitfed.federated.low_rank import add_update, compress_update, decompress_update
from splitfed.federated.model_copy import Mirror, copied_value, copy_segments, copy_with_modules, deliver
from splitfed.federated.objectives import NoObjective, objective_of
from splitfed.federated.shared_weights import check_alike, check_unbound, initial_weights
from splitfed.federated.topology_values import (
    clients_hold_all,
    embedding,
    makers,
    making_segment,
    only_client,
    only_head,
)

PROJECTION = "projection"


@dataclass(frozen=True, kw_only=True)
class FedKD(Method):
    """A small mentee is averaged in compressed updates; a mentor that never leaves the client teaches it.

    `energy` to `last_energy`, in (0, 1], over `over` rounds (None: those of the run), or a fixed `rank` >= 1.

    `embedding`: the hidden value of the topology's model (default: the last that a client makes of its own data alone).

    `mentee`, beside whole models, and `mentor`, beside split ones: what `splitfed.topologies.local` returns.
    """

    energy: float = field(default=0.95, metadata=require_number("fedkd energy", low=0.0, high=1.0, open_low=True))
    last_energy: float = field(
        default=0.98, metadata=require_number("fedkd last_energy", low=0.0, high=1.0, open_low=True)
    )
    over: int | None = field(default=None, metadata=require_count("fedkd over", low=1))
    rank: int | None = field(default=None, metadata=require_count("fedkd rank", low=1))
    embedding: str | None = None
    mentee: Topology | None = None
    mentor: Topology | None = None

    def __post_init__(self) -> None:
        """Raise `InvalidInput` for parameters out of range."""
        super().__post_init__()
        for name, given in (("mentee", self.mentee), ("mentor", self.mentor)):
            if given is not None and not isinstance(given, Topology):
                raise InvalidInput(
                    f"fedkd {name}={type(given).__name__} is not allowed; expected what topologies.local returns"
                )

    def for_rounds(self, rounds: int) -> FedKD:
        """Return the method with `over` set to the rounds of the run, unless it was given."""
        return self if self.over is not None else replace(self, over=rounds)

    def traits(self, topology: Topology) -> MethodTraits:
        """Return the traits: mentor and W are private, and the size of a compressed update depends on its values."""
        shared, fixed = _mentee(topology), self.rank is not None
        return replace(
            super().traits(topology),
            at_most=None if fixed else "fedkd: as if every matrix of an update were sent whole",
            varying_shapes=frozenset() if fixed else frozenset({"update"}),
            # The objective computes both cross-entropies a second time.
            reads_labels=True,
            message_values={"update": BOTH},
            private_segments=tuple(
                s.name for s in topology.segments if s.role in topology.data_roles and s.name not in shared
            ),
            broadcast_segments=shared,
        )

    def check(self, topology: Topology, clients: int) -> None:
        """Refuse a task without classes, and a second model that cannot stand beside the topology's."""
        only_client("fedkd", topology)
        only_head("fedkd", topology)
        if topology.forward_only:
            raise InvalidInput("fedkd needs a way back through the whole of the mentee; here a cut returns no gradient")
        embedding("fedkd", topology, self.embedding)
        wrong, where = ("mentor", "whole") if clients_hold_all(topology) else ("mentee", "split")
        if getattr(self, wrong) is not None:
            raise InvalidInput(f"fedkd takes no {wrong}= on {where} models: the topology's own model is that one")
        if (second := self._given(topology)) is not None:
            name = _second_name(topology)
            check_whole(f"fedkd {name}", second)
            embedding(f"fedkd {name}", second, None)
            if len(second.inputs) != len(topology.inputs) or len(second.heads) != 1:
                raise InvalidInput(f"fedkd's {name} needs the inputs of the topology's model, and one output")

    def check_run(self, context: MethodContext) -> None:
        """Raise `InvalidInput` for mentees that cannot be averaged, and for a schedule that also moves them."""
        check_unbound("fedkd", "the mentees", context.bound)
        check_alike("fedkd", "mentee", context.topologies, [_mentee(t) for t in context.topologies])

    def fit(self, topology: Topology, facts: TopologyFacts, seed: int) -> Topology:
        """Return the topology with the second model beside it, and the matrix between their hidden values."""
        head, role = topology.heads[0], only_client("fedkd", topology)
        own = embedding("fedkd", topology, self.embedding)
        second, second_hidden, out = self._second(topology, role, own, derive(seed, _second_name(topology)))
        segments = (*topology.segments, *second.segments)
        heads = (head, replace(head, value=out, role=role, via=()))
        training = frozenset({PROJECTION, *(s.name for s in second.segments)})
        twinned = replace(topology, segments=segments, heads=heads)
        # Shapes alone: the second model may be of any make.
        probed = pass_example(
            twinned, {v: torch.zeros(2, *facts.shapes[v], dtype=facts.dtypes[v]) for v in topology.inputs}
        )
        narrow, wide = (second_hidden, own) if clients_hold_all(topology) else (own, second_hidden)
        with stream(derive(seed, PROJECTION)):
            matrix = Projection(prod(probed.shapes[narrow]), prod(probed.shapes[wide]))
        bridge = Segment(PROJECTION, role, matrix, (narrow,), (PROJECTION,))
        both = replace(twinned, segments=(*segments, bridge), training_only=topology.training_only | training)
        # Each model's scores go to the party that makes the other's.
        return deliver(both, {head.value: role, out: head.role})

    def objective(self, placement: ObjectivePlacement) -> MentorObjective | None:
        """Return the mutual distillation losses of mentor and mentee at a party that makes scores of one of them."""
        topology = placement.topology
        mentor, mentee = _mentor_output(topology), _mentee_output(topology)
        made = {s.name for s in topology.segments_of(placement.role)}
        segments = {
            value: name
            for value in (mentor, mentee, self._mentor_hidden(topology), PROJECTION)
            if (name := making_segment(topology, value).name) in made
        }
        if mentor not in segments and mentee not in segments:
            return None
        return MentorObjective((mentor, mentee), self._mentor_hidden(topology), segments)

    def start(self, clients: int) -> State:
        """Return the state without a mentee; `seen`: client -> version of the mentee that it holds."""
        return {"mentee": {}, "update": {}, "version": 0, "seen": {}}

    def query(self, learners: Sequence[Learner], number: int, state: State) -> None:
        """Send every client the newest mentee: the last update if it has the mentee before that, else all weights."""
        state["mentee"] = state["mentee"] or initial_weights(learners[0].topology, _mentee(learners[0].topology))
        for learner in learners:
            objective, seen = objective_of(learner, MentorObjective), state["seen"].get(str(learner.replica))
            if seen is None or seen < state["version"] - 1:
                base = dict(learner.receive("weights", state["mentee"], number))
            elif seen == state["version"] - 1:
                sent = learner.receive("update", state["update"], number)
                base = {} if objective is None else add_update(objective.base, decompress_update(sent, objective.base))
            else:
                base = {} if objective is None else objective.base
            state["seen"][str(learner.replica)] = state["version"]
            if objective is not None:
                objective.base = base
                learner.adopt(base)

    def aggregate(self, learners: Sequence[Learner], shares: Mapping[int, float], number: int, state: State) -> None:
        """Average the changes of the mentees, and add the mean, compressed as it is sent, to the server's mentee."""
        energy, mean = self.energy_of(number), RunningMean()
        for learner in learners:
            now, objective = learner.contents(_mentee(learner.topology)), objective_of(learner, MentorObjective)
            change = now if objective is None else {n: t - objective.base[n].to(t.device) for n, t in now.items()}
            sent = learner.send("update", compress_update(change, energy, self.rank), number)
            mean.add(decompress_update(sent, state["mentee"]), shares[learner.replica])
        state["update"] = compress_update(mean.value(), energy, self.rank)
        state["mentee"] = add_update(state["mentee"], decompress_update(state["update"], state["mentee"]))
        state["version"] += 1

    def energy_of(self, number: int) -> float:
        """Return the fraction of energy kept at the end of round `number`, counted from 0.

        The smallest of all rounds if the number of rounds is unknown, as in a plan, which compresses no values.
        """
        share = 0.0 if self.over is None else min(1.0, (number + 1) / self.over)
        return self.energy + share * (self.last_energy - self.energy)

    def scores(self, learner: Learner, part: str, state: State) -> Mapping[str, float]:
        """Return the accuracy of the server's mentee on whole models, of the mentor on split ones."""
        if not clients_hold_all(learner.topology):
            return {"mentor": accuracy(learner, _mentor_output(learner.topology), part)}
        return score_second(learner, "mentee", 1, part, state)

    def _given(self, topology: Topology) -> Topology | None:
        """Return the second model that was given, or None: the layout of the first is drawn anew."""
        return self.mentee if clients_hold_all(topology) else self.mentor

    def _second(self, topology: Topology, role: str, own: str, seed: int) -> tuple[Mirror, str, str]:
        """Return the second model, its hidden value and its output."""
        given, name = self._given(topology), _second_name(topology)
        if given is None:
            made = copy_segments("fedkd", topology, [s.name for s in topology.segments], name, role, seed)
            return made, made.names[own], made.names[topology.heads[0].value]
        modules = copy.deepcopy({s.name: s.module for s in given.segments})
        inputs = dict(zip(given.inputs, topology.inputs, strict=True))
        made = copy_with_modules(given, list(modules), name, role, modules, inputs)
        return made, made.names[embedding("fedkd", given, None)], made.names[given.heads[0].value]

    def _mentor_hidden(self, topology: Topology) -> str:
        """Return the hidden value of the mentor in a topology with both models."""
        if clients_hold_all(topology):
            return embedding("fedkd", _mentor(topology), self.embedding)
        given, (own,) = self._given(topology), topology.segment(PROJECTION).inputs
        return f"{_second_name(topology)}_{own if given is None else embedding('fedkd', given, None)}"


class Projection(nn.Module):
    """Matrix W: maps a flattened hidden value to the width of the mentor's, without bias."""

    def __init__(self, narrow: int, wide: int) -> None:
        super().__init__()
        self.linear = nn.Linear(narrow, wide, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the projected hidden value, (rows, wide)."""
        found: Tensor = self.linear(hidden.flatten(1))
        return found


class MentorObjective(NoObjective):
    """Adds what mentor and mentee learn from each other; keeps the mentee that the client was sent, `base`.

    `outputs`: the scores of both models; `hidden`: the mentor's. `segments`: of those, and of the projected value, that
    the party makes -> its segment.
    """

    kept = ("base",)

    def __init__(self, outputs: tuple[str, str], hidden: str, segments: Mapping[str, str]) -> None:
        self.outputs, self.hidden, self.segments = outputs, hidden, dict(segments)
        self.base: dict[str, Tensor] = {}

    def terms(self, made: Mapping[str, Tensor], labels: Mapping[str, Tensor], stamp: Stamp) -> Mapping[str, Tensor]:
        """Return the divergences and distances of what the party makes, over the sum of the cross-entropies."""
        out, other = scores = [made[v if v in self.segments else copied_value(v)] for v in self.outputs]
        y = next(labels[v] for v in self.outputs if v in labels).view(-1).long().to(out.device)
        below = sum(functional.cross_entropy(one.detach(), y) for one in scores)
        terms = list(zip(self.outputs, (divergence(out, other), divergence(other, out)), strict=True))
        if self.hidden in self.segments:
            flat, projected = made[self.hidden].flatten(1), made[PROJECTION]
            terms.append((self.hidden, functional.mse_loss(flat, projected.detach())))
            terms.append((PROJECTION, functional.mse_loss(projected, flat.detach())))
        return total_pairs((self.segments[v], term / below) for v, term in terms if v in self.segments)


def _second_name(topology: Topology) -> str:
    """Return which model stands beside the topology's own."""
    return "mentee" if clients_hold_all(topology) else "mentor"


def _mentor_output(topology: Topology) -> str:
    return topology.heads[0 if clients_hold_all(topology) else 1].value


def _mentee_output(topology: Topology) -> str:
    return topology.heads[1 if clients_hold_all(topology) else 0].value


def _mentee(topology: Topology) -> tuple[str, ...]:
    """Return the segments of the mentee that the client holds."""
    held = {s.name for s in topology.segments if s.role in topology.data_roles}
    return tuple(name for name in makers(topology, _mentee_output(topology)) if name in held)


def _mentor(topology: Topology) -> Topology:
    """Return the topology without the mentee."""
    own = makers(topology, topology.heads[0].value)
    segments = tuple(s for s in topology.segments if s.name in own)
    return replace(topology, segments=segments, heads=topology.heads[:1], training_only=frozenset())
