"""FedGen: a server trains a generator of embeddings by class on its clients' heads, and clients learn from its output.

Paper: Zhu, Hong, Zhou, "Data-free knowledge distillation for heterogeneous federated learning", ICML 2021, algorithm 1.

Each round clients send their weights, which are averaged by examples, and the number of rows they have of each class.
The server trains its generator, which maps noise and a label to an embedding, on the cross-entropy of the label under
every client's head, weighted by the client's share of the class's rows, plus `diversity` times a loss that falls when
different noise gives different embeddings (both as in the authors' code; the paper writes the loss of the mean scores,
without diversity). Clients receive average and generator; in every step their heads also learn, with `weight`, from
generated rows, whose labels are drawn uniformly from the classes that at least one client holds; a batch norm in a head
includes these rows. The second term of the authors' code, `distillation` times the divergence KL(q || p) of the
prediction p of a true row from the prediction q of a generated row of its label, reaches the extractor too; it is left
out by default. Their code lets both weights fall from round to round, which is not implemented here.

`share`: "model" averages all segments of the clients, which so start each round alike; "head" averages only those
behind the embedding, so that clients may have extractors of different architectures. For whole models, cut where the
embedding is.

On a split replica the embedding is what arrives where the loss is computed. In a U-shape that is the client, whose last
segments are the head. Where it is a server, the server holds the head already: it trains the generator itself, on its
head or on its copies for the clients, and counts the rows of each class by the labels of the steps, so that neither
counts nor generator cross. Nothing of the clients belongs to the head then: with `share` "head" the method sends
nothing, and client segments go as the schedule says.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from splitfed.core.errors import InvalidInput, require_count, require_name, require_number
from splitfed.core.messages import Stamp
from splitfed.core.private_values import LABELS
from splitfed.core.random import derive, generator, stream
from splitfed.core.topology import Segment, Topology
from splitfed.federated.averaging import Averaging, take_step
from splitfed.federated.base import Method, MethodContext, MethodTraits, ObjectivePlacement, State
from splitfed.federated.generator import ClientHead, Generator, diversity, ensemble_loss
from splitfed.federated.learner import Learner
from splitfed.federated.objectives import NoObjective, objective_of, weights_with_gradients
from splitfed.federated.topology_values import (
    clients_hold_all,
    count_classes,
    embedding,
    makers,
    making_segment,
    only_client,
    only_head,
)

SHARES = ("model", "head")


@dataclass(frozen=True, kw_only=True)
class FedGen(Averaging):
    """The server trains a generator of features on the clients' heads, and clients learn from generated features.

    `weight` >= 0 of the loss on `rows` generated rows a step, `distillation` >= 0 of the divergence of true rows from
    generated ones; `embedding`: the value to generate (default: the last that clients compute by themselves, on split
    replicas the one that arrives where the loss is computed).

    At the server: `noise` and `hidden`, the widths of the generator; `steps` of Adam at `rate` a round on `batch` rows;
    `diversity` >= 0, the weight of the diversity loss.
    """

    who: ClassVar[str] = "fedgen"
    what: ClassVar[str] = "shared part"
    refuses: ClassVar[Mapping[str, str]] = {
        "secure": "its server trains on every client's own head, which a secure sum hides",
    }

    share: str = field(default="model", metadata=require_name("fedgen share", SHARES))
    weight: float = field(default=1.0, metadata=require_number("fedgen weight", low=0.0))
    distillation: float = field(default=0.0, metadata=require_number("fedgen distillation", low=0.0))
    rows: int = field(default=32, metadata=require_count("fedgen rows", low=1))
    embedding: str | None = None
    noise: int = field(default=32, metadata=require_count("fedgen noise", low=1))
    hidden: int = field(default=256, metadata=require_count("fedgen hidden", low=1))
    steps: int = field(default=50, metadata=require_count("fedgen steps", low=0))
    batch: int = field(default=32, metadata=require_count("fedgen batch", low=2))
    rate: float = field(default=3e-4, metadata=require_number("fedgen rate", low=0.0, open_low=True))
    diversity: float = field(default=1.0, metadata=require_number("fedgen diversity", low=0.0))

    def traits(self, topology: Topology) -> MethodTraits:
        """Return the traits of averaging; clients that hold a head also send the number of their rows of each class."""
        off = "fedgen with weight=0 does not use the generator" if self._off else None
        base = super().traits(topology) if self.shared(topology) else Method.traits(self, topology)
        told = {**base.message_values, "label counts": LABELS} if self._at_clients(topology) else base.message_values
        reads = not self._off and (self.distillation > 0 or not self._at_clients(topology))
        return replace(base, turned_off=off, post_processing=self._off, message_values=told, reads_labels=reads)

    def check(self, topology: Topology, clients: int) -> None:
        """Raise `InvalidInput` for a task without classes, and for heads that are no one party's or read more."""
        only_client("fedgen", topology)
        role = only_head("fedgen", topology).role
        head, value = self._head(topology)
        known = {value, *(v for s in head for v in s.outputs)}
        for segment in head:
            if segment.role != role:
                raise InvalidInput(
                    f"fedgen generates {value!r} for a head that one party holds; segment {segment.name!r} behind it "
                    f"is at role {segment.role!r} and the loss at {role!r}: name a value behind it by embedding="
                )
            for read in segment.inputs:
                if read not in known:
                    raise InvalidInput(
                        f"fedgen generates {value!r}; segment {segment.name!r} reads {read!r} as well: cut elsewhere"
                    )
        if self.shared(topology):
            super().check(topology, clients)

    def check_run(self, context: MethodContext) -> None:
        """Raise `InvalidInput` as averaging does, where anything of the clients is averaged."""
        if any(map(self.shared, context.topologies)):
            super().check_run(context)

    def shared(self, topology: Topology) -> tuple[str, ...]:
        """Return the segments that are averaged: of clients alone."""
        own = super().shared(topology)
        return own if self.share == "model" else tuple(s.name for s in self._head(topology)[0] if s.name in own)

    def objective(self, placement: ObjectivePlacement) -> GeneratorObjective | None:
        """Return the losses on generated rows of the party that computes the loss; None with both weights 0."""
        if self._off or placement.role != placement.topology.heads[0].role:
            return None
        head, value = self._head(placement.topology)
        classes, shape = count_classes(placement.topology.heads[0]), placement.facts.shapes[value]
        # Replaced by the first one that is sent; until then it is part of the run's state.
        with stream(derive(placement.seed, "generator")):
            generator = Generator(self.noise, classes, self.hidden, shape).to(placement.device)
        draws, out = any(s.name in placement.facts.stochastic for s in head), placement.topology.heads[0].value
        scores = ClientHead(head, placement.modules, value, out) if self.distillation else None
        return GeneratorObjective(
            self.weight, self.rows, head, value, out, generator, placement.seed, draws, self.distillation, scores
        )

    def start(self, clients: int) -> State:
        """Return the state before the server has a generator."""
        labels = torch.zeros(0, dtype=torch.bool)
        return {**super().start(clients), "generator": {}, "labels": labels, "adam": {}, "shape": []}

    def query(self, learners: Sequence[Learner], number: int, state: State) -> None:
        """Send every client what is shared; a server that holds the head takes the generator that it has trained."""
        if self.shared(learners[0].topology):
            super().query(learners, number, state)
        if self._at_clients(learners[0].topology):
            return
        for objective in _objectives(learners):
            objective.counts.zero_()
            if state["generator"]:
                objective.load_generator({**state["generator"], "labels": state["labels"]})

    def begin(self, learner: Learner, arrived: Mapping[str, Tensor], number: int, state: State) -> None:
        """Send a client that holds its head the generator and the classes that it was trained on, with the weights."""
        super().begin(learner, arrived, number, state)
        if state["generator"] and self._at_clients(learner.topology):
            sent = learner.receive("generator", {**state["generator"], "labels": state["labels"]}, number)
            if (objective := objective_of(learner, GeneratorObjective)) is not None:
                objective.load_generator(sent)

    def aggregate(self, learners: Sequence[Learner], shares: Mapping[int, float], number: int, state: State) -> None:
        """Average the clients' weights, and train the generator on their heads."""
        at_clients = self._at_clients(learners[0].topology)
        if self.shared(learners[0].topology) and (self._off or not at_clients):
            super().aggregate(learners, shares, number, state)
        if not at_clients:
            self._train_at_server(learners, number, state)
        if self._off or not at_clients:
            return
        gathering, heads, counts = self.settings.start(), [], []
        for learner, part in self.parts(learners, shares):
            arrived = learner.send("weights", self.shared_tensors(learner), number)
            gathering.add(arrived, part)
            head = learner.topology.heads[0]
            held = torch.bincount(learner.labels(head.value).view(-1).long(), minlength=count_classes(head))
            counts.append(learner.send("label counts", {"rows": held}, number)["rows"])
            if objective_of(learner, GeneratorObjective) is not None:  # in a plan nothing is computed
                heads.append(self._receive_head(learner.topology, arrived))
        state["weights"] = take_step(self, learners[0], gathering.value(), state)
        made = self._generator(learners[0], state)
        if heads:
            self._train(made, heads, torch.stack(counts), state, generator(learners[0].seed, "fedgen", number))
        self._keep(made, counts, state)

    def _train_at_server(self, learners: Sequence[Learner], number: int, state: State) -> None:
        """Train the generator where the head is, on the head or on its copies, by the rows of the round's steps."""
        role, seen = learners[0].topology.heads[0].role, {}
        for learner in learners:
            if isinstance(objective := learner.objective(role), GeneratorObjective) and id(objective) not in seen:
                held = learner.at(role).contents([s.name for s in self._head(learner.topology)[0]])
                seen[id(objective)] = self._receive_head(learner.topology, held), objective.counts.clone()
        counts = [count for _, count in seen.values()]
        if not counts or not torch.stack(counts).any():
            return
        made = self._generator(learners[0], state)
        random = generator(learners[0].seed, "fedgen", number)
        self._train(made, [head for head, _ in seen.values()], torch.stack(counts), state, random)
        self._keep(made, counts, state)

    def _keep(self, made: Generator, counts: Sequence[Tensor], state: State) -> None:
        """Keep the generator and the classes that it has been trained on."""
        state["generator"] = {name: tensor.clone() for name, tensor in made.state_dict().items()}
        known = torch.stack(list(counts)).sum(0) > 0
        state["labels"] = known | state["labels"] if len(state["labels"]) else known

    def _train(
        self, generator: Generator, heads: Sequence[ClientHead], counts: Tensor, state: State, random: torch.Generator
    ) -> None:
        """Train the generator for this round on the clients' heads, continuing from the optimizer state in `state`."""
        optimizer = torch.optim.Adam(generator.parameters(), lr=self.rate)
        if state["adam"]:
            optimizer.load_state_dict(state["adam"])
        device = next(generator.parameters()).device
        held = (counts.sum(0) > 0).nonzero().view(-1).cpu()
        for _ in range(self.steps):
            y = held[torch.randint(len(held), (self.batch,), generator=random)].to(device)
            noise = torch.randn(self.batch, self.noise, generator=random).to(device)
            z = generator(noise, y)
            loss = ensemble_loss(heads, z, y, counts) + self.diversity * diversity(noise, z)
            learning = list(generator.parameters())
            for weight, slope in zip(learning, torch.autograd.grad(loss, learning), strict=True):
                weight.grad = slope
            optimizer.step()
        state["adam"] = copy.deepcopy(optimizer.state_dict())

    def _generator(self, learner: Learner, state: State) -> Generator:
        """Return the server's generator, with the weights in `state`."""
        head, classes = learner.topology.heads[0], count_classes(learner.topology.heads[0])
        objective = learner.objective(head.role)
        if isinstance(objective, GeneratorObjective):
            state["shape"] = list(objective.generator.shape)
        else:  # in a plan, whose values are of the right shape wherever they are made
            state["shape"] = state["shape"] or list(learner.compute(self._head(learner.topology)[1]).shape[1:])
        with stream(derive(learner.seed, "fedgen")):
            generator = Generator(self.noise, classes, self.hidden, state["shape"])
        if state["generator"]:
            generator.load_state_dict(state["generator"])
        return generator.to(learner.labels(head.value).device)

    def _receive_head(self, topology: Topology, arrived: Mapping[str, Tensor]) -> ClientHead:
        """Return a client's head as the server has received it."""
        segments, value = self._head(topology)
        modules = copy.deepcopy({s.name: s.module for s in segments})
        for name, module in modules.items():
            mine = {n: arrived.get(f"{name}/{n}", tensor) for n, tensor in module.state_dict().items()}
            module.to(next(iter(arrived.values())).device).load_state_dict(mine)
            module.eval().requires_grad_(False)
        return ClientHead(segments, modules, value, topology.heads[0].value)

    def _head(self, topology: Topology) -> tuple[tuple[Segment, ...], str]:
        """Return the segments behind the embedding, and the name of the embedding."""
        value = (
            embedding("fedgen", topology, self.embedding) if clients_hold_all(topology) else self._arriving(topology)
        )
        front = makers(topology, value)
        return tuple(s for s in topology.segments if s.name not in front), value

    def _arriving(self, topology: Topology) -> str:
        """Return the value to generate on a split replica: the one named, or what arrives where the loss is."""
        if self.embedding is not None:
            making_segment(topology, self.embedding)
            return self.embedding
        role = topology.heads[0].role
        arriving = [e.values for e in topology.crossings if topology.role_of(e.target) == role]
        values = list(dict.fromkeys(value for found in arriving for value in found))
        if len(values) != 1:
            raise InvalidInput(
                f"fedgen generates one value, and {', '.join(values) or 'none'} arrive at role {role!r} in topology "
                f"{topology.name!r}: name the value behind which nothing else is read by embedding="
            )
        return values[0]

    def _at_clients(self, topology: Topology) -> bool:
        """Return whether clients hold the head, and send what the generator is trained with."""
        return topology.heads[0].role in topology.data_roles

    @property
    def _off(self) -> bool:
        return self.weight == self.distillation == 0


def _objectives(learners: Sequence[Learner]) -> list[GeneratorObjective]:
    """Return the local objectives of the parties that compute these clients' losses; none in a plan."""
    found = (learner.objective(learner.topology.heads[0].role) for learner in learners)
    return [objective for objective in found if isinstance(objective, GeneratorObjective)]


class GeneratorObjective(NoObjective):
    """Local objective where the head is: adds the gradients of the head's loss on generated rows, and the divergence.

    `counts`: how many rows of each class the steps of this round had. `scores`: the head that trains, if the divergence
    of true rows from generated ones counts.
    """

    def __init__(
        self,
        weight: float,
        rows: int,
        head: Sequence[Segment],
        value: str,
        out: str,
        generator: Generator,
        seed: int,
        stochastic: bool,
        distillation: float = 0.0,
        scores: ClientHead | None = None,
    ) -> None:
        self.weight, self.rows, self.value, self.out = weight, rows, value, out
        # Without the modules of the topology, which other parties have copies of as well.
        self.head = tuple(replace(segment, module=nn.Identity(), original=None) for segment in head)
        self.generator, self.seed, self.stochastic = generator.eval().requires_grad_(False), seed, stochastic
        self.distillation, self.scores = distillation, scores
        self.labels = torch.zeros(0, dtype=torch.int64)
        self.counts = torch.zeros(generator.classes, dtype=torch.int64)
        self.steps = 0

    def load_generator(self, sent: Mapping[str, Tensor]) -> None:
        """Load the generator and the classes that it was trained on from a message."""
        self.labels = sent["labels"].nonzero().view(-1).cpu()
        self.generator.load_state_dict({name: tensor for name, tensor in sent.items() if name != "labels"})

    def terms(self, made: Mapping[str, Tensor], labels: Mapping[str, Tensor], stamp: Stamp) -> Mapping[str, Tensor]:
        """Count the labels of the step, and return its rows' divergence from generated rows of the same labels."""
        if self.out not in labels:
            return {}
        y = labels[self.out].view(-1).long()
        self.counts += torch.bincount(y.cpu(), minlength=len(self.counts))
        if self.scores is None or not len(self.labels):
            return {}
        words = stamp.epoch, stamp.step, stamp.replica
        random = generator(self.seed, "same label", *words)
        found = functional.log_softmax(made[self.out], 1)
        z = self.generator(torch.randn(len(y), self.generator.noise, generator=random).to(found), y.to(found.device))
        drawing = (
            stream(derive(self.seed, "teacher dropout", *words), found.device) if self.stochastic else nullcontext()
        )
        with torch.no_grad(), drawing:
            goal = functional.softmax(self.scores(z), 1)
        maker = next(s.name for s in self.head if self.out in s.outputs)
        return {maker: self.distillation * functional.kl_div(found, goal, reduction="batchmean")}

    def correct(self, modules: Mapping[str, nn.Module]) -> None:
        """Add the gradient of the cross-entropy on generated rows, times its weight."""
        if not len(self.labels) or self.weight == 0:
            return
        self.steps += 1
        random = generator(self.seed, "practice", self.steps)
        device = next(self.generator.parameters()).device
        y = self.labels[torch.randint(len(self.labels), (self.rows,), generator=random)].to(device)
        z = self.generator(torch.randn(self.rows, self.generator.noise, generator=random).to(device), y)
        learning = list(weights_with_gradients(modules, [s.name for s in self.head]))
        with stream(derive(self.seed, "dropout", self.steps), device) if self.stochastic else nullcontext():
            scores = ClientHead(self.head, modules, self.value, self.out)(z)
        loss = self.weight * functional.cross_entropy(scores, y)
        slopes = torch.autograd.grad(loss, [weight for _, weight, _ in learning])
        for (_, _, gradient), slope in zip(learning, slopes, strict=True):
            gradient.add_(slope)

    def state(self) -> dict[str, Any]:
        """Return the generator, its classes, and the number of steps taken."""
        made = {name: tensor.clone() for name, tensor in self.generator.state_dict().items()}
        return {"generator": made, "labels": self.labels, "steps": self.steps}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore `state`."""
        self.generator.load_state_dict(state["generator"])
        self.labels, self.steps = state["labels"], int(state["steps"])
