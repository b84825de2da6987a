"""`train`: what it reports, and that it refuses whatever does not fit before anything is written."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import splitfed
from splitfed.core.errors import InvalidInput, NonFinite
from splitfed.core.messages import Recording
from splitfed.core.optimizers import Optim
from splitfed.core.random import generator, stream
from splitfed.core.tasks import Task, regression
from splitfed.core.topology import Head, Segment, Topology
from splitfed.data.dataset import Dataset
from splitfed.defenses import DistanceCorrelation, Marvell, Noise
from splitfed.models.lenet import lenet
from splitfed.schedules.sequential import Sequential
from splitfed.stats.intervals import share_interval
from splitfed.topologies import u_shaped, vanilla
from splitfed.training.run import Run
from splitfed.training.settings import GROUPS
from tests.examples import InPlaceAfterCut, SmallUNet, toy_data

DATA = toy_data(120).clients(2, auxiliary=10, victims=10)
FAST = Optim("Adam", {"lr": 1e-2})


def train(**changes: Any) -> splitfed.Run:
    arguments: dict[str, Any] = {"rounds": 1, "batch_size": 10, **changes}
    topology = arguments.pop("topology", None) or vanilla(InPlaceAfterCut(), "conv")
    return splitfed.train(topology, arguments.pop("data", DATA), **arguments)


def narrow() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 7))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "rounds": ({"rounds": 0}, "rounds=0 is not allowed; expected a whole number of at least 1"),
    "rounds is no count": ({"rounds": 1.5}, "rounds=1.5 is not allowed"),
    "batch_size": ({"batch_size": 0}, "batch_size=0 is not allowed"),
    "schedule": ({"schedule": "sequental"}, "unknown schedule 'sequental'; did you mean 'sequential'"),
    "width": (
        {"topology": vanilla(narrow(), "1")},
        "the model returns (7,) a row at '_3'; classification here needs (10,)",
    ),
    "batch of one": (
        {"topology": vanilla(SmallUNet(), "pool1"), "data": DATA, "batch_size": 34},
        "client0 has 35 training rows, so batch_size=34 leaves a batch of one, and batch norm in segment 'bottom'",
    ),
    "batches of one": (
        {"topology": vanilla(SmallUNet(), "pool1"), "batch_size": 1},
        "so batch_size=1 leaves a batch of one, and batch norm in segment",
    ),
    "role": ({"optimizer": {"sever": FAST}}, "unknown role in optimizer 'sever'; did you mean 'server'"),
    "party to record": (
        {"logging": splitfed.Logging(record=Recording(("client2",)))},
        "unknown party to record 'client2'; did you mean 'client1' or 'client0'? (allowed: client0, client1, server)",
    ),
    "edge": (
        {"defenses": [Noise(on=("bottom->to",))]},
        "unknown edge 'bottom->to'; did you mean 'bottom->top'",
    ),
    "no defense": ({"defenses": None}, "defenses=None is not allowed; expected defenses, such as"),
    "no sequence of defenses": ({"defenses": 3}, "defenses=3 is not allowed; expected defenses, such as"),
    "defense": ({"defenses": [Marvell()]}, "Marvell has no gradient to guard"),
    "short batch": (
        {"defenses": [DistanceCorrelation(statistic="unbiased")], "batch_size": 16},
        "rows",
    ),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_refused_before_anything_is_written(case: str, tmp_path: Path) -> None:
    arguments, text = REFUSED[case]
    logging = replace(arguments.get("logging", splitfed.Logging()), folder=tmp_path / "run")
    with pytest.raises(InvalidInput, match=re.escape(text)) as caught:
        train(**{**arguments, "logging": logging})
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists(), "a corrected call must find the folder free"


def test_data_that_do_not_fit_the_model_are_named() -> None:
    text = "segment 'bottom' cannot take what arrives on input of 'bottom' (input_1 (4, 1, 8, 8))"
    with pytest.raises(InvalidInput, match=re.escape(text)):
        train(topology=vanilla(nn.Sequential(nn.Linear(9, 9), nn.Flatten(), nn.Linear(72, 10)), "0"))


def test_training_learns() -> None:
    """Ten brightness patterns that one layer can tell apart; chance is .1."""
    data = toy_data(400).clients(2, auxiliary=10, victims=10)
    run = train(topology=u_shaped(InPlaceAfterCut(), ("conv", "fc1")), data=data, rounds=15, optimizer=FAST)
    assert run.accuracy > 0.6
    losses = [entry["loss"] for entry in run.history]
    assert losses[-1] < 0.5 * losses[0]


def test_train_has_fourteen_parameters_of_which_four_are_values() -> None:
    parameters = inspect.signature(splitfed.train).parameters
    assert len(parameters) == 14
    assert {name: type(p.default) for name, p in parameters.items() if name in GROUPS} == GROUPS


VALUES: dict[str, tuple[Callable[[], Any], str]] = {
    "local_epochs": (lambda: splitfed.LocalUpdate(local_epochs=-1), "local_epochs=-1 is not allowed"),
    "sampling": (lambda: splitfed.LocalUpdate(sampling="poison"), "unknown sampling 'poison'; did you mean 'poisson'"),
    "starts": (lambda: splitfed.LocalUpdate(starts="given"), "unknown starts 'given'"),
    "restart": (lambda: splitfed.LocalUpdate(restart_optimizers="yes"), "restart_optimizers='yes' is not allowed"),  # type: ignore[arg-type]
    "every": (lambda: splitfed.Evaluation(every=0), "evaluation every=0 is not allowed"),
    "across": (lambda: splitfed.Evaluation(across_clients=1), "across_clients=1 is not allowed"),  # type: ignore[arg-type]
    "delta": (lambda: splitfed.Evaluation(delta=1.0), "delta=1.0 is not allowed"),
    "link": (lambda: splitfed.Logging(link="byte"), "unknown link 'byte'; did you mean 'bytes'"),
    "resume": (lambda: splitfed.Logging(resume=True), "resume=True needs the folder of the run to resume"),
    "no table": (lambda: splitfed.Adversaries("fsha"), "training_attacks='fsha' is not allowed"),  # type: ignore[arg-type]
    "no attack": (
        lambda: splitfed.Adversaries({"server": "rmle"}),
        "'rmle' is not an attack that runs during training",
    ),
    "evaluate": (lambda: splitfed.Adversaries(evaluate_every={"a": 0}), "evaluate_every['a']=0 is not allowed"),
    "poisoning": (lambda: splitfed.Adversaries(poisoning=("flip",)), "'flip' is not allowed"),  # type: ignore[arg-type]
    "no detector": (lambda: splitfed.Adversaries(detectors={"client": 3}), "detectors['client']=3 is not allowed"),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("case", VALUES)
def test_a_value_refuses_what_it_does_not_take(case: str) -> None:
    make, text = VALUES[case]
    with pytest.raises(InvalidInput, match=re.escape(text)) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_what_a_run_reports() -> None:
    """35 training rows a client in batches of 10: 4 steps each, so 8 a round; 3 messages a step."""
    seen: list[tuple[int, int]] = []
    run = train(rounds=3, logging=splitfed.Logging(progress=lambda done, rounds, metrics: seen.append((done, rounds))))
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert [entry["round"] for entry in run.history] == [0, 1, 2]
    assert [entry["steps"] for entry in run.history] == [8, 8, 8]
    # Hand-overs: one in the first round, two in each later one.
    assert [entry["messages"] for entry in run.history] == [25, 51, 77]
    assert run.bytes == run.history[-1]["bytes"] == 3 * 70 * 3080 + 5 * 240
    assert run.seconds == sum(entry["seconds"] for entry in run.history)
    assert run.seconds > 0
    assert run.accuracy == run.history[-1]["test"]["union"]
    assert len(run.history[-1]["test"]["clients"]) == 2


def test_the_union_is_the_score_over_all_rows() -> None:
    run = train(rounds=2)
    rows = [len(client.test) for client in DATA.clients]
    scores = run.history[-1]["test"]["clients"]
    mean = sum(n * s for n, s in zip(rows, scores, strict=True)) / sum(rows)
    assert run.accuracy == pytest.approx(mean)


def test_evaluating_now_and_then_always_includes_the_last_round() -> None:
    run = train(rounds=5, evaluation=splitfed.Evaluation(every=2))
    assert ["test" in entry for entry in run.history] == [False, True, False, True, True]


def test_scores_are_those_of_the_newest_model() -> None:
    run = train(rounds=2, optimizer=FAST)
    test = DATA.test_union()
    agree = (run.predict(test.x).argmax(1) == test.y).double().mean()
    assert run.accuracy == pytest.approx(float(agree))


def test_the_last_test_score_has_an_interval_over_its_rows() -> None:
    run = train(rounds=2)
    rows = sum(len(client.test) for client in DATA.clients)
    found = run.history[-1]["test"]["interval"]
    own = share_interval(round(run.accuracy * rows), rows)
    assert found == {"low": own.low, "high": own.high, "rows": rows, "kind": "Wilson over rows"}
    assert "interval" not in run.history[0]["test"]
    assert "interval" not in run.history[-1]["validation"]


def numbers(task: Task | None = None) -> Run:
    """A run on numbers: y is the sum of the pixels."""
    drawn = torch.rand(80, 1, 4, 4, generator=generator(0))
    data = Dataset("sums", drawn, drawn.flatten(1).sum(1), task or regression())
    with stream(0):
        model = nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.Linear(4, 1))
    return splitfed.train(vanilla(model, "1"), data.clients(2, auxiliary=8, victims=8), rounds=1, batch_size=10)


def test_what_is_no_accuracy_is_not_called_one() -> None:
    run = numbers()
    assert run.utility == run.history[-1]["test"]["union"]
    with pytest.raises(
        InvalidInput, match=r"^the run has no accuracy: its task is scored by 'r_squared'; ask for run\.u"
    ):
        _ = run.accuracy
    assert run.history[-1]["test"]["interval"]["kind"] == "bootstrap over rows"
    assert run.history[-1]["test"]["interval"]["high"] <= 1.0
    # A metric of the user's own that is called F1.
    own = numbers(replace(regression(), metric=lambda output, y: 0.5, metric_name="f1", constant=None))
    assert (own.utility, own.constant) == (0.5, None)
    with pytest.raises(InvalidInput, match="scored by 'f1'"):
        _ = own.accuracy


def test_a_run_is_set_beside_whoever_always_gives_the_same_answer() -> None:
    run = train(rounds=2)
    labels = torch.cat([client.train.y for client in DATA.clients])
    test = DATA.test_union().y
    share = float((test == int(torch.bincount(labels).argmax())).double().mean())
    assert run.constant == (pytest.approx(share), "always answering the most frequent class")
    run.history[-1]["test"]["union"] = share / 2
    assert f"is below {share:.3g} of always answering the most frequent class" in repr(run)
    run.history[-1]["test"]["union"] = 1.0
    assert repr(run) == f"Run(2 rounds, {run.bytes:,} bytes, test accuracy 1)"
    mean = numbers()
    constant = mean.constant
    assert constant is not None
    # The mean of other rows than these is worse than their own, which has 0.
    assert -0.2 < constant.score <= 0.0


def test_no_test_rows_is_said_not_a_crash() -> None:
    data = toy_data(60).clients(2, auxiliary=10, victims=10, test=0.0)
    run = train(data=data)
    assert run.history[-1]["test"] == {"metric": "accuracy", "clients": [None, None], "union": None, "spread": None}
    with pytest.raises(InvalidInput, match="test"):
        _ = run.accuracy


def test_optimizers_may_differ_by_role() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = InPlaceAfterCut()
    run = train(topology=vanilla(model, "conv"), optimizer={"server": Optim("SGD", {"lr": 0.0})})
    assert torch.equal(run.engine.modules(0)["top"].fc2.weight, model.fc2.weight)
    assert not torch.equal(run.engine.modules(1)["bottom"].conv.weight, model.conv.weight)


def test_the_rate_falls_once_a_round() -> None:
    run = train(rounds=3, optimizer=Optim("SGD", {"lr": 0.08}, "StepLR", {"step_size": 1, "gamma": 0.5}))
    for party in run.engine.parties.values():
        assert party.state.state_dict()["optimizer"]["param_groups"][0]["lr"] == 0.01


def test_a_folder_holds_definition_environment_metrics_and_two_checkpoints(tmp_path: Path) -> None:
    run = train(rounds=3, logging=splitfed.Logging(folder=tmp_path / "run"))
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [
        "arguments.json",
        "checkpoints",
        "environment.json",
        "metrics.jsonl",
        "run.json",
    ]
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == ["000001", "000002"]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    assert all(len(entry.pop("digest")) == 64 for entry in found)
    assert found == run.history
    assert json.loads((tmp_path / "run" / "environment.json").read_text())["packages"]["torch"] == torch.__version__


def test_a_schedule_may_be_given_as_a_value() -> None:
    run = train(schedule=Sequential(hand_over="none"), rounds=2)
    assert "weights" not in run.engine.traffic.by_kind()


def test_lenet_on_regression_data_is_refused_by_width() -> None:
    data = splitfed.data.from_arrays(
        torch.rand(60, 1, 8, 8).numpy(), torch.rand(60).numpy(), task=splitfed.regression(1), name="r"
    ).clients(1, auxiliary=5, victims=5)
    with pytest.raises(
        InvalidInput, match=re.escape("the model returns (10,) a row at 'fc3'; regression here needs (1,)")
    ):
        train(topology=vanilla(lenet((1, 8, 8), 10), "pool1"), data=data)


def test_weights_that_the_last_step_ruined_are_found_when_they_are_scored() -> None:
    """One step at a huge rate: its loss and gradients are finite, what the model then returns is not."""
    one = toy_data(60).clients(1, auxiliary=10, victims=10)
    with pytest.raises(NonFinite, match="not finite"):
        train(data=one, batch_size=64, optimizer=Optim("SGD", {"lr": 1e30}))


def test_roles_whose_parties_would_share_a_name_are_refused() -> None:
    """Client 0 plays "client" under the name client0, which another role bears here."""
    flat = nn.Sequential(nn.Flatten(), nn.Linear(64, 8))
    segments = (
        Segment("bottom", "client", flat, ("x",), ("h",), "bottom."),
        Segment("top", "client0", nn.Linear(8, 10), ("h",), ("out",), "top."),
    )
    with pytest.raises(InvalidInput, match="client0"):
        train(topology=Topology("t", segments, {"x": "client"}, (Head("out", "client0", "client"),)))
