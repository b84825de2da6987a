"""White-box inversion by second order: rows whose release equals what was seen, by L-BFGS from a regression's rows.

Paper: none; after He, Zhang, Lee, "Model inversion attacks against collaborative inference", ACSAC 2019 (white box),
whose search takes thousands of steps of first order.

For a row x of d numbers and its release z of m numbers, whose variance over auxiliary rows is s, minimise

    |f(x) - z|^2 / s  +  w (x - mu)' S^-1 (x - mu)  +  10 |x - clip(x)|^2

with mu and S the mean and shrunk covariance of the auxiliary rows, and clip to the value range. f has the run's
defenses at their mean. If these are random the attack adapts: w is `prior` plus the variance of the release's noise
over s, which makes the minimum the most probable row under Gaussian noise and a Gaussian prior, searched in the basis
in which S is the identity. With a prior annealed to zero the same work came no nearer to the rows than a search from
the regression's.

The search starts from the ridge regression from releases of the auxiliary rows under the known weights
(`splitfed.attacks.reconstruction.linear_inverse`). Every victim has a search direction, a step and a stopping point of
its own (`splitfed.attacks.networks.row_lbfgs`). If f is injective the search ends at the rounding of f: of float32, or
with `double` of float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from splitfed.attacks.base import FORWARD, Attack, Budgets, Knowledge, Needs, Progress, Releases, Space, unwrap
from splitfed.attacks.networks.query_passes import hold_out, join_values, query_passes
from splitfed.attacks.networks.ridge_map import fit_ridge_map
from splitfed.attacks.networks.row_lbfgs import RowLbfgs
from splitfed.attacks.reconstruction.inversion import VICTIMS_AT_ONCE, noise_variance, release_variance
from splitfed.core.errors import require_count, require_number
from splitfed.core.messages import View
from splitfed.core.rows import flat_rows

OUTSIDE = 10.0
"""Weight of the squared distance of a row from the value range."""
SHRINK = 0.05
"""Share of the mean variance that is added in every direction of the prior, as few rows span few directions."""
LEAST_VARIANCE = 1e-12


@dataclass(frozen=True)
class LbfgsInversion(Attack):
    """At most `iterations` steps of L-BFGS for each victim, with a memory of `history` steps.

    `queries`: draws of the defenses for the initial regression. `prior`: weight of the Gaussian prior, which helps if
    the release does not determine the row. `double`: whether the client's segment is computed in float64, whatever the
    type of its weights.
    """

    requires: ClassVar[frozenset[Needs]] = frozenset({Needs.RELEASES, Needs.UPSTREAM, Needs.AUXILIARY})
    adapts_to = FORWARD
    budgets: ClassVar[Budgets] = {
        "quick": {"iterations": 200},
        "standard": {"iterations": 800},
        "full": {"iterations": 3000},
    }
    space: ClassVar[Space] = {"history": (5, 10, 30), "prior": (0.0, 1e-6, 1e-4, 1e-2)}

    iterations: int = field(default=800, metadata=require_count("lbfgs_inversion iterations", low=1))
    history: int = field(default=10, metadata=require_count("lbfgs_inversion history", low=1))
    queries: int = field(default=5, metadata=require_count("lbfgs_inversion queries", low=1))
    prior: float = field(default=0.0, metadata=require_number("lbfgs_inversion prior", low=0.0))
    double: bool = False

    def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Tensor:
        """Return the rows found for the releases in the view: (victims, *shape)."""
        seen = view.select(kind="activation").tensors(knowledge.device)
        x, function, sample = unwrap(knowledge.auxiliary), unwrap(knowledge.upstream), unwrap(knowledge.sample)
        start = self._regress(seen, x, sample, generator)
        if knowledge.value_range is not None:
            start = start.clamp(*knowledge.value_range)
        scale = max(release_variance(function, x, seen), LEAST_VARIANCE)
        weight = self.prior + noise_variance(function, sample, x[:VICTIMS_AT_ONCE]) / scale
        searched = _in_float64(function) if self.double else lambda rows: function(rows.to(x.dtype))
        search = RowSearch(searched, scale, weight, GaussianPrior.of(x) if weight else None, knowledge)
        found, total = [], len(start) * self.iterations
        for first in range(0, len(start), VICTIMS_AT_ONCE):
            part = slice(first, first + VICTIMS_AT_ONCE)

            def told(done: int, _: int, first: int = first) -> None:
                progress(first * self.iterations + done * min(VICTIMS_AT_ONCE, len(start) - first), total)

            few = {name: z[part] for name, z in seen.items()}
            found.append(search.run(few, start[part], self.iterations, self.history, told))
        progress(total, total)
        return torch.cat(found).to(x.dtype).view(-1, *knowledge.shape)

    def _regress(
        self, seen: Releases, x: Tensor, sample: Callable[[Tensor], Releases], generator: torch.Generator
    ) -> Tensor:
        kept, aside = hold_out(len(x), generator, "lbfgs_inversion")
        names = list(seen)
        passes = [join_values(p, names) for p in query_passes(sample, x, self.queries)]
        fitted, weights = fit_ridge_map(passes, x.flatten(1), kept, aside)
        return fitted.predict(weights, join_values(seen, names))


class GaussianPrior(NamedTuple):
    """A Gaussian of rows: `mean` (d,), and `root` (d, d), with root root' the shrunk covariance; float64."""

    mean: Tensor
    root: Tensor

    @classmethod
    def of(cls, x: Tensor) -> GaussianPrior:
        """Return the Gaussian of the rows x (n, *shape)."""
        flat = x.flatten(1).double()
        centred = flat - flat.mean(0)
        covariance = centred.T @ centred / max(len(x) - 1, 1)
        least = max(float(covariance.diagonal().mean()), LEAST_VARIANCE)
        variances, basis = torch.linalg.eigh(covariance)
        return cls(flat.mean(0), basis * (variances.clamp_min(0.0) + SHRINK * least).sqrt())


class RowSearch(NamedTuple):
    """The search for rows whose release under `function`, of rows in float64, equals a received one.

    `scale`: variance of a released number; `weight`: that of the `prior`, which is None if the weight is 0.
    """

    function: Callable[[Tensor], Releases]
    scale: float
    weight: float
    prior: GaussianPrior | None
    knowledge: Knowledge

    def run(
        self, seen: Releases, start: Tensor, iterations: int, history: int, progress: Progress | None = None
    ) -> Tensor:
        """Return rows (n, d), float64, for the releases `seen`, from `start` (n, d)."""
        if self.prior is None:
            return RowLbfgs(lambda x, rows: self._misfit(seen, x, rows), start, history).run(iterations, progress)
        mean, root = self.prior

        def losses(u: Tensor, rows: Tensor) -> Tensor:
            return self._misfit(seen, u @ root.T + mean, rows) + self.weight * u.square().sum(1)

        begun = torch.linalg.solve(root, (start.double() - mean).T).T
        return RowLbfgs(losses, begun, history).run(iterations, progress) @ root.T + mean

    def _misfit(self, seen: Releases, x: Tensor, rows: Tensor) -> Tensor:
        released = self.function(x.view(-1, *self.knowledge.shape))
        parts = [flat_rows((released[name] - z[rows]).double().square()).sum(1) for name, z in seen.items()]
        loss = torch.stack(parts).sum(0) / self.scale
        if (bounds := self.knowledge.value_range) is None:
            return loss
        return loss + OUTSIDE * (x - x.clamp(*bounds)).square().sum(1)


class _Float64(TorchFunctionMode):
    """Mode in which every operation of torch takes and returns float64 instead of any other floating type."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return tree_map(_widen, func(*tree_map(_widen, args), **tree_map(_widen, kwargs or {})))


def _widen(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _in_float64(function: Callable[[Tensor], Releases]) -> Callable[[Tensor], Releases]:
    def computed(x: Tensor) -> Releases:
        with _Float64():
            return function(x)

    return computed
