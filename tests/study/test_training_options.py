"""Keys for batches, optimizers and losses: what they become; studies without them are written as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from splitfed.core.optimizers import Optim
from splitfed.core.tasks import classification
from splitfed.schedules.base import Training
from splitfed.study.config import build
from splitfed.study.config.grid import expand
from splitfed.study.config.run_spec import RunSpec
from splitfed.study.config.schema import parse_study
from tests.study.examples import SMALL, small

WEIGHTS = [1, 2.5] * 5
OPTIMIZER: dict[str, Any] = {
    "name": "SGD",
    "lr": 0.1,
    "clip_norm": 2,
    "scheduler": {"name": "StepLR", "step_size": 3, "every": "step"},
}


def changed(table: str, **keys: Any) -> dict[str, Any]:
    return small(**{table: {**SMALL[table], **keys}})


def cell(config: dict[str, Any]) -> RunSpec:
    return expand(parse_study(config, "study.toml"), "study.toml", Path()).cells[0]


def test_every_key_reaches_the_run() -> None:
    config = changed("training", drop_last=True, optimizer=OPTIMIZER)
    config["data"] = {**config["data"], "class_weights": WEIGHTS}
    found = cell(config)
    assert found.training.optimizer == Optim("SGD", {"lr": 0.1}, "StepLR", {"step_size": 3}, "step", 2)
    assert found.training.local.drop_last
    size, epochs = found.training.batch_size, found.training.local.local_epochs
    assert found.training.training(5) == Training(size, local_epochs=epochs, seed=5, drop_last=True)
    data = build.dataset(found.data)
    output, y = torch.randn(7, 10), torch.arange(7)
    assert torch.equal(data.task.loss(output, y), classification(10, WEIGHTS).loss(output, y))
    again = cell({**found.config})
    assert again.config == found.config
    assert again.training.optimizer == found.training.optimizer
    assert again.training.local == found.training.local
    assert again.data.parts == found.data.parts == {"class_weights": WEIGHTS}


def test_a_table_a_role_may_clip() -> None:
    found = cell(changed("training", optimizer={"client": {"clip_norm": 1.5}, "server": OPTIMIZER}))
    assert isinstance(found.training.optimizer, dict)
    assert found.training.optimizer["client"].clip_norm == 1.5
    assert found.config["training"]["optimizer"]["server"] == OPTIMIZER
