"""Local: the whole model at every client; a step sends nothing. The basis of federated methods.

Paper: McMahan, Moore, Ramage, Hampson, Aguera y Arcas, "Communication-efficient learning of deep networks from
decentralized data", AISTATS 2017, where clients hold whole models and only weights are sent.

`cuts` divide the model within the client, so that a method can refer to a value between its pieces (an embedding).
Input and output are called `x` and `out` whatever the model calls them, so that topologies of clients with different
architectures agree in these. Several inputs have the names of the model's arguments.
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
    output: str | None = None,
) -> Topology:
    """Return the topology with `model` at the client, whole or cut after `cuts` into body, head, or body1, body2, ....

    `task` defaults to that of the data. `example`: rows of the input; `output`: which result of the model, of several;
    both as for `splitfed.cut`.
    """
    if not isinstance(cuts, (list, tuple)):
        raise InvalidInput(f"cuts={cuts!r} is not allowed; expected the names of submodules, or none")
    if not cuts:
        inputs = _arguments(model, example)
        segments: tuple[Segment, ...] = (Segment("model", "client", model, inputs, ("out",), ""),)
        return Topology("local", segments, dict.fromkeys(inputs, "client"), (Head("out", "client", "client", task),))
    bodies = ["body"] if len(cuts) == 1 else [f"body{i}" for i in range(1, len(cuts) + 1)]
    segments = cut_in_roles(model, tuple(cuts), (*bodies, "head"), ("client",) * (len(cuts) + 1), example, output)
    segments = _rename_values(segments)
    return Topology("local", segments, model_inputs(segments, "client"), (Head("out", "client", "client", task),))


def _arguments(model: nn.Module, example: Tensor | Mapping[str, Tensor] | None) -> tuple[str, ...]:
    """Return the names of the model's arguments if it needs several, otherwise `x`."""
    if isinstance(example, Mapping):
        names = list(example)
    else:
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        given = inspect.signature(model.forward).parameters.values()
        names = [p.name for p in given if p.default is p.empty and p.kind in positional]
    return tuple(names) if len(names) > 1 else ("x",)


def _rename_values(segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
    """Return `segments` with a single input renamed to `x` and their output to `out`."""
    inputs = model_inputs(segments, "client")
    ends = {**(dict.fromkeys(inputs, "x") if len(inputs) == 1 else {}), only_output(segments): "out"}
    # A value between the pieces with one of the two names is renamed.
    ends = {"x": "x_", "out": "out_", **ends}
    return tuple(
        replace(s, inputs=tuple(ends.get(v, v) for v in s.inputs), outputs=tuple(ends.get(v, v) for v in s.outputs))
        for s in segments
    )
