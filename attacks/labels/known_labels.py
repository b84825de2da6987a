"""Hints: randomly drawn victims whose labels an adversary knows.

An attack requests a number of them for each class; it gets their positions, and they are excluded from its scores.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput, check_count


def draw_hints(labels: Tensor, counts: Mapping[int, int], generator: torch.Generator) -> dict[int, Tensor]:
    """Return the positions of `counts[c]` victims of each class c, drawn without replacement: c -> (count,) int64.

    labels: (victims,). Raises `InvalidInput` for more hints than victims of the class, and if no victim is left to
    score.
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
        raise InvalidInput(f"hints for all {len(labels)} victims leave no victim to attack; expected fewer")
    return drawn


def rows_without_hints(victims: int, hints: Mapping[int, Tensor]) -> Tensor:
    """Return the positions, in order, of those of the `victims` that are no hints: (m,) int64."""
    left = torch.ones(victims, dtype=torch.bool)
    for rows in hints.values():
        left[rows] = False
    return left.nonzero()[:, 0]


def name_clusters(scores: Tensor, hints: Mapping[int, Tensor]) -> Tensor:
    """Return `scores` (n, classes) with their columns permuted to fit the `hints` best.

    The permutation has the greatest sum of scores of the known rows at their classes.
    """
    # SciPy's optimizers take half a second to import.
    from scipy.optimize import linear_sum_assignment

    fit = torch.zeros(scores.shape[1], scores.shape[1], dtype=torch.float64)
    for number, rows in hints.items():
        fit[:, number] = scores[rows.to(scores.device)].double().sum(0).cpu()
    columns = linear_sum_assignment(-fit.T.numpy())[1]
    return scores[:, torch.as_tensor(columns, device=scores.device)]
