"""Courses: numbers that follow the epochs of a run, such as the strength of a defense that starts weak.

A course is a frozen value, and what it is in an epoch depends on the epoch alone: a run that is resumed goes on with it
to the bit. Epochs are counted from 0 over all rounds of a run, `local_epochs` of them a round. A study writes a course
as a table: its name beside its parameters, such as {name = "linear", start = 0.0, end = 0.5, epochs = 10}.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

from splitfed.core.argument_kinds import guarded
from splitfed.core.errors import InvalidInput, check_count, check_names, check_number


@dataclass(frozen=True)
class Annealing:
    """Base of all courses."""

    def at(self, epoch: int) -> float:
        """Return the number in `epoch`, counted from 0."""
        raise NotImplementedError

    @property
    def ends(self) -> Mapping[str, float]:
        """The numbers between which it stays, by what its parameters call them; the last one is where it stops."""
        raise NotImplementedError

    @property
    def label(self) -> str:
        """The course in a few words without a comma, for the labels of a study."""
        raise NotImplementedError


@dataclass(frozen=True)
class Constant(Annealing):
    """The same `value` in every epoch, as the number itself would be."""

    value: float

    def __post_init__(self) -> None:
        """Refuse what is no number."""
        check_number("constant value", self.value)

    def at(self, epoch: int) -> float:
        """Return the value."""
        return self.value

    @property
    def ends(self) -> Mapping[str, float]:
        """The value."""
        return {"value": self.value}

    @property
    def label(self) -> str:
        """As that of the number."""
        return f"{self.value:g}"


@dataclass(frozen=True)
class Linear(Annealing):
    """From `start` in epoch 0 in equal steps to `end` in epoch `epochs`, at least 1, and `end` from then on."""

    start: float
    end: float
    epochs: int

    def __post_init__(self) -> None:
        """Refuse what is no number, and a warm-up of no epoch."""
        name = _name(type(self))
        check_number(f"{name} start", self.start)
        check_number(f"{name} end", self.end)
        check_count(f"{name} epochs", self.epochs, low=1)

    def at(self, epoch: int) -> float:
        """Return start + (end - start) share(epoch / epochs)."""
        # At its end it is the very number that was given, not that number but for rounding.
        if epoch >= self.epochs:
            return self.end
        found = self.start + (self.end - self.start) * self._share(epoch / self.epochs)
        # Nor may rounding carry it past one of them, which may be the bound of what is allowed.
        return min(max(found, min(self.start, self.end)), max(self.start, self.end))

    @property
    def ends(self) -> Mapping[str, float]:
        """Start and end."""
        return {"start": self.start, "end": self.end}

    @property
    def label(self) -> str:
        """Such as `linear 0 to 0.5 by epoch 10`."""
        return f"{_name(type(self))} {self.start:g} to {self.end:g} by epoch {self.epochs}"

    def _share(self, passed: float) -> float:
        return passed


@dataclass(frozen=True)
class Cosine(Linear):
    """As `Linear`, but slowly at both ends: the share of the way is (1 - cos(pi epoch / epochs)) / 2."""

    def _share(self, passed: float) -> float:
        return (1 - math.cos(math.pi * passed)) / 2


@dataclass(frozen=True)
class Steps(Annealing):
    """A number that changes at given epochs.

    `steps`: pairs (epoch, number): the number from that epoch on, to the next pair's; the first epoch is 0.
    """

    steps: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        """Refuse what are no pairs, and epochs that do not rise from 0."""
        pairs = self.steps
        if not isinstance(pairs, (list, tuple)) or not pairs or not all(map(_is_pair, pairs)):
            raise InvalidInput(
                f"steps={pairs!r} is not allowed; expected pairs of epoch and number, such as [[0, 0.1], [5, 0.5]]"
            )
        object.__setattr__(self, "steps", tuple((epoch, value) for epoch, value in pairs))
        for epoch, value in self.steps:
            check_count("steps epoch", epoch)
            check_number(f"steps number from epoch {epoch}", value)
        starts = [epoch for epoch, _ in self.steps]
        if starts[0] != 0 or any(later <= sooner for sooner, later in pairwise(starts)):
            raise InvalidInput(
                f"steps from epochs {starts!r} are not allowed; expected 0 first, then each above the last"
            )

    def at(self, epoch: int) -> float:
        """Return the number of the last pair whose epoch has come."""
        return next((value for start, value in reversed(self.steps) if start <= epoch), self.steps[0][1])

    @property
    def ends(self) -> Mapping[str, float]:
        """Every number."""
        return {f"from epoch {epoch}": value for epoch, value in self.steps}

    @property
    def label(self) -> str:
        """Such as `steps 0.1 then 0.5 from 5`."""
        first, *rest = self.steps
        return " then ".join([f"steps {first[1]:g}", *(f"{value:g} from {epoch}" for epoch, value in rest)])


KINDS: dict[str, type[Annealing]] = {"constant": Constant, "linear": Linear, "cosine": Cosine, "steps": Steps}
EXAMPLE = '{name = "linear", start = 0.0, end = 0.5, epochs = 10}'


def number_at(value: float | Annealing, epoch: int) -> float:
    """Return a number, or what a course is in `epoch`."""
    return value.at(epoch) if isinstance(value, Annealing) else value


def numbers_of(value: float | Annealing) -> tuple[float, ...]:
    """Return a number, or those between which a course stays."""
    return tuple(value.ends.values()) if isinstance(value, Annealing) else (value,)


@guarded
def number_or_annealing(name: str, value: Any, **bounds: Any) -> float | Annealing:
    """Return `value` if it is a number, or a course (or the table of one), that stays within the bounds.

    `bounds`: as `check_number` takes them. Raises `InvalidInput` that calls the value `name`.
    """
    if isinstance(value, (list, tuple)):
        raise InvalidInput(f"{name}={value!r} is not allowed; expected a number or a course, such as {EXAMPLE}")
    value_or_course: float | Annealing = made(name, value) if isinstance(value, Mapping) else value
    for place, number in value_or_course.ends.items() if isinstance(value_or_course, Annealing) else ():
        check_number(f"{name} {place}", number, **bounds)
    if not isinstance(value_or_course, Annealing):
        check_number(name, value_or_course, **bounds)
    return value_or_course


@guarded
def made(name: str, table: Mapping[str, Any]) -> Annealing:
    """Return the course that `table` writes, or refuse it as a value of `name`."""
    rest = dict(table)
    kind = rest.pop("name", None)
    if not isinstance(kind, str):
        raise InvalidInput(f"{name}={dict(table)!r} is not allowed; expected a course with its name, such as {EXAMPLE}")
    check_names(f"course for {name}", KINDS, kind)
    parameters = [field.name for field in fields(KINDS[kind])]
    check_names(f"key of a {kind} course for {name}", parameters, *rest)
    if absent := [key for key in parameters if key not in rest]:
        raise InvalidInput(f"{name} is a {kind} course without {absent[0]}; expected {', '.join(parameters)}")
    try:
        return KINDS[kind](**rest)
    except InvalidInput as error:
        raise InvalidInput(f"{name} is no course: {error}") from None


@guarded
def annealing_of(table: Mapping[str, Any]) -> Annealing | None:
    """Return the course that `table` writes; None where it writes none."""
    try:
        return made("", table)
    except InvalidInput:
        return None


def _name(kind: type[Annealing]) -> str:
    return next(name for name, known in KINDS.items() if known is kind)


def _is_pair(value: object) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 2
