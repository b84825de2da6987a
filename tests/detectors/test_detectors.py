"""SplitGuard and SplitOut: alarm at a hijacker, none at an honest server, and what an attacker that adapts gets."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from math import exp, pi
from pathlib import Path
from typing import Any

import pytest
import torch

from splitfed.attacks.training_time.fsha import Fsha
from splitfed.core.errors import InvalidInput
from splitfed.core.optimizers import Optim
from splitfed.core.random import generator
from splitfed.detectors import Detector, SplitGuard, SplitOut
from splitfed.detectors.splitguard import draw_wrong_labels, score
from splitfed.training.run import Run
from splitfed.training.settings import Adversaries, Logging
from tests.attacks.training_time_examples import go, ramps
from tests.examples import assert_same
from tests.thinning import thin

DETECTORS: dict[str, Detector] = {
    "splitguard": SplitGuard(start=80, rate=0.2, window=5),
    "splitout": SplitOut(share=1.0, epochs=2),
}
HIJACKER = Fsha.with_budget("quick", width=32)


@cache
def watched(name: str, plan: Fsha | None, seed: int = 0, shape: str = "vanilla") -> dict[str, Any]:
    run = go(plan, shape, rounds=16, seed=seed, adversaries=Adversaries(detectors={"client": DETECTORS[name]}))
    found: dict[str, Any] = run.history[-1]["detectors"]["client0"]
    return found


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *(("splitguard", shape) for shape in ("vanilla", "u_shaped")),
        ("splitout", "vanilla"),
        pytest.param("splitout", "u_shaped", marks=pytest.mark.exhaustive),
    ],
)
def test_a_hijacker_is_noticed(name: str, shape: str) -> None:
    assert watched(name, HIJACKER, 0, shape)["alarm"]


@pytest.mark.parametrize("seed", thin(range(6), 3))
@pytest.mark.parametrize("name", DETECTORS)
def test_an_honest_server_is_left_alone(name: str, seed: int) -> None:
    """False alarms over six seeds: none."""
    assert watched(name, None, seed)["alarm"] is False


def test_the_scores_stand_far_apart() -> None:
    """Wrong labels that make no difference score about sigmoid(0)^2 = 1/4, and an honest server nearly one."""
    assert watched("splitguard", HIJACKER, 0, "vanilla")["lowest"] < 0.6
    assert watched("splitguard", None, 0)["lowest"] > 0.9


@pytest.mark.exhaustive
def test_an_attacker_that_is_honest_where_it_is_tested_is_noticed_later() -> None:
    """The guard's limit: ten honest rounds, then an honest gradient for every batch whose labels look wrong."""
    at = []
    for disguise in (None, 2.0):
        plan = Fsha.with_budget("quick", width=32, disguise=disguise, start=80)
        run = go(plan, rounds=20, rate=3e-3, adversaries=Adversaries(detectors={"client": DETECTORS["splitguard"]}))
        at.append(run.history[-1]["detectors"]["client0"]["alarmed_at"])
        assert run.history[-1]["detectors"]["client0"]["fakes"] >= 5
    assert 80 < at[0] < at[1]


def test_the_score_by_hand() -> None:
    """F opposite to R and twice as long, R1 and R2 alike: theta = pi, S = pi, sigmoid(5 pi)^2."""
    x = torch.tensor([1.0, 0.0], dtype=torch.float64)
    means, norms = {"fake": -2 * x, "one": x, "two": x}, {"fake": 2.0, "one": 1.0, "two": 1.0}
    assert score(means, norms) == pytest.approx((1 / (1 + exp(-5 * pi))) ** 2)
    # F is like R; R1 and R2 are at a right angle and differ in length by one: S = -pi / 2.
    y = torch.tensor([0.0, 1.0], dtype=torch.float64)
    means, norms = {"fake": x + y, "one": x, "two": y}, {"fake": 1.5, "one": 1.0, "two": 2.0}
    assert score(means, norms) == pytest.approx((1 / (1 + exp(5 * pi / 2))) ** 2)
    assert score(means, dict.fromkeys(norms, 1.0)) == 0.25


def test_wrong_labels_are_all_wrong_and_all_other_classes_occur() -> None:
    y = torch.arange(3).repeat(100)
    found = draw_wrong_labels(y, 3, generator(0))
    assert bool((found != y).all())
    assert {(int(a), int(b)) for a, b in zip(y, found, strict=True)} == {(a, b) for a in range(3) for b in range(3)} - {
        (k, k) for k in range(3)
    }
    assert torch.equal(draw_wrong_labels(torch.tensor([0.0, 1.0]), 2, generator(0)), torch.tensor([1.0, 0.0]))


def weights(run: Run) -> dict[str, Any]:
    return {name: party.state.state_dict()["segments"] for name, party in run.engine.parties.items()}


def test_the_client_learns_nothing_from_a_fake_batch_and_the_server_does() -> None:
    """All batches but a first one are fake: the client stays where one step took it, the server goes on."""
    almost = SplitGuard(start=1, rate=0.999999)
    changes: dict[str, Any] = {"optimizer": Optim("SGD", {"lr": 0.1}), "data": ramps(1, 64)}
    one = weights(go(None, batch_size=64, adversaries=Adversaries(detectors={"client0": almost}), rounds=1, **changes))
    more = weights(go(None, batch_size=64, adversaries=Adversaries(detectors={"client0": almost}), rounds=3, **changes))
    assert_same(more["client0"], one["client0"])
    assert any(not torch.equal(t, one["server"]["top"][n]) for n, t in more["server"]["top"].items())


def test_splitout_leaves_the_training_as_it_is() -> None:
    one, two = (go(None, adversaries=Adversaries(detectors=d)) for d in ({}, {"client": DETECTORS["splitout"]}))
    assert_same(weights(one), weights(two))


class Stop(Exception):
    """Stands for a crash."""


@pytest.mark.parametrize("name", DETECTORS)
def test_a_resumed_run_ends_in_the_same_bits(name: str, tmp_path: Path) -> None:
    def progress(done: int, rounds: int, metrics: Mapping[str, Any]) -> None:
        if done == 5:
            raise Stop

    changes: dict[str, Any] = {
        "rounds": 8,
        "data": ramps(2, 64),
        "adversaries": Adversaries(detectors={"client": DETECTORS[name]}),
    }
    whole = go(None, **changes)
    with pytest.raises(Stop):
        go(None, logging=Logging(folder=tmp_path / "run", progress=progress), **changes)
    again = go(None, logging=Logging(folder=tmp_path / "run", resume=True), **changes)
    assert_same(weights(again), weights(whole))
    assert set(again.history[-1]["detectors"]) == {"client0", "client1"}
    assert [h["detectors"] for h in again.history] == [h["detectors"] for h in whole.history]
    with pytest.raises(InvalidInput, match="holds another run: its detectors"):
        go(
            None,
            logging=Logging(folder=tmp_path / "run", resume=True),
            **{**changes, "adversaries": Adversaries(detectors={})},
        )


REFUSED: dict[str, tuple[Any, str]] = {
    "party": (
        lambda: go(None, adversaries=Adversaries(detectors={"cleint": SplitGuard()})),
        "unknown party for a detector 'cleint'",
    ),
    "server": (
        lambda: go(None, adversaries=Adversaries(detectors={"server": SplitGuard()})),
        "SplitGuard works at a client",
    ),
    "rate": (lambda: SplitGuard(rate=1.0), "splitguard rate=1.0"),
    "window": (lambda: SplitGuard(window=0), "splitguard window=0"),
    "share": (lambda: SplitOut(share=0.0), "splitout share=0.0"),
    "few": (
        lambda: go(None, adversaries=Adversaries(detectors={"client": SplitOut(share=0.01, epochs=1, servers=1)})),
        "splitout needs three honest gradients or more; share=0.01 and epochs=1",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        REFUSED[case][0]()
    assert REFUSED[case][1] in str(caught.value)
    assert "\n" not in str(caught.value)
