"""Rotated MNIST: some images of each digit of MNIST-5k, once for every angle; each angle is a domain.

Paper: Ghifary, Kleijn, Zhang, Balduzzi, "Domain generalization for object recognition with multi-task autoencoders",
ICCV 2015.

In the paper angles are counterclockwise, 0 to 75 in steps of 15, with 100 images of each digit; angles here are
clockwise, and by default those of Zhou, Li, Chen, Ding, "Model agnostic federated mutual learning", 2023. All domains
show the same images, as in the paper; `Dataset.clients` divides them once for all angles, so that no client's test
image is another's training image at another angle.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from splitfed.core.errors import InvalidInput, check_count
from splitfed.core.random import generator
from splitfed.data.dataset import Dataset
from splitfed.data.rotation import ANGLES
from splitfed.data.sources.packaged import packaged_mnist


def rotated_mnist(angles: Sequence[float] = ANGLES, per_class: int = 100, seed: int = 0) -> Dataset:
    """Return x (angles * 10 * per_class, 1, 28, 28) in [0, 1], ten classes, and the number of the angle as domain.

    `per_class`: images of each digit, at most 500, drawn by `seed`. `.clients(len(angles), by_domain=True)` makes one
    client for each angle.
    """
    check_count("per_class", per_class, low=1)
    data = packaged_mnist("rotated_mnist")
    counts = data.y.bincount()
    if per_class > int(counts.min()):
        raise InvalidInput(f"per_class={per_class} is not allowed; there are {int(counts.min())} images of some digit")
    order = torch.randperm(len(data), generator=generator(seed, "rotated_mnist"))
    chosen = [order[data.y[order] == digit][:per_class] for digit in range(10)]
    return data.rows(torch.cat(chosen)).rotated(angles)
