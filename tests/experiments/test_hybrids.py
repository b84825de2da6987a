"""The table of federated layers on split replicas: arms that differ in the method alone, tiny cells, what is shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from experiments.papers import hybrids
from experiments.papers.hybrid_leaks import answered_by
from experiments.papers.hybrid_runs import ALONE, HYBRIDS, SETTINGS, SHARING, Arm, Setting, federation, plain_of, train
from experiments.papers.hybrids import ARMS, SEEDS, change, measure, paired, show, verdict

TINY = {
    "few": Setting(200, 2, 5.0, 0.5, 30, 20, 1, 16),
    "domains": Setting(200, 2, 0.5, 0.5, 30, 20, 1, 16, public=0.1, domains=True),
}


def named(name: str) -> Arm:
    return next(arm for arm in ARMS if arm.name == name)


def test_a_plain_split_is_its_hybrid_without_the_method() -> None:
    for arm in (*HYBRIDS, SHARING):
        plain = plain_of(arm)
        assert plain.method is None
        assert plain == arm._replace(name=plain.name, method=None)
    assert {arm.setting for arm in HYBRIDS} == set(ALONE) == set(SETTINGS)


def test_rows_are_those_that_the_budget_tells() -> None:
    few, turned = (federation(setting, 0) for setting in SETTINGS.values())
    assert (len(few.clients), len(few.victims), len(few.auxiliary)) == (10, 200, 500)
    assert sum(len(client.train) for client in few.clients) == pytest.approx(400, abs=10)
    assert sum(len(client.train) for client in turned.clients) == pytest.approx(600, abs=10)
    # Every image is in one domain only: upright, no two rows are the same one.
    domains = [client.train.domains for client in turned.clients]
    assert [d.unique().tolist() for d in domains if d is not None] == [[0], [1], [2], [3]]
    assert sum(len(c.train) + len(c.test) for c in turned.clients) + 300 == SETTINGS["domains"].images


EXPECTED = {
    "FML vanilla": {"private union", "private own", "agreement", "agreement blind"},
    "FedProto U": {"shares", "shares even", "prototype ssim", "prototype blind", "prototype members"},
    "MAFML vanilla": {"shares", "shares by public labels"},
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", EXPECTED)
def test_a_tiny_cell(name: str, tmp_path: Path) -> None:
    arm = named(name)
    found = measure(arm, 0, tmp_path, TINY[arm.setting])
    assert EXPECTED[name] | {"union", "own", "MiB", "membership", "cut ssim", "cut blind"} <= set(found)
    figures = {figure for figure, _, _ in hybrids.ATTACKS[type(arm.method).__name__]}
    assert figures <= set(found)
    # FedProto's clients send how many rows of each class they hold; MAFML's public rows are taken in proportion.
    if name == "FedProto U":
        assert found["shares"] == pytest.approx(0.0, abs=1e-9)
    if name == "MAFML vanilla":
        assert found["shares by public labels"] < found["shares even"]


def test_an_answer_is_scored_as_the_run_scores_it(tmp_path: Path) -> None:
    run = train(named("FML vanilla"), 1, TINY["few"])
    across = run.history[-1]["test"]["across"]
    for where, score in answered_by(run, run.engine.topology.heads[0].value).items():
        assert score == pytest.approx(sum(across[where]) / 2)
    private = answered_by(run, run.engine.topology.heads[1].value)["own"]
    assert private == pytest.approx(sum(run.history[-1]["test"]["method"]["private"]) / 2)


def test_gains_are_paired_by_seed() -> None:
    one, other = {0: {"a": 3.0}, 1: {"a": 5.0}, 3: {"a": 9.0}}, {0: {"b": 1.0}, 1: {"b": 3.5}, 2: {"b": 0.0}}
    assert paired(one, "a", other, "b") == [2.0, 1.5]
    assert (verdict([1.0, 1.2, 0.9]), verdict([-1.0, -1.2]), verdict([-1.0, 1.2]), verdict([1.0])) == (
        "Better than",
        "Not settled against",
        "Not settled against",
        "One seed, against",
    )
    assert verdict([-1.0, -1.2, -0.9]) == "Worse than"
    # Two values 1 and 2: 1.5, and 12.706 times the error of .5.
    assert change([1.0, 2.0]) == "+1.5 (-4.9 to 7.9)"
    assert change([]) == "not measured"


def entry(union: float, mebibytes: float) -> dict[str, Any]:
    figures = {figure: 0.5 for arm in hybrids.ATTACKS.values() for figure, _, _ in arm}
    blind = {b: 0.25 for arm in hybrids.ATTACKS.values() for _, _, b in arm if isinstance(b, str)}
    private = {"private union": union - 20, "private own": union - 10}
    return {"union": union, "own": union + 5, "MiB": mebibytes, "membership": 0.6, **private, **figures, **blind}


def test_what_is_shown_of_some_cells() -> None:
    scores = {"alone": 50.0, "plain": 70.0}
    done = {}
    for seed in SEEDS[:3]:
        for arm in ARMS:
            score = scores.get(arm.name.split()[0], 60.0 if arm.name == "FedAKT vanilla" else 80.0)
            wobble = (0.1, -0.1, 0.2)[seed] if arm.method is not None else 0.0
            done[hybrids._key(arm, seed)] = entry(score + wobble, 5.0 if arm.method else 2.0)
    text = show(done)
    assert "| FedProto U | 50.0 (50.0 to 50.0) | 70.0 (70.0 to 70.0) | 80.1 (" in text
    assert "class shares: distance 0.50 (0.50 to 0.50), knowing nothing 0.25" in text
    assert "Worse than the plain split: FML vanilla, private; FML U, private; FedAKT vanilla" in text
    assert "Better than alone: FML vanilla; FML vanilla, private;" in text
    assert "members by prototypes: AUC 0.50 (0.50 to 0.50), knowing nothing 0.50 | 3.00 |" in text
    assert "The same split, others' public rows trained on as one's own" in text
    assert show({}) == hybrids.REMARKS
    some = {key: value for key, value in done.items() if "plain" not in key}
    assert "not measured" in show(some)
