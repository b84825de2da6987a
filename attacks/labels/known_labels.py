"""Hints: victims whose label an adversary happens to know, drawn at random by whoever runs the experiment.

An attack asks for a number of them per class; it gets their positions, and they are left out when it is scored.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput, check_count


def draw_hints(labels: Tensor, counts: Mapping[int, int], generator: torch.Generator) -> dict[int, Tensor]:
    """Return the positions of `asked[c]` victims of each class c, drawn without replacement: c -> (count,) int64.

    labels: (victims,). Raises `InvalidInput` for more hints than there are victims of the class, and when nobody
    would be left to attack.
    """
    drawn = {}
    for number, count in counts.items():
        check_count(f"hints of class {number}", count)
        members = (labels == number).nonzero()[:, 0].cpu()
        if count > len(members):
            raise InvalidInput(f"hints={count} is not allowed; there are {len(members)} victims of class {number}")
        order = torch.randperm(len(members), generator=generator, device=generator.device).cpu()
        drawn[number] = members[order[:count]]
    if counts and sum(counts.values()) == len(labels):
        raise InvalidInput(f"hints for all {len(labels)} victims leave nobody to attack; expected fewer")
    return drawn


def rows_without_hints(victims: int, hints: Mapping[int, Tensor]) -> Tensor:
    """Return the positions of the `victims` that no hint names, in order: (m,) int64."""
    left = torch.ones(victims, dtype=torch.bool)
    for rows in hints.values():
        left[rows] = False
    return left.nonzero()[:, 0]


def name_clusters(scores: Tensor, hints: Mapping[int, Tensor]) -> Tensor:
    """Return `scores` (n, classes) with their columns in the order in which they fit the `hints` best.

    Of all ways to give each column to a class, the one with the greatest sum of scores over the known rows is taken.
    """
    # SciPy's optimizers take half a second to import.
    from scipy.optimize import linear_sum_assignment

    fit = torch.zeros(scores.shape[1], scores.shape[1], dtype=torch.float64)
    for number, rows in hints.items():
        fit[:, number] = scores[rows.to(scores.device)].double().sum(0).cpu()
    columns = linear_sum_assignment(-fit.T.numpy())[1]
    return scores[:, torch.as_tensor(columns, device=scores.device)]
