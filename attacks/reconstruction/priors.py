"""Image priors of attackers: penalties on differences of neighbouring pixels."""

from __future__ import annotations

from torch import Tensor


def total_variation(x: Tensor) -> Tensor:
    """Return the mean squared difference of neighbouring pixels, both directions, summed over rows.

    x: (n, channels, height, width); for rows that are no images the result is 0.
    """
    return roughness(x).sum()


def roughness(x: Tensor) -> Tensor:
    """Return the total variation of every row of x (n, ...): (n,); 0 for rows that are no images."""
    if x.dim() != 4:
        return x.new_zeros(len(x))
    down = (x[:, :, 1:] - x[:, :, :-1]).square().flatten(1)
    across = (x[..., 1:] - x[..., :-1]).square().flatten(1)
    return sum((d.mean(1) for d in (down, across) if d.shape[1]), x.new_zeros(len(x)))
