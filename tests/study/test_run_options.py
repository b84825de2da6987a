"""What `splitfed run` shows and what it leaves out: live table, `--dry-run`, `skip_refused`, attacks not applicable."""

from __future__ import annotations

import copy
import io
import json
import os
import pty
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from splitfed.core.errors import InvalidInput
from splitfed.study.config.run_spec import RunSpec
from splitfed.study.results import to_json
from splitfed.study.run import checked_study, dry_run
from splitfed.study.run.progress import Lines, LiveTable, ProgressEvent, Watcher, open_watcher
from splitfed.study.run.python_study import load_study
from splitfed.study.run.runner import run_cell
from tests.study.examples import checked, small, write
from tests.study.report_page import check
from tests.study.search_examples import run, searching
from tests.study.test_encryption import SHARES, study as encrypted

# Sequential training has no average that a method could work on.
MIXED: dict[str, Any] = {
    "study": {"name": "mixed", "seeds": [0], "skip_refused": True},
    "data": {"name": "digits", "victims": 8, "auxiliary": 16, "clients": 2},
    "training": {"rounds": 1, "batch_size": 256, "schedule": ["sequential", "splitfed_v3"]},
    "method": [{"name": "none"}, {"name": "fedavg"}],
    "defense": None,
    "attack": None,
}
REFUSED = "vanilla-relu1--sequential--fedavg--none--seed0"


def mixed(**changes: Any) -> dict[str, Any]:
    return small(**{**copy.deepcopy(MIXED), **changes})


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("mixed")
    assert run(write(home, mixed()), home / "out") == 0
    return home


def test_a_refused_run_refuses_the_study_unless_it_is_to_be_skipped() -> None:
    with pytest.raises(InvalidInput, match=r"\Astudy\.toml: method\[1\]: ") as caught:
        checked(mixed(study={"name": "mixed"}))
    (line,) = str(caught.value).splitlines()
    grid = checked(mixed())
    assert [name for name, _ in grid.refused] == [REFUSED]
    assert f"study.toml: {grid.refused[0][1]}" == line
    assert len(grid.cells) == 3
    assert grid.resolved["study"]["skip_refused"] is True
    # One run alone does not skip itself.
    assert "skip_refused" not in grid.cells[0].config["study"]
    # Where none is left, all mistakes are told.
    with pytest.raises(InvalidInput, match=r"\Astudy\.toml: method\[0\]: "):
        checked(mixed(training={"rounds": 1, "batch_size": 256}, method=[{"name": "fedavg"}]))


@pytest.mark.parametrize(
    ("study", "line"),
    [
        (
            mixed(study={"name": "mixed", "skip_refused": 1}),
            "study.skip_refused: 1 is not allowed; expected true or",
        ),
        (mixed(study={"name": "mixed", "skip_refuse": True}), "study.skip_refuse: unknown key 'skip_refuse'; did you"),
    ],
)
def test_a_mistake_in_the_key_is_one_line(study: dict[str, Any], line: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        checked(study)
    assert str(caught.value).startswith(f"study.toml: {line}")
    assert "\n" not in str(caught.value)


def test_a_search_has_no_runs_to_skip(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = searching(study={"name": "search", "seeds": [0], "skip_refused": True})
    assert run(write(tmp_path, study), tmp_path / "out") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert (
        line == "study.toml: study.skip_refused: is for grids: a search refuses a trial that does not fit, and goes on"
    )


def test_skipped_runs_are_listed_wherever_results_are(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = finished / "out"
    assert sorted(path.name for path in (out / "runs").iterdir()) == sorted(c.id for c in checked(mixed()).cells)
    page = (out / "report.html").read_text("utf-8")
    check(page)
    section = page.partition('<section class="warning" id="refused">')[2].partition("</section>")[0]
    reason = checked(mixed()).refused[0][1]
    assert f"<code>{REFUSED}</code>" in section
    assert reason.split("'")[0] in section
    assert 'id="unfinished"' not in page
    assert run(finished / "study.toml", out, "--resume") == 0
    assert f"refused: {REFUSED}: {reason}\n" in capsys.readouterr().out
    assert run(finished / "study.toml", out, "--resume", "--json") == 0
    assert json.loads(capsys.readouterr().out)["refused"] == [{"run": REFUSED, "reason": reason}]
    assert load_study(out).refused == {REFUSED: reason}


def tree(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_a_dry_run_lists_the_runs_and_writes_nothing(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    more, before = ("--dry-run", "--workers", "2"), tree(finished)
    assert run(finished / "study.toml", finished / "out", *more) == 2
    assert "holds this study already; add --resume" in capsys.readouterr().err
    assert run(finished / "study.toml", finished / "out", "--resume", *more) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(": ")[2] for line in lines[:3]] == ["done"] * 3
    assert lines[3].startswith(f"{REFUSED}: refused, left out: method[1]: ")
    assert lines[4:] == [f"0 of 3 runs left in {finished / 'out'}", "nothing was written"]
    assert tree(finished) == before
    # Another seed of a setting takes as long as the first did; nothing has to be timed for it.
    ready = checked_study.prepare_study(finished / "study.toml")
    done = [(cell, dry_run.read_result(finished / "out" / "runs" / cell.id)) for cell in ready.grid.cells]
    monkeypatch.setattr(dry_run, "measure_training", lambda *given: pytest.fail("it was done before"))
    estimate = dry_run.DurationEstimate(ready.data, [(cell, found) for cell, found in done if found is not None])
    cell, found = done[0]
    assert found is not None
    assert estimate.seconds_of(cell) == found.seconds
    monkeypatch.undo()
    # Nothing is there yet, and nothing is afterwards.
    (tmp_path / "new").mkdir()
    path = write(tmp_path / "new", small(defense=None))
    assert run(path, tmp_path / "out", "--json", "--dry-run") == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed["runs"] == [{"run": "vanilla-relu1--none--seed0", "state": "to do"}]
    assert (listed["left"], listed["timed"], listed["attacks_timed"], listed["refused"]) == (1, 1, False, [])
    assert listed["seconds"] > 0
    assert [p.name for p in tmp_path.rglob("*")] == ["new", "study.toml"]
    # A mistake is found as it would be.
    assert (
        run(write(tmp_path / "new", small(topology=[{"name": "vanilla", "cut": "relu7"}])), tmp_path / "out", *more)
        == 2
    )
    assert "relu7" in capsys.readouterr().err


def test_a_search_is_listed_by_trials(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, searching({"trials": 2}))
    assert run(path, tmp_path / "out", "--dry-run") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["trial 0: to do", "trial 1: to do"]
    assert lines[2].startswith(f"2 of 2 runs left in {tmp_path / 'out'}, about ")
    assert not (tmp_path / "out").exists()


def shown(table: LiveTable) -> list[str]:
    console = Console(file=io.StringIO(), width=110)
    console.print(table)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return [" ".join(line.split()) for line in text.splitlines()]


def test_the_table_has_a_row_a_worker_and_the_time_left() -> None:
    now = [100.0]
    said = io.StringIO()
    table = LiveTable(10, 2, Console(file=said, width=110), lambda: now[0])
    first, second = table.worker(0), table.worker(1)
    first.start("a[b]")
    second.start("c")
    now[0] += 4
    first.round(1, 5)
    second.round(3, 5, epsilon=1.25)  # a run that was resumed: two rounds took no time now
    assert second.cells(now[0])[-1] == "0:00:08"
    now[0] += 1
    first.tell({"event": "attack", "name": "rmle", "done": 0, "total": 300})
    now[0] += 10
    first.attack("rmle", 100, 300)
    assert shown(table) == [
        "worker run round attack time left",
        "1 a[b] 1 of 5 rmle 100/300 0:00:20",
        # Of its eight seconds eleven are over.
        "2 c 3 of 5, epsilon 1.25 0:00:00",
        "2 of 10 done",
    ]
    first.finish("a[b]: failed: \x1b[2Jx", failed=True)
    assert said.getvalue() == "a[b]: failed: ?[2Jx\n"
    table.gone(1)
    # One took 15 seconds, seven are left.
    assert shown(table) == ["worker run round attack time left", "1 -", "3 of 10 done, 1 failed, about 0:01:45 left"]


def test_elsewhere_there_are_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with open_watcher(2, 0) as watcher:
        assert isinstance(watcher, Lines)
        one = watcher.worker(1)
        for event in ({"event": "start", "run": "a"}, {"event": "round", "done": 1, "total": 2, "epsilon": 0.5}):
            one.tell(event)
        told: list[ProgressEvent] = []
        Watcher(told.append).finish("a: 0.5\x1b[31m", failed=True)
        Watcher(told.append).note("worker 1 ended early")
        for event in told:
            one.tell(json.loads(json.dumps(event)))
        watcher.gone(1)
    assert capsys.readouterr().err == "[1/2] a: 0.5?[31m\nworker 1 ended early\n"


def test_on_a_terminal_it_is_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr("sys.stderr", terminal)
        with open_watcher(2, 0) as watcher:
            assert isinstance(watcher, LiveTable)
            row = watcher.worker(0)
            row.start("a")
            row.round(1, 3)
            row.finish("a: 0.5")
        monkeypatch.setenv("TERM", "dumb")
        with open_watcher(2, 0) as watcher:
            assert isinstance(watcher, Lines)
    text = ""
    # Both ends of the terminal are closed: reading ends with an error.
    with suppress(OSError):
        while part := os.read(ours, 65536):
            text += part.decode(errors="replace")
    os.close(ours)
    assert "a: 0.5" in text
    assert "\x1b[" in text


LAYER = {"name": "linear_gradient_inversion"}
LEAKING = {"protocol": "plain_gradient", "precision": 0.1, "accept_leak": True}


def test_an_attack_on_an_encrypted_layer_is_left_out_of_runs_in_plain(tmp_path: Path) -> None:
    made = encrypted({"protocol": "none"}, LEAKING, attack=[LAYER])
    plain, sealed = checked(made).cells
    why = "it reads a layer that computes on ciphertexts, and this run is in plain"
    assert [probe.attack.name for probe in sealed.attacks] == ["linear_gradient_inversion"]
    assert (plain.attacks, sealed.left_out) == ((), ())
    assert [reason for _, reason in plain.left_out] == [why]
    # Alone the run is that run.
    assert checked(dict(plain.config)).cells[0].attacks == ()
    assert told(plain, tmp_path)["refused"] == [{"attack": plain.left_out[0][0], "why": why}]
    # Where every run is in plain it is a mistake, as before.
    for wrong in (encrypted({"protocol": "none"}, attack=[LAYER]), small(attack=[LAYER])):
        with pytest.raises(InvalidInput, match=r"study\.toml: attack\[0\]: linear_gradient_inversion"):
            checked(wrong)
    assert checked(encrypted({"protocol": "none"}, SHARES, attack=[LAYER])).cells[0].left_out != ()


def told(cell: RunSpec, home: Path) -> dict[str, Any]:
    _, data = checked_study.check_study(dict(cell.config), "config.toml", home)
    return to_json(run_cell(cell, data, home / "run", Lines(1)))
