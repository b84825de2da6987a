"""Scaling of data to the range [-1, 1] in which networks train best, and back."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Scale:
    """Maps `value_range` to [-1, 1]; data without a range are left unchanged."""

    value_range: tuple[float, float] | None

    @property
    def bounded(self) -> bool:
        """Whether the data have a value range."""
        return self.value_range is not None

    @property
    def unit(self) -> float:
        """Factor from a difference in network units to one in units of the data."""
        return 1.0 if self.value_range is None else (self.value_range[1] - self.value_range[0]) / 2

    def down(self, x: Tensor) -> Tensor:
        """Return data in network units."""
        return x if self.value_range is None else (x - self.value_range[0]) / self.unit - 1

    def up(self, x: Tensor) -> Tensor:
        """Return a network's output in units of the data."""
        return x if self.value_range is None else (x + 1) * self.unit + self.value_range[0]
