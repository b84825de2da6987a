"""Summary of a training beside its curves: how far clients lie apart, and when a target was first reached.

Paper: Li, Sanjabi, Beirami, Smith, "Fair resource allocation in federated learning", ICLR 2020, for the figures that
tell fairness over clients there: the spread of their scores, and the mean of the tenth that fares worst.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev
from typing import Any


def summarize_clients(scores: Sequence[float | None], higher_is_better: bool = True) -> dict[str, float] | None:
    """Return mean, least, greatest, standard deviation and worst tenth of the clients' `scores`; None without any.

    Every client counts alike, those without a score (None) not at all. The deviation is that of these very clients
    (divided by their number). The worst tenth is the mean of the ceil(n / 10) clients that fare worst.
    """
    known = sorted((s for s in scores if s is not None and math.isfinite(s)), reverse=not higher_is_better)
    if not known:
        return None
    # A metric without bounds (R² of constant labels) may be so large that its square is beyond all numbers.
    most = max(abs(s) for s in known)
    unit = most if most > 1e100 else 1.0
    small = [s / unit for s in known]
    return {
        "mean": unit * fmean(small),
        "min": min(known),
        "max": max(known),
        "std": unit * pstdev(small),
        "worst_decile": unit * fmean(small[: math.ceil(len(small) / 10)]),
    }


def find_first_reaching(
    history: Sequence[Mapping[str, Any]], target: float, higher_is_better: bool = True
) -> Mapping[str, Any] | None:
    """Return the first entry of `history` whose score on the union of the validation rows is `target` or better.

    None where no round that was scored is. Test rows are not looked at: what is chosen by them is no test any more.
    """
    scored = (
        (entry, score) for entry in history if (score := (entry.get("validation") or {}).get("union")) is not None
    )
    return next((entry for entry, score in scored if (score >= target if higher_is_better else score <= target)), None)


def find_best_round(history: Sequence[Mapping[str, Any]], higher_is_better: bool = True) -> Mapping[str, Any] | None:
    """Return the first entry of `history` with the best score on the union of the validation rows; None without any.

    Its test score is what stopping there would have given; the best test score over rounds is nobody's. A score that is
    no finite number is never the best.
    """
    told = [(entry, (entry.get("validation") or {}).get("union")) for entry in history]
    scored = [(entry, float(score)) for entry, score in told if score is not None and math.isfinite(score)]
    sign = 1.0 if higher_is_better else -1.0
    return max(scored, key=lambda pair: sign * pair[1], default=(None, 0.0))[0]
