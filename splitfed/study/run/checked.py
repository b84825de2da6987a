"""What the check of a study found, kept in its folder: whoever goes on with the same study need not check it again.

It counts for the same study, the same files of data and weights, the same versions and the same machine only. A study
with code of the user's, by import paths or plug-ins, is checked in every call, for its code may have changed; the
workers of one call rely on what that call has checked.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from splitfed.core import digests
from splitfed.registry import PLUGINS
from splitfed.study.config.search_space import Assignment
from splitfed.study.report.data import CHECKED
from splitfed.study.run.trust import import_paths
from splitfed.training.checkpoint import write_atomic

MOST_FILES = 10_000
"""Files of one folder that are looked at."""


@dataclass(frozen=True)
class Checked:
    """What a check found: `key` says of what, `refused` the runs that are left out, as pairs of name and reason.

    `setting`: of a search, the first setting that fits.
    """

    key: str
    refused: tuple[tuple[str, str], ...] = ()
    setting: Assignment | None = None


def key_of(resolved: Mapping[str, Any]) -> str:
    """Return what tells the check of the study `resolved`, its tables with all defaults, from any other check."""
    files = {str(path): [found.st_size, found.st_mtime_ns] for path, found in _files(resolved)}
    text = json.dumps([resolved, files, _versions()], sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def write_checked(folder: Path, found: Checked) -> None:
    """Keep what was found in the study's `folder`, unless it is there already."""
    if read_checked(folder) == found:
        return
    document = {"key": found.key, "refused": [list(pair) for pair in found.refused], "setting": found.setting}
    write_atomic(folder / CHECKED, digests.json_with_digest(document))


def read_checked(folder: Path) -> Checked | None:
    """Return what a check found that the study's `folder` keeps; None where there is none that can be read."""
    try:
        found = digests.read(folder / CHECKED, "")
        refused = tuple((str(name), str(reason)) for name, reason in found["refused"])
        return Checked(str(found["key"]), refused, found["setting"])
    except (digests.Damaged, OSError, KeyError, TypeError, ValueError):
        return None  # it is written again after the next check


def recall(folder: Path | None, resolved: Mapping[str, Any], token: str = "") -> Checked | None:
    """Return what an earlier check of the study `resolved` found, where `folder` keeps it and it still counts.

    `token`: the key by which the process that started this one knows what it has checked; "" for none.
    """
    if folder is None or (found := read_checked(folder)) is None or found.key != key_of(resolved):
        return None
    own_code = bool(PLUGINS) or any(import_paths(resolved))
    return None if own_code and token != found.key else found


def _files(value: Any) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield the files that tables name by absolute paths, and those in folders that they name so."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, Sequence) and not isinstance(value, str):
        for one in value:
            yield from _files(one)
    elif isinstance(value, str) and os.path.isabs(value):
        with suppress(OSError, ValueError):
            path = Path(value)
            for file in sorted(islice(path.rglob("*"), MOST_FILES)) if path.is_dir() else [path]:
                yield file, file.stat()


@cache
def _versions() -> str:
    """Return a digest of all that is installed, of the source of this package, and of the device."""
    installed = sorted(
        entry.name for place in sys.path if os.path.isdir(place) for entry in Path(place).glob("*.dist-info")
    )
    home, source = Path(__file__).parents[2], []
    for place, _, files in os.walk(home, followlinks=True):
        for name in files:
            if name.endswith(".py"):
                found = (Path(place) / name).stat()
                source.append([os.path.relpath(os.path.join(place, name), home), found.st_size, found.st_mtime_ns])
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    told = [sys.version, platform.platform(), torch.__version__, device, installed, sorted(source)]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()
