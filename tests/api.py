"""The public interface as text, a name a line: `python -m tests.api --write` writes it into tests/api.txt.

Names and signatures of the public modules, what is registered with its parameters (which a study writes as keys), the
commands with their options, and the keys of a study. Defaults are told where they are plain values.
"""

from __future__ import annotations

import argparse
import difflib
import enum
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import splitfed
from splitfed import cli_options
from splitfed.core.lazy_package import LazyPackage
from splitfed.registry import TABLES, load
from splitfed.study.config.schema import StudyConfig
from splitfed.study.config.values import EXTRA, parameters_of, tables_in

FILE = Path(__file__).parent / "api.txt"
PLAIN = (bool, int, float, str, type(None))
REGISTERED = {where for table in TABLES.values() for where in table.values()}


def default(value: Any) -> str:
    """Return a default as it is written, `...` for what has no short form that all versions share."""
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, (tuple, list)) and all(isinstance(one, PLAIN) for one in value):
        return repr(value)
    return repr(value) if isinstance(value, PLAIN) else "..."


def signature(function: Any, bound: bool) -> str:
    """Return the parameters of a function, without `self` where it is `bound`, and what it returns."""
    found = inspect.signature(function)
    given = list(found.parameters.values())[int(bound) :]
    # One spelling of all versions: annotations as they stand in the file, defaults as `default` writes them.
    shown = [p.replace(annotation=p.empty, default=p.empty) for p in given]
    words = []
    for before, p in zip(shown, given, strict=True):
        kind = "" if p.annotation is p.empty else f": {_annotation(p.annotation)}"
        words.append(str(before) + kind + ("" if p.default is p.empty else f" = {default(p.default)}"))
    for place, p in enumerate(given):
        if p.kind is p.KEYWORD_ONLY and not any(q.kind is q.VAR_POSITIONAL for q in given):
            words.insert(place, "*")
            break
    back = (
        "" if found.return_annotation in (found.empty, None, "None") else f" -> {_annotation(found.return_annotation)}"
    )
    return f"({', '.join(words)}){back}"


def _annotation(found: Any) -> str:
    return found if isinstance(found, str) else inspect.formatannotation(found)


def constructor(kind: type) -> str:
    """Return the parameters of a class of ours; nothing for one that is made as Python or torch has it."""
    if hasattr(kind, "_fields"):
        defaults = kind._field_defaults
        return f"({', '.join(n + (f' = {default(defaults[n])}' if n in defaults else '') for n in kind._fields)})"
    owner = next(c for c in kind.__mro__ if "__init__" in vars(c))
    if not owner.__module__.startswith("splitfed") or getattr(kind, "_is_protocol", False):
        return ""
    return signature(owner.__init__, bound=True)


def members(where: str, kind: type) -> Iterator[str]:
    """Yield the public members of a class that are ours, inherited ones too."""
    if issubclass(kind, enum.Enum):
        yield f"{where}: {', '.join(kind.__members__)}"
        return
    ours = [c for c in kind.__mro__ if c.__module__.startswith("splitfed")]
    fields = set(getattr(kind, "_fields", ())) | set(getattr(kind, "__dataclass_fields__", ()))
    for name in sorted({n for c in ours for n in vars(c) if not n.startswith("_")} - fields):
        found = inspect.getattr_static(kind, name)
        if isinstance(found, (classmethod, staticmethod)):
            yield f"{where}.{name}{signature(found.__func__, isinstance(found, classmethod))}"
        elif inspect.isfunction(found):
            yield f"{where}.{name}{signature(found, bound=True)}"
        else:
            yield f"{where}.{name}"


def public(module: ModuleType) -> list[str]:
    """Return the names that a module shows: those in `__all__`, else those it makes itself or imports on use."""
    if hasattr(module, "__all__"):
        return sorted(module.__all__)
    names = [n for n in dir(module) if not n.startswith("_")]
    if isinstance(module, LazyPackage):
        return names
    return [n for n in names if getattr(getattr(module, n), "__module__", None) == module.__name__]


def modules() -> Iterator[str]:
    """Yield the lines of the public modules: the package, what it shows of itself, and where the registry leads."""
    found = (getattr(splitfed, name) for name in splitfed.__all__)
    shown = {module.__name__ for module in found if isinstance(module, ModuleType)}
    shown |= {".".join(where.split(".")[:2]) for where in REGISTERED}
    for path in ["splitfed", *sorted(shown)]:
        module = importlib.import_module(path)
        for name in public(module):
            thing = getattr(module, name)
            if inspect.isclass(thing):
                yield f"{path}.{name}{constructor(thing)}"
                if f"{thing.__module__}:{thing.__qualname__}" not in REGISTERED:
                    yield from members(f"{path}.{name}", thing)
            elif inspect.isfunction(thing):
                yield f"{path}.{name}{signature(thing, bound=False)}"
            elif isinstance(thing, ModuleType) and callable(thing):
                yield f"{path}.{name}{signature(type(thing).__call__, bound=True)}"
            else:
                yield f"{path}.{name}"


def registered() -> Iterator[str]:
    """Yield what is registered, with the parameters that a study gives it."""
    for kind, table in TABLES.items():
        for name in sorted(table):
            found = load(kind, name)
            yield f"{kind} {name}{constructor(found) if inspect.isclass(found) else signature(found, bound=False)}"


def commands() -> Iterator[str]:
    """Yield the options of every command."""
    parser, found = cli_options.build_parser()
    for name, command in {"": parser, **found}.items():
        for action in command._actions:
            if not isinstance(action, (argparse._SubParsersAction, argparse._HelpAction)):
                said = "/".join(action.option_strings) or action.dest
                needs = " (required)" if action.required else f" = {default(action.default)}"
                yield f"{' '.join(filter(None, ('splitfed', name, said)))}{needs}"


def keys(table: type[Any] = StudyConfig, path: str = "") -> Iterator[str]:
    """Yield the keys of a study, those of its tables below them."""
    for name, one in parameters_of(table).items():
        if name == EXTRA:
            continue
        yield f"study key {path}{name}{' (required)' if one.required else f' = {default(one.default)}'}"
        if (inner := tables_in(one.hint)) is not None:
            yield from keys(inner[1], f"{path}{name}.")


def text() -> str:
    """Return the whole interface."""
    return "\n".join([*modules(), "", *registered(), "", *commands(), "", *keys()]) + "\n"


def difference(before: str, now: str) -> str:
    """Return what changed, a line a name, `-` before what was and `+` before what is; empty where nothing did."""
    lines = difflib.unified_diff(before.splitlines(), now.splitlines(), "tests/api.txt", "the code", lineterm="", n=0)
    return "\n".join(line for line in lines if not line.startswith("@@"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.api", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write tests/api.txt; without it, print the differences")
    if parser.parse_args().write:
        FILE.write_text(text(), "utf-8")
    else:
        print(difference(FILE.read_text("utf-8"), text()))
