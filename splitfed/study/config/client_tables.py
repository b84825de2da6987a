"""What differs between the clients of a study: several `[[model]]` tables and who has which, batch sizes by client.

A `[[model]]` says which clients have it, `clients = [0, 2]`. Clients that none names take turns with the tables that
name none: the first client the first of them, the next one the next, and so on again. `cut` and `cuts` in it are where
a topology cuts this model, in the place of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from splitfed.core.errors import InvalidInput, unknown
from splitfed.models.import_paths import NameResolver
from splitfed.study.config.algorithm_tables import read_algorithm
from splitfed.study.config.lookup import StudyReader
from splitfed.study.config.mistakes import Mistakes, short_repr
from splitfed.study.config.run_spec import AlgorithmSetting, ClientModel, NamedAlgorithm, RunSpec
from splitfed.study.config.schema import CUT_KEYS, MODEL_KEYS, NamedTable, StudyConfig
from splitfed.study.config.values import parameters_of
from splitfed.topologies.auto_cuts import AUTO


def read_models(
    reader: StudyReader, config: StudyConfig, base: Path
) -> tuple[NamedAlgorithm | None, tuple[ClientModel, ...]]:
    """Return what `[model]` names; of several tables what the first client has, and all of them."""
    cuts = [cuts_model(reader.code, table.name) for table in config.topology]
    if not config.models:
        if True in cuts:
            reader.mistakes.add(
                "model", f"is missing; topology[{cuts.index(True)}] cuts a model: add [model] with name = ..."
            )
        return None, ()
    if not any(cuts) and None not in cuts:
        reader.mistakes.add(
            "model", "is used by no topology, whose pieces have models in their own tables; leave it out"
        )
    if len(config.models) == 1:
        (table,) = config.models
        return _read_model(reader, "model", table.name, table.extra, base), ()
    return _read_several(reader, config.models, config.data.clients, base)


def _read_several(
    reader: StudyReader, tables: Sequence[NamedTable], count: int, base: Path
) -> tuple[NamedAlgorithm | None, tuple[ClientModel, ...]]:
    holders = _assign(reader.mistakes, [table.extra.get("clients") for table in tables], count)
    found: list[ClientModel] = []
    for i, (table, clients) in enumerate(zip(tables, holders, strict=True)):
        where, rest = f"model[{i}]", _without(table.extra, MODEL_KEYS)
        cuts = {key: table.extra[key] for key in CUT_KEYS if key in table.extra}
        for key, value in cuts.items():
            _check_cut(reader.mistakes, f"{where}.{key}", key, value)
        # One that is not known is a mistake by now; where it would be cut is known all the same.
        named = _read_model(reader, where, table.name, rest, base)
        made = ClientModel(named or NamedAlgorithm("models", table.name, rest, rest), tuple(clients), cuts, where)
        same = [one.where for one in found if (one.named, one.cuts) == (made.named, made.cuts)]
        if same:
            reader.mistakes.add(where, f"is the same as {same[0]}: add its clients there")
        found.append(made)
    return next((one.named for one in found if 0 in one.clients), None), tuple(found)


def _read_model(
    reader: StudyReader, where: str, name: str, given: Mapping[str, Any], base: Path
) -> NamedAlgorithm | None:
    if ":" in name:
        return NamedAlgorithm("models", name, given, given)
    return read_algorithm(reader, where, "models", {"name": name, **given}, base=base, lists="")


def _assign(mistakes: Mistakes, given: Sequence[Any], count: int) -> list[list[int]]:
    """Return the clients of every table of models, of which `given` says who it names (None: nobody)."""
    holder: dict[int, int] = {}
    for i, clients in enumerate(given):
        where = f"model[{i}].clients"
        if clients is None:
            continue
        if not isinstance(clients, list) or not clients or not all(type(one) is int for one in clients):
            mistakes.add(where, f"{short_repr(clients)} is not allowed; expected a list of clients, numbered from 0")
            continue
        for client in clients:
            if not 0 <= client < count:
                mistakes.add(where, f"{client} is not allowed; there are {count} clients, numbered from 0")
            elif client in holder:
                mistakes.add(where, f"client {client} has model[{holder[client]}]; expected one model a client")
            else:
                holder[client] = i
    left = [client for client in range(count) if client not in holder]
    if takers := [i for i, clients in enumerate(given) if clients is None]:
        for turn, client in enumerate(left):
            holder[client] = takers[turn % len(takers)]
        for i in takers[len(left) :]:
            mistakes.add(f"model[{i}]", f"no client is left for it; there are {count} clients")
    elif left and not mistakes:
        mistakes.add(
            "model",
            f"client {left[0]} has none; name it in clients, or leave clients out of a table for all that are left",
        )
    return [[client for client in range(count) if holder.get(client) == i] for i in range(len(given))]


def _check_cut(mistakes: Mistakes, where: str, key: str, value: Any) -> None:
    if value == AUTO:
        mistakes.add(where, "'auto' is for one model; expected the name of a submodule")
    elif key == "cut" and not isinstance(value, str):
        mistakes.add(where, f"{short_repr(value)} is not allowed; expected the name of a submodule")
    elif key == "cuts" and not (isinstance(value, list) and value and all(isinstance(one, str) for one in value)):
        mistakes.add(where, f"{short_repr(value)} is not allowed; expected a list of names of submodules")


def read_topology(
    reader: StudyReader, models: Sequence[ClientModel], where: str, table: Mapping[str, Any]
) -> AlgorithmSetting | None:
    """Return the topology of a table without lists, for clients that have `models`; None after a mistake.

    Where all of these say where they are cut, the topology says nothing of it.
    """
    mistakes, keys = reader.mistakes, _cut_keys(reader.code, table["name"])
    named = [key for key in keys if models and all(key in one.cuts for one in models)]
    for key in named:
        if key in table:
            mistakes.add(f"{where}.{key}", f"is used by no model: every [[model]] has its own {key}")
    for key in [key for key in keys if models and key not in named and table.get(key) == AUTO]:
        mistakes.add(f"{where}.{key}", f"'auto' is for one model; give every [[model]] its own {key}")
    found = read_algorithm(reader, where, "topologies", {**table, **{key: models[0].cuts[key] for key in named}})
    if found is None:
        return None
    told = {key: "by model" if key in named else value for key, value in found.label_values.items()}
    return AlgorithmSetting(where, (replace(found, parameters=_without(found.parameters, named), label_values=told),))


def check_cut_keys(reader: StudyReader, models: Sequence[ClientModel], topologies: Sequence[NamedTable]) -> None:
    """Note a cut of a model that no topology has a use for."""
    known = {key for table in topologies for key in _cut_keys(reader.code, table.name)}
    for one in models:
        for key in [key for key in one.cuts if key not in known]:
            reader.mistakes.add(f"{one.where}.{key}", unknown("key", key, sorted(known)))


def _cut_keys(code: NameResolver, name: str) -> list[str]:
    """Return the parameters of the topology `name` that say where a model is cut; none where the name leads nowhere."""
    try:
        found = parameters_of(code.load("topologies", name))
    except InvalidInput:
        return []
    return [key for key in CUT_KEYS if key in found and "model" in found]


def _without(table: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if key not in keys}


def cuts_model(code: NameResolver, name: str) -> bool | None:
    """Return whether the topology `name` takes the one model of `[model]`; None where that name leads nowhere."""
    try:
        return "model" in parameters_of(code.load("topologies", name))
    except InvalidInput:
        return None


def describe_clients(cell: RunSpec) -> list[dict[str, Any]]:
    """Return what each client of `cell` has where clients differ, a table a client; none where all have the same.

    "client": its number; "model" with its cuts and "batch_size", each where they differ.
    """
    sizes = cell.training.batch_size
    own: list[dict[str, Any]] = [{"client": client} for client in range(cell.data.clients)]
    for one in cell.models:
        for client in one.clients:
            own[client]["model"] = one.label
    if isinstance(sizes, tuple):
        for client, size in enumerate(sizes):
            own[client]["batch_size"] = size
    return own if len(own[0]) > 1 else []


def parse_batch_sizes(mistakes: Mistakes, given: Any, clients: int) -> int | tuple[int, ...]:
    """Return `training.batch_size`: a number for all clients, or one a client, as a list or a table.

    A table has a `default` and clients by number: `{default = 64, 0 = 8}`.
    """
    where, expected = "training.batch_size", "expected a whole number of at least 1"

    def check(value: Any, place: str = where) -> int:
        if type(value) is int and 1 <= value <= 2**53:
            return value
        mistakes.add(place, f"{short_repr(value)} is not allowed; {expected}")
        return 1

    if isinstance(given, list):
        sizes = tuple(check(value, f"{where}[{i}]") for i, value in enumerate(given))
        if len(sizes) != clients:
            mistakes.add(
                where,
                f"has {len(sizes)} entries; expected {clients}, one a client (a list here is no grid: for several "
                "sizes in turn take a [search])",
            )
        return sizes or 1
    if not isinstance(given, Mapping):
        return check(given)
    numbers = {str(client): client for client in range(clients)}
    for key in given:
        if key != "default" and key not in numbers:
            mistakes.add(f"{where}.{key}", f"is no client; expected default, or a number from 0 to {clients - 1}")
    by_key = {key: check(value, f"{where}.{key}") for key, value in given.items()}
    if "default" not in by_key and (left := [key for key in numbers if key not in by_key]):
        mistakes.add(where, f"has nothing for client {left[0]}; add default = ...")
        return 1
    return tuple(by_key.get(key, by_key.get("default", 1)) for key in numbers)
