"""Ridge regression from releases to rows in closed form, in the primal or the dual, whichever is smaller.

Paper: none; ridge regression as in Hoerl, Kennard, "Ridge regression: biased estimation for nonorthogonal problems",
Technometrics 1970.

With releases Z (rows, m) and data X (rows, d), both centred, the weights are

    B = (Z'Z + lam tr(Z'Z)/m I)^-1 Z'X                     where m <= rows,
    B = Z'(ZZ' + lam tr(Z'Z)/m I)^-1 X                     where m > rows (the same matrix),

in float64, and a row is x^ = (z - mean z) B + mean x. `lam` is chosen from `RIDGES` on held-out rows; the weights are
then solved for all rows. In the dual B is never formed: (z - mean z) Z' has only as many columns as there are rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

RIDGES = (1e-10, 1e-7, 1e-4, 1e-2, 1.0, 1e2)
"""Candidate ridges, in units of the mean variance of a released number. The two smallest suit invertible releases."""

MOST = 3000
"""Maximum side of the factorised matrix: about a second on one core, 72 MB."""

_CHUNK = 1 << 22  # numbers of a release held in float64 at a time


class RidgeMap:
    """Ridge regression on `rows` pairs: `passes` (n, m) of releases of x (n, d), each pass drawn afresh.

    If rows times passes exceed the limit `MOST` of the dual, only the first `MOST` pairs, pass by pass, are used.
    """

    def __init__(self, passes: Sequence[Tensor], x: Tensor, rows: Tensor) -> None:
        rows = rows.to(x.device)
        self._width = passes[0].shape[1]
        self._pairs = [(z, rows) for z in passes]
        self.wide = self._width > min(MOST, len(rows) * len(passes))
        if self.wide:
            left, self._pairs = MOST, []
            for z in passes:
                if left:
                    self._pairs.append((z, rows[:left]))
                    left -= len(rows[:left])
        count = sum(len(part) for _, part in self._pairs)
        self._z_mean = torch.stack([_sum_rows(z, part) for z, part in self._pairs]).sum(0) / count
        every = torch.cat([part for _, part in self._pairs])
        x = x.double()
        self._x_mean = x[every].mean(0)
        left_over = x[every] - self._x_mean
        if self.wide:
            self._matrix, self._right = self._products(self._pairs), left_over
        else:
            self._matrix = x.new_zeros(self._width, self._width)
            self._right = x.new_zeros(self._width, x.shape[1])
            for z, part in self._pairs:
                for few in part.split(self._chunk()):
                    centred = z[few].double() - self._z_mean
                    self._matrix += centred.T @ centred
                    self._right += centred.T @ (x[few] - self._x_mean)
        self._unit = float(self._matrix.trace()) / self._width

    def solve(self, ridge: float) -> Tensor | None:
        """Return the weights, (m, d) or in the dual (rows, d), for a `ridge` > 0.

        None if rounding makes the matrix singular.
        """
        weight = ridge * self._unit
        if weight == 0:
            # Releases that never vary say nothing.
            return torch.zeros_like(self._right)
        matrix = self._matrix.clone()
        matrix.diagonal().add_(weight)
        factor, failed = torch.linalg.cholesky_ex(matrix)
        found: Tensor = torch.cholesky_solve(self._right, factor)
        return None if bool(failed) or not bool(torch.isfinite(found).all()) else found

    def predict(self, weights: Tensor, z: Tensor) -> Tensor:
        """Return rows (n, d), float64, for releases z (n, m)."""
        if self.wide:
            every = torch.arange(len(z), device=z.device)
            return self._products([(z, every)]) @ weights + self._x_mean
        parts = [(few.double() - self._z_mean) @ weights for few in z.split(self._chunk())]
        return torch.cat(parts) + self._x_mean

    def _chunk(self) -> int:
        return max(1, _CHUNK // self._width)

    def _products(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Return the inner products of releases with those of the pairs, all centered: (n, rows)."""
        own = sum(len(rows) for _, rows in self._pairs)
        found = self._z_mean.new_zeros(sum(len(rows) for _, rows in pairs), own)
        step = max(1, _CHUNK // (len(found) + own))
        for start in range(0, self._width, step):
            columns = slice(start, start + step)
            left, right = (
                torch.cat([z[:, columns][rows].double() for z, rows in some]) - self._z_mean[columns]
                for some in (pairs, self._pairs)
            )
            found += left @ right.T
        return found


def fit_ridge_map(passes: Sequence[Tensor], x: Tensor, kept: Tensor, aside: Tensor) -> tuple[RidgeMap, Tensor]:
    """Return the regression on all rows of x (n, d), and its weights at the ridge with the least error on rows `aside`.

    `passes`: releases (n, m) of these rows; `kept`: positions of the rows that the compared ridges are fitted to.
    """
    trial, aside = RidgeMap(passes, x, kept), aside.to(x.device)

    def error(ridge: float) -> float:
        weights = trial.solve(ridge)
        if weights is None:
            return float("inf")
        # One draw of each row, as of a victim.
        return float((trial.predict(weights, passes[0][aside]) - x[aside].double()).square().mean())

    ranked = sorted(RIDGES, key=error)
    whole = RidgeMap(passes, x, torch.arange(len(x)))
    for ridge in ranked:
        if (weights := whole.solve(ridge)) is not None:
            return whole, weights
    raise AssertionError("a ridge as large as the matrix leaves it positive definite")


def _sum_rows(z: Tensor, rows: Tensor) -> Tensor:
    step = max(1, _CHUNK // z.shape[1])
    return torch.stack([z[few].double().sum(0) for few in rows.split(step)]).sum(0)
