"""Assignment of predictions to victims where the order of a batch is unknown; for the scorer, which knows the truth.

Paper: Kuhn, "The Hungarian method for the assignment problem", Naval Research Logistics Quarterly 1955.
"""

from __future__ import annotations

import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput


def assignment(truth: Tensor, prediction: Tensor) -> Tensor:
    """Return order (n,) int64 such that prediction i matches victim order[i] with the least total squared error.

    truth and prediction: (n, ...) in the same unit. A sum over gradients has no order, so a prediction from it has
    none.
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
