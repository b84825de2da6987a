"""Values among which a parameter of an attack may be tuned: an interval, or a list."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from splitfed.core.errors import InvalidInput, check_number


@dataclass(frozen=True)
class Span:
    """Numbers from `low` to `high`, both included; whole numbers if both bounds are; `log`: on a logarithmic scale."""

    low: float
    high: float
    log: bool = False

    def __post_init__(self) -> None:
        """Raise `InvalidInput` unless low < high, and 0 < low for a logarithmic scale."""
        check_number("span low", self.low, low=0.0 if self.log else -float("inf"), open_low=self.log)
        check_number("span high", self.high, low=self.low, open_low=True)

    @property
    def whole(self) -> bool:
        """Whether the span has whole numbers only."""
        return isinstance(self.low, int) and isinstance(self.high, int)


Choice = Span | tuple[Any, ...]
"""An interval, or a tuple of values."""

Space = Mapping[str, Choice]


def check_choice(name: str, choice: Any) -> None:
    """Raise `InvalidInput` unless `choice` is a `Span` or a non-empty list of values."""
    if not isinstance(choice, Span) and not (isinstance(choice, (tuple, list)) and len(choice) > 0):
        raise InvalidInput(f"{name}={choice!r} is not allowed; expected Span(low, high) or a list of values")
