"""Callbacks: what a user wants called at the moments of a run, and the end of training by what one has seen.

A callback that may end training early makes the number of rounds depend on what it looks at. It says so, by
`decides_by`: it is then part of what defines the run, and where a defense promises something it is refused unless what
it looks at is public. The ledger then states what all planned rounds cost: a figure of the rounds that were trained
would itself depend on what was released (Rogers, Roth, Ullman, Vadhan, "Privacy odometers and filters", NeurIPS 2016).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from splitfed.core.argument_kinds import check_overrides
from splitfed.core.defense import privacy_event
from splitfed.core.errors import InvalidInput, unknown
from splitfed.planning.validation import Prepared
from splitfed.threats.attack_result import AttackResult


class Callback:
    """Base of all callbacks: every hook does nothing unless it is overridden; what one raises ends the training.

    `run`: the `splitfed.Run` that is trained or attacked. A run that is resumed repeats the round that a crash cut
    short: a callback may be told of the same round twice.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        """Refuse a method that is called like a hook and is none."""
        super().__init_subclass__(**options)
        hooks = [name for name in vars(Callback) if name.startswith("on_")]
        for name in vars(cls):
            if name.startswith("on_") and name not in hooks:
                raise unknown(f"hook of callback {cls.__name__}", name, hooks)
        check_overrides(cls, Callback)

    @property
    def decides_by(self) -> str | None:
        """What the end of training depends on, in words, if `on_round_end` may end it; None if it never does."""
        return None

    @property
    def public(self) -> bool:
        """Whether the rows that it decides by are public, so that no promise is about them."""
        return False

    def check(self, prepared: Prepared) -> None:
        """Refuse, by `InvalidInput`, a run that it cannot serve, before anything is computed or written."""

    def on_start(self, run: Any) -> None:
        """Act before the first round that is trained now: the one after `run.history`, which a resumed run has."""

    def on_round_end(self, run: Any, metrics: Mapping[str, Any]) -> str | None:
        """Act after a round, before its checkpoint; return why training shall end here, in few words, or None.

        `metrics`: the entry of the round in `run.history`.
        """
        return None

    def on_evaluate(self, run: Any, part: str, scores: Mapping[str, Any]) -> None:
        """Act after "validation" or "test" rows were scored; `scores` as `Run.evaluate` returns them."""

    def on_attack_end(self, run: Any, result: AttackResult) -> None:
        """Act after an attack on the run has ended and was scored."""

    def on_checkpoint(self, run: Any, folder: Path) -> None:
        """Act after the checkpoint of a round was written into `folder`; never called without a folder."""

    def on_end(self, run: Any) -> None:
        """Act when no more rounds are trained now, also where training was broken off by an error."""

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs of it: plain values and tensors; kept in every checkpoint."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go back to `state`, as `state` returned it."""


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


def find_reasons_to_stop(callbacks: Sequence[Callback], run: Any, metrics: Mapping[str, Any]) -> list[str]:
    """Tell every callback that the round of `metrics` has ended; return why training ends with it, one line a reason.

    Raises `InvalidInput` where one ends it that does not say by what.
    """
    reasons = []
    for callback in callbacks:
        reason = callback.on_round_end(run, MappingProxyType(metrics))
        if reason is not None and callback.decides_by is None:
            raise InvalidInput(
                f"{type(callback).__name__} ends training ({reason}) and does not say by what: define decides_by"
            )
        reasons += [] if reason is None else [" ".join(str(reason).split())]
    return reasons


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


def callback_states(callbacks: Sequence[Callback]) -> dict[str, dict[str, Any]]:
    """Return the states of all callbacks that have one, by class and number."""
    return {name: state for name, one in _numbered(callbacks).items() if (state := one.state())}


def load_callback_states(callbacks: Sequence[Callback], states: Mapping[str, Mapping[str, Any]]) -> None:
    """Give every callback its state back; one that was not there before keeps what it has."""
    for name, one in _numbered(callbacks).items():
        if name in states:
            one.load_state(states[name])


def _numbered(callbacks: Sequence[Callback]) -> dict[str, Callback]:
    """Return every callback by its class, and its number among those of its class."""
    found: dict[str, Callback] = {}
    for one in callbacks:
        name = type(one).__qualname__
        found[f"{name} {sum(key.rpartition(' ')[0] == name for key in found)}"] = one
    return found
