"""Trains the runs of the board that are missing, and asks them the attacks that they have not been asked."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path

import torch

from experiments.board.entries import Entries, Json, describe_attack, describe_refusal, describe_run, reason, versions
from experiments.board.studies import BoardRun, BoardStudy, Question, alone
from splitfed.core import digests
from splitfed.core.errors import InvalidInput, SplitfedError
from splitfed.data.dataset import Dataset
from splitfed.study.config import build
from splitfed.study.run.preflight import check_grid
from splitfed.study.run.progress import Lines
from splitfed.study.run.reattack import attack_run
from splitfed.study.run.runner import run_cell

Told = Callable[[str], None]


class Stopwatch(Lines):
    """Takes the processor time of a training from one end of a round to the next; says nothing of rounds."""

    def __init__(self) -> None:
        super().__init__(0)
        self._marks: list[tuple[int, float]] = []

    def round(self, done: int, total: int, epsilon: float | None = None) -> None:
        """Note when a round ended."""
        self._marks.append((done, time.process_time()))

    def seconds(self, rounds: int) -> float | None:
        """Return the time of all `rounds`, by those that were seen from end to end; None where there are none."""
        if len(self._marks) < 2:
            return None
        (first, began), (last, ended) = self._marks[0], self._marks[-1]
        return (ended - began) / (last - first) * rounds if last > first else None


class Measurement:
    """Does a study run by run in the folder `home`, and keeps what it came to in `entries`.

    `retry`: whether runs and attacks that were refused or failed are tried again.
    """

    def __init__(self, study: BoardStudy, entries: Entries, home: Path, told: Told, *, retry: bool = False) -> None:
        self._study, self._entries, self._home, self._told, self._retry = study, entries, home, told, retry
        self._order = [run.key for run in study.runs]
        self._tried: set[tuple[str, str]] = set()

    def missing(self) -> list[tuple[BoardRun, list[Question]]]:
        """Return the runs that are not done, each with what it has not been asked."""
        return [(run, asked) for run in self._study.runs if (asked := self._open(run)) is not None]

    def complete(self, seed: int | None = None) -> None:
        """Do what is missing; of the runs with `seed` alone, where it is given."""
        for run, asked in self.missing():
            if seed is None or run.cell.seed == seed:
                self._do(run, asked)

    def _open(self, run: BoardRun) -> list[Question] | None:
        """Return the questions that are open for a run, None if it is done."""
        entry, asked = self._entries.get(run.key), list(self._study.questions)
        if entry is None:
            return asked
        if "refused" in entry or "failed" in entry:
            return asked if self._retry and (run.key, "") not in self._tried else None
        return [q for q in asked if not self._answered(run, entry, q)] or None

    def _answered(self, run: BoardRun, entry: Json, question: Question) -> bool:
        found = question.answer_in(entry)
        again = self._retry and found is not None and {"refused", "failed"} & set(found)
        return found is not None and not (again and (run.key, question.label) not in self._tried)

    def _do(self, run: BoardRun, asked: Sequence[Question]) -> None:
        entry = self._train(run)
        self._tried.add((run.key, ""))
        self._entries.put(entry, self._order)
        if "attacks" in entry:
            kept = [q for q in self._study.questions if q not in asked and q.answer_in(entry) is not None]
            entry["attacks"] = {question.label: entry["attacks"][question.label] for question in kept}
        for question in self._study.questions if "attacks" in entry else ():
            if question.label in entry["attacks"]:
                continue
            answer = self._ask(run, question)
            differing = {} if versions() == entry["versions"] else {"versions": versions()}
            entry["attacks"][question.label] = {"settings": question.settings, **answer, **differing}
            self._tried.add((run.key, question.label))
            self._entries.put(entry, self._order)
        self._told(f"{self._study.name}: {run.cell.id}: {_outcome(entry)}")

    def _train(self, run: BoardRun) -> Json:
        """Return the entry of a run: as it is known, or of one that is trained now or was left half done."""
        folder, known = self._home / "runs" / run.folder, self._entries.get(run.key)
        if known is None or "attacks" not in known:
            try:
                check_grid(alone(self._study.grid, run.cell), self._study.name, self._data)
            except InvalidInput as error:
                return describe_refusal(run, reason(error))
        was_there, watcher = (folder / "result.json").is_file(), Stopwatch()
        result = run_cell(run.cell, self._data, folder, watcher)
        seconds = watcher.seconds(run.cell.training.rounds)
        entry = describe_run(run, result, result.seconds if seconds is None else seconds)
        if known is None or "attacks" not in known or "attacks" not in entry:
            return entry
        if was_there:
            return known
        # Trained again, to the same bits by the same versions alone: what others have found is asked anew.
        same = entry["versions"] == known["versions"]
        return {**entry, "attacks": dict(known["attacks"]) if same else {}}

    def _ask(self, run: BoardRun, question: Question) -> Json:
        """Ask a finished run one attack; a refusal, or what went wrong in it, is an answer too."""
        began = time.process_time()
        try:
            given = dict(question.given)
            place = self._home / "runs" / run.folder, [question.name], given.pop("budget"), given.pop("adversary")
            (found,) = attack_run(*place, **given)
        except digests.Damaged:
            raise
        except SplitfedError as error:
            kind = "refused" if isinstance(error, InvalidInput) else "failed"
            return {kind: reason(error)}
        return describe_attack(found, self._data.value_range, time.process_time() - began)

    @cached_property
    def _data(self) -> Dataset:
        """The data set; one that cannot be divided is refused before any run."""
        first = self._study.runs[0].cell
        data = build.dataset(first.data)
        for seed in self._study.seeds:
            build.federation(data, first.data, seed)
        return data


def complete(
    studies: Sequence[BoardStudy], results: Path, home: Path, told: Told = print, *, retry: bool = False
) -> None:
    """Do what is missing of all `studies`, on one thread: the first seed of each of them first, then the second.

    `results`: the folder of the entries, a file a study. `home`: that of the runs.
    """
    torch.set_num_threads(1)
    found = [Measurement(s, Entries(results / f"{s.name}.jsonl"), home / s.name, told, retry=retry) for s in studies]
    left = sum(len(one.missing()) for one in found)
    told(f"{left} of {sum(len(study.runs) for study in studies)} runs are to be trained or asked")
    for turn in range(max((len(study.seeds) for study in studies), default=0)):
        for study, measurement in zip(studies, found, strict=True):
            if turn < len(study.seeds):
                measurement.complete(study.seeds[turn])


def _outcome(entry: Json) -> str:
    for kind in ("refused", "failed"):
        if kind in entry:
            return f"{kind}: {entry[kind]}"
    parts = [f"{entry['metric']} {entry['utility']:.3f}"]
    for label, found in entry["attacks"].items():
        told = next((kind for kind in ("refused", "failed") if kind in found), "no number")
        if "metric" in found and (score := found["scores"]["attack"][found["metric"]]["mean"]) is not None:
            told = f"{found['metric']} {score:.3g}"
        parts.append(f"{label} {told}")
    return ", ".join(parts)
