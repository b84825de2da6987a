"""The runs that a study left out because they are refused: read back from its folder."""

from __future__ import annotations

from pathlib import Path

from splitfed.core import digests
from splitfed.study.trust import CHECKED

ADVICE = "delete it and go on with --resume: the study is checked again"


def read_refused(folder: Path) -> tuple[tuple[str, str], ...]:
    """Return name and reason of every run that the study in `folder` left out; raises `Damaged`."""
    path = folder / CHECKED
    if not path.is_file():
        return ()
    return tuple((str(name), str(reason)) for name, reason in digests.read(path, ADVICE)["refused"])
