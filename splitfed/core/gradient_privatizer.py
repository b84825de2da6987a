"""Contract of a gradient privatizer: it clips and noises a party's gradients before the optimizer's step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from splitfed.core.messages import Stamp


@dataclass(frozen=True)
class PrivatizedParty:
    """A party whose weights a defense guards: its segments by name, and the roles it sends its rows' norms."""

    party: str
    role: str
    modules: Mapping[str, nn.Module]
    seed: int
    position: int
    device: torch.device
    tells: tuple[str, ...] = ()


class GradientPrivatizer(Protocol):
    """Makes a party's gradients private, by clipping and noise, before its optimizer's step; one replica at a time.

    `active`: whether this step will change weights. `tells`: the roles that are sent the norms of its rows' gradients.
    """

    active: bool
    tells: tuple[str, ...]

    def begin(self, rows: int, divisor: float, stamp: Stamp, active: bool) -> None:
        """Start a step of `rows` rows whose losses are summed and divided by `divisor`."""

    def watching(self, module: nn.Module) -> AbstractContextManager[None]:
        """Record the inputs and outputs of the layers of `module` inside the block."""

    def backward(self, roots: Sequence[Tensor], gradients: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
        """Backpropagate `gradients` from `roots` into the `grad` of `leaves`; keep those of weights, row by row."""

    def total(self) -> float:
        """Return a number that is finite only if all gradients kept are."""

    def norms(self) -> Tensor:
        """Return the squared norm of every row's own gradient: (rows,)."""

    def hear(self, norms: Tensor) -> None:
        """Add the squared norms of the same rows' gradients at another party: (rows,)."""

    def finish(self) -> int:
        """Write the private gradients to the weights' `grad`; return how many rows had no finite gradient."""

    def drop(self) -> None:
        """Discard the open step."""
