"""A semi-supervised Gaussian mixture of defended gradients: planted and hopeless worlds, degenerate rows, refusals."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from splitfed.attacks.base import Attack, Knowledge
from splitfed.attacks.labels.direction import Direction
from splitfed.attacks.labels.gaussian_mixture import GaussianMixture, fit_gaussians, reduce_rows
from splitfed.attacks.labels.known_labels import rows_without_hints
from splitfed.attacks.labels.known_victims import KnownVictims
from splitfed.attacks.labels.norm import Norm
from splitfed.attacks.labels.similar import Similar
from splitfed.attacks.labels.spectral import Spectral
from splitfed.attacks.labels.strongest_labels import LabelMember, StrongestLabels
from splitfed.attacks.scoring.label_metrics import auc
from splitfed.core.errors import InvalidInput
from splitfed.core.messages import Message, Stamp, View
from splitfed.core.random import generator
from splitfed.defenses import Marvell
from splitfed.defenses.aligned_noise import add_aligned_noise
from tests.attacks.examples import two_party

HINTS, BATCH = 6, 64
CHEAP: dict[str, Attack] = {
    "similar": Similar(hints=HINTS),
    "k-means": Similar(hints=HINTS, method="k-means"),
    "norm": Norm(),
    "direction": Direction(hints=HINTS),
    "spectral": Spectral(),
}


def view(rows: Tensor) -> View:
    """Return what a party sees to which `rows` came back as one batch."""
    return View("left", (Message("s", "left", "gradient", "e", {"z": rows / len(rows)}, Stamp("step", 0, 0, 0)),))


def known(y: Tensor, count: int = HINTS) -> dict[int, Tensor]:
    """The first rows of each class, which were drawn in no order."""
    return {c: (y == c).nonzero()[:count, 0] for c in range(int(y.max()) + 1)}


def predict(rows: Tensor, hints: dict[int, Tensor], attack: Attack | None = None) -> Tensor:
    attack = GaussianMixture() if attack is None else attack
    return attack(view(rows), Knowledge((4,), classes=len(hints), hints=hints), generator(0)).prediction


def area(scores: Tensor, y: Tensor, hints: dict[int, Tensor]) -> float:
    left = rows_without_hints(len(y), hints)
    return auc((scores if scores.dim() == 1 else scores[:, 1] - scores[:, 0])[left], y[left] == 1)


def spread(classes: int = 2, columns: int = 16, signed: bool = False) -> tuple[Tensor, Tensor]:
    """Rows of mean 0 and of the same length in all classes but for chance: in class c every c-th column is longer.

    `signed`: as many columns are shorter, so that lengths are alike.
    """
    drawn, y = generator(1), torch.arange(240) % classes
    deviations = torch.ones(classes, columns)
    for c in range(classes):
        deviations[c, c::classes] = 3.0
    factors = deviations if signed else 2.0 ** torch.arange(classes)[:, None] * torch.ones(1, columns)
    return torch.randn(240, columns, generator=drawn) * factors[y], y


def test_the_spread_of_a_class_tells_it_where_direction_does_not() -> None:
    """Class 1 is twice as wide in every direction; an AUC of 228 rows has a deviation of .04 by chance."""
    rows, y = spread()
    hints = known(y)
    assert area(predict(rows, hints), y, hints) > 0.95
    for name in ("similar", "k-means", "direction", "spectral"):
        assert abs(area(predict(rows, hints, CHEAP[name]), y, hints) - 0.5) < 0.12, name


def test_a_covariance_of_its_own_tells_a_class_of_the_same_mean_and_length() -> None:
    """Two columns, one of which is three times as wide, another one in each class: lengths tell nothing either."""
    rows, y = spread(columns=2, signed=True)
    hints = known(y, 20)
    attack = GaussianMixture(hints=20, components=2)
    assert area(predict(rows, hints, attack), y, hints) > 0.75
    for name in ("norm", "k-means", "spectral"):
        assert abs(area(predict(rows, hints, CHEAP[name]), y, hints) - 0.5) < 0.12, name


def clean(seed: int, share: float = 0.2, columns: int = 16, sure: float = 4.0) -> tuple[Tensor, Tensor]:
    """Gradients p - y along one direction, with masks of their own, of 256 rows a `share` of which is positive.

    `sure`: how far the logits of both classes are apart.
    """
    drawn = torch.Generator().manual_seed(seed)
    y = (torch.rand(256, generator=drawn) < share).long()
    logits = sure * (y - 0.5) + 0.3 * sure * torch.randn(256, generator=drawn) + torch.tensor(share / (1 - share)).log()
    along = torch.randn(columns, generator=drawn)
    masks = (1 + 0.3 * torch.randn(256, columns, generator=drawn)).relu()
    return (logits.sigmoid() - y)[:, None] * along * masks, y


def defended(name: str, seed: int) -> tuple[Tensor, Tensor]:
    """The same behind a defense, batch by batch; with `max_norm` a model that is hardly sure: positives are long."""
    rows, y = clean(100 + seed, *{"max_norm": (0.1, 64, 1.0), "marvell": (0.2, 16, 4.0)}[name])
    drawn = torch.Generator().manual_seed(seed)
    parts = [
        add_aligned_noise(g, drawn) if name == "max_norm" else Marvell(s=1.0).add_noise(g, labels == 1, drawn)
        for g, labels in zip(rows.split(BATCH), y.split(BATCH), strict=True)
    ]
    return torch.cat(parts), y


@pytest.mark.parametrize(("name", "floor", "margin"), [("marvell", 0.85, 0.05), ("max_norm", 0.8, 0.05)])
def test_behind_defenses_it_finds_more_than_those_that_do_not_know_them(name: str, floor: float, margin: float) -> None:
    """Means of twelve seeds."""
    found: dict[str, list[float]] = {}
    for seed in range(12):
        rows, y = defended(name, seed)
        hints = known(y)
        for who, attack in {"gaussian_mixture": GaussianMixture(), **CHEAP}.items():
            found.setdefault(who, []).append(area(predict(rows, hints, attack), y, hints))
    means = {who: sum(areas) / len(areas) for who, areas in found.items()}
    own = means.pop("gaussian_mixture")
    assert own > floor
    assert own > max(means.values()) + margin, means


def test_many_classes() -> None:
    """Five directions that overlap little; a known row of each, and six."""
    drawn, y = generator(2), torch.arange(200) % 5
    rows = torch.randn(5, 16, generator=drawn)[y] + 0.4 * torch.randn(200, 16, generator=drawn)
    for count in (1, HINTS):
        assert float((predict(rows, known(y, count)).argmax(1) == y).double().mean()) > 0.95


def test_where_nothing_leaks_it_guesses() -> None:
    """Five runs of 244 rows that know nothing: the mean AUC has a deviation of .037 / sqrt(5)."""
    areas = []
    for seed in range(5):
        drawn = generator(seed)
        rows, y = torch.randn(256, 8, generator=drawn), (torch.rand(256, generator=drawn) < 0.5).long()
        hints = known(y)
        areas.append(area(predict(rows, hints), y, hints))
    assert abs(sum(areas) / 5 - 0.5) < 4 * 0.037 / 5**0.5


def test_neither_the_order_nor_the_scale_of_rows_matters() -> None:
    rows, y = clean(0)
    hints = known(y)
    found = predict(rows, hints)
    order = torch.randperm(len(rows), generator=generator(5))
    places = {c: order.argsort()[positions] for c, positions in hints.items()}
    assert torch.allclose(predict(rows[order], places), found[order], rtol=1e-3, atol=1e-3)
    assert torch.allclose(predict(rows * 1e-12, hints), found, rtol=1e-3, atol=1e-3)
    assert torch.equal(predict(rows, hints), found)


def test_the_gaussians_by_hand() -> None:
    """One number, every row known: a mean of 2 rows and .01, squares of the class, 20 rows of both, a prior of one."""
    rows = torch.tensor([[-2.0], [-1.0], [1.0], [2.0]], dtype=torch.float64)
    found = fit_gaussians(rows, {0: torch.tensor([0, 1]), 1: torch.tensor([2, 3])}, 1)
    mean = 3 / 2.01
    squares = (2 - mean) ** 2 + (1 - mean) ** 2 + 0.01 * mean**2
    pooled = (2 * squares + 1 / 4) / 5
    assert found.means[:, 0].tolist() == pytest.approx([-mean, mean])
    assert found.factors.square()[:, 0, 0].tolist() == pytest.approx([(squares + 20 * pooled) / 22] * 2)
    assert found.log_shares.exp().tolist() == pytest.approx([0.5, 0.5])
    assert found.log_posterior(rows).exp().sum(1).tolist() == pytest.approx([1.0] * 4)


def test_known_victims_have_no_part_in_how_frequent_classes_are() -> None:
    """Of 100 rows that are not known one in ten is positive; as many are known of both classes."""
    y = torch.cat([torch.zeros(20), torch.ones(20), torch.zeros(90), torch.ones(10)]).long()
    rows = (torch.randn(140, 1, generator=generator(0)) * 0.1 + y[:, None]).double()
    standard = (rows - rows.mean()) / rows.std()
    found = fit_gaussians(standard, {0: torch.arange(20), 1: torch.arange(20, 40)}, 100)
    assert found.log_shares.exp().tolist() == pytest.approx([91 / 102, 11 / 102], abs=1e-3)


def test_rounding_is_no_remainder() -> None:
    """Rows of rank 1 in single precision have one component, and those of rank 2 what is left of it."""
    flat = torch.randn(50, 1, generator=generator(0)) * torch.randn(1, 30, generator=generator(1))
    assert reduce_rows(flat, 3)(flat).shape == (50, 1)
    more = flat + torch.randn(50, 1, generator=generator(2)) * torch.randn(1, 30, generator=generator(3))
    numbers = reduce_rows(more, 1)(more)
    assert numbers.shape == (50, 2)
    assert numbers.mean(0).tolist() == pytest.approx([0.0, 0.0], abs=1e-9)
    assert numbers.std(0, correction=0).tolist() == pytest.approx([1.0, 1.0])
    wide = torch.randn(6, 40, generator=generator(4))
    assert reduce_rows(wide, 99)(wide).shape == (6, 5), "six rows around their mean have five components"


@pytest.mark.parametrize(
    "rows",
    [
        torch.zeros(12, 3),
        torch.ones(12, 3),
        torch.eye(3)[torch.arange(12) % 2],
        torch.cat([torch.zeros(11, 3), torch.ones(1, 3)]),
        torch.randn(12, 1, generator=generator(0)),
        1e-30 * torch.randn(12, 3, generator=generator(0)),
    ],
    ids=["zero", "constant", "duplicates", "one that is not", "one column", "tiny"],
)
def test_degenerate_rows_have_a_finite_posterior(rows: Tensor) -> None:
    found = predict(rows, {0: torch.tensor([0]), 1: torch.tensor([1])}, GaussianMixture(hints=1))
    assert bool(torch.isfinite(found).all())
    assert found.exp().sum(1).tolist() == pytest.approx([1.0] * 12)
    if bool((rows == rows[0]).all()):
        assert found.std(0).tolist() == [0.0, 0.0]


@dataclass(frozen=True)
class Only(StrongestLabels):
    """The strongest of a single member, `only`."""

    only: str = ""

    def members(self, knowledge: Knowledge, known: KnownVictims) -> Iterator[LabelMember]:
        return (one for one in super().members(knowledge, known) if one.name == self.only)


def test_the_strongest_has_it_among_its_members_and_names_what_the_chosen_one_misses() -> None:
    """What is said of a result is said of the member that made it: one adapts to the defense, another does not."""
    run, attack = two_party(Marvell(s=1.0)), replace(StrongestLabels(), iterations=5, doublings=1, hints=4)
    (result,) = run.attack(attack, adversary="left0")
    assert result.selection is not None
    assert "gaussian_mixture" in {one.member for one in result.selection.tried}
    for only, missed in (("gaussian_mixture", ()), ("similar", ("marvell",))):
        (result,) = run.attack(Only(hints=4, only=only), adversary="left0")
        assert result.selection is not None
        assert result.selection.member == only
        assert result.unadapted == missed


def test_refusals() -> None:
    rows, y = clean(0)
    with pytest.raises(InvalidInput, match="gaussian_mixture needs a known victim of each of 2 classes"):
        predict(rows, {0: torch.tensor([0]), 1: torch.tensor([], dtype=torch.int64)})
    rows[3, 0] = torch.nan
    with pytest.raises(InvalidInput, match="gaussian_mixture needs finite gradients; those of 1 of 256 rows are not"):
        predict(rows, known(y))
    with pytest.raises(InvalidInput, match="gaussian_mixture needs labels with classes; those of this run have none"):
        GaussianMixture().asks(None)
    with pytest.raises(InvalidInput, match="gaussian_mixture hints=0 is not allowed"):
        GaussianMixture(hints=0)
    assert GaussianMixture(hints=2).asks(3) == {0: 2, 1: 2, 2: 2}
