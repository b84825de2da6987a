"""Candidates of a membership attack: equally many rows that clients trained on and rows that no client trained on."""

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
    """Return a balanced set of candidate rows in random order, and (rows,) bool, True for rows that were trained on.

    Members are drawn from the training rows of all clients, non-members from `outsiders`; there are as many of each as
    the smaller side has. `client`: members are rows of this client, and members and non-members are equally many in
    every class that it holds, so that the class of a row reveals nothing. `shown`: (k,) int64, the public rows of that
    client, which are known to be its own and are no candidates. Raises `InvalidInput` if a side is empty, and for a row
    of `outsiders` equal to a training row of a client; victims of `data` itself that equal one are left out with a
    warning.
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
            raise InvalidInput(f"all rows of client {client} are public: whether they were trained on is no secret")
        inside, outside = _by_class(trained.y, inside, outsiders.y, outside)
    count = len(inside)
    if count == 0:
        raise InvalidInput("there are no rows outside of training: set some aside (victims=64)")
    both = trained.rows(inside).join([outsiders.rows(outside)])
    order = torch.randperm(2 * count, generator=generator)
    return both.rows(order), order < count


def _without_trained(data: Federation, outsiders: Dataset) -> Dataset:
    """Return `outsiders` without rows that equal a training row; warn if these are victims of `data`, else raise."""
    keys = [row.numpy().tobytes() for few in blocks(outsiders.source) for row in few]
    wanted = set(keys)
    trained = (row.numpy().tobytes() for few in blocks(trained_rows(data).source) for row in few)
    found = {key for key in trained if key in wanted}
    if not found:
        return outsiders
    if outsiders is not data.victims:
        raise InvalidInput("outsiders contain a client's training row; expected rows that no client trains on")
    left = [i for i, key in enumerate(keys) if key not in found]
    said = f"{len(keys) - len(left)} of {len(keys)} victims equal a training row in every value"
    if not left:
        raise InvalidInput(f"{said}: no row outside of training remains; give others as victims=")
    warnings.warn(f"{said}; they are no candidates for membership", UserWarning, stacklevel=3)
    return outsiders.rows(left)


def _by_class(y: Tensor, rows: Tensor, others_y: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows from `rows` (labels y) and from `others` (labels others_y), equally many of both in every class."""
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
