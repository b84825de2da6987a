"""FedGen: a server trains a generator of embeddings by class on its clients' heads, and clients learn from its output.

Paper: Zhu, Hong, Zhou, "Data-free knowledge distillation for heterogeneous federated learning", ICML 2021, algorithm 1.

Each round clients send their weights, which are averaged by examples, and the number of rows they have of each class.
The server trains its generator, which maps noise and a label to an embedding, on the cross-entropy of the label under
every client's head, weighted by the client's share of the class's rows, plus `diversity` times a loss that falls when
different noise gives different embeddings (both as in the authors' code; the paper writes the loss of the mean scores,
without diversity). Clients receive average and generator; in every step their heads also learn, with `weight`, from
generated rows, whose labels are drawn uniformly from the classes that at least one client holds; a batch norm in a head
includes these rows. The authors' code adds a second term, between predictions of true and of generated rows of the same
label, and lets both weights fall; neither is implemented here.

`share`: "model" averages all segments of the clients, which so start each round alike; "head" averages only those
behind the embedding, so that clients may have extractors of different architectures. For whole models, cut where the
embedding is.
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
from splitfed.core.private_values import LABELS
from splitfed.core.random import derive, generator, stream
from splitfed.core.topology import Segment, Topology
from splitfed.federated.averaging import Averaging, check_whole, take_step
from splitfed.federated.base import MethodTraits, ObjectivePlacement, State
from splitfed.federated.generator import ClientHead, Generator, diversity, ensemble_loss
from splitfed.federated.learner import Learner
from splitfed.federated.objectives import NoObjective, objective_of, weights_with_gradients
from splitfed.federated.topology_values import count_classes, embedding, makers, only_head

SHARES = ("model", "head")


@dataclass(frozen=True, kw_only=True)
class FedGen(Averaging):
    """The server trains a generator of features on the clients' heads, and clients learn from generated features.

    `weight` >= 0 of the loss on `rows` generated rows a step; `embedding`: the value to generate (see
    `topology_values`).

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
    rows: int = field(default=32, metadata=require_count("fedgen rows", low=1))
    embedding: str | None = None
    noise: int = field(default=32, metadata=require_count("fedgen noise", low=1))
    hidden: int = field(default=256, metadata=require_count("fedgen hidden", low=1))
    steps: int = field(default=50, metadata=require_count("fedgen steps", low=0))
    batch: int = field(default=32, metadata=require_count("fedgen batch", low=2))
    rate: float = field(default=3e-4, metadata=require_number("fedgen rate", low=0.0, open_low=True))
    diversity: float = field(default=1.0, metadata=require_number("fedgen diversity", low=0.0))

    def traits(self, topology: Topology) -> MethodTraits:
        """Return the traits of averaging; with weight > 0 clients also send the number of their rows of each class."""
        off = "fedgen with weight=0 does not use the generator" if self.weight == 0 else None
        base = super().traits(topology)
        told = {**base.message_values, "label counts": LABELS}
        return replace(base, turned_off=off, post_processing=self.weight == 0, message_values=told)

    def check(self, topology: Topology, clients: int) -> None:
        """Raise `InvalidInput` for split models, a task without classes, or heads that read more than the embedding."""
        check_whole("fedgen", topology)
        only_head("fedgen", topology)
        head, value = self._head(topology)
        known = {value, *(v for s in head for v in s.outputs)}
        for segment in head:
            for read in segment.inputs:
                if read not in known:
                    raise InvalidInput(
                        f"fedgen generates {value!r}; segment {segment.name!r} reads {read!r} as well: cut elsewhere"
                    )
        super().check(topology, clients)

    def shared(self, topology: Topology) -> tuple[str, ...]:
        """Return the segments that are averaged."""
        return super().shared(topology) if self.share == "model" else tuple(s.name for s in self._head(topology)[0])

    def objective(self, placement: ObjectivePlacement) -> GeneratorObjective | None:
        """Return the loss of a client's head on generated rows; None with weight 0."""
        if self.weight == 0:
            return None
        head, value = self._head(placement.topology)
        classes, shape = count_classes(placement.topology.heads[0]), placement.facts.shapes[value]
        # Replaced by the first one that is sent; until then it is part of the run's state.
        with stream(derive(placement.seed, "generator")):
            generator = Generator(self.noise, classes, self.hidden, shape).to(placement.device)
        draws = any(s.name in placement.facts.stochastic for s in head)
        return GeneratorObjective(
            self.weight, self.rows, head, value, placement.topology.heads[0].value, generator, placement.seed, draws
        )

    def start(self, clients: int) -> State:
        """Return the state before the server has a generator."""
        labels = torch.zeros(0, dtype=torch.bool)
        return {**super().start(clients), "generator": {}, "labels": labels, "adam": {}, "shape": []}

    def begin(self, learner: Learner, arrived: Mapping[str, Tensor], number: int, state: State) -> None:
        """Send the client the generator and the classes that it was trained on, in addition to the weights."""
        super().begin(learner, arrived, number, state)
        if state["generator"]:
            sent = learner.receive("generator", {**state["generator"], "labels": state["labels"]}, number)
            if (objective := objective_of(learner, GeneratorObjective)) is not None:
                objective.load_generator(sent)

    def aggregate(self, learners: Sequence[Learner], shares: Mapping[int, float], number: int, state: State) -> None:
        """Average the clients' weights, and train the generator on their uploaded heads."""
        if self.weight == 0:
            super().aggregate(learners, shares, number, state)
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
        state["generator"] = {name: tensor.clone() for name, tensor in made.state_dict().items()}
        known = torch.stack(counts).sum(0) > 0
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
        _, value = self._head(learner.topology)
        classes = count_classes(learner.topology.heads[0])
        state["shape"] = state["shape"] or list(learner.compute(value).shape[1:])
        with stream(derive(learner.seed, "fedgen")):
            generator = Generator(self.noise, classes, self.hidden, state["shape"])
        if state["generator"]:
            generator.load_state_dict(state["generator"])
        return generator.to(learner.labels(learner.topology.heads[0].value).device)

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
        """Return the segments behind the embedding, and the name of their output."""
        value = embedding("fedgen", topology, self.embedding)
        front = makers(topology, value)
        return tuple(s for s in topology.segments if s.name not in front), value


class GeneratorObjective(NoObjective):
    """Local objective of a client: adds the gradients of its head's loss on generated rows."""

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
    ) -> None:
        self.weight, self.rows, self.head, self.value, self.out = weight, rows, tuple(head), value, out
        self.generator, self.seed, self.stochastic = generator.eval().requires_grad_(False), seed, stochastic
        self.labels = torch.zeros(0, dtype=torch.int64)
        self.steps = 0

    def load_generator(self, sent: Mapping[str, Tensor]) -> None:
        """Load the generator and the classes that it was trained on from a message."""
        self.labels = sent["labels"].nonzero().view(-1).cpu()
        self.generator.load_state_dict({name: tensor for name, tensor in sent.items() if name != "labels"})

    def correct(self, modules: Mapping[str, nn.Module]) -> None:
        """Add the gradient of the cross-entropy on generated rows, times its weight."""
        if not len(self.labels):
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
