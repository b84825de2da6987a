"""What Python code holds and names: functions, classes, globals, environment variables, and the names in compiled code.

Code of installed packages is told apart from the user's: it is taken to keep no state of a model.
"""

from __future__ import annotations

import dis
import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from types import CellType, CodeType
from typing import Any

from splitfed.core.object_kinds import AnyKind
from splitfed.core.plain_values import Held, Key, set_attributes

_PLACES = frozenset(("site-packages", "dist-packages"))
_INSTALLED: dict[str, bool] = {"splitfed": True, "torch": True, "__main__": False}


def installed(module: str) -> bool:
    """Return whether `module` belongs to Python, to an installed package, or to this one."""
    top = module.partition(".")[0]
    if (known := _INSTALLED.get(top)) is not None:
        return known
    found = sys.modules.get(top)
    file = getattr(found, "__file__", None) or next(iter(getattr(found, "__path__", ())), "")
    stands = top in sys.stdlib_module_names or not _PLACES.isdisjoint(file.replace("\\", "/").split("/"))
    if found is not None:
        _INSTALLED[top] = stands
    return stands


def is_installed(thing: Any) -> bool:
    """Return whether a class or function belongs to an installed package, and not to the user."""
    return installed(getattr(thing, "__module__", None) or "")


def nested_code(code: CodeType) -> Iterator[CodeType]:
    """Yield `code`, and that of all functions and classes that are written within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from nested_code(constant)


@lru_cache(maxsize=4096)
def names_mentioned(code: CodeType) -> frozenset[str]:
    """Return the globals and attributes that `code` names, and the texts in it that may name one."""
    found: set[str] = set()
    for one in nested_code(code):
        found.update(one.co_names)
        found.update(text for text in one.co_consts if isinstance(text, str) and text.isidentifier())
    return frozenset(found)


@lru_cache(maxsize=4096)
def names_in(code: CodeType, *instructions: str) -> frozenset[str]:
    """Return the names that these `instructions` of `code` take, as LOAD_GLOBAL does."""
    steps = (step for one in nested_code(code) for step in dis.get_instructions(one))
    return frozenset(step.argval for step in steps if step.opname in instructions)


def is_data(name: str, value: Any) -> bool:
    """Return whether `value`, which a class holds under `name`, is no method, descriptor or class."""
    described = hasattr(type(value), "__get__") or isinstance(value, type)
    return not described and not (name.startswith("__") and name.endswith("__")) and not name.startswith("_abc_")


class NamesKind(AnyKind):
    """A class, or the globals of a module, of which some names are looked up; `set_name`, `remove` change one."""

    def __init__(
        self,
        name: str,
        role: str,
        table: Callable[[Any], Mapping[str, Any]],
        set_name: Callable[[Any, str, Any], None],
        remove: Callable[[Any, str], None],
    ) -> None:
        self.name, self.role = name, role
        self.table, self._set, self.remove = table, set_name, remove

    def put_back(self, value: Any, held: Held, data: Any) -> None:
        """Set what was there."""
        for key, one in held.items():
            if self.table(value).get(key.name, self) is not one:
                self._set(value, key.name, one)


class _FunctionKind(AnyKind):
    """A function: its code, defaults, the variables of its closure, and attributes."""

    name = "function"

    def data(self, value: Any) -> Any:
        return value.__code__

    def held(self, value: Any) -> Held:
        code = value.__code__
        found: Held = {Key("attribute", name): one for name, one in vars(value).items()}
        positional = code.co_varnames[: code.co_argcount]
        defaults = value.__defaults__ or ()
        # Code may have hung more of them on it than it has arguments.
        spare = range(max(0, len(defaults) - len(positional)))
        names = (*spare, *positional[max(0, len(positional) - len(defaults)) :])
        named = dict(zip(names, defaults, strict=True))
        found |= {Key("default", name): one for name, one in {**named, **(value.__kwdefaults__ or {})}.items()}
        for name, cell in zip(code.co_freevars, value.__closure__ or (), strict=True):
            if is_filled(cell):
                found[Key("variable", name)] = cell.cell_contents
        return found

    def put_back(self, value: Any, held: Held, data: Any) -> None:
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            if (key := Key("variable", name)) in held:
                cell.cell_contents = held[key]
        set_attributes(vars(value), {key.name: one for key, one in held.items() if key.role == "attribute"})


def is_filled(cell: CellType) -> bool:
    """Return whether the variable in `cell` has a value yet."""
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


class _EnvironmentKind(AnyKind):
    """The environment variables of the process."""

    name = "environment"

    def __init__(self) -> None:
        self._read: tuple[Any, Held] = None, {}

    def held(self, value: Any) -> Held:
        """Return them; read anew where they are others than the last time."""
        table = self.mark(value)
        if table is None or table != self._read[0]:
            self._read = table, {Key("environment variable", name): text for name, text in value.items()}
        return self._read[1]

    def mark(self, value: Any) -> Any:
        """Return a copy of them as the system has them, which costs less to compare."""
        table = getattr(value, "_data", None)
        return None if table is None else dict(table)

    def turn_back(self, value: Any, mark: Any) -> bool:
        """Return whether they are the same."""
        return bool(value._data == mark)

    def put_back(self, value: Any, held: Held, data: Any) -> None:
        """Set and delete those that are others now."""
        wanted = {key.name: text for key, text in held.items()}
        for name in [n for n in value if n not in wanted]:
            del value[name]
        value.update({n: text for n, text in wanted.items() if value.get(n) != text})


CLASS = NamesKind("class", "attribute", vars, type.__setattr__, type.__delattr__)
GLOBALS = NamesKind("globals", "global", lambda table: table, operator.setitem, operator.delitem)
FUNCTION = _FunctionKind()
ENVIRONMENT = _EnvironmentKind()
