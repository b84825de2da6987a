"""IID: rows go to the clients at random, in equal numbers."""

from __future__ import annotations

import torch
from torch import Tensor


def iid(rows: int, clients: int, generator: torch.Generator) -> list[Tensor]:
    """Return `clients` disjoint int64 tensors that hold 0 to `rows` - 1; sizes differ by one at most."""
    return list(torch.randperm(rows, generator=generator).tensor_split(clients))
