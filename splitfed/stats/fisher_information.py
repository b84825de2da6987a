"""Fisher information of a noisy release about its row, and the lower bound it implies on the error of every attack.

Paper: Maeng, Guo, Kariyappa, Suh, "Bounding the invertibility of privacy-preserving instance encoding using Fisher
information", NeurIPS 2023 (dFIL, and the bound after van Trees); Gill, Levit, "Applications of the van Trees
inequality: a Bayesian Cramer-Rao bound", Bernoulli 1995.

A release is f(x) + noise, J the Jacobian of f at a row x of d numbers. The Fisher information of x is I = J'J / s² for
Gaussian noise of deviation s, and J'J / b² for Laplace noise of scale b; its diagonal information leakage is dFIL =
tr(I) / d. Whatever an attacker computes from the release and knows of the distribution of rows,

    E |x^ - x|² / d  >=  tr((E I + K)^-1) / d  >=  sum_i 1 / (E I_ii + K_ii) / d  >=  1 / (E dFIL + tr(K) / d),

where K is the information in the distribution of rows itself, E (grad log p)(grad log p)', and i runs over any
orthogonal directions. 1 / dFIL alone bounds unbiased attackers only; an attacker with a prior may beat it. If rows have
no density (a pixel that is always black), K is infinite and the last form is 0; the sum over the principal directions
of the rows is not.

K is not known for real data; there are two choices (`prior_of`). That of a Gaussian with the covariance of known rows
is the least that this covariance allows: clustered rows have more, so that bound applies to an attacker who knows mean
and covariance only; one who knows more may beat it. For rows to which Gaussian noise of variance v was added, K <= I /
v whatever they are, and the bound is proven for the rows with that noise.

A Jacobian is taken exactly, by a backward pass for every released number, where these are few; otherwise by random
signs v, E (J'v)(J'v)' = J'J, with the standard error over the draws.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import sqrt

import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput, check_count, check_number

EXACT = 512
"""Maximum number of released numbers for which the whole Jacobian is computed."""

PROBES = 64
MOST_MATRIX = 1000  # numbers of a row up to which the whole information matrix is kept
MOST_ROWS = 1000  # rows that principal directions of longer rows are taken from
_RANK = 1e-10  # of the largest variance: below it a direction has none


@dataclass(frozen=True)
class Prior:
    """Principal `directions` (d, k) of rows, in columns, and the information (k,) of the prior in each.

    `variance`: mean squared deviation of a number from its mean, which is the error of the mean row. `assumed`: the
    assumed distribution of rows, in words.
    """

    directions: Tensor
    information: Tensor
    variance: float
    assumed: str


@dataclass(frozen=True)
class FisherInformation:
    """Fisher information of releases: `dfil` of every row (n,), and the mean over rows in each direction (k,).

    `matrix`: the mean of I over rows in these directions, (k, k), None if it was not computed exactly. `error`:
    standard error of the mean dFIL, relative to it; 0 if it is exact. `numbers`: count of numbers in a row.
    """

    dfil: Tensor
    directions: Tensor
    matrix: Tensor | None
    error: float
    numbers: int

    def repeated(self, releases: int) -> FisherInformation:
        """Return the information in `releases` >= 1 releases of each row with independent noise.

        It is `releases` times that of one release.
        """
        matrix = None if self.matrix is None else releases * self.matrix
        return replace(self, dfil=releases * self.dfil, directions=releases * self.directions, matrix=matrix)


@dataclass(frozen=True)
class ReconstructionBound:
    """Lower bound on every attack's mean squared error of a number, for rows of the distribution `assumed`.

    `dfil`: mean over rows, in one over squared units of the data, with relative standard error `error`. `trace`: 1 /
    (dFIL + tr K / d), 0 if it is `empty`. `directions`: the sum over principal directions. `matrix`: from the whole
    matrix, None if that is too large. `variance`: the error of the mean row.
    """

    dfil: float
    error: float
    trace: float
    directions: float
    matrix: float | None
    variance: float
    assumed: str

    @property
    def least(self) -> float:
        """The largest of the bounds, at most the error of the mean row."""
        return max(self.trace, self.directions, self.matrix or 0.0)

    @property
    def unbiased(self) -> float:
        """The bound 1 / dFIL for unbiased attackers alone; infinity if releases hold no information."""
        return 1 / self.dfil if self.dfil > 0 else float("inf")

    @property
    def empty(self) -> bool:
        """Whether the bound by dFIL alone is 0, as rows have no variance in some direction."""
        return self.trace == 0


def prior_of(rows: Tensor, smoothing: float | None = None) -> Prior:
    """Return the prior of rows like `rows` (n, ...), n >= 2, in their principal directions.

    A Gaussian with their covariance or, with `smoothing` > 0, any distribution to which Gaussian noise of that
    deviation was added (`rows` are without it). For rows longer than 1000 numbers the directions of at most 1000 rows
    are used: the bound stays valid, as omitted directions add nothing to it.
    """
    flat = rows.double().flatten(1)
    if len(flat) < 2:
        raise InvalidInput(f"rows has {len(flat)} rows; expected at least 2 for a covariance")
    centred = flat - flat.mean(0)
    variance = float(centred.square().mean())
    if smoothing is not None:
        check_number("smoothing", smoothing, low=0.0, open_low=True)
    if flat.shape[1] <= MOST_MATRIX:
        values, vectors = torch.linalg.eigh(centred.T @ centred / (len(flat) - 1))
    else:
        some = centred[:MOST_ROWS]
        found = torch.linalg.svd(some, full_matrices=False)
        values, vectors = found.S.square() / (len(some) - 1), found.Vh.T
    if smoothing is not None:
        said = f"rows with Gaussian noise of deviation {smoothing:g} added; proven"
        return Prior(vectors, torch.full_like(values, smoothing**-2), variance + smoothing**2, said)
    most = float(values.max()) * _RANK
    information = torch.where(values > most, 1 / values.clamp_min(1e-300), torch.inf)
    return Prior(vectors, information, variance, "rows that are Gaussian with the covariance of the auxiliary rows")


def fisher_information(
    function: Callable[[Tensor], Tensor],
    x: Tensor,
    directions: Tensor,
    generator: torch.Generator,
    *,
    probes: int = PROBES,
    known: Callable[[Tensor], Tensor] | None = None,
) -> FisherInformation:
    """Return the information in `function(x)` (n, m) about each of the rows x (n, ...), in units of the noise.

    `function` divides releases by the deviation of Gaussian noise, or by the scale of Laplace noise. `directions` (d,
    k): orthonormal, in columns. `probes`: number of random sign vectors if m is above 512. `known(z)`: further
    cotangents (n, m), whose squared products with the Jacobian are added, such as the information in a deviation that
    depends on z.
    """
    check_count("probes", probes, low=2)
    with torch.enable_grad():
        rows = x.detach().clone().requires_grad_(True)
        z = function(rows).flatten(1)
    n, m, d = len(rows), z.shape[1], rows[0].numel()
    exact, basis = m <= EXACT, directions.double()
    whole = exact and d <= MOST_MATRIX
    dfil, along = rows.new_zeros(n, dtype=torch.float64), basis.new_zeros(basis.shape[1])
    matrix, draws = basis.new_zeros(basis.shape[1], basis.shape[1]), []

    def back(cotangent: Tensor) -> Tensor:
        (found,) = torch.autograd.grad(z, rows, cotangent, retain_graph=True, allow_unused=True)
        return torch.zeros_like(rows).double().flatten(1) if found is None else found.double().flatten(1)

    further = [] if known is None else [known(z.detach())]
    for number in range((m if exact else probes) + len(further)):
        counted = 1.0
        if number < len(further):
            cotangent = further[number]
        elif exact:
            cotangent = torch.zeros_like(z)
            cotangent[:, number - len(further)] = 1.0
        else:
            signs = torch.randint(0, 2, z.shape, generator=generator, device=generator.device)
            cotangent, counted = (2 * signs - 1).to(z), 1 / probes
        found = back(cotangent)
        squares = found.square().sum(1)
        dfil += counted * squares
        projected = found @ basis
        along += counted * projected.square().mean(0)
        if whole:
            matrix += projected.T @ projected / n
        if not exact and number >= len(further):
            draws.append(float(squares.mean()))
    mean, error = float(dfil.mean()), 0.0
    if draws and mean > 0:
        error = float(torch.tensor(draws, dtype=torch.float64).std()) / sqrt(probes) / mean
    return FisherInformation(dfil / d, along, matrix if whole else None, error, d)


def reconstruction_bound(information: FisherInformation, prior: Prior) -> ReconstructionBound:
    """Return the bound on the error of every attack that follows from the mean `information` and the `prior`."""
    d, known = information.numbers, prior.information.isfinite()
    both = information.directions[known] + prior.information[known]
    # A direction that is left out may be known exactly to an attacker: it adds no error to the bound.
    directions = float((1 / both).sum()) / d
    complete = bool(known.all()) and len(known) == d
    trace = 1 / (float(information.dfil.mean()) + float(prior.information.mean())) if complete else 0.0
    matrix = None
    if information.matrix is not None:
        part = information.matrix[known][:, known] + torch.diag(prior.information[known])
        matrix = float(torch.linalg.inv(part).trace()) / d if len(part) else 0.0
    mean = float(information.dfil.mean())
    return ReconstructionBound(mean, information.error, trace, directions, matrix, prior.variance, prior.assumed)
