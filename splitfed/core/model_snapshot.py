"""Snapshot of a user's model: all that tracing or running it can change, kept, compared and put back.

Weights, buffers, gradients, modes and registered submodules; all Python objects that hang on the model or that its
code names (see `splitfed.core.reachable`); the generators of torch, NumPy and Python.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from splitfed.core.plain_values import same, same_tensors
from splitfed.core.reachable import Change, Location, Records, differences, put_back, reach
from splitfed.core.reachable_names import describe_changes, name_changes
from splitfed.core.unsaved_state import saved_tensors


class _Kept(NamedTuple):
    """A tensor, a copy of its numbers, and what autograd knew of it."""

    tensor: Tensor
    numbers: Tensor
    requires_grad: bool
    gradient: Tensor | None


class ModelSnapshot:
    """What `model` and the random generators of the process are at the moment this is made.

    `like`: another snapshot of the same model, which has been left or put back as it was there; its copies of weights
    and other tensors are used again. `code`: whether what its code names belongs to it.
    """

    def __init__(self, model: nn.Module, like: ModelSnapshot | None = None, *, code: bool = True) -> None:
        self.model, self._code = model, code
        self._root: Location = Location() if like is None else like._root
        self.records = self.reach()
        known = {} if like is None else like._tensors
        self._tensors: dict[int, _Kept] = {}
        for record in self.records.values():
            # A replayed segment has shapes of what others hold.
            if isinstance(tensor := record.value, Tensor) and not tensor.is_meta:
                copied = known[id(tensor)].numbers if id(tensor) in known else tensor.detach().clone()
                gradient = tensor.grad if tensor.is_leaf else None
                self._tensors[id(tensor)] = _Kept(tensor, copied, tensor.requires_grad, gradient)
        self._generators = generator_states()

    def reach(self) -> Records:
        """Return what can be reached from the model now, to be compared with `records`."""
        return reach(self.model, self._root, self._code)

    def changes(self) -> list[str]:
        """Return what is no longer as it was, as `attribute 'steps' of 'block' (0 -> 1)`.

        Tensors that hang on the model do not count: whether they matter shows in what the model computes. Those that
        all copies of the model share do, such as one in a global.
        """
        now = self.reach()
        found = [change for change in self._shared_differences(now) if not _is_new_tensor(change, now)]
        return list(describe_changes(found, self.records, now))

    def shared_changes(self) -> list[str]:
        """Return the changes in what all copies of the model share, as `changes` tells them."""
        now = self.reach()
        found = [change for change in self._shared_differences(now) if change.shared]
        return list(describe_changes(found, self.records, now))

    def changed_constant(self) -> str | None:
        """Return a tensor outside of the state dict that has other numbers than it had, None where there is none."""
        weights = set(map(id, self.model.parameters()))
        if not any(id(kept.tensor) not in weights or vars(kept.tensor) for kept in self._tensors.values()):
            return None
        now = self.reach()
        found = [c for c in self.unsaved_differences(now) if isinstance(now[c.place].value, Tensor)]
        return next(name_changes(found, self.records), None)

    def unsaved_differences(self, now: Records) -> Iterator[Change]:
        """Yield what is another `now`, but for the numbers of weights and of what the state dict holds."""
        saved = saved_tensors(self.model)

        def changed(_: Location, old: Tensor, new: Tensor) -> bool:
            return id(old) not in saved and self.tensor_changed(old, new)

        return differences(self.records, now, changed)

    def _shared_differences(self, now: Records) -> Iterator[Change]:
        """Yield what is another `now`, but for the numbers of tensors that hang on the model."""

        def changed(place: Location, old: Tensor, new: Tensor) -> bool:
            return self.records[place].shared and self.tensor_changed(old, new)

        return differences(self.records, now, changed)

    def tensor_changed(self, old: Tensor, new: Tensor) -> bool:
        """Return whether `new` has other numbers than `old`, a tensor of this snapshot, had."""
        return not same_tensors(self.numbers(old), new)

    def numbers(self, tensor: Tensor) -> Tensor:
        """Return a copy of the numbers that `tensor` had when this was made; of another tensor, itself."""
        kept = self._tensors.get(id(tensor))
        return tensor if kept is None else kept.numbers

    def keep(self) -> LaterState:
        """Return what the model is now, to be compared with what it is at another time."""
        records = self.reach()
        changed = {
            place: record.value.detach().clone()
            for place, record in records.items()
            if isinstance(one := record.value, Tensor)
            and not one.is_meta
            and (id(one) not in self._tensors or self.tensor_changed(one, one))
        }
        return LaterState(self, records, changed)

    def drop_gradients(self) -> None:
        """Let no weight have a gradient, so that what is left of earlier training is neither added to nor changed."""
        for kept in self._tensors.values():
            if kept.tensor.is_leaf:
                kept.tensor.grad = None

    def restore(self) -> None:
        """Put everything back."""
        put_back(self.records)
        self.restore_tensors()
        self.restore_generators()

    def restore_generators(self) -> None:
        """Put back the random generators of the process."""
        set_generators(self._generators)

    def restore_tensors(self, but: Collection[int] = ()) -> None:
        """Put back the numbers and gradients of all tensors, but for the numbers of those with the identities `but`."""
        with torch.no_grad():
            for tensor, numbers, requires_grad, gradient in self._tensors.values():
                if id(tensor) not in but and tensor.shape != numbers.shape:
                    tensor.data = numbers.clone()
                elif id(tensor) not in but and not same_tensors(numbers, tensor):
                    tensor.copy_(numbers)
                if tensor.is_leaf:
                    tensor.requires_grad_(requires_grad)
                    tensor.grad = gradient


class LaterState(NamedTuple):
    """What can be reached from a model some time after its `snapshot`, and the numbers of tensors that have others."""

    snapshot: ModelSnapshot
    records: Records
    changed: Mapping[Location, Tensor]

    def differences(self, other: LaterState) -> Iterator[Change]:
        """Yield what is another in `other`, a later state since the same snapshot."""

        def changed(place: Location, old: Tensor, new: Tensor) -> bool:
            one, another = self.changed.get(place), other.changed.get(place)
            return not same_tensors(
                self.snapshot.numbers(old) if one is None else one,
                self.snapshot.numbers(new) if another is None else another,
            )

        return differences(self.records, other.records, changed)


def _is_new_tensor(change: Change, after: Records) -> bool:
    """Return whether a tensor stands now in a named place of the model's own where something else stood."""
    record = after[change.place]
    if change.key is None:
        return isinstance(record.value, Tensor) and not change.shared
    entry = record.contents.get(change.key)
    is_tensor = isinstance(entry, Location) and isinstance(after[entry].value, Tensor)
    return is_tensor and not change.shared and not record.kind.contains


def generator_states(torch_alone: bool = False) -> tuple[Any, ...]:
    """Return the states of the default generators of torch on the CPU, and of Python and NumPy, which take longer."""
    if torch_alone:
        return (torch.get_rng_state(),)
    return torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)  # noqa: NPY002


def set_generators(states: tuple[Any, ...]) -> None:
    """Go back to what `generator_states` returned."""
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])  # noqa: NPY002


def seed_generators(seed: int) -> None:
    """Let the same generators start from `seed`, of which NumPy takes the last 32 bits."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002


def drawn_packages(before: tuple[Any, ...], after: tuple[Any, ...]) -> list[str]:
    """Return the packages (torch, random, numpy.random) whose default generators differ between two states."""
    alike = {"torch": torch.equal(before[0], after[0])}
    if len(before) > 1:
        alike["random"] = before[1] == after[1]
        one, other = ({**state, **state["state"], "state": None} for state in (before[2], after[2]))
        alike["numpy.random"] = one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    return [package for package, found in alike.items() if not found]
