"""What each segment of a replayed model runs, reads and sends, found by running the model once on an example.

The operations are numbered as they run, a cut stands where its submodule has returned for the last time (or for the
n-th time, for "name#n"), and a segment is all that runs between two cuts. What one segment makes and a later one reads
crosses. Values that follow from shapes and constants alone (masks, positions) cross nowhere: every party computes them.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from splitfed.core.attribute_reads import AttributeReads, noting
from splitfed.core.cut_names import Cut, check_places
from splitfed.core.errors import InvalidInput, check_names, describe_error, line_of, others_code
from splitfed.core.forward_path import ForwardPath, OperationOutput
from splitfed.core.held_arrays import check_references
from splitfed.core.meta_copies import not_copied
from splitfed.core.model_call import ModelCall, trying
from splitfed.core.model_snapshot import ModelSnapshot
from splitfed.core.module_copies import open_compiled
from splitfed.core.nested_tensors import autograd_nodes
from splitfed.core.replay_branches import ForwardRun, courses_beyond, find_courses
from splitfed.core.replay_constants import OtherCalls, find_constants
from splitfed.core.replay_passes import Operation, RecordingPass, mark_whole_modules
from splitfed.core.replay_values import CrossingValues
from splitfed.core.weight_sharing import copy_sharing

_RESHAPE_NAMES = "squeeze_ unsqueeze_ transpose_ t_ swapaxes_ swapdims_ resize_ resize_as_ as_strided_ set_"
_RESHAPES = frozenset(_RESHAPE_NAMES.split())


def flatten_result(result: Any, output: str | None = None) -> dict[str, Tensor]:
    """Return the tensors that a model returned: by key or field of a table, else by their place ("0", "1").

    `output`: the only one that is asked for. What holds no tensor, such as None or a cache of keys and values, is left
    out. Raises `InvalidInput` without any.
    """
    named: Mapping[Any, Any] = {}
    if isinstance(result, Mapping):
        named = result
    elif hasattr(result, "_asdict"):
        named = result._asdict()
    elif is_dataclass(result) and not isinstance(result, type):
        named = {f.name: getattr(result, f.name) for f in fields(result)}
    elif isinstance(result, (tuple, list)):
        named = dict(enumerate(result))
    elif isinstance(result, Tensor):
        named = {0: result}
    found: dict[str, Tensor] = {}
    for key, value in named.items():
        parts = value if isinstance(value, (tuple, list)) else (value,)
        suffixes = [f"_{i}" for i in range(len(parts))] if parts is value else [""]
        found |= {f"{key}{s}": one for s, one in zip(suffixes, parts, strict=True) if isinstance(one, Tensor)}
    if not found:
        raise InvalidInput(
            f"a model that returns a {type(result).__name__} without tensors cannot be cut; return a tensor, or "
            "a tuple, dict or dataclass of them"
        )
    if output is None:
        return found
    check_names("output of the model", found, output)
    return {output: found[output]}


def plan_ways(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    cuts: Sequence[Cut],
    gradients: bool,
    call: ModelCall,
    output: str | None = None,
    after: str | None = None,
) -> tuple[ForwardPath, ...]:
    """Return the ways that a copy of `model`, in the modes in which it is, takes: first that of the example.

    The others follow from other numbers in tensors; see `replay_branches`. `inputs`: argument -> example; `output`: the
    only result that is used. `after`: a result behind which there is one more cut, the last. Raises `InvalidInput` for
    what cannot be cut there.
    """
    kind = type(model).__name__

    def record(answers: Mapping[int, Any]) -> ForwardRun | None:
        return _record(model, inputs, cuts, gradients, call, after, answers)

    natural = _record(model, inputs, cuts, gradients, call, after, None)
    assert natural is not None
    ways: list[ForwardPath] = []
    for course in find_courses(kind, record) if natural.questions else [natural]:
        way = _plan_course(course, list(inputs), output, after, ways)
        if cuts and after is None:
            for other in courses_beyond(course, record):
                with contextlib.suppress(InvalidInput):
                    way.beyond = (*way.beyond, _plan_course(other, list(inputs), output, after, [*ways, way]))
        ways.append(way)
    return tuple(ways)


def _plan_course(
    course: ForwardRun, inputs: Sequence[str], output: str | None, after: str | None, earlier: Sequence[ForwardPath]
) -> ForwardPath:
    """Return the way of one course; what it shares with `earlier` ones has the same names there."""
    operations, ends = course.operations, course.ends
    way = ForwardPath(
        tuple(o.name for o in operations), ends, tuple({} for _ in (*ends, 0)), tuple({} for _ in (*ends, 0)), {}
    )
    if after is not None:
        way.after = _place_of(course.recording, flatten_result(course.result, after)[after])
    way.reshapes = not _RESHAPES.isdisjoint(way.names)
    way.draws = {number: operation.draws for number, operation in enumerate(operations) if operation.draws}
    for number, operation in enumerate(operations):
        for place, index in enumerate(operation.results):
            if index is not None and operation.results.count(index) > 1:
                way.repeated.setdefault(OperationOutput(number, operation.results.index(index)), []).append(place)
        # In an order that is the same in another process, which may go on with the run.
        for name in sorted(operation.state):
            if operation.alone:
                way.kept.setdefault(name, set()).add(way.segment(number))
                continue
            counts, segment = way.state.setdefault(name, {}), way.segment(number)
            counts[segment] = counts.get(segment, 0) + (2 if operation.deep else 1)
            way.readers.setdefault(name, set()).add(number)
        way.changed |= operation.changed
    way.overwrites = frozenset(
        n
        for n, o in enumerate(operations)
        if o.writes and (not o.results or (len(o.results) == 1 and o.results[0] in o.writes))
    )
    way.by_holders = frozenset(number for number, operation in enumerate(operations) if operation.alone)
    way.wholes = frozenset(number for number, operation in enumerate(operations) if operation.whole)
    way.constants, way.attributes, way.calls = course.constants, course.attributes, course.calls
    way.overwritten, way.constant_readers = course.overwritten, _readers_of_constants(way, operations)
    way.asked = {number: operation.answer[0] for number, operation in enumerate(operations) if operation.answer}
    way.branches = course.branches or max(way.asked, default=-1) >= ends[-1]
    nodes = autograd_nodes(flatten_result(course.result, output).values()) if way.branches else set()
    way.numbers, way.told, way.free = course.answers(), frozenset(course.told), frozenset(course.free)
    recording = course.recording
    arguments = dict(zip(recording.inputs, inputs, strict=True))
    values = CrossingValues(way, operations, arguments, recording.tensors, course.batches)
    values.keep_names(earlier)
    values.follow({name: recording.index(tensor) for name, tensor in flatten_result(course.result, output).items()})
    for name, value in way.received[-1].items() if nodes else ():
        index = operations[value.made.operation].results[value.made.place]
        if index is not None and recording.tensors[index].grad_fn in nodes:
            way.connected.add(name)
    return way


def _readers_of_constants(way: ForwardPath, operations: Sequence[Operation]) -> dict[int, frozenset[int]]:
    """Return by which segments is read what comes of the operations that make constants."""
    readers: dict[int, frozenset[int]] = {}
    found: dict[int, frozenset[int]] = {}
    for number in reversed(range(len(operations))):
        one, segment = operations[number], way.segment(number)
        if number in way.constants:
            made = (*(i for i in one.results if i is not None), *one.writes)
            segments = found[number] = frozenset().union(*(readers.get(i, frozenset()) for i in made))
        else:
            # Whoever goes by the answer to a question asks it.
            segments = frozenset(range(segment, len(way.ends) + 1 if one.answer else segment + 1))
        for index in one.reads:
            readers[index] = readers.get(index, frozenset()) | segments
    return found


def _place_of(recording: RecordingPass, result: Tensor) -> OperationOutput | None:
    made = recording.index(result)
    places = (
        OperationOutput(n, o.results.index(made)) for n, o in enumerate(recording.operations) if made in o.results
    )
    return None if made is None else next(places, None)


def _record(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    cuts: Sequence[Cut],
    gradients: bool,
    call: ModelCall,
    after: str | None,
    answers: Mapping[int, Any] | None,
) -> ForwardRun | None:
    """Run a copy of `model` on the example, with some questions answered by `answers`; None where that raises.

    With `answers` given, even none, it is noted what the run changes in Python.
    """
    targets = [cut.target for cut in cuts]
    with others_code(partial(not_copied, model)):
        recorded = copy_sharing(model)
    open_compiled(recorded)
    mark_whole_modules(recorded, targets)
    noted = AttributeReads(recorded, lambda: recording.place())
    snapshot = None if answers is None else ModelSnapshot(recorded)
    examples = {name: x.clone() for name, x in inputs.items()}
    recording = RecordingPass(recorded, list(examples.values()), list(dict.fromkeys(targets)), answers or {})
    quiet = logging.root.manager.disable
    try:
        with trying(gradients):
            # Warnings come again where the model runs.
            logging.disable(logging.CRITICAL if answers else quiet)
            with recording, noting(noted):
                result = call(recorded, examples)
    except (Exception, SystemExit) as error:  # the user's own forward may raise anything
        if answers:
            return None
        if answers is None:
            # What copies share with the original is at fault where that runs.
            for hook in recording.hooks:
                hook.remove()
            check_references(recorded, type(model).__name__)
        hint = "; of rows named '0' and '1' it gets a tuple, of others a table" if call.batch is not None else ""
        how = "fails by itself" if gradients else "fails without gradients, as predictions are made,"
        if answers is None and _runs(model, inputs, call, gradients):
            how, hint = "cannot be followed", "; write that otherwise, or pass segments by hand (splitfed.Segment)"
        raise InvalidInput(f"{type(model).__name__} {how}{line_of(error)}: {describe_error(error)}{hint}") from error
    finally:
        logging.disable(quiet)
        changes = () if snapshot is None else snapshot.changes()
        if snapshot is not None:
            snapshot.restore()
    if (name := recording.changed_unseen()) is not None:
        raise InvalidInput(
            f"forward of {type(model).__name__} changes {name!r} by what is no operation on tensors (set_, NumPy): "
            "change it in place by copy_, add_ or mul_"
        )
    try:
        ends = _find_ends(model, recording, cuts)
    except InvalidInput as error:
        if answers:
            raise InvalidInput(f"{error}, where a number that forward takes out of a tensor is another") from error
        raise
    if after is not None:
        place = _place_of(recording, flatten_result(result, after)[after])
        if place is None:
            raise InvalidInput(f"result {after!r} of {type(model).__name__} is one of its inputs, weights or buffers")
        ends = (*ends, place.operation + 1)
    course = ForwardRun(recording, result, ends, changes=changes, attributes=noted.reads)
    rows = len(next(iter(examples.values())))
    calls = partial(OtherCalls, model, examples, targets, course, gradients, call)
    for other in (rows + 1, rows - 1):
        with contextlib.suppress(InvalidInput):
            if other and find_constants(calls(other)):
                return course
    # With both it goes elsewhere, or asks for a number: what is found there is refused here, or by the comparison.
    find_constants(calls(rows + 1))
    return course


def _runs(model: nn.Module, inputs: Mapping[str, Tensor], call: ModelCall, gradients: bool) -> bool:
    """Return whether a copy of `model` runs where nobody looks on."""
    copied = copy_sharing(model)
    open_compiled(copied)
    failing = others_code(lambda error: InvalidInput(str(error)))
    with trying(gradients), contextlib.suppress(InvalidInput), failing:
        call(copied, {name: x.clone() for name, x in inputs.items()})
        return True
    return False


def _find_ends(model: nn.Module, recording: RecordingPass, cuts: Sequence[Cut]) -> tuple[int, ...]:
    """Return how many operations have run at each cut."""
    kind = type(model).__name__ if model.training else f"{type(model).__name__} in evaluation"
    called = {operation.name.rpartition(".")[0] for operation in recording.operations if operation.whole} - {""}
    for target in (cut.target for cut in cuts if not recording.starts[cut.target]):
        module, owner = model.get_submodule(target), target.rpartition(".")[0]
        try:
            check_references(model, type(model).__name__)
        except InvalidInput as error:
            raise InvalidInput(f"submodule {target!r} is not called by a copy of {kind}: {error}") from error
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and len(module):
            element = next(name for name, _ in module.named_children())
            raise InvalidInput(
                f"submodule {target!r} is a {type(module).__name__}, which {kind} does not call as a whole; name one "
                f"of its elements, such as '{target}.{element}'"
            )
        if owner in called:
            raise InvalidInput(
                f"submodule {target!r} is not called by {kind} with this example, and others of {owner!r} are: of "
                "experts, no row is routed to it; give rows that are; of blocks that are left out at random "
                "(LayerDrop), it may be left out; cut with a share of 0, or elsewhere"
            )
    ends = [cut.select(kind, recording.starts[cut.target], recording.ends[cut.target]) for cut in cuts]
    check_places(cuts, ends)
    if ends and ends[0] == 0:
        raise InvalidInput(f"cut {cuts[0].name!r} leaves an empty segment before {cuts[0].name!r}")
    if ends and ends[-1] == recording.number:
        raise InvalidInput(f"cut {cuts[-1].name!r} leaves an empty segment after {cuts[-1].name!r}")
    return tuple(ends)
