"""FedMD: clients train towards the mean of all clients' class scores on public rows, then on their own rows.

Paper: Li, Wang, "FedMD: heterogenous federated learning via model distillation", NeurIPS workshop on federated learning
2019, algorithm 1.

The public set consists of the clients' public rows, which each sends once, when it first takes part. In its first round
a client makes `transfer` passes over the public set with its labels, and then trains on its own rows only. Every later
round begins as follows: the selected clients score the same public rows (communicate), the aggregation server averages
the scores with equal weights (aggregate) and sends the mean back (distribute); each client takes steps towards it
(digest), and the schedule trains it on its own rows (revisit). A client that knows a single public row, its own, delays
its passes until others have sent theirs: batch norm needs two rows. The paper trains to convergence on the public and
the private rows before the first round; here the first round trains as long as it is configured. `distance="l1"` is the
authors' code: the mean absolute difference of class scores before the softmax; "kl" is KL(softmax of the mean ||
student), averaged over rows.

The authors' code digests with a second optimizer: `separate=True`. By default one optimizer takes the steps on public
and on private rows, and its momentum carries over between them.

`secure`: the aggregation server learns only the sum of the clients' scores, for whole models; the public rows are sent
in the clear. If fewer clients take part than the sum needs, no client digests in that round.

Between split nodes (a schedule that leaves segments in place: "sequential" with hand_over="none") the party that makes
the scores sends and receives them; digesting needs no labels, and none are sent. Clients start from the weights that
the run's `starts` gives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput, require_count, require_name
from splitfed.core.messages import Stamp
from splitfed.core.private_values import FEATURES
from splitfed.core.random import derive
from splitfed.core.topology import Topology
from splitfed.federated import public_rows
from splitfed.federated.base import MethodContext, MethodTraits, ObjectivePlacement, State
from splitfed.federated.distillation import divergence
from splitfed.federated.learner import Learner
from splitfed.federated.topology_values import making_segment
from splitfed.federated.uploads import SummedUploads, close_round, open_round
from splitfed.secure_sum.base import SecureSumPlan

PART = "shown by all"
DISTANCES = ("l1", "kl")


@dataclass(frozen=True, kw_only=True)
class FedMD(SummedUploads):
    """Clients of any architecture distil from their mean scores on public rows.

    `rows`: the number of public rows scored a round (None: all); `batch`: rows a step of digesting; `passes`: passes
    over the scored rows in digesting; `transfer`: initial passes over all public rows, in batches of the same size. A
    single remaining row joins the batch before it. `separate`: whether digesting has an optimizer state (momentum) of
    its own; a plan of memory counts one state only. `secure`: a secure sum of the scores, as schedules take it.
    """

    rows: int | None = field(default=None, metadata=require_count("fedmd rows", low=1))
    batch: int = field(default=32, metadata=require_count("fedmd batch", low=1))
    passes: int = field(default=1, metadata=require_count("fedmd passes", low=1))
    transfer: int = field(default=1, metadata=require_count("fedmd transfer", low=0))
    distance: str = field(default="l1", metadata=require_name("fedmd distance", DISTANCES))
    separate: bool = False
    secure: bool | str | Mapping[str, Any] | SecureSumPlan = False

    def traits(self, topology: Topology) -> MethodTraits:
        """Return the traits: clients send soft labels and take steps before the schedule's round."""
        # Under a secure sum the scores of a single client cannot be read.
        batch = None if self.secure else self._public_batch
        return replace(
            super().traits(topology),
            trains_between_rounds="query",
            secure=self.settings.sum,
            public_batch=batch,
            message_values={**public_rows.SHOWN_VALUES, "soft labels": FEATURES},
        )

    def check(self, topology: Topology, clients: int) -> None:
        """Raise `InvalidInput` for clients that cannot learn from each other's rows and class scores."""
        head = public_rows.check("fedmd", topology, clients)
        if self.secure and head.role not in topology.data_roles:
            raise InvalidInput(
                f"fedmd secure sums what clients send; in topology {topology.name!r} {head.role!r} makes all scores"
            )

    def check_run(self, context: MethodContext) -> None:
        """Raise `InvalidInput` for batches of one row with batch norm, and for a client without public rows."""
        public_rows.check_batch("fedmd", self.batch if self.rows is None else min(self.batch, self.rows), context.facts)
        public_rows.check_public("fedmd", context.public)

    def objective(self, placement: ObjectivePlacement) -> Follower:
        """Return the distillation loss of a party's class scores towards the mean of all clients'."""
        value = placement.topology.heads[0].value
        return Follower(value, making_segment(placement.topology, value).name, self.distance)

    def start(self, clients: int) -> State:
        """Return the state before any public rows are sent, and before any client has trained on them."""
        return {**public_rows.start(), "met": []}

    def query(self, learners: Sequence[Learner], number: int, state: State) -> None:
        """Exchange public rows; new clients train on them with labels, the others towards the mean of their scores."""
        for learner in public_rows.exchange_rows(learners, number, state):
            public_rows.store_rows(learner, PART, public_rows.received_rows(learner, state), "public")
        known = [learner for learner in learners if learner.replica in state["met"]]
        for learner in learners:
            if learner.replica not in state["met"] and learner.rows(PART) > 1:
                state["met"].append(learner.replica)
                self._transfer(learner, number)
        plan = self.settings.sum
        if len(known) > 1 and (plan is None or len(known) >= plan.required_members(len(known))):
            self._reach_consensus(known, number, state)

    def _transfer(self, learner: Learner, number: int) -> None:
        """Train a client on all public rows with their labels."""
        count, steps = learner.rows(PART), 0
        for turn in range(self.transfer):
            order = public_rows.draw_row_numbers(
                derive(learner.seed, "fedmd transfer", learner.replica), count, turn * count, count
            )
            batches = public_rows.split_batches(order, self.batch)
            learner.train(number, batches, steps, part=PART)
            steps += len(batches)

    def _reach_consensus(self, learners: Sequence[Learner], number: int, state: State) -> None:
        """Have clients score the same public rows, and train each towards the mean of the scores."""
        counts = {int(replica): len(shown["y"]) for replica, shown in sorted(state["shown"].items())}
        rows = self._public_batch(learners[0].seed, learners[0].replica, counts, number)
        if self.secure:
            open_round(self.settings, learners, number, state)
            uploads = [
                (one, 1.0, {"soft labels": {"scores": one.consult(one.topology.heads[0].value, rows, PART, number)}})
                for one in learners
            ]
            mean = close_round(self.settings, uploads, number, state, weighted=False)["soft labels"]
        else:
            mean = {"scores": self._gather(learners, rows, number)}
        for learner in learners:
            goal = learner.receive("soft labels", mean, number, learner.topology.heads[0].role)["scores"]
            with learner.separate_optimizer("digest") if self.separate else nullcontext():
                self._digest(learner, rows, goal, number)

    def _public_batch(self, seed: int, replica: int, counts: Mapping[int, int], number: int) -> Tensor:
        """Return which of all public rows the clients score in round `number`; see `public_rows.PublicBatch`."""
        count = sum(counts.values())
        size = count if self.rows is None else self.rows
        return public_rows.draw_row_numbers(derive(seed, "fedmd"), count, number * size, size)

    def _gather(self, learners: Sequence[Learner], rows: Tensor, number: int) -> Tensor:
        """Return the mean of the scores that clients send, (rows, classes)."""
        total: Tensor | None = None
        for learner in learners:
            head = learner.topology.heads[0]
            scores = learner.consult(head.value, rows, PART, number)
            arrived = learner.send("soft labels", {"scores": scores}, number, head.role)["scores"]
            total = arrived if total is None else total + arrived
        assert total is not None
        return total / len(learners)

    def _digest(self, learner: Learner, rows: Tensor, goal: Tensor, number: int) -> None:
        """Take steps of one client towards the mean scores `goal` of `rows`."""
        objective, steps = learner.objective(learner.topology.heads[0].role), 0
        for turn in range(self.passes):
            seed = derive(learner.seed, "fedmd digest", learner.replica, number)
            order = public_rows.draw_row_numbers(seed, len(rows), turn * len(rows), len(rows))
            for some in public_rows.split_batches(order, self.batch):
                if isinstance(objective, Follower):
                    objective.goal = goal[some]
                learner.train(number, [rows[some]], steps, part=PART, task=0.0)
                steps += 1


class Follower(public_rows.PublicRowsObjective):
    """Local objective of a party: stores others' rows, and adds the distance of its class scores from a target."""

    def __init__(self, value: str, segment: str, distance: str) -> None:
        super().__init__()
        self.value, self.segment, self.distance = value, segment, distance
        self.goal: Tensor | None = None

    def terms(self, made: Mapping[str, Tensor], labels: Mapping[str, Tensor], stamp: Stamp) -> Mapping[str, Tensor]:
        """Return the distance from the mean scores in a step of digesting, otherwise nothing."""
        if stamp.part != PART or self.goal is None or self.value not in made:
            return {}
        scores, goal, self.goal = made[self.value], self.goal, None
        if self.distance == "kl":
            return {self.segment: divergence(scores, goal)}
        return {self.segment: torch.abs(scores - goal.to(scores)).mean()}
