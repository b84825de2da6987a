"""The site of a training attack: its party, what the party receives, its segments, and the adversary's knowledge."""

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
    """A sender's defenses, imitated with states and random numbers of the attack's own.

    Noise that the sender's own layers have learnt is not drawn. `omitted`: names of the defenses whose penalty cannot
    be computed without the sender's segments.
    """

    @property
    def omitted(self) -> tuple[str, ...]:
        """Names of the defenses whose penalties `in_training` leaves out."""

    def release(self, z: Tensor, number: int) -> Tensor:
        """Return the defended release of z (n, ...), with the random draws of `number`: same shape."""

    def expected(self, z: Tensor) -> Tensor:
        """Return the release of z with every defense at its mean, differentiable in z."""

    def in_training(self, x: Tensor, z: Tensor, number: int, epoch: int) -> tuple[Tensor, Tensor, float]:
        """Return the release of z, the defenses' penalty on the loss of raw rows x, and the task loss's factor.

        The penalty is a scalar whose gradient is exact; its value is not where a defense defines its penalty by the
        gradient alone. `epoch`: of the run.
        """

    @property
    def defenses(self) -> DefenseStates:
        """States of the imitated defenses."""

    def copy(self) -> Sender:
        """Return an equal sender with states of its own."""


@dataclass(frozen=True)
class AttackSite:
    """The site of a training attack, and what the attack knows there.

    `value`, of `shape` a row, arrives at `party` on `edge`; `returns`: whether a gradient goes back on it. `labels`:
    the head whose labels arrive too, None if they do not. `segments`: the party's own, which compute `out` (of
    `out_shape`) from the value. `sender`: imitation of the sender's defenses. `modules(replica)`: copies of the party's
    segments as they are now. `seed`: of all random draws of the attack. The attack may change all of these in place, as
    knowledge, segments and modules are copies.
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
        """Whether the party's own segments compute the output whose labels arrive; false for a relay."""
        return self.out == self.labels

    @property
    def device(self) -> torch.device:
        """Device of the party."""
        return self.knowledge.device

    def released(self, view: View) -> Tensor:
        """Return the value received on the site's edge in `view`: (victims, *shape)."""
        return view.select(kind="activation", edge=self.edge).tensors(self.device)[self.value]

    def draw_rows(self, count: int, random: torch.Generator) -> Tensor:
        """Return random positions of auxiliary rows, without repetition if there are enough: (count,)."""
        known = len(unwrap(self.knowledge.auxiliary))
        if count > known:
            return torch.randint(known, (count,), generator=random)
        return torch.randperm(known, generator=random)[:count]

    def copy(self) -> AttackSite:
        """Return the site with copies of knowledge and segments."""
        modules = copy_modules({s.name: s.module for s in self.segments})
        segments = tuple(replace(s, module=modules[s.name]) for s in self.segments)
        return replace(self, segments=segments, knowledge=self.knowledge.copy(), sender=self.sender.copy())
