"""Gaussian mixture: fits a Gaussian of cut gradients for each class, to known and unknown victims together.

Paper: after Miller, Uyar, "A mixture of experts classifier with learning based on both labelled and unlabelled data",
NIPS 1996, and Nigam, McCallum, Thrun, Mitchell, "Text classification from labeled and unlabeled documents using EM",
Machine Learning 39, 2000: expectation maximization (Dempster, Laird, Rubin, Journal of the Royal Statistical Society B
39, 1977) in which rows of known class keep it. The use of mixtures against defended labels, and the features of a row
that are fitted, are ours.

A class has a mean and a covariance of its own, so that a defense's noise reveals the class if it differs between
classes; nothing is assumed of undefended gradients. For example, `marvell` draws different noise for each class, and
`max_norm` stretches long rows less.

The features are the C - 1 leading principal components of the rows, for C classes, and the cube root of the squared
length of the remainder of a row. Gradients p - y of C logits lie in C - 1 directions, through a linear head too; noise
in all other directions is summarised by one number, which is nearly Gaussian if the noise is (Wilson, Hilferty, "The
distribution of chi-square", PNAS 17, 1931). Components and remainders below the rounding of single precision
(`ROUNDING`) are left out. All features are scaled to variance 1 over the victims.

A class's covariance is drawn towards that of all classes, after Friedman, "Regularized discriminant analysis", Journal
of the American Statistical Association 84, 1989: the latter has the weight of 20 rows, a constant that was set on
synthetic gradients. It has itself a prior of one row and covariance I / C^(2 / numbers), and a mean one of .01 rows at
the mean of all, after Fraley, Raftery, "Bayesian regularization for normal mixture estimation and model-based
clustering", Journal of Classification 24, 2007. Frequencies of classes are those among victims that are not known, with
one row more for each. The first step uses the known victims alone. The algorithm is deterministic.

Gradients need not be Gaussian: without a defense, attacks that compare directions do as well or better. Labels that a
defense has changed in training (`label_dp`) are not modelled, as known victims are held to their true ones. With few
rows, or if the classes are not clusters, the fitted components need not be the classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from splitfed.attacks.base import DefenseEffect, Knowledge, Progress, check_classes
from splitfed.attacks.labels.label_attack import LabelAttack, gradient_rows
from splitfed.core.errors import InvalidInput, require_count
from splitfed.core.messages import View

ROUNDING = 1e-5
"""Size, relative to the rows' root mean square, below which a remainder or principal component is rounding."""
PRIOR_ROWS = 0.01
"""Weight of the prior of a class's mean, in rows."""
SHARED_ROWS = 20.0
"""Weight of the covariance of all classes in that of one class, in rows."""
SETTLED = 1e-6
"""Convergence threshold: largest change of any row's class probabilities in the last step."""


@dataclass(frozen=True)
class GaussianMixture(LabelAttack):
    """Predicts classes by the log posterior of a semi-supervised Gaussian mixture, one Gaussian a class.

    `hints`: known victims of each class; `components`: number of leading principal components that are fitted, at most
    those of the rows (None: one fewer than classes); `iterations`: maximum steps of expectation maximization.
    """

    adapts_to = frozenset({DefenseEffect.TASK_WEIGHT, DefenseEffect.GRADIENT})

    hints: int = field(default=6, metadata=require_count("gaussian_mixture hints", low=1))
    components: int | None = field(default=None, metadata=require_count("gaussian_mixture components", low=1))
    iterations: int = field(default=200, metadata=require_count("gaussian_mixture iterations", low=1))

    def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Tensor:
        """Return the log posterior of each class for each victim: (victims, classes).

        Known victims get a posterior too, which need not be at their known class. Raises `InvalidInput` without a known
        victim of every class, and for gradients that are not finite.
        """
        return self.fit(view, knowledge).log_posterior(gradient_rows(view, knowledge.device))

    def fit(self, view: View, knowledge: Knowledge) -> FittedMixture:
        """Return the mixture fitted to the gradients in `view`; raises `InvalidInput` as `run`."""
        classes = check_classes("gaussian_mixture", knowledge.classes)
        if any(len(knowledge.hints.get(number, ())) == 0 for number in range(classes)):
            raise InvalidInput(f"gaussian_mixture needs a known victim of each of {classes} classes")
        rows = gradient_rows(view, knowledge.device)
        if infinite := int((~torch.isfinite(rows)).any(1).sum()):
            raise InvalidInput(
                f"gaussian_mixture needs finite gradients; those of {infinite} of {len(rows)} rows are not"
            )
        reduction = reduce_rows(rows, max(classes - 1, 1) if self.components is None else self.components)
        hints = {number: knowledge.hints[number].to(rows.device) for number in range(classes)}
        return FittedMixture(reduction, fit_gaussians(reduction(rows), hints, self.iterations))


@dataclass(frozen=True)
class Reduction:
    """Maps rows to features: principal components, and the size of the remainder if there is one.

    `mean` (numbers,) of the rows, `axes` (numbers, components); `remains`: whether there are remainders; `shift` and
    `scale`, one each for every feature, standardise the features to mean 0 and variance 1.
    """

    mean: Tensor
    axes: Tensor
    remains: bool
    shift: Tensor | float = 0.0
    scale: Tensor | float = 1.0

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the features of `rows` (n, numbers): (n, components), or (n, components + 1) with the remainder.

        Float64.
        """
        centered = rows.double() - self.mean
        along = centered @ self.axes
        if self.remains:
            lengths = _remainders(centered, self.axes) ** (2 / 3)
            along = torch.cat([along, lengths[:, None]], 1)
        return (along - self.shift) / self.scale


@dataclass(frozen=True)
class Gaussians:
    """Means (classes, numbers), lower Cholesky factors of covariances (classes, numbers, numbers), and log frequencies.

    `log_shares`: (classes,), of the classes among the rows whose class is not known.
    """

    means: Tensor
    factors: Tensor
    log_shares: Tensor

    def log_posterior(self, rows: Tensor) -> Tensor:
        """Return the log posterior of each class for `rows` (n, numbers): (n, classes)."""
        apart = (rows - self.means[:, None]).transpose(1, 2)
        squares = torch.linalg.solve_triangular(self.factors, apart, upper=False).square().sum(1).T
        log_sizes = self.factors.diagonal(dim1=1, dim2=2).log().sum(1)
        posterior: Tensor = (self.log_shares - log_sizes - squares / 2).log_softmax(1)
        return posterior


@dataclass(frozen=True)
class FittedMixture:
    """A fitted mixture, and the reduction of rows to the features it was fitted on."""

    reduction: Reduction
    gaussians: Gaussians

    def log_posterior(self, rows: Tensor) -> Tensor:
        """Return the log posterior of each class for gradients `rows` (n, numbers): (n, classes)."""
        return self.gaussians.log_posterior(self.reduction(rows))


def reduce_rows(rows: Tensor, components: int) -> Reduction:
    """Return the reduction of `rows` (n, numbers) to `components` principal components, or as many as there are."""
    rows = rows.double()
    centered = rows - rows.mean(0)
    least = ROUNDING * float(rows.norm())
    axes = _principal_axes(centered, components, least)
    raw = Reduction(rows.mean(0), axes, float(_remainders(centered, axes).norm()) > least)
    numbers = raw(rows)
    shift = numbers.mean(0)
    deviations = (numbers - shift).square().mean(0).sqrt()
    # A number that is the same in all rows, as the lengths of remainders may be, tells nothing.
    scale = torch.where(deviations > ROUNDING * numbers.abs().amax(0), deviations, 1.0)
    return Reduction(raw.mean, raw.axes, raw.remains, shift, scale)


def fit_gaussians(rows: Tensor, hints: Mapping[int, Tensor], iterations: int) -> Gaussians:
    """Return the Gaussians of `rows` (n, numbers), of mean 0 and variance 1, by expectation maximization.

    `hints`: class -> positions (count,) of rows that are known to belong to it, at least one; `iterations`: at most.
    """
    known = torch.zeros(len(rows), len(hints), dtype=rows.dtype, device=rows.device)
    for number, positions in hints.items():
        known[positions, number] = 1
    free = known.sum(1) == 0
    shares = known.new_full((len(hints),), 1 / len(hints))
    weights, found = known, _maximize(rows, known, shares)
    for _ in range(iterations):
        before = weights
        weights = torch.where(free[:, None], found.log_posterior(rows).exp(), known)
        shares = (weights[free].sum(0) + 1) / (free.sum() + len(hints))
        found = _maximize(rows, weights, shares)
        if float((weights - before).abs().max()) < SETTLED:
            break
    return found


def _maximize(rows: Tensor, weights: Tensor, shares: Tensor) -> Gaussians:
    """Return the maximum a posteriori Gaussians for class probabilities `weights` (n, classes) of the rows."""
    numbers, classes = rows.shape[1], weights.shape[1]
    counts = weights.sum(0)
    means = weights.T @ rows / (counts + PRIOR_ROWS)[:, None]
    apart = rows - means[:, None]
    scatter = (apart * weights.T[:, :, None]).transpose(1, 2) @ apart
    scatter = scatter + PRIOR_ROWS * means[:, :, None] * means[:, None]
    prior = torch.eye(numbers, dtype=rows.dtype, device=rows.device) / classes ** (2 / max(numbers, 1))
    pooled = (scatter.sum(0) + prior) / (counts.sum() + 1)
    covariances = (scatter + SHARED_ROWS * pooled) / (counts + SHARED_ROWS)[:, None, None]
    return Gaussians(means, torch.linalg.cholesky(covariances), shares.log())


def _principal_axes(centered: Tensor, components: int, least: float) -> Tensor:
    """Return the leading right singular vectors of `centered` (n, numbers): (numbers, count), `components` or fewer.

    `least`: vectors whose singular value is not greater are left out.
    """
    tall = len(centered) >= centered.shape[1]
    # The smaller of the two products has the same eigenvalues, the squares of the singular values.
    values, vectors = torch.linalg.eigh(centered.T @ centered if tall else centered @ centered.T)
    sizes = values.clamp_min(0).sqrt().flip(0)[:components]
    count = int((sizes > least).sum())
    leading = vectors.flip(1)[:, :count]
    axes: Tensor = leading if tall else centered.T @ leading / sizes[:count]
    return axes


def _remainders(centered: Tensor, axes: Tensor) -> Tensor:
    """Return the length of each row of `centered` (n, numbers) orthogonal to `axes` (numbers, count): (n,)."""
    lengths: Tensor = (centered - centered @ axes @ axes.T).norm(dim=1)
    return lengths
