"""The engine that runs are made with."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec

from splitfed.engines.engine import Engine
from splitfed.engines.local import LocalEngine

Arguments = ParamSpec("Arguments")


def _as_contract(made_by: Callable[Arguments, Engine]) -> Callable[Arguments, Engine]:
    return made_by


make_engine = _as_contract(LocalEngine)
"""Function that makes a `LocalEngine` from its arguments; use the result only through the contract `Engine`."""
