"""Values from the tables of a study: by the parameters of what a table is for, their types and what these require.

The class is the schema: a table is read by the fields of the dataclass that it describes, at any depth, and each value
is held against its field's type and against what the field's metadata require of it (`require_count` and the like).
`table_of` is the way back. A function is read by its signature in the same way.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from splitfed.core.annealing import EXAMPLE, Annealing
from splitfed.core.argument_kinds import WORDS, describe, fits
from splitfed.core.errors import unknown
from splitfed.study.config.mistakes import Mistakes, short_repr

T = TypeVar("T")

LIMIT = 10_000
"""Runs that a grid may have, and values of a list; more are taken for a slip of the pen."""

TABLES = 1_000
"""Tables of a kind that a study may have."""

EXTRA = "extra"
"""Field of a table's class for keys that are none of its own: the parameters of the algorithm that it names."""

_COURSE = f"a course such as {EXAMPLE}"
_WORDS = {**WORDS, bool: "true or false", NoneType: "", object: "", Path: "text", Annealing: _COURSE}


@dataclass(frozen=True)
class Parameter:
    """One parameter of an algorithm: its type as written, its default where it has one, and what it must be."""

    name: str
    hint: Any
    default: Any
    check: Callable[[Any], None] | None = None

    @property
    def required(self) -> bool:
        """Whether a value must be given."""
        return self.default is inspect.Parameter.empty

    def takes(self, value: Any) -> bool:
        """Return whether `value`, as TOML gives it, is of the parameter's type."""
        top = (self.hint, *get_args(self.hint))
        choices = [option for one in top if get_origin(one) is Literal for option in get_args(one)]
        # `fits` leaves it to a function which names it takes.
        strange = isinstance(value, str) and choices and value not in choices and str not in top
        return not strange and (self.takes_course(value) or fits(value, self.hint))

    def takes_course(self, value: Any) -> bool:
        """Return whether `value` is the table of a course, where one may stand for the number."""
        return isinstance(value, Mapping) and holds_type(self.hint, Annealing)


def parameters_of(algorithm: Callable[..., Any], hidden: Collection[str] = ()) -> dict[str, Parameter]:
    """Return the parameters of a function or dataclass by name, without those that are `hidden`."""
    hints = get_type_hints(algorithm)
    checks = {one.name: one.metadata.get("check") for one in fields(algorithm)} if is_dataclass(algorithm) else {}
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {
        name: Parameter(name, hints.get(name, Any), p.default, checks.get(name))
        for name, p in inspect.signature(algorithm).parameters.items()
        if p.kind in named and name not in hidden
    }


def read_parameters(
    mistakes: Mistakes,
    where: str,
    allowed: Mapping[str, Parameter],
    given: Mapping[str, Any],
    *,
    keys: Sequence[str] = (),
    base: Path | None = None,
    lists: str = "",
) -> dict[str, Any] | None:
    """Return `given` with the defaults of the parameters `allowed`, as plain values; note what is wrong, then None.

    `keys`: what else may stand in the table, for the hint. `base`: the folder that relative paths start from. `lists`:
    what is said of a list in the place of one value.
    """
    full: dict[str, Any] = {}
    with mistakes.part() as own:
        for name in given:
            if name not in allowed:
                own.add(place(where, name), unknown("key", name, [*keys, *allowed]))
        for name, parameter in allowed.items():
            if name not in given:
                if parameter.required:
                    own.add(place(where, name), f"is missing; expected {describe_type(parameter.hint)}")
                elif _is_plain(parameter.default):
                    full[name] = plain(parameter.default)
                continue
            value = full[name] = given[name] if base is None else _absolute_path(given[name], parameter, base)
            if not parameter.takes(value):
                several = lists if isinstance(value, list) or lists.startswith(",") else ""
                expected = f"expected {describe_type(parameter.hint)}{several}"
                own.add(place(where, name), f"{short_repr(value)} is not allowed; {expected}")
            elif parameter.check is not None and not parameter.takes_course(value):
                with own.at(place(where, name)):
                    parameter.check(lists_to_tuples(value))
    return None if own else full


def read_table(mistakes: Mistakes, where: str, kind: type[T], given: Any) -> T | None:
    """Return the value of the dataclass `kind` that the table `given` describes, at any depth; None after a mistake.

    Keys that are none of its fields go into its field `EXTRA`, where it has one.
    """
    if not isinstance(given, Mapping):
        known = ", ".join(name for name in parameters_of(kind) if name != EXTRA)
        mistakes.add(where, f"{short_repr(given)} is not allowed; expected a table with {known}")
        return None
    allowed = parameters_of(kind)
    extra = {key: one for key, one in given.items() if key not in allowed} if allowed.pop(EXTRA, None) else {}
    inner = {name: found for name, p in allowed.items() if (found := tables_in(p.hint)) is not None}
    with mistakes.part() as own:
        rest = {key: one for key, one in given.items() if key not in extra and key not in inner}
        flat = {name: p for name, p in allowed.items() if name not in inner}
        values = read_parameters(own, where, flat, rest, keys=[*inner])
        nested: dict[str, Any] = {}
        for name, (form, part) in inner.items():
            if given.get(name) == [] and form != "named" and allowed[name].default != ():
                own.add(place(where, name), "[] is not allowed; expected one table or more")
            elif name in given:
                nested[name] = _read_nested(own, place(where, name), form, part, given[name])
            elif allowed[name].required:
                head = place(where, name)
                shown = f"{name} = ..." if where else (f"[[{head}]]" if form == "list" else f"[{head}]")
                own.add(head, f"is missing; add {shown}")
        if not own and values is not None:
            with own.blaming(where, allowed):
                typed = {key: _as_held(flat[key].hint, values[key]) for key in rest}
                return kind(**typed, **nested, **({EXTRA: extra} if extra else {}))
    return None


def _read_nested(mistakes: Mistakes, where: str, form: str, kind: type[Any], given: Any) -> Any:
    """Return the tables of `kind` that `given` holds: "one", several "named", a "list", or "either" one or a list."""
    if form == "one" or (form == "either" and not isinstance(given, list)):
        return read_table(mistakes, where, kind, given)
    if form == "named" and isinstance(given, Mapping):
        return {name: read_table(mistakes, f"{where}.{name}", kind, one) for name, one in given.items()}
    if form == "named" or not isinstance(given, (list, Mapping)):
        each = f"tables, each with {', '.join(parameters_of(kind))}"
        expected = f"a table of {each}" if form == "named" else f"a list of tables, [[{where}]]"
        mistakes.add(where, f"{short_repr(given)} is not allowed; expected {expected}")
        return None
    if isinstance(given, Mapping):
        mistakes.add(where, f"is one table; expected a list of them: write [[{where}]], or {where} = [{{...}}]")
        return None
    if len(given) > TABLES:
        mistakes.add(where, f"has {len(given)} entries; at most {TABLES} are allowed")
        return None
    return tuple(read_table(mistakes, f"{where}[{i}]", kind, one) for i, one in enumerate(given))


def tables_in(hint: Any) -> tuple[str, type[Any]] | None:
    """Return the form of the tables that stand for a parameter with this hint, and their class; None for a value.

    The form is "one" table, a "list", "either" of the two, or "named": a table of tables.
    """
    kinds = [one for one in _flatten_hint(hint) if isinstance(one, type) and is_dataclass(one)]
    if not kinds or issubclass(kinds[0], Annealing):
        return None
    origins = {get_origin(one) for one in _flatten_hint(hint)}
    form = "named" if Mapping in origins else "one" if tuple not in origins else "either" if len(kinds) > 1 else "list"
    return form, kinds[0]


def table_of(value: Any) -> dict[str, Any]:
    """Return the table of a study that means the dataclass `value`: every field but those that are None."""
    own: dict[str, Any] = {one.name: getattr(value, one.name) for one in fields(value)}
    extra = own.pop(EXTRA, {})
    return {key: plain(one) for key, one in {**own, **extra}.items() if one is not None}


def changed_fields(value: Any) -> dict[str, Any]:
    """Return the same without what has its default."""
    defaults = {one.name: one.default for one in fields(value) if one.default is not MISSING}
    return {key: one for key, one in table_of(value).items() if key not in defaults or one != plain(defaults[key])}


def describe_type(hint: Any) -> str:
    """Return the type `hint` in words, of what TOML can hold."""
    return describe(hint, _WORDS) or "another value"


def holds_type(hint: Any, kind: type) -> bool:
    """Return whether a parameter with this hint may be a `kind`."""
    return kind in _flatten_hint(hint)


def _as_held(hint: Any, value: Any) -> Any:
    """Return `value` as a field with this hint holds it: a list as a tuple where the hint says so."""
    return lists_to_tuples(value) if any(get_origin(one) is tuple for one in _flatten_hint(hint)) else value


def absolute_paths(table: Mapping[str, Any], allowed: Mapping[str, Parameter], base: Path) -> dict[str, Any]:
    """Return `table` with the paths among the parameters `allowed`, which start from `base`, as absolute ones."""
    return {key: _absolute_path(one, allowed[key], base) if key in allowed else one for key, one in table.items()}


def lists_to_tuples(value: Any) -> Any:
    """Return lists, which is all that TOML knows, and lists inside them, as tuples, which frozen values hold."""
    return tuple(map(lists_to_tuples, value)) if isinstance(value, list) else value


def plain(value: Any) -> Any:
    """Return `value` as TOML has it: tuples as lists, dataclasses as tables."""
    match value:
        case tuple() | list():
            return [plain(one) for one in value]
        case Mapping():
            return {key: plain(one) for key, one in value.items()}
    return table_of(value) if is_dataclass(value) else value


def place(where: str, *parts: str) -> str:
    """Return the place of a key below `where`: `defense[1].alpha`."""
    return ".".join(filter(None, (where, *parts)))


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return isinstance(value, (bool, int, float, str))


def _absolute_path(value: Any, parameter: Parameter, base: Path) -> Any:
    if not holds_type(parameter.hint, Path) or not isinstance(value, str):
        return value
    return str(Path(value) if value.startswith("~") else base / value)


def _flatten_hint(hint: Any) -> Iterator[Any]:
    yield hint
    for inner in get_args(hint):
        yield from _flatten_hint(inner)
