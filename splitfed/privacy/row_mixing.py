"""Whether rows of a batch change what leaves of other rows, or the state of a segment: tried out on made-up rows.

A release is charged to its own row only if no other row shows in it: neither through the segments that make it
(`splitfed.core.row_independence`) nor through a defense, which may scale its noise by the batch. Whatever cannot be
tried on made-up rows counts as mixing.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from splitfed.core.defense import Defense, ReleaseDefense
from splitfed.core.defense_context import Context
from splitfed.core.messages import Stamp
from splitfed.core.probe import Facts
from splitfed.core.row_independence import FAILURES, ROWS, draw_values, findings, other_rows_equal
from splitfed.core.topology import Topology


def segments_mix(topology: Topology, facts: Facts, names: Collection[str]) -> bool:
    """Return whether one of the segments `names`, which need nothing that others make, mixes rows or keeps any."""
    try:
        return any(findings(topology, facts, names))
    except FAILURES:
        return True


def release_mixes(defense: Defense, topology: Topology, facts: Facts, edge: str) -> bool:
    """Return whether `defense` lets a row change what is released of others on `edge`."""
    if not isinstance(defense, ReleaseDefense):
        return False
    context = Context("", edge, Stamp("train", 0, 0, 0), 0, 0)
    try:
        with torch.no_grad():
            for value in topology.edge(edge).values:
                shape, dtype = facts.shapes[value], facts.dtypes[value]
                z = draw_values((ROWS, *shape), dtype, "one", value)
                new = 3 * draw_values((1, *shape), dtype, "other", value) + 1
                changed = torch.cat([new.to(dtype), z[1:]])
                if not other_rows_equal(*(defense.release(value, t.clone(), context) for t in (z, changed))):
                    return True
    except FAILURES:
        return True
    return False
