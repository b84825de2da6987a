"""The table [search]: every mistake has its line, all are told at once, and what is read is what was meant."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from splitfed.core.errors import InvalidInput
from splitfed.models.import_paths import NameResolver
from splitfed.study.config.grid import Grid
from splitfed.study.config.mistakes import InvalidStudy
from splitfed.study.config.search import SearchStudy, read_search
from splitfed.study.config.search_space import active, count_points, describe, dimensions, list_points, list_variations
from splitfed.study.run import checked_study
from splitfed.study.run.search_check import check_search
from splitfed.study.run.search_queue import list_fixed_points
from tests.study.examples import checked
from tests.study.search_examples import read, searching

ATTACKS = [{"name": "rmle", "iterations": 1}, {"name": "inverse_network", "budget": "quick"}]
GOALS = "expected 'minimize' or 'maximize'"
NUMBER = "is not allowed; expected a number"


def lines(study: dict[str, Any]) -> list[str]:
    with pytest.raises(InvalidStudy) as caught:
        read(study)
    return [line.removeprefix("study.toml: ") for line in caught.value.lines]


def with_lr(value: Any) -> dict[str, Any]:
    return searching(training={"optimizer": {"name": "SGD", "lr": value}})


WRONG: list[tuple[dict[str, Any], str]] = [
    # The table itself.
    ({"sampler": "tpw"}, "search.sampler: 'tpw' is not allowed; expected 'tpe' or 'nsga2' or 'nsga3' or 'random' or"),
    ({"trials": None}, "search.trials: is missing; add trials = ..."),
    ({"trials": 0}, "search.trials: trials=0 is not allowed; expected a whole number of at least 1"),
    (
        {"sampler": "grid", "trials": None},
        "search.sampler: training.optimizer.lr is a range without steps, which has no",
    ),
    ({"objectives": None}, "search.objectives: is missing; expected a table"),
    ({"objectives": {}}, "search.objectives: {} is not allowed; expected"),
    ({"trial": 3}, "search.trial: unknown key 'trial'; did you mean 'trials'"),
    ({"population": 4}, "search.population: is for nsga2 and nsga3, not for random"),
    (
        {"population": 1, "sampler": "nsga2"},
        "search.population: population=1 is not allowed; expected a whole number of at least 2",
    ),
    ({"startup": 4}, "search.startup: is for tpe, not for random"),
    (
        {"startup": 0, "sampler": "tpe"},
        "search.startup: startup=0 is not allowed; expected a whole number of at least 1",
    ),
    (
        {"prune": {"percentile": 100}},
        "search.prune.percentile: percentile=100 is not allowed; expected a number in (0, 100)",
    ),
    (
        {"prune": {"startup": 0}},
        "search.prune.startup: startup=0 is not allowed; expected a whole number of at least 1",
    ),
    ({"prune": {"warmup": 0}}, "search.prune.warmup: warmup=0 is not allowed; expected a whole number of at least 1"),
    ({"prune": {"percent": 3}}, "search.prune.percent: unknown key 'percent'; did you mean 'percentile'?"),
    (
        {"storage": "study.db"},
        "search.storage: 'study.db' is not allowed; expected an SQL address such as postgresql://",
    ),
    ({"storage": "mysql://me:secret@host/a"}, "search.storage: holds a password, which every copy of the study would"),
    # Objectives.
    ({"objectives": {"utility": "up"}}, f"search.objectives.utility: 'up' is not allowed; {GOALS}"),
    ({"objectives": {"utility": {"cap": 1}}}, f"search.objectives.utility.direction: is missing; {GOALS}"),
    ({"objectives": {"bytes": {"direction": "minimize", "cap": "x"}}}, f"search.objectives.bytes.cap: 'x' {NUMBER}"),
    (
        {"objectives": {"bytes": {"direction": "minimize", "limit": 3}}},
        "search.objectives.bytes.limit: unknown key 'limit'",
    ),
    (
        {"objectives": {"epsilon": "minimize"}},
        "search.objectives.epsilon: has no bound where nothing is promised, so it",
    ),
    (
        {"objectives": {"utilty": "maximize"}},
        "search.objectives.utilty: unknown metric 'utilty'; did you mean 'utility'",
    ),
    ({"objectives": {"tpr_at_fpr_1%": "minimize"}}, "search.objectives.tpr_at_fpr_1%: tpr_at_fpr_1% is a score of"),
    (
        {"objectives": {"psnr": "minimize"}},
        "search.objectives.psnr: psnr is a score of several attacks; expected rmle.",
    ),
    (
        {"objectives": {"rmel.psnr": "minimize"}},
        "search.objectives.rmel.psnr: unknown attack 'rmel'; did you mean 'rmle'?",
    ),
    ({"objectives": {"rmle": {"psnrr": "minimize"}}}, "search.objectives.rmle.psnrr: unknown score of rmle 'psnrr'"),
    # Constraints.
    ({"constraints": "epsilon <= 3"}, "search.constraints: 'epsilon <= 3' is not allowed; expected"),
    ({"constraints": ["epsilon < 3"]}, "search.constraints[0]: 'epsilon < 3' is not allowed; expected text such as"),
    ({"constraints": ["epsilon <= three"]}, "search.constraints[0]: 'epsilon <= three' is not allowed; expected text"),
    (
        {"constraints": ["bytes <= 3", "byte >= 1"]},
        "search.constraints[1]: unknown metric 'byte'; did you mean 'bytes'?",
    ),
]


@pytest.mark.parametrize(("search", "line"), WRONG, ids=[line.split(";")[0][:70] for _, line in WRONG])
def test_a_mistake_in_the_search_has_its_line(search: dict[str, Any], line: str) -> None:
    found = lines(searching(search, attack=ATTACKS))
    assert len(found) == 1, found
    assert found[0].startswith(line), found[0]


WRONG_VALUES: list[tuple[Any, str]] = [
    ({"low": 0.1}, "high: is missing; expected a number"),
    ({"high": 0.1}, "low: is missing; expected a number"),
    ({"low": "a", "high": 1.0}, f"low: 'a' {NUMBER}"),
    ({"low": 0.1, "high": True}, f"high: True {NUMBER}"),
    ({"low": 0.2, "high": 0.1}, "high: high=0.1 is not allowed; expected a number above low = 0.2"),
    ({"low": 0.0, "high": 0.1, "log": True}, "low: low=0.0 is not allowed; expected a number above 0, as log = true"),
    ({"low": 0.1, "high": 0.2, "log": 1}, "log: 1 is not allowed; expected true or false"),
    ({"low": 0.1, "high": 0.2, "log": True, "step": 0.1}, "step: step=0.1 is not allowed beside log = true"),
    ({"low": 0.1, "high": 0.2, "step": 0.0}, "step: step=0.0 is not allowed; expected a number above 0"),
    ({"low": 1, "high": 2, "step": 0.5}, "step: step=0.5 is not allowed; expected a whole number of at least 1"),
    ({"low": 0.1, "high": 0.2, "step": 1e-9}, "step: step=1e-09 is not allowed; the range has more than 10000 steps"),
    ({"low": 0.1, "high": 0.2, "setp": 0.05}, "setp: unknown key 'setp'; did you mean 'step'?"),
    ({"choice": []}, "choice: [] is not allowed; expected a list of values"),
    ({"choice": 0.1}, "choice: 0.1 is not allowed; expected a list of values"),
    ({"choice": [0.1, 0.2, 0.1]}, "choice: 0.1 is there twice; expected once"),
    ({"choice": [0.1, 0.2], "log": True}, "log: unknown key 'log'"),
]


@pytest.mark.parametrize(("value", "line"), WRONG_VALUES, ids=[json.dumps(value) for value, _ in WRONG_VALUES])
def test_a_mistake_in_a_range_or_a_choice_has_its_line(value: Any, line: str) -> None:
    (found,) = lines(with_lr(value))
    assert found.startswith(f"training.optimizer.lr.{line}"), found


def test_what_cannot_vary_is_refused() -> None:
    study = searching(data={"name": "digits", "victims": {"low": 1, "high": 3}})
    assert lines(study)[0] == (
        "data.victims: is the same in every trial; what varies stands in model, training, topology, method, defense"
    )
    nothing = searching(training={"rounds": 1}, topology=[{"name": "vanilla", "cut": "relu1"}], defense=None)
    assert lines(nothing) == [
        "search: nothing varies: write {low = ..., high = ...} or {choice = [...]} where a value stands"
    ]


def test_an_end_of_a_range_or_an_option_that_is_not_allowed_is_told_at_its_place() -> None:
    study = searching(
        topology=[{"name": "vanilla", "cut": "relu1"}, {"name": "u_shaped", "cuts": ["fc1", "relu1"], "color": "red"}],
        defense=[{"name": "none"}, {"name": "noise", "scale": {"low": -1.0, "high": 1.0}}],
    )
    found = lines(study)
    assert any(line.startswith("topology[1].color: unknown key 'color'") for line in found), found
    assert any(line.startswith("defense[1].scale: ") and "-1" in line for line in found), found
    assert len(found) == 2


def test_all_mistakes_are_told_at_once() -> None:
    study = with_lr({"low": 0.2, "high": 0.1})
    study["search"] |= {"sampler": "tpw"}
    study["training"]["round"] = 3
    assert [line.split(": ")[0] for line in lines(study)] == [
        "training.optimizer.lr.high",
        "search.sampler",
        "training.round",
    ]


def test_metrics_that_no_run_can_have_are_refused_before_any_trial() -> None:
    study = searching(
        {"objectives": {"utility_validation": "maximize", "rmle.r2": "minimize", "simulated_seconds": "minimize"}},
        attack=ATTACKS[:1],
        data={"name": "digits", "victims": 8, "auxiliary": 16, "validation": 0.0},
    )
    study["search"]["constraints"] = ["rounds_to_target <= 3"]
    with pytest.raises(InvalidStudy) as caught:
        check_search(*_first(study))
    assert [line.removeprefix("study.toml: ") for line in caught.value.lines] == [
        "search.objectives.utility_validation: utility_validation needs validation rows; give data.validation = 0.1",
        "search.objectives.rmle.r2: r2 is no score of images; expected psnr",
        "search.objectives.simulated_seconds: simulated_seconds needs the speeds of parties; add [training.speeds]",
        "search.constraints[0]: rounds_to_target needs study.target",
    ]


def _first(study: dict[str, Any]) -> tuple[SearchStudy, Grid]:
    return read_search(study, "study.toml", Path(), NameResolver(Path()))


def test_a_value_that_fits_nowhere_is_refused_before_any_trial_and_one_that_fits_once_is_not() -> None:
    cuts = searching(topology=[{"name": "vanilla", "cut": ["relu1", "relu9"]}], defense=None)
    with pytest.raises(InvalidStudy, match=r"topology\[0\].*relu9"):
        check_search(*_first(cuts))
    # Averaging of clients takes the schedule in which nobody else averages.
    two = {"name": "digits", "victims": 8, "auxiliary": 16, "clients": 2}
    layered = searching(method=[{"name": "none"}, {"name": "fedavg"}], defense=None, data=two)
    with pytest.raises(InvalidStudy) as caught:
        check_search(*_first(layered))
    (line,) = caught.value.lines
    assert line.startswith("study.toml: method[1]: ")
    layered["training"]["schedule"] = ["sequential", "splitfed_v3"]
    check_search(*_first(layered))


def test_a_grid_takes_no_number_of_trials() -> None:
    study = searching({"sampler": "grid"}, training={"rounds": 1}, defense=None)
    assert lines(study) == ["search.trials: is for other samplers; grid tries every combination once"]


def test_a_list_inside_a_piece_that_makes_a_grid_is_a_choice() -> None:
    study = searching(
        model=None,
        data={"name": "digits", "victims": 8, "auxiliary": 16, "strips": 2},
        topology=[
            {
                "name": "extended_vanilla",
                "bottoms": {"model": "mlp", "hidden": [], "width": [4, 8]},
                "middle": {"model": "mlp", "hidden": [], "width": 9},
                "top": {"model": "mlp", "hidden": []},
                "labels": "server",
            }
        ],
    )
    assert dimensions(read(study).tree)["topology[0].bottoms.width"][0].ends == (0, 1)
    study["topology"][0]["bottoms"]["width"] = {"choice": [4, 8]}
    assert "topology[0].bottoms.width" in dimensions(read(study).tree)


def test_what_varies_is_named_by_its_place_and_conditions_are_kept() -> None:
    study = searching(
        training={
            "rounds": {"low": 1, "high": 3},
            "schedule": ["sequential", {"name": "splitfed_v1"}],
            "optimizer": {
                "choice": [{"name": "SGD", "lr": {"low": 0.1, "high": 1.0, "step": 0.3}}, {"name": "Adam", "lr": 0.001}]
            },
        },
        model={"name": "mlp", "hidden": {"choice": [[4], [8, 8]]}},
        defense=[{"combine": [{"name": "noise", "scale": [0.1, 0.2]}, {"name": "label_dp", "epsilon": 1.0}]}],
    )
    tree = read(study).tree
    assert list(dimensions(tree)) == [
        *("model.hidden", "training.rounds", "training.schedule", "training.optimizer", "training.optimizer[0].lr"),
        *("topology[0].cut", "defense[0].combine[0].scale"),
    ]
    inner, around = dimensions(tree)["training.optimizer[0].lr"]
    assert inner.ends == (0.1, 1.0)
    assert inner.values == (0.1, 0.4, 0.7, 1.0)
    assert around == {"training.optimizer": 0}
    first = list_variations(tree)[0]
    chosen = {**first, "training.optimizer": 1, "model.hidden": 1}
    assert "training.optimizer[0].lr" not in active(tree, chosen)
    assert describe(tree, chosen)["training.optimizer"] == "Adam"
    assert describe(tree, chosen)["model.hidden"] == "[8, 8]"
    # 2 models, 3 rounds, 2 schedules, 4 rates of SGD and one Adam, 2 cuts, 2 scales.
    assert count_points(tree) == len(list_points(tree)) == 2 * 3 * 2 * (4 + 1) * 2 * 2


def test_the_study_of_a_trial_has_one_of_each() -> None:
    search = read(searching())
    study = search.study_of(
        {"training.optimizer.lr": 0.25, "topology[0].cut": 1, "defense": 1, "defense[1].scale": 0.5}
    )
    assert study["training"]["optimizer"] == {"name": "SGD", "lr": 0.25}
    assert study["topology"] == [{"name": "vanilla", "cut": "fc1"}]
    assert study["defense"] == [{"name": "noise", "scale": 0.5, "relative": True}]
    assert "search" not in study


def test_a_grid_of_a_search_is_the_grid_of_a_study() -> None:
    study = searching({"sampler": "grid", "trials": None}, training={"rounds": 1})
    study["defense"][1]["scale"] = [0.5, 1.0]
    search = read(study)
    found = {search.expand(point).cells[0].id.rsplit("--", 2)[0] for point in list_points(search.tree)}
    plain = {key: table for key, table in study.items() if key != "search"}
    assert found == {cell.id.rsplit("--", 1)[0] for cell in checked(plain).cells}
    assert len(found) == search.trials == 6


def test_random_and_qmc_points_depend_on_the_seed_alone() -> None:
    for sampler in ("random", "qmc"):
        search = read(searching({"sampler": sampler, "trials": 8}))
        points = list_fixed_points(search)
        assert len(points) == 8
        assert points == list_fixed_points(search)
        # A longer search begins with the trials of the shorter one.
        assert list_fixed_points(read(searching({"sampler": sampler, "trials": 16})))[:8] == points
        other = searching({"sampler": sampler, "trials": 8}, study={"name": "search", "seeds": [1]})
        assert list_fixed_points(read(other)) != points
        rates = [point["training.optimizer.lr"] for point in points]
        assert all(0.01 <= rate <= 0.5 for rate in rates)
        assert all(("defense[1].scale" in point) == (point["defense"] == 1) for point in points)


def test_points_of_qmc_fill_the_space_evenly() -> None:
    # Of a scrambled Sobol sequence each half of any parameter holds half of every 2^k points.
    points = list_fixed_points(read(searching({"sampler": "qmc", "trials": 16})))
    cuts = [point["topology[0].cut"] for point in points]
    middle = (0.01 * 0.5) ** 0.5
    assert cuts.count(0) == cuts.count(1) == 8
    assert sum(point["training.optimizer.lr"] < middle for point in points) == 8


def test_a_search_is_no_grid() -> None:
    study = searching({"sampler": "grid", "trials": None}, training={"rounds": 1})
    study["defense"] = [{"name": "none"}]
    with pytest.raises(InvalidInput, match="search: is no grid"):
        checked_study.check_study(study, "study.toml", Path())
