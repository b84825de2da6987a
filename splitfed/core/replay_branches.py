"""What the numbers that `forward` takes out of tensors steer, found by answering otherwise and looking what happens.

`bool(mask.all())`, `h.max().item()` or `0 in ids` is a question to the party that holds the tensor. It answers for
real; a party behind it, which runs through the same line, cannot. What an answer steers decides what that party gets.
A *guard* leads to an error where it is answered otherwise: whoever comes behind would not be there, and goes by the
answer of the example. A *free* answer steers nothing: the same operations run on the same values (a warning). Every
other answer is *told*: the tensor that it is read of crosses, as all that two parties read, and each answer leads to a
way of its own that is planned beforehand. Truth values are tried both ways, all combinations of them; a number that may
be any is told, and must lead to the same operations on the same shapes. A holder whose answer is none of the plan's
stops, so that no party goes on by an answer that was not the real one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from splitfed.core.attribute_reads import Reads
from splitfed.core.errors import InvalidInput
from splitfed.core.plain_values import same_tensors
from splitfed.core.replay_answers import Answer
from splitfed.core.replay_passes import ArgumentTensor, Operation, RecordingPass

MOST_COURSES = 24
"""How many courses of a model are looked at in one mode, at the most."""

MOST_BEYOND = 6
"""How many courses that part behind the last cut are looked at in one mode, at the most."""


@dataclass(eq=False)
class ForwardRun:
    """One run through `forward` on the example, its questions answered by themselves or as a trial says.

    `result`: what the model returned; `ends`: how many operations have run at each cut; `questions`: the operations
    before the last cut that ask a tensor whose holder alone can answer. `constants`, `batches` and `overwritten`: see
    `replay_constants.find_constants`. `changes`: the Python attributes that it changed. `told` and `free`: see above.
    `attributes`: what it read of the model's objects; `calls`: what submodules return, for those that do not run them.
    `branches`: whether shapes alone do not show how it goes on behind the last cut.
    """

    recording: RecordingPass
    result: Any
    ends: tuple[int, ...]
    questions: tuple[int, ...] = ()
    constants: frozenset[int] = frozenset()
    batches: Mapping[Any, int | None] = field(default_factory=dict)
    changes: Sequence[str] = ()
    told: set[int] = field(default_factory=set)
    free: set[int] = field(default_factory=set)
    attributes: Reads = field(default_factory=Reads)
    calls: dict[int, Answer] = field(default_factory=dict)
    branches: bool = False
    overwritten: frozenset[int] = frozenset()

    @property
    def operations(self) -> list[Operation]:
        """All operations in the order they ran."""
        return self.recording.operations

    def answers(self, before: int | None = None) -> dict[int, Any]:
        """Return the answers to all questions, or to those `before` an operation."""
        return {n: self.operations[n].answer[0] for n in self.questions if before is None or n < before}


Record = Callable[[Mapping[int, Any]], ForwardRun | None]
"""Runs the model with some questions answered beforehand; None where it raises an error of its own."""


@dataclass
class _Fork:
    number: int
    same: _Fork | ForwardRun
    other: _Fork | ForwardRun | None


def find_courses(name: str, record: Record) -> list[ForwardRun]:
    """Return all courses that the answers in tensors lead to, that of the example first, `told` and `free` filled.

    `name`: the model's. Raises `InvalidInput` where they are too many, and for a number that steers shapes.
    """
    runs = 0

    def run(answers: Mapping[int, Any]) -> ForwardRun | None:
        nonlocal runs
        runs += 1
        if runs > MOST_COURSES:
            raise InvalidInput(
                f"{name} asks tensors for numbers so often that more than {MOST_COURSES} ways through its forward "
                "would have to be planned: write the branches as operations on tensors (torch.where), or cut before "
                "them"
            )
        return record(answers)

    def grow(course: ForwardRun, start: int) -> _Fork | ForwardRun:
        number = next((n for n in course.questions if n >= start and _is_truth(course, n)), None)
        if number is None:
            return course
        same = grow(course, number + 1)
        other = run({**course.answers(number), number: not course.operations[number].answer[0]})
        return _Fork(number, same, other and grow(other, number + 1))

    natural = run({})
    assert natural is not None
    courses = _collect(name, grow(natural, 0))
    for course in courses:
        for number in course.questions:
            if not _is_truth(course, number):
                _check_number(name, course, number, run)
                course.told.add(number)
    return courses


def courses_beyond(course: ForwardRun, record: Record) -> list[ForwardRun]:
    """Return courses that part from `course` where a truth value behind its last cut is another, `MOST_BEYOND` at most.

    Those that raise, or cannot be cut so, are left out: who holds all that is behind the last cut goes by the numbers.
    """
    found, pending, runs = [], [(course, course.ends[-1])], 0
    while pending:
        one, start = pending.pop(0)
        known = one.answers()
        for number in [n for n in range(start, len(one.operations)) if one.operations[n].answer]:
            if _is_truth(one, number) and runs < MOST_BEYOND:
                runs += 1
                with contextlib.suppress(InvalidInput):
                    other = record({**known, number: not one.operations[number].answer[0]})
                    if other is not None:
                        found.append(other)
                        pending.append((other, number + 1))
            known[number] = one.operations[number].answer[0]
    return found


def _is_truth(course: ForwardRun, number: int) -> bool:
    return isinstance(course.operations[number].answer[0], bool)


def _collect(name: str, fork: _Fork | ForwardRun) -> list[ForwardRun]:
    """Return the courses below a fork, of those that are alike one."""
    if isinstance(fork, ForwardRun):
        return [fork]
    mine = _collect(name, fork.same)
    if fork.other is None:
        return mine
    others = _collect(name, fork.other)
    if changed := next((set(mine[0].changes) ^ set(other.changes) for other in others), None):
        raise InvalidInput(
            f"forward of {name} changes the {min(changed)} by a number taken out of a tensor: keep what must change in "
            "a buffer that is changed in place by operations on tensors (torch.where)"
        )
    if len(mine) == len(others) and all(any(_alike(m, o, fork.number) for o in others) for m in mine):
        for course in mine:
            course.free.add(fork.number)
        return mine
    for course in (*mine, *others):
        course.told.add(fork.number)
    return mine + others


def _alike(one: ForwardRun, other: ForwardRun, number: int) -> bool:
    """Return whether two courses that answer question `number` differently are the same behind it."""
    steering = [n for n in one.questions if n > number and n not in one.free]
    same_answers = all(n in other.questions and one.answers()[n] == other.answers()[n] for n in steering)
    return same_answers and one.told == other.told and one.changes == other.changes and same_course(one, other)


def same_course(one: ForwardRun, other: ForwardRun) -> bool:
    """Return whether two courses run the same operations on the same values with the same arguments."""
    left, right = one.operations, other.operations
    if len(left) != len(right) or one.ends != other.ends:
        return False
    if any(
        a.name != b.name or not _same_form(a, b) or a.results != b.results for a, b in zip(left, right, strict=True)
    ):
        return False
    made = {i for operation in left for i in operation.results} | set(one.recording.inputs)
    tensors = zip(one.recording.tensors, other.recording.tensors, strict=False)
    fixed = all(i in made or _same_bits(a, b) for i, (a, b) in enumerate(tensors))
    return fixed and len(one.recording.tensors) == len(other.recording.tensors)


def _same_form(one: Operation, other: Operation) -> bool:
    (left_spec, left), (right_spec, right) = one.form, other.form
    return left_spec == right_spec and all(_same(a, b) for a, b in zip(left, right, strict=True))


def _same(one: Any, other: Any, depth: int = 3) -> bool:
    """Return whether two arguments are the same; False for what cannot be told."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return _same_bits(one, other)
    if isinstance(one, (bool, int, float, complex, str, bytes, ArgumentTensor, slice, torch.dtype, torch.device)):
        return bool(one == other)
    if not depth:
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(_same(a, b, depth - 1) for a, b in zip(one, other, strict=True))
    inner = (dict(one), dict(other)) if isinstance(one, Mapping) else (getattr(one, "__dict__", 0), vars(other))
    if not isinstance(inner[0], dict) or callable(one) or inner[0].keys() != inner[1].keys():
        return False
    return all(_same(value, inner[1][key], depth - 1) for key, value in inner[0].items())


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return not one.is_meta and same_tensors(one, other)


def _check_number(name: str, course: ForwardRun, number: int, run: Record) -> None:
    """Refuse a number that steers which operations run, or their shapes, as far as two others show it."""
    answer = course.operations[number].answer[0]
    if isinstance(answer, (list, tuple, complex)):
        return
    for trial in (answer + 1, answer - 1) if isinstance(answer, int) else (answer * 1.5 + 1.0, answer * 0.5 - 1.0):
        try:
            other = run({**course.answers(number), number: trial})
            steers = other is not None and list(_shapes(course)) != list(_shapes(other))
        except InvalidInput:
            # There is no such way, or it has no such cut.
            steers = True
        if steers:
            raise InvalidInput(
                f"{name} takes a number out of a tensor, by {course.operations[number].name!r}, that steers which "
                "operations run or how large they are: ask the tensor a question that is true or false (h.max() > 3 in "
                "place of h.max().item() > 3), give that number as a constant, or cut before it"
            )


def _shapes(course: ForwardRun) -> Iterator[tuple[str, tuple[Any, ...]]]:
    for operation in course.operations:
        known = (course.recording.tensors[i] for i in operation.results if i is not None)
        yield operation.name, tuple(tensor.shape for tensor in known)
