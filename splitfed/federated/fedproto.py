"""FedProto: clients of different make learn from each other's class prototypes, the mean embeddings of a class.

Paper: Tan, Long, Liu, Zhou, Lu, Jiang, Zhang, "FedProto: federated prototype learning across heterogeneous clients",
AAAI 2022.

A client's loss is its own plus `weight` times the distance between the embedding of each row and the global prototype
of its label, where there is one. The aggregation server averages prototypes over the clients that hold the class:
weighted by n_ij / N_j, or all alike, as the authors' code does. (Equation 6 taken literally divides once more by the
number of clients that hold the class, and so shrinks every prototype; that form is not offered.) `distance` is one of
three. "mse", the default and the authors' code: the mean over batch and dimensions of the squared difference. "l2": the
mean over the batch of the Euclidean norm. "class_means", equations 7 and 8 as printed: the sum over the classes of the
Euclidean norm between the mean embedding of the class in the batch and its global prototype; a batch stands for the
client's rows, as in algorithm 1, so that a term of the loss depends on several rows. They differ in scale, "mse" by
about the dimension, and so do useful weights.
Prototypes are collected in evaluation mode over all of a client's training rows.

Its two variants: `mh`, clients of different make, one topology each, whose embeddings have one width; and `mr`
(`further`, 15 in the paper): so many clients, those of the lowest mean loss in the round before, train every epoch
`passes` times (2) instead of once, each time in another order. For that clients send their loss, and are told the
number of passes. Whole epochs alone are repeated: neither what a client does that leaves during the round, nor a
round that is counted in other steps than those of an epoch. Steps that several clients take together, and batches of
random size, go without this variant.

`secure`: the aggregation server learns the sum of the clients' prototypes, weighted, and of the weights n_ij / N_i, and
of no client which classes it holds (see `class_sums`). Clients that send their loss cannot be summed: no `further`.

`private`: prototypes and counts under differential privacy (`splitfed.defenses.private_class_sums`), of embeddings that
learn from no private row; every class is sent by every client. Not under a secure sum.

`similar` (after the paper's outlook, which names personalised aggregation and no formula): a client is sent, for each
class that it holds, the mean over the clients with weights n_ij exp(cos(C_i, C_j) / `similar`), where C_i is its own
newest prototype of the class; clients whose prototypes resemble its own count more. Large values are the plain mean.

`answer`: the run predicts by the output of its model ("head"), or by the nearest of the prototypes that the client was
sent last ("nearest", the paper's inference), at the start of a round: after the run's last round they are those of the
round before. What stands behind the embedding then serves training alone. Before any are sent all classes score alike.

Three accuracies are scored: the run's own, the nearest prototype among the client's own classes, and the nearest among
all. On a split replica the embedding is what crosses at the first cut, so that clients of different make
share what stands behind it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from splitfed.core.errors import InvalidInput, require_count, require_name, require_number
from splitfed.core.messages import Stamp
from splitfed.core.private_values import BOTH
from splitfed.core.random import generator
from splitfed.core.topology import Topology
from splitfed.core.topology_facts import TopologyFacts
from splitfed.defenses.private_class_sums import (
    PrivateClassSums,
    check_frozen,
    check_rows_apart,
    message_noise,
    private_of,
)
from splitfed.federated.base import MethodContext, MethodTraits, ObjectivePlacement, State
from splitfed.federated.class_sums import class_sums, class_upload
from splitfed.federated.learner import Learner
from splitfed.federated.nearest_prototype import NAME, add_nearest_prototype, prototype_buffers
from splitfed.federated.objectives import NoObjective, objective_of
from splitfed.federated.topology_values import count_classes, embedding, labelled_head, making_segment
from splitfed.federated.uploads import SummedUploads, close_round, open_round
from splitfed.secure_sum.base import SecureSumPlan

DISTANCES = ("mse", "l2", "class_means")
ANSWERS = ("head", "nearest")


@dataclass(frozen=True, kw_only=True)
class FedProto(SummedUploads):
    """Clients share the mean embedding of each class, and pull their own towards the global one.

    `weight` (the paper's lambda) >= 0 of the prototype term; `embedding`: the value meant (default: see `places`).

    `weighted`: average by the numbers of examples, or every client that holds the class alike. `further` clients train
    `passes` times. `secure`: a secure sum of the prototypes, as schedules take it. `private`: noise on sums and counts,
    a `PrivateClassSums` or a table of its parameters. `similar` > 0: the temperature of a mean of one's own. `answer`:
    by what the run predicts, "head" or "nearest".
    """

    weight: float = field(default=1.0, metadata=require_number("fedproto weight", low=0.0))
    distance: str = field(default="mse", metadata=require_name("fedproto distance", DISTANCES))
    weighted: bool = True
    embedding: str | None = None
    further: int = field(default=0, metadata=require_count("fedproto further", low=0))
    passes: int = field(default=2, metadata=require_count("fedproto passes", low=1))
    secure: bool | str | Mapping[str, Any] | SecureSumPlan = False
    private: Mapping[str, Any] | PrivateClassSums | None = None
    similar: float | None = field(default=None, metadata=require_number("fedproto similar", low=0.0, open_low=True))
    answer: str = field(default="head", metadata=require_name("fedproto answer", ANSWERS))

    def __post_init__(self) -> None:
        """Refuse parameters out of range, and a secure sum beside losses that the server must read."""
        super().__post_init__()
        object.__setattr__(self, "private", private_of(self.private))
        if self.secure and self.private:
            raise InvalidInput("fedproto private adds a client's whole noise to what secure hides already: take one")
        if self.secure and self.further:
            raise InvalidInput(
                f"fedproto further={self.further} reads every client's loss, which secure hides: take one"
            )
        if self.secure and self.similar is not None:
            raise InvalidInput(
                f"fedproto similar={self.similar:g} compares every client's prototypes, which secure hides: take one"
            )

    @property
    def mechanism(self) -> PrivateClassSums:
        """What makes prototypes private, where they are."""
        assert isinstance(self.private, PrivateClassSums)
        return self.private

    def traits(self, topology: Topology) -> MethodTraits:
        """Prototypes are means of the embedding; which one a row is pulled to depends on its label."""
        # Some clients train every epoch several times; who does depends on losses.
        longer, value = self.further > 0 and self.passes > 1, _embedding_and_head(self, topology)[0]
        most = f"fedproto with further={self.further}: as if every client trained all its epochs {self.passes} times"
        off = "fedproto with weight=0 adds nothing to a client's loss"
        return replace(
            super().traits(topology),
            turned_off=off if self.weight == 0 and not longer else None,
            at_most=most if longer else None,
            own_steps=longer,
            reads_labels=True,
            class_means={"prototype": value},
            message_values={"prototype": BOTH, "loss": BOTH},
            secure=self.settings.sum,
            message_events={} if self.private is None else {"prototype": self.mechanism.event()},
            scored_values=(value,),
            private_segments=(NAME,) if self.answer == "nearest" else (),
        )

    def check(self, topology: Topology, clients: int) -> None:
        """Refuse a topology without an embedding or class labels beside it, or one that learns, if it is private."""
        value, _ = _embedding_and_head(self, topology)
        if self.private is not None:
            check_frozen("fedproto", topology, value)

    def check_run(self, context: MethodContext) -> None:
        """Refuse embeddings of different widths, and private ones that other rows have changed."""
        for topology, known in zip(context.topologies, context.facts, strict=True):
            if self.private is not None:
                check_rows_apart("fedproto", topology, known, _embedding_and_head(self, topology)[0])
        clients = zip(context.topologies, context.facts, strict=True)
        wide = [prod(known.shapes[_embedding_and_head(self, t)[0]]) for t, known in clients]
        for client, mine in enumerate(wide):
            if mine != wide[0]:
                raise InvalidInput(f"fedproto: client {client} has embeddings of {mine} numbers, client 0 of {wide[0]}")

    def fit(self, topology: Topology, facts: TopologyFacts, seed: int) -> Topology:
        """Return the topology, with predictions by the nearest prototype where these are asked for."""
        if self.answer == "head":
            return topology
        value, name = _embedding_and_head(self, topology)
        head = next(one for one in topology.heads if one.value == name)
        return add_nearest_prototype(topology, value, head, max(count_classes(head), 2), prod(facts.shapes[value]))

    def train(self, learner: Learner, epoch: int, batches: Sequence[Tensor], first: int) -> list[float]:
        """Train one client on these batches, several times where it was told so; a plan takes it for told."""
        objective = objective_of(learner, Pull)
        times = (self.passes if self.further else 1) if objective is None else objective.passes
        losses = learner.train(epoch, batches, first)
        sizes = [len(rows) for rows in batches]
        for again in range(1, times if sum(sizes) == learner.rows() else 1):
            order = torch.randperm(
                sum(sizes), generator=generator(objective.seed if objective else 0, "again", epoch, again)
            )
            mixed = torch.cat(list(batches))[order].split(sizes)
            losses += learner.train(epoch, mixed, first + again * len(sizes))
        if objective is not None and self.further:
            objective.losses += losses
        return losses

    def objective(self, placement: ObjectivePlacement) -> Pull | None:
        """Return the loss between a client's embeddings and the prototypes that it was sent."""
        value, head = _embedding_and_head(self, placement.topology)
        segment = making_segment(placement.topology, value)
        if placement.replica is None or segment.role != placement.role:
            return None
        return Pull(self, segment.name, value, head, seed=placement.seed)

    def start(self, clients: int) -> State:
        """No class has a prototype yet, and no client a loss."""
        return {"prototypes": {}, "losses": {}, "uploads": {}}

    def query(self, learners: Sequence[Learner], number: int, state: State) -> None:
        """Send every client all prototypes, and how often it trains an epoch where that differs."""
        losses: dict[str, float] = state["losses"]
        chosen = sorted(losses, key=lambda replica: (losses[replica], int(replica)))[: self.further]
        for learner in learners if self.further else ():
            passes = torch.tensor(self.passes if str(learner.replica) in chosen else 1)
            received = learner.receive("passes", {"passes": passes}, number)
            if (pull := objective_of(learner, Pull)) is not None:
                pull.passes, pull.losses = int(received["passes"]), []
        for learner in learners if state["prototypes"] else ():
            arrived = learner.receive("prototype", self._prototypes_for(learner.replica, state), number)
            if self.answer == "nearest":
                learner.adopt(prototype_buffers(learner.topology, arrived))
            for objective in learner.objectives.values():
                assert isinstance(objective, Pull)
                objective.prototypes = dict(arrived)
        open_round(self.settings, learners, number, state)

    def _prototypes_for(self, replica: int, state: State) -> dict[str, Tensor]:
        """Return what a client is sent: global prototypes, or means of similar clients for classes that it holds."""
        sent: dict[str, Tensor] = state["prototypes"]
        if self.similar is None:
            return sent
        uploads = state["uploads"]
        own = {name for name in uploads.get(str(replica), {}) if name.isdecimal()}
        personal = {name: self._mean_of_similar(name, uploads[str(replica)][name], uploads) for name in own}
        return {name: personal.get(name, row) for name, row in sent.items()}

    def _mean_of_similar(self, name: str, own: Tensor, uploads: Mapping[str, Mapping[str, Tensor]]) -> Tensor:
        """Return the mean over clients of the prototypes of class `name`, those that are like `own` weighing more."""
        assert self.similar is not None
        held = [one for one in uploads.values() if name in one]
        rows = torch.stack([one[name].double() for one in held])
        shares = torch.stack(
            [one[f"{name}/rows"].double() if self.weighted else torch.ones(()).double() for one in held]
        )
        alike = cosine_similarity(rows, own.double().unsqueeze(0), dim=1) / self.similar
        weights = (alike + shares.log()).softmax(0)
        return (weights.unsqueeze(1) * rows).sum(0).to(own.dtype)

    def aggregate(self, learners: Sequence[Learner], shares: Mapping[int, float], number: int, state: State) -> None:
        """Average each class's prototypes over the clients that hold it; a class that none holds keeps its last one."""
        if self.secure:
            sums, weights = class_sums(self._sum(learners, number, state))
        else:
            sums, weights = self._gather(learners, number, state)
        averaged = {name: (total / weights[name]).to(torch.float32) for name, total in sums.items()}
        state["prototypes"] = dict(sorted({**state["prototypes"], **averaged}.items(), key=lambda item: int(item[0])))

    def _sum(self, learners: Sequence[Learner], number: int, state: State) -> Mapping[str, Tensor]:
        """Return the mean of the clients' rows by class, as a secure sum gives it."""
        uploads = []
        for learner in learners:
            value, head = _embedding_and_head(self, learner.topology)
            means, rows = prototypes(learner.compute(value), learner.labels(head))
            total = sum(rows.values())
            parts = {name: count / total if self.weighted else 1.0 for name, count in rows.items()}
            heads = {one.value: one for one in learner.topology.heads}
            uploads.append((learner, 1.0, {"prototype": class_upload(means, parts, heads[head])}))
        return close_round(self.settings, uploads, number, state, self.weighted)["prototype"]

    def _gather(
        self, learners: Sequence[Learner], number: int, state: State
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Return the sum of the prototypes that clients send, and of their weights, by class."""
        sums: dict[str, Tensor] = {}
        counts: dict[str, float] = {}
        for learner in learners:
            value, head = _embedding_and_head(self, learner.topology)
            arrived = learner.send("prototype", self._upload(learner, value, head, number), number)
            if self.similar is not None:
                state["uploads"][str(learner.replica)] = dict(arrived)
            for name in (name for name in arrived if name.isdecimal()):
                if self.private is not None and float(arrived[f"{name}/rows"]) < self.mechanism.least:
                    continue
                share = float(arrived[f"{name}/rows"]) if self.weighted else 1.0
                mean = arrived[name].double() * share
                sums[name] = sums[name] + mean if name in sums else mean
                counts[name] = counts.get(name, 0.0) + share
            if self.further:
                pull = objective_of(learner, Pull)
                loss = torch.tensor(sum(pull.losses) / len(pull.losses) if pull and pull.losses else 0.0)
                state["losses"][str(learner.replica)] = float(learner.send("loss", {"loss": loss}, number)["loss"])
        return sums, counts

    def _upload(self, learner: Learner, value: str, head: str, number: int) -> dict[str, Tensor]:
        """Return what a client sends: its prototypes by class, and how many rows each is of where that is told."""
        z, y = learner.compute(value), learner.labels(head)
        if self.private is None:
            means, rows = prototypes(z, y)
            sizes = {f"{name}/rows": torch.tensor(count) for name, count in rows.items()} if self.weighted else {}
            return {**means, **sizes}
        classes = max(count_classes({one.value: one for one in learner.topology.heads}[head]), 2)
        noisy = self.mechanism.release(z, y, classes, message_noise(learner.seed, learner.replica, number))
        named = {str(label): mean.clone() for label, mean in enumerate(noisy.means)}
        return {**named, **{f"{label}/rows": count.clone() for label, count in enumerate(noisy.counts)}}

    def scores(self, learner: Learner, part: str, state: State) -> Mapping[str, float]:
        """Return the accuracy of the nearest prototype, among the client's own classes and among all."""
        known: dict[str, Tensor] = state["prototypes"]
        if not known:
            return {}
        value, head = _embedding_and_head(self, learner.topology)
        z, y = learner.compute(value, part), learner.labels(head, part).view(-1)
        own = {str(label) for label in learner.labels(head).long().unique().tolist()}
        predictions = {
            "nearest_prototype": nearest(z, known),
            "nearest_own_prototype": nearest(z, {name: row for name, row in known.items() if name in own} or known),
        }
        return {name: float((prediction == y).double().mean()) for name, prediction in predictions.items()}


@dataclass
class Pull(NoObjective):
    """Local objective of a client: stores the prototypes it was sent, and adds the distance to them to its loss.

    `passes`: how often it trains an epoch in this round, `losses`: those of its steps in it; `seed`: of the orders.
    """

    kept = ("prototypes",)

    method: FedProto
    segment: str
    value: str
    head: str
    prototypes: dict[str, Tensor] = field(default_factory=dict)
    seed: int = 0
    passes: int = 1
    losses: list[float] = field(default_factory=list)

    def terms(self, made: Mapping[str, Tensor], labels: Mapping[str, Tensor], stamp: Stamp) -> Mapping[str, Tensor]:
        """Return the weighted distance of the batch to the prototypes of its labels."""
        if not self.prototypes or self.method.weight == 0:
            return {}
        z, y = made[self.value].flatten(1), labels[self.head].view(-1).long()
        if self.method.distance == "class_means":
            z, y = _class_means(z, y)
        # A row of a class that has no prototype yet is its own target: distance 0.
        targets = [self.prototypes[str(label)].to(z) if str(label) in self.prototypes else None for label in y.tolist()]
        target = torch.stack([row.detach() if one is None else one for row, one in zip(z, targets, strict=True)])
        squares = (z - target).square()
        if self.method.distance == "mse":
            return {self.segment: self.method.weight * squares.mean()}
        # The norm has no slope at 0, where a row without a prototype is.
        norms = squares.sum(1).clamp_min(1e-12).sqrt()
        return {
            self.segment: self.method.weight * (norms.sum() if self.method.distance == "class_means" else norms.mean())
        }


def _class_means(z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean row of each class in z (rows, width), (classes, width), and the classes in ascending order."""
    classes, places, counts = y.unique(return_inverse=True, return_counts=True)
    sums = z.new_zeros(len(classes), z.shape[1]).index_add(0, places, z)
    return sums / counts[:, None], classes


def prototypes(z: Tensor, y: Tensor) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Return the mean embedding of each class in z (rows, ...), flattened, and its number of rows, by class name."""
    flat, y = z.flatten(1), y.view(-1).long()
    classes = y.unique().tolist()
    return {str(c): flat[y == c].mean(0) for c in classes}, {str(c): int((y == c).sum()) for c in classes}


def nearest(z: Tensor, known: Mapping[str, Tensor]) -> Tensor:
    """Return the class of the nearest of the `known` prototypes in Euclidean distance: (rows,)."""
    goals = torch.stack([row.to(z) for row in known.values()])
    found = torch.cdist(z.flatten(1), goals).argmin(1)
    return torch.tensor([int(name) for name in known], device=z.device)[found]


def _embedding_and_head(method: FedProto, topology: Topology) -> tuple[str, str]:
    """Return the embedding and the head whose labels stand beside it, or refuse."""
    value = embedding("fedproto", topology, method.embedding)
    head = labelled_head("fedproto", topology, making_segment(topology, value).role)
    if head.task is None or head.task.name not in ("classification", "binary"):
        told = "no task" if head.task is None else head.task.name
        raise InvalidInput(f"fedproto needs classes; head {head.value!r} has {told}")
    return value, head.value
