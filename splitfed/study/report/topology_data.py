"""A topology as plain data in a result, and the picture that a report draws of it: no markup is ever read back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import nn

from splitfed.core.errors import InvalidInput
from splitfed.core.topology import Head, Segment, Topology
from splitfed.drawing.svg import to_svg

# Far more than a picture can show; a file that asks for more is not drawn, so that none can keep a report busy.
MOST, LONGEST = 300, 500
Text = Annotated[str, Field(max_length=LONGEST)]
Texts = Annotated[list[Text], Field(max_length=MOST)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)


class _Segment(_Table):
    name: Text
    role: Text
    inputs: Texts
    outputs: Texts
    parameters: Annotated[int, Field(ge=0, le=2**53)]


class _Head(_Table):
    value: Text
    role: Text
    labels: Text
    weight: Annotated[float, Field(allow_inf_nan=False)]
    target: Text | None
    via: Texts


class _Graph(_Table):
    name: Text
    segments: Annotated[list[_Segment], Field(max_length=MOST)]
    inputs: Annotated[dict[Text, Text], Field(max_length=MOST)]
    heads: Annotated[list[_Head], Field(max_length=MOST)]
    forward_only: Texts
    training_only: Texts
    defended: Annotated[dict[Text, Text], Field(max_length=MOST)]


class _Counted(nn.Module):
    """Stands for a module of which only the number of parameters is known; it holds no memory."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        if parameters:
            self.counted = nn.Parameter(torch.empty(parameters, device="meta"))


def graph_of(topology: Topology, defended: Mapping[str, str]) -> dict[str, Any]:
    """Return what a picture of `topology` shows, as plain values; `defended`: edge -> what stands there."""
    return {
        "name": topology.name,
        "segments": [
            {
                "name": s.name,
                "role": s.role,
                "inputs": list(s.inputs),
                "outputs": list(s.outputs),
                "parameters": sum(p.numel() for p in s.module.parameters()),
            }
            for s in topology.segments
        ],
        "inputs": dict(topology.inputs),
        "heads": [
            {key: getattr(h, key) for key in ("value", "role", "labels", "target")}
            | {"weight": float(h.weight), "via": list(h.via)}
            for h in topology.heads
        ],
        "forward_only": sorted(topology.forward_only),
        "training_only": sorted(topology.training_only),
        "defended": dict(defended),
    }


def draw_graph(graph: object) -> str:
    """Return an SVG of the topology that `graph` describes, in the form that `graph_of` returns.

    Raises `InvalidInput` where `graph` describes no topology, or one that is too large to be drawn.
    """
    try:
        known = _Graph.model_validate(graph)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the topology"
        raise InvalidInput(f"{where} is no part of a drawing: {first['msg']}") from None
    segments = tuple(
        Segment(s.name, s.role, _Counted(s.parameters), tuple(s.inputs), tuple(s.outputs)) for s in known.segments
    )
    heads = tuple(
        Head(h.value, h.role, h.labels, weight=h.weight, target=h.target, via=tuple(h.via)) for h in known.heads
    )
    return to_svg(
        Topology(
            known.name, segments, known.inputs, heads, frozenset(known.forward_only), frozenset(known.training_only)
        ),
        known.defended,
    )


def input_depth(topology: Topology, role: str) -> int:
    """Return the most steps (modules without parts of their own) between an input and what arrives at `role`.

    0 where nothing but raw data of its own does. A module that holds others counts by them, a bare one as one step,
    so within one model a later cut is a greater depth.
    """
    known: dict[str, int] = dict.fromkeys(topology.inputs, 0)
    for segment in topology.segments:
        steps = sum(not list(module.children()) for module in segment.module.modules())
        known |= dict.fromkeys(segment.outputs, max((known[value] for value in segment.inputs), default=0) + steps)
    arriving = [e for e in topology.crossings if topology.role_of(e.target) == role]
    return max((known[value] for edge in arriving for value in edge.values), default=0)
