"""Which prediction is meant for which victim, where a batch's order is unknown: for the scorer, who knows the truth.

Paper: Kuhn, "The Hungarian method for the assignment problem", Naval Research Logistics Quarterly 1955.
"""

from __future__ import annotations

import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput


def assignment(truth: Tensor, prediction: Tensor) -> Tensor:
    """Return order (n,) int64: victim order[i] is prediction i's, so that the summed squared error is least.

    truth and prediction: (n, ...) in the same unit. A sum over gradients has no order, so none can be asked of a
    prediction.
    """
    if truth.shape != prediction.shape or len(truth) == 0:
        raise InvalidInput(
            f"truth has shape {tuple(truth.shape)} and prediction {tuple(prediction.shape)}; "
            "expected equal (n, ...), n >= 1"
        )
    # SciPy's optimizers take half a second to import.
    from scipy.optimize import linear_sum_assignment

    one, other = (t.detach().double().cpu().flatten(1) for t in (prediction, truth))
    cost = (one[:, None] - other[None]).square().sum(2)
    return torch.as_tensor(linear_sum_assignment(cost.numpy())[1], dtype=torch.int64)
