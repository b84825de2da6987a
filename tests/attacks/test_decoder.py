"""The decoder behind `inverse_network`: where it begins, sizes that no doubling reaches, and parts at their places."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import splitfed as sf
from splitfed.attacks.base import Attack
from splitfed.attacks.networks.image_parts import Rectangle, boxes, bridge, doublings
from splitfed.attacks.reconstruction.decoder import Decoder
from splitfed.attacks.reconstruction.inverse_network import InverseNetwork
from splitfed.attacks.scoring.reconstruction_metrics import psnr
from splitfed.core.optimizers import Optim
from splitfed.core.random import generator, stream
from splitfed.models.lenet import lenet
from splitfed.topologies import extended_vanilla, vanilla, vertical

ADAM = Optim("Adam", {"lr": 3e-3})
QUICK = InverseNetwork(epochs=6, batch_size=16, queries=1, width=16)


@pytest.mark.parametrize("shape", [(3, 4, 4), (10,)])
def test_before_it_is_fitted_it_answers_the_mean_row(shape: tuple[int, ...]) -> None:
    start = torch.rand(2, 8, 8, generator=generator(0, "start"))
    with stream(0):
        decoder = Decoder({"z": shape}, (2, 8, 8), (0.0, 1.0), 8, start)
        blind = Decoder({"z": shape}, (2, 8, 8), (0.0, 1.0), 8)
    z = {"z": torch.randn(16, *shape, generator=generator(1))}
    assert torch.equal(decoder(z), start.expand(16, 2, 8, 8))
    assert torch.equal(blind(z), torch.full((16, 2, 8, 8), 0.5))


def test_columns_without_a_range_start_at_their_means() -> None:
    start = torch.tensor([-4.0, 0.0, 9.0])
    with stream(0):
        decoder = Decoder({"z": (5,)}, (3,), None, 4, start)
    assert torch.equal(decoder({"z": torch.zeros(2, 5)}), start.expand(2, 3))


def test_an_answer_beyond_the_range_is_its_bound_and_can_still_come_back() -> None:
    """It is worth no error where the truth is the bound, and moves at full slope where the truth lies inside."""
    with stream(0):
        decoder = Decoder({"z": (5,)}, (2,), (0.0, 1.0), 4, torch.tensor([-0.3, 1.2]))
    found = decoder({"z": torch.zeros(1, 5)})
    assert found.tolist() == [[0.0, 1.0]]
    at_the_bound = functional.mse_loss(found, torch.tensor([[0.0, 1.0]]))
    inside = functional.mse_loss(found, torch.tensor([[0.5, 0.5]]))
    weights = [p for p in decoder.parameters() if p.grad_fn is None][-1:]
    (none,) = torch.autograd.grad(at_the_bound, weights, retain_graph=True)
    (some,) = torch.autograd.grad(inside, weights)
    assert float(none.abs().max()) == 0.0
    # The last bias, in units of half the range: .5 * the mean's 2 (0 - .5) / 2, and the other way.
    assert some.tolist() == pytest.approx([-0.25, 0.25])


SIZES = [(a, b) for a, b in product(range(2, 41), range(2, 41))]


def test_doublings_reach_every_size_with_little_to_spare() -> None:
    for size, goal in SIZES:
        times, reached = doublings(size, goal)
        assert goal <= reached * 2**times < goal + 2**times, (size, goal)
        if goal >= size:
            assert size <= reached <= size + 8 or 3 * reached <= 4 * size or reached <= size, (size, goal)
    assert [doublings(size, 28) for size in (28, 24, 14, 12, 8, 7, 4)] == [
        (0, 28), (0, 28), (1, 14), (1, 14), (1, 14), (2, 7), (3, 4)
    ]  # fmt: skip


@pytest.mark.parametrize(("side", "goal"), [((24, 24), (28, 28)), ((5, 6), (8, 8)), ((7, 4), (5, 4)), ((6, 9), (7, 2))])
def test_a_bridge_leaves_nothing_out(side: tuple[int, int], goal: tuple[int, int]) -> None:
    """Every number at the source reaches a pixel, and every pixel is reached, symmetrically."""
    layer = bridge(1, 1, side, goal)
    with torch.no_grad():
        layer.weight.fill_(1.0)
        layer.bias.zero_()  # type: ignore[union-attr]
    x = torch.ones(1, 1, *side, requires_grad=True)
    y = layer(x)
    assert y.shape[2:] == goal
    (slope,) = torch.autograd.grad(y.sum(), x)
    assert float(y.detach().min()) >= 1.0
    assert float(slope.min()) >= 1.0
    if all((g - s) % 2 == 0 for s, g in zip(side, goal, strict=True)):
        assert torch.equal(y, y.flip(2, 3))


@pytest.mark.parametrize("shape", [(3, 5, 6), (3, 6, 9), (2, 13, 2), (4, 1, 1), (7,), (2, 3, 40)])
@pytest.mark.parametrize("target", [(1, 8, 8), (2, 9, 4), (1, 3, 17)])
def test_any_release_becomes_any_image(shape: tuple[int, ...], target: tuple[int, ...]) -> None:
    with stream(0):
        decoder = Decoder({"z": shape}, target, (0.0, 1.0), 8)
    z = {"z": torch.randn(12, *shape, generator=generator(1))}
    assert decoder(z).shape == (12, *target)
    decoder.fit([z], torch.rand(12, *target, generator=generator(2)))
    assert decoder(z).shape == (12, *target)


def attacked(run: sf.Run, attack: Attack, party: str | None = None) -> float:
    (result,) = run.attack(attack, adversary=party)
    return result.scores["attack"]["psnr"].mean


class Squared(nn.Module):
    """Bends what a convolution says, so that no linear map undoes it."""

    def forward(self, z: Tensor) -> Tensor:
        return z.square() + z


def test_digits_behind_a_valid_convolution() -> None:
    """8x8 becomes 6x6, which no doubling brings back: 33 dB; put through bilinear interpolation 17 to 19."""
    with stream(0):
        bottom = nn.Sequential(nn.Conv2d(1, 4, 3), Squared())
        model = nn.Sequential(bottom, nn.Flatten(), nn.Linear(144, 10))
    data = sf.data.digits().clients(1, auxiliary=400, victims=24)
    run = sf.train(vanilla(model, "0"), data, rounds=1, optimizer=ADAM)
    assert attacked(run, QUICK) > 27.0


@pytest.mark.exhaustive
def test_the_network_alone_bridges_a_size_that_no_doubling_reaches() -> None:
    """Without the linear inverse to help it: a convolution learns in these steps what interpolation does not."""
    x = sf.data.digits().x[:500]
    with stream(0):
        client = nn.Conv2d(1, 4, 4)
        decoder = Decoder({"z": (4, 5, 5)}, (1, 8, 8), (0.0, 1.0), 16, x[:400].mean(0))
    z = client(x).detach()
    optimizer = torch.optim.Adam(decoder.parameters(), lr=3e-3)
    for _ in range(25):
        for chosen in torch.randperm(400, generator=generator(0, "order")).split(16):
            loss = functional.mse_loss(decoder({"z": z[chosen]}), x[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    found = decoder({"z": z[400:]}).detach()
    # 24.7 dB; with bilinear interpolation in the place of the bridge 18.9.
    assert float(psnr(x[400:], found, 1.0).mean()) > 22.0


def halves(kind: str) -> sf.Run:
    """Halves of digits, each behind a convolution; of "relayed" the halves' maps are joined as channels by a relay."""
    with stream(1):
        bottoms: dict[str, nn.Module] = {
            side: nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.LeakyReLU(0.3)) for side in ("left", "right")
        }
        middle, top = nn.Conv2d(8, 16, 1), nn.Sequential(nn.Flatten(), nn.Linear(512, 10))
        direct = nn.Sequential(nn.Flatten(), nn.Linear(256, 10))
    data = sf.data.digits().halves().clients(1, auxiliary=400, victims=24)
    topology = (
        vertical(bottoms, direct, labels="left")
        if kind == "joined"
        else extended_vanilla(bottoms, middle, top, labels="left")
    )
    return sf.train(topology, data, rounds=1, optimizer=ADAM)


@pytest.mark.parametrize("kind", ["joined", "relayed"])
def test_halves_of_images_stand_at_their_places(kind: str) -> None:
    """About 40 dB; as channels of one stretched image 18 to 21."""
    assert attacked(halves(kind), QUICK, "server") > 30.0


PLACES = {
    "left": torch.arange(64).view(1, 8, 8)[..., :4].flatten(),
    "right": torch.arange(64).view(1, 8, 8)[..., 4:].flatten(),
    "odd": torch.tensor([0, 9, 18]),
    "all": torch.arange(64),
}
LEFT, RIGHT, WHOLE = Rectangle(0, 0, 8, 4), Rectangle(0, 4, 8, 4), Rectangle(0, 0, 8, 8)


@pytest.mark.parametrize(
    ("origins", "shape", "expected"),
    [
        (("left",), (3, 6, 2), (LEFT,)),
        (("right",), (5,), (RIGHT,)),
        (("left", "right"), (4, 8, 4), (LEFT, RIGHT)),
        (("left", "right"), (4, 8, 8), (WHOLE,)),
        (("left", "right"), (12,), (WHOLE,)),
        (("odd",), (4, 8, 4), (WHOLE,)),
        (("left", "odd"), (4, 8, 4), (WHOLE,)),
        (("all",), (4, 8, 4), (WHOLE,)),
        ((), (4, 8, 4), (WHOLE,)),
    ],
)
def test_which_part_of_an_image_a_value_shows(
    origins: tuple[str, ...], shape: tuple[int, ...], expected: tuple[Rectangle, ...]
) -> None:
    assert boxes((1, 8, 8), PLACES, {"z": origins}, {"z": shape}) == {"z": expected}


# Half a minute: MNIST behind the convolution that LeNet begins with in most code, without padding.
@pytest.mark.exhaustive
def test_the_usual_budget_reaches_25_db_behind_a_valid_convolution() -> None:
    with stream(0):
        model = nn.Sequential(nn.Conv2d(1, 8, 5), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 24 * 24, 10))
    data = sf.data.mnist5k().clients(1, auxiliary=1500, victims=32)
    run = sf.train(vanilla(model, "0"), data, rounds=1)
    (result,) = run.attack(["inverse_network"])
    assert result.scores["attack"]["psnr"].mean > 25.0
    assert not result.quick


@pytest.mark.exhaustive
@pytest.mark.parametrize("depth", ["relu1", "pool1"])
def test_the_usual_budget_reaches_20_db_behind_a_lenet_for_each_half(depth: str) -> None:
    with stream(0):
        nets = {side: lenet((1, 28, 14), 10, seed=None) for side in ("left", "right")}
        names = [name for name, _ in nets["left"].named_children()]
        bottoms: dict[str, nn.Module] = {side: net[: names.index(depth) + 1] for side, net in nets.items()}
        width = bottoms["left"](torch.zeros(1, 1, 28, 14)).numel()
        top = nn.Sequential(nn.Flatten(), nn.Linear(2 * width, 10))
    data = sf.data.mnist5k().halves().clients(1, auxiliary=800, victims=32)
    run = sf.train(vertical(bottoms, top, labels="left"), data, rounds=1)
    assert attacked(run, InverseNetwork.with_budget(), "server") > 20.0
