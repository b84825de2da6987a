"""The contract of a training attack: it learns in every training step, and may replace the gradient its party sends.

A training attack is a frozen value, given to one party of a run. `enter` creates its state with its networks, which
sees every message that the party receives in training, reads the party's own segments, and knows the auxiliary data.
Run like any other attack after training, it predicts by that state.
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
__all__ += ["GRANTED_IN_TRAINING"]

GRANTED_IN_TRAINING = (Needs.AUXILIARY, Needs.AUXILIARY_LABELS, Needs.ARCHITECTURE, Needs.HEAD)
"""Needs that may be granted during training; all others are granted after training only."""


@dataclass(frozen=True)
class TrainingAttack(Attack):
    """Base of training attacks: `learns_from` states what they must know in training; a subclass writes `enter`.

    Auxiliary rows, their labels, and the architectures of the client and of its head can be known in training
    (`GRANTED_IN_TRAINING`); received messages, and the party's own segments, need no grant. `active`: whether the
    attack replaces what the party sends, so that others are not trained on the task; its state declares that too.
    """

    active: ClassVar[bool] = False
    trains_decoder: ClassVar[bool] = True
    requires: ClassVar[frozenset[Needs]] = frozenset({Needs.RELEASES, Needs.TRAINING_ATTACK})
    learns_from: ClassVar[frozenset[Needs]] = frozenset({Needs.AUXILIARY})

    @property
    def adapts_to(self) -> frozenset[DefenseEffect] | None:
        """Effects of the sender's defenses that the attack's substitute client imitates, if it trains one."""
        return imitated_effects(self.layout) if isinstance(self, HasLayout) else None

    def needs(self, labels_arrive: bool) -> frozenset[Needs]:
        """Return what the attack must know if labels arrive at its party, or not: `learns_from`, or more.

        More are the architectures of the client, and of its head, if a network of the attack's has their layout.
        """
        further = layout_needs(self.layout, labels_arrive) if isinstance(self, HasLayout) else frozenset()
        return self.learns_from | further

    def enter(self, site: AttackSite) -> TrainingAttackState:
        """Return the state at `site` before the first step.

        Raises `InvalidInput` for a site where the attack cannot work.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define enter(site)")

    def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Tensor:
        """Return the prediction by this attack's state in the run for the releases in the view.

        Raises `InvalidInput` if another attack was at the party.
        """
        state = unwrap(knowledge.training_attack)
        if type(state.plan) is not type(self):
            raise InvalidInput(
                f"{type(self).__name__} works during training; here {type(state.plan).__name__} was at "
                f"{view.party!r}: train with Adversaries({{{view.party!r}: {type(self).__name__}()}})"
            )
        return state.predict(view, self.target)


class Seen(NamedTuple):
    """What arrived in one training step: `z` (rows, *shape), and the labels `y` (rows,) if they arrive.

    `epoch`: of the step, counted from 0 over the run.
    """

    z: Tensor
    y: Tensor | None
    epoch: int = 0


class RoundMeans:
    """Running means of an attack's metrics since the last `take`."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, int]] = {}

    def add(self, **values: Tensor) -> None:
        """Add one value of each metric."""
        for name, value in values.items():
            total, count = self._sums.get(name, (0.0, 0))
            self._sums[name] = total + float(value.detach()), count + 1

    def take(self) -> dict[str, float]:
        """Return the means and reset them."""
        found = {name: total / count for name, (total, count) in self._sums.items()}
        self._sums.clear()
        return found


@dataclass
class TrainingAttackState:
    """State of a training attack at `site`: its networks, its counters and the means of its metrics.

    A subclass builds its networks in `build` and writes `learn` and `predict`; if it is active, the result of `learn`
    is sent. Further `numbers` of the state are kept by name. The engine calls `receive`, `send` and `step_ended` during
    a step, `metrics` after every round, and saves `state`. After training a copy predicts, and a resumed run continues
    with one: built by `build` and `load_state`, it has what is in `nets` (weights and buffers) and in `numbers`, and
    nothing else that `learn` has changed. A tensor of the state must be a buffer of a module; add a module without
    weights by `nets[name] = module`, others by `nets.add`, which creates an optimizer.
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
        """Build the networks, from the attack's own seed."""
        self.nets = AttackNetworks(self.site.device)
        with stream(derive(self.site.seed, "start"), self.site.device):
            self.build()

    def build(self) -> None:
        """Build the networks and their optimizers, with `nets.add`."""
        raise NotImplementedError(f"{type(self).__name__} does not define build()")

    def learn(self, seen: Seen, modules: Mapping[str, nn.Module], random: torch.Generator) -> Tensor | None:
        """Learn from one training step; return the gradient to send in place of the honest one, if any."""
        raise NotImplementedError(f"{type(self).__name__} does not define learn(seen, modules, random)")

    def choose(self, gradient: Tensor, honest: Tensor) -> Tensor:
        """Return the gradient to send, the attack's `gradient` or the `honest` one, both (rows, *shape)."""
        return gradient

    def predict(self, view: View, target: Target) -> Tensor:
        """Return a prediction of `target` from the releases in `view`."""
        raise NotImplementedError(f"{type(self).__name__} does not define predict(view, target)")

    def copy(self) -> TrainingAttackState:
        """Return an equal state, with networks and a site of its own."""
        found = self.plan.enter(self.site.copy())
        found.load_state(copy.deepcopy(self.state()))
        return found

    def receive(self, message: Message) -> None:
        """Record a message that arrived at the party in training; ignore all others."""
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
        """Return the message to send instead of `message`; a passive attack returns it unchanged."""
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
        """Learn from the messages of a step, after the party's honest step."""
        for replica in list(self._arrived):
            self._learn(replica, self._arrived.pop(replica))

    def _learn(self, replica: int, seen: Seen) -> Tensor | None:
        number, self.steps = self.steps, self.steps + 1
        with torch.enable_grad(), stream(derive(self.site.seed, "step", number), self.site.device):
            return self.learn(seen, self.site.modules(replica), generator(self.site.seed, "draws", number))

    def metrics(self) -> dict[str, float]:
        """Return the means since the last call and reset them."""
        return self.means.take()

    def state(self) -> dict[str, Any]:
        """Return networks, optimizers and counters, which a resumed run needs."""
        return {"steps": self.steps, **self.nets.state_dict(), "memory": dict(self.numbers)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state from `state`."""
        self.steps = int(state["steps"])
        self.nets.load_state_dict(state)
        self.numbers = dict(state["memory"])
