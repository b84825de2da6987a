"""Mistakes of a study, gathered so that the user sees all of them at once, one line each."""

from __future__ import annotations

from types import TracebackType

from splitfed.errors import InvalidInput


class InvalidStudy(InvalidInput):
    """One or more mistakes in a study; `lines` holds one a mistake, the text is all of them."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__("\n".join(lines))
        self.lines = tuple(lines)


class Mistakes:
    """Collects mistakes of the study called `source`; the same line is kept once."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._lines: dict[str, None] = {}

    def add(self, where: str, text: object) -> None:
        """Note that `text` is wrong at `where` (a path such as `defense[1].alpha`)."""
        # A key may hold anything, line breaks too.
        where = "".join(c if c.isprintable() and c != " " else f"\\x{ord(c):02x}" for c in where)
        self._lines[f"{self._source}: {where or 'study'}: {' '.join(str(text).split())}"] = None

    def at(self, where: str) -> Place:
        """Note an `InvalidInput` raised inside the block as a mistake at `where`, and go on after it."""
        return Place(self, where)

    def fresh(self) -> Mistakes:
        """Return an empty collection for the same study."""
        return Mistakes(self._source)

    def take(self, other: Mistakes) -> None:
        """Add the mistakes that were noted elsewhere in the same study."""
        self._lines.update(other._lines)

    def __bool__(self) -> bool:
        return bool(self._lines)

    def stop(self) -> None:
        """Raise `InvalidStudy` if there was any mistake."""
        if self._lines:
            raise InvalidStudy(list(self._lines))


class Place:
    """A block whose mistake is noted at a place of the study."""

    def __init__(self, mistakes: Mistakes, where: str) -> None:
        self._mistakes = mistakes
        self._where = where

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Note what the user got wrong; anything else goes on its way."""
        if not isinstance(error, InvalidInput):
            return False
        self._mistakes.add(self._where, error)
        return True


def shown(value: object, width: int = 60) -> str:
    """Return `value` as it is written in Python, on one line, cut to `width` characters."""
    text = repr(value)
    return text if len(text) <= width else f"{text[: width - 3]}..."
