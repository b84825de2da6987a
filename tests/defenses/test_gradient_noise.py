"""Noise on gradients that needs no labels: max norm and isotropic noise have the stated law, by hand and by count."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from splitfed.attacks.scoring.label_metrics import auc
from splitfed.core.defense import Defense
from splitfed.core.defense_context import Context
from splitfed.core.errors import InvalidInput
from splitfed.core.messages import Stamp
from splitfed.defenses import Iso, MaxNorm

DRAWS = 4000
# Lengths 5, 1, 0 and 5 again.
ROWS = torch.tensor([[3.0, 4.0], [0.6, 0.8], [0.0, 0.0], [0.0, -5.0]])


def sent(defense: Defense, g: Tensor, step: int = 0, seed: int = 0) -> Tensor:
    return defense.gradient("z", g, Context("server", "bottom->top", Stamp("train", 0, 0, step), seed, 0))


def many(defense: Defense, g: Tensor) -> Tensor:
    """What leaves in place of each of DRAWS copies of `g` in one batch: (DRAWS, *g.shape)."""
    return sent(defense, g.repeat(DRAWS, 1)).view(DRAWS, *g.shape).double()


def test_max_norm_by_hand() -> None:
    """sigma is 0 for rows of the greatest length, sqrt(25/1 - 1) for the row of length 1; row 3 has nothing to grow."""
    found = many(MaxNorm(), ROWS)
    assert torch.equal(found[:, [0, 2, 3]], ROWS[[0, 2, 3]].double().expand(DRAWS, 3, 2))
    factor = found[:, 1] / ROWS[1].double()
    torch.testing.assert_close(factor[:, 0], factor[:, 1], rtol=1e-5, atol=1e-6)
    drawn = (factor[:, 0] - 1) / math.sqrt(24)
    assert abs(float(drawn.mean())) < 4 / math.sqrt(DRAWS)
    assert float(drawn.square().mean()) == pytest.approx(1.0, abs=4 * math.sqrt(2 / DRAWS))
    # The point of it: all squared lengths are 25 in expectation.
    assert float(found[:, 1].square().sum(1).mean()) == pytest.approx(25, abs=25 * 4 * math.sqrt(2 / DRAWS))


def test_max_norm_hides_lengths() -> None:
    """Positives three times as long: their norms tell all before, and about nothing once aligned."""
    torch.manual_seed(0)
    positive = torch.arange(400) < 100
    g = torch.nn.functional.normalize(torch.randn(400, 8)) * torch.where(positive, 3.0, 1.0).unsqueeze(1)
    assert auc(g.norm(dim=1), positive) == 1.0
    found = sent(MaxNorm(), g)
    # A negative's length is |1 + sqrt(8) N|, a positive's 3: P(|1 + sqrt(8) N| < 3) = Phi(.707) - Phi(-1.414) = .68.
    assert auc(found.norm(dim=1), positive) == pytest.approx(0.6816, abs=4 * math.sqrt(0.68 * 0.32 / 300))


@pytest.mark.parametrize("ratio", [0.5, 3.0])
def test_iso_by_hand(ratio: float) -> None:
    """The longest row has length 5 and two numbers: deviation ratio 5/sqrt(2) everywhere."""
    drawn = (many(Iso(ratio=ratio), ROWS) - ROWS.double()).flatten(1)
    deviation = ratio * 5 / math.sqrt(2)
    assert float(drawn.mean(0).abs().max()) < 5 * deviation / math.sqrt(DRAWS)
    torch.testing.assert_close(
        drawn.square().mean(0),
        torch.full((8,), deviation**2, dtype=torch.float64),
        rtol=5 * math.sqrt(2 / DRAWS),
        atol=0,
    )
    alike = torch.corrcoef(drawn.T) - torch.eye(8)
    assert float(alike.abs().max()) < 5 / math.sqrt(DRAWS)


@pytest.mark.parametrize("defense", [MaxNorm(), Iso(ratio=1.0)], ids=["max_norm", "iso"])
def test_scale_shape_and_draws(defense: Defense) -> None:
    """In proportion to the gradient down to the smallest; any shape; the same step draws the same."""
    torch.manual_seed(0)
    g = torch.randn(6, 2, 3)
    first = sent(defense, g)
    assert first.shape == g.shape
    assert first.dtype == g.dtype
    torch.testing.assert_close(sent(defense, g * 2.0**-90) * 2.0**90, first)
    assert torch.equal(sent(defense, g), first)
    assert not torch.equal(sent(defense, g, step=1), first)
    assert not torch.equal(sent(defense, g, seed=1), first)
    assert not torch.equal(first, g)
    assert torch.equal(sent(defense, torch.zeros(3, 4)), torch.zeros(3, 4))


def test_no_ratio_is_no_noise() -> None:
    assert torch.equal(sent(Iso(ratio=0.0), ROWS), ROWS)


def test_refused() -> None:
    with pytest.raises(InvalidInput, match=r"iso ratio=-1 is not allowed; expected a number in \[0, inf\)"):
        Iso(ratio=-1)
