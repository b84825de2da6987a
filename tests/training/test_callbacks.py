"""Callbacks: when they are called, what they may decide, what of them survives a resume, and what that costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import splitfed as sf
from splitfed.core.errors import InvalidInput
from splitfed.core.topology import Topology
from splitfed.models.mlp import mlp
from splitfed.planning.private import planned_ledger
from splitfed.topologies import vanilla
from splitfed.training.run import Run
from tests.examples import assert_same, toy_data


def model() -> Topology:
    return vanilla(mlp((1, 8, 8), 10, hidden=[8], seed=0), "relu1")


def go(*callbacks: sf.Callback, rounds: int = 6, folder: Path | None = None, resume: bool = False, **more: Any) -> Run:
    data = more.pop("data", toy_data(80).clients(2, auxiliary=8, victims=4, validation=0.2))
    logging = sf.Logging(folder, resume, callbacks=callbacks)
    return sf.train(model(), data, rounds=rounds, batch_size=20, logging=logging, **more)


class Log(sf.Callback):
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_start(self, run: Run) -> None:
        self.seen.append(("start", len(run.history)))

    def on_round_end(self, run: Run, metrics: Mapping[str, Any]) -> None:
        assert metrics == run.history[-1]
        self.seen.append(("round", metrics["round"]))

    def on_evaluate(self, run: Run, part: str, scores: Mapping[str, Any]) -> None:
        assert set(scores) >= {"metric", "union", "clients"}
        self.seen.append((part, len(run.history)))

    def on_attack_end(self, run: Run, result: sf.AttackResult) -> None:
        self.seen.append((result.attack, result.adversary))

    def on_checkpoint(self, run: Run, folder: Path) -> None:
        assert (folder / "manifest.json").is_file()
        self.seen.append(("checkpoint", folder.name))

    def on_end(self, run: Run) -> None:
        self.seen.append(("end", len(run.history)))


class Stop(sf.Callback):
    """Ends training after a round that it was given; counts the rounds itself, as its state."""

    decides_by = "nothing but the number of rounds"  # type: ignore[assignment]

    def __init__(self, after: int) -> None:
        self.after, self.rounds = after, 0

    def __repr__(self) -> str:
        return f"Stop({self.after})"

    def on_round_end(self, run: Run, metrics: Mapping[str, Any]) -> str | None:
        self.rounds += 1
        return "counted\nenough" if self.rounds == self.after else None

    def state(self) -> dict[str, Any]:
        return {"rounds": self.rounds}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.rounds = state["rounds"]


class Crash(sf.Callback):
    """Stands for a crash in the middle of a round's end, before its checkpoint."""

    def __init__(self, round: int) -> None:
        self.round = round

    def on_round_end(self, run: Run, metrics: Mapping[str, Any]) -> None:
        if metrics["round"] == self.round:
            raise KeyboardInterrupt


def test_hooks_are_called_in_their_order(tmp_path: Path) -> None:
    log = Log()
    run = go(log, rounds=2, folder=tmp_path / "run")
    run.attack("rmle", budget="quick")
    per_round = [[("validation", n), ("test", n), ("round", n), ("checkpoint", f"{n:06d}")] for n in range(2)]
    assert log.seen == [("start", 0), *per_round[0], *per_round[1], ("end", 2), ("rmle", "server")]


def test_on_end_is_called_where_training_breaks_off() -> None:
    log = Log()
    with pytest.raises(KeyboardInterrupt):
        go(log, Crash(1))
    assert log.seen[-1] == ("end", 2)


def test_callbacks_that_only_look_change_no_bit_of_the_run() -> None:
    one, other = go(rounds=2), go(Log(), sf.EarlyStopping(patience=9), rounds=2)
    assert_same(one.state(), other.state())


def test_what_is_no_callback_and_no_hook_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"callbacks=<function .* is not allowed; expected a list of callbacks"):
        sf.Logging(callbacks=[model])  # type: ignore[list-item]
    with pytest.raises(InvalidInput, match="callbacks=3 is not allowed"):
        sf.Logging(callbacks=3)  # type: ignore[arg-type]
    with pytest.raises(
        InvalidInput, match="unknown hook of callback Wrong 'on_rounds_end'; did you mean 'on_round_end'"
    ):
        type("Wrong", (sf.Callback,), {"on_rounds_end": lambda self, run, metrics: None})
    silent = type("Silent", (sf.Callback,), {"on_round_end": lambda self, run, metrics: "so"})
    with pytest.raises(InvalidInput, match=r"Silent ends training \(so\) and does not say by what: define decides_by"):
        go(silent())


def history(scores: list[float | None]) -> list[dict[str, Any]]:
    return [
        {"round": i} if s is None else {"round": i, "validation": {"metric": "accuracy", "union": s}}
        for i, s in enumerate(scores)
    ]


@pytest.mark.parametrize(
    ("scores", "least", "ends"),
    [
        ([0.5, 0.5, 0.5], 0.0, True),  # two rounds without anything better
        ([0.5, 0.5, 0.51], 0.0, False),
        ([0.5, 0.55, 0.59], 0.1, True),  # .09 above the best is not more than .1
        ([0.5, 0.55, 0.61], 0.1, False),
        ([0.5, None, 0.5], 0.0, False),  # a round that was not scored does not count
        ([0.5, float("nan"), 0.4], 0.0, True),
        ([0.9, 0.8, None], 0.0, False),  # nothing is decided by a round that was not scored
    ],
)
def test_early_stopping_by_hand(scores: list[float | None], least: float, ends: bool) -> None:
    run = go(rounds=1)
    run.history[:] = history(scores)
    said = sf.EarlyStopping(patience=2, least=least).on_round_end(run, run.history[-1])
    assert (said is not None) == ends
    if said:
        assert said.startswith("validation accuracy no better than 0.5 for 2 scored rounds")


def test_early_stopping_follows_the_direction_of_the_metric() -> None:
    """An error that falls, .9, .5 and .4, gets better all the time."""
    rows = toy_data(80)
    error = replace(rows.task, metric=lambda output, y: 0.5, metric_name="error", higher_is_better=False)
    run = go(rounds=1, data=replace(rows, task=error).clients(2, auxiliary=8, victims=4))
    stopping = sf.EarlyStopping(patience=2)
    for scores, ends in (([0.9, 0.5, 0.4], False), ([0.4, 0.5, 0.9], True)):
        run.history[:] = history(scores)
        assert (stopping.on_round_end(run, run.history[-1]) is not None) == ends


def test_early_stopping_ends_the_run_and_a_resumed_one_ends_there_too(tmp_path: Path) -> None:
    """The rate is so small that no row changes its class."""
    still = {"optimizer": sf.Optim("SGD", {"lr": 1e-12})}
    stopping = sf.EarlyStopping(patience=3)
    whole = go(stopping, folder=tmp_path / "whole", **still)
    assert len(whole.history) == 4
    assert whole.stopped == whole.history[-1]["stopped"]
    assert "ended early" in str(whole.summary())
    with pytest.raises(KeyboardInterrupt):
        go(stopping, Crash(2), folder=tmp_path / "run", **still)
    resumed = go(stopping, folder=tmp_path / "run", resume=True, **still)
    assert len(resumed.history) == 4
    assert_same(resumed.state(), whole.state())
    assert len(go(stopping, folder=tmp_path / "run", resume=True, **still).history) == 4, "it has ended"
    with pytest.raises(InvalidInput, match="the run has ended early"):
        resumed.continue_training(1)
    with pytest.raises(InvalidInput, match="holds another run: its callbacks"):
        go(folder=tmp_path / "run", resume=True, **still)
    with pytest.raises(InvalidInput, match="holds another run: its callbacks"):
        go(sf.EarlyStopping(patience=4), folder=tmp_path / "run", resume=True, **still)


def test_the_state_of_a_callback_survives_a_resume(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        go(Stop(4), Crash(2), folder=tmp_path / "run")
    run = go(Log(), Stop(4), folder=tmp_path / "run", resume=True)
    assert (len(run.history), run.stopped) == (4, "counted enough")


def test_the_round_in_which_training_ends_is_scored_as_a_last_one() -> None:
    run = go(Stop(2), evaluation=sf.Evaluation(every=5))
    assert [("test" in entry) for entry in run.history] == [False, True]
    assert run.history[-1]["test"]["interval"]["kind"] == "Wilson over rows"
    assert 0.0 <= run.accuracy <= 1.0


def test_early_stopping_needs_validation_rows(tmp_path: Path) -> None:
    data = toy_data(80).clients(2, auxiliary=8, victims=4, validation=0)
    with pytest.raises(InvalidInput, match=r"EarlyStopping needs validation rows, and no client has one: keep some"):
        go(sf.EarlyStopping(), data=data, folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    for wrong in ({"patience": 0}, {"least": -1.0}, {"public": "yes"}):
        with pytest.raises(InvalidInput, match=f"{next(iter(wrong))}="):
            sf.EarlyStopping(**wrong)  # type: ignore[arg-type]


def test_beside_a_promise_only_public_rows_may_end_training(tmp_path: Path) -> None:
    """And the ledger states all planned rounds: how many were trained is itself told by what was released."""
    private = {"defenses": sf.defenses.LabelDp(epsilon=1.0), "optimizer": sf.Optim("SGD", {"lr": 1e-12})}
    noisy = {"defenses": sf.defenses.DpSgd(noise_multiplier=1.0), "optimizer": sf.Optim("SGD", {"lr": 1e-12})}
    for promise in (private, noisy):
        with pytest.raises(
            InvalidInput, match="EarlyStopping ends training by the scores of validation rows, which no"
        ):
            go(sf.EarlyStopping(), folder=tmp_path / "run", **promise)
    assert not (tmp_path / "run").exists()
    stopped = go(sf.EarlyStopping(patience=1, public=True), **noisy)
    whole = go(**noisy)
    assert len(stopped.history) == 2 < len(whole.history)
    assert stopped.ledger.totals == whole.ledger.totals
    assert whole.ledger.totals[0].epsilon > go(rounds=2, **noisy).ledger.totals[0].epsilon
    assert "when training ends, by the scores of validation rows, said to be public" in str(stopped.ledger)
    assert "when training ends" not in str(whole.ledger)
    assert stopped.plan is not None
    assert planned_ledger(stopped.plan.prepared, 6).totals == whole.ledger.totals


class Remembers(torch.optim.SGD):
    """Keeps an object of its own class of every step."""

    def step(self, closure: Any = None) -> None:
        """Take a step, and remember it."""
        super().step()
        for weight in self.param_groups[0]["params"]:
            self.state[weight]["last"] = Log()


class Keeps(Log):
    """Has an object for a state."""

    def state(self) -> dict[str, Any]:
        """Return it."""
        return {"seen": object()}


def test_state_that_no_checkpoint_holds_is_refused_before_the_first_round(tmp_path: Path) -> None:
    """Without a folder nothing is kept, and nothing refused."""
    log = Keeps()
    with pytest.raises(InvalidInput, match=r"the state of callbacks\['Keeps 0'\]\['seen'\] is of type object"):
        go(log, rounds=1, folder=tmp_path / "a")
    own = sf.Optim(Remembers, {"lr": 0.1})
    with pytest.raises(
        InvalidInput, match=r"the state of optimizer .*Remembers\['state'\]\[0\]\['last'\] is of type Log"
    ):
        go(rounds=1, folder=tmp_path / "b", optimizer=own)
    assert not (tmp_path / "a" / "metrics.jsonl").exists()
    assert not (tmp_path / "b").exists()
    go(Keeps(), rounds=1, optimizer=own)
