"""Places detectors at the clients that they watch over, with what such a client knows."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput, unknown
from splitfed.core.messages import Stamp
from splitfed.core.party import Party
from splitfed.core.payload import copy_nested
from splitfed.core.per_client_defenses import of_client
from splitfed.core.random import derive, generator, stream
from splitfed.core.step_state import Batch
from splitfed.core.topology import Topology
from splitfed.detectors.base import Detector, DetectorSite, DetectorState, LocalTrainer
from splitfed.engines.base import Placement
from splitfed.engines.factory import make_engine
from splitfed.engines.observers import Observable
from splitfed.planning.example_passes import inputs_of
from splitfed.planning.validation import Prepared, labels_of

_FAKE = "fake"


def place_detectors(engine: Observable, prepared: Prepared, detectors: Mapping[str, Detector]) -> None:
    """Place every detector at its party, or at every client where it is for the clients' role.

    Raises `InvalidInput` for a party that is not there, and where the clients do not hold all inputs and labels.
    """
    topology = prepared.topology
    for name, detector in detectors.items():
        replicas = [
            i
            for i, replica in enumerate(engine.run_parties.replicas)
            for p in replica.parties.values()
            if name in (p.name, p.role)
        ]
        if not replicas:
            raise unknown("party for a detector", name, [*engine.parties, *topology.data_roles])
        if topology.data_roles != (engine.parties[name].role if name in engine.parties else name,):
            raise InvalidInput(
                f"{type(detector).__name__} works at a client that holds inputs and labels; in topology "
                f"{topology.name!r} {name!r} does not hold them all"
            )
        detector.check(topology)
        for replica in replicas:
            party = engine.party(replica, topology.data_roles[0])
            site = _detector_site(prepared, replica, party)
            engine.detectors[party.name] = _PlacedDetector(detector.watch(site), site.inputs)


def _detector_site(prepared: Prepared, replica: int, party: Party) -> DetectorSite:
    graph, rows = prepared.topologies[replica], prepared.data.clients[replica].train
    task = graph.heads[0].task
    assert task is not None
    return DetectorSite(
        party.name,
        {name: x.to(party.device) for name, x in copy_nested(inputs_of(graph, rows)).items()},
        {name: y.to(party.device) for name, y in copy_nested(labels_of(graph, rows)).items()},
        task.outputs if task.name == "classification" and task.outputs else 2,
        _local_trainer(prepared, replica, party),
        derive(prepared.training.seed, "detector", party.name),
    )


class _PlacedDetector:
    """Hands a detector the gradients of its client, and sends the labels it makes up."""

    def __init__(self, detector: DetectorState, inputs: Mapping[str, Tensor]) -> None:
        self.detector, self.inputs = detector, inputs
        self.metrics, self.state, self.load_state = detector.metrics, detector.state, detector.load_state

    def batch(self, party: Party, batch: Batch, stamp: Stamp) -> Batch:
        labels = self.detector.fake(batch.rows)
        if labels is None:
            return batch
        party.state.own(_FAKE, {name: x[batch.rows] for name, x in self.inputs.items()}, labels)
        return Batch(_FAKE, torch.arange(len(batch.rows)))

    def keeps(self, party: Party) -> bool:
        return self.detector.judge(_first_gradient(party))


class _GradientRecorder(DetectorState):
    """Records the gradients of the client of a local training."""

    def __init__(self) -> None:
        self.gradients: list[Tensor] = []

    def look(self, gradient: Tensor) -> bool:
        self.gradients.append(gradient)
        return True


def _local_trainer(prepared: Prepared, replica: int, party: Party) -> LocalTrainer:
    """Return the training of the whole model on one machine, from weights that owe nothing to the real server's."""
    graph, facts = prepared.topologies[replica], prepared.facts[replica]
    data = prepared.data.clients[replica].train

    def train_locally(rows: Tensor, epochs: int, number: int) -> Tensor:
        seed = derive(prepared.training.seed, "rehearsal", party.name, number)
        size = prepared.training.of_client(replica).batch_size
        engine = make_engine(
            _redraw_servers(graph, seed),
            facts,
            1,
            defenses=of_client(prepared.defenses, replica),
            optims=prepared.optims,
            seed=seed,
            device=party.device,
            placement=Placement(),
        )
        inputs, labels = (
            {n: t[rows] for n, t in found.items()} for found in (inputs_of(graph, data), labels_of(graph, data))
        )
        engine.own(0, "train", inputs, labels)
        client = engine.party(0, graph.data_roles[0])
        recorder = _GradientRecorder()
        engine.detectors[client.name] = _PlacedDetector(recorder, {})
        for epoch in range(epochs):
            order = torch.randperm(len(rows), generator=generator(seed, "order", epoch))
            engine.train(0, epoch, [b for b in order.split(size) if len(b) > 1 or len(rows) == 1])
        return torch.stack(recorder.gradients) if recorder.gradients else torch.empty(0, 0)

    return train_locally


def _first_gradient(party: Party) -> Tensor | None:
    """Return the gradient of the first weight that has one, in the order of the party's segments: (weights,)."""
    weights = (weight for module in party.state.modules.values() for weight in module.parameters())
    gradient = next((weight.grad for weight in weights if weight.grad is not None), None)
    return None if gradient is None else gradient.detach().flatten().to("cpu", torch.float64)


def _redraw_servers(topology: Topology, seed: int) -> Topology:
    """Return the topology with all but the clients' weights drawn anew, wherever a module knows how to."""
    segments = []
    with stream(seed):
        for segment in topology.segments:
            module = copy.deepcopy(segment.module)
            for part in module.modules() if segment.role not in topology.data_roles else ():
                if callable(reset := getattr(part, "reset_parameters", None)):
                    reset()
            segments.append(replace(segment, module=module, original=None))
    return replace(topology, segments=tuple(segments))
