"""Reconstruction metrics: values worked by hand, SSIM against its definition, baselines and refusals."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from splitfed.attacks.scoring.reconstruction_metrics import (
    mean_image,
    mse,
    psnr,
    r2,
    random_pairing,
    score_reconstruction,
    ssim,
)
from splitfed.core.errors import InvalidInput
from splitfed.core.random import generator


def _images(n: int, channels: int, size: int, seed: int = 0) -> Tensor:
    return torch.rand(n, channels, size, size, generator=generator(seed))


def test_mse_and_psnr_by_hand() -> None:
    truth = torch.zeros(3, 1, 4, 4)
    prediction = truth.clone()
    prediction[1] += 0.1  # mse .01 at range 1: 10 log10(100) = 20 dB
    prediction[2, 0, 0, 0] = 1.0  # one pixel in sixteen: mse 1/16, 10 log10(16) = 12.0412 dB
    assert mse(truth, prediction).tolist() == pytest.approx([0, 0.01, 1 / 16])
    assert psnr(truth, prediction, 1).tolist() == pytest.approx([100, 20, 12.041200], abs=1e-5)
    # The same images in [0, 255]: error and range grow together.
    assert psnr(255 * truth, 255 * prediction, 255).tolist() == pytest.approx([100, 20, 12.041200], abs=1e-5)
    # Twice the range at the same error: 20 log10(2) = 6.0206 dB more.
    assert psnr(truth, prediction, 2)[1].item() == pytest.approx(26.020600, abs=1e-5)


@pytest.mark.parametrize("size", [1, 2, 8, 11, 28])
def test_ssim_of_constant_images_by_hand(size: int) -> None:
    # No variance: the contrast part is 1 and 2ab + c1 over a² + b² + c1 is left, c1 = (.01 range)².
    truth, prediction = torch.full((2, 3, size, size), 1.0), torch.full((2, 3, size, size), 0.5)
    expected = (2 * 1 * 0.5 + 1e-4) / (1 + 0.25 + 1e-4)
    assert ssim(truth, prediction, 1).tolist() == pytest.approx([expected] * 2)
    assert ssim(truth, prediction, 2)[0].item() == pytest.approx((1 + 4e-4) / (1.25 + 4e-4))
    assert ssim(truth, truth, 1).tolist() == pytest.approx([1, 1])


def _ssim_by_definition(a: Tensor, b: Tensor, window: int, deviation: float) -> float:
    """Slide one window over a single-channel pair (h, w) and average, straight from the paper."""
    offsets = torch.arange(window, dtype=torch.float64) - window // 2
    line = torch.exp(-(offsets**2) / (2 * deviation**2))
    weight = torch.outer(line, line) / line.sum() ** 2
    values = []
    for i in range(a.shape[0] - window + 1):
        for j in range(a.shape[1] - window + 1):
            p, q = a[i : i + window, j : j + window].double(), b[i : i + window, j : j + window].double()
            mean_p, mean_q = (weight * p).sum(), (weight * q).sum()
            var_p, var_q = (weight * (p - mean_p) ** 2).sum(), (weight * (q - mean_q) ** 2).sum()
            cov = (weight * (p - mean_p) * (q - mean_q)).sum()
            light = (2 * mean_p * mean_q + 1e-4) / (mean_p**2 + mean_q**2 + 1e-4)
            values.append(light * (2 * cov + 9e-4) / (var_p + var_q + 9e-4))
    return float(torch.stack(values).mean())


@pytest.mark.parametrize(("size", "window"), [(28, 11), (11, 11), (10, 9), (8, 7), (6, 5), (3, 3)])
def test_ssim_follows_its_definition_at_the_stated_window(size: int, window: int) -> None:
    truth = _images(2, 1, size)
    prediction = 0.7 * truth + 0.3 * _images(2, 1, size, seed=1)
    expected = [
        _ssim_by_definition(a[0], b[0], window, 1.5 * window / 11) for a, b in zip(truth, prediction, strict=True)
    ]
    assert ssim(truth, prediction, 1).tolist() == pytest.approx(expected, abs=1e-7)


def test_ssim_averages_channels_and_batches_of_any_size() -> None:
    truth, prediction = _images(300, 3, 8), _images(300, 3, 8, seed=1)
    whole = ssim(truth, prediction, 1)
    by_channel = torch.stack([ssim(truth[:, c : c + 1], prediction[:, c : c + 1], 1) for c in range(3)]).mean(0)
    assert whole.shape == (300,)
    torch.testing.assert_close(whole, by_channel)
    torch.testing.assert_close(whole[[299]], ssim(truth[299:], prediction[299:], 1))
    torch.testing.assert_close(whole, ssim(truth.double(), prediction.double(), 1))


def test_r_squared_by_hand() -> None:
    # Rows (0, 0), (2, 0), (4, 0): mean (2, 0), mean square distance (4 + 0 + 4) / 3 = 8/3.
    truth = torch.tensor([[0.0, 0], [2, 0], [4, 0]])
    prediction = torch.tensor([[0.0, 0], [2, 1], [2, 0]])
    assert r2(truth, prediction).tolist() == pytest.approx([1, 1 - 3 / 8, 1 - 12 / 8])
    assert r2(truth, truth.mean(0).expand(3, 2)).mean().item() == pytest.approx(0)


def test_mean_image_is_the_mean_of_the_auxiliary_data() -> None:
    auxiliary = torch.stack([torch.zeros(1, 2, 2), torch.ones(1, 2, 2), torch.full((1, 2, 2), 0.5)])
    assert mean_image(auxiliary).tolist() == [[[0.5, 0.5], [0.5, 0.5]]]
    assert mean_image((2 * auxiliary).byte()).tolist() == [[[1.0, 1.0], [1.0, 1.0]]]


@pytest.mark.parametrize("n", [2, 3, 7, 50])
def test_random_pairing_moves_every_victim(n: int) -> None:
    truth = torch.arange(n).reshape(n, 1)
    paired = random_pairing(truth, generator(n))
    assert sorted(paired.flatten().tolist()) == list(range(n))
    assert not bool((paired == truth).any())


def test_random_pairing_of_three_takes_both_cycles_equally() -> None:
    draws = generator(0)
    first = sum(random_pairing(torch.arange(3).reshape(3, 1), draws)[0].item() == 1 for _ in range(400))
    assert abs(first - 200) < 4 * math.sqrt(400 / 4)


def test_score_of_images_by_hand() -> None:
    # Two victims, black and white; the attacker saw black only, and guesses each one .1 off.
    truth = torch.stack([torch.zeros(1, 8, 8), torch.ones(1, 8, 8)])
    prediction = torch.stack([torch.full((1, 8, 8), 0.1), torch.full((1, 8, 8), 0.9)])
    scores = score_reconstruction(truth, prediction, (0, 1), torch.zeros(5, 1, 8, 8), generator(0))
    assert list(scores) == ["attack", "mean_image", "random_pairing"]
    assert all(list(row) == ["psnr", "ssim", "mse"] for row in scores.values())
    assert scores["attack"]["mse"].mean == pytest.approx(0.01)
    assert scores["attack"]["psnr"].mean == pytest.approx(20, abs=1e-5)
    # .1 against 0: c1 / (.01 + c1); .9 against 1: (1.8 + c1) / (1.81 + c1).
    expected = (1e-4 / 0.0101 + 1.8001 / 1.8101) / 2
    assert scores["attack"]["ssim"].mean == pytest.approx(expected, abs=1e-6)
    # Black for both: right on one (capped at 100 dB), all wrong on the other (0 dB).
    black = scores["mean_image"]
    assert (black["mse"].mean, black["mse"].low, black["mse"].high) == (0.5, 0, 1)
    assert black["psnr"].mean == pytest.approx(50)
    assert black["mse"].n == 2
    # Two victims can only be exchanged: everything is wrong.
    swapped = scores["random_pairing"]
    assert (swapped["mse"].mean, swapped["psnr"].mean) == (1, 0)


def test_score_of_tables_has_no_image_metrics() -> None:
    truth = torch.randn(200, 5, generator=generator(1), dtype=torch.float64)
    scores = score_reconstruction(truth, truth, None, torch.zeros(3, 5), generator(0))
    assert all(list(row) == ["r2", "mse"] for row in scores.values())
    assert scores["attack"]["r2"].mean == 1
    # Independent standard normal rows differ by variance 2, and from the true mean by 1: R² about -1 and 0.
    assert scores["random_pairing"]["mse"].mean == pytest.approx(2, abs=0.3)
    assert scores["random_pairing"]["r2"].mean == pytest.approx(-1, abs=0.2)
    assert scores["mean_image"]["r2"].mean == pytest.approx(0, abs=0.05)
    assert scores == score_reconstruction(truth, truth, None, torch.zeros(3, 5), generator(0))


@pytest.mark.parametrize(("shape", "metric"), [((1, 2, 2), "psnr"), ((3,), "r2")])
def test_median_and_worst_decile_are_those_of_the_victims_recovered_best(shape: tuple[int, ...], metric: str) -> None:
    """Of 20 victims two are copied: the mean over all hides them, the worst decile is of them alone."""
    truth = torch.rand(20, *shape, generator=generator(0))
    prediction = truth + torch.linspace(0.2, 0.4, 20).view(-1, *[1] * len(shape))
    prediction[7], prediction[12] = truth[7], truth[12] + 1e-3
    scores = score_reconstruction(truth, prediction, (0.0, 1.0), truth, generator(0))["attack"]
    each = {"psnr": psnr(truth, prediction, 1.0)} if metric == "psnr" else {"r2": r2(truth, prediction)}
    each["mse"] = mse(truth, prediction)
    for name, values in each.items():
        assert scores[name].median == pytest.approx(float(values.quantile(0.5)))
        assert scores[name].worst_decile == pytest.approx(float(values[[7, 12]].mean()))


def test_score_of_one_victim_leaves_out_what_needs_two() -> None:
    image = _images(1, 1, 12)
    scores = score_reconstruction(image, image.flip(3), (0, 1), _images(4, 1, 12, seed=1), generator(0))
    assert list(scores) == ["attack", "mean_image"]
    assert list(scores["attack"]) == ["psnr", "ssim", "mse"]
    assert not scores["attack"]["psnr"].known
    row = torch.ones(1, 3)
    assert list(score_reconstruction(row, row, None, row, generator(0))["attack"]) == ["mse"]


def test_refusals() -> None:
    image = _images(2, 1, 8)
    with pytest.raises(InvalidInput, match=r"truth has shape \(2, 1, 8, 8\) and prediction \(2, 8, 8\)"):
        mse(image, image[:, 0])
    with pytest.raises(InvalidInput, match="prediction holds a value that is not finite"):
        psnr(image, image / 0, 1)
    with pytest.raises(InvalidInput, match=r"data_range=0 is not allowed; expected a number in \(0, inf\)"):
        psnr(image, image, 0)
    with pytest.raises(InvalidInput, match="data_range=-1"):
        ssim(image, image, -1)
    with pytest.raises(InvalidInput, match=r"images have shape \(2, 8\)"):
        ssim(image[:, 0, 0], image[:, 0, 0], 1)
    with pytest.raises(InvalidInput, match="all 2 are equal"):
        r2(torch.ones(2, 3), torch.zeros(2, 3))
    with pytest.raises(InvalidInput, match=r"auxiliary has shape \(0, 3\)"):
        mean_image(torch.ones(0, 3))
    with pytest.raises(InvalidInput, match="n >= 2 to pair"):
        random_pairing(image[:1], generator(0))
    with pytest.raises(InvalidInput, match="value_range=None"):
        score_reconstruction(image, image, None, image, generator(0))
    with pytest.raises(InvalidInput, match=r"auxiliary_x has shape \(2, 8, 8\); expected \(m, \*\(1, 8, 8\)\)"):
        score_reconstruction(image, image, (0, 1), image[:, 0], generator(0))
