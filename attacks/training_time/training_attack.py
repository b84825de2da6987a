"""The contract of an attack that lives inside training: it learns from every step, and may replace what it sends.

A training attack is a frozen value, given to one party of a run. `enter` makes its state, which has networks: it sees
every message that party receives in training, reads the party's own segments, and knows the auxiliary data. Asked like
any other attack after training, the attack answers with what its state has learnt.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from splitfed.attacks.base import Attack, DefenseEffect, Knowledge, Needs, Progress, Target, unwrap
from splitfed.attacks.networks.substitute_client import HasLayout, imitated_effects, layout_needs
from splitfed.attacks.training_time.attack_networks import AttackNetworks
from splitfed.attacks.training_time.attack_site import AttackSite, Sender
from splitfed.core.errors import InvalidInput
from splitfed.core.messages import Message, View
from splitfed.core.random import derive, generator, stream

__all__ = ["AttackNetworks", "AttackSite", "RoundMeans", "Seen", "Sender", "TrainingAttack", "TrainingAttackState"]
__all__ += ["GRANTED_IN_TRAINING", "guess_of"]

GRANTED_IN_TRAINING = (Needs.AUXILIARY, Needs.AUXILIARY_LABELS, Needs.ARCHITECTURE, Needs.HEAD)
"""What an attack may be granted inside training; all else it can ask for after training only."""


@dataclass(frozen=True)
class TrainingAttack(Attack):
    """Base of attacks inside training: `learns_from` is what it must know there; a subclass writes `enter`.

    Inside training auxiliary rows, their labels, and the architectures of the client and of its head can be known
    (`GRANTED_IN_TRAINING`); what arrives, and the party's own segments, need no grant.
    `active`: whether it replaces what the party sends, so that others learn something else than the task; its state
    says so too.
    """

    active: ClassVar[bool] = False
    trains_decoder: ClassVar[bool] = True
    requires: ClassVar[frozenset[Needs]] = frozenset({Needs.RELEASES, Needs.TRAINING_ATTACK})
    learns_from: ClassVar[frozenset[Needs]] = frozenset({Needs.AUXILIARY})

    @property
    def adapts_to(self) -> frozenset[DefenseEffect] | None:
        """What a network in the client's place imitates of the sender's defenses, where the attack trains one."""
        return imitated_effects(self.layout) if isinstance(self, HasLayout) else None

    def needs(self, labels_arrive: bool) -> frozenset[Needs]:
        """Return what this one must know where labels arrive at its party, or do not: `learns_from`, or more.

        More are the layouts of the client, and of its head, where a network of the attack's has them.
        """
        further = layout_needs(self.layout, labels_arrive) if isinstance(self, HasLayout) else frozenset()
        return self.learns_from | further

    def enter(self, site: AttackSite) -> TrainingAttackState:
        """Return the state at `site` before the first step, or refuse a site where the attack cannot work."""
        raise NotImplementedError(f"{type(self).__name__} does not define enter(site)")

    def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Tensor:
        """Return what this attack's state in the run makes of the releases in the view."""
        return guess_of(self, view, knowledge)


def guess_of(attack: Attack, view: View, knowledge: Knowledge) -> Tensor:
    """Return the prediction of the state that `attack` has reached in the run; refuse if another one was there."""
    state = unwrap(knowledge.training_attack)
    if type(state.plan) is not type(attack):
        raise InvalidInput(
            f"{type(attack).__name__} works during training; here {type(state.plan).__name__} was at "
            f"{view.party!r}: train with Adversaries({{{view.party!r}: {type(attack).__name__}()}})"
        )
    return state.predict(view, attack.target)


class Seen(NamedTuple):
    """What arrived in one training step: `z` (rows, *shape), and the labels `y` (rows,) where they arrive.

    `epoch`: the step's, counted from 0 over the run.
    """

    z: Tensor
    y: Tensor | None
    epoch: int = 0


class RoundMeans:
    """Means of what an attack measures in its steps, since they were last asked for."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, int]] = {}

    def add(self, **values: Tensor) -> None:
        """Add one value of each metric."""
        for name, value in values.items():
            total, count = self._sums.get(name, (0.0, 0))
            self._sums[name] = total + float(value.detach()), count + 1

    def take(self) -> dict[str, float]:
        """Return the means, and forget them."""
        found = {name: total / count for name, (total, count) in self._sums.items()}
        self._sums.clear()
        return found


@dataclass
class TrainingAttackState:
    """A training attack at work at `site`: its networks, its counters and the means of its metrics.

    A subclass makes its networks in `build` and writes `learn`, `predict`, and (when active) sends what `learn`
    returns. Further `numbers` that belong to the state are kept by name. The engine calls `receive`, `send` and
    `step_ended` at the moments of a step, `metrics` after every round, and keeps `state`.

    After training a copy answers, and a resumed run goes on with one: made by `build` and `load_state`, it has what is
    in `nets` (weights and buffers) and in `numbers`, and nothing else that `learn` has changed. A tensor to be kept is
    a buffer of a module; one without weights is put there by `nets[name] = module`, as `nets.add` makes an optimizer.
    """

    plan: TrainingAttack
    site: AttackSite
    active: ClassVar[bool] = False
    nets: AttackNetworks = field(init=False)
    steps: int = field(default=0, init=False)
    numbers: dict[str, float] = field(default_factory=dict, init=False)
    means: RoundMeans = field(default_factory=RoundMeans, init=False, repr=False)
    _arrived: dict[int, Seen] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        """Make the networks, from the attack's own seed."""
        self.nets = AttackNetworks(self.site.device)
        with stream(derive(self.site.seed, "start"), self.site.device):
            self.build()

    def build(self) -> None:
        """Make the networks and their optimizers, with `nets.add`."""
        raise NotImplementedError(f"{type(self).__name__} does not define build()")

    def learn(self, seen: Seen, modules: Mapping[str, nn.Module], random: torch.Generator) -> Tensor | None:
        """Learn from one training step; return the gradient to send in place of the honest one, if any."""
        raise NotImplementedError(f"{type(self).__name__} does not define learn(seen, modules, random)")

    def choose(self, gradient: Tensor, honest: Tensor) -> Tensor:
        """Return which gradient goes out, both (rows, *shape)."""
        return gradient

    def predict(self, view: View, target: Target) -> Tensor:
        """Return what was released in `view` turned into a prediction of `target`."""
        raise NotImplementedError(f"{type(self).__name__} does not define predict(view, target)")

    def copy(self) -> TrainingAttackState:
        """Return a state that has learnt the same, with networks and a site of its own."""
        found = self.plan.enter(self.site.copy())
        found.load_state(copy.deepcopy(self.state()))
        return found

    def receive(self, message: Message) -> None:
        """Look at what has arrived at the party; only what arrives in training counts."""
        if message.stamp.phase != "train":
            return
        replica = message.stamp.replica
        if message.kind == "activation" and message.edge == self.site.edge:
            z = message.tensors[self.site.value].to(self.site.device)
            self._arrived[replica] = Seen(z, None, message.stamp.epoch)
        elif message.kind == "label" and replica in self._arrived:
            labels = message.tensors.get(self.site.labels or "")
            if labels is not None:
                self._arrived[replica] = self._arrived[replica]._replace(y=labels.to(self.site.device))

    def send(self, message: Message) -> Message:
        """Return what the party sends in place of `message`; a passive attack changes nothing."""
        seen = self._arrived.get(message.stamp.replica)
        due = message.stamp.phase == "train" and message.kind == "gradient" and message.edge == self.site.edge
        if not (self.active and due) or seen is None:
            return message
        del self._arrived[message.stamp.replica]
        honest = message.tensors[self.site.value]
        gradient = self._learn(message.stamp.replica, seen)
        if gradient is None:
            raise InvalidInput(
                f"{type(self).__name__}.learn returned None, but it is active; expected the gradient to send, "
                "(rows, *shape)"
            )
        return message._replace(tensors={**message.tensors, self.site.value: self.choose(gradient.to(honest), honest)})

    def step_ended(self) -> None:
        """Learn, after the party's honest step, from what arrived in it."""
        for replica in list(self._arrived):
            self._learn(replica, self._arrived.pop(replica))

    def _learn(self, replica: int, seen: Seen) -> Tensor | None:
        number, self.steps = self.steps, self.steps + 1
        with torch.enable_grad(), stream(derive(self.site.seed, "step", number), self.site.device):
            return self.learn(seen, self.site.modules(replica), generator(self.site.seed, "draws", number))

    def metrics(self) -> dict[str, float]:
        """Return the means since the last call, and forget them."""
        return self.means.take()

    def state(self) -> dict[str, Any]:
        """Return networks, optimizers and counters: all that a resumed run needs."""
        return {"steps": self.steps, **self.nets.state_dict(), "memory": dict(self.numbers)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go back to `state`."""
        self.steps = int(state["steps"])
        self.nets.load_state_dict(state)
        self.numbers = dict(state["memory"])
