"""What `splitfed cuts` prints: every place of a model, what crosses there, and why others are refused."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from rich.console import Console
from rich.table import Column, Table

from splitfed.core.cut_places import CutPlace

TITLES = ("bytes a row\nforward", "back", "multiply-adds\nbefore", "weights\nbefore", "by")


def print_places(places: Sequence[CutPlace], auto: Mapping[str, tuple[str, ...]], console: Console) -> None:
    """Print `places` in the order they run, and those that cannot be cut at for one reason together.

    `auto`: topology -> the cuts that "auto" chooses, of vanilla's marked *.
    """
    columns = [Column(title, overflow="fold") for title in ("cut after", "crosses, a row")]
    columns += [Column(title, justify="right", no_wrap=True) for title in TITLES]
    table = Table(*columns, box=None, header_style="bold", pad_edge=False)
    for place in places:
        if place.possible:
            mark = " *" if auto.get("vanilla") == (place.name,) else ""
            table.add_row(f"{_names(place)}{mark}", describe_values(place), *_numbers(place))
    if any(place.possible for place in places):
        console.print(table)
    for refusal, refused in _group_refusals(places).items():
        names = ", ".join(map(_names, refused))
        text = refusal if len(refused) > 1 else refused[0].refusal
        console.print(f"no cut after {names}: {text}", highlight=False, markup=False)


def describe_values(place: CutPlace) -> str:
    """Return the shapes of what crosses at a place: `16x32x32 + 8 (no gradient back)`, types but float32 after them."""
    words = []
    for value in place.values:
        kind = "" if value.dtype == torch.float32 else f" {str(value.dtype).removeprefix('torch.')}"
        back = "" if value.returned else " (no gradient back)"
        words.append(f"{'x'.join(map(str, value.shape)) or '1'}{kind}{back}")
    return " + ".join(words)


def share(pair: tuple[int, int]) -> float:
    """Return the part of the first of two amounts in both together, 0 where there is nothing."""
    return pair[0] / max(1, sum(pair))


def _group_refusals(places: Sequence[CutPlace]) -> dict[str, list[CutPlace]]:
    """Return the places that cannot be cut at by why not, where "..." stands for each one's own name."""
    groups: dict[str, list[CutPlace]] = {}
    for place in places:
        if place.refusal is not None:
            # As a value, a place has no dots in its name.
            names = {repr(place.name), repr(place.name.replace(".", "_"))}
            text = re.sub("|".join(map(re.escape, names)), "'...'", place.refusal)
            groups.setdefault(text, []).append(place)
    return groups


def _numbers(place: CutPlace) -> list[str]:
    sizes = [f"{size:,}" for size in (place.forward_bytes, place.backward_bytes)]
    return [*sizes, *(f"{share(pair):.1%}" for pair in (place.multiply_adds, place.parameters)), str(place.method)]


def _names(place: CutPlace) -> str:
    return " = ".join((place.name, *place.aliases))
