"""Scores for predicted membership: area under the ROC curve, and true positive rates at low false positive rates.

Paper: Carlini, Chien, Nasr, Song, Terzis, Tramèr, "Membership inference attacks from first principles", IEEE S&P 2022,
sections III and IV (TPR at a low FPR, log-log ROC).

n non-members resolve false-positive rates in steps of 1/n. A requested rate is rounded down to such a step: with 64
non-members "FPR 1 %" admits no false positive. The baseline is exact for that: random scores that admit k of n
non-members have a true positive rate of (k + 1) / (n + 1) on average.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from splitfed.attacks.scoring.label_metrics import auc_interval, percentile_bounds, resample
from splitfed.attacks.scoring.reconstruction_metrics import Scores
from splitfed.core.errors import InvalidInput, check_count, check_number
from splitfed.stats.intervals import Interval

RATES = {"tpr_at_fpr_1%": 0.01, "tpr_at_fpr_0.1%": 0.001}
_RESAMPLES = 1000


class Roc(NamedTuple):
    """The corners of a ROC curve, (k,) float64 each, from (0, 0) to (1, 1); tied scores are one step."""

    fpr: Tensor
    tpr: Tensor


def score_members(truth: Tensor, scores: Tensor, generator: torch.Generator) -> Scores:
    """Score the values `scores` (n,), the greater the more likely a member, against `truth` (n,) bool.

    Predictors: "attack" and the baseline "chance". Metrics: "auc" and those of `RATES`, in [0, 1], with 95 % bootstrap
    intervals over members and non-members; "least_fpr", the smallest rate above 0 that the non-members can resolve.
    """
    truth, scores = _pair(truth, scores)
    non_members, n = int((~truth).sum()), len(truth)
    least = 1 / non_members
    prediction = {"auc": auc_interval(scores, truth, generator)}
    chance = {"auc": Interval(0.5, 0.5, 0.5, n)}
    for name, rate in RATES.items():
        prediction[name] = tpr_interval(scores, truth, rate, generator)
        blind = chance_at(rate, non_members)
        chance[name] = Interval(blind, blind, blind, n)
    prediction["least_fpr"] = chance["least_fpr"] = Interval(least, least, least, n)
    return {"attack": prediction, "chance": chance}


def tpr_at(scores: Tensor, member: Tensor, fpr: float) -> float:
    """Return the share of members above the threshold that admits at most the share `fpr` of non-members.

    scores (n,), member (n,) bool. Members tied with the threshold do not count, so the share is a lower bound.
    """
    member, scores = _pair(member, scores)
    check_number("fpr", fpr, low=0, high=1)
    return float(_tpr(scores[member][None], scores[~member][None], fpr))


def chance_at(fpr: float, non_members: int) -> float:
    """Return the expected `tpr_at` of random scores without ties: (k + 1) / (n + 1), k = floor(fpr n)."""
    check_count("non_members", non_members, low=1)
    return min(1.0, (_count_admitted(fpr, non_members) + 1) / (non_members + 1))


def tpr_interval(scores: Tensor, member: Tensor, fpr: float, generator: torch.Generator) -> Interval:
    """Return `tpr_at` with its 95 % percentile bootstrap interval, members and non-members resampled separately."""
    members, others = (resample(scores[side], generator, _RESAMPLES) for side in (member, ~member))
    return Interval(tpr_at(scores, member, fpr), *percentile_bounds(_tpr(members, others, fpr)), len(scores))


def roc(scores: Tensor, member: Tensor) -> Roc:
    """Return the corners of the ROC curve of `scores` (n,) for `member` (n,) bool.

    For a log-log figure leave out rates of 0, as the smallest resolved rate is 1 / non-members.
    """
    member, scores = _pair(member, scores)
    step = scores.unique(return_inverse=True)[1]
    steps = int(step.max()) + 1
    rates = []
    for side in (~member, member):
        above = torch.bincount(step[side], minlength=steps).flip(0).cumsum(0).double()
        rates.append(torch.cat([torch.zeros(1, dtype=torch.float64), above / above[-1]]))
    return Roc(*rates)


def _tpr(members: Tensor, others: Tensor, fpr: float) -> Tensor:
    """Return for each row the share of members (r, m) above the threshold given by its non-members (r, n): (r,)."""
    admitted = _count_admitted(fpr, others.shape[1])
    if admitted >= others.shape[1]:
        return torch.ones(len(members), dtype=torch.float64)
    threshold = others.sort(1, descending=True).values[:, admitted : admitted + 1]
    return (members > threshold).double().mean(1)


def _count_admitted(fpr: float, non_members: int) -> int:
    # .29 * 100 is 28.999999999999996; the tolerance is far below one non-member.
    return math.floor(fpr * non_members + 1e-9)


def _pair(member: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Check and return (member, scores), on the CPU, scores in float64."""
    if member.dtype != torch.bool or member.dim() != 1 or scores.shape != member.shape:
        raise InvalidInput(
            f"scores have shape {tuple(scores.shape)} for {tuple(member.shape)} {member.dtype}; expected (n,) and bool"
        )
    if not 0 < int(member.sum()) < len(member):
        raise InvalidInput(f"{int(member.sum())} of {len(member)} are members; expected members and non-members")
    scores = scores.detach().double().cpu()
    if not bool(torch.isfinite(scores).all()):
        raise InvalidInput("scores hold a value that is not finite; expected finite numbers")
    return member.cpu(), scores
