"""Class means under a secure sum: each client uploads a row for every class, zero for absent ones, and class weights.

Under a secure sum the server must not learn which classes a client holds. Every client therefore uploads, for each
class of the task, its row times its weight of that class, and the weights; both are zero for a class that the client
does not hold. The sum of the rows over the sum of the weights is the mean over the clients that hold the class. The
error of this mean is that of the secure sum divided by the class's weight in it: a class with one row in a thousand has
errors a thousand times as large. If one client alone holds a class, the sum is that client's mean, although the server
does not learn which client it is.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from splitfed.core.topology import Head
from splitfed.federated.topology_values import count_classes

MEANS, WEIGHTS = "means", "weights"


def class_upload(means: Mapping[str, Tensor], weights: Mapping[str, float], head: Head) -> dict[str, Tensor]:
    """Return a client's upload in float64: its `means` times `weights`, (classes, width), and the weights, (classes,).

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
    """Return class -> row and class -> weight of the mean of all uploads, for classes that at least one client holds.

    A class that no client holds has weight exactly 0: sums of zeros have no error.
    """
    held = [label for label, weight in enumerate(mean[WEIGHTS].tolist()) if weight > 0]
    rows = {str(label): mean[MEANS][label] for label in held}
    return rows, {str(label): float(mean[WEIGHTS][label]) for label in held}
