"""`Evaluation(keep="best")`: which round a run answers for, what reads its model, and what a resumed run has of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import splitfed as sf
from splitfed.core.errors import InvalidInput
from splitfed.core.optimizers import Optim
from splitfed.core.tasks import classification
from splitfed.federated import Ditto
from splitfed.models.mlp import mlp
from splitfed.study.report.remarks import length_remarks
from splitfed.study.run import session
from splitfed.study.run.checked_study import prepare_study
from splitfed.topologies import vanilla
from splitfed.training.run import Run
from tests.examples import assert_same, toy_data
from tests.study.examples import small, write

ROUNDS = 6


def go(keep: str = "best", rounds: int = ROUNDS, every: int = 1, **changes: Any) -> Run:
    """Train with so high a rate that the score of validation rows goes up and down."""
    data = changes.pop("data", None) or toy_data(160).clients(2, auxiliary=8, victims=4, validation=0.3)
    given: dict[str, Any] = {"optimizer": Optim("SGD", {"lr": 1.0, "momentum": 0.9}), "batch_size": 8, **changes}
    topology = vanilla(mlp((1, 8, 8), 10, hidden=[8], seed=0), "relu1")
    return sf.train(topology, data, rounds=rounds, evaluation=sf.Evaluation(every, keep=keep), **given)


def scores(run: Run) -> list[float]:
    return [entry["validation"]["union"] for entry in run.history if "validation" in entry]


METHODS: list[dict[str, Any]] = [{}, {"schedule": "splitfed_v3", "method": Ditto()}]


@pytest.mark.parametrize("changes", METHODS, ids=["sequential", "ditto"])
def test_a_run_answers_as_one_that_had_ended_with_the_best_round(changes: dict[str, Any]) -> None:
    run = go(**changes)
    best = scores(run).index(max(scores(run)))
    assert 0 < best < ROUNDS - 1, "neither the first round nor the last, or the test shows nothing"
    assert run.best.entry is run.history[best]
    ended = go("last", best + 1, **changes)
    assert_same(run.state_dict(client=0), ended.state_dict(client=0))
    assert_same(run.method_state, ended.method_state)
    x = run.data.clients[0].test.x
    assert torch.equal(run.predict(x), ended.predict(x))
    assert run.utility == run.history[best]["test"]["union"] == run.evaluate("test")["union"] == ended.utility
    assert run.history[best]["test"]["interval"] == ended.history[-1]["test"]["interval"]
    assert f"of round {best + 1}, chosen by the best accuracy of validation rows" in str(run.summary())
    views = [one.observe("server").tensors() for one in (run, ended)]
    assert all(torch.equal(views[0][name], views[1][name]) for name in views[1])


def test_the_rounds_themselves_do_not_change() -> None:
    run, last = go(), go("last")
    assert run.bytes == last.bytes
    assert [entry["loss"] for entry in run.history] == [entry["loss"] for entry in last.history]
    with run.best.newest():
        assert_same(run.state_dict(client=0), last.state_dict(client=0))


@pytest.mark.parametrize("changes", METHODS, ids=["sequential", "ditto"])
def test_it_is_resumed_and_continued_to_the_bit(changes: dict[str, Any], tmp_path: Path) -> None:
    def stop(done: int, rounds: int, metrics: Any) -> None:
        if done == 4:
            raise KeyboardInterrupt

    whole = go(**changes)
    assert whole.best.entry["round"] < 3, "chosen before the stop, by a checkpoint that is not the newest"
    with pytest.raises(KeyboardInterrupt):
        go(logging=sf.Logging(tmp_path / "run", progress=stop), **changes)
    again = go(logging=sf.Logging(tmp_path / "run", resume=True), **changes)
    longer = go(rounds=4, **changes)
    longer.continue_training(2)
    opened = go(logging=sf.Logging(tmp_path / "run", resume=True), **changes)
    for other in (again, longer, opened):
        assert scores(other) == scores(whole)
        assert_same(other.state_dict(client=0), whole.state_dict(client=0))
        assert_same(other.method_state, whole.method_state)
        assert_same(other.state()["party-server"]["segments"], whole.state()["party-server"]["segments"])
        assert_same(other.state()["best"]["parties"]["server"], whole.state()["best"]["parties"]["server"])
    with pytest.raises(InvalidInput, match="holds another run: its keep is 'best, every=1', not None"):
        go("last", logging=sf.Logging(tmp_path / "run", resume=True), **changes)


def test_what_can_choose_nothing_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"and no client has one: keep some \(validation=0.1\)"):
        go(data=toy_data(80).clients(2, auxiliary=8, victims=4, validation=0.0))
    with pytest.raises(InvalidInput, match=r"of 6 rounds the last alone is scored \(every=6\)"):
        go(every=6)
    with pytest.raises(InvalidInput, match="which no figure of DpSgd counts"):
        go(defenses=sf.defenses.DpSgd(noise_multiplier=1.0))
    with pytest.raises(InvalidInput, match=r"unknown evaluation keep 'first' \(allowed: best, last\)"):
        sf.Evaluation(keep="first")
    run = go(every=4)
    assert [entry["round"] for entry in run.history if "test" in entry] == [3, 5]
    with pytest.raises(InvalidInput, match=r"round 6 was scored because it was the last \(every=4\)"):
        run.continue_training(2)


def test_a_metric_that_is_no_number_cannot_choose() -> None:
    undefined = classification(10).with_metric(lambda outputs, y: float("nan"), "nothing")
    data = replace(toy_data(80), task=undefined).clients(2, auxiliary=8, victims=4, validation=0.2)
    with pytest.raises(InvalidInput, match="chooses by the nothing of validation rows, which is nan after round 0"):
        go(data=data)


def test_a_study_keeps_and_names_the_round(tmp_path: Path) -> None:
    training = {"rounds": 4, "keep": "best", "optimizer": {"lr": 2.0}}
    study = small(training=training, defense=[{"name": "none"}], attack=None)
    session.run_study(prepare_study(write(tmp_path, study)), tmp_path / "out")
    found = sf.load_study(tmp_path / "out")
    (result,) = found.results
    best = max(result.history, key=lambda entry: entry["validation"]["union"])
    assert result.kept_round == best["round"] + 1 < 4, "not the last, or the test shows nothing"
    assert result.utility.test == best["test"]["union"]
    assert found.frame()["kept_round"][0] == result.kept_round
    said = f"the model is that of round {result.kept_round}, chosen by the best accuracy of validation rows"
    assert said in length_remarks(result)
    assert found.load(result.id).utility == result.utility.test
