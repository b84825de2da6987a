"""A table that takes long to compute: measured cell by cell, resumable, written into RESULTS.md as far as it is done.

A table is a module of this package with a `TABLE`. Each measurement of it is one line of `papers/NAME.jsonl`, appended
as it comes; what is there is not measured again.
"""

from __future__ import annotations

import datetime
import fcntl
import json
import math
import os
import platform
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from splitfed.attacks.scoring.reconstruction_metrics import PSNR_CAP
from splitfed.stats.intervals import mean_interval
from splitfed.study.report.units import format_seconds

RESULTS = Path(__file__).parents[1] / "RESULTS.md"
Measured = Mapping[str, Mapping[str, Any]]
Range = tuple[float, float]

# What values of a kind cannot leave, nor can the interval of their mean; differences may be anything.
SHARE, PERCENT, SSIM, AMOUNT = (0.0, 1.0), (0.0, 100.0), (-1.0, 1.0), (0.0, math.inf)
DECIBELS, ANY = (-math.inf, PSNR_CAP), (-math.inf, math.inf)
BOUNDS: Mapping[str, Range] = {"psnr": DECIBELS, "ssim": SSIM, "mse": AMOUNT}


@dataclass(frozen=True)
class Cell:
    """One measurement. `measure` gets a folder to keep state in, to go on from when it was cut short.

    It returns plain values that JSON can hold; what it raises stops the table, with the cells before it kept.
    """

    key: str
    measure: Callable[[Path], dict[str, Any]]


@dataclass(frozen=True)
class Table:
    """`budget` says what is computed and how long it takes; `show` makes Markdown of the cells that are there.

    `show` gets key -> what `measure` returned, with `seconds` and `megabytes` (the most memory of the process) added.
    """

    name: str
    title: str
    budget: str
    cells: tuple[Cell, ...]
    show: Callable[[Measured], str]

    def complete(self, folder: Path, told: Callable[[str], None] = print) -> None:
        """Measure what is missing in `folder`, on one thread."""
        torch.set_num_threads(1)
        done = self.measured(folder)
        for cell in self.cells:
            if cell.key in done:
                continue
            told(f"{self.name}: {cell.key}")
            state = folder / self.name / "".join(c if c.isalnum() else "-" for c in cell.key)
            state.mkdir(parents=True, exist_ok=True)
            started = time.perf_counter()
            found = cell.measure(state)
            spent = {"seconds": time.perf_counter() - started, "megabytes": _peak(), "date": _today()}
            _append(folder / f"{self.name}.jsonl", {"key": cell.key, **spent, **found})
            told(f"{self.name}: {cell.key}: {spent['seconds']:.0f} s")

    def measured(self, folder: Path) -> dict[str, dict[str, Any]]:
        """Return what is in `folder`, by key; a line that was cut short is left out."""
        path = folder / f"{self.name}.jsonl"
        found = {}
        for line in path.read_text("utf-8").splitlines() if path.is_file() else []:
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:
                continue
            found[entry["key"]] = entry
        wanted = {cell.key for cell in self.cells}
        return {key: entry for key, entry in found.items() if key in wanted}

    def text(self, folder: Path) -> str:
        """Return the section of RESULTS.md; cells that are not there yet are counted in its first lines."""
        done = self.measured(folder)
        dates = sorted({str(entry["date"]) for entry in done.values()})
        missing = len(self.cells) - len(done)
        state = "" if not missing else f" **Not finished: {missing} of {len(self.cells)} measurements are missing.**"
        machine = f"torch {torch.__version__.split('+')[0]}, Python {platform.python_version()}, one thread"
        took = format_seconds(sum(float(entry["seconds"]) for entry in done.values()))
        head = f"{' to '.join(dict.fromkeys((dates[0], dates[-1])))}. {machine}; {took} in all.{state}"
        body = self.show(done)
        command = f"`make papers TABLE={self.name}`"
        return f"## {self.title} ({command})\n\n{head}\n\n{self.budget}\n\n{body}\n"


def write(table: Table, folder: Path, path: Path = RESULTS) -> None:
    """Put the section of `table` into the file at `path`, in place of the one that was there; none if nothing is."""
    if not table.measured(folder):
        return
    begin, end = f"<!-- {table.name}: begin -->", f"<!-- {table.name}: end -->"
    section = f"{begin}\n{table.text(folder)}{end}\n"
    with path.open("r+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        text = file.read()
        if begin in text:
            before, rest = text.split(begin, 1)
            text = before + section + rest.split(f"{end}\n", 1)[1]
        else:
            text = f"{text.rstrip()}\n\n{section}"
        file.seek(0)
        file.truncate()
        file.write(text)


def mean(values: Sequence[float], within: Range, digits: int = 2) -> str:
    """Return the mean of `values`, one a seed, with its 95 % interval within their range where there are two."""
    found = mean_interval(values, low=within[0], high=within[1])
    if not found.known:
        return f"{found.mean:.{digits}f}"
    return f"{found.mean:.{digits}f} ({found.low:.{digits}f} to {found.high:.{digits}f})"


def verdict(differences: Sequence[float]) -> str:
    """Return what paired differences, one a seed, say of the claim that they are above zero."""
    found = mean_interval(differences)
    if not found.known or found.low <= 0 <= found.high:
        return "not settled"
    return "confirmed" if found.low > 0 else "contradicted"


def signed(differences: Sequence[float], digits: int = 1) -> str:
    """Return the mean of `differences` with its sign, and its interval as `mean` does."""
    return f"{'+' if sum(differences) >= 0 else ''}{mean(differences, ANY, digits)}"


def markdown(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table; every row must have a cell for each name in the head."""
    for row in rows:
        if len(row) != len(head):
            raise ValueError(f"a row has {len(row)} cells, the head {len(head)}: {row}")
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)


def _append(path: Path, entry: Mapping[str, Any]) -> None:
    # On a line of its own even where the one before was cut short.
    torn = path.is_file() and path.stat().st_size and not path.read_bytes().endswith(b"\n")
    with path.open("a", encoding="utf-8") as file:
        file.write("\n" * bool(torn) + json.dumps(entry) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()
