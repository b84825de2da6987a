"""A trainer that computes nothing: it counts the messages of a real one, from shapes alone."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from splitfed.core.defense import Defense, WeightDefense
from splitfed.core.executor import Combine
from splitfed.core.local_objective import LocalObjective
from splitfed.core.optimizers import Optim
from splitfed.core.party_state import relabel_for_training
from splitfed.core.per_client_defenses import missing, of_client
from splitfed.core.step_plan import find_relabelled_heads
from splitfed.core.topology import Topology, member
from splitfed.core.topology_facts import TopologyFacts
from splitfed.core.traffic import Traffic
from splitfed.core.upload_defenses import Sent, find_upload_defenses, rows_of, size
from splitfed.core.usage_counts import OTHERS, SCORED, RowOrigins
from splitfed.engines.base import FED, Batches, ReplicaBatches, Scales, Trainer
from splitfed.engines.inference import ROWS_AT_ONCE
from splitfed.engines.participation import Participation
from splitfed.planning.computation import PlannedMessage, plan_of
from splitfed.planning.example_passes import inputs_of
from splitfed.planning.validation import Prepared, labels_of
from splitfed.planning.weight_flows import WeightFlows
from splitfed.secure_sum.base import Flow


class CountingTrainer(Trainer):
    """Plays the schedule of `prepared`; `traffic` holds what a run would count, and `steps` the rows of each step.

    All of it is exact except for the bytes of ciphertexts, which are within 1 %.
    """

    def __init__(self, prepared: Prepared) -> None:
        self.prepared = prepared
        self.topology, self.replicas = prepared.topology, len(prepared.topologies)
        self.traffic = Traffic()
        self.steps: dict[int, list[int]] = {replica: [] for replica in range(self.replicas)}
        self._own = set(self.topology.data_roles)
        self._flows: dict[tuple[int, tuple[int, ...]], list[PlannedMessage]] = {}
        self._labels: dict[tuple[int, str], dict[str, Tensor]] = {}
        self._taken = [Participation() for _ in range(self.replicas)]
        self._weight_flows = WeightFlows(prepared.topologies, prepared.placement)
        # The kinds of messages to the aggregation server with content on which a defense could act.
        self.defended: set[str] = set()
        # Origins of the rows in each further part of a replica: rows of "train", or of other clients.
        self.origins: dict[tuple[int, str], RowOrigins] = {
            (replica, "public"): RowOrigins.own(client.shown) for replica, client in enumerate(prepared.data.clients)
        }
        self._count(plan_of(self.topology).setup_flows(self.topology, self.replicas))

    def step_counts(self, replica: int) -> tuple[int, int]:
        """Return the number of steps of `replica`, and the largest number of steps of any single row of it."""
        return self._taken[replica].steps, self._taken[replica].most

    def rows(self, replica: int, part: str) -> int:
        """Return the number of rows of `replica` in `part`."""
        return len(getattr(self.prepared.data.clients[replica], part))

    def labels(self, replica: int, part: str) -> dict[str, Tensor]:
        """Return head -> labels of `replica` in `part`, as a run on the CPU uses them in training: (rows,)."""
        if part == "public":
            return {
                head: y[self.prepared.data.clients[replica].shown] for head, y in self.labels(replica, "train").items()
            }
        if (replica, part) not in self._labels:
            topology, seed = self.prepared.topologies[replica], self.prepared.training.seed
            labels = labels_of(topology, getattr(self.prepared.data.clients[replica], part))
            relabelling = find_relabelled_heads(topology, of_client(self.prepared.defenses, replica))
            for role, heads in relabelling.items() if part not in SCORED else ():
                labels = relabel_for_training(labels, heads, seed, self._party(role, replica), part)
            self._labels[replica, part] = labels
        return self._labels[replica, part]

    def train(
        self, replica: int, epoch: int, batches: Batches, first: int = 0, part: str = "train", task: float = 1.0
    ) -> list[float]:
        """Count the messages of these steps; return a zero loss for each."""
        self._taken[replica].add(epoch, batches, part)
        self.steps[replica] += map(len, batches)
        for rows in batches:
            flows = [flow for flow in self._flows_of_replica(replica) if task or flow.kind != "label"]
            self._count_flows(replica, flows, len(rows))
        return [0.0] * sum(len(rows) > 0 for rows in batches)

    def consult(self, replica: int, rows: Tensor, part: str) -> None:
        """Count the messages of a forward pass of `rows` without a training step."""
        for few in rows.split(ROWS_AT_ONCE):
            self._count_flows(replica, [flow for flow in self._flows_of_replica(replica) if flow.ahead], len(few))

    def train_together(
        self, epoch: int, step: int, batches: ReplicaBatches, scales: Scales, combine: Combine | None = None
    ) -> dict[int, float]:
        """Count the messages of one step of every replica."""
        return {replica: sum(self.train(replica, epoch, [rows])) for replica, rows in batches.items()}

    def hand_over(self, source: int, target: int, role: str, epoch: int, via: str | None = None) -> None:
        """Count the weights handed over."""
        self._count(self._weight_flows.hand_over(source, target, role, via))

    def download(self, replicas: Sequence[int], epoch: int) -> None:
        """Count what the aggregation server sends."""
        self._count(self._weight_flows.download(replicas))

    def upload(self, weights: Mapping[int, float], epoch: int) -> None:
        """Count what the aggregation server receives."""
        self._count(self._weight_flows.upload(weights))

    def branch(self, replicas: Sequence[int]) -> None:
        """Do nothing: no message is sent."""

    def merge(self, weights: Mapping[int, float]) -> None:
        """Do nothing: no message is sent."""

    def _flows_of_replica(self, replica: int) -> list[PlannedMessage]:
        topology = self.prepared.topologies[replica]
        key = id(topology), missing(self.prepared.defenses, replica)
        if key not in self._flows:
            labels = labels_of(topology, self.prepared.data.clients[replica].train)
            mine = of_client(self.prepared.defenses, replica)
            self._flows[key] = flows_of(topology, self.prepared.facts[replica], labels, mine)
        return self._flows[key]

    def _count_flows(self, replica: int, flows: Sequence[PlannedMessage], rows: int) -> None:
        for flow in flows if rows else ():
            sender, receiver = self._party(flow.sender, replica), self._party(flow.receiver, replica)
            self.traffic.add("train", flow.kind, sender, receiver, flow.size(rows))

    def _party(self, role: str, replica: int) -> str:
        return member(role, replica) if role in self._own else role

    def sent(self, sent: Sent, role: str) -> None:
        """Count what a client of a federated method, or the party in `role` for it, sends to the aggregation server."""
        if any(rows_of(tensor) is not None for tensor in sent.tensors.values()):
            self.defended.add(sent.kind)
        packed = size(sent, find_upload_defenses(self.prepared.defenses, sent.kind, sent.replica))
        nbytes = sum(t.nbytes for t in sent.tensors.values()) if packed is None else packed
        self.traffic.add("train", sent.kind, sent.party, FED, nbytes)

    def _count(self, flows: Iterable[Flow]) -> None:
        for flow in flows:
            self.traffic.add("train", *flow)


def flows_of(
    topology: Topology, facts: TopologyFacts, labels: Mapping[str, Tensor], defenses: Sequence[Defense] = ()
) -> list[PlannedMessage]:
    """Return every message of one training step of `topology`; `labels`: head -> labels, for their size."""
    flows = plan_of(topology).crossing_messages(topology, facts, defenses)
    for defense in defenses:
        flows += [
            PlannedMessage("norm", sender, receiver, partial(operator.mul, _norm_size(topology, sender)))
            for sender, receiver in (defense.norms(topology) if isinstance(defense, WeightDefense) else ())
        ]
    for head in topology.heads:
        y = labels[head.value]
        size = partial(operator.mul, y.element_size() * y[0].numel())
        flows += [PlannedMessage("label", sender, receiver, size) for sender, receiver in pairwise(head.path)]
    return flows


def _norm_size(topology: Topology, role: str) -> int:
    """Return the bytes of one norm, which has the type of the party's weights."""
    weights = (p for s in topology.segments_of(role) for p in s.module.parameters() if p.requires_grad)
    return max(p.element_size() for p in weights)


@dataclass(frozen=True)
class CountingLearner:
    """A learner with shapes and labels only, which counts what a federated method sends, and sends zeros."""

    trainer: CountingTrainer
    replica: int
    role: str | None = None
    objectives: Mapping[str, LocalObjective] = field(default_factory=dict)
    held: dict[str, tuple[int, Mapping[str, Tensor]]] = field(default_factory=dict)

    @property
    def topology(self) -> Topology:
        """The replica's topology."""
        return self.trainer.prepared.topologies[self.replica]

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles whose parties it stands for."""
        return self.topology.data_roles if self.role is None else (self.role,)

    @property
    def pseudonym(self) -> int:
        """The client's own number: nothing is computed."""
        return self.replica

    def at(self, role: str) -> CountingLearner:
        """Return the client's party in `role` alone."""
        return replace(self, role=role)

    def objective(self, role: str) -> LocalObjective | None:
        """Return None: nothing is computed."""
        return None

    @property
    def seed(self) -> int:
        """The run's seed."""
        return self.trainer.prepared.training.seed

    @property
    def shown(self) -> Tensor:
        """Row numbers of the public rows in "train": (rows,) int64."""
        return self.trainer.prepared.data.clients[self.replica].shown

    def inputs(self, part: str = "train") -> dict[str, Tensor]:
        """Return the client's raw inputs in `part`: name -> (rows, ...)."""
        return inputs_of(self.topology, getattr(self.trainer.prepared.data.clients[self.replica], part))

    def rows(self, part: str = "train") -> int:
        """Return the number of the client's rows in `part`."""
        return self.held[part][0] if part in self.held else self.trainer.rows(self.replica, part)

    @property
    def rate(self) -> float:
        """The constant 1, as nothing is trained."""
        return 1.0

    @property
    def optim(self) -> Optim:
        """The optimizer settings of the client's first party."""
        return self.trainer.prepared.optims[self.roles[0]]

    def momentum(self) -> dict[str, Tensor]:
        """Return an empty mapping, as nothing is trained."""
        return {}

    def hold(
        self, part: str, inputs: Mapping[str, Tensor], labels: Mapping[str, Tensor], origins: RowOrigins | None = None
    ) -> None:
        """Store the number of rows, and their labels."""
        rows = len(next(iter((*inputs.values(), *labels.values()))))
        self.trainer.origins[self.replica, part] = origins or RowOrigins.shown(OTHERS, rows)
        self.held[part] = rows, dict(labels)

    def train(
        self, epoch: int, batches: Sequence[Tensor], first: int = 0, part: str = "train", task: float = 1.0
    ) -> list[float]:
        """Count the messages of these steps."""
        return self.trainer.train(self.replica, epoch, batches, first, part, task)

    def separate_optimizer(self, name: str, rate: float | None = None) -> AbstractContextManager[None]:
        """Return a context that does nothing, as nothing is trained."""
        return nullcontext()

    def consult(self, value: str, rows: Tensor, part: str, number: int) -> Tensor:
        """Count the messages of the forward pass; return zeros of the shape of `value`: (rows, ...)."""
        self.trainer.consult(self.replica, rows, part)
        return self._zeros(value, len(rows))

    def compute(self, value: str, part: str = "train") -> Tensor:
        """Return zeros of the shape of `value`: (rows, ...)."""
        return self._zeros(value, self.rows(part))

    def _zeros(self, value: str, rows: int) -> Tensor:
        facts = self.trainer.prepared.facts[self.replica]
        return torch.zeros(1, dtype=facts.dtypes[value]).expand(rows, *facts.shapes[value])

    def labels(self, head: str, part: str = "train") -> Tensor:
        """Return the client's labels, as they are used in training: (rows,)."""
        known = self.held[part][1] if part in self.held else self.trainer.labels(self.replica, part)
        return known[head]

    def contents(self, segments: Sequence[str], copies: bool = True) -> dict[str, Tensor]:
        """Return the weights and buffers of `segments` as tensors on the device "meta": shapes and types only."""
        return {
            f"{name}/{key}": tensor.to("meta")
            for name in segments
            if self.topology.segment(name).role in self.roles
            for key, tensor in self.topology.segment(name).module.state_dict().items()
        }

    def adopt(self, tensors: Mapping[str, Tensor]) -> None:
        """Do nothing: no weights are kept."""

    def lend(self, tensors: Mapping[str, Tensor]) -> AbstractContextManager[None]:
        """Return a context that does nothing: no weights are kept."""
        return nullcontext()

    def gradient(self, batches: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return `segment/name` -> a tensor on the device "meta" of the shape of that weight's gradient."""
        return {
            f"{segment.name}/{name}": weight.detach().to("meta")
            for segment in self.topology.segments
            for name, weight in segment.module.named_parameters()
            if weight.requires_grad
        }

    def send(
        self, kind: str, tensors: Mapping[str, Tensor], number: int, role: str | None = None
    ) -> Mapping[str, Tensor]:
        """Count a message to the aggregation server, in the form in which it is sent; return its contents."""
        sent = Sent(kind, tensors, self._name(role), self.replica, number)
        self.trainer.sent(sent, role or self.roles[0])
        return tensors

    def receive(
        self, kind: str, tensors: Mapping[str, Tensor], number: int, role: str | None = None
    ) -> Mapping[str, Tensor]:
        """Count a message from the aggregation server."""
        self.trainer.traffic.add("train", kind, FED, self._name(role), sum(t.nbytes for t in tensors.values()))
        return tensors

    def _name(self, role: str | None) -> str:
        role = role or self.roles[0]
        return member(role, self.replica) if role in self.topology.data_roles else role
