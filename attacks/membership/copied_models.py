"""The work of attacks that train copies of the model: timed on one copy that learns from a few batches."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch

from splitfed.attacks.base import Knowledge, unwrap
from splitfed.attacks.work import BATCHES, Work

BATCH = 32
"""Rows of a batch, where the attack leaves the size to the run."""


class Copies(NamedTuple):
    """As many copies of the model as `copies` says, each trained on `rows` rows."""

    copies: int
    rows: int


def copies_work(
    knowledge: Knowledge,
    epochs: int | None,
    batch_size: int | None,
    least: Collection[Copies],
    most: Collection[Copies],
) -> Work:
    """Return the work of training at least the copies in `least` and at most those in `most`.

    `epochs` and `batch_size` of every copy; None: as the run was. A unit is a few batches of one of them.
    """
    x, y, imitate = unwrap(knowledge.auxiliary), unwrap(knowledge.auxiliary_labels), unwrap(knowledge.imitate)
    few = BATCHES * (batch_size or BATCH)

    def run(size: int) -> None:
        rows = torch.arange(size * few, device=x.device) % len(x)
        imitate(x[rows], y[rows], epochs, batch_size, 0).predict(unwrap(knowledge.candidates))

    sizes = [sum(one.copies * one.rows for one in copies) / few for copies in (least, most)]
    return Work(run, sizes[0], sizes[1], (sum(one.copies for one in least), sum(one.copies for one in most)))
