"""A small search that several tests share, and ways to run it and to look at what it left."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from optuna.storages import RDBStorage

from splitfed.cli import main
from splitfed.models.import_paths import NameResolver
from splitfed.study.config.search import SearchStudy, read_search

SEARCH: dict[str, Any] = {
    "study": {"name": "search", "seeds": [0]},
    "data": {"name": "digits", "victims": 8, "auxiliary": 16},
    "model": {"name": "mlp", "hidden": [6]},
    "training": {
        "rounds": 1,
        "batch_size": 256,
        "optimizer": {"name": "SGD", "lr": {"low": 0.01, "high": 0.5, "log": True}},
    },
    "topology": [{"name": "vanilla", "cut": ["relu1", "fc1"]}],
    "defense": [{"name": "none"}, {"name": "noise", "scale": {"low": 0.1, "high": 2.0}, "relative": True}],
    "search": {"sampler": "random", "trials": 4, "objectives": {"utility_validation": "maximize", "bytes": "minimize"}},
}


def searching(search: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """Return a copy of the small search with some tables replaced, and `search` changed; None takes a key out."""
    study = copy.deepcopy({**SEARCH, **changes})
    study["search"] = {key: value for key, value in {**study["search"], **(search or {})}.items() if value is not None}
    return {key: value for key, value in study.items() if value is not None}


def read(study: dict[str, Any]) -> SearchStudy:
    """Return the search as it is read, before data are loaded."""
    return read_search(study, "study.toml", Path(), NameResolver(Path()))[0]


@contextmanager
def opened_by_optuna(path: Path) -> Iterator[RDBStorage]:
    """Yield the storage that Optuna makes of the file's address, and close the connections that it keeps in a pool."""
    storage = RDBStorage(f"sqlite:///{path}")
    try:
        yield storage
    finally:
        storage.engine.dispose()


def run(path: Path, folder: Path, *more: str) -> int:
    """Run the study file as the command line does."""
    return main(["run", str(path), "--folder", str(folder), *more])


def records(folder: Path) -> dict[int, dict[str, Any]]:
    """Return number -> record of every trial, without digests."""
    found = {}
    for path in sorted((folder / "trials").iterdir()):
        record = json.loads(path.read_text("utf-8"))
        record.pop("digest", None)
        found[int(path.stem)] = record
    return found
