"""Vanilla: the client holds the bottom of the model, the server the top and the loss; labels are sent to it.

Paper: Gupta, Raskar, "Distributed learning of deep neural network over multiple agents", JNCA 2018;
Vepakomma, Gupta, Swedish, Raskar, "Split learning for health", 2018, figure 2a.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from splitfed.core.errors import InvalidInput
from splitfed.core.tasks import Task
from splitfed.core.topology import Head, Topology
from splitfed.topologies._chain import cut_in_roles, model_inputs, only_output, sent_values
from splitfed.topologies.auto_cuts import asks_auto, with_auto_cuts


def vanilla(
    model: nn.Module,
    cut: str,
    task: Task | None = None,
    example: Tensor | Mapping[str, Tensor] | None = None,
    output: str | None = None,
    sent_inputs: Sequence[str] | None = None,
) -> Topology:
    """Return the topology of `model` cut after the submodule `cut`: bottom at the client, top at the server.

    The labels belong to the client and are sent to the server at every step. `task` defaults to that of the data.
    `example`: rows of the input; `output`: which result of the model, of several; `sent_inputs`: inputs that the server
    may read unchanged; all three as for `splitfed.cut`. "auto" takes the cheapest place by the rule of
    `splitfed.topologies.auto_cuts`.
    """
    if asks_auto(model, cut):
        return with_auto_cuts(
            *(model, example, 1, lambda cuts: vanilla(model, cuts[0], task, example, output, sent_inputs)),
            output=output,
            sent_inputs=sent_inputs,
        )
    if not isinstance(cut, str):
        raise InvalidInput(f"cut={cut!r} is not allowed; expected the name of one submodule, or 'auto'")
    segments = cut_in_roles(model, (cut,), ("bottom", "top"), ("client", "server"), example, output, (), sent_inputs)
    head = Head(only_output(segments), "server", "client", task)
    return Topology(
        "vanilla", segments, model_inputs(segments, "client"), (head,), sent_inputs=sent_values(segments, sent_inputs)
    )
