"""Kinds of state that a layer may keep between batches; for `tests/core/test_kinds_of_state.py`.

A row: what the state is at first, how a batch changes and reads it, and whether a segment made by hand is trained with
it. Where it is, what a batch reads shows whether order, class, layout or sharing came back.
"""

from __future__ import annotations

import array
import datetime
import enum
import functools
import itertools
import math
import random
import weakref
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


class Pair(NamedTuple):
    """A tuple with names."""

    mean: Any
    count: int


class Mode(enum.Enum):
    """Two modes."""

    FIRST = 1
    LATER = 2


class Scale(float):
    """A float of another class."""

    def twice(self) -> float:
        """Return what no plain float has."""
        return 2 * self


class Whole(int):
    """A whole number of another class."""


class Text(str):
    """A text of another class."""

    __slots__ = ()


class Bank(list[Any]):
    """A list of another class, with an attribute."""

    turns = 0

    def mean(self) -> Tensor:
        """Return what no plain list has."""
        return torch.stack(list(self)).mean(0) / self.turns


class Table(dict[Any, Any]):
    """A dict of another class."""

    def total(self) -> Any:
        """Return what no plain dict has."""
        return sum(self.values())


class Members(set[int]):
    """A set of another class."""

    def total(self) -> int:
        """Return what no plain set has."""
        return sum(self)


class Slotted:
    """An object without a table of attributes."""

    __slots__ = ("mean", "steps")

    def __init__(self) -> None:
        self.mean, self.steps = torch.zeros(8), 0


class Averages:
    """An object with a property."""

    def __init__(self) -> None:
        self._sum, self.steps = torch.zeros(8), 0

    @property
    def mean(self) -> Tensor:
        """The mean of what was added."""
        return self._sum / max(self.steps, 1)

    @mean.setter
    def mean(self, new: Tensor) -> None:
        self._sum, self.steps = self._sum + new, self.steps + 1


@dataclass
class Noted:
    """Fields that change."""

    steps: int = 0
    means: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Frozen:
    """Fields that a copy changes."""

    steps: int = 0


def mean_of(h: Tensor) -> Tensor:
    return h.detach().mean(0)


def move_to_end(m: Any, h: Tensor) -> Tensor:
    m.state.move_to_end(next(iter(m.state)))
    for number, one in enumerate(m.state.values()):
        h = h + number * one
    return h


def reorder(m: Any, h: Tensor) -> Tensor:
    name = next(iter(m.state))
    m.state[name] = m.state.pop(name)
    return h * float(functools.reduce(lambda total, one: total / 2 + one, m.state.values()))


def mask(m: Any, h: Tensor) -> Tensor:
    m.state[int(m.state.count()) - 1] = np.ma.masked
    return h * float(m.state.sum())


def replace_masked(m: Any, h: Tensor) -> Tensor:
    m.state = np.ma.array(m.state.data + 1, mask=np.arange(6) == m.state.data[0] % 6)
    return h * float(m.state.sum())


def refill_array(order: Callable[[np.ndarray[Any, Any]], Any]) -> Callable[[Any, Tensor], Tensor]:
    def keep(m: Any, h: Tensor) -> Tensor:
        h = h * (1 + m.state.strides[0] / 64) + float(m.state.mean())
        m.state = order(np.ascontiguousarray(m.state) + np.float32(0.1) * h.detach().numpy().mean())
        return h

    return keep


def refill_tensor(order: Callable[[Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    def keep(m: Any, h: Tensor) -> Tensor:
        h = h * m.state.stride(0) / (m.state.stride(1) + 1) + m.state.mean()
        m.state = order(torch.zeros(2, 4, 4, 4) + m.state.mean() / 3 + 0.1 * h.detach().mean())
        return h

    return keep


def change(step: Callable[[Any], Any], told: Callable[[Any], Any]) -> Callable[[Any, Tensor], Tensor]:
    """Return what puts another value in the place of the state, and scales by it."""

    def keep(m: Any, h: Tensor) -> Tensor:
        m.state = step(m.state)
        return h * told(m.state)

    return keep


def act(do: Callable[[Any, Tensor], object], told: Callable[[Any], Any]) -> Callable[[Any, Tensor], Tensor]:
    """Return what changes the state in place by the mean of the batch, and adds what it tells."""

    def keep(m: Any, h: Tensor) -> Tensor:
        do(m.state, mean_of(h))
        return h + told(m.state)

    return keep


def named_tuple(m: Any, h: Tensor) -> Tensor:
    m.state = Pair(m.state.mean + mean_of(h), m.state.count + 1)
    return h - m.state.mean / m.state.count


def view_of_another(m: Any, h: Tensor) -> Tensor:
    m.state.add_(mean_of(h))
    if not hasattr(m, "row"):
        m.row = m.state[2:6]
    m.row.mul_(0.5)
    return h + m.state


def view_of_weight(m: Any, h: Tensor) -> Tensor:
    if m.state is None:
        m.state = m.fc.weight.detach()[0]
    return h + m.state


def array_of_tensor(m: Any, h: Tensor) -> Tensor:
    m.state.add_(mean_of(h))
    m.numbers = m.state.numpy()
    return h + float(m.numbers.sum())


def rows_of_array(m: Any, h: Tensor) -> Tensor:
    m.row = m.state[1]
    m.row += 1
    return h * float(m.state.sum())


def appearing(m: Any, h: Tensor) -> Tensor:
    m.more = getattr(m, "more", 0) + 1
    return h / m.more


def disappearing(m: Any, h: Tensor) -> Tensor:
    if hasattr(m, "state"):
        del m.state
        return h
    return h * 0.5


def of_another_type(m: Any, h: Tensor) -> Tensor:
    kinds = {int: float, float: str, str: lambda one: [float(one)], list: lambda one: torch.tensor(one)}
    m.state = kinds[type(m.state)](m.state) if type(m.state) in kinds else int(m.state[0]) + 1
    return h * len(type(m.state).__name__)


def another_dtype(m: Any, h: Tensor) -> Tensor:
    m.state = (m.state.double() if m.state.dtype == torch.float32 else m.state.float()) + mean_of(h)
    return h + m.state.to(h.dtype) / m.state.element_size()


def recursive(m: Any, h: Tensor) -> Tensor:
    m.state.append(mean_of(h))
    if len(m.state) == 2:
        m.state.insert(0, (m.state, {"all": m.state}))
    return h + m.state[0][0][-1] if isinstance(m.state[0], tuple) else h


def one_list_twice(m: Any, h: Tensor) -> Tensor:
    m.state.append(mean_of(h))
    m.other = m.state
    return h + m.other[-1]


def lazy_generator(m: Any, h: Tensor) -> Tensor:
    m.state = m.state or torch.Generator().manual_seed(1)
    return h * torch.rand(8, generator=m.state)


def turn(limits: Any) -> Callable[[Any, Tensor], Tensor]:
    def keep(m: Any, h: Tensor) -> Tensor:
        m.state = deque(m.state, maxlen=next(limits.__iter__()) + len(m.state))
        m.state.append(mean_of(h))
        return h + torch.stack(tuple(m.state)).mean(0) * (m.state.maxlen or 1)

    return keep


def set_of_floats(m: Any, h: Tensor) -> Tensor:
    m.state.add(8.0 * (20 - len(m.state)))
    return h * functools.reduce(lambda total, one: total / 3 + one, m.state, 0.1)


def learning_tensor(m: Any, h: Tensor) -> Tensor:
    h = h * (2.0 if m.state.requires_grad else 1.0) * m.state.detach()
    m.state = (m.state.detach() + 0.1).requires_grad_()
    return h


def count_key(m: Any, h: Tensor) -> Tensor:
    (name,) = m.state
    m.state = {Text(name + "a"): m.state[name]}
    return h * len(next(iter(m.state)))


Row = tuple[Callable[[], Any], Callable[[Any, Tensor], Tensor], bool]
EXACT, REFUSED = True, False
total = functools.partial(functools.reduce, lambda one, other: one / 2 + other)
STATES: dict[str, Row] = {
    "ordered_dict_that_moves": (
        lambda: OrderedDict((str(n), torch.full((8,), n / 7)) for n in range(5)),
        move_to_end,
        EXACT,
    ),
    "ordered_dict_of_numbers": (lambda: OrderedDict(a=0.1, b=0.7, c=0.2, d=3.0, e=5.0), move_to_end, EXACT),
    "dict_in_another_order": (lambda: {"a": 0.1, "b": 0.7, "c": 0.2, "d": 3.0, "e": 5.0}, reorder, EXACT),
    "masked_array": (lambda: np.ma.array(np.arange(40, dtype=np.float32), mask=[False] * 40), mask, EXACT),
    "masked_array_anew": (lambda: np.ma.array(np.arange(6), mask=[True] + [False] * 5), replace_masked, EXACT),
    "array_of_fortran": (lambda: np.zeros((8, 16), np.float32, "F"), refill_array(np.asfortranarray), EXACT),
    "array_that_becomes_fortran": (lambda: np.zeros((8, 16), np.float32), refill_array(np.asfortranarray), EXACT),
    "array_with_gaps": (
        lambda: np.zeros((8, 16), np.float32),
        refill_array(lambda one: np.repeat(one, 2, 1)[:, ::2]),
        EXACT,
    ),
    "array_backwards": (lambda: np.zeros((8, 16), np.float32), refill_array(lambda one: one[::-1]), EXACT),
    "channels_last": (
        lambda: torch.zeros(2, 4, 4, 4),
        refill_tensor(lambda one: one.contiguous(memory_format=torch.channels_last)),
        EXACT,
    ),
    "column": (lambda: torch.zeros(2, 4, 4, 4), refill_tensor(lambda one: one.repeat(1, 1, 1, 3)[..., ::3]), EXACT),
    "expanded": (lambda: torch.zeros(2, 4, 4, 4), refill_tensor(lambda one: one[:, :1].expand(2, 4, 4, 4)), EXACT),
    "learning_tensor": (lambda: torch.zeros(8), learning_tensor, EXACT),
    "list_of_another_class": (
        Bank,
        act(lambda s, z: (s.append(z), setattr(s, "turns", s.turns + 1)), lambda s: s.mean()),
        EXACT,
    ),
    "dict_of_another_class": (
        Table,
        act(lambda s, z: s.setdefault("z", []).append(0.5) or s.update({len(s): z}), lambda s: len(s.get("z"))),
        EXACT,
    ),
    "nested_in_another_class": (
        lambda: Table(all=Bank()),
        act(lambda s, z: (s["all"].append(z), setattr(s["all"], "turns", 1)), lambda s: s["all"].mean()),
        EXACT,
    ),
    "new_of_another_class": (
        dict,
        act(lambda s, z: s.update(all=Table(z=z)), lambda s: s["all"].total()),
        REFUSED,
    ),
    "set_of_another_class": (Members, act(lambda s, z: s.add(len(s)), lambda s: s.total()), EXACT),
    "float_of_another_class": (
        lambda: Scale(1.0),
        change(lambda one: Scale(one * 0.9), lambda one: one.twice()),
        REFUSED,
    ),
    "int_of_another_class": (lambda: Whole(1), change(lambda one: Whole(one + 1), float), REFUSED),
    "text_of_another_class": (lambda: Text("a"), change(lambda one: Text(one + "a"), len), REFUSED),
    "nested_float_of_another_class": (
        lambda: [Scale(1.0)],
        change(lambda one: [Scale(one[0] * 0.9)], lambda one: one[0].twice()),
        REFUSED,
    ),
    "key_of_another_class": (lambda: {Text("a"): torch.ones(8)}, count_key, REFUSED),
    "named_tuple": (lambda: Pair(torch.zeros(8), 0), named_tuple, EXACT),
    "new_named_tuple": (
        lambda: None,
        change(lambda one: Pair(0.5, 1) if one is None else one._replace(count=one.count + 1), lambda one: one.count),
        REFUSED,
    ),
    "counter": (Counter, act(lambda s, z: s.update("ab"), lambda s: s.total()), EXACT),
    "default_dict": (
        lambda: defaultdict(list),
        act(lambda s, z: s["all"].append(z), lambda s: torch.stack(s["all"]).mean(0) + len(s["none"])),
        EXACT,
    ),
    "deque_of_tensors": (
        lambda: deque(maxlen=3),
        act(lambda s, z: s.append(z), lambda s: torch.stack(tuple(s)).mean(0)),
        EXACT,
    ),
    "deque_with_another_limit": (lambda: deque(maxlen=2), turn((1,)), EXACT),
    "user_list": (UserList, act(lambda s, z: s.append(z), lambda s: torch.stack(list(s)).mean(0)), EXACT),
    "user_dict": (UserDict, act(lambda s, z: s.update({len(s): z}), lambda s: sum(s.values())), EXACT),
    "chain_map": (
        lambda: ChainMap({}, {"a": 1.0}),
        act(lambda s, z: s.update({"b": s.get("b", 0) + 1}), lambda s: s["a"] + s["b"]),
        EXACT,
    ),
    "set_in_an_order_of_its_own": (lambda: {0.0}, set_of_floats, REFUSED),
    "frozen_set": (lambda: frozenset((0,)), change(lambda one: one | {len(one)}, sum), EXACT),
    "dataclass": (
        Noted,
        act(lambda s, z: (s.means.append(z), setattr(s, "steps", s.steps + 1)), lambda s: sum(s.means) / s.steps),
        EXACT,
    ),
    "frozen_dataclass": (Frozen, change(lambda one: replace(one, steps=one.steps + 1), lambda one: one.steps), EXACT),
    "enum": (lambda: Mode.FIRST, change(lambda one: Mode.LATER, lambda one: one.value), REFUSED),
    "nested_enum": (lambda: [Mode.FIRST], change(lambda one: [Mode.LATER], lambda one: one[0].value), REFUSED),
    "namespace": (
        lambda: SimpleNamespace(mean=torch.zeros(8), deep=SimpleNamespace(steps=0)),
        act(
            lambda s, z: (setattr(s, "mean", s.mean + z), setattr(s.deep, "steps", s.deep.steps + 1)),
            lambda s: s.mean / s.deep.steps,
        ),
        EXACT,
    ),
    "slots": (
        Slotted,
        act(lambda s, z: (setattr(s, "mean", s.mean + z), setattr(s, "steps", s.steps + 1)), lambda s: s.mean),
        EXACT,
    ),
    "property": (Averages, act(lambda s, z: setattr(s, "mean", z), lambda s: s.mean), EXACT),
    "generator": (
        lambda: torch.Generator().manual_seed(2),
        lambda m, h: h * torch.rand(8, generator=m.state),
        EXACT,
    ),
    "generator_made_late": (lambda: None, lazy_generator, REFUSED),
    "generator_of_python": (lambda: random.Random(2), lambda m, h: h * m.state.gauss(1.0, 0.1), EXACT),
    "generator_of_numpy": (lambda: np.random.default_rng(2), lambda m, h: h * float(m.state.normal()), EXACT),
    "older_generator_of_numpy": (lambda: np.random.RandomState(2), lambda m, h: h * float(m.state.randn()), EXACT),
    "generator_of_another_kind": (
        lambda: np.random.Generator(np.random.PCG64(1)),
        change(lambda _: np.random.Generator(np.random.MT19937(1)), lambda one: float(one.random())),
        REFUSED,
    ),
    "weak_reference": (
        lambda: None,
        lambda m, h: setattr(m, "state", weakref.ref(m.fc)) or h + m.state().bias.detach(),
        REFUSED,
    ),
    "partial": (
        lambda: functools.partial(math.pow, 2.0),
        change(lambda one: functools.partial(math.pow, one(1.0) * 0.9), lambda one: one(1.0)),
        REFUSED,
    ),
    "iterator": (lambda: itertools.count(1), lambda m, h: h / next(m.state), REFUSED),
    "decimal": (lambda: Decimal(1), change(lambda one: one * Decimal("0.9"), float), REFUSED),
    "fraction": (lambda: Fraction(1), change(lambda one: one * Fraction(9, 10), float), REFUSED),
    "date": (
        lambda: datetime.datetime(2020, 1, 1),
        change(lambda one: one + datetime.timedelta(1), lambda one: one.day),
        REFUSED,
    ),
    "huge_int": (lambda: 3**3000, change(lambda one: one * 3 + 1, lambda one: float(one % 97)), EXACT),
    "zero_below": (lambda: 0.0, change(lambda one: -one, lambda one: 2 + math.copysign(1.0, one)), EXACT),
    "not_a_number": (
        lambda: 1.0,
        change(lambda one: math.nan, lambda one: 1.0 if math.isnan(one) else 0.5),
        EXACT,
    ),
    "complex": (lambda: 1 + 0j, change(lambda one: one * (0.6 + 0.8j), lambda one: one.real + 2), EXACT),
    "bytes": (lambda: b"", change(lambda one: one + bytes([len(one)]), len), EXACT),
    "bytearray": (bytearray, act(lambda s, z: s.append(len(s)), sum), EXACT),
    "array_of_the_library": (
        lambda: array.array("d", [0.0]),
        act(lambda s, z: s.append(1.5), lambda s: s[-1] + len(s)),
        REFUSED,
    ),
    "scalar_of_numpy": (lambda: np.float32(1), change(lambda one: one * np.float32(0.9), float), EXACT),
    "date_of_numpy": (
        lambda: np.datetime64("2020-01-01"),
        change(lambda one: one + np.timedelta64(1, "D"), lambda one: one.astype(object).day),
        EXACT,
    ),
    "structured_array": (
        lambda: np.zeros(2, [("a", "f4")]),
        act(lambda s, z: s["a"].__iadd__(1), lambda s: float(s["a"].sum())),
        REFUSED,
    ),
    "array_of_objects": (
        lambda: np.array([1, None], object),
        act(lambda s, z: s.__setitem__(0, s[0] + 1), lambda s: s[0]),
        REFUSED,
    ),
    "sparse_tensor": (
        lambda: torch.eye(8).to_sparse(),
        lambda m, h: setattr(m, "state", (m.state * 0.5).coalesce()) or h + m.state.to_dense().sum(0),
        REFUSED,
    ),
    "view_of_another_tensor": (lambda: torch.zeros(8), view_of_another, EXACT),
    "view_of_a_weight": (lambda: None, view_of_weight, EXACT),
    "array_on_a_tensor": (lambda: torch.zeros(8), array_of_tensor, REFUSED),
    "row_of_an_array": (lambda: np.zeros((4, 8)), rows_of_array, REFUSED),
    "appears": (lambda: None, appearing, EXACT),
    "disappears": (lambda: 1, disappearing, EXACT),
    "none_that_becomes_a_tensor": (
        lambda: None,
        lambda m, h: setattr(m, "state", mean_of(h) if m.state is None else m.state + mean_of(h)) or h + m.state,
        EXACT,
    ),
    "another_type": (lambda: 1, of_another_type, EXACT),
    "another_dtype": (lambda: torch.zeros(8), another_dtype, EXACT),
    "recursive": (list, recursive, EXACT),
    "one_list_twice": (list, one_list_twice, EXACT),
}
