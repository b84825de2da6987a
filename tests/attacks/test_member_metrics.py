"""Scores for membership against numbers worked out by hand."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import Tensor

from splitfed.attacks.membership.confidence import log_density, log_probabilities, losses, margins, moments
from splitfed.attacks.membership.lira import halves
from splitfed.attacks.scoring.member_metrics import chance_at, roc, score_members, tpr_at, tpr_interval
from splitfed.core.errors import InvalidInput
from splitfed.core.random import generator
from tests.rounding import single

# Members 9, 7, 5, 1; others 8, 6, 4, 2: thresholds 8 (no false positive), 6 (one), 4 (two), 2 (three).
SCORES = torch.tensor([9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 2.0, 1.0])
MEMBER = torch.tensor([1, 0, 1, 0, 1, 0, 0, 1], dtype=torch.bool)


@pytest.mark.parametrize(
    ("fpr", "share"), [(0.0, 0.25), (0.01, 0.25), (0.2499, 0.25), (0.25, 0.5), (0.5, 0.75), (0.75, 0.75), (1.0, 1.0)]
)
def test_true_positives_at_a_rate_round_down_to_what_four_can_resolve(fpr: float, share: float) -> None:
    assert tpr_at(SCORES, MEMBER, fpr) == share


def test_members_tied_with_the_threshold_do_not_count() -> None:
    member = torch.tensor([True, True, False, False])
    assert tpr_at(torch.tensor([2.0, 1.0, 1.0, 0.0]), member, 0.0) == 0.5
    assert tpr_at(torch.zeros(4), member, 0.0) == 0.0
    assert tpr_at(torch.zeros(4), member, 0.99) == 0.0


def test_chance_by_hand() -> None:
    """Of four others none is admitted at 1 %: a blind score tops all four in a fifth of the cases."""
    assert chance_at(0.01, 4) == 0.2
    assert chance_at(0.01, 100) == 2 / 101
    assert chance_at(0.001, 100) == 1 / 101
    assert chance_at(0.29, 100) == 30 / 101, "0.29 * 100 is a little under 29 in floating point"
    assert chance_at(1.0, 7) == 1.0


def test_chance_is_what_blind_scores_reach() -> None:
    drawn = generator(0, "blind")
    member = torch.arange(20) < 10
    found = [tpr_at(torch.rand(20, generator=drawn), member, 0.1) for _ in range(2000)]
    assert sum(found) / 2000 == pytest.approx(chance_at(0.1, 10), abs=0.015)
    assert chance_at(0.1, 10) == 2 / 11


def test_roc_corners_by_hand() -> None:
    found = roc(SCORES, MEMBER)
    assert found.fpr.tolist() == [0, 0, 0.25, 0.25, 0.5, 0.5, 0.75, 1.0, 1.0]
    assert found.tpr.tolist() == [0, 0.25, 0.25, 0.5, 0.5, 0.75, 0.75, 0.75, 1.0]


def test_ties_are_one_step_of_the_roc() -> None:
    found = roc(torch.zeros(4), torch.tensor([True, False, True, False]))
    assert (found.fpr.tolist(), found.tpr.tolist()) == ([0.0, 1.0], [0.0, 1.0])


def test_the_area_under_the_corners_is_the_auc() -> None:
    scores = torch.randint(0, 20, (200,), generator=generator(1)).float()
    member = torch.rand(200, generator=generator(2)) < 0.3
    curve = roc(scores, member)
    scores = score_members(member, scores, generator(0))
    assert float(torch.trapezoid(curve.tpr, curve.fpr)) == pytest.approx(scores["attack"]["auc"].mean, abs=1e-12)


def test_score_by_hand() -> None:
    """Members win 4, 3, 2 and 0 of their duels with four others: 9 of 16."""
    found = score_members(MEMBER, SCORES, generator(0))
    assert found["attack"]["auc"].mean == 9 / 16
    assert found["attack"]["tpr_at_fpr_1%"].mean == found["attack"]["tpr_at_fpr_0.1%"].mean == 0.25
    assert found["attack"]["least_fpr"].mean == 0.25
    assert {n: i.mean for n, i in found["chance"].items()} == {
        "auc": 0.5,
        "tpr_at_fpr_1%": 0.2,
        "tpr_at_fpr_0.1%": 0.2,
        "least_fpr": 0.25,
    }
    assert found["attack"]["auc"].low < 9 / 16 < found["attack"]["auc"].high


def test_a_perfect_guess_has_no_doubt() -> None:
    member = torch.arange(40) < 20
    found = score_members(member, member.float(), generator(0))["attack"]
    for metric in ("auc", "tpr_at_fpr_1%", "tpr_at_fpr_0.1%"):
        assert (found[metric].low, found[metric].mean, found[metric].high) == (1.0, 1.0, 1.0)


def test_intervals_shrink_with_the_root_of_the_number_of_candidates() -> None:
    def width(n: int) -> float:
        scores = torch.randn(2 * n, generator=generator(3))
        found = tpr_interval(scores, torch.arange(2 * n) < n, 0.5, generator(4))
        assert found.low < found.mean < found.high
        return found.high - found.low

    assert width(50) / width(1250) == pytest.approx(5, rel=0.4)


BAD: dict[str, tuple[Tensor, Tensor, str]] = {
    "only members": (
        torch.zeros(3),
        torch.ones(3, dtype=torch.bool),
        "3 of 3 are members; expected members and non-members",
    ),
    "numbers": (torch.zeros(3), torch.ones(3), "scores have shape (3,) for (3,) torch.float32; expected (n,) and bool"),
    "shapes": (torch.zeros(3, 2), MEMBER[:3], "scores have shape (3, 2) for (3,)"),
    "nan": (torch.tensor([math.nan, 0.0]), torch.tensor([True, False]), "scores hold a value that is not finite"),
}


@pytest.mark.parametrize("case", BAD)
def test_refusals(case: str) -> None:
    scores, member, text = BAD[case]
    for call in (lambda: score_members(member, scores, generator(0)), lambda: roc(scores, member)):
        with pytest.raises(InvalidInput, match=re.escape(text)):
            call()


def test_a_rate_outside_is_refused() -> None:
    with pytest.raises(InvalidInput, match=re.escape("fpr=1.5 is not allowed; expected a number in [0, 1]")):
        tpr_at(SCORES, MEMBER, 1.5)


def test_confidence_by_hand() -> None:
    """Logits (0, log 3): probabilities 1/4 and 3/4, odds 1/3 and 3."""
    outputs, labels = torch.tensor([[0.0, math.log(3)]] * 2), torch.tensor([0, 1])
    assert log_probabilities(outputs)[0].exp().tolist() == single([0.25, 0.75])
    assert losses(outputs, labels).tolist() == single([math.log(4), math.log(4 / 3)])
    assert margins(outputs, labels).tolist() == single([-math.log(3), math.log(3)])


@pytest.mark.parametrize("shape", [(2,), (2, 1)])
def test_a_single_logit_is_that_of_class_one(shape: tuple[int, ...]) -> None:
    found = margins(torch.tensor([2.0, 2.0]).view(shape), torch.tensor([1, 0]))
    assert found.tolist() == single([2.0, -2.0])


def test_confidence_beyond_rounding_stays_finite() -> None:
    outputs = torch.tensor([[500.0, 0.0, 0.0]])
    assert float(margins(outputs, torch.tensor([0]))) == single(500 - math.log(2))
    assert float(margins(outputs, torch.tensor([1]))) == single(-500)


@pytest.mark.parametrize("copies", [4, 16])
def test_every_row_is_in_half_of_the_copies(copies: int) -> None:
    held = halves(copies, 500, generator(0))
    assert held.shape == (copies, 500)
    assert held.sum(0).tolist() == [copies // 2] * 500
    assert 0.35 * 500 < int(held[0].sum()) < 0.65 * 500


def test_moments_by_hand() -> None:
    """Column one: 1 and 3 chosen, mean 2, variance 2; column two: 0 and 4, mean 2, variance 8; pooled 5."""
    values = torch.tensor([[1.0, 9.0], [3.0, 0.0], [7.0, 4.0]])
    chosen = torch.tensor([[True, False], [True, True], [False, True]])
    mean, deviation = moments(values, chosen, pooled=False)
    assert mean.tolist() == [2.0, 2.0]
    assert deviation.square().tolist() == single([2.0, 8.0])
    assert moments(values, chosen, pooled=True)[1].square().tolist() == single([5.0, 5.0])


def test_log_density_is_that_of_a_gaussian() -> None:
    mean, deviation = torch.tensor([0.0, 1.0]), torch.tensor([1.0, 2.0])
    value = torch.tensor([0.5, 4.0])
    wanted = torch.distributions.Normal(mean, deviation).log_prob(value) + math.log(2 * math.pi) / 2
    assert torch.allclose(log_density(value, mean, deviation), wanted)
