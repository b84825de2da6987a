"""Callbacks: what a user wants called at the moments of a run, and the end of training by what one has seen.

A callback that may end training early makes the number of rounds depend on what it looks at. It says so, by
`decides_by`: it is then part of what defines the run, and where a defense promises something it is refused unless what
it looks at is public. The ledger then states what all planned rounds cost: a figure of the rounds that were trained
would itself depend on what was released (Rogers, Roth, Ullman, Vadhan, "Privacy odometers and filters", NeurIPS 2016).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from splitfed.core.defense import privacy_event
from splitfed.core.errors import InvalidInput
from splitfed.planning.private import planned_ledger
from splitfed.planning.validation import Prepared
from splitfed.privacy.ledger import Ledger
from splitfed.training.run import Callback


def check_callbacks(given: object) -> tuple[Callback, ...]:
    """Return the callbacks in a list, refusing everything else."""
    found = tuple(given) if isinstance(given, (list, tuple)) else (given,)
    if wrong := [one for one in found if not isinstance(one, Callback)]:
        raise InvalidInput(f"callbacks={wrong[0]!r} is not allowed; expected a list of callbacks, [EarlyStopping()]")
    return found


def check_deciding(callbacks: Sequence[Callback], prepared: Prepared) -> None:
    """Refuse callbacks that cannot serve the run, and those whose decisions a promise does not allow."""
    for callback in callbacks:
        callback.check(prepared)
    private = next((d for d in prepared.defenses if privacy_event(d) is not None), None)
    for callback in deciding(callbacks) if private is not None else ():
        if not callback.public:
            raise InvalidInput(
                f"{type(callback).__name__} ends training by {callback.decides_by}, which no figure of "
                f"{type(private).__name__} counts: leave one of them out, or give public=True if these rows are public"
            )


def deciding(callbacks: Sequence[Callback]) -> list[Callback]:
    """Return the callbacks that may end training early."""
    return [callback for callback in callbacks if callback.decides_by is not None]


def describe_callbacks(callbacks: Sequence[Callback]) -> dict[str, str] | None:
    """Return as plain values those that decide over the run, which a resumed one must have too; None without any."""
    return {str(i): _describe(one) for i, one in enumerate(deciding(callbacks))} or None


def _describe(callback: Callback) -> str:
    kind = type(callback)
    # The default form holds an address, which is another one in every process.
    return kind.__qualname__ if kind.__repr__ is object.__repr__ else repr(callback)


def committed_ledger(
    callbacks: Sequence[Callback], prepared: Prepared, rounds: int, every: int, delta: float | None
) -> Ledger | None:
    """Return the ledger of all planned rounds, where a callback may end training early beside a promise; else None."""
    found = deciding(callbacks)
    if not found or all(privacy_event(defense) is None for defense in prepared.defenses):
        return None
    planned = planned_ledger(prepared, rounds, every, delta)
    said = [f"when training ends, by {one.decides_by}, said to be public" for one in found]
    return replace(planned, uncharged=(*planned.uncharged, *said))
