"""Dirichlet label skew: the rows of each class are spread over the clients by a Dirichlet draw.

Paper: Yurochkin et al., "Bayesian Nonparametric Federated Learning of Neural Networks", ICML 2019, section 4; named and
studied in Li et al., "Federated Learning on Non-IID Data Silos", ICDE 2022.

Deviates from the second: a client that already has its fair share still receives rows, so the draw is a plain
Dirichlet; instead the whole draw is repeated until every client has the minimum number of rows.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput, check_count, check_number

DRAWS = 200


def dirichlet(labels: Tensor, clients: int, alpha: float, minimum: int, generator: torch.Generator) -> list[Tensor]:
    """Return the positions of each client; labels: (rows,) int64. A smaller `alpha` > 0 gives more skew.

    Raises `InvalidInput` if in each of `DRAWS` draws some client has fewer than `minimum` rows.
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
