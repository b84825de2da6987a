"""What each segment of a replayed model runs, reads and sends, found by running the model once on an example.

The operations are numbered as they run, a cut stands where its submodule has returned for the last time (or for the
n-th time, for "name#n"), and a segment is all that runs between two cuts. What one segment makes and a later one reads
crosses. Values that follow from shapes and constants alone (masks, positions) cross nowhere: every party computes them.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from splitfed.core.attribute_reads import AttributeReads
from splitfed.core.cut_names import Cut, check_places
from splitfed.core.errors import InvalidInput, check_names, describe_error, describe_failure, line_of, others_code
from splitfed.core.held_arrays import check_references
from splitfed.core.meta_pass import MetaPass
from splitfed.core.model_call import ModelCall
from splitfed.core.model_snapshot import ModelSnapshot
from splitfed.core.module_copies import copy_computed, deep_copy, open_compiled
from splitfed.core.nested_tensors import autograd_nodes, tensors_of
from splitfed.core.replay_answers import Answer, SeenCall, answer, numbers_in
from splitfed.core.replay_courses import ForwardCourse, courses_beyond, find_courses
from splitfed.core.replay_passes import (
    AllMembers,
    Operation,
    RecordingPass,
    Stop,
    mark_whole_modules,
)
from splitfed.core.replay_values import CrossingValues
from splitfed.core.replay_way import Made, Way
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


def meta_copy(model: nn.Module, own: Collection[str], real: Collection[str]) -> nn.Module:
    """Return a copy of `model` that shares the weights and buffers `own`; of all others but `real` it has shapes alone.

    Those others are no parameters and buffers of the copy: they stand on the meta device, as plain attributes. Names
    of one tensor go together. Raises `InvalidInput` for a model that cannot be copied.
    """
    memo = copy_computed(model, numbers=False)
    for name, weight in model.named_parameters(remove_duplicate=False):
        if name in own:
            memo[id(weight)] = weight
        elif name not in real:
            memo[id(weight)] = nn.Parameter(weight.detach().to("meta"), weight.requires_grad)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if name in own:
            memo[id(buffer)] = buffer
        elif name not in real:
            memo[id(buffer)] = buffer.detach().to("meta")
    with others_code(partial(_not_copied, model)):
        made: nn.Module = deep_copy(model, (model,), memo)
    open_compiled(made)
    for module in made.modules():
        vars(module)["_named_members"] = AllMembers(module)
    for path, module in made.named_modules(remove_duplicate=False):
        for table in (module._parameters, module._buffers):
            for key, tensor in list(table.items()):
                full = f"{path}.{key}" if path else key
                if tensor is not None and full not in own:
                    if full in real:
                        module._non_persistent_buffers_set.add(key)
                    else:
                        del table[key]
                        vars(module)[key] = tensor
        if not any(t is not None for table in (module._parameters, module._buffers) for t in table.values()):
            # Batch normalisation would look for its count in every state that is loaded.
            vars(module)["_load_from_state_dict"] = _load_nothing
    return made


def _not_copied(model: nn.Module, error: BaseException) -> InvalidInput:
    return InvalidInput(f"{type(model).__name__} cannot be copied for its parties: {describe_failure(error)}")


def _load_nothing(*given: Any) -> None:
    """Load nothing: the module is another party's."""


def plan_ways(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    cuts: Sequence[Cut],
    gradients: bool,
    call: ModelCall,
    output: str | None = None,
    after: str | None = None,
) -> tuple[Way, ...]:
    """Return the ways that a copy of `model`, in the modes in which it is, takes: first that of the example.

    The others follow from other numbers in tensors; see `replay_courses`. `inputs`: argument -> example; `output`: the
    only result that is used. `after`: a result behind which there is one more cut, the last. Raises `InvalidInput` for
    what cannot be cut there.
    """
    kind = type(model).__name__

    def record(answers: Mapping[int, Any]) -> ForwardCourse | None:
        return _record(model, inputs, cuts, gradients, call, after, answers)

    natural = _record(model, inputs, cuts, gradients, call, after, None)
    assert natural is not None
    ways: list[Way] = []
    for course in find_courses(kind, record) if natural.questions else [natural]:
        way = _plan_course(course, list(inputs), output, after, ways)
        if cuts and after is None:
            for other in courses_beyond(course, record):
                with contextlib.suppress(InvalidInput):
                    way.beyond = (*way.beyond, _plan_course(other, list(inputs), output, after, [*ways, way]))
        ways.append(way)
    return tuple(ways)


def _plan_course(
    course: ForwardCourse, inputs: Sequence[str], output: str | None, after: str | None, earlier: Sequence[Way]
) -> Way:
    """Return the way of one course; what it shares with `earlier` ones has the same names there."""
    operations, ends = course.operations, course.ends
    way = Way(tuple(o.name for o in operations), ends, tuple({} for _ in (*ends, 0)), tuple({} for _ in (*ends, 0)), {})
    if after is not None:
        way.after = _place_of(course.recording, flatten_result(course.result, after)[after])
    way.reshapes = not _RESHAPES.isdisjoint(way.names)
    way.draws = {number: operation.draws for number, operation in enumerate(operations) if operation.draws}
    for number, operation in enumerate(operations):
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


def _place_of(recording: RecordingPass, result: Tensor) -> Made | None:
    made = recording.index(result)
    places = (Made(n, o.results.index(made)) for n, o in enumerate(recording.operations) if made in o.results)
    return None if made is None else next(places, None)


def _record(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    cuts: Sequence[Cut],
    gradients: bool,
    call: ModelCall,
    after: str | None,
    answers: Mapping[int, Any] | None,
) -> ForwardCourse | None:
    """Run a copy of `model` on the example, with some questions answered by `answers`; None where that raises.

    With `answers` given, even none, it is noted what the run changes in Python.
    """
    targets = [cut.target for cut in cuts]
    with others_code(partial(_not_copied, model)):
        recorded = copy_sharing(model)
    open_compiled(recorded)
    mark_whole_modules(recorded, targets)
    noting = AttributeReads(recorded, lambda: recording.place())
    snapshot = None if answers is None else ModelSnapshot(recorded)
    examples = {name: x.clone() for name, x in inputs.items()}
    recording = RecordingPass(recorded, list(examples.values()), list(dict.fromkeys(targets)), answers or {})
    quiet = logging.root.manager.disable
    try:
        with warnings.catch_warnings(), torch.set_grad_enabled(gradients), torch.random.fork_rng(devices=[]):
            # They come again where the model runs.
            warnings.simplefilter("ignore")
            logging.disable(logging.CRITICAL if answers else quiet)
            with recording, noting:
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
        raise InvalidInput(
            f"{type(model).__name__} fails by itself{line_of(error)}: {describe_error(error)}{hint}"
        ) from error
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
    course = ForwardCourse(recording, result, ends, changes=changes, attributes=noting.reads)
    rows = len(next(iter(examples.values())))
    find = partial(_find_constants, model, examples, targets, course, gradients, call)
    for other in (rows + 1, rows - 1):
        with contextlib.suppress(InvalidInput):
            if other and find(other):
                return course
    # With both it goes elsewhere, or asks for a number: what is found there is refused here, or by the comparison.
    find(rows + 1)
    return course


def _find_ends(model: nn.Module, recording: RecordingPass, cuts: Sequence[Cut]) -> tuple[int, ...]:
    """Return how many operations have run at each cut."""
    kind = type(model).__name__
    called = {operation.name.rpartition(".")[0] for operation in recording.operations if operation.whole} - {""}
    for target in (cut.target for cut in cuts):
        if not recording.starts[target] and (owner := target.rpartition(".")[0]) in called:
            raise InvalidInput(
                f"submodule {target!r} is not called by {kind} with this example, and others of {owner!r} are: of a "
                "mixture of experts, no row is routed to it; give rows that are, or cut elsewhere"
            )
    ends = [cut.select(kind, recording.starts[cut.target], recording.ends[cut.target]) for cut in cuts]
    check_places(cuts, ends)
    if ends and ends[0] == 0:
        raise InvalidInput(f"cut {cuts[0].name!r} leaves an empty segment before {cuts[0].name!r}")
    if ends and ends[-1] == recording.number:
        raise InvalidInput(f"cut {cuts[-1].name!r} leaves an empty segment after {cuts[-1].name!r}")
    return tuple(ends)


def _find_constants(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    targets: Sequence[str],
    course: ForwardCourse,
    gradients: bool,
    call: ModelCall,
    other: int,
) -> bool:
    """Fill in what a pass with `other` rows, in which inputs and weights have shapes alone, shows of a `course`.

    Returns whether it goes the same way up to the last cut. `other`: a row more than were recorded, or less.
    `constants`: the operations that return numbers there; `batches`: the batch dimension of the results of which it is
    not the first; `questions`: the operations that ask for a number that is not there.
    """
    operations, last = course.operations, course.ends[-1]
    changed = set().union(*(operation.changed for operation in operations))
    saved = {*model.state_dict(), *changed, *(name for name, _ in model.named_parameters(remove_duplicate=False))}
    constants = {name for name, _ in model.named_buffers(remove_duplicate=False)} - saved
    shapes = meta_copy(model, (), constants)
    mark_whole_modules(shapes, targets)
    device = next((x.device for x in inputs.values()), torch.device("cpu"))
    arguments = {name: torch.empty((other, *x.shape[1:]), dtype=x.dtype, device="meta") for name, x in inputs.items()}
    course.calls.clear()
    course.constants, course.batches, course.questions, course.branches = frozenset(), {}, (), False
    run = _ConstantsPass(device, course, _OtherCalls(model, inputs, targets, course, gradients, call, other))
    try:
        with warnings.catch_warnings(), torch.set_grad_enabled(gradients), torch.random.fork_rng(devices=[]), run:
            warnings.simplefilter("ignore")
            call(shapes, arguments)
    except Stop:
        pass
    except InvalidInput:
        raise
    except (Exception, SystemExit) as error:  # what a user's own forward raises of shapes can be anything
        # The party of the last segment holds what a later operation needs, and nobody comes after it.
        course.branches = True
        if run.number <= last:
            raise InvalidInput(
                f"{type(model).__name__} takes a number out of a tensor, or what has no shape beforehand"
                f"{line_of(error)} ({describe_error(error)}): a party that does not hold that tensor cannot follow; "
                "write it as operations on tensors, or cut before it"
            ) from error
    course.constants, course.batches, course.questions = frozenset(run.constants), run.batches, tuple(run.questions)
    return run.number >= last and not run.astray


class _ConstantsPass(MetaPass):
    """A pass with another number of rows than the `course` had, which finds what `_find_constants` fills in.

    `calls`: what submodules return with other numbers of rows. `astray`: whether it has left the course.
    """

    def __init__(self, device: torch.device, course: ForwardCourse, calls: _OtherCalls) -> None:
        operations = course.operations
        draws = {number: operation.draws for number, operation in enumerate(operations) if operation.draws}
        super().__init__(device, len(operations), draws)
        self._course, self._calls, self._rows = course, calls, calls.other
        self._last, self.astray = course.ends[-1], False
        self.constants: set[int] = set()
        self.batches: dict[Made, int | None] = {}
        self.questions: list[int] = []

    def operation(self, name: str, func: Any, args: Any, kwargs: Mapping[str, Any], module: nn.Module | None) -> Any:
        """Run it on shapes, or answer it by what was recorded, and note what it returns."""
        number, course = self.number, self._course
        recorded = course.operations[number] if number < len(course.operations) else Operation("")
        self.astray = self.astray or (number < self._last and recorded.name != name)
        try:
            returned = super().operation(name, func, args, kwargs, module)
        except Exception as error:
            if recorded.answer:
                self.questions.extend([number] if number < self._last else [])
                return recorded.answer[0]
            if module is None or number >= self._last:
                raise
            course.calls[number] = self._calls.answer(number, error)
            returned = course.calls[number].build(self._rows, tensors_of((args, dict(kwargs))))
        else:
            if module is not None and number < self._last:
                self._note_call(number, args, kwargs, returned)
        tensors = tensors_of(returned)
        if tensors and not any(tensor.is_meta for tensor in tensors):
            self.constants.add(number)
        for place, (tensor, index) in enumerate(zip(tensors, recorded.results, strict=False)):
            if index is not None and (batch := _batch(course.recording.tensors[index], tensor)) != 0:
                self.batches[Made(number, place)] = batch
        return returned

    def _note_call(self, number: int, args: Any, kwargs: Mapping[str, Any], returned: Any) -> None:
        """Note what those are told that do not run this call of a submodule."""
        course, tensors = self._course, tensors_of(returned)
        if (tensors and not any(tensor.is_meta for tensor in tensors)) or course.attributes.leaves_behind(number):
            return
        known = answer(self._calls.first(number), SeenCall(self._rows, tensors_of((args, dict(kwargs))), returned))
        if isinstance(known, str) and (calls := self._calls.all(number)):
            known = answer(*calls)
        if isinstance(known, Answer):
            course.calls[number] = known


class _OtherCalls:
    """Calls of submodules with other numbers of rows, with numbers; made where shapes alone do not do."""

    def __init__(
        self,
        model: nn.Module,
        inputs: Mapping[str, Tensor],
        targets: Sequence[str],
        course: ForwardCourse,
        gradients: bool,
        call: ModelCall,
        other: int,
    ) -> None:
        self._model, self._inputs, self._targets, self._course = model, inputs, targets, course
        self._gradients, self._call = gradients, call
        self.rows, self.other = len(next(iter(inputs.values()))), other

    def first(self, number: int) -> SeenCall:
        """Return the call that was recorded."""
        operation = self._course.operations[number]
        return SeenCall(self.rows, operation.given, operation.returned, bool(operation.draws - {"torch"}))

    def all(self, number: int) -> list[SeenCall]:
        """Return that call, one of the other number of rows, and one of equal rows; none where the way is another."""
        return [self.first(number), *(calls[number] for calls in self._others)] if all(self._others) else []

    def answer(self, number: int, error: Exception) -> Answer:
        """Return the answer of a submodule that fails without numbers, by `error`."""
        what = f"submodule {self._course.operations[number].name!r} of {type(self._model).__name__}"
        calls = self.all(number)
        if not calls:
            raise error
        known = answer(*calls)
        if self._course.attributes.leaves_behind(number):
            known = "sets an attribute that is read outside of it"
        elif numbers := numbers_in(calls[0].returned):
            known = f"returns the number {numbers[0]!r}, which may depend on values"
        if isinstance(known, str):
            raise InvalidInput(
                f"{what} takes a number out of a tensor{line_of(error)} ({describe_error(error)}) and {known}: parties "
                "that do not hold it cannot follow; return tensors alone, of a shape that follows from the input's"
            ) from error
        return known

    @cached_property
    def _others(self) -> list[dict[int, SeenCall]]:
        choices = ([row % self.rows for row in range(self.other)], [0] * self.rows)
        return [self._run(choice) for choice in choices]

    def _run(self, choice: list[int]) -> dict[int, SeenCall]:
        copied = copy_sharing(self._model)
        open_compiled(copied)
        mark_whole_modules(copied, self._targets)
        given = {name: x[choice] for name, x in self._inputs.items()}
        operations = self._course.operations
        answers = {n: operation.answer[0] for n, operation in enumerate(operations) if operation.answer}
        run = RecordingPass(copied, list(given.values()), [], answers)
        with warnings.catch_warnings(), torch.set_grad_enabled(self._gradients), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            with run, contextlib.suppress(RuntimeError, TypeError, ValueError, LookupError):
                self._call(copied, given)
        if [operation.name for operation in run.operations] != [operation.name for operation in operations]:
            return {}
        return {n: SeenCall(len(choice), o.given, o.returned) for n, o in enumerate(run.operations) if o.whole}


def _batch(value: Tensor, with_one_row_more: Tensor) -> int | None:
    """Return the dimension that is the number of rows, None where the number of rows changes none."""
    pairs = list(zip(value.shape, with_one_row_more.shape, strict=False))
    changed = [dimension for dimension, (before, after) in enumerate(pairs) if before != after]
    if not changed:
        return None if value.dim() == with_one_row_more.dim() else 0
    return changed[0] if len(changed) == 1 else 0
