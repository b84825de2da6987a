"""Shared by attacks that train copies of the model: their number, and their work."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import NamedTuple

import torch

from splitfed.attacks.base import Knowledge, unwrap
from splitfed.attacks.work import BATCHES, Work
from splitfed.core.errors import InvalidInput, Requirement, check_count

BATCH = 32
"""Batch size for the estimate, if the attack uses the batch size of the run."""


def require_copies(name: str) -> Requirement:
    """Return the metadata of a field that must be an even number of copies, at least 4."""
    return {"check": partial(_check_copies, name)}


def _check_copies(name: str, copies: int) -> None:
    check_count(name, copies, low=4)
    if copies % 2:
        raise InvalidInput(f"{name}={copies} is not allowed; expected an even number: half hold each row")


class Copies(NamedTuple):
    """From `least` to `most` copies of the model, each trained on `rows` rows and evaluated on `asked` rows.

    If a copy learns from a random half of rows, `rows` is the mean.
    """

    least: int
    most: int
    rows: int
    asked: int


def copies_work(
    knowledge: Knowledge, epochs: int | None, batch_size: int | None, copies: Collection[Copies]
) -> list[Work]:
    """Return the work of all `copies`, each with `epochs` and `batch_size` (None: those of the run).

    A copy of a few batches is timed as a whole, as its incomplete last batch may cost as much as a full one. The work
    of larger copies grows in proportion to their rows, with a few batches as the unit.
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
