"""Leakage by cut depth in reports: depth counted by hand, cuts in order, a figure and a grid where cuts differ."""

from __future__ import annotations

import copy
import re
from html import unescape
from pathlib import Path

import pytest
from torch import nn

from splitfed.cli import main
from splitfed.core import digests
from splitfed.models.lenet import lenet
from splitfed.study.report.document import write_report
from splitfed.study.report.figures.depth import cut_of, depth_lines, depth_of, plot_leakage_by_depth
from splitfed.study.report.summary import summarise
from splitfed.study.report.topology_data import input_depth
from splitfed.topologies import extended_vanilla, multi_hop, u_shaped, vanilla, vertical
from tests.study.examples import small, write
from tests.study.test_report import parsed, put, result

CUTS = {"relu2": (5, 18.0), "conv1": (1, 31.0), "pool1": (3, 24.0), "fc1": (8, 12.0)}
LABEL = "inverse_network(budget=quick)"


def net() -> nn.Module:
    return lenet((1, 8, 8), 10)


def test_depth_is_the_steps_before_what_arrives() -> None:
    """conv1 is the first step, pool1 the third; flatten is one too, so fc1 is the eighth."""
    assert {cut: input_depth(vanilla(net(), cut), "server") for cut in CUTS} == {cut: d for cut, (d, _) in CUTS.items()}
    hops = multi_hop(net(), ("relu1", "pool2", "fc2"))
    assert [input_depth(hops, role) for role in ("client", "hop1", "hop2", "server")] == [0, 2, 6, 10]


def test_of_two_ways_in_the_longer_counts_and_what_comes_back_does_too() -> None:
    bottoms = {"a": nn.Linear(3, 4), "b": nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 4))}
    assert input_depth(vertical(bottoms, nn.Linear(8, 2), labels="a"), "server") == 3
    relayed = extended_vanilla(copy.deepcopy(bottoms), nn.Linear(8, 4), nn.Linear(4, 2), labels="a")
    # The relay's fusion is a step, as is its one layer.
    assert (input_depth(relayed, "relay"), input_depth(relayed, "server")) == (3, 5)
    u = u_shaped(net(), ("relu1", "fc2"))
    assert (input_depth(u, "server"), input_depth(u, "client")) == (2, 10)


@pytest.fixture(scope="module")
def studied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cuts") / "whole"
    folder.mkdir()
    for cut, (deep, decibels) in CUTS.items():
        for seed in (0, 1):
            found = result("none", seed, 0.0, 0.9, {"psnr": decibels + seed, "ssim": decibels / 40, "mse": 0.1})
            found["id"] = f"vanilla-{cut}--none--seed{seed}"
            found["topology"] = {"name": "vanilla", "label": f"vanilla(cut={cut})", "parameters": {"cut": cut}}
            found["attacks"][0]["depth"] = deep
            put(folder, found, (1, 8, 8), seed)
    (folder / "config.toml").write_bytes(digests.toml_with_digest('[study]\nname = "cuts"\n'))
    (folder / "environment.json").write_bytes(digests.json_with_digest({}))
    return folder


def test_cuts_stand_in_the_order_of_the_model(studied: Path) -> None:
    (line,) = depth_lines(summarise(studied), LABEL)
    assert line.name == "vanilla, undefended"
    assert [cut_of(s) for s in line.settings] == ["conv1", "pool1", "relu2", "fc1"]


@pytest.mark.drawn
def test_the_page_shows_figure_and_grid_by_depth(studied: Path) -> None:
    page = write_report(studied).read_text("utf-8")
    parser = parsed(page)
    assert len(parser.ids) == len(set(parser.ids))
    section = page.split('<section id="depth">')[1].split("</section>")[0]
    figure, grid = section.split("<table", 1)
    said = re.findall(r">(conv1|relu2|pool1|fc1|baseline: the mean|baseline: another victim)<", unescape(figure))
    # Ticks from shallow to deep in each of two panels, PSNR and SSIM, and one legend.
    assert [s for s in said if not s.startswith("baseline")] == 2 * ["conv1", "pool1", "relu2", "fc1"]
    assert {s for s in said if s.startswith("baseline")} == {"baseline: the mean", "baseline: another victim"}
    named = re.findall(r"PSNR ([\d.]+)", grid)
    # Seed 0 is shown: 31, 24, 18 and 12 dB.
    assert named == ["31.0", "24.0", "18.0", "12.0"]
    assert grid.count("<img") == 1 + len(CUTS)


def test_without_several_cuts_there_is_no_such_section(studied: Path) -> None:
    summary = summarise(studied)
    one = {**summary, "settings": summary["settings"][:1]}
    assert plot_leakage_by_depth(one, LABEL, ["psnr"], "x") == ""
    old = copy.deepcopy(summary)
    for setting in old["settings"]:
        del setting["attacks"][LABEL]["depth"]
    assert plot_leakage_by_depth(old, LABEL, ["psnr"], "x") == ""


def test_defenses_have_lines_of_their_own(studied: Path) -> None:
    summary = summarise(studied)
    other = copy.deepcopy(summary["settings"])
    for setting in other:
        setting |= {"defense": "noise(scale=1)", "family": "noise"}
    both = {**summary, "settings": [*summary["settings"], *other]}
    both["names"] = {**summary["names"], "noise(scale=1)": "noise(scale=1)"}
    assert [line.name for line in depth_lines(both, LABEL)] == ["vanilla, undefended", "vanilla, noise(scale=1)"]


def test_hijacked_trainings_keep_out_of_honest_lines(tmp_path: Path) -> None:
    """At every cut an honest run and a hijacked one: each attack has the pictures of its own runs."""
    folder, inside = tmp_path / "both", "fsha(budget=quick)"
    folder.mkdir()
    for cut in ("conv1", "pool1"):
        for intruder in (None, inside):
            deep, decibels = CUTS[cut][0], CUTS[cut][1] - 5 * (intruder is not None)
            found = result("none", 0, 0.0, 0.9, {"psnr": decibels, "ssim": 0.5, "mse": 0.1})
            found["id"] = f"vanilla-{cut}--{'fsha-inside' if intruder else 'honest'}--seed0"
            found["topology"] = {"name": "vanilla", "label": f"vanilla(cut={cut})", "parameters": {"cut": cut}}
            found["training_attack"] = intruder
            found["attacks"][0] |= {"depth": deep, **({"label": inside, "attack": "fsha"} if intruder else {})}
            put(folder, found, (1, 8, 8), 0)
    (folder / "config.toml").write_bytes(digests.toml_with_digest('[study]\nname = "both"\n'))
    (folder / "environment.json").write_bytes(digests.json_with_digest({}))
    summary = summarise(folder)
    for attack in (LABEL, inside):
        assert [line.name for line in depth_lines(summary, attack)] == ["vanilla, undefended"]
    assert {s["training_attack"] for s in depth_lines(summary, LABEL)[0].settings} == {""}
    section = write_report(folder).read_text("utf-8").split('<section id="depth">')[1].split("</section>")[0]
    named = [re.findall(r"PSNR ([\d.]+)", part) for part in section.split("<h3>")[1:]]
    assert sorted(named) == [["26.0", "19.0"], ["31.0", "24.0"]]


def test_from_study_to_report(tmp_path: Path) -> None:
    """A grid of two cuts, written with the deeper one first: results say how deep, the report puts them in order."""
    study = small(
        model={"name": "mlp", "hidden": [24, 12]},
        topology=[{"name": "vanilla", "cut": ["relu2", "relu1"]}],
        defense=[{"name": "none"}],
    )
    assert main(["run", str(write(tmp_path, study)), "--folder", str(tmp_path / "out")]) == 0
    summary = summarise(tmp_path / "out")
    (attack,) = summary["attacks"]
    (line,) = depth_lines(summary, attack)
    depths = [depth_of(s, attack) for s in line.settings]
    assert [cut_of(s) for s in line.settings] == ["relu1", "relu2"]
    # Flatten, two layers and two activations: the second cut is two steps deeper.
    assert depths[1] == depths[0] + 2
    assert '<section id="depth">' in (tmp_path / "out" / "report.html").read_text("utf-8")
