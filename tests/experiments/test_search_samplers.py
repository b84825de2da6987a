"""Samplers against a grid: the volume by hand, a grid of forty points inside the ranges, and what is shown of some."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from experiments.papers import search_samplers
from experiments.papers.search_samplers import ARMS, GENETIC, GRID, PLAIN, TPE, hypervolume, measure, show, study
from experiments.papers.search_volume import front, volume
from splitfed.models.import_paths import NameResolver
from splitfed.study.config.lookup import StudyReader
from splitfed.study.config.mistakes import Mistakes
from splitfed.study.config.search_space import SearchChoice, SearchRange, count_points, dimensions, read_space


def test_volumes_that_a_person_can_work_out() -> None:
    assert volume([], (1.0, 1.0)) == 0.0
    assert volume([(0.25,)], (1.0,)) == 0.75
    # Two rectangles of .5 x 1 and 1 x .5 share a square of .5 x .5.
    assert volume([(0.5, 0.0), (0.0, 0.5)], (1.0, 1.0)) == 0.75
    # Three slabs of .5 x 1 x 1, each two of which share .25, and all three .125.
    slabs = [(0.5, 0.0, 0.0), (0.0, 0.5, 0.0), (0.0, 0.0, 0.5)]
    assert volume(slabs, (1.0, 1.0, 1.0)) == 1.5 - 0.75 + 0.125
    # A dominated point adds nothing, nor one on the reference or beyond it.
    more = [*slabs, (0.6, 0.6, 0.6), (1.0, 0.0, 0.0), (0.0, 0.0, 2.0)]
    assert volume(more, (1.0, 1.0, 1.0)) == 0.875


def test_the_front_has_no_dominated_point_and_equal_ones_once() -> None:
    assert front([(1.0, 2.0), (2.0, 1.0), (2.0, 2.0), (1.0, 2.0), (0.0, 3.0)]) == [0, 1, 4]


def test_a_hypervolume_is_a_share_of_the_box_and_the_test_rows_judge_the_front_of_the_validation_rows() -> None:
    # Half of the accuracy, of 25 dB and of epsilon 55: an eighth of the box.
    half = ["noise", 0.5, 0.25, 12.5, 27.5]
    assert hypervolume([half]) == pytest.approx(1 / 8)
    assert hypervolume([half], judged_by=2) == pytest.approx(1 / 16)
    beaten = ["dropout", 0.4, 0.9, 12.5, 27.5]
    assert hypervolume([half, beaten], judged_by=2) == pytest.approx(1 / 16), "it is not on the front"


def test_every_sampler_has_the_same_space_and_the_grids_have_forty_points_in_it() -> None:
    spaces = {arm.label: read_space(StudyReader(Mistakes("study"), NameResolver()), study(arm, 0)) for arm in ARMS}
    ranges = {name: one for name, (one, _) in dimensions(spaces[GENETIC.label]).items()}
    assert all(dimensions(space).keys() == ranges.keys() for space in spaces.values())
    for arm in (arm for arm in ARMS if arm.table["sampler"] == "grid"):
        assert count_points(spaces[arm.label]) == 40
        for name, (choice, _) in dimensions(spaces[arm.label]).items():
            around = ranges[name]
            assert isinstance(choice, SearchChoice)
            if isinstance(around, SearchRange):
                assert all(around.low <= value <= around.high for value in choice.options)
                assert arm.ends == (around.low in choice.options)
    assert {study(arm, 0)["search"].get("trials", 40) for arm in ARMS} == {40}


def entry(*trials: list[Any]) -> dict[str, Any]:
    return {"seconds": 1.0, "lost": 0, "trials": list(trials)}


def test_differences_are_paired_by_seed(tmp_path: Path) -> None:
    done = {
        f"{arm.label} | seed {seed}": entry(["none", share, share, 12.5, 27.5])
        for arm, shares in ((GENETIC, (0.6, 0.8, 1.0)), (GRID, (0.2, 0.4, 0.6)), (TPE, (0.1,)))
        for seed, share in enumerate(shares)
    }
    text = show(done, tmp_path)
    # A quarter of the box for an accuracy of 1: always .4 more is 10 points.
    assert "| `nsga2` | 20.00 (10.32 to 35.21) | 20.00 (10.32 to 35.21) | +10.00 (10.00 to 10.00) |" in text
    assert "| confirmed | 1.0 | 3 |" in text
    assert "| `tpe` | 2.50 | 2.50 | -2.50 | -2.50 | not settled | 1.0 | 1 |" in text
    assert (tmp_path / "search_samplers.svg").read_text("utf-8").startswith("<?xml")
    assert show({}, None).endswith(search_samplers.REMARKS)


# Half a minute: imports, three settings that are trained and attacked.
@pytest.mark.exhaustive
def test_a_tiny_search_is_measured_and_gone_on_with(tmp_path: Path) -> None:
    changes = {"training": {"rounds": 1, "evaluate_every": 1}, "search": {"trials": 2, "population": 2}}
    found = measure(GENETIC, 0, tmp_path, changes)
    assert len(found["trials"]) + found["lost"] == 2
    for setting, validation, test, psnr, epsilon in found["trials"]:
        assert "vanilla(cut=" in setting
        assert 0 <= min(validation, test) <= max(validation, test) <= 1
        assert psnr > 0
        assert 0 < epsilon <= search_samplers.CAP
    assert measure(GENETIC, 0, tmp_path, changes) == found


def test_the_plain_sampler_draws_without_what_the_library_adds() -> None:
    made = search_samplers.search_queue.DistinctSampler
    with search_samplers._draws(PLAIN):
        assert search_samplers.search_queue.DistinctSampler("inner", {}, [], str) == "inner"
    with search_samplers._draws(GENETIC):
        assert search_samplers.search_queue.DistinctSampler is made
    assert search_samplers.search_queue.DistinctSampler is made
