"""Vertical partitions: the columns of a table, or the strips of an image, that each party holds of every row."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from splitfed.core.errors import InvalidInput, check_count, check_names, short
from splitfed.data.features import Feature


def columns(
    name: str,
    shape: tuple[int, ...],
    parties: int | Mapping[str, Sequence[int | str]],
    overlap: bool,
    names: Sequence[str] = (),
) -> dict[str, Feature]:
    """Return the columns of rows of shape (columns,) as a feature for each party: party -> feature.

    A number of parties gives each neighbouring columns in numbers as equal as possible, the first parties one more if
    needed; they are called party0, party1, ... A mapping gives each party's columns, in the party's order, by number or
    by one of `names`, (columns,), which means all columns of that name. Every column goes to exactly one party; with
    `overlap` to one or more. `name`: the prefix of errors. Raises `InvalidInput`.
    """
    if len(shape) != 1:
        raise InvalidInput(f"{name} has rows of shape {shape}, which are no columns; take halves or strips of an image")
    (width,) = shape
    if not isinstance(parties, Mapping):
        names = _party_names("parties", parties, width, f"{name} has {width} columns")
        parts = torch.arange(width).tensor_split(len(names))
        return {party: Feature(part, (len(part),)) for party, part in zip(names, parts, strict=True)}
    numbers = {party: _number_columns(name, names, party, chosen) for party, chosen in parties.items()}
    _check_columns(name, names, width, numbers, overlap)
    return {party: Feature(torch.tensor(found, dtype=torch.int64), (len(found),)) for party, found in numbers.items()}


def strips(name: str, shape: tuple[int, ...], count: int, names: Sequence[str] | None) -> dict[str, Feature]:
    """Return images of `shape` (..., height, width) as `count` strips of full height, from left to right.

    Widths are as equal as possible, the first strips one pixel wider if needed; strips are called party0, party1, ...
    unless `names` are given. `name`: the prefix of errors. Raises `InvalidInput`.
    """
    if len(shape) < 2:
        raise InvalidInput(f"{name} has rows of shape {shape}, which are no images; take vertical for columns")
    called = _party_names("strips", count, shape[-1], f"{name} is {shape[-1]} pixels wide")
    if names is not None:
        called = list(names)
        if isinstance(names, str) or len(called) != count or len(set(called)) < count:
            raise InvalidInput(f"names={short(names)} of strips are not allowed; expected {count}, each once")
    parts = torch.arange(math.prod(shape)).reshape(shape).tensor_split(count, dim=-1)
    return {part: Feature(piece.flatten(), tuple(piece.shape)) for part, piece in zip(called, parts, strict=True)}


def _party_names(what: str, count: object, most: int, fact: str) -> list[str]:
    check_count(what, count, low=1)
    assert isinstance(count, int)
    if count > most:
        raise InvalidInput(f"{what}={count} is not allowed: {fact}; expected 1 to {most}")
    return [f"party{i}" for i in range(count)]


def _number_columns(name: str, names: Sequence[str], party: str, chosen: Sequence[int | str]) -> list[int]:
    """Return the numbers of a party's columns, given by number or by name, in its order."""
    if isinstance(chosen, str):
        raise InvalidInput(f"{name}: party {party!r} is given {chosen!r}; expected a list of columns")
    found: list[int] = []
    for column in chosen:
        if not isinstance(column, str):
            found.append(column)
            continue
        if not names:
            raise InvalidInput(f"{name}: party {party!r} is given column {column!r}, and columns have no names here")
        check_names(f"column of {name}:", set(names), column)
        found += [number for number, known in enumerate(names) if known == column]
    return found


def _check_columns(
    name: str, names: Sequence[str], width: int, parties: Mapping[str, Sequence[int]], overlap: bool
) -> None:
    """Raise `InvalidInput` for columns that do not exist, that no party holds, or that two hold without `overlap`."""
    if not parties:
        raise InvalidInput(f"{name}: no party is given; expected at least one with its columns")
    holder: dict[int, str] = {}

    def told(column: int) -> str:
        return f"{column} ({names[column]!r})" if names else str(column)

    for party, chosen in parties.items():
        if len(chosen) == 0:
            raise InvalidInput(f"{name}: party {party!r} has no columns; expected at least one")
        for column in chosen:
            if isinstance(column, bool) or not isinstance(column, int) or not 0 <= column < width:
                raise InvalidInput(
                    f"{name}: party {party!r} has no column {column!r} to hold; expected 0 to {width - 1}"
                )
            if list(chosen).count(column) > 1:
                raise InvalidInput(f"{name}: party {party!r} is given column {told(column)} twice; expected once")
            other = holder.setdefault(column, party)
            if other != party and not overlap:
                raise InvalidInput(
                    f"{name}: column {told(column)} is given to {other!r} and to {party!r}; expected one, or "
                    "overlap=True"
                )
    if left := [column for column in range(width) if column not in holder]:
        raise InvalidInput(
            f"{name}: column {told(left[0])} is given to no party ({len(left)} in all); with_features leaves columns "
            "out"
        )
