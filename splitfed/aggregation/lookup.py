"""Conversion of the settings `aggregation` and `secure`, names and tables as TOML gives them, into values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache
from typing import Any, Literal

from splitfed.aggregation.base import AggregationRule
from splitfed.core.errors import InvalidInput, unknown
from splitfed.registry import EXTENSIONS, load, resolve
from splitfed.secure_sum.base import SecureSumPlan


def aggregation_of(given: object, find: Callable[[str, str], Any] = load) -> AggregationRule:
    """Return the aggregation rule of this name, or the one that a table with a name and parameters describes.

    `find(kind, name)` resolves a name, as `registry.load` does. Raises `InvalidInput` for anything else.
    """
    if isinstance(given, AggregationRule):
        return given
    table = named_table("aggregation", given, "or a rule")
    kind: type[AggregationRule] = find("aggregation", table["name"])
    return kind(**parameters_of_table(f"parameter of aggregation rule {table['name']!r}", kind, table, "name"))


def secure_of(given: object) -> SecureSumPlan | Literal[False]:
    """Return the secure sum that `given` describes; False for none.

    `given`: a plan, true (pairwise masks) or false, a name ("masks", "ckks"), or a table of a plan's parameters, whose
    `name` gives the kind (default "masks"). Raises `InvalidInput` for anything else.
    """
    if isinstance(given, SecureSumPlan) or given is False:
        return given
    kinds = EXTENSIONS["secure_sums"]
    table = {"name": "masks" if given is True else given} if isinstance(given, (str, bool)) else given
    if not isinstance(table, Mapping) or table.get("name", "masks") not in kinds:
        names = ", ".join(map(repr, kinds))
        raise InvalidInput(
            f"secure={given!r} is not allowed; expected true, false, {names}, a table with such a name, or a "
            "SecureSumPlan"
        )
    kind: type[SecureSumPlan] = resolve(kinds[table.get("name", "masks")])
    return kind(**parameters_of_table("parameter of secure", kind, table, "name"))


@cache
def kinds_of_sums() -> tuple[frozenset[str], frozenset[str]]:
    """Return the message kinds of all secure sums as two sets: `sums` and `overhead` of `SecureSumPlan`."""
    plans: list[type[SecureSumPlan]] = [resolve(target) for target in EXTENSIONS["secure_sums"].values()]
    sums, overhead = ([getattr(plan, which) for plan in plans] for which in ("sums", "overhead"))
    return frozenset().union(*sums), frozenset().union(*overhead)


def named_table(what: str, given: object, others: str) -> Mapping[str, Any]:
    """Return `given`, a name or a table with the key `name`, as a table; raise `InvalidInput` for anything else."""
    table = {"name": given} if isinstance(given, str) else given
    if not isinstance(table, Mapping) or not isinstance(table.get("name"), str):
        raise InvalidInput(
            f"{what}={given!r} is not allowed; expected a name, a table with a name and parameters, {others}"
        )
    return table


def parameters_of_table(what: str, kind: type[Any], table: Mapping[str, Any], *besides: str) -> dict[str, Any]:
    """Return the parameters of `kind` in `table`; raise `InvalidInput` for keys other than these and `besides`."""
    allowed = [field.name for field in fields(kind)]
    for name in table:
        if name not in (*allowed, *besides):
            raise unknown(what, name, allowed)
    return {name: value for name, value in table.items() if name in allowed}
