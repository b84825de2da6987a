"""Figures keep their room: whatever labels, titles and legends take, every panel has its share of its own area."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from splitfed.drawing import figure as style
from splitfed.drawing.figure import LEAST_SHARE, add_legend, as_svg, canvas, keep_room, wrap_label
from splitfed.study.report.data import Study, read_study
from splitfed.study.report.document import write_report
from splitfed.study.report.figures.federated import plot_client_scores
from splitfed.study.report.figures.leakage import plot_scores
from splitfed.study.report.figures.rounds import plot_training_curves, plot_utility_by_round
from splitfed.study.report.figures.strength import plot_leakage_by_strength
from splitfed.study.report.figures.style import SeriesStyles
from splitfed.study.report.figures.tradeoff_front import plot_tradeoff
from splitfed.study.report.summary import summarise
from tests.study.test_report import parsed, put, result
from tests.thinning import thin

pytestmark = pytest.mark.drawn

# 120 characters, as combined defenses and tables of parameters make them.
LONG = (
    "noise" + "+distance_correlation+gradient_compression+quantization+channel_pruning+adversarial+shredder+latent+mid"
)
LONG = f"{LONG}{'+dropout' * 4}"[:120]


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of 16 settings, of families whose names are as long as a line."""
    folder = tmp_path_factory.mktemp("crowded") / "study"
    put(folder, result("none", 0, 0.0, 0.9, {"psnr": 26.0, "ssim": 0.9}), (1, 8, 8), 0)
    for i in range(15):
        found = result("x", 0, 1.0 + i, 0.85 - i / 100, {"psnr": 25.0 - i / 2, "ssim": 0.9 - i / 50})
        family = f"{LONG[:-2]}{i % 5:02d}"
        about = {"name": family, "label": f"{family}(scale={i})", "strength_parameter": "scale"}
        about |= {"strength_unit": "deviations of the batch's release", "stronger": "more"}
        found["defense"] |= about
        found["utility"]["spread"] = {"mean": 0.8, "min": 0.7, "max": 0.9, "std": 0.05, "worst_decile": 0.7}
        put(folder, found | {"id": f"run{i}"}, (1, 8, 8), 0)
    return folder


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[float, float]]]:
    """Collect, for every figure that is drawn, the share of each panel's width and height that its axes got."""
    seen: list[list[tuple[float, float]]] = []

    def watched(figure: Any) -> None:
        keep_room(figure)
        figure.draw_without_rendering()
        width, height, *_ = style._PANELS[figure]
        inches = figure.get_size_inches()
        got = [axis.get_position().size * inches for axis in figure.axes]
        seen.append([(float(w) / width, float(h) / height) for w, h in got])

    monkeypatch.setattr(style, "keep_room", watched)
    return seen


def assert_room(seen: list[list[tuple[float, float]]]) -> None:
    assert seen
    for panels in seen:
        for width, height in panels:
            assert width > LEAST_SHARE[0] - 0.02, seen
            assert height > LEAST_SHARE[1] - 0.02, seen


def made(study: Study, summary: dict[str, Any], looks: SeriesStyles) -> dict[str, Callable[[], str | None]]:
    attack = "inverse_network(budget=quick)"
    named = [(f"{LONG} {i}", s) for i, s in enumerate(study.settings)]
    return {
        "tradeoff": lambda: plot_tradeoff(summary, attack, looks, "a"),
        "strength": lambda: plot_leakage_by_strength(summary, "psnr", "inputs", looks, "b"),
        "curves": lambda: plot_training_curves(summary, study.settings, looks, "c"),
        "dots": lambda: plot_scores(summary, summary["settings"], attack, ["psnr", "ssim"], looks, "d"),
        "by round": lambda: plot_utility_by_round(named, "accuracy", "e"),
        "per client": lambda: plot_client_scores(named, "accuracy", "f"),
    }


@pytest.mark.parametrize("which", thin(["tradeoff", "strength", "curves", "dots", "by round", "per client"], 2))
def test_axes_keep_their_area_under_long_names_and_many_settings(
    crowded: Path, sizes: list[list[tuple[float, float]]], which: str
) -> None:
    study, summary = read_study(crowded), summarise(crowded)
    assert len(summary["settings"]) == 16
    drawn = made(study, summary, SeriesStyles(summary))[which]()
    assert drawn
    assert_room(sizes)


@pytest.mark.exhaustive
def test_a_report_of_long_names_is_whole(crowded: Path) -> None:
    parsed(write_report(crowded).read_text("utf-8"))


def test_a_legend_stays_within_its_figure_and_the_axes_above_it() -> None:
    with canvas(2) as (figure, axes):
        for i in range(12):
            axes[0].plot([0, 1], [0, i], label=f"{LONG} {i}")
        add_legend(figure, axes[0])
        keep_room(figure)
        figure.draw_without_rendering()
        (found,) = figure.legends
        box, whole = found.get_window_extent(), figure.bbox
        assert box.x0 >= 0
        assert box.x1 <= whole.x1 + 1
        assert box.y1 <= min(axis.get_window_extent().y0 for axis in axes)


def test_a_broken_formula_in_a_label_is_only_text() -> None:
    with canvas(1) as (figure, axes):
        axes[0].plot([0, 1], [0, 1], label="none$\\frac{1$ $\\broken{$: strength")
        add_legend(figure, axes[0])
        assert r"$\broken{$" in as_svg(figure, "broken")


def test_ordinary_names_need_no_larger_figure() -> None:
    with canvas(2) as (figure, axes):
        axes[0].plot([0, 1], [0, 1], label="noise")
        axes[0].set(xlabel="PSNR [dB]: more is more leakage", ylabel="test accuracy")
        keep_room(figure)
        assert tuple(figure.get_size_inches()) == (10.6, 3.9)


def test_wrapped_keeps_both_ends_and_every_line_in_its_width() -> None:
    assert wrap_label("noise", 30) == "noise"
    assert wrap_label("", 30) == ""
    for text in (LONG, LONG * 3, "x" * 120, "word " * 40):
        found = wrap_label(text, 34)
        assert found.count("\n") <= 2
        assert all(len(line) <= 34 for line in found.split("\n"))
        assert found.startswith(text[:10])
        assert re.sub(r"\s", "", found).endswith(re.sub(r"\s", "", text)[-10:])
