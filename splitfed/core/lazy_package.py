"""Packages that import what they show on first use, so that `import splitfed` costs nothing."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

from splitfed.core.deprecation import warn


class LazyPackage(ModuleType):
    """A package whose names are imported on first use; its functions keep their names although modules bear the same.

    Importing splitfed.models.mlp makes the import system bind the module to `mlp`: its function is bound instead.
    """

    def __getattr__(self, name: str) -> Any:
        homes, old = vars(self)["_homes"], vars(self)["_old"]
        if name in old:
            warn(f"{self.__name__}.{name} is now {self.__name__}.{old[name]}", 3)
            name = old[name]
        if name not in homes:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{self.__name__}.{homes[name]}"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, ModuleType) and name in vars(self)["_homes"]:
            value = getattr(value, name)
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted(vars(self)["_homes"])


def make_lazy(package: str, homes: Mapping[str, str], old: Mapping[str, str] | None = None) -> None:
    """Let `package` import the names in `homes` (name -> module inside it) on first use.

    `old`: names of before -> the new ones; they warn.
    """
    module = sys.modules[package]
    vars(module).update(_homes=dict(homes), _old=dict(old or {}))
    module.__class__ = LazyPackage
