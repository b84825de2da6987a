"""By domain: each client holds rows of one domain only (a hospital, a camera, a writer)."""

from __future__ import annotations

import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput


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
