"""Kinds of Python objects by how they hold others: what an object holds, and how that is put back into it.

An object that holds plain values alone (a list of numbers) is copied as a whole; of others each entry is named by a
`Key`. Objects are read without running code of theirs.
"""

from __future__ import annotations

import array
import ast
import copy
import gc
import itertools
import operator
import random
import threading
import warnings
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from functools import partial
from types import FunctionType, GeneratorType, MappingProxyType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from splitfed.core.plain_values import (
    LEAVES,
    Held,
    Identity,
    Key,
    all_plain,
    attributes_of,
    base_of,
    entries_of,
    is_leaf,
    refill,
    same,
    same_entries,
    set_attributes,
    slots_of,
)
from splitfed.core.unchanging import UNCHANGING, VALUES, Opaque, hides_state, is_closed

_TABLES = {"_parameters": "weight", "_buffers": "buffer", "_modules": "submodule"}
OWN: Mapping[str, Any] = vars(nn.Module())
"""What every module has, as a new one has it."""
HOOKS = frozenset(name for name in OWN if "hooks" in name)
"""The tables of hooks among it."""
_SETTINGS = tuple(name for name, one in OWN.items() if type(one) in LEAVES)
UNSAVED = "_non_persistent_buffers_set"
"""What a module calls the names of buffers that its state dict lacks."""
_EMPTY: Mapping[Any, Any] = MappingProxyType({})


class AnyKind:
    """How objects of some types hold others; `name` is told. This one holds nothing."""

    name = "object"
    contains = False
    """Whether its entries have no names of their own, as those of a list."""

    def data(self, value: Any) -> Any:
        """Return a copy of what `value` is besides what it holds."""
        return None

    def held(self, value: Any) -> Held:
        """Return what `value` holds."""
        return {}

    def mark(self, value: Any) -> Any:
        """Return what tells fast whether `value` is as it is now; None where nothing does."""
        return None

    def turn_back(self, value: Any, mark: Any) -> bool:
        """Return whether `value` holds the very objects that it held when it got `mark`, but for what is undone."""
        return False

    def put_back(self, value: Any, held: Held, data: Any) -> None:
        """Let `value` hold what it held, and no more."""

    def replacement(self, value: Any, data: Any) -> Any:
        """Return what has to stand where `value` stood: itself, or an equal object where it cannot be turned back."""
        return value


class ObjectKind(AnyKind):
    """An object with attributes."""

    def held(self, value: Any) -> Held:
        """Return its attributes."""
        found = {Key("attribute", name): one for name, one in attributes_of(value).items()}
        for name in slots_of(type(value)):
            try:
                found[Key("attribute", name)] = object.__getattribute__(value, name)
            except AttributeError:
                continue
        return found

    def put_back(self, value: Any, held: Held, data: Any) -> None:
        """Set and delete attributes, past a `__setattr__` of the class."""
        table, slots = attributes_of(value), slots_of(type(value))
        wanted = {key.name: one for key, one in held.items() if key.role == "attribute"}
        for name in slots:
            if name in wanted:
                object.__setattr__(value, name, wanted.pop(name))
            elif hasattr(value, name):
                object.__delattr__(value, name)
        set_attributes(table, wanted)


class ModuleKind(AnyKind):
    """A module: its weights, buffers, submodules and attributes, and the tables of hooks that are not empty."""

    name = "module"

    def held(self, value: Any) -> Held:
        """Return them."""
        found: Held = {}
        for name, one in vars(value).items():
            if name not in OWN:
                found[Key("attribute", name)] = one
            elif (role := _TABLES.get(name)) is not None:
                found.update((Key(role, n), entry) for n, entry in one.items())
            elif one and name in HOOKS:
                found[Key("hooks", name)] = one
        return found

    def data(self, value: Any) -> Any:
        """Return what else `nn.Module` keeps: the mode, and which buffers are not saved."""
        table = vars(value)
        # A compiled module keeps its mode elsewhere.
        kept = {name: table[name] for name in _SETTINGS if name in table}
        return {**kept, UNSAVED: set(value._non_persistent_buffers_set)}

    def mark(self, value: Any) -> Any:
        """Return copies of its table of attributes, of the tables in it, and of the names of unsaved buffers."""
        table = dict(vars(value))
        tables = [one for name in (*_TABLES, *HOOKS) if isinstance(one := table.get(name), dict)]
        return table, [(one, dict(one) if one else _EMPTY) for one in tables], set(value._non_persistent_buffers_set)

    def turn_back(self, value: Any, mark: Any) -> bool:
        """Put back the mode, and return whether all is the same, entry by entry."""
        table, inner, unsaved = mark
        if "training" in table and "training" in vars(value):
            vars(value)["training"] = table["training"]
        if not same_entries(vars(value), table) or value._non_persistent_buffers_set != unsaved:
            return False
        return all(same_entries(now, kept) for now, kept in inner if now or kept)

    def put_back(self, value: Any, held: Held, data: Any) -> None:
        """Put everything back into the tables."""
        by_role: dict[str, dict[str, Any]] = {}
        for key, one in held.items():
            by_role.setdefault(key.role, {})[key.name] = one
        table, hooks = vars(value), by_role.get("hooks", {})
        for name, role in _TABLES.items():
            if type(table.get(name)) in (dict, OrderedDict):
                refill(table[name], by_role.get(role, {}))
        for name in HOOKS - hooks.keys():
            if table.get(name):
                table[name].clear()
        kept = {name: one for name, one in table.items() if name in OWN}
        if kept[UNSAVED] != data[UNSAVED]:
            kept[UNSAVED] = set(data[UNSAVED])
        plain = {name: data[name] for name in _SETTINGS if name in data}
        set_attributes(table, {**kept, **hooks, **plain, **by_role.get("attribute", {})})


class ValueKind(ObjectKind):
    """An immutable value of a class of the user's, such as one that is a float, with attributes."""

    def data(self, value: Any) -> Any:
        """Return the value."""
        return Opaque(value)


class SequenceKind(ObjectKind):
    """A list or deque."""

    name = "list"
    contains = True

    def data(self, value: Any) -> Any:
        """Return a copy of one that holds plain values alone."""
        return list(value) if all_plain(value) else None

    def held(self, value: Any) -> Held:
        """Return its items by number."""
        items = {} if all_plain(value) else {Key("item", number): one for number, one in enumerate(value)}
        return {**items, **super().held(value)}

    def put_back(self, value: Any, held: Held, data: Any) -> None:
        """Replace all items where one is another."""
        items = [one for key, one in held.items() if key.role == "item"] if data is None else data
        if len(items) != len(value) or any(one is not now for one, now in zip(items, value, strict=True)):
            base = base_of(value, deque, list)
            base.clear(value)
            base.extend(value, items)
        super().put_back(value, held, data)


class TupleKind(ObjectKind):
    """A tuple, which cannot be changed; what it holds can be."""

    name = "tuple"
    contains = True

    def held(self, value: Any) -> Held:
        """Return its items by number."""
        items = {Key("item", number): one for number, one in enumerate(tuple.__iter__(value))}
        return items if type(value) is tuple else {**items, **super().held(value)}

    def put_back(self, value: Any, held: Held, data: Any) -> None:
        """Put back the attributes of one of another class."""
        if type(value) is not tuple:
            super().put_back(value, held, data)


class TableKind(ObjectKind):
    """A dict; an entry is named by its key, or by the identity of a key that is not plain."""

    name = "dict"
    contains = True

    def data(self, value: Any) -> Any:
        """Return a copy of one that holds plain values alone."""
        return dict(entries_of(value)) if all_plain(dict.values(value)) and all_plain(dict.keys(value)) else None

    def held(self, value: Any) -> Held:
        """Return its values by key."""
        if self.data(value) is not None:
            return super().held(value)
        named = {Key("item", k if is_leaf(k) else Identity(k)): one for k, one in entries_of(value)}
        return {**named, **super().held(value)}

    def put_back(self, value: Any, held: Held, data: Any) -> None:
        """Replace all entries where one is another."""
        items = data
        if items is None:
            names = ((key.name, one) for key, one in held.items() if key.role == "item")
            items = {k.value if isinstance(k, Identity) else k: one for k, one in names}
        refill(value, items)
        super().put_back(value, held, data)


class SetKind(ObjectKind):
    """A set or frozenset."""

    name = "set"
    contains = True

    def data(self, value: Any) -> Any:
        """Return a copy of one that holds plain values alone."""
        return set(value) if all_plain(value) else None

    def held(self, value: Any) -> Held:
        """Return its members."""
        named = {} if all_plain(value) else {Key("item", o if is_leaf(o) else Identity(o)): o for o in value}
        return {**named, **super().held(value)}

    def put_back(self, value: Any, held: Held, data: Any) -> None:
        """Replace all members where one is another."""
        members = [one for key, one in held.items() if key.role == "item"] if data is None else data
        if isinstance(value, set) and value != set(members):
            set.clear(value)
            set.update(value, members)
        super().put_back(value, held, data)


class DataKind(ObjectKind):
    """An array or a generator of random numbers: `read` returns a copy of its state, and `write` puts that back."""

    def __init__(self, name: str, read: Callable[[Any], Any], write: Callable[[Any, Any], object]) -> None:
        self.name = name
        self._read, self._write = read, write

    def data(self, value: Any) -> Any:
        """Return a copy of its state."""
        return self._read(value)

    def put_back(self, value: Any, held: Held, data: Any) -> None:
        """Write its state back, and its attributes."""
        self._write(value, data)
        super().put_back(value, held, data)


def _read_array(value: Any) -> Any:
    """Return a copy of the numbers of an array; one that cannot be written to is its own copy."""
    return np.array(value) if value.flags.writeable else value


def _write_array(value: Any, numbers: Any) -> None:
    if numbers is not value and not same(value.view(np.ndarray), numbers):
        np.copyto(value.view(np.ndarray), numbers)


def _write_bits(value: np.random.Generator, state: Any) -> None:
    value.bit_generator.state = state


class TensorKind(AnyKind):
    """A tensor and the attributes that somebody hung on it: its numbers are kept elsewhere."""

    name = "tensor"

    def held(self, value: Any) -> Held:
        """Return its attributes."""
        return {Key("attribute", name): one for name, one in attributes_of(value).items()}

    def put_back(self, value: Any, held: Held, data: Any) -> None:
        """Set and delete attributes."""
        if (table := attributes_of(value)) or held:
            set_attributes(table, {key.name: one for key, one in held.items()})


class IteratorKind(AnyKind):
    """An iterator of Python: what it runs over, and where it is."""

    name = "iterator"

    def data(self, value: Any) -> Any:
        """Return how it is told, and how far it is from its end, with an iterator that is there."""
        return _IteratorState(value)

    def held(self, value: Any) -> Held:
        """Return what it runs over."""
        referents = [one for one in gc.get_referents(value) if not isinstance(one, type)]
        return {Key("part", number): one for number, one in enumerate(referents)}

    def replacement(self, value: Any, data: Any) -> Any:
        """Turn it back where it has moved, or return an equal one where it cannot be turned back."""
        if same(data, _IteratorState(value)) or data.there is None:
            return value
        if type(value) is type(iter([])) and value.__length_hint__():  # type: ignore[attr-defined]
            value.__setstate__(data.there.__reduce__()[2])  # type: ignore[attr-defined]
            return value
        return _copy_iterator(data.there)


class _IteratorState:
    """Where an iterator is; `there` is a copy of it, None where it cannot be copied."""

    def __init__(self, iterator: Any) -> None:
        self.there = None if isinstance(iterator, GeneratorType) else _copy_iterator(iterator)
        told = repr(iterator) if isinstance(iterator, (itertools.count, itertools.repeat)) else None
        left = iterator.__length_hint__() if told is None and hasattr(iterator, "__length_hint__") else None
        frame = getattr(iterator, "gi_frame", None)
        self.position = (told, left, None if frame is None else frame.f_lasti)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _IteratorState) and self.position == other.position

    def __repr__(self) -> str:
        told, left, line = self.position
        return told or (f"iterator, {left} left" if left is not None else f"generator at {line}")

    __hash__ = None  # type: ignore[assignment]


class GeneratorKind(IteratorKind):
    """A generator function at work, which can be neither copied nor turned back."""

    def held(self, value: Any) -> Held:
        """Return its variables."""
        frame = value.gi_frame
        return {} if frame is None else {Key("variable", name): one for name, one in frame.f_locals.items()}


class LinkKind(AnyKind):
    """What leads to another object alone: a bound method, a weak reference, a partial call, a descriptor."""

    name = "function"

    def data(self, value: Any) -> Any:
        """Return which function of its package or object a compiled one is; of others what they lead to tells."""
        return getattr(value, "__qualname__", None) if isinstance(value, _COMPILED) else None

    def held(self, value: Any) -> Held:
        """Return what it leads to."""
        if isinstance(value, ContextVar):
            # One that is not set has its default, or nothing.
            try:
                return {Key("part", "value"): value.get()}
            except LookupError:
                return {}
        if isinstance(value, _VIEWS):
            return {Key("part", "mapping"): one for one in gc.get_referents(value)}
        if isinstance(value, weakref.ref):
            return {Key("part", "referent"): weakref.ref.__call__(value)}
        if isinstance(value, partial):
            found = {"func": value.func, "args": value.args, "keywords": value.keywords}
        elif isinstance(value, MethodType):
            found = {"self": value.__self__, "func": value.__func__}
        else:
            names = ("__self__", "__wrapped__", "__func__", "fget", "fset", "fdel", "func")
            found = {name: getattr(value, name, None) for name in names}
        return {Key("part", n): one for n, one in found.items() if one is not None and not isinstance(one, ModuleType)}

    def put_back(self, value: Any, held: Held, data: Any) -> None:
        """Set a context variable; empty a cache of a function that holds what a trace has left there."""
        if isinstance(value, ContextVar):
            for one in held.values():
                value.set(one)
            return
        if hasattr(value, "cache_clear") and hasattr(value, "__wrapped__") and _holds_proxy(value):
            value.cache_clear()


_OBJECT, _VALUE = ObjectKind(), ValueKind()
TENSOR = TensorKind()
_VIEWS: tuple[type, ...] = (MappingProxyType, type({}.keys()), type({}.values()), type({}.items()))
_COMPILED: tuple[type, ...] = (type(len), type("".__str__))
_LINKS = (weakref.ref, partial, MethodType, property, staticmethod, classmethod, *_COMPILED)
_KINDS: tuple[tuple[tuple[type, ...], AnyKind | None], ...] = (
    ((Tensor,), TENSOR),
    ((nn.Module,), ModuleKind()),
    ((type, ModuleType, FunctionType, fx.Proxy, random.SystemRandom), None),
    ((list, deque), SequenceKind()),
    ((tuple,), TupleKind()),
    ((dict,), TableKind()),
    ((set, frozenset), SetKind()),
    ((np.ndarray,), DataKind("array", _read_array, _write_array)),
    (
        (bytearray, array.array),
        DataKind("array", lambda value: value[:], lambda value, data: operator.setitem(value, slice(None), data)),
    ),
    ((random.Random,), DataKind("generator", random.Random.getstate, random.Random.setstate)),
    ((torch.Generator,), DataKind("generator", torch.Generator.get_state, torch.Generator.set_state)),
    (
        (np.random.RandomState,),
        DataKind("generator", lambda value: value.get_state(legacy=False), np.random.RandomState.set_state),
    ),
    (
        (np.random.Generator,),
        DataKind("generator", lambda value: copy.deepcopy(value.bit_generator.state), _write_bits),
    ),
    ((*_LINKS, *_VIEWS, ContextVar), LinkKind()),
    ((GeneratorType,), GeneratorKind()),
)
_KIND_OF: weakref.WeakKeyDictionary[type, AnyKind | None] = weakref.WeakKeyDictionary()


def kind_of(type_: type) -> AnyKind | None:
    """Return how objects of `type_` hold others; None where that is not known, and for classes and functions."""
    try:
        return _KIND_OF[type_]
    except KeyError:
        found = _KIND_OF[type_] = _find_kind(type_)
        return found


def _find_kind(type_: type) -> AnyKind | None:
    for types, kind in _KINDS:
        if issubclass(type_, types):
            return kind
    home = type_.__module__
    if issubclass(type_, threading.local):
        return _OBJECT
    if is_closed(home):
        return None
    if home in ("builtins", "itertools", "collections", "_collections") and hasattr(type_, "__next__"):
        return IteratorKind()
    if hasattr(type_, "__wrapped__") or type_.__name__ in ("_lru_cache_wrapper", "cached_property"):
        return LinkKind()
    hidden = hides_state(type_) and not issubclass(type_, UNCHANGING)
    if hidden or not (type_.__dictoffset__ or slots_of(type_)):
        return None
    return _VALUE if issubclass(type_, VALUES) else _OBJECT


def _copy_iterator(iterator: Any) -> Any:
    try:
        with warnings.catch_warnings(action="ignore"):
            return copy.copy(iterator)
    except (TypeError, AttributeError):
        # Python 3.14 copies no iterator of itertools.
        if isinstance(iterator, itertools.count):
            return itertools.count(*ast.literal_eval(f"({repr(iterator)[len('count(') : -1]},)"))
        return None


def _holds_proxy(cached: Any) -> bool:
    """Return whether the cache of a function holds what stands for a tensor in a trace, or a tensor of shapes alone."""
    pending: list[Any] = [cached]
    met: set[int] = set()
    for _ in range(4):
        pending = [
            one for outer in pending for one in gc.get_referents(outer) if not isinstance(one, (type, FunctionType))
        ]
        if any(isinstance(one, fx.Proxy) or (isinstance(one, Tensor) and one.is_meta) for one in pending):
            return True
        pending = [one for one in pending if id(one) not in met]
        met.update(map(id, pending))
    return False
