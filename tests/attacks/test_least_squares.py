"""The best linear inverse: exact where there is one, the closed form under noise, the mean where nothing tells."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from splitfed.attacks.networks.least_squares import MOST_FEATURES, Dense, Local, _ridge, linear_inverse
from splitfed.core.random import generator, stream


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed, "rows"))


def test_a_linear_map_is_inverted_to_rounding() -> None:
    x = rows(60, 8)
    z = x @ rows(8, 12, seed=1) + 3.0
    found = linear_inverse([z[:40]], x[:40])
    assert isinstance(found, Dense)
    assert torch.allclose(found(z[40:]), x[40:], atol=1e-4)


# Images, and the kernel, stride and padding of the client: grids that doubling reaches, and such as it does not. The
# images have a blank margin, as digits have, for where the grid ends a kernel that fits the middle does not.
@pytest.mark.parametrize(
    ("side", "kernel", "stride", "padding"), [(12, 3, 1, 1), (12, 3, 1, 0), (12, 4, 2, 1), (14, 5, 1, 0), (13, 3, 2, 1)]
)
def test_a_convolution_is_inverted_at_every_place_alike(side: int, kernel: int, stride: int, padding: int) -> None:
    with stream(3):
        client = nn.Conv2d(1, kernel * kernel, kernel, stride, padding)
    x = functional.pad(rows(60, 1, side - 8, side - 8), [4] * 4)
    with torch.no_grad():
        z = client(x)
    found = Local((z.shape[2], z.shape[3]), (1, side, side), 3)
    solved = _ridge(lambda chosen: [(found.features(z[chosen]), found.blocks(x[chosen]))], 40)
    found.fit(solved.weight, solved.bias)
    assert found(z).shape == x.shape
    assert float((found(z[40:]) - x[40:]).square().mean()) < 1e-6


def test_the_grid_stands_in_the_middle_of_the_image() -> None:
    """As a convolution without padding leaves it: what is cut off of all sides is inverted by a kernel of one pixel."""
    x = functional.pad(rows(30, 1, 6, 7), [2] * 4)
    z = x[..., 2:-2, 2:-2]
    found = Local((6, 7), (1, 10, 11), 1)
    solved = _ridge(lambda chosen: [(found.features(z[chosen]), found.blocks(x[chosen]))], 30)
    assert torch.allclose(found.fit(solved.weight, solved.bias)(z), x, atol=1e-4)


def test_under_gaussian_noise_the_error_is_that_of_the_best_guess() -> None:
    """x ~ N(0, 4 I), z = A x + N(0, 1): nobody is better than tr((I / 4 + A'A)^-1) / d, which least squares reaches."""
    a = rows(6, 5, seed=4)
    x = 2 * rows(6000, 5)
    z = x @ a.T + rows(6000, 6, seed=6)
    best = float(torch.linalg.inv(torch.eye(5) / 4 + a.T @ a).trace()) / 5
    found = linear_inverse([z[:3000]], x[:3000])
    assert found is not None
    # The mean of 15,000 squares has a relative deviation of about .012.
    assert float((found(z[3000:]) - x[3000:]).square().mean()) == pytest.approx(best, rel=0.05)


@pytest.mark.parametrize("shape", [(30,), (4, 6, 6)])
def test_from_noise_alone_it_guesses_the_mean(shape: tuple[int, ...]) -> None:
    x = rows(200, 1, 6, 6) + 5.0
    z = rows(200, *shape, seed=7)
    found = linear_inverse([z], x)
    assert found is not None
    assert float((found(z) - x.mean((0, 2, 3))).abs().max()) < 0.5
    blind = float((x - x.mean()).square().mean())
    new = rows(200, 1, 6, 6, seed=8) + 5.0
    assert float((found(rows(200, *shape, seed=9)) - new).square().mean()) < 1.05 * blind


def test_all_passes_count() -> None:
    """Noise that is drawn anew in every pass is learnt as noise; one pass of few rows would be learnt by heart."""
    x = rows(40, 8)
    z = x @ rows(8, 30, seed=1)
    passes = [z + 3 * rows(40, 30, seed=seed) for seed in range(20, 60)]
    new = rows(400, 8, seed=2)
    seen = new @ rows(8, 30, seed=1) + 3 * rows(400, 30, seed=70)
    one, all_ = (linear_inverse(some, x) for some in (passes[:1], passes))
    assert one is not None
    assert all_ is not None
    first, second = (float((found(seen) - new).square().mean()) for found in (one, all_))
    assert second < 0.9 * first


def test_what_has_too_many_weights_is_left_to_the_network() -> None:
    assert linear_inverse([rows(6, 20_000)], rows(6, 3)) is None


def test_a_wide_linear_release_is_inverted_from_mixtures_of_its_numbers() -> None:
    x = rows(80, 30)
    z = x @ rows(30, MOST_FEATURES + 500, seed=1)
    found = linear_inverse([z[:60]], x[:60])
    assert isinstance(found, Dense)
    assert torch.allclose(found(z[60:]), x[60:], atol=1e-3)


def test_the_kernel_is_preferred_where_the_whole_row_is_learnt_by_heart() -> None:
    """Images from a third of the channels, and few rows: 144 numbers of a release, 1 of a place that counts."""
    x = rows(40, 1, 12, 12)
    found = linear_inverse([torch.cat([x + 0.1 * rows(40, 1, 12, 12, seed=1), rows(40, 2, 12, 12, seed=2)], 1)], x)
    assert isinstance(found, Local)
