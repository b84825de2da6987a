"""Noise that carries a promise: on a grid that every value shares, fine in its last bits, with its whole tails."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor, nn

from splitfed.core.defense import Defense
from splitfed.core.defense_context import Context
from splitfed.core.errors import InvalidInput
from splitfed.core.example_pass import pass_example
from splitfed.core.messages import Stamp
from splitfed.core.random import wide_generator
from splitfed.core.tasks import classification
from splitfed.defenses import DpSgd, GaussianRelease, LabelDp, LaplaceRelease, private_noise
from splitfed.defenses.private_noise import add_gaussian, add_laplace, gaussian, laplace
from splitfed.topologies import vanilla

CONTEXT = Context("client0", "a->b", Stamp("train", 0, 0, 0), 3, 0)
RELEASES = [GaussianRelease(epsilon=8.0, delta=1e-5), LaplaceRelease(epsilon=8.0)]
ROWS, WIDTH = 2000, 20


def step_of(defense: Defense) -> float:
    """The grid of a release: a power of two, at most 2^-30 of the noise's scale."""
    if isinstance(defense, GaussianRelease):
        scale = defense.multiplier * defense.sensitivity
    else:
        assert isinstance(defense, LaplaceRelease)
        scale = defense.scale
    return 2.0 ** (math.floor(math.log2(scale)) - 30)


@pytest.mark.parametrize("defense", RELEASES, ids=["gaussian", "laplace"])
def test_neighbours_are_answered_by_the_same_numbers(defense: Defense) -> None:
    """Whatever a row is, its release lies on one grid; the last bits of float noise on a float would tell."""
    step = step_of(defense)
    for value in (0.0, 1 / 3, -0.2):
        z = torch.full((ROWS, 1), value, dtype=torch.float64)
        sent = defense.release("z", z, CONTEXT) / step
        assert torch.equal(sent, sent.round())


@pytest.mark.parametrize("defense", RELEASES, ids=["gaussian", "laplace"])
def test_noise_is_drawn_in_float64(defense: Defense, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn in float32 it would end at 5.77 standard deviations, or 16.6 scales, and nobody would see it in samples."""
    kinds = []

    def watched(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def drawn(*given: Any, **options: Any) -> Tensor:
            found = draw(*given, **options)
            kinds.append(found.dtype)
            return found

        return drawn

    for name in ("randn", "rand", "randint"):
        monkeypatch.setattr(torch, name, watched(getattr(torch, name)))
    defense.release("z", torch.zeros(4, WIDTH), CONTEXT)
    assert set(kinds) in ({torch.float64}, {torch.float64, torch.int64})


@pytest.mark.parametrize(
    ("add", "drawn", "charge"), [(add_gaussian, "gaussian", math.sqrt(64)), (add_laplace, "laplace", 64.0)]
)
def test_the_noise_pays_for_the_rounding(add, drawn: str, charge: float, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """Rounded, neighbours may lie one step further apart in each of 64 numbers: the scale is made for that too."""
    monkeypatch.setattr(private_noise, drawn, lambda shape, random: torch.ones(shape, dtype=torch.float64))
    sensitivity, multiplier = 2.0, 0.75
    step = 2.0 ** (math.floor(math.log2(sensitivity * multiplier)) - 30)
    found = float(add(torch.zeros(1, dtype=torch.float64), sensitivity, multiplier, 64, torch.Generator())[0])
    assert multiplier * (sensitivity + step * charge) - step <= found < multiplier * sensitivity * (1 + 1e-6)


@pytest.mark.parametrize("multiplier", [0.01, 1.0, 1e3, 1e5, 2.0**24])
@pytest.mark.parametrize(("add", "deviation"), [(add_gaussian, 1.0), (add_laplace, math.sqrt(2))])
def test_the_noise_is_as_wide_as_it_is_said_whatever_its_size(add, deviation: float, multiplier: float) -> None:  # type: ignore[no-untyped-def]
    value = torch.zeros(20_000, 64, dtype=torch.float64)
    noise = add(value, 2.0, multiplier, 64, wide_generator(0, "width")) / (2 * multiplier)
    assert float(noise.std()) == pytest.approx(deviation, rel=5e-3)
    step = float((noise * 2 * multiplier).abs()[noise != 0].min())
    assert step >= private_noise._grid(2.0, multiplier)
    # Sums on the grid are exact, and the grid moves neighbours by next to nothing.
    assert 73 * 2 * multiplier < 2**53 * private_noise._grid(2.0, multiplier)
    assert private_noise._grid(2.0, multiplier) <= 2 * 2.0**-20


def test_noise_that_no_grid_is_fine_enough_for_is_refused() -> None:
    for make in (
        lambda: GaussianRelease(noise_multiplier=1e12),
        lambda: DpSgd(noise_multiplier=1e12),
        lambda: LaplaceRelease(epsilon=1e-12),
        lambda: add_gaussian(torch.zeros(1, dtype=torch.float64), 1.0, 1e12, 1, torch.Generator()),
    ):
        with pytest.raises(InvalidInput, match=r"1e[-+]?0?12|1000000000000"):
            make()


def test_the_draws_have_their_distributions() -> None:
    count = 100_000
    for draw, name in ((gaussian, "norm"), (laplace, "laplace")):
        drawn = draw(torch.Size([count]), wide_generator(0, name))
        assert drawn.dtype == torch.float64
        assert stats.kstest(drawn.numpy(), name).pvalue > 1e-3


def test_a_laplace_number_has_its_far_tail(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """53 coins that all come up zero go on to another 53: one logarithm of a uniform number would end at 37."""
    words = iter([0, 1])
    monkeypatch.setattr(torch, "randint", lambda *_, **__: torch.tensor([next(words)]))
    far = private_noise._exponential(torch.Size([1]), torch.Generator())
    assert 105 * math.log(2) <= float(far) <= 106 * math.log(2)


def test_a_gaussian_number_has_its_far_tail(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """The greatest float64 draw is sqrt(2 · 53 · log 2) = 8.57; two of them over √2 reach 12.1."""
    monkeypatch.setattr(torch, "randn", lambda *_, **__: torch.tensor([8.57], dtype=torch.float64))
    assert float(gaussian(torch.Size([1]), torch.Generator())) == pytest.approx(8.57 * math.sqrt(2))


@pytest.mark.parametrize("defense", RELEASES, ids=["gaussian", "laplace"])
def test_the_gradient_is_that_of_clipping(defense: Defense) -> None:
    z = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).requires_grad_()
    weights = torch.randn(5, 7, generator=torch.Generator().manual_seed(1))
    (found,) = torch.autograd.grad((defense.release("z", z, CONTEXT) * weights).sum(), z)
    (expected,) = torch.autograd.grad((defense.expected("z", z.double(), CONTEXT) * weights).sum(), z)
    assert torch.allclose(found, expected, rtol=1e-6, atol=1e-7)


class Half(nn.Module):
    """Computes in half precision, and hands that on."""

    def forward(self, x: Tensor) -> Tensor:
        return x.bfloat16()


@pytest.mark.parametrize("defense", RELEASES, ids=["gaussian", "laplace"])
def test_half_precision_is_refused_before_anything_is_trained(defense: Defense) -> None:
    topology = vanilla(nn.Sequential(Half(), nn.Linear(6, 3, dtype=torch.bfloat16)), "0", sent_inputs=("input",))
    topology = topology.with_task(classification(3))
    facts = pass_example(topology, {next(iter(topology.inputs)): torch.rand(4, 6)})
    with pytest.raises(InvalidInput, match="in bfloat16: half precision is too coarse for noise"):
        defense.check(topology, facts)
    with pytest.raises(InvalidInput, match="half precision"):
        defense.release("z", torch.zeros(2, 3, dtype=torch.float16), CONTEXT)


def test_dp_sgd_refuses_weights_of_half_precision() -> None:
    front = nn.Sequential(
        Half(), nn.Linear(6, 6, dtype=torch.bfloat16), nn.ReLU(), nn.Linear(6, 3, dtype=torch.bfloat16)
    )
    topology = vanilla(front, "1").with_task(classification(3))
    facts = pass_example(topology, {next(iter(topology.inputs)): torch.rand(4, 6)})
    with pytest.raises(InvalidInput, match=r"dp_sgd cannot act on weight '.*' of segment '.*' in bfloat16"):
        DpSgd(noise_multiplier=1.0).check(topology, facts)


def test_labels_get_noise_of_the_same_make() -> None:
    """Zeros and ones stay on the grid of the noise."""
    random = wide_generator(0, "labels")
    noisy = LabelDp(epsilon=2.0, mode="gradient").targets(torch.tensor([0, 2, 1]), classification(3), random)
    again = add_laplace(torch.eye(3, dtype=torch.float64)[[0, 2, 1]], 2.0, 0.5, 3, wide_generator(0, "labels"))
    assert torch.equal(noisy, again.float())


def test_outside_of_training_noise_belongs_to_what_is_released() -> None:
    """Asked with the same words for other rows, a release draws afresh: two answers do not subtract to the truth."""
    defense = GaussianRelease(noise_multiplier=1.0)
    rows = torch.rand(4, 6, generator=torch.Generator().manual_seed(0)) / 10
    others = rows.flip(0)
    for phase, alike in (("train", True), ("evaluate", False), ("predict", False), ("query", False)):
        context = Context("client0", "a->b", Stamp(phase, 0, 7, 0), 3, 0)
        first, second, again = (defense.release("z", z.double(), context) for z in (rows, others, rows))
        assert torch.equal(first, again), "asked again for the same, the same is told"
        same = torch.allclose(first - rows, second - others, rtol=0, atol=1e-6)
        assert same is alike, phase
