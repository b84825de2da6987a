"""Training loops of attacks: counted iterations with progress, shuffled batches, and optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from splitfed.attacks.base import Progress

Pass = TypeVar("Pass")


def count_turns(turns: int, progress: Progress | None, every: int = 1) -> Iterator[int]:
    """Yield 0 to `turns` - 1; report the number of finished turns to `progress` after every `every` turns."""
    for number in range(turns):
        yield number
        if progress is not None and number % every == every - 1:
            progress(number + 1, turns)


def part_of(progress: Progress, before: int, total: int) -> Progress:
    """Return the progress of a part of the work, which begins when `before` of `total` are done."""
    return lambda done, _: progress(before + done, total)


def draw_batches(count: int, size: int, generator: torch.Generator, least: int = 2) -> Iterator[Tensor]:
    """Yield the numbers 0 to `count` - 1 in random order, `size` at a time; skip a last batch smaller than `least`.

    By default a batch of a single row is skipped, as it cannot be normalised by its variance.
    """
    yield from (rows for rows in torch.randperm(count, generator=generator).split(size) if len(rows) >= least)


def descend(
    weights: Iterable[nn.Parameter],
    passes: Sequence[Pass] | Callable[[int], Pass],
    loss: Callable[[Pass, Tensor], Tensor],
    rows: int,
    generator: torch.Generator,
    progress: Progress | None = None,
    *,
    epochs: int,
    lr: float,
    batch_size: int,
    least: int = 2,
) -> None:
    """Train `weights` for `epochs` by Adam, at a rate that falls from `lr` along half a cosine.

    Each epoch uses one of `passes`, in turn, or `passes(epoch)`, and `rows` rows in batches of `batch_size`, none
    smaller than `least` (see `draw_batches`). `loss(one, chosen)` is the scalar loss of the chosen row numbers in a
    pass.
    """
    optimizer = torch.optim.Adam(weights, lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for epoch in count_turns(epochs, progress):
        one = passes(epoch) if callable(passes) else passes[epoch % len(passes)]
        for chosen in draw_batches(rows, batch_size, generator, least):
            take_step(optimizer, loss(one, chosen))
        schedule.step()


def take_step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """Take one step of `optimizer` down the gradient of `loss`, a scalar."""
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
