"""What stands between a party's gradients and its optimizer where a defense guards weights: the contract of it."""

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
    """A party whose weights a defense guards: its segments by name, and the roles it tells the norms of its rows."""

    party: str
    role: str
    modules: Mapping[str, nn.Module]
    seed: int
    position: int
    device: torch.device
    tells: tuple[str, ...] = ()


class GradientPrivatizer(Protocol):
    """Stands between a party's gradients and its optimizer, for the length of a step of one replica.

    `active`: whether this is a step that will move weights. `tells`: the roles that are told the norms of its rows.
    """

    active: bool
    tells: tuple[str, ...]

    def begin(self, rows: int, divisor: float, stamp: Stamp, active: bool) -> None:
        """Start a step of `rows` rows whose losses are summed and divided by `divisor`."""
        ...

    def watching(self, module: nn.Module) -> AbstractContextManager[None]:
        """Take note of what goes through the weights of `module` inside the block."""
        ...

    def backward(self, roots: Sequence[Tensor], gradients: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
        """Send `gradients` back from `roots`: into the `grad` of `leaves`, and kept row by row for the weights."""
        ...

    def total(self) -> float:
        """Return a number that is finite only if the gradients kept are."""
        ...

    def norms(self) -> Tensor:
        """Return the squared norm of every row's own gradient: (rows,)."""
        ...

    def hear(self, norms: Tensor) -> None:
        """Take the squared norms of the same rows' gradients at another party: (rows,)."""
        ...

    def finish(self) -> int:
        """Leave in the `grad` of the weights what their optimizer may see; return how many rows were not finite."""
        ...

    def drop(self) -> None:
        """Forget the step."""
        ...
