"""What a search varies: ranges and choices that stand in the tables of a study in the place of values.

`{low = 0.1, high = 2.0, log = true}` is a range of numbers, of whole ones where both ends are whole; `{choice = [...]}`
is one of several values or tables, which may hold ranges and choices themselves. Several tables of one kind, a list of
schedules, and a list that would span a grid are choices too. A parameter is called by its place in the study.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from splitfed.core.errors import InvalidInput, unknown
from splitfed.registry import TABLES, load
from splitfed.study.config.mistakes import Mistakes, short_repr
from splitfed.study.config.parameters import parameters_of
from splitfed.study.config.schema import LIMIT

SEARCHED = ("model", "training", "topology", "method", "defense")
"""The tables of a study in which something may vary; the others are the same in every trial."""

KINDS = {"topology": "topologies", "method": "methods", "defense": "defenses", "schedule": "schedules"}
"""Table -> the kind of algorithm that its name means."""

DIGITS = 6
"""Significant digits of a number from a range: as many as labels show, so that a label says the number itself."""


@dataclass(frozen=True)
class SearchRange:
    """Numbers from `low` to `high`, ends included; `step`: in steps from `low`, None for any number between."""

    name: str
    low: float
    high: float
    log: bool = False
    step: float | None = None

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


def read_space(mistakes: Mistakes, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the study `raw` with ranges and choices as objects; one in a table that does not vary is a mistake."""
    tree: dict[str, Any] = {}
    for key, table in raw.items():
        if key not in SEARCHED:
            _refuse_dimensions(mistakes, key, table)
            tree[key] = table
        elif key in KINDS and isinstance(table, list) and all(isinstance(one, Mapping) for one in table):
            options = [_read_algorithm(mistakes, f"{key}[{i}]", key, one) for i, one in enumerate(table)]
            tree[key] = _choose_table(key, options)
        elif key == "training" and isinstance(table, Mapping):
            tree[key] = {k: _read_training(mistakes, k, value) for k, value in table.items()}
        else:
            tree[key] = _read(mistakes, key, table)
    return tree


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
        return _read_choice(mistakes, where, value)
    if _is_range(value):
        return _read_range(mistakes, where, value)
    return {key: _read(mistakes, f"{where}.{key}", one) for key, one in value.items()}


def _read_training(mistakes: Mistakes, key: str, value: Any) -> Any:
    where = f"training.{key}"
    if key != "schedule":
        return _read(mistakes, where, value)
    if isinstance(value, list):
        options = [_read_algorithm(mistakes, f"{where}[{i}]", key, one) for i, one in enumerate(value)]
        return _choice(where, options) if len(options) > 1 else options[0] if options else value
    return _read_algorithm(mistakes, where, key, value)


def _read_algorithm(mistakes: Mistakes, where: str, kind: str, table: Any) -> Any:
    """Return the table of an algorithm; a list in place of one value, elsewhere a grid, is a choice."""
    if not isinstance(table, Mapping) or "choice" in table:
        return _read(mistakes, where, table)
    if isinstance(table.get("combine"), list):
        parts = [
            _read_algorithm(mistakes, f"{where}.combine[{i}]", kind, one) for i, one in enumerate(table["combine"])
        ]
        return {**table, "combine": parts}
    return {
        key: _choice(f"{where}.{key}", value)
        if _spans_grid(kind, table, key, value)
        else _read(mistakes, f"{where}.{key}", value)
        for key, value in table.items()
    }


def _spans_grid(kind: str, table: Mapping[str, Any], key: str, value: Any) -> bool:
    """Return whether `value` is a list of values of a parameter that takes one; of own algorithms that is not known."""
    name = table.get("name")
    if not isinstance(value, list) or len(value) < 2 or not isinstance(name, str) or ":" in name:
        return False
    if name not in TABLES[KINDS[kind]]:
        return False
    parameter = parameters_of(load(KINDS[kind], name)).get(key)
    plain = all(isinstance(one, (bool, int, float, str, list)) for one in value)
    return parameter is not None and plain and not parameter.takes(value) and all(map(parameter.takes, value))


def _choose_table(key: str, options: Sequence[Any]) -> list[Any]:
    """Return the one table of a kind that a trial has, as a list, which studies have there."""
    return [_choice(key, options)] if len(options) > 1 else list(options)


def _read_choice(mistakes: Mistakes, where: str, table: Mapping[str, Any]) -> Any:
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
    return _choice(where, [_read(mistakes, f"{where}[{i}]", one) for i, one in enumerate(options)])


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
    with mistakes.part() as own:
        for key in table:
            if key not in ("low", "high", "log", "step"):
                own.add(f"{where}.{key}", unknown("key", key, ["low", "high", "log", "step"]))
        for key in ("low", "high", "step"):
            if key not in table:
                if key != "step":
                    own.add(f"{where}.{key}", "is missing; expected a number")
            elif isinstance(table[key], bool) or not isinstance(table[key], (int, float)) or not _finite(table[key]):
                own.add(f"{where}.{key}", f"{short_repr(table[key])} is not allowed; expected a number")
        if not isinstance(table.get("log", False), bool):
            own.add(f"{where}.log", f"{short_repr(table['log'])} is not allowed; expected true or false")
        if own:
            # Read on with any number that is there, so that one mistake hides no other.
            return next((table[k] for k in ("low", "high") if isinstance(table.get(k), (int, float))), None)
        found = SearchRange(where, table["low"], table["high"], table.get("log", False), table.get("step"))
        if found.low >= found.high:
            own.add(f"{where}.high", f"{found.high} is not allowed; expected a number above low = {found.low}")
        elif found.log and found.low <= 0:
            own.add(f"{where}.low", f"{found.low} is not allowed; expected a number above 0, as log = true")
        elif found.step is not None and found.log:
            own.add(f"{where}.step", "is not allowed beside log = true")
        elif found.step is not None and (found.step <= 0 or (found.whole and not isinstance(found.step, int))):
            kind = "a whole number of at least 1" if found.whole else "a number above 0"
            own.add(f"{where}.step", f"{found.step} is not allowed; expected {kind}")
        elif found.step is not None and (found.high - found.low) / found.step > LIMIT:
            own.add(f"{where}.step", f"{found.step} is not allowed; the range has more than {LIMIT} steps")
        return found.low if own else found


def _finite(value: float) -> bool:
    return math.isfinite(value) and abs(value) <= 2**53


def _refuse_dimensions(mistakes: Mistakes, where: str, value: Any) -> None:
    if isinstance(value, list):
        for i, one in enumerate(value):
            _refuse_dimensions(mistakes, f"{where}[{i}]", one)
    elif isinstance(value, Mapping) and where != "search":
        if "choice" in value or _is_range(value):
            mistakes.add(where, f"is the same in every trial; what varies stands in {', '.join(SEARCHED)}")
        for key, one in value.items():
            _refuse_dimensions(mistakes, f"{where}.{key}", one)
