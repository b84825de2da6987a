"""Multi-hop: a chain of parties between the client and the server, each of which sees its neighbours only.

Paper: Vepakomma, Gupta, Swedish, Raskar, "Split learning for health: distributed deep learning without sharing raw
patient data", 2018, figure 3c ("Tor-like").

Messages name their sender, their receiver and a number that tells one client's messages from another's but is not the
client's; what the order or the number of its batches tells about a client is not hidden. Labels are relayed hop by hop
to the server (each hop sees them), stay with the client, which then holds the last piece of the model and is the
server's neighbor too, or belong to the server: then every client has a server of its own, as it has data of its own,
and the last hop can tell the clients by their servers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from torch import Tensor, nn

from splitfed.core.errors import InvalidInput, unknown
from splitfed.core.tasks import Task
from splitfed.core.topology import Head, Topology
from splitfed.topologies._chain import cut_in_roles, model_inputs, only_output

LABELS = ("relayed", "client", "server")


def multi_hop(
    model: nn.Module,
    cuts: Sequence[str],
    roles: Sequence[str] | None = None,
    labels: str = "relayed",
    task: Task | None = None,
    example: Tensor | Mapping[str, Tensor] | None = None,
) -> Topology:
    """Cut `model` after the submodules `cuts`, one more than there are hops, and give each piece to the next party.

    `roles`: client, hops and server in order (default: client, hop1, ..., server). `labels`: "relayed" from the
    client through the hops to the server; "client": the client keeps them and gets the last piece, the last cut being
    the way back to it; "server": the server owns them. A value that would jump over a party is refused.
    `example`: rows of the input, as for `splitfed.cut`.
    """
    if labels not in LABELS:
        raise unknown("labels of a multi-hop topology", labels, LABELS)
    if not isinstance(cuts, (list, tuple)):
        raise InvalidInput(f"cuts={cuts!r} is not allowed; expected a list of submodules")
    pieces = len(cuts) + 1 - (labels == "client")
    if pieces < 3:
        least = 3 if labels == "client" else 2
        raise InvalidInput(f"cuts={cuts!r} is not allowed; expected a list of at least {least} submodules")
    chain = tuple(roles) if roles is not None else ("client", *(f"hop{i}" for i in range(1, pieces - 1)), "server")
    if isinstance(roles, str) or len(chain) != pieces or len(set(chain)) != pieces:
        raise InvalidInput(f"roles={roles!r} is not allowed; {len(cuts)} cuts need {pieces} different roles")
    names = ["bottom", *chain[1:-1], "top", *(["head"] if labels == "client" else [])]
    segments = cut_in_roles(model, tuple(cuts), names, [*chain, *([chain[0]] if labels == "client" else [])], example)
    holder = chain[-1] if labels == "server" else chain[0]
    via = chain[1:-1] if labels == "relayed" else ()
    head = Head(only_output(segments), segments[-1].role, holder, task, via=via)
    topology = Topology("multi_hop", segments, model_inputs(segments, chain[0]), (head,))
    _check_neighbours(topology, (*chain, chain[0]) if labels == "client" else chain)
    return topology


def _check_neighbours(topology: Topology, chain: tuple[str, ...]) -> None:
    neighbours = {frozenset(pair) for pair in pairwise(chain)}
    for edge in topology.crossings:
        ends = topology.role_of(edge.source), topology.role_of(edge.target)
        if frozenset(ends) not in neighbours:
            raise InvalidInput(
                f"value {edge.values[0]!r} would go from {ends[0]!r} straight to {ends[1]!r}, past the parties between "
                "them: cut where no connection skips a piece"
            )
