"""Extended vanilla: the joined releases pass another client before they reach the server.

Paper: Vepakomma, Gupta, Swedish, Raskar, "Split learning for health: distributed deep learning without sharing raw
patient data", 2018, figure 3a.

The server sees what the relay releases, and no feature party's release by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from splitfed.core.errors import InvalidInput
from splitfed.core.tasks import Task
from splitfed.core.topology import Head, Segment, Topology
from splitfed.topologies.fusion import bottoms_of, check_free, fusion_at


def extended_vanilla(
    bottoms: Mapping[str, nn.Module],
    middle: nn.Module,
    top: nn.Module,
    *,
    labels: str,
    fusion: str | nn.Module = "concat",
    relay: str = "relay",
    server: str = "server",
    task: Task | None = None,
    inputs: Mapping[str, Sequence[str]] | None = None,
    sent_inputs: Sequence[str] = (),
) -> Topology:
    """Return the topology that joins the releases of `bottoms` (role -> module) at `relay` and ends at `server`.

    `middle` runs at `relay`, `top` at `server`. `labels`: the role that holds them; they are sent to the server unless
    it holds them. `fusion`, `inputs` and `sent_inputs` as for `vertical`.
    """
    check_free(bottoms, relay=relay, server=server)
    if relay == server:
        raise InvalidInput(f"relay={relay!r} is not allowed; it must be another party than the server")
    parties, owners = bottoms_of(bottoms, inputs)
    joined = fusion_at(relay, parties, fusion)
    segments = (
        *parties,
        joined,
        Segment("middle", relay, middle, joined.outputs, ("middle_out",), "middle."),
        Segment("top", server, top, ("middle_out",), ("top_out",), "top."),
    )
    heads = (Head("top_out", server, labels, task),)
    return Topology("extended_vanilla", segments, owners, heads, sent_inputs=tuple(sent_inputs))
