"""The studies of the board: a TOML file each, as `splitfed run` takes it, read as runs and as what is asked of them.

A run is trained without its study's attacks, which are asked of it one by one once it has finished. So a run is known
by all that it is made of but the attacks: one more defense, seed or attack leaves it what it is.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from splitfed.attacks.base import Attack
from splitfed.attacks.threat_model import BLACK_BOX, WHITE_BOX
from splitfed.core.errors import InvalidInput
from splitfed.models.import_paths import NameResolver
from splitfed.study.config import build, schema
from splitfed.study.config.algorithm_tables import read_attack
from splitfed.study.config.grid import Grid, expand
from splitfed.study.config.lookup import StudyReader
from splitfed.study.config.mistakes import Mistakes
from splitfed.study.config.run_spec import DefenseSetting, RunSpec, format_value
from splitfed.study.config.values import read_table
from splitfed.threats.attack_requests import threat_model_of

ROOT = Path(__file__).resolve().parents[2]
BOARD = ROOT / "docs" / "board"
ASKED = {"name", "budget", "adversary", "threat_model", "round"}
"""Keys of an `[[attack]]` table here: what `splitfed attack` takes."""
COLUMNS = {
    BLACK_BOX: "rows, black box",
    WHITE_BOX: "rows, white box",
    "labels": "labels",
    "members": "membership",
}
"""What attacks recover, of rows by their threat model -> what the board calls the column."""


@dataclass(frozen=True)
class Question:
    """An attack as it is asked of every run of a study.

    `label`: as in the results of `splitfed attack`. `column`: where on the board its answer stands, of `COLUMNS`.
    `settings`: a digest of all its parameters; an answer of an attack with other ones is none. `given`: the arguments
    of `attack_run` beside its name.
    """

    name: str
    label: str
    column: str
    settings: str
    given: Mapping[str, Any]

    def answer_in(self, entry: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return what the run with this entry answered; None where it was not asked, or with other parameters."""
        found: Mapping[str, Any] | None = entry.get("attacks", {}).get(self.label)
        return None if found is None or found.get("settings") != self.settings else found


@dataclass(frozen=True)
class BoardRun:
    """A run of a study; `key` is a digest of all that defines it, whatever it is called.

    `defense`: with its strength alone, for people: `noise 0.5`, `dp_sgd ε 8`.
    """

    cell: RunSpec
    key: str
    defense: str

    @property
    def folder(self) -> str:
        """The name of its folder."""
        return f"{self.cell.id}-{self.key[:8]}"

    @property
    def place(self) -> str:
        """Its topology and cut, for people: `vanilla, cut pool1`."""
        builder = self.cell.topology.part
        cuts = [format_value(value) for key, value in builder.label_values.items() if key in schema.CUT_KEYS]
        return ", cut ".join([builder.name, *cuts])


@dataclass(frozen=True)
class BoardStudy:
    """A study of the board: its `runs`, seed by seed, and the `questions` that each of them is asked."""

    name: str
    grid: Grid
    runs: tuple[BoardRun, ...]
    questions: tuple[Question, ...]

    def open_questions(self, entry: Mapping[str, Any]) -> list[Question]:
        """Return what a run with this entry has not been asked; nothing of one that was refused or failed."""
        return [q for q in self.questions if "attacks" in entry and q.answer_in(entry) is None]

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds that every setting has."""
        return tuple(dict.fromkeys(run.cell.seed for run in self.runs))


def read_studies(folder: Path = BOARD, names: Sequence[str] = ()) -> list[BoardStudy]:
    """Return the studies whose TOML files lie in `folder`, or those called `names`, by name of the file.

    Those of detectors are left out: see `experiments.board.detection`.
    """
    paths = sorted(folder.glob("*.toml"))
    if unknown := set(names) - {path.stem for path in paths}:
        known = ", ".join(path.stem for path in paths)
        raise InvalidInput(f"study {sorted(unknown)[0]!r} is not known; expected one of {known}")
    chosen = [path for path in paths if not names or path.stem in names]
    return [read_study(path) for path in chosen if "detector" not in schema.read_toml(path)]


def read_study(path: Path) -> BoardStudy:
    """Return the study in the file `path`; nothing is loaded or checked beyond its tables.

    Raises `InvalidInput` for a file that is no study, a search, and an `[[attack]]` with other keys than `ASKED`.
    """
    raw = schema.read_toml(path)
    attacks = raw.pop("attack", [])
    grid = expand(schema.parse_study(raw, path.name), path.name, path.parent)
    names = _short_names([cell.defense for cell in grid.cells])
    found = [BoardRun(cell, key_of(cell), names[cell.defense.label]) for cell in grid.cells]
    runs = sorted(found, key=lambda run: _turn(run, grid))
    return BoardStudy(path.stem, grid, tuple(runs), tuple(_question(path.name, table) for table in attacks))


def key_of(cell: RunSpec) -> str:
    """Return a digest of all that defines the run `cell`, but for its name and its attacks."""
    config = {key: value for key, value in cell.config.items() if key != "attack"}
    config["study"] = {key: value for key, value in config["study"].items() if key != "name"}
    return digest_of(config)


def digest_of(value: Any) -> str:
    """Return a digest of plain values."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def alone(grid: Grid, cell: RunSpec) -> Grid:
    """Return the grid of one run, which is refused with a reason rather than left out."""
    return replace(grid, cells=(replace(cell, skip_refused=False),), skip_refused=False)


def _short_names(settings: Iterable[DefenseSetting]) -> dict[str, str]:
    """Return label -> short name of defenses; those that it would not tell apart keep their labels."""
    names = {setting.label: _short_name(setting) for setting in settings}
    times = Counter(names.values())
    return {label: name if times[name] == 1 else label for label, name in names.items()}


def _short_name(setting: DefenseSetting) -> str:
    if setting.strength is None:
        return setting.name
    sign = "ε " if setting.strength.name == "epsilon" else ""
    return f"{setting.name} {sign}{format_value(setting.strength.value)}"


def _turn(run: BoardRun, grid: Grid) -> int:
    """Return when it is a run's turn: one seed of everything first, so that an unfinished board shows all settings."""
    seeds = list(dict.fromkeys(cell.seed for cell in grid.cells))
    return seeds.index(run.cell.seed)


def _question(source: str, table: Mapping[str, Any]) -> Question:
    if "name" not in table or (more := set(table) - ASKED):
        given = f"has {sorted(more)[0]!r}" if "name" in table else "has no name"
        raise InvalidInput(f"{source}: an [[attack]] of the board {given}; expected {', '.join(sorted(ASKED))}")
    name, given = table["name"], {key: table.get(key) for key in sorted(ASKED - {"name"})}
    mistakes = Mistakes(source)
    reader = StudyReader(mistakes, NameResolver(refusal="import paths are not followed here"))
    asked = read_table(mistakes, f"attack {name}", schema.AttackTable, table)
    setting = None if asked is None else read_attack(reader, f"attack {name}", asked)
    mistakes.stop()
    assert setting is not None
    if setting.lives != "outside":
        raise InvalidInput(f"{source}: {name} lives in training; expected an attack that finished runs can be asked")
    column = _column(source, name, build.attack(setting))
    return Question(name, setting.label, column, digest_of(setting.attack.parameters)[:16], given)


def _column(source: str, name: str, attack: Attack) -> str:
    """Return where the answers of `attack` stand; refuse one whose threat model would depend on the run."""
    if (target := attack.target.name.lower()) != "inputs":
        return target
    if getattr(attack, "threat_model", BLACK_BOX) is None:
        raise InvalidInput(
            f'{source}: {name} says no threat model; expected threat_model = "{BLACK_BOX}" or "{WHITE_BOX}"'
        )
    return threat_model_of(attack)
