"""All that a call of a model can read or change in Python, found by following references from the model.

Two regions. What hangs on the model: its modules with attributes and hooks, containers, objects, arrays, iterators,
generators of random numbers. And what its code names, which all copies of the model share: the classes and functions
of these objects, default arguments, closures, globals, environment variables; followed through every function and
method that is named on the way. Code of installed packages is not followed, but objects of their classes are that hang
on the model.

Every object has a place, the shortest chain of names that leads to it. Two walks are compared place by place, so that
an object in the stead of an equal one is no change, and cycles and shared objects are met once.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any, NamedTuple
from weakref import ProxyTypes

from torch import Tensor, nn

from splitfed.core.code_kinds import (
    CLASS,
    ENVIRONMENT,
    FUNCTION,
    GLOBALS,
    NamesKind,
    installed,
    is_data,
    names_in,
    names_mentioned,
)
from splitfed.core.object_kinds import AnyKind, kind_of
from splitfed.core.plain_values import LEAVES, Key, is_leaf, same
from splitfed.core.unchanging import Opaque

_CALLED = frozenset({"forward", "train", "eval"})
_MAKERS = "__init__ __new__ __repr__ __str__ __init_subclass__ __class_getitem__ __del__"
_COPIERS = "__reduce__ __reduce_ex__ __deepcopy__ __copy__ __getstate__ __setstate__"
_UNCALLED = frozenset(f"{_MAKERS} {_COPIERS}".split())


class Location:
    """Where an object is: what `key` leads to from the object at `parent`."""

    __slots__ = ("children", "key", "parent")

    def __init__(self, parent: Location | None = None, key: Key | None = None) -> None:
        self.parent, self.key = parent, key
        self.children: dict[Key, Location] = {}

    def child(self, key: Key) -> Location:
        """Return the place that `key` leads to from here, the same for every walk."""
        found = self.children.get(key)
        if found is None:
            found = self.children[key] = Location(self, key)
        return found

    def path(self) -> tuple[Key, ...]:
        """Return the keys that lead here from the model."""
        keys: list[Key] = []
        place: Location | None = self
        while place is not None and place.key is not None:
            keys.append(place.key)
            place = place.parent
        return tuple(reversed(keys))


@dataclass(slots=True)
class Record:
    """An object, and what it held: `contents` of other objects (their places) and plain values, `data` of its own.

    `shared`: whether all copies of the model share it. `asked`: the names that were looked up in it; None: all.
    `mark`: of `AnyKind.mark`, where `contents` are as they were found.
    """

    value: Any
    kind: AnyKind
    shared: bool
    contents: dict[Key, Any] = field(default_factory=dict)
    data: Any = None
    asked: set[str] | None = None
    mark: Any = None


Records = dict[Location, Record]


def reach(model: nn.Module, root: Location, code: bool = True) -> Records:
    """Return what can be reached from `model`, by place, nearest first; without `code` only what hangs on it.

    `root`: the place of the model, the same for walks that are to be compared.
    """
    walk = _Reach(root)
    walk.refer(model, root)
    walk.follow()
    if code:
        walk.follow_code()
    return walk.records


class _Reach:
    """A walk: records of what was met, objects that are still to be looked into, and names that code has used."""

    def __init__(self, root: Location) -> None:
        self.records: Records = {}
        self._root, self._shared = root, False
        self._met: dict[int, Location] = {}
        self._pending: deque[tuple[Location, Record]] = deque()
        self._code: deque[Any] = deque()
        self._names: set[str] = set()
        self._named: list[tuple[Location, Record]] = []
        self._kinds: dict[type, AnyKind | None] = {}

    def refer(self, value: Any, place: Location) -> Any:
        """Return what stands for `value` in the record of its holder: its place, or itself where it is plain."""
        if (found := self._met.get(id(value))) is not None:
            return found
        if is_leaf(value):
            return value
        type_ = type(value)
        if type_ not in self._kinds:
            self._kinds[type_] = kind = kind_of(type_)
            if kind is not None:
                self._code.append(type_)
        if (kind := self._kinds[type_]) is not None:
            record = Record(value, kind, self._shared)
            self._met[id(value)] = place
            self.records[place] = record
            self._pending.append((place, record))
            return place
        if issubclass(type_, FunctionType):
            self._met[id(value)] = place
            self.records[place] = Record(value, FUNCTION, True, data=value.__code__)
            self._code.append(place)
            return place
        if issubclass(type_, (type, ModuleType)):
            self._code.append(value)
            return value
        if type_ in ProxyTypes:
            # It answers for another object in all that is asked of it.
            with suppress(ReferenceError):
                self.refer(value.__repr__.__self__, place)
        return Opaque(value)

    def follow(self) -> None:
        """Look into all objects that were met."""
        while self._pending:
            place, record = self._pending.popleft()
            value, kind = record.value, record.kind
            record.data, record.mark = kind.data(value), kind.mark(value)
            contents, child = record.contents, place.child
            for key, one in kind.held(value).items():
                contents[key] = one if type(one) in LEAVES else self.refer(one, child(key))

    def follow_code(self) -> None:
        """Look into functions, classes and globals that were met, until there is nothing new."""
        self._shared = True
        place = self._root.child(Key("environment", None))
        self.records[place] = Record(os.environ, ENVIRONMENT, True)
        self._pending.append((place, self.records[place]))
        self._use(_CALLED)
        while self._code or self._pending:
            self.follow()
            while self._code:
                met = self._code.popleft()
                if isinstance(met, Location):
                    self._look_into_function(met)
                elif isinstance(met, ModuleType):
                    if not installed(met.__name__):
                        self._look_into_globals(vars(met))
                else:
                    for base in met.__mro__:
                        self._look_into_class(base)

    def _look_into_function(self, place: Location) -> None:
        record = self.records[place]
        function, child = record.value, place.child
        foreign = installed(function.__globals__.get("__name__", ""))
        for key, one in FUNCTION.held(function).items():
            # A wrapper of an installed package leads to what it wraps.
            if not foreign or (key.role == "variable" and callable(one)) or key.name == "__wrapped__":
                record.contents[key] = self.refer(one, child(key))
        if not foreign:
            self._look_into_globals(function.__globals__)
            self._use(names_mentioned(function.__code__))

    def _use(self, names: set[str] | frozenset[str]) -> None:
        """Look up new `names` in all classes and globals that were met."""
        if new := names - self._names:
            self._names |= new
            for place, record in self._named:
                self._look_up(place, record, new)

    def _look_into_class(self, type_: type) -> None:
        if installed(type_.__module__) or (place := self._root.child(Key("class", type_))) in self.records:
            return
        record = self.records[place] = Record(type_, CLASS, True, asked=self._names)
        self._named.append((place, record))
        special = {n for n, v in vars(type_).items() if is_data(n, v) or (n not in _UNCALLED and _is_special(n, v))}
        self._look_up(place, record, special | self._names)

    def _look_into_globals(self, table: dict[str, Any]) -> None:
        place = self._root.child(Key("globals", id(table)))
        if place not in self.records:
            record = self.records[place] = Record(table, GLOBALS, True, asked=self._names)
            self._named.append((place, record))
            self._look_up(place, record, self._names)

    def _look_up(self, place: Location, record: Record, names: set[str] | frozenset[str]) -> None:
        assert isinstance(record.kind, NamesKind)
        table = record.kind.table(record.value)
        for name in sorted(names & table.keys()):
            key = Key(record.kind.role, name)
            if key not in record.contents:
                record.contents[key] = self.refer(table[name], place.child(key))


def names_asked(records: Records) -> set[str]:
    """Return the names that code among `records` uses."""
    return next((record.asked for record in records.values() if record.asked is not None), set())


_BARE = ("LOAD_GLOBAL", "STORE_GLOBAL", "LOAD_NAME", "STORE_NAME")


def bare_globals(records: Records) -> set[tuple[int, str]]:
    """Return the globals, by identity of their table and name, that code among `records` reads or writes as such."""
    functions = (record.value for record in records.values() if isinstance(record.value, FunctionType))
    return {(id(one.__globals__), name) for one in functions for name in names_in(one.__code__, *_BARE)}


def is_named(place: Location, bare: set[tuple[int, str]]) -> bool:
    """Return whether code names what leads to `place`, of a global one that is among the `bare`."""
    path = place.path()
    return not path or path[0].role != "globals" or len(path) < 2 or (path[0].name, path[1].name) in bare


def _is_special(name: str, value: Any) -> bool:
    return name.startswith("__") and name.endswith("__") and isinstance(value, FunctionType)


class Change(NamedTuple):
    """One entry that is another now: of the object at `place`, under `key`; None: the object itself."""

    place: Location
    key: Key | None
    shared: bool


def differences(
    before: Records, after: Records, changed: Callable[[Location, Tensor, Tensor], bool]
) -> Iterator[Change]:
    """Yield what is another in `after`; `changed` says so of the two tensors at a place.

    What one of the walks alone has looked up is none.
    """
    for place, old in before.items():
        new = after.get(place)
        if new is None:
            continue
        if type(new.value) is not type(old.value):
            yield Change(place, None, old.shared)
            continue
        if isinstance(old.value, Tensor):
            if changed(place, old.value, new.value):
                yield Change(place, None, old.shared)
        elif old.kind.name != "module" and not same(old.data, new.data):
            yield Change(place, None, old.shared)
        for key in old.contents.keys() | new.contents.keys():
            if not _same_entry(key, old, new):
                yield Change(place, key, old.shared)


def _same_entry(key: Key, old: Record, new: Record) -> bool:
    if key in old.contents and key in new.contents:
        one, other = old.contents[key], new.contents[key]
        return one is other if isinstance(one, Location) or isinstance(other, Location) else same(one, other)
    if not isinstance(old.kind, NamesKind) or not isinstance(new.kind, NamesKind):
        return False
    if key in old.contents:
        return key.name in new.kind.table(new.value)
    return key.name not in (old.asked or ())


def put_back(records: Records) -> None:
    """Let every object hold what it held when `records` were made."""
    moved = False
    for record in records.values():
        value, record.value = record.value, record.kind.replacement(record.value, record.data)
        moved = moved or value is not record.value
    for record in records.values():
        if record.mark is not None and not moved and record.kind.turn_back(record.value, record.mark):
            continue
        held = {key: bare(one, records) for key, one in record.contents.items()}
        record.kind.put_back(record.value, held, record.data)
        if isinstance(record.kind, NamesKind):
            known = {key.name for key in record.contents}
            for name in [n for n in record.kind.table(record.value) if n in (record.asked or ()) and n not in known]:
                record.kind.remove(record.value, name)


def bare(one: Any, records: Records) -> Any:
    """Return the object that an entry of the contents of one of `records` stands for."""
    if isinstance(one, Location):
        return records[one].value
    return one.value if isinstance(one, Opaque) else one
