"""Every one of the small models trained in parts: recorded, stopped and resumed to the bit, attacked, exported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import splitfed as sf
from splitfed.data.dataset import Federation
from splitfed.defenses import DpSgd
from splitfed.topologies import vanilla
from splitfed.training.run import Run
from tests.examples import assert_same
from tests.models.tiny_transformers import TINY

pytestmark = pytest.mark.exhaustive


def first_numbers(output: Tensor, y: Tensor) -> Tensor:
    """Learn four classes from the first numbers of an output of any shape."""
    return functional.cross_entropy(output.flatten(1)[:, :4], y)


def rows_of(name: str) -> Federation:
    drawn, y = TINY[name].rows(48), torch.arange(48) % 4
    task = sf.Task("first numbers", first_numbers, lambda out, y: float(first_numbers(out, y)), "loss", None, False)
    if isinstance(drawn, dict):
        data = sf.data.from_arrays(drawn, y, task=task, dtype="int64")
    else:
        data = sf.Dataset("rows", drawn, y, task, (0.0, 1.0) if drawn.is_floating_point() else None)
    return data.clients(1, auxiliary=12, victims=4, seed=0)


def trained(name: str, folder: Path, **given: Any) -> Run:
    """Train for two rounds in two parts; one mode of attention, as in a run of anybody's."""
    data, model = rows_of(name), TINY[name].build()
    example = TINY[name].rows()
    topology = vanilla(model, model.cuts[0], example=example)
    logging = sf.Logging(folder=folder, record=sf.Recording(("server",)), **given)
    return sf.train(topology, data, rounds=2, batch_size=8, seed=1, logging=logging)


@pytest.mark.parametrize("name", TINY)
def test_a_run_is_recorded_resumed_attacked_and_exported(name: str, tmp_path: Path) -> None:
    def stop(done: int, rounds: int, metrics: Any) -> None:
        raise KeyboardInterrupt

    whole = trained(name, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        trained(name, tmp_path / "half", progress=stop)
    resumed = trained(name, tmp_path / "half", resume=True)
    states = [run.engine.topology.state_dict(run.engine.modules(0)) for run in (whole, resumed)]
    assert_same(*states)
    seen = whole.engine.link.recorders["server"].view().select(kind="activation", phase="train")
    assert seen.messages
    attack = "token_decoder" if whole.data.victims.discrete else "inverse_network"
    (found,) = whole.attack(attack, budget="quick")
    assert found.prediction.shape == found.truth.shape
    TINY[name].build().load_state_dict(states[0], strict=True)


@pytest.mark.parametrize("name", ["bert", "bert_masked", "gpt2", "vit"])
def test_rows_of_dp_sgd_add_up_to_the_gradient(name: str) -> None:
    """Clipped to a norm that none has, and without noise, a run is the one without the defense."""
    dropout = {"hidden_dropout_prob": 0.0} if name == "vit" else {}
    private = DpSgd(max_norm=1e6, noise_multiplier=0.0)
    states = []
    for defenses in ([], [private]):
        model = replace(TINY[name], config={**TINY[name].config, **dropout}).build()
        topology = vanilla(model, model.cuts[0], example=TINY[name].rows())
        run = sf.train(topology, rows_of(name), rounds=1, batch_size=8, defenses=defenses, seed=1)
        states.append(run.state_dict())
    for key, value in states[0].items():
        assert torch.allclose(value, states[1][key], rtol=1e-4, atol=1e-6), key
