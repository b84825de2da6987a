"""A figure of an attack that does not adapt to a defense beside it is marked in the report and said in the terminal."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from splitfed.cli import main
from tests.study.examples import small, write


@pytest.mark.exhaustive
def test_from_a_study_to_result_report_and_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """unsplit imitates the client without a term of its loss; linear_inverse asks the client itself."""
    once = dict.fromkeys(("rounds", "input_steps", "model_steps", "restarts"), 1)
    attacks = [{"name": "unsplit", "floors": False, **once}, {"name": "linear_inverse", "floors": False}]
    study = small(attack=attacks, defense=[{"name": "distance_correlation", "alpha": 0.5}])
    assert main(["run", str(write(tmp_path, study)), "--folder", str(tmp_path / "out")]) == 0
    said = "did not adapt to: distance_correlation"
    # Lines are wrapped, and the attack is called by its parameters too.
    assert " ".join(capsys.readouterr().out.split()).count(said) == 1
    (home,) = (tmp_path / "out" / "runs").iterdir()
    entries = json.loads((home / "result.json").read_text("utf-8"))["attacks"]
    assert [entry["unadapted"] for entry in entries] == [["distance_correlation"], []]

    page = (tmp_path / "out" / "report.html").read_text("utf-8")
    rows = re.findall(r"<tr>.*?</tr>", page.partition('id="all"')[2].partition("</table>")[0], re.DOTALL)
    marked = [row for row in rows if "<sup>†</sup>" in row]
    assert len(rows) == 3
    assert len(marked) == 1
    assert "unsplit" in marked[0]
    assert "† did not adapt to: distance_correlation" in marked[0]
    assert "Attacks that did not adapt, marked † in the table: unsplit" in page

    assert main(["attack", str(home), "--attack", "unsplit", "--budget", "quick"]) == 0
    assert said in capsys.readouterr().out
