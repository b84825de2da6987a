"""Opens a kept run from Python: `splitfed.load`, for a run of a study and for one of `splitfed.train`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from splitfed.core import digests
from splitfed.core.errors import InvalidInput
from splitfed.core.topology import Topology
from splitfed.data.dataset import Federation
from splitfed.study.run.progress import Lines
from splitfed.study.run.reattack import load_finished_run
from splitfed.study.run.runner import train_cell
from splitfed.study.trust import check_links
from splitfed.training.entry_point import load_run
from splitfed.training.folder import is_run_without_definition
from splitfed.training.run import Run


@digests.reads_folder
def load(
    folder: str | Path,
    topology: Topology | Sequence[Topology] | None = None,
    data: Federation | None = None,
    *,
    trust: bool = False,
    **given: Any,
) -> Run:
    """Return the run in `folder` as its newest checkpoint has it, without training.

    A finished run of a study, STUDY/runs/NAME, says all by itself; nothing is written there: more rounds, attacks and
    scores stay in memory. A run of `train` needs its `topology`, with the weights it began with, and its `data`; more
    rounds go on in its folder. `given`: by the names of `train`, objects of your own classes that the folder could not
    keep. `trust`: whether a folder that is not known to be your own may import code and read files. Raises
    `InvalidInput` where the folder holds no run, or another one.
    """
    home = Path(folder)
    if (home / "study.toml").is_file():
        raise InvalidInput(f"{str(folder)!r} holds a study; give the folder of one of its runs, or use load_study")
    if not (home / "run.json").is_file():
        if is_run_without_definition(home):
            raise InvalidInput(f"{home / 'run.json'} is missing; {digests.RETRAIN}")
        raise InvalidInput(f"{str(folder)!r} holds no run; expected the folder of one")
    of_study = any((home / name).is_file() for name in ("config.toml", "result.json"))
    if of_study:
        if topology is not None or data is not None or given:
            raise InvalidInput(f"{str(folder)!r} is a run of a study, which says all by itself: give its folder alone")
        return _load_cell(home, trust)
    if topology is None or data is None:
        raise InvalidInput(
            f"{str(folder)!r} is a run of splitfed.train, or of a study and not finished; model and data are not kept "
            "in it: give topology= and data=, as it was trained, or go on with its study by --resume"
        )
    if not trust:
        check_links(home)
    return load_run(home, topology, data, given)


def _load_cell(home: Path, trust: bool) -> Run:
    _, cell, data = load_finished_run(home, trust=trust)
    run = train_cell(cell, data, home, Lines(1))
    # The study's results speak of what is there: it stays as it is.
    run.detach_folder()
    return run
