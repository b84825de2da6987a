"""FedDistill: clients follow the mean class scores that the others reach on rows of each class.

Paper: Jeong, Oh, Kim, Park, Bennis, Kim, "Communication-efficient on-device machine learning: federated distillation
and augmentation under non-IID private data", NeurIPS workshop on machine learning on the phone, 2018.

After training a client sends, for every class that it holds, the mean of its scores (logits) over its rows of that
class. Before training it gets, for every class, the mean of what the others have sent, its own left out, every client
that holds the class alike. Its loss is its own plus `weight` times the divergence KL(p || q) of its prediction q of a
row from the softmax p of the mean for the row's label: summed over classes, averaged over the batch, where rows of a
class that nobody else holds count as nothing. Its slope is that of the paper's cross-entropy. Here the means are taken
in evaluation mode over all of a client's rows when it is done; the paper adds them up while it trains. A client that
is not asked stands with what it sent last. No weights are exchanged: clients may be of any make.

`secure`: the aggregation server learns, for every class, the sum of the clients' mean scores and how many clients hold
it, and of no client which classes it holds (see `class_sums`). It sends both to the clients, and each takes its own out
itself. A sum holds for the clients that finished its round: one that is not asked, or leaves, is then in none, where
otherwise it stands with what it sent last.

On a split replica the party that makes the output takes the means and the divergence: the client in a U-shape, the
server, which is sent the labels of every step, in other forms. The rows cross once more a round for it. In a group of
several parties that own rows it is the one that makes the output, inside the group or outside of all groups. The output
of a binary task, the score z of a sigmoid, counts as the two class scores (0, z). Clients start from the weights that
the run's `starts` says: nothing is broadcast.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from splitfed.core.errors import InvalidInput, require_number
from splitfed.core.grouping import total_pairs
from splitfed.core.messages import Stamp
from splitfed.core.private_values import BOTH
from splitfed.core.topology import Topology
from splitfed.federated.base import MethodTraits, ObjectivePlacement, State
from splitfed.federated.class_sums import class_sums, class_upload
from splitfed.federated.distillation import check_class_scores, class_scores
from splitfed.federated.learner import Learner
from splitfed.federated.objectives import NoObjective
from splitfed.federated.topology_values import (
    clients_hold_all,
    count_classes,
    making_segment,
    only_head,
)
from splitfed.federated.uploads import SummedUploads, close_round, open_round
from splitfed.secure_sum.base import SecureSumPlan


@dataclass(frozen=True, kw_only=True)
class FedDistill(SummedUploads):
    """Clients distil from the others' mean class scores; `weight` >= 0 multiplies the divergence.

    `secure`: a secure sum of the clients' mean scores, as schedules take it.
    """

    weight: float = field(default=1.0, metadata=require_number("feddistill weight", low=0.0))
    secure: bool | str | Mapping[str, Any] | SecureSumPlan = False

    def traits(self, topology: Topology) -> MethodTraits:
        """Return the traits: messages are class means of the output, and a row's target depends on its label."""
        return replace(
            super().traits(topology),
            turned_off="feddistill with weight=0 adds nothing to a client's loss" if self.weight == 0 else None,
            reads_labels=True,
            class_means={"soft labels": topology.heads[0].value},
            message_values={"soft labels": BOTH},
            secure=self.settings.sum,
        )

    def check(self, topology: Topology, clients: int) -> None:
        """Refuse a task without classes, and a secure sum of what clients do not send themselves."""
        head = only_head("feddistill", topology, classes=False)
        check_class_scores("feddistill", head)
        if self.secure and topology.data_roles != (head.role,):
            raise InvalidInput(
                f"feddistill secure sums what clients send; in topology {topology.name!r} role {head.role!r} makes the "
                "scores and sends their means: take a whole model (splitfed.topologies.local) or a U-shape"
            )

    def objective(self, placement: ObjectivePlacement) -> Follow | None:
        """Return the distillation loss towards the others' mean scores, of the party that makes the scores."""
        head = placement.topology.heads[0]
        if placement.role != head.role:
            return None
        classes = max(count_classes(head), 2)
        return Follow(self.weight, making_segment(placement.topology, head.value).name, head.value, classes)

    def start(self, clients: int) -> State:
        """Return the empty state: `means`, client -> class -> mean scores; `sums`, those of the newest secure sum."""
        return {"means": {}, "sums": {}}

    def query(self, learners: Sequence[Learner], number: int, state: State) -> None:
        """Send every client the others' mean for each class, or under a secure sum what it needs to compute it."""
        if self.secure:
            for learner in learners if state["sums"] else ():
                arrived = learner.receive("soft labels", state["sums"], number)
                if (objective := _objective(learner)) is not None:
                    objective.follow(learner.pseudonym, objective.others(arrived))
            open_round(self.settings, learners, number, state)
            return
        known: dict[str, dict[str, Tensor]] = state["means"]
        sums = total_pairs((label, scores.double()) for means in known.values() for label, scores in means.items())
        counts = Counter(label for means in known.values() for label in means)
        labels = sorted(sums, key=int)
        for learner in learners:
            own = known.get(str(learner.replica), {})
            others = {}
            for label in labels:
                count = counts[label] - (label in own)
                if count:
                    rest = sums[label] - own[label].double() if label in own else sums[label]
                    others[label] = (rest / count).float()
            if others:
                arrived = learner.receive("soft labels", others, number, learner.topology.heads[0].role)
                if (objective := _objective(learner)) is not None:
                    objective.follow(learner.pseudonym, arrived)

    def aggregate(self, learners: Sequence[Learner], shares: Mapping[int, float], number: int, state: State) -> None:
        """Receive every client's mean scores by class, or their sum."""
        if self.secure:
            state["sums"] = self._sum(learners, number, state)
            return
        for learner in learners:
            means = _mean_scores(learner, number)
            role = learner.topology.heads[0].role
            state["means"][str(learner.replica)] = dict(learner.send("soft labels", means, number, role))

    def _sum(self, learners: Sequence[Learner], number: int, state: State) -> dict[str, Tensor]:
        """Return, by class, the sum of the clients' mean scores and how many hold it, and the round of the sum."""
        uploads = []
        for learner in learners:
            head, means = learner.topology.heads[0], _mean_scores(learner, number)
            if (objective := _objective(learner)) is not None:
                objective.own, objective.told = means, number
            uploads.append((learner, 1.0, {"soft labels": class_upload(means, dict.fromkeys(means, 1.0), head)}))
        found = close_round(self.settings, uploads, number, state, weighted=False)["soft labels"]
        sums, weights = class_sums(found)
        holders = {f"{name}/clients": torch.tensor(round(part * len(learners))) for name, part in weights.items()}
        rows = {name: (row * len(learners)).float() for name, row in sums.items()}
        return {**rows, **holders, "round": torch.tensor(number)}


def _objective(learner: Learner) -> Follow | None:
    """Return the local objective where the client's scores are made; None in a plan."""
    objective = learner.objective(learner.topology.heads[0].role)
    return objective if isinstance(objective, Follow) else None


class Follow(NoObjective):
    """Stores the others' mean scores by class for each client whose scores the party makes; adds the divergence.

    `means`: client -> class -> mean scores (classes,).
    """

    def __init__(self, weight: float, segment: str, value: str, classes: int) -> None:
        self.weight, self.segment, self.value, self.classes = weight, segment, value, classes
        self.means: dict[int, dict[str, Tensor]] = {}
        # What the client itself has put into a secure sum, and in which round.
        self.own: dict[str, Tensor] = {}
        self.told = -1
        # Client -> log probabilities by class, and whether there are any, 1 or 0.
        self._targets: dict[int, tuple[Tensor, Tensor]] = {}

    def others(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the others' mean scores by class, from the sums and the numbers of clients over all clients."""
        own = self.own if self.told == int(sums["round"]) else {}
        found = {}
        for label in (name.removesuffix("/clients") for name in sums if name.endswith("/clients")):
            count = int(sums[f"{label}/clients"]) - (label in own)
            if count:
                rest = sums[label] - own[label].to(sums[label]) if label in own else sums[label]
                found[label] = rest / count
        return found

    def follow(self, client: int, means: Mapping[str, Tensor]) -> None:
        """Take the others' mean scores (classes,) by class, for rows of `client`."""
        self.means[client] = dict(means)
        self._targets.pop(client, None)
        if means:
            device = next(iter(means.values())).device
            goals, there = torch.zeros(self.classes, self.classes), torch.zeros(self.classes, 1)
            for label, scores in means.items():
                goals[int(label)] = functional.log_softmax(class_scores(scores.view(1, -1)), 1)[0]
                there[int(label)] = 1.0
            self._targets[client] = goals.to(device), there.to(device)

    def terms(self, made: Mapping[str, Tensor], labels: Mapping[str, Tensor], stamp: Stamp) -> Mapping[str, Tensor]:
        """Return the weighted divergence of the batch from the mean scores of its labels."""
        if stamp.replica not in self._targets or self.weight == 0:
            return {}
        scores, (goals, there) = class_scores(made[self.value]), self._targets[stamp.replica]
        y = labels[self.value].view(-1).long().to(scores.device)
        found = functional.log_softmax(scores, 1)
        rows = functional.kl_div(found, goals[y].to(found), reduction="none", log_target=True)
        return {self.segment: self.weight * (rows * there[y].to(found)).sum() / len(y)}

    def state(self) -> dict[str, Any]:
        """Return the stored means, and the client's own contribution to the newest sum."""
        means = {str(client): dict(known) for client, known in self.means.items()}
        return {"means": means, "own": dict(self.own), "told": self.told}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore `state`."""
        for client, known in state["means"].items():
            self.follow(int(client), known)
        self.own, self.told = dict(state["own"]), int(state["told"])


def _mean_scores(learner: Learner, number: int) -> dict[str, Tensor]:
    """Return the mean scores of the client's model by class, over all of its training rows."""
    value = learner.topology.heads[0].value
    whole = clients_hold_all(learner.topology)
    rows = torch.arange(learner.rows())
    return class_means(
        learner.compute(value) if whole else learner.consult(value, rows, "train", number), learner.labels(value)
    )


def class_means(scores: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Return class -> mean of `scores`, (rows, classes), over the rows with that label; only for classes that occur."""
    y = y.view(-1).long()
    return {str(label): scores[y == label].mean(0) for label in y.unique().tolist()}
