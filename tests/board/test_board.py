"""The board runs what is missing and nothing else, and its pages and figures say what its results say."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from splitfed.core.errors import InvalidInput
from splitfed.study.config.toml import dumps
from splitfed.study.report.metrics import METRICS
from splitfed.study.run.reattack import attack_run
from splitfed.study.run.runner import run_cell
from tests.board import measure
from tests.board.__main__ import main
from tests.board.entries import Entries
from tests.board.measure import complete
from tests.board.page import write_pages
from tests.board.settings import estimate, summarize
from tests.board.studies import BOARD, BoardStudy, read_study
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
        "grn needs inputs of its own" in e["attacks"]["grn(budget=fast)"]["refused"] for e in entries if "attacks" in e
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
    assert row == f"| noise 0.5 | {100 * lost:.1f} | {left} | - |"
    assert _texts(board / "board.svg")[-3:] == [f"{100 * lost:.1f}", left, "-"]
    figure = _texts(board / "toy.svg")
    assert figure[figure.index("noise 0.5") + 1 :][:3] == [f"{100 * lost:.1f}", f"{sum(best) / 2:.1f}", "-"]
    utility = sum(of["noise(scale=0.5)", s]["utility"] for s in (0, 1)) / 2
    points = re.findall(r"<title>(\d+: [^<]*)</title>", (board / "toy-scatter.svg").read_text("utf-8"))
    assert points[-1] == f"3: rows, black box, PSNR [dB] {sum(best) / 2:.4g}, accuracy {utility:.4g}"


def _texts(path: Path) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text("utf-8"))


def test_what_was_not_asked_says_so(grown: tuple[Path, list[Any]]) -> None:
    assert "| not asked | - | - | not asked |" in (grown[0] / "toy.md").read_text("utf-8")


def test_what_has_not_finished_says_so(grown: tuple[Path, list[Any]], tmp_path: Path) -> None:
    study = place(
        tmp_path, toy(defense=[{"name": "none"}, NOISE, {"name": "dropout"}], attack=[LINEAR, {"name": "rmle"}])
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
