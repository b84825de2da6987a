"""Shared by the builders: cut a model and give the pieces names and roles in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from splitfed.core.cutting import cut
from splitfed.core.errors import InvalidInput
from splitfed.core.topology import Segment


def cut_in_roles(
    model: nn.Module,
    cuts: Sequence[str],
    names: Sequence[str],
    roles: Sequence[str],
    example: Tensor | Mapping[str, Tensor] | None = None,
) -> tuple[Segment, ...]:
    """Cut `model` at `cuts` and give piece i the name `names[i]` and the role `roles[i]`; `example` as for `cut`."""
    pieces = cut(model, cuts, example)
    return tuple(
        Segment(name, role, piece.module, piece.inputs, piece.outputs, original=piece.original)
        for name, role, piece in zip(names, roles, pieces, strict=True)
    )


def only_output(segments: Sequence[Segment]) -> str:
    """Return the one value that no segment reads: the model's output."""
    read = {value for s in segments for value in s.inputs}
    finals = [value for s in segments for value in s.outputs if value not in read]
    if len(finals) != 1:
        raise InvalidInput(f"the model must have one output for this topology; it has {len(finals)}: {finals}")
    return finals[0]


def model_inputs(segments: Sequence[Segment], role: str) -> dict[str, str]:
    """Return `role` for every value that no segment makes, the arguments of the model, in the order they are read."""
    made = {value for s in segments for value in s.outputs}
    return dict.fromkeys((value for s in segments for value in s.inputs if value not in made), role)
