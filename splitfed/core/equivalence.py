"""Equivalence of a cut model and the uncut one, tested before training by running both on the same rows.

The user's own model is trained for a few small batches as anybody would train it, beside parties that hold copies of
its segments, and everything is compared bit for bit: what comes out, which weights get a gradient and which one,
weights and buffers after the optimizer's step (every copy of a buffer that is held twice), names of the state, modes,
random numbers drawn, and plain Python attributes that `forward` changes. Outputs that are not finite (-inf for a masked
class) are compared as they are; the comparison ends, with a warning, at the batch where the gradients of both are no
longer finite. Afterwards the model is as it was. A difference is a refusal that names it: what cannot be cut exactly is
not cut.

Batches of 8 and of 5 rows in training, then evaluation with and without gradients, then training again, because each
of these is the first to show some difference. A finite test does not exclude a branch that is taken later, which is
why a `forward` that goes on changing Python state, wherever it is kept, is refused whatever it computes.

One thing is compared loosely: where a value is read twice or more behind a cut and again elsewhere, its gradients are
added in another order than in the uncut model. The gradients of the weights behind that value, and of no others, may
then differ by 1024 units in the last place of the largest number of their tensor; a smaller difference of another cause
is not found there. The parties' step is taken with the uncut model's gradients of these weights, so that all else stays
comparable bit for bit.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from splitfed.core import weight_sharing
from splitfed.core.equivalence_batches import Batches, SideFailed, Stage, first_rows, run_batch
from splitfed.core.equivalence_sides import (
    EVALUATION,
    NO_GRADIENTS,
    TRAINING,
    Parties,
    Side,
    StepResult,
    Uncut,
    Values,
    as_tuple,
    unit_of,
)
from splitfed.core.errors import InvalidInput
from splitfed.core.example_pass import pass_example
from splitfed.core.model_checks import naming_what_is_left
from splitfed.core.model_snapshot import ModelSnapshot
from splitfed.core.outcome_differences import TRACE, UNREPEATED, Difference, check_same
from splitfed.core.payload import copy_modules
from splitfed.core.plain_values import same_tensors
from splitfed.core.reordered_gradients import reordered_weights
from splitfed.core.topology import Original, Segment, Topology, frozen_modules
from splitfed.core.uncut_runs import RecordedUncut, UncutRun, UncutRuns
from splitfed.core.unread_state import refuse_unread
from splitfed.core.unsaved_state import UNKEPT, NotKept, check_comes_back, state_digests, unsaved_state
from splitfed.core.weight_sharing import copy_sharing, is_large, weight_sums

STAGES: tuple[Stage, ...] = ((TRAINING, 8), (TRAINING, 5), (EVALUATION, 8), (NO_GRADIENTS, 5), (TRAINING, 8))
"""The batches that are compared: the mode, and how many rows."""
FEW_STAGES: tuple[Stage, ...] = ((TRAINING, 3), (NO_GRADIENTS, 2))
"""Those of a large model; see `weight_sharing.is_large`."""
EXAMPLES = max(rows for _, rows in STAGES)
"""How many rows are used, at the most."""
_STATE = (
    "each party has only a part of the model, so that Python values cannot steer it: keep what must change in a buffer "
    "that is changed in place, and nothing else"
)
_SHARED = "all copies of the segment share that: keep what changes in a buffer, or in an attribute that is a number"


class FailsByItself(InvalidInput):
    """The uncut model fails on the rows that it is compared on."""


def describe_proof(weights: int) -> str:
    """Return what the comparison of a model of so many `weights` leaves unproved, in a line; "" for a small one."""
    if weights < weight_sharing.LARGE:
        return ""
    batches = " and ".join(f"{rows} rows in {stage}" for stage, rows in FEW_STAGES)
    return (
        f"compared on {batches}, with one step between them, as the model is large: what would show in more rows or in "
        "later steps alone is not proved"
    )


def check_topology(topology: Topology, batch: Values) -> None:
    """Compare every model that segments of `topology` were cut from, and every segment made by hand, with plain calls.

    `batch`: rows of every input (value -> (rows, ...)), two or more. Raises `InvalidInput` for the first difference.
    """
    if not torch.is_grad_enabled():
        raise InvalidInput(
            "gradients are switched off by the caller (torch.no_grad, inference_mode or set_grad_enabled), with which "
            "nothing can be trained or compared; expected a call outside of it"
        )
    values: Values = batch
    in_training = any(segment.module.training for segment in topology.segments)
    for segments, original in _list_units(topology):
        reads = {v for s in segments for v in s.inputs} - {v for s in segments for v in s.outputs}
        if not reads <= set(values):
            values = _plain_values(topology, batch)
        with naming_what_is_left(original.model):
            _compare(segments, original, {v: values[v] for v in reads}, in_training)


def check_example(original: Original, batch: Values) -> None:
    """Refuse a `batch` (value -> (rows, ...)) that lacks an input of `original`, or has fewer than two rows of it."""
    kind = type(original.model).__name__
    for value, name in original.arguments.items():
        if value not in batch:
            raise InvalidInput(f"example has no rows for the input {name!r} of {kind}")
    check_counts(kind, {name: batch[value] for value, name in original.arguments.items()})


def check_counts(kind: str, inputs: Values) -> None:
    """Refuse `inputs` of the class of models `kind` that have fewer than two rows, or not the same number."""
    counts = {name: len(x) if x.dim() else 0 for name, x in inputs.items()}
    for name, rows in counts.items():
        if rows < 2:
            raise InvalidInput(f"example has {rows} rows for the input {name!r} of {kind}; expected at least 2")
    if len(set(counts.values())) > 1:
        raise InvalidInput(
            f"the inputs of {kind} have {', '.join(f'{rows} rows ({name})' for name, rows in counts.items())}: a batch "
            "has one row of each; of a graph, let a row be a whole graph (rows, nodes, features) and its edges a "
            "buffer of the model or an adjacency of every row"
        )


def check_original(
    original: Original, batch: Values, snapshot: ModelSnapshot | None = None, runs: UncutRuns | None = None
) -> None:
    """Compare the pieces of `original` with it on `batch` (value -> (rows, ...)), two rows or more.

    `snapshot`: one of its model as it is, where there is one. `runs`: keeps what the model comes to, for all of its
    cuts. Raises `InvalidInput` for the first difference.
    """
    segments = [
        Segment(f"piece{number}", "model", module, inputs, outputs)
        for number, (module, inputs, outputs) in enumerate(original.pieces)
    ]
    with naming_what_is_left(original.model):
        _compare(segments, original, batch, original.model.training, snapshot, runs)


def _list_units(topology: Topology) -> list[tuple[list[Segment], Original]]:
    """Return what is compared by itself: all pieces of one model, or one segment made by hand."""
    units: dict[int, tuple[list[Segment], Original]] = {}
    available = {*topology.inputs, *(v for s in topology.segments for v in s.outputs)}
    segment_keys = {(id(s.module), s.inputs, s.outputs) for s in topology.segments}
    for segment in topology.segments:
        original = segment.original
        whole = original is not None and all((id(m), i, o) in segment_keys for m, i, o in original.pieces)
        if original is not None and whole and set(original.arguments) <= available:
            units.setdefault(id(original), ([], original))[0].append(segment)
        else:
            pieces = ((segment.module, segment.inputs, segment.outputs),)
            alone = Original(segment.module, {}, segment.outputs, pieces, ())
            units[id(segment)] = ([replace(segment, prefix="")], alone)
    return list(units.values())


def _plain_values(topology: Topology, batch: Values) -> dict[str, Tensor]:
    """Return every value of `topology` on `batch`, from copies of its segments in evaluation mode."""
    values = dict(batch)
    copies = copy_sharing({s.name: s.module for s in topology.segments})
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for segment in topology.segments:
            found = as_tuple(copies[segment.name].eval()(*(values[name].clone() for name in segment.inputs)))
            values.update(zip(segment.outputs, found, strict=True))
    return values


def _compare(
    segments: list[Segment],
    original: Original,
    inputs: Values,
    in_training: bool,
    snapshot: ModelSnapshot | None = None,
    runs: UncutRuns | None = None,
) -> None:
    """Run the segments beside the model they make up, and refuse the first difference.

    `in_training`: whether the user gave the model in training mode; see `graph.frozen_modules`.
    """
    unit = unit_of(segments, original, inputs)
    # One stream of random numbers runs through all segments, as it does through the uncut model.
    snapshot = snapshot or ModelSnapshot(original.model)
    refuse_unread(snapshot.records)
    large, reordered = is_large(original.model), reordered_weights(original)

    def make_sides(sharing: bool = False) -> tuple[Uncut, Parties]:
        snapshot.restore()
        snapshot.drop_gradients()
        parties = Parties(unit, facts, frozen_modules(unit, in_training), sharing)
        return Uncut(original, in_training, parties.shared), parties

    changed: list[str] | None = None
    try:
        facts = pass_example(unit, {n: first_rows(x, 2) for n, x in inputs.items()}, shared=True)
        facts = replace(facts, stochastic=frozenset(), plain_draws=frozenset())
        shapes = {head.value: facts.shapes[head.value] for head in unit.heads}
        stages = FEW_STAGES if large else STAGES
        stages += tuple((mode, rows) for rows in original.sizes for mode in (TRAINING, NO_GRADIENTS))
        batches = Batches(stages, inputs, shapes)
        forward_alone = replace(batches, shapes={})
        run = None
        if runs is not None:
            run = runs.find(original, in_training, batches, partial(make_sides, large), partial(_going_on, snapshot))
        if run and _same_as_recorded(original, run, make_sides(large), batches, reordered) and not snapshot.changes():
            return
        if run or not (large and _same_on_shared(original.model, make_sides(True), batches, reordered)):
            _run_stages(original.model, make_sides(), batches, reordered)
        changed, changes = [], bool(snapshot.changes())
        if changes and original.cuts:
            changed = _going_on(snapshot, partial(Uncut, original, in_training), forward_alone)
        if changed:
            raise Difference(f"forward changes the {changed[0]}", _STATE)
        if changes and (unkept := _find_unkept(snapshot, partial(Uncut, original, in_training), batches, original)):
            what = "a backward pass" if original.cuts else "forward"
            raise Difference(f"{what} changes the {unkept}, which a checkpoint cannot hold", UNKEPT)
    except Difference as error:
        what, advice = str(error), error.advice
        if original.cuts and changed is None:
            changed = _going_on(snapshot, partial(Uncut, original, in_training), forward_alone)
        if changed:
            what, advice = f"forward changes the {changed[0]}", _STATE
        elif error.in_outputs and not original.cuts and (shared := snapshot.shared_changes()):
            what, advice = f"forward changes the {shared[0]}", _SHARED
        elif not _repeats(lambda: make_sides()[0], batches):
            what, advice = "the uncut model itself does not repeat its results from the same seeds", UNREPEATED
        elif error.in_outputs:
            what += _locate_difference(make_sides(), batches)
        by_hand = ", or pass segments by hand (splitfed.Segment)" if original.cuts else ""
        raise InvalidInput(f"{_describe_model(segments, original)}: {what}; {advice}{by_hand}") from None
    finally:
        snapshot.restore()


def _describe_model(segments: Sequence[Segment], original: Original) -> str:
    if not original.cuts:
        return f"segment {segments[0].name!r} does in its party what it does not do by itself"
    cuts = ", ".join(map(repr, original.cuts))
    return f"{type(original.model).__name__} cut at {cuts} is another model than the uncut one"


class _Written(Exception):
    """A forward pass has written into weights that both sides share."""


def _same_as_recorded(
    original: Original,
    run: UncutRun,
    sides: tuple[Uncut, Parties],
    batches: Batches,
    reordered: Collection[str],
) -> bool:
    """Return whether the parties come to what the uncut model came to in `run`; False says nothing of another run."""
    uncut, parties = sides
    recorded = run.stand_in(uncut, original)
    return parties.shared == run.shared and _same_on_shared(original.model, (recorded, parties), batches, reordered)


def _same_on_shared(
    model: nn.Module, sides: tuple[Uncut | RecordedUncut, Parties], batches: Batches, reordered: Collection[str]
) -> bool:
    """Return whether the sides are the same on shared weights; False says nothing of sides with their own."""
    try:
        _run_stages(model, sides, batches, reordered)
    except (Difference, _Written):
        return False
    return True


def _run_stages(
    model: nn.Module, sides: tuple[Uncut | RecordedUncut, Parties], batches: Batches, reordered: Collection[str]
) -> None:
    name, shared = type(model).__name__, bool(sides[1].shared)
    sums = weight_sums(model) if shared else []
    for step, (stage, rows) in enumerate(batches.stages):
        try:
            uncut = run_batch(sides[0], step, batches)
        except SideFailed as error:
            raise FailsByItself(f"{name} fails by itself in {stage} with {rows} rows: {error}") from error
        if uncut is not None:
            sides[1].replaced = {n: g for n in reordered if (g := uncut.gradients.get(n)) is not None}
            sides[1].expected = uncut.gradients
        if shared and sums != weight_sums(model):
            raise _Written
        try:
            cut = run_batch(sides[1], step, batches)
        except SideFailed as error:
            raise Difference(f"in {stage} with {rows} rows its segments fail ({error})", TRACE) from error
        if uncut is None and cut is None:
            warnings.warn(
                f"{name} was compared with its cut model for {step} of {len(batches.stages)} batches only: its "
                f"gradients are not finite in {stage} with {rows} rows",
                UserWarning,
                stacklevel=2,
            )
            return
        if uncut is None or cut is None:
            raise Difference(f"in {stage} one of them alone is finite", TRACE, in_outputs=True)
        try:
            check_same(uncut, cut, reordered)
        except Difference as error:
            raise Difference(f"in {stage} {error}", error.advice, error.in_outputs) from None
        if shared:
            if sums != weight_sums(model):
                raise _Written
            if uncut.gradients:
                sides[0].step_shared(uncut.gradients)
                sums = weight_sums(model)


def _going_on(snapshot: ModelSnapshot, make: Callable[[], Side], batches: Batches) -> list[str]:
    """Return the Python state that the uncut model changed since `snapshot`, and changes again in the same batches.

    What is the same after them is a cache, such as a table of positions, that the first batches filled.
    """
    if not (changed := snapshot.changes()):
        return []
    warm = ModelSnapshot(snapshot.model, like=snapshot)
    _all_stages(make(), batches)
    going_on = warm.changes()
    return _of_the_same(changed, going_on) or going_on


def _find_unkept(snapshot: ModelSnapshot, make: Callable[[], Side], batches: Batches, original: Original) -> str | None:
    """Return what no checkpoint of a party would hold of what the uncut model changes since `snapshot`."""
    shared, model = snapshot.shared_changes(), snapshot.model
    if shared and original.cuts:
        # Hooks change in the backward pass what one party alone has.
        shared = _of_the_same(shared, _going_on(snapshot, make, batches))
    snapshot.restore()
    fresh = None if original.cuts else copy_modules({"": model})[""]
    if fresh is None:
        # What the first batches have filled is a cache, which each party has filled when it begins.
        _all_stages(make(), batches)
    first = state_digests(model)
    _all_stages(make(), batches)
    try:
        saved = unsaved_state(model, first)
        if saved and fresh is not None:
            check_comes_back(model, {"": saved}, fresh)
    except NotKept as error:
        return error.name
    return shared[0] if shared else None


def _of_the_same(changes: Sequence[str], others: Sequence[str]) -> list[str]:
    """Return those of `changes` that change the same as one of `others`, though perhaps to another value."""
    names = {change.rpartition(" (")[0] for change in others}
    return [change for change in changes if change.rpartition(" (")[0] in names]


def _repeats(make: Callable[[], Side], batches: Batches) -> bool:
    """Return whether a side comes to the same bits when it is run again."""
    first, second = (_all_stages(make(), batches) for _ in range(2))
    try:
        for one, other in zip(first, second, strict=False):
            if one is not None and other is not None:
                check_same(one, other, ())
    except Difference:
        return False
    return len(first) == len(second)


def _all_stages(side: Side, batches: Batches) -> list[StepResult | None]:
    """Run all batches, or those before the first at which the model fails by itself."""
    found = []
    for step in range(len(batches.stages)):
        try:
            found.append(run_batch(side, step, batches))
        except SideFailed:
            break
    return found


def _locate_difference(sides: tuple[Side, Side], batches: Batches) -> str:
    """Say at which submodule the two first differ, by running both again and looking at what each returns."""
    for step in range(len(batches.stages)):
        calls_of_sides: list[dict[tuple[str, int], Tensor]] = []
        for side in sides:
            calls: dict[tuple[str, int], Tensor] = {}
            hooks = [
                m.register_forward_hook(partial(_record_call, calls, name))
                for name, m in side.modules().items()
                if name
            ]
            try:
                run_batch(side, step, batches)
            except SideFailed:
                return ""
            finally:
                for hook in hooks:
                    hook.remove()
            calls_of_sides.append(calls)
        last = ""
        for (name, count), value in calls_of_sides[0].items():
            if (name, count) not in calls_of_sides[1] or not same_tensors(value, calls_of_sides[1][name, count]):
                return f", first at submodule {name!r}" + (f", after {last!r}" if last else "")
            last = name
    return f", after submodule {last!r}" if last else ""


def _record_call(
    calls: dict[tuple[str, int], Tensor], name: str, _module: nn.Module, _inputs: Any, output: Any
) -> None:
    value = output[0] if isinstance(output, (tuple, list)) and output else output
    if isinstance(value, Tensor):
        calls[name, sum(n == name for n, _ in calls)] = value.detach().clone()
