"""Comparisons of settings: paired by seed and by victim, claimed only what is there, refused what has no pairs."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

import splitfed as sf
from splitfed.cli import main
from splitfed.core import digests
from splitfed.core.errors import InvalidInput
from splitfed.stats.paired import needed_pairs
from splitfed.study.config.toml import dumps
from splitfed.study.results import (
    AttackRecord,
    DefenseLabel,
    MeasuredUtility,
    RunResult,
    Score,
    TopologyLabel,
    read_result,
)
from splitfed.study.run import checked_study, session
from splitfed.study.run.compare import ComparedSide, compare, compare_sides, parse_setting
from splitfed.study.run.comparison import ComparedMetric, Comparison
from splitfed.study.run.row_scores import mean_over_runs, score_victims
from tests.study.examples import small, write
from tests.thinning import thin

NOISE = "noise(scale=1, relative=true)"


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a study of two settings and three seeds."""
    place = tmp_path_factory.mktemp("compare")
    study = small(
        study={"name": "small", "seeds": [0, 1, 2]},
        training={"rounds": 1, "batch_size": 64},
        defense=[{"name": "none"}, {"name": "noise", "scale": 1.0, "relative": True}],
    )
    ready = checked_study.prepare_study(write(place, study))
    session.run_study(ready, place / "study", resume=False, workers=1)
    return place / "study"


@pytest.fixture
def folder(kept: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may change."""
    return Path(shutil.copytree(kept, tmp_path / "copy"))


def runs_of(study: Path, defense: str) -> list[Path]:
    return sorted(path for path in (study / "runs").iterdir() if f"--{defense}" in path.name)


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the JSON document at `path`, and its digest with it."""
    document = digests.read(path, "")
    change(document)
    path.write_bytes(digests.json_with_digest(document))


def by_metric(found: Comparison, over: str = "seeds") -> dict[str, ComparedMetric]:
    return {one.metric.rpartition(" ")[2]: one for one in found.metrics if one.over == over}


def result(seed: int, accuracy: float, psnr: float, defense: str = "none", **more: Any) -> RunResult:
    """A result with what a comparison reads."""
    told = {
        "id": f"{defense}-{seed}",
        "seed": seed,
        "topology": TopologyLabel("vanilla", "vanilla"),
        "defense": DefenseLabel(defense, defense, ""),
        "schedule": "sequential",
        "model": "mlp",
        "data": "digits",
        "clients": 1,
        "bytes": 1000,
        "seconds": 1.0 + seed / 10,
        "utility": MeasuredUtility("accuracy", test=accuracy),
        "attacks": (AttackRecord("rmle", "rmle", "server", {"psnr": {"attack": Score(psnr)}}),),
    }
    return RunResult(**{**told, **more})


def kept_result(run: Path) -> RunResult:
    found = read_result(run)
    assert found is not None
    return found


def two_sides(seeds: int, shift: float, draw: int) -> list[ComparedSide]:
    """Two settings whose seeds have much in common; the second is better and leaks more by `shift` deviations."""
    random = torch.Generator().manual_seed(draw)
    common, one, other = torch.randn(3, seeds, 2, generator=random).double()
    first, second = 10 + 5 * common + one, 10 + 5 * common + other + shift * math.sqrt(2)
    return [
        ComparedSide(name, tuple(result(s, *map(float, values), defense=name) for s, values in enumerate(drawn)))
        for name, drawn in (("none", first), ("noise", second))
    ]


def test_the_numbers_are_those_of_the_results(kept: Path) -> None:
    found = compare(kept, axis="defense")
    (pair,) = found.pairs
    assert (pair.first, pair.second) == ("defense=none", f"defense={NOISE}")
    assert (pair.seeds, pair.differs) == ((0, 1, 2), ("defense",))
    results = [[read_result(path) for path in runs_of(kept, name)] for name in ("none", "noise")]
    accuracies = [[one.utility.test for one in side if one] for side in results]
    metrics = by_metric(found)
    one = metrics["accuracy"]
    assert one.first == pytest.approx(sum(accuracies[0]) / 3)
    assert one.found.mean == pytest.approx((sum(accuracies[1]) - sum(accuracies[0])) / 3)
    assert one.first > one.second + 0.05, "noise costs utility, or the test sees nothing"
    assert (one.found.n, one.found.flip.p, one.found.flip.least) == (3, 0.25, 0.25)
    assert list(metrics) == ["accuracy", "psnr", "ssim", "mse", "bytes", "seconds"]
    assert not metrics["bytes"].tested, "counted, and the same in every seed"
    assert not any(one.claim for one in metrics.values())
    text = found.to_text()
    assert "3 seeds: the permutation test cannot fall below 0.25, or 1 corrected for 5 tests" in text
    assert "nothing can be claimed at 0.05 with fewer than 8 seeds" in text, "2 / 2^8 is below .05 / 5"


def test_victims_are_paired_one_by_one(kept: Path) -> None:
    found = by_metric(compare(kept, axis="defense"), "victims")
    assert list(found) == ["mse", "psnr", "ssim"]
    values = []
    for name in ("none", "noise"):
        psnr = []
        for run in runs_of(kept, name):
            (entry,) = kept_result(run).attacks
            rows = score_victims(run, entry).scores["psnr"]
            assert float(rows.mean()) == pytest.approx(entry.scores["psnr"]["attack"].mean, rel=1e-6)
            psnr += rows.tolist()
        values.append(torch.tensor(psnr))
    one = found["psnr"]
    assert one.found.n == 24, "eight victims a seed, all different"
    assert one.found.mean == pytest.approx(float((values[1] - values[0]).mean()), rel=1e-5)
    assert not by_metric(compare(kept, axis="defense", rows=False), "victims")


@pytest.mark.exhaustive
def test_a_metric_that_is_no_mean_over_rows_is_not_compared_over_them(kept: Path) -> None:
    run = runs_of(kept, "none")[0]
    (entry,) = kept_result(run).attacks
    told = entry.scores["mse"]["attack"]
    assert told.mean is not None
    other = replace(entry, scores={**entry.scores, "mse": {"attack": replace(told, mean=told.mean * 1.01)}})
    assert "mse" not in score_victims(run, other).scores


def test_the_same_victim_under_several_seeds_counts_once() -> None:
    rows, values = torch.tensor([[1.0], [2.0]]), torch.tensor([10.0, 20.0])
    again = [(rows, values), (rows.flip(0), torch.tensor([40.0, 30.0]))]
    assert mean_over_runs(again, whole=True).tolist() == [20.0, 30.0]
    assert mean_over_runs(again, whole=False).tolist() == [10.0, 20.0, 40.0, 30.0]


def test_test_rows_of_an_undefended_run_are_those_that_were_scored(folder: Path) -> None:
    found = compare(folder, axis="defense", rows=False, test_rows=True, metrics=["accuracy"])
    rows, seeds = by_metric(found, "test rows")["accuracy"], by_metric(found)["accuracy"]
    assert rows.found.n > 351, "three seeds have not the same test rows"
    # Rows that several seeds share count once, so the two means weigh rows a little differently.
    assert rows.first == pytest.approx(seeds.first, abs=0.05)
    assert rows.claim
    assert rows.found.mean < 0


@pytest.mark.parametrize("studies", thin([50, 150], 2))
def test_no_difference_is_not_claimed(studies: int) -> None:
    """Studies of ten seeds: the share with any claim at all stays below 5 % and four of its errors."""
    claimed = sum(bool(compare_sides(two_sides(10, 0.0, draw)).claims) for draw in range(studies)) / studies
    assert claimed < 0.05 + 4 * math.sqrt(0.05 * 0.95 / studies)


@pytest.mark.parametrize("studies", thin([40, 80], 2))
def test_a_planted_difference_is_found_as_often_as_said(studies: int) -> None:
    """A shift of 1.2 deviations in both metrics; the seeds that are needed for two tests find each in 80 %."""
    needed = needed_pairs(1.2, 0.05 / 2)
    assert needed is not None
    metrics = ["accuracy", "psnr"]
    found = [compare_sides(two_sides(needed, 1.2, draw), metrics=metrics) for draw in range(studies)]
    assert sum(len(one.claims) for one in found) / (2 * studies) > 0.8 - 3 * math.sqrt(0.16 / studies)
    assert all(one.found.mean > 0 for each in found for one in each.claims)


def test_seeds_needed_count_the_correction_and_the_pairing() -> None:
    sides = two_sides(12, 1.2, 0)
    alone, both = (compare_sides(sides, metrics=m) for m in (["accuracy"], ["accuracy", "psnr"]))
    needed = [by_metric(one)["accuracy"].needed for one in (alone, both)]
    assert needed[0] is not None
    assert needed[1] is not None
    assert needed[0] < needed[1] < 40, "unpaired, with five times the deviation in common, it would take hundreds"


def test_holm_counts_all_pairs_and_metrics_over_seeds() -> None:
    sides = [*two_sides(12, 2.0, 0), ComparedSide("third", two_sides(12, 0.0, 5)[0].runs)]
    found = compare_sides(sides, metrics=["accuracy", "psnr"])
    assert len(found.pairs) == 3
    p_values = [one.found.flip.p for one in found.metrics]
    assert len(p_values) == 6
    least = min(found.metrics, key=lambda one: one.found.flip.p)
    assert least.corrected == pytest.approx(min(1.0, 6 * min(p_values)))


def test_a_claim_is_made_by_the_corrected_p_value() -> None:
    """Six seeds that all agree: 2 / 2^6 is below 5 % for one metric, and twice that above it for two."""
    alone, both = (compare_sides(two_sides(6, 9.0, 0), metrics=m) for m in (["accuracy"], ["accuracy", "psnr"]))
    assert [one.found.flip.p for one in both.metrics] == [1 / 32, 1 / 32]
    assert (len(alone.claims), len(both.claims)) == (1, 0)
    assert [one.corrected for one in both.metrics] == [1 / 16, 1 / 16]


def test_epsilon_is_compared_where_both_sides_have_one() -> None:
    def private(epsilon: float | None) -> dict[str, Any]:
        return {"privacy": {"ledger": {"epsilon": epsilon}}}

    sides = [
        ComparedSide(name, tuple(result(s, 0.5 + s, 9.0 - s, name, **private(epsilon)) for s in range(3)))
        for name, epsilon in (("one", 2.0), ("other", 3.0), ("without", None))
    ]
    found = compare_sides(sides[:2])
    assert (by_metric(found)["epsilon"].found.mean, by_metric(found)["epsilon"].tested) == (1.0, False)
    (pair,) = compare_sides([sides[0], sides[2]]).pairs
    assert pair.notes == ("not in every run of both sides, so left out: epsilon",)


def test_what_both_sides_vary_over_is_matched(tmp_path: Path) -> None:
    def side(name: str, schedule: str, defenses: tuple[str, ...]) -> ComparedSide:
        return ComparedSide(
            name, tuple(result(s, 0.5 + s, 9.0, d, schedule=schedule) for d in defenses for s in range(2))
        )

    found = compare_sides([side("A", "one", ("none", "noise")), side("B", "two", ("noise", "none", "mid"))])
    assert [pair.where for pair in found.pairs] == ["none", "noise"]
    assert found.pairs[0].differs == ("schedule",)
    with pytest.raises(InvalidInput, match=r"'B' has 2 values of defense \(noise, mid\); choose one by only defense="):
        compare_sides([side("A", "one", ("none",)), side("B", "two", ("noise", "mid"))])


def test_other_seeds_are_refused_and_some_are_named() -> None:
    first, second = two_sides(4, 0.0, 0)
    apart = ComparedSide("B", tuple(replace(run, seed=run.seed + 10) for run in second.runs))
    with pytest.raises(
        InvalidInput, match=r"no seed is in both: 'none' has \[0, 1, 2, 3\] and 'B' has \[10, 11, 12, 13\]"
    ):
        compare_sides([first, apart])
    some = ComparedSide("B", second.runs[:3], failed=(3,))
    (pair,) = compare_sides([first, some]).pairs
    assert pair.seeds == (0, 1, 2)
    assert pair.notes == (
        "none has seeds [3] alone, which are left out",
        "B has runs that failed (seeds [3])",
    )


def test_an_interrupted_study_says_what_is_missing(folder: Path) -> None:
    """It was said of those of one side that they are left out, and of a study without results that it holds no run."""
    for place in runs_of(folder, "noise")[1:]:
        (place / "result.json").unlink()
    (pair,) = compare(folder, axis="defense", rows=False).pairs
    name = runs_of(folder, "noise")[1].name
    said = f"{str(folder)!r} is not finished: 4 of 6 runs have a result; without one: {name} (1 round trained so far), "
    assert pair.notes[0].endswith("has seeds [1, 2] alone, which are left out")
    assert pair.notes[1].startswith(said)
    (runs_of(folder, "noise")[0] / "result.json").unlink()
    said = said.replace("4 of 6", "3 of 6").partition(name)[0]
    with pytest.raises(
        InvalidInput, match=re.escape(f"has one value in {str(folder)!r}, none; expected several; {said}")
    ):
        compare(folder, axis="defense")
    with pytest.raises(
        InvalidInput, match=re.escape(f"unknown defense 'noise'; did you mean 'none'? (allowed: none); {said}")
    ):
        compare(folder, settings=[{"defense": "none"}, {"defense": "noise"}])
    for place in runs_of(folder, "none"):
        shutil.rmtree(place)
    with pytest.raises(
        InvalidInput, match=re.escape("holds no finished run: ") + ".*0 of 6 runs have a result; .*begun"
    ):
        compare(folder, axis="defense")


def test_other_metrics_data_and_repeated_runs_are_refused() -> None:
    first, second = two_sides(3, 0.0, 0)
    other = ComparedSide("B", tuple(replace(r, utility=replace(r.utility, metric="r_squared")) for r in second.runs))
    with pytest.raises(InvalidInput, match="seed 0 of 'none' and 'B' cannot be paired: metric: 'accuracy', not 'r_sq"):
        compare_sides([first, other])
    elsewhere = ComparedSide("B", tuple(replace(r, data="mnist") for r in second.runs))
    with pytest.raises(InvalidInput, match=r"cannot be paired: data.name is 'digits', not 'mnist'"):
        compare_sides([first, elsewhere])
    twice = ComparedSide("B", (*second.runs, second.runs[1]))
    with pytest.raises(InvalidInput, match="'B' has several runs of seed 1 that differ in nothing"):
        compare_sides([first, twice])
    with pytest.raises(InvalidInput, match="a comparison has 1 sides; expected at least 2"):
        compare_sides([first])
    with pytest.raises(InvalidInput, match="unknown metric 'acuracy'; did you mean 'accuracy'"):
        compare_sides([first, second], metrics=["acuracy"])
    with pytest.raises(InvalidInput, match=r"level=1 is not allowed; expected a number in \(0, 1\)"):
        compare_sides([first, second], level=1)


def test_other_rows_are_refused_by_name(kept: Path, folder: Path) -> None:
    run = runs_of(folder, "none")[0]
    compare(kept / "runs" / run.name, runs_of(folder, "noise")[0])

    config = run / "config.toml"
    was = config.read_bytes()
    table = digests.read_toml(config, was, "")
    table["data"]["victims"] = 16
    config.write_bytes(digests.toml_with_digest(dumps(table)))
    with pytest.raises(InvalidInput, match=r"seed 0 of .* cannot be paired: data.victims is 8, not 16"):
        compare(kept / "runs" / runs_of(kept, "noise")[0].name, run)
    config.write_bytes(was)
    rewrite(run / "run.json", lambda told: told["data"].update(rows="0" * 64))
    with pytest.raises(InvalidInput, match=r"seed 0 of .* cannot be paired: their rows are not the same"):
        compare(folder, axis="defense")


def test_other_victims_are_refused_by_name(folder: Path) -> None:
    run = runs_of(folder, "noise")[1]
    file = run / "attacks" / "rmle.safetensors"
    tensors = load(file.read_bytes())
    changed = save({**tensors, "truth": tensors["truth"].flip(0).contiguous()})
    file.write_bytes(changed)
    with pytest.raises(digests.Damaged, match=r"rmle.safetensors is damaged"):
        compare(folder, axis="defense")
    rewrite(run / "result.json", lambda told: told["attacks"][0].update(sha256=digests.of(changed)))
    with pytest.raises(InvalidInput, match=r"seed 1: attack 'rmle.* went against other victims in "):
        compare(folder, axis="defense")


def test_a_folder_of_somebody_else_leads_nowhere(folder: Path, tmp_path: Path) -> None:
    run = runs_of(folder, "noise")[0]
    rewrite(run / "result.json", lambda told: told["attacks"][0].update(file="../../../secret.safetensors"))
    with pytest.raises(InvalidInput, match=r"the predictions of 'rmle.* lie outside of its folder"):
        compare(folder, axis="defense")
    (tmp_path / "secret").write_text("x")
    (folder / "runs" / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(InvalidInput, match="holds a link that leads out of it"):
        compare(folder, axis="defense")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, r"is one folder: choose settings or an axis of it; it varies defense \(none, noise"),
        ({"axis": "depth"}, "unknown axis 'depth'"),
        ({"axis": "schedule"}, "axis='schedule' has one value in .*, sequential; expected several"),
        ({"settings": [{"defense": "none"}, {"defense": "mid"}]}, "unknown defense 'mid'"),
        ({"settings": [{"defense": "none"}]}, "a comparison has 1 sides; expected at least 2"),
        ({"axis": "defense", "only": {"topology": "u_shaped"}}, "unknown topology 'u_shaped'"),
    ],
)
def test_what_is_not_chosen_well_is_refused(kept: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        compare(kept, **given)


def test_folders_that_cannot_be_compared_are_refused(kept: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="nothing to compare; expected folders of runs or of studies"):
        compare()
    with pytest.raises(InvalidInput, match="a folder is there twice; expected different ones"):
        compare(kept, kept)
    with pytest.raises(InvalidInput, match="settings and axis choose among the runs of one study"):
        compare(kept, kept / "runs", axis="defense")
    with pytest.raises(InvalidInput, match="holds no finished run; expected the folder of a study, or STUDY/runs/NAME"):
        compare(kept, tmp_path)
    with pytest.raises(InvalidInput, match="is no folder; expected that of a run or of a study"):
        compare(kept, tmp_path / "nothing")


def test_settings_are_written_as_axis_and_value() -> None:
    assert parse_setting(f"defense={NOISE}; topology = vanilla(cut=relu1)") == {
        "defense": NOISE,
        "topology": "vanilla(cut=relu1)",
    }
    for wrong in ("defense", "defense=", ""):
        with pytest.raises(InvalidInput, match="expected AXIS=VALUE, several with ; between"):
            parse_setting(wrong)


def test_the_command_prints_text_json_and_markdown(
    kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = [str(kept), "--setting", "defense=none", "--setting", "defense=noise"]
    assert main(["compare", *chosen, "--metric", "accuracy,psnr", "--markdown", str(tmp_path / "found.md")]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("defense=none -> defense=noise, 3 seeds\n")
    assert "leaks more (rmle(budget=quick, iterations=5) psnr)" in printed
    page = (tmp_path / "found.md").read_text("utf-8")
    table = [line for line in page.splitlines() if line.startswith("|")]
    assert len(table) == 2 + 3, "head, line, accuracy, PSNR over seeds and over victims"
    assert {line.replace("\\|", "").count("|") for line in table} == {11}
    assert main(["compare", *chosen, "--json", "--level", "0.3"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["pairs"][0]["seeds"] == [0, 1, 2]
    rows = {(row["metric"], row["over"]): row for row in found["metrics"]}
    assert rows["accuracy", "seeds"]["sign_flip_p"] == 0.25
    assert rows["bytes", "seeds"]["sign_flip_p"] is None
    assert main(["compare", str(kept)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_names_of_somebody_elses_folder_cannot_write_markdown(folder: Path) -> None:
    for run in runs_of(folder, "noise"):
        rewrite(run / "result.json", lambda told: told["defense"].update(label="<b>|[x](http://y)\x1b[2J"))
    for run in (folder / "runs").iterdir():
        rewrite(run / "result.json", lambda told: told["attacks"][0].update(label="<i>|`"))
    page = compare(folder, axis="defense").to_markdown()
    assert page.replace("\\\\", "").count("<") == page.count("\\<") > 3
    table = [line for line in page.splitlines() if line.startswith("|")]
    assert {line.replace("\\|", "").count("|") for line in table} == {11}
    assert "\x1b" not in page


def test_it_is_part_of_the_package_and_gives_a_frame(kept: Path) -> None:
    found = sf.compare(*runs_of(kept, "none")[:1], *runs_of(kept, "noise")[:1], rows=False)
    assert "1 seed: the permutation test cannot fall below 1" in str(found)
    frame = found.to_frame()
    assert list(frame.metric) == [
        "accuracy",
        *(f"rmle(budget=quick, iterations=5) {m}" for m in ("psnr", "ssim", "mse")),
        "bytes",
        "seconds",
    ]
    assert frame.set_index("metric").effect.isna().all()
    assert found._repr_markdown_() == found.to_markdown()
