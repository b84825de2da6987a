"""L-BFGS by row on functions whose least is known, and inversion where a release tells all, something or nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import optimize
from torch import Tensor

from splitfed.attacks.base import Knowledge, Releases
from splitfed.attacks.networks.row_lbfgs import RowLbfgs
from splitfed.attacks.reconstruction import lbfgs_inversion
from splitfed.attacks.reconstruction.lbfgs_inversion import GaussianPrior, LbfgsInversion
from splitfed.core.messages import Message, Stamp, View
from splitfed.core.random import generator
from splitfed.defenses import Noise
from tests.attacks.examples import lenet_run


def rosenbrock(x: Tensor, rows: Tensor) -> Tensor:
    """Every row a valley of its own steepness."""
    steep = 10.0 + 10.0 * rows
    return (steep[:, None] * (x[:, 1:] - x[:, :-1].square()).square() + (1 - x[:, :-1]).square()).sum(1)


STARTS = torch.randn(6, 8, generator=generator(0, "starts")).double()


def test_rows_arrive_where_another_implementation_does() -> None:
    found = RowLbfgs(rosenbrock, STARTS).run(400)
    for row, start in enumerate(STARTS):

        def loss(x: np.ndarray, row: int = row) -> tuple[float, np.ndarray]:
            x = torch.from_numpy(x)[None].requires_grad_()
            value = rosenbrock(x, torch.tensor([row]))
            return float(value.detach()), torch.autograd.grad(value.sum(), x)[0][0].numpy()

        other = optimize.minimize(loss, start.numpy(), jac=True, method="L-BFGS-B", options={"ftol": 0, "maxiter": 900})
        assert loss(found[row].numpy())[0] <= float(other.fun) + 1e-9


def test_a_row_goes_alone_as_it_goes_beside_others() -> None:
    together = RowLbfgs(rosenbrock, STARTS).run(25)
    for row in range(len(STARTS)):

        def alone(x: Tensor, rows: Tensor, row: int = row) -> Tensor:
            return rosenbrock(x, rows + row)

        assert torch.allclose(RowLbfgs(alone, STARTS[row : row + 1]).run(25)[0], together[row], rtol=1e-9, atol=1e-9)


def test_kinks_are_passed_and_a_row_that_has_ended_costs_nothing() -> None:
    """The loss of Lewis and Overton's kind: smooth along a valley with a kink at its ground."""
    search = RowLbfgs(lambda x, rows: (x[:, 0] - x[:, 1].square()).abs() * 10 + x[:, 1].square(), STARTS[:, :2] + 3)
    search.run(200)
    assert float(search.loss.max()) < 1e-4
    flat = RowLbfgs(lambda x, rows: torch.where(rows == 0, x.square().sum(1), 0 * x.sum(1)), STARTS[:2])
    before = flat.evaluations
    flat.run(50)
    assert len(flat.active) == 0
    assert flat.evaluations - before < 40


def test_a_loss_that_is_not_finite_somewhere_is_stepped_over() -> None:
    search = RowLbfgs(lambda x, rows: (x - x.log()).sum(1), STARTS.abs() + 5)
    assert torch.allclose(search.run(100), torch.ones_like(STARTS), atol=1e-4)


MIXING = torch.randn(12, 30, generator=generator(1, "mixing")) / 3


def wide(x: Tensor) -> Releases:
    """Of twelve numbers thirty, bent: nothing is lost."""
    return {"z": torch.nn.functional.leaky_relu(x.flatten(1) @ MIXING, 0.3)}


def view_of(released: Releases) -> View:
    stamp = Stamp("predict", 0, 0, 0, "victims")
    return View("server", (Message("client0", "server", "activation", "bottom->top", dict(released), stamp),))


def knowledge_of(rows: Tensor, scale: float = 0.0) -> Knowledge:
    drawn = generator(2, "noise")

    def noisy(x: Tensor) -> Releases:
        return {"z": wide(x)["z"] + scale * torch.randn(len(x), 30, generator=drawn)}

    return Knowledge((12,), None, auxiliary=rows, upstream=wide, sample=noisy if scale else wide)


def test_what_loses_nothing_is_inverted_to_rounding() -> None:
    rows = torch.randn(150, 12, generator=generator(3, "rows"))
    victims, known = rows[:20], knowledge_of(rows[20:])
    found = LbfgsInversion()(view_of(wide(victims)), known, generator(0)).prediction
    assert float((found - victims).abs().max()) < 1e-3


SPREAD = torch.logspace(0, -3, 12)
"""What a release makes of a row's numbers: the last ones hardly show in it, and less than the rounding of the first."""


def uneven(x: Tensor) -> Releases:
    """A function that holds numbers in float32 and writes into one it has made."""
    made = torch.zeros(len(x), 30)
    made[:] = torch.nn.functional.leaky_relu((SPREAD * x.flatten(1)) @ MIXING, 0.3)
    return {"z": made.add_(10.0)}


def test_computed_in_float64_it_does_not_end_at_the_rounding_of_the_segment() -> None:
    rows = torch.randn(150, 12, generator=generator(3, "rows"))
    victims, known = rows[:20], Knowledge((12,), None, auxiliary=rows[20:], upstream=uneven, sample=uneven)
    single, double = (
        LbfgsInversion(double=double)(view_of(uneven(victims)), known, generator(0)).prediction
        for double in (False, True)
    )
    assert single.dtype == double.dtype == torch.float32
    assert (double - victims).square().mean() < 0.01 * (single - victims).square().mean()


def test_under_noise_it_is_the_most_probable_row_and_no_fit_of_the_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the prior the noise is fitted, and the rows are further from the truth."""
    rows = torch.randn(150, 12, generator=generator(3, "rows"))
    victims, known = rows[:40], knowledge_of(rows[40:], 1.0)
    seen = view_of({"z": wide(victims)["z"] + torch.randn(40, 30, generator=generator(4, "seen"))})
    adapted = LbfgsInversion()(seen, known, generator(0)).prediction
    monkeypatch.setattr(lbfgs_inversion, "noise_variance", lambda *given: 0.0)
    fitted = LbfgsInversion()(seen, known, generator(0)).prediction
    errors = [float((found - victims).square().mean()) for found in (adapted, fitted)]
    assert errors[0] < 0.8 * errors[1]


def test_the_prior_is_that_of_the_rows() -> None:
    rows = torch.randn(4000, 3, generator=generator(5, "rows")) * torch.tensor([1.0, 2.0, 3.0]) + 1
    prior = GaussianPrior.of(rows)
    assert torch.allclose(prior.mean, torch.ones(3).double(), atol=0.2)
    spread = prior.root @ prior.root.T
    least = lbfgs_inversion.SHRINK * float(rows.var(0).mean())
    assert torch.allclose(spread, torch.diag(rows.var(0).double() + least), atol=0.4)


def test_a_convolution_is_inverted_beyond_what_a_first_order_search_reaches() -> None:
    """Rows behind the first pooling of LeNet: mean 99.9 dB in two seconds, where `rmle` comes to 18 in `quick`."""
    (found,) = lenet_run(rounds=3).attack(LbfgsInversion.with_budget("quick"))
    (first,) = lenet_run(rounds=3).attack("rmle", budget="quick")
    assert found.scores["attack"]["psnr"].mean > first.scores["attack"]["psnr"].mean + 20


def test_where_nothing_is_told_it_is_the_mean_row() -> None:
    (found,) = lenet_run(Noise(scale=1e3), rounds=3).attack("lbfgs_inversion", budget="quick")
    assert found.scores["attack"]["psnr"].mean < found.scores["mean_image"]["psnr"].mean + 0.5
