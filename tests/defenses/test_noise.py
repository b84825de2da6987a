"""Noise on releases: the stated distribution, fresh wherever it is drawn, in every phase."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput
from splitfed.core.optimizers import Optim
from splitfed.defenses import Noise
from splitfed.engines.local import LocalEngine
from splitfed.topologies import u_shaped, vanilla
from tests.examples import InPlaceAfterCut, SmallUNet, assert_same, engine_of, images

FROZEN = Optim("SGD", {"lr": 0.0})
ROWS = torch.arange(64)


def engine(*defenses: Noise, seed: int = 0, replicas: int = 1) -> LocalEngine:
    """Clients whose weights never change, so that releases of the same rows differ by the noise alone."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = InPlaceAfterCut()
    x, y = images(64)
    made = engine_of(
        vanilla(model, "conv"),
        x.repeat(replicas, 1, 1, 1),
        y.repeat(replicas),
        replicas,
        FROZEN,
        defenses=defenses,
        seed=seed,
    )
    assert made.rows(0, "train") == 64
    return made


def released(made: LocalEngine, phase: str = "train", replica: int = 0, number: int = 0) -> Tensor:
    """All that arrives at the server when `replica` sends its 64 rows: (64, 6, 8, 8)."""
    with made.record_party("server") as recorder:
        if phase == "train":
            made.train(replica, number, [ROWS])
        else:
            made.predict(replica, "train", phase, number)
    return recorder.view().select(kind="activation").tensors()["conv"]


def noise_of(defense: Noise) -> Tensor:
    return (released(engine(defense)) - released(engine())).flatten().double()


@pytest.mark.parametrize(("kind", "deviation", "kurtosis"), [("gaussian", 1.0, 3.0), ("laplace", math.sqrt(2), 6.0)])
def test_the_stated_distribution(kind: str, deviation: float, kurtosis: float) -> None:
    """24576 draws at scale .5: within 4 standard errors of mean and deviation, and the right tails."""
    from scipy import stats

    drawn = noise_of(Noise(scale=0.5, kind=kind)) / 0.5
    n = len(drawn)
    assert n == 64 * 6 * 8 * 8
    assert abs(float(drawn.mean())) < 4 * deviation / math.sqrt(n)
    assert float(drawn.square().mean()) == pytest.approx(
        deviation**2, abs=4 * deviation**2 * math.sqrt((kurtosis - 1) / n)
    )
    beyond = 2 * stats.norm.sf(3) if kind == "gaussian" else math.exp(-3)
    assert float((drawn.abs() > 3).double().mean()) == pytest.approx(beyond, abs=4 * math.sqrt(beyond / n))
    assert stats.kstest(drawn.numpy(), "norm" if kind == "gaussian" else "laplace").pvalue > 0.001


def test_relative_noise_has_a_share_of_the_releases_deviation() -> None:
    z = released(engine()).flatten().double()
    drawn = noise_of(Noise(scale=0.5, relative=True))
    share = float(drawn.std() / z.std(correction=0))
    assert share == pytest.approx(0.5, abs=0.5 * 4 / math.sqrt(2 * len(drawn)))


def test_noise_has_no_pattern_over_rows() -> None:
    """64 rows of 384 independent draws: correlations of two rows stay within 5 / sqrt(384)."""
    drawn = noise_of(Noise(scale=1.0)).view(64, -1)
    between = torch.corrcoef(drawn) - torch.eye(64, dtype=torch.float64)
    assert float(between.abs().max()) < 5 / math.sqrt(384)


def test_fresh_for_every_phase_lane_epoch_step_defense_and_seed() -> None:
    made, x = engine(Noise(scale=1.0), replicas=2), released(engine())
    drawn = {
        "train": released(made),
        "next epoch": released(made, number=1),
        "other replica": released(made, replica=1),
        "evaluate": released(made, "evaluate"),
        "next evaluation": released(made, "evaluate", number=1),
        "predict": released(made, "predict"),
        "query": released(made, "query"),
        "other seed": released(engine(Noise(scale=1.0), seed=1)),
        "second in the list": released(engine(Noise(scale=0.0), Noise(scale=1.0))),
    }
    with made.record_party("server") as recorder:
        made.train(0, 0, [ROWS, ROWS])
    drawn["next step"] = recorder.view().select(kind="activation").messages[1].tensors["conv"]
    rows = torch.stack([(z - x).flatten() for z in drawn.values()])
    alike = torch.corrcoef(rows) - torch.eye(len(rows))
    assert float(rows.std(1).min()) > 0.9, "there is noise in every one of them"
    assert float(alike.abs().max()) < 5 / math.sqrt(rows.shape[1]), list(drawn)


def test_the_same_step_draws_the_same() -> None:
    made = engine(Noise())
    assert torch.equal(released(made), released(made))
    assert torch.equal(released(made), released(engine(Noise())))


def test_two_parts_scored_in_one_round_get_noise_of_their_own() -> None:
    """Otherwise the difference of two releases would be free of noise."""
    made = engine(Noise(scale=1.0))
    x, y = images(64)
    made.own(0, "test", {"x": x}, {"fc2": y})
    seen = []
    for part in ("train", "test"):
        with made.record_party("server") as recorder:
            made.predict(0, part, "evaluate", 3)
        seen.append(recorder.view().tensors()["conv"])
    assert not torch.equal(seen[0], seen[1])


def test_every_value_and_edge_has_noise_of_its_own() -> None:
    defense = Noise(scale=1.0, on=("bottom->middle", "middle->head"))
    made, plain = (
        engine_of(u_shaped(SmallUNet(), ("pool1", "up2")), *images(8), optim=FROZEN, defenses=d)
        for d in ([defense], [])
    )
    for party in ("client0", "server"):
        plain.parties[party].state.load_state_dict(made.parties[party].state.state_dict())
    found = []
    for place in (made, plain):
        with place.record_party("client0") as recorder:
            place.predict(0, "train", "evaluate")
        found.append(recorder.view().tensors())
    first, second = ((found[0][n] - found[1][n]).flatten() for n in ("up2", "down2_2"))
    assert float(second.std()) > 0.5
    assert not torch.allclose(first, second)


def test_zero_noise_and_removed_noise_change_nothing() -> None:
    assert torch.equal(released(engine(Noise(scale=0.0))), released(engine()))
    assert not torch.equal(released(engine(Noise(scale=0.01))), released(engine()))
    states = []
    for defenses in ([], [Noise(scale=0.0)]):
        torch.manual_seed(0)
        made = engine_of(vanilla(InPlaceAfterCut(), "conv"), *images(32), defenses=defenses)
        made.train(0, 0, [torch.arange(16), torch.arange(16, 32)])
        states.append(made.state()["parties"])
    assert_same(states[0], states[1])


def test_by_default_it_guards_what_leaves_the_data_owner() -> None:
    topology = u_shaped(SmallUNet(), ("pool1", "up2"))
    assert Noise().edges(topology) == ("bottom->middle",)
    assert Noise(on=("middle->head",)).edges(topology) == ("middle->head",)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "negative": ({"scale": -0.5}, "noise scale=-0.5 is not allowed; expected a number in [0, 1e+38]"),
    "not finite": ({"scale": math.nan}, "noise scale=nan is not allowed"),
    "kind": ({"kind": "gausian"}, "unknown noise kind 'gausian'; did you mean 'gaussian'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    arguments, text = REFUSED[case]
    with pytest.raises(InvalidInput, match=re.escape(text)):
        Noise(**arguments)


def test_edges_that_are_not_there_or_do_not_cross_are_refused() -> None:
    topology = u_shaped(SmallUNet(), ("pool1", "up2"))
    with pytest.raises(InvalidInput, match="unknown edge 'bottom->midle'; did you mean 'bottom->middle'"):
        Noise(on=("bottom->midle",)).edges(topology)
    with pytest.raises(InvalidInput, match="edge 'bottom->head' stays within one party: nothing crosses there"):
        Noise(on=("bottom->head",)).edges(topology)
