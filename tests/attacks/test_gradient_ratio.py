"""Ratio of a defense's gradient to a hijacker's: lengths of known gradients, and what the scale of a release does."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitfed.attacks.training_time.gradient_ratio import GradientRatio, gradient_ratio, kept_ratio
from splitfed.core.errors import InvalidInput
from splitfed.core.random import generator
from splitfed.stats.dependence import distance_correlation, slope


def linear(*weights: float) -> nn.Module:
    """Return a critic whose gradient is `weights` in every row, in double precision."""
    critic = nn.Linear(len(weights), 1).double()
    critic.weight.data = torch.tensor([weights], dtype=torch.float64)
    return nn.Sequential(critic, nn.Flatten(0))


def drawn(rows: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, *shape, generator=generator(seed, "gradient ratio"), dtype=torch.float64)


def test_the_lengths_of_known_gradients() -> None:
    """The critic 3 a + 4 b in the mean of four rows: 5 / 4 in each row, 5 / 2 over the batch, 25 times the strength."""
    x, z = drawn(4, 3, seed=1), drawn(4, 2)
    found = gradient_ratio([(x, z)], linear(3.0, 4.0), weight=7.0, strength=10.0)
    leaf = z.clone().requires_grad_()
    (by_autograd,) = torch.autograd.grad(distance_correlation(x, leaf), leaf)
    assert found.attack == pytest.approx(25.0)
    assert found.defense == pytest.approx(7 * float(by_autograd.norm()))
    assert found.rho == pytest.approx(7 * float(by_autograd.norm()) / 25)
    pairs = [float((z[i] - z[j]).norm()) for i in range(4) for j in range(i)]
    assert found.distance == pytest.approx(sum(pairs) / 6)


def test_lengths_are_means_over_batches() -> None:
    """Of the critic a² / 2 the gradient is a / n: at z = 1 and at z = 3, four rows each, lengths 1 / 2 and 3 / 2."""

    class Square(nn.Module):
        def forward(self, z: Tensor) -> Tensor:
            return z[:, 0].square() / 2

    rows, other = drawn(4, 3), drawn(4, 5)
    batches = [(rows, torch.cat([torch.full((4, 1), a, dtype=torch.float64), other], 1)) for a in (1.0, 3.0)]
    assert gradient_ratio(batches, Square()).attack == pytest.approx(1.0)


@pytest.mark.parametrize("shape", [(6,), (4, 3, 3)])
@pytest.mark.parametrize("statistic", ["distance_correlation", "u_distance_correlation_sqr"])
def test_the_gradient_of_distance_correlation_is_orthogonal_to_the_release(shape: Any, statistic: Any) -> None:
    x, z = drawn(16, 5), drawn(16, *shape, seed=1)
    pull = slope(x, z, statistic)
    assert float(pull.norm()) > 1e-3
    assert abs(float((pull * z).sum())) < 1e-6 * float(pull.norm() * z.norm())


def test_a_release_twice_as_large_feels_half_the_defense_and_the_same_attack() -> None:
    x, z, critic = drawn(16, 5), drawn(16, 6, seed=1), linear(1.0, -2.0, 0.5, 0.0, 3.0, 1.0)
    one, two = (gradient_ratio([(x, times * z)], critic) for times in (1.0, 2.0))
    assert two.defense == pytest.approx(one.defense / 2, rel=1e-9)
    assert two.distance == pytest.approx(2 * one.distance, rel=1e-9)
    assert two.attack == pytest.approx(one.attack, rel=1e-12)
    assert two.rho == pytest.approx(one.rho / 2, rel=1e-9)


def test_the_scaled_weight_has_the_ratio_of_the_reference() -> None:
    """Ratios .031 at the authors' width and .76 here: 1e4 becomes 408."""
    assert kept_ratio(1e4, GradientRatio(0.031, 1.0, 1.0), GradientRatio(0.76, 1.0, 1.0)) == pytest.approx(
        407.9, abs=0.1
    )
    x, critic = drawn(16, 5), linear(1.0, -2.0, 0.5)
    wide, narrow = drawn(16, 3, seed=1), 0.1 * drawn(16, 3, seed=2)
    reference, here = (gradient_ratio([(x, z)], critic, weight=20.0, strength=3.0) for z in (wide, narrow))
    weight = kept_ratio(20.0, reference, here)
    assert abs(weight - 20.0) > 1
    again = gradient_ratio([(x, narrow)], critic, weight=weight, strength=3.0)
    assert again.rho == pytest.approx(reference.rho, rel=1e-9)


def test_measuring_moves_nothing() -> None:
    x, z, critic = drawn(8, 5), drawn(8, 2, seed=1).requires_grad_(), linear(3.0, 4.0)
    with torch.no_grad():
        gradient_ratio([(x, z)], critic)
    assert z.grad is None
    assert all(p.grad is None for p in critic.parameters())


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no batch": ({"batches": []}, "gradient_ratio batches=() is not allowed; expected one batch or more"),
    "one row": (
        {"batches": [(drawn(1, 5), drawn(1, 2))]},
        "a batch has 1 raw rows and 1 releases; expected",
    ),
    "unequal": ({"batches": [(drawn(3, 5), drawn(4, 2))]}, "a batch has 3 raw rows and 4 releases"),
    "weight": ({"weight": 0.0}, "gradient_ratio weight=0.0 is not allowed"),
    "strength": ({"strength": -1.0}, "gradient_ratio strength=-1.0 is not allowed"),
    "a constant release": (
        {"batches": [(drawn(4, 5), torch.ones(4, 2, dtype=torch.float64))]},
        "the gradient of distance correlation has length 0; expected a finite one above zero",
    ),
    "a dead critic": ({"critic": linear(0.0, 0.0)}, "the gradient of the critic has length 0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_line(case: str) -> None:
    changes, text = REFUSED[case]
    given = {"batches": [(drawn(4, 5), drawn(4, 2))], "critic": linear(3.0, 4.0), **changes}
    with pytest.raises(InvalidInput, match=re.escape(text)):
        gradient_ratio(**given)
    with pytest.raises(InvalidInput, match=r"kept_ratio weight=0.0 is not allowed"):
        kept_ratio(0.0, GradientRatio(1.0, 1.0, 1.0), GradientRatio(1.0, 1.0, 1.0))
