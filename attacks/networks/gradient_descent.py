"""How attacks train: batches in a new order every epoch, and one step of an optimizer down a loss."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def draw_batches(count: int, size: int, generator: torch.Generator, least: int = 2) -> Iterator[Tensor]:
    """Yield the numbers 0 to `count` - 1 in random order, `size` at a time; a last batch below `least` is left out.

    By default a single row is: it has no variance to be normalised by.
    """
    yield from (rows for rows in torch.randperm(count, generator=generator).split(size) if len(rows) >= least)


def take_step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """Move what `optimizer` holds one step down the gradient of `loss`, a scalar."""
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
