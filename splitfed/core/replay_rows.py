"""Whether the parties of a replayed model take the way of their plan with other numbers of rows than the example's.

Python code of `forward` may look at the number of rows (`if len(x) > 4`). A model that does is planned for every number
up to that of its example. The numbers of a run are known before its first step, so that each is tried: every party's
pass runs once more on shapes alone, as its plan was found, which takes milliseconds whatever the model's size. A
submodule that no cut lies within may do with rows what it likes.

A trace needs none of this: a branch on a number of rows cannot be traced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from splitfed.core.errors import InvalidInput, describe_failure, others_code
from splitfed.core.forward_path import ForwardPath
from splitfed.core.meta_pass import MetaPass
from splitfed.core.model_call import set_mode, trying
from splitfed.core.module_copies import copy_computed, deep_copy
from splitfed.core.nested_tensors import tensors_of
from splitfed.core.replay import Replayed, ReplayedSegment
from splitfed.core.replay_passes import Stop
from splitfed.core.segment_pass import SegmentPass

MOST_SIZES = 64
"""How many numbers of rows get ways of their own, at the most."""
_ASTRAY = "takes another way"
_PROOF = 8
"""Rows of a batch in the comparison with the uncut model, at the most."""


def other_sizes(segments: Sequence[nn.Module], rows: int) -> list[int]:
    """Return the numbers of rows, up to `rows`, in which replayed `segments` take another way than in `rows`.

    A model that does not do so in one row nor in two is taken to do so in none.
    """

    def goes_astray(count: int) -> bool:
        return any(
            # What shapes alone do not show of the example, they do not show of other batches.
            _fault(segment, training, way, count) == _ASTRAY and not _fault(segment, training, way, rows)
            for segment in segments
            if isinstance(segment, ReplayedSegment)
            for training in (True, False)
            for way in segment.replay_plan.ways[training, training]
        )

    if not any(map(goes_astray, {1, min(2, rows)} - {rows})):
        return []
    return [count for count in range(1, most_rows(rows) + 1) if count != rows and goes_astray(count)][:MOST_SIZES]


def most_rows(rows: int) -> int:
    """Return up to how many rows a model is planned that goes by their number, and has `rows` as an example."""
    return max(rows, _PROOF)


def is_replayed(module: nn.Module) -> bool:
    """Return whether `module` is a segment of a replayed model, or holds one."""
    return any(isinstance(inner, ReplayedSegment) for inner in module.modules())


def with_needed(replayed: Replayed, rows: int, held: Mapping[int, Mapping[str, bool]]) -> Replayed:
    """Return `replayed`, whose parties hold `held`, with what else they need to take their ways in passes on shapes.

    Of each attribute that others alone read as little as will do: nothing, the single numbers in it, or all of it.
    """
    segments = list(replayed.segments)
    for number, (segment, *_) in enumerate(segments):
        before = held.get(number, {})
        names = sorted(segment.withheld)
        if not names or _goes_as_planned(segment, rows):
            continue

        def will_do(needed: Mapping[str, bool], number: int = number) -> bool:
            return _goes_as_planned(replayed.build(number, needed)[0], rows)

        tried = ({**before, **dict.fromkeys(names, whole)} for whole in (False, True))
        if (needed := next(filter(will_do, tried), None)) is None:
            continue  # What shapes alone do not show of the example is left to the comparison.
        for name in names:
            rest = {one: whole for one, whole in needed.items() if one != name or one in before}
            fewer = (rest, {**rest, name: False})[: 1 + needed[name]]
            needed = next(filter(will_do, fewer), needed)
        segments[number] = replayed.build(number, needed)
    return replace(replayed, segments=tuple(segments))


def _goes_as_planned(segment: ReplayedSegment, rows: int) -> bool:
    """Return whether `segment` takes, with `rows` rows on shapes, all ways that are planned for it."""
    ways = segment.replay_plan.ways
    return not any(_fault(segment, mode, way, rows) for mode in (True, False) for way in ways[mode, mode])


def check_row_counts(module: nn.Module, training: Mapping[int, str], evaluation: Mapping[int, str]) -> None:
    """Refuse a number of rows with which a replayed segment in `module` does not run as its plan says.

    `training`, `evaluation`: numbers of rows in that mode -> which batches have so many, in words.
    """
    for segment in (m for m in module.modules() if isinstance(m, ReplayedSegment)):
        plan = segment.replay_plan
        for mode, counts in ((True, training), (False, evaluation)):
            untried = {rows for rows in counts if (mode, segment.replay_number, rows) not in plan.tried}
            if untried:
                _try(segment, mode, sorted(untried))
            for rows, whose in sorted(counts.items()):
                if found := plan.tried[mode, segment.replay_number, rows]:
                    larger = f", or cut with {rows} rows or more as example" if rows > plan.rows else ""
                    smaller = ", or choose another batch_size, or drop_last=True for a last batch" if mode else ""
                    raise InvalidInput(
                        f"forward of {plan.model} {found} with {rows} {'row' if rows == 1 else 'rows'} ({whose}), and "
                        f"not with {plan.rows}: compute the same for every number of rows, or put what depends on it "
                        f"into a submodule of its own, which no cut lies within{larger}{smaller}"
                    )


def _try(segment: ReplayedSegment, training: bool, counts: list[int]) -> None:
    """Note in the plan of `segment` what becomes of batches of `counts` rows in a mode: "" for all as planned."""
    plan, number = segment.replay_plan, segment.replay_number
    found = dict.fromkeys(counts, "")
    counts = [rows for rows in counts if rows not in plan.sizes]
    for way in plan.ways[training, training]:
        # What shapes alone do not show of the example, they do not show of other batches.
        if _fault(segment, training, way, plan.rows):
            continue
        for rows in counts:
            found[rows] = found[rows] or _fault(segment, training, way, rows)
    plan.tried.update({(training, number, rows): fault for rows, fault in found.items()})


def _fault(segment: ReplayedSegment, training: bool, way: ForwardPath, rows: int) -> str:
    """Return what goes wrong in a pass of `segment` with `rows` rows in a mode, "" for nothing."""
    # A copy for each pass, which may keep what it computes for the next.
    shapes = _on_shapes(segment)
    if shapes.training != training:
        set_mode(shapes, training)
    plan, number = shapes.replay_plan, shapes.replay_number
    known = {**plan.inputs, **{name: (form.shape, form.dtype) for name, form in plan.forms.items()}}
    names = [*plan.inputs, *shapes.replay_values[0]]
    given = {n: torch.empty((rows, *known[n][0]), dtype=known[n][1], device="meta") for n in names}
    key = (training, training, number, rows, "shapes")
    run = _ShapesPass(shapes, {n: given[n] for n in shapes.replay_values[0]}, key, way)
    arguments = {n: run.received_inputs.get(place, given[n]) for place, n in enumerate(plan.inputs)}
    try:
        with trying(training), contextlib.suppress(Stop), others_code(_Failed), run:
            plan.call(super(ReplayedSegment, shapes).forward, arguments)
    except _Failed as failed:
        return _ASTRAY if run.astray else f"fails ({failed})"
    finally:
        for left in [one for one in plan.memory if one[: len(key)] == key]:
            del plan.memory[left]
    return _ASTRAY if run.astray or run.number != run.stop else ""


def _on_shapes(segment: ReplayedSegment) -> ReplayedSegment:
    """Return a copy of `segment` whose weights, and buffers that are saved or change, are shapes."""
    changed = {name for way in segment.replay_plan.every_way() for name in way.changed}
    changed |= set(segment.state_dict())
    memo: dict[int, Any] = copy_computed(segment)
    for weight in segment.parameters():
        memo[id(weight)] = nn.Parameter(weight.detach().to("meta"), weight.requires_grad)
    for name, buffer in segment.named_buffers(remove_duplicate=False):
        if name in changed:
            memo[id(buffer)] = buffer.detach().to("meta")
    return deep_copy(segment, (segment,), memo)


class _Failed(Exception):
    """What a user's own `forward` raised, in one line."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(describe_failure(error))


class _ShapesPass(SegmentPass):
    """The pass of a party of which its own operations have shapes alone, too; questions are answered as planned.

    `astray`: whether it left its plan.
    """

    def __init__(
        self, shapes: ReplayedSegment, given: Mapping[str, Tensor], key: tuple[Any, ...], way: ForwardPath
    ) -> None:
        super().__init__(shapes.replay_plan, shapes.replay_number, given, torch.device("cpu"), key, (way,))
        self.astray = False
        held = (*shapes.parameters(), *shapes.buffers(), *given.values(), *self._received_values.values())
        # Of what the party has numbers; kept, so that no other tensor gets its identity.
        self._known = {id(tensor): tensor for tensor in (*held, *self.received_inputs.values())}

    def operation(self, name: str, func: Any, args: Any, kwargs: Mapping[str, Any], module: nn.Module | None) -> Any:
        """Run it on shapes, be it one's own or another's."""
        number = self.number
        if number >= self.stop and self._free:
            raise self.strayed()
        if number >= self.stop:
            return super().operation(name, func, args, kwargs, module)
        if self._way.names[number] != name:
            raise self.strayed()
        if number in self._way.numbers:
            self.number += 1
            return self._way.numbers[number]
        if number < self._first or number in self._way.constants:
            return super().operation(name, func, args, kwargs, module)
        unknown = (t for t in tensors_of((args, dict(kwargs))) if t.is_meta and id(t) not in self._known)
        if next(unknown, None) is not None:
            raise self.strayed()
        try:
            returned = MetaPass.operation(self, name, func, args, kwargs, module)
        except (RuntimeError, TypeError, ValueError):
            # A question behind the last cut, which shapes do not answer.
            if number not in self._way.asked:
                raise
            returned = self._way.asked[number]
        if module is not None and (told := self._way.calls.get(number)) and not told.holds(self._key[3], returned):
            raise self.strayed()
        self._known |= {id(tensor): tensor for tensor in tensors_of(returned)}
        return returned

    def strayed(self) -> InvalidInput:
        """Note it, and return the error."""
        self.astray = True
        return super().strayed()
