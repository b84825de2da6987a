"""What `aggregation` and `secure` mean: names and tables, as TOML gives them, become values."""

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
    """Return the aggregation rule called so, or the one that a table with a name and parameters describes.

    `find`: what a name means among a kind, as `registry.load`.
    """
    if isinstance(given, AggregationRule):
        return given
    table = named_table("aggregation", given, "or a rule")
    kind: type[AggregationRule] = find("aggregation", table["name"])
    return kind(**parameters_of_table(f"parameter of aggregation rule {table['name']!r}", kind, table, "name"))


def secure_of(given: object) -> SecureSumPlan | Literal[False]:
    """Return the secure sum that is meant; False for none.

    `given`: a plan, true (by masks) or false, a name ("masks", "ckks"), or a table of a plan's parameters, in which
    `name` says which kind (default "masks"). Raises `InvalidInput` for anything else.
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
    """Return the kinds of messages of all secure sums: `sums` and `overhead` of `SecureSumPlan`."""
    plans: list[type[SecureSumPlan]] = [resolve(target) for target in EXTENSIONS["secure_sums"].values()]
    sums, overhead = ([getattr(plan, which) for plan in plans] for which in ("sums", "overhead"))
    return frozenset().union(*sums), frozenset().union(*overhead)


def named_table(what: str, given: object, others: str) -> Mapping[str, Any]:
    """Return what is `given` for `what`, a name or a table with one, as a table; refuse anything else."""
    table = {"name": given} if isinstance(given, str) else given
    if not isinstance(table, Mapping) or not isinstance(table.get("name"), str):
        raise InvalidInput(
            f"{what}={given!r} is not allowed; expected a name, a table with a name and parameters, {others}"
        )
    return table


def parameters_of_table(what: str, kind: type[Any], table: Mapping[str, Any], *besides: str) -> dict[str, Any]:
    """Return the parameters of `kind` that `table` gives; refuse others that are not among `besides` either."""
    allowed = [field.name for field in fields(kind)]
    for name in table:
        if name not in (*allowed, *besides):
            raise unknown(what, name, allowed)
    return {name: value for name, value in table.items() if name in allowed}
