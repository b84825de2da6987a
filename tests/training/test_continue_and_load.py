"""More rounds for a run, and runs opened from their folders: to the bits of those that were planned so."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import splitfed as sf
from splitfed.core import digests
from splitfed.core.errors import InvalidInput
from splitfed.core.topology import Topology
from splitfed.data.dataset import Federation
from splitfed.federated import FedAvg, FedKD
from splitfed.models.mlp import mlp
from splitfed.schedules import Sequential
from splitfed.topologies import local, vanilla
from splitfed.training import arguments
from splitfed.training.run import Run
from tests.examples import assert_refuses, assert_same, toy_data

ADAM = sf.Optim("Adam", {"lr": 1e-2}, "StepLR", {"step_size": 1, "gamma": 0.7})


def model(seed: int = 0) -> Topology:
    return vanilla(mlp((1, 8, 8), 10, hidden=[8], seed=seed), "relu1")


def alone() -> Topology:
    return local(mlp((1, 8, 8), 10, hidden=[8], seed=0), cuts=["relu1"])


ALONE: dict[str, Any] = {"schedule": "independent", "topology": alone, "defenses": []}


def data(rows: int = 80) -> Federation:
    return toy_data(rows).clients(2, auxiliary=16, victims=4)


def go(rounds: int, folder: Path | None = None, resume: bool = False, **more: Any) -> Run:
    given = {"optimizer": ADAM, "batch_size": 20, "defenses": [sf.defenses.Noise(scale=0.1)], **more}
    logging = sf.Logging(folder, resume, callbacks=given.pop("callbacks", ()), record=given.pop("record", None))
    return sf.train(given.pop("topology", model()), data(), rounds=rounds, logging=logging, **given)


def whole_state(run: Run) -> dict[str, Any]:
    state = run.state()
    # Where its lines are kept differs.
    state["run"].pop("recorders")
    return state


class Crash(sf.Callback):
    """Stands for a crash after a round, before its checkpoint."""

    def __init__(self, after: int) -> None:
        self.after = after

    def on_round_end(self, run: Run, metrics: Mapping[str, Any]) -> None:
        if metrics["round"] == self.after:
            raise KeyboardInterrupt


@pytest.mark.parametrize("more", [{}, {"schedule": "splitfed_v1"}, {"method": FedAvg(), **ALONE}])
def test_a_continued_run_is_the_longer_one_to_the_bit(more: dict[str, Any]) -> None:
    more = {key: value() if key == "topology" else value for key, value in more.items()}
    run, longer = go(2, **more), go(5, **more)
    run.continue_training(2)
    run.continue_training(1)
    assert [entry["round"] for entry in run.history] == [0, 1, 2, 3, 4]
    assert_same(whole_state(run), whole_state(longer))
    assert run.bytes == longer.bytes
    assert run.history[-1]["test"] == longer.history[-1]["test"]


def test_a_continued_run_goes_on_in_its_folder_after_a_crash_too(tmp_path: Path) -> None:
    run = go(2, tmp_path / "run", callbacks=[Crash(3)])
    with pytest.raises(KeyboardInterrupt):
        run.continue_training(3)
    assert_refuses(
        lambda: go(2, tmp_path / "run", resume=True),
        "holds another run: its rounds is 5, not 2; give another folder, or train it for more by continue_training",
    )
    loaded = sf.load(tmp_path / "run", model(), data())
    assert len(loaded.history) == 3
    loaded.continue_training(1)
    loaded.continue_training()
    assert len(loaded.history) == 5, "those that were planned"
    assert_same(whole_state(loaded), whole_state(go(5)))
    again = go(5, tmp_path / "run", resume=True)
    assert_same(whole_state(again), whole_state(loaded))
    assert again.history == loaded.history


def test_what_was_worked_out_for_the_length_is_not_continued() -> None:
    rdp = sf.defenses.DpSgd(epsilon=8.0, delta=1e-3, accountant="rdp")
    private = go(2, defenses=rdp, local=sf.LocalUpdate(sampling="poisson"))
    assert_refuses(lambda: private.continue_training(1), "DpSgd was worked out for 2 rounds, and would be another one")
    assert len(private.history) == 2
    fixed = go(2, defenses=sf.defenses.DpSgd(noise_multiplier=1.0), local=sf.LocalUpdate(sampling="poisson"))
    spent = fixed.ledger.totals[0].epsilon
    fixed.continue_training(1)
    assert fixed.ledger.totals[0].epsilon > spent
    kd = go(1, method=FedKD(), **{**ALONE, "topology": alone()})
    assert_refuses(lambda: kd.continue_training(1), "FedKD was worked out for 1 rounds")
    assert_refuses(lambda: go(1).continue_training(0), "rounds=0 is not allowed")


def test_a_run_is_loaded_as_it_was(tmp_path: Path) -> None:
    record = sf.Recording(("server",))
    run = go(3, tmp_path / "run", schedule="splitfed_v1", record=record, evaluation=sf.Evaluation(delta=1e-3, every=2))
    loaded = sf.load(str(tmp_path / "run"), model(), data())
    assert_same(whole_state(loaded), whole_state(run))
    assert loaded.history == run.history
    assert loaded.plan.evaluation.delta == 1e-3
    x = run.data.clients[0].test.x
    assert torch.equal(loaded.predict(x, number=7), run.predict(x, number=7))
    ours, theirs = (one.attack("rmle", budget="quick")[0] for one in (run, loaded))
    assert torch.equal(ours.prediction, theirs.prediction)
    assert len(loaded.engine.view("server").messages) == len(run.engine.view("server").messages) > 0


def test_all_kinds_of_arguments_come_back_from_the_folder(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "schedule": sf.schedules.SplitFedV1(clients_per_round=2, secure=True),
        "optimizer": {"client": ADAM, "server": sf.Optim()},
        "defenses": (
            sf.defenses.DistanceCorrelation(alpha=sf.annealing.Linear(0.1, 0.0, 4)),
            sf.defenses.Noise(clients=(1,)),
        ),
        "seed": 3,
        "local": sf.LocalUpdate(local_epochs=2, restart_optimizers=True),
        "adversaries": sf.Adversaries(poisoning=sf.poisoning.LabelFlip(clients=(1,))),
        "evaluation": sf.Evaluation(speeds=sf.Speeds(named={"server": sf.Machine(compute=1e9)})),
    }
    run = go(2, tmp_path / "run", callbacks=[sf.EarlyStopping(patience=4)], **given)
    kept = arguments.read_arguments(tmp_path / "run", {})
    assert {name: kept[name] for name in given} == given
    assert_same(whole_state(sf.load(tmp_path / "run", model(), data())), whole_state(run))


@dataclass(frozen=True, kw_only=True)
class Own(Sequential):
    """A user's own schedule."""


def test_what_the_folder_cannot_keep_is_asked_for(tmp_path: Path) -> None:
    run = go(1, tmp_path / "run", schedule=Own())
    load = lambda **more: sf.load(tmp_path / "run", model(), data(), **more)  # noqa: E731
    assert_refuses(load, "could not keep its schedule (an object of class Own): give schedule=, as it was trained")
    assert_same(whole_state(load(schedule=Own())), whole_state(run))
    assert_refuses(lambda: load(schedule=Own(), seed=4), "holds another run")
    assert_refuses(lambda: load(schedul=Own()), "unknown argument 'schedul' (allowed: adversaries,")
    assert_refuses(lambda: load(schedule="blind"), "holds another run: its schedule is")


def test_folders_that_cannot_be_loaded_say_why(tmp_path: Path) -> None:
    go(1, tmp_path / "run")
    assert_refuses(lambda: sf.load(tmp_path / "run"), "model and data are not kept in it: give topology= and data=")
    assert_refuses(lambda: sf.load(tmp_path), "holds no run")
    # Digests say nothing to anybody.
    for wrong, given, text in (
        (
            model(1),
            data(),
            "its weights are those of another start than the model given has: give one with the weights",
        ),
        (
            model(),
            toy_data(80).clients(2, auxiliary=16, victims=4, seed=1),
            "its data.rows are not those of the data given: give the same rows, split by the same",
        ),
    ):
        assert_refuses(partial(sf.load, tmp_path / "run", wrong, given), f"holds another run: {text}")
    assert_refuses(
        lambda: sf.load(tmp_path / "run", model(), data(90)), "holds another run: its data.clients[0] is 21, not 24"
    )
    path = tmp_path / "run" / "arguments.json"
    changed = path.read_text().replace('"batch_size": 20', '"batch_size": 21')
    path.write_text(changed)
    assert_refuses(lambda: sf.load(tmp_path / "run", model(), data()), "arguments.json is damaged")
    path.unlink()
    assert_refuses(lambda: sf.load(tmp_path / "run", model(), data()), "keeps no arguments: go on with it by")
    go(1, tmp_path / "run", resume=True)
    assert sf.load(tmp_path / "run", model(), data()).history


@pytest.mark.parametrize(
    "name",
    ["os:system", "splitfed.study.run.session:CheckedStudy", "splitfed.models.import_paths:Code", "subprocess:Popen"],
)
def test_nothing_but_values_of_a_training_is_made_of_what_a_folder_says(tmp_path: Path, name: str) -> None:
    document = {"arguments": {"schedule": {"value": name, "fields": {}}}, "left_out": {}}
    (tmp_path / "arguments.json").write_bytes(digests.json_with_digest(document))
    with pytest.raises(InvalidInput, match="is no value of splitfed that a run can be trained with"):
        arguments.read_arguments(tmp_path, {})
    assert json.loads((tmp_path / "arguments.json").read_text())["arguments"]["schedule"]["value"] == name


@dataclass(frozen=True)
class Meddler(sf.Callback):
    """Has others train in and load from the run's folder meanwhile, notes how they are refused, and crashes."""

    home: Path
    refused: list[str]

    def on_round_end(self, run: Run, metrics: Mapping[str, Any]) -> None:
        for other in (lambda: go(2, self.home, resume=True), lambda: sf.load(self.home, model(), data())):
            with pytest.raises(InvalidInput) as error:
                other()
            self.refused.append(str(error.value))
        raise KeyError("a crash")


def test_nobody_else_trains_in_a_folder_meanwhile(tmp_path: Path) -> None:
    home, refused = tmp_path / "run", list[str]()
    with pytest.raises(KeyError, match="a crash"):
        go(2, home, resume=True, callbacks=[Meddler(home, refused)])
    assert refused == [f"folder {str(home)!r} is being trained in; wait for that to end"] * 2
    # Whoever has ended, however that was, holds it no longer.
    assert len(go(2, home, resume=True).history) == 2
    loaded = sf.load(home, model(), data())
    loaded.callbacks = (Meddler(home, refused),)
    with pytest.raises(KeyError, match="a crash"):
        loaded.continue_training(1)
    assert len(refused) == 4


def test_what_is_refused_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="unknown schedule"):
        go(1, tmp_path / "run", schedule="nowhere")
    assert not (tmp_path / "run").exists()


def test_files_of_a_run_that_are_missing_are_named(tmp_path: Path) -> None:
    """Without its definition the folder was called no run; with checkpoints gone the rest was trained mute."""
    home = tmp_path / "run"
    expected = whole_state(go(3, home))
    shutil.rmtree(home / "checkpoints")
    with pytest.warns(UserWarning, match="checkpoints of rounds 0 to 2 are missing; the run goes on with round 0"):
        again = go(3, home, resume=True)
    assert_same(whole_state(again), expected)
    for name in ("metrics.jsonl", "run.json"):
        (home / name).rename(tmp_path / name)
        assert_refuses(lambda: go(3, home, resume=True), f"{name} is missing; put back a copy of it")
        if name == "run.json":
            assert_refuses(lambda: sf.load(home, model(), data()), f"{name} is missing; put back a copy of it")
        (tmp_path / name).rename(home / name)


def test_a_run_without_its_last_checkpoint_is_not_opened_as_a_shorter_one(tmp_path: Path) -> None:
    """It was opened with fewer rounds, or with none and the first weights, and its metrics were cut to these."""
    home = tmp_path / "run"
    expected = whole_state(go(3, home))
    metrics = (home / "metrics.jsonl").read_bytes()
    for left in (["000001"], []):
        for one in (home / "checkpoints").iterdir():
            if one.name not in left:
                shutil.rmtree(one)
        assert_refuses(lambda: sf.load(home, model(), data()), "holds no checkpoint of its last round, 2, any more")
        assert (home / "metrics.jsonl").read_bytes() == metrics
    with pytest.warns(UserWarning, match="checkpoints of rounds 0 to 2 are missing"):
        assert_same(whole_state(go(3, home, resume=True)), expected)
    assert len((home / "metrics.jsonl").read_bytes().splitlines()) == 3


@pytest.mark.parametrize("error", [PermissionError(1, "Operation not permitted"), FileNotFoundError(2, "No such file")])
def test_a_place_where_no_folder_can_be_made_is_refused(
    error: OSError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under /proc and /sys, which left the system's own error."""

    def refuse(path: Path, *_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert_refuses(lambda: go(1, tmp_path / "new"), f"new' cannot be made here ({error.strerror}); give another")
