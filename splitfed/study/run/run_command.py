"""What `splitfed run` does with a checked study: do its runs or list them, print the results and write the report."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from splitfed.study.report.data import read_refused
from splitfed.study.report.document import write_report
from splitfed.study.report.search_data import read_search_outcome, search_to_json
from splitfed.study.report.search_page import print_front
from splitfed.study.results import RunResult
from splitfed.study.run import session, terminal_table
from splitfed.study.run.checked_study import CheckedStudy
from splitfed.study.run.dry_run import list_runs, print_runs
from splitfed.study.run.terminal_messages import others_print_aside

SHOWN = 20
"""Refused runs that are printed; the report has all."""


def run_command(
    ready: CheckedStudy,
    home: Path,
    *,
    resume: bool = False,
    workers: int = 1,
    as_json: bool = False,
    trust: bool = False,
    dry_run: bool = False,
) -> bool:
    """Do the runs of `ready` in the folder `home` and print their results.

    `dry_run`: the runs are listed, and nothing is written. Returns whether every run has ended, and not all of them in
    a failure of their own.
    """
    if dry_run:
        with others_print_aside():
            session.check_folder(ready, home, resume=resume, workers=workers, trust=trust)
            listed = list_runs(ready, home, workers)
        if as_json:
            _print(json.dumps(listed))
        else:
            print_runs(listed, _console())
        return True
    with others_print_aside():
        results = session.run_study(ready, home, resume=resume, workers=workers, trust=trust)
    _print_results(results, home, as_json, trust)
    outcome = read_search_outcome(home)
    wanted = len(ready.grid.cells) if ready.search is None else ready.search.trials
    if results and all(found.failed is not None for found in results):
        return False
    return (len(results) if outcome is None else len(outcome.records)) >= wanted


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")


def _console() -> Console:
    # A file is as wide as it needs to be.
    return Console(width=None if sys.stdout.isatty() else 120)


def _print_results(results: Sequence[RunResult], home: Path, as_json: bool, trust: bool) -> None:
    report = write_report(home, trust=trust) if any(found.failed is None for found in results) else None
    outcome, refused = read_search_outcome(home), read_refused(home)
    if as_json:
        found = {"folder": str(home), "report": None if report is None else str(report)}
        rows = {"settings": terminal_table.setting_rows(results)}
        left = {"refused": [{"run": run, "reason": reason} for run, reason in refused]} if refused else {}
        _print(json.dumps(found | (rows if outcome is None else search_to_json(outcome)) | left))
        return
    console = _console()
    if outcome is not None:
        print_front(outcome, console)
    else:
        terminal_table.print_table(results, console)
    for run, reason in refused[:SHOWN]:
        console.print(f"refused: {run}: {reason}", highlight=False, markup=False, soft_wrap=True)
    if len(refused) > SHOWN:
        console.print(f"and {len(refused) - SHOWN} more that are refused", highlight=False, markup=False)
    _print(f"report: {report.resolve()}" if report is not None else f"every run failed: see {home}")
