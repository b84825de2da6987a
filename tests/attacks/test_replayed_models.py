"""Attacks on a model whose segments replay its `forward`: to the bit what they find where it is cut by a trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from splitfed.attacks import Fsha, Pcat, Sdar
from splitfed.core import cutting
from splitfed.models.mlp import mlp
from splitfed.topologies import vanilla
from splitfed.training.entry_point import train
from splitfed.training.run import Run
from splitfed.training.settings import Adversaries
from tests.defenses.test_replayed_models import refuse_to_trace
from tests.examples import toy_data

AFTER_TRAINING = ("inverse_network", "ladder", "lira", "rmle", "shadow")
LONG = ("unsplit", "model_inversion", "membership_releases", "membership_shadow", "membership_threshold")
IN_TRAINING = {"fsha": Fsha(), "pcat": Pcat(), "sdar": Sdar()}


def trained(**given: Any) -> Run:
    data = toy_data(80).clients(1, auxiliary=16, victims=4, seed=0)
    topology = vanilla(mlp((8, 8), 10, (24, 20, 16), seed=0), "relu1", example=data.victims.x)
    return train(topology, data, rounds=2, batch_size=16, seed=3, **given)


def check_same(traced: Run, replayed: Run, attack: str) -> None:
    found = [run.attack(attack, budget="quick") for run in (traced, replayed)]
    for one, other in zip(*found, strict=True):
        assert torch.equal(one.prediction, other.prediction), attack


def pair(monkeypatch: pytest.MonkeyPatch, **given: Any) -> tuple[Run, Run]:
    traced = trained(**given)
    monkeypatch.setattr(cutting, "cut_by_trace", refuse_to_trace)
    return traced, trained(**given)


def test_attacks_find_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = pair(monkeypatch)
    for attack in AFTER_TRAINING:
        check_same(*runs, attack)


@pytest.mark.exhaustive
def test_long_attacks_find_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = pair(monkeypatch)
    for attack in LONG:
        check_same(*runs, attack)


@pytest.mark.exhaustive
@pytest.mark.parametrize("attack", IN_TRAINING)
def test_attacks_in_training_find_the_same(attack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_same(*pair(monkeypatch, adversaries=Adversaries(training_attacks={"server": IN_TRAINING[attack]})), attack)
