"""Which guess is meant for which victim, where a batch's order is unknown: for the scorer, who knows the truth.

Paper: Kuhn, "The Hungarian method for the assignment problem", Naval Research Logistics Quarterly 1955.
"""

from __future__ import annotations

import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput


def assignment(truth: Tensor, guess: Tensor) -> Tensor:
    """Return order (n,) int64: victim order[i] is guess i's, so that the summed squared error is least.

    truth and guess: (n, ...) in the same unit. A sum over gradients has no order, so none can be asked of a guess.
    """
    if truth.shape != guess.shape or len(truth) == 0:
        raise InvalidInput(
            f"truth has shape {tuple(truth.shape)} and guess {tuple(guess.shape)}; expected equal (n, ...), n >= 1"
        )
    # SciPy's optimizers take half a second to import.
    from scipy.optimize import linear_sum_assignment

    one, other = (t.detach().double().cpu().flatten(1) for t in (guess, truth))
    cost = (one[:, None] - other[None]).square().sum(2)
    return torch.as_tensor(linear_sum_assignment(cost.numpy())[1], dtype=torch.int64)
