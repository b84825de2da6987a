"""U-shaped: the client holds the first and the last piece of the model, so labels never leave it.

Paper: Vepakomma, Gupta, Swedish, Raskar, "Split learning for health: distributed deep learning without sharing raw
patient data", 2018, figure 2b.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from splitfed.errors import InvalidInput
from splitfed.graph import Head, Topology
from splitfed.task import Task
from splitfed.topologies._chain import cut_in_roles, only_input, only_output


def u_shaped(model: nn.Module, cuts: Sequence[str], task: Task | None = None) -> Topology:
    """Cut `model` after the two submodules `cuts`: bottom and head at the client, middle at the server.

    Labels and loss stay with the client. `task` defaults to that of the data.
    """
    if isinstance(cuts, str) or len(cuts) != 2:
        raise InvalidInput(f"cuts={cuts!r} is not allowed; a U-shaped topology takes two cuts, in the order they run")
    segments = cut_in_roles(model, tuple(cuts), ("bottom", "middle", "head"), ("client", "server", "client"))
    head = Head(only_output(segments), "client", "client", task)
    return Topology("u_shaped", segments, {only_input(segments): "client"}, (head,))
