"""grn: what a peer's features look like to a party that holds correlated ones, and what it cannot know."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

import splitfed as sf
from splitfed.attacks.base import Knowledge
from splitfed.attacks.reconstruction.grn import Grn, VictimRows, network
from splitfed.attacks.reconstruction.inversion import spread
from splitfed.core.errors import InvalidInput
from splitfed.core.random import generator
from splitfed.data.features import places
from splitfed.threats.attack_result import AttackResult
from splitfed.threats.released_rows import UnknownFeatures, select_unknown
from splitfed.topologies import vertical
from splitfed.training.run import Run
from tests.topologies.vertical_examples import LINKED, convolution, linked, perceptron, planted, train, with_active

QUICK = Grn(epochs=60, batch_size=32, lr=1e-3)


def attacked(run: Run, attack: Grn = QUICK, party: str = "active0", seed: int = 0) -> AttackResult:
    (result,) = run.attack(attack, adversary=party, seed=seed)
    return result


@cache
def found() -> AttackResult:
    """What the attack makes of columns that are correlated with the adversary's own."""
    return attacked(planted())


def error(result: AttackResult, who: str = "attack") -> float:
    return result.scores[who]["mse"].mean


def test_correlated_features_are_found() -> None:
    """The mean of every column is what somebody knows who saw nothing; a third of its error is left."""
    result = found()
    assert error(result) < 0.35 * error(result, "mean_image")
    assert result.scores["attack"]["r2"].mean > 0.6


def test_own_features_are_what_tells_rows_apart() -> None:
    with_own, alone = found(), attacked(planted(), replace(QUICK, own_features=False))
    assert error(with_own) < 0.5 * error(alone)
    # Noise alone gives a row that is at best typical: never better than the mean by more than chance.
    assert error(alone) > 0.8 * error(alone, "mean_image")


def test_own_features_stay_and_are_not_scored() -> None:
    result = found()
    assert torch.equal(result.prediction[:, 6:], result.truth[:, 6:])
    assert not torch.equal(result.prediction[:, :6], result.truth[:, :6])
    missed = (result.prediction - result.truth)[:, :6].double().square().mean()
    assert error(result) == pytest.approx(float(missed), rel=1e-5)


def test_same_seed_same_guess() -> None:
    brief = Grn(epochs=2)
    one, two, other = (attacked(planted(), brief, seed=s).prediction for s in (4, 4, 5))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)


def test_the_weight_of_the_variance_keeps_guesses_together() -> None:
    loose, tight = (
        attacked(planted(), Grn(20, 32, 3e-3, variance=v)).prediction[:, :6].std(0).mean() for v in (0.0, 1e3)
    )
    assert float(tight) < 0.2 * float(loose)


MEASURED = {
    2: {"clinic": [*range(10, 20)], "active": [*range(10), *range(20, 30)]},
    4: {
        "clinic": [*range(10, 16)],
        "lab": [*range(16, 20)],
        "ward": [*range(20, 25)],
        "active": [*range(10), *range(25, 30)],
    },
}


@pytest.mark.parametrize("parties", [pytest.param(2, marks=pytest.mark.exhaustive), 4])
def test_breast_cancer_by_columns(parties: int) -> None:
    """Measurements scaled to (0, 1), as the authors scale theirs."""
    raw, parts = sf.data.breast_cancer(), MEASURED[parties]
    low, high = raw.x.min(0).values, raw.x.max(0).values
    scaled = sf.Dataset("tumours", ((raw.x - low) / (high - low)).clamp(0, 1), raw.y, raw.task, (0.0, 1.0))
    data = scaled.vertical(parts).clients(1, auxiliary=100, victims=128, validation=0.0)
    bottoms = {name: perceptron((len(part), 32, 16), i) for i, (name, part) in enumerate(parts.items())}
    run = train(with_active(bottoms, perceptron((16 * parties, 1), 9)), data, rounds=5)
    result = attacked(run, Grn(epochs=100, batch_size=32, lr=5e-3))
    # Three bottoms say more of 15 unknown columns than one says of ten.
    assert error(result) < {2: 0.95, 4: 0.7}[parties] * error(result, "mean_image")


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("eye", "active"), id="2", marks=pytest.mark.exhaustive),
        pytest.param(("eye0", "active", "eye1", "eye2"), id="4"),
    ],
)
def test_images_by_strips(names: tuple[str, ...]) -> None:
    """With four strips the active party has one through the middle of the digit; what a margin shows is too little."""
    few = sf.data.mnist5k().strips(len(names), names).rows(range(0, 5000, 10))
    data = few.clients(1, auxiliary=100, victims=128, validation=0.0)
    bottoms = {name: convolution(10 + i, 8) for i, name in enumerate(names)}
    width = 8 * len(names) * 14 * (14 // len(names))
    run = train(with_active(bottoms, perceptron((width, 10), 9)), data)
    result = attacked(run, Grn(epochs=100, batch_size=32, lr=5e-3))
    assert result.prediction.shape == (128, 1, 28, 28)
    # The left half alone is an image still; strips to both sides of another are not.
    assert ("psnr" in result.scores["attack"]) == (len(names) == 2)
    assert error(result) < 0.7 * error(result, "mean_image")


def test_a_party_without_features_is_refused() -> None:
    data = linked().vertical(LINKED).clients(1, auxiliary=100, victims=32, validation=0.0)
    bottoms = {role: perceptron((6, 8, 2), 1) for role in LINKED}
    run = train(vertical(bottoms, perceptron((4, 2), 3), labels="active"), data)
    with pytest.raises(InvalidInput) as refused:
        attacked(run, party="server")
    assert str(refused.value) == (
        "grn needs inputs of its own to distinguish rows; this party has none (own_features=False: noise alone)"
    )
    assert run.applicable("server")["grn"] == str(refused.value)
    prediction = attacked(run, Grn(2, own_features=False), party="server").prediction
    assert prediction.shape == (32, 12)
    assert run.applicable("peer0")["grn"] == "Grn needs releases; this run does not grant that"


def test_a_head_at_a_feature_party_makes_it_able_to_attack() -> None:
    """The paper's own case: the active party holds features and sees what the joint model makes of them."""
    data = linked().vertical(LINKED).clients(1, auxiliary=100, victims=32, validation=0.0)
    bottoms = {role: perceptron((6, 8, 2), 1) for role in LINKED}
    topology = vertical(bottoms, perceptron((4, 4), 3), labels="active", head=perceptron((4, 2), 4))
    run = train(topology, data)
    assert run.applicable("active0")["grn"] is None
    with pytest.raises(InvalidInput, match="grn learns across rows, and there is one victim; expected two or more"):
        run.attack(QUICK, adversary="active0", victims=data.victims.rows(range(1)))


def test_the_generator_is_the_papers() -> None:
    net = network(10, 4)
    weights = [tuple(p.shape) for p in net.parameters() if p.dim() == 2]
    assert weights == [(600, 10), (200, 600), (100, 200), (4, 100)]
    out = spread(net(100 * torch.randn(64, 10, generator=generator(0))), (-1.0, 3.0)).detach()
    assert -1.0 <= float(out.min()) <= float(out.max()) <= 3.0


def test_rows_by_hand() -> None:
    """Columns 1 and 3 are read by the adversary and also by the peer: what is unknown are 0 and 2. Nobody reads 4."""
    own = {"me": torch.tensor([[1.0, 3.0], [2.0, 5.0]])}
    where = {"me": torch.tensor([1, 3]), "peer": torch.tensor([0, 1, 2])}
    rows = VictimRows(Knowledge((5,), own=own, places=where), 2)
    assert rows.unknown.tolist() == [0, 2]
    whole = rows.whole(torch.tensor([1]), torch.tensor([[7.0, 8.0]]))
    assert whole.tolist() == [[7.0, 2.0, 8.0, 5.0, 0.0]]
    # Two rows that differ stand sqrt(2) / 2 standard deviations from their mean.
    assert torch.allclose(rows.scaled, torch.tensor([[-1.0, -1.0], [1.0, 1.0]]) / 2**0.5)


@pytest.mark.parametrize(
    ("positions", "expected"),
    [
        ([2, 3, 6, 7], [[[[2.0, 3.0], [6.0, 7.0]]]]),
        ([0, 5], [[0.0, 5.0]]),
        ([0, 1, 2, 3, 4], [[0.0, 1.0, 2.0, 3.0, 4.0]]),
    ],
)
def test_a_rectangle_of_an_image_stays_one(positions: list[int], expected: list[object]) -> None:
    x: Tensor = torch.arange(8.0).view(1, 1, 2, 4)
    assert UnknownFeatures((1, 2, 4), torch.tensor(positions))(x).tolist() == expected


def test_what_nobody_else_holds_is_scored_too() -> None:
    where = places((3,), ["a", "b"], linked().vertical({"a": [0], "b": range(1, 12)}).features)
    assert where["a"].tolist() == [0]
    part = select_unknown((12,), where, {"a": torch.zeros(1, 1)})
    assert part is not None
    assert part.positions.tolist() == list(range(1, 12))
    assert select_unknown((12,), where, {}) is None
