"""The code of a user's classes and functions, by which a run is known again.

A module that is imported counts by the SHA-256 of its source file, and of those of the modules that it imports. What
has no such file (of a script, a notebook or a shell, or of a file that was edited since) counts by its source there, or
by its instructions where that is gone, and so does all that it calls by name. Variables and closures are not looked at.
Code of Python, of this package and of installed ones does not count: their versions stand in environment.json.
"""

from __future__ import annotations

import ast
import inspect
import json
import linecache
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from splitfed.core import digests
from splitfed.core.code_kinds import installed

PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...))
"""Types of values that are told by their text."""


class UserCode:
    """Collects the code of the user's: files by their SHA-256, functions without one by themselves."""

    def __init__(self) -> None:
        self._texts: dict[str, set[bytes]] = defaultdict(set)
        # What was collected, with its lines; kept alive, so that no two have the same id.
        self._taken: dict[int, tuple[object, list[int]]] = {}

    def digests(self) -> dict[str, str]:
        """Return what was collected, by its place."""
        return {place: digests.of(b"\n".join(sorted(texts))) for place, texts in self._texts.items()}

    def take(self, thing: type | FunctionType) -> list[int]:
        """Collect the code of a function, or of a class and of those that it inherits from.

        Returns where it stands in its source file, by the lines on which its functions begin.
        """
        lines: list[int] = []
        for one in thing.__mro__ if isinstance(thing, type) else (thing,):
            if id(one) not in self._taken:
                # Noted before, as what it calls may call it.
                self._taken[id(one)] = one, []
                if not installed(one.__module__):
                    self._taken[id(one)] = one, self._take_one(one)
            lines += self._taken[id(one)][1]
        return lines

    def _take_one(self, one: type | FunctionType) -> list[int]:
        functions, file = list(_functions(one)), _file_of(one.__module__)
        own = [function for function in functions if function.__code__.co_filename == file]
        if file is not None and all(map(_is_current, own)):
            self._take_file(one.__module__)
            others = [function for function in functions if function not in own and function is not one]
            lines = [function.__code__.co_firstlineno for function in own]
            return lines + [line for function in others for line in self.take(function)]
        values = {name: repr(v) for name, v in vars(one).items() if isinstance(v, PLAIN) and name[:2] != "__"}
        self._texts[f"the code of {name_of(one)}"].add(json.dumps(values).encode())
        for function in functions:
            self._take_function(function)
        return []

    def _take_function(self, function: FunctionType) -> None:
        code = function.__code__
        text = _lines(code) if _is_current(function) else _instructions(code)
        self._texts[f"the code of {name_of(function)}"].add(text.encode("utf-8", "surrogatepass"))
        for name in {name for part in _nested(code) for name in part.co_names} & function.__globals__.keys():
            found = function.__globals__[name]
            if isinstance(found, (type, FunctionType)):
                self.take(found)
            elif isinstance(found, ModuleType):
                self._take_file(found.__name__)

    def _take_file(self, module: str) -> None:
        """Collect the source file of a module of the user's, and of all those that it imports."""
        file, place = _file_of(module), f"the source of {module}"
        if file is None or installed(module) or place in self._texts:
            return
        content = Path(file).read_bytes()
        self._texts[place].add(content)
        with suppress(SyntaxError, ValueError):  # of a file that was edited since
            for name in _imports(ast.parse(content), sys.modules[module].__package__ or ""):
                self._take_file(name)


def _imports(tree: ast.AST, package: str) -> Iterator[str]:
    """Yield the names of what a file of `package` imports, and of what may be modules in there; not in functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level else ""
            home = ".".join(part for part in (base, node.module) if part)
            yield from (home, *(f"{home}.{alias.name}" for alias in node.names))
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.expr)):
            yield from _imports(node, package)


def _functions(thing: Any) -> Iterator[FunctionType]:
    """Yield the functions that a class defines, those of properties too; of a function, itself."""
    for member in list(vars(thing).values()) if isinstance(thing, type) else [thing]:
        parts: tuple[Any, ...] = (member.fget, member.fset, member.fdel) if isinstance(member, property) else (member,)
        functions = (inspect.unwrap(getattr(part, "__func__", part)) for part in parts)
        yield from (function for function in functions if isinstance(function, FunctionType))


def _is_current(function: FunctionType) -> bool:
    """Return whether the text that a function was made from, a file's or a cell's, still has its code."""
    file = function.__code__.co_filename
    linecache.checkcache(file)
    return _instructions(function.__code__) in _compiled(file, "".join(linecache.getlines(file)))


def _lines(code: CodeType) -> str:
    """Return the lines that `code` was made from."""
    last = max(line for part in _nested(code) for _, _, line in part.co_lines() if line is not None)
    return "".join(linecache.getlines(code.co_filename)[code.co_firstlineno - 1 : last])


@lru_cache(maxsize=32)
def _compiled(file: str, text: str) -> frozenset[str]:
    with suppress(SyntaxError, ValueError):
        return frozenset(map(_instructions, _nested(compile(text, file, "exec", dont_inherit=True))))
    return frozenset()


def _nested(code: CodeType) -> Iterator[CodeType]:
    """Yield `code` and the code of everything defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


def _instructions(code: CodeType) -> str:
    """Write down what `code` does, wherever it stands: instructions, names and constants, without lines."""
    held = (_instructions(one) if isinstance(one, CodeType) else one for one in code.co_consts)
    constants = [sorted(map(repr, one)) if isinstance(one, frozenset) else repr(one) for one in held]
    return repr((code.co_code, code.co_names, code.co_varnames, constants))


def _file_of(module: str) -> str | None:
    """Return the source file of a module that was imported; None of a script, a notebook, a shell and other ones."""
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return file if module != "__main__" and file.endswith(".py") and Path(file).is_file() else None


def name_of(thing: Any) -> str:
    """Return module and name of a class or a function."""
    return f"{getattr(thing, '__module__', None)}.{getattr(thing, '__qualname__', type(thing).__qualname__)}"
