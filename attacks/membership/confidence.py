"""A model's confidence in the true label of a row, as membership attacks compute it from outputs.

Outputs of two classes may be a single logit, (n,) or (n, 1), of class 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput


def log_probabilities(outputs: Tensor) -> Tensor:
    """Return log p of every class, (n, classes), from logits (n, classes), (n, 1) or (n,)."""
    if outputs.dim() == 1 or outputs.shape[1] == 1:
        logit = outputs.reshape(-1)
        outputs = torch.stack([torch.zeros_like(logit), logit], 1)
    return outputs.double().log_softmax(1)


def losses(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of each row, (n,), at least 0; labels (n,) int64."""
    return -log_probabilities(outputs).gather(1, labels.reshape(-1, 1).long()).squeeze(1)


def margins(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return log(p / (1 - p)) for p the probability of the true label, (n,): the logit-scaled confidence.

    1 - p is summed over the other classes in the log domain, so that a p that rounds to 1 stays finite.
    """
    known = log_probabilities(outputs)
    true = torch.zeros_like(known, dtype=torch.bool).scatter(1, labels.reshape(-1, 1).long(), True)
    return known[true] - known.masked_fill(true, -torch.inf).logsumexp(1)


def check_classes(attack: str, classes: int | None) -> int:
    """Return the number of classes; raise `InvalidInput` for a regression, which has no confidence in a label."""
    if classes is None:
        raise InvalidInput(f"{attack} needs a classification; this run learns a regression")
    return classes
