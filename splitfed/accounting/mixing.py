"""Whether rows of a batch change what leaves of other rows, or the state of a segment: tried out on made-up rows.

A release is charged to its own row only if no other row shows in it. Batch norm in training is not all there is: a
layer may subtract the mean of its batch, attend across it, or keep a running average in a buffer, and a defense may
scale its noise by the batch. So one row is changed, and nothing of the others may change with it. Whatever cannot be
tried on made-up rows counts as mixing.
"""

from __future__ import annotations

import copy
from collections.abc import Collection

import torch
from torch import Tensor, nn

from splitfed.defense import Context, Defense, overrides
from splitfed.graph import Segment, Topology
from splitfed.probe import Facts
from splitfed.seeding import derive, generator, stream
from splitfed.view import Stamp

ROWS = 4
FAILURES = (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, NotImplementedError)


def segments_mix(topology: Topology, facts: Facts, names: Collection[str]) -> bool:
    """Tell whether one of the segments `names`, which need nothing that others make, mixes rows or keeps any."""
    one = {name: _made_up(facts, name, "one") for name in topology.inputs}
    other = {name: _one_changed(facts, name, x) for name, x in one.items()}
    try:
        return any(_mixes(s, one, other) for s in topology.segments if s.name in names)
    except FAILURES:
        return True


def release_mixes(defense: Defense, topology: Topology, facts: Facts, edge: str) -> bool:
    """Tell whether `defense` lets a row change what is released of others on `edge`."""
    if not overrides(defense, "release"):
        return False
    context = Context("", edge, Stamp("train", 0, 0, 0), 0, 0)
    try:
        with torch.no_grad():
            for value in topology.edge(edge).values:
                z = _made_up(facts, value, "one")
                changed = _one_changed(facts, value, z)
                if not _others_same(*(defense.release(value, t.clone(), context) for t in (z, changed))):
                    return True
    except FAILURES:
        return True
    return False


def _mixes(segment: Segment, one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    mixed = False
    for values in (one, other):
        module = _in_training(segment.module)
        before = {name: t.clone() for name, t in module.state_dict().items()}
        with torch.no_grad(), stream(derive(0, "mixing", segment.name)):
            result = module(*(values[name].clone() for name in segment.inputs))
        outputs = tuple(result) if isinstance(result, (tuple, list)) else (result,)
        values.update(zip(segment.outputs, outputs, strict=True))
        mixed |= any(not torch.equal(before[name], t) for name, t in module.state_dict().items())
    return mixed or not all(_others_same(one[name], other[name]) for name in segment.outputs)


def _in_training(module: nn.Module) -> nn.Module:
    """A copy as a party trains it: what the user froze inside a module in training mode stays in evaluation mode."""
    made = copy.deepcopy(module)
    return made if made.training else made.train()


def _made_up(facts: Facts, value: str, *words: str) -> Tensor:
    like = torch.empty(ROWS, *facts.shapes[value], dtype=facts.dtypes[value])
    drawn = generator(derive(0, "mixing", value, *words))
    if like.is_floating_point():
        return torch.rand(like.shape, generator=drawn, dtype=like.dtype)
    return torch.randint(0, 2, like.shape, generator=drawn).to(like.dtype)


def _one_changed(facts: Facts, value: str, x: Tensor) -> Tensor:
    """Return `x` with another first row, of greater numbers where they are real."""
    new = _made_up(facts, value, "other")[:1]
    return torch.cat([3 * new + 1 if new.is_floating_point() else 1 - x[:1].clamp(0, 1), x[1:]])


def _others_same(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or len(one) != ROWS:
        return False
    return torch.allclose(one[1:].double(), other[1:].double(), rtol=1e-4, atol=1e-5, equal_nan=True)
