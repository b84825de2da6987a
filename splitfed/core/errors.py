"""Errors that are the user's to fix: one line with the name, the value and what is allowed."""

from __future__ import annotations

import linecache
import math
import numbers
import os
import re
import sys
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from functools import partial
from pathlib import Path
from textwrap import shorten
from traceback import walk_tb
from typing import Any

from splitfed.core.nearest_names import nearest_names

LONGEST = 1200
"""Characters of the text of an error that are shown."""

LARGEST = 2**63 - 1
"""The largest whole number that tensors hold, and so that is taken for a count."""

LARGEST_NORM = 1e18
"""The largest norm that noise is made for, and the most noise by it: both together stay numbers of float32."""

PATH = "a path of names of at most 255 bytes each, without NUL"


class SplitfedError(Exception):
    """Base of every error this package raises on purpose; its text is one line of at most `LONGEST` characters."""

    def __str__(self) -> str:
        """The text, the middle of one that is too long left out: there a value stands that was given."""
        text = in_a_line(super().__str__())
        return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} ... {text[5 - LONGEST // 2 :]}"


def in_a_line(text: str) -> str:
    """Return `text` with its lines after one another."""
    return " ".join(line.strip() for line in text.splitlines())


class InvalidInput(SplitfedError, ValueError):
    """Something given from outside is wrong: nothing was computed, nothing was written.

    `part`: which part of a run it is about, as `train` calls it, where that is known.
    """

    part = ""


class FolderGone(InvalidInput):
    """A folder that results are written to is not there any more."""

    def __init__(self, folder: object) -> None:
        super().__init__(
            f"folder {str(folder)!r} is gone: it was moved or deleted while it was written to; put it back and go on "
            "with --resume (in Python resume=True), or begin in another folder"
        )


class NonFinite(SplitfedError, ArithmeticError):
    """A loss, message or gradient stopped being finite: party, step and edge are in the text."""


class Unknown(InvalidInput):
    """A name that is none of those allowed; the text is worded when it is read, as to find the nearest name takes long.

    The nearest name comes first, all of them after it.
    """

    def __init__(self, kind: str, name: object, allowed: Iterable[str]) -> None:
        super().__init__(kind, name, list(allowed))

    def __str__(self) -> str:
        kind, given, allowed = self.args
        options, name = sorted(map(str, allowed)), short(given)
        near = nearest_names(str(given), options) if len(name) < WIDEST else []
        hint = f"; did you mean {' or '.join(repr(n) for n in near)}?" if near else ""
        shown = ", ".join(options[:MOST]) + (f" and {len(options) - MOST} more" if len(options) > MOST else "")
        what = name if len(name) < WIDEST else f"{name[:WIDEST]}..."
        return in_a_line(f"unknown {kind} {what}{hint} (allowed: {shown or 'none'})")


MOST, WIDEST = 100, 200
"""Names that are listed, and characters of a name that are shown."""


def unknown(kind: str, name: object, allowed: Iterable[str]) -> InvalidInput:
    """Return the error for a `name` that no `kind` has; its text has the nearest name, then all `allowed` ones."""
    return Unknown(kind, name, allowed)


def check_names(kind: str, allowed: Collection[Any], *names: object) -> None:
    """Refuse the first of `names` that no `kind` has: those `allowed`."""
    for name in names:
        with suppress(TypeError):  # that has no hash
            if isinstance(name, Hashable) and name in allowed:
                continue
        raise unknown(kind, name, allowed)


def first_line(error: BaseException) -> str:
    """Return the first line of what `error` says, or its kind where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def short(value: object) -> str:
    """Return what `value` is in a line of at most `WIDEST` characters, without addresses, for the text of an error."""
    try:
        text = " ".join(re.sub(r" at 0x[0-9a-f]+", "", repr(value)).split())
    except ValueError:  # more digits than Python writes
        text = f"{type(value).__name__}(...)"
    return text if len(text) <= WIDEST else f"{text[:WIDEST]}..."


def check_kind(name: str, value: object, kind: type | tuple[type, ...], expected: str) -> None:
    """Refuse a `value` that is no `kind`, in the words of `expected`."""
    if not isinstance(value, kind):
        raise InvalidInput(f"{name}={short(value)} is not allowed; expected {expected}")


def describe_error(error: BaseException) -> str:
    """Return kind and text of an `error` that other people's code raised: `KeyError: 'share'`, in one line.

    It has at most 300 characters, and is cut between words.
    """
    return shorten(f"{type(error).__name__}: {error}", 300, placeholder=" ...").rstrip(" :")


def describe_failure(error: BaseException) -> str:
    """Return what `error` says, in one line: of ours and of torch, which speak in sentences, without its kind."""
    if isinstance(error, SplitfedError):
        return " ".join(str(error).split())
    return first_line(error) if type(error) in (RuntimeError, ValueError, TypeError) else describe_error(error)


def line_of(error: BaseException) -> str:
    """Return where the code of others raised `error`, as " at 'the line' (file.py:number)"; empty where it is unknown.

    Frames of torch and of the core are passed over.
    """
    torch = str(Path(sys.modules["torch"].__file__ or "").parent) if "torch" in sys.modules else __file__
    skipped, found = (torch, str(Path(__file__).parent)), ""
    # Code that torch.fx has made tells neither lines nor columns, at which `traceback.extract_tb` fails on Python 3.11.
    for frame, number in walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if number and not file.startswith(skipped):
            found = f" at {linecache.getline(file, number, frame.f_globals).strip()!r} ({Path(file).name}:{number})"
    return found


@contextmanager
def others_code(refusal: Callable[[BaseException], BaseException]) -> Iterator[None]:
    """Raise, in place of whatever the block raises, what `refusal` makes of it, which may be the error itself.

    For code of other people, which may raise anything: errors of a class of their own, or the end of the process. An
    interrupt goes on as it is.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        made = refusal(error)
        if made is error:
            raise
        raise made from error


@contextmanager
def about(part: str) -> Iterator[None]:
    """Say of an `InvalidInput` raised inside the block which `part` of a run it is about; the innermost counts."""
    try:
        yield
    except InvalidInput as error:
        error.part = error.part or part
        raise


def check_number(
    name: str,
    value: Any,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    open_low: bool = False,
    open_high: bool = False,
) -> None:
    """Refuse a `value` that is no finite number between the bounds (`open_*` excludes the bound)."""
    inside = (
        _is(value, numbers.Real)
        and abs(value) <= sys.float_info.max
        and (value > low if open_low else value >= low)
        and (value < high if open_high else value <= high)
    )
    if not inside:
        left = "(" if open_low or low == -math.inf else "["
        right = ")" if open_high or high == math.inf else "]"
        raise InvalidInput(f"{name}={short(value)} is not allowed; expected a number in {left}{low:g}, {high:g}{right}")


def check_count(name: str, value: Any, *, low: int = 0, high: float = LARGEST) -> None:
    """Refuse a `value` that is no whole number of at least `low`, and at most `high`."""
    if not _is(value, numbers.Integral) or not low <= value <= high:
        most = f" and at most {high}" if _is(value, numbers.Integral) and value > high else ""
        raise InvalidInput(f"{name}={short(value)} is not allowed; expected a whole number of at least {low}{most}")


def check_counts(name: str, values: Any, *, low: int = 0, expected: str = "one whole number or more") -> None:
    """Refuse `values` that are no list of whole numbers of at least `low`, and an empty one: `expected` is said."""
    if not isinstance(values, (tuple, list)) or not values:
        raise InvalidInput(f"{name}={short(values)} is not allowed; expected {expected}")
    for value in values:
        check_count(name, value, low=low)


def is_path(value: str | os.PathLike[str]) -> bool:
    """Return whether the file system may have `value` for a path."""
    try:
        text = os.fsencode(value)
    except (TypeError, ValueError):
        return False
    return b"\0" not in text and all(len(name) <= 255 for name in text.split(b"/"))


def check_path(name: str, value: object) -> None:
    """Refuse a `value` that is no path, and one that no file can have."""
    if not (isinstance(value, (str, Path)) and is_path(value)):
        raise InvalidInput(f"{name}={short(value)} is not allowed; expected {PATH}")


Requirement = dict[str, Callable[[Any], None]]
"""Metadata of a dataclass field: what its value must be, which `check_fields` asks of it."""


def require_number(name: str, **bounds: Any) -> Requirement:
    """Return the metadata of a field that must be a number; `name` and `bounds` as `check_number` takes them."""
    return {"check": partial(check_number, name, **bounds)}


def require_count(name: str, *, low: int = 0, high: float = LARGEST) -> Requirement:
    """Return the metadata of a field that must be a whole number of at least `low` and at most `high`."""
    return {"check": partial(check_count, name, low=low, high=high)}


def require_counts(name: str, *, low: int = 0, expected: str = "one whole number or more") -> Requirement:
    """Return the metadata of a field that must be a list of whole numbers, as `check_counts` takes it."""
    return {"check": partial(check_counts, name, low=low, expected=expected)}


def require_share(name: str) -> Requirement:
    """Return the metadata of a field that must be a share: a number in (0, 1); `name` as `check_number` takes it."""
    return require_number(name, low=0.0, high=1.0, open_low=True, open_high=True)


def require_name(kind: str, allowed: Collection[str]) -> Requirement:
    """Return the metadata of a field that must be one of the `allowed` names of a `kind`."""
    return {"check": partial(check_names, kind, allowed)}


def check_fields(value: Any) -> None:
    """Refuse a dataclass with a field that is not what its metadata require, and a switch that is none.

    None passes where it is the default.
    """
    for one in fields(value):
        given = getattr(value, one.name)
        if one.type in ("bool", bool):
            check_kind(one.name, given, bool, "True or False")
        if "check" in one.metadata and not (given is None and one.default is None):
            one.metadata["check"](given)


def _is(value: object, kind: type) -> bool:
    """Return whether `value` is a number of this kind; True and False are none, though Python counts them in."""
    return isinstance(value, kind) and not isinstance(value, bool)
