"""A model's confidence in the true label of a row, as membership attacks compute it, and Gaussians of it over copies.

Paper: Carlini, Chien, Nasr, Song, Terzis, Tramèr, "Membership inference attacks from first principles", IEEE S&P 2022.
Outputs of two classes may be a single logit, (n,) or (n, 1), of class 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LEAST = 1e-3  # of a standard deviation, in log odds: copies that agree to the bit prove nothing


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


def moments(values: Tensor, chosen: Tensor, pooled: bool) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of the `chosen` entries of each column of `values` (copies, n): (n,) each.

    `pooled`: whether all columns share the root of the mean variance. Every column needs two chosen entries.
    """
    count = chosen.sum(0)
    mean = (values * chosen).sum(0) / count
    variance = ((values - mean).square() * chosen).sum(0) / (count - 1)
    if pooled:
        variance = variance.mean().expand_as(mean)
    return mean, variance.sqrt().clamp_min(_LEAST)


def membership_score(seen: Tensor, confidence: Tensor, held: Tensor, online: bool, pooled: bool) -> Tensor:
    """Return the score of each row by the confidence `seen` (n,) in it, given that of copies, (copies, n).

    `held`: (copies, n) bool, whether the copy learnt from the row. Online it is the log likelihood ratio of copies with
    and without the row; offline the number of standard deviations above the copies without it. `pooled` as in
    `moments`.
    """
    mean, deviation = moments(confidence, ~held, pooled)
    if not online:
        return (seen - mean) / deviation
    inner, spread = moments(confidence, held, pooled)
    return log_density(seen, inner, spread) - log_density(seen, mean, deviation)


def log_density(value: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
    """Return the log density of Gaussians at `value`, up to a constant that all of them share."""
    return -((value - mean) / deviation).square() / 2 - deviation.log()
