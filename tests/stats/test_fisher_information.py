"""Fisher information of releases: by hand, against the best estimate that exists, and by random signs."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from splitfed.core.errors import InvalidInput
from splitfed.core.random import generator, stream
from splitfed.stats import fisher_information as module
from splitfed.stats.fisher_information import Prior, fisher_information, prior_of, reconstruction_bound


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed, "fisher")).double()


def gaussian(width: int, variance: float) -> Prior:
    """Return the prior of independent numbers, known and not estimated."""
    information = torch.full((width,), 1 / variance, dtype=torch.float64)
    return Prior(torch.eye(width).double(), information, variance, "known")


@pytest.mark.parametrize(
    ("singular", "dfil", "trace", "best"),
    [
        (torch.ones(20), 5.0, 0.1429, 0.1429),
        (torch.logspace(math.log10(3), math.log10(0.03), 20), 5.857, 0.1273, 0.3253),
    ],
)
def test_in_a_linear_gaussian_world_the_matrix_bound_is_the_least_error(
    singular: Tensor, dfil: float, trace: float, best: float
) -> None:
    """Twenty numbers of variance .5, noise of variance .2: (I/.5 + A'A/.2)^-1 is the error of the best estimate."""
    (left, right) = (torch.linalg.qr(drawn(20, 20, seed=s))[0] for s in (0, 1))
    mixing, prior = left @ torch.diag(singular.double()) @ right, gaussian(20, 0.5)
    found = fisher_information(lambda x: x @ mixing / math.sqrt(0.2), drawn(7, 20), prior.directions, generator(0))
    bound = reconstruction_bound(found, prior)
    least = float(torch.linalg.inv(torch.eye(20) / 0.5 + mixing @ mixing.T / 0.2).trace()) / 20
    assert bound.dfil == pytest.approx(dfil, rel=1e-3)
    assert bound.trace == pytest.approx(trace, rel=1e-3)
    assert least == pytest.approx(best, rel=1e-3)
    assert bound.matrix == pytest.approx(least, rel=1e-9)
    assert bound.trace <= bound.directions + 1e-12 <= least + 2e-12
    assert bound.least == pytest.approx(least)
    assert bound.unbiased == pytest.approx(1 / dfil, rel=1e-3)
    if dfil == 5.0:
        assert least < bound.unbiased, "1 / dFIL alone is no bound: the best estimate beats it"


def test_information_by_hand() -> None:
    """z = (2 x1, x1 x2) at (3, 5): J = ((2, 0), (5, 3)); J'J = ((29, 15), (15, 9))."""
    x = torch.tensor([[3.0, 5.0]]).double()

    def function(rows: Tensor) -> Tensor:
        return torch.stack([2 * rows[:, 0], rows[:, 0] * rows[:, 1]], 1)

    found = fisher_information(function, x, torch.eye(2), generator(0))
    assert found.dfil.tolist() == [19.0]
    assert found.directions.tolist() == [29.0, 9.0]
    assert found.matrix is not None
    assert found.matrix.tolist() == [[29.0, 15.0], [15.0, 9.0]]
    assert found.error == 0
    more = fisher_information(function, x, torch.eye(2), generator(0), known=lambda z: torch.ones_like(z))
    assert more.dfil.tolist() == [19.0 + (7**2 + 3**2) / 2], "the sum of z, whose gradient is (7, 3), is told too"


def test_random_signs_agree_with_the_whole_jacobian(monkeypatch: pytest.MonkeyPatch) -> None:
    with stream(0):
        client = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten()).requires_grad_(False)
    x = torch.rand(5, 1, 6, 6, generator=generator(0))
    prior = prior_of(torch.rand(60, 1, 6, 6, generator=generator(1)))
    exact = fisher_information(client, x, prior.directions, generator(0))
    monkeypatch.setattr(module, "EXACT", 0)
    found = fisher_information(client, x, prior.directions, generator(0), probes=400)
    assert found.matrix is None
    mean = float(exact.dfil.mean())
    assert 0 < found.error < 0.05
    assert abs(float(found.dfil.mean()) - mean) < 4 * found.error * mean
    torch.testing.assert_close(found.directions.sum(), exact.directions.sum(), rtol=5 * found.error, atol=0)
    bounds = [reconstruction_bound(one, prior) for one in (exact, found)]
    assert bounds[1].directions == pytest.approx(bounds[0].directions, rel=0.1)


def test_where_nothing_is_told_the_bound_is_the_error_of_the_mean_row() -> None:
    """And the prior that is fitted has the variance of the rows."""
    rows = drawn(500, 4) * torch.tensor([1.0, 2.0, 3.0, 0.0])
    found = fisher_information(lambda x: 0 * x, rows, prior_of(rows).directions, generator(0))
    bound = reconstruction_bound(found, prior_of(rows))
    assert bound.directions == pytest.approx(bound.variance, rel=3 / 500)
    assert bound.matrix == pytest.approx(bound.directions)
    assert bound.unbiased == math.inf


def test_where_rows_fill_no_volume_the_bound_by_dfil_is_empty_and_the_others_are_not() -> None:
    rows = drawn(200, 3) @ drawn(3, 8, seed=2)
    prior = prior_of(rows)
    bound = reconstruction_bound(fisher_information(lambda x: x, rows, prior.directions, generator(0)), prior)
    assert bound.empty
    assert bound.trace == 0
    assert 0 < bound.directions <= bound.least < bound.variance


def test_smoothed_rows_have_a_proven_prior() -> None:
    """Two points, of which any release tells everything, with noise of deviation .5: K = I / .25 at most."""
    rows = torch.tensor([[0.0, 0.0], [4.0, 0.0]]).double()
    prior = prior_of(rows, smoothing=0.5)
    assert prior.information.tolist() == [4.0, 4.0]
    bound = reconstruction_bound(fisher_information(lambda x: 3 * x, rows, prior.directions, generator(0)), prior)
    assert bound.least == pytest.approx(1 / (9 + 4))
    assert not bound.empty
    assert bound.assumed.endswith("proven")


def test_long_rows_leave_directions_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten rows of thirty numbers: nine directions at most, and a bound below that of all."""
    rows = drawn(10, 30)
    whole = prior_of(rows)
    monkeypatch.setattr(module, "MOST_MATRIX", 20)
    prior = prior_of(rows)
    assert prior.directions.shape == (30, 10)
    found = [fisher_information(lambda x: x, rows, p.directions, generator(0)) for p in (whole, prior)]
    bounds = [reconstruction_bound(f, p) for f, p in zip(found, (whole, prior), strict=True)]
    assert bounds[1].directions == pytest.approx(bounds[0].directions)
    assert bounds[1].empty
    monkeypatch.setattr(module, "MOST_ROWS", 10)
    some = prior_of(drawn(40, 30))
    assert bool(some.information.isfinite().all())
    bound = reconstruction_bound(fisher_information(lambda x: x, rows, some.directions, generator(0)), some)
    assert bound.empty, "of twenty directions nothing is known"


def test_refusals() -> None:
    with pytest.raises(InvalidInput, match="rows has 1 rows; expected at least 2"):
        prior_of(torch.ones(1, 3))
    with pytest.raises(InvalidInput, match=r"smoothing=0.0 is not allowed; expected a number in \(0, inf\)"):
        prior_of(torch.ones(3, 3), smoothing=0.0)
    with pytest.raises(InvalidInput, match="probes=1 is not allowed"):
        fisher_information(lambda x: x, torch.ones(3, 3), torch.eye(3), generator(0), probes=1)
