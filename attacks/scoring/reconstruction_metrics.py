"""Image and vector metrics of reconstructions, one number a victim, with baselines beside every score.

Paper: SSIM from Wang, Bovik, Sheikh and Simoncelli, "Image quality assessment: from error visibility to structural
similarity", IEEE Transactions on Image Processing 2004.

Every metric takes `truth` and `prediction` of equal shape (n, ...) in the same unit, and returns (n,) in float64, so
that an interval over victims can be taken. Images are (n, c, h, w), and `data_range` is the width of the data's value
range (1 for images in [0, 1]), not that of the values in a batch. Predictions without an order are assigned to victims
first: Kuhn, "The Hungarian method for the assignment problem", Naval Research Logistics Quarterly 1955.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput, check_number
from splitfed.core.random import derive
from splitfed.stats.intervals import Interval, bootstrap_interval
from splitfed.stats.structural_similarity import similarity_map

PSNR_CAP = 100.0  # dB
_CHUNK = 256  # images at a time: SSIM holds five filtered copies

Scores = dict[str, dict[str, Interval]]


def mse(truth: Tensor, prediction: Tensor) -> Tensor:
    """Return the mean squared error of each example, (n,), in squared units of the data."""
    truth, prediction = _pair(truth, prediction)
    return (truth - prediction).square().flatten(1).mean(1)


def psnr(truth: Tensor, prediction: Tensor, data_range: float) -> Tensor:
    """Return 10 log10(data_range² / mse) of each image, (n,), in dB, capped at `PSNR_CAP` = 100 dB.

    The cap keeps a perfect copy, of infinite PSNR, from dominating a mean; above about 59 dB the error of an 8-bit
    image is under half a grey level.
    """
    check_number("data_range", data_range, low=0, open_low=True)
    error = mse(truth, prediction) / data_range**2
    return -10 * error.clamp_min(10 ** (-PSNR_CAP / 10)).log10()


def ssim(truth: Tensor, prediction: Tensor, data_range: float) -> Tensor:
    """Return the mean structural similarity of each image, (n,), in [-1, 1]; K1 = .01, K2 = .03.

    Gaussian window 11x11 with deviation 1.5; for an image smaller than that the largest odd window that fits
    (7 for 8x8 digits), with the deviation shrunk in proportion. Windows that reach over the border are left
    out, as in the paper.
    """
    check_number("data_range", data_range, low=0, open_low=True)
    truth, prediction = _pair(truth, prediction)
    if truth.dim() != 4:
        raise InvalidInput(f"images have shape {tuple(truth.shape)}; expected (n, c, h, w)")
    parts = [
        similarity_map(a, b, float(data_range)).flatten(1).mean(1)
        for a, b in zip(truth.split(_CHUNK), prediction.split(_CHUNK), strict=True)
    ]
    return torch.cat(parts)


def r2(truth: Tensor, prediction: Tensor) -> Tensor:
    """Return each example's contribution to R squared, (n,), at most 1; their mean is R squared over all of them.

    1 - |x_i - prediction_i|² / mean_j |x_j - mean|²: 0 on average for the victims' own mean. Features count by their
    variance, so standardise them first. Raises `InvalidInput` if all victims are equal.
    """
    truth, prediction = _pair(truth, prediction)
    spread = (truth - truth.mean(0)).square().flatten(1).sum(1).mean()
    if float(spread) == 0:
        raise InvalidInput(f"r2 needs victims that differ; all {len(truth)} are equal")
    return 1 - (truth - prediction).square().flatten(1).sum(1) / spread


def mean_image(auxiliary: Tensor) -> Tensor:
    """Return the mean of the attacker's own examples (m, ...): the constant prediction of least squared error."""
    if auxiliary.dim() == 0 or len(auxiliary) == 0:
        raise InvalidInput(f"auxiliary has shape {tuple(auxiliary.shape)}; expected (m, ...) with m >= 1")
    return auxiliary.double().mean(0)


def random_pairing(truth: Tensor, generator: torch.Generator) -> Tensor:
    """Return `truth` (n, ...) permuted by one random cycle, so that every victim gets another victim's example.

    It scores a perfect sample of the data that is independent of the release. As it uses the truth, it is a reference
    for the scorer, not an attack. Needs n >= 2.
    """
    if truth.dim() == 0 or len(truth) < 2:
        raise InvalidInput(f"truth has shape {tuple(truth.shape)}; expected (n, ...) with n >= 2 to pair")
    order = torch.randperm(len(truth), generator=generator, device=generator.device).to(truth.device)
    paired = torch.empty_like(truth)
    paired[order] = truth[order.roll(1)]
    return paired


def score_reconstruction(
    truth: Tensor,
    prediction: Tensor,
    value_range: tuple[float, float] | None,
    auxiliary_x: Tensor,
    generator: torch.Generator,
    beside: Mapping[str, Tensor] | None = None,
) -> Scores:
    """Score a `prediction` of `truth` (n, ...): predictor -> metric -> mean and 95 % bootstrap interval over victims.

    Predictors: "attack", and the baselines "mean_image" (of `auxiliary_x`, the attacker's data) and "random_pairing".
    Metrics: "psnr", "ssim" and "mse" for images (n, c, h, w) with the `value_range` (low, high); "r2" and "mse" for all
    other rows, which need no range. A prediction outside the range is not clamped. Without auxiliary rows there is no
    mean image. A single victim has no interval, no pairing and no "r2". `beside`: further predictors -> (n, ...), whose
    intervals use random draws of their own. Each mean comes with the median and the worst decile of the metric: see
    `Interval`.
    """
    images = truth.dim() == 4
    if images and value_range is None:
        raise InvalidInput(
            "value_range=None is not allowed for images, whose scores need it: from_arrays(..., value_range=(0, 1))"
        )
    if auxiliary_x.shape[1:] != truth.shape[1:]:
        raise InvalidInput(f"auxiliary_x has shape {tuple(auxiliary_x.shape)}; expected (m, *{tuple(truth.shape[1:])})")
    predictions = {"attack": prediction.to(truth.device)}
    if len(auxiliary_x) > 0:
        predictions["mean_image"] = mean_image(auxiliary_x).to(truth.device).expand(truth.shape)
    if len(truth) > 1:
        predictions["random_pairing"] = random_pairing(truth, generator)
    width = value_range[1] - value_range[0] if images and value_range is not None else None
    # What is set beside a prediction does not move the draws of the others.
    apart = torch.Generator().manual_seed(derive(generator.initial_seed(), "beside"))
    drawn = {**dict.fromkeys(predictions, generator), **dict.fromkeys(beside or {}, apart)}
    predictions |= {name: rows.to(truth.device) for name, rows in (beside or {}).items()}
    return {
        name: {
            metric: _over_victims(metric, value, drawn[name]) for metric, value in _score(truth, attempt, width).items()
        }
        for name, attempt in predictions.items()
    }


def _over_victims(metric: str, values: Tensor, generator: torch.Generator) -> Interval:
    """Return the mean of `values` (n,) with its interval, their median, and the mean of the tenth that leaks most."""
    leaking = values.sort(descending=metric != "mse").values[: -(-len(values) // 10)]
    found = bootstrap_interval(values, generator)
    return replace(found, median=float(values.quantile(0.5)), worst_decile=float(leaking.mean()))


def _score(truth: Tensor, prediction: Tensor, data_range: float | None) -> dict[str, Tensor]:
    """Return every metric that applies, (n,) each; `data_range` is None for what is no image."""
    if data_range is not None:
        return {
            "psnr": psnr(truth, prediction, data_range),
            "ssim": ssim(truth, prediction, data_range),
            "mse": mse(truth, prediction),
        }
    differ = not bool((truth == truth[:1]).all())
    return {"r2": r2(truth, prediction), "mse": mse(truth, prediction)} if differ else {"mse": mse(truth, prediction)}


def _pair(truth: Tensor, prediction: Tensor) -> tuple[Tensor, Tensor]:
    """Check a pair of equal shape (n, ...) with finite values, and return both detached, in float64."""
    if truth.shape != prediction.shape or truth.dim() < 2 or truth.numel() == 0:
        raise InvalidInput(
            f"truth has shape {tuple(truth.shape)} and prediction {tuple(prediction.shape)}; expected equal (n, ...)"
        )
    for name, value in (("truth", truth), ("prediction", prediction)):
        if not bool(torch.isfinite(value).all()):
            raise InvalidInput(f"{name} holds a value that is not finite; expected finite numbers")
    return truth.detach().double(), prediction.detach().double()


def assignment(truth: Tensor, prediction: Tensor) -> Tensor:
    """Return order (n,) int64 such that prediction i matches victim order[i] with the least total squared error.

    truth and prediction: (n, ...) in the same unit. A sum over gradients has no order, so a prediction from it has
    none.
    """
    if truth.shape != prediction.shape or len(truth) == 0:
        raise InvalidInput(
            f"truth has shape {tuple(truth.shape)} and prediction {tuple(prediction.shape)}; "
            "expected equal (n, ...), n >= 1"
        )
    # SciPy's optimizers take half a second to import.
    from scipy.optimize import linear_sum_assignment

    one, other = (t.detach().double().cpu().flatten(1) for t in (prediction, truth))
    cost = (one[:, None] - other[None]).square().sum(2)
    return torch.as_tensor(linear_sum_assignment(cost.numpy())[1], dtype=torch.int64)
