"""Whether a row of a batch changes what is computed of other rows, now or in later batches: tried out before training.

A promise for a row holds only if no other row shows in what is released of it. Batch norm in training is not all there
is: a layer may subtract the mean of its batch or of eight rows, pad to the longest, hand rows to experts until these
are full, attend across the batch, or remember rows in a buffer, in an attribute, in what it calls, or outside of the
module. So each segment is run on batches that are followed by their twins, in which some rows are others
(`splitfed.core.trial_rows`), and nothing of the rest may differ: neither their outputs, nor anything that can be
reached from the module (`splitfed.core.reachable`), nor what it computes of the next batch. The loss is tried likewise.

A run that promises something of its rows does this once, with rows of its own, and keeps what was found in its
`TopologyFacts`; for what has no rows at hand they are made up.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from splitfed.core.model_snapshot import LaterState, ModelSnapshot, seed_generators
from splitfed.core.plain_values import same_tensors
from splitfed.core.random import derive
from splitfed.core.reachable import Change, Records
from splitfed.core.reachable_names import name_changes
from splitfed.core.row_losses import FAILURES, LossFault, loss_fault, rows_equal
from splitfed.core.topology import Segment, Topology
from splitfed.core.topology_facts import Finding, TopologyFacts
from splitfed.core.trial_rows import RowPair, TrialRows, make_pairs, make_up_rows

_FAULTS = {LossFault.MIXED: "loss", LossFault.SCALED: "scale"}


class _Course(NamedTuple):
    """What came of the batches of all pairs, and what the module held before those in which no row is another."""

    outputs: list[tuple[Tensor, ...]]
    kept: LaterState


def findings(topology: Topology, facts: TopologyFacts, names: Collection[str]) -> Sequence[Finding]:
    """Return where one row of a batch changes what the segments `names` compute of another row.

    `names`: segments that read inputs alone. What the run has found on its own rows is returned where it has, else the
    segments are tried with rows made up for it; raises one of `FAILURES` where a segment cannot compute on these.
    """
    if facts.row_findings is not None:
        return [finding for finding in facts.row_findings if finding.segment in names]
    return try_rows(topology, facts, make_up_rows(topology, facts), names)


def mixes_rows(topology: Topology, facts: TopologyFacts, names: Collection[str]) -> bool:
    """Return whether one of the segments `names`, which need nothing that others make, mixes rows or keeps any.

    A loss whose rows are only weighed otherwise than in a mean does not. What cannot be tried counts as mixing.
    """
    try:
        return any(finding.kind != "scale" for finding in findings(topology, facts, names))
    except FAILURES:
        return True


def try_rows(
    topology: Topology, facts: TopologyFacts, trial: TrialRows, names: Collection[str] | None = None
) -> tuple[Finding, ...]:
    """Run the segments `names` (default: all), and the losses of their values, on pairs of batches of `trial`.

    What tells of lengths and masks alone is not compared: it crosses without a promise (`TopologyFacts.told`), and
    shows in what is made of it where that matters. Raises what a segment raises on the first pair, on which it has to
    work.
    """
    pairs = make_pairs(trial)
    found: list[Finding] = []
    for segment in topology.segments:
        if names is None or segment.name in names:
            found += _try_segment(segment, facts.data(segment.outputs), pairs)
            for head in topology.heads:
                if head.value in segment.outputs and head.task is not None:
                    rows, labels = pairs[0].rows, trial.labels.get(head.value)
                    fault = loss_fault(
                        head.task,
                        pairs[0].one[head.value],
                        None if rows is None or labels is None else labels.index_select(0, rows),
                    )
                    found += [] if fault is None else [Finding(segment.name, _FAULTS[fault], head.value)]
    return tuple(dict.fromkeys(found))


def in_training(module: nn.Module) -> nn.Module:
    """Return a copy as a party would train it: in training mode, but for what its owner has put in evaluation mode."""
    made = copy.deepcopy(module)
    return made if made.training else made.train()


def _try_segment(segment: Segment, compared: Collection[str], pairs: list[RowPair]) -> list[Finding]:
    """Return where changed rows show; what the segment returns becomes part of the `pairs`, for those behind it.

    `compared`: those of its outputs in which a row may not show. Pairs on which it fails, and that it need not work on,
    are taken out.
    """
    module, name = in_training(segment.module), segment.name
    saved = {key: t.clone() for key, t in module.state_dict().items()}
    fresh = ModelSnapshot(module)
    try:
        first = _run_all(segment, module, pairs, fresh, other=False)
        state = [key for key, t in module.state_dict().items() if key not in saved or not same_tensors(saved[key], t)]
        fresh.restore()
        second = None if first is None else _run_all(segment, module, pairs, fresh, other=True)
        fresh.restore()
        if first is None or second is None:
            # Anew: what it did until it failed is no memory of rows.
            return _try_segment(segment, compared, pairs)
        remembered = _remembered(first.kept, second.kept)
        found = [Finding(name, "state", key) for key in state]
        for place, pair in enumerate(pairs):
            for value, a, b in zip(segment.outputs, first.outputs[place], second.outputs[place], strict=True):
                if value in compared and not rows_equal(a, b, ~pair.changed):
                    alone = place == 0 or _mixes_alone(segment, module, fresh, pair)
                    found.append(Finding(name, _kind(pair) if alone else "next batch", value))
        found += [Finding(name, "memory", where) for where in remembered]
    finally:
        fresh.restore()
    for pair, one, other in zip(tuple(pairs), first.outputs, second.outputs, strict=True):
        pair.one.update(zip(segment.outputs, one, strict=True))
        pair.other.update(zip(segment.outputs, other, strict=True))
        if not pair.needed and not all(bool(torch.isfinite(t).all()) for t in (*one, *other)):
            pairs.remove(pair)
    return found


def _kind(pair: RowPair) -> str:
    return "output" if pair.training else "evaluation"


def _mixes_alone(segment: Segment, module: nn.Module, fresh: ModelSnapshot, pair: RowPair) -> bool:
    """Return whether changed rows show in others of their batch, and not only those of earlier batches."""
    if not bool(pair.changed.any()):
        return False
    results = []
    for other in (False, True):
        results.append(_run(segment, module, pair, other))
        fresh.restore()
    return not all(rows_equal(a, b, ~pair.changed) for a, b in zip(*results, strict=True))


def _run_all(
    segment: Segment, module: nn.Module, pairs: list[RowPair], fresh: ModelSnapshot, *, other: bool
) -> _Course | None:
    """Run one batch of each pair, in their order; None where a pair had to be taken out."""
    outputs: list[tuple[Tensor, ...]] = []
    kept = None
    for pair in pairs:
        if kept is None and not bool(pair.changed.any()):
            kept = fresh.keep()
        try:
            outputs.append(_run(segment, module, pair, other))
        except Exception:  # the user's own module may raise anything
            if pair.needed:
                raise
            pairs.remove(pair)
            return None
    return _Course(outputs, fresh.keep() if kept is None else kept)


def _run(segment: Segment, module: nn.Module, pair: RowPair, other: bool) -> tuple[Tensor, ...]:
    values = pair.other if other else pair.one
    modes = [(inner, inner.training) for inner in module.modules()]
    seed_generators(derive(0, "made-up rows", segment.name))
    try:
        if not pair.training:
            module.eval()
        with torch.no_grad():
            result = module(*(values[name].clone() for name in segment.inputs))
    finally:
        for inner, mode in modes:
            inner.training = mode
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def _remembered(first: LaterState, second: LaterState) -> list[str]:
    """Return the names of what is another in `second` than in `first`."""
    found = [one for one in first.differences(second) if not _is_transient(one, second.records)]
    return list(name_changes(found, first.records))


def _is_transient(change: Change, records: Records) -> bool:
    """Return whether it is about an attribute that every call makes anew before anybody reads it."""
    keys = (*change.place.path(), *([] if change.key is None else [change.key]))
    holder = change.place if change.key is not None else change.place.parent
    for key in reversed(keys):
        record = None if holder is None else records.get(holder)
        if record is not None and key.name in getattr(type(record.value), "transient", ()):
            return True
        holder = None if holder is None else holder.parent
    return False
