"""One run of a study as plain values: everything the runner needs, nothing it has to look up."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from splitfed.core.annealing import annealing_of
from splitfed.core.defense import Strength
from splitfed.core.errors import InvalidInput, describe_error
from splitfed.core.local_update import LocalUpdate
from splitfed.core.messages import Recording
from splitfed.core.optimizers import Optim
from splitfed.core.secure_computation import SecureComputation
from splitfed.core.topology import Topology
from splitfed.costs.speeds import Speeds
from splitfed.data.dataset import Dataset
from splitfed.models.import_paths import NOUNS, NameResolver
from splitfed.registry import EXTENSIONS, is_foreign
from splitfed.schedules.base import Training
from splitfed.study.config.values import lists_to_tuples, plain, table_of

RETURNS: Mapping[str, type] = {"topologies": Topology, "data": Dataset}
"""Kind -> what its functions make."""

(COMPUTATION,) = EXTENSIONS["computations"]
"""The key of a study, and of its results, under which stands how topologies are computed that are not in plain."""


@dataclass(frozen=True)
class NamedAlgorithm:
    """An algorithm of a `kind` by name with all its parameters; `label_values` are those worth telling, in its label.

    `factory`: what the name means; None for a model, which is found when it is built. `objects`: parameters that TOML
    names, by the values that are meant.
    """

    kind: str
    name: str
    parameters: Mapping[str, Any]
    label_values: Mapping[str, Any]
    factory: Callable[..., Any] | None = field(default=None, compare=False, repr=False)
    objects: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def table(self) -> dict[str, Any]:
        """The table of a study that means it."""
        return {"name": self.name, **self.parameters}

    @property
    def label(self) -> str:
        """The name with its telling parameters, for people: `noise(scale=0.5, relative=true)`."""
        inner = ", ".join(f"{key}={format_value(value)}" for key, value in self.label_values.items())
        return f"{self.name}({inner})" if inner else self.name

    @property
    def slug(self) -> str:
        """The same for file names: `noise-0.5`; switches are left out."""
        values = (v for v in self.label_values.values() if not isinstance(v, bool))
        return slug("-".join([self.name, *map(_format_for_file_name, values)]))

    def construct(self, **objects: Any) -> Any:
        """Construct it with its parameters, `objects` going before them; see `call`."""
        given = {key: lists_to_tuples(value) for key, value in self.parameters.items()}
        return self.call(**{**given, **self.objects, **objects})

    def takes(self, argument: str) -> bool:
        """Tell whether the factory has an argument of this name."""
        return self.factory is not None and argument in inspect.signature(self.factory).parameters

    def call(self, **arguments: Any) -> Any:
        """Return what the factory makes of `arguments`; what a user's own code raises becomes an `InvalidInput`."""
        assert self.factory is not None
        what = f"{NOUNS[self.kind]} {self.name!r}"
        try:
            made = self.factory(**arguments)
        except InvalidInput:
            raise
        except Exception as error:  # a user's own code and a plug-in may raise anything; ours is wrong where it does
            if not is_foreign(self.kind, self.name):
                raise
            raise InvalidInput(f"{what} cannot be built: {describe_error(error)}") from error
        expected = RETURNS.get(self.kind, object)
        if not isinstance(made, expected):
            raise InvalidInput(f"{what} returned a value of type {type(made).__name__}; expected a {expected.__name__}")
        return made


@dataclass(frozen=True)
class AlgorithmSetting:
    """A setting of algorithms of one kind: its `parts` in the order they act, none for none; `where` in the study."""

    where: str = field(default="", compare=False)
    parts: tuple[NamedAlgorithm, ...] = ()

    @property
    def name(self) -> str:
        """The family: names of the parts joined by "+", or "none"."""
        return "+".join(part.name for part in self.parts) or "none"

    @property
    def label(self) -> str:
        """The parts' labels joined by " + ", or "none"."""
        return " + ".join(part.label for part in self.parts) or "none"

    @property
    def slug(self) -> str:
        """The same for file names."""
        return "+".join(part.slug for part in self.parts) or "none"

    @property
    def part(self) -> NamedAlgorithm:
        """The one algorithm of a setting that has one."""
        return self.parts[0]

    @property
    def table(self) -> dict[str, Any]:
        """The table of a study that means it."""
        if len(self.parts) > 1:
            return {"combine": [part.table for part in self.parts]}
        return self.parts[0].table if self.parts else {"name": "none"}


@dataclass(frozen=True)
class ComputationSetting(AlgorithmSetting):
    """How a run is computed: `secure` without the folder of its keys, None for a run in plain.

    `key_folder`: where the runs' keys go, a folder each; None: nowhere. `defended`: whether it goes with defenses.
    """

    secure: SecureComputation | None = None
    key_folder: str | None = None
    defended: bool = True

    @property
    def table(self) -> dict[str, Any]:
        """The table of a study that means it."""
        if self.secure is None:
            return {"protocol": "none"}
        return table_of(self.secure) | ({} if self.key_folder is None else {"key_folder": self.key_folder})


@dataclass(frozen=True)
class DefenseSetting(AlgorithmSetting):
    """A setting of defenses.

    `strength` is what a plot of leakage against strength has on its axis; None for no defense, and for one without
    a parameter for its strength.
    """

    strength: Strength | None = None
    guarantee: str = "no formal guarantee"


@dataclass(frozen=True)
class ClientModel:
    """A model that the `clients`, by number, have, cut at `cuts` (parameter of a topology -> names) where these say so.

    `where` is its place in the study.
    """

    named: NamedAlgorithm
    clients: tuple[int, ...]
    cuts: Mapping[str, Any] = field(default_factory=dict)
    where: str = field(default="model", compare=False)

    @property
    def label(self) -> str:
        """The model and where it is cut, for people: `mlp(hidden=12) cut=relu1`."""
        return " ".join([self.named.label, *(f"{key}={format_value(value)}" for key, value in self.cuts.items())])

    @property
    def table(self) -> dict[str, Any]:
        """The table of a study that means it."""
        return {**self.named.table, "clients": list(self.clients), **self.cuts}


@dataclass(frozen=True)
class DataSetting:
    """A data set by the name of its `loader`, and how it is `split` over `clients`.

    `parts`: which party holds which part of a row, and what is learnt, as written. `code`: key -> the user's own loss,
    metric (as keywords of `Task.with_metric`) or transform that `parts` name there.
    """

    loader: NamedAlgorithm
    clients: int
    split: Mapping[str, Any]
    parts: Mapping[str, Any] = field(default_factory=dict)
    code: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def name(self) -> str:
        """The name of the data set."""
        return self.loader.name

    @property
    def table(self) -> dict[str, Any]:
        """The table of a study that means it."""
        return {**self.loader.table, "clients": self.clients, **self.split, **self.parts}


@dataclass(frozen=True)
class TrainingPlan:
    """How a run trains, as the arguments of `splitfed.train`; `optimizer_table`: as written, or the default."""

    optimizer: Optim | Mapping[str, Optim]
    rounds: int
    batch_size: int | tuple[int, ...]
    local: LocalUpdate
    evaluate_every: int
    device: str
    record: Recording
    speeds: Speeds | None = None
    delta: float | None = None
    across: bool = False
    keep: str = "last"
    optimizer_table: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def training(self, seed: int) -> Training:
        """Return the same for the run with `seed`, as a schedule gets it."""
        return Training.of(self.local, self.batch_size, seed)

    @property
    def table(self) -> dict[str, Any]:
        """The table of a study that means it, without the schedule."""
        own = table_of(self)
        local, optimizer = own.pop("local"), own.pop("optimizer_table")
        return {**own, **local, "optimizer": optimizer}


@dataclass(frozen=True)
class AttackSetting:
    """One attack to run: `key` names its file; the adversary defaults to the first party without data.

    `lives`: how it is in the training, "outside", "passive" or "active"; `every`: after how many rounds it is asked
    there. `tune`: how many settings of it are tried on auxiliary rows; 0: it is taken as it is.
    `floors`: whether floors and oracles are scored beside it. `releases`: how often each victim's row is released.
    `round`: up to which an attack on recorded training reads it, from 0; None: the newest, or none for label attacks.
    """

    where: str
    key: str
    attack: NamedAlgorithm
    adversary: str | None
    lives: Literal["outside", "passive", "active"] = "outside"
    every: int | None = None
    tune: int = 0
    floors: bool = True
    releases: int = 1
    round: int | None = None

    @property
    def label(self) -> str:
        """The attack with its telling parameters, for people."""
        return self.attack.label

    @property
    def table(self) -> dict[str, Any]:
        """The table of a study that means it."""
        asked = {"every": self.every, "adversary": self.adversary, "floors": None if self.floors else False}
        own = {"name": self.attack.name, **self.attack.label_values, **self.attack.parameters}
        return own | {key: value for key, value in asked.items() if value is not None}


@dataclass(frozen=True)
class RunSpec:
    """One run: a point of the grid with a seed.

    `training_attack`: the one among the attacks that this training is hijacked by, None for an honest training. `model`
    is None where the topology has the models of its segments in its own tables; where clients are of different make it
    is the first client's, and `models` has all of them. `target`: the metric's value that
    training is to reach on validation rows, where the study names one. `code`: where import paths of models may lead.
    `variant`: what of [training] a search chose for this run, in words; "" in a grid, where all runs have the same.
    `left_out`: label of each attack of the study that this run is not asked -> why, as pairs. `skip_refused`: whether
    an attack that this run cannot grant is told among its results, as others of its study can. `cut_choice`: where cuts
    were left to a rule, which were chosen and why.
    """

    id: str
    seed: int
    data: DataSetting
    model: NamedAlgorithm | None
    training: TrainingPlan
    topology: AlgorithmSetting = AlgorithmSetting()
    schedule: AlgorithmSetting = AlgorithmSetting()
    method: AlgorithmSetting = AlgorithmSetting()
    computation: ComputationSetting = ComputationSetting()
    defense: DefenseSetting = DefenseSetting()
    attacks: tuple[AttackSetting, ...] = ()
    training_attack: AttackSetting | None = None
    target: float | None = None
    code: NameResolver = field(default_factory=NameResolver, compare=False)
    variant: str = ""
    left_out: tuple[tuple[str, str], ...] = ()
    skip_refused: bool = False
    models: tuple[ClientModel, ...] = ()
    callbacks: tuple[NamedAlgorithm, ...] = ()
    cut_choice: str = ""

    @property
    def labels(self) -> dict[str, str]:
        """What is trained and how, for people, by its key in results; all that the defense does not change."""
        layers = {"method": self.method.label, COMPUTATION: self.computation.label}
        return {"topology": self.topology.label, "schedule": self.schedule.label, **layers}

    @property
    def model_label(self) -> str:
        """The model, or of several each with its clients, for people: `mlp of clients 0, 2 + lenet of client 1`."""
        if self.models:
            return " + ".join(f"{one.label} of {name_clients(one.clients)}" for one in self.models)
        return self.model.label if self.model else "models by piece"

    @property
    def config(self) -> dict[str, Any]:
        """The study that consists of this run alone, as plain tables."""
        own: Any = [one.table for one in self.models] if self.models else self.model and self.model.table
        study: dict[str, Any] = {"name": slug(self.id).replace("+", "-"), "seeds": [self.seed]}
        study |= {} if self.target is None else {"target": self.target}
        tables: dict[str, Any] = {
            "study": study if self.training_attack is None else {**study, "honest": False},
            "data": self.data.table,
            "model": own,
            "training": {**self.training.table, "schedule": self.schedule.table},
            "topology": [self.topology.table],
            "method": [self.method.table] if self.method.parts else None,
            COMPUTATION: [self.computation.table] if self.computation.secure is not None else None,
            "defense": [self.defense.table],
            "attack": [one.table for one in self.attacks],
            "callback": [one.table for one in self.callbacks] or None,
        }
        return {key: plain(table) for key, table in tables.items() if table is not None}


def format_value(value: Any) -> str:
    """Return a parameter's value as it stands in labels; tables in few words, cut with a hash where they are long."""
    match value:
        case bool():
            return str(value).lower()
        case float():
            return f"{value:g}"
        case list() | tuple():
            return _table_names(value, "~") if _holds_tables(value) else "+".join(map(format_value, value))
        case Mapping():
            if (course := annealing_of(value)) is not None:
                return _cut(course.label)
            kind = value.get("model")
            inner = " ".join(f"{key}={format_value(item) or '[]'}" for key, item in value.items() if key != "model")
            return _cut(f"{{{inner}}}" if kind is None else f"{kind}({inner})" if inner else str(kind))
    return str(value)


def name_clients(clients: Sequence[int]) -> str:
    """Return clients by number, for people: `client 1`, `clients 0, 2`."""
    return f"client{'' if len(clients) == 1 else 's'} {', '.join(map(str, clients))}"


def slug(text: str, width: int = 80) -> str:
    """Return `text` as a file name, shortened with a hash where it is long."""
    clean = re.sub(r"[^A-Za-z0-9.+_-]+", "-", text).strip("-.") or "x"
    if len(clean) <= width:
        return clean
    return f"{clean[: width - 9]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _format_for_file_name(value: Any) -> str:
    """Return `value` as it stands in a file name: of a table its values alone."""
    if isinstance(value, Mapping):
        return _cut("-".join(filter(None, map(_format_for_file_name, value.values()))), 24)
    return _table_names(value, "-") if _holds_tables(value) else format_value(value)


def _holds_tables(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(item, Mapping) for item in value)


def _table_names(tables: Sequence[Mapping[str, Any]], sign: str) -> str:
    """Return what `tables` are called, and a hash of all that they hold."""
    names = "+".join(str(table.get("name", table.get("value", ""))) for table in tables)
    return f"{names[:24]}{sign}{_digest(json.dumps(tables, default=str))}"


def _cut(text: str, width: int = 48) -> str:
    return text if len(text) <= width else f"{text[: width - 7]}~{_digest(text)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:6]
