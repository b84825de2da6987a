"""The table of FedAKT: what it shares out, which round and which weight it takes, and what it makes of differences."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from experiments.papers import fedakt, fedakt_groups
from experiments.papers.fedakt_models import CNNS, FOUR, RESNETS, Group, topologies
from experiments.papers.fedakt_shown import ALONE, PARTS, WHOLE, chosen, keyed, minus
from experiments.papers.table import verdict
from splitfed.core.tasks import classification
from splitfed.data.dataset import Dataset
from splitfed.federated import FedAKT

SETTING = "Fashion-MNIST, Dirichlet .1"


def noise(rows: int = 600) -> Dataset:
    random = torch.Generator().manual_seed(0)
    return Dataset("noise", torch.rand(rows, 1, 28, 28, generator=random), torch.arange(rows) % 10, classification(10))


def size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("group", [FOUR, CNNS, RESNETS])
def test_makes_differ_and_agree_in_their_features(group: Group) -> None:
    made = {make: nn.Sequential(group.extractor(make)) for make in group.makes}
    sizes = {make: size(one) for make, one in made.items()}
    assert len(set(sizes.values())) == len(group.makes)
    assert min(sizes, key=sizes.__getitem__) == group.makes[0]
    assert {one(torch.zeros(2, 1, 28, 28)).shape for one in made.values()} == {(2, group.features)}


def test_a_resnet_has_as_many_layers_as_its_name_says() -> None:
    """Convolutions on the way without shortcuts, and two linear layers, of which the one to the features is ours."""
    for make in RESNETS.makes:
        layers = [name for name, m in RESNETS.model(make).named_modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
        assert len([name for name in layers if "shortcut" not in name and name != "fc"]) == int(make)


def test_every_client_has_weights_of_its_own() -> None:
    heads = [topology.segments[-1].module for topology in topologies(20, 0)]
    weights = {tuple(next(head.parameters()).flatten().tolist()) for head in heads}
    assert len(weights) == 20


def test_verdicts_follow_the_interval() -> None:
    # t(.975, 1) = 12.706, standard error of (1, 1.1) is .05: .41 to 1.69.
    assert verdict([1.0, 1.1]) == "confirmed"
    assert verdict([-1.0, -1.1]) == "contradicted"
    assert verdict([1.0, 2.0]) == verdict([1.0]) == "not settled"
    pairs = {0: {"accuracy": 3.0}, 1: {"accuracy": 5.0}}
    assert minus(pairs, {1: {"accuracy": 1.0}, 2: {"accuracy": 9.0}}) == [4.0]


def test_validation_at_a_seed_of_its_own_chooses_the_weight() -> None:
    def done(*scores: float) -> dict[str, dict[str, Any]]:
        return {
            keyed(WHOLE, w, SETTING, 99): {"validation": score} for w, score in zip((3.0, 0.5), scores, strict=False)
        }

    assert chosen(done(60.0, 61.0), SETTING, (3.0, 0.5), 99) == (0.5, {3.0: 60.0, 0.5: 61.0})
    assert chosen(done(60.0, 60.0), SETTING, (3.0, 0.5), 99)[0] == 3.0
    assert chosen({}, SETTING, (3.0, 0.5), 99) == (3.0, {})


def test_the_round_is_chosen_by_validation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def entry(number: int, validation: float, test: float) -> dict[str, Any]:
        spreads: dict[str, dict[str, float]] = {
            "validation": {"mean": validation},
            "test": {"mean": test, "std": 0.1, "min": 0.2},
        }
        scores: dict[str, dict[str, Any]] = {part: {"spread": spread} for part, spread in spreads.items()}
        scores["test"]["method"] = {"adapter": [0.25, None, 0.75]}
        return {"round": number, **scores}

    history = [entry(4, 0.5, 0.9), {"round": 5}, entry(9, 0.7, 0.6), entry(14, 0.6, 0.8)]
    run = SimpleNamespace(history=history, bytes=3 * 2**20)
    monkeypatch.setattr(fedakt, "train", lambda *args: run)
    found = fedakt.measure(WHOLE, 3.0, SETTING, 0, tmp_path)
    numbers = {"accuracy": 60.0, "deviation": 10.0, "worst": 20.0, "validation": 70.0, "last": 80.0, "MiB": 3.0}
    assert {name: found[name] for name in numbers} == pytest.approx(numbers)
    assert found["round"] == 10
    assert found["elsewhere"] == {"adapter": 50.0}


def test_claims_are_told_from_the_cells() -> None:
    def cell(accuracy: float, **elsewhere: float) -> dict[str, Any]:
        rest = {"deviation": 1.0, "worst": 2.0, "validation": accuracy, "MiB": 4.0}
        return {"accuracy": accuracy, "elsewhere": elsewhere, **rest}

    done = {}
    for seed in (0, 1):
        done[keyed(ALONE, None, SETTING, seed)] = cell(80.0 + seed)
        done[keyed("FML", None, SETTING, seed)] = cell(88.0 + seed, meme=10.0)
        done[keyed("FedKD", None, SETTING, seed)] = cell(90.0 - 10 * seed)
        done[keyed(WHOLE, 0.5, SETTING, seed)] = cell(85.0 + seed)
        done[keyed(PARTS[1], None, SETTING, seed)] = cell(84.0 + 1.1 * seed)
    done |= {keyed(WHOLE, w, SETTING, 99): cell(w) for w in (0.5,)}
    text = fedakt.show(done)
    assert "FedAKT above standalone: **confirmed**; FedAKT above FML: **contradicted**" in text
    assert "FedAKT above FedKD: **not settled**" in text
    assert "FedAKT above itself with no mutual distillation: **confirmed**" in text
    assert "lambda 0.5: 0.5 %; so lambda 0.5 is compared" in text
    assert (
        "over the best of the others (FML) | -3.0 (-3.0 to -3.0) | +0.64 / +1.32 / +2.00 | -3.6 / -4.3 / -5.0 |" in text
    )
    assert "FML's meme (FML) 10.0 (10.0 to 10.0)" in text
    assert "| standalone (= no adapter) | 80.5 (73.4 to 86.1) |" in text
    assert fedakt.show({done_key: done[done_key] for done_key in list(done)[:1]}).count("**") == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "weight"), fedakt.variants())
def test_every_method_of_the_table_trains(name: str, weight: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fedakt, "images", noise)
    monkeypatch.setattr(fedakt, "CLIENTS", 5)
    run = fedakt.train(name, weight, SETTING, 0, 1, 1, rows=200)
    assert (run.bytes > 0) == (name != ALONE)
    assert run.history[-1]["test"]["spread"]["mean"] >= 0
    if weight is not None:
        assert isinstance(run.method, FedAKT)
        assert (run.method.weight, run.method.dual_use) == (weight, name == WHOLE)


@pytest.mark.parametrize("setting", fedakt.SETTINGS)
def test_clients_hold_rows_of_every_part(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fedakt, "images", lambda: noise(fedakt.ROWS))
    clients = fedakt.federation(setting, 0).clients
    assert len(clients) == fedakt.CLIENTS
    assert sum(len(c.train) + len(c.validation) + len(c.test) for c in clients) == fedakt.ROWS
    assert all(len(part) > 0 for c in clients for part in (c.train, c.validation, c.test))
    if "classes_per_client" in fedakt.SETTINGS[setting]:
        assert {len(c.train.y.unique()) for c in clients} == {2}


@pytest.mark.parametrize(
    "name",
    [WHOLE, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in ("FedProto", "FML", "FedKD"))],
)
def test_what_a_client_exchanges_is_what_the_formula_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fedakt, "images", noise)
    monkeypatch.setattr(fedakt_groups, "EACH", 40)
    found = fedakt_groups.measure(name, SETTING, "CNNs", 5, 0, Path(), rounds=1, every=1)
    words, most = fedakt_groups.expected(name, CNNS) or ("", 0.0)
    assert 0 < found["bytes"] <= most
    assert words.startswith("at most") or found["bytes"] == most


def test_margins_are_told_over_the_best_of_the_others() -> None:
    def cell(accuracy: float) -> dict[str, Any]:
        return {"accuracy": accuracy, "bytes": 2.0**20}

    scores = {"standalone": 80.0, "FML": 84.0, "FedProto": 82.0, WHOLE: 85.0}
    done = {
        fedakt_groups.keyed(name, SETTING, "CNNs", 50, seed): cell(score + seed)
        for name, score in scores.items()
        for seed in (0, 1)
    }
    text = fedakt_groups.show(done)
    (line,) = [line for line in text.splitlines() if line.startswith("| CNNs | 50 |")]
    told = [cell.split(" (")[0].strip() for cell in line.split("|")[3:8]]
    assert told == ["Dirichlet .1", "80.5", "82.5", "84.5", "to do"]
    assert "| +1.0 (1.0 to 1.0) (FML) | - / +1.59 / - | 2 |" in text
    assert "| CNNs | FML | 2 times the meme | 4.007 | 1.000 |" in text
    assert "| FedKD |" not in text.split("exchanges in a round")[1]
