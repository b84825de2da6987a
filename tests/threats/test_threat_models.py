"""Black box and white box: what an attack is shown, what holds for a party by what reached it, and who is told."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import splitfed as sf
from splitfed.attacks.base import Attack, Knowledge, Needs, Progress
from splitfed.attacks.reconstruction.strongest import Strongest
from splitfed.attacks.threat_model import BLACK_BOX, WEIGHTS, WHITE_BOX
from splitfed.core.messages import View
from splitfed.models import mlp
from splitfed.registry import TABLES, load
from splitfed.schedules import Sequential
from splitfed.threats.attack_requests import threat_model_of
from splitfed.training.run import Run


@dataclass(frozen=True)
class Shown(Strongest):
    """Predicts nothing, and remembers what it was shown."""

    def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Tensor:  # type: ignore[override]
        found.append((self.threat_model, knowledge.upstream is not None))
        return torch.zeros(len(next(iter(view.select(kind="activation").tensors().values()))), *knowledge.shape)


found: list[tuple[str | None, bool]] = []


def run(schedule: object = "sequential") -> Run:
    x = torch.rand(60, 4, generator=torch.Generator().manual_seed(0))
    data = sf.data.from_arrays(x, torch.arange(60) % 2).clients(2, auxiliary=20, victims=4, seed=0)
    model = mlp((4,), 2, (6,), seed=0)
    return sf.train(sf.topologies.vanilla(model, "relu1"), data, rounds=1, schedule=schedule, seed=0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("schedule", "party", "model"),
    [
        ("sequential", "server", BLACK_BOX),
        (Sequential(hand_over="none"), "server", BLACK_BOX),
        (Sequential(hand_over="server"), "server", WHITE_BOX),
        ("splitfed_v1", "server", BLACK_BOX),
    ],
    ids=["from client to client", "stay", "through the server", "averaged elsewhere"],
)
def test_white_box_is_who_has_received_weights(schedule: object, party: str, model: str) -> None:
    found.clear()
    (result,) = run(schedule).attack(Shown(), adversary=party, floors=False)
    assert found == [(model, model == WHITE_BOX)]
    assert result.threat_model == model


@pytest.mark.parametrize("model", [BLACK_BOX, WHITE_BOX])
def test_a_threat_model_that_was_asked_for_stays(model: str) -> None:
    found.clear()
    (result,) = run().attack(Shown(threat_model=model), floors=False)
    assert found == [(model, model == WHITE_BOX)]
    assert result.threat_model == model


def test_every_attack_that_is_shown_weights_is_white_box() -> None:
    for name in TABLES["attacks"]:
        attack: Attack = load("attacks", name).with_budget("quick")
        shown = attack.requires | getattr(attack, "uses", frozenset())
        assert threat_model_of(attack) == (WHITE_BOX if shown & WEIGHTS else BLACK_BOX), name
    assert (
        threat_model_of(load("attacks", "rmle")()) == threat_model_of(load("attacks", "lbfgs_inversion")()) == WHITE_BOX
    )
    assert threat_model_of(load("attacks", "inverse_network")()) == BLACK_BOX


def test_whatever_holds_trained_weights_counts_as_such() -> None:
    """By the words of `Needs`: one that speaks of weights or of a model that is exchanged, but of no architecture."""
    said = {need for need in Needs if "weights" in need.value or need is Needs.EXCHANGED_MODEL}
    assert said == WEIGHTS
