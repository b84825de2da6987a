"""The arguments of `train` as a run's folder keeps them: values of splitfed's own, as plain data.

Written are names, numbers and frozen values of this package by class and fields, so that `splitfed.load` needs them not
again. Model and data are not in it, nor objects of a user's own classes: those are listed, and have to be given. What
is read makes values of this package and nothing else; no code that a file names is imported.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from splitfed.core import digests
from splitfed.core.errors import InvalidInput
from splitfed.training.checkpoint import write_atomic

FILE = "arguments.json"
ADVICE = "delete it, and go on with the run by splitfed.train(..., logging=Logging(folder, resume=True))"

PLACES = (
    *("schedules", "federated", "defenses", "aggregation", "secure_sum", "poisoning", "detectors", "attacks"),
    *(
        "costs.speeds",
        "core.annealing",
        "core.local_update",
        "core.optimizers",
        "core.parameter_groups",
        "core.messages",
        "training.settings",
        "training.early_stopping",
    ),
)
"""Packages and modules whose values may stand in the file."""


class _NotPlain(Exception):
    """A value that is none of this package's; the text says which."""


def write_arguments(folder: Path, arguments: Mapping[str, Any]) -> None:
    """Keep `arguments` (name -> value) in `folder`, unless they are there already.

    A finished run of a study, whose configuration says all, is left as it is.
    """
    path = folder / FILE
    if path.is_file() or (folder / "config.toml").is_file():
        return
    kept, left = {}, {}
    for name, value in arguments.items():
        try:
            encoded = _encode(value)
            if repr(_decode(encoded)) != repr(value):
                raise _NotPlain(type(value).__name__)
        except (_NotPlain, InvalidInput, TypeError) as error:
            left[name] = str(error)
        else:
            kept[name] = encoded
    write_atomic(path, digests.json_with_digest({"arguments": kept, "left_out": left}))


def read_arguments(folder: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments kept in `folder`, those `given` in their place.

    Raises `InvalidInput` for a name that `train` has not, and where something that the folder could not keep is not
    given.
    """
    path = folder / FILE
    if not path.is_file():
        raise InvalidInput(
            f"{str(folder)!r} keeps no arguments: go on with it by "
            "splitfed.train(..., logging=Logging(folder, resume=True))"
        )
    document = digests.read(path, ADVICE)
    names = [*document["arguments"], *document["left_out"]]
    for name in given:
        if name not in names:
            raise InvalidInput(f"unknown argument {name!r} (allowed: {', '.join(sorted(names))})")
    for name, what in document["left_out"].items():
        if name not in given:
            raise InvalidInput(f"{str(folder)!r} could not keep its {name} ({what}): give {name}=, as it was trained")
    return {name: _decode(value) for name, value in document["arguments"].items() if name not in given} | dict(given)


def _encode(value: Any) -> Any:
    match value:
        case None | bool() | str():
            return value
        case int() | float() if type(value) in (int, float):
            return value if math.isfinite(value) else {"number": repr(value)}
        case torch.device():
            return str(value)
        case tuple():
            return {"tuple": [_encode(one) for one in value]}
        case list():
            return [_encode(one) for one in value]
        case Mapping():
            return {"table": [[_encode(key), _encode(one)] for key, one in value.items()]}
    kind = type(value)
    if not is_dataclass(value) or not _allowed(kind.__module__):
        raise _NotPlain(f"an object of class {kind.__qualname__}")
    own = {one.name: _encode(getattr(value, one.name)) for one in fields(value) if one.init}
    return {"value": f"{kind.__module__}:{kind.__qualname__}", "fields": own}


def _decode(value: Any) -> Any:
    match value:
        case list():
            return [_decode(one) for one in value]
        case {"number": str(text)}:
            return float(text)
        case {"tuple": list(found)}:
            return tuple(_decode(one) for one in found)
        case {"table": list(found)}:
            return {_decode(key): _decode(one) for key, one in found}
        case {"value": str(name), "fields": dict(found)}:
            return _class(name)(**{key: _decode(one) for key, one in found.items()})
    return value


def _class(name: str) -> Any:
    module, _, attribute = name.partition(":")
    kind = getattr(import_module(module), attribute, None) if _allowed(module) else None
    if not isinstance(kind, type) or not is_dataclass(kind):
        raise InvalidInput(f"{name!r} is no value of splitfed that a run can be trained with")
    return kind


def _allowed(module: str) -> bool:
    top, _, place = module.partition(".")
    return top == "splitfed" and any(place == one or place.startswith(f"{one}.") for one in PLACES)
