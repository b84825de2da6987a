"""Marvell: its variances are the best there are, its noise has them, and it hides two classes as well as it says."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from splitfed.attacks.scoring.label_metrics import auc
from splitfed.core.defense_context import Context
from splitfed.core.errors import InvalidInput
from splitfed.core.messages import Stamp
from splitfed.core.random import generator
from splitfed.defenses import Iso, Marvell
from splitfed.defenses.aligned_noise import add_aligned_noise
from splitfed.defenses.marvell import positives
from splitfed.defenses.sum_kl import NoiseVariances, detection_error, least_sum_kl, sum_kl

# u, v, d, squared distance of the means, share of positives, power
PROBLEMS: dict[str, tuple[float, float, int, float, float, float]] = {
    "few positives": (0.2, 0.5, 8, 1.0, 0.1, 1.0),
    "positives vary less": (0.5, 0.02, 8, 1.0, 0.3, 2.0),
    "one dimension": (0.1, 0.4, 1, 2.0, 0.25, 1.0),
    "two dimensions": (0.0, 0.3, 2, 1.0, 0.5, 0.5),
    "many dimensions": (1e-4, 1e-2, 64, 0.3, 0.8, 4.0),
    "no spread": (0.0, 0.0, 5, 1.0, 0.2, 1.0),
}


def context(y: Tensor, step: int = 0) -> Context:
    return Context("server", "bottom->top", Stamp("train", 0, 0, step), 0, 0, {}, {"top_out": y})


def power_of(noise: NoiseVariances, d: int, p: float) -> float:
    (a0, a1), (b0, b1) = noise.along, noise.around
    return (1 - p) * (a0 + (d - 1) * b0) + p * (a1 + (d - 1) * b1)


def search(u: float, v: float, d: int, gap: float, p: float, power: float) -> float:
    """The least sum over all four variances by brute force: shares of the power on a grid, refined around the best."""
    steps, best, at, width = 13, math.inf, torch.full((4,), 0.5), 0.5
    for _ in range(24):
        axes = [torch.linspace(max(c - width, 0), min(c + width, 1), steps, dtype=torch.float64) for c in at.tolist()]
        # The power that the positives get, and in each class the share around; the last axis leaves some unused.
        used, pos, around0, around1 = (t.flatten() for t in torch.meshgrid(*axes, indexing="ij"))
        given0, given1 = power * used * (1 - pos) / (1 - p), power * used * pos / p
        c0, c1 = given0 * around0 / d, given1 * around1 / d
        a, b = u + c0 + given0 * (1 - around0), v + c1 + given1 * (1 - around1)
        c, e = u + c0, v + c1
        beside = ((a + gap) / b + (b + gap) / a) / 2 - 1
        across = (d - 1) / 2 * (c / e + e / c - 2) if d > 1 else torch.zeros(())
        values = torch.nan_to_num(beside + across, nan=math.inf)
        if u == v == 0:
            # Without spread and without noise around, both classes are alike across: 0/0.
            values = torch.where((c0 == 0) & (c1 == 0), beside, values)
        place = int(values.argmin())
        if float(values[place]) < best:
            best = float(values[place])
        at = torch.stack([used, pos, around0, around1])[:, place]
        width *= 0.6
    return best


@pytest.mark.parametrize("name", PROBLEMS)
def test_no_noise_of_this_power_is_better(name: str) -> None:
    u, v, d, gap, p, power = PROBLEMS[name]
    noise = least_sum_kl(u, v, d, gap, p, power)
    assert noise.sum_kl == pytest.approx(search(u, v, d, gap, p, power), rel=1e-5)
    assert noise.sum_kl == pytest.approx(sum_kl(noise.along, noise.around, u, v, d, gap), rel=1e-9)
    assert power_of(noise, d, p) == pytest.approx(power, rel=1e-9), "all of the power is used"
    for along, around in zip(noise.along, noise.around, strict=True):
        assert along >= around >= 0
    assert noise.around[u < v] == 0, "the class of greater variance needs nothing around"


def test_the_sum_by_hand() -> None:
    """u = v = 1, d = 1, gap 4, no noise: two unit Gaussians two apart, each divergence 4/2."""
    assert sum_kl((0, 0), (0, 0), 1.0, 1.0, 1, 4.0) == pytest.approx(4.0)
    # Variances 1 and 4, same mean, each of 3 dimensions adds (1/4 + 4)/2 - 1.
    assert sum_kl((0, 0), (0, 0), 1.0, 4.0, 3, 0.0) == pytest.approx(3 * (4.25 / 2 - 1))
    # Equal classes, equal shares: half of the power each, and only along; a = b = 2, so gap/2 (1/2 + 1/2).
    noise = least_sum_kl(1.0, 1.0, 6, 3.0, 0.5, 1.0)
    assert noise.along == pytest.approx((1.0, 1.0))
    assert noise.around == (0.0, 0.0)
    assert noise.sum_kl == pytest.approx(1.5)
    assert noise.detection_error == pytest.approx(0.5 - math.sqrt(1.5) / 4)
    assert detection_error(4.1) == 0.0


def test_swapped_classes_swap_the_noise() -> None:
    one, two = least_sum_kl(0.2, 0.5, 8, 1.0, 0.1, 1.0), least_sum_kl(0.5, 0.2, 8, 1.0, 0.9, 1.0)
    assert one.along == pytest.approx(two.along[::-1])
    assert one.around == pytest.approx(two.around[::-1])


def batch(rows: int = 40, d: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Gradients of a batch, one in four positive: positives longer, the other way, and less spread."""
    drawn = generator(seed, "marvell")
    y = (torch.arange(rows) % 4 == 0).long()
    away = torch.randn(d, generator=drawn)
    g = torch.where(y.bool().unsqueeze(1), 3 * away + 0.1 * torch.randn(rows, d, generator=drawn), -away)
    return 1e-3 * (g + 0.3 * torch.randn(rows, d, generator=drawn)), y


def test_the_noise_has_the_variances_along_and_around() -> None:
    """60 steps of 1500 negatives and 500 positives, measured along the difference of means and across it."""
    g, y = batch(rows=2000)
    defense = Marvell(s=2.0)
    steps = 60
    noise = defense.noise(g, y.bool())
    assert noise is not None
    drawn = torch.stack([defense.gradient("z", g, context(y, step)) for step in range(steps)]).double() - g.double()
    apart = (g[y == 1].mean(0) - g[y == 0].mean(0)).double()
    unit = apart / apart.norm()
    for label in (0, 1):
        mine = drawn[:, y == label].flatten(0, 1)
        along = mine @ unit
        across = mine - along.unsqueeze(1) * unit
        n = len(mine)
        assert abs(float(along.mean())) < 5 * math.sqrt(noise.along[label] / n)
        assert float(along.square().mean()) == pytest.approx(noise.along[label], rel=5 * math.sqrt(2 / n))
        wide = float(across.square().sum(1).mean()) / 5
        assert wide == pytest.approx(noise.around[label], rel=5 * math.sqrt(2 / n / 5), abs=1e-14)
    total = float(drawn.square().sum(2).mean())
    assert total == pytest.approx(2.0 * float(apart.square().sum()), rel=0.03), "power s times the squared distance"
    assert max(noise.around) > 0, "both parts were looked at"


def test_leaks_fall_as_the_budget_grows() -> None:
    """The detector that knows both means: its mean error over both classes is never below the bound."""
    g, y = batch(rows=4000)
    unit = g[y == 1].mean(0) - g[y == 0].mean(0)
    found = []
    for s in (0.25, 1.0, 4.0, 25.0):
        defense = Marvell(s=s)
        sent = defense.gradient("z", g, context(y))
        noise = defense.noise(g, y.bool())
        assert noise is not None
        score = sent @ unit
        cuts = score.sort().values
        errors = [
            (float((score[y == 0] > cut).double().mean()) + float((score[y == 1] <= cut).double().mean())) / 2
            for cut in cuts[:: len(cuts) // 200].tolist()
        ]
        assert min(errors) > noise.detection_error - 0.02
        found.append((auc(score, y == 1), noise.detection_error))
    assert auc(g @ unit, y == 1) > 0.999
    assert all(later[0] < sooner[0] and later[1] > sooner[1] for sooner, later in itertools.pairwise(found))
    assert found[-1][0] < 0.65
    assert found[-1][1] > 0.3


def test_better_than_isotropic_noise_of_the_same_power() -> None:
    g, y = batch(rows=4000, d=32)
    positive, unit = y == 1, g[y == 1].mean(0) - g[y == 0].mean(0)
    sent = Marvell(s=1.0).gradient("z", g, context(y))
    ratio = float(unit.norm() / g.norm(dim=1).max())
    same = Iso(ratio=ratio).gradient("z", g, context(y))
    assert float((sent - g).square().sum(1).mean()) == pytest.approx(float((same - g).square().sum(1).mean()), rel=0.1)
    assert auc(sent @ unit, positive) < auc(same @ unit, positive) - 0.1


@pytest.mark.parametrize("s", [1.0, 4.0, 25.0])
def test_gradients_on_a_line_are_told_apart_by_what_leaves_it(s: float) -> None:
    """A linear remainder with one logit: all gradients lie on a line, and the noise around it is that of one class."""
    drawn = generator(5)
    y = (torch.arange(300) % 4 == 0).long()
    confidence = torch.sigmoid(torch.randn(300, generator=drawn, dtype=torch.float64) - 1)
    g = (confidence - y)[:, None] * torch.randn(8, generator=drawn, dtype=torch.float64)
    sent = Marvell(s=s).gradient("z", g, context(y))
    line = g[0] / g[0].norm()
    beside = (sent - (sent @ line)[:, None] * line).norm(dim=1)
    assert max(auc(beside, y == 1), auc(-beside, y == 1)) == 1.0
    # The bound is one for classes that spread alike in all directions, and does not hold here.
    noise = Marvell(s=s).noise(g, y.bool())
    assert noise is not None
    assert noise.detection_error > 0.1


def test_batches_without_two_classes() -> None:
    """One class: the noise of max norm. Equal means: no budget. A class of one row: no spread, but hidden."""
    g, _ = batch()
    defense = Marvell()
    for y in (torch.zeros(40).long(), torch.ones(40).long()):
        here = context(y)
        assert torch.equal(defense.gradient("z", g, here), add_aligned_noise(g, here.generator("z", g.device)))
        assert defense.noise(g, y.bool()) is None
    twice, both = torch.cat([g, g]), torch.arange(80) < 40
    assert torch.equal(defense.gradient("z", twice, context(both.long())), twice)
    single = (torch.arange(40) == 3).long()
    noise = defense.noise(g, single.bool())
    assert noise is not None
    assert 0 < noise.sum_kl < math.inf
    assert not torch.equal(defense.gradient("z", g, context(single)), g)
    zeros = torch.zeros(4, 3)
    assert torch.equal(defense.gradient("z", zeros, context(torch.tensor([0, 1, 0, 1]))), zeros)
    pair = defense.gradient("z", torch.tensor([[1.0], [-1.0]]), context(torch.tensor([0, 1])))
    assert bool(torch.isfinite(pair).all())


def test_scale_shape_and_draws() -> None:
    g, y = batch()
    images = g.view(40, 2, 3)
    first = Marvell().gradient("z", images, context(y))
    assert first.shape == images.shape
    assert first.dtype == g.dtype
    torch.testing.assert_close(Marvell().gradient("z", images * 2.0**-60, context(y)) * 2.0**60, first)
    assert torch.equal(Marvell().gradient("z", images, context(y)), first)
    assert not torch.equal(Marvell().gradient("z", images, context(y, 1)), first)


def test_soft_labels_say_the_class_they_lean_to() -> None:
    assert positives(torch.tensor([0, 1])).tolist() == [False, True]
    assert positives(torch.tensor([-0.4, 0.7])).tolist() == [False, True]
    assert positives(torch.tensor([[0.9, 0.3], [-1.0, -0.5]])).tolist() == [False, True]


def test_refused() -> None:
    with pytest.raises(InvalidInput, match=r"marvell s=0 is not allowed; expected a number in \(0, inf\)"):
        Marvell(s=0)
