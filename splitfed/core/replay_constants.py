"""What a pass with another number of rows shows of a way through `forward`: constants, batches, questions.

Inputs and weights have shapes alone there. Where these do not do, submodules are called with numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from splitfed.core.errors import InvalidInput, describe_error, line_of
from splitfed.core.forward_path import OperationOutput
from splitfed.core.meta_copies import meta_copy
from splitfed.core.meta_pass import LIKE, MetaPass
from splitfed.core.model_call import ModelCall, trying
from splitfed.core.module_copies import open_compiled
from splitfed.core.nested_tensors import tensors_of
from splitfed.core.payload import storage_of
from splitfed.core.replay_answers import Answer, SeenCall, answer, numbers_in
from splitfed.core.replay_branches import ForwardRun
from splitfed.core.replay_passes import Operation, RecordingPass, Stop, mark_whole_modules
from splitfed.core.tracer import catches_errors
from splitfed.core.weight_sharing import copy_sharing


def find_constants(calls: OtherCalls) -> bool:
    """Fill in what a pass in which inputs and weights have shapes alone shows of the course of `calls`.

    Returns whether it goes the same way up to the last cut.
    """
    try:
        return _find_by_shapes(calls)
    except _CallsMissing:
        # No pass within another: what the user's forward has entered may be entered once at a time.
        calls.run()
        return _find_by_shapes(calls)


class _CallsMissing(BaseException):
    """Calls of submodules with other numbers of rows are wanted; no `except Exception` of the user's catches it."""


def _find_by_shapes(calls: OtherCalls, overwritten: frozenset[int] = frozenset()) -> bool:
    """Do what `find_constants` does; raise `_CallsMissing` where `calls` have not been made and are wanted.

    `constants`: the operations that return numbers there; `batches`: the batch dimension of the results of which it is
    not the first; `questions`: the operations that ask for a number that is not there; `overwritten`: those on memory
    that constants made, and that an operation up to the last cut has written what is no constant into; found pass by
    pass, as what is made of them is no constant either.
    """
    model, course = calls.model, calls.course
    operations, last = course.operations, course.ends[-1]
    changed = set().union(*(operation.changed for operation in operations))
    saved = {*model.state_dict(), *changed, *(name for name, _ in model.named_parameters(remove_duplicate=False))}
    constants = {name for name, _ in model.named_buffers(remove_duplicate=False)} - saved
    shapes = meta_copy(model, (), constants)
    mark_whole_modules(shapes, calls.targets)
    device = next((x.device for x in calls.inputs.values()), torch.device("cpu"))
    rows = {name: x.new_empty((calls.other, *x.shape[1:]), device="meta") for name, x in calls.inputs.items()}
    course.calls.clear()
    course.constants, course.batches, course.questions = frozenset(), {}, ()
    course.branches, course.overwritten = catches_errors(model), overwritten
    run = _ConstantsPass(device, course, calls)
    try:
        with trying(calls.gradients), run:
            calls.call(shapes, rows)
    except Stop:
        pass
    except (Exception, SystemExit) as error:  # what a user's own forward raises of shapes can be anything
        # The party of the last segment holds what a later operation needs, and nobody comes after it.
        course.branches, known = True, run.find_overwritten() <= overwritten
        if known and isinstance(error, InvalidInput):
            raise
        if known and run.number <= last:
            raise InvalidInput(
                f"{type(model).__name__} takes a number out of a tensor, or what has no shape beforehand"
                f"{line_of(error)} ({describe_error(error)}): a party that does not hold that tensor cannot follow; "
                "write it as operations on tensors, or cut before it"
            ) from error
    if not (found := run.find_overwritten()) <= overwritten:
        return _find_by_shapes(calls, overwritten | found)
    course.constants, course.batches, course.questions = frozenset(run.constants), run.batches, tuple(run.questions)
    return run.number >= last and not run.astray


class _ConstantsPass(MetaPass):
    """A pass with another number of rows than the `course` had, which finds what `find_constants` fills in.

    `calls`: what submodules return with other numbers of rows. `astray`: whether it has left the course.
    """

    def __init__(self, device: torch.device, course: ForwardRun, calls: OtherCalls) -> None:
        operations = course.operations
        draws = {number: operation.draws for number, operation in enumerate(operations) if operation.draws}
        super().__init__(device, len(operations), draws)
        self._course, self._calls, self._rows = course, calls, calls.other
        self._last, self.astray = course.ends[-1], False
        self.overwritten, self._depends = course.overwritten, False
        self._writers: list[int] = []
        self.constants: set[int] = set()
        self.batches: dict[OperationOutput, int | None] = {}
        self.questions: list[int] = []

    def operation(self, name: str, func: Any, args: Any, kwargs: Mapping[str, Any], module: nn.Module | None) -> Any:
        """Run it on shapes, or answer it by what was recorded, and note what it returns."""
        number, course = self.number, self._course
        recorded = course.operations[number] if number < len(course.operations) else Operation("")
        self.astray = self.astray or (number < self._last and recorded.name != name)
        self._depends = number in self.draws
        try:
            returned = super().operation(name, func, args, kwargs, module)
        except Exception as error:
            self._depends = True
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
        if self._depends and number < self._last and not self.astray:
            self._writers.append(number)
        for place, (tensor, index) in enumerate(zip(tensors, recorded.results, strict=False)):
            if index is not None and (batch := _batch(course.recording.tensors[index], tensor)) != 0:
                self.batches[OperationOutput(number, place)] = batch
        return returned

    def on_shapes(self, name: str, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Note whether any of the tensors has no numbers."""
        self._depends = self._depends or any(tensor.is_meta for tensor in tensors_of((args, kwargs)))
        return super().on_shapes(name, func, args, kwargs)

    def find_overwritten(self) -> frozenset[int]:
        """Return the operations on memory of constants from the segment on that first writes no constant into it."""
        operations, tensors = self._course.operations, self._course.recording.tensors
        made = {i for operation in operations for i in operation.results} | set(self._course.recording.inputs)
        constant = {storage_of(tensors[i]) for n in self.constants for i in operations[n].results if i is not None}
        begins: dict[int, int] = {}
        for number in self._writers:
            one = operations[number]
            # In inference mode torch does not count what is written.
            for index in (*one.writes, *(i for i in one.reads if tensors[i].is_inference())):
                memory = storage_of(tensors[index])
                if memory and (memory in constant or index not in made):
                    begin = max((end for end in self._course.ends if end <= number), default=0)
                    begins.setdefault(memory, begin)
        found = set()
        for number, one in enumerate(operations[: self._last] if begins else ()):
            met = [*one.results, *(() if one.name in LIKE else one.reads)]
            if any(begins.get(storage_of(tensors[i]), self._last) <= number for i in met if i is not None):
                found.add(number)
        return frozenset(found)

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


class OtherCalls:
    """Calls of submodules with other numbers of rows, with numbers; made where shapes alone do not do.

    `other`: a row more than were recorded in the `course`, or less.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Mapping[str, Tensor],
        targets: Sequence[str],
        course: ForwardRun,
        gradients: bool,
        call: ModelCall,
        other: int,
    ) -> None:
        self.model, self.inputs, self.targets, self.course = model, inputs, targets, course
        self.gradients, self.call = gradients, call
        self.rows, self.other = len(next(iter(inputs.values()))), other
        self._others: list[dict[int, SeenCall]] | None = None

    def first(self, number: int) -> SeenCall:
        """Return the call that was recorded."""
        operation = self.course.operations[number]
        return SeenCall(self.rows, operation.given, operation.returned, bool(operation.draws - {"torch"}))

    def all(self, number: int) -> list[SeenCall]:
        """Return that call, one of the other number of rows, and one of equal rows; none where the way is another."""
        if self._others is None:
            raise _CallsMissing
        return [self.first(number), *(calls[number] for calls in self._others)] if all(self._others) else []

    def answer(self, number: int, error: Exception) -> Answer:
        """Return the answer of a submodule that fails without numbers, by `error`."""
        what = f"submodule {self.course.operations[number].name!r} of {type(self.model).__name__}"
        calls = self.all(number)
        if not calls:
            raise error
        known = answer(*calls)
        if self.course.attributes.leaves_behind(number):
            known = "sets an attribute that is read outside of it"
        elif numbers := numbers_in(calls[0].returned):
            known = f"returns the number {numbers[0]!r}, which may depend on values"
        if isinstance(known, str):
            raise InvalidInput(
                f"{what} takes a number out of a tensor{line_of(error)} ({describe_error(error)}) and {known}: parties "
                "that do not hold it cannot follow; return tensors alone, of a shape that follows from the input's"
            ) from error
        return known

    def run(self) -> None:
        """Make the calls."""
        choices = ([row % self.rows for row in range(self.other)], [0] * self.rows)
        self._others = [self._run(choice) for choice in choices]

    def _run(self, choice: list[int]) -> dict[int, SeenCall]:
        copied = copy_sharing(self.model)
        open_compiled(copied)
        mark_whole_modules(copied, self.targets)
        given = {name: x[choice] for name, x in self.inputs.items()}
        operations = self.course.operations
        answers = {n: operation.answer[0] for n, operation in enumerate(operations) if operation.answer}
        run = RecordingPass(copied, list(given.values()), [], answers)
        failures = (RuntimeError, TypeError, ValueError, LookupError)
        with trying(self.gradients), run, contextlib.suppress(*failures):
            self.call(copied, given)
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
