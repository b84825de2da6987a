"""Counter of floating-point operations that goes with any `forward`, those of replayed segments included.

It is torch's own, which knows matrix products, convolutions and attention alone; a product of (m, k) with (k, n) is
2mkn operations, which is mkn multiply-adds.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

from torch.utils.flop_counter import FlopCounterMode


class _Untracked:
    """In place of torch's tracker of submodules, whose hooks call functions of torch within the user's `forward`."""

    parents = frozenset({"Global"})

    def __enter__(self) -> _Untracked:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class _FlopCounter(FlopCounterMode):
    """Torch's counter, of which torch's compiler may see the inside.

    Nothing is compiled here; to hide it would load the compiler, which takes longer than most of what is counted.
    """

    def __enter__(self) -> _FlopCounter:
        super().__enter__()  # type: ignore[no-untyped-call]
        mode = getattr(self, "mode", None)
        if mode is not None:
            kind: Any = type(mode)
            mode.__class__ = _visible(kind)
        return self


@cache
def _visible(kind: Any) -> Any:
    """Return the dispatch mode `kind` as it is written, without the wrapper that hides it."""
    inside = {
        "__torch_dispatch__": inspect.unwrap(kind.__torch_dispatch__),
        "_should_skip_dynamo": classmethod(lambda _: False),
    }
    return type(kind.__name__, (kind,), inside)


def flop_counter() -> FlopCounterMode:
    """Return a counter, to be entered around what is counted; `get_total_flops` says how many there were so far."""
    counter = _FlopCounter(display=False)
    counter.mod_tracker = _Untracked()  # type: ignore[assignment]
    return counter
