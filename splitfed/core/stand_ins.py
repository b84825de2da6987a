"""What a party of a replayed model has in place of attributes that other parties read: their form without numbers.

A party runs the user's `forward` from the top, over the code of earlier segments, which reads their attributes. For
these it has stand-ins: of a tensor its shape on the meta device, of a module one whose weights are shapes, of an array,
a container, an object or a function one of the same form in which every number is blank. What is of no known form has
nothing in its place, and using it is an error. Stand-ins are handed out there alone; where its own operations run, the
attribute is not there.

Whole numbers stay where an attribute leads to fewer than eight numbers, such as the size of a kernel.
"""

from __future__ import annotations

import array
import copy
import enum
import operator
import types
import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from functools import lru_cache, partial
from itertools import islice
from numbers import Integral, Number
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from splitfed.core.code_kinds import is_installed
from splitfed.core.held_arrays import followed
from splitfed.core.object_kinds import kind_of
from splitfed.core.payload import not_dense
from splitfed.core.plain_values import attributes_of, base_of, entries_of, refill, slots_of
from splitfed.core.unchanging import VALUES, hides_state, is_closed, is_unchanging

SCALARS = (Number, np.bool_, str, type(None), torch.dtype, torch.device, enum.Enum)
"""Types of which a single object is a setting, which every party has."""
_BLANK_INTEGER = int(np.iinfo(np.int64).min)
_NUMBERS = (Number, np.generic, range, slice)
_WHOLE = (Integral, np.bool_, range, slice)
# Up to so many whole numbers together are a setting, such as the size of a kernel.
_FEW = 8
_PROGRAM = (type, types.ModuleType, types.CodeType)
_KEPT = (*_PROGRAM, str, type(None), torch.dtype, torch.device, enum.Enum, np.dtype, np.ufunc, PurePath)
_LINKS = (partial, types.MethodType, types.FunctionType, weakref.ref, types.MappingProxyType, type(lru_cache(repr)))


class StandIns:
    """The stand-ins of one module, attribute -> stand-in; `kept_alive`: what weak references among them lead to."""

    def __init__(self, values: Mapping[str, Any], kept_alive: list[Any]) -> None:
        self.values, self.kept_alive = dict(values), kept_alive

    def __deepcopy__(self, memo: dict[int, Any]) -> StandIns:
        """Return copies, of what `copy.deepcopy` shares too: functions, and what weak references lead to."""
        values = copy.deepcopy(self.values, memo)
        own = {id(one): one for one in memo.values() if isinstance(one, (Tensor, nn.Module))}
        made = Blanking(own, copies=True)
        return StandIns({name: made.stand_in(value) for name, value in values.items()}, made.kept_alive)


class Unheld:
    """Stands for something of which no form without numbers is known; whatever asks it for anything fails."""

    def __getattr__(self, name: str) -> Any:
        """Say so."""
        raise AttributeError(f"{name!r} of an object that this party does not hold")


class Blanking:
    """Makes stand-ins; `own`: identity of what is a party's own, modules and weights -> what is put in its place.

    `copies`: whether what it is given are stand-ins, which keep the numbers that they have.
    """

    def __init__(self, own: Mapping[int, Any], copies: bool = False) -> None:
        self._made: dict[int, Any] = dict(own)
        self._held: list[Any] = []
        self._copies, self._few, self._settings = copies, False, False
        self.kept_alive: list[Any] = []

    def of_attribute(self, value: Any, settings: bool = False) -> Any:
        """Return the stand-in of an attribute of a module; `value` itself where it is one of settings alone.

        `settings`: whether single numbers stay that are attributes of an object, variables or arguments of a function,
        or have a text as a key.
        """
        if isinstance(value, SCALARS):
            return value
        before = self._few, self._settings
        self._few, self._settings = sum(1 for _ in islice(_numbers_behind(value), _FEW)) < _FEW, settings
        found = self.stand_in(value)
        self._few, self._settings = before
        return found

    def stand_in(self, value: Any, named: bool = False) -> Any:
        """Return `value` without numbers, and what leads to none as it is; `named`: whether code names it."""
        if id(value) in self._made:
            return self._made[id(value)]
        if type(value) not in weakref.ProxyTypes and isinstance(value, _KEPT):
            return value
        if isinstance(value, _NUMBERS) and type(value) not in weakref.ProxyTypes:
            stays = self._copies or (self._few and isinstance(value, _WHOLE))
            return value if stays or (named and self._settings) else _blank(value)
        self._held.append(value)  # so that no identity is used twice
        self._made[id(value)] = Unheld()  # of what leads back to itself
        self._made[id(value)] = made = self._make(value)
        return made

    def _make(self, value: Any) -> Any:
        if type(value) in weakref.ProxyTypes:
            there = value.__repr__.__self__
            self.kept_alive.append(made := self.stand_in(there))
            return value if made is there else weakref.proxy(made)
        if isinstance(value, Tensor):
            return self._of_tensor(value)
        if isinstance(value, np.ndarray):
            return self._of_array(value)
        if isinstance(value, (array.array, bytearray, bytes)):
            zeros = bytes(len(memoryview(value).cast("B")))
            return array.array(value.typecode, zeros) if isinstance(value, array.array) else type(value)(zeros)
        if isinstance(value, (list, tuple, set, frozenset, deque)):
            return self._of_items(value)
        if isinstance(value, dict):
            return self._of_table(value)
        if isinstance(value, _LINKS):
            return self._of_link(value)
        kind = kind_of(type(value))
        return _new_generator(value) if kind is not None and kind.name == "generator" else self._of_object(value)

    def _of_tensor(self, tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            return tensor
        dense = not_dense(tensor) is None
        bare = tensor.detach().to("meta") if dense else torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(bare, tensor.requires_grad)
        return bare.requires_grad_() if tensor.is_leaf and tensor.requires_grad else bare

    def _of_array(self, value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        if not value.dtype.hasobject:
            return value if value.dtype.kind in "US" else _blank_array(value)
        made = np.zeros_like(value)
        for place in np.ndindex(value.shape):
            made[place] = self.stand_in(value[place])
        return made

    def _of_items(self, value: Any) -> Any:
        made = value
        if not isinstance(value, (tuple, frozenset)):
            made = self._made[id(value)] = copy.copy(value)
            made.clear()
        items = list(value)
        found = self._keys(items) if isinstance(value, (set, frozenset)) else [self.stand_in(one) for one in items]
        same = all(map(operator.is_, items, found))
        if isinstance(value, (tuple, frozenset)) and not same:
            try:
                made = base_of(value, tuple, frozenset).__new__(type(value), found)
            except TypeError:  # a class of Python's own, which makes its objects by itself
                return Unheld()
        elif made is not value:
            (made.update if isinstance(made, set) else made.extend)(found)
        return self._with_attributes(made, value, same and len(made) == len(items))

    def _of_table(self, value: Any) -> Any:
        self._made[id(value)] = made = copy.copy(value)
        refill(made, {})
        before = entries_of(value)
        keys = self._keys([key for key, _ in before])
        found = [self.stand_in(one, isinstance(key, str)) for key, one in before]
        refill(made, dict(zip(keys, found, strict=True)))
        same = all(key is k and one is v for (key, one), k, v in zip(before, keys, found, strict=True))
        return self._with_attributes(made, value, same) if len(made) == len(before) else Unheld()

    def _with_attributes(self, made: Any, value: Any, same: bool) -> Any:
        """Return `made`, a container like `value`, with such attributes too; `value` where all in it is the `same`."""
        before = dict(attributes_of(value))
        found = {name: self.stand_in(one, True) for name, one in before.items()}
        if same and all(found[name] is one for name, one in before.items()):
            return value
        attributes_of(made).update(found)
        return made

    def _keys(self, keys: Iterable[Any]) -> list[Any]:
        """Return the stand-ins of keys of a table or members of a set: whole numbers are counted through."""
        ranks: dict[Any, int] = {}

        def of_key(key: Any) -> Any:
            if type(key) is tuple:
                return tuple(map(of_key, key)) if any(of_key(one) is not one for one in key) else key
            blank = self.stand_in(key)
            rank = ranks.setdefault(key, len(ranks)) if isinstance(key, Number) and blank is not key else None
            return blank if rank is None or blank != blank else type(key)(rank)

        return list(map(of_key, keys))

    def _of_link(self, value: Any) -> Any:
        if isinstance(value, partial):
            before = (value.func, *value.args, *value.keywords.values())
            func, *given = [self.stand_in(one, True) for one in before]
            named = dict(zip(value.keywords, given[len(value.args) :], strict=True))
            same = all(map(operator.is_, before, (func, *given)))
            return value if same else type(value)(func, *given[: len(value.args)], **named)
        if isinstance(value, types.MethodType):
            owner, func = self.stand_in(value.__self__), self.stand_in(value.__func__)
            same = owner is value.__self__ and func is value.__func__
            return value if same else types.MethodType(func, owner)
        if isinstance(value, types.MappingProxyType):
            return types.MappingProxyType(self._of_table(dict(value)))
        if isinstance(value, weakref.ref):
            there = value()
            if (made := self.stand_in(there)) is there:
                return value
            self.kept_alive.append(made)
            return weakref.ref(made)
        if isinstance(value, types.FunctionType):
            return value if is_installed(value) else self._of_function(value)
        return lru_cache(**value.cache_parameters())(self.stand_in(value.__wrapped__))

    def _of_function(self, value: types.FunctionType) -> types.FunctionType:
        cells = tuple(self._of_cell(cell) for cell in value.__closure__ or ())
        defaults = tuple(self.stand_in(one, True) for one in value.__defaults__ or ())
        named = {name: self.stand_in(one, True) for name, one in (value.__kwdefaults__ or {}).items()}
        table = {name: self.stand_in(one, True) for name, one in vars(value).items()}
        before = (*(value.__closure__ or ()), *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        after = (*cells, *defaults, *named.values())
        if all(map(operator.is_, (*before, *vars(value).values()), (*after, *table.values()))):
            return value
        closure = cells if value.__closure__ else None
        made = types.FunctionType(value.__code__, value.__globals__, value.__name__, defaults, closure)
        made.__kwdefaults__, made.__dict__ = named, table
        return made

    def _of_cell(self, cell: types.CellType) -> types.CellType:
        try:
            held = cell.cell_contents
        except ValueError:
            return cell
        made = self.stand_in(held, True)
        return cell if made is held else types.CellType(made)

    def _of_object(self, value: Any) -> Any:
        kind = type(value)
        table, slots = attributes_of(value), slots_of(kind)
        if is_closed(kind.__module__) or (is_unchanging(value) and not isinstance(value, VALUES)):
            return value
        if isinstance(value, types.BuiltinFunctionType):
            owner = value.__self__
            return value if (made := self.stand_in(owner)) is owner else getattr(made, value.__name__)
        if not (table or slots) or hides_state(kind):
            return Unheld()
        before = {**table, **{name: getattr(value, name) for name in slots if hasattr(value, name)}}
        try:
            made = object.__new__(kind)
        except TypeError:  # a class of Python's own, such as a namespace
            made = copy.copy(value)
        self._made[id(value)] = made
        same, whole = not self._copies, isinstance(value, nn.Module)
        for name, one in before.items():
            found = self.of_attribute(one, self._settings) if whole else self.stand_in(one, True)
            object.__setattr__(made, name, found)
            same = same and found is one
        return value if same else made


def _numbers_behind(value: Any) -> Iterable[None]:
    """Yield once for every number that `value` leads to, itself included, but by modules and tensors."""
    waiting: list[Any] = [value]
    met: dict[int, Any] = {}
    while waiting:
        thing = waiting.pop()
        if isinstance(thing, _NUMBERS) and not isinstance(thing, enum.Enum):
            yield None
        elif not isinstance(thing, (nn.Module, Tensor, *_KEPT)) and id(thing) not in met:
            met[id(thing)] = thing
            waiting += (one for one, _ in followed(thing))


def _blank(number: Any) -> Any:
    """Return what stands for `number`: not a number, or of whole ones the least; nothing where its type has neither."""
    if isinstance(number, (range, slice)):
        return Unheld()
    if isinstance(number, np.generic):
        return _blank_array(np.asarray(number))[()]
    if isinstance(number, (bool, Integral)):
        return _BLANK_INTEGER if type(number) is not bool else False
    for text in ("nan", 0):
        try:
            return type(number)(text)
        except (TypeError, ValueError, ArithmeticError):
            continue
    return Unheld()


def _blank_array(value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    made = np.zeros_like(value)
    if value.dtype.kind in "fc":
        made.fill(np.nan)
    elif value.dtype.kind == "i":
        made.fill(np.iinfo(value.dtype).min)
    return made


def _new_generator(generator: Any) -> Any:
    """Return a generator of random numbers of the same class, with a seed that everybody knows."""
    if isinstance(generator, np.random.Generator):
        return np.random.Generator(type(generator.bit_generator)(0))
    made = copy.deepcopy(generator)
    (made.manual_seed if isinstance(made, torch.Generator) else made.seed)(0)
    return made
