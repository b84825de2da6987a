"""What the submodules of other parties return, known by shapes alone: no code of theirs runs, and nothing is held.

The shapes of a row are fixed in a plan, so that every length is an affine function of the number of rows; it follows
from two calls with different numbers. A length or a number that depends on values cannot be answered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from splitfed.core.nested_tensors import is_plain, replace_tensors, tensors_of


@dataclass(frozen=True)
class SeenCall:
    """One call of a submodule as it was seen: the number of rows, the tensors it was given, and what it returned.

    `draws`: whether it draws from NumPy or Python, and so whether it hands a tensor through.
    """

    rows: int
    given: Sequence[Tensor]
    returned: Any
    draws: bool = False


@dataclass(frozen=True)
class _Length:
    """A number of a shape: `base` and `slope` for every row."""

    base: int
    slope: int


@dataclass(frozen=True)
class _Shape:
    """A tensor of a result; `alias`: the place among what was given of the tensor that is handed through."""

    lengths: tuple[_Length, ...]
    dtype: torch.dtype
    alias: int | None


@dataclass(frozen=True)
class Answer:
    """What a submodule returns for any number of rows: `structure`, in which tensors are replaced by `shapes`."""

    structure: Any
    shapes: tuple[_Shape, ...]

    @property
    def hands_through(self) -> bool:
        """Whether a tensor that was given is returned."""
        return any(shape.alias is not None for shape in self.shapes)

    def holds(self, rows: int, returned: Any) -> bool:
        """Return whether this is what `returned`, the result of a call with `rows`, looks like."""
        tensors = tensors_of(returned)
        if len(tensors) != len(self.shapes) or not is_plain(returned):
            return False
        lengths = [[one.base + one.slope * rows for one in shape.lengths] for shape in self.shapes]
        parts, structure = _plain_parts(returned)
        told, expected = _plain_parts(self.structure)
        return (
            [list(tensor.shape) for tensor in tensors] == lengths
            and structure == expected
            and all(map(_equal, parts, told))
        )

    def build(self, rows: int, given: Sequence[Tensor]) -> Any:
        """Return the result of a call with `given`, on the meta device."""
        made = {}
        for place, shape in enumerate(self.shapes):
            if shape.alias is not None:
                made[place] = given[shape.alias]
            else:
                lengths = [one.base + one.slope * rows for one in shape.lengths]
                made[place] = torch.empty(lengths, dtype=shape.dtype, device="meta")
        return replace_tensors(self.structure, made, copies=True)


def answer(first: SeenCall, second: SeenCall, *more: SeenCall) -> Answer | str:
    """Return what follows from calls with two numbers of rows, `more` for comparison, or why nothing does."""
    calls = (first, second, *more)
    if not all(is_plain(call.returned) for call in calls):
        found = next((leaf for leaf in _pytree.tree_leaves(first.returned) if not is_plain(leaf)), first.returned)
        return f"returns a {type(found).__name__}"
    plain = [_plain_parts(call.returned) for call in calls]
    for parts in plain[1:]:
        if parts[1] != plain[0][1]:
            return "returns another structure for another number of rows or other values"
        if changed := [one for one, other in zip(plain[0][0], parts[0], strict=True) if not _equal(one, other)]:
            return f"returns the number {changed[0]!r}, which depends on the number of rows or on values"
    shapes = []
    for tensors in zip(*(tensors_of(call.returned) for call in calls), strict=True):
        aliases = {
            None if first.draws else _alias(call.given, tensor) for call, tensor in zip(calls, tensors, strict=True)
        }
        lengths = _lengths([call.rows for call in calls], [tuple(tensor.shape) for tensor in tensors])
        if len(aliases) > 1 or len({tensor.dtype for tensor in tensors}) > 1:
            return "returns another structure for another number of rows or other values"
        if lengths is None:
            return f"returns a tensor of shape {tuple(tensors[0].shape)}, which depends on values"
        shapes.append(_Shape(lengths, tensors[0].dtype, aliases.pop()))
    bare = {place: torch.empty(0, device="meta") for place in range(len(shapes))}
    return Answer(replace_tensors(first.returned, bare, copies=True), tuple(shapes))


def numbers_in(returned: Any) -> list[Any]:
    """Return the plain numbers in what was returned."""
    return [one for one in _plain_parts(returned)[0] if isinstance(one, (bool, int, float, complex))]


def _plain_parts(value: Any) -> tuple[list[Any], str]:
    """Return all that `value` holds besides tensors, and its structure."""
    parts: list[Any] = []
    leaves, spec = _pytree.tree_flatten(value)
    kinds = [str(spec)]
    for leaf in leaves:
        inner: Mapping[Any, Any] = {}
        if isinstance(leaf, Mapping):
            inner = leaf
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, Tensor):
            inner = vars(leaf)
        elif not isinstance(leaf, Tensor):
            parts.append(leaf)
        parts += [one for one in inner.values() if not isinstance(one, Tensor)]
        kinds.append(f"{type(leaf).__name__}{[(key, isinstance(one, Tensor)) for key, one in inner.items()]}")
    return parts, " ".join(kinds)


def _equal(one: Any, other: Any) -> bool:
    return type(one) is type(other) and (one == other or (one != one and other != other))


def _alias(given: Sequence[Tensor], tensor: Tensor) -> int | None:
    return next((place for place, one in enumerate(given) if one is tensor), None)


def _lengths(rows: Sequence[int], shapes: Sequence[tuple[int, ...]]) -> tuple[_Length, ...] | None:
    if len({len(shape) for shape in shapes}) > 1:
        return None
    found = []
    for sizes in zip(*shapes, strict=True):
        slope, rest = divmod(sizes[1] - sizes[0], rows[1] - rows[0])
        base = sizes[0] - slope * rows[0]
        if rest or slope < 0 or any(size != base + slope * count for count, size in zip(rows, sizes, strict=True)):
            return None
        found.append(_Length(base, slope))
    return tuple(found)
