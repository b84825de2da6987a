"""What each segment of a replayed model runs, reads and sends, found by running the model once on an example.

The operations are numbered as they run, a cut stands where its submodule has returned for the last time (or for the
n-th time, for "name#n"), and a segment is all that runs between two cuts. What one segment makes and a later one reads
crosses. Values that follow from shapes and constants alone (masks, positions) cross nowhere: every party computes them.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import traceback
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from splitfed.core.attribute_reads import AttributeReads, Reads
from splitfed.core.computed_tensors import plain_copies
from splitfed.core.cut_names import Cut, check_places, relays
from splitfed.core.errors import InvalidInput, check_names, describe_error, describe_failure, others_code
from splitfed.core.model_call import ModelCall
from splitfed.core.model_snapshot import ModelSnapshot
from splitfed.core.replay_answers import Answer, SeenCall, answer, numbers_in
from splitfed.core.replay_courses import ForwardCourse, find_courses
from splitfed.core.replay_passes import (
    AllMembers,
    MetaPass,
    Operation,
    RecordingPass,
    Stop,
    mark_whole_modules,
    open_compiled,
    tensors_of,
)
from splitfed.core.weight_sharing import copy_sharing, copy_tables

INPUT = -1
"""Stands for the operation in `Made` of an input."""
UNSEEN = (
    "it is computed before forward, made by what torch shows to nobody (functions of TorchScript or torch.func, a "
    "class of tensors of your own), or kept in an object; give functions as they were before they were compiled, and "
    "compute such a tensor within one submodule that returns a plain one"
)
"""Why nobody knows where a tensor comes from, and what to write instead."""
_RESHAPE_NAMES = "squeeze_ unsqueeze_ transpose_ t_ swapaxes_ swapdims_ resize_ resize_as_ as_strided_ set_"
_RESHAPES = frozenset(_RESHAPE_NAMES.split())


class Made(NamedTuple):
    """A tensor by its origin: number `place` among the tensors that operation `operation` returned."""

    operation: int
    place: int


class CrossingValue(NamedTuple):
    """The tensor `made` as it is when segment `source` ends, sent under a name.

    `batch`: the dimension of the batch, which is sent as the first one; None: it has none, and is sent for every row.
    `sometimes`: whether there are ways in which it does not cross; then zeros do. `origin`: its name where it was made,
    if it is handed on.
    """

    name: str
    source: int
    made: Made
    batch: int | None = 0
    sometimes: bool = False
    origin: str = ""

    def send(self, value: Tensor, rows: int) -> Tensor:
        """Return `value` as it crosses, (rows, ...)."""
        if self.batch == 0:
            return value
        return value.expand(rows, *value.shape) if self.batch is None else value.movedim(self.batch, 0)

    def receive(self, sent: Tensor) -> Tensor:
        """Return the value of which `send` made `sent`."""
        # Nobody waits for a gradient of what does not always cross.
        sent = sent.detach() if self.sometimes else sent
        if self.batch == 0:
            return sent
        return sent[0] if self.batch is None else sent.movedim(0, self.batch)


class CrossingForm(NamedTuple):
    """What a crossing value looks like: its shape a row, its type, and whether a gradient comes back for it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    learns: bool


@dataclass
class Way:
    """One way of a model through its `forward`: the names of all operations, and how many have run at each cut.

    `received`: for each segment, what it reads of earlier ones; `raw`: the inputs of the model that it reads;
    `outputs`: what the model returns, `results`: their names as they are returned. `state`: weight or buffer ->
    segment -> in how many places it is read there; `changed`: buffers that change; `draws`: operations that draw
    random numbers -> of which packages; `constants`: those whose results follow from shapes;
    `reshapes`: whether one changes a shape in
    place. `reads`: crossing value -> segment -> in how many places it is read, its own segment included;
    `upstream`: crossing value -> the weights that it is computed from. `after`: the result behind which the last
    cut stands, if a result was named. `numbers`: operations that ask a tensor for a number -> what it is in this
    way, of which those `told` are asked by everybody, and those `free` may be any; see `replay_courses`. `labels`:
    what crosses or is returned -> its name; `forms`: name -> shape a row, type, and whether a gradient comes back.
    `kept`: weight or buffer -> the segments that change it by constants and nothing else, as whoever holds it and
    comes no earlier does too. `attributes`: what is read of the model's objects; `calls`: of
    calls of submodules, what those are told that do not run them; `wholes`: which operations are such calls;
    `readers`: weight or buffer -> the operations that read it. `asked`: operations that returned a number -> that one.
    """

    names: tuple[str, ...]
    ends: tuple[int, ...]
    received: tuple[dict[str, CrossingValue], ...]
    raw: tuple[dict[str, None], ...]
    outputs: dict[str, CrossingValue]
    results: tuple[str, ...] = ()
    state: dict[str, dict[int, int]] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)
    draws: Mapping[int, frozenset[str]] = field(default_factory=dict)
    constants: frozenset[int] = frozenset()
    reshapes: bool = False
    reads: dict[str, dict[int, int]] = field(default_factory=dict)
    upstream: dict[str, set[str]] = field(default_factory=dict)
    after: Made | None = None
    kept: dict[str, set[int]] = field(default_factory=dict)
    numbers: dict[int, Any] = field(default_factory=dict)
    told: frozenset[int] = frozenset()
    free: frozenset[int] = frozenset()
    labels: dict[tuple[Made, int], str] = field(default_factory=dict)
    forms: dict[str, CrossingForm] = field(default_factory=dict)
    attributes: Reads = field(default_factory=Reads)
    calls: Mapping[int, Answer] = field(default_factory=dict)
    wholes: frozenset[int] = frozenset()
    readers: dict[str, set[int]] = field(default_factory=dict)
    asked: Mapping[int, Any] = field(default_factory=dict)

    def runs(self, segment: int, operation: int) -> bool:
        """Return whether the party of `segment` runs the code of `operation`, be it on shapes."""
        first, last = self.bounds(segment)
        return operation < last and (operation >= first or operation not in self.calls)

    def next_told(self, number: int) -> int | None:
        """Return the first operation from `number` on whose answer is told."""
        return min((n for n in self.told if n >= number), default=None)

    def rename(self, name: str, other: str) -> bool:
        """Call what crosses as `name` `other`, unless something is called so already, or it is an output."""
        if other in self.forms or name in self.outputs:
            return False
        self.forms[other] = self.forms.pop(name)
        self.labels = {key: other if label == name else label for key, label in self.labels.items()}
        if name in self.reads:
            self.reads[other], self.upstream[other] = self.reads.pop(name), self.upstream.pop(name)
        for received in self.received:
            if name in received:
                received[other] = received.pop(name)._replace(name=other)
        return True

    def lasts(self, number: int) -> bool:
        """Return whether what operation `number` returns on shapes is the same in every batch of this way."""
        return all(n > number or isinstance(self.numbers[n], bool) for n in self.told)

    def shared_with(self, other: Way) -> int:
        """Return before which operation this way and `other` are one."""
        differing = {n for n in self.told | other.told if self.numbers.get(n) is not other.numbers.get(n)}
        truths = {n for n in differing if isinstance(self.numbers.get(n, other.numbers.get(n)), bool)}
        return min(truths, default=len(self.names))

    def send_inputs(self, names: Sequence[str], inputs: Sequence[str]) -> None:
        """Let the first segment send what later ones read of `names`, some of the model's `inputs`."""
        for name in names:
            for raw, received in zip(self.raw[1:], self.received[1:], strict=True):
                if name in raw:
                    del raw[name]
                    self.raw[0][name] = None
                    received[f"{name}_sent"] = CrossingValue(f"{name}_sent", 0, Made(INPUT, inputs.index(name)))

    def hand_on(self, chain: Sequence[str]) -> None:
        """Let what crosses go along `chain`, the party of each segment; see `cut_names.relays`."""
        for target, received in enumerate(list(self.received)):
            for name, value in list(received.items()):
                for relay in relays(chain, value.source, target):
                    self.received[relay].setdefault(value.name, value)
                    value = value._replace(name=f"{name}_{chain[relay]}", source=relay, origin=name)
                del received[name]
                received[value.name] = value

    def bounds(self, segment: int) -> tuple[int, int]:
        """Return the number of the first operation of `segment`, and of the first one after it."""
        limits = (0, *self.ends, len(self.names))
        return limits[segment], limits[segment + 1]

    def sent(self, segment: int) -> dict[str, CrossingValue]:
        """Return what `segment` hands on or returns as an output of the model, by name."""
        values = {**{n: c for received in self.received for n, c in received.items()}, **self.outputs}
        return {name: value for name, value in values.items() if value.source == segment}


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
    memo = plain_copies(model, numbers=False)
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
        made: nn.Module = copy.deepcopy(model, memo | copy_tables(model))
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
        ways.append(_plan_course(course, list(inputs), output, after, ways))
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
                way.kept.setdefault(name, set()).add(_segment(way, number))
                continue
            counts, segment = way.state.setdefault(name, {}), _segment(way, number)
            counts[segment] = counts.get(segment, 0) + (2 if operation.deep else 1)
            way.readers.setdefault(name, set()).add(number)
        way.changed |= operation.changed
    way.wholes = frozenset(number for number, operation in enumerate(operations) if operation.whole)
    way.constants, way.attributes, way.calls = course.constants, course.attributes, course.calls
    way.asked = {number: operation.answer[0] for number, operation in enumerate(operations) if operation.answer}
    way.numbers, way.told, way.free = course.answers(), frozenset(course.told), frozenset(course.free)
    recording = course.recording
    arguments = dict(zip(recording.inputs, inputs, strict=True))
    values = _Values(way, operations, arguments, recording.tensors, course.batches)
    values.keep_names(earlier)
    values.follow({name: recording.index(tensor) for name, tensor in flatten_result(course.result, output).items()})
    return way


def align_ways(model: str, ways: Sequence[Way]) -> None:
    """Let as much as can be cross in all of `ways` of `model`, and mark what crosses in some alone.

    What is of one form takes the place of another: `h` in one way and `-h` in the other cross under one name. Refuses
    what crosses in some alone and takes a gradient back.
    """
    for way in ways[1:]:
        for segment, received in enumerate(way.received):
            lacking = [name for name in ways[0].received[segment] if name not in received]
            for name in [name for name in received if name not in ways[0].received[segment]]:
                place = (way.forms[name], received[name].source)
                same = (n for n in lacking if (ways[0].forms[n], ways[0].received[segment][n].source) == place)
                if (other := next(same, None)) is not None and way.rename(name, other):
                    lacking.remove(other)
    for segment in range(len(ways[0].received)):
        crossing = [way.received[segment] for way in ways]
        for name in dict.fromkeys(name for received in crossing for name in received):
            if all(name in received for received in crossing):
                continue
            if any(way.forms[name].learns for way in ways if name in way.forms):
                raise InvalidInput(
                    f"value {name!r} of {model} crosses in some batches only, by a number taken out of a tensor: "
                    "weights behind it would get a gradient of zeros in place of none; read it in every case, or cut "
                    "elsewhere"
                )
            for received in crossing:
                if name in received:
                    received[name] = received[name]._replace(sometimes=True)


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
        hint = "; of rows named '0' and '1' it gets a tuple, of others a table" if call.batch is not None else ""
        raise InvalidInput(
            f"{type(model).__name__} fails by itself{_where(error)}: {describe_error(error)}{hint}"
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
    _find_constants(model, examples, targets, course, gradients, call)
    return course


def _segment(way: Way, operation: int) -> int:
    return sum(operation >= end for end in way.ends)


def _find_ends(model: nn.Module, recording: RecordingPass, cuts: Sequence[Cut]) -> tuple[int, ...]:
    """Return how many operations have run at each cut."""
    kind = type(model).__name__
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
) -> None:
    """Fill in what a pass with one row more, in which inputs and weights have shapes alone, shows of a `course`.

    `constants`: the operations that return numbers there; `batches`: the batch dimension of the results of which it is
    not the first; `questions`: the operations that ask for a number that is not there.
    """
    operations, last = course.operations, course.ends[-1]
    changed = set().union(*(operation.changed for operation in operations))
    saved = {*model.state_dict(), *changed, *(name for name, _ in model.named_parameters(remove_duplicate=False))}
    constants = {name for name, _ in model.named_buffers(remove_duplicate=False)} - saved
    shapes = meta_copy(model, (), constants)
    mark_whole_modules(shapes, targets)
    found: set[int] = set()
    batches: dict[Made, int | None] = {}
    questions: list[int] = []
    rows = len(next(iter(inputs.values())))
    seen = _OtherCalls(model, inputs, targets, course, gradients, call)

    class Constants(MetaPass):
        def operation(
            self, name: str, func: Any, args: Any, kwargs: Mapping[str, Any], module: nn.Module | None
        ) -> Any:
            number = self.number
            recorded = operations[number] if number < len(operations) else Operation("")
            try:
                returned = super().operation(name, func, args, kwargs, module)
            except Exception as error:
                if recorded.answer:
                    questions.extend([number] if number < last else [])
                    return recorded.answer[0]
                if module is None or number >= last:
                    raise
                course.calls[number] = seen.answer(number, error)
                returned = course.calls[number].build(rows + 1, tensors_of((args, dict(kwargs))))
            else:
                if module is not None and number < last:
                    self.note_call(number, args, kwargs, returned)
            tensors = tensors_of(returned)
            if tensors and not any(tensor.is_meta for tensor in tensors):
                found.add(number)
            for place, (tensor, index) in enumerate(zip(tensors, recorded.results, strict=False)):
                if index is not None and (batch := _batch(course.recording.tensors[index], tensor)) != 0:
                    batches[Made(number, place)] = batch
            return returned

        def note_call(self, number: int, args: Any, kwargs: Mapping[str, Any], returned: Any) -> None:
            """Note what those are told that do not run this call of a submodule."""
            tensors = tensors_of(returned)
            if (tensors and not any(tensor.is_meta for tensor in tensors)) or course.attributes.leaves_behind(number):
                return
            known = answer(seen.first(number), SeenCall(rows + 1, tensors_of((args, dict(kwargs))), returned))
            if isinstance(known, str) and (calls := seen.all(number)):
                known = answer(*calls)
            if isinstance(known, Answer):
                course.calls[number] = known

    device = next((x.device for x in inputs.values()), torch.device("cpu"))
    arguments = {name: torch.cat([x.to("meta"), x[:1].to("meta")]) for name, x in inputs.items()}
    draws = {number: operation.draws for number, operation in enumerate(operations) if operation.draws}
    run = Constants(device, len(operations), draws)
    course.constants, course.batches, course.questions = frozenset(), batches, ()
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
        if run.number <= last:
            raise InvalidInput(
                f"{type(model).__name__} takes a number out of a tensor, or what has no shape beforehand"
                f"{_where(error)} ({describe_error(error)}): a party that does not hold that tensor cannot follow; "
                "write it as operations on tensors, or cut before it"
            ) from error
    course.constants, course.questions = frozenset(found), tuple(questions)


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
    ) -> None:
        self._model, self._inputs, self._targets, self._course = model, inputs, targets, course
        self._gradients, self._call = gradients, call
        self._rows = len(next(iter(inputs.values())))

    def first(self, number: int) -> SeenCall:
        """Return the call that was recorded."""
        operation = self._course.operations[number]
        return SeenCall(self._rows, operation.given, operation.returned, bool(operation.draws))

    def all(self, number: int) -> list[SeenCall]:
        """Return that call, one with a row more, and one of equal rows; none where the model takes another way."""
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
                f"{what} takes a number out of a tensor{_where(error)} ({describe_error(error)}) and {known}: parties "
                "that do not hold it cannot follow; return tensors alone, of a shape that follows from the input's"
            ) from error
        return known

    @cached_property
    def _others(self) -> list[dict[int, SeenCall]]:
        choices = ([*range(self._rows), 0], [0] * self._rows)
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


def _where(error: BaseException) -> str:
    skipped = (str(Path(torch.__file__).parent), str(Path(__file__).parent / "replay"))
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(skipped)]
    return f" at {frames[-1].line!r} ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""


class _Values:
    """Follows every tensor of a recorded pass from where it is made to where it is read."""

    def __init__(
        self,
        way: Way,
        operations: Sequence[Operation],
        inputs: Mapping[int, str],
        tensors: Sequence[Tensor],
        batches: Mapping[Made, int | None],
    ) -> None:
        self._way, self._operations, self._inputs = way, operations, inputs
        self._tensors, self._batches = tensors, batches
        self._made: dict[int, Made] = {}
        self._holder: dict[int, int] = {}
        self._names: dict[tuple[Made, int], str] = {}
        self._forms: dict[str, CrossingForm] = {}
        self._last: dict[tuple[Made, int | None], Made] = {}
        self._weights: dict[int, set[str]] = {}
        self._readers: dict[int, dict[int, int]] = {}

    def keep_names(self, earlier: Sequence[Way]) -> None:
        """Take the names of what is the same in `earlier` ways."""
        for way in earlier:
            shared = self._way.shared_with(way)
            self._names |= {key: name for key, name in way.labels.items() if key[0].operation < shared}
            self._forms = {**way.forms, **self._forms}

    def follow(self, results: Mapping[str, int | None]) -> None:
        """Fill the way with what crosses, and with its outputs: `results`, name -> index of the tensor."""
        for number, operation in enumerate(self._operations):
            segment = _segment(self._way, number)
            if number in self._way.constants:
                self._note_made(number, operation, None)
                continue
            for index in operation.reads:
                self._read(index, segment, operation)
            for index in operation.writes:
                self._write(index, segment, number, operation)
            self._note_made(number, operation, segment)
            if number in self._way.told:
                self._tell(number, segment, operation)
        for key, found in results.items():
            if found is None or found not in self._made:
                raise InvalidInput(
                    "a model that returns one of its inputs, weights or buffers, or what a hook takes out of a "
                    f"submodule ({key!r} here), cannot be cut; name the output that is used by output="
                )
            made, holder = self._made[found], self._holder.get(found)
            if holder is None:
                raise InvalidInput("a model that returns a constant cannot be cut")
            if (made, holder) not in self._names and not key.isdecimal():
                self._names[made, holder] = key
            name = self._name(made, holder, found)
            # What is returned twice is one value.
            self._way.results = (*self._way.results, name)
            self._way.outputs[name] = CrossingValue(name, holder, made)
            for received in self._way.received:
                if name in received:
                    # What the model returns is sent as it is.
                    received[name] = self._way.outputs[name]
        self._way.labels = self._names

    def _tell(self, number: int, segment: int, operation: Operation) -> None:
        """Let all later segments read what question `number` asks, so that everybody asks it."""
        if operation.state:
            raise InvalidInput(
                f"{operation.name!r} takes a number out of {min(operation.state)!r}, a weight or buffer that later "
                "parties do not hold, and goes on by it: ask it a question that is true or false by an operation "
                "(if scale > 3, in place of scale.item()), or keep it as a plain number"
            )
        for later in range(segment + 1, len(self._way.received)):
            for index in operation.reads:
                self._read(index, later, None)

    def _note_made(self, number: int, operation: Operation, segment: int | None) -> None:
        """Note where tensors come from; `segment` is None for constants, which everybody makes."""
        weights = set(operation.state).union(*(self._weights.get(i, set()) for i in operation.reads))
        for place, index in enumerate(operation.results):
            if index is not None and index not in self._made and index not in self._inputs:
                self._made[index] = Made(number, place)
                if segment is not None:
                    self._holder[index] = segment
            if index in self._made:
                self._last[self._made[index], segment] = Made(number, place)
            if index is not None:
                self._weights.setdefault(index, set()).update(weights)

    def _read(self, index: int, segment: int, operation: Operation | None) -> None:
        """Note that `operation` of `segment` reads a tensor; None: for its numbers alone, to which no gradient goes."""
        if index in self._inputs:
            self._way.raw[segment][self._inputs[index]] = None
            return
        source = self._holder.get(index)
        if source is None:
            if operation is not None and index not in self._made and self._tensors[index].grad_fn is not None:
                raise InvalidInput(f"{operation.name!r} reads a tensor of which it is not seen what made it: {UNSEEN}")
            return
        name = self._name(self._made[index], source, index) if source != segment else None
        counts = self._readers.setdefault(index, {})
        if operation is not None:
            counts[segment] = counts.get(segment, 0) + (2 if operation.deep else 1)
        if name is not None:
            if self._tensors[index].is_inference():
                raise InvalidInput(f"value {name!r} is made in inference mode, and crosses a cut: use torch.no_grad()")
            made = self._made[index]
            self._way.received[segment][name] = CrossingValue(name, source, made, self._batches.get(made, 0))
            self._way.reads[name] = counts
            self._way.upstream[name] = self._weights.get(index, set())

    def _write(self, index: int, segment: int, number: int, operation: Operation) -> None:
        """Let `segment` hold what it overwrites; refuse where another name of that memory is read across a cut."""
        if index in self._inputs and len(self._way.ends) > 0:
            later = [n for n, o in enumerate(self._operations) if n > number and index in o.reads]
            if any(_segment(self._way, n) != segment for n in later):
                raise self._overwritten(operation)
        memory = self._tensors[index].untyped_storage().data_ptr()
        for other, tensor in enumerate(self._tensors):
            known = other in self._made or other in self._inputs
            if other == index or not known or not memory or tensor.untyped_storage().data_ptr() != memory:
                continue
            later = [n for n, o in enumerate(self._operations) if n > number and other in o.reads]
            apart = self._holder.get(other) != segment or self._holder.get(index) != segment
            if any(_segment(self._way, n) != segment or apart for n in later):
                raise self._overwritten(operation)
        if index in self._made:
            self._holder[index] = segment

    def _overwritten(self, operation: Operation) -> InvalidInput:
        return InvalidInput(
            f"{operation.name!r} overwrites in place what is read after a cut under another name: the cut would change "
            "the model; make that operation not in place"
        )

    def _name(self, made: Made, source: int, index: int) -> str:
        """Return the name of a tensor that `source` hands on: of what returned it, with a number where that is taken.

        Of several operations it is the last one: dropout returns what it is given, but in training. A name that has
        another form in another way is taken too.
        """
        tensor, batch = self._tensors[index], self._batches.get(made, 0)
        shape = tuple(size for dimension, size in enumerate(tensor.shape) if dimension != batch)
        form = CrossingForm(shape, tensor.dtype, tensor.requires_grad)
        if (made, source) not in self._names:
            last = self._last.get((made, source), made)
            base = self._operations[last.operation].name.strip("_").replace(".", "_")
            base += f"_{last.place}" if len(self._operations[last.operation].results) > 1 else ""
            name, number = base, 1
            while (
                name in self._names.values()
                or name in self._inputs.values()
                or self._forms.get(name, form)[:2] != form[:2]
            ):
                name, number = f"{base}_{number}", number + 1
            self._names[made, source] = name
        name = self._names[made, source]
        self._way.forms[name] = form
        return name
