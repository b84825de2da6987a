"""Recorded steps: every row gets back what came for it, whatever step it was in, and label attacks read the mean."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import splitfed as sf
from splitfed.attacks.base import Attack
from splitfed.attacks.labels.co_training import CoTraining
from splitfed.attacks.labels.exploit import Exploit
from splitfed.attacks.labels.similar import Similar
from splitfed.attacks.labels.strongest_labels import StrongestLabels
from splitfed.core.defense import Defense
from splitfed.core.errors import InvalidInput
from splitfed.core.messages import Message, Stamp, View
from splitfed.core.optimizers import Optim
from splitfed.core.random import stream
from splitfed.core.tasks import binary
from splitfed.data.dataset import Dataset
from splitfed.defenses import Marvell
from splitfed.study.config import build
from splitfed.study.run.progress import Lines
from splitfed.study.run.reattack import attack_run, rebuild_run
from splitfed.study.run.runner import run_cell
from splitfed.threats.recorded_training import recorded_passes, recorded_view
from splitfed.threats.repeated_releases import RepeatedReleases, mean_view
from splitfed.topologies import vertical
from splitfed.training.run import Run
from tests.study.examples import checked, small

BATCHES = {
    0: (torch.tensor([3, 1]), torch.tensor([0, 2])),
    1: (torch.tensor([2, 0]), torch.tensor([1, 3])),
    2: (torch.tensor([0, 1]), torch.tensor([3])),
}
"""In the last epoch a row is left out."""


def value(row: int, epoch: int) -> float:
    return 10.0 * row + epoch


def recorded(batches: dict[int, tuple[Tensor, ...]] = BATCHES) -> View:
    """Releases and gradients that say which row they are of, and in which epoch; gradients are of a batch's mean."""
    messages = []
    for epoch, steps in batches.items():
        for step, rows in enumerate(steps):
            z = torch.tensor([[value(int(row), epoch)] for row in rows])
            stamp = Stamp("train", 0, epoch, step)
            messages.append(Message("a", "b", "activation", "a->b", {"z": z}, stamp))
            messages.append(Message("b", "a", "activation", "b->c", {"h": z}, stamp))
            messages.append(Message("c", "b", "gradient", "b->c", {"h": z / len(rows)}, stamp))
    return View("b", tuple(messages))


def test_every_row_gets_back_what_came_for_it() -> None:
    """Of rows in three epochs all three passes, and a row that was left out of one of them is no victim."""
    rows, passes = recorded_passes(recorded(), BATCHES.__getitem__)
    assert rows.tolist() == [0, 1, 3]
    assert len(passes) == 3
    rows, passes = recorded_passes(recorded(dict(list(BATCHES.items())[:2])), BATCHES.__getitem__)
    assert rows.tolist() == [0, 1, 2, 3]
    for epoch, view in enumerate(passes):
        (sent,), (came,) = (view.select(kind=kind).messages for kind in ("activation", "gradient"))
        expected = torch.tensor([[value(row, epoch)] for row in range(4)])
        assert torch.equal(sent.tensors["z"], expected)
        assert torch.equal(4 * came.tensors["h"], expected)
    mean, equal = mean_view(passes, 2)
    assert not equal
    assert torch.equal(mean.select(kind="activation").messages[0].tensors["z"][:, 0], torch.arange(4) * 10 + 0.5)


def test_whose_rows_are_not_known_is_refused() -> None:
    with pytest.raises(InvalidInput, match=re.escape("no training step was recorded at party 'b'")):
        recorded_passes(View("b", ()), BATCHES.__getitem__)
    with pytest.raises(InvalidInput, match="2 steps of epoch 0 were recorded of 'b', and its client takes 1"):
        recorded_passes(recorded(), lambda epoch: BATCHES[epoch][:1])
    with pytest.raises(InvalidInput, match="'z' arrived for 2 rows in a step of 1"):
        recorded_passes(recorded(), lambda epoch: [rows[:1] for rows in BATCHES[epoch]])


@cache
def cancer(*defenses: Defense, rounds: int = 10, seed: int = 0) -> Run:
    """Breast cancer between a party with all columns, recorded, and one with labels and the top."""
    data = sf.data.breast_cancer()
    told = Dataset("cancer", data.x, (data.y == 0).long(), binary()).vertical({"features": range(data.x.shape[1])})
    with stream(seed):
        bottom = nn.Sequential(nn.Linear(data.x.shape[1], 32), nn.ReLU())
        top = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 1))
    return sf.train(
        vertical({"features": bottom}, top, labels="server"),
        told.clients(1, auxiliary=20, victims=40, seed=seed),
        rounds=rounds,
        batch_size=64,
        optimizer=Optim("Adam", {"lr": 1e-3}),
        defenses=defenses,
        seed=seed,
        logging=sf.Logging(record=sf.Recording(parties=("features0",))),
    )


def test_recorded_gradients_are_those_of_training() -> None:
    """The mean over two epochs, row by row, by hand from the messages and the batches of the run."""
    run = cancer(rounds=2)
    rows, view, repeated = run.evaluator.released.recorded_steps("features0", 0, 1)
    assert repeated == RepeatedReleases(2, steps=True)
    assert str(repeated) == "2 steps of training with each row"
    train = run.data.clients[0].train
    total: Tensor | None = None
    seen = recorded_view(run.engine, "features0", 0).select(kind="gradient").messages
    for message, batch in zip(seen, [b for n in (0, 1) for b in run.evaluator.grants.batches(0, n)], strict=True):
        (g,) = message.tensors.values()
        total = torch.zeros(len(train), g.shape[1]) if total is None else total
        total[batch] += g * len(batch) / 2
    (mean,) = view.select(kind="gradient").messages[0].tensors.values()
    assert total is not None
    assert torch.allclose(mean * len(train), total, atol=1e-6)
    assert torch.equal(rows.y, train.y)


def test_attacks_on_recorded_steps_go_against_the_rows_of_training() -> None:
    run = cancer(rounds=2)
    (result,) = run.attack(Similar(hints=6), adversary="features0", round=1)
    assert len(result.truth) == len(run.data.clients[0].train)
    assert result.repeated is not None
    assert "2 steps of training with each row" in repr(result)
    (single,) = run.attack(Similar(hints=6), adversary="features0", round=0)
    assert single.repeated is None
    with pytest.raises(InvalidInput, match="Similar targets the client's training rows: leave victims out"):
        run.attack(Similar(), adversary="features0", round=1, victims=run.data.victims)
    with pytest.raises(InvalidInput, match="'server0' was not recorded in training"):
        run.evaluator.released.recorded_steps("server0", 0, 1)


def means(attack: Attack, rounds: int, seeds: range) -> float:
    """AUC of the attack on the steps of the first `rounds` epochs."""
    found = []
    for seed in seeds:
        (result,) = cancer(Marvell(s=1.0), seed=seed).attack(attack, adversary="features0", round=rounds - 1, seed=seed)
        found.append(result.scores["attack"]["auc"].mean)
    return fmean(found)


STUDY: dict[str, Any] = {
    "study": {"name": "epochs", "seeds": [0]},
    "data": {"name": "breast_cancer", "victims": 32, "auxiliary": 40},
    "model": {"name": "mlp", "hidden": [6, 6]},
    "training": {"rounds": 2, "batch_size": 64, "record": {"parties": ["server"]}},
    "topology": [{"name": "u_shaped", "cuts": ["relu1", "relu2"]}],
    "defense": [{"name": "marvell"}],
    "attack": [{"name": "similar", "round": 1}, {"name": "similar"}],
}


def test_a_study_asks_up_to_a_round_by_itself_and_later(tmp_path: Path) -> None:
    """A row of training in two epochs is another victim than one set aside, and their figures are two."""
    cell = checked(small(**STUDY)).cells[0]
    assert [setting.round for setting in cell.attacks] == [1, None]
    assert [setting.table.get("round") for setting in cell.attacks] == [1, None]
    data = build.dataset(cell.data)
    result = run_cell(cell, data, tmp_path, Lines(0))
    epochs, fresh = result.attacks
    assert (epochs.label, epochs.round) == ("similar(budget=quick, round=1)", 1)
    assert fresh.round is None
    assert epochs.victims > fresh.victims == 30
    (expected,) = rebuild_run(tmp_path).attack(Similar.with_budget("quick"), round=1)
    assert epochs.scores["auc"]["attack"].mean == expected.scores["attack"]["auc"].mean
    (earlier,) = attack_run(tmp_path, ["similar"], "quick", None, round=0)
    assert (earlier.label, earlier.round) == ("similar(budget=quick, round=0)", 0)
    assert earlier.scores["auc"]["attack"].mean != expected.scores["attack"]["auc"].mean


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"attack": [{"name": "similar", "round": -1}]}, r"attack\[0\]\.round: round=-1 is not allowed"),
        ({"attack": [{"name": "similar", "round": 2}]}, r"attack\[0\]: round=2 is not allowed; expected .* 1"),
        ({"attack": [{"name": "rmle", "round": 0}]}, r"attack\[0\]\.round: is for attacks on recorded training"),
        ({"training": {"rounds": 2}}, r"record it: \[training\.record\] parties = \['server'\]"),
    ],
)
def test_a_round_that_cannot_be_asked_is_refused_in_its_place(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        checked(small(**{**STUDY, **changed}))


def test_marvell_hides_a_step_and_not_ten() -> None:
    """The noise of every epoch is drawn anew, and the mean over epochs is what an adversary has."""
    one, ten = (means(Similar(hints=6), rounds, range(1)) for rounds in (1, 10))
    assert one < 0.8
    assert ten > 0.9


EXPLOIT = Exploit(iterations=300, restarts=1, hints=6)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("attack", "least"), [(Similar(hints=6), 0.9), (EXPLOIT, 0.9), (CoTraining(hints=6), 0.97)])
def test_marvell_over_all_epochs(attack: Attack, least: float) -> None:
    assert means(attack, 10, range(3)) > least


@pytest.mark.exhaustive
def test_one_step_under_marvell_is_far_below_all_of_them() -> None:
    assert means(Similar(hints=6), 1, range(3)) < 0.75
    assert means(StrongestLabels(iterations=20, doublings=1), 10, range(1)) > 0.97


@cache
def ten_classes() -> Run:
    """Halves of digits, the parties' logits added up; the left one is recorded."""
    with stream(0):
        bottoms = {
            role: nn.Sequential(nn.Flatten(), nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 10))
            for role in ("left", "right")
        }
    data = sf.data.digits().halves().clients(1, auxiliary=200, victims=1300)
    logging = sf.Logging(record=sf.Recording(parties=("left0",)))
    return sf.train(vertical(bottoms, nn.Identity(), labels="server", fusion="sum"), data, rounds=3, logging=logging)


def test_ten_classes_over_three_epochs() -> None:
    for attack in (Similar(hints=2), CoTraining(hints=2), Exploit(iterations=60, restarts=1, hints=2)):
        (result,) = ten_classes().attack(attack, adversary="left0", round=2)
        assert result.scores["attack"]["accuracy"].mean > 0.5
        assert result.repeated == RepeatedReleases(3, steps=True)
