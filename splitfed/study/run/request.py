"""What `splitfed run` was asked for: apart from what does it, so that to read a command line imports nothing heavy."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class RunRequest(NamedTuple):
    """The study in the file `path`, to be done in `folder` (None: named after the study) by `workers` processes.

    `dry_run`: it is checked and its runs listed; nothing is written.
    """

    path: Path
    folder: Path | None
    resume: bool = False
    workers: int = 1
    as_json: bool = False
    trust: bool = False
    dry_run: bool = False
