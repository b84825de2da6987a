"""A small real study, and ways to run and to break it, that several tests share."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest

from splitfed.core.errors import InvalidInput
from splitfed.study.config.grid import Grid
from splitfed.study.config.toml import dumps
from splitfed.study.run import checked_study

SMALL: dict[str, Any] = {
    "study": {"name": "small", "seeds": [0]},
    "data": {"name": "digits", "victims": 8, "auxiliary": 32},
    "model": {"name": "mlp", "hidden": [12]},
    "training": {"rounds": 2, "batch_size": 64},
    "topology": [{"name": "vanilla", "cut": "relu1"}],
    "defense": [{"name": "none"}, {"name": "noise", "scale": [0.5, 1.0], "relative": True}],
    "attack": [{"name": "rmle", "budget": "quick", "iterations": 5}],
}


def small(**changes: Any) -> dict[str, Any]:
    """Return a copy of the small study with some tables replaced; None takes a table out."""
    study = copy.deepcopy({**SMALL, **changes})
    return {key: value for key, value in study.items() if value is not None}


def checked(study: dict[str, Any], base: Path = Path()) -> Grid:
    """Return the grid of `study` after everything was checked."""
    return checked_study.check_study(study, "study.toml", base)[0]


def write(folder: Path, study: dict[str, Any], name: str = "study.toml") -> Path:
    """Write `study` as TOML and return its path."""
    path = folder / name
    path.write_text(dumps(study), "utf-8")
    return path


LINEAR: dict[str, Any] = {"model": "mlp", "hidden": [], "width": 8}

# What each topology puts in the place of tables of the small study; its parts of digits are 4x8 or 8x8 pixels.
PLACED: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "u_shaped": {"topology": [{"name": "u_shaped", "cuts": ["fc1", "relu1"]}]},
    "multi_hop": {
        "model": {"name": "mlp", "hidden": [12, 10]},
        "topology": [{"name": "multi_hop", "cuts": ["relu1", "relu2"], "roles": ["client", "relay", "server"]}],
    },
    "vertical": {
        "data": {**SMALL["data"], "halves": True},
        "model": None,
        "topology": [
            {
                "name": "vertical",
                "bottoms": {"left": {"model": "mlp", "hidden": [6], "width": 8}, "right": LINEAR},
                "fusion": "sum",
                "top": {"model": "mlp", "hidden": [12]},
                "labels": "right",
            }
        ],
    },
    "extended_vanilla": {
        "data": {**SMALL["data"], "strips": 2},
        "model": None,
        "topology": [
            {
                "name": "extended_vanilla",
                "bottoms": LINEAR,
                "middle": {"model": "mlp", "hidden": [], "width": 9},
                "top": {"model": "mlp", "hidden": []},
                "labels": "server",
            }
        ],
    },
    "multi_task": {
        "data": {**SMALL["data"], "halves": True, "targets": {"odd": {"classes": [0, 1] * 5}}},
        "model": None,
        "topology": [
            {
                "name": "multi_task",
                "bottoms": LINEAR,
                "tops": {"digit": {"model": "mlp", "hidden": []}, "parity": {"model": "mlp", "hidden": []}},
                "targets": {"parity": "odd"},
                "labels": {"digit": "left"},
                "weights": {"parity": 0.5},
            }
        ],
        "attack": [{"name": "rmle", "iterations": 5, "adversary": "parity0"}],
    },
    # Nothing crosses: a client looks into the model that it holds itself.
    "local": {
        "topology": [{"name": "local", "cuts": ["relu1"]}],
        "defense": [{"name": "none"}, {"name": "label_dp", "epsilon": [1.0, 4.0]}],
        "attack": [{"name": "model_inversion", "iterations": 5, "adversary": "client0"}],
    },
    "custom": {
        "model": None,
        "topology": [
            {
                "name": "custom",
                # The order is not that in which they run.
                "segments": [
                    {"name": "top", "role": "server", "inputs": ["joined"], "model": "mlp", "hidden": []},
                    {"name": "joined", "role": "server", "inputs": ["a", "b"], "fusion": "concat"},
                    {"name": "a", "role": "client", "inputs": ["x"], **LINEAR},
                    {"name": "b", "role": "client", "inputs": ["a"], "model": "mlp", "hidden": [], "width": 5},
                ],
                "inputs": {"x": "client"},
                "heads": [{"value": "top", "labels": "client"}],
            }
        ],
    },
}


def placed(name: str, **changes: Any) -> dict[str, Any]:
    """Return the small study with the topology `name`, and `changes` to that topology's table; None takes a key out."""
    study = small(**PLACED[name])
    table = {**study["topology"][0], **copy.deepcopy(changes)}
    study["topology"] = [{key: value for key, value in table.items() if value is not None}]
    return study


def assert_one_mistake(study: dict[str, Any], pattern: str) -> None:
    """Assert that `study` is refused in one line, which begins with what `pattern` matches."""
    with pytest.raises(InvalidInput) as caught:
        checked(study)
    lines = str(caught.value).splitlines()
    assert len(lines) == 1, lines
    assert re.match(rf"study\.toml: (?:{pattern})", lines[0]), lines[0]
