"""Deprecated names: warn of one, and go on taking it.

A module, a name in it, an attribute, a keyword or an overridden hook that was renamed works under its old name until
the next release. Which names were renamed is said in `splitfed.old_names` and where the new ones are defined.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from operator import attrgetter
from types import ModuleType
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])

STATE_KEYS = {
    "insiders": "training_attacks",
    "sentries": "detectors",
    "taken": "participation",
    "tutor": "objective",
}
"""Old key of the state of an engine or a party, as checkpoints hold it -> the new one."""


def warn(text: str, stacklevel: int) -> None:
    """Warn that an old name will be gone with the next release, and point at the line that uses it."""
    # What checks a call in front of a function is no line of a user's.
    stacklevel += sys._getframe(stacklevel - 1).f_globals.get("__name__") == "splitfed.core.argument_kinds"
    warnings.warn(f"{text}; the old name will be gone in the next release", DeprecationWarning, stacklevel=stacklevel)


def accept_old_keywords(moved: Mapping[str, tuple[str, str]], kinds: Mapping[str, type]) -> Callable[[F], F]:
    """Return a decorator under which a function goes on taking keywords that are now fields of values.

    `moved`: old keyword -> the parameter and the field that took its place; `kinds`: parameter -> class of its value.
    None, by which the old keywords said that nothing is given, is the field's default. Raises `TypeError` where the
    same value is given both ways.
    """

    def decorate(function: F) -> F:
        @wraps(function)
        def with_new_keywords(*args: Any, **given: Any) -> Any:
            fields: dict[str, dict[str, Any]] = {}
            for old in [name for name in given if name in moved]:
                parameter, field = moved[old]
                if parameter in given:
                    raise TypeError(f"{function.__name__}() got {old!r}, which is a part of {parameter!r}, and both")
                warn(f"{function.__name__}({old}=...) is now {parameter}={kinds[parameter].__name__}({field}=...)", 3)
                fields.setdefault(parameter, {})[field] = given[old]
            values = {p: kinds[p](**{n: v for n, v in held.items() if v is not None}) for p, held in fields.items()}
            return function(*args, **{name: value for name, value in given.items() if name not in moved}, **values)

        return cast(F, with_new_keywords)

    return decorate


def accept_renamed_keywords(**moved: str) -> Callable[[F], F]:
    """Return a decorator under which a function goes on taking keywords by their old names; `moved`: old -> new."""

    def decorate(function: F) -> F:
        @wraps(function)
        def with_new_names(*args: Any, **given: Any) -> Any:
            for old in [name for name in given if name in moved]:
                warn(f"{function.__name__}({old}=...) is now {moved[old]}=...", 3)
                given[moved[old]] = given.pop(old)
            return function(*args, **given)

        return cast(F, with_new_names)

    return decorate


def forwarded(package: str, new: str, names: Collection[str] | Mapping[str, str]) -> Callable[[str], Any]:
    """Return a `__getattr__` for `package`: `names`, which it held, are now in `new`, under other names in a table."""

    def getattr_(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        now = names[name] if isinstance(names, Mapping) else name
        warn(f"{package}.{name} is now {new}.{now}", 3)
        return getattr(import_module(new), now)

    return getattr_


def adopt(kind: type, hooks: Mapping[str, str]) -> None:
    """Let a user's class that overrides a hook under its old name override the new one; `hooks`: old -> new."""
    for old, new in hooks.items():
        if old in vars(kind):
            warn(f"{kind.__name__}.{old} is now {new}", 4)
            setattr(kind, new, vars(kind)[old])


def adopt_fields(kind: type, hook: str, fields: Mapping[str, str]) -> None:
    """Let a user's class that overrides hooks which are now fields of what `hook` returns set these; old -> field.

    An old hook is a property, or a method of the argument of `hook`.
    """
    own = {old: new for old, new in fields.items() if old in vars(kind)}
    inner = getattr(kind, hook)
    for old, new in own.items():
        warn(f"{kind.__name__}.{old} is now {new} of what {hook} returns", 4)

    def returned(self: Any, argument: Any) -> Any:
        told = {new: getattr(self, old) for old, new in own.items()}
        return replace(inner(self, argument), **{n: v(argument) if callable(v) else v for n, v in told.items()})

    if own:
        setattr(kind, hook, returned)


class OldAttribute:
    """An attribute under its old name: reading it warns, and returns the attribute at `path`."""

    def __init__(self, path: str) -> None:
        self._path, self._name = path, ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type) -> Any:
        warn(f"{owner.__name__}.{self._name} is now {owner.__name__}.{self._path}", 3)
        return attrgetter(self._path)(owner if instance is None else instance)


def current_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of an engine or a party that an earlier version may have written, by the keys of now."""
    return {STATE_KEYS.get(key, key): value for key, value in state.items()}


class OldModules(MetaPathFinder):
    """Finds modules that were moved under their old names; asked last, after all that is really there.

    `moved`: old module -> new one; `renamed`: old module -> its old names of classes and functions -> the new ones.
    """

    def __init__(self, moved: Mapping[str, str], renamed: Mapping[str, Mapping[str, str]]) -> None:
        self._moved, self._renamed = moved, renamed

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how to load the old name, None for any other module."""
        if fullname not in self._moved:
            return None
        loader = _NewModule(self._moved[fullname], self._renamed.get(fullname, {}))
        return ModuleSpec(fullname, loader, is_package=any(m.startswith(f"{fullname}.") for m in self._moved))


class _NewModule(Loader):
    """Fills a module with the names of the one that took its place."""

    def __init__(self, new: str, renamed: Mapping[str, str]) -> None:
        self._new, self._renamed = new, renamed

    def exec_module(self, module: ModuleType) -> None:
        """Import the new module, and warn."""
        warn(f"{module.__name__} is now {self._new}", 7)
        found = import_module(self._new)
        if not self._renamed and not hasattr(module, "__path__"):
            # The import system takes what stands here then; a package under a second name would load second copies.
            sys.modules[module.__name__] = found
            return
        shown = ("__all__", "__doc__")
        vars(module).update({n: v for n, v in vars(found).items() if not n.startswith("__") or n in shown})
        vars(module).update({old: getattr(found, name) for old, name in self._renamed.items()})
