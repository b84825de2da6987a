"""Local: the whole model at every client; nothing crosses in a step. What federated methods start from.

Paper: McMahan, Moore, Ramage, Hampson, Aguera y Arcas, "Communication-efficient learning of deep networks from
decentralized data", AISTATS 2017, where clients hold whole models and only weights are sent.

`cuts` divide the model within the client, so that a method can name what is between its pieces (an embedding). Input
and output are called `x` and `out` whatever the model calls them: clients with models of different make, one topology
each, agree in these. Several inputs bear the names of the model's arguments.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor, nn

from splitfed.core.errors import InvalidInput
from splitfed.core.tasks import Task
from splitfed.core.topology import Head, Segment, Topology
from splitfed.topologies._chain import cut_in_roles, model_inputs, only_output


def local(
    model: nn.Module,
    cuts: Sequence[str] = (),
    task: Task | None = None,
    example: Tensor | Mapping[str, Tensor] | None = None,
) -> Topology:
    """Leave `model` whole at the client, or in pieces after the submodules `cuts`: body, head, or body1, body2, ....

    `task` defaults to that of the data. `example`: rows of the input, as for `splitfed.cut`.
    """
    if not isinstance(cuts, (list, tuple)):
        raise InvalidInput(f"cuts={cuts!r} is not allowed; expected the names of submodules, or none")
    if not cuts:
        inputs = _arguments(model, example)
        segments: tuple[Segment, ...] = (Segment("model", "client", model, inputs, ("out",), ""),)
        return Topology("local", segments, dict.fromkeys(inputs, "client"), (Head("out", "client", "client", task),))
    bodies = ["body"] if len(cuts) == 1 else [f"body{i}" for i in range(1, len(cuts) + 1)]
    segments = cut_in_roles(model, tuple(cuts), (*bodies, "head"), ("client",) * (len(cuts) + 1), example)
    segments = _rename_values(segments)
    return Topology("local", segments, model_inputs(segments, "client"), (Head("out", "client", "client", task),))


def _arguments(model: nn.Module, example: Tensor | Mapping[str, Tensor] | None) -> tuple[str, ...]:
    """Return the names of the model's arguments where it needs several, else `x`."""
    if isinstance(example, Mapping):
        names = list(example)
    else:
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        given = inspect.signature(model.forward).parameters.values()
        names = [p.name for p in given if p.default is p.empty and p.kind in positional]
    return tuple(names) if len(names) > 1 else ("x",)


def _rename_values(segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
    """Return `segments` with an only input called `x` and their one output `out`."""
    inputs = model_inputs(segments, "client")
    ends = {**(dict.fromkeys(inputs, "x") if len(inputs) == 1 else {}), only_output(segments): "out"}
    # A value between the pieces that has one of the two names gives it up.
    ends = {"x": "x_", "out": "out_", **ends}
    return tuple(
        replace(s, inputs=tuple(ends.get(v, v) for v in s.inputs), outputs=tuple(ends.get(v, v) for v in s.outputs))
        for s in segments
    )
