"""Attacks a finished run once more: rebuilt from its folder and newest checkpoint, without training again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from splitfed.checkpoint import write_atomic
from splitfed.errors import InvalidInput
from splitfed.study import build, config, session
from splitfed.study.cell import slug
from splitfed.study.grid import probe, written
from splitfed.study.mistakes import Mistakes
from splitfed.study.progress import watcher
from splitfed.study.rehearsal import check_attack
from splitfed.study.runner import Json, attacked, result, trained, write_result
from splitfed.study.store import StudyFolder
from splitfed.study.toml import dumps


def attack(folder: Path, names: Sequence[str], preset: str, adversary: str | None) -> list[Json]:
    """Run the attacks `names` on the run in `folder`, add them to its result, and return what they achieved."""
    known = result(folder)
    if known is None or "failed" in known or not (folder / "config.toml").is_file():
        raise InvalidInput(f"{str(folder)!r} holds no finished run; expected a folder .../runs/NAME")
    if not names:
        raise InvalidInput("no attack is named; expected --attack inverse_network,rmle")
    raw = config.read(folder / "config.toml")
    grid, data = session.check(raw, "config.toml", folder)
    cell = grid.cells[0]
    mistakes = Mistakes("attack")
    probes = [probe(mistakes, name, name, preset, {}, adversary) for name in names]
    mistakes.stop()
    topology = build.topology(cell, data)
    split = build.federation(data, cell.data, cell.seed)
    chosen = []
    for found in filter(None, probes):
        with mistakes.at(found.where):
            check_attack(found, topology, split)
        chosen.append(replace(found, key=_key(known, found.label, found.attack.name)))
    mistakes.stop()
    with watcher(1, 0) as told:
        run = trained(cell, data, folder, told)
        entries = [attacked(run, found, folder, told) for found in chosen]
    done = {entry["attack"] for entry in entries}
    kept = [a for a in known["attacks"] if a["attack"] not in done]
    labels = {found.label for found in chosen}
    tables = [written(p) for p in [*(p for p in cell.attacks if p.label not in labels), *chosen]]
    write_atomic(folder / "config.toml", dumps({**cell.config, "attack": tables}).encode())
    write_result(folder, {**known, "attacks": [*kept, *entries]})
    _refresh(folder.resolve().parent.parent)
    return entries


def _key(known: Json, label: str, name: str) -> str:
    """Return the file name for the attack called `label`: its own where it ran before, else one not in use."""
    used = {entry["attack"]: entry["label"] for entry in known["attacks"]}
    return name if used.get(name, label) == label else slug(label)


def _refresh(study: Path) -> None:
    """Write the table of the study again, where the run belongs to one."""
    if (study / "study.toml").is_file():
        home = StudyFolder(study)
        home.write_table(home.results(sorted(path.name for path in (study / "runs").iterdir())))
