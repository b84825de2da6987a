"""Means by class under a secure sum: rows of all classes, zeros where a client has none, and each class's weight.

A server that gets only the sum must not learn either which classes a client holds. Every client therefore uploads a
row for each class there is, times the weight that it gives that class, and the weights; where it holds none of a class,
both are zero. The sum of the rows over the sum of the weights is the mean over the clients that hold the class. The
error of such a mean is that of the secure sum over the class's weight in it: a class with one row in a thousand has
errors a thousand times as large. Of a class that one client alone holds the sum shows that client's mean, though not
whose it is.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from splitfed.core.topology import Head
from splitfed.federated.topology_values import count_classes

MEANS, WEIGHTS = "means", "weights"


def class_upload(means: Mapping[str, Tensor], weights: Mapping[str, float], head: Head) -> dict[str, Tensor]:
    """Return what a client uploads: `means` (classes, width) times `weights`, and these (classes,), in float64.

    `means`: class -> (width,) of the classes that it holds; `weights`: class -> weight in [0, 1].
    """
    width = next(iter(means.values())).numel() if means else 0
    # A binary head has one output.
    classes = max(count_classes(head), 2)
    rows, shares = torch.zeros(classes, width, dtype=torch.float64), torch.zeros(classes, dtype=torch.float64)
    for name, mean in means.items():
        rows[int(name)], shares[int(name)] = mean.double().cpu() * weights[name], weights[name]
    return {MEANS: rows, WEIGHTS: shares}


def class_sums(mean: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return class -> row and class -> weight of the mean of all uploads, of the classes that somebody holds.

    A class that nobody holds has weight 0 exactly: sums of zeros have no error.
    """
    held = [label for label, weight in enumerate(mean[WEIGHTS].tolist()) if weight > 0]
    rows = {str(label): mean[MEANS][label] for label in held}
    return rows, {str(label): float(mean[WEIGHTS][label]) for label in held}
