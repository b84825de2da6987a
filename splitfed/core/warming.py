"""Caches of a model: what its first call leaves behind and every later call finds, filled before it is cut.

Tables of positions, masks by length, hooks that a package installs at its first call. A party that replays `forward`
must take the same way in its first step as in all others, so that its copy of the model is made of a warm one. What a
call leaves behind counts as a cache where it is the same after a call with other rows; all else is put back.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from splitfed.core.errors import others_code
from splitfed.core.grouping import group_pairs
from splitfed.core.model_snapshot import LaterState, ModelSnapshot
from splitfed.core.plain_values import Key
from splitfed.core.reachable import Change, Location, Records, put_back

_MODES = (False, True)


def warm_up(cold: ModelSnapshot, calls: Sequence[Callable[[], object]]) -> None:
    """Fill the caches of the model that `cold` was just taken of.

    `calls`: two calls of the model, on other rows of the same shapes. A model that fails is left as it was.
    """
    handle = RemovableHandle.next_id
    found: list[LaterState] = []
    for number, call in enumerate(calls):
        # Most models have none: then one call in evaluation mode is all.
        for mode in _MODES if number else _MODES[:1]:
            if not _run(cold, call, mode):
                cold.restore()
                return
        if not number:
            if not any(True for _ in cold.unsaved_differences(cold.reach())):
                cold.restore()
                return
            _run(cold, call, _MODES[1])
        found.append(cold.keep())
        if number < len(calls) - 1:
            cold.restore()
            # Hooks that the next call registers again have the same keys.
            RemovableHandle.next_id = handle
    first, last = found
    kept = _left_alike(cold.unsaved_differences(last.records), first, last)
    # A counter is the same after any call, and another after one more.
    if kept and not _run(cold, calls[-1], _MODES[0]):
        cold.restore()
        return
    _put_back_all_but(cold, _left_alike(kept, last, cold.keep()), last.records)


class _CallFails(Exception):
    """A user's own `forward` raised something; the cut that follows tells what."""


def _run(cold: ModelSnapshot, call: Callable[[], object], training: bool) -> bool:
    modes = [(module, module.training) for module in cold.model.modules()]
    try:
        with warnings.catch_warnings(action="ignore"), torch.no_grad():
            cold.model.train(training)
            with others_code(_CallFails):
                call()
    except _CallFails:
        return False
    finally:
        for module, mode in modes:
            module.training = mode
    return True


def _left_alike(changes: Iterable[Change], one: LaterState, other: LaterState) -> list[Change]:
    """Return those of `changes` in which two calls have left the same, with all that hangs on it."""
    differing = group_pairs((place, key) for place, key, _ in one.differences(other))
    return [change for change in changes if _is_alike(change, one, other, differing)]


def _is_alike(
    change: Change, one: LaterState, other: LaterState, differing: Mapping[Location, Collection[Key | None]]
) -> bool:
    place, key, _ = change
    if place not in one.records or place not in other.records:
        return False
    held, contents = one.records[place].contents, other.records[place].contents
    if key is not None and ((key in held) != (key in contents) or key in differing.get(place, ())):
        return False
    pending: list[Any] = [place if key is None else contents.get(key)]
    met: set[Location] = set()
    while pending:
        found = pending.pop()
        if isinstance(found, Location) and found not in met:
            if found in differing:
                return False
            met.add(found)
            pending += other.records[found].contents.values()
    return True


def _put_back_all_but(cold: ModelSnapshot, kept: Sequence[Change], last: Records) -> None:
    """Put back what `cold` holds but for the entries `kept`, which are as the `last` call has left them."""
    mixed = {place: record for place, record in last.items() if place not in cold.records}
    mixed |= {
        place: replace(record, contents=dict(record.contents), mark=None) for place, record in cold.records.items()
    }
    filled: set[int] = set()
    for place, key, _ in kept:
        if key is None and (
            isinstance(last[place].value, Tensor) or type(last[place].value) is not type(mixed[place].value)
        ):
            mixed[place] = last[place]
            filled.add(id(last[place].value))
        elif key is None:
            mixed[place].data = last[place].data
        elif key in last[place].contents:
            mixed[place].contents[key] = last[place].contents[key]
        else:
            mixed[place].contents.pop(key, None)
    put_back(mixed)
    cold.restore_tensors(but=filled)
    cold.restore_generators()
