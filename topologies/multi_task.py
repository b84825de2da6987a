"""Multi-task: several servers, each with a model, labels and a loss of its own, on the same releases.

Paper: Vepakomma, Gupta, Swedish, Raskar, "Split learning for health: distributed deep learning without sharing raw
patient data", 2018, figure 3b.

Every server receives every feature party's release and joins them itself; the gradients of all tasks are added at the
feature parties.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from splitfed.core.errors import InvalidInput, check_names
from splitfed.core.topology import Head, Segment, Topology
from splitfed.topologies.fusion import bottoms_of, check_free, fusion_at


def multi_task(
    bottoms: Mapping[str, nn.Module],
    tops: Mapping[str, nn.Module],
    *,
    targets: Mapping[str, str | None],
    labels: Mapping[str, str] | None = None,
    weights: Mapping[str, float] | None = None,
    fusion: str = "concat",
    inputs: Mapping[str, Sequence[str]] | None = None,
    sent_inputs: Sequence[str] = (),
) -> Topology:
    """Return the topology that sends the releases of `bottoms` to every server of `tops`, each role -> module.

    `targets`: server -> the label set it is trained on (None: the data's main one); `labels`: server -> the role that
    holds those labels (default: the server itself); `weights`: server -> factor of its loss (default: 1). `fusion` as
    for `vertical`, by name only, since every server needs its own; `inputs` and `sent_inputs` as there.
    """
    if not isinstance(tops, Mapping) or not tops:
        raise InvalidInput("tops must name at least one server with its module")
    for name, given in (("targets", targets), ("labels", labels or {}), ("weights", weights or {})):
        check_names(f"server in {name}", tops, *given)
    parties, owners = bottoms_of(bottoms, inputs)
    segments, heads = list(parties), []
    for server, top in tops.items():
        check_free(bottoms, server=server)
        if server not in targets:
            raise InvalidInput(
                f"targets has no entry for server {server!r}; expected a label set, or None for the main one"
            )
        joined = fusion_at(server, parties, fusion, f"fusion_{server}")
        out = f"out_{server}"
        segments += [joined, Segment(f"top_{server}", server, top, joined.outputs, (out,), f"tops.{server}.")]
        holder, weight = (labels or {}).get(server, server), (weights or {}).get(server, 1.0)
        heads.append(Head(out, server, holder, None, weight, targets[server]))
    return Topology("multi_task", tuple(segments), owners, tuple(heads), sent_inputs=tuple(sent_inputs))
