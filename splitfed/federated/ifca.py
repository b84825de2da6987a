"""IFCA: several models are averaged side by side; every client trains the one with the lowest loss on its rows.

Paper: Ghosh, Chung, Yin, Ramchandran, "An efficient framework for clustered federated learning", NeurIPS 2020,
algorithm 1 with model averaging.

The aggregation server sends all `clusters` models to the clients it asks. A client trains the one with the lowest loss
on its training rows (in evaluation mode), and sends it back with the number of its cluster; each model becomes the mean
of those that chose it, weighted by examples, and stays what it was where nobody did. The first model starts as the
topology says, the others are drawn anew by the run's seed; with one cluster it is FedAvg to the bit. A client predicts
with the model, as it now is, that has the lowest loss on its training rows. A client's choices are known to the
aggregation server (`run.method_state["chosen"]`).

On a split replica the models are those of the client's segments. To choose, its training rows cross once with each of
them, and the party that makes the output works the loss out; it predicts with the model that it chose last (the first
one before that).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from splitfed.aggregation.running_mean import RunningMean
from splitfed.core.errors import require_count
from splitfed.core.initial_weights import redraw_weights
from splitfed.core.private_values import BOTH
from splitfed.core.random import derive
from splitfed.core.topology import Head, Topology
from splitfed.federated.averaging import Averaging, shared_at
from splitfed.federated.base import MethodTraits, ObjectivePlacement, State
from splitfed.federated.learner import Learner
from splitfed.federated.objectives import NoObjective, objective_of, trainable_names
from splitfed.federated.topology_values import clients_hold_all, only_client


@dataclass(frozen=True, kw_only=True)
class Ifca(Averaging):
    """Several models on the server; every client trains the one with the least loss on its rows.

    `clusters` >= 1: how many models.
    """

    who: ClassVar[str] = "ifca"
    refuses: ClassVar[Mapping[str, str]] = {
        "rule": "the number of clients in a cluster depends on their losses and may be too small for a rule",
        "secure": "the sum of a cluster with one client is that client's upload",
    }

    clusters: int = field(default=2, metadata=require_count("ifca clusters", low=1))

    def traits(self, topology: Topology) -> MethodTraits:
        """Return the traits of averaging, except that a client receives all models and returns one, chosen by its loss.

        With one cluster it is FedAvg. The choice reads the rows, so it is no post-processing of defended gradients.
        """
        off = "ifca with clusters=1 is fedavg" if self.clusters == 1 else None
        # The client's starting point was chosen by the loss on its true labels.
        told = {"cluster": BOTH, "weights": BOTH}
        base = super().traits(topology)
        return replace(base, turned_off=off, returns_weights=False, post_processing=False, message_values=told)

    def check(self, topology: Topology, clients: int) -> None:
        """Refuse clients of several parties, and weights that cannot be drawn anew."""
        only_client(self.who, topology)
        super().check(topology, clients)
        self._draw_weights(topology, min(1, self.clusters - 1), 0)

    def objective(self, placement: ObjectivePlacement) -> ClusterChoice | None:
        """Return the record of a client's cluster; None at a party that serves no client."""
        return None if placement.replica is None else ClusterChoice()

    def start(self, clients: int) -> State:
        """Return the state before the first client sends its weights."""
        return {"clusters": [], "chosen": {}}

    def query(self, learners: Sequence[Learner], number: int, state: State) -> None:
        """Send all models to every client, which continues with the one of lowest loss."""
        for learner in learners:
            if not state["clusters"]:
                first, topology = self.shared_tensors(learner, copies=True), learner.topology
                drawn_models = [
                    self._draw_weights(topology, cluster, learner.seed) for cluster in range(1, self.clusters)
                ]
                state["clusters"] = [first, *({n: found[n].to(first[n]) for n in first} for found in drawn_models)]
            sent = {f"{i}/{name}": t for i, found in enumerate(state["clusters"]) for name, t in found.items()}
            arrived = learner.receive("weights", sent, number)
            models = [{n: arrived[f"{i}/{n}"] for n in found} for i, found in enumerate(state["clusters"])]
            chosen = 0
            if objective := objective_of(learner, ClusterChoice):
                chosen = objective.cluster = best_cluster(learner, models, number)
            elif not clients_hold_all(learner.topology):
                best_cluster(learner, models, number)
            self.begin(learner, models[chosen], number, state)

    def aggregate(self, learners: Sequence[Learner], shares: Mapping[int, float], number: int, state: State) -> None:
        """Average every model over the clients that chose it."""
        sums: dict[int, RunningMean] = {}
        total: dict[int, float] = {}
        parts = self.parts(learners, shares)
        for learner, part in parts:
            objective = objective_of(learner, ClusterChoice)
            named = learner.send("cluster", {"cluster": torch.tensor(objective.cluster if objective else 0)}, number)
            cluster = state["chosen"][str(learner.replica)] = int(named["cluster"])
            total[cluster] = total.get(cluster, 0.0) + part
        for learner, part in parts:
            cluster = state["chosen"][str(learner.replica)]
            arrived = learner.send("weights", self.shared_tensors(learner), number)
            sums.setdefault(cluster, RunningMean()).add(arrived, part / total[cluster])
        first, memory = learners[0], state.setdefault("server_step", {}) if self.settings.server_step else {}
        for cluster, mean in sums.items():
            before, names = (
                state["clusters"][cluster],
                trainable_names(first.topology, shared_at(self, first)),
            )
            state["clusters"][cluster] = self.settings.move(before, mean.value(), names, memory.setdefault(cluster, {}))

    def newest(self, learner: Learner, state: State) -> Mapping[str, Tensor] | None:
        """Return the model with the lowest loss on the client's training rows; on a split replica its last choice."""
        models: list[dict[str, Tensor]] = state["clusters"]
        if not models:
            return None
        if clients_hold_all(learner.topology):
            return models[best_cluster(learner, models)]
        last: int = state["chosen"].get(str(learner.replica), 0)
        return models[last]

    def _draw_weights(self, topology: Topology, cluster: int, seed: int) -> dict[str, Tensor]:
        """Return the initial weights of `cluster` in a run with this seed."""
        modules = {name: topology.segment(name).module for name in self.shared(topology)}
        made = redraw_weights("ifca", modules, derive(seed, "ifca", cluster)) if cluster else modules
        return {f"{s}/{name}": t for s, module in made.items() for name, t in module.state_dict().items()}


@dataclass
class ClusterChoice(NoObjective):
    """Stores the cluster that the client chose in this round."""

    kept: ClassVar[tuple[str, ...]] = ("cluster",)

    cluster: int = 0


def best_cluster(learner: Learner, models: Sequence[Mapping[str, Tensor]], number: int = 0) -> int:
    """Return the number of the model with the lowest loss on the client's training rows; the first of equals.

    `number`: of the round, by which defenses draw where rows have to cross.
    """
    if len(models) == 1:
        return 0
    losses = []
    for cluster, tensors in enumerate(models):
        with learner.lend(tensors):
            # Every pass is a release of its own: defenses draw anew for each.
            draw = number * len(models) + cluster
            losses.append(sum(_loss(learner, head, draw) for head in learner.topology.heads))
    return min(range(len(losses)), key=losses.__getitem__)


def _loss(learner: Learner, head: Head, draw: int) -> float:
    assert head.task is not None
    if clients_hold_all(learner.topology):
        scores = learner.compute(head.value)
    else:
        scores = learner.consult(head.value, torch.arange(learner.rows()), "train", draw)
    return head.weight * float(head.task.loss(scores, learner.labels(head.value).to(scores.device)))
