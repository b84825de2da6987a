"""How users would name what has changed in or around their model: "attribute 'steps' of 'block' (0 -> 1)"."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from splitfed.core.plain_values import Key
from splitfed.core.reachable import Change, Location, Records

_NAMED = frozenset(
    ("attribute", "weight", "buffer", "submodule", "global", "variable", "default", "environment variable")
)
_LONGEST = 40
_ABSENT = object()


def describe_changes(changes: Iterable[Change], before: Records, after: Records) -> Iterator[str]:
    """Yield each change once, by the name of the attribute, global or variable that leads to it, with both values."""
    for name, place, key in _once_each(changes, before):
        yield f"{name} ({_difference(place, key, before, after)})"


def name_changes(changes: Iterable[Change], records: Records) -> Iterator[str]:
    """Yield what `describe_changes` does without the values, of which some may be of rows."""
    for name, _, _ in _once_each(changes, records):
        yield name


def _once_each(changes: Iterable[Change], records: Records) -> Iterator[tuple[str, Location, Key | None]]:
    told: set[str] = set()
    for change in changes:
        place, key = _named(change.place, change.key)
        name = _name(place, key, records)
        if name not in told:
            told.add(name)
            yield name, place, key


def describe_place(place: Location, records: Records) -> str:
    """Return the attribute, global or variable that leads to `place`, in words."""
    return _name(*_named(place, None), records)


def _named(place: Location, key: Key | None) -> tuple[Location, Key | None]:
    """Return the nearest place, and key there, that has a name in the user's code and leads to `key` of `place`."""
    while key is None or key.role not in _NAMED:
        if place.parent is None or place.key is None:
            break
        place, key = place.parent, place.key
    return place, key


def _difference(place: Location, key: Key | None, before: Records, after: Records) -> str:
    values = []
    for records in (before, after):
        held = records[place].contents if place in records else {}
        values.append(held.get(key, _ABSENT) if key is not None else _ABSENT)
    if values[0] is _ABSENT:
        return "new"
    if values[1] is _ABSENT:
        return "removed"
    told = [_short(_render(value, records)) for value, records in zip(values, (before, after), strict=True)]
    return " -> ".join(told) if told[0] != told[1] else "changed"


def _name(place: Location, key: Key | None, records: Records) -> str:
    if key is None:
        return "model"
    if key.role == "environment variable":
        return f"environment variable {key.name!r}"
    if key.role == "global":
        return f"global {key.name!r}"
    words = {"variable": "variable", "default": "default of the argument"}.get(key.role, key.role)
    return f"{words} {key.name!r} {_owner(place, records)}"


def _owner(place: Location, records: Records) -> str:
    if place.parent is None:
        return "of the model"
    record = records.get(place)
    kind = record.kind.name if record is not None else ""
    if kind == "class":
        assert record is not None
        return f"of class {record.value.__name__}"
    if kind == "function":
        assert record is not None
        return f"of function {record.value.__name__!r}"
    path = place.path()
    return f"of global {path[1].name!r}" if path[0].role == "globals" and len(path) == 2 else f"of {_dotted(path)!r}"


def _dotted(path: tuple[Key, ...]) -> str:
    text, before = "", ""
    for role, name in path:
        before, holder = role, before
        # The numbers of hooks tell nobody anything.
        if role in ("globals", "environment") or holder == "hooks":
            continue
        if role == "hooks":
            text += f".{name.strip('_')}"
        elif role == "item":
            text += f"[{name!r}]"
        else:
            text += f".{name.__name__ if isinstance(name, type) else name}"
    return text.removeprefix(".")


def _render(value: Any, records: Records, depth: int = 3) -> str:
    if not isinstance(value, Location):
        return repr(value) if not isinstance(value, type) else value.__name__
    record = records[value]
    if isinstance(record.value, Tensor) or depth == 0:
        return "..."
    kind, data = record.kind.name, record.data
    if kind == "array":
        return str(data.tolist() if hasattr(data, "tolist") else data)
    if kind in ("iterator",):
        return repr(data)
    if data is not None and record.kind.contains:
        return repr(list(data) if isinstance(data, tuple) else data)
    inner = [(k.name, _render(v, records, depth - 1)) for k, v in record.contents.items() if k.role == "item"]
    if kind == "dict":
        return "{" + ", ".join(f"{k!r}: {v}" for k, v in inner) + "}"
    if record.kind.contains:
        brackets = {"tuple": "()", "set": "{}"}.get(kind, "[]")
        return brackets[0] + ", ".join(v for _, v in inner) + brackets[1]
    return f"{type(record.value).__name__}(...)"


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
