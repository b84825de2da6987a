"""The contract of an attack that lives inside training: it learns from every step, and may replace what it sends.

An intruder is a frozen value, given to one party of a run. `enter` makes the insider, which has networks and a state:
it sees every message that party receives in training, reads the party's own segments, and knows the auxiliary data.
Asked like any other attack after training, the intruder answers with what its insider has learnt.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from splitfed.attacks.base import Attack, DefenseStates, Knowledge, Needs, Progress, Target
from splitfed.core.errors import InvalidInput
from splitfed.core.messages import Message, View
from splitfed.core.payload import copy_modules
from splitfed.core.random import derive, generator, stream
from splitfed.core.topology import Segment


class Sender(Protocol):
    """The defenses of a sender, imitated with states and random numbers of the intruder's own.

    Noise that the sender's own layers have learnt is not drawn. `omitted`: the defenses whose term in the sender's loss
    cannot be told without its segments, by name.
    """

    @property
    def omitted(self) -> tuple[str, ...]:
        """Which penalties are left out of `in_training`."""
        ...

    def release(self, z: Tensor, number: int) -> Tensor:
        """Return what the defenses would make of z (n, ...) at draw `number`."""
        ...

    def expected(self, z: Tensor) -> Tensor:
        """Return the same with every defense at its mean, differentiable in z."""
        ...

    def in_training(self, x: Tensor, z: Tensor, number: int, epoch: int) -> tuple[Tensor, Tensor, float]:
        """Return `release`, the term of the defenses in the loss for raw rows x and z, and the weight of the task.

        The term is a scalar whose gradient is right; its value is not where a defense gives its penalty by the gradient
        alone. `epoch`: of the run.
        """
        ...

    @property
    def defenses(self) -> DefenseStates:
        """What the imitated defenses keep and learn."""
        ...

    def copy(self) -> Sender:
        """Return the same with states of its own."""
        ...


@dataclass(frozen=True)
class AttackSite:
    """Where an intruder sits, and what it knows there.

    `value`, of `shape` a row, arrives at `party` on `edge`, and a gradient `returns` on it or not. `labels`: the head
    whose labels arrive too, None where they do not. `segments`: the party's own, which make `out` (of `out_shape`) of
    what arrived. `sender`: the sender's defenses, as the intruder imitates them. `modules(lane)`: copies of the party's
    segments as they are now. `seed`: of all that the intruder draws.

    An insider may write into all of it but the post itself: knowledge, segments and modules are copies.
    """

    party: str
    edge: str
    value: str
    shape: tuple[int, ...]
    returns: bool
    labels: str | None
    segments: tuple[Segment, ...]
    out: str
    out_shape: tuple[int, ...]
    knowledge: Knowledge
    sender: Sender
    modules: Callable[[int], Mapping[str, nn.Module]]
    seed: int

    @property
    def makes_scores(self) -> bool:
        """Whether the party's own segments end in the output whose labels arrive; a relay's do not."""
        return self.out == self.labels

    def copy(self) -> AttackSite:
        """Return the post with knowledge and segments of its own."""
        modules = copy_modules({s.name: s.module for s in self.segments})
        segments = tuple(replace(s, module=modules[s.name]) for s in self.segments)
        return replace(self, segments=segments, knowledge=self.knowledge.copy(), sender=self.sender.copy())


@dataclass(frozen=True)
class TrainingAttack(Attack):
    """Base of attacks inside training: `learns_from` is what it must know there; a subclass writes `enter`.

    `active`: whether its insider replaces what the party sends, so that others learn something else than the task.
    """

    active: ClassVar[bool] = False
    requires: ClassVar[frozenset[Needs]] = frozenset({Needs.RELEASES, Needs.INSIDER})
    learns_from: ClassVar[frozenset[Needs]] = frozenset({Needs.AUXILIARY})

    def needs(self, told: bool) -> frozenset[Needs]:
        """Return what this one must know, where the labels arrive (`told`) or do not: `learns_from`, or more."""
        return self.learns_from

    def enter(self, post: AttackSite) -> TrainingAttackState:
        """Return the insider at `post`, or refuse a post where the attack cannot work."""
        raise NotImplementedError

    def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Tensor:
        """Return what this intruder's insider makes of the releases in the view."""
        return guess_of(self, view, knowledge)


def guess_of(intruder: Attack, view: View, knowledge: Knowledge) -> Tensor:
    """Return the guess of the insider that `intruder` has in the run; refuse if another one is there."""
    insider = knowledge.insider
    assert insider is not None
    if type(insider.plan) is not type(intruder):
        raise InvalidInput(
            f"{type(intruder).__name__} works during training; here {type(insider.plan).__name__} was at "
            f"{view.party!r}: train with Adversaries({{{view.party!r}: {type(intruder).__name__}()}})"
        )
    return insider.guess(view, intruder.target)


class Seen(NamedTuple):
    """What arrived in one training step: `z` (rows, *shape), and the labels `y` (rows,) where they arrive.

    `epoch`: the step's, counted from 0 over the run.
    """

    z: Tensor
    y: Tensor | None
    epoch: int = 0


@dataclass
class _Sum:
    total: float = 0.0
    count: int = 0


@dataclass
class TrainingAttackState:
    """An intruder at work: networks by name with an optimizer each, counters, and the sums of its metrics.

    `defenses`: by name of the network that imitates their party, what imitated defenses keep and learn.

    A subclass makes its networks in `build` and writes `learn`, `guess`, and (when active) sends what `learn` returns.
    """

    plan: TrainingAttack
    post: AttackSite
    active: ClassVar[bool] = False
    nets: dict[str, nn.Module] = field(default_factory=dict, init=False)
    optimizers: dict[str, torch.optim.Optimizer] = field(default_factory=dict, init=False)
    defenses: dict[str, DefenseStates] = field(default_factory=dict, init=False)
    steps: int = field(default=0, init=False)
    _arrived: dict[int, Seen] = field(default_factory=dict, init=False, repr=False)
    _sums: dict[str, _Sum] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        """Make the networks, from the intruder's own seed."""
        with stream(derive(self.post.seed, "start"), self.device):
            self.build()

    @property
    def device(self) -> torch.device:
        """Where the party computes."""
        return self.post.knowledge.device

    def build(self) -> None:
        """Make the networks and their optimizers, with `add`."""
        raise NotImplementedError

    def learn(self, seen: Seen, modules: Mapping[str, nn.Module], random: torch.Generator) -> Tensor | None:
        """Learn from one training step; return the gradient to send in place of the honest one, if any."""
        raise NotImplementedError

    def guess(self, view: View, target: Target) -> Tensor:
        """Return what was released in `view` turned into a guess of `target`."""
        raise NotImplementedError

    def add(self, name: str, net: nn.Module, lr: float, momentum: float = 0.9) -> None:
        """Keep `net` under `name`, with Adam at rate `lr`; `momentum` is its first decay rate."""
        self.nets[name] = net.to(self.device)
        self.optimizers[name] = torch.optim.Adam(net.parameters(), lr=lr, betas=(momentum, 0.999))

    def descend(self, losses: Mapping[str, Tensor]) -> None:
        """Take one step of every net named, down its own loss; all slopes are taken before any net moves."""
        slopes = {}
        for name, loss in losses.items():
            weights = list(self.nets[name].parameters())
            # A layout that is not the attacker's own may have weights that nothing flows through.
            slopes[name] = torch.autograd.grad(loss, weights, retain_graph=True, allow_unused=True)
        for name, found in slopes.items():
            for weight, slope in zip(self.nets[name].parameters(), found, strict=True):
                weight.grad = slope
            self.optimizers[name].step()
            self.optimizers[name].zero_grad(set_to_none=True)

    def note(self, **values: Tensor) -> None:
        """Add `values` to this round's metrics."""
        for name, value in values.items():
            kept = self._sums.setdefault(name, _Sum())
            kept.total += float(value.detach())
            kept.count += 1

    def receive(self, message: Message) -> None:
        """Look at what has arrived at the party; only what arrives in training counts."""
        if message.stamp.phase != "train":
            return
        lane = message.stamp.lane
        if message.kind == "activation" and message.edge == self.post.edge:
            self._arrived[lane] = Seen(message.tensors[self.post.value].to(self.device), None, message.stamp.epoch)
        elif message.kind == "label" and lane in self._arrived:
            labels = message.tensors.get(self.post.labels or "")
            if labels is not None:
                self._arrived[lane] = self._arrived[lane]._replace(y=labels.to(self.device))

    def send(self, message: Message) -> Message:
        """Return what the party sends in place of `message`; a passive insider changes nothing."""
        seen = self._arrived.get(message.stamp.lane)
        due = message.stamp.phase == "train" and message.kind == "gradient" and message.edge == self.post.edge
        if not (self.active and due) or seen is None:
            return message
        del self._arrived[message.stamp.lane]
        honest = message.tensors[self.post.value]
        gradient = self._learn(message.stamp.lane, seen)
        assert gradient is not None
        sent = self.choose(gradient.to(honest), honest)
        return message._replace(tensors={**message.tensors, self.post.value: sent})

    def choose(self, gradient: Tensor, honest: Tensor) -> Tensor:
        """Return which gradient goes out, both (rows, *shape)."""
        return gradient

    def step_ended(self) -> None:
        """Learn, after the party's honest step, from what arrived in it."""
        for lane in list(self._arrived):
            self._learn(lane, self._arrived.pop(lane))

    def _learn(self, lane: int, seen: Seen) -> Tensor | None:
        number, self.steps = self.steps, self.steps + 1
        with torch.enable_grad(), stream(derive(self.post.seed, "step", number), self.device):
            return self.learn(seen, self.post.modules(lane), generator(self.post.seed, "draws", number))

    def metrics(self) -> dict[str, float]:
        """Return the means since the last call, and forget them."""
        found = {name: kept.total / kept.count for name, kept in self._sums.items()}
        self._sums.clear()
        return found

    def state(self) -> dict[str, Any]:
        """Return networks, optimizers and counters: all that a resumed run needs."""
        return {
            "steps": self.steps,
            "nets": {n: {k: t.detach().clone() for k, t in net.state_dict().items()} for n, net in self.nets.items()},
            "optimizers": {name: copy.deepcopy(found.state_dict()) for name, found in self.optimizers.items()},
            "defenses": {name: found.state_dict() for name, found in self.defenses.items()},
            "memory": self.memory(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go back to `state`."""
        self.steps = int(state["steps"])
        for name, net in self.nets.items():
            net.load_state_dict(state["nets"][name])
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state["optimizers"][name])
        for name, held in self.defenses.items():
            held.load_state_dict(state["defenses"][name])
        self.remember(state["memory"])

    def copy(self) -> TrainingAttackState:
        """Return an insider that has learnt the same, with networks and a post of its own."""
        found = self.plan.enter(self.post.copy())
        found.load_state(copy.deepcopy(self.state()))
        return found

    def memory(self) -> dict[str, float]:
        """Return further numbers that belong to the state."""
        return {}

    def remember(self, memory: Mapping[str, float]) -> None:
        """Take them back."""

    def released(self, view: View) -> Tensor:
        """Return what arrived on the insider's edge in `view`: (victims, *shape)."""
        found: Tensor = view.select(kind="activation", edge=self.post.edge).tensors(self.device)[self.post.value]
        return found

    def rows(self, count: int, random: torch.Generator) -> Tensor:
        """Draw `count` auxiliary row numbers, without repetition where there are enough: (count,)."""
        assert self.post.knowledge.auxiliary is not None
        known = len(self.post.knowledge.auxiliary)
        if count > known:
            return torch.randint(known, (count,), generator=random)
        return torch.randperm(known, generator=random)[:count]
