"""Long tables of cases: some in every run of the tests, all of them with the exhaustive ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def thin(cases: Iterable[Any], every: int) -> list[Any]:
    """Return `cases` for a parametrized test, of which all but each `every`-th are marked as exhaustive.

    A case is the value of one argument, or a tuple with that of each, or what `pytest.param` has made.
    """
    return [case if number % every == 0 else _exhaustive(case) for number, case in enumerate(cases)]


def _exhaustive(case: Any) -> Any:
    if hasattr(case, "marks"):
        return pytest.param(*case.values, marks=(*case.marks, pytest.mark.exhaustive), id=case.id)
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.exhaustive)
