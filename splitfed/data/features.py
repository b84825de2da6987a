"""Features: named parts of a row that different parties hold, and their assignment to the inputs of a topology."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from splitfed.core.argument_kinds import guard_constructor
from splitfed.core.errors import InvalidInput, unknown
from splitfed.core.rows import Draw, RowSource, read_rows


@guard_constructor
@dataclass(frozen=True, eq=False, repr=False)
class Feature:
    """A part of one row of x: its positions in the flattened row, and its shape.

    positions: (k,) int64 on the CPU, all different, at least one, into `x.flatten(1)`; `shape` holds k numbers. Raises
    `InvalidInput`.
    """

    positions: Tensor
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        found = self.positions
        if found.dtype != torch.int64 or found.dim() != 1 or found.numel() == 0 or found.device.type != "cpu":
            raise InvalidInput(
                f"positions of a feature have shape {tuple(found.shape)} and type "
                f"{str(found.dtype).removeprefix('torch.')} on {found.device}; "
                "expected (k,), at least one, int64, on cpu"
            )
        if int(found.min()) < 0:
            raise InvalidInput(f"position {int(found.min())} of a feature is not allowed; expected 0 or more")
        values, counts = found.unique(return_counts=True)
        if len(values) < len(found):
            raise InvalidInput(f"position {int(values[counts > 1][0])} occurs twice in a feature; expected once")
        if not self.shape or min(self.shape) < 1 or math.prod(self.shape) != len(found):
            raise InvalidInput(f"a feature of {len(found)} positions cannot have shape {self.shape}")

    def __repr__(self) -> str:
        return f"Feature({len(self.positions)} positions, shape {self.shape})"

    @cached_property
    def end(self) -> int:
        """Smallest length of a flattened row that has all the positions."""
        return int(self.positions.max()) + 1

    @cached_property
    def _start(self) -> int | None:
        """The first position if positions are consecutive, otherwise None."""
        first = int(self.positions[0])
        run = torch.arange(first, first + len(self.positions))
        return first if torch.equal(self.positions, run) else None

    def select(self, x: Tensor) -> Tensor:
        """Return this part of every row of x (n, ...): (n, *shape), differentiable, as a copy.

        It is never a view, whose storage would hold all of x.
        """
        if x.dim() < 2 or math.prod(x.shape[1:]) < self.end:
            raise InvalidInput(
                f"x has shape {tuple(x.shape)}; a feature needs at least {self.end} numbers in every row of (n, ...)"
            )
        flat = x.flatten(1)
        if self._start is None:
            part = flat.index_select(1, self.positions.to(x.device))
        else:
            part = flat.narrow(1, self._start, len(self.positions)).clone(memory_format=torch.contiguous_format)
        return part.reshape(len(x), *self.shape)


def feed(x: Tensor, names: Mapping[str, str], features: Mapping[str, Feature]) -> dict[str, Tensor]:
    """Return input name -> tensor: the part of x (n, ...) that each input of a topology receives.

    `names`: input name -> role that owns it (a topology's `inputs`). An input with the name of a feature receives that
    part. If no input has one, the only input receives the whole x. Raises `InvalidInput` for several inputs without
    features, which would give the raw data of one party to another, or a part of a row to every argument of a model,
    and for an input that is no feature where others are.
    """
    strangers = [name for name in names if name not in features]
    if not strangers:
        return {name: features[name].select(x) for name in names}
    roles = sorted(set(names.values()))
    if len(strangers) < len(names) or (features and len(roles) > 1):
        raise unknown("feature for an input:", strangers[0], features)
    if len(roles) > 1:
        input_roles = ", ".join(f"{name!r} of {role}" for name, role in names.items())
        raise InvalidInput(
            f"inputs {input_roles}: the data has no features, so every role would get each whole row; define the part "
            "of each with Dataset.vertical, halves, strips or with_features"
        )
    if len(names) > 1:
        listed = ", ".join(map(repr, names))
        raise InvalidInput(
            f"inputs {listed} of {roles[0]}: the data has no features of these names, so each would get each whole "
            "row; give the parts by name, from_arrays({name: array, ...}, y), or with_features"
        )
    return dict.fromkeys(names, x)


def feed_rows(
    rows: RowSource, names: Mapping[str, str], features: Mapping[str, Feature]
) -> Mapping[str, Tensor | RowSource]:
    """Return the result of `feed` for all `rows`, to be read by batch; an input that receives whole rows shares them.

    A party that holds a part of each row gets a copy of that part alone, if the rows are in memory.
    """
    if rows.resident and any(name in features for name in names):
        return feed(read_rows("rows", rows), names, features)
    # With no rows: raises for inputs and features that do not match.
    feed(torch.zeros(0, *rows.shape, dtype=rows.dtype), names, features)
    return {name: FeatureRows(rows, features[name]) if name in features else rows for name in names}


class FeatureRows(RowSource):
    """One feature of the rows of `source`."""

    def __init__(self, source: RowSource, feature: Feature) -> None:
        self.source, self.feature = source, feature
        self.shape, self.dtype, self.draws, self.couples = feature.shape, source.dtype, source.draws, source.couples

    def __len__(self) -> int:
        return len(self.source)

    def take(self, rows: Tensor, draw: Draw | None = None) -> Tensor:
        """Return this feature of the rows of these numbers."""
        return self.feature.select(self.source.take(rows, draw))


def adjacent_features(parts: Mapping[str, Tensor]) -> dict[str, Feature]:
    """Return the positions of `parts`, name -> (n, ...), in a row that joins them flattened."""
    ends = itertools.accumulate(math.prod(part.shape[1:]) for part in parts.values())
    return {
        name: Feature(torch.arange(end - math.prod(part.shape[1:]), end), tuple(part.shape[1:]))
        for (name, part), end in zip(parts.items(), ends, strict=True)
    }


def places(shape: tuple[int, ...], names: Iterable[str], features: Mapping[str, Feature]) -> dict[str, Tensor]:
    """Return the positions, in a flattened row of `shape`, that each input in `names` receives from `feed`."""
    everything = torch.arange(math.prod(shape))
    return {name: features[name].positions if name in features else everything for name in names}


def check_features(name: str, shape: tuple[int, ...], features: Mapping[str, Feature]) -> None:
    """Raise `InvalidInput` for features outside of the rows, of `shape`, of the data set `name`."""
    width = math.prod(shape)
    for part, feature in features.items():
        if not part:
            raise InvalidInput(f"{name}: a feature has no name")
        if feature.end > width:
            raise InvalidInput(
                f"{name}: feature {part!r} reaches position {feature.end - 1}; a row has positions 0 to {width - 1}"
            )
