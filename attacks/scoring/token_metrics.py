"""Scores for reconstructed token ids: the share of correct positions, beside baselines.

Ids are categories, so no distance is computed: a token is right or wrong.
"""

from __future__ import annotations

import torch
from torch import Tensor

from splitfed.attacks.networks.tokens import frequent_tokens
from splitfed.attacks.scoring.reconstruction_metrics import Scores, random_pairing
from splitfed.core.errors import InvalidInput
from splitfed.stats.intervals import bootstrap_interval


def score_tokens(
    truth: Tensor,
    prediction: Tensor,
    auxiliary: Tensor,
    generator: torch.Generator,
    counted: Tensor | None = None,
    counted_auxiliary: Tensor | None = None,
) -> Scores:
    """Score a `prediction` of token ids `truth` (n, ...): predictor -> metric -> mean and 95 % interval over victims.

    Predictors: "attack", and the baselines "frequent_token", the most frequent token of every position in the
    `auxiliary` rows (m, ...), and "random_pairing", another victim's row. Metric: "token_accuracy", the share of a
    victim's positions that are right, in [0, 1]. `counted`, `counted_auxiliary`: (n, numbers) and (m, numbers) bool,
    which positions count, such as those that are no padding; victims without any are left out.
    """
    if truth.shape != prediction.shape or truth.dim() < 2 or truth.numel() == 0 or truth.is_floating_point():
        raise InvalidInput(
            f"truth has shape {tuple(truth.shape)} of {truth.dtype} and prediction {tuple(prediction.shape)}; expected "
            "equal (n, ...) of token ids"
        )
    known = truth.detach().cpu().flatten(1)
    predictions = {"attack": prediction.detach().cpu().flatten(1)}
    if len(auxiliary):
        predictions["frequent_token"] = (
            frequent_tokens(auxiliary.cpu(), counted_auxiliary).flatten().expand(known.shape)
        )
    if len(known) > 1:
        predictions["random_pairing"] = random_pairing(known, generator)
    where = torch.ones_like(known, dtype=torch.bool) if counted is None else counted.cpu()
    some = where.any(1)
    if not bool(some.any()):
        raise InvalidInput("every position of every victim is padding; expected one that is not")
    shares = {
        name: (((found == known) & where).sum(1).double() / where.sum(1).clamp(min=1))[some]
        for name, found in predictions.items()
    }
    return {name: {"token_accuracy": bootstrap_interval(share, generator)} for name, share in shares.items()}
