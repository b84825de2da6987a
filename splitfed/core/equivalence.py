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

import math
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from splitfed.core import weight_sharing
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
from splitfed.core.errors import InvalidInput, NonFinite, describe_failure, others_code
from splitfed.core.model_checks import naming_what_is_left
from splitfed.core.model_snapshot import ModelSnapshot, same_generators, seed_generators
from splitfed.core.probe import probe
from splitfed.core.random import generator
from splitfed.core.reordered_gradients import reordered_weights
from splitfed.core.topology import Original, Segment, Topology, frozen_modules
from splitfed.core.weight_sharing import copy_sharing, is_large, weight_sums

Stage = tuple[str, int]
STAGES: tuple[Stage, ...] = ((TRAINING, 8), (TRAINING, 5), (EVALUATION, 8), (NO_GRADIENTS, 5), (TRAINING, 8))
"""The batches that are compared: the mode, and how many rows."""
FEW_STAGES: tuple[Stage, ...] = ((TRAINING, 3), (NO_GRADIENTS, 2))
"""Those of a large model; see `weight_sharing.is_large`."""
EXAMPLES = max(rows for _, rows in STAGES)
"""How many rows are used, at the most."""
# Of some summands in another order: units in the last place of the largest number of the tensor, cancellation included.
_REORDERED = 2.0**10
_MODES = {True: "training", False: "evaluation"}
_MODE = "a party switches modes itself: call .eval() on that submodule before the cut, not in train()"
_RANDOM = "draw within a submodule that no cut lies in, such as nn.Dropout, or by a function of torch"
_GRADIENT = (
    "hooks on weights, no_grad and functions with a backward of their own do not survive the cut: use detach(), or put "
    "that part into a submodule"
)
_NO_GRADIENT = "freeze it by requires_grad_(False) instead of torch.no_grad() or set_grad_enabled() in forward"
_BUFFER = "change buffers in place by operations on tensors, in a submodule that stands on one side of the cut"
_STATE = (
    "each party has only a part of the model, so that Python values cannot steer it: keep what must change in a buffer "
    "that is changed in place, and nothing else"
)
_UNKEPT = (
    "keep what changes in buffers, or in attributes that are tensors, numbers, arrays, or lists, tuples, dicts and "
    "sets of these"
)
_TRACE = (
    "the trace does not show what forward does there (autocast, a branch, a number taken out of a tensor): write it as "
    "operations on tensors, or as a submodule"
)


class FailsByItself(InvalidInput):
    """The uncut model fails on the rows that it is compared on."""


class SideFailed(Exception):
    """What the code of one of the two sides raised, the user's own, in one line."""


def describe_proof(weights: int) -> str:
    """Return what the comparison of a model of so many `weights` leaves unproved, in a line; "" for a small one."""
    if weights < weight_sharing.LARGE:
        return ""
    batches = " and ".join(f"{rows} rows in {stage}" for stage, rows in FEW_STAGES)
    return (
        f"compared on {batches}, with one step between them, as the model is large: what would show in more rows or in "
        "later steps alone is not proved"
    )


@dataclass(frozen=True)
class _Batches:
    """What both sides run: the modes with how many rows, the rows, and the shapes of outputs without rows."""

    stages: tuple[Stage, ...]
    inputs: Values
    shapes: Mapping[str, tuple[int, ...]]


class Difference(Exception):
    """What differs, what to write instead, and whether it shows in what comes out."""

    def __init__(self, what: str, advice: str, in_outputs: bool = False) -> None:
        super().__init__(what)
        self.advice = advice
        self.in_outputs = in_outputs


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


def check_original(original: Original, batch: Values, snapshot: ModelSnapshot | None = None) -> None:
    """Compare the pieces of `original` with it on `batch` (value -> (rows, ...)), two rows or more.

    `snapshot`: one of its model as it is, where there is one. Raises `InvalidInput` for the first difference.
    """
    segments = [
        Segment(f"piece{number}", "model", module, inputs, outputs)
        for number, (module, inputs, outputs) in enumerate(original.pieces)
    ]
    with naming_what_is_left(original.model):
        _compare(segments, original, batch, original.model.training, snapshot)


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
) -> None:
    """Run the segments beside the model they make up, and refuse the first difference.

    `in_training`: whether the user gave the model in training mode; see `graph.frozen_modules`.
    """
    unit = unit_of(segments, original, inputs)
    # One stream of random numbers runs through all segments, as it does through the uncut model.
    snapshot = snapshot or ModelSnapshot(original.model)
    snapshot.refuse_generators()
    large, reordered = is_large(original.model), reordered_weights(original)

    def make_sides(sharing: bool = False) -> tuple[Uncut, Parties]:
        snapshot.restore()
        snapshot.drop_gradients()
        parties = Parties(unit, facts, frozen_modules(unit, in_training), sharing)
        return Uncut(original, in_training, parties.shared), parties

    changed: list[str] | None = None
    try:
        facts = probe(unit, {n: _first_rows(x, 2) for n, x in inputs.items()}, shared=True)
        facts = replace(facts, stochastic=frozenset(), plain_draws=frozenset())
        shapes = {head.value: facts.shapes[head.value] for head in unit.heads}
        stages = FEW_STAGES if large else STAGES
        stages += tuple((mode, rows) for rows in original.sizes for mode in (TRAINING, NO_GRADIENTS))
        batches = _Batches(stages, inputs, shapes)
        if not (large and _same_on_shared(original.model, make_sides(True), batches, reordered)):
            _run_stages(original.model, make_sides(), batches, reordered)
        changed = _going_on(snapshot, Uncut(original, in_training), batches) if original.cuts else []
        if changed:
            raise Difference(f"forward changes the {changed[0]}", _STATE)
        if not original.cuts and (unkept := snapshot.unkept_changes()):
            raise Difference(f"forward changes the {unkept[0]}, which a checkpoint cannot hold", _UNKEPT)
    except Difference as error:
        what, advice = str(error), error.advice
        if original.cuts and changed is None:
            changed = _going_on(snapshot, Uncut(original, in_training), batches)
        if changed:
            what, advice = f"forward changes the {changed[0]}", _STATE
        elif not _repeats(lambda: make_sides()[0], batches):
            what, advice = "the uncut model itself does not repeat its results from the same seeds", _RANDOM
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


def _same_on_shared(
    model: nn.Module, sides: tuple[Uncut, Parties], batches: _Batches, reordered: Collection[str]
) -> bool:
    """Return whether the sides are the same on shared weights; False says nothing of sides with their own."""
    try:
        _run_stages(model, sides, batches, reordered)
    except (Difference, _Written):
        return False
    return True


def _run_stages(model: nn.Module, sides: tuple[Uncut, Parties], batches: _Batches, reordered: Collection[str]) -> None:
    name, shared = type(model).__name__, bool(sides[1].shared)
    sums = weight_sums(model) if shared else []
    for step, (stage, rows) in enumerate(batches.stages):
        try:
            uncut = _run(sides[0], step, batches)
        except SideFailed as error:
            raise FailsByItself(f"{name} fails by itself in {stage} with {rows} rows: {error}") from error
        if uncut is not None:
            sides[1].replaced = {n: g for n in reordered if (g := uncut.gradients.get(n)) is not None}
            sides[1].expected = uncut.gradients
        if shared and sums != weight_sums(model):
            raise _Written
        try:
            cut = _run(sides[1], step, batches)
        except SideFailed as error:
            raise Difference(f"in {stage} with {rows} rows its segments fail ({error})", _TRACE) from error
        if uncut is None and cut is None:
            warnings.warn(
                f"{name} was compared with its cut model for {step} of {len(batches.stages)} batches only: its "
                f"gradients are not finite in {stage} with {rows} rows",
                UserWarning,
                stacklevel=2,
            )
            return
        if uncut is None or cut is None:
            raise Difference(f"in {stage} one of them alone is finite", _TRACE, in_outputs=True)
        try:
            _check_same(uncut, cut, reordered)
        except Difference as error:
            raise Difference(f"in {stage} {error}", error.advice, error.in_outputs) from None
        if shared:
            if sums != weight_sums(model):
                raise _Written
            sides[0].step_shared(uncut.gradients)
            sums = weight_sums(model)


def _run(side: Side, step: int, batches: _Batches) -> StepResult | None:
    """Run the batch of number `step`, towards random numbers; None where gradients are not finite."""
    stage, rows = batches.stages[step]
    draws = generator(step, "targets")
    targets = {name: torch.randn((rows, *shape), generator=draws) for name, shape in batches.shapes.items()}
    seed_generators(step)
    given = {n: _first_rows(x, rows) for n, x in batches.inputs.items()}
    try:
        with others_code(_side_failed):
            result = side.run(stage, given, targets, step)
    except NonFinite:
        return None
    finite = all(_is_finite(t) for t in result.gradients.values() if t is not None)
    return result if finite else None


def _is_finite(tensor: Tensor) -> bool:
    """Return whether all numbers are finite. So is their sum, as a rule, which is found without a mask of them."""
    return (tensor.is_floating_point() and math.isfinite(tensor.sum().item())) or bool(tensor.isfinite().all())


def _going_on(snapshot: ModelSnapshot, side: Side, batches: _Batches) -> list[str]:
    """Return the Python state that the uncut model changed since `snapshot`, and changes again in the same batches.

    What is the same after them is a cache, such as a table of positions, that the first batches filled.
    """
    if not (changed := snapshot.changes()):
        return []
    warm = ModelSnapshot(snapshot.model, like=snapshot)
    _all_stages(side, replace(batches, shapes={}))
    going_on = warm.changes()
    names = {change.rpartition(" (")[0] for change in going_on}
    return [change for change in changed if change.rpartition(" (")[0] in names] or going_on


def _side_failed(error: BaseException) -> BaseException:
    return error if isinstance(error, NonFinite) else SideFailed(describe_failure(error))


def _repeats(make: Callable[[], Side], batches: _Batches) -> bool:
    """Return whether a side comes to the same bits when it is run again."""
    first, second = (_all_stages(make(), batches) for _ in range(2))
    try:
        for one, other in zip(first, second, strict=False):
            if one is not None and other is not None:
                _check_same(one, other, ())
    except Difference:
        return False
    return len(first) == len(second)


def _all_stages(side: Side, batches: _Batches) -> list[StepResult | None]:
    """Run all batches, or those before the first at which the model fails by itself."""
    found = []
    for step in range(len(batches.stages)):
        try:
            found.append(_run(side, step, batches))
        except SideFailed:
            break
    return found


def _check_same(uncut: StepResult, cut: StepResult, reordered: Collection[str]) -> None:
    """Raise the `Difference` between two outcomes that explains most, if there is one.

    `reordered`: the weights whose gradients may be rounded differently.
    """
    for name, mode in uncut.modes.items():
        if cut.modes.get(name, mode) != mode:
            raise Difference(f"submodule {name!r} is not in {_MODES[mode]} mode, as it is in the uncut model", _MODE)
    if package := same_generators(uncut.generators, cut.generators):
        raise Difference(f"other random numbers are drawn from {package}", _RANDOM)
    # A copy that does not change with the other explains what comes out.
    _check_buffers(uncut, cut, alone=False)
    for name, value in uncut.outputs.items():
        _check_output(name, value, cut.outputs[name])
    for name, attached in uncut.attached.items():
        if cut.attached.get(name, attached) != attached:
            raise Difference(f"output {name!r} has {'no' if attached else 'a'} gradient", _GRADIENT)
    for name, gradient in uncut.gradients.items():
        _check_gradient(name, gradient, cut.gradients.get(name), name in reordered)
    for name in uncut.state:
        if name not in cut.state:
            raise Difference(f"the state has no {name!r}", _TRACE)
    for name, value in cut.state.items():
        if name not in uncut.state:
            raise Difference(f"the state has {name!r} besides", _TRACE)
        if not _same(uncut.state[name], value):
            raise Difference(f"{name!r} is another after the step", _BUFFER)
    _check_buffers(uncut, cut, alone=True)


def _check_buffers(uncut: StepResult, cut: StepResult, alone: bool) -> None:
    """Compare buffers that one segment alone has if `alone`, else those of several, and plain tensors of several."""
    compared = {"buffer": (uncut.buffers, cut.copies), "attribute": (uncut.attributes, cut.attribute_copies)}
    for kind, (wanted, copies) in compared.items():
        holders = Counter(name for _, name, _ in copies)
        for segment, name, value in copies if kind == "buffer" or not alone else ():
            if name in wanted and (holders[name] == 1) == alone and not _same(wanted[name], value):
                what = kind if alone else f"the copy of {kind}"
                raise Difference(f"{what} {name!r} in {segment!r} is another after the step", _BUFFER)


def _check_output(name: str, uncut: Tensor, cut: Tensor) -> None:
    for what, mine, wanted in (("type", cut.dtype, uncut.dtype), ("shape", tuple(cut.shape), tuple(uncut.shape))):
        if mine != wanted:
            raise Difference(f"output {name!r} has {what} {mine} in place of {wanted}", _TRACE, in_outputs=True)
    if not _same(uncut, cut):
        most = float((uncut.double() - cut.double())[uncut != cut].abs().max())
        raise Difference(f"output {name!r} differs by up to {most:.3g}", _TRACE, in_outputs=True)


def _check_gradient(name: str, uncut: Tensor | None, cut: Tensor | None, reordered: bool) -> None:
    if uncut is None and cut is not None:
        raise Difference(f"weight {name!r} gets a gradient, and none in the uncut model", _NO_GRADIENT)
    if uncut is not None and cut is None:
        raise Difference(f"weight {name!r} gets no gradient, and one in the uncut model", _GRADIENT)
    if uncut is not None and cut is not None and not (_same(uncut, cut) or (reordered and _close(uncut, cut))):
        raise Difference(f"the gradient of weight {name!r} differs", _GRADIENT)


def _same(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if torch.equal(one, other):
        return True
    return one.is_floating_point() and bool(((one == other) | (one.isnan() & other.isnan())).all())


def _close(one: Tensor, other: Tensor) -> bool:
    """Return whether two gradients, both finite, are sums of the same summands in another order."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool((one - other).abs().max() <= _REORDERED * torch.finfo(one.dtype).eps * one.abs().max())


def _locate_difference(sides: tuple[Side, Side], batches: _Batches) -> str:
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
                _run(side, step, batches)
            except SideFailed:
                return ""
            finally:
                for hook in hooks:
                    hook.remove()
            calls_of_sides.append(calls)
        last = ""
        for (name, count), value in calls_of_sides[0].items():
            if (name, count) not in calls_of_sides[1] or not _same(value, calls_of_sides[1][name, count]):
                return f", first at submodule {name!r}" + (f", after {last!r}" if last else "")
            last = name
    return f", after submodule {last!r}" if last else ""


def _record_call(
    calls: dict[tuple[str, int], Tensor], name: str, _module: nn.Module, _inputs: Any, output: Any
) -> None:
    value = output[0] if isinstance(output, (tuple, list)) and output else output
    if isinstance(value, Tensor):
        calls[name, sum(n == name for n, _ in calls)] = value.detach().clone()


def _first_rows(value: Tensor, rows: int) -> Tensor:
    """Return the first `rows` rows, from the start again where there are fewer."""
    if rows <= len(value) and value.is_contiguous():
        return value[:rows]
    return value[torch.arange(rows) % len(value)]
