"""Oracles: reconstructions computed from the truth, as upper references of a score; for the scorer alone, not attacks.

They show how near auxiliary rows, or a few principal directions, come to a victim at best. An adversary that sees
releases alone cannot compute them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from splitfed.attacks.networks.nearest_rows import nearest_positions

COMPONENTS = 16
"""Number of principal directions, fitted on the victims; requires more than twice as many victims."""

PCA, NEAREST_ROW = f"oracle_pca_{COMPONENTS}", "oracle_nearest_row"
ORACLES = (PCA, NEAREST_ROW)


def oracle_predictions(truth: Tensor, auxiliary: Tensor) -> dict[str, Tensor]:
    """Return the oracles' reconstructions of `truth` (n, ...): name -> (n, ...), float64.

    "oracle_pca_16": the truth projected on the 16 principal components of the victims, the least error of any linear
    code of 16 numbers; left out for at most 32 victims or at most 16 numbers a row. "oracle_nearest_row": the row of
    `auxiliary` (m, ...) nearest to the truth.
    """
    found = {}
    flat = truth.double().flatten(1)
    if len(flat) > 2 * COMPONENTS and flat.shape[1] > COMPONENTS:
        found[PCA] = principal_reconstruction(flat, COMPONENTS).view_as(truth)
    if len(auxiliary):
        nearest = nearest_positions(auxiliary.flatten(1).to(truth.device), flat, 1)[:, 0]
        found[NEAREST_ROW] = auxiliary.to(truth.device)[nearest].double()
    return found


def principal_reconstruction(x: Tensor, components: int) -> Tensor:
    """Return rows x (n, d) projected on the affine space of their `components` principal directions: (n, d)."""
    mean = x.mean(0)
    directions: Tensor = torch.linalg.svd(x - mean, full_matrices=False)[2][:components]
    return mean + (x - mean) @ directions.T @ directions
