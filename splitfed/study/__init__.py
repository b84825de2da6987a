"""Studies: a grid of runs described by one TOML file, checked as a whole, resumable, ending in one report.

The package is what `splitfed.study(...)` calls: a study built in Python from the tables that a file would have.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _StudyPackage(ModuleType):
    """A package that can be called: importing one of its modules would hide a function of its name."""

    def __call__(self, name: str = "study", **tables: Any) -> Any:
        """Return what `splitfed.study.run.python_study.study` makes of these tables."""
        return import_module(f"{__name__}.run.python_study").study(name, **tables)


sys.modules[__name__].__class__ = _StudyPackage
