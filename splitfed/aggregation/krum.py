"""Krum and multi-Krum: average the uploads that lie closest to their nearest neighbours, and leave out the others.

Paper: Blanchard, El Mhamdi, Guerraoui, Stainer, "Machine learning with adversaries: Byzantine tolerant gradient
descent", NIPS 2017.

The score of an upload is the sum of its squared distances to the n - f - 2 uploads nearest to it; the `keep` uploads of
lowest score are averaged with equal weights (ties go to the client that was added first). `keep=1` is Krum. The paper
selects among gradients at every step; here the selection is among weights, once a round.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from splitfed.aggregation.base import AggregationRule
from splitfed.core.errors import InvalidInput, require_count


@dataclass(frozen=True, kw_only=True)
class Krum(AggregationRule):
    """Mean of the `keep` uploads of lowest score.

    `f`: the number of Byzantine clients to tolerate; `keep`: how many uploads are averaged, at most n - f.
    """

    f: int = field(default=1, metadata=require_count("krum f", low=1))
    keep: int = field(default=1, metadata=require_count("krum keep", low=1))

    def check(self, parts: int) -> None:
        """Raise `InvalidInput` for fewer than 2 f + 3 parties (the paper's proposition) and for keep > parts - f."""
        if parts < 2 * self.f + 3:
            raise InvalidInput(f"krum f={self.f} needs {2 * self.f + 3} clients or more (2 f + 3); there are {parts}")
        if self.keep > parts - self.f:
            raise InvalidInput(
                f"krum keep={self.keep} is not allowed; expected at most {parts - self.f}, as f={self.f} of {parts} "
                "clients may be bad"
            )

    def scores(self, rows: Tensor) -> Tensor:
        """Return the score of every row of `rows`, (parts, numbers) -> (parts,); the lowest scores are kept."""
        # Without the shortcut over inner products, which loses the small distances between close rows.
        apart = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist").square()
        apart.fill_diagonal_(float("inf"))
        return torch.sort(apart, 1).values[:, : len(rows) - self.f - 2].sum(1)

    def fuse(self, rows: Tensor, shares: Tensor) -> Tensor:
        """Return the mean of the `keep` rows of lowest score."""
        kept = torch.sort(self.scores(rows), stable=True).indices[: self.keep]
        return rows[kept].mean(0)
