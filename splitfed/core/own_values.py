"""Values that a party computes from its own data alone, outside of any step."""

from __future__ import annotations

import torch
from torch import Tensor

from splitfed.core.messages import Stamp
from splitfed.core.party import Party
from splitfed.core.step_plan import SegmentPlan
from splitfed.core.step_state import Batch

OWN_ROWS = 256
"""The rows of which a party computes a value at once."""


def compute_own_value(party: Party, value: str, part: str, rows: int = OWN_ROWS) -> Tensor:
    """Return `value` of all rows of `part`, (rows, ...), in evaluation mode, `rows` at a time.

    Raises `KeyError` for a value that needs what others send.
    """
    inputs, _ = party.state.data[part]
    total = len(next(iter(inputs.values())))
    needed_values, batches = {value}, []
    needed: list[SegmentPlan] = []
    for segment_plan in reversed(party.state.segment_plans.values()):
        if needed_values.intersection(segment_plan.outputs):
            needed_values.update(segment_plan.inputs)
            needed.insert(0, segment_plan)
    with torch.no_grad():
        for step, row_indices in enumerate(torch.arange(total).split(rows)):
            stamp = Stamp("evaluate", -1, 0, step, part)
            party.begin(Batch(part, row_indices), stamp)
            own = party.inputs(-1)
            for segment_plan in needed:
                if all(party.has_value(n, -1) or n in own for n in segment_plan.inputs):
                    party.forward(segment_plan.segment, (), stamp, {}, ())
            batches.append(party.output(value, -1))
            party.forget(-1)
    return torch.cat(batches)
