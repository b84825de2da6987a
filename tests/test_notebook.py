"""The notebook of docs/: no output is stored, every cell compiles, and all of them run in order in a fresh process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages import ROOT

NOTEBOOK = ROOT / "docs" / "notebook.ipynb"

# Runs the cells as a notebook would, one after the other in one set of names, and looks at the memory all the while.
RUNNER = """
import json, re, sys, threading, time
from pathlib import Path

import matplotlib

matplotlib.use("agg")
most, over = [0], threading.Event()


def watch():
    while not over.wait(0.02):
        found = re.search(r"RssAnon:\\s+(\\d+) kB", Path("/proc/self/status").read_text())
        most[0] = max(most[0], 1024 * int(found[1]))


watcher = threading.Thread(target=watch)
if Path("/proc/self/status").exists():
    watcher.start()
names = {"__name__": "__main__"}
try:
    for number, text in enumerate(json.load(sys.stdin)):
        exec(compile(text, f"cell {number}", "exec"), names)
finally:
    over.set()
told = {
    "most": most[0],
    "runs": len(names["frame"]),
    "rounds": len(names["run"].history),
    "front": len(names["front"]),
    "own": names["own"].accuracy,
    "scanned": names["scanned"].accuracy,
    "gone": not names["folder"].exists(),
}
print(json.dumps(told))
"""


def cells() -> list[str]:
    """Return the code of the notebook, cell by cell."""
    found = json.loads(NOTEBOOK.read_text("utf-8"))
    return ["".join(cell["source"]) for cell in found["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_is_one_and_stores_no_output() -> None:
    found = json.loads(NOTEBOOK.read_text("utf-8"))
    assert (found["nbformat"], found["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in found["cells"]}) == len(found["cells"])
    for cell in found["cells"]:
        assert set(cell) - {"cell_type", "id", "metadata", "source"} == (
            {"execution_count", "outputs"} if cell["cell_type"] == "code" else set()
        )
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
    for number, text in enumerate(cells()):
        compile(text, f"cell {number}", "exec")


# A minute; the file of 10 GiB is sparse, 320 MiB on the disk, and goes again.
@pytest.mark.exhaustive
def test_the_notebook_runs_in_a_gibibyte(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", RUNNER],
        input=json.dumps(cells()),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["runs"] == 4
    assert told["rounds"] == 5
    assert 1 <= told["front"] <= 8
    assert told["own"] > 0.7, "chance is .1"
    assert told["scanned"] > 0.9, "chance is .25"
    assert told["gone"]
    assert told["most"] < 2**30
    if sys.platform == "linux":
        assert told["most"] > 2**27, "the memory was looked at"
    assert "10.0 GiB, " in done.stdout
