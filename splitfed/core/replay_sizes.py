"""Ways of a replayed model that goes by the number of rows: those of other numbers than the example's.

Everybody knows how many rows a batch has, so that all parties take the same way without being told. The parties are
made for what crosses with the example: a number of rows with which anything else would cross gets no ways.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput
from splitfed.core.forward_path import ForwardPath, align_ways

Ways = Mapping[tuple[bool, bool], tuple[ForwardPath, ...]]
"""Training, gradients -> the ways of a model."""
Sizes = Mapping[int, Ways]
"""Number of rows -> its ways."""


def plan_sizes(ways: Ways, sizes: Mapping[int, Callable[[], Ways]]) -> Sizes:
    """Return the ways of other numbers of rows, without those that fail or that send or read what `ways` do not.

    The parties are made for what crosses in `ways`; a number that is left out is refused where a run has it.
    """
    found: dict[int, Ways] = {}
    for rows, plan in sizes.items():
        try:
            planned = plan()
        except InvalidInput:
            continue
        if all(_agree(ways[mode][0], one) for mode, one in planned.items()):
            found[rows] = planned
    return found


def _agree(way: ForwardPath, others: Sequence[ForwardPath]) -> bool:
    """Return whether the same crosses in all of `others` as in `way`, under its names, which they take."""
    first = replace(way, received=tuple(dict(received) for received in way.received))
    try:
        align_ways("", (first, *others))
    except InvalidInput:
        return False
    return all(
        {*first.outputs} == {*other.outputs}
        and first.results == other.results
        and [{*one} for one in first.raw] == [{*one} for one in other.raw]
        and all(
            {n: (v.source, v.sometimes, way.forms[n]) for n, v in mine.items()}
            == {n: (v.source, v.sometimes, other.forms[n]) for n, v in theirs.items()}
            for mine, theirs in zip(way.received, other.received, strict=True)
        )
        for other in others
    )


def every_way(ways: Ways, sizes: Sizes) -> list[ForwardPath]:
    """Return all ways, of all modes and numbers of rows."""
    return [way for of_mode in (ways, *sizes.values()) for planned in of_mode.values() for way in planned]


def repeat_rows(inputs: Mapping[str, Tensor], rows: int) -> dict[str, Tensor]:
    """Return the first `rows` rows of `inputs`, from the start again where there are fewer."""
    return {name: x[torch.arange(rows) % len(x)] for name, x in inputs.items()}
