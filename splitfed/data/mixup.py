"""Mixup: every training row is mixed with another row of the same client, drawn by the seed, the row and the epoch.

Paper: Zhang, Cisse, Dauphin, Lopez-Paz, "mixup: beyond empirical risk minimization", ICLR 2018.

Deviates: labels are not mixed. The paper mixes rows i and j by lambda from Beta(alpha, alpha), and compares the result
with both labels, weighted by lambda and 1 - lambda. By the symmetry of i and j the expected gradient is the same if
only the label of row i is used and lambda comes from Beta(alpha + 1, alpha): for cross-entropy and logistic loss, and
for squared error, where the difference does not depend on the weights. So labels are unchanged, wherever they are held.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput, check_number
from splitfed.core.random import derive
from splitfed.core.rows import Draw, RowSource, layers, row_numbers


class MixedRows(RowSource):
    """The rows of `source`, each mixed with another of these rows in a training step.

    `alpha` > 0: larger values mix more. `numbers`: (rows,) by which each row draws; None: 0, 1, ... `select` restricts
    partners to the selected rows, so that no client's row is mixed into another's.
    """

    draws = True
    couples = True

    def __init__(self, name: str, source: RowSource, alpha: float, numbers: Tensor | None = None) -> None:
        check_number("mixup", alpha, low=0.0, open_low=True)
        if not source.dtype.is_floating_point:
            raise InvalidInput(f"{name} has rows of whole numbers, which are codes and cannot be mixed")
        if source.couples:
            raise InvalidInput(f"{name} has a mixup already; expected one")
        self.name, self.source, self.alpha = name, source, alpha
        self.numbers = torch.arange(len(source)) if numbers is None else numbers
        self.shape, self.dtype = source.shape, source.dtype

    def __len__(self) -> int:
        return len(self.source)

    def select(self, rows: Tensor) -> MixedRows:
        """Return the rows of these numbers, mixed with one another."""
        rows = row_numbers(self.name, rows, len(self))
        return MixedRows(self.name, self.source.select(rows), self.alpha, self.numbers[rows])

    def take(self, rows: Tensor, draw: Draw | None = None) -> Tensor:
        """Return the rows of these numbers, mixed if `draw` is given."""
        found = self.source.take(rows, draw)
        if draw is None or len(rows) == 0:
            return found
        shares, partners = np.empty(len(rows), dtype=np.float32), np.empty(len(rows), dtype=np.int64)
        for place, number in enumerate(self.numbers[rows].tolist()):
            random = np.random.default_rng(derive(draw.seed, "mixup", draw.epoch, number))
            shares[place], partners[place] = random.beta(self.alpha + 1, self.alpha), random.integers(len(self))
        own = torch.from_numpy(shares).reshape(-1, *[1] * len(self.shape))
        return found * own + self.source.take(torch.from_numpy(partners), draw) * (1 - own)


def mixup_of(rows: RowSource) -> float | None:
    """Return the alpha of the mixup of `rows`; None if there is none."""
    return next((float(one.alpha) for one in layers(rows) if isinstance(one, MixedRows)), None)
