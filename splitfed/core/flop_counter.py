"""Counter of floating-point operations that goes with any `forward`, those of replayed segments included.

It is torch's own, which knows matrix products, convolutions and attention alone; a product of (m, k) with (k, n) is
2mkn operations, which is mkn multiply-adds.
"""

from __future__ import annotations

from torch.utils.flop_counter import FlopCounterMode


class _Untracked:
    """In place of torch's tracker of submodules, whose hooks call functions of torch within the user's `forward`."""

    parents = frozenset({"Global"})

    def __enter__(self) -> _Untracked:
        return self

    def __exit__(self, *error: object) -> None:
        pass


def flop_counter() -> FlopCounterMode:
    """Return a counter, to be entered around what is counted; `get_total_flops` says how many there were so far."""
    counter = FlopCounterMode(display=False)
    counter.mod_tracker = _Untracked()  # type: ignore[assignment]
    return counter
