"""Partitions: rules that divide rows among clients; labels or domains in, the positions of each client out."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput, check_count, check_number

DRAWS = 200


def pathological(labels: Tensor, clients: int, classes_per_client: int, generator: torch.Generator) -> list[Tensor]:
    """Return the positions of each client; labels: (rows,) int64. Every row is assigned.

    Raises `InvalidInput` for fewer classes than `classes_per_client`, for a class without a client, and for a class
    with fewer rows than clients.

    Pathological label skew, each client with rows of a few classes only: McMahan et al., "Communication-efficient
    learning of deep networks from decentralized data", AISTATS 2017, section 3. The paper sorts the rows by label and
    cuts them into shards of one size, so that a shard may hold two classes and a client fewer classes than intended.
    Here a shard is a part of one class, and a client gets shards of different classes: each client has exactly
    `classes_per_client` classes, and shards differ in size where classes do.
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


def iid(rows: int, clients: int, generator: torch.Generator) -> list[Tensor]:
    """Return `clients` disjoint int64 tensors that hold 0 to `rows` - 1; sizes differ by one at most."""
    return list(torch.randperm(rows, generator=generator).tensor_split(clients))


def dirichlet(labels: Tensor, clients: int, alpha: float, minimum: int, generator: torch.Generator) -> list[Tensor]:
    """Return the positions of each client; labels: (rows,) int64. A smaller `alpha` > 0 gives more skew.

    Raises `InvalidInput` if in each of `DRAWS` draws some client has fewer than `minimum` rows.

    Label skew by which the rows of each class are spread over the clients by a Dirichlet draw: Yurochkin et al.,
    "Bayesian nonparametric federated learning of neural networks", ICML 2019, section 4; named and studied in Li et
    al., "Federated learning on non-IID data silos", ICDE 2022. Unlike in the second, a client that already has its fair
    share still receives rows, so the draw is a plain Dirichlet; instead the whole draw is repeated until every client
    has the minimum number of rows.
    """
    check_number("dirichlet", alpha, low=0, open_low=True)
    check_count("minimum", minimum, low=1)
    if minimum * clients > len(labels):
        raise InvalidInput(f"minimum={minimum} for {clients} clients is more than the {len(labels)} rows there are")
    shuffled = torch.randperm(len(labels), generator=generator)
    rows = [shuffled[labels[shuffled] == value] for value in torch.unique(labels)]
    # torch draws no Dirichlet from a given generator; NumPy does, and is stable for a tiny alpha.
    random = np.random.default_rng(int(torch.randint(2**62, (), generator=generator)))
    for _ in range(DRAWS):
        shares = random.dirichlet(np.full(clients, alpha), size=len(rows))
        bounds = [_bounds(share, len(own)) for share, own in zip(shares, rows, strict=True)]
        sizes = sum(np.diff(b, prepend=0, append=len(own)) for b, own in zip(bounds, rows, strict=True))
        if np.min(sizes) >= minimum:
            parts = [own.tensor_split(b.tolist()) for b, own in zip(bounds, rows, strict=True)]
            return [torch.cat([part[i] for part in parts]) for i in range(clients)]
    raise InvalidInput(
        f"dirichlet={alpha:g}: in {DRAWS} draws some of {clients} clients always had fewer than "
        f"minimum={minimum} of {len(labels)} rows; raise dirichlet, lower minimum or take fewer clients"
    )


def _bounds(share: np.ndarray, rows: int) -> np.ndarray:
    """Return the inner bounds at which `rows` rows are cut into parts proportional to `share`."""
    return np.asarray(np.rint(np.cumsum(share[:-1]) * rows).clip(0, rows), np.int64)


def uneven_classes(
    labels: Tensor, clients: int, mean: int, spread: int, rows_per_class: int | None, generator: torch.Generator
) -> list[Tensor]:
    """Return the positions of each client; labels: (rows,) int64.

    `rows_per_class`: rows that a client gets of each of its classes (None: its clients share all rows of a class).
    Raises `InvalidInput` for fewer classes than `mean`, and for a class with too few rows for its clients.

    Clients hold different numbers of classes around a mean, and so many rows of each: Tan, Long, Liu, Zhou, Lu, Jiang,
    Zhang, "FedProto: federated prototype learning across heterogeneous clients", AAAI 2022, section on the experiments
    ("n-way k-shot"). Follows the authors' code in what the paper calls a standard deviation: numbers of classes are
    drawn evenly from mean - spread to mean + spread, no fewer than two and no more than there are. Their true standard
    deviation is sqrt(spread (spread + 1) / 3) where no bound cuts it: .82 for a spread of 1, 1.41 for 2. The classes of
    each client are drawn independently, so a class may have no client, and its rows are left out.
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


def by_domain(domains: Tensor, clients: int) -> list[Tensor]:
    """Return the positions of each client; domains: (rows,) int64.

    Client i gets domain i modulo the number of domains, in ascending order; clients with the same domain share it in
    equal numbers. Raises `InvalidInput` for fewer clients than domains, which would mix or lose rows.
    """
    values = torch.unique(domains)
    if clients < len(values):
        raise InvalidInput(f"by_domain with {clients} clients, but there are {len(values)} domains; take {len(values)}")
    holders = [len(range(d, clients, len(values))) for d in range(len(values))]
    shares = [(domains == value).nonzero().flatten().tensor_split(n) for value, n in zip(values, holders, strict=True)]
    return [torch.as_tensor(shares[i % len(values)][i // len(values)]) for i in range(clients)]
