"""Fusion of the releases of several parties: concatenation, sum, mean, or a custom module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from splitfed.core.argument_kinds import guard_constructor
from splitfed.core.errors import InvalidInput, check_names
from splitfed.core.topology import Segment

FUSIONS = ("concat", "sum", "mean")


class Fusion(nn.Module):
    """Joins tensors (rows, ...): "concat" along dimension 1, "sum" and "mean" of equal shapes; no parameters."""

    def __init__(self, how: str = "concat") -> None:
        super().__init__()
        check_names("fusion", FUSIONS, how)
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
        """Return the fusion's name for `repr`."""
        return self.how


@guard_constructor
class Output(nn.Module):
    """Runs `module` and returns one of its several outputs: `Output(nn.LSTM(4, 8, batch_first=True))`.

    at: its index among them; for nested outputs a tuple of indices, such as (1, 0). Raises `InvalidInput` for a
    recurrent layer without `batch_first`.
    """

    def __init__(self, module: nn.Module, at: int | Sequence[int] = 0) -> None:
        super().__init__()
        if isinstance(module, nn.RNNBase) and not module.batch_first:
            raise InvalidInput(
                f"Output of {type(module).__name__} with batch_first=False is not allowed: it takes rows of a batch "
                "for moments of one sequence; give batch_first=True"
            )
        self.module = module
        self.at = (at,) if isinstance(at, (int, np.integer)) else tuple(at)

    def forward(self, *values: Tensor) -> Tensor:
        """Return the selected output; raise `InvalidInput` if there is none at that index, or no tensor."""
        found = self.module(*values)
        for place in self.at:
            if not isinstance(found, (tuple, list)) or not -len(found) <= place < len(found):
                there = f"{len(found)} values" if isinstance(found, (tuple, list)) else f"a {type(found).__name__}"
                raise InvalidInput(f"Output at={self.at} of {type(self.module).__name__} finds {there} there")
            found = found[place]
        if not isinstance(found, Tensor):
            raise InvalidInput(
                f"Output at={self.at} of {type(self.module).__name__} is a {type(found).__name__}; expected a tensor"
            )
        return found


def bottoms_of(
    bottoms: Mapping[str, nn.Module], inputs: Mapping[str, Sequence[str]] | None = None
) -> tuple[tuple[Segment, ...], dict[str, str]]:
    """Return a segment `bottom_ROLE` for every role, and input -> the role that owns it.

    A bottom reads its role's `inputs`, in their order: parts of a row, by default the one with the name of the role.
    """
    if not isinstance(bottoms, Mapping) or not bottoms:
        raise InvalidInput("bottoms must name at least one role with its module")
    read = _inputs_of_roles(bottoms, inputs or {})
    for role, module in bottoms.items():
        if isinstance(module, nn.RNNBase):
            raise InvalidInput(
                f"bottom of {role!r} is {type(module).__name__}, which returns its output and its state: hand on one, "
                f"Output({type(module).__name__}(..., batch_first=True), 0)"
            )
    segments = (
        Segment(f"bottom_{role}", role, module, read[role], (f"z_{role}",), f"bottoms.{role}.")
        for role, module in bottoms.items()
    )
    return tuple(segments), {name: role for role, names in read.items() for name in names}


def _inputs_of_roles(
    bottoms: Mapping[str, nn.Module], inputs: Mapping[str, Sequence[str]]
) -> dict[str, tuple[str, ...]]:
    """Return role -> the inputs that it reads; raise `InvalidInput` for an input of two roles."""
    for role, names in inputs.items():
        check_names("party in inputs", bottoms, role)
        if isinstance(names, str) or not names or len(set(names)) < len(names):
            raise InvalidInput(f"inputs of {role!r} are {names!r}; expected a list of parts of a row, each once")
    read = {role: tuple(inputs.get(role, (role,))) for role in bottoms}
    owner: dict[str, str] = {}
    for role, names in read.items():
        for name in names:
            other = owner.setdefault(name, role)
            if other != role:
                raise InvalidInput(f"input {name!r} is read by {other!r} and by {role!r}; expected one party each")
    return read


def fusion_at(role: str, bottoms: tuple[Segment, ...], fusion: str | nn.Module, name: str = "fusion") -> Segment:
    """Return the segment at `role` that joins the releases of the `bottoms` into a value called `name`."""
    module = Fusion(fusion) if isinstance(fusion, str) else fusion
    return Segment(name, role, module, tuple(v for s in bottoms for v in s.outputs), (f"{name}_out",), f"{name}.")


def check_free(bottoms: Mapping[str, nn.Module], **others: str) -> None:
    """Raise `InvalidInput` for a role in `others` that is also a feature party."""
    for what, role in others.items():
        if role in bottoms:
            raise InvalidInput(f"{what}={role!r} is not allowed; that role is a feature party: {', '.join(bottoms)}")
