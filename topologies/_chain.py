"""Cutting of a model into pieces with names and roles in order, shared by the builders."""

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
    output: str | None = None,
    chain: Sequence[str] = (),
    sent_inputs: Sequence[str] | None = None,
) -> tuple[Segment, ...]:
    """Return the pieces of `model` cut at `cuts`, piece i with `names[i]` and `roles[i]`; others as in `cut`."""
    pieces = cut(model, cuts, example, output, chain, sent_inputs or ())
    return tuple(
        Segment(name, role, piece.module, piece.inputs, piece.outputs, original=piece.original)
        for name, role, piece in zip(names, roles, pieces, strict=True)
    )


def only_output(segments: Sequence[Segment]) -> str:
    """Return the only value that no segment reads, which is the model's output; raise `InvalidInput` for several."""
    read = {value for s in segments for value in s.inputs}
    finals = [value for s in segments for value in s.outputs if value not in read]
    if len(finals) != 1:
        raise InvalidInput(
            f"the model must have one output for this topology; it has {len(finals)}: {finals}; name one by output="
        )
    return finals[0]


def sent_values(segments: Sequence[Segment], sent_inputs: Sequence[str] | None) -> tuple[str, ...]:
    """Return the values of the model's arguments `sent_inputs`, from the `segments` cut from it."""
    original = segments[0].original
    arguments = {} if original is None else original.arguments
    return tuple(value for value, name in arguments.items() if name in (sent_inputs or ()))


def model_inputs(segments: Sequence[Segment], role: str) -> dict[str, str]:
    """Return value -> `role` for the arguments of the model, values that no segment computes, in reading order."""
    made = {value for s in segments for value in s.outputs}
    return dict.fromkeys((value for s in segments for value in s.inputs if value not in made), role)
