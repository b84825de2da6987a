"""Reports: complete, self-contained, honest about what is missing, and right in every number checked by hand."""

from __future__ import annotations

import base64
import copy
import io
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from safetensors.torch import save_file

from splitfed import cli
from splitfed.cli import main
from splitfed.core import digests
from splitfed.core.errors import InvalidInput
from splitfed.core.random import generator
from splitfed.stats.intervals import share_interval
from splitfed.study.report.costs import utility_over_time
from splitfed.study.report.data import Setting, estimate
from splitfed.study.report.document import write_report
from splitfed.study.report.figures.images import Pair, brightness_range, feature_scores, image_strip
from splitfed.study.report.figures.leakage import plot_roc_curves, roc_corners
from splitfed.study.report.remarks import reversals
from splitfed.study.report.summary import pareto_front, short_names, summarise
from splitfed.study.report.topology_data import graph_of
from splitfed.study.report.units import format_bytes, format_seconds
from splitfed.study.results import RunResult, Score, attack_from_json, result_from_json
from splitfed.study.run import reattack, session, terminal_table
from tests.blank_figures import PICTURES
from tests.drawing.test_svg import VANILLA
from tests.study.report_page import check

CONFIG = """[study]
name = "made-up"
seeds = [0, 1]

[data]
name = "digits"

[model]
name = "lenet"

[[topology]]
name = "vanilla"
cut = "pool1"

[[defense]]
name = "none"

[[defense]]
name = "noise"
scale = [0.5, 2.0]

[[attack]]
name = "inverse_network"
"""
# defense -> (strength, test accuracy at seeds 0 and 1, PSNR at seeds 0 and 1)
MADE_UP = {
    "none": (0.0, (0.94, 0.92), (26.0, 27.0)),
    "noise(kind=gaussian, scale=0.5)": (0.5, (0.93, 0.92), (22.0, 22.5)),
    "noise(kind=gaussian, scale=2)": (2.0, (0.73, 0.74), (16.0, 16.4)),
}


def result(defense: str, seed: int, strength: float, accuracy: float, scores: Mapping[str, float]) -> dict[str, Any]:
    """A run's result whose baselines are 11 for the mean and 8 for another victim, and which crossed 3000 bytes."""
    name = defense.partition("(")[0]

    def around(value: float) -> dict[str, float]:
        return {"mean": value, "low": value - 0.5, "high": value + 0.5}

    def baselines(value: float) -> dict[str, dict[str, float]]:
        return {"attack": around(value), "mean_image": around(11.0), "random_pairing": around(8.0)}

    history = [
        {"round": r, "loss": 2.0 / (r + 1), "validation": {"union": accuracy * (r + 1) / 3}, "seconds": 1.0}
        for r in range(3)
    ]
    return {
        "id": f"vanilla-pool1--{name}{f'-{strength:g}' if strength else ''}--seed{seed}",
        "topology": {"name": "vanilla", "label": "vanilla(cut=pool1)", "parameters": {"cut": "pool1"}},
        "defense": {
            "label": defense,
            "name": name,
            "strength": None if name == "none" else strength,
            "guarantee": "no formal guarantee",
            "parts": [] if name == "none" else [{"name": name, "parameters": {"scale": strength}}],
        },
        "seed": seed,
        "schedule": "sequential",
        "model": "lenet",
        "data": "digits",
        "clients": 1,
        "utility": {
            "metric": "accuracy",
            "higher_is_better": True,
            "validation": accuracy,
            "test": accuracy,
            "clients": [accuracy],
        },
        "bytes": 3000,
        "messages": 12,
        "seconds": 3.0,
        "rounds": 3,
        "history": history,
        "bytes_by_kind": {"activation": 1400, "gradient": 1400, "label": 200},
        "dependence": {
            "u_distance_correlation_sqr": 0.8 - strength / 10,
            "p_value": 0.005 + seed / 1000,
            "permutations": 200,
            "edge": "bottom->top",
        },
        "attacks": [
            {
                "attack": "inverse_network",
                "label": "inverse_network(budget=quick)",
                "adversary": "server",
                "seconds": 6.0,
                "victims": 12,
                "scores": {m: baselines(v) for m, v in scores.items()},
                "file": "attacks/inverse_network.safetensors",
            }
        ],
        "topology_graph": graph_of(VANILLA, {}),
    }


def put(folder: Path, found: Mapping[str, Any], shape: Sequence[int], seed: int) -> None:
    place = folder / "runs" / found["id"]
    (place / "attacks").mkdir(parents=True)
    drawn = generator(seed, "victims")
    truth = torch.rand(12, *shape, generator=drawn)
    prediction = (truth + 0.1 * torch.rand(truth.shape, generator=drawn)).clamp(0, 1)
    tensors = place / "attacks" / "inverse_network.safetensors"
    save_file({"truth": truth, "prediction": prediction}, tensors)
    attacks = [{**one, "sha256": digests.of_file(tensors)} for one in found["attacks"]]
    (place / "result.json").write_bytes(digests.json_with_digest({**found, "attacks": attacks}))


def study(folder: Path, seeds: Sequence[int] = (0, 1), shape: Sequence[int] = (1, 8, 8)) -> Path:
    folder.mkdir()
    for defense, (strength, accuracies, decibels) in MADE_UP.items():
        for seed in seeds:
            scores = {"psnr": decibels[seed], "ssim": decibels[seed] / 30, "mse": 1 / decibels[seed]}
            scores = scores if len(shape) == 3 else {"r2": decibels[seed] / 30}
            put(folder, result(defense, seed, strength, accuracies[seed], scores), shape, seed)
    (folder / "config.toml").write_bytes(digests.toml_with_digest(CONFIG))
    environment = {"python": "3.11", "packages": {"torch": "2.13.0"}}
    (folder / "environment.json").write_bytes(digests.json_with_digest(environment))
    return folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return study(tmp_path_factory.mktemp("studies") / "whole")


@pytest.fixture(scope="module")
def page(finished: Path) -> str:
    with PICTURES.shown():
        return write_report(finished).read_text("utf-8")


class Balance(HTMLParser):
    """Complains about a tag that closes what is not open, and keeps what the tests ask for."""

    VOID = ("meta", "img", "br", "wbr", "link", "hr", "input")

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.ids: list[str] = []
        self.uses: list[str] = []
        self.images: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        self.handle_startendtag(tag, attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.ids.append(value)
            if name in ("src", "href", "xlink:href", "action", "data", "poster") and value:
                self.uses.append(value)
                if tag == "img":
                    self.images.append(value)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag


def parsed(page: str) -> Balance:
    parser = Balance()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    if page.startswith("<!DOCTYPE"):
        check(page)
    return parser


def test_page_is_balanced_and_its_ids_are_unique(page: str) -> None:
    parser = parsed(page)
    assert len(parser.ids) == len(set(parser.ids))
    inner = {use.removeprefix("#") for use in parser.uses if use.startswith("#")}
    inner |= set(re.findall(r"url\(#([^)]+)\)", page))
    assert inner <= set(parser.ids)


def test_page_needs_nothing_from_outside(page: str) -> None:
    outside = [use for use in parsed(page).uses if not use.startswith(("#", "data:image/png;base64,"))]
    assert outside == []
    assert set(re.findall(r"https?://[^\"' <]+", page)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    assert not re.search(r"@import|<link|<iframe|<script[^>]+src", page)


def test_page_shows_every_setting_image_and_number(page: str) -> None:
    assert "in a folder with config.toml:</p>" in page
    text = unescape(re.sub(r"<wbr>", "", page))
    for name in ("undefended", "noise(scale=0.5)", "noise(scale=2)"):
        assert text.count(name) >= 4
    # One strip of originals, one a setting.
    assert len(parsed(page).images) == 1 + 3
    # 93 % is the mean of .94 and .92; 26.5 dB of 26 and 27.
    for number in ("93.0 %", "26.5", "22.2", "16.2", "3 kB", "p = 0.006", "no formal guarantee", CONFIG.strip()):
        assert number in text, number
    for section in ("pictures", "tradeoff", "strength", "curves", "topology", "cost", "table", "setup"):
        assert f'<section id="{section}">' in page


@pytest.mark.drawn
def test_same_folder_gives_the_same_page(finished: Path, page: str) -> None:
    assert write_report(finished).read_text("utf-8") == page


@pytest.mark.drawn
def test_figures_leave_nothing_open(finished: Path) -> None:
    before = dict(plt.rcParams)
    write_report(finished)
    assert plt.get_fignums() == []
    assert dict(plt.rcParams) == before


def test_summary_has_means_and_with_two_seeds_intervals_over_victims(finished: Path) -> None:
    found = summarise(finished)
    json.dumps(found, allow_nan=False)
    none, weak, strong = found["settings"]
    assert [s["defense"] for s in (none, weak, strong)] == list(MADE_UP)
    psnr = none["attacks"]["inverse_network(budget=quick)"]["scores"]["psnr"]["attack"]
    # Student's interval of two seeds, 26 and 27, would be 12.7 times .5 wide to either side: that of their victims
    # is .5 around each.
    assert psnr == {"mean": 26.5, "low": 26.0, "high": 27.0, "n": 2, "over": "victims"}
    # These results hold no interval over test rows.
    assert (none["utility"]["low"], none["utility"]["over"]) == (None, "nothing")
    assert none["utility"]["mean"] == pytest.approx(0.93)
    assert none["bytes_by_kind"] == {"activation": 1400, "gradient": 1400, "label": 200}
    assert weak["dependence"]["mean"] == pytest.approx(0.75)
    assert weak["dependence"]["p_value"] == pytest.approx(0.006)
    # Utility and leakage both rise from strong to weak to none: nobody beats anybody on both.
    assert all("psnr" in s["attacks"]["inverse_network(budget=quick)"]["front"] for s in found["settings"])


def test_with_one_seed_the_interval_is_over_victims(tmp_path: Path) -> None:
    folder = study(tmp_path / "one", seeds=(0,))
    found = summarise(folder)
    psnr = found["settings"][0]["attacks"]["inverse_network(budget=quick)"]["scores"]["psnr"]["attack"]
    assert psnr == {"mean": 26.0, "low": 25.5, "high": 26.5, "n": 1, "over": "victims"}
    assert found["settings"][0]["utility"]["low"] is None
    assert found["headline"][-2].startswith("One seed a setting: intervals are over victims")


def test_headline_is_made_from_the_numbers(tmp_path: Path) -> None:
    found = summarise(study(tmp_path / "said", seeds=(0,)))["headline"]
    assert found[0] == (
        "lenet on digits, 1 client, 3 rounds of the sequential schedule, split as vanilla(cut=pool1): 3 runs finished "
        "over 3 settings and 1 seed. 3 runs did not finish and count nowhere below."
    )
    assert found[1:4] == [
        "Undefended (accuracy 94.0 %), inverse_network reconstructs at 26.0 dB PSNR (mean-image baseline 11.0 dB).",
        "With noise(scale=2), the strongest attack (inverse_network) gets 16.0 dB, at a cost of 21.0 points of "
        "accuracy.",
        "Among the settings that lose at most 1.0 points of accuracy, one lowers leakage most: with "
        "noise(scale=0.5), the strongest attack (inverse_network) gets 22.0 dB, at a cost of 1.0 points of accuracy.",
    ]


def test_headline_admits_an_attack_that_fails_and_a_defense_that_does_not_help(tmp_path: Path) -> None:
    folder = tmp_path / "weak"
    put(folder, result("none", 0, 0.0, 0.9, {"psnr": 11.2}), (1, 8, 8), 0)
    put(folder, result("noise(scale=1)", 0, 1.0, 0.9, {"psnr": 11.3}), (1, 8, 8), 0)
    said = summarise(folder)["headline"]
    # The guess's interval, 10.7 to 11.7, holds the baseline's 11.
    assert said[1].endswith(
        "gets 11.2 dB PSNR (mean-image baseline 11.0 dB): not measurably better than that baseline."
    )
    assert said[2] == "The strongest attack does no worse than undefended against noise(scale=1)."


@pytest.mark.parametrize(
    ("floor", "sentence"),
    [
        (20.2, "A closed form does no worse than undefended against noise(scale=1)."),
        (
            18.0,
            "With noise(scale=1), a closed form, linear inverse, gets 18.0 dB and the strongest attack "
            "(inverse_network) no more, 15.0 dB, with no change in accuracy.",
        ),
    ],
)
def test_headline_names_a_closed_form_that_beats_the_attack(tmp_path: Path, floor: float, sentence: str) -> None:
    folder = tmp_path / "floors"
    for defense, strength, attack, best in (("none", 0.0, 17.2, 20.2), ("noise(scale=1)", 1.0, 15.0, floor)):
        found = result(defense, 0, strength, 0.9, {"psnr": attack})
        scores = found["attacks"][0]["scores"]["psnr"]
        scores |= {
            "linear_inverse": {"mean": best, "low": best - 0.5, "high": best + 0.5},
            "nearest_1": scores["attack"],
        }
        put(folder, found, (1, 8, 8), 0)
    assert summarise(folder)["headline"][1:3] == [
        "Undefended (accuracy 90.0 %), a closed form, linear inverse, reconstructs at 20.2 dB PSNR (mean-image "
        "baseline 11.0 dB), and the strongest attack, inverse_network, gets no more: 17.2 dB.",
        sentence,
    ]


def test_a_closed_form_beside_another_attack_leads_too(tmp_path: Path) -> None:
    """The strongest attack has none beside it, as one in training; a weaker one has, and it was left out."""
    found = result("none", 0, 0.0, 0.9, {"psnr": 17.2})
    weaker = copy.deepcopy(found["attacks"][0]) | {"attack": "rmle", "label": "rmle"}
    weaker["scores"]["psnr"]["attack"] = {"mean": 12.0, "low": 11.5, "high": 12.5}
    weaker["scores"]["psnr"]["nearest_10"] = {"mean": 20.2, "low": 19.7, "high": 20.7}
    put(tmp_path, found | {"attacks": [*found["attacks"], weaker]}, (1, 8, 8), 0)
    assert summarise(tmp_path)["headline"][1] == (
        "Undefended (accuracy 90.0 %), a closed form, mean of 10 nearest, reconstructs at 20.2 dB PSNR (mean-image "
        "baseline 11.0 dB), and the strongest attack, inverse_network, gets no more: 17.2 dB."
    )


def test_an_attack_that_is_the_closed_form_itself_is_not_behind_it(tmp_path: Path) -> None:
    found = result("none", 0, 0.0, 0.9, {"psnr": 20.0})
    attack = found["attacks"][0] | {"attack": "linear_inverse", "label": "linear_inverse(budget=quick)"}
    attack["scores"]["psnr"]["linear_inverse"] = attack["scores"]["psnr"]["attack"]
    put(tmp_path / "itself", found | {"attacks": [attack]}, (1, 8, 8), 0)
    said = summarise(tmp_path / "itself")["headline"][1]
    assert "linear_inverse reconstructs at 20.0 dB" in said
    assert "closed form" not in said


def test_an_interrupted_study_says_so(tmp_path: Path, finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(shutil.copytree(finished, tmp_path / "part"))
    runs = sorted((folder / "runs").iterdir())
    assert [r.name for r in runs][2:4] == ["vanilla-pool1--noise-2--seed0", "vanilla-pool1--noise-2--seed1"]
    (runs[2] / "result.json").unlink()
    (runs[2] / "run.json").write_bytes(digests.json_with_digest({"rounds": 3}))
    start = digests.content({"rounds": 3})
    first, second = {"round": 0}, {"round": 1}
    lines = digests.link(start, first) + digests.link(digests.chain(start, first), second)
    (runs[2] / "metrics.jsonl").write_bytes(lines + b'{"round": 2, "lo')
    failed = {"id": runs[3].name, "failed": "the loss became NaN at party client, step 3"}
    (runs[3] / "result.json").write_bytes(digests.json_with_digest(failed))
    shutil.rmtree(runs[1])
    found = summarise(folder)
    assert found["finished"] == 3
    assert found["unfinished"] == [
        {"id": "vanilla-pool1--noise-0.5--seed1", "reason": "not begun"},
        {"id": "vanilla-pool1--noise-2--seed0", "reason": "not finished: 2 rounds trained so far"},
        {"id": "vanilla-pool1--noise-2--seed1", "reason": f"failed: {failed['failed']}"},
    ]
    assert [s["strength"] for s in found["settings"]] == [None, 0.5]
    page = write_report(folder).read_text("utf-8")
    parsed(page)
    assert "<b>This study is incomplete:</b> 3 of 6 runs have no result" in page
    assert "the loss became NaN at party client, step 3" in page
    said = (
        f"{str(folder)!r} is not finished: 3 of 6 runs have a result; without one: {runs[1].name} (not begun), "
        f"{runs[2].name} (2 rounds trained so far), {runs[3].name} (failed: {failed['failed']})"
    )
    assert main(["report", str(folder)]) == 0
    assert capsys.readouterr().err == f"{said}; the report leaves them out\n"
    assert main(["report", str(finished)]) == 0
    assert capsys.readouterr().err == ""


def test_a_study_without_a_finished_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runs" / "a").mkdir(parents=True)
    with pytest.raises(
        InvalidInput,
        match=r"^study '.*' has no finished run to report on: 0 of 1 runs have a result; without one: a \(0 rounds "
        r"trained so far\); finish it first$",
    ):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_a_folder_without_a_study_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"^folder '.*' holds no study: it has no runs/ in it$"):
        summarise(tmp_path)


def test_tables_show_errors_by_feature(tmp_path: Path) -> None:
    page = write_report(study(tmp_path / "table", seeds=(0,), shape=(5,))).read_text("utf-8")
    assert parsed(page).images == []
    assert len(re.findall(r'<td class="h\d+">', page)) == 5 * 3
    assert "R² of feature" in page


@pytest.mark.parametrize(
    ("points", "front"),
    [
        ([(0.9, 20.0)], (0,)),
        # 1 has less utility and more leakage than 0; 2 trades one for the other.
        ([(0.9, 20.0), (0.8, 21.0), (0.7, 10.0)], (2, 0)),
        # Equal in one coordinate: the better in the other wins.
        ([(0.9, 20.0), (0.9, 19.0)], (1,)),
        ([(0.9, 20.0), (0.8, 20.0)], (0,)),
        # Equal in both: neither is strictly better.
        ([(0.9, 20.0), (0.9, 20.0)], (0, 1)),
        ([(0.5, 5.0), (0.6, 6.0), (0.55, 6.5), (0.7, 9.0), (0.7, 8.0), (0.4, 5.0)], (0, 1, 4)),
        ([], ()),
    ],
)
def test_pareto_front(points: list[tuple[float, float]], front: tuple[int, ...]) -> None:
    assert pareto_front(points) == front


def test_pareto_front_refuses_what_is_no_number() -> None:
    with pytest.raises(InvalidInput, match=r"point 1 is \(nan, 1\.0\); expected two numbers"):
        pareto_front([(0.9, 1.0), (float("nan"), 1.0)])


def test_estimate_leaves_out_what_is_missing() -> None:
    assert estimate([None, float("inf")]) is None
    one = estimate([None, 2.0])
    assert one is not None
    assert (one.mean, one.low, one.n) == (2.0, None, 1)


def test_from_three_seeds_on_the_interval_is_over_seeds_and_stays_in_the_range() -> None:
    victims = [{"low": 0.0, "high": 1.0}] * 3
    shares = estimate([0.02, 0.5, 0.97], victims, (0.0, 1.0))
    assert shares is not None
    assert shares.over == "seeds"
    # Student's on the shares themselves: .497 -+ 4.303 * .475 / sqrt(3), from -.68 to 1.68.
    assert 0.0 < shares.low < 0.02 < 0.97 < shares.high < 1.0  # type: ignore[operator]
    open_ended = estimate([1.0, 2.0, 3.0], victims)
    assert open_ended is not None
    assert open_ended.low == pytest.approx(2 - 4.302653 / 3**0.5, rel=1e-6)


@pytest.mark.parametrize(("over", "accuracies"), [("rows", (0.5, 0.12)), ("seeds", (0.99, 1.0, 0.62))])
def test_no_interval_of_an_accuracy_leaves_its_range(tmp_path: Path, over: str, accuracies: Sequence[float]) -> None:
    """Two seeds at .5 and .12 had -210 % to 272 %."""
    folder = tmp_path / "few"
    for seed, accuracy in enumerate(accuracies):
        found = result("none", seed, 0.0, accuracy, {"ssim": accuracy})
        own = share_interval(round(100 * accuracy), 100)
        found["utility"] |= {"bounds": [0.0, 1.0], "interval": {"low": own.low, "high": own.high, "rows": 100}}
        put(folder, found, (1, 8, 8), seed)
    (setting,) = summarise(folder)["settings"]
    utility = setting["utility"]
    assert utility["over"] == over
    assert 0.0 <= utility["low"] < utility["mean"] < utility["high"] <= 1.0
    if over == "rows":
        ends = [share_interval(r, 100) for r in (50, 12)]
        assert utility["low"] == pytest.approx((ends[0].low + ends[1].low) / 2)
        assert utility["high"] == pytest.approx((ends[0].high + ends[1].high) / 2)
    ssim = setting["attacks"]["inverse_network(budget=quick)"]["scores"]["ssim"]["attack"]
    assert ssim["high"] <= (1.0 if over == "seeds" else 1.5)  # the made-up victims' own intervals are wider
    page = write_report(folder).read_text("utf-8")
    assert not re.search(r"-\d+\.\d %", page)
    assert ("(rows)" in page) == (over == "rows")


def test_a_model_that_is_no_better_than_one_answer_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "useless"
    for defense, accuracy in (("none", 0.9), ("noise(scale=9)", 0.12)):
        found = result(defense, 0, 9.0, accuracy, {"psnr": 20.0})
        found["utility"]["constant"] = {"score": 0.23, "name": "always answering the most frequent class"}
        put(folder, found, (1, 8, 8), 0)
    said = "accuracy 0.12 is below 0.23 of always answering the most frequent class"
    sentences = [s for s in summarise(folder)["headline"] if "0.23" in s]
    assert sentences == [f"noise(scale=9): {said}, so this model is of no use."]
    assert session.format_outcome(result_from_json(found)).endswith(f"; {said}")
    console = Console(file=io.StringIO(), width=200)
    terminal_table.print_table([result_from_json(found)], console)
    assert f"noise(scale=9): {said}" in console.file.getvalue()  # type: ignore[attr-defined]
    page = write_report(folder).read_text("utf-8")
    assert said in page
    assert "constant 23.0 %" in page


def test_attacking_a_run_again_says_what_is_reversed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scores = {"auc": {"attack": {"mean": 0.2, "low": 0.1, "high": 0.3}, "mean_image": {"mean": 0.5}}}
    entry = attack_from_json({"attack": "norm", "label": "norm", "adversary": "server", "scores": scores})
    other = replace(entry, scores={"auc": {"attack": Score(0.8)}})
    monkeypatch.setattr(reattack, "attack_run", lambda *_, **__: [entry, other])
    assert cli.main(["attack", "runs/RUN", "--attack", "norm"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "norm by server: auc 0.2",
        "  auc: 95 % 0.1 to 0.3 (victims); mean 0.5",
        "norm is reversed: AUC 0.2 leaks as much as 0.8 does",
        "norm by server: auc 0.8",
    ]


def test_a_reversed_attack_does_not_count_as_safe(tmp_path: Path) -> None:
    """AUC .02 leaks as much as .98: no defense that turns a prediction over is on the Pareto front for that."""
    folder = targets(tmp_path / "front", 0.97, 0.95, 0.99)
    (path,) = (folder / "runs").glob("*/result.json")
    found = digests.read(path, "")
    defended = json.loads(json.dumps(found)) | {"id": "turned"}
    about = {
        "label": "noise(scale=1)",
        "name": "noise",
        "strength": 1.0,
        "parts": [{"name": "noise", "parameters": {}}],
    }
    defended["defense"] |= about
    defended["utility"]["test"] = 0.5
    label = defended["attacks"][0]["label"]
    defended["attacks"][0]["scores"]["auc"]["attack"] = {"mean": 0.02, "low": 0.01, "high": 0.03}
    (folder / "runs" / "turned").mkdir()
    (folder / "runs" / "turned" / "result.json").write_bytes(digests.json_with_digest(defended))
    summary = summarise(folder)
    fronts = {s["defense"]: s["attacks"][label]["front"] for s in summary["settings"]}
    assert "auc" in fronts["none"]
    assert "auc" not in fronts["noise(scale=1)"]
    assert any("does no worse than undefended against noise" in sentence for sentence in summary["headline"])
    turned = attack_from_json(defended["attacks"][0])
    assert reversals(turned) == [f"{label} is reversed: AUC 0.02 leaks as much as 0.98 does"]
    assert reversals(attack_from_json(found["attacks"][0])) == []
    parsed(write_report(folder).read_text("utf-8"))


def test_strip_puts_the_right_pixels_side_by_side() -> None:
    images = torch.tensor([[[[0.0, 1.0], [0.5, 2.0]]], [[[1.0, 0.0], [-1.0, 0.25]]]])
    found = image_strip(images, 0.0, 1.0)
    data = base64.b64decode(found.source.removeprefix("data:image/png;base64,"))
    pixels = np.asarray(Image.open(io.BytesIO(data)))
    # .5 * 255 = 127.5 rounds to the even 128; what is above 1 or below 0 is cut off; a white column between.
    assert pixels.tolist() == [[0, 255, 255, 255, 0], [128, 255, 255, 0, 64]]
    assert (found.width, found.height) == (5 * 36, 2 * 36)


def test_strip_keeps_colours_apart() -> None:
    red = torch.zeros(1, 3, 2, 2)
    red[:, 0] = 1
    data = base64.b64decode(image_strip(red, 0.0, 1.0).source.partition(",")[2])
    assert np.asarray(Image.open(io.BytesIO(data)))[0, 0].tolist() == [255, 0, 0]


def test_brightness_follows_data_that_leaves_zero_to_one() -> None:
    assert brightness_range(torch.tensor([0.2, 0.7])) == (0.0, 1.0)
    assert brightness_range(torch.tensor([-2.0, 3.0])) == (-2.0, 3.0)


def test_feature_scores_by_hand() -> None:
    truth = torch.tensor([[0.0, 1.0, 5.0], [2.0, 3.0, 5.0]])
    prediction = torch.tensor([[1.0, 1.0, 5.0], [1.0, 3.5, 4.0]])
    setting = Setting("t", "none", "none", 0.0, "", ())
    rows, left_out = feature_scores([Pair(setting, prediction, truth)])
    # Feature 0: error 2, spread 2; feature 1: error .25, spread 2; feature 2 never varies.
    assert rows == [[0.0], [0.875], [None]]
    assert left_out == 0


def test_short_names_keep_what_tells_apart() -> None:
    given = ["none", "noise(scale=0.5, relative=true)", "noise(scale=2, relative=true)", "vanilla(cut=pool1)"]
    noise = ["noise(scale=0.5, relative=true)", "noise(scale=2, relative=true)"]
    assert list(short_names(given).values()) == ["undefended", *noise, "vanilla"]
    given = ["noise(scale=0.5, kind=laplace)", "noise(scale=2, kind=laplace)"]
    assert list(short_names(given).values()) == ["noise(scale=0.5)", "noise(scale=2)"]
    assert short_names(["noise(scale=2)"], alone=True) == {"noise(scale=2)": "noise(scale=2)"}
    same = ["a(x=1, y=2)", "a(y=2, x=1)"]
    assert short_names(same) == {label: label for label in same}


def test_sizes_have_decimal_units() -> None:
    assert [format_bytes(n) for n in (0, 999, 1000, 104_500_000, 2.5e12)] == [
        "0 B",
        "999 B",
        "1 kB",
        "104 MB",
        "2.5 TB",
    ]


def costly(found: dict[str, Any], schedule: str = "sequential", shift: float = 0.0) -> dict[str, Any]:
    """A result of a study with several schedules and a clock; `shift` moves a byte between predicted and counted."""
    history = [
        entry | {"simulated_seconds": 60.0 * (i + 1) + found["seed"], "clients": 4, "dropped": [], "averaged": True}
        for i, entry in enumerate(found["history"])
    ]
    if schedule != "sequential":
        history[1] |= {"clients": 3, "dropped": [0, 2], "averaged": False}
    predicted = {
        "bytes": 3000,
        "messages": 12,
        "bytes_by_kind": {**found["bytes_by_kind"], "label": 200 + shift},
        "client_bytes": [3000] * 4,
        "flops": {"client": [2e9, 4e9, 4e9, 6e9], "server": [5e9]},
        "memory": {"client": {"total": 1000}, "server": {"total": 2_500_000}},
        "seconds": 180.0,
    }
    seen = {"kind": "activation", "value": "relu1", "shape": [6, 4, 4], "bytes": 384, "from": "client", "edge": "a->b"}
    parties = [
        {
            "role": "server",
            "parties": 1,
            "segments": [{"name": "top", "parameters": 1234}],
            "data": [],
            "labels": [],
            "losses": ["fc3"],
            "receives": [seen | {"returns": True, "guard": "x" if found["defense"]["parts"] else ""}],
        }
    ]
    sizes = {"clients": 4, "parameters": 1000.0, "client_share": 0.5, "examples": 600, "cut_width": 5.0}
    changes = {"history": history, "predicted": predicted, "parties": parties, "sizes": sizes, "clients": 4}
    return found | changes | {"schedule": schedule, "id": f"{found['id']}-{schedule}"}


def two_schedules(folder: Path, shift: float = 0.0) -> Path:
    for schedule in ("sequential", "splitfed_v1(quorum=4)"):
        for defense in ("none", "noise(kind=gaussian, scale=0.5)"):
            strength, accuracies, decibels = MADE_UP[defense]
            for seed in (0, 1):
                found = result(defense, seed, strength, accuracies[seed], {"psnr": decibels[seed]})
                put(folder, costly(found, schedule, shift), (1, 8, 8), seed)
    return folder


def test_several_schedules_are_settings_of_their_own(tmp_path: Path) -> None:
    found = summarise(two_schedules(tmp_path / "two"))
    json.dumps(found, allow_nan=False)
    assert [(s["schedule"], s["family"]) for s in found["settings"]] == [
        ("sequential", "none"),
        ("sequential", "noise"),
        ("splitfed_v1(quorum=4)", "none"),
        ("splitfed_v1(quorum=4)", "noise"),
    ]
    assert [found["names"][place] for place in found["places"]] == ["sequential", "splitfed_v1"]
    assert "3 rounds of the schedules sequential and splitfed_v1(quorum=4), split as vanilla" in found["headline"][0]
    assert [line.split(":")[0] for line in found["headline"][1:5]] == ["sequential"] * 2 + ["splitfed_v1"] * 2
    assert found["settings"][0]["participation"] is None
    # Two seeds of three rounds: (4 + 3 + 4) / 3 clients a round, two of whom leave in the one that is not fused.
    assert found["settings"][2]["participation"] == {
        "rounds": 6,
        "clients": 4,
        "asked": pytest.approx(11 / 3),
        "dropped": 4,
        "missed": 2,
        "noted": [f"seed {seed}, round 2: client 0, 2 dropped out; no quorum" for seed in (0, 1)],
    }
    # The clock of seed 1 is a second late: 180 and 181.
    assert found["settings"][0]["simulated_seconds"]["mean"] == 180.5
    assert found["settings"][0]["predicted"]["flops"] == {"client": 4e9, "server": 5e9}


@pytest.mark.drawn
def test_costs_time_and_views_are_on_the_page(tmp_path: Path) -> None:
    page = write_report(two_schedules(tmp_path / "two")).read_text("utf-8")
    parsed(page)
    text = unescape(re.sub(r"<[^>]+>", " ", page))
    assert "exactly what was predicted from shapes alone" in text
    assert "Predicted and counted differ" not in text
    for words in (
        "simulated time in minutes",
        "Who took part",
        "3.67 of 4",
        "seed 1, round 2: client 0, 2 dropped out; no quorum",
        "2.5 MB",
        "client 4, server 5",
    ):
        assert words in text, words
    # 2pq / (2 - a) / N = 2 * 600 * 5 / 1.5 / 1000 = 4 clients.
    assert "4 clients is where the lines cross; this study has 4." in text
    row = re.search(r"activation: relu1(.*?)</tr>", page, re.DOTALL)
    assert row is not None
    cells = [unescape(c).strip() for c in re.findall(r"<td[^>]*>(.*?)</td>", row[1], re.DOTALL)]
    assert cells == ["6 x 4 x 4", "384 B", "client", "yes", "noise(kind=gaussian, scale=0.5)"]
    # Both schedules look the same, so one drawing is there for both.
    assert page.count("1,234 parameters") == 1
    assert "vanilla(cut=pool1), sequential; vanilla(cut=pool1), splitfed_v1(quorum=4)" in text


def test_a_byte_that_was_not_predicted_is_told(tmp_path: Path) -> None:
    page = write_report(two_schedules(tmp_path / "wrong", shift=1)).read_text("utf-8")
    assert "Predicted and counted differ in undefended, sequential; " in page
    assert "exactly what was predicted" not in page
    assert "201" in page


def test_results_without_costs_still_make_a_report(page: str) -> None:
    for words in ("Predicted before training", "Who took part", "simulated time", "by the formulas"):
        assert words not in page


def test_time_curves_are_means_over_seeds() -> None:
    def run(seed: int, scores: Sequence[float | None]) -> RunResult:
        rounds = [
            {"round": i, "simulated_seconds": 10.0 * (i + 1) + seed, "validation": {"union": score}}
            for i, score in enumerate(scores)
        ]
        return RunResult("run", history=tuple(rounds), clients=1)

    made = Setting("t", "none", "none", 0.0, "", (run(0, [0.2, None, 0.6]), run(2, [0.4, 0.5, 0.8])))
    found = utility_over_time(made)
    assert found is not None
    mean, each = found
    # Round 1 was not scored at seed 0.
    assert mean == ([11.0, 31.0], [pytest.approx(0.3), pytest.approx(0.7)])
    assert each[1] == ([12.0, 22.0, 32.0], [0.4, 0.5, 0.8])
    assert (
        utility_over_time(Setting("t", "none", "none", 0.0, "", (RunResult("run", history=({"round": 0},)),))) is None
    )


def test_spans_have_the_largest_unit() -> None:
    assert [format_seconds(n) for n in (0.0, 0.94567, 59, 60, 5400, 200_000)] == [
        "0 s",
        "0.946 s",
        "59 s",
        "1 min",
        "1.5 h",
        "2.31 d",
    ]


def targets(folder: Path, auc: float, low: float, high: float) -> Path:
    """A study of one run, attacked for labels, for membership and for classes; no input is reconstructed."""
    found = result("none", 0, 0.0, 0.9, {})

    def exactly(value: float) -> dict[str, float]:
        return {"mean": value, "low": value, "high": value}

    labels = {
        "auc": {"attack": {"mean": auc, "low": low, "high": high}, "majority": exactly(0.5)},
        "accuracy": {"attack": exactly(0.9), "majority": exactly(0.6), "random_pairing": exactly(0.52)},
    }
    members = {
        "auc": {"attack": {"mean": 0.75, "low": 0.7, "high": 0.8}, "chance": exactly(0.5)},
        "tpr_at_fpr_1%": {"attack": exactly(0.25), "chance": exactly(0.125)},
        "least_fpr": {"attack": exactly(0.25), "chance": exactly(0.25)},
    }
    classes = {
        "psnr": {"attack": exactly(9.0), "mean_image": exactly(15.0)},
        "accuracy": {"attack": exactly(1.0), "mean_image": exactly(0.5), "truth": exactly(1.0)},
    }
    kept = {"labels": ("norm", labels), "members": ("lira", members), "representatives": ("model_inversion", classes)}
    found["attacks"] = [
        {
            "attack": name,
            "label": f"{name}(budget=quick)",
            "adversary": "client0",
            "seconds": 1.0,
            "target": target,
            "victims": 8,
            "scores": scores,
            "file": f"attacks/{name}.safetensors",
        }
        for target, (name, scores) in kept.items()
    ]
    place = folder / "runs" / found["id"]
    (place / "attacks").mkdir(parents=True)
    truth = torch.tensor([1.0, 1, 1, 1, 0, 0, 0, 0])
    prediction = torch.tensor([8.0, 7, 6, 3, 5, 4, 2, 1])
    for name, pair in {"norm": (prediction, truth), "lira": (prediction, truth)}.items():
        save_file({"prediction": pair[0], "truth": pair[1].clone()}, place / "attacks" / f"{name}.safetensors")
    faces = {"prediction": torch.rand(2, 1, 8, 8), "truth": torch.rand(2, 1, 8, 8)}
    save_file(faces, place / "attacks" / "model_inversion.safetensors")
    for one in found["attacks"]:
        one["sha256"] = digests.of_file(place / one["file"])
    (place / "result.json").write_bytes(digests.json_with_digest(found))
    return folder


def test_guesses_of_other_things_are_told_by_what_they_guess(tmp_path: Path) -> None:
    folder = targets(tmp_path / "others", 0.97, 0.95, 0.99)
    found = summarise(folder)
    assert found["headline"][1:4] == [
        "Undefended (accuracy 90.0 %), client0 by norm predicts labels at 0.970 AUC (chance 0.500).",
        "Undefended, client0 by lira predicts membership at 0.750 AUC (chance 0.500).",
        "Undefended, client0 by model_inversion shows what classes look like at 1.000 accuracy "
        "(mean-image baseline 0.500).",
    ]
    page = write_report(folder).read_text("utf-8")
    parsed(page)
    text = unescape(re.sub(r"<wbr>", "", page))
    assert "Undefended: client0 predicts the labels of 8 victims at AUC 0.970 (chance 0.500)." in text
    assert (
        "Undefended: client0 predicts who of 8 candidates was trained on at AUC 0.750 (chance 0.500); where at most "
        "one outsider in a hundred is accused, it finds 25.0 % of the members (chance 12.5 %)."
    ) in text
    # The class means and what stands for them, and no table of features made of labels.
    assert len(parsed(page).images) == 2
    assert "class means" in text
    assert "R² of feature" not in text
    assert "majority 0.600" in text
    assert "least_fpr" not in text


@pytest.mark.drawn
def test_an_attack_that_names_two_kinds_the_wrong_way_round_has_told_them_apart(tmp_path: Path) -> None:
    folder = targets(tmp_path / "turned", 0.02, 0.01, 0.03)
    said = summarise(folder)["headline"]
    turned = (
        "is reversed: it ranks the wrong way round (AUC 0.020), and whoever turns its predictions over has AUC 0.980."
    )
    assert said[1].endswith(f"the strongest attack on labels, norm, {turned}")
    assert not any("norm" in sentence for sentence in said[2:]), "it is said once"
    page = write_report(folder).read_text("utf-8")
    assert f"(chance 0.500); it {turned}" in page
    assert "0.020 reversed" in page
    assert "AUC (1 - AUC where reversed)" in page


def test_a_reconstruction_comes_first_in_the_headline_whatever_else_was_guessed(tmp_path: Path) -> None:
    folder = targets(tmp_path / "mixed", 0.97, 0.95, 0.99)
    (path,) = (folder / "runs").glob("*/result.json")
    found = json.loads(path.read_text())
    found["attacks"] += result("none", 0, 0.0, 0.9, {"psnr": 26.0})["attacks"]
    del found["digest"]
    path.write_bytes(digests.json_with_digest(found))
    said = summarise(folder)["headline"]
    assert said[1] == (
        "Undefended (accuracy 90.0 %), inverse_network reconstructs at 26.0 dB PSNR (mean-image baseline 11.0 dB)."
    )
    assert said[2] == "Undefended, client0 by norm predicts labels at 0.970 AUC (chance 0.500)."
    parsed(write_report(folder).read_text("utf-8"))


@pytest.mark.drawn
def test_roc_curve_is_drawn_through_its_corners() -> None:
    member = torch.tensor([True, True, True, True, False, False, False, False])
    scores = torch.tensor([8.0, 7, 6, 3, 5, 4, 2, 1])
    # By falling score: three members, two outsiders, a member, two outsiders. No logarithm shows the rates of 0.
    assert roc_corners(scores, member) == ([0.25, 0.5, 0.5, 0.75, 1.0], [0.75, 0.75, 1.0, 1.0, 1.0])
    drawn = plot_roc_curves([("undefended", "none", scores, member)], "roc")
    parsed(drawn)
    assert "undefended" in drawn
    assert "chance" in drawn
    assert "true-positive rate: members found" in drawn


@pytest.mark.drawn
def test_roc_curves_are_told_apart() -> None:
    """Undefended settings of several topologies were all black, and the seventh curve was the first again."""
    member, scores = torch.tensor([True, False, True, False]), torch.tensor([4.0, 3, 2, 1])
    kinds = ["none", "none", *(["noise"] * 6), "none"]
    drawn = plot_roc_curves([(f"curve {i}", kind, scores, member) for i, kind in enumerate(kinds)], "roc")
    strokes = re.findall(r'<path d="[^"]*" clip-path="[^"]*" fill="none" (stroke[^/]*)', drawn)
    looks = [one for one in strokes if 'stroke-width="1.8"' in one]
    assert len(set(looks)) == len(looks) == len(kinds)


def test_the_table_of_a_study_shows_the_intervals_of_the_report() -> None:
    (found,) = [result_from_json(result("none", 0, 0.0, 0.9, {"psnr": 26.0, "ssim": 0.5}))]
    console = Console(file=io.StringIO(), width=120)
    terminal_table.print_table([found], console)
    lines = [" ".join(line.split()) for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    (row,) = terminal_table.setting_rows([found])
    assert row["intervals"]["attacks"]["inverse_network"]["psnr"]["over"] == "victims"
    (place,) = [i for i, line in enumerate(lines) if line.startswith("95 % over")]
    assert lines[place : place + 2] == ["95 % over victims 25.5 to 26.5", "0.00 to 1.00"]
    # The word of the report for what results call "none".
    assert lines[place - 1].startswith("undefended 0.9")
    assert row["defense"] == "none"


def test_table_means_leave_out_what_is_no_number() -> None:
    found = json.loads(json.dumps(result("none", 0, 0.0, 0.9, {"psnr": 26.0})))
    other = copy.deepcopy(found)
    other["attacks"][0]["scores"]["psnr"]["attack"]["mean"] = None
    other["attacks"][0]["scores"]["psnr"]["mean_image"]["mean"] = 13.0
    (row,) = terminal_table.setting_rows([result_from_json(found), result_from_json(other)])
    scores = row["attacks"]["inverse_network"]["psnr"]
    assert (scores["attack"], scores["mean_image"]) == (26.0, 12.0)


def test_remarks_of_all_seeds_and_notes_on_epsilon_stand_below_the_table() -> None:
    """Those of the first seed alone were told, as if they were of all."""
    total = {"epsilon": 2.0, "protects": "labels", "note": "what the weights cost is another line"}
    seeds = [json.loads(json.dumps(result("none", seed, 0.0, 0.9, {"psnr": 26.0}))) for seed in range(3)]
    for seed, found in enumerate(seeds):
        found["privacy"] = {"ledger": {"epsilon": 2.0, "totals": [total]}}
        if seed:
            found |= {"stopped": "worse", "rounds": seed, "rounds_planned": 9}
    (row,) = terminal_table.setting_rows(list(map(result_from_json, seeds)))
    assert row["remarks"] == [
        "training ended after 1 of 9 rounds: worse (seed 1; 2 of 3 seeds)",
        "epsilon for labels: what the weights cost is another line",
    ]
    assert (
        "training ended after 2 of 9 rounds: worse"
        in terminal_table.setting_rows(list(map(result_from_json, seeds[2:])))[0]["remarks"]
    )


def test_remarks_of_one_seed_on_several_attacks_stay_apart() -> None:
    """Their names differ in a number alone."""
    seeds = [json.loads(json.dumps(result("none", seed, 0.0, 0.9, {"psnr": 26.0}))) for seed in range(2)]
    for found in seeds:
        (attack,) = found["attacks"]
        found["attacks"] = [{**attack, "label": f"width {n}", "floors": False} for n in (16, 32)]
    (row,) = terminal_table.setting_rows(list(map(result_from_json, seeds)))
    assert [said.split(" stands")[0] for said in row["remarks"]] == ["width 16", "width 32"]
