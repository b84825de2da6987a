"""Mistakes of a study, gathered so that the user sees all of them at once, one line each."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from splitfed.core.errors import InvalidInput

_STEP = re.compile(r"([^.\[\]]+)|\[(\d+)\]")

WIDEST = 200
"""Characters of a place that are shown."""

SHOWN = 20
"""Mistakes that are shown; of more, only the number."""

MANY = 100
"""Mistakes beyond those after which to look for more, where that takes long, is given up."""


class InvalidStudy(InvalidInput):
    """One or more mistakes in a study; `lines` holds one a mistake, `more` how many are left out, the text is all."""

    def __init__(self, lines: list[str], more: int = 0, counted: bool = True) -> None:
        rest = [f"and {'' if counted else 'at least '}{more} more"] if more else []
        super().__init__("\n".join([*lines, *rest]))
        self.lines = tuple(lines)
        self.more, self.counted = more, counted

    def __str__(self) -> str:
        """All lines."""
        return Exception.__str__(self)


@contextmanager
def in_file_order(raw: Mapping[str, Any]) -> Iterator[None]:
    """Put the lines of an `InvalidStudy` that is raised inside the block into the order of the places in `raw`."""
    try:
        yield
    except InvalidStudy as error:
        lines = sorted(error.lines, key=lambda line: _position(raw, place_of(line)))
        raise InvalidStudy(lines, error.more, error.counted) from error.__cause__


def place_of(line: str) -> str:
    """Return the place in the study that a line of an `InvalidStudy` is about."""
    return line.split(": ")[1] if ": " in line else ""


def remove_key(raw: dict[str, Any], where: str) -> None:
    """Remove the key at the path `where` from the tables `raw`, if it is there."""
    inner: Any = raw
    *outer, (last, _) = _STEP.findall(where) or [("", "")]
    for key, index in outer:
        if isinstance(inner, list) and index and int(index) < len(inner):
            inner = inner[int(index)]
        else:
            inner = inner.get(key) if isinstance(inner, Mapping) else None
    if isinstance(inner, dict):
        inner.pop(last, None)


def _position(raw: Any, where: str) -> list[int]:
    """Return which entry each step of the path `where` is in the tables `raw`; behind all where it is none of them."""
    found, inner = [], raw
    for key, index in _STEP.findall(where):
        entries: list[Any] = list(inner) if isinstance(inner, Mapping) else []
        if isinstance(inner, list) and index:
            place = int(index)
        else:
            place = entries.index(key) if key in entries else len(entries)
        found.append(place)
        if isinstance(inner, (Mapping, list)):
            inner = list(inner.values() if isinstance(inner, Mapping) else inner)[place : place + 1]
            inner = inner[0] if inner else None
    return found


class Mistakes:
    """Collects mistakes of the study called `source`; the same line is kept once."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._lines: dict[str, None] = {}
        # Place and text, or kind, of mistakes shown and of those left out: to word a mistake costs time.
        self._told: set[tuple[str, str]] = set()
        self._more: set[tuple[str, str]] = set()

    def add(self, where: str, text: object) -> None:
        """Add one mistake to the list: `text` says what is wrong, `where` is its path, such as `defense[1].alpha`.

        The same mistake twice is listed once; of very many only the first are, and the rest counted.
        """
        # What an error was made of, not its text.
        key = (where, repr(text.args) if isinstance(text, Exception) else str(text))
        if len(self._lines) >= SHOWN:
            self._more |= {key} - self._told
            return
        self._told.add(key)
        # A key may hold anything, line breaks too.
        where = "".join(c if c.isprintable() and c != " " else f"\\x{ord(c):02x}" for c in where[:WIDEST])
        self._lines[f"{self._source}: {where or 'study'}: {' '.join(str(text).split())}"] = None

    def at(self, where: str) -> Place:
        """Note an `InvalidInput` raised inside the block as a mistake at `where`, and go on after it."""
        return Place(self, where)

    def blaming(self, where: str, parameters: Collection[str]) -> Place:
        """Do as `at`, at the first of the `parameters` of the table `where` that the error names."""
        return Place(self, where, tuple(parameters))

    @contextmanager
    def part(self) -> Iterator[Mistakes]:
        """Yield an empty collection for one part of the study; its mistakes are added to this one after the block."""
        own = Mistakes(self._source)
        yield own
        self.take(own)

    def take(self, other: Mistakes) -> None:
        """Add the mistakes that were noted elsewhere in the same study."""
        self.take_lines(other._lines)
        self._told |= other._told
        self._more |= other._more - self._told

    def take_lines(self, lines: Iterable[str], more: int = 0) -> None:
        """Add mistakes that were worded elsewhere, each a whole line, and as many as are left out of them."""
        for line in lines:
            if len(self._lines) < SHOWN:
                self._lines[line] = None
            elif line not in self._lines:
                self._more.add(("", line))
        self._more |= {("", f"left out {i}") for i in range(more)}

    def __bool__(self) -> bool:
        return bool(self._lines)

    @property
    def first(self) -> str:
        """The first of the mistakes, there being one, without the name of the study."""
        return next(iter(self._lines)).removeprefix(f"{self._source}: ")

    def stop(self) -> None:
        """Raise `InvalidStudy` if there was any mistake."""
        if self._lines:
            raise InvalidStudy(list(self._lines), len(self._more))

    def stop_if_many(self) -> None:
        """Raise `InvalidStudy` if there were so many mistakes that to look for the others would take long."""
        if len(self._more) >= MANY:
            raise InvalidStudy(list(self._lines), len(self._more), counted=False)


@dataclass(frozen=True)
class Place:
    """A block whose mistake is noted in `mistakes` at `where`, a place of the study, or at a parameter below it."""

    mistakes: Mistakes
    where: str
    parameters: tuple[str, ...] = ()

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Note what the user got wrong; anything else goes on its way."""
        if not isinstance(error, InvalidInput):
            return False
        text = str(error)
        named = sorted(
            (name for name in self.parameters if f"{name}=" in text), key=lambda name: text.index(f"{name}=")
        )
        named = named or [name for name in self.parameters if name in text.split()]
        self.mistakes.add(f"{self.where}.{named[0]}" if named else self.where, error)
        return True


def short_repr(value: object, width: int = 60) -> str:
    """Return `value` as it is written in Python, on one line, cut to `width` characters."""
    text = repr(value)
    return text if len(text) <= width else f"{text[: width - 3]}..."
