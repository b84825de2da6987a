"""How the releases of several parties become one: side by side, their sum, their mean, or a module of one's own."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from splitfed.core.errors import InvalidInput, unknown
from splitfed.core.topology import Segment

FUSIONS = ("concat", "sum", "mean")


class Fusion(nn.Module):
    """Joins tensors (rows, ...): "concat" along dimension 1, "sum" and "mean" of equal shapes; no parameters."""

    def __init__(self, how: str = "concat") -> None:
        super().__init__()
        if how not in FUSIONS:
            raise unknown("fusion", how, FUSIONS)
        self.how = how

    def forward(self, *parts: Tensor) -> Tensor:
        """Return the joined tensor."""
        shapes = [tuple(part.shape[1:]) for part in parts]
        if self.how == "concat":
            if len({(len(shape), shape[1:]) for shape in shapes}) > 1:
                raise InvalidInput(f"fusion 'concat' needs releases that differ in dimension 1 only; got {shapes}")
            return torch.cat(parts, 1)
        if len(set(shapes)) > 1:
            raise InvalidInput(f"fusion {self.how!r} needs releases of one shape; got {shapes}")
        total = torch.stack(parts).sum(0)
        return total if self.how == "sum" else total / len(parts)

    def extra_repr(self) -> str:
        """Return what stands between the brackets."""
        return self.how


def bottoms_of(bottoms: Mapping[str, nn.Module]) -> tuple[Segment, ...]:
    """Return a segment `bottom_ROLE` for every role: it reads the role's part of a row, the input named after it."""
    if not isinstance(bottoms, Mapping) or not bottoms:
        raise InvalidInput("bottoms must name at least one role with its module")
    return tuple(
        Segment(f"bottom_{role}", role, module, (role,), (f"z_{role}",), f"bottoms.{role}.")
        for role, module in bottoms.items()
    )


def fusion_at(role: str, bottoms: tuple[Segment, ...], fusion: str | nn.Module, name: str = "fusion") -> Segment:
    """Return the segment at `role` that joins what the `bottoms` release, as the value of its own name."""
    module = Fusion(fusion) if isinstance(fusion, str) else fusion
    return Segment(name, role, module, tuple(v for s in bottoms for v in s.outputs), (f"{name}_out",), f"{name}.")


def check_free(bottoms: Mapping[str, nn.Module], **others: str) -> None:
    """Refuse a party that would be one of the feature parties as well."""
    for what, role in others.items():
        if role in bottoms:
            raise InvalidInput(f"{what}={role!r} is not allowed; that role is a feature party: {', '.join(bottoms)}")
