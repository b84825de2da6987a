"""The strength of a defense: every registered one names its own, a study tells it, and a plot is drawn along it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from splitfed import registry
from splitfed.core.annealing import Linear
from splitfed.core.defense import Defense, Strength
from splitfed.study.config import schema
from splitfed.study.config.grid import expand
from splitfed.study.config.run_spec import DefenseSetting
from splitfed.study.report.document import write_report
from splitfed.study.report.figures.strength import (
    families_without_strength,
    plot_leakage_by_strength,
    strength_panels,
    undefended_position,
)
from splitfed.study.report.figures.style import SeriesStyles
from splitfed.study.report.summary import summarise
from splitfed.study.results import result_from_json
from splitfed.study.run import results_csv
from splitfed.study.run.runner import _describe_strength
from tests.study.test_report import parsed, put, result

DEFENSES = sorted(registry.TABLES["defenses"])
# defense -> (what it needs, its parameter, from weak to strong); None: it has no strength.
STRENGTHS: dict[str, tuple[Mapping[str, Any], str, tuple[Any, ...]] | None] = {
    "adversarial": ({}, "weight", (0.1, 0.3)),
    "channel_pruning": ({}, "ratio", (0.2, 0.5)),
    "distance_correlation": ({}, "alpha", (0.1, Linear(0.0, 0.5, 3))),
    "dp_sgd": ({"delta": 1e-5}, "epsilon", (8.0, 2.0)),
    "dropout": ({}, "rate", (0.2, 0.5)),
    "gaussian_release": ({}, "epsilon", (8.0, 2.0)),
    "gradient_compression": ({}, "share", (0.5, 0.1)),
    "gradient_rounding": ({}, "bins", (12, 3)),
    "iso": ({}, "ratio", (0.5, 2.0)),
    "label_dp": ({}, "epsilon", (8.0, 2.0)),
    "laplace_release": ({}, "epsilon", (8.0, 2.0)),
    "latent": ({}, "epsilon", (8.0, 2.0)),
    "marvell": ({}, "s", (0.5, 2.0)),
    "max_norm": None,
    "mid": ({}, "weight", (1e-3, 1e-2)),
    "mid_labels": ({}, "weight", (1e-3, 1e-2)),
    "noise": ({}, "scale", (0.5, 2.0)),
    "quantization": ({}, "bits", (8, 2)),
    "shredder": ({}, "target", (0.5, 2.0)),
    "top_k": ({}, "k", (16, 4)),
}


def test_every_registered_defense_is_in_the_table() -> None:
    assert sorted(STRENGTHS) == DEFENSES


@pytest.mark.parametrize("name", DEFENSES)
def test_more_of_the_parameter_that_is_named_is_another_strength(name: str) -> None:
    kind = registry.load("defenses", name)
    written = any("strength" in vars(base) for base in kind.__mro__ if base not in (Defense, object))
    assert written or any("strength" in one.metadata for one in fields(kind)), "it says so itself"
    row = STRENGTHS[name]
    if row is None:
        assert kind().strength is None
        return
    given, parameter, values = row
    weak, strong = (kind(**given, **{parameter: value}).strength for value in values)
    assert {weak.name, strong.name} == {parameter}
    assert (strong.value > weak.value) == strong.rises
    assert strong.value != weak.value
    ends = [value.end if isinstance(value, Linear) else value for value in values]
    assert [weak.value, strong.value] == ends


def test_without_a_target_epsilon_the_multiplier_is_the_strength() -> None:
    for name, unit in (("dp_sgd", "clipping norms"), ("gaussian_release", "sensitivities")):
        defense = registry.load("defenses", name)(noise_multiplier=1.5)
        assert defense.strength == Strength("noise_multiplier", 1.5, unit)


def test_a_defense_of_the_users_own_has_none_unless_it_says_so() -> None:
    assert Defense().strength is None


def guarded(*tables: dict[str, Any]) -> list[DefenseSetting]:
    raw = {
        "study": {"name": "s"},
        "data": {"name": "digits"},
        "model": {"name": "lenet"},
        "topology": [{"name": "vanilla", "cut": "pool1"}],
        "defense": list(tables),
    }
    return [cell.defense for cell in expand(schema.parse_study(raw, "study.toml"), "study.toml", Path()).cells]


def test_epsilon_2_and_8_stand_apart_in_a_study() -> None:
    """Of dp_sgd(max_norm=1, epsilon=2) and (max_norm=1, epsilon=8) the first numbers are the same."""
    found = guarded({"name": "dp_sgd", "epsilon": [2.0, 8.0], "delta": 1e-5}, {"name": "none"})
    assert [f.strength and f.strength.value for f in found] == [2.0, 8.0, None]
    assert [f.label for f in found[:2]] == [
        "dp_sgd(max_norm=1, epsilon=2, delta=1e-05)",
        "dp_sgd(max_norm=1, epsilon=8, delta=1e-05)",
    ], "labels name runs, so they stay as they are"
    assert _describe_strength(found[0]) == {
        "strength": 2.0,
        "strength_parameter": "epsilon",
        "strength_unit": "of the run, at delta 1e-05",
        "stronger": "less",
    }
    assert _describe_strength(found[2]) == {}


def test_of_combined_defenses_the_one_that_varies_counts() -> None:
    noise, bits = {"name": "noise", "scale": 1.0}, {"name": "quantization", "bits": [4, 8]}
    found = guarded({"combine": [noise, bits]})
    found += guarded({"combine": [{"name": "noise", "scale": [1.0, 2.0]}, bits]})
    strengths = [f.strength for f in found]
    assert [(s.name, s.value) for s in strengths[:2] if s] == [("quantization bits", 4), ("quantization bits", 8)]
    assert [(s.name, s.value) for s in strengths[2:] if s] == [("noise scale", v) for v in (1.0, 1.0, 2.0, 2.0)]
    # What varies in the first is no strength of it, so that the second counts.
    kinds = {"name": "noise", "kind": ["gaussian", "laplace"]}
    assert {f.strength.name for f in guarded({"combine": [kinds, bits]}) if f.strength} == {"quantization bits"}


def epsilons(folder: Path) -> Path:
    """A study of an undefended run, DP-SGD at three epsilons, noise, and a defense without a strength."""
    about = {"strength_parameter": "epsilon", "strength_unit": "of the run, at delta 1e-05", "stronger": "less"}
    for epsilon in (8.0, 2.0, 1.0):
        found = result(f"dp_sgd(max_norm=1, epsilon={epsilon:g})", 0, epsilon, 0.8, {"psnr": 12.0 + epsilon})
        found["defense"] |= about
        put(folder, found, (1, 8, 8), 0)
    put(folder, result("none", 0, 0.0, 0.9, {"psnr": 26.0}), (1, 8, 8), 0)
    other = result("max_norm", 0, 0.0, 0.9, {"psnr": 26.0}) | {"id": "max_norm"}
    other["defense"] |= {"strength": None, "strength_parameter": None, "strength_unit": None, "stronger": None}
    put(folder, other, (1, 8, 8), 0)
    return folder


@pytest.mark.drawn
def test_the_report_names_parameter_and_unit_and_rises_to_the_right(tmp_path: Path) -> None:
    folder = epsilons(tmp_path / "private")
    summary = summarise(folder)
    assert strength_panels(summary) == [("dp_sgd", "epsilon (of the run, at delta 1e-05)", False)]
    assert families_without_strength(summary) == ["max_norm"]
    private = [s["strength"] for s in summary["settings"] if s["family"] == "dp_sgd"]
    assert private == [8.0, 2.0, 1.0], "from weak to strong"
    drawn = plot_leakage_by_strength(summary, "psnr", "inputs", SeriesStyles(summary), "x")
    ticks = re.findall(r">(undefended|\d+)</text>", drawn)
    # Evenly spaced epsilons 1, 2, 8: a usual step is the square root of 8.
    assert undefended_position([1.0, 2.0, 8.0]) == pytest.approx(8 * 8**0.5)
    places = {text: float(x) for x, text in re.findall(r'<text[^>]*x="([\d.]+)"[^>]*>(undefended|8|2|1)</text>', drawn)}
    assert {"undefended", "8", "2", "1"} <= set(ticks)
    assert places["undefended"] < places["8"] < places["2"] < places["1"]
    page = write_report(folder).read_text("utf-8")
    parsed(page)
    assert "dp_sgd: epsilon (of the run, at delta 1e-05)" in page
    assert "epsilon (of the run, at delta 1e-05) 2<" in page
    assert "and so without a panel: max_norm." in page
    assert "no strength parameter" in page


def test_the_table_of_results_has_parameter_unit_and_direction() -> None:
    found = result("noise(scale=2)", 0, 2.0, 0.8, {"psnr": 20.0})
    found["defense"] |= {"strength_parameter": "scale", "strength_unit": "units of the release", "stronger": "more"}
    (row,) = results_csv.table_rows(result_from_json(found))
    assert [row[key] for key in results_csv.STRENGTH] == [2.0, "scale", "units of the release", "more"]


def test_strength_follows_a_replaced_parameter() -> None:
    noise = registry.load("defenses", "noise")(scale=1.0)
    assert replace(noise, scale=3.0, relative=True).strength == Strength(
        "scale", 3.0, "deviations of the batch's release"
    )
