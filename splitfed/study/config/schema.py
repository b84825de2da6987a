"""The tables of a study as frozen values; what the names in them mean is checked in `splitfed.study.config.grid`.

Tables that carry an algorithm's own parameters beside their own keys keep those as `extra`.
"""

from __future__ import annotations

import codecs
import errno
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from splitfed.core import digests
from splitfed.core.errors import (
    InvalidInput,
    check_counts,
    require_count,
    require_number,
)
from splitfed.core.local_update import LocalUpdate
from splitfed.core.nearest_names import nearest_names
from splitfed.study.config.mistakes import Mistakes
from splitfed.study.config.values import EXTRA, LIMIT, parameters_of, read_table, tables_in

Extra = Mapping[str, Any]
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")
_RESERVED = re.compile("CON|PRN|AUX|NUL|(COM|LPT)[0-9]", re.IGNORECASE)


def _check_name(name: str) -> None:
    """Refuse what is no plain name, and what no folder can be called on Windows."""
    if not _NAME.fullmatch(name):
        raise InvalidInput(
            f"{name!r} is not allowed; expected at most 80 letters, digits, '.', '_' and '-', the first a letter or "
            "digit"
        )
    if _RESERVED.fullmatch(name.partition(".")[0]) or name.endswith("."):
        raise InvalidInput(
            f"{name!r} is not allowed; expected a name for a folder, no device of Windows (CON, NUL, COM1) and no dot "
            "at the end"
        )


def _check_seeds(seeds: Any) -> None:
    check_counts("seeds", seeds)
    if len(seeds) > LIMIT:
        raise InvalidInput(f"has {len(seeds)} entries; at most {LIMIT} are allowed")


def _check_filled(given: Any) -> None:
    if not given:
        raise InvalidInput(f"{given} is not allowed; expected one entry or more")


@dataclass(frozen=True, kw_only=True)
class StudyTable:
    """`[study]`: what it is called and which seeds every setting is run with.

    `honest = false` leaves out the runs without an active training attack. `target`: a value of the task's metric; for
    every run it is reported after how many rounds its validation rows reached it. `skip_refused`: runs that cannot be
    put together are left out and listed, in place of refusing the study.
    """

    name: str = field(metadata={"check": _check_name})
    seeds: tuple[int, ...] = field(default=(0,), metadata={"check": _check_seeds})
    honest: bool = True
    target: float | None = field(default=None, metadata=require_number("target"))
    skip_refused: bool = False


@dataclass(frozen=True, kw_only=True)
class SplitTable:
    """How the rows of a data set are divided over clients and parts, as `Dataset.clients`; None: its default."""

    dirichlet: float | None = None
    minimum: int | None = 2
    classes_per_client: int | None = None
    class_spread: int | None = None
    rows_per_class: int | None = None
    by_domain: bool | None = False
    auxiliary: int | float | None = 0.2
    victims: int | None = 64
    validation: float | None = 0.1
    test: float | None = 0.2
    public: float | None = None


@dataclass(frozen=True, kw_only=True)
class PartsTable:
    """Which party holds which part of a row, further label sets, and what is learnt.

    What of these goes together is checked by `splitfed.study.config.data_table`.
    """

    vertical: int | dict[str, list[int | str]] | None = None
    overlap: bool | None = None
    halves: bool | None = None
    strips: int | None = None
    targets: dict[str, dict[str, list[int]]] | None = None
    class_weights: list[float] | None = None
    loss: str | None = None
    metric: str | dict[str, str | bool | float] | None = None
    transform: str | None = None
    mixup: float | None = None


@dataclass(frozen=True, kw_only=True)
class NamedTable:
    """A table that names an algorithm, and holds its parameters."""

    name: str
    extra: Extra = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class DataTable(SplitTable, PartsTable, NamedTable):
    """`[data]`: a data set with its loader's parameters, and how it is split."""

    clients: int = field(default=1, metadata=require_count("clients", low=1))


CUT_KEYS = ("cut", "cuts")
MODEL_KEYS = ("clients", *CUT_KEYS)
"""Keys of a `[[model]]`, where there are several, beside the model's own."""


@dataclass(frozen=True, kw_only=True)
class TrainingTable(LocalUpdate):
    """`[training]`: as the arguments of `splitfed.train`, with the fields of `local`; a list of schedules gives a grid.

    What stands in `schedule`, `optimizer`, `record` and `speeds` is checked by `splitfed.study.config.training_table`,
    `batch_size`, one for all clients or one a client, by `splitfed.study.config.client_tables`.
    """

    rounds: int = field(default=10, metadata=require_count("rounds", low=1))
    batch_size: Any = 64
    delta: float | None = field(
        default=None, metadata=require_number("delta", low=0.0, high=1.0, open_low=True, open_high=True)
    )
    schedule: Any = "sequential"
    optimizer: dict[str, Any] = field(default_factory=dict)
    evaluate_every: int = field(default=1, metadata=require_count("evaluate_every", low=1))
    keep: Literal["last", "best"] = "last"
    across: bool = False
    device: str = "cpu"
    record: dict[str, Any] | None = None
    speeds: Any = None


@dataclass(frozen=True, kw_only=True)
class DefenseTable:
    """`[[defense]]`: a name with parameters, or `combine` with several of those in the order they act."""

    name: str | None = None
    combine: list[dict[str, Any]] | None = field(default=None, metadata={"check": _check_filled})
    extra: Extra = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ComputationTable:
    """`[encryption]`, or several: a protocol with the fields of `splitfed.Encryption`, or "none".

    `defended = false` leaves out its runs with a defense, for a study whose defenses act on what is encrypted.
    """

    protocol: Any = "weight_shares"
    defended: bool = True
    extra: Extra = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class AttackTable(NamedTable):
    """`[[attack]]`: a name with the parameters that differ from those of `budget` (None: the attack's usual one).

    `every`: a training attack is evaluated after every so many rounds. `tune`: how many settings of the attack's
    space are tried on auxiliary rows first. `floors = false` leaves floors and oracles out beside reconstructions.
    `releases`: how often every victim's row is released to the attack. `round`: of recorded training, from 0, up to
    which an attack on it reads what was recorded.
    """

    budget: str | None = None
    adversary: str | None = None
    every: int | None = field(default=None, metadata=require_count("every", low=1))
    tune: int | None = field(default=None, metadata=require_count("tune", low=1))
    floors: bool = True
    releases: int = field(default=1, metadata=require_count("releases", low=1))
    round: int | None = field(default=None, metadata=require_count("round"))


@dataclass(frozen=True, kw_only=True)
class PruneTable:
    """`search.prune`: from round `warmup` on a run ends whose best utility is in the lowest `percentile` of others.

    `startup`: how many other trials must have come as far before.
    """

    percentile: float = field(
        default=25.0, metadata=require_number("percentile", low=0, high=100, open_low=True, open_high=True)
    )
    startup: int = field(default=5, metadata=require_count("startup", low=1))
    warmup: int = field(default=1, metadata=require_count("warmup", low=1))


@dataclass(frozen=True, kw_only=True)
class SearchTable:
    """`[search]`: trials in the place of a grid, by a sampler of Optuna, for objectives under constraints.

    What the objectives and constraints mean is checked by `splitfed.study.config.search`. `population`: of nsga2 and
    nsga3; `startup`: how many trials tpe draws at random first. `storage`: an SQL address, or $NAME of a variable.
    """

    sampler: Literal["tpe", "nsga2", "nsga3", "random", "grid", "qmc"] = "tpe"
    trials: int | None = field(default=None, metadata=require_count("trials", low=1, high=LIMIT))
    objectives: dict[str, Any] = field(metadata={"check": _check_filled})
    constraints: tuple[str, ...] = ()
    population: int | None = field(default=None, metadata=require_count("population", low=2, high=LIMIT))
    startup: int | None = field(default=None, metadata=require_count("startup", low=1))
    prune: PruneTable | None = None
    storage: str | None = None


@dataclass(frozen=True, kw_only=True)
class StudyConfig:
    """A whole study as written in TOML."""

    study: StudyTable
    data: DataTable
    model: NamedTable | tuple[NamedTable, ...] = ()
    training: TrainingTable = TrainingTable()
    topology: tuple[NamedTable, ...]
    method: tuple[NamedTable, ...] = (NamedTable(name="none"),)
    encryption: ComputationTable | tuple[ComputationTable, ...] = ComputationTable(protocol="none")
    defense: tuple[DefenseTable, ...] = (DefenseTable(name="none"),)
    attack: tuple[AttackTable, ...] = ()
    callback: tuple[NamedTable, ...] = ()
    search: SearchTable | None = None

    @property
    def models(self) -> tuple[NamedTable, ...]:
        """The tables of models, one or several."""
        return self.model if isinstance(self.model, tuple) else (self.model,)

    @property
    def computations(self) -> tuple[ComputationTable, ...]:
        """How topologies are computed that are not in plain."""
        return self.encryption if isinstance(self.encryption, tuple) else (self.encryption,)


DEEPEST = 32
"""How deep tables and lists of a study may be nested; more are no study."""

# What keeps any file from being read.
_MACHINE = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO}
# Names joined by more dots than a study has levels: Python's reader takes a time that grows with their square.
_DOTTED = re.compile(r"""(?<![^\s.=,{}\[\]])(?:(?:"[^"\n]*+"|'[^'\n]*+'|[^\s.=,{}\[\]"']++)[ \t]*+\.[ \t]*+){32}""")


def read_toml(path: Path, advice: str | None = None) -> dict[str, Any]:
    """Return the TOML in `path`; `InvalidInput` names what cannot be read.

    `advice`: what to do about a file that was written with its digest, where it is damaged; None where the file need
    not have one.
    """
    try:
        if path.is_dir():
            kept = [path / name for name in ("study.toml", "config.toml") if (path / name).is_file()]
            raise InvalidInput(f"{path} is a folder; expected a file{f': its study is {kept[0]}' if kept else ''}")
        if path.exists() and not path.is_file():
            raise InvalidInput(f"{path} cannot be read as a study: it is a pipe, socket or device")
        content = path.read_bytes().removeprefix(codecs.BOM_UTF8)
        if _DOTTED.search(content.decode("utf-8")):
            raise RecursionError
        document = digests.read_toml(path, content, advice)
        _check_depth(document)
    except RecursionError:
        raise InvalidInput(f"{path} cannot be read as a study: it is nested more than {DEEPEST} levels deep") from None
    except InvalidInput:
        raise
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno in _MACHINE:
            raise  # The file is not at fault.
        reason = error.strerror if isinstance(error, OSError) else error
        raise InvalidInput(f"{path} cannot be read as a study: {reason}") from None
    return document


def _check_depth(document: Mapping[str, Any]) -> None:
    level: list[Any] = [document]
    for _ in range(DEEPEST):
        level = [inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer)]
        level = [inner for inner in level if isinstance(inner, (dict, list))]
    if level:
        raise RecursionError


def parse_study(raw: Mapping[str, Any], source: str) -> StudyConfig:
    """Check the structure of `raw`; raises `InvalidStudy` with one line a mistake, `source` in front."""
    mistakes = Mistakes(source)
    strays = {key: homes for key in raw if key not in parameters_of(StudyConfig) and (homes := _homes(key))}
    for key, homes in strays.items():
        mistakes.add(key, f"is no table of a study; expected in a table, as {' or '.join(homes)}")
    found = read_table(mistakes, "", StudyConfig, {key: one for key, one in raw.items() if key not in strays})
    mistakes.stop()
    assert found is not None
    return found


def _homes(key: str) -> list[str]:
    """Return where in the tables of a study the key stands that is called so, or almost so: ["training.rounds"]."""
    tables = {name: keys_of(name) for name in parameters_of(StudyConfig)}
    near = nearest_names(key, {inner for keys in tables.values() for inner in keys}, 1, 0.85)
    return [f"{name}.{near[0]}" for name, keys in tables.items() if near and near[0] in keys]


def keys_of(table: str) -> list[str]:
    """Return the keys that the `table` of a study has itself, beside those of the algorithm that it names."""
    found = tables_in(parameters_of(StudyConfig)[table].hint)
    return [] if found is None else [key for key in parameters_of(found[1]) if key != EXTRA]
