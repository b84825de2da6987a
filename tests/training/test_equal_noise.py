"""Private runs that draw the same noise: a second one from the same seed on the same rows says so when it begins."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

import splitfed as sf
from splitfed.core.defense import Defense
from splitfed.defenses import GaussianRelease, LabelDp, Noise
from splitfed.federated import FedProto
from splitfed.models.mlp import mlp
from splitfed.topologies import local, vanilla
from tests.examples import toy_data

PRIVATE = GaussianRelease(noise_multiplier=4.0)
EQUAL = "run 'first' beside this one drew private noise from the same seed=0 on the same rows"


def go(folder: Path, *defenses: Defense, rows: int = 40, resume: bool = False, **options: Any) -> sf.Run:
    data = toy_data(rows).clients(2, auxiliary=4, victims=4)
    topology = options.pop("topology", None) or vanilla(mlp((1, 8, 8), 10, (8, 8), seed=0), "relu1")
    logging = sf.Logging(folder=folder, resume=resume)
    return sf.train(topology, data, defenses=defenses, rounds=1, logging=logging, **options)


@pytest.mark.parametrize("second", [(GaussianRelease(noise_multiplier=8.0),), (PRIVATE, LabelDp(1.0))])
def test_the_same_seed_again_is_warned_of(tmp_path: Path, second: tuple[Defense, ...]) -> None:
    go(tmp_path / "first", PRIVATE)
    with pytest.warns(UserWarning, match=EQUAL):
        go(tmp_path / "second", *second)


def test_a_method_that_is_private_itself_counts(tmp_path: Path) -> None:
    for name, private in (("first", {"noise_multiplier": 2.0}), ("second", {"noise_multiplier": 3.0})):
        topology = local(mlp((1, 8, 8), 10, (8, 8), seed=0), ("relu1",))
        topology.segments[0].module.requires_grad_(False)
        given = {"topology": topology, "schedule": "independent", "method": FedProto(private=private)}
        if name == "first":
            go(tmp_path / name, **given)
            continue
        with pytest.warns(UserWarning, match=EQUAL):
            go(tmp_path / name, **given)


def test_other_seeds_other_rows_and_other_folders_are_silent(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        go(tmp_path / "a" / "first", PRIVATE)
        go(tmp_path / "a" / "other seed", PRIVATE, seed=1)
        go(tmp_path / "a" / "other rows", PRIVATE, rows=44)
        go(tmp_path / "a" / "no promise", Noise(scale=1.0))
        go(tmp_path / "a" / "nothing")
        go(tmp_path / "b" / "first", PRIVATE)
        go(tmp_path / "a" / "the very same, which says nothing new", PRIVATE)
        go(tmp_path / "a" / "first", PRIVATE, resume=True)


def test_files_that_are_no_runs_are_passed_over(tmp_path: Path) -> None:
    for name, content in (("empty", ""), ("list", "[]"), ("nested", "[" * 10_000), ("else", '{"digest": 1}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(content)
    (tmp_path / "folder" / "run.json").mkdir(parents=True)
    go(tmp_path / "first", PRIVATE)
