"""U-shaped: the client holds the first and the last piece of the model, so labels never leave it.

Paper: Vepakomma, Gupta, Swedish, Raskar, "Split learning for health: distributed deep learning without sharing raw
patient data", 2018, figure 2b.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from torch import Tensor, nn

from splitfed.core.errors import InvalidInput
from splitfed.core.secure_computation import SecureComputation
from splitfed.core.tasks import Task
from splitfed.core.topology import Head, Topology
from splitfed.topologies._chain import cut_in_roles, model_inputs, only_output, sent_values
from splitfed.topologies.auto_cuts import asks_auto, with_auto_cuts


def u_shaped(
    model: nn.Module,
    cuts: Sequence[str] | Literal["auto"],
    task: Task | None = None,
    example: Tensor | Mapping[str, Tensor] | None = None,
    output: str | None = None,
    sent_inputs: Sequence[str] | None = None,
    encryption: SecureComputation | None = None,
) -> Topology:
    """Return the topology of `model` cut after an even number of `cuts`, with pieces at client and server in turn.

    Two cuts give bottom and head at the client, middle at the server; every further two another round trip. Labels and
    loss stay with the client. `task` defaults to that of the data. `example`: rows of the input; `output`: which result
    of the model, of several; `sent_inputs`: inputs that the server may read; all three as for `splitfed.cut`.
    `encryption`: settings under which the server computes on ciphertexts only; None: everything in plain. "auto" takes
    two cheap cuts by the rule of `splitfed.topologies.auto_cuts`.
    """
    if asks_auto(model, cuts):
        return with_auto_cuts(
            *(model, example, 2, lambda two: u_shaped(model, two, task, example, output, sent_inputs, encryption)),
            output=output,
            sent_inputs=sent_inputs,
            client_ends=True,
        )
    if not isinstance(cuts, (list, tuple)) or len(cuts) < 2 or len(cuts) % 2:
        wanted = "an even number of submodules, two a round trip, or 'auto'"
        raise InvalidInput(f"cuts={cuts!r} is not allowed; expected {wanted}")
    trips = len(cuts) // 2
    inner = [f"{name}{i}" for i in range(1, trips + 1) for name in ("middle", "between")][:-1]
    names = ["bottom", *(["middle"] if trips == 1 else inner), "head"]
    roles = [("client", "server")[i % 2] for i in range(len(cuts) + 1)]
    segments = cut_in_roles(model, tuple(cuts), names, roles, example, output, (), sent_inputs)
    head = Head(only_output(segments), "client", "client", task)
    return Topology(
        "u_shaped",
        segments,
        model_inputs(segments, "client"),
        (head,),
        computation=encryption,
        sent_inputs=sent_values(segments, sent_inputs),
    )
