"""Packages that import what they show on first use, so that `import splitfed` costs nothing."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from types import FunctionType, ModuleType
from typing import Any

from splitfed.core.argument_kinds import guarded


class LazyPackage(ModuleType):
    """A package whose names are imported on first use; its functions keep their names although modules bear the same.

    Importing splitfed.models.mlp makes the import system bind the module to `mlp`: its function is bound instead. What
    is shown of a function is `guarded`.
    """

    def __getattr__(self, name: str) -> Any:
        homes = vars(self)["_homes"]
        if name not in homes:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        found = show(self.__name__, getattr(import_module(f"{self.__name__}.{homes[name]}"), name))
        # Found once, it is found without this function from now on.
        super().__setattr__(name, found)
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, ModuleType) and name in vars(self)["_homes"]:
            value = show(self.__name__, getattr(value, name))
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted(vars(self)["_homes"])


def show(package: str, found: Any) -> Any:
    """Return what a `package` shows users in place of what it has `found`: a function with its arguments guarded."""
    return guarded(found, package) if isinstance(found, FunctionType) else found


def make_lazy(package: str, homes: Mapping[str, str]) -> None:
    """Let `package` import the names in `homes` (name -> module inside it) on first use."""
    module = sys.modules[package]
    vars(module).update(_homes=dict(homes))
    module.__class__ = LazyPackage
