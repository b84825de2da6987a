"""The contract of an aggregation rule: how the tensors of several parties become one set, at either server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput, check_fields


class Accumulator(Protocol):
    """Takes one part after another, and makes one of them."""

    def add(self, tensors: Mapping[str, Tensor], share: float) -> None:
        """Take one party's tensors; the shares of all parties add up to one."""

    def value(self) -> dict[str, Tensor]:
        """Return the fused tensors, each in its own type."""


@dataclass(frozen=True, kw_only=True)
class AggregationRule:
    """Base of all fusions: a subclass writes `fuse`, and `check` where it needs a number of parties.

    What is fused is all that one role's party sends, as one vector: real numbers only, batch-norm statistics among
    them where the schedule sends those. Of whole numbers (counts of batches) the largest is kept, as in the mean.
    Every part is held in memory until all are there. A role that a server averages is fused by itself: two servers do
    not tell each other whom they left out.
    """

    def __post_init__(self) -> None:
        """Refuse parameters that are not what their fields require."""
        check_fields(self)

    @property
    def by_itself(self) -> bool:
        """Whether it reads every part by itself, which a secure sum hides."""
        return True

    def check(self, parts: int) -> None:
        """Refuse a number of parts that cannot be fused."""

    def start(self) -> Accumulator:
        """Return an empty gathering."""
        return VectorAccumulator(self)

    def fuse(self, rows: Tensor, shares: Tensor) -> Tensor:
        """Fuse `rows`: (parts, numbers) in double precision, with `shares`: (parts,), to (numbers,)."""
        raise NotImplementedError


class VectorAccumulator:
    """Keeps every part, and has `fusion` fuse them as vectors."""

    def __init__(self, fusion: AggregationRule) -> None:
        self._fusion = fusion
        self._parts: list[dict[str, Tensor]] = []
        self._shares: list[float] = []

    def add(self, tensors: Mapping[str, Tensor], share: float) -> None:
        """Keep a copy of one part."""
        if self._parts and set(tensors) != set(self._parts[0]):
            name = min(set(tensors) ^ set(self._parts[0]))
            raise InvalidInput(f"{name!r} is not in every part to be fused")
        self._parts.append({name: tensor.clone() for name, tensor in tensors.items()})
        self._shares.append(share)

    def value(self) -> dict[str, Tensor]:
        """Return the fused tensors."""
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
