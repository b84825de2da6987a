"""The places where a model can be cut, for people: of a registered model, of one by import path, or of a study's own.

A model by itself gets random rows of the shape it is asked for; a study gives its own rows. What "auto" would choose
is found by building the topologies.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from splitfed.core.cut_places import CutPlace, cut_places
from splitfed.core.equivalence import EXAMPLES
from splitfed.core.errors import InvalidInput, check_count
from splitfed.core.random import generator
from splitfed.core.topology import Topology
from splitfed.models.import_paths import NameResolver
from splitfed.registry import load
from splitfed.study.config import build
from splitfed.study.config.assembly import build_model
from splitfed.study.config.grid import expand
from splitfed.study.config.mistakes import Mistakes
from splitfed.study.config.piece_tables import HIDDEN
from splitfed.study.config.schema import parse_study
from splitfed.study.config.values import parameters_of, read_parameters
from splitfed.study.run.checked_study import read_study_file
from splitfed.study.trust import is_results
from splitfed.topologies.auto_cuts import with_auto_cuts

Json = dict[str, Any]


@dataclass(frozen=True)
class AutoChoice:
    """What "auto" chooses for a topology: the `cuts`, none where there is no choice, and why, in a line."""

    cuts: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class CutSurvey:
    """A model called `name`, its places, and what "auto" would choose: topology -> cuts."""

    name: str
    model: nn.Module
    places: tuple[CutPlace, ...]
    auto: Mapping[str, AutoChoice]


@dataclass(frozen=True)
class ModelRequest:
    """A model to be made, by name or path, and its rows: `shape` of one; whole numbers below `integers`, if any.

    `settings`: parameters of the model, each as "key=value" with a value as in TOML.
    """

    name: str
    shape: str | None = None
    outputs: int | None = None
    settings: Sequence[str] = ()
    integers: int | None = None


def survey(
    request: ModelRequest,
    depth: int | None,
    progress: Callable[[int, int], None] | None,
    *,
    blocks: bool = False,
    trust: bool = False,
) -> CutSurvey:
    """Return the places of the model asked for; one named by a `.toml` file is that of the study in it.

    `depth`, `blocks` and `progress` as for `cut_places`; "auto", which chooses among all places, is not asked with
    `blocks`. `trust`: whether code in folders of results of somebody else may be run. Raises `InvalidInput`.
    """
    if depth is not None:
        check_count("depth", depth, low=1)
    load_model = _load_from_study if request.name.endswith(".toml") else _load_by_name
    model, example = load_model(request, trust)
    places = cut_places(model, example, depth, progress, blocks=blocks)
    if blocks:
        return CutSurvey(request.name, model, places, {})

    def places_at(limit: int) -> Sequence[CutPlace]:
        if depth is None or limit <= depth:
            return [place for place in places if place.depth <= limit]
        return cut_places(model, example, limit)

    vanilla, u_shaped = load("topologies", "vanilla"), load("topologies", "u_shaped")
    builders: dict[str, Callable[[tuple[str, ...]], Topology]] = {
        "vanilla": lambda cuts: vanilla(model, cuts[0], example=example),
        "u_shaped": lambda cuts: u_shaped(model, cuts, example=example),
    }
    auto = {
        name: _choose(
            partial(with_auto_cuts, model, example, count, builders[name], client_ends=ends, places_at=places_at)
        )
        for name, count, ends in (("vanilla", 1, False), ("u_shaped", 2, True))
    }
    return CutSurvey(request.name, model, places, auto)


def survey_to_json(found: CutSurvey) -> Json:
    """Return `found` as plain values."""
    return {
        "model": found.name,
        "places": [
            {
                "name": place.name,
                "aliases": list(place.aliases),
                "refused": place.refusal,
                "method": place.method,
                "values": [
                    {
                        "name": v.name,
                        "shape": list(v.shape),
                        "dtype": str(v.dtype).removeprefix("torch."),
                        "returned": v.returned,
                    }
                    for v in place.values
                ],
                "forward_bytes": place.forward_bytes,
                "backward_bytes": place.backward_bytes,
                "parameters": list(place.parameters),
                "multiply_adds": list(place.multiply_adds),
            }
            for place in found.places
        ],
        "auto": {name: {"cuts": list(choice.cuts), "why": choice.why} for name, choice in found.auto.items()},
    }


def _choose(choose: Callable[[], Topology]) -> AutoChoice:
    try:
        topology = choose()
    except InvalidInput as error:
        return AutoChoice((), str(error))
    original = topology.segments[0].original
    assert original is not None
    return AutoChoice(original.cuts, topology.cut_choice)


def _load_from_study(request: ModelRequest, trust: bool) -> tuple[nn.Module, Tensor]:
    given = {"shape": request.shape, "outputs": request.outputs, "set": request.settings or None}
    for option, value in {**given, "integers": request.integers}.items():
        if value is not None:
            raise InvalidInput(f"--{option} is for a model by itself; the study {request.name} has its own")
    path = Path(request.name)
    raw, base, code = read_study_file(path, trust=trust)
    grid = expand(parse_study(raw, path.name), path.name, base, code)
    cell = next((cell for cell in grid.cells if cell.model is not None), None)
    if cell is None or cell.model is None:
        raise InvalidInput(f"{path.name}: no topology of the study cuts a model; there is nothing to list")
    data = build.dataset(cell.data)
    return build.uncut_model(cell, cell.model, data), data.rows(range(min(EXAMPLES, len(data)))).x


def _load_by_name(request: ModelRequest, trust: bool) -> tuple[nn.Module, Tensor]:
    code, name = _resolve_path(request.name, trust)
    factory = code.load("models", name)
    shape, outputs = _parse_shape(request.shape), 10 if request.outputs is None else request.outputs
    check_count("outputs", outputs, low=1)
    parameters = dict(_parse_setting(text) for text in request.settings)
    if ":" not in name:
        mistakes = Mistakes("splitfed cuts")
        read_parameters(mistakes, name, parameters_of(factory, HIDDEN["models"]), parameters)
        mistakes.stop()
    model = build_model(request.name, name, shape, outputs, 0, parameters, code)
    draws = generator(0, "cut places")
    if request.integers is None:
        return model, torch.rand((EXAMPLES, *shape), generator=draws)
    check_count("integers", request.integers, low=1)
    return model, torch.randint(request.integers, (EXAMPLES, *shape), generator=draws)


def _resolve_path(name: str, trust: bool) -> tuple[NameResolver, str]:
    """Return where the name of a model may lead, and the name there: "nets/my.py:Net" is "my.py:Net" in nets."""
    file, colon, attribute = name.rpartition(":")
    if not colon:
        return NameResolver(), name
    path = Path(file if file.endswith(".py") else ".")
    if path.name and not path.is_file():
        raise InvalidInput(f"model {name!r}: there is no file {file!r}")
    folder, own = path.resolve().parent if path.name else path.resolve(), path.name or file
    if is_results(folder) and not trust:
        raise InvalidInput(
            f"{str(folder)!r} is a folder of results, and would run {own!r}: add --trust if you trust whoever made it"
        )
    return NameResolver(folder), f"{own}:{attribute}"


def _parse_shape(text: str | None) -> tuple[int, ...]:
    if text is None:
        raise InvalidInput(
            "the model needs the shape of one row: --shape 1,28,28 for an image, --shape 64 for 64 numbers"
        )
    sizes = text.replace("x", ",").split(",")
    if not all(size.strip().isdecimal() and int(size) > 0 for size in sizes):
        raise InvalidInput(f"shape={text!r} is not allowed; expected whole numbers of at least 1, such as 1,28,28")
    return tuple(int(size) for size in sizes)


def _parse_setting(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip().isidentifier():
        raise InvalidInput(f"set={text!r} is not allowed; expected KEY=VALUE, such as hidden=[64,32]")
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        # A word needs no quotes here.
        return key.strip(), value.strip()
