"""Cut a model by replay: every party runs the user's own `forward`, of which it computes its own segment alone.

A party holds a copy of the model in which all weights and saved buffers of others are shapes without numbers, on
torch's meta device. Its `forward` runs from the top: operations of earlier segments are answered by shapes, what
crosses is put where the sender's operation stood, its own operations run as they are, and at its own cut it stops. So
branches, default arguments, contexts (`no_grad`, autocast) and functions with a backward of their own work as the user
wrote them. An operation that needs a number which the party does not hold fails instead of computing.

What a model computes from shapes and constants alone (positions, masks) every party computes. A value without a batch
dimension (a position bias) crosses once for every row, and its reader takes the first of these equal rows. Weights that
two segments read are one tensor in both, which only one party can hold. Refused: memory overwritten across a cut,
unsaved buffers that change and are read in two segments, and a `forward` that needs a number of a tensor before the
last cut.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from splitfed.core.attribute_reads import Reads
from splitfed.core.cut_names import Cut
from splitfed.core.errors import InvalidInput, check_names
from splitfed.core.grouping import group_pairs, nest
from splitfed.core.held_arrays import check_references
from splitfed.core.model_call import ModelCall, call_of
from splitfed.core.module_copies import copy_computed, deep_copy
from splitfed.core.nested_tensors import is_plain, replace_tensors, tensors_of
from splitfed.core.replay_parts import leave_out, machinery_reads
from splitfed.core.replay_passes import MetaPass, Stop, mark_whole_modules
from splitfed.core.replay_plan import meta_copy, plan_ways
from splitfed.core.replay_sizes import Sizes, Ways, every_way, plan_sizes, repeat_rows
from splitfed.core.replay_values import UNSEEN
from splitfed.core.replay_way import INPUT, CrossingForm, Made, Way, align_ways

_MODES = ((True, True), (True, False), (False, True), (False, False))


@dataclass(frozen=True)
class ReplayPlan:
    """How the segments of one model are replayed: training, gradients -> the ways; input -> its shape a row and type.

    The first way of each mode is that of the example; others follow from other numbers in tensors, see
    `replay_courses`. `forms`: what crosses -> what it looks like. `call`: how `forward` takes its rows. `memory`: for a
    mode, segment, number of rows, device and way, what operations of other segments return, on the meta device.
    `rows`: of the example; `sizes`: other numbers of rows -> mode -> their ways, where these are others; `tried`: what
    `replay_rows` has found of other numbers of rows. Shared by all copies of a segment.
    """

    model: str
    ways: Ways
    inputs: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    forms: Mapping[str, CrossingForm] = field(default_factory=dict)
    call: ModelCall = field(default_factory=ModelCall)
    memory: dict[Any, dict[int, Any]] = field(default_factory=dict, compare=False, repr=False)
    rows: int = 2
    sizes: Sizes = field(default_factory=dict)
    tried: dict[tuple[bool, int, int], str] = field(default_factory=dict, compare=False, repr=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> ReplayPlan:
        """Return itself: it holds no state."""
        return self

    def ways_of(self, training: bool, gradients: bool, rows: int) -> tuple[Way, ...]:
        """Return the ways that a batch of `rows` may take in a mode."""
        return self.sizes.get(rows, {}).get((training, gradients)) or self.ways[training, gradients]

    def every_way(self) -> list[Way]:
        """Return all ways, of all modes and numbers of rows."""
        return every_way(self.ways, self.sizes)


class ReplayedSegment(nn.Module):
    """A segment as a module: the user's own with the weights of others left out. Built by `replay` alone."""

    keeps_names: ClassVar[bool] = True
    replay_plan: ReplayPlan
    replay_number: int
    replay_values: tuple[tuple[str, ...], tuple[str, ...]]

    def forward(self, *values: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return what the segment sends, for what it reads, in the order of its inputs and outputs."""
        plan, number = self.replay_plan, self.replay_number
        training, gradients = self.training, torch.is_grad_enabled()
        given = dict(zip(self.replay_values[0], values, strict=True))
        rows, device = len(values[0]), values[0].device
        arguments: dict[str, Tensor] = {}
        for name, (shape, dtype) in plan.inputs.items():
            if name in given and tuple(given[name].shape[1:]) != shape:
                raise InvalidInput(
                    f"input {name!r} of {plan.model} has shape {tuple(given[name].shape[1:])} a row; the model was cut "
                    f"for {shape}"
                )
            arguments[name] = given[name] if name in given else torch.empty((rows, *shape), dtype=dtype, device="meta")
        run = SegmentPass(plan, number, given, device, (training, gradients, number, rows, device))
        for place, name in enumerate(plan.inputs):
            arguments[name] = run.received_inputs.get(place, arguments[name])
        run.held |= {Made(INPUT, place): arguments[name] for place, name in enumerate(plan.inputs)}
        try:
            with run:
                plan.call(super().forward, arguments)
        except Stop:
            pass
        finally:
            # What the user switches back after the cut is not reached.
            torch.set_grad_enabled(gradients)
        returned = run.returned(self.replay_values[1], rows)
        return returned[0] if len(returned) == 1 else returned

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be pickled: what others hold is not in it."""
        raise InvalidInput(f"a segment of {self.replay_plan.model} cannot be pickled; save its state_dict()")

    def __deepcopy__(self, memo: dict[int, Any]) -> ReplayedSegment:
        """Return a copy with weights of its own."""
        made: ReplayedSegment = object.__new__(type(self))
        memo[id(self)] = made
        memo |= copy_computed(self)
        made.__dict__.update(deep_copy(self.__dict__, (self,), memo))
        return made


class SegmentPass(MetaPass):
    """The pass of one party: shapes before its segment, numbers in it, and the end after it.

    `key`: under which the plan's memory stands, mode, whether there are gradients, segment and number of rows first;
    `ways`: those that may be taken, all of the mode unless given.
    """

    def __init__(
        self,
        plan: ReplayPlan,
        segment: int,
        given: Mapping[str, Tensor],
        device: torch.device,
        key: tuple[Any, ...],
        ways: Sequence[Way] = (),
    ) -> None:
        ways = ways or plan.ways_of(key[0], key[1], key[3])
        super().__init__(device, 0, {})
        self._plan, self._segment, self._given, self._key = plan, segment, given, key
        self.held: dict[Made, Tensor] = {}
        self._off = False
        self._follow(ways)

    def _follow(self, ways: Sequence[Way]) -> None:
        """Go on in one of `ways`, which are the same up to the next answer that is told."""
        self._ways, self._way = ways, ways[0]
        self._first, self.stop = self._way.bounds(self._segment)
        self.draws = self._way.draws
        horizon = self._way.next_told(self.number) if len(ways) > 1 else None
        self._received_values: dict[Made, Tensor] = {}
        wanted: dict[Made, None] = {}
        for way in ways:
            near = [c for c in way.received[self._segment].values() if horizon is None or c.made.operation <= horizon]
            self._received_values |= {c.made: c.receive(self._given[c.name]) for c in near}
            wanted |= {c.made: None for c in way.sent(self._segment).values()}
        self._received = nest((made.operation, made.place, tensor) for made, tensor in self._received_values.items())
        self._wanted = group_pairs((made.operation, made.place) for made in wanted)
        planned = self._plan.ways_of(self._key[0], self._key[1], self._key[3])
        number = next(n for n, way in enumerate(planned) if way is self._way)
        self._memory = self._plan.memory.setdefault((*self._key, number), {})

    @property
    def received_inputs(self) -> Mapping[int, Tensor]:
        """The inputs of the model that were sent, by their place."""
        return self._received.get(INPUT, {})

    def returned(self, names: Sequence[str], rows: int) -> tuple[Tensor, ...]:
        """Return what the segment sends under `names`, of a batch of `rows`, at the end of the pass."""
        if self._off or self.number != self.stop:
            raise self.strayed()
        sent, found = self._way.sent(self._segment), []
        for name in names:
            if name not in sent:
                # In this way there is none; whoever reads it comes the same way.
                shape, dtype, _ = self._plan.forms[name]
                found.append(torch.zeros((rows, *shape), dtype=dtype, device=self.device))
                continue
            made = sent[name].made
            value = self._received_values[made] if made in self._received_values else self.held[made]
            if value.is_meta:
                raise InvalidInput(
                    f"segment {self._segment} of {self._plan.model} returns a tensor without numbers: {UNSEEN}"
                )
            found.append(sent[name].send(value, rows))
        return tuple(found)

    def operation(self, name: str, func: Any, args: Any, kwargs: Mapping[str, Any], module: nn.Module | None) -> Any:
        """Answer, run, or end."""
        number = self.number
        if self._off or (number >= self.stop and self._segment == len(self._way.ends)):
            raise self.strayed()
        if number >= self.stop:
            raise Stop
        if self._way.names[number] != name:
            raise self.strayed()
        if number in self._way.numbers and number < self._first and number not in self._way.told:
            # Whoever holds that tensor has looked, or else nothing would have been sent.
            self.number += 1
            return self._way.numbers[number]
        if number < self._first or number in self._way.constants:
            return self._decide(number, self._hold(number, self._answer(number, name, func, args, kwargs, module)))
        self.number += 1
        if module is None and number not in self._way.by_holders:
            for one in args:
                # Products of numbers and of shapes alone would come out as what memory happens to hold.
                if isinstance(one, Tensor) and one.is_meta:
                    raise self._without_numbers(name)
        if module is None:
            returned = func(*args, **kwargs)
        else:
            # What happens within a submodule of its own is nobody's business, and costs nothing.
            torch.overrides.TorchFunctionMode.__exit__(self, None, None, None)
            try:
                returned = func(*args, **kwargs)
            finally:
                torch.overrides.TorchFunctionMode.__enter__(self)
        return self._decide(number, self._hold(number, returned))

    def _decide(self, number: int, returned: Any) -> Any:
        """Go on by a number that was taken out of a tensor; where no way is planned for it, nothing more runs."""
        way = self._way
        if number not in way.numbers or number in way.free:
            return returned
        if number in way.told and not isinstance(way.numbers[number], bool):
            return returned
        if returned == way.numbers[number]:
            agreeing = [one for one in self._ways if one.numbers.get(number) == returned]
        else:
            agreeing = [one for one in self._ways if number in one.told and one.numbers[number] == returned]
        # An error that `forward` raises of itself at such a number comes first.
        self._off = not agreeing
        if agreeing and len(self._ways) > 1:
            self._follow(agreeing)
        return returned

    def _hold(self, number: int, returned: Any) -> Any:
        """Keep what the segment sends, and return all."""
        for place in self._wanted.get(number, ()):
            self.held[Made(number, place)] = tensors_of(returned)[place]
        return returned

    def _answer(
        self, number: int, name: str, func: Any, args: Any, kwargs: Mapping[str, Any], module: nn.Module | None
    ) -> Any:
        """Return what an operation of another segment returned: shapes, constants, and what crossed."""
        received = self._received.get(number, {})
        if number in self._memory:
            self.number += 1
            # All parties share what is remembered: what was received is put into a copy.
            return replace_tensors(self._memory[number], received, copies=True)
        if number in self._way.calls:
            self.number += 1
            known = self._way.calls[number]
            returned = known.build(self._key[3], tensors_of((args, dict(kwargs))))
            if not known.hands_through:
                self._memory[number] = returned
            return replace_tensors(returned, received, copies=True)
        # Others' work is none of this party's, where operations or memory are counted.
        with _disable_current_modes():
            returned = super().operation(name, func, args, kwargs, module)
        tensors = tensors_of(returned)
        written = any(tensor is one for tensor in tensors for one in tensors_of((args, dict(kwargs))))
        lasting = not written and self._way.lasts(number) and not self._way.reshapes and is_plain(returned)
        if tensors and lasting and all(tensor.is_meta for tensor in tensors):
            # Without its graph, which would keep what was received in this step.
            bare = dict(enumerate(tensor.detach() for tensor in tensors))
            self._memory[number] = replace_tensors(returned, bare, copies=True)
        return replace_tensors(returned, received) if received else returned

    def _without_numbers(self, name: str) -> InvalidInput:
        """Return the error of an operation of this segment that reads what the party has no numbers of."""
        return InvalidInput(
            f"{name!r}, operation {self.number - 1} of {self._plan.model}, reads a tensor of which its party has no "
            f"numbers: {UNSEEN}"
        )

    def strayed(self) -> InvalidInput:
        """Return the error of a pass that is another one than the plan's."""
        return InvalidInput(
            f"forward of {self._plan.model} takes another way than when it was cut, at operation {self.number} of "
            f"{len(self._way.names)}: a branch that depends on more than the mode cannot be cut"
        )


@dataclass(frozen=True)
class Replayed:
    """A model cut by replay: its segments with the names of what they read and return, and its inputs and outputs.

    `reordered`: weights whose gradients are summed in another order than in the uncut model. `sizes`: the numbers of
    rows that have ways of their own.
    """

    segments: tuple[tuple[ReplayedSegment, tuple[str, ...], tuple[str, ...]], ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    reordered: frozenset[str]
    sizes: tuple[int, ...] = ()


def replay(
    model: nn.Module,
    cuts: Sequence[Cut],
    example: Tensor | Mapping[str, Tensor],
    output: str | None = None,
    chain: Sequence[str] = (),
    after: str | None = None,
    sent_inputs: Sequence[str] = (),
    sizes: Collection[int] = (),
) -> Replayed:
    """Cut `model` at each of `cuts`, in the order they run.

    `example`: two rows of its input or more, by argument if there are several. `output`: the only result of the model
    that is used. `chain`: the party of each segment, where neighbours alone send to each other; see
    `cut_names.relays`. `after`: a result of the model behind which there is one more cut, the last.
    `sent_inputs`: inputs that the first segment may send. `sizes`: other numbers of rows that get ways of their own,
    where these agree with those of the example in what crosses. Raises `InvalidInput` for what cannot be cut.
    """
    inputs = _name_inputs(model, example)
    check_names(f"input of {type(model).__name__}", inputs, *sent_inputs)
    call = call_of(model, list(inputs))

    def plan_rows(rows: Mapping[str, Tensor]) -> dict[tuple[bool, bool], tuple[Way, ...]]:
        return {mode: _plan_mode(model, rows, cuts, mode, call, output, after) for mode in _MODES}

    ways = plan_rows(inputs)
    every = [way for planned in ways.values() for way in planned]
    forms = {name: form for way in reversed(every) for name, form in way.forms.items()}
    first = every[0]
    for way in every:
        if set(first.outputs) != set(way.outputs):
            raise InvalidInput(
                f"{type(model).__name__} returns {', '.join(first.outputs)} in training, {', '.join(way.outputs)} in "
                "evaluation: return the same in both modes"
            )
    for planned in ways.values():
        align_ways(type(model).__name__, planned)
    other_sizes = plan_sizes(ways, {rows: partial(plan_rows, repeat_rows(inputs, rows)) for rows in sizes})
    every = every_way(ways, other_sizes)
    reads = [_list_reads(planned) for planned in ways.values()]
    if not all(set(a) == set(b) for other in reads for a, b in zip(reads[0], other, strict=True)):
        raise InvalidInput(
            f"in {type(model).__name__} other values cross in evaluation than in training: let what stands behind the "
            "cut read the same in both modes"
        )
    _check_segments(first, cuts)
    trained = [*ways[True, True], *(way for other in other_sizes.values() for way in other[True, True])]
    reordered = frozenset().union(*(_find_reordered(way) for way in trained))
    for way in every:
        way.send_inputs(sent_inputs, list(inputs))
        way.hand_on(chain)
    forms |= {f"{name}_sent": CrossingForm(tuple(x.shape[1:]), x.dtype, False) for name, x in inputs.items()}
    for way in every:
        for received in way.received:
            # What is handed on has the form of what it is handed on from.
            forms |= {name: forms[value.origin] for name, value in received.items() if name not in forms}
    holders = _assign_state(model, every, len(first.received))
    shapes = {name: (tuple(x.shape[1:]), x.dtype) for name, x in inputs.items()}
    rows = len(next(iter(inputs.values())))
    plan = ReplayPlan(type(model).__name__, ways, shapes, forms, call, rows=rows, sizes=other_sizes)
    machinery = machinery_reads(meta_copy(model, (), ()))
    segments = tuple(_build(model, plan, number, holders, cuts, machinery) for number in range(len(first.received)))
    return Replayed(segments, tuple(inputs), first.results, reordered, tuple(other_sizes))


def _plan_mode(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    cuts: Sequence[Cut],
    mode: tuple[bool, bool],
    call: ModelCall,
    output: str | None,
    after: str | None,
) -> tuple[Way, ...]:
    """Return the ways of `model` in a mode: whether it trains, and whether there are gradients."""
    training, gradients = mode
    modes = {module: module.training for module in model.modules()}
    try:
        if training != model.training:
            model.train(training)
        return plan_ways(model, inputs, cuts, gradients, call, output, after)
    finally:
        for module, was in modes.items():
            module.training = was


def _check_segments(first: Way, cuts: Sequence[Cut]) -> None:
    """Refuse a segment of the way `first` that reads nothing, or of which nothing is read."""
    for number in range(len(cuts) + 1 if cuts else 0):
        if not (first.raw[number] or first.received[number]) or not first.sent(number):
            place = f"after {cuts[-1].name!r}" if number == len(cuts) else f"before {cuts[number].name!r}"
            begin, end = first.bounds(number)
            idle = end - begin == len(first.constants.intersection(range(begin, end)))
            hint = (
                "" if idle else f": nothing there is seen to read an input and to be read behind it; if it is, {UNSEEN}"
            )
            name = cuts[min(number, len(cuts) - 1)].name
            raise InvalidInput(f"cut {name!r} leaves an empty segment {place}{hint}")


def _list_reads(ways: Sequence[Way]) -> list[dict[str, None]]:
    """Return what each segment reads of earlier ones, in any of `ways`, in the order of the first."""
    count = len(ways[0].received)
    return [dict.fromkeys(name for way in ways for name in way.received[number]) for number in range(count)]


def _name_inputs(model: nn.Module, example: Tensor | Mapping[str, Tensor]) -> dict[str, Tensor]:
    if isinstance(example, Mapping):
        return dict(example)
    parameters = list(inspect.signature(model.forward).parameters)
    if not parameters:
        raise InvalidInput(f"forward of {type(model).__name__} takes no argument")
    return {parameters[0]: example}


def _assign_state(model: nn.Module, ways: Sequence[Way], count: int) -> dict[str, tuple[int, ...]]:
    """Return which segments hold each weight and buffer; of a buffer that never changes all but the first a copy."""
    saved, changed = set(model.state_dict()), set().union(*(way.changed for way in ways))
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    readers: dict[int, set[int]] = {}
    keepers: dict[int, set[int]] = {}
    for name, tensor in named:
        readers.setdefault(id(tensor), set()).update(*(way.state.get(name, ()) for way in ways))
        keepers.setdefault(id(tensor), set()).update(*(way.kept.get(name, ()) for way in ways))
    for tensor_id, found_keepers in keepers.items():
        if len(readers[tensor_id]) != 1 or max(found_keepers, default=0) > max(readers[tensor_id]):
            readers[tensor_id] |= found_keepers
    found: dict[str, tuple[int, ...]] = {}
    before = 0
    for name, tensor in named:
        readers_here = sorted(readers[id(tensor)]) or [before]
        if len(readers_here) > 1 and name in changed and name not in saved:
            raise InvalidInput(f"buffer {name!r} changes and is read on two sides of a cut: let one side alone read it")
        if name in saved:
            before = readers_here[0]
        found[name] = tuple(readers_here)
    return found


def _build(
    model: nn.Module,
    plan: ReplayPlan,
    number: int,
    holders: Mapping[str, tuple[int, ...]],
    cuts: Sequence[Cut],
    machinery: Reads,
) -> tuple[ReplayedSegment, tuple[str, ...], tuple[str, ...]]:
    saved = set(model.state_dict())
    weights = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    changed = set().union(*(way.changed for way in plan.every_way()))
    one_tensor = weights | changed
    own = {n for n, held in holders.items() if number in (held if n in one_tensor else held[:1])}
    real = {n for n, held in holders.items() if n not in weights and n not in own and (number in held)}
    constant = {n for n in holders if n not in weights and n not in saved and n not in changed and n not in own}
    every, targets = plan.every_way(), [cut.target for cut in cuts]
    real |= {n for n in constant if any(way.runs(number, o) for way in every for o in way.readers.get(n, ()))}
    made = meta_copy(model, own, real)
    leave_out(made, every, number, machinery, targets)
    check_references(made, type(model).__name__)
    mark_whole_modules(made, targets)
    kind = type(model)
    made.__class__ = type(f"{kind.__name__}Segment{number}", (ReplayedSegment, kind), {"__module__": kind.__module__})
    assert isinstance(made, ReplayedSegment)
    made.replay_plan, made.replay_number = plan, number
    first = plan.ways[True, True]
    raw = dict.fromkeys(name for ways in plan.ways.values() for way in ways for name in way.raw[number])
    inputs = (*(name for name in plan.inputs if name in raw), *_list_reads(first)[number])
    made.replay_values = (inputs, tuple(dict.fromkeys(name for way in first for name in way.sent(number))))
    return made, *made.replay_values


def _find_reordered(way: Way) -> frozenset[str]:
    """Return the weights behind a value whose gradients are summed in another order than in the uncut model.

    The rule is that of `splitfed.core.reordered_gradients`, on what was recorded.
    """
    found: set[str] = set()
    for name, counts in way.reads.items():
        source = next(r[name].source for r in way.received if name in r)
        by_loss = name in way.outputs
        behind = [n for segment, n in counts.items() if segment != source]
        partial = max(behind, default=0) > 1 and sum(counts.values()) + by_loss > max(behind)
        if partial or (by_loss and len(behind) > 1):
            found |= way.upstream[name]
    for name, counts in way.state.items():
        # Of a weight in several segments, the gradients of the last one come first, here as there.
        if any(n > 1 and segment != max(counts) for segment, n in counts.items()):
            found.add(name)
    return frozenset(found)
