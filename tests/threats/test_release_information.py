"""Leakage without an attack: bounds that no attack of this house goes below, and what closed forms can use."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import splitfed
from splitfed.attacks.base import Attack
from splitfed.attacks.reconstruction.inverse_network import InverseNetwork
from splitfed.attacks.reconstruction.ladder import Ladder
from splitfed.attacks.reconstruction.linear_inverse import LinearInverse
from splitfed.attacks.reconstruction.nearest import Nearest
from splitfed.attacks.reconstruction.rmle import Rmle
from splitfed.core.defense import Defense
from splitfed.core.errors import InvalidInput
from splitfed.core.random import generator, stream
from splitfed.core.tasks import classification
from splitfed.data.dataset import Dataset
from splitfed.defenses import Dropout, GaussianRelease, LaplaceRelease, Noise
from splitfed.stats.fisher_information import fisher_information
from splitfed.threats.release_information import _Noise, _size_cotangents
from splitfed.topologies import vanilla
from splitfed.training.run import Run
from tests.attacks.examples import lenet_run, two_party
from tests.attacks.token_examples import embedded

HOUSE = (LinearInverse(), Nearest(), Nearest((30,)), InverseNetwork(epochs=5, queries=3), Rmle(iterations=200, lr=0.05))
SMOOTHING = 0.15  # of pixels in [0, 1]


def trained(x: Tensor, y: Tensor, client: Sequence[nn.Module], defense: Defense, victims: int) -> Run:
    """Return a run on rows x (n, d) whose client sends what `client` makes of them."""
    classes = int(y.max()) + 1
    data = Dataset("rows", x, y, classification(classes)).clients(1, auxiliary=0.5, victims=victims, validation=0.0)
    with stream(0):
        model = nn.Sequential()
        for number, layer in enumerate(client):
            model.add_module(f"part{number}", layer)
        model.add_module("top", nn.LazyLinear(classes))
        model(x[:2])
    sent = ("input",) if isinstance(client[0], nn.Identity) else None
    topology = vanilla(model, f"part{len(client) - 1}", sent_inputs=sent)
    return splitfed.train(topology, data, rounds=1, defenses=(defense,))


@cache
def linear_gaussian() -> Run:
    """Eight numbers of different variances, mixed to six, with noise of deviation .7."""
    x = torch.randn(4000, 8, generator=generator(0, "rows")) * torch.linspace(0.3, 2, 8)
    with stream(1):
        client = [nn.Linear(8, 6)]
    return trained(x, (x[:, 7] > 0).long(), client, Noise(scale=0.7), 1000)


@cache
def smoothed_digits() -> Run:
    """Digits to which noise was added, so that they fill all directions, behind a tanh layer with noise."""
    digits = splitfed.data.digits()
    x = digits.x.flatten(1)
    x = x + SMOOTHING * torch.randn(x.shape, generator=generator(0, "smoothing"))
    with stream(1):
        client = [nn.Linear(64, 48), nn.Tanh()]
    return trained(x, digits.y, client, Noise(scale=0.5), 300)


def errors(run: Run, attacks: Sequence[Attack]) -> list[float]:
    """Return the upper end of the interval of each attack's error."""
    found = run.attack(attacks, floors=False)
    return [one.scores["attack"]["mse"].high for one in found]


def test_in_a_linear_gaussian_world_the_bound_is_what_the_linear_inverse_reaches() -> None:
    run = linear_gaussian()
    bound = run.measure_release().bound
    assert bound is not None
    assert bound.matrix is not None
    assert bound.error == 0
    (result,) = run.attack(LinearInverse(), floors=False)
    found = result.scores["attack"]["mse"]
    # 8000 squared errors, a covariance and six weights from about 2000 rows.
    assert found.mean == pytest.approx(bound.matrix, rel=0.06)
    assert bound.trace < bound.directions < bound.matrix == bound.least < bound.variance
    assert min(errors(run, HOUSE)) > bound.least


def test_no_attack_of_the_house_goes_below_the_proven_bound() -> None:
    """On digits that fill no volume it would be empty; with noise of deviation .15 in them it is proven and is not."""
    run = smoothed_digits()
    bound = run.measure_release(smoothing=SMOOTHING).bound
    assert bound is not None
    assert bound.assumed.endswith("proven")
    assert not bound.empty
    assert bound.least > 0.3 * SMOOTHING**2
    assert min(errors(run, HOUSE)) > bound.least


@pytest.mark.exhaustive
def test_no_attack_goes_below_the_bound_for_gaussian_rows_on_digits_themselves() -> None:
    """Pixels that are always black make the form by dFIL empty; in principal directions it says something."""
    for scale in (0.3, 1.0, 3.0):
        run = lenet_run(Noise(scale=scale))
        bound = run.measure_release().bound
        assert bound is not None
        assert bound.empty
        assert 0.02 * bound.variance < bound.least < bound.variance
        attacks = (*HOUSE, Ladder(widths=(16, 64), epochs=(15,)), Rmle(iterations=1000))
        assert min(errors(run, attacks)) > bound.least


@pytest.mark.exhaustive
def test_more_noise_more_error_and_less_information() -> None:
    found = [lenet_run(Noise(scale=s), rounds=1).measure_release() for s in (0.3, 3.0, 1e3)]
    bounds = [one.bound for one in found if one.bound is not None]
    assert bounds[0].least < bounds[1].least < bounds[2].least
    assert bounds[2].least == pytest.approx(bounds[2].variance, rel=0.02)
    mutual = [one.mutual for one in found if one.mutual is not None]
    assert mutual[0].lower > mutual[1].lower > mutual[2].lower - 1e-9
    assert mutual[2].upper == pytest.approx(0, abs=0.01)
    usable = [one.usable for one in found if one.usable is not None]
    assert usable[0].mean > usable[1].mean > usable[2].mean - 1e-9
    assert usable[2].mean == pytest.approx(0, abs=0.01)
    assert all(one.invertibility is not None for one in found)


def test_closed_forms_alone_where_no_noise_is_added() -> None:
    found = lenet_run().measure_release()
    assert found.bound is found.mutual is None
    assert found.why.startswith("no noise is added on ")
    assert found.why.endswith(": without any, nothing bounds what is reconstructed")
    assert found.usable is not None
    assert found.invertibility is not None
    result = lenet_run().attack(LinearInverse())[0].scores
    error, mean = (result[who]["mse"].mean for who in ("linear_inverse", "mean_image"))
    assert found.usable.mean == pytest.approx(0.5 * torch.log(torch.tensor(mean / error)).item())
    assert found.invertibility.mean == pytest.approx(1 - error / mean)
    assert found.usable.low < found.usable.mean < found.usable.high


@pytest.mark.parametrize(
    ("defense", "kind", "size"),
    [
        (GaussianRelease(clip=2.0, noise_multiplier=0.25), "gaussian", 1.0),
        (LaplaceRelease(clip=1.0, epsilon=4.0), "laplace", 0.5),
        (Noise(scale=0.4, kind="laplace"), "laplace", 0.4),
    ],
)
def test_the_noise_is_that_of_the_defense(defense: Defense, kind: str, size: float) -> None:
    """A client that changes nothing but for the clipping: inside of it the Jacobian is the identity."""
    x = 0.01 * torch.randn(200, 4, generator=generator(0, "rows"))
    run = trained(x, (x[:, 0] > 0).long(), [nn.Identity()], defense, 50)
    found = run.measure_release()
    assert found.bound is not None
    assert found.mutual is not None
    assert found.bound.dfil == pytest.approx(1 / size**2)


def test_noise_as_large_as_the_release_varies_tells_of_it_by_its_size() -> None:
    """One row of two numbers: I / s² + N / (2 s⁴) g g', g the gradient of s² = (.5 deviation)², worked by hand."""
    x = torch.tensor([[1.0, 5.0]]).double()
    size = 0.5 * 2.0  # the deviation of 1 and 5 is 2
    noise = {"z": _Noise("gaussian", size, 0.5)}
    found = fisher_information(
        lambda rows: rows / size, x, torch.eye(2), generator(0), known=_size_cotangents(noise, {"z": x})
    )
    gradient = 0.25 * (x[0] - 3.0)  # s²/N times twice what is left of the mean, N = 2
    by_hand = torch.eye(2) / size**2 + 2 / (2 * size**4) * gradient.outer(gradient)
    assert found.matrix is not None
    torch.testing.assert_close(found.matrix, by_hand.double())


def test_relative_noise_is_measured() -> None:
    found = lenet_run(Noise(scale=1.0, relative=True), rounds=1).measure_release()
    assert found.bound is not None
    assert 0 < found.bound.least < found.bound.variance


def test_what_has_no_bound_says_why() -> None:
    assert lenet_run(Dropout(rate=0.5), rounds=1).measure_release().why.startswith("Dropout on ")
    found = lenet_run(Dropout(rate=0.5), Noise(), rounds=1).measure_release()
    assert found.why.startswith("2 defenses change what crosses ")
    assert found.bound is None
    assert (
        lenet_run(Noise(scale=0.0), rounds=1).measure_release().why.endswith("adds no noise of a density that is known")
    )


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(InvalidInput, match="are whole numbers, such as token ids: no derivative is taken"):
        embedded().measure_release()
    with pytest.raises(InvalidInput, match="party 'left0' holds a part of the rows itself"):
        two_party().measure_release("left0")
