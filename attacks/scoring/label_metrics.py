"""Scores for predicted labels: accuracy and, for two classes, the area under the ROC curve ("leak AUC").

Paper: Li, Sun, Yang, Gao, Zhang, Xie, Smith, Wang, "Label leakage and protection in two-party split learning", ICLR
2022 (leak AUC).

The AUC is that of the unmodified scores: reversing them would require the truth.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from splitfed.attacks.scoring.reconstruction_metrics import Scores
from splitfed.core.errors import InvalidInput, check_count
from splitfed.stats.intervals import Interval, bootstrap_interval

NULL = "permutation_null"
EXCESS = "excess"
"""Name of the score of an attack minus the greatest score of its floors."""
RESAMPLES = 500
PERMUTATIONS = 200
"""Number of random permutations of a prediction that estimate the chance level of the assigned accuracy."""


def score_labels(
    truth: Tensor,
    prediction: Tensor,
    prior: Tensor,
    generator: torch.Generator,
    scored: Tensor | None = None,
    *,
    named: bool = True,
    floors: Mapping[str, Tensor] | None = None,
) -> Scores:
    """Score a prediction of the labels `truth`, (n,) int64: predictor -> metric -> value and interval.

    `prediction`: scores (n, classes), or (n,) for two classes. The predicted class has the greatest score, the first
    among equals; with a single score it is class 1 if the score is above zero. `scored`: positions of the scored
    victims (default: all). Predictors: "attack", and the baselines "majority", the most frequent class of `prior` (m,),
    the labels an attacker may know, and "random_pairing", the label of a random other victim (in expectation).

    Metrics: "accuracy" with a bootstrap interval over victims; for two classes, both among the victims, also "auc" in
    [0, 1], which is .5 for the baselines. If the attack could not match clusters to classes, so that it is not `named`,
    also "assigned_accuracy", the accuracy of the best assignment: an oracle that exceeds guessing by chance alone. The
    further predictor "permutation_null" states by how much: the mean over randomly permuted predictions, and its 95 %
    range.

    `floors`: name -> a prediction of the same victims, scored like it; "excess" is then the score minus that of the
    best floor, with the interval of the difference, paired over victims. An AUC that is measurably below .5 counts as
    reversed there.
    """
    _check(truth, prediction)
    scores, known = prediction.detach().double().cpu(), truth.cpu()
    if scored is not None:
        scores, known = scores[scored.cpu()], known[scored.cpu()]
    predictions = (scores > 0).long() if scores.dim() == 1 else scores.argmax(1)
    by_predictor: Scores = {"attack": {"accuracy": bootstrap_interval((predictions == known).double(), generator)}}
    if len(prior):
        most = int(prior.long().mode().values)
        by_predictor["majority"] = {"accuracy": bootstrap_interval((known == most).double(), generator)}
    if len(known) > 1:
        # The chance, exact, that another victim drawn at random bears the same label.
        same = torch.bincount(known)[known] - 1
        by_predictor["random_pairing"] = {"accuracy": bootstrap_interval((same / (len(known) - 1)).double(), generator)}
    if not named:
        for name, assigned in _score_assigned(known, predictions, generator).items():
            if name in by_predictor or name == NULL:
                by_predictor.setdefault(name, {})["assigned_accuracy"] = assigned
    single = scores if scores.dim() == 1 else scores[:, 1] - scores[:, 0]
    if (scores.dim() == 1 or scores.shape[1] == 2) and 0 < int(known.sum()) < len(known):
        for name in by_predictor.keys() - {"attack", NULL}:
            by_predictor[name]["auc"] = Interval(0.5, 0.5, 0.5, len(known))
        by_predictor["attack"]["auc"] = auc_interval(single, known == 1, generator)
    for name, floor in (floors or {}).items():
        shown = floor.double().cpu() if scored is None else floor.double().cpu()[scored.cpu()]
        _add_floor(by_predictor, name, shown, (single, predictions), known, generator)
    return by_predictor


def _add_floor(
    by_predictor: Scores,
    name: str,
    floor: Tensor,
    attack: tuple[Tensor, Tensor],
    known: Tensor,
    generator: torch.Generator,
) -> None:
    """Score the predictions of the `floor` (n, classes), and the attack's excess over it."""
    said, (single, classes) = floor.argmax(1), attack
    right = (said == known).double()
    scores = {"accuracy": bootstrap_interval(right, generator)}
    better = {"accuracy": bootstrap_interval((classes == known).double() - right, generator)}
    if "auc" in by_predictor["attack"]:
        own, positive = by_predictor["attack"]["auc"], known == 1
        turned = -1 if (own.high if own.known else own.mean) < 0.5 else 1
        scores["auc"] = auc_interval(floor[:, 1] - floor[:, 0], positive, generator)
        better["auc"] = auc_difference(turned * single, floor[:, 1] - floor[:, 0], positive, generator)
    by_predictor[name] = scores
    best = by_predictor.setdefault(EXCESS, better)
    for metric, difference in better.items():
        best[metric] = min(best[metric], difference, key=lambda one: one.mean)


def _score_assigned(known: Tensor, predictions: Tensor, generator: torch.Generator) -> dict[str, Interval]:
    """Return predictor -> the accuracy of the best assignment of predicted classes to true ones."""
    classes = int(torch.cat([known, predictions]).max()) + 1
    names = _best_names(known, predictions, classes)
    by_predictor = {"attack": bootstrap_interval((names[predictions] == known).double(), generator)}
    # Who says one class of all is right, by the best assignment, of the most frequent one.
    by_predictor["majority"] = bootstrap_interval((known == int(known.mode().values)).double(), generator)
    shuffled = []
    for _ in range(PERMUTATIONS):
        mixed = predictions[torch.randperm(len(known), generator=generator)]
        shuffled.append((_best_names(known, mixed, classes)[mixed] == known).double().mean())
    null = torch.stack(shuffled)
    return {**by_predictor, NULL: Interval(float(null.mean()), *percentile_bounds(null), len(known))}


def _best_names(known: Tensor, predictions: Tensor, classes: int) -> Tensor:
    """Return the true class assigned to each predicted one, with the greatest accuracy: (classes,)."""
    # SciPy's optimizers take half a second to import.
    from scipy.optimize import linear_sum_assignment

    together = torch.bincount(predictions * classes + known, minlength=classes * classes).view(classes, classes)
    return torch.as_tensor(linear_sum_assignment(-together.numpy())[1])


def auc(scores: Tensor, positive: Tensor) -> float:
    """Return the probability that a positive scores higher than a negative, ties counting half, in [0, 1].

    scores: (n,) without NaN; positive: (n,) bool with at least one of each.
    """
    if scores.dim() != 1 or positive.shape != scores.shape or positive.dtype != torch.bool:
        raise InvalidInput(
            f"an AUC needs scores (n,) and a bool mask (n,); got {tuple(scores.shape)} and "
            f"{tuple(positive.shape)} of {positive.dtype}"
        )
    if bool(scores.isnan().any()):
        raise InvalidInput("scores hold nan; expected numbers")
    if not 0 < int(positive.sum()) < len(positive):
        raise InvalidInput("an AUC needs at least one positive and one negative")
    order = torch.unique(scores.double(), return_inverse=True)[1]
    equal = torch.bincount(order[~positive], minlength=int(order.max()) + 1).double()
    below = equal.cumsum(0) - equal
    wins = below[order[positive]] + equal[order[positive]] / 2
    return float(wins.mean() / (~positive).sum())


def auc_interval(scores: Tensor, positive: Tensor, generator: torch.Generator, resamples: int = RESAMPLES) -> Interval:
    """Return `auc` with its 95 % percentile bootstrap interval over victims, each class resampled separately.

    With a single victim of a class the spread is unknown: the bounds are NaN.
    """
    check_count("resamples", resamples, low=1)
    return _interval_of(auc, scores, positive, generator, resamples)


def auc_difference(scores: Tensor, others: Tensor, positive: Tensor, generator: torch.Generator) -> Interval:
    """Return the AUC of `scores` minus that of `others`, (n,) each, with its bootstrap interval as in `auc_interval`.

    Both are resampled together, victim by victim.
    """

    def difference(both: Tensor, positive: Tensor) -> float:
        return auc(both[:, 0], positive) - auc(both[:, 1], positive)

    return _interval_of(difference, torch.stack([scores, others], 1), positive, generator, RESAMPLES)


def _interval_of(
    statistic: Callable[[Tensor, Tensor], float],
    values: Tensor,
    positive: Tensor,
    generator: torch.Generator,
    resamples: int,
) -> Interval:
    """Return `statistic(values, positive)`, values (n, ...), with its interval over victims as in `auc_interval`."""
    value = statistic(values, positive)
    positives, negatives = values[positive], values[~positive]
    if min(len(positives), len(negatives)) == 1:
        return Interval(value, float("nan"), float("nan"), len(values))
    marks = torch.arange(len(values)) < len(positives)
    resampled = [
        statistic(torch.cat([resample(positives, generator), resample(negatives, generator)]), marks)
        for _ in range(resamples)
    ]
    return Interval(value, *percentile_bounds(torch.tensor(resampled, dtype=torch.float64)), len(values))


def percentile_bounds(draws: Tensor) -> tuple[float, float]:
    """Return the bounds of the central 95 % of `draws` (n,), float64."""
    low, high = draws.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def _check(truth: Tensor, prediction: Tensor) -> None:
    """Raise `InvalidInput` for labels that are not classes, and for a prediction whose shape does not fit them."""
    if truth.dim() != 1 or truth.is_floating_point():
        raise InvalidInput(f"labels have shape {tuple(truth.shape)} and type {truth.dtype}; expected one class a row")
    if len(prediction) != len(truth) or prediction.dim() not in (1, 2):
        raise InvalidInput(f"prediction has shape {tuple(prediction.shape)}; expected scores for {len(truth)} victims")
    classes = 2 if prediction.dim() == 1 else prediction.shape[1]
    if classes < 2 or (len(truth) and int(truth.max()) >= classes):
        raise InvalidInput(
            f"prediction has scores for {classes} classes; the victims have labels up to {int(truth.max())}"
        )
    if not bool(torch.isfinite(prediction).all()):
        raise InvalidInput("prediction holds a score that is not finite")


def resample(values: Tensor, generator: torch.Generator, *times: int) -> Tensor:
    """Draw as many of `values` (n,) as there are, with replacement, as many `times` as given: (*times, n)."""
    drawn = torch.randint(len(values), (*times, len(values)), generator=generator, device=generator.device)
    return values[drawn.to(values.device)]
