"""Pathological label skew: each client holds rows of a few classes only.

Paper: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017,
section 3.

Deviates: the paper sorts the rows by label and cuts them into shards of one size, so that a shard may hold two classes
and a client fewer classes than intended. Here a shard is a part of one class, and a client gets shards of different
classes: each client has exactly `classes_per_client` classes, and shards differ in size where classes do.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput, check_count


def pathological(labels: Tensor, clients: int, classes_per_client: int, generator: torch.Generator) -> list[Tensor]:
    """Return the positions of each client; labels: (rows,) int64. Every row is assigned.

    Raises `InvalidInput` for fewer classes than `classes_per_client`, for a class without a client, and for a class
    with fewer rows than clients.
    """
    check_count("classes_per_client", classes_per_client, low=1)
    values = torch.unique(labels)
    slots = clients * classes_per_client
    if classes_per_client > len(values):
        raise InvalidInput(f"classes_per_client={classes_per_client} is not allowed; there are {len(values)} classes")
    if slots < len(values):
        raise InvalidInput(
            f"classes_per_client={classes_per_client} for {clients} clients covers {slots} of {len(values)} "
            f"classes; take {math.ceil(len(values) / clients)} classes or "
            f"{math.ceil(len(values) / classes_per_client)} clients"
        )
    holders = _deal(len(values), clients, classes_per_client, generator)
    parts: list[list[Tensor]] = [[] for _ in range(clients)]
    for value, own in zip(values, holders, strict=True):
        rows = (labels == value).nonzero().flatten()
        if len(rows) < len(own):
            raise InvalidInput(f"class {int(value)} has {len(rows)} rows for {len(own)} clients; take fewer clients")
        rows = rows[torch.randperm(len(rows), generator=generator)]
        for client, shard in zip(own, rows.tensor_split(len(own)), strict=True):
            parts[client].append(shard)
    return [torch.cat(part) for part in parts]


def _deal(classes: int, clients: int, each: int, generator: torch.Generator) -> list[list[int]]:
    """Return the clients of each class: `each` classes a client, distributed evenly over the classes."""
    left = torch.full((classes,), clients * each // classes)
    left[torch.randperm(classes, generator=generator)[: clients * each % classes]] += 1
    holders: list[list[int]] = [[] for _ in range(classes)]
    for client in range(clients):
        # Classes with most remaining shards first, ties at random: otherwise two shards of one class may be left.
        luck = torch.rand(classes, generator=generator)
        for c in (left + luck).topk(each).indices.tolist():
            holders[c].append(client)
            left[c] -= 1
    return holders
