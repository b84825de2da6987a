"""L-BFGS for independent rows: each has its own direction, step and end, and all are evaluated as one batch.

Papers: Liu, Nocedal, "On the limited memory BFGS method for large scale optimization", Mathematical Programming 45,
1989 (two-loop recursion, scaled by s'y / y'y); Lewis, Overton, "Nonsmooth optimization via quasi-Newton methods",
Mathematical Programming 141, 2013: a step by bisection that meets the weak Wolfe conditions, and ends where the strong
ones are out of reach, at a kink of a ReLU or of a maximum.

A common line search would limit all rows to the smallest step. Numbers are float64; losses may have a lower precision,
and a row ends when its loss no longer falls at that precision.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from splitfed.attacks.base import Progress

DECREASE, CURVATURE = 1e-4, 0.9
"""Constants of the weak Wolfe conditions."""
MOST_TRIALS = 12
"""Maximum number of steps tried along a direction; then the best step that lowered the loss is taken."""
LEAST_GAIN = 1e-9
"""Relative decrease of the loss below which, several times in succession, a row ends."""
PATIENCE = 5
LEAST_BEND = 1e-12
"""Cosine of a pair (s, y) below which it is left out, as it would have no positive curvature."""

Losses = Callable[[Tensor, Tensor], Tensor]
"""Maps numbers (n, d), float64, and the positions of their rows, (n,), to losses (n,), float64."""


class RowLbfgs:
    """Minimises `losses` from `start` (rows, d) with the last `history` >= 1 steps of each row."""

    def __init__(self, losses: Losses, start: Tensor, history: int = 30) -> None:
        self._losses, self._history = losses, history
        self.x = start.detach().double().clone()
        rows, width = self.x.shape
        self._every = torch.arange(rows, device=start.device)
        self.loss, self._gradient = self._evaluate(self.x, self._every)
        # Pairs by the number of their step, modulo `history`; weight 1 / s'y, or 0 where the row has none there.
        self._steps, self._changes = (self.x.new_zeros(history, rows, width) for _ in range(2))
        self._weights, self._scale = self.x.new_zeros(history, rows), self.x.new_ones(rows)
        self._count = 0
        self._idle = torch.zeros(rows, dtype=torch.long, device=start.device)
        self.evaluations = rows
        """Number of evaluations of a row's loss and gradient so far."""

    @property
    def active(self) -> Tensor:
        """Positions of the rows that have not ended, (n,)."""
        return self._every[self._idle < PATIENCE]

    def run(self, iterations: int, progress: Progress | None = None) -> Tensor:
        """Return the rows after at most `iterations` steps of each: (rows, d)."""
        for number in range(iterations):
            rows = self.active
            if not len(rows):
                break
            self._step(rows)
            if progress is not None and number % 10 == 9:
                progress(number + 1, iterations)
        return self.x

    def _evaluate(self, x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            losses = self._losses(x, rows)
            (gradient,) = torch.autograd.grad(losses.sum(), x)
        return torch.nan_to_num(losses.detach(), nan=torch.inf), torch.nan_to_num(gradient, 0.0, 0.0, 0.0)

    def _step(self, rows: Tensor) -> None:
        direction = self._direction(rows)
        gradient, before = self._gradient[rows], self.loss[rows]
        slope = _dot(direction, gradient)
        # Rounding may turn a direction round: the gradient then begins a new history.
        lost = slope >= 0
        if bool(lost.any()):
            self._forget(rows[lost])
            direction[lost], slope[lost] = -gradient[lost], -_dot(gradient[lost], gradient[lost])
        fresh = self._weights[:, rows].eq(0).all(0)
        length = direction.norm(dim=1).clamp_min(torch.finfo(torch.float64).tiny)
        first = torch.where(fresh, (1 / length).clamp(max=1.0), 1.0)
        x, loss, new = self._search(rows, direction, slope, first)
        moved = loss < before
        step, change = x - self.x[rows], new - gradient
        self.x[rows], self.loss[rows] = torch.where(moved[:, None], x, self.x[rows]), torch.where(moved, loss, before)
        self._gradient[rows] = torch.where(moved[:, None], new, gradient)
        gained = (before - self.loss[rows]) > LEAST_GAIN * before
        self._idle[rows] = torch.where(gained, 0, self._idle[rows] + 1)
        self._remember(rows, step, change, moved)
        # What a direction from its history does not lower begins anew; what its gradient does not lower has ended.
        self._forget(rows[~moved])
        self._idle[rows[~moved & fresh]] = PATIENCE

    def _direction(self, rows: Tensor) -> Tensor:
        found = -self._gradient[rows]
        places = [number % self._history for number in range(max(self._count - self._history, 0), self._count)]
        # All rows at once are read where they stand: copies of every pair take a tenth of a step.
        part = slice(None) if len(rows) == len(self._every) else rows
        pairs = [(self._steps[k, part], self._changes[k, part], self._weights[k, part]) for k in places]
        shares = []
        for s, y, weight in reversed(pairs):
            shares.append(weight * _dot(s, found))
            found = found - shares[-1][:, None] * y
        found = found * self._scale[rows, None]
        for (s, y, weight), share in zip(pairs, reversed(shares), strict=True):
            found = found + (share - weight * _dot(y, found))[:, None] * s
        return found

    def _forget(self, rows: Tensor) -> None:
        self._weights[:, rows], self._scale[rows] = 0.0, 1.0

    def _remember(self, rows: Tensor, step: Tensor, change: Tensor, moved: Tensor) -> None:
        product = _dot(step, change)
        held = moved & (product > LEAST_BEND * step.norm(dim=1) * change.norm(dim=1))
        place = self._count % self._history
        self._steps[place, rows], self._changes[place, rows] = step, change
        self._weights[place] = 0.0
        self._weights[place, rows[held]] = 1 / product[held]
        self._scale[rows[held]] = product[held] / _dot(change[held], change[held])
        self._count += 1

    def _search(self, rows: Tensor, direction: Tensor, slope: Tensor, step: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return rows, losses and gradients after a step that meets the weak Wolfe conditions, or the best step."""
        base, before = self.x[rows], self.loss[rows]
        best_x, best, best_gradient = base.clone(), before.clone(), self._gradient[rows].clone()
        low, high = torch.zeros_like(step), torch.full_like(step, torch.inf)
        step, open_ = step.clone(), torch.arange(len(rows), device=rows.device)
        for _ in range(MOST_TRIALS):
            x = base[open_] + step[open_, None] * direction[open_]
            loss, gradient = self._evaluate(x, rows[open_])
            self.evaluations += len(open_)
            steep = _dot(gradient, direction[open_])
            falls = loss <= before[open_] + DECREASE * step[open_] * slope[open_]
            flat = steep >= CURVATURE * slope[open_]
            better = open_[loss < best[open_]]
            picked = loss < best[open_]
            best_x[better], best[better], best_gradient[better] = x[picked], loss[picked], gradient[picked]
            high[open_] = torch.where(falls, high[open_], step[open_])
            low[open_] = torch.where(falls & ~flat, step[open_], low[open_])
            done = falls & flat
            # A step that met both conditions is the one, whatever else lowered the loss more.
            final = open_[done]
            best_x[final], best[final], best_gradient[final] = x[done], loss[done], gradient[done]
            open_ = open_[~done]
            if not len(open_):
                break
            bounded = torch.isfinite(high[open_])
            step[open_] = torch.where(bounded, (low[open_] + high[open_]) / 2, 2 * low[open_])
        return best_x, best, best_gradient


def _dot(one: Tensor, other: Tensor) -> Tensor:
    return (one * other).sum(1)
