"""The board runs what is missing and nothing else, and its pages and figures say what its results say."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from experiments.board import measure
from experiments.board.__main__ import main
from experiments.board.entries import Entries
from experiments.board.measure import complete
from experiments.board.page import write_pages
from experiments.board.settings import estimate, summarize
from experiments.board.studies import BOARD, BoardStudy, read_study
from splitfed.core.errors import InvalidInput
from splitfed.study.config.toml import dumps
from splitfed.study.report.metrics import METRICS
from splitfed.study.run.reattack import attack_run
from splitfed.study.run.runner import run_cell
from tests.pages import broken_links
from tests.study.examples import small

NOISE = {"name": "noise", "scale": 0.5}
LINEAR, NEAREST = {"name": "linear_inverse"}, {"name": "nearest"}


def toy(**changes: Any) -> dict[str, Any]:
    """Return a study of two runs, undefended, of two seeds."""
    study = {"name": "toy", "seeds": [0, 1], "skip_refused": True}
    return small(**{"study": study, "defense": [{"name": "none"}], "attack": [LINEAR], **changes})


def place(folder: Path, study: dict[str, Any]) -> BoardStudy:
    """Write `study` into `folder` as a study of a board, and read it."""
    (folder / "toy.toml").write_text(dumps(study), "utf-8")
    return read_study(folder / "toy.toml")


class Counted:
    """What was trained and asked since the last look."""

    def __init__(self, patched: pytest.MonkeyPatch) -> None:
        self.trained: list[str] = []
        self.asked: list[str] = []
        train, ask = run_cell, attack_run

        def train_counted(cell: Any, data: Any, folder: Path, *more: Any) -> Any:
            if not (folder / "result.json").is_file():
                self.trained.append(cell.id)
            return train(cell, data, folder, *more)

        def ask_counted(folder: Path, names: Any, *more: Any, **given: Any) -> Any:
            self.asked += [f"{folder.name.rpartition('-')[0]} {name}" for name in names]
            return ask(folder, names, *more, **given)

        patched.setattr(measure, "run_cell", train_counted)
        patched.setattr(measure, "attack_run", ask_counted)

    def look(self) -> tuple[list[str], list[str]]:
        """Return both, and forget them."""
        found = self.trained, self.asked
        self.trained, self.asked = [], []
        return found


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """Return a board that was begun, given an attack, a defense and a defense that is refused, and what each took."""
    base = tmp_path_factory.mktemp("board")
    board, home, steps = base / "docs", base / "runs", list[Any]()
    board.mkdir()
    stages = [
        toy(),
        toy(),
        toy(attack=[LINEAR, NEAREST, {"name": "grn"}]),
        toy(
            attack=[LINEAR, NEAREST, {"name": "grn"}],
            defense=[{"name": "adversarial"}, {"name": "none"}, NOISE],
        ),
    ]
    with pytest.MonkeyPatch.context() as patched:
        counted = Counted(patched)
        for study in stages:
            complete([place(board, study)], board, home, lambda line: None)
            steps.append(counted.look())
        # Without the folder of the runs nothing is computed either, but for what is new.
        shutil.rmtree(home)
        complete([place(board, stages[-1])], board, home, lambda line: None)
        steps.append(counted.look())
    write_pages([read_study(board / "toy.toml")], board)
    return board, steps


def test_only_what_is_new_is_computed(grown: tuple[Path, list[Any]]) -> None:
    first, again, attack, defense, without_runs = grown[1]
    bare = ["vanilla-relu1--none--seed0", "vanilla-relu1--none--seed1"]
    noisy = ["vanilla-relu1--noise-0.5--seed0", "vanilla-relu1--noise-0.5--seed1"]
    assert first == (bare, [f"{run} linear_inverse" for run in bare])
    assert again == ([], [])
    assert attack == ([], [f"{run} {name}" for run in bare for name in ("nearest", "grn")])
    assert defense == (noisy, [f"{run} {name}" for run in noisy for name in ("linear_inverse", "nearest", "grn")])
    assert without_runs == ([], [])


@pytest.mark.exhaustive
def test_a_refusal_is_kept_with_its_reason_and_is_no_result(grown: tuple[Path, list[Any]]) -> None:
    study = read_study(grown[0] / "toy.toml")
    summary = summarize(study, Entries(grown[0] / "toy.jsonl"))
    refused = next(s for s in summary.settings if s.defense.startswith("adversarial"))
    assert refused.utility is None
    assert refused.why.startswith("refused: adversarial has no bottleneck")
    assert refused.why in (grown[0] / "toy.md").read_text("utf-8")
    entries = [json.loads(line) for line in (grown[0] / "toy.jsonl").read_text("utf-8").splitlines()]
    assert {
        "grn needs inputs of its own" in e["attacks"]["grn(budget=quick)"]["refused"] for e in entries if "attacks" in e
    } == {True}


def test_the_numbers_of_pages_and_figures_are_those_of_the_results(grown: tuple[Path, list[Any]]) -> None:
    board = grown[0]
    entries = [json.loads(line) for line in (board / "toy.jsonl").read_text("utf-8").splitlines()]
    of = {(e["defense"], e["seed"]): e for e in entries if "utility" in e}
    lost = sum(of["none", s]["utility"] - of["noise(scale=0.5)", s]["utility"] for s in (0, 1)) / 2
    best, kept = [], []
    for seed in (0, 1):
        readings = {}
        for defense in ("none", "noise(scale=0.5)"):
            asked = [a["scores"] for a in of[defense, seed]["attacks"].values() if "scores" in a]
            known = [a[who] for a in asked for who in ("attack", "linear_inverse", "nearest_1", "nearest_10")]
            readings[defense] = min(known, key=lambda by: by["mse"]["mean"])
        best.append(readings["noise(scale=0.5)"]["psnr"]["mean"])
        floor, reached, top = (
            by["mse"]["mean"] for by in (asked[0]["mean_image"], readings["noise(scale=0.5)"], readings["none"])
        )
        kept.append((floor - reached) / (floor - top))
    left = f"{100 * sum(kept) / 2:.0f} %"
    row = next(line for line in (board / "README.md").read_text("utf-8").splitlines() if line.startswith("| noise 0.5"))
    assert row == f"| noise 0.5 | {100 * lost:.1f} | {left} | no |"
    assert _texts(board / "board.svg")[-3:] == [f"{100 * lost:.1f}", left.replace(" ", ""), "no"]
    figure = _texts(board / "toy.svg")
    assert figure[figure.index("noise 0.5") + 1 :][:3] == [f"{100 * lost:.1f}", f"{sum(best) / 2:.1f}", "no"]
    utility = sum(of["noise(scale=0.5)", s]["utility"] for s in (0, 1)) / 2
    points = re.findall(r"<title>(\d+: [^<]*)</title>", (board / "toy-scatter.svg").read_text("utf-8"))
    assert points[-1] == f"3: rows, black box, PSNR [dB] {sum(best) / 2:.4g}, accuracy {utility:.4g}"


def _texts(path: Path) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text("utf-8"))


def test_what_was_not_asked_says_so(grown: tuple[Path, list[Any]]) -> None:
    assert "| not asked | - | - | not asked |" in (grown[0] / "toy.md").read_text("utf-8")


def test_what_has_not_finished_says_so(grown: tuple[Path, list[Any]], tmp_path: Path) -> None:
    study = place(
        tmp_path,
        toy(defense=[{"name": "none"}, NOISE, {"name": "dropout"}], attack=[LINEAR, {"name": "inverse_network"}]),
    )
    lines = (grown[0] / "toy.jsonl").read_text("utf-8").splitlines()
    kept = [line for line in lines if json.loads(line)["run"] != "vanilla-relu1--none--seed1"]
    (tmp_path / "toy.jsonl").write_text("".join(f"{line}\n" for line in kept), "utf-8")
    write_pages([study], tmp_path)
    page, first = ((tmp_path / name).read_text("utf-8") for name in ("toy.md", "README.md"))
    assert re.search(r"\| `dropout\(rate=0\.\d\)` \| to do \|", page)
    assert re.search(r"\| `none` \|.*\| 1/2 \|", page)
    assert ", 2 to do |" in next(line for line in page.splitlines() if line.startswith("| `noise"))
    assert "0 of 6 runs are done." in first
    assert "| to do | to do | to do |" in first
    assert not broken_links(tmp_path / "toy.md")


def test_a_table_that_changed_makes_other_runs_and_the_order_of_tables_none(tmp_path: Path) -> None:
    keys = [run.key for run in place(tmp_path, toy()).runs]
    moved = place(tmp_path, toy(defense=[NOISE, {"name": "none"}], attack=[NEAREST]))
    assert [run.key for run in moved.runs if run.cell.defense.label == "none"] == keys
    changed = place(tmp_path, toy(training={"rounds": 3, "batch_size": 64}))
    assert not {run.key for run in changed.runs} & set(keys)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"name": "linear_inverse", "tune": 3}, "has 'tune'; expected adversary, budget, name, round, threat_model"),
        ({"name": "strongest"}, 'strongest says no threat model; expected threat_model = "black_box" or "white_box"'),
        ({"name": "sdar"}, "lives in training"),
        ({"name": "strongest_label"}, "unknown attack 'strongest_label'"),
    ],
)
def test_an_attack_that_cannot_be_asked_is_refused(tmp_path: Path, table: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        place(tmp_path, toy(attack=[table]))


def test_intervals_over_seeds_are_students_and_those_of_one_seed_are_its_rows() -> None:
    found = estimate([0.5, 0.6, 0.7])
    assert (found.low, found.high) == pytest.approx((0.6 - 4.302653 * 0.1 / 3**0.5, 0.6 + 4.302653 * 0.1 / 3**0.5))
    alone = estimate([0.5], METRICS["auc"].bounds, (0.4, 0.6), "victims")
    assert (alone.low, alone.high, alone.over) == (0.4, 0.6, "victims")
    assert estimate([0.5]).low is None


def test_the_pages_of_the_board_are_what_its_results_give(tmp_path: Path) -> None:
    """`make board SHOW=1` writes them."""
    for path in [*BOARD.glob("*.toml"), *BOARD.glob("*.jsonl")]:
        shutil.copy(path, tmp_path)
    assert main(["--show", "--board", str(tmp_path)]) == 0
    written = {path.name for path in tmp_path.iterdir()}
    assert written == {path.name for path in BOARD.iterdir()}
    for name in written:
        assert (tmp_path / name).read_bytes() == (BOARD / name).read_bytes(), f"{name}: run make board SHOW=1"
    for page in BOARD.glob("*.md"):
        assert not broken_links(page)


BLACK, WHITE = ({"name": "strongest", "budget": "quick", "threat_model": t} for t in ("black_box", "white_box"))
LABELS = {"name": "strongest_labels", "budget": "quick"}
FLOOR = 0.1
"""Mean squared error of the mean image in these results."""


def rows(error: float, converged: bool = True, **beside: float) -> dict[str, Any]:
    """Return what an attack on rows recovered, at a mean squared error; `beside`: the errors of closed forms."""

    def scores(mse: float) -> dict[str, dict[str, float]]:
        decibels = -10 * math.log10(mse)
        images = {"mean": decibels, "low": decibels, "high": decibels, "median": decibels - 1}
        return {
            "psnr": {**images, "worst_decile": decibels + 9},
            "ssim": {"mean": 0.5},
            "mse": {"mean": mse, "median": mse, "worst_decile": mse},
        }

    errors = {"attack": error, "mean_image": FLOOR, **beside}
    about = {"metric": "psnr", "width": 1.0, "member": f"member {error:g}", "converged": converged}
    return {**about, "scores": {who: scores(mse) for who, mse in errors.items()}}


def labels(auc: float, own: float | None = None) -> dict[str, Any]:
    """Return what an attack on labels came to, with the score of the adversary's own columns where it has some."""
    found: dict[str, Any] = {"attack": {"auc": {"mean": auc}}, "majority": {"auc": {"mean": 0.5}}}
    if own is not None:
        found |= {"own_features": {"auc": {"mean": own}}, "excess": {"auc": {"mean": auc - own}}}
    return {"metric": "auc", "scores": found, "member": "co_training", "converged": True}


def board_of(folder: Path, attacks: list[Any], answers: dict[str, list[Any]]) -> tuple[BoardStudy, str, str]:
    """Write the board of one seed, undefended and with noise, from answers in the order of `attacks`: defense -> them.

    Return the study, its page and the first page.
    """
    about = {"name": "toy", "seeds": [0], "skip_refused": True}
    study = place(folder, toy(study=about, attack=attacks, defense=[{"name": "none"}, NOISE]))
    kept = Entries(folder / "toy.jsonl")
    for run in study.runs:
        named = zip(study.questions, answers[run.cell.defense.label], strict=True)
        entry = {
            "key": run.key,
            "run": run.cell.id,
            "place": run.place,
            "defense": run.cell.defense.label,
            "seed": 0,
            "date": "2026-01-01",
            "versions": {},
            "metric": "accuracy",
            "utility": 0.9,
            "bytes": 1,
            "interval": {"low": None, "high": None},
            "rounds": 1,
            "cpu_seconds": 1.0,
            "attacks": {q.label: {"settings": q.settings, **found} for q, found in named if found is not None},
        }
        kept.put(entry, [one.key for one in study.runs])
    write_pages([study], folder)
    return study, *((folder / name).read_text("utf-8") for name in ("toy.md", "README.md"))


def line_of(page: str, start: str, nth: int = 0) -> list[str]:
    """Return the cells of the `nth` line of a table that begins with `start`."""
    lines = [line for line in page.splitlines() if line.startswith(f"| {start}")]
    return [cell.strip() for cell in lines[nth].strip("|").split("|")]


def test_the_white_box_never_stands_for_the_black_box(tmp_path: Path) -> None:
    """Each threat model has a share, a ceiling, a member, a cell in both figures and a panel of its own."""
    answers = {"none": [rows(1e-3), rows(1e-7)], "noise(scale=0.5)": [rows(0.05), rows(0.02)]}
    _, page, first = board_of(tmp_path, [BLACK, WHITE], answers)
    black, white = (f"{100 * (FLOOR - e) / (FLOOR - top):.0f} %" for e, top in ((0.05, 1e-3), (0.02, 1e-7)))
    assert (black, white) == ("51 %", "80 %")
    assert line_of(first, "noise 0.5") == ["noise 0.5", "0.0", black, white]
    assert line_of(page, "`noise")[3:5] == [f"{black}; 13.0 dB", f"{white}; 17.0 dB"]
    cells = line_of(page, "`noise", 1)
    assert cells[1:] == [
        *("10.0", "13.0 (13.0 to 13.0)*", "12.0, 22.0", "13.0", "0.500", "30.0", "member 0.05"),
        *("17.0 (17.0 to 17.0)*", "16.0, 26.0", "17.0", "0.500", "70.0", "member 0.02"),
    ]
    assert _texts(tmp_path / "board.svg")[-2:] == ["51%", "80%"]
    figure = _texts(tmp_path / "toy.svg")
    assert figure[figure.index("noise 0.5") + 2 :][:2] == ["13.0", "17.0"]
    drawn = re.findall(r"<title>2: ([^<]*)</title>", (tmp_path / "toy-scatter.svg").read_text("utf-8"))
    assert [one.partition("dB] ")[2][:5] for one in drawn] == ["13.01", "16.99"]
    assert "rows, black box" in drawn[0]
    assert "rows, white box" in drawn[1]


def test_a_white_box_that_was_not_asked_is_to_do_whatever_the_black_box_found(tmp_path: Path) -> None:
    answers = {"none": [rows(1e-3), None], "noise(scale=0.5)": [None, rows(0.02)]}
    study, page, first = board_of(tmp_path, [BLACK, WHITE], answers)
    assert line_of(first, "noise 0.5")[2:] == ["to do", "17.0 dB: to do"]
    assert line_of(page, "`none`")[3:5] == ["100 %; 30.0 dB", "to do"]
    assert [len(study.open_questions(Entries(tmp_path / "toy.jsonl").get(r.key) or {})) for r in study.runs] == [1, 1]


def test_who_has_weights_does_no_worse_than_who_has_not_and_it_is_named_so(tmp_path: Path) -> None:
    answers = {"none": [rows(1e-3), rows(1e-3)], "noise(scale=0.5)": [rows(0.02), rows(0.05, converged=False)]}
    _, page, _ = board_of(tmp_path, [BLACK, WHITE], answers)
    assert line_of(page, "`noise")[3:5] == ["81 %; 17.0 dB"] * 2
    cells = line_of(page, "`noise", 1)
    assert (cells[7], cells[-1]) == ("member 0.02", "black box: member 0.02; not converged")
    assert cells[8].startswith("17.0")


def test_a_closed_form_beside_the_attack_counts_where_it_recovers_more(tmp_path: Path) -> None:
    answers = {"none": [rows(1e-3), rows(1e-3)], "noise(scale=0.5)": [rows(0.05, linear_inverse=0.03), rows(0.04)]}
    _, page, _ = board_of(tmp_path, [BLACK, WHITE], answers)
    assert line_of(page, "`noise", 1)[7] == "linear_inverse, as a floor"


@pytest.mark.parametrize(("error", "exact"), [(1e-4, False), (1e-5, False), (9e-7, True)])
def test_a_ceiling_that_has_not_converged_leaves_no_percentage(tmp_path: Path, error: float, exact: bool) -> None:
    """But where it is exact already: below 60 dB nothing is shown but the raw figure and why."""
    answers = {"none": [rows(error, converged=False), rows(1e-7)], "noise(scale=0.5)": [rows(0.05), rows(0.05)]}
    _, page, first = board_of(tmp_path, [BLACK, WHITE], answers)
    raw = "13.0 dB: ceiling not converged"
    assert line_of(page, "`noise")[3:5] == ["50 %; 13.0 dB" if exact else raw, "50 %; 13.0 dB"]
    assert line_of(first, "noise 0.5")[2:] == ["50 %" if exact else raw, "50 %"]
    assert _texts(tmp_path / "board.svg")[-2:] == ["50%" if exact else "13.0", "50%"]


def test_labels_stand_beside_what_own_columns_say(tmp_path: Path) -> None:
    """Of two adversaries that one counts which learns more beyond its own columns, not that with the greater score."""
    attacks = [LABELS, {**LABELS, "adversary": "client0"}]
    answers = {"none": [labels(0.98, 0.976), labels(0.97, 0.9)], "noise(scale=0.5)": [labels(0.98, 0.976)] * 2}
    _, page, first = board_of(tmp_path, attacks, answers)
    assert line_of(page, "`none`")[5:8] == ["0.970", "0.900", "0.070"]
    assert line_of(page, "`noise")[5:8] == ["0.980", "0.976", "0.004"]
    assert line_of(first, "noise 0.5") == ["noise 0.5", "0.980", "0.976", "0.004"]
    figure = _texts(tmp_path / "toy.svg")
    assert figure[figure.index("none") + 4 :][:2] == ["0.97", "0.07"]


def test_labels_without_own_columns_are_held_against_chance(tmp_path: Path) -> None:
    _, page, first = board_of(tmp_path, [LABELS], {"none": [labels(0.9)], "noise(scale=0.5)": [labels(0.2)]})
    assert line_of(page, "`noise")[5:8] == ["0.200", "none (0.500)", "0.300"]
    assert line_of(first, "none")[1:] == ["0.900", "none (0.500)", "0.400"]


def test_an_answer_of_an_attack_with_other_settings_is_none(tmp_path: Path) -> None:
    answers = {"none": [rows(1e-3), rows(1e-3)], "noise(scale=0.5)": [rows(0.02), rows(0.02)]}
    study, *_ = board_of(tmp_path, [BLACK, WHITE], answers)
    path = tmp_path / "toy.jsonl"
    path.write_text(path.read_text("utf-8").replace(study.questions[0].settings, "another"), "utf-8")
    write_pages([study], tmp_path)
    first = (tmp_path / "README.md").read_text("utf-8")
    assert "0 of 2 runs are done." in first
    assert line_of(first, "noise 0.5")[2:] == ["to do", "81 %"]
    without = [
        json.dumps({**json.loads(line), "attacks": {"strongest(budget=quick)": rows(1e-9)}})
        for line in path.read_text("utf-8").splitlines()
    ]
    path.write_text("".join(f"{line}\n" for line in without), "utf-8")
    write_pages([study], tmp_path)
    assert line_of((tmp_path / "README.md").read_text("utf-8"), "noise 0.5")[2:] == ["to do", "to do"]
