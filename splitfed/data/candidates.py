"""Candidates for a membership attack: as many rows that clients trained on as rows that nobody trained on."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput
from splitfed.core.rows import blocks
from splitfed.data.dataset import Dataset, Federation


def candidates(
    data: Federation,
    outsiders: Dataset,
    generator: torch.Generator,
    client: int | None = None,
    shown: Tensor | None = None,
) -> tuple[Dataset, Tensor]:
    """Return a balanced set of rows in random order, and (rows,) bool, which of them were trained on.

    Members are drawn from the training rows of all clients alike, non-members from `outsiders`, which nobody trained
    on; there are as many of each as the smaller side has. `client`: members are rows of this client, and there are as
    many of each of every class that it holds, so that the class of a row tells nothing. `shown`: (k,) int64, the rows
    of that client that it has shown to all, which are known as its own and no candidates. Raises `InvalidInput` where a
    side is empty, and for `outsiders` with a row whose values some client trained on; victims of `data` itself that are
    such a row are left out with a warning.
    """
    outsiders = _without_trained(data, outsiders)
    trained = trained_rows(data) if client is None else data.clients[client].train
    inside, outside = (torch.randperm(len(side), generator=generator) for side in (trained, outsiders))
    if client is None:
        count = min(len(trained), len(outsiders))
        inside, outside = inside[:count], outside[:count]
    else:
        if shown is not None:
            inside = inside[~torch.isin(inside, shown)]
        if len(inside) == 0:
            raise InvalidInput(f"client {client} has shown all of its rows: whether they were trained on is no secret")
        inside, outside = _by_class(trained.y, inside, outsiders.y, outside)
    count = len(inside)
    if count == 0:
        raise InvalidInput("there are no rows that nobody trained on: set some aside (victims=64)")
    both = trained.rows(inside).join([outsiders.rows(outside)])
    order = torch.randperm(2 * count, generator=generator)
    return both.rows(order), order < count


def _without_trained(data: Federation, outsiders: Dataset) -> Dataset:
    """Return `outsiders` without rows that equal a training row, with a warning if they are the victims of `data`."""
    keys = [row.numpy().tobytes() for few in blocks(outsiders.source) for row in few]
    wanted = set(keys)
    trained = (row.numpy().tobytes() for few in blocks(trained_rows(data).source) for row in few)
    found = {key for key in trained if key in wanted}
    if not found:
        return outsiders
    if outsiders is not data.victims:
        raise InvalidInput("a row given as one that nobody trained on is a client's training row; expected others")
    left = [i for i, key in enumerate(keys) if key not in found]
    said = f"{len(keys) - len(left)} of {len(keys)} victims equal a training row in every value"
    if not left:
        raise InvalidInput(f"{said}: there is no row that nobody trained on; give others as victims=")
    warnings.warn(f"{said}; they are no candidates for membership", UserWarning, stacklevel=3)
    return outsiders.rows(left)


def _by_class(y: Tensor, rows: Tensor, others_y: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first of `rows` (labels y) and of `others` (labels others_y), as many of each for every class."""
    found: list[tuple[Tensor, Tensor]] = []
    for label in y[rows].unique():
        mine, theirs = rows[y[rows] == label], others[others_y[others] == label]
        count = min(len(mine), len(theirs))
        found.append((mine[:count], theirs[:count]))
    one, other = zip(*found, strict=True)
    return torch.cat(one), torch.cat(other)


def trained_rows(data: Federation) -> Dataset:
    """Return the training rows of all clients, client by client."""
    first, *others = data.clients
    return first.train.join(client.train for client in others)
