"""FedProto: clients of different make learn from each other's class prototypes, the mean embeddings of a class.

Paper: Tan, Long, Liu, Zhou, Lu, Jiang, Zhang, "FedProto: federated prototype learning across heterogeneous clients",
AAAI 2022.

A client's loss is its own plus `weight` times the distance between the embedding of each row and the global prototype
of its label, where there is one. The fed server fuses prototypes over the clients that hold the class: weighted by
n_ij / N_j, or plainly averaged, as the authors' code does. (Equation 6 taken literally divides once more by the number
of clients that hold the class, and so shrinks every prototype; that form is not offered.) `distance="mse"` is the
default, and the authors' code: the mean over batch and dimensions of the squared difference; "l2" is the paper's: the
mean over the batch of the Euclidean norm. The first is smaller by about the dimension, and so is its weight. Prototypes
are collected in evaluation mode over all of a client's training rows.

Three accuracies are scored: the head's (the run's own), the nearest prototype among the client's own classes, and the
nearest among all. On a split lane the embedding is what crosses at the first cut, so that clients of different make
share what stands behind it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from splitfed.errors import InvalidInput, check_number, unknown
from splitfed.federated.base import Learner, Method, Seat, State
from splitfed.federated.places import embedding, labelled, maker
from splitfed.graph import Topology
from splitfed.tutoring import Tutor
from splitfed.view import Stamp

DISTANCES = ("mse", "l2")


@dataclass(frozen=True, kw_only=True)
class FedProto(Method):
    """`weight` (the paper's lambda) >= 0 of the prototype term; `embedding`: the value meant (default: see `places`).

    `weighted`: fuse by the numbers of examples, or every client that holds the class alike.
    """

    weight: float = 1.0
    distance: str = "mse"
    weighted: bool = True
    embedding: str | None = None

    def __post_init__(self) -> None:
        """Refuse a negative weight and an unknown distance."""
        check_number("fedproto weight", self.weight, low=0.0)
        if self.distance not in DISTANCES:
            raise unknown("fedproto distance", self.distance, DISTANCES)

    @property
    def turned_off(self) -> str | None:
        """A weight of zero leaves every client alone."""
        return "fedproto with weight=0 adds nothing to a client's loss" if self.weight == 0 else None

    def check(self, topology: Topology, clients: int) -> None:
        """Refuse a topology without an embedding, or without class labels beside it."""
        _place(self, topology)

    def tutor(self, seat: Seat) -> Tutor | None:
        """Return who pulls the embeddings of a client towards the prototypes it was sent."""
        value, head = _place(self, seat.topology)
        segment = maker(seat.topology, value)
        if seat.lane is None or segment.role != seat.role:
            return None
        return Pull(self, segment.name, value, head)

    def start(self, clients: int) -> State:
        """No class has a prototype yet."""
        return {"prototypes": {}}

    def query(self, learners: Sequence[Learner], number: int, state: State) -> None:
        """Send every client all prototypes."""
        known: dict[str, Tensor] = state["prototypes"]
        for learner in learners if known else ():
            arrived = learner.receive("prototype", known, number)
            for tutor in learner.tutors.values():
                assert isinstance(tutor, Pull)
                tutor.prototypes = dict(arrived)

    def fuse(self, learners: Sequence[Learner], shares: Mapping[int, float], number: int, state: State) -> None:
        """Average the prototypes of each class over the clients that hold it; others keep the one they had."""
        sums: dict[str, Tensor] = {}
        counts: dict[str, float] = {}
        for learner in learners:
            value, head = _place(self, learner.topology)
            means, rows = prototypes(learner.compute(value), learner.labels(head))
            sizes = {f"{name}/rows": torch.tensor(count) for name, count in rows.items()} if self.weighted else {}
            arrived = learner.send("prototype", {**means, **sizes}, number)
            for name in means:
                share = float(arrived[f"{name}/rows"]) if self.weighted else 1.0
                mean = arrived[name].double() * share
                sums[name] = sums[name] + mean if name in sums else mean
                counts[name] = counts.get(name, 0.0) + share
        fused = {name: (total / counts[name]).to(torch.float32) for name, total in sums.items()}
        state["prototypes"] = dict(sorted({**state["prototypes"], **fused}.items(), key=lambda item: int(item[0])))

    def scores(self, learner: Learner, part: str, state: State) -> Mapping[str, float]:
        """Return the accuracy of the nearest prototype, among the client's own classes and among all."""
        known: dict[str, Tensor] = state["prototypes"]
        if not known:
            return {}
        value, head = _place(self, learner.topology)
        z, y = learner.compute(value, part), learner.labels(head, part).view(-1)
        own = {str(label) for label in learner.labels(head).long().unique().tolist()}
        found = {"nearest_prototype": nearest(z, known), "nearest_own_prototype": nearest(z, _only(known, own))}
        return {name: float((guess == y).double().mean()) for name, guess in found.items()}


@dataclass
class Pull:
    """Stands by a client: keeps the prototypes it was sent, and adds the distance to them to its loss."""

    method: FedProto
    segment: str
    value: str
    head: str
    prototypes: dict[str, Tensor] = field(default_factory=dict)

    def terms(self, made: Mapping[str, Tensor], labels: Mapping[str, Tensor], stamp: Stamp) -> Mapping[str, Tensor]:
        """Return the weighted distance of the batch to the prototypes of its labels."""
        if not self.prototypes or self.method.weight == 0:
            return {}
        z, y = made[self.value].flatten(1), labels[self.head].view(-1).long().tolist()
        # A row of a class that nobody has sent a prototype of stands where it is: distance 0.
        goals = [self.prototypes[str(label)].to(z) if str(label) in self.prototypes else None for label in y]
        goal = torch.stack([row.detach() if known is None else known for row, known in zip(z, goals, strict=True)])
        return {self.segment: self.method.weight * _distance(self.method.distance, z, goal)}

    def correct(self, modules: Mapping[str, nn.Module]) -> None:
        """Gradients stay as they are."""

    def state(self) -> dict[str, Any]:
        """Return the prototypes."""
        return {"prototypes": dict(self.prototypes)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go back to `state`."""
        self.prototypes = dict(state["prototypes"])


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


def _distance(kind: str, z: Tensor, goal: Tensor) -> Tensor:
    if kind == "mse":
        return (z - goal).square().mean()
    # The norm has no slope at 0, where a row without a prototype stands.
    return (z - goal).square().sum(1).clamp_min(1e-12).sqrt().mean()


def _only(known: Mapping[str, Tensor], names: set[str]) -> dict[str, Tensor]:
    return {name: row for name, row in known.items() if name in names} or dict(known)


def _place(method: FedProto, topology: Topology) -> tuple[str, str]:
    """Return the embedding and the head whose labels stand beside it, or refuse."""
    value = embedding("fedproto", topology, method.embedding)
    head = labelled("fedproto", topology, maker(topology, value).role)
    if head.task is None or head.task.name not in ("classification", "binary"):
        told = "no task" if head.task is None else head.task.name
        raise InvalidInput(f"fedproto needs classes; head {head.value!r} has {told}")
    return value, head.value
