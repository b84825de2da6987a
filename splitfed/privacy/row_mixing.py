"""Tests on made-up values whether a defense makes the release of a row depend on other rows of the batch.

A release is charged to its own row only if it depends on no other row: neither through the segments that compute it
(`splitfed.core.row_independence`) nor through a defense, which may scale its noise by the batch. A defense that cannot
be tested on made-up values counts as mixing.
"""

from __future__ import annotations

import torch

from splitfed.core.defense import Defense, ReleaseDefense
from splitfed.core.defense_context import Context
from splitfed.core.messages import Stamp
from splitfed.core.row_losses import FAILURES, rows_equal
from splitfed.core.topology import Topology
from splitfed.core.topology_facts import TopologyFacts
from splitfed.core.trial_rows import MADE_UP, draw_half, draw_values

_RANGES = ((0.0, 1.0), (-30.0, 30.0))


def release_mixes(defense: Defense, topology: Topology, facts: TopologyFacts, edge: str) -> bool:
    """Return whether `defense` makes the release of a row on `edge` depend on other rows."""
    if not isinstance(defense, ReleaseDefense):
        return False
    context = Context("", edge, Stamp("train", 0, 0, 0), 0, 0)
    try:
        with torch.no_grad():
            for value in facts.data(topology.edge(edge).values):
                shape, dtype = (MADE_UP, *facts.shapes[value]), facts.dtypes[value]
                for low, high in _RANGES:
                    z = draw_values(shape, dtype, "one", value, low=low, high=high)
                    new = (3 * draw_values(shape, dtype, "other", value, low=low, high=high) + high).to(dtype)
                    changed = draw_half(MADE_UP, edge, value)
                    other = torch.where(changed.reshape(-1, *[1] * (z.dim() - 1)), new, z)
                    one, two = (defense.release(value, t.clone(), context) for t in (z, other))
                    if not rows_equal(one, two, ~changed):
                        return True
    except FAILURES:
        return True
    return False
