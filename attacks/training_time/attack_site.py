"""Where a training attack is installed: the party, what arrives there, its segments, and what the adversary knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from splitfed.attacks.knowledge import Knowledge, unwrap
from splitfed.attacks.local_models import DefenseStates
from splitfed.core.messages import View
from splitfed.core.payload import copy_modules
from splitfed.core.topology import Segment


class Sender(Protocol):
    """The defenses of a sender, imitated with states and random numbers of the attack's own.

    Noise that the sender's own layers have learnt is not drawn. `omitted`: the defenses whose term in the sender's loss
    cannot be told without its segments, by name.
    """

    @property
    def omitted(self) -> tuple[str, ...]:
        """Which penalties are left out of `in_training`."""

    def release(self, z: Tensor, number: int) -> Tensor:
        """Return z (n, ...) after the imitated defenses, with the random draws of `number`: same shape."""

    def expected(self, z: Tensor) -> Tensor:
        """Return the same with every defense at its mean, differentiable in z."""

    def in_training(self, x: Tensor, z: Tensor, number: int, epoch: int) -> tuple[Tensor, Tensor, float]:
        """Return the release of z, the penalty that defenses add to the loss of raw rows x, and the task loss's weight.

        The penalty is a scalar whose gradient is right; its value is not where a defense gives its penalty by the
        gradient alone. `epoch`: of the run.
        """

    @property
    def defenses(self) -> DefenseStates:
        """What the imitated defenses keep and learn."""

    def copy(self) -> Sender:
        """Return the same with states of its own."""


@dataclass(frozen=True)
class AttackSite:
    """Where a training attack is installed, and what it knows there.

    `value`, of `shape` a row, arrives at `party` on `edge`, and a gradient `returns` on it or not. `labels`: the head
    whose labels arrive too, None where they do not. `segments`: the party's own, which make `out` (of `out_shape`) of
    what arrived. `sender`: the sender's defenses, as the attack imitates them. `modules(replica)`: copies of
    the party's segments as they are now. `seed`: of all that the attack draws.

    The attack may write into all of it but the site itself: knowledge, segments and modules are copies.
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

    @property
    def device(self) -> torch.device:
        """Where the party computes."""
        return self.knowledge.device

    def released(self, view: View) -> Tensor:
        """Return what arrived on the site's edge in `view`: (victims, *shape)."""
        return view.select(kind="activation", edge=self.edge).tensors(self.device)[self.value]

    def draw_rows(self, count: int, random: torch.Generator) -> Tensor:
        """Draw `count` auxiliary row numbers, without repetition where there are enough: (count,)."""
        known = len(unwrap(self.knowledge.auxiliary))
        if count > known:
            return torch.randint(known, (count,), generator=random)
        return torch.randperm(known, generator=random)[:count]

    def copy(self) -> AttackSite:
        """Return the site with knowledge and segments of its own."""
        modules = copy_modules({s.name: s.module for s in self.segments})
        segments = tuple(replace(s, module=modules[s.name]) for s in self.segments)
        return replace(self, segments=segments, knowledge=self.knowledge.copy(), sender=self.sender.copy())
