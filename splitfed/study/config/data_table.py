"""What `[data]` says of rows beyond their loading: who holds which part, further label sets, losses and metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from splitfed.core.errors import InvalidInput, unknown
from splitfed.core.tasks import classification, regression
from splitfed.data.dataset import Dataset
from splitfed.data.transform import Transform
from splitfed.study.config.lookup import StudyReader
from splitfed.study.config.mistakes import short_repr
from splitfed.study.config.parameters import Parameter, check_parameters
from splitfed.study.config.schema import DataTable

WAYS = ("vertical", "halves", "strips")
HINTS = {
    "vertical": int | dict[str, list[int | str]],
    "overlap": bool,
    "halves": bool,
    "strips": int,
    "targets": dict[str, dict[str, list[int]]],
    "class_weights": list[float],
    "loss": str,
    "metric": str | dict[str, str | bool | float],
    "transform": str,
    "mixup": float,
}
METRIC_KEYS = ("name", "label", "higher_is_better", "low", "high")


def parse_parts(reader: StudyReader, table: DataTable) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the keys of `table` that divide rows, add label sets or say what is learnt: as written, and as meant.

    A loss, and the name of a metric, is an import path to a function in a Python file of the study's folder.
    """
    mistakes = reader.mistakes
    keys = {key: getattr(table, key) for key in DataTable.PARTS if getattr(table, key) is not None}
    check_parameters(mistakes, "data", {key: Parameter(key, HINTS[key], None) for key in keys}, keys)
    ways = [way for way in WAYS if keys.get(way) not in (None, False)]
    if "loss" in keys and "class_weights" in keys:
        mistakes.add("data.class_weights", "is not allowed beside loss: weigh classes there")
    for way in ways[1:]:
        mistakes.add(f"data.{way}", f"is not allowed beside {ways[0]}: rows are divided in one way")
    if "overlap" in keys and not isinstance(keys.get("vertical"), Mapping):
        mistakes.add("data.overlap", "is for columns by party; add vertical = {party = [0, 1], ...}")
    targets = keys.get("targets")
    for name, target in targets.items() if isinstance(targets, Mapping) else ():
        if isinstance(target, Mapping) and list(target) != ["classes"]:
            mistakes.add(
                f"data.targets.{name}", f"holds {', '.join(target) or 'nothing'}; expected classes = [...] alone"
            )
    return keys, keys | _find_functions(reader, keys)


def _find_functions(reader: StudyReader, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the loss and the metric that import paths lead to, the metric as keywords of `Task.with_metric`."""
    found: dict[str, Any] = {}
    metric = {"name": keys.get("metric")} if isinstance(keys.get("metric"), str) else keys.get("metric")
    rest = dict(metric) if isinstance(metric, Mapping) else {}
    paths = {"loss": keys.get("loss"), **({"metric": rest.get("name")} if metric is not None else {})}
    for key, path in paths.items():
        if path is None and key not in keys:
            continue
        if not isinstance(path, str) or ":" not in path:
            reader.mistakes.add(
                f"data.{key}", f"{short_repr(path)} is not allowed; expected an import path, module:function"
            )
        elif (function := reader.find(f"data.{key}", "losses" if key == "loss" else "metrics", path)) is not None:
            found[key] = function
    for key in rest:
        if key not in METRIC_KEYS:
            reader.mistakes.add(f"data.metric.{key}", unknown("key", key, METRIC_KEYS))
    if "metric" in found:
        low, high = rest.get("low", -math.inf), rest.get("high", math.inf)
        with reader.mistakes.at("data.metric"):
            for name, bound in (("low", low), ("high", high)):
                if isinstance(bound, bool) or not isinstance(bound, (int, float)):
                    raise InvalidInput(f"{name}={short_repr(bound)} is not allowed; expected a number")
            more = {"higher_is_better": rest.get("higher_is_better", True), "bounds": (float(low), float(high))}
            found["metric"] = {"metric": found["metric"], "name": rest.get("label"), **more}
            regression().with_metric(**found["metric"])
    return found


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


def apply_parts(data: Dataset, given: Mapping[str, Any]) -> Dataset:
    """Return `data` with the features, the label sets and the weights of its classes that `given` asks for."""
    for name, target in given.get("targets", {}).items():
        data = _with_coarser_labels(data, name, target["classes"])
    if "class_weights" in given:
        data = _with_class_weights(data, given["class_weights"])
    if "loss" in given:
        data = replace(data, task=data.task.with_loss(given["loss"]))
    if "metric" in given:
        data = replace(data, task=data.task.with_metric(**given["metric"]))
    if "vertical" in given:
        return data.vertical(given["vertical"], overlap=given.get("overlap", False))
    if "strips" in given:
        return data.strips(given["strips"])
    return data.halves() if given.get("halves") else data


def _with_class_weights(data: Dataset, weights: list[float]) -> Dataset:
    """Return `data` whose main classes weigh as much in the loss."""
    if data.task.name != "classification" or data.task.outputs is None:
        raise InvalidInput(f"class_weights are for classification; {data.name} is for {data.task.name}")
    return replace(data, task=classification(data.task.outputs, weights))


def _with_coarser_labels(data: Dataset, name: str, classes: list[int]) -> Dataset:
    """Return `data` with a label set that puts main class i into class `classes[i]`."""
    where = f"targets.{name}.classes"
    if (classes_known := {"classification": data.task.outputs, "binary": 2}.get(data.task.name)) is None:
        raise InvalidInput(f"{where} needs main labels that are classes; {data.name} is for {data.task.name}")
    if len(classes) != classes_known:
        raise InvalidInput(
            f"{where} has {len(classes)} entries; {data.name} has {classes_known} classes, expected one each"
        )
    count = len(set(classes))
    if count < 2 or set(classes) != set(range(count)):
        raise InvalidInput(f"{where}={classes} is not allowed; expected classes 0, 1, ... without a gap, two or more")
    return data.with_target(name, torch.tensor(classes)[data.y], classification(count))
