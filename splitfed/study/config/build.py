"""From a run's plain values to the objects it is made of: data, model, topology, defenses, attacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from inspect import signature
from typing import Any, cast

import torch
from torch import Tensor, nn

from splitfed.attacks.base import Attack
from splitfed.core.defense import Defense
from splitfed.core.equivalence import EXAMPLES
from splitfed.core.errors import InvalidInput, about
from splitfed.core.random import derive
from splitfed.core.tasks import classification
from splitfed.core.topology import Topology
from splitfed.data.dataset import Dataset, Federation
from splitfed.data.features import feed
from splitfed.federated.base import Method
from splitfed.planning.example_passes import ExamplePasses
from splitfed.planning.validation import Prepared, prepare
from splitfed.schedules.base import Schedule
from splitfed.study.config.assembly import assemble_topology, build_model
from splitfed.study.config.run_spec import AttackSetting, DataSetting, NamedAlgorithm, RunSpec, name_clients
from splitfed.study.config.values import lists_to_tuples
from splitfed.topologies.shared_segments import share_segments


def dataset(source: DataSetting) -> Dataset:
    """Load the data set of `source` and say who holds what of it; the same for every seed."""
    found = _apply_parts(source.loader.call(**source.loader.parameters), {**source.parts, **source.code})
    if (transform := source.code.get("transform")) is not None:
        found = found.with_transform(transform)
    mixup = source.parts.get("mixup")
    return found if mixup is None else found.with_mixup(mixup)


def _apply_parts(data: Dataset, given: Mapping[str, Any]) -> Dataset:
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


def federation(data: Dataset, source: DataSetting, seed: int) -> Federation:
    """Return `data` divided over clients, auxiliary rows and victims, by `source` (a `[data]` table) and a seed.

    Raises `InvalidInput` where the rows do not suffice.
    """
    return data.clients(source.clients, **source.split, seed=seed)


def topologies(cell: RunSpec, data: Dataset) -> Topology | tuple[Topology, ...]:
    """Make the run's topology, or that of every client, where clients have models of different make; see `topology`.

    Clients with the same model have the same topology, and all have the first client's segments at shared roles.
    """
    if not cell.models:
        return topology(cell, data)
    by_client: dict[int, Topology] = {}
    for one in cell.models:
        try:
            built = _cut_model(cell, one.named, data, one.cuts)
        except InvalidInput as error:
            with about(error.part):
                raise InvalidInput(f"{one.label} of {name_clients(one.clients)}: {error}") from error
        by_client |= dict.fromkeys(one.clients, built)
    each = [by_client[client] for client in range(cell.data.clients)]
    return share_segments(each, feed(data.x[:EXAMPLES], each[0].inputs, data.features))


def topology(cell: RunSpec, data: Dataset) -> Topology:
    """Make the run's topology, its parameters initialised from the run's seed: of one model that is cut, or of pieces.

    Where clients have models of different make it is the first client's. Keys of a secure computation are in no file.
    Raises `InvalidInput`, whose `part` is the place of a piece that cannot be made, `topology.bottoms.lab`.
    """
    if cell.models:
        return first_topology(topologies(cell, data))
    if cell.model is None:
        built = assemble_topology(cell.topology.part, data, cell.seed, cell.code)
    else:
        built = _cut_model(cell, cell.model, data, {})
    return built if cell.computation.secure is None else replace(built, computation=cell.computation.secure)


def first_topology(built: Topology | Sequence[Topology]) -> Topology:
    """Return the topology of all clients, or the first client's."""
    return built if isinstance(built, Topology) else built[0]


def _cut_model(cell: RunSpec, named: NamedAlgorithm, data: Dataset, cuts: Mapping[str, Any]) -> Topology:
    """Return the topology that cuts the model `named`, at `cuts` where they say something."""
    model, builder = uncut_model(cell, named, data), cell.topology.part
    more: dict[str, Any] = {"example": _example(model, data)} if builder.takes("example") else {}
    more |= {key: lists_to_tuples(value) for key, value in cuts.items() if builder.takes(key)}
    built: Topology = builder.construct(model=model, **more)
    return replace(built.with_tasks(data.tasks), cut_choice=cell.cut_choice or built.cut_choice)


def uncut_model(cell: RunSpec, named: NamedAlgorithm, data: Dataset) -> nn.Module:
    """Make the model that the run's topology cuts, `named` in its study, initialised from the run's seed."""
    outputs = data.task.outputs or 1
    with about(next((one.where for one in cell.models if one.named is named), "model")):
        return build_model(named.label, named.name, data.shape, outputs, cell.seed, named.parameters, cell.code)


def _example(model: nn.Module, data: Dataset) -> Tensor | dict[str, Tensor]:
    """Return rows of the model's input, by argument where its arguments bear the names of features."""
    few, known = data.rows(range(min(EXAMPLES, len(data)))).x, data.features
    return {name: known[name].select(few) for name in signature(model.forward).parameters if name in known} or few


def defenses(cell: RunSpec) -> list[Defense]:
    """Make the run's defenses, in the order they act."""
    return [part.construct() for part in cell.defense.parts]


def schedule(cell: RunSpec) -> Schedule:
    """Make the run's schedule."""
    return cast(Schedule, cell.schedule.part.construct())


def method(cell: RunSpec, data: Dataset) -> Method | None:
    """Make the run's federated method, None where it has none, with the models that it has of its own.

    Such a model reads whole rows, and is as wide as its table says or as the labels need.
    """
    if not cell.method.parts:
        return None
    part = cell.method.part
    models = {}
    for key, table in part.parameters.items():
        if isinstance(table, Mapping) and isinstance(table.get("model"), str):
            parameters = dict(table)
            name, width = parameters.pop("model"), parameters.pop("width", None)
            outputs, seed = (data.task.outputs or 1) if width is None else width, derive(cell.seed, "method", key)
            models[key] = build_model(name, name, data.shape, outputs, seed, parameters, cell.code)
    return cast(Method, part.construct(**models))


class StudyBuilder:
    """Puts runs of one study on `data` together; topologies, splits and what is found out about them are made once.

    To prepare a run changes neither, and who trains copies modules: see `splitfed.core.payload.copy_modules`.
    """

    def __init__(self, data: Dataset) -> None:
        self.data, self.example_passes = data, ExamplePasses()
        self._topologies: dict[str, Topology | Sequence[Topology]] = {}
        self._federations: dict[str, Federation] = {}

    def topologies(self, cell: RunSpec) -> Topology | Sequence[Topology]:
        """Return the run's topology, or that of every client; see `topologies`."""
        named = None if cell.model is None else cell.model.table
        key = repr(
            (
                cell.seed,
                cell.topology.part.table,
                cell.cut_choice,
                named,
                cell.models,
                cell.computation.table,
            )
        )
        if key not in self._topologies:
            self._topologies[key] = topologies(cell, self.data)
        return self._topologies[key]

    def federation(self, cell: RunSpec) -> Federation:
        """Return the run's split; see `federation`."""
        key = repr((cell.seed, cell.data.clients, cell.data.split))
        if key not in self._federations:
            self._federations[key] = federation(self.data, cell.data, cell.seed)
        return self._federations[key]

    def prepare(self, cell: RunSpec, other: Schedule | None = None, *, defended: bool = False) -> Prepared:
        """Put the run `cell` together, or an `other` schedule without a method on it; with its defenses if `defended`.

        Most defenses change no cost; those that pack what is sent, add layers to a segment or exchange norms do.
        """
        return prepare(
            self.topologies(cell),
            self.federation(cell),
            schedule=schedule(cell) if other is None else other,
            defenses=defenses(cell) if defended else (),
            optimizer=cell.training.optimizer,
            training=cell.training.training(cell.seed),
            method=method(cell, self.data) if other is None else None,
            example_passes=self.example_passes,
        )


def attack(setting: AttackSetting) -> Attack:
    """Make the attack of `setting`."""
    return cast(Attack, setting.attack.construct())
