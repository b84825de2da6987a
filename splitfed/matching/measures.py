"""Six measures of how well a client's codes fit an expert: one number a set of rows, higher for a better fit.

Paper: Sharma et al., "ExpertMatcher", 2019 (arXiv 1910.02312, 1910.03731).

Only the papers' abstracts were available. That they assign by reconstruction error and by cosine with class means, and
that distance correlation, HSIC, MMD and kernel alignment have been proposed for the same purpose, is taken from others;
every definition below, in particular the pairing, is ours.

`reconstruction` (minus the mean squared error) and `cosine` (of each row's code with the nearest class mean, on
average) judge row by row, so a client that holds few of the classes fits as well as one that holds all. The others
judge a set against the expert's reference codes, class proportions included: they find the expert of such a client, but
a matcher that uses them as evidence rejects it. Rows easier than the expert's own, nearly black images say, have a
small reconstruction error under any expert. `mmd` compares the two distributions.

`alignment`, `hsic` and `distance_correlation` need pairs, and no row of a client belongs to a row of the repository.
But both sets come from one encoder, so code *dimension* i of the client belongs to dimension i of the reference:
dimension i is the vector of its values over the rows, and the measure compares the relations between dimensions in both
sets. All three ignore the scale of either argument, so numbers of rows may differ. They need tens of rows: of sets of
four rows of noise, half are accepted. `hsic` is not normalised, so its values differ in scale between experts, and it
is the weakest of the six.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from splitfed.matching import similarity
from splitfed.stats.dependence import distance_correlation


@dataclass(frozen=True, eq=False)
class Reference:
    """An expert's reference codes.

    `codes` (m, d) of rows its autoencoder did not train on, `means` (classes, d) of the classes `labels` (classes,)
    int64, and `bandwidth`, the median distance of `codes`.
    """

    codes: Tensor
    means: Tensor
    labels: Tensor
    bandwidth: float


@dataclass(frozen=True)
class Measure:
    """A measure of how well a client's codes fit an expert, higher for a better fit.

    `score(values, reference)` of one set: `values` are codes (n, d), or errors (n,) if `on_errors`. `least`: minimum
    number of rows in a set; `paired`: whether the measure pairs code dimensions.
    """

    score: Callable[[Tensor, Reference], float]
    least: int
    paired: bool
    on_errors: bool = False


def _mmd(codes: Tensor, reference: Reference) -> float:
    # The reference alone sets the bandwidth: a client far away may not choose the scale it is judged at.
    return -float(similarity.mmd_sqr(codes, reference.codes, reference.bandwidth))


def _paired(statistic: Callable[[Tensor, Tensor], Tensor]) -> Measure:
    """Return the measure that applies `statistic` to paired code dimensions: codes (n, d) are transposed to (d, n)."""

    def score(codes: Tensor, reference: Reference) -> float:
        return float(statistic(codes.transpose(0, 1), reference.codes.transpose(0, 1)))

    return Measure(score, 2, paired=True)


MEASURES = {
    "reconstruction": Measure(lambda errors, reference: -float(errors.mean()), 1, paired=False, on_errors=True),
    "cosine": Measure(
        lambda codes, reference: float(similarity.cosine(codes, reference.means).amax(1).mean()), 1, paired=False
    ),
    "mmd": Measure(_mmd, 2, paired=False),
    "alignment": _paired(similarity.kernel_alignment),
    "hsic": _paired(similarity.hsic),
    "distance_correlation": _paired(distance_correlation),
}
