"""Packages that import what they show on first use, so that `import splitfed` costs nothing.

What a package shows is written once, in the block of its `__init__.py` that type checkers read:

    if TYPE_CHECKING:
        from splitfed.models.mlp import mlp as mlp

    make_lazy(__name__)
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from inspect import getsource
from types import FunctionType, ModuleType
from typing import Any

from splitfed.core.argument_kinds import guarded

Home = tuple[str, str]
"""What stands behind `from` and behind `import`: a module or package, and a name or module in it."""


class LazyPackage(ModuleType):
    """A package whose names are imported on first use; its functions keep their names although modules bear the same.

    Importing splitfed.models.mlp makes the import system bind the module to `mlp`: its function is bound instead. What
    is shown of a function or a class is `guarded`.
    """

    def __getattr__(self, name: str) -> Any:
        homes = vars(self)["_homes"]
        if name not in homes:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        found = self._load(*homes[name])
        # Found once, it is found without this function from now on.
        super().__setattr__(name, found)
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        home = vars(self)["_homes"].get(name)
        if isinstance(value, ModuleType) and home is not None and home[0] == value.__name__:
            value = self._load(*home)
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted(vars(self)["_homes"])

    def _load(self, module: str, name: str) -> Any:
        found = None if module == self.__name__ else import_module(module)
        if found is None or not hasattr(found, name):
            return import_module(f"{module}.{name}")
        return show(self.__name__, getattr(found, name))


def show(package: str, found: Any) -> Any:
    """Return what a `package` shows users of what it has `found`: functions and constructors have guarded arguments.

    Not those of protocols, nor of classes with `_made_each_step`, which parties construct and users do not.
    """
    if isinstance(found, FunctionType):
        return guarded(found, package)
    unguarded = any(getattr(found, mark, False) for mark in ("_is_protocol", "_made_each_step"))
    own = vars(found).get("__init__") if isinstance(found, type) and not unguarded else None
    if isinstance(own, FunctionType) and not hasattr(own, "__wrapped__"):
        setattr(found, "__init__", guarded(own))  # noqa: B010  the type checker takes no assignment to a constructor
    return found


def make_lazy(package: str, others: Mapping[str, Home] | None = None) -> None:
    """Let `package` import on first use what its block for type checkers imports, and `others` by name."""
    module = sys.modules[package]
    homes = {**dict(_imports(getsource(module))), **(others or {})}
    vars(module).update(_homes=homes, __all__=sorted(homes))
    module.__class__ = LazyPackage


def _imports(source: str) -> Iterator[tuple[str, Home]]:
    """Yield the names that `source` imports under `if TYPE_CHECKING`, with their homes."""
    blocks = (block for block in ast.parse(source).body if isinstance(block, ast.If))
    for block in blocks:
        if ast.unparse(block.test) != "TYPE_CHECKING":
            continue
        for line in block.body:
            if isinstance(line, ast.ImportFrom) and line.module is not None:
                yield from ((alias.asname or alias.name, (line.module, alias.name)) for alias in line.names)
