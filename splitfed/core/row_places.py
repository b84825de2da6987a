"""Whether what is computed of a row depends on its place in the batch, or on how many rows that has: tried out.

Where a row may be added or taken away, as with `sampling="poisson"`, each of the others stands elsewhere then, beside
one row more or less. So every segment is run on a batch and on parts of it, without the first row, without a random
half, and on the first half alone, and outputs of the rows that are left have to be the same, up to rounding. A part
gets what the segments before made of the whole batch.

In both modes, with the dropout of torch.nn switched off, as what is drawn for a row goes by its place; in a
mode in which a segment draws all the same it is not tried.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.modules.dropout import _DropoutNd

from splitfed.core.model_call import set_mode
from splitfed.core.model_snapshot import ModelSnapshot, seed_generators
from splitfed.core.random import derive
from splitfed.core.row_losses import FAILURES, rows_equal
from splitfed.core.topology import Segment, Topology
from splitfed.core.topology_facts import Finding, TopologyFacts
from splitfed.core.trial_rows import TrialRows, draw_half


def find_counting(topology: Topology, facts: TopologyFacts, trial: TrialRows) -> tuple[Finding, ...]:
    """Return the outputs, kind "count", in which place or number of rows shows, by rows of `trial`."""
    batch = max(3, trial.batch)
    numbers = torch.arange(batch) % len(trial)
    found: list[Finding] = []
    for training in (True, False):
        values = {name: t.index_select(0, numbers) for name, t in trial.inputs.items()}
        for segment in topology.segments:
            found += _try_segment(segment, facts, values, training, batch)
    return tuple(dict.fromkeys(found))


def _try_segment(
    segment: Segment, facts: TopologyFacts, values: dict[str, Tensor], training: bool, batch: int
) -> Iterator[Finding]:
    """Yield what shows in a segment; its outputs on the whole batch join `values`."""
    module, data = segment.module, facts.data(segment.outputs)
    modes = [(inner, inner.training) for inner in module.modules()]
    # As parties train and score: what its owner has put in evaluation mode stays in it in training.
    if training != module.training:
        set_mode(module, training)
    elif not training:
        module.eval()
    for inner in module.modules():
        if isinstance(inner, _DropoutNd):
            inner.eval()
    # It puts modes back as well.
    fresh = ModelSnapshot(module)
    try:
        whole, draws = _run(segment, values)
        fresh.restore()
        values.update(zip(segment.outputs, whole, strict=True))
        if draws:
            return
        for kept in _parts(batch):
            part = {n: values[n][kept] if _has_rows(values[n], batch) else values[n] for n in segment.inputs}
            try:
                outputs, _ = _run(segment, part)
            except FAILURES:  # it takes no such number of rows, and raises in training too
                continue
            finally:
                fresh.restore()
            for name, one, other in zip(segment.outputs, whole, outputs, strict=True):
                every = torch.ones(len(kept), dtype=torch.bool)
                if name in data and _has_rows(one, batch) and not rows_equal(one[kept], other, every):
                    yield Finding(segment.name, "count", name)
    finally:
        fresh.restore()
        for inner, mode in modes:
            inner.training = mode


def _parts(batch: int) -> Iterator[Tensor]:
    """Yield which rows are left, their numbers in order."""
    yield torch.arange(1, batch)
    yield draw_half(batch, "left out").logical_not().nonzero()[:, 0]
    yield torch.arange((batch + 1) // 2)


def _has_rows(value: Tensor, batch: int) -> bool:
    return value.dim() > 0 and len(value) == batch


def _run(segment: Segment, values: dict[str, Tensor]) -> tuple[tuple[Tensor, ...], bool]:
    """Return what the segment makes of `values`, and whether it draws random numbers."""
    seed_generators(derive(0, "made-up rows", segment.name))
    before = torch.get_rng_state()
    with torch.no_grad():
        result = segment.module(*(values[name].clone() for name in segment.inputs))
    outputs = tuple(result) if isinstance(result, (tuple, list)) else (result,)
    return outputs, not torch.equal(before, torch.get_rng_state())
