"""Whether a row of a batch changes what is computed of other rows, now or in later batches: tried out on made-up rows.

A promise for a row holds only if no other row shows in what is released of it. Batch norm in training is not all there
is: a layer may subtract the mean of its batch, attend across it, or remember rows in a buffer, in an attribute or
outside of the module. So one row is changed and nothing of the others may change with it: neither their outputs, nor
what the module keeps, nor what it computes of the next batch. Inputs of several magnitudes and both signs are tried,
since a branch may ask for them.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from splitfed.core.probe import Facts
from splitfed.core.random import derive, generator, stream
from splitfed.core.topology import Segment, Topology

ROWS = 4
"""The rows of a made-up batch; the first is the one that is changed."""

FAILURES = (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, NotImplementedError)
"""What a module may raise on rows that are made up."""

_RANGES = ((0.0, 1.0), (0.0, 0.01), (0.0, 100.0), (-1.0, 1.0), (-100.0, 100.0))
"""Between which numbers inputs lie; in the first one every segment has to work."""

_OWN = frozenset(vars(nn.Module())) - {"_buffers"}
_DEPTH = 6


class Finding(NamedTuple):
    """What a changed row shows in: `segment`, and the value or the state `name`.

    `kind`: "state", which is stored with the weights; "output", of other rows; "memory", a buffer or an attribute; or
    "next batch".
    """

    segment: str
    kind: str
    name: str


class TrialBatch(NamedTuple):
    """Values by name: of one batch, of the same one with another first row, and of the batch that follows."""

    one: dict[str, Tensor]
    other: dict[str, Tensor]
    following: dict[str, Tensor]


def findings(topology: Topology, facts: Facts, names: Collection[str]) -> Iterator[Finding]:
    """Go through the segments `names`, which need nothing that others make, and tell where a row shows in others.

    Raises one of `FAILURES` where a segment cannot work on made-up rows.
    """
    for low, high in _RANGES:
        batch = _batch(topology, facts, low, high)
        for segment in topology.segments:
            if segment.name not in names:
                continue
            try:
                yield from _examine_segment(segment, batch)
            except FAILURES:
                if (low, high) == _RANGES[0]:
                    raise
                break
            if not all(bool(torch.isfinite(batch.one[name]).all()) for name in segment.outputs):
                break


def in_training(module: nn.Module) -> nn.Module:
    """Return a copy as a party would train it: in training mode, but for what its owner has put in evaluation mode."""
    made = copy.deepcopy(module)
    return made if made.training else made.train()


def draw_values(shape: Sequence[int], dtype: torch.dtype, *words: str, low: float = 0.0, high: float = 1.0) -> Tensor:
    """Return numbers between `low` and `high`, or zeros and ones of a type without fractions, drawn by `words`."""
    random = generator(derive(0, "made-up rows", *words))
    if dtype.is_floating_point:
        return low + (high - low) * torch.rand(shape, generator=random, dtype=dtype)
    return torch.randint(0, 2, shape, generator=random).to(dtype)


def other_rows_equal(one: Tensor, other: Tensor) -> bool:
    """Return whether all rows but the first are equal, up to rounding."""
    return one.shape == other.shape and len(one) == ROWS and _same(one[1:], other[1:])


def _batch(topology: Topology, facts: Facts, low: float, high: float) -> TrialBatch:
    batch = TrialBatch({}, {}, {})
    for name in topology.inputs:
        shape, dtype = (ROWS, *facts.shapes[name]), facts.dtypes[name]
        one = draw_values(shape, dtype, "one", name, low=low, high=high)
        new = draw_values((1, *shape[1:]), dtype, "other", name, low=low, high=high)
        # Of greater numbers where they are real, so that a maximum shows it as well.
        new = 3 * new + high if dtype.is_floating_point else 1 - one[:1].clamp(0, 1)
        batch.one[name], batch.other[name] = one, torch.cat([new, one[1:]])
        batch.following[name] = draw_values(shape, dtype, "following", name, low=low, high=high)
    return batch


def _examine_segment(segment: Segment, batch: TrialBatch) -> Iterator[Finding]:
    name = segment.name
    first, second, fresh = (in_training(segment.module) for _ in range(3))
    initial_state = {key: t.clone() for key, t in first.state_dict().items()}
    one, other = _run(segment, first, batch.one), _run(segment, second, batch.other)
    first_memory, second_memory = _copy_attributes(first), _copy_attributes(second)
    for key, value in first.state_dict().items():
        if key not in initial_state or not torch.equal(initial_state[key], value):
            yield Finding(name, "state", key)
    for value, a, b in zip(segment.outputs, one, other, strict=True):
        if not other_rows_equal(a, b):
            yield Finding(name, "output", value)
    for key in sorted({*first_memory, *second_memory}):
        if not _contents_equal(first_memory.get(key), second_memory.get(key)):
            yield Finding(name, "memory", key)
    for value, a, b in zip(
        segment.outputs,
        _run(segment, first, batch.following),
        _run(segment, second, batch.following),
        strict=True,
    ):
        if a.shape != b.shape or not _same(a, b):
            yield Finding(name, "next batch", value)
    after = _run(segment, fresh, batch.following)
    for values, outputs in ((batch.one, one), (batch.other, other), (batch.following, after)):
        values.update(zip(segment.outputs, outputs, strict=True))


def _run(segment: Segment, module: nn.Module, values: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    with torch.no_grad(), stream(derive(0, "made-up rows", segment.name)):
        result = module(*(values[name].clone() for name in segment.inputs))
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def _same(one: Tensor, other: Tensor) -> bool:
    a, b = one.double(), other.double()
    finite = a[torch.isfinite(a)]
    top = float(finite.abs().max()) if len(finite) else 0.0
    return torch.allclose(a, b, rtol=1e-4, atol=1e-5 * min(top, 1.0), equal_nan=True)


def _copy_attributes(module: nn.Module) -> dict[str, Any]:
    """Return all that `module` and those inside it keep besides weights: name -> a copy."""
    attributes: dict[str, Any] = {}
    for path, inner in module.named_modules():
        where = f"{path}." if path else ""
        for name, value in vars(inner).items():
            if name == "_buffers":
                attributes.update({f"{where}{key}": None if t is None else t.clone() for key, t in value.items()})
            elif name not in _OWN:
                attributes[f"{where}{name}"] = _content(value)
    return attributes


def _content(value: Any, depth: int = _DEPTH) -> Any:
    """Return what `value` holds, in a form that stays when it changes; an object holds what its attributes do."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy()) if value.dtype.kind in "biuf" else value.tolist()
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return value
    if depth == 0 or callable(value):
        return None
    if isinstance(value, Mapping):
        return {repr(key): _content(item, depth - 1) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(map(repr, value))
    if isinstance(value, Collection):
        return [_content(item, depth - 1) for item in value]
    return {key: _content(item, depth - 1) for key, item in vars(value).items()} if hasattr(value, "__dict__") else None


def _contents_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if (one.dtype, one.shape, one.device) != (other.dtype, other.shape, other.device):
            return False
        # Of a replayed segment, what others hold has no numbers.
        return one.is_meta or torch.equal(one.nan_to_num(), other.nan_to_num())
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_contents_equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_contents_equal, one, other))
    return bool(one == other or (one != one and other != other))
