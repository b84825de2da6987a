"""A small real study, and ways to run and to break it, that several tests share."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from splitfed.study import session
from splitfed.study.grid import Grid
from splitfed.study.toml import dumps

SMALL: dict[str, Any] = {
    "study": {"name": "small", "seeds": [0]},
    "data": {"name": "digits", "victims": 8, "auxiliary": 32},
    "model": {"name": "mlp", "hidden": [12]},
    "training": {"rounds": 2, "batch_size": 64},
    "topology": [{"name": "vanilla", "cut": "relu1"}],
    "defense": [{"name": "none"}, {"name": "noise", "scale": [0.5, 1.0], "relative": True}],
    "attack": [{"name": "rmle", "iterations": 5}],
}


def small(**changes: Any) -> dict[str, Any]:
    """Return a copy of the small study with some tables replaced; None takes a table out."""
    study = copy.deepcopy({**SMALL, **changes})
    return {key: value for key, value in study.items() if value is not None}


def checked(study: dict[str, Any], base: Path = Path()) -> Grid:
    """Return the grid of `study` after everything was checked."""
    return session.check(study, "study.toml", base)[0]


def write(folder: Path, study: dict[str, Any], name: str = "study.toml") -> Path:
    """Write `study` as TOML and return its path."""
    path = folder / name
    path.write_text(dumps(study), "utf-8")
    return path
