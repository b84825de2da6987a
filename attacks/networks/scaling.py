"""Brings data into the range in which networks learn best, and back."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Scale:
    """Maps `value_range` to [-1, 1]; data without a range stay as they are."""

    value_range: tuple[float, float] | None

    @property
    def bounded(self) -> bool:
        """Whether there is a range."""
        return self.value_range is not None

    @property
    def unit(self) -> float:
        """What a difference of one is in the unit of the data."""
        return 1.0 if self.value_range is None else (self.value_range[1] - self.value_range[0]) / 2

    def down(self, x: Tensor) -> Tensor:
        """Return data as the networks see it."""
        return x if self.value_range is None else (x - self.value_range[0]) / self.unit - 1

    def up(self, x: Tensor) -> Tensor:
        """Return what a network made in the unit of the data."""
        return x if self.value_range is None else (x + 1) * self.unit + self.value_range[0]
