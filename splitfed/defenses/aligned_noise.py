"""Noise along the gradient, as in `max_norm`, which `marvell` also uses for batches of one class."""

from __future__ import annotations

import torch
from torch import Tensor

from splitfed.core.rows import flat_rows


def add_aligned_noise(g: Tensor, generator: torch.Generator) -> Tensor:
    """Return g_i (1 + sigma_i N), sigma_i = sqrt(max‖g‖²/‖g_i‖² - 1), for each row of `g`: (batch, ...).

    N is one standard normal number a row. Rows of zeros are unchanged.
    """
    # In double precision: squares of small gradients would vanish in single.
    squares = flat_rows(g.detach().double()).square().sum(1)
    ratio = torch.where(squares > 0, squares.max() / squares, 1.0)
    drawn = torch.randn(len(g), generator=generator, device=g.device, dtype=torch.float64)
    factor = 1 + drawn * (ratio - 1).clamp_min(0).sqrt()
    return g * factor.to(g.dtype).view(-1, *[1] * (g.dim() - 1))
