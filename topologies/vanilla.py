"""Vanilla: the client holds the bottom of the model, the server the top and the loss; labels are sent to it.

Paper: Gupta, Raskar, "Distributed learning of deep neural network over multiple agents", JNCA 2018;
Vepakomma, Gupta, Swedish, Raskar, "Split learning for health", 2018, figure 2a.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from splitfed.core.errors import InvalidInput
from splitfed.core.tasks import Task
from splitfed.core.topology import Head, Topology
from splitfed.topologies._chain import cut_in_roles, model_inputs, only_output


def vanilla(
    model: nn.Module, cut: str, task: Task | None = None, example: Tensor | Mapping[str, Tensor] | None = None
) -> Topology:
    """Cut `model` after the submodule `cut`: bottom at the client, top at the server.

    The labels belong to the client and cross to the server as messages at every step. `task` defaults to that of
    the data. `example`: rows of the input, as for `splitfed.cut`.
    """
    if not isinstance(cut, str):
        raise InvalidInput(f"cut={cut!r} is not allowed; expected the name of one submodule")
    segments = cut_in_roles(model, (cut,), ("bottom", "top"), ("client", "server"), example)
    head = Head(only_output(segments), "server", "client", task)
    return Topology("vanilla", segments, model_inputs(segments, "client"), (head,))
