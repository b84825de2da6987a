"""What `[data]` says of rows beyond their loading: who holds which part, further label sets, losses and metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from splitfed.core.tasks import regression
from splitfed.data.transform import Transform
from splitfed.study.config.algorithm_tables import read_algorithm
from splitfed.study.config.lookup import StudyReader
from splitfed.study.config.mistakes import Mistakes, short_repr
from splitfed.study.config.run_spec import DataSetting
from splitfed.study.config.schema import DataTable, PartsTable, SplitTable, keys_of
from splitfed.study.config.values import read_table

WAYS = ("vertical", "halves", "strips")


def read_data(reader: StudyReader, table: DataTable, base: Path) -> DataSetting | None:
    """Return the data of a study; None after a mistake. Relative paths start from `base`.

    A loss, a transform and the name of a metric are import paths to functions in Python files of the study's folder.
    """
    given = {"name": table.name, **table.extra}
    loader = read_algorithm(reader, "data", "data", given, keys=keys_of("data"), base=base, lists="")
    with reader.mistakes.part() as own:
        split, parts = _own(table, SplitTable), _own(table, PartsTable)
        _check_parts(own, parts)
        inner = replace(reader, mistakes=own)
        code = _find_functions(inner, parts)
        if (transform := find_transform(inner, parts)) is not None:
            code["transform"] = transform
    return None if own or loader is None else DataSetting(loader, table.clients, split, parts, code)


def _own(table: DataTable, kind: type[SplitTable | PartsTable]) -> dict[str, Any]:
    return {one.name: value for one in fields(kind) if (value := getattr(table, one.name)) is not None}


def _check_parts(mistakes: Mistakes, keys: Mapping[str, Any]) -> None:
    """Note keys that do not go together."""
    ways = [way for way in WAYS if keys.get(way) not in (None, False)]
    if "loss" in keys and "class_weights" in keys:
        mistakes.add("data.class_weights", "is not allowed beside loss: weigh classes there")
    for way in ways[1:]:
        mistakes.add(f"data.{way}", f"is not allowed beside {ways[0]}: rows are divided in one way")
    if "overlap" in keys and not isinstance(keys.get("vertical"), Mapping):
        mistakes.add("data.overlap", "is for columns by party; add vertical = {party = [0, 1], ...}")
    for name, target in keys.get("targets", {}).items():
        if list(target) != ["classes"]:
            said = f"holds {', '.join(target) or 'nothing'}; expected classes = [...] alone"
            mistakes.add(f"data.targets.{name}", said)


@dataclass(frozen=True, kw_only=True)
class MetricTable:
    """`data.metric`: the import path of a function, what it is called, which way it is better and what bounds it."""

    name: str
    label: str | None = None
    higher_is_better: bool = True
    low: float = -math.inf
    high: float = math.inf


def _find_functions(reader: StudyReader, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the loss and the metric that import paths lead to, the metric as keywords of `Task.with_metric`."""
    found: dict[str, Any] = {}
    if (loss := keys.get("loss")) is not None and (function := _find(reader, "loss", "losses", loss)) is not None:
        found["loss"] = function
    if (given := keys.get("metric")) is None:
        return found
    table = read_table(
        reader.mistakes, "data.metric", MetricTable, {"name": given} if isinstance(given, str) else given
    )
    if table is None or (function := _find(reader, "metric", "metrics", table.name)) is None:
        return found
    with reader.mistakes.at("data.metric"):
        more = {"higher_is_better": table.higher_is_better, "bounds": (float(table.low), float(table.high))}
        found["metric"] = {"metric": function, "name": table.label, **more}
        regression().with_metric(**found["metric"])
    return found


def _find(reader: StudyReader, key: str, kind: str, path: str) -> Any:
    if ":" in path:
        return reader.find(f"data.{key}", kind, path)
    wrong = f"{short_repr(path)} is not allowed; expected an import path, module:function"
    reader.mistakes.add(f"data.{key}", wrong)
    return None


def find_transform(reader: StudyReader, keys: Mapping[str, Any]) -> Transform | None:
    """Return the function of the study's own that `transform` of these keys names, None where there is none.

    Notes one that would move numbers from one party's part of a row to another's.
    """
    if not isinstance(path := keys.get("transform"), str):
        return None
    ways = [way for way in WAYS if keys.get(way) not in (None, False)]
    if ways:
        reader.mistakes.add(
            "data.transform",
            f"is not allowed beside {ways[0]}: it would carry numbers from one party's part to another's",
        )
    if ":" not in path:
        reader.mistakes.add(
            "data.transform", f"{path!r} is no import path; expected module:function in a Python file beside the study"
        )
        return None
    with reader.mistakes.at("data.transform"):
        return reader.code.find(path, "transforms")
    return None
