"""Caches of a model: what its first call leaves behind and every later call finds, filled before it is cut.

Tables of positions, masks by length, hooks that a package installs at its first call. A party that replays `forward`
must take the same way in its first step as in all others, so that its copy of the model is made of a warm one. What a
call leaves behind counts as a cache where it is the same after a call with other rows; all else is put back.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from splitfed.core.errors import others_code
from splitfed.core.model_snapshot import ModelSnapshot
from splitfed.core.plain_values import same, same_tensors
from splitfed.core.reachable import Change, Location, Records, differences, put_back

_MODES = (False, True)


def warm_up(cold: ModelSnapshot, calls: Sequence[Callable[[], object]]) -> None:
    """Fill the caches of the model that `cold` was just taken of.

    `calls`: two calls of the model, on other rows of the same shapes. A model that fails is left as it was.
    """
    saved = {id(tensor) for tensor in cold.model.state_dict(keep_vars=True).values()}

    def changed(_: Location, old: Tensor, new: Tensor) -> bool:
        return id(old) not in saved and cold.tensor_changed(old, new)

    handle = RemovableHandle.next_id
    found: list[tuple[Records, dict[int, Tensor]]] = []
    for number, call in enumerate(calls):
        # Most models have none: then one call in evaluation mode is all.
        for mode in _MODES if number else _MODES[:1]:
            if not _run(cold, call, mode):
                cold.restore()
                return
        if not number:
            if not any(True for _ in differences(cold.records, cold.reach(), changed)):
                cold.restore()
                return
            _run(cold, call, _MODES[1])
        records = cold.reach()
        copies = {id(r.value): r.value.detach().clone() for r in records.values() if isinstance(r.value, Tensor)}
        found.append((records, copies))
        if number < len(calls) - 1:
            cold.restore()
            # Hooks that the next call registers again have the same keys.
            RemovableHandle.next_id = handle
    (first, copies), (last, last_copies) = found
    changes = list(differences(cold.records, last, changed))
    kept = [change for change in changes if _agree(change, first, last, copies)]
    # A counter is the same after any call, and another after one more.
    if kept and not _run(cold, calls[-1], _MODES[0]):
        cold.restore()
        return
    again = cold.reach()
    kept = [change for change in kept if _agree(change, last, again, last_copies)]
    _put_back_all_but(cold, kept, last)


class _CallFails(Exception):
    """A user's own `forward` raised something; the cut that follows tells what."""


def _run(cold: ModelSnapshot, call: Callable[[], object], training: bool) -> bool:
    modes = [(module, module.training) for module in cold.model.modules()]
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            cold.model.train(training)
            with others_code(_CallFails):
                call()
    except _CallFails:
        return False
    finally:
        for module, mode in modes:
            module.training = mode
    return True


def _agree(change: Change, first: Records, last: Records, copies: dict[int, Tensor]) -> bool:
    """Return whether both calls have left the same in one place, with all that hangs on it."""
    if change.place not in first or change.place not in last:
        return False
    pending: list[tuple[Any, Any]] = []
    if change.key is None:
        pending.append((change.place, change.place))
    else:
        one, other = first[change.place].contents, last[change.place].contents
        if change.key not in one or change.key not in other:
            return change.key not in one and change.key not in other
        pending.append((one[change.key], other[change.key]))
    met: set[Location] = set()
    while pending:
        old, new = pending.pop()
        if not isinstance(old, Location):
            if isinstance(new, Location) or not same(old, new):
                return False
            continue
        if old is not new or old not in first or new not in last:
            return False
        if old in met:
            continue
        met.add(old)
        one_record, other_record = first[old], last[new]
        if type(one_record.value) is not type(other_record.value):
            return False
        if isinstance(one_record.value, Tensor):
            if not same_tensors(copies[id(one_record.value)], other_record.value):
                return False
            continue
        if not same(one_record.data, other_record.data):
            return False
        if one_record.contents.keys() != other_record.contents.keys():
            return False
        pending += [(value, other_record.contents[key]) for key, value in one_record.contents.items()]
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
