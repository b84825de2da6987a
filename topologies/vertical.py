"""Vertical: parties that hold different parts of the same rows, each with a bottom model of its own, and one top.

Paper: Vepakomma, Gupta, Swedish, Raskar, "Split learning for health: distributed deep learning without sharing raw
patient data", 2018, figure 2c; Ceballos et al., "SplitNN-driven vertical partitioning", 2020, for the fusions.

An input is named after the party that owns it, which is the name of its feature in the data; `inputs` names others,
and several. Parameters of the whole model are called `bottoms.ROLE.*`, `fusion.*`, `top.*` and `head.*`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from splitfed.core.tasks import Task
from splitfed.core.topology import Head, Segment, Topology
from splitfed.topologies.fusion import bottoms_of, check_free, fusion_at


def vertical(
    bottoms: Mapping[str, nn.Module],
    top: nn.Module,
    *,
    labels: str,
    fusion: str | nn.Module = "concat",
    head: nn.Module | None = None,
    server: str = "server",
    task: Task | None = None,
    inputs: Mapping[str, Sequence[str]] | None = None,
    sent_inputs: Sequence[str] = (),
) -> Topology:
    """Return the topology that joins the releases of `bottoms` (role -> module) at `server`, and runs `top` on them.

    `labels`: the role that holds them: a feature party, a party with labels only, or the server itself; they are sent
    to the server unless it holds them, or unless `head`, the last piece of the model, is at the label party: then the
    loss is computed there and they stay. `fusion`: "concat", "sum", "mean" or a module that takes all releases.
    `inputs`: role -> the features that its bottom takes, in the order of its arguments (default: the one with the name
    of the role). Bottoms may have different architectures; each returns one tensor, (rows, ...), see `Output`.
    `sent_inputs`: features that the server may see unchanged, or changed by constants only.
    """
    check_free(bottoms, server=server)
    parties, owners = bottoms_of(bottoms, inputs)
    joined = fusion_at(server, parties, fusion)
    segments = [*parties, joined, Segment("top", server, top, joined.outputs, ("top_out",), "top.")]
    if head is not None:
        segments.append(Segment("head", labels, head, ("top_out",), ("head_out",), "head."))
    last = segments[-1]
    heads = (Head(last.outputs[0], last.role, labels, task),)
    return Topology("vertical", tuple(segments), owners, heads, sent_inputs=tuple(sent_inputs))
