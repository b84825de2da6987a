"""The tables of a study, typed; structure only, what the names mean is checked in `splitfed.study.config.grid`.

Tables that carry an algorithm's own parameters beside their own keys keep those as `extra`.
"""

from __future__ import annotations

import codecs
import errno
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args, get_type_hints

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, create_model, field_validator
from pydantic_core import ErrorDetails

from splitfed.core import digests
from splitfed.core.errors import InvalidInput, unknown
from splitfed.core.local_update import LocalUpdate
from splitfed.core.nearest_names import nearest_names
from splitfed.study.config.mistakes import Mistakes, short_repr

LIMIT = 10_000
"""Runs that a grid may have; more are taken for a slip of the pen."""

TABLES = 1_000
"""Tables of a kind that a study may have."""

Count = Annotated[int, Field(ge=1, le=2**53)]
Number = Annotated[int, Field(ge=0, le=2**53)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Name = Annotated[str, Field(min_length=1)]


class StrictTable(BaseModel):
    """A table without unknown keys; numbers are not read from text, nor text from numbers."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class OpenTable(StrictTable):
    """A table that also holds the parameters of the algorithm it names."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    @property
    def extra(self) -> dict[str, Any]:
        """The algorithm's parameters."""
        return dict(self.model_extra or {})


_RESERVED = re.compile("CON|PRN|AUX|NUL|(COM|LPT)[0-9]", re.IGNORECASE)


def _check_file_name(name: str) -> str:
    """Refuse what no folder can be called on Windows."""
    if _RESERVED.fullmatch(name.partition(".")[0]) or name.endswith("."):
        raise ValueError("a name for a folder, no device of Windows (CON, NUL, COM1) and no dot at the end")
    return name


class StudyTable(StrictTable):
    """`[study]`: what it is called and which seeds every setting is run with.

    `honest = false` leaves out the runs without an active training attack. `target`: a value of the task's metric; for
    every run it is reported after how many rounds its validation rows reached it. `skip_refused`: runs that cannot be
    put together are left out and listed, in place of refusing the study.
    """

    name: Annotated[
        str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=80), AfterValidator(_check_file_name)
    ]
    seeds: Annotated[list[Seed], Field(min_length=1, max_length=LIMIT)] = [0]
    honest: bool = True
    target: float | None = None
    skip_refused: bool = False


class DataTable(OpenTable):
    """`[data]`: a data set with its loader's parameters, and how it is split (as `Dataset.clients`).

    Which party holds which part of a row, and further label sets, are checked by `splitfed.study.config.data_table`.
    """

    name: Name
    clients: Count = 1
    dirichlet: float | None = None
    minimum: int = 2
    classes_per_client: int | None = None
    class_spread: int | None = None
    rows_per_class: int | None = None
    by_domain: bool = False
    auxiliary: int | float = 0.2
    victims: int = 64
    validation: float = 0.1
    test: float = 0.2
    public: float | None = None
    vertical: Any = None
    overlap: Any = None
    halves: Any = None
    strips: Any = None
    targets: Any = None
    class_weights: Any = None
    loss: Any = None
    metric: Any = None
    transform: Any = None
    mixup: Any = None

    SPLIT: ClassVar[tuple[str, ...]] = (
        *("dirichlet", "minimum", "classes_per_client", "class_spread", "rows_per_class", "by_domain"),
        *("auxiliary", "victims", "validation", "test", "public"),
    )
    PARTS: ClassVar[tuple[str, ...]] = (
        *(
            "vertical",
            "overlap",
            "halves",
            "strips",
            "targets",
            "class_weights",
            "loss",
            "metric",
            "transform",
            "mixup",
        ),
    )


class ModelTable(OpenTable):
    """`[model]`: a registered model or "package.module:Name", with its parameters; for topologies that cut one.

    Several `[[model]]` are for clients of different make; `splitfed.study.config.client_tables` says who has which.
    Such a path leads to a subclass of `torch.nn.Module`, or to a function in a Python file beside the study.
    """

    name: Name


CUT_KEYS = ("cut", "cuts")
MODEL_KEYS = ("clients", *CUT_KEYS)
"""Keys of a `[[model]]`, where there are several, beside the model's own."""


class RecordTable(StrictTable):
    """`training.record`: whose view is kept during training, as `splitfed.Recording`."""

    parties: list[Name] = []
    every: Count = 1
    budget: Count = 256 * 2**20


_LOCAL: dict[str, Any] = {one.name: (get_type_hints(LocalUpdate)[one.name], one.default) for one in fields(LocalUpdate)}
_LocalUpdateTable: Any = create_model("_LocalUpdateTable", __base__=StrictTable, **_LOCAL)


class TrainingTable(_LocalUpdateTable):  # type: ignore[misc]
    """`[training]`: as the arguments of `splitfed.train`, with the fields of `local`; a list of schedules gives a grid.

    What stands in `schedule` and `speeds` is checked by `splitfed.study.config.training_table`, `batch_size`, one for
    all clients or one a client, by `splitfed.study.config.client_tables`.
    """

    rounds: Count = 10
    batch_size: Any = 64
    delta: Annotated[float, Field(gt=0, lt=1)] | None = None
    schedule: Any = "sequential"
    optimizer: dict[str, Any] = Field(default={})
    evaluate_every: Count = 1
    across: bool = False
    device: Name = "cpu"
    record: RecordTable | None = None
    speeds: Any = None


class TopologyTable(OpenTable):
    """`[[topology]]`: a builder's name and parameters; a list where one value belongs gives a grid."""

    name: Name


class DefenseTable(OpenTable):
    """`[[defense]]`: a name with parameters, or `combine` with several of those in the order they act."""

    name: Name | None = None
    combine: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None


class ComputationTable(OpenTable):
    """`[encryption]`, or several: a protocol with the fields of `splitfed.Encryption`, or "none".

    `defended = false` leaves out its runs with a defense, for a study whose defenses act on what is encrypted.
    """

    protocol: Any = "weight_shares"
    defended: bool = True


class MethodTable(OpenTable):
    """`[[method]]`: a federated method layered on the schedule, with its parameters, or "none"."""

    name: Name


class AttackTable(OpenTable):
    """`[[attack]]`: a name with the parameters that differ from those of `budget` (None: the attack's usual one).

    `every`: a training attack is evaluated after every so many rounds. `tune`: how many settings of the attack's
    space are tried on auxiliary rows first. `floors = false` leaves floors and oracles out beside reconstructions.
    `releases`: how often every victim's row is released to the attack. `round`: of recorded training, from 0, up to
    which an attack on it reads what was recorded.
    """

    name: Name
    budget: Name | None = None
    adversary: Name | None = None
    every: Count | None = None
    tune: Count | None = None
    floors: bool = True
    releases: Count = 1
    round: Number | None = None

    OWN: ClassVar[tuple[str, ...]] = ("budget", "adversary", "every", "tune", "floors", "releases", "round")


class CallbackTable(OpenTable):
    """`[[callback]]`: what is called while a run is trained, by name or "module:Class", with its parameters."""

    name: Name


class PruneTable(StrictTable):
    """`search.prune`: from round `warmup` on a run ends whose best utility is in the lowest `percentile` of others.

    `startup`: how many other trials must have come as far before.
    """

    percentile: Annotated[float, Field(gt=0, lt=100)] = 25.0
    startup: Count = 5
    warmup: Count = 1


class SearchTable(StrictTable):
    """`[search]`: trials in the place of a grid, by a sampler of Optuna, for objectives under constraints.

    What the objectives and constraints mean is checked by `splitfed.study.config.search`. `population`: of nsga2 and
    nsga3; `startup`: how many trials tpe draws at random first. `storage`: an SQL address, or $NAME of a variable.
    """

    sampler: Literal["tpe", "nsga2", "nsga3", "random", "grid", "qmc"] = "tpe"
    trials: Annotated[int, Field(ge=1, le=LIMIT)] | None = None
    objectives: Annotated[dict[str, Any], Field(min_length=1)]
    constraints: list[Name] = []
    population: Annotated[int, Field(ge=2, le=LIMIT)] | None = None
    startup: Count | None = None
    prune: PruneTable | None = None
    storage: Name | None = None


class StudyConfig(StrictTable):
    """A whole study as written in TOML."""

    study: StudyTable
    data: DataTable
    model: Annotated[list[ModelTable], Field(max_length=TABLES)] = []
    training: TrainingTable = TrainingTable()
    topology: Annotated[list[TopologyTable], Field(min_length=1, max_length=TABLES)]
    method: Annotated[list[MethodTable], Field(min_length=1, max_length=TABLES)] = [MethodTable(name="none")]
    encryption: Annotated[list[ComputationTable], Field(min_length=1, max_length=TABLES)] = [
        ComputationTable(protocol="none")
    ]
    defense: Annotated[list[DefenseTable], Field(min_length=1, max_length=TABLES)] = [DefenseTable(name="none")]
    attack: Annotated[list[AttackTable], Field(max_length=TABLES)] = []
    callback: Annotated[list[CallbackTable], Field(max_length=TABLES)] = []
    search: SearchTable | None = None

    @property
    def computations(self) -> list[ComputationTable]:
        """How topologies are computed that are not in plain."""
        return self.encryption

    @field_validator("model", "encryption", mode="before")
    @classmethod
    def _accept_one_table(cls, given: Any) -> Any:
        return [given] if isinstance(given, dict) else given


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
    try:
        return StudyConfig.model_validate(dict(raw))
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            if detail["loc"][:2] == ("model", 0) and isinstance(raw.get("model"), Mapping):
                detail["loc"] = ("model", *detail["loc"][2:])
            mistakes.add(*_describe_mistake(detail))
        mistakes.stop()
        raise


def place(parts: tuple[str | int, ...]) -> str:
    """Return ("defense", 1, "alpha") as `defense[1].alpha`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).removeprefix(".")


def _describe_mistake(detail: ErrorDetails) -> tuple[str, object]:
    """Return place and text of one mistake, in our words."""
    loc, table = _location(detail["loc"])
    where = place(loc)
    match detail["type"]:
        case "extra_forbidden" if len(loc) == 1 and (found := _homes(str(loc[0]))):
            return where, f"is no table of a study; expected in a table, as {' or '.join(found)}"
        case "extra_forbidden":
            return where, unknown("key", str(loc[-1]), table)
        case "list_type" if len(loc) == 1 and isinstance(detail["input"], dict):
            return where, f"is one table; expected a list of them: write [[{where}]], or {where} = [{{...}}]"
        case "model_type":
            return where, f"{short_repr(detail['input'])} is not allowed; expected a table"
        case "missing":
            return where, f"is missing; add {loc[-1]} = ..."
        case "string_pattern_mismatch":
            shown = short_repr(detail["input"])
            return where, f"{shown} is not allowed; expected letters, digits, '.', '_' and '-' only"
        case "too_long":
            given, most = detail["ctx"]["actual_length"], detail["ctx"]["max_length"]
            return where, f"has {given} entries; at most {most} are allowed"
    text = detail["msg"].removeprefix("Input should be ").removeprefix("Input should ").removeprefix("Value error, ")
    return where, f"{short_repr(detail['input'])} is not allowed; expected {text[:1].lower()}{text[1:]}"


def _homes(key: str) -> list[str]:
    """Return where in the tables of a study the key stands that is called so, or almost so: ["training.rounds"]."""
    tables = {name: table for name in StudyConfig.model_fields if (table := _table_of(StudyConfig, name))}
    near = nearest_names(key, {inner for table in tables.values() for inner in table.model_fields}, 1, 0.85)
    return [f"{name}.{near[0]}" for name, table in tables.items() if near and near[0] in table.model_fields]


def _location(loc: tuple[str | int, ...]) -> tuple[tuple[str | int, ...], list[str]]:
    """Return `loc` without pydantic's names of a union's branches, and the keys of the table around it."""
    kept: list[str | int] = []
    model: type[BaseModel] | None = StudyConfig
    keys: list[str] = list(StudyConfig.model_fields)
    for i, part in enumerate(loc):
        if isinstance(part, str):
            if model is None:
                # Below a key that is no table there are only branches of unions such as "list[str]" or "int".
                break
            keys = list(model.model_fields)
            model = _table_of(model, part) if i + 1 < len(loc) else None
        kept.append(part)
    return tuple(kept), keys


def _table_of(model: type[BaseModel], key: str) -> type[BaseModel] | None:
    """Return the table that `key` of `model` holds, one or a list of them."""
    hint = model.model_fields[key].annotation if key in model.model_fields else None
    return next((one for one in (hint, *get_args(hint)) if isinstance(one, type) and issubclass(one, BaseModel)), None)
