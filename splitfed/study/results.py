"""What a run of a study came to, as a frozen value: `RunResult`, written to and read from result.json here alone.

What is read was perhaps written by somebody else: a document of another form than `RunResult` is refused in one line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field, TypeAdapter

from splitfed.core import digests
from splitfed.study.config.run_spec import COMPUTATION
from splitfed.threats.repeated_releases import RepeatedReleases
from splitfed.training.checkpoint import write_atomic
from splitfed.training.folder import RunFolder

FILE = "result.json"
LABELS = (
    *("id", "topology", "defense", "seed", "training_attack", "schedule", "method", "computation", "model", "data"),
    *("clients", "variant", "clients_differ"),
)
"""What a result says of the run itself."""
MEASURED = (
    *("topology", "defense", "seed", "schedule", "model", "data", "clients", "utility", "bytes", "messages"),
    *("bytes_by_kind", "seconds", "rounds", "history", "dependence", "attacks"),
)
"""What the document of a finished run holds in any case; one that failed tells no more than its name and why."""

Json = Mapping[str, Any]


@dataclass(frozen=True)
class Score:
    """A mean over victims with its interval, None where there is none.

    Of reconstructions also the `median` over victims and the mean of the `worst_decile`, the tenth recovered best.
    """

    mean: float | None
    low: float | None = None
    high: float | None = None
    median: float | None = None
    worst_decile: float | None = None

    def __str__(self) -> str:
        """Return the mean, and of a reconstruction what it hides."""
        beside = f" (median {self.median:.3g}, worst decile {self.worst_decile:.3g})" if self.median is not None else ""
        return "-" if self.mean is None else f"{self.mean:.3g}{beside}"


Scores = Mapping[str, Mapping[str, Score]]
"""Metric -> predictor (the attack, a baseline, a floor, an oracle) -> what it scored."""


@dataclass(frozen=True)
class AttackRecord:
    """An attack on a finished run: who ran it against what, what it scored, and the file of what it predicted.

    `attack`: the name of its files, `label` that of the attack with its parameters. `file`: relative to the run's
    folder. `floors`: whether floors were computed beside it. `round`: of recorded training, up to which it read.
    `asked`, `tune`: the adversary and the trials of tuning that were asked for, by which it is known again.
    """

    attack: str
    label: str
    adversary: str
    scores: Scores
    seconds: float = 0.0
    victims: int = 0
    target: str = "inputs"
    threat_model: str | None = None
    file: str = ""
    sha256: str | None = None
    lives: str = "outside"
    under_trained: tuple[str, ...] = ()
    unadapted: tuple[str, ...] = ()
    floors: bool = True
    releases: RepeatedReleases | None = None
    round: int | None = None
    quick: bool = False
    depth: int | None = None
    stolen: Scores | None = None
    selection: Json | None = None
    tuned: Json | None = None
    parameters: Json = field(default_factory=dict)
    asked: str | None = None
    tune: int = 0


@dataclass(frozen=True)
class MeasuredUtility:
    """The scores of the round that the run answers for, the last or the one kept, in `metric`, with interval.

    `bounds`: what the metric cannot leave. `constant`: what always giving one answer scores. `spread`, `method`,
    `across`: how far clients lie apart, in this metric, in further ones, and each model on the others' rows.
    """

    metric: str = ""
    higher_is_better: bool = True
    validation: float | None = None
    test: float | None = None
    interval: Json | None = None
    bounds: tuple[float | None, float | None] | None = None
    constant: Json | None = None
    clients: tuple[float | None, ...] = ()
    spread: Mapping[str, float | None] | None = None
    method: Mapping[str, Mapping[str, float | None] | None] | None = None
    across: Mapping[str, Mapping[str, float | None] | None] | None = None


class StrengthMeasure(NamedTuple):
    """What the strength of a defense counts: a parameter `name`, in `unit`; `rises`: whether more is stronger."""

    name: str
    unit: str = ""
    rises: bool = True

    @property
    def title(self) -> str:
        """Name and unit, for an axis or a heading."""
        return f"{self.name} ({self.unit})" if self.unit else self.name


UNNAMED = StrengthMeasure("strength")
"""Of results that name no parameter."""


@dataclass(frozen=True)
class DefenseLabel:
    """The defense of a run: its label, the names of its parts, what it promises, and how strong it is in which unit."""

    label: str
    name: str
    guarantee: str
    strength: float | None = None
    strength_parameter: str | None = None
    strength_unit: str | None = None
    stronger: str | None = None
    parts: tuple[Json, ...] = ()

    @property
    def measure(self) -> StrengthMeasure:
        """What the strength counts."""
        if not self.strength_parameter:
            return UNNAMED
        return StrengthMeasure(self.strength_parameter, self.strength_unit or "", self.stronger != "less")


@dataclass(frozen=True)
class TopologyLabel:
    """The topology of a run, and in `cut_choice` why "auto" has cut where it did."""

    label: str
    name: str
    parameters: Json = field(default_factory=dict)
    cut_choice: str = ""


@dataclass(frozen=True)
class RunResult:
    """What a run was and what it came to; one that `failed` has, beside its labels, nothing but the reason.

    `LABELS` say what the run is, all else what was measured. `history`: an entry a round, as `Run.history`.
    `privacy`: the ledger that was counted ("ledger") and the one "planned". `predicted`, `sizes`, `parties`: costs by
    shapes, what the published formulas need, and who sees what. `files`: file in the run's folder -> SHA-256.
    `selected`: the round that validation rows would choose, `kept_round` (from 1) the one whose model the run answers
    with by `keep = "best"`. `folder`: where it was read, which no document says.
    """

    id: str
    topology: TopologyLabel = field(default=TopologyLabel("", ""))
    defense: DefenseLabel = field(default=DefenseLabel("", "", ""))
    seed: int = 0
    training_attack: str | None = None
    schedule: str = ""
    method: str = "none"
    computation: Annotated[str, Field(alias=COMPUTATION)] = "none"
    model: str = ""
    data: str = ""
    clients: int = 0
    variant: str = ""
    clients_differ: tuple[Json, ...] = ()
    data_digest: str | None = None
    failed: str | None = None
    utility: MeasuredUtility = field(default=MeasuredUtility())
    selected: Json | None = None
    kept_round: int | None = None
    target: Json | None = None
    turned_off: str | None = None
    restart_optimizers: bool | None = None
    starts: str | None = None
    starts_asked: str | None = None
    bytes: int = 0
    messages: int = 0
    bytes_by_kind: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    rounds: int = 0
    stopped: str | None = None
    rounds_planned: int | None = None
    rounds_at_first: int | None = None
    history: tuple[Json, ...] = ()
    dependence: Json | None = None
    information: Json | None = None
    topology_graph: Any = field(default_factory=dict)
    predicted: Json | None = None
    sizes: Json | None = None
    parties: tuple[Json, ...] = ()
    privacy: Json | None = None
    attacks: tuple[AttackRecord, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    refused: tuple[Json, ...] = ()
    folder: Annotated[Path | None, Field(exclude=True)] = None

    @property
    def labels(self) -> dict[str, str]:
        """What was trained and how, for people: what runs that differ in their seed alone have in common."""
        layers = {"schedule": self.schedule, "method": self.method, COMPUTATION: self.computation}
        ends = {"defense": self.defense.label, "training_attack": self.training_attack or ""}
        return {"topology": self.topology.label, **layers, **ends}

    @property
    def place(self) -> Path:
        """The run's folder; raises `LookupError` for a result that was not read from one."""
        if self.folder is None:
            raise LookupError(f"the result of {self.id!r} was read from no folder")
        return self.folder

    @property
    def last(self) -> Json:
        """The entry of the last round."""
        return self.history[-1]

    @property
    def ledger(self) -> Json | None:
        """The privacy ledger that was counted; None where nothing is promised."""
        return None if self.privacy is None else self.privacy["ledger"]

    def attack(self, label: str) -> AttackRecord | None:
        """Return what the attack with this label came to, None where the run has none."""
        return next((attack for attack in self.attacks if attack.label == label), None)


RESULT, ATTACK = TypeAdapter(RunResult), TypeAdapter(AttackRecord)


def to_json(value: RunResult | AttackRecord) -> dict[str, Any]:
    """Return `value` as JSON has it, which knows no infinity and no NaN: null stands there."""
    if isinstance(value, AttackRecord):
        written = ATTACK.dump_json(value)
    else:
        written = RESULT.dump_json(value, exclude_defaults=value.failed is not None, by_alias=True)
    found: dict[str, Any] = json.loads(written)
    return found


def attack_from_json(document: Json) -> AttackRecord:
    """Return the attack of a document that `to_json` has made; raises `ValueError` for one of another form."""
    return ATTACK.validate_python(document)


def result_from_json(document: Json, folder: Path | None = None) -> RunResult:
    """Return the result of a document that `to_json` has made; raises `LookupError` or `ValueError` for another form.

    `folder`: that of the run, where there is one.
    """
    if "failed" not in document and (missing := [name for name in MEASURED if name not in document]):
        raise LookupError(f"the result has no {missing[0]!r}")
    return RESULT.validate_python({**document, "folder": folder})


@digests.reads_folder
def read_result(folder: Path, name: str | None = None) -> RunResult | None:
    """Return the result in the run folder `folder`, or None if it has not finished.

    `name`: of the run whose result it must be; raises `Damaged` for that of another one, and `InvalidInput` for a
    document of another form.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    found = digests.read(path, digests.REMEASURE)
    if name is not None and found.get("id") != name:
        raise digests.Damaged(path, digests.REMEASURE, f"it is the result of another run, {found.get('id')!r}")
    return result_from_json(found, folder)


def write_result(folder: Path, found: RunResult) -> RunResult:
    """Write `found` as the result of the run in `folder`, and return it; raises `FolderGone`."""
    RunFolder(folder).check_there()
    write_atomic(folder / FILE, digests.json_with_digest(to_json(found)))
    return found
