"""Context of a defense: the place where it starts to work, and what its own party holds at a step."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from splitfed.core.random import generator, wide_generator

if TYPE_CHECKING:
    from splitfed.core.messages import Stamp


@dataclass(frozen=True)
class DefenseSite:
    """Where a defense starts to work: one party and one edge.

    `shapes`: of what leaves on the edge, `inputs`: of the party's raw inputs, both value -> shape of a row. `device`:
    where the party computes. `seed`: of all that the defense draws to begin with.
    """

    party: str
    edge: str
    shapes: Mapping[str, tuple[int, ...]]
    inputs: Mapping[str, tuple[int, ...]]
    seed: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


@dataclass(frozen=True)
class Context:
    """What a defense may know: what its own party holds at this step, and nothing of any other.

    `inputs`: the party's raw inputs of this batch (value -> tensor), empty where it owns none. `labels`: its labels
    of this batch by head, likewise. `state`: what `LearnedDefense.start` returned for this party and edge. `module`:
    the party's own segment that the edge leaves, or that its gradient comes from; None for whoever imitates the party.
    `counts_as`: the epoch of training that a rehearsed step stands for; None: the stamp says it. `arrived`: what the
    party has received in this batch and not sent back yet, value -> (batch, ...).
    """

    _made_each_step: ClassVar[bool] = True

    party: str
    edge: str
    stamp: Stamp
    seed: int
    position: int
    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    labels: Mapping[str, Tensor] = field(default_factory=dict)
    state: Any = None
    module: nn.Module | None = None
    counts_as: int | None = None
    arrived: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def epoch(self) -> int:
        """The epoch of training, counted from 0 over the whole run."""
        return self.stamp.epoch if self.counts_as is None else self.counts_as

    def generator(self, value: str, device: torch.device) -> torch.Generator:
        """Return the random numbers of this defense, party, edge, `value`, phase, part, epoch and step."""
        return generator(self.seed, *self._words(value), device=device)

    def noise(self, value: str, z: Tensor) -> torch.Generator:
        """Return the same for a mechanism that promises privacy, which is about to release `z` as `value`.

        It has as many states as there may be releases. A step of training happens once in a run. Outside of training
        the same words may come again with other rows or weights, when a run is scored again or loaded and asked again,
        and noise that is used twice cancels in a difference: so there `z` itself is one of the words. Asked again for
        the same, the same is released, and nothing new is told.
        """
        digest = () if self.stamp.phase == "train" else (_digest(z),)
        return wide_generator(self.seed, *self._words(value), *digest, device=z.device)

    def _words(self, value: str) -> tuple[str | int, ...]:
        return ("defense", self.position, self.party, self.edge, value, *self.stamp)


def _digest(z: Tensor) -> str:
    """Return a digest of the shape, type and bits of `z`."""
    held = z.detach().cpu().contiguous()
    found = hashlib.blake2b(f"{held.dtype}{tuple(held.shape)}".encode(), digest_size=32)
    found.update(held.flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
