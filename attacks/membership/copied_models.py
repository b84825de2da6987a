"""The work of attacks that train copies of the model: timed on one copy, as it will be made."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch

from splitfed.attacks.base import Knowledge, unwrap
from splitfed.attacks.work import BATCHES, Work

BATCH = 32
"""Rows of a batch, where the attack leaves the size to the run."""


class Copies(NamedTuple):
    """Copies of the model, `least` of them or up to `most`, each trained on `rows` rows and then asked about `asked`.

    Where a copy learns from a random half of rows, `rows` is the mean.
    """

    least: int
    most: int
    rows: int
    asked: int


def copies_work(
    knowledge: Knowledge, epochs: int | None, batch_size: int | None, copies: Collection[Copies]
) -> list[Work]:
    """Return the work of all `copies`, each with `epochs` and `batch_size`; None: as the run was.

    A copy of a few batches is timed as a whole, for its last batch counts as much as a full one and nobody tells here
    how large the run's were; larger ones grow in proportion to their rows, a few batches of which are a unit.
    """
    x, y, imitate = unwrap(knowledge.auxiliary), unwrap(knowledge.auxiliary_labels), unwrap(knowledge.imitate)
    few = BATCHES * (batch_size or BATCH)

    def train(rows: int, asked: int) -> None:
        drawn, questions = (torch.arange(count, device=x.device) % len(x) for count in (rows, asked))
        imitate(x[drawn], y[drawn], epochs, batch_size, 0).predict(x[questions])

    def whole(one: Copies) -> Work:
        return Work(lambda size: train(one.rows, one.asked), 0, 0, (one.least, one.most))

    large = [one for one in copies if one.rows > few]
    found = [whole(one) for one in copies if one.rows <= few]
    if large:
        asked = max(one.asked for one in large)
        least, most = (sum(getattr(one, end) * one.rows for one in large) / few for end in ("least", "most"))
        begun = (sum(one.least for one in large), sum(one.most for one in large))
        found.append(Work(lambda size: train(size * few, asked), least, most, begun))
    return found
