"""Local: the whole model at every client; nothing crosses in a step. What federated methods start from.

Paper: McMahan, Moore, Ramage, Hampson, Aguera y Arcas, "Communication-efficient learning of deep networks from
decentralized data", AISTATS 2017, where clients hold whole models and only weights are sent.

`cuts` divide the model within the client, so that a method can name what is between its pieces (an embedding). Input
and output are called `x` and `out` whatever the model calls them: clients with models of different make, one topology
each, agree in these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor, nn

from splitfed.core.errors import InvalidInput
from splitfed.core.tasks import Task
from splitfed.core.topology import Head, Segment, Topology
from splitfed.topologies._chain import cut_in_roles, only_output, raw_inputs


def local(
    model: nn.Module,
    cuts: Sequence[str] = (),
    task: Task | None = None,
    example: Tensor | Mapping[str, Tensor] | None = None,
    output: str | None = None,
) -> Topology:
    """Leave `model` whole at the client, or in pieces after the submodules `cuts`: body, head, or body1, body2, ....

    `task` defaults to that of the data. `example`: rows of the input; `output`: which result of
    the model, of several; both as for `splitfed.cut`.
    """
    if not isinstance(cuts, (list, tuple)):
        raise InvalidInput(f"cuts={cuts!r} is not allowed; expected the names of submodules, or none")
    if not cuts:
        segments: tuple[Segment, ...] = (Segment("model", "client", model, ("x",), ("out",), ""),)
        return Topology("local", segments, {"x": "client"}, (Head("out", "client", "client", task),))
    bodies = ["body"] if len(cuts) == 1 else [f"body{i}" for i in range(1, len(cuts) + 1)]
    segments = cut_in_roles(model, tuple(cuts), (*bodies, "head"), ("client",) * (len(cuts) + 1), example, output)
    segments = _rename_values(segments)
    inputs = dict.fromkeys(raw_inputs(segments), "client")
    return Topology("local", segments, inputs, (Head("out", "client", "client", task),))


def _rename_values(segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
    """Return `segments` with their one output called `out`, and their input `x` if there is one alone."""
    raw = raw_inputs(segments)
    ends = {**({raw[0]: "x"} if len(raw) == 1 else {}), only_output(segments): "out"}
    # A value between the pieces that has one of the two names gives it up.
    ends = {"x": "x_", "out": "out_", **ends}
    return tuple(
        replace(s, inputs=tuple(ends.get(v, v) for v in s.inputs), outputs=tuple(ends.get(v, v) for v in s.outputs))
        for s in segments
    )
