"""Accuracy and leak AUC of guessed labels, on numbers small enough to count, and hints that are not scored."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from splitfed.attacks.labels.known_labels import draw_hints, rows_without_hints
from splitfed.attacks.labels.label_attack import boundary
from splitfed.attacks.scoring.label_metrics import auc, auc_interval, score_labels
from splitfed.core.random import generator
from tests.examples import refusal
from tests.rounding import single

NONE = torch.empty(0, dtype=torch.int64)


def marks(*ones: int) -> Tensor:
    return torch.tensor(ones).bool()


AREAS = {
    "perfect": ([3.0, 4.0, 1.0, 2.0], (1, 1, 0, 0), 1.0),
    "reversed": ([1.0, 2.0, 3.0, 4.0], (1, 1, 0, 0), 0.0),
    "three of four pairs": ([1.0, 4.0, 0.0, 2.0], (1, 1, 0, 0), 0.75),
    "all tied": ([5.0, 5.0, 5.0], (1, 0, 0), 0.5),
    "one tie counts half": ([2.0, 2.0, 1.0], (1, 0, 0), 0.75),
    "infinite scores": ([math.inf, 0.0, -math.inf], (1, 0, 0), 1.0),
}


@pytest.mark.parametrize("case", AREAS)
def test_area_by_counting_pairs(case: str) -> None:
    scores, positive, area = AREAS[case]
    assert auc(torch.tensor(scores), marks(*positive)) == area


def test_area_equals_the_definition_over_all_pairs_and_ignores_monotone_maps() -> None:
    drawn = generator(0)
    scores = torch.randint(0, 6, (60,), generator=drawn).float()
    positive = torch.rand(60, generator=drawn) < 0.3
    one, other = scores[positive][:, None], scores[~positive][None]
    pairs = float(((one > other).double() + (one == other).double() / 2).mean())
    assert auc(scores, positive) == pytest.approx(pairs, abs=1e-12)
    assert auc(3 * scores.exp() + 1, positive) == pytest.approx(pairs, abs=1e-12)
    assert auc(-scores, positive) == pytest.approx(1 - pairs, abs=1e-12)


def test_area_agrees_with_scikit_learn() -> None:
    from sklearn.metrics import roc_auc_score

    drawn = generator(1)
    scores = torch.randn(300, generator=drawn).mul(2).round()
    positive = torch.rand(300, generator=drawn) < 0.2
    assert auc(scores, positive) == pytest.approx(roc_auc_score(positive.numpy(), scores.numpy()), abs=1e-12)


def test_interval_holds_the_area_and_narrows_with_victims() -> None:
    def width(n: int) -> float:
        drawn = generator(2)
        positive = torch.arange(n) < n // 4
        found = auc_interval(torch.randn(n, generator=drawn) + positive.float(), positive, generator(3))
        assert found.low < found.mean < found.high
        assert found.n == n
        return found.high - found.low

    # Four times as many victims: about half as wide.
    assert 1.6 < width(60) / width(240) < 2.6


def test_interval_of_perfect_scores_is_a_point_and_of_one_positive_unknown() -> None:
    perfect = auc_interval(torch.tensor([2.0, 3.0, 0.0, 1.0]), marks(1, 1, 0, 0), generator(0))
    assert (perfect.low, perfect.mean, perfect.high) == (1.0, 1.0, 1.0)
    lone = auc_interval(torch.tensor([2.0, 3.0, 0.0, 1.0]), marks(1, 0, 0, 0), generator(0))
    assert lone.mean == pytest.approx(2 / 3)
    assert not lone.known


def test_score_of_single_scores_by_hand() -> None:
    """Says 1 1 0 0 of 1 0 0 1: two of four right; pairs (2>1), (2>-1), (-2<1), (-2<-1): two of four won."""
    found = score_labels(torch.tensor([1, 0, 0, 1]), torch.tensor([2.0, 1.0, -1.0, -2.0]), NONE, generator(0))
    assert found["attack"]["accuracy"].mean == 0.5
    assert found["attack"]["auc"].mean == 0.5
    assert set(found) == {"attack", "random_pairing"}
    # Each victim has one of its class among three others.
    assert found["random_pairing"]["accuracy"].mean == pytest.approx(1 / 3)


def test_score_of_rows_of_scores_by_hand() -> None:
    """Says 2 1 0 0 of 2 1 0 1, where auxiliary rows are mostly of class 1: 3/4, and 2/4 for the majority."""
    prediction = torch.tensor([[0.0, 1.0, 2.0], [0.0, 5.0, 1.0], [3.0, 2.0, 1.0], [0.0, 0.0, 0.0]])
    prior = torch.tensor([1, 1, 2])
    found = score_labels(torch.tensor([2, 1, 0, 1]), prediction, prior, generator(0))
    assert found["attack"]["accuracy"].mean == 0.75
    assert found["majority"]["accuracy"].mean == 0.5
    assert found["random_pairing"]["accuracy"].mean == pytest.approx((0 + 1 + 0 + 1) / 3 / 4)
    assert all("auc" not in metrics for metrics in found.values())


def test_two_columns_have_the_area_of_their_difference_and_baselines_a_half() -> None:
    prediction = torch.tensor([[0.0, 1.0], [10.0, 10.5], [0.0, 3.0]])
    found = score_labels(torch.tensor([1, 0, 1]), prediction, torch.tensor([1]), generator(0))
    assert found["attack"]["auc"].mean == 1.0
    assert (found["majority"]["auc"].mean, found["random_pairing"]["auc"].mean) == (0.5, 0.5)


def test_the_sign_is_never_repaired() -> None:
    """A prediction that is wrong throughout scores 0, not 1."""
    found = score_labels(torch.tensor([1, 1, 0, 0]), torch.tensor([-2.0, -1.0, 1.0, 2.0]), NONE, generator(0))
    assert found["attack"]["auc"].mean == 0.0
    assert found["attack"]["accuracy"].mean == 0.0


def test_victims_of_one_class_have_no_area() -> None:
    found = score_labels(torch.ones(3, dtype=torch.int64), torch.tensor([1.0, 2.0, -1.0]), NONE, generator(0))
    assert set(found["attack"]) == {"accuracy"}
    assert found["attack"]["accuracy"].mean == pytest.approx(2 / 3)


def test_scored_leaves_the_others_out_everywhere() -> None:
    truth, prediction = torch.tensor([1, 1, 0, 0, 1, 1]), torch.tensor([9.0, 1.0, -1.0, 2.0, 9.0, 3.0])
    kept = torch.tensor([1, 2, 3, 5])
    part = score_labels(truth, prediction, NONE, generator(0), kept)
    alone = score_labels(truth[kept], prediction[kept], NONE, generator(0))
    assert part == alone
    assert part["attack"]["accuracy"].n == 4
    assert part["attack"]["auc"].mean == 0.75


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "real labels": (
        lambda: score_labels(torch.rand(2), torch.rand(2), NONE, generator(0)),
        "labels have shape (2,) and type torch.float32; expected one class a row",
    ),
    "too few scores": (
        lambda: score_labels(torch.tensor([0, 1]), torch.rand(3), NONE, generator(0)),
        "prediction has shape (3,); expected scores for 2 victims",
    ),
    "one column": (
        lambda: score_labels(torch.tensor([0, 1]), torch.rand(2, 1), NONE, generator(0)),
        "prediction has scores for 1 classes; the victims have labels up to 1",
    ),
    "single scores of three classes": (
        lambda: score_labels(torch.tensor([0, 2]), torch.rand(2), NONE, generator(0)),
        "prediction has scores for 2 classes; the victims have labels up to 2",
    ),
    "nan": (
        lambda: score_labels(torch.tensor([0, 1]), torch.tensor([0.0, math.nan]), NONE, generator(0)),
        "prediction holds a score that is not finite",
    ),
    "nan in an area": (lambda: auc(torch.tensor([math.nan, 1.0]), marks(0, 1)), "scores hold nan"),
    "one class": (lambda: auc(torch.rand(2), marks(1, 1)), "an AUC needs at least one positive and one negative"),
    "marks of another length": (lambda: auc(torch.rand(2), marks(1, 0, 0)), "an AUC needs scores (n,) and a bool mask"),
    "resamples": (lambda: auc_interval(torch.rand(2), marks(1, 0), generator(0), 0), "resamples=0 is not allowed"),
    "hints": (
        lambda: draw_hints(torch.tensor([0, 1, 1]), {1: 3}, generator(0)),
        "hints=3 is not allowed; there are 2 victims of class 1",
    ),
    "hints below zero": (lambda: draw_hints(torch.tensor([0, 1]), {1: -1}, generator(0)), "hints of class 1=-1"),
    "nobody left": (
        lambda: draw_hints(torch.tensor([0, 1]), {0: 1, 1: 1}, generator(0)),
        "hints for all 2 victims leave no victim to attack",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    call, text = REFUSED[case]
    assert text in refusal(call)


def test_hints_are_of_their_class_distinct_and_follow_the_generator() -> None:
    labels = torch.arange(40) % 4
    drawn = draw_hints(labels, {1: 5, 3: 2}, generator(0))
    assert {c: len(rows.unique()) for c, rows in drawn.items()} == {1: 5, 3: 2}
    assert all(bool((labels[rows] == c).all()) for c, rows in drawn.items())
    again, other = (draw_hints(labels, {1: 5, 3: 2}, generator(s)) for s in (0, 1))
    assert all(torch.equal(drawn[c], again[c]) for c in drawn)
    assert not all(torch.equal(drawn[c], other[c]) for c in drawn)


def test_every_positive_is_drawn_equally_often() -> None:
    labels = torch.tensor([1, 0, 1, 1])
    counts = torch.bincount(torch.cat([draw_hints(labels, {1: 1}, generator(s))[1] for s in range(300)]), minlength=4)
    assert int(counts[1]) == 0
    # 100 each with a deviation of 8.
    assert all(abs(int(counts[i]) - 100) < 30 for i in (0, 2, 3))


def test_others_are_those_that_no_hint_names() -> None:
    assert rows_without_hints(5, {1: torch.tensor([3]), 0: torch.tensor([0])}).tolist() == [1, 2, 4]
    assert rows_without_hints(3, {}).tolist() == [0, 1, 2]
    assert draw_hints(torch.tensor([0, 1]), {}, generator(0)) == {}


def test_boundary_lies_between_two_groups() -> None:
    """Means 1 and 11, whatever the order; groups of 1 and 3 (0 and mean 10); equal scores have none."""
    assert boundary(torch.tensor([12.0, 0.0, 10.0, 2.0])) == 6.0
    assert boundary(torch.tensor([9.0, 10.0, 11.0, 0.0])) == 5.0
    assert boundary(torch.tensor([7.0, 7.0, 7.0])) == 7.0
    assert boundary(torch.tensor([4.0])) == 4.0


def test_boundary_is_the_best_of_all_splits() -> None:
    scores = torch.randn(30, generator=generator(4)).double()
    low, high = (scores[side] for side in (scores <= boundary(scores), scores > boundary(scores)))
    chosen = float(low.var(correction=0) * len(low) + high.var(correction=0) * len(high))
    for cut in scores.sort().values[:-1].tolist():
        one, other = scores[scores <= cut], scores[scores > cut]
        assert chosen <= float(one.var(correction=0) * len(one) + other.var(correction=0) * len(other)) + 1e-9


def test_classes_without_names_are_scored_by_the_best_assignment_beside_chance() -> None:
    """Classes 0, 1, 2 are called 1, 2, 0: nothing is right as it stands, and all but one row by other names."""
    truth = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2])
    said = torch.tensor([1, 1, 1, 2, 2, 2, 0, 0, 1])
    scores = torch.eye(3)[said]
    found = score_labels(truth, scores, NONE, generator(0), named=False)
    assert found["attack"]["accuracy"].mean == 0.0
    assert found["attack"]["assigned_accuracy"].mean == single(8 / 9)
    assert set(found["permutation_null"]) == {"assigned_accuracy"}
    null = found["permutation_null"]["assigned_accuracy"]
    # The best of six ways to name three classes of three rows each is never below a third, and mostly above.
    assert 1 / 3 <= null.low <= null.mean <= null.high <= 8 / 9
    assert 0.45 < null.mean < 0.65
    named = score_labels(truth, scores, NONE, generator(0))
    assert "assigned_accuracy" not in named["attack"]
    assert "permutation_null" not in named


def test_who_says_one_class_of_all_is_right_of_the_most_frequent() -> None:
    truth, prior = torch.tensor([0, 0, 0, 1, 2]), torch.tensor([2])
    found = score_labels(truth, torch.eye(3)[[1, 1, 1, 1, 1]], prior, generator(0), named=False)
    assert found["attack"]["assigned_accuracy"].mean == single(0.6)
    assert found["majority"]["accuracy"].mean == single(0.2)
    assert found["majority"]["assigned_accuracy"].mean == single(0.6)
    assert found["permutation_null"]["assigned_accuracy"].mean == single(0.6)
