"""MAFML: clients of any make teach each other by soft labels on public rows, and keep what they know of their own.

Paper: Zhou, Li, Chen, Ding, "Model agnostic federated mutual learning", 2023.

A round is local training by the schedule, on private and public rows, then a mutual step of every client that finished.
Each first tells its class probabilities p_j on a batch of its own public rows; then, for every client i with all the
others' batches at once,

    KL = 1/(N-1) sum_j A_j KL(p_j || p_i),   CE = 1/(N-1) sum_j CE(f_i(x_j), y_j),   g_pub = gradient of KL + CE,

and if g_pub has a negative cosine with g_loc, the gradient of i's newest local step, its part along g_loc is taken off:
g_pub - (g_loc . g_pub / |g_loc|^2) g_loc. Teachers are detached; all of them tell before anybody takes a mutual step.

Deviations from Algorithm 1:

- Local steps: the paper takes one an iteration; here as many as the schedule asks for, of which the last gives g_loc.
  The paper's iteration is a round of schedule "independent" with steps=1.
- Mutual steps: one over all the others' batches at once, as the sums say. With `mutual_steps="each"` Algorithm 1 is
  read literally, with the update inside the loop over the others: a step for each of them, in the order of the clients,
  on its own term of the sums, 1/(N-1) (A_j KL(p_j || p_i) + CE(f_i(x_j), y_j)), projected against the same g_loc.
- One optimizer: the paper's two rates beta (local) and eta (mutual) are one, and so is the optimizer's state, such as
  Adam's moments, which both kinds of steps change. With `mutual_rate` eta is that number, and mutual steps have an
  optimizer state of their own.
- Accuracies: A_j on the batch is worked out by the aggregation server, which has soft labels and labels both; in the
  paper client j sends it.
- Public rows: sent once, by way of the aggregation server, when a client first takes part. Which of them make a batch
  all know from the seed and the number of the round; a batch goes through them again where there are fewer.
- N: the clients that finished the round, not all there are; one that is left alone takes no mutual step.
- Probabilities are told in evaluation mode; in a mutual step, in training mode, batch norm sees the others' rows.
- Split nodes, which the paper does not have (a schedule that leaves segments in place: "sequential" with
  hand_over="none", or "splitfed_v3", whose server copies take the mutual steps of their clients and are averaged once
  more): soft labels are told by the party that makes the output and go to the one where the loss is, labels
  stay where they are, and each party projects the gradient of its own segments by itself: no party knows the whole
  gradient. A server that all clients share remembers a local gradient for each of them.

Clients start from the weights that the run's `starts` says; the paper tells nothing of that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax

from splitfed.core.errors import InvalidInput, require_count, require_name, require_number
from splitfed.core.messages import Stamp
from splitfed.core.private_values import FEATURES
from splitfed.core.random import derive
from splitfed.core.topology import Topology
from splitfed.federated import public_rows
from splitfed.federated.base import Method, MethodContext, MethodTraits, ObjectivePlacement, State
from splitfed.federated.learner import Learner
from splitfed.federated.objectives import weights_with_gradients
from splitfed.federated.sgd_reach import first_rate
from splitfed.federated.topology_values import making_segment

PART = "shown by others"
MUTUAL_STEPS = ("all", "each")
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class MAFML(Method):
    """Model-agnostic federated mutual learning: clients learn from each other's scores of shown rows.

    `batch`: rows of every public batch. `weighted`: whether a teacher counts by its accuracy, or all alike.

    `projected`: whether the mutual gradient is kept from going against the local one. `mutual_steps`: one over "all"
    others, or one for "each" of them. `mutual_rate` > 0: the learning rate of mutual steps, which then have a state of
    the optimizer of their own (None: they share rate and state with local steps).
    """

    batch: int = field(default=32, metadata=require_count("mafml batch", low=1))
    weighted: bool = True
    projected: bool = True
    mutual_steps: str = field(default="all", metadata=require_name("mafml mutual_steps", MUTUAL_STEPS))
    mutual_rate: float | None = field(
        default=None, metadata=require_number("mafml mutual_rate", low=0.0, open_low=True)
    )

    def traits(self, topology: Topology) -> MethodTraits:
        """Return the traits: the mutual step comes after the schedule's round."""
        told = {**public_rows.SHOWN_VALUES, "soft labels": FEATURES}
        batch = self._public_batch
        return replace(
            super().traits(topology), trains_between_rounds="aggregate", public_batch=batch, message_values=told
        )

    def check(self, topology: Topology, clients: int) -> None:
        """Refuse clients that could not learn from each other's rows and class probabilities."""
        public_rows.check("mafml", topology, clients)

    def check_run(self, context: MethodContext) -> None:
        """Refuse batches of one row where there is batch norm, and a client that shows nothing."""
        # There may be one other client that finished.
        public_rows.check_batch("mafml", self.batch, context.facts)
        public_rows.check_public("mafml", context.public)
        for optim in context.optimizers.values() if self.mutual_rate is not None else ():
            first_rate(optim)
            if optim.scheduler_every == "step":
                raise InvalidInput(
                    f"mafml mutual_rate={self.mutual_rate:g} is a rate of its own; scheduler_every='step', which "
                    "changes rates in mutual steps too, is not allowed: take scheduler_every='round'"
                )

    def objective(self, placement: ObjectivePlacement) -> MafmlObjective:
        """Return the mutual divergence loss of a party, with the projection of its gradient."""
        value = placement.topology.heads[0].value
        return MafmlObjective(value, making_segment(placement.topology, value).name, self.projected)

    def start(self, clients: int) -> State:
        """Nobody has shown anything."""
        return public_rows.start()

    def query(self, learners: Sequence[Learner], number: int, state: State) -> None:
        """Let everybody have everybody's public rows."""
        for learner in public_rows.exchange_rows(learners, number, state):
            if rows := public_rows.received_rows(learner, state):
                public_rows.store_rows(learner, PART, rows)

    def train(self, learner: Learner, epoch: int, batches: Sequence[Tensor], first: int) -> list[float]:
        """Train as the schedule asks; the gradient of the last step alone is remembered."""
        if len(batches) < 2 or not self.projected:
            return learner.train(epoch, batches, first)
        objectives = [t for role in learner.topology.roles if isinstance(t := learner.objective(role), MafmlObjective)]
        for objective in objectives:
            objective.remembers = False
        losses = learner.train(epoch, batches[:-1], first)
        for objective in objectives:
            objective.remembers = True
        return losses + learner.train(epoch, batches[-1:], first + len(batches) - 1)

    def aggregate(self, learners: Sequence[Learner], shares: Mapping[int, float], number: int, state: State) -> None:
        """Let the clients that finished tell each other what they make of their public rows, and learn from it."""
        if len(learners) < 2:
            return
        taught = {learner.replica: self._score_public_batch(learner, number, state) for learner in learners}
        for learner in learners:
            self._take_mutual_step(learner, {k: v for k, v in taught.items() if k != learner.replica}, number, state)

    def _rows(self, learner: Learner, replica: int, count: int, number: int) -> Tensor:
        return self._public_batch(learner.seed, replica, {replica: count}, number)

    def _public_batch(self, seed: int, replica: int, counts: Mapping[int, int], number: int) -> Tensor:
        """Return which public rows a client scores in round `number`, of its own; see `public_rows.PublicBatch`."""
        before = sum(count for other, count in counts.items() if other < replica)
        seed = derive(seed, "mafml", replica)
        return before + public_rows.draw_row_numbers(seed, counts[replica], number * self.batch, self.batch)

    def _score_public_batch(self, learner: Learner, number: int, state: State) -> dict[str, Tensor]:
        """Have the client tell its class probabilities on a public batch; return them with their accuracy."""
        head, known = learner.topology.heads[0], state["shown"][learner.replica]["y"]
        rows = self._rows(learner, learner.replica, len(known), number)
        found = learner.consult(head.value, rows, "public", number).softmax(1)
        arrived = distribution(
            learner.send("soft labels", {"probabilities": found}, number, head.role)["probabilities"]
        )
        right = (arrived.argmax(1) == known[rows]).to(arrived.dtype)
        return {"probabilities": arrived, "accuracy": right.mean() if self.weighted else torch.ones_like(right.mean())}

    def _take_mutual_step(
        self, learner: Learner, taught: Mapping[int, Mapping[str, Tensor]], number: int, state: State
    ) -> None:
        """Send the client what the others told, and let it take a mutual step on their rows."""
        head = learner.topology.heads[0]
        message = {f"{replica}/{name}": t for replica, predictions in taught.items() for name, t in predictions.items()}
        arrived = learner.receive("soft labels", message, number, head.role)
        objective = learner.objective(head.role)
        share = 1.0 if self.mutual_steps == "all" else 1 / len(taught)
        if isinstance(objective, MafmlObjective):
            teachers = [
                (arrived[f"{replica}/probabilities"], share * arrived[f"{replica}/accuracy"].repeat(self.batch))
                for replica in taught
            ]
            objective.teaching = [_joined(step) for step in self._steps(teachers)]
        sizes = {replica: len(rows["y"]) for replica, rows in public_rows.received_rows(learner, state).items()}
        chosen, before = [], 0
        for replica, count in sizes.items():
            if replica in taught:
                chosen.append(self._rows(learner, replica, count, number) + before)
            before += count
        batches = [torch.cat(list(step)) for step in self._steps(chosen)]
        own_state = nullcontext() if self.mutual_rate is None else learner.separate_optimizer(PART, self.mutual_rate)
        with own_state:
            learner.train(number, batches, part=PART, task=share)

    def _steps(self, of_teachers: Sequence[T]) -> list[Sequence[T]]:
        """Return what belongs to each teacher, by mutual step."""
        return [of_teachers] if self.mutual_steps == "all" else [[one] for one in of_teachers]


class MafmlObjective(public_rows.PublicRowsObjective):
    """Local objective of a party: stores others' rows, adds the divergence at the loss, projects the gradient."""

    def __init__(self, value: str, segment: str, projected: bool) -> None:
        super().__init__()
        self.value, self.segment, self.projected = value, segment, projected
        # The class probabilities of every row of the mutual steps to come, and the weight of each row.
        self.teaching: list[tuple[Tensor, Tensor]] = []
        self.remembers = True
        self._step: Stamp | None = None
        self._local: dict[int, dict[str, Tensor]] = {}

    def terms(self, made: Mapping[str, Tensor], labels: Mapping[str, Tensor], stamp: Stamp) -> Mapping[str, Tensor]:
        """Return, in a mutual step, the weighted divergence from the teachers' class probabilities."""
        self._step = stamp
        if stamp.part != PART or not self.teaching or self.value not in made:
            return {}
        teachers, weights = self.teaching.pop(0)
        return {self.segment: weighted_divergence(made[self.value], teachers, weights)}

    def correct(self, modules: Mapping[str, nn.Module]) -> None:
        """Remember the gradient of a local step; take what goes against it off that of a mutual one."""
        step, self._step = self._step, None
        if step is None or not self.projected:
            return
        if step.part == "train" and self.remembers:
            self._local[step.replica] = {name: g.clone() for name, _, g in weights_with_gradients(modules, modules)}
        elif step.part == PART and (local := self._local.get(step.replica)) is not None:
            project({name: g for name, _, g in weights_with_gradients(modules, modules)}, local)


def _joined(taught: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return the class probabilities and weights of several teachers as those of one batch."""
    probabilities, weights = zip(*taught, strict=True)
    return torch.cat(probabilities), torch.cat(weights)


def distribution(told: Tensor) -> Tensor:
    """Return what was `told`, (batch, classes), as probabilities again: a defense may have left them anything."""
    positive = told.clamp_min(0)
    return positive / positive.sum(1, keepdim=True).clamp_min(torch.finfo(told.dtype).tiny)


def weighted_divergence(student: Tensor, teachers: Tensor, weights: Tensor) -> Tensor:
    """Return the mean over the batch of weight times KL(teacher || student): a scalar.

    student: (batch, classes) scores before the softmax; teachers: (batch, classes) probabilities; weights: (batch,).
    """
    apart = torch.xlogy(teachers, teachers).sum(1) - (teachers * log_softmax(student, 1)).sum(1)
    return torch.mean(weights * apart)


def project(gradient: Mapping[str, Tensor], local: Mapping[str, Tensor]) -> None:
    """Take off `gradient`, in place, its part along `local` where the two, each as one vector, point apart."""
    common = [(gradient[name].flatten(), local[name].flatten()) for name in gradient if name in local]
    along = float(sum(torch.dot(a, b) for a, b in common))
    if along >= 0:
        return
    length = float(sum(torch.dot(b, b) for b in (g.flatten() for g in local.values())))
    for name in gradient:
        if name in local:
            gradient[name].sub_(local[name], alpha=along / length)
