"""Multi-hop: a chain of parties between the client and the server, each of which sees its neighbours only.

Paper: Vepakomma, Gupta, Swedish, Raskar, "Split learning for health: distributed deep learning without sharing raw
patient data", 2018, figure 3c ("Tor-like").

Messages name their sender, their receiver and a pseudonymous number that distinguishes the clients; the order and the
number of a client's batches are not hidden. Labels are relayed hop by hop to the server (each hop sees them), stay with
the client, which then holds the last piece of the model and is the server's neighbour too, or belong to the server:
then every client has a server of its own, as it has data of its own, and the last hop can identify the clients by their
servers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn

from splitfed.core.errors import InvalidInput, check_names
from splitfed.core.tasks import Task
from splitfed.core.topology import Head, Topology
from splitfed.topologies._chain import cut_in_roles, model_inputs, only_output, sent_values
from splitfed.topologies.auto_cuts import asks_auto, with_auto_cuts

LABELS = ("relayed", "client", "server")


def multi_hop(
    model: nn.Module,
    cuts: Sequence[str] | Literal["auto"],
    roles: Sequence[str] | None = None,
    labels: str = "relayed",
    task: Task | None = None,
    example: Tensor | Mapping[str, Tensor] | None = None,
    output: str | None = None,
    sent_inputs: Sequence[str] | None = None,
) -> Topology:
    """Return the topology of `model` cut after `cuts`, one more than there are hops, with each piece at the next party.

    `roles`: client, hops and server in order (default: client, hop1, ..., server). `labels`: "relayed" from the client
    through the hops to the server; "client": the client keeps them and gets the last piece, which the last cut leads
    back to; "server": the server owns them. A value that a later party reads is forwarded, and seen, by those between.
    `example`: rows of the input; `output`: which result of the model, of several; `sent_inputs`: inputs that others may
    read; all three as for `splitfed.cut`. "auto" takes as many cheap cuts as `roles` need, by the rule of
    `splitfed.topologies.auto_cuts`; without `roles` there is one hop.
    """
    check_names("labels of a multi-hop topology", LABELS, labels)
    if asks_auto(model, cuts):
        if roles is not None and (isinstance(roles, str) or len(set(roles)) != len(roles) or len(roles) < 3):
            raise InvalidInput(f"roles={roles!r} is not allowed; expected at least 3 different roles")
        given: dict[str, Any] = {"roles": roles, "labels": labels, "task": task, "example": example}
        given |= {"output": output, "sent_inputs": sent_inputs}
        count = (2 if roles is None else len(roles) - 1) + (labels == "client")
        return with_auto_cuts(
            *(model, example, count, partial(multi_hop, model, **given)),
            output=output,
            sent_inputs=sent_inputs,
            client_ends=labels == "client",
        )
    if not isinstance(cuts, (list, tuple)):
        raise InvalidInput(f"cuts={cuts!r} is not allowed; expected a list of submodules, or 'auto'")
    pieces = len(cuts) + 1 - (labels == "client")
    if pieces < 3:
        least = 3 if labels == "client" else 2
        raise InvalidInput(f"cuts={cuts!r} is not allowed; expected a list of at least {least} submodules")
    chain = tuple(roles) if roles is not None else ("client", *(f"hop{i}" for i in range(1, pieces - 1)), "server")
    if isinstance(roles, str) or len(chain) != pieces or len(set(chain)) != pieces:
        raise InvalidInput(f"roles={roles!r} is not allowed; {len(cuts)} cuts need {pieces} different roles")
    names = ["bottom", *chain[1:-1], "top", *(["head"] if labels == "client" else [])]
    holders = (*chain, chain[0]) if labels == "client" else chain
    segments = cut_in_roles(model, tuple(cuts), names, holders, example, output, holders, sent_inputs)
    holder = chain[-1] if labels == "server" else chain[0]
    via = chain[1:-1] if labels == "relayed" else ()
    head = Head(only_output(segments), segments[-1].role, holder, task, via=via)
    return Topology(
        "multi_hop", segments, model_inputs(segments, chain[0]), (head,), sent_inputs=sent_values(segments, sent_inputs)
    )
