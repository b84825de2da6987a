"""Uneven classes: clients hold different numbers of classes around a mean, and so many rows of each.

Paper: Tan, Long, Liu, Zhou, Lu, Jiang, Zhang, "FedProto: federated prototype learning across heterogeneous clients",
AAAI 2022, section on the experiments ("n-way k-shot").

Follows the authors' code in what the paper calls a standard deviation: numbers of classes are drawn evenly from mean -
spread to mean + spread, no fewer than two and no more than there are. Their true standard deviation is sqrt(spread
(spread + 1) / 3) where no bound cuts it: .82 for a spread of 1, 1.41 for 2. The classes of each client are drawn
independently, so a class may have no client, and its rows are left out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput, check_count


def uneven_classes(
    labels: Tensor, clients: int, mean: int, spread: int, rows_per_class: int | None, generator: torch.Generator
) -> list[Tensor]:
    """Return the positions of each client; labels: (rows,) int64.

    `rows_per_class`: rows that a client gets of each of its classes (None: its clients share all rows of a class).
    Raises `InvalidInput` for fewer classes than `mean`, and for a class with too few rows for its clients.
    """
    check_count("classes_per_client", mean, low=1)
    check_count("class_spread", spread)
    if rows_per_class is not None:
        check_count("rows_per_class", rows_per_class, low=1)
    values = torch.unique(labels)
    if mean > len(values):
        raise InvalidInput(f"classes_per_client={mean} is not allowed; there are {len(values)} classes")
    low, high = max(min(2, mean), mean - spread), min(len(values), mean + spread)
    counts = torch.randint(low, high + 1, (clients,), generator=generator).tolist()
    held = [torch.randperm(len(values), generator=generator)[:count].tolist() for count in counts]
    parts: list[list[Tensor]] = [[] for _ in range(clients)]
    for c, value in enumerate(values):
        own = [client for client in range(clients) if c in held[client]]
        rows = (labels == value).nonzero().flatten()
        rows = rows[torch.randperm(len(rows), generator=generator)]
        needed = len(own) * (rows_per_class or 1)
        if len(rows) < needed:
            raise InvalidInput(
                f"class {int(value)} has {len(rows)} rows, and {len(own)} clients need {needed}; lower rows_per_class "
                "or take fewer clients"
            )
        shards = rows.tensor_split(len(own)) if rows_per_class is None and own else rows.split(rows_per_class or 1)
        for client, shard in zip(own, shards, strict=False):
            parts[client].append(shard)
    return [torch.cat(part) for part in parts]
