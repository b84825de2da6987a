"""U-shaped: the client holds the first and the last piece of the model, so labels never leave it.

Paper: Vepakomma, Gupta, Swedish, Raskar, "Split learning for health: distributed deep learning without sharing raw
patient data", 2018, figure 2b.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from splitfed.core.errors import InvalidInput
from splitfed.core.tasks import Task
from splitfed.core.topology import Head, Topology
from splitfed.topologies._chain import cut_in_roles, model_inputs, only_output


def u_shaped(
    model: nn.Module,
    cuts: Sequence[str],
    task: Task | None = None,
    example: Tensor | Mapping[str, Tensor] | None = None,
) -> Topology:
    """Cut `model` after the submodules `cuts`, an even number of them: client and server take turns along it.

    Two cuts give bottom and head at the client, middle at the server; every two more another round trip. Labels and
    loss stay with the client. `task` defaults to that of the data. `example`: rows of the input, as for `splitfed.cut`.
    """
    if not isinstance(cuts, (list, tuple)) or len(cuts) < 2 or len(cuts) % 2:
        raise InvalidInput(f"cuts={cuts!r} is not allowed; expected an even number of submodules, two a round trip")
    trips = len(cuts) // 2
    inner = [f"{name}{i}" for i in range(1, trips + 1) for name in ("middle", "between")][:-1]
    names = ["bottom", *(["middle"] if trips == 1 else inner), "head"]
    roles = [("client", "server")[i % 2] for i in range(len(cuts) + 1)]
    segments = cut_in_roles(model, tuple(cuts), names, roles, example)
    head = Head(only_output(segments), "client", "client", task)
    return Topology("u_shaped", segments, model_inputs(segments, "client"), (head,))
