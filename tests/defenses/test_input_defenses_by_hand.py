"""The defenses of inputs, each by numbers that a person can work out."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitfed.attacks.scoring import reconstruction_metrics
from splitfed.core.defense import Defense
from splitfed.core.defense_context import Context, DefenseSite
from splitfed.core.messages import Stamp
from splitfed.core.random import generator, stream
from splitfed.defenses import (
    Adversarial,
    ChannelPruning,
    Dropout,
    Mid,
    Quantization,
    Shredder,
    TopK,
    top_k,
)
from splitfed.defenses.adversary import Adversary
from splitfed.defenses.channel_pruning import Pruner
from splitfed.defenses.fitted_layers import Layer, OutputLayers
from splitfed.defenses.shredder import NoiseSet
from splitfed.defenses.variational_encoder import Variational, divergence
from tests.defenses.wire_formats import pack_bits, pack_levels, pack_top_k, unpack_levels, unpack_top_k
from tests.examples import assert_refuses
from tests.rounding import single

EDGE = "bottom->top"
TRAIN = Stamp("train", 0, 0, 0)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed, "drawn"))


def number(t: Tensor) -> float:
    return float(t.detach())


def here(module: nn.Module | None = None, x: Tensor | None = None, state: Any = None, stamp: Stamp = TRAIN) -> Context:
    return Context("client", EDGE, stamp, 0, 0, {} if x is None else {"x": x}, {}, state, module)


def behind(layer: Layer) -> OutputLayers:
    """A client whose only layer of its own is a convolution, and the fitted one behind it."""
    layer.edges = (EDGE,)
    with stream(0):
        return OutputLayers(nn.Conv2d(1, 4, 3, padding=1), {0: layer})


def adversary_of(defense: Defense, shape: tuple[int, ...], inputs: tuple[int, ...]) -> Adversary:
    made = defense.start(DefenseSite("client", EDGE, {"z": shape}, {"x": inputs}, 0))
    assert isinstance(made, Adversary)
    return made


def silent(adversary: Adversary) -> None:
    """Let the decoder say zero whatever it sees."""
    with torch.no_grad():
        for p in adversary.net.parameters():
            p.zero_()


def test_dropout_by_hand() -> None:
    """Numbers stay with chance 3/4 and are then multiplied by 4/3; 40000 draws keep to four standard errors."""
    z = torch.ones(40, 1000)
    out = Dropout(rate=0.25).release("z", z, here())
    assert sorted(out.unique().tolist()) == single([0, 4 / 3])
    assert number((out == 0).double().mean()) == pytest.approx(0.25, abs=4 * math.sqrt(0.25 * 0.75 / 40000))
    assert torch.equal(Dropout(rate=0.25).expected("z", z, here()), z)
    assert torch.equal(Dropout(rate=0.0).release("z", z, here()), z)
    other = Dropout(rate=0.25).release("z", z, here(stamp=Stamp("query", 0, 0, 1)))
    assert 0.3 < number((other != out).double().mean()) < 0.45, "3/8 of independent masks differ"


def test_quantization_by_hand() -> None:
    z = torch.tensor([[0.0, 1.2], [2.0, 3.0]], requires_grad=True)
    levels = Quantization(bits=2).release("z", z, here())
    assert levels.tolist() == [[0.0, 1.0], [2.0, 3.0]]
    assert Quantization(bits=1).release("z", z, here()).tolist() == [[0.0, 0.0], [3.0, 3.0]]
    assert Quantization(bits=1, per="channel").release("z", z, here()).flatten().tolist() == single([0, 1.2, 2, 3])
    levels.sum().backward()
    assert torch.equal(z.grad, torch.ones(2, 2))
    same = torch.full((2, 3), -1.5)
    assert torch.equal(Quantization(bits=4).release("z", same, here()), same)
    assert bool(Quantization().release("z", torch.tensor([[1.0, math.inf]]), here()).isnan().all()), "so the run stops"


@pytest.mark.parametrize("per", ["tensor", "channel"])
@pytest.mark.parametrize("bits", [1, 3, 8, 16])
def test_quantization_through_bytes_and_back(bits: int, per: str) -> None:
    z = drawn(7, 3, 5, 5)
    defense = Quantization(bits=bits, per=per)
    found = pack_levels(z, bits, per)
    wire = [t.numpy().tobytes() for t in found]
    assert sum(map(len, wire)) == defense.packed("activation", 7, (3, 5, 5), torch.float32)
    codes = torch.frombuffer(bytearray(wire[0]), dtype=torch.uint8)
    ranges = torch.frombuffer(bytearray(wire[1]), dtype=torch.float32).view(found[1].shape)
    sent = defense.release("z", z, here())
    assert torch.allclose(unpack_levels(codes, ranges, z.shape, bits), sent, atol=1e-6)
    low, high = (z.amin((0, 2, 3), True), z.amax((0, 2, 3), True)) if per == "channel" else (z.min(), z.max())
    assert bool(((sent - z).abs() <= (high - low) / (2**bits - 1) / 2 * 1.001 + 1e-6).all())


def test_top_k_by_hand() -> None:
    z = torch.tensor([[[1.0, -9.0], [3.0, 0.5]], [[7.0, -2.0], [0.0, 6.0]], [[1.0, 1.0], [1.0, 1.0]]])
    kept = torch.tensor([[[0.0, -9.0], [3.0, 0.0]], [[7.0, 0.0], [0.0, 6.0]], [[1.0, 1.0], [0.0, 0.0]]])
    x = z.clone().requires_grad_()
    sent = TopK(k=2).release("z", x, here())
    assert torch.equal(sent, kept)
    sent.sum().backward()
    assert torch.equal(x.grad, (kept != 0).float()), "no gradient for what was left out"
    assert torch.equal(TopK(k=4).release("z", z, here()), z)


@pytest.mark.parametrize(("k", "shape"), [(1, (5,)), (3, (2, 3, 4)), (8, (8,)), (1, (1,))])
def test_top_k_through_bytes_and_back(k: int, shape: tuple[int, ...]) -> None:
    z = drawn(6, *shape)
    values, where = pack_top_k(z, k)
    wire = values.numpy().tobytes(), where.numpy().tobytes()
    numbers, counted = math.prod(shape), TopK(k=k).packed("activation", 6, shape, torch.float32)
    assert min(len(wire[0]) + len(wire[1]), z.nbytes) == counted
    read = torch.frombuffer(bytearray(wire[0]), dtype=torch.float32).view(6, k)
    places = torch.frombuffer(bytearray(wire[1]), dtype=torch.uint8) if wire[1] else where
    assert torch.equal(unpack_top_k(read, places, z.shape), TopK(k=k).release("z", z, here()))
    assert top_k.place_bits(numbers) == math.ceil(math.log2(numbers))


def test_bytes_by_hand() -> None:
    """80 numbers of 3 bits are 30 bytes, a range 8, five 40; 4 x 5 values have places of 5 bits, 13 bytes."""
    assert Quantization(bits=3).packed("activation", 4, (20,), torch.float32) == 38
    assert Quantization(bits=3, per="channel").packed("activation", 4, (5, 2, 2), torch.float32) == 70
    assert Quantization(bits=16, per="channel").packed("activation", 2, (40,), torch.float32) == 320, (
        "no longer than raw"
    )
    assert TopK(k=5).packed("activation", 4, (20,), torch.float32) == 80 + 13
    assert TopK(k=20).packed("activation", 4, (20,), torch.float32) == 320, "no longer than raw"
    for defense in (Quantization(), TopK()):
        assert defense.packed("gradient", 4, (20,), torch.float32) is None
    assert pack_bits(torch.tensor([5, 2, 7]), 3).tolist() == [0b11010101, 0b1], "5 first, low bits first"


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_a_prunes_mask_by_hand() -> None:
    """Four channels, ratio one half: the threshold is the third score from below; a thirtieth is one temperature."""
    pruner = Pruner("z", (4, 2, 2), 0.5, 0.5, hard=True)
    scores = torch.tensor([[0.0, 1 / 30, 2 / 30, 3 / 30], [3.0, -1.0, 2.0, 1.0]])
    z = torch.ones(2, 4, 2, 2)
    soft = pruner.prune(z, scores)[:, :, 0, 0]
    assert soft[0].tolist() == pytest.approx([sigmoid(-2), sigmoid(-1), 0.5, sigmoid(1)], abs=1e-5)
    assert soft[1].tolist() == pytest.approx([1, 0, 0.5, 0], abs=1e-5)
    hard = pruner.eval().prune(z, scores)[:, :, 0, 0]
    assert hard.tolist() == [[0, 0, 1, 1], [1, 0, 1, 0]]


def test_the_pruner_takes_its_share_of_the_tasks_gradient_and_the_client_all() -> None:
    z, found = drawn(3, 4, 2, 2), {}
    with stream(0):
        one = Pruner("z", (4, 2, 2), 0.5, 1.0)
    quarter = copy.deepcopy(one)
    quarter.share = 0.25
    for name, pruner in (("one", one), ("quarter", quarter)):
        leaf = z.clone().requires_grad_()
        (pruner(leaf) * drawn(3, 4, 2, 2, seed=1)).sum().backward()
        found[name] = (leaf.grad, [p.grad for p in pruner.parameters()])
    assert torch.equal(found["one"][0], found["quarter"][0])
    assert number(found["one"][1][0].abs().max()) > 0
    for whole, part in zip(found["one"][1], found["quarter"][1], strict=True):
        assert torch.allclose(part, whole / 4)


def test_discos_penalty_reaches_the_pruner_alone_and_the_adversary_its_own_error() -> None:
    defense, x = ChannelPruning(alpha=0.3, width=4, lr=0.1), drawn(5, 1, 4, 4)
    client = behind(Pruner("z", (4, 4, 4), 0.5, 0.7))
    adversary = adversary_of(defense, (4, 4, 4), (1, 4, 4))
    z = client(x)
    context = here(client, x, adversary)
    decoded = adversary.net(z.detach())
    before = copy.deepcopy(adversary.state_dict())
    penalty = defense.penalty(z, context)
    assert number(penalty) == pytest.approx(-0.3 * number((decoded - x).detach().square().mean()), rel=1e-5)
    penalty.backward()
    assert client.module.weight.grad is None
    assert all(p.grad is not None for p in client.layers.parameters())
    studied = torch.autograd.grad((decoded - x).square().mean(), list(adversary.net.parameters()))
    for p, g in zip(adversary.net.parameters(), studied, strict=True):
        assert torch.allclose(p.grad, g, atol=1e-7)
    defense.learn(adversary)
    # The first step of Adam is one rate long against the gradient, wherever that is no rounding error.
    moved = adversary.net[0].weight - before["net"]["0.weight"]
    clear = studied[0].abs() > 1e-5
    assert number(clear.double().mean()) > 0.5
    assert torch.allclose(moved.detach()[clear], -0.1 * studied[0][clear].sign(), rtol=1e-2)
    silent(adversary)
    assert number(defense.penalty(z, context)) == pytest.approx(-0.3 * number(x.square().mean()), rel=1e-5)


def test_an_adversary_learns_in_training_only_and_comes_back_from_its_state() -> None:
    defense, x = Adversarial(width=4, lr=1e-2), drawn(6, 1, 4, 4)
    one, other = (adversary_of(defense, (2, 4, 4), (1, 4, 4)) for _ in range(2))
    z = drawn(6, 2, 4, 4, seed=1)
    start = number(one.error(z, here(x=x)))
    one.accumulate_gradient(z, here(x=x, stamp=Stamp("rehearse", 0, 0, 0)))
    one.step()
    assert number(one.error(z, here(x=x))) == start
    for _ in range(30):
        one.accumulate_gradient(z, here(x=x))
        one.step()
    assert number(one.error(z, here(x=x))) < 0.9 * start
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    for adversary in (one, other):
        adversary.accumulate_gradient(z, here(x=x))
        adversary.step()
    assert torch.equal(one.decode(z), other.decode(z))
    assert defense.start(DefenseSite("server", EDGE, {"z": (2, 4, 4)}, {}, 0)) is None


def test_adversarial_pays_for_similarity_above_the_threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoder that sees everything: .3 (1 - .5); one that sees nothing is below the threshold and costs nothing."""
    defense, x = Adversarial(width=4), torch.rand(3, 1, 8, 8, generator=generator(0))
    adversary = adversary_of(defense, (1, 8, 8), (1, 8, 8))
    z = x.clone().requires_grad_()
    monkeypatch.setattr(adversary, "decode", lambda release: release)
    assert number(defense.penalty(z, here(x=x, state=adversary))) == single(0.3 * 0.5)
    half = (0.5 * z).detach().requires_grad_()
    penalty = defense.penalty(half, here(x=x, state=adversary))
    assert number(penalty) == pytest.approx(
        0.3 * (number(reconstruction_metrics.ssim(half.detach(), x, 1.0).mean()) - 0.5), abs=1e-6
    )
    penalty.backward()
    assert number(half.grad.abs().max()) > 0
    monkeypatch.undo()
    silent(adversary)
    assert number(defense.penalty(z, here(x=x, state=adversary)).detach()) == 0.0


def test_mid_by_hand() -> None:
    """KL of N(2, 1) is 2, of N(0, .25) is (.25 + log 4 - 1) / 2 nats a number; two numbers a row add up."""
    assert number(divergence(torch.tensor([[2.0]]), torch.ones(1, 1))) == single(2.0)
    narrow = divergence(torch.zeros(3, 2), torch.full((3, 2), 0.5))
    assert number(narrow) == single(0.25 + math.log(4) - 1)
    layer = Variational("z", (4, 4, 4))
    client, x = behind(layer), drawn(200, 1, 4, 4)
    with torch.no_grad():
        for p in layer.spread.parameters():
            p.zero_()
        layer.spread.bias += 5 + math.log(math.e**0.5 - 1)  # softplus of it, less five, is one half
    defense, mean = Mid(weight=0.1), client(x)
    z = defense.release("z", mean, here(client))
    assert number((z - mean).std()) == pytest.approx(0.5, abs=4 * 0.5 / math.sqrt(2 * z.numel()))
    assert torch.equal(defense.expected("z", mean, here(client)), mean)
    squares = mean.square().flatten(1).sum(1).mean()
    foreseen = 0.05 * (number(squares) + 64 * (0.25 + math.log(4) - 1))
    assert number(defense.penalty(mean, here(client))) == pytest.approx(foreseen, rel=1e-5)
    z.sum().backward()
    assert number(layer.spread.weight.grad.abs().max()) > 0, "the noise is learnt"
    assert copy.deepcopy(client)(x).shape == mean.shape, "a copy in the middle of a step"


def test_shredder_by_hand() -> None:
    layer = NoiseSet("z", 2, (4, 4, 4), 1.0)
    with torch.no_grad():
        layer.noise[0], layer.noise[1] = 1.0, -3.0
    client, x = behind(layer), drawn(50, 1, 4, 4)
    defense, z = Shredder(members=2, weight=0.01, target=1e3), client(x)
    added = defense.release("z", z, here(client)) - z
    assert sorted(added.flatten(1).mean(1).round().unique().tolist()) == [-3, 1]
    assert torch.allclose(defense.expected("z", z, here(client)), z - 1)
    # 64 numbers of 1 and of 3, a mean of 128 a member; their variance is 4.
    assert number(defense.penalty(z, here(client))) == single(-1.28)
    assert number(layer.in_vivo()) == pytest.approx(4 / number(z.square().mean()), rel=1e-5)
    strong = Shredder(members=2, weight=0.01, target=number(layer.in_vivo()) / 2)
    assert number(strong.penalty(z, here(client))) == 0.0
    with stream(0):
        many = NoiseSet("z", 100, (100,), 2.0).noise
    assert number(many.abs().mean()) == pytest.approx(2.0, abs=4 * 2 / 100), "E|n| of a Laplace variable is its scale"


def test_who_imitates_the_party_without_its_layers_knows_the_mean_alone() -> None:
    z = drawn(3, 4)
    for defense in (Mid(), Shredder()):
        assert torch.equal(defense.release("z", z, here()), z)
        assert torch.equal(defense.expected("z", z, here()), z)
        assert defense.guarantee == "no formal guarantee"


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "dropout": (lambda: Dropout(rate=1.0), "dropout rate=1.0 is not allowed; expected a number in [0, 1)"),
    "bits": (lambda: Quantization(bits=0), "quantization bits=0 is not allowed; expected a whole number of at least 1"),
    "many bits": (
        lambda: Quantization(bits=17),
        "bits=17 is not allowed; expected a whole number of at least 1 and at most 16",
    ),
    "per": (lambda: Quantization(per="row"), "unknown quantization per 'row'"),
    "k": (lambda: TopK(k=0), "top_k k=0 is not allowed; expected a whole number of at least 1"),
    "ratio": (
        lambda: ChannelPruning(ratio=1.0),
        "channel_pruning ratio=1.0 is not allowed; expected a number in [0, 1)",
    ),
    "alpha": (lambda: ChannelPruning(alpha=1.1), "channel_pruning alpha=1.1 is not allowed"),
    "pruner's lr": (lambda: ChannelPruning(lr=0.0), "channel_pruning lr=0.0 is not allowed"),
    "weight": (lambda: Adversarial(weight=-1.0), "adversarial weight=-1.0 is not allowed"),
    "threshold": (lambda: Adversarial(threshold=2.0), "adversarial threshold=2.0 is not allowed"),
    "range": (lambda: Adversarial(data_range=0.0), "adversarial data_range=0.0 is not allowed"),
    "mid": (lambda: Mid(weight=-0.1), "mid weight=-0.1 is not allowed"),
    "members": (lambda: Shredder(members=0), "shredder members=0 is not allowed"),
    "target": (lambda: Shredder(target=0.0), "shredder target=0.0 is not allowed"),
    "shape": (lambda: Variational("z", (2, 3)), "mid cannot guard 'z' of shape (2, 3) a row: expected (features,) or"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    assert_refuses(*REFUSED[case])
