"""Attacks a finished run once more, or says what could: rebuilt from its newest checkpoint, without training again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from splitfed.core import digests
from splitfed.core.errors import InvalidInput, check_count
from splitfed.data.dataset import Dataset
from splitfed.study.config import schema
from splitfed.study.config.algorithm_tables import read_attack
from splitfed.study.config.lookup import StudyReader
from splitfed.study.config.mistakes import Mistakes
from splitfed.study.config.run_spec import RunSpec, slug
from splitfed.study.config.toml import dumps
from splitfed.study.config.values import read_table
from splitfed.study.results import AttackRecord, RunResult, read_result, write_result
from splitfed.study.run import checked_study
from splitfed.study.run.preflight import check_attack
from splitfed.study.run.progress import open_watcher
from splitfed.study.run.runner import run_attack, train_cell
from splitfed.study.run.store import StudyFolder, hold_run, study_of
from splitfed.study.trust import check_links, code_of, read_own_files, write_mark
from splitfed.training.checkpoint import newest_round, write_atomic
from splitfed.training.run import Run


def attack_run(
    folder: Path,
    names: Sequence[str],
    budget: str | None,
    adversary: str | None,
    *,
    releases: int = 1,
    threat_model: str | None = None,
    round: int | None = None,
    trust: bool = False,
) -> list[AttackRecord]:
    """Run the attacks `names` on the run in `folder`, add them to its result, and return what they achieved.

    `releases`: how often each victim's row is released to them. `threat_model`: a parameter of all of them, where it is
    given. `round`: of recorded training, from 0, up to which they read it.
    """
    check_count("releases", releases, low=1)
    if round is not None:
        check_count("round", round)
    if not names:
        raise InvalidInput("no attack is named; expected --attack inverse_network,rmle")
    if not folder.is_dir():
        raise InvalidInput(f"{str(folder)!r} holds no finished run; expected a folder .../runs/NAME")
    if not trust:  # a lock is a file that is written
        check_links(study_of(folder) or folder)
    # From here on: what another attack adds meanwhile would be lost.
    with hold_run(folder):
        given: dict[str, Any] = {"budget": budget, "adversary": adversary, "releases": releases, "round": round}
        given |= {} if threat_model is None else {"threat_model": threat_model}
        return _attack_alone(folder, names, given, trust)


def _attack_alone(folder: Path, names: Sequence[str], given: Mapping[str, Any], trust: bool) -> list[AttackRecord]:
    """Do what `attack_run` says, while nobody else writes to the run."""
    result, cell, data = load_finished_run(folder, trust=trust)
    mistakes = Mistakes("attack")
    for name in names:
        if ":" in name and name not in {setting.attack.name for setting in cell.attacks}:
            mistakes.add(name, "is an import path that the run's study does not name; expected a registered attack")
    mistakes.stop()
    reader = StudyReader(mistakes, cell.code)
    asked = {key: value for key, value in given.items() if value is not None}
    tables = [read_table(mistakes, name, schema.AttackTable, {"name": name, **asked}) for name in names]
    attack_settings = [read_attack(reader, table.name, table) for table in tables if table is not None]
    trained_attacks = [(p.attack.name, p.attack.parameters) for p in cell.attacks]
    for found in filter(None, attack_settings):
        own = (found.attack.name, found.attack.parameters)
        if found.lives != "outside" and own not in trained_attacks:
            mistakes.add(found.where, f"{own[0]} lives in training, and was not in this one with these parameters")
    mistakes.stop()
    chosen = [
        replace(found, key=_attack_key(result, found.label, found.attack.name))
        for found in filter(None, attack_settings)
    ]
    with open_watcher(1, 0) as workers:
        watcher = workers.worker(0)
        run = digests.reads_folder(lambda place: train_cell(cell, data, place, watcher))(folder)
        for found in chosen:
            with mistakes.at(found.where):
                check_attack(found, run)
        mistakes.stop()
        entries = [run_attack(run, found, folder, watcher) for found in chosen]
    keys, labels = {entry.attack for entry in entries}, {found.label for found in chosen}
    others = [a for a in result.attacks if a.attack not in keys]
    asked_now = (*(p for p in cell.attacks if p.label not in labels), *chosen)
    sources = read_own_files(folder)
    config = replace(cell, attacks=asked_now).config
    write_atomic(folder / "config.toml", digests.toml_with_digest(dumps(config)))
    if sources is not None:
        # Defaults that a later version has are written out now.
        write_mark(folder, sources)
    write_result(folder, replace(result, attacks=(*others, *entries)))
    rewrite_results_table(folder)
    return entries


@digests.reads_folder
def applicable_attacks(folder: Path, adversary: str | None, *, trust: bool = False) -> dict[str, dict[str, str | None]]:
    """Return, for the run in `folder`, party -> attack -> None or why that party cannot run it.

    `adversary`: the one party to ask for (default: all of them).
    """
    run = rebuild_run(folder, trust=trust)
    parties = list(run.engine.parties) if adversary is None else [run.evaluator.adversary(adversary)]
    return {party: run.evaluator.applicable(party) for party in parties}


@digests.reads_folder
def load_finished_run(folder: Path, *, trust: bool = False) -> tuple[RunResult, RunSpec, Dataset]:
    """Return the result of the run in `folder`, what it is, and its data; refuse what has not finished.

    One that reaches outside of its folder and is not this user's own is refused without `trust`.
    """
    known = read_result(folder)
    if known is None or known.failed is not None or not (folder / "config.toml").is_file():
        raise InvalidInput(f"{str(folder)!r} holds no finished run; expected a folder .../runs/NAME")
    if newest_round(folder / "checkpoints") + 1 < known.rounds:
        # It would be trained again, without a word and into the folder.
        raise InvalidInput(f"{str(folder)!r} holds no checkpoint of its last round any more; run its study again")
    return known, *open_cell(folder, trust)


def open_cell(folder: Path, trust: bool) -> tuple[RunSpec, Dataset]:
    """Return the run whose configuration is in `folder`, with all rounds that it is to have, and its data."""
    raw = schema.read_toml(folder / "config.toml", digests.RUN_CONFIG)
    grid, data = checked_study.check_study(raw, "config.toml", folder, code_of(folder, raw, trust))
    return grid.cells[0], data


@digests.reads_folder
def rebuild_run(folder: Path, *, trust: bool = False) -> Run:
    """Return the finished run in `folder`, as its newest checkpoint has it; see `load_finished_run`."""
    _, cell, data = load_finished_run(folder, trust=trust)
    with open_watcher(1, 0) as workers:
        return train_cell(cell, data, folder, workers.worker(0))


def format_applicable(found: Mapping[str, Mapping[str, str | None]]) -> str:
    """Return what `applicable_attacks` has found for people: the parties, and a line an attack."""
    lines, width = [], 2 + max((len(name) for attacks in found.values() for name in attacks), default=0)
    for party, attacks in found.items():
        lines.append(party)
        lines += [f"  {name:{width}}{'applies' if no is None else f'no: {no}'}" for name, no in attacks.items()]
    return "\n".join(lines)


def _attack_key(known: RunResult, label: str, name: str) -> str:
    """Return the file name for the attack called `label`: its own where it ran before, else one not in use."""
    used = {entry.attack: entry.label for entry in known.attacks}
    return slug(name) if used.get(slug(name), label) == label else slug(label)


@digests.reads_folder
def rewrite_results_table(folder: Path) -> None:
    """Write the table of the study again that the run in `folder` belongs to, where there is one."""
    if (study := study_of(folder)) is not None:
        StudyFolder(study).write_table(sorted(path.name for path in (study / "runs").iterdir()))
