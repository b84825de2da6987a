"""The contract of an aggregation rule: how the tensors of several parties are combined into one set by a server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput, check_fields


class Accumulator(Protocol):
    """Receives the tensors of one party after another and returns their aggregate."""

    def add(self, tensors: Mapping[str, Tensor], share: float) -> None:
        """Add one party's tensors with its weight `share`; the shares of all parties add up to one."""

    def value(self) -> dict[str, Tensor]:
        """Return the aggregate, each tensor in the data type in which it was added."""


@dataclass(frozen=True, kw_only=True)
class AggregationRule:
    """Base of all aggregation rules: a subclass implements `fuse`, and `check` where it needs a number of parties.

    The rule is applied to one role at a time. All floating-point tensors that a party of this role sends (batch-norm
    statistics too, where the schedule sends those) form one vector. Of integer tensors (counts of batches) the largest
    value is kept, as in the mean. All vectors are held in memory until the last has arrived. Two servers choose
    independently which clients they leave out.
    """

    def __post_init__(self) -> None:
        """Raise `InvalidInput` for parameters that the metadata of their fields do not allow."""
        check_fields(self)

    @property
    def by_itself(self) -> bool:
        """True if the rule reads every upload separately, so that it cannot be combined with a secure sum."""
        return True

    def check(self, parts: int) -> None:
        """Raise `InvalidInput` if the rule cannot aggregate the uploads of `parts` parties."""

    def start(self) -> Accumulator:
        """Return an empty accumulator."""
        return VectorAccumulator(self)

    def fuse(self, rows: Tensor, shares: Tensor) -> Tensor:
        """Aggregate `rows`, (parts, numbers) in double precision, with weights `shares`, (parts,), to (numbers,)."""
        raise NotImplementedError


class VectorAccumulator:
    """Accumulator that keeps every party's tensors and aggregates them as vectors by the rule `fusion`."""

    def __init__(self, fusion: AggregationRule) -> None:
        self._fusion = fusion
        self._parts: list[dict[str, Tensor]] = []
        self._shares: list[float] = []

    def add(self, tensors: Mapping[str, Tensor], share: float) -> None:
        """Keep a copy of one party's tensors."""
        if self._parts and set(tensors) != set(self._parts[0]):
            name = min(set(tensors) ^ set(self._parts[0]))
            raise InvalidInput(f"{name!r} is missing from the upload of at least one client")
        self._parts.append({name: tensor.clone() for name, tensor in tensors.items()})
        self._shares.append(share)

    def value(self) -> dict[str, Tensor]:
        """Return the aggregate, each tensor in the data type in which it was added."""
        self._fusion.check(len(self._parts))
        first = self._parts[0]
        if any(tensor.is_meta for tensor in first.values()):
            return first  # in a plan, where nothing is known but shapes
        real = [name for name, tensor in first.items() if tensor.is_floating_point()]
        fused = {
            name: torch.stack([part[name] for part in self._parts]).amax(0)
            for name in first
            if not first[name].is_floating_point()
        }
        if real:
            rows = torch.stack([torch.cat([p[n].double().flatten() for n in real]) for p in self._parts])
            shares = torch.tensor(self._shares, dtype=torch.float64, device=rows.device)
            flat = self._fusion.fuse(rows, shares).split([first[n].numel() for n in real])
            fused |= {
                name: piece.reshape(first[name].shape).to(first[name].dtype)
                for name, piece in zip(real, flat, strict=True)
            }
        return {name: fused[name] for name in first}
