"""What varies among the runs of a study: lists, and in a search ranges and choices, in the place of values.

A grid has all points of the space that its lists make; a search draws points of its own. `{low = 0.1, high = 2.0,
log = true}` is a range of numbers, of whole ones where both ends are whole; `{choice = [...]}`
is one of several values or tables, which may hold ranges and choices themselves. Several tables of one kind, a list of
schedules, and a list that would span a grid are choices too. A parameter is called by its place in the study.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import nn

from splitfed.core.errors import InvalidInput, unknown
from splitfed.study.config.algorithm_tables import computation_parameters
from splitfed.study.config.lookup import StudyReader
from splitfed.study.config.mistakes import Mistakes, short_repr
from splitfed.study.config.piece_tables import is_one_piece, parameters_of_piece, plain_parameter, table_kind
from splitfed.study.config.values import LIMIT, Parameter, parameters_of, read_table

SEARCHED = ("model", "training", "topology", "method", "defense")
"""The tables of a study in which something may vary; the others are the same in every trial."""

KINDS = {"topology": "topologies", "method": "methods", "defense": "defenses", "schedule": "schedules"}
"""Table -> the kind of algorithm that its name means."""

DIGITS = 6
"""Significant digits of a number from a range: as many as labels show, so that a label says the number itself."""


def _check_end(value: float) -> None:
    if not math.isfinite(value) or abs(value) > 2**53:
        raise InvalidInput(f"{value} is not allowed; expected a number")


@dataclass(frozen=True)
class SearchRange:
    """Numbers from `low` to `high`, ends included; `step`: in steps from `low`, None for any number between.

    Raises `InvalidInput` that begins with the field that is wrong.
    """

    low: float = field(metadata={"check": _check_end})
    high: float = field(metadata={"check": _check_end})
    log: bool = False
    step: float | None = field(default=None, metadata={"check": _check_end})
    name: str = ""

    def __post_init__(self) -> None:
        """Refuse ends in the wrong order, a logarithm of no number, and steps that lead nowhere."""
        if self.low >= self.high:
            raise InvalidInput(f"high={self.high} is not allowed; expected a number above low = {self.low}")
        if self.log and self.low <= 0:
            raise InvalidInput(f"low={self.low} is not allowed; expected a number above 0, as log = true")
        if self.step is None:
            return
        if self.log:
            raise InvalidInput(f"step={self.step} is not allowed beside log = true")
        if self.step <= 0 or (self.whole and not isinstance(self.step, int)):
            kind = "a whole number of at least 1" if self.whole else "a number above 0"
            raise InvalidInput(f"step={self.step} is not allowed; expected {kind}")
        if (self.high - self.low) / self.step > LIMIT:
            raise InvalidInput(f"step={self.step} is not allowed; the range has more than {LIMIT} steps")

    @property
    def whole(self) -> bool:
        """Whether its numbers are whole ones."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    @property
    def ends(self) -> tuple[Any, ...]:
        """Its least and its greatest number."""
        return (self.low, self.high) if self.step is None else (self.values[0], self.values[-1])

    @property
    def values(self) -> tuple[Any, ...]:
        """All its numbers; none where they are not counted in steps."""
        step = 1 if self.step is None and self.whole else self.step
        if step is None:
            return ()
        count = math.floor((self.high - self.low) / step + 1e-9) + 1
        return tuple(self.value_of(self.low + i * step) for i in range(count))

    def value_of(self, drawn: float) -> Any:
        """Return the number that stands in the study for one that was drawn: rounded, and within the range."""
        return int(drawn) if self.whole else min(max(float(f"{drawn:.{DIGITS}g}"), self.low), self.high)


@dataclass(frozen=True)
class SearchChoice:
    """One of `options`, which may hold ranges and choices; `labels`: what each is called, all different."""

    name: str
    options: tuple[Any, ...]
    labels: tuple[Any, ...]

    @property
    def ends(self) -> tuple[int, ...]:
        """The number of every option."""
        return tuple(range(len(self.options)))


Dimension = SearchRange | SearchChoice
Assignment = dict[str, Any]
"""Name of a parameter -> its number, or which option it takes."""


def read_space(reader: StudyReader, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the study `raw` with lists, ranges and choices as objects; one in a table that does not vary is a mistake.

    The code that import paths name is asked what it takes.
    """
    tree: dict[str, Any] = {}
    for key, table in raw.items():
        if key not in SEARCHED:
            _refuse_dimensions(reader.mistakes, key, table)
            tree[key] = table
        elif key in KINDS and isinstance(table, list) and all(isinstance(one, Mapping) for one in table):
            options = [read_lists(reader, f"{key}[{i}]", KINDS[key], one, _read) for i, one in enumerate(table)]
            tree[key] = [_choice(key, options)] if len(options) > 1 else options
        elif key == "training" and isinstance(table, Mapping):
            tree[key] = {k: _read_training(reader, k, value) for k, value in table.items()}
        else:
            tree[key] = _read(reader.mistakes, key, table)
    return tree


def list_tables(reader: StudyReader, where: str, kind: str, table: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tables without lists that the lists in the `table` of an algorithm make, the first varying slowest."""
    tree = read_lists(reader, where, kind, table, lambda mistakes, where, value: value)
    if (count := count_points(tree)) > LIMIT:
        reader.mistakes.add(where, f"the lists make {count} combinations; at most {LIMIT} are allowed")
        return []
    return [assigned(tree, point) for point in list_points(tree)]


Reading = Callable[[Mistakes, str, Any], Any]
"""How a value is read in which no list spans anything: for ranges and choices, or as it is."""


def read_lists(reader: StudyReader, where: str, kind: str, table: Any, read: Reading) -> Any:
    """Return the table of an algorithm of `kind` with a choice for every list that stands for several values.

    All that is none of those lists is read by `read`.
    """
    if not isinstance(table, Mapping):
        return read(reader.mistakes, where, table)
    if "choice" in table and read is _read:
        return _read_choice(reader.mistakes, where, table, lambda at, one: read_lists(reader, at, kind, one, read))
    if isinstance(table.get("combine"), list):
        parts = enumerate(table["combine"])
        return {**table, "combine": [read_lists(reader, f"{where}.combine[{i}]", kind, one, read) for i, one in parts]}
    allowed = _parameters(reader, kind, table)
    return {
        key: _read_value(reader, f"{where}.{key}", allowed[key], value, read)
        if key in allowed
        else read(reader.mistakes, f"{where}.{key}", value)
        for key, value in _in_order(table, allowed, read)
    }


def _in_order(table: Mapping[str, Any], allowed: Mapping[str, Parameter], read: Reading) -> Iterable[tuple[str, Any]]:
    """Return keys and values of a table in the order in which they vary.

    In a grid that of the parameters, tables of pieces last; in a search that in which they are written.
    """
    if read is _read:
        return table.items()
    places = {key: (table_kind(p, table.get(key)) is not None, i) for i, (key, p) in enumerate(allowed.items())}
    return sorted(table.items(), key=lambda pair: places.get(pair[0], (False, -1)))


def _parameters(reader: StudyReader, kind: str, table: Mapping[str, Any]) -> Mapping[str, Parameter]:
    """Return the parameters of the algorithm that `table` names; none where it is not known, which is told later."""
    if kind == "computations":
        return computation_parameters()
    name, silent = table.get("name"), replace(reader, mistakes=Mistakes(""))
    found = silent.find("", kind, name) if isinstance(name, str) else None
    return {} if found is None else parameters_of(found)


def _read_value(reader: StudyReader, where: str, parameter: Parameter, value: Any, read: Reading) -> Any:
    """Return the value of a parameter, or the choice among those of a list that stands in its place."""
    form = table_kind(parameter, value)
    if form in ("segments", "heads") and isinstance(value, list):
        return [_read_piece(reader, f"{where}[{i}]", form, one, read) for i, one in enumerate(value)]
    if form in ("piece", "roles"):
        if isinstance(value, list) and value and all(isinstance(one, Mapping) for one in value):
            each = [_read_pieces(reader, f"{where}[{i}]", form, one, read) for i, one in enumerate(value)]
            return _choice(where, each) if len(each) > 1 else each[0]
        return _read_pieces(reader, where, form, value, read)
    return _read_list(reader, where, plain_parameter(parameter), value, read)


def _read_list(reader: StudyReader, where: str, parameter: Parameter, value: Any, read: Reading) -> Any:
    if isinstance(value, list) and len(value) > LIMIT:
        reader.mistakes.add(where, f"has {len(value)} entries; at most {LIMIT} are allowed")
        return value[0]
    if not isinstance(value, list) or not value or parameter.takes(value) or not all(map(parameter.takes, value)):
        return read(reader.mistakes, where, value)
    return _choice(where, value) if len(value) > 1 else value[0]


def _read_pieces(reader: StudyReader, where: str, form: str, value: Any, read: Reading) -> Any:
    if form == "roles" and isinstance(value, Mapping) and "choice" not in value and not is_one_piece(value):
        piece = Parameter("", nn.Module, None)
        return {role: _read_value(reader, f"{where}.{role}", piece, one, read) for role, one in value.items()}
    return _read_piece(reader, where, "piece", value, read)


def _read_piece(reader: StudyReader, where: str, form: str, table: Any, read: Reading) -> Any:
    if not isinstance(table, Mapping) or "choice" in table:
        return read(reader.mistakes, where, table)
    # What is wrong with its name is told by who reads the piece.
    silent = replace(reader, mistakes=Mistakes(""))
    allowed = parameters_of_piece(silent, where, form, table) or {}
    return {
        key: _read_list(reader, f"{where}.{key}", allowed[key], one, read)
        if key in allowed and ":" not in str(table.get("model"))
        else read(reader.mistakes, f"{where}.{key}", one)
        for key, one in _in_order(table, allowed, read)
    }


def dimensions(tree: Any) -> dict[str, tuple[Dimension, dict[str, int]]]:
    """Return name -> every range and choice in `tree`, with the options of choices around it that it stands in."""
    return {dimension.name: (dimension, around) for dimension, around in _walk(tree, {})}


def resolve(tree: Any, pick: Callable[[Dimension], Any]) -> Any:
    """Return `tree` with a value for each range and choice; `pick` says which number, or which option.

    Only those are asked for that are met: not what stands in an option that is not taken.
    """
    match tree:
        case SearchRange():
            return pick(tree)
        case SearchChoice():
            return resolve(tree.options[pick(tree)], pick)
        case Mapping():
            found = {key: resolve(value, pick) for key, value in tree.items()}
            return {key: value for key, value in found.items() if value is not None}  # None: see `_read_range`
        case list():
            return [resolve(value, pick) for value in tree]
    return tree


def assigned(tree: Any, assignment: Mapping[str, Any]) -> Any:
    """Return `tree` with the values of `assignment` for its ranges and choices."""
    return resolve(tree, lambda dimension: assignment[dimension.name])


def active(tree: Any, assignment: Mapping[str, Any]) -> Assignment:
    """Return those entries of `assignment` that decide something: not what stands in options that are not taken."""
    met: Assignment = {}

    def pick(dimension: Dimension) -> Any:
        met[dimension.name] = assignment[dimension.name]
        return met[dimension.name]

    resolve(tree, pick)
    return met


def count_points(tree: Any) -> int:
    """Return how many combinations there are; raises `InvalidInput` naming a range without steps."""
    match tree:
        case SearchRange():
            if not tree.values:
                raise InvalidInput(f"{tree.name} is a range without steps, which has no grid; add step = ...")
            return len(tree.values)
        case SearchChoice():
            return sum(map(count_points, tree.options))
        case Mapping():
            return math.prod(map(count_points, tree.values()))
        case list():
            return math.prod(map(count_points, tree))
    return 1


def list_points(tree: Any) -> list[Assignment]:
    """Return every combination, the first parameter varying slowest; the caller has counted them."""
    match tree:
        case SearchRange():
            return [{tree.name: value} for value in tree.values]
        case SearchChoice():
            return [{tree.name: i, **rest} for i, option in enumerate(tree.options) for rest in list_points(option)]
        case Mapping() | list():
            points: list[Assignment] = [{}]
            for inner in tree.values() if isinstance(tree, Mapping) else tree:
                rests = list_points(inner)
                points = [{**point, **rest} for point in points for rest in rests]
            return points
    return [{}]


def list_variations(tree: Any) -> list[Assignment]:
    """Return the first value of everything, then each end of every range and each option with all else at its first."""
    found = dimensions(tree)
    first = {name: dimension.ends[0] for name, (dimension, _) in found.items()}
    varied = [{**first, **around, name: end} for name, (dimension, around) in found.items() for end in dimension.ends]
    return list({json.dumps(active(tree, one)): one for one in (first, *varied)}.values())


def describe(tree: Any, assignment: Mapping[str, Any]) -> Assignment:
    """Return the entries that decide something by name, options by their labels."""
    known = dimensions(tree)
    told = {}
    for name, value in active(tree, assignment).items():
        dimension = known[name][0]
        told[name] = dimension.labels[value] if isinstance(dimension, SearchChoice) else value
    return told


def flatten_choices(value: Any) -> Iterator[Any]:
    """Yield all that may stand in the place of `value`: each entry of a list and of a choice, at any depth, and it."""
    if isinstance(value, list):
        for one in value:
            yield from flatten_choices(one)
        return
    yield value
    if isinstance(value, Mapping) and "choice" in value:
        yield from flatten_choices(value["choice"])


def _walk(tree: Any, around: dict[str, int]) -> Iterator[tuple[Dimension, dict[str, int]]]:
    match tree:
        case SearchRange():
            yield tree, around
        case SearchChoice():
            yield tree, around
            for i, option in enumerate(tree.options):
                yield from _walk(option, {**around, tree.name: i})
        case Mapping():
            for value in tree.values():
                yield from _walk(value, around)
        case list():
            for value in tree:
                yield from _walk(value, around)


def _read(mistakes: Mistakes, where: str, value: Any) -> Any:
    """Return `value` with every range and choice in it as an object."""
    if isinstance(value, list):
        return [_read(mistakes, f"{where}[{i}]", one) for i, one in enumerate(value)]
    if not isinstance(value, Mapping):
        return value
    if "choice" in value:
        return _read_choice(mistakes, where, value, partial(_read, mistakes))
    if _is_range(value):
        return _read_range(mistakes, where, value)
    return {key: _read(mistakes, f"{where}.{key}", one) for key, one in value.items()}


def _read_training(reader: StudyReader, key: str, value: Any) -> Any:
    where = f"training.{key}"
    if key != "schedule":
        return _read(reader.mistakes, where, value)
    if isinstance(value, list):
        options = [read_lists(reader, f"{where}[{i}]", KINDS[key], one, _read) for i, one in enumerate(value)]
        return _choice(where, options) if len(options) > 1 else options[0] if options else value
    return read_lists(reader, where, KINDS[key], value, _read)


def _read_choice(
    mistakes: Mistakes, where: str, table: Mapping[str, Any], read_option: Callable[[str, Any], Any]
) -> Any:
    for key in table:
        if key != "choice":
            mistakes.add(f"{where}.{key}", unknown("key", key, ["choice"]))
    options = table["choice"]
    if not isinstance(options, list) or not options:
        mistakes.add(f"{where}.choice", f"{short_repr(options)} is not allowed; expected a list of values")
        return None
    if len(options) > LIMIT:
        mistakes.add(f"{where}.choice", f"has {len(options)} entries; at most {LIMIT} are allowed")
        return None
    texts = [json.dumps(one, sort_keys=True, default=str) for one in options]
    for i, text in enumerate(texts):
        if text in texts[:i]:
            mistakes.add(f"{where}.choice", f"{short_repr(options[i])} is there twice; expected once")
    return _choice(where, [read_option(f"{where}[{i}]", one) for i, one in enumerate(options)])


def _choice(name: str, options: Sequence[Any]) -> SearchChoice:
    """Return the choice among `options`, called by themselves where they are plain values, by name where tables."""
    labels: list[Any] = []
    for i, option in enumerate(options):
        if isinstance(option, Mapping):
            parts = option.get("combine")
            named = "+".join(str(part.get("name")) for part in parts) if isinstance(parts, list) else None
            label: Any = named or str(option.get("name") or option.get("model") or f"option {i}")
        else:
            label = option if isinstance(option, (bool, int, float, str)) else json.dumps(option, default=str)
        # 1, 1.0 and true are the same to Python, and to a database.
        labels.append(f"{label} ({i})" if any(label == other for other in labels) else label)
    return SearchChoice(name, tuple(options), tuple(labels))


def _is_range(table: Mapping[str, Any]) -> bool:
    return any(key in table and not isinstance(table[key], (Mapping, list)) for key in ("low", "high"))


def _read_range(mistakes: Mistakes, where: str, table: Mapping[str, Any]) -> Any:
    found = read_table(mistakes, where, SearchRange, table)
    # Read on with any number that is there, so that one mistake hides no other.
    there = (table[key] for key in ("low", "high") if isinstance(table.get(key), (int, float)))
    return next(there, None) if found is None else replace(found, name=where)


def _refuse_dimensions(mistakes: Mistakes, where: str, value: Any) -> None:
    if isinstance(value, list):
        for i, one in enumerate(value):
            _refuse_dimensions(mistakes, f"{where}[{i}]", one)
    elif isinstance(value, Mapping) and where != "search":
        if "choice" in value or _is_range(value):
            mistakes.add(where, f"is the same in every trial; what varies stands in {', '.join(SEARCHED)}")
        for key, one in value.items():
            _refuse_dimensions(mistakes, f"{where}.{key}", one)
