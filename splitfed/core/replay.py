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
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from splitfed.core.attribute_reads import Reads
from splitfed.core.cut_names import Cut
from splitfed.core.errors import InvalidInput, check_names
from splitfed.core.forward_path import INPUT, CrossingForm, ForwardPath, OperationOutput, align_ways
from splitfed.core.held_arrays import check_references
from splitfed.core.meta_copies import meta_copy
from splitfed.core.model_call import ModelCall, call_of, set_mode
from splitfed.core.module_copies import copy_computed, deep_copy
from splitfed.core.replay_parts import Withholding, leave_out, machinery_reads
from splitfed.core.replay_passes import Stop, mark_whole_modules
from splitfed.core.replay_plan import plan_ways
from splitfed.core.replay_sizes import every_way, plan_sizes, repeat_rows
from splitfed.core.replay_values import UNSEEN
from splitfed.core.segment_pass import ReplayPlan, SegmentPass

_MODES = ((True, True), (True, False), (False, True), (False, False))


class ReplayedSegment(Withholding):
    """A segment as a module: the user's own with the weights of others left out. Built by `replay` alone."""

    keeps_names: ClassVar[bool] = True
    replay_plan: ReplayPlan
    replay_number: int
    replay_values: tuple[tuple[str, ...], tuple[str, ...]]
    withheld: frozenset[str]
    """Attributes and buffers, by their full names, that others alone are seen to read: it has no numbers of them."""

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
        run.held |= {OperationOutput(INPUT, place): arguments[name] for place, name in enumerate(plan.inputs)}
        result = None
        try:
            with run:
                result = plan.call(super().forward, arguments)
        except Stop:
            pass
        except AttributeError as error:
            if not run.branches:
                raise
            raise run.beyond(f"needs there what its party does not hold ({error})") from error
        finally:
            # What the user switches back after the cut is not reached.
            torch.set_grad_enabled(gradients)
        returned = run.returned(self.replay_values[1], rows, result)
        if training and gradients and run.branches:
            run.check_gradients(returned)
        return returned[0] if len(returned) == 1 else returned

    @property
    def may_learn_from(self) -> frozenset[str]:
        """What it reads from which its outputs learn on some way, where numbers in tensors steer its way."""
        ways = [way for way in self.replay_plan.every_way() if self.replay_number == len(way.ends)]
        return frozenset(n for way in ways for n, v in way.received[-1].items() if (v.origin or n) in way.connected)

    @property
    def may_overwrite(self) -> frozenset[str]:
        """What it reads and may change in place on a way that is not planned: all, where numbers steer it there."""
        ways = (way for way in self.replay_plan.every_way() if self.replay_number == len(way.ends))
        return frozenset(self.replay_values[0] if any(way.branches for way in ways) else ())

    @property
    def read_attributes(self) -> frozenset[str]:
        """The attributes of the model that its operations may read, by their full names."""
        found: set[str] = set()
        for way in self.replay_plan.every_way():
            # What is looked up right before its end is for the next segment.
            last = way.bounds(self.replay_number)[1] - 1
            read = way.attributes.names(partial(operator.gt, last + 1), partial(way.runs, self.replay_number))
            found.update(f"{path}.{name}" if path else name for path, names in read.items() for name in names)
        return frozenset(found)

    @property
    def planned_draws(self) -> frozenset[str]:
        """The packages from which it draws random numbers in any way of training that is known."""
        number, plan = self.replay_number, self.replay_plan
        ways = [*(way for mode, ways in plan.ways.items() if mode[0] for way in ways), *plan.beyond]
        bounds = ((way, *way.bounds(number)) for way in ways)
        found = (draws for way, first, last in bounds for n, draws in way.draws.items() if first <= n < last)
        return frozenset().union(*found)

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


NamedSegment = tuple[ReplayedSegment, tuple[str, ...], tuple[str, ...]]
"""A segment with the names of what it reads and returns."""


@dataclass(frozen=True)
class Replayed:
    """A model cut by replay: its segments with the names of what they read and return, and its inputs and outputs.

    `reordered`: weights whose gradients are summed in another order than in the uncut model. `sizes`: the numbers of
    rows that have ways of their own.
    """

    segments: tuple[NamedSegment, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    reordered: frozenset[str]
    sizes: tuple[int, ...]
    build: Callable[[int, Mapping[str, bool]], NamedSegment]
    """Makes the segment of a number, given the attributes and buffers that its party holds though others alone are seen
    to read them: True: as they are, False: the single numbers in them."""


def replay(
    model: nn.Module,
    cuts: Sequence[Cut],
    example: Tensor | Mapping[str, Tensor],
    output: str | None = None,
    chain: Sequence[str] = (),
    after: str | None = None,
    sent_inputs: Sequence[str] = (),
    sizes: Collection[int] = (),
    held: Mapping[int, Mapping[str, bool]] | None = None,
) -> Replayed:
    """Cut `model` at each of `cuts`, in the order they run.

    `example`: two rows of its input or more, by argument if there are several. `output`: the only result of the model
    that is used. `chain`: the party of each segment, where neighbours alone send to each other; see
    `cut_names.relays`. `after`: a result of the model behind which there is one more cut, the last.
    `sent_inputs`: inputs that the first segment may send. `sizes`: other numbers of rows that get ways of their own,
    where these agree with those of the example in what crosses. `held`: number of a segment -> what `Replayed.build` is
    given. Raises `InvalidInput` for what cannot be cut.
    """
    inputs = _name_inputs(model, example)
    check_names(f"input of {type(model).__name__}", inputs, *sent_inputs)
    call = call_of(model, list(inputs))

    def plan_rows(rows: Mapping[str, Tensor]) -> dict[tuple[bool, bool], tuple[ForwardPath, ...]]:
        return {mode: _plan_mode(model, rows, cuts, mode, call, output, after) for mode in _MODES}

    ways = plan_rows(inputs)
    every = [way for planned in ways.values() for way in planned]
    first = every[0]
    for (training, _), planned in ways.items():
        for way in planned:
            if set(first.outputs) == set(way.outputs):
                continue
            name, mine, other = type(model).__name__, ", ".join(first.outputs), ", ".join(way.outputs)
            if not training:
                raise InvalidInput(
                    f"{name} returns {mine} in training, {other} in evaluation: return the same in both modes"
                )
            raise InvalidInput(
                f"{name} returns {mine} with gradients, {other} without: a full backward hook on the submodule that "
                "makes a result puts another tensor in its place where there are gradients; register it on a submodule "
                "before that one"
            )
    for way in every:
        way.widen(type(model).__name__)
    forms = {name: form for way in reversed(every) for name, form in way.forms.items()}
    for planned in ways.values():
        align_ways(type(model).__name__, planned)
    other_sizes = plan_sizes(ways, {rows: partial(plan_rows, repeat_rows(inputs, rows)) for rows in sizes})
    every = every_way(ways, other_sizes)
    beyond = tuple(one for way in every for one in way.beyond)
    reads = [_list_reads(planned) for planned in ways.values()]
    if not all(set(a) == set(b) for other in reads for a, b in zip(reads[0], other, strict=True)):
        raise InvalidInput(
            f"in {type(model).__name__} other values cross in evaluation than in training: let what stands behind the "
            "cut read the same in both modes"
        )
    _check_segments(first, cuts)
    trained = [*ways[True, True], *(way for other in other_sizes.values() for way in other[True, True])]
    reordered = frozenset().union(*(_find_reordered(one) for way in trained for one in (way, *way.beyond)))
    for way in every:
        way.send_inputs(sent_inputs, list(inputs))
        way.hand_on(chain)
    forms |= {f"{name}_sent": CrossingForm(tuple(x.shape[1:]), x.dtype, False) for name, x in inputs.items()}
    for way in every:
        for received in way.received:
            # What is handed on has the form of what it is handed on from.
            forms |= {name: forms[value.origin] for name, value in received.items() if name not in forms}
    holders = _assign_state(model, [*every, *beyond], len(first.received))
    shapes = {name: (tuple(x.shape[1:]), x.dtype) for name, x in inputs.items()}
    rows = len(next(iter(inputs.values())))
    plan = ReplayPlan(
        type(model).__name__, ways, shapes, forms, call, rows=rows, sizes=other_sizes, output=output, beyond=beyond
    )
    machinery = machinery_reads(meta_copy(model, (), ()))
    build = partial(_build, model, plan, holders, cuts, machinery)
    segments = tuple(build(number, (held or {}).get(number, {})) for number in range(len(first.received)))
    return Replayed(segments, tuple(inputs), first.results, reordered, tuple(other_sizes), build)


def _plan_mode(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    cuts: Sequence[Cut],
    mode: tuple[bool, bool],
    call: ModelCall,
    output: str | None,
    after: str | None,
) -> tuple[ForwardPath, ...]:
    """Return the ways of `model` in a mode: whether it trains, and whether there are gradients."""
    training, gradients = mode
    modes = {module: module.training for module in model.modules()}
    try:
        if training != model.training:
            set_mode(model, training)
        return plan_ways(model, inputs, cuts, gradients, call, output, after)
    finally:
        for module, was in modes.items():
            module.training = was


def _check_segments(first: ForwardPath, cuts: Sequence[Cut]) -> None:
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


def _list_reads(ways: Sequence[ForwardPath]) -> list[dict[str, None]]:
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


def _assign_state(model: nn.Module, ways: Sequence[ForwardPath], count: int) -> dict[str, tuple[int, ...]]:
    """Return which segments hold each weight and buffer; of a buffer that never changes all but the first a copy.

    What none of `ways` reads is held by whoever holds what is nearest to it.
    """
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
    relatives: dict[str, int] = {}
    for name, tensor in named:
        for owner in _owners(name) if readers[id(tensor)] else ():
            relatives[owner] = max(readers[id(tensor)])
    found: dict[str, tuple[int, ...]] = {}
    before = 0
    for name, tensor in named:
        nearest = next((relatives[owner] for owner in _owners(name) if owner in relatives), before)
        readers_here = sorted(readers[id(tensor)]) or [nearest]
        if len(readers_here) > 1 and name in changed and name not in saved:
            raise InvalidInput(f"buffer {name!r} changes and is read on two sides of a cut: let one side alone read it")
        switched = any(way.names[o] == "requires_grad_" for way in ways for o in way.readers.get(name, ()))
        if len(readers_here) > 1 and switched:
            raise InvalidInput(
                f"forward of {type(model).__name__} calls requires_grad_() of {name!r} on another side of a cut than "
                "what reads it: freeze it before, outside of forward, or call that and read it within one submodule"
            )
        if name in saved:
            before = readers_here[0]
        found[name] = tuple(readers_here)
    return found


def _owners(name: str) -> list[str]:
    """Return the submodules that a weight lies in, the innermost first."""
    parts = name.split(".")[:-1]
    return [".".join(parts[:end]) for end in range(len(parts), 0, -1)]


def _build(
    model: nn.Module,
    plan: ReplayPlan,
    holders: Mapping[str, tuple[int, ...]],
    cuts: Sequence[Cut],
    machinery: Reads,
    number: int,
    left: Mapping[str, bool],
) -> NamedSegment:
    saved = set(model.state_dict())
    weights = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    changed = set().union(*(way.changed for way in plan.every_way()))
    one_tensor = weights | changed
    own = {n for n, held in holders.items() if number in (held if n in one_tensor else held[:1])}
    real = {n for n, held in holders.items() if n not in weights and n not in own and (number in held)}
    constant = {n for n in holders if n not in weights and n not in saved and n not in changed and n not in own}
    every, targets = plan.every_way(), [cut.target for cut in cuts]
    met = {n: [(way, o) for way in every for o in way.readers.get(n, ()) if way.runs(number, o)] for n in constant}
    read = {n for n, places in met.items() if any(_reads_numbers(way, number, o) for way, o in places)}
    real |= read.union(n for n, places in met.items() if places and left.get(n))
    made = meta_copy(model, own, real)
    withheld = leave_out(made, [*every, *plan.beyond], number, machinery, targets, left)
    check_references(made, type(model).__name__)
    mark_whole_modules(made, targets)
    kind = type(model)
    made.__class__ = type(f"{kind.__name__}Segment{number}", (ReplayedSegment, kind), {"__module__": kind.__module__})
    assert isinstance(made, ReplayedSegment)
    made.replay_plan, made.replay_number = plan, number
    made.withheld = withheld.union(n for n, places in met.items() if places and n not in real)
    first = plan.ways[True, True]
    raw = dict.fromkeys(name for ways in plan.ways.values() for way in ways for name in way.raw[number])
    inputs = (*(name for name in plan.inputs if name in raw), *_list_reads(first)[number])
    made.replay_values = (inputs, tuple(dict.fromkeys(name for way in first for name in way.sent(number))))
    return made, *made.replay_values


def _reads_numbers(way: ForwardPath, segment: int, operation: int) -> bool:
    """Return whether the party of `segment` needs the numbers that `operation` reads."""
    return way.computes(segment, operation) or (operation in way.wholes and operation not in way.constants)


def _find_reordered(way: ForwardPath) -> frozenset[str]:
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
