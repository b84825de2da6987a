"""Krum and multi-Krum: the uploads that lie closest to their nearest neighbours are taken, the others left out.

Paper: Blanchard, El Mhamdi, Guerraoui, Stainer, "Machine learning with adversaries: Byzantine tolerant gradient
descent", NIPS 2017.

The score of an upload is the sum of its squared distances to the n - f - 2 uploads nearest to it; the `keep` uploads
of lowest score are averaged, each counting the same (of equal scores the one that came first). `keep=1` is Krum. There
it chooses among gradients at every step, here among weights once a round.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from splitfed.aggregation.base import AggregationRule
from splitfed.core.errors import InvalidInput, require_count


@dataclass(frozen=True, kw_only=True)
class Krum(AggregationRule):
    """The uploads that lie closest to their nearest neighbours, or their mean.

    `f`: how many bad clients it is to stand; `keep`: how many of the others are averaged, n - f at most.
    """

    f: int = field(default=1, metadata=require_count("krum f", low=1))
    keep: int = field(default=1, metadata=require_count("krum keep", low=1))

    def check(self, parts: int) -> None:
        """Refuse fewer than 2 f + 3 clients, which the paper's proposition needs, and to keep some of the f."""
        if parts < 2 * self.f + 3:
            raise InvalidInput(f"krum f={self.f} needs {2 * self.f + 3} clients or more (2 f + 3); there are {parts}")
        if self.keep > parts - self.f:
            raise InvalidInput(f"krum keep={self.keep} is not allowed; of {parts} clients {parts - self.f} are good")

    def scores(self, rows: Tensor) -> Tensor:
        """Return the score of every row of `rows`: (parts, numbers) -> (parts,); the lower, the better."""
        # Without the shortcut over inner products, which loses the small distances between close rows.
        apart = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist").square()
        apart.fill_diagonal_(float("inf"))
        return torch.sort(apart, 1).values[:, : len(rows) - self.f - 2].sum(1)

    def fuse(self, rows: Tensor, shares: Tensor) -> Tensor:
        """Return the mean of the rows kept."""
        kept = torch.sort(self.scores(rows), stable=True).indices[: self.keep]
        return rows[kept].mean(0)
