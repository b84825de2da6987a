"""Releases of the adversary's own rows, asked for as often as draws of the defenses tell something new."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from splitfed.attacks.local_models import Releases
from splitfed.core.errors import InvalidInput
from splitfed.core.rows import flat_rows


def query_passes(query: Callable[[Tensor], Releases], x: Tensor, count: int) -> list[Releases]:
    """Return what arrives of the rows x (n, *shape) in each of `count` queries; one pass where nothing is random.

    Two passes with the same numbers end it: the defenses draw nothing, and a third would be the same again.
    """
    passes = [query(x)]
    while len(passes) < count:
        passes.append(query(x))
        if len(passes) == 2 and all(torch.equal(z, passes[1][name]) for name, z in passes[0].items()):
            return passes[:1]
    return passes


def query_shuffled(query: Callable[[Tensor], Releases], x: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Return what arrives of the rows x (n, *shape) when they are asked for in random order, in the order of x.

    A defense may go by the batch: rows that are asked for again and again should not always be in the same one.
    """
    order = torch.randperm(len(x), generator=generator).to(x.device)
    return {name: z[order.argsort()] for name, z in query(x[order]).items()}


def join_values(released: Releases, like: Sequence[str], scales: Mapping[str, Tensor] | None = None) -> Tensor:
    """Return the values named in `like`, flattened and side by side: (n, numbers), in their own precision.

    `scales`: value -> what each channel is divided by, (channels,). Raises `InvalidInput` for what is not finite.
    """
    parts = []
    for name in like:
        z = released[name]
        if not bool(torch.isfinite(z).all()):
            raise InvalidInput(f"release {name!r} holds a value that is not finite; expected finite numbers")
        if scales is not None:
            z = z / scales[name].view(-1, *[1] * (z.dim() - 2))
        parts.append(flat_rows(z))
    return torch.cat(parts, 1)


def channel_scales(released: Releases) -> dict[str, Tensor]:
    """Return value -> the standard deviation of each channel over rows and places, (channels,); 1 where none varies.

    A release of rows of numbers (n, m) has a channel for each number.
    """
    scales = {}
    for name, z in released.items():
        # (n, m) has no places, (n, c, h, w) has h * w of them.
        flat = z.double().reshape(len(z), z.shape[1] if z.dim() > 1 else 1, -1)
        deviation = flat.std((0, 2), correction=0)
        scales[name] = torch.where(deviation > 0, deviation, 1.0).to(z.dtype)
    return scales


def hold_out(rows: int, generator: torch.Generator, who: str, most: int | None = None) -> tuple[Tensor, Tensor]:
    """Return positions to learn from and, put aside, a fifth of `rows` (at most `most`), drawn at random.

    Raises `InvalidInput` for fewer than five rows, of which nothing could be put aside.
    """
    if rows < 5:
        raise InvalidInput(f"{who} has {rows} auxiliary rows; expected at least 5, of which a fifth is held out")
    order = torch.randperm(rows, generator=generator)
    aside = rows // 5 if most is None else min(rows // 5, most)
    return order[aside:], order[:aside]
