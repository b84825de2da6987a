"""The closed-form attacks: worlds where the answer is known to be reachable, worlds where nothing can be learnt.

Released numbers are made here by functions that a person can check; attacks get them as a view and queries.
"""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt

import pytest
import torch
from torch import Tensor, nn

import splitfed
from splitfed.attacks.base import Attack, Knowledge
from splitfed.attacks.networks import ridge_map
from splitfed.attacks.networks.query_passes import channel_scales, hold_out, nearest_positions, query_passes
from splitfed.attacks.networks.ridge_map import RidgeMap, fit_ridge_map
from splitfed.attacks.reconstruction.linear_inverse import LinearInverse
from splitfed.attacks.reconstruction.nearest import Nearest
from splitfed.core.errors import InvalidInput
from splitfed.core.messages import Message, Stamp, View
from splitfed.core.random import generator, stream

Query = Callable[[Tensor], Tensor]


def view_of(z: Tensor) -> View:
    """Return a server's view of one release."""
    return View("server", (Message("client", "server", "activation", "cut", {"z": z}, Stamp("predict", 0, 0, 0)),), {})


def reconstruct(attack: Attack, query: Query, auxiliary: Tensor, victims: Tensor, seed: int = 0) -> Tensor:
    """Return what `attack` makes of the victims' releases under `query`, which it may also ask."""
    knowledge = Knowledge(tuple(auxiliary.shape[1:]), auxiliary=auxiliary, query=lambda x: {"z": query(x)})
    return attack(view_of(query(victims)), knowledge, generator(seed, "closed forms")).prediction.double()


def error(found: Tensor, truth: Tensor) -> float:
    """Return the mean squared error."""
    return float((found - truth).square().mean())


def normal(rows: int, width: int, seed: int) -> Tensor:
    """Return standard normal rows."""
    return torch.randn(rows, width, generator=generator(seed, "closed forms", "rows"))


def noisy(scale: float, function: Query = lambda x: x) -> Query:
    """Return a query that adds normal noise, drawn afresh in every call."""
    drawn = generator(1, "closed forms", "noise")
    return lambda x: (z := function(x)) + scale * torch.randn(z.shape, generator=drawn)


@pytest.mark.parametrize("wide", [False, True])
def test_an_invertible_linear_client_is_inverted(wide: bool) -> None:
    """Twelve numbers mixed to as many, or to more numbers than there are auxiliary rows, where the dual solves."""
    mixing = normal(12, 12, 3) + 3 * torch.eye(12)
    function = (lambda x: x @ mixing @ normal(12, 200, 4)) if wide else (lambda x: x @ mixing + 5.0)
    auxiliary, victims = normal(150, 12, 0), normal(40, 12, 1)
    assert error(reconstruct(LinearInverse(), function, auxiliary, victims), victims) < 1e-10


def test_the_linear_inverse_is_the_best_estimate_in_a_linear_gaussian_world() -> None:
    """x ~ N(0, t²), z = x A + N(0, s²): the least error of anybody is tr((I/t² + A A'/s²)^-1)/d."""
    t, s = 2.0, 1.5
    mixing = normal(6, 9, 5)
    least = float(torch.linalg.inv(torch.eye(6) / t**2 + mixing @ mixing.T / s**2).trace()) / 6
    auxiliary, victims = t * normal(4000, 6, 0), t * normal(4000, 6, 1)
    found = error(reconstruct(LinearInverse(), noisy(s, lambda x: x @ mixing), auxiliary, victims), victims)
    # The mean over 24 000 squared errors, each of variance 2 least², and nine weights from 4000 rows.
    assert found == pytest.approx(least, rel=4 * sqrt(2 / 24000) + 10 / 4000)


@pytest.mark.parametrize(("count", "factor"), [(1, 2.0), (10, 1.1)])
def test_where_releases_are_noise_nearest_rows_are_strangers(count: int, factor: float) -> None:
    """With V the mean row's error: 2 V for one row, V (1 + 1/k) for the mean of k."""
    auxiliary, victims = normal(1000, 8, 0), normal(1000, 8, 1)
    found = error(reconstruct(Nearest((count,)), noisy(100.0), auxiliary, victims), victims)
    blind = error(auxiliary.mean(0).expand(victims.shape), victims)
    # A row may be nearest to several victims: the mean over strangers has a relative error of about 3 %.
    assert found == pytest.approx(factor * blind, rel=0.05)


def test_where_releases_are_noise_the_linear_inverse_is_the_mean_row() -> None:
    auxiliary, victims = normal(1500, 8, 0) / 4, normal(300, 8, 1) / 4
    found = error(reconstruct(LinearInverse(), noisy(100.0), auxiliary, victims), victims)
    assert found == pytest.approx(error(auxiliary.mean(0).expand(victims.shape), victims), abs=1e-4)


def test_the_dual_is_the_primal(monkeypatch: pytest.MonkeyPatch) -> None:
    """50 pairs of 30 numbers and 20 of 30: the same weights by either matrix, whichever is smaller."""
    x, z, victims = normal(50, 4, 0), normal(50, 30, 1), normal(7, 30, 2)
    primal = RidgeMap([z], x, torch.arange(50))
    monkeypatch.setattr(ridge_map, "MOST", 29)
    few = RidgeMap([z], x, torch.arange(50))
    monkeypatch.undo()
    dual = RidgeMap([z], x, torch.arange(20))
    assert (primal.wide, few.wide, dual.wide) == (False, True, True)
    centred, y = (part[:20].double() - part[:20].double().mean(0) for part in (z, x))
    unit = float(centred.square().sum()) / 30
    by_hand = torch.linalg.solve(centred.T @ centred + 0.5 * unit * torch.eye(30).double(), centred.T @ y)
    weights = dual.solve(0.5)
    assert weights is not None
    wanted = (victims.double() - z[:20].double().mean(0)) @ by_hand + x[:20].double().mean(0)
    torch.testing.assert_close(dual.predict(weights, victims), wanted, rtol=1e-10, atol=1e-10)
    assert len(few.solve(0.5)) == 29, "no matrix is larger than the limit"  # type: ignore[arg-type]


def test_the_ridge_is_the_best_one_for_rows_put_aside() -> None:
    """Without noise the least; where releases are noise the greatest."""
    x = normal(60, 5, 0)
    kept, aside = torch.arange(48), torch.arange(48, 60)
    for z, wanted in ((x, min(ridge_map.RIDGES)), (normal(60, 5, 1), max(ridge_map.RIDGES))):
        fitted, weights = fit_ridge_map([z], x, kept, aside)
        assert torch.equal(weights, fitted.solve(wanted))  # type: ignore[arg-type]


def test_constant_releases_give_the_mean_row() -> None:
    auxiliary, victims = normal(30, 4, 0), normal(6, 4, 1)
    found = reconstruct(LinearInverse(), lambda x: torch.ones(len(x), 3), auxiliary, victims)
    torch.testing.assert_close(found, auxiliary.double().mean(0).expand(6, 4), rtol=0, atol=1e-6)


def test_queries_end_where_nothing_is_random() -> None:
    x, asked = normal(5, 3, 0), list[int]()

    def ask(rows: Tensor) -> dict[str, Tensor]:
        asked.append(len(rows))
        return {"z": rows + (0.0 if len(asked) < 3 else 1.0)}

    assert len(query_passes(ask, x, 5)) == 1
    assert asked == [5, 5]
    assert len(query_passes(lambda rows: {"z": noisy(1.0)(rows)}, x, 1)) == 1
    drawn = noisy(1.0)
    assert len(query_passes(lambda rows: {"z": drawn(rows)}, x, 4)) == 4


def test_more_queries_gain_where_defenses_are_random() -> None:
    """The pairs are noised as the victims are; more draws lower the noise of what they are compared with."""
    auxiliary, victims = normal(300, 6, 0), normal(200, 6, 1)
    once, often = (
        error(reconstruct(Nearest((10,), queries=n), noisy(1.0), auxiliary, victims), victims) for n in (1, 20)
    )
    assert often < 0.9 * once


def test_channels_of_different_scales_are_divided_by_them() -> None:
    """A channel of noise a hundred times as large hides the one that tells; held-out rows choose to scale it."""

    def released(x: Tensor) -> Tensor:
        loud = 100 * noisy(1.0)(torch.zeros(len(x), 1, 1, 1))
        return torch.cat([x[:, None, None], loud], 1)

    auxiliary, victims = torch.linspace(-1, 1, 200)[:, None], torch.linspace(-0.9, 0.9, 30)[:, None]
    assert error(reconstruct(Nearest((10,)), released, auxiliary, victims), victims) < 0.05
    scales = channel_scales({"z": torch.tensor([[[1.0, 3.0], [0.0, 0.0]], [[3.0, 1.0], [0.0, 0.0]]])})
    assert scales["z"].tolist() == [1.0, 1.0], "deviation 1 over rows and places; one that never varies is left"


def test_the_number_of_neighbours_is_chosen_on_rows_put_aside() -> None:
    auxiliary, victims = normal(400, 2, 0), normal(100, 2, 1)
    for query, wanted in ((lambda x: x, (1,)), (noisy(100.0), (10,))):
        alone = reconstruct(Nearest(wanted, queries=1), query, auxiliary, victims)
        chosen = reconstruct(Nearest((1, 10), queries=1), query, auxiliary, victims)
        assert error(chosen, victims) == pytest.approx(error(alone, victims), rel=0.1)


def test_nearest_positions_far_from_the_origin() -> None:
    known, z = torch.tensor([[1e4], [1e4 + 1], [1e4 + 3]]), torch.tensor([[1e4 + 2.4], [1e4 - 7]])
    assert nearest_positions(known, z, 2).tolist() == [[2, 1], [0, 1]]


@pytest.mark.parametrize(
    ("attack", "rows", "text"),
    [
        (LinearInverse(), 4, "linear_inverse has 4 auxiliary rows; expected at least 5"),
        (Nearest(), 4, "nearest has 4 auxiliary rows; expected at least 5"),
        (Nearest((1, 9)), 10, "nearest neighbours=9 is not allowed; expected at most 8, the auxiliary rows"),
    ],
)
def test_too_few_auxiliary_rows(attack: Attack, rows: int, text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        reconstruct(attack, lambda x: x, normal(rows, 3, 0), normal(5, 3, 1))


def test_releases_that_are_not_finite_are_refused() -> None:
    with pytest.raises(InvalidInput, match="release 'z' holds a value that is not finite"):
        reconstruct(LinearInverse(), lambda x: x / 0, normal(10, 3, 0), normal(5, 3, 1))


def test_rows_are_put_aside_without_overlap() -> None:
    kept, aside = hold_out(23, generator(0), "x", 3)
    assert (len(kept), len(aside)) == (20, 3)
    assert sorted([*kept.tolist(), *aside.tolist()]) == list(range(23))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("noise", "inverse", "one", "ten"),
    [
        (0.0, 22.36, 16.93, 18.27),
        (0.3, 18.40, 15.77, 17.82),
        (1.0, 14.26, 10.91, 13.72),
        (3.0, 11.84, 8.65, 11.31),
        (100.0, 11.34, 8.44, 10.92),
    ],
)
def test_digits_behind_a_convolution_as_measured_before(noise: float, inverse: float, one: float, ten: float) -> None:
    """1200 auxiliary digits, 300 victims, an untrained convolution of 8 channels, ReLU, pooling; noise over std of z.

    Measured once with other code and other draws of weights, rows and noise: three draws of weights differ by .8 dB.
    """
    x = splitfed.data.digits().x
    order = torch.randperm(len(x), generator=generator(0, "digits"))
    auxiliary, victims = x[order[:1200]], x[order[1200:1500]]
    found = []
    for seed in range(3):
        with stream(seed):
            client = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)).requires_grad_(False)
        query = noisy(noise * float(client(auxiliary).std()), client)
        attacks = LinearInverse(queries=1), Nearest((1,), queries=1), Nearest((10,), queries=1)
        found.append([error(reconstruct(a, query, auxiliary, victims).clamp(0, 1), victims) for a in attacks])
    measured = (-10 * torch.tensor(found).log10()).mean(0).tolist()
    assert measured == pytest.approx([inverse, one, ten], abs=0.8)
