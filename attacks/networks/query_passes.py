"""Releases of the adversary's own rows: repeated queries of random defenses, and the rows with the nearest releases."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from splitfed.attacks.local_models import Releases
from splitfed.core.errors import InvalidInput
from splitfed.core.rows import flat_rows

_CHUNK = 1 << 22  # numbers of a release held in float64 at a time


def query_passes(query: Callable[[Tensor], Releases], x: Tensor, count: int) -> list[Releases]:
    """Return the releases of the rows x (n, *shape) in each of `count` queries, or in one if nothing is random.

    Two passes with equal numbers end the queries, as further ones would be equal too.
    """
    passes = [query(x)]
    while len(passes) < count:
        passes.append(query(x))
        if len(passes) == 2 and all(torch.equal(z, passes[1][name]) for name, z in passes[0].items()):
            return passes[:1]
    return passes


def is_repeatable(query: Callable[[Tensor], Releases], x: Tensor) -> bool:
    """Return whether a second query of the rows x, in another order and batch, is answered alike up to rounding."""
    x = x[:8]
    both = [query(x), query(x.flip(0)[:-1])]
    return all(
        torch.allclose(z[1:], both[1][name].flip(0), rtol=1e-4, atol=1e-5 * float(z.abs().max()))
        for name, z in both[0].items()
    )


def query_shuffled(query: Callable[[Tensor], Releases], x: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Return the releases of the rows x (n, *shape), queried in random order, in the order of x.

    A defense may depend on the batch, so repeated queries should not always have the same rows in one batch.
    """
    order = torch.randperm(len(x), generator=generator).to(x.device)
    return {name: z[order.argsort()] for name, z in query(x[order]).items()}


def join_values(released: Releases, like: Sequence[str], scales: Mapping[str, Tensor] | None = None) -> Tensor:
    """Return the values named in `like`, flattened and concatenated: (n, numbers), in their own precision.

    `scales`: value -> divisor of each channel, (channels,). Raises `InvalidInput` for numbers that are not finite.
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
    """Return value -> the standard deviation of each channel over rows and places, (channels,).

    1 for a constant channel.

    In a release of vectors (n, m) every number is a channel.
    """
    scales = {}
    for name, z in released.items():
        # (n, m) has no places, (n, c, h, w) has h * w of them.
        flat = z.double().reshape(len(z), z.shape[1] if z.dim() > 1 else 1, -1)
        deviation = flat.std((0, 2), correction=0)
        scales[name] = torch.where(deviation > 0, deviation, 1.0).to(z.dtype)
    return scales


def hold_out(rows: int, generator: torch.Generator, who: str, most: int | None = None) -> tuple[Tensor, Tensor]:
    """Return random positions to learn from, and those of a held-out fifth of `rows` (at most `most`).

    Raises `InvalidInput` for fewer than five rows.
    """
    if rows < 5:
        raise InvalidInput(f"{who} has {rows} auxiliary rows; expected at least 5, of which a fifth is held out")
    order = torch.randperm(rows, generator=generator)
    aside = rows // 5 if most is None else min(rows // 5, most)
    return order[aside:], order[:aside]


def nearest_positions(known: Tensor, z: Tensor, count: int) -> Tensor:
    """Return for each release in z (v, m) the positions of the `count` nearest in `known` (n, m): (v, count).

    The nearest comes first; `count` <= n.
    """
    centre = known.mean(0, dtype=torch.float64)
    own = known.new_zeros(len(z), len(known), dtype=torch.float64)
    step = max(1, _CHUNK // (len(z) + len(known)))
    # Differences of columns add up over parts of the columns, and so far from the origin no digit is lost.
    for start in range(0, known.shape[1], step):
        columns = slice(start, start + step)
        left, right = (part[:, columns].double() - centre[columns] for part in (z, known))
        own += left.square().sum(1)[:, None] - 2 * left @ right.T + right.square().sum(1)[None]
    return own.topk(count, dim=1, largest=False).indices


def nearest_means(known: Tensor, x: Tensor, z: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """Return for each k in `counts` the mean of the k rows of x (n, d) nearest to z (v, m): (v, d), float64.

    `known`: (n, m) releases of x, between which and z distances are taken.
    """
    positions = nearest_positions(known, z, max(counts))
    rows = x.double()
    return [rows[positions[:, :count]].mean(1) for count in counts]
