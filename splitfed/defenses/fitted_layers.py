"""Layers that defenses add to segments, after a value before it leaves or before one that arrives."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

from torch import Tensor, nn

from splitfed.core.errors import InvalidInput
from splitfed.core.random import derive, stream
from splitfed.core.topology import Segment, Topology
from splitfed.core.topology_facts import TopologyFacts


class Layer(nn.Module):
    """Layer behind one `value` of a segment, which crosses on `edges`.

    `kept`: tensors of the current step that its defense reads.
    """

    transient: ClassVar[tuple[str, ...]] = ("kept",)

    def __init__(self, value: str) -> None:
        super().__init__()
        self.value = value
        self.edges: tuple[str, ...] = ()
        self.kept: tuple[Tensor, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without `kept`, as a copy is in no step and tensors with a graph cannot be copied."""
        return {**self.__dict__, "kept": ()}


L = TypeVar("L", bound=Layer)


class OutputLayers(nn.Module):
    """Runs `module` and passes its outputs at the positions in `layers` through these."""

    def __init__(self, module: nn.Module, layers: Mapping[int, nn.Module]) -> None:
        super().__init__()
        self.module = module
        self.layers = nn.ModuleDict({str(i): layer for i, layer in layers.items()})
        # Or a model that is given as a whole in evaluation mode would count as one whose parts its owner has frozen.
        self.training = module.training

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return the module's outputs with the layers applied."""
        result = self.module(*inputs)
        outputs = list(result) if isinstance(result, (tuple, list)) else [result]
        for i, layer in self.layers.items():
            outputs[int(i)] = layer(outputs[int(i)])
        return tuple(outputs) if len(outputs) > 1 else outputs[0]


class InputLayers(nn.Module):
    """Runs `module` on its inputs, those at the positions in `layers` passed through these first."""

    def __init__(self, module: nn.Module, layers: Mapping[int, nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(i): layer for i, layer in layers.items()})
        self.module = module
        self.training = module.training

    def forward(self, *inputs: Tensor) -> object:
        """Return the module's output for the transformed inputs."""
        given = list(inputs)
        for i, layer in self.layers.items():
            # A copy, for the module may overwrite what it reads, and the layer needs its own result on the way back.
            given[int(i)] = layer(given[int(i)]).clone()
        return self.module(*given)


def values_of(topology: Topology, edges: tuple[str, ...], facts: TopologyFacts) -> tuple[str, ...]:
    """Return the distinct values with data that cross on `edges`."""
    return tuple(dict.fromkeys(value for name in edges for value in facts.data(topology.edge(name).values)))


def append_layers(
    name: str,
    topology: Topology,
    edges: tuple[str, ...],
    facts: TopologyFacts,
    seed: int,
    make: Callable[[str, tuple[int, ...]], Layer],
) -> Topology:
    """Return `topology` with the layer `make(value, shape)` behind every value of `values_of` on `edges`.

    Weights are drawn from `seed`. `name`: of the defense; raises `InvalidInput` for a value with a layer of its kind
    already.
    """
    guarded = values_of(topology, edges, facts)

    def fitted(segment: Segment) -> Segment:
        layers = {}
        with stream(derive(seed, name, segment.name)):
            for i, value in enumerate(segment.outputs):
                if value in guarded:
                    layer = make(value, facts.shapes[value]).to(facts.dtypes[value])
                    if layer_of(segment.module, type(layer), value) is not None:
                        raise InvalidInput(f"{name} guards value {value!r} twice; expected once")
                    layer.edges = tuple(e for e in edges if value in topology.edge(e).values)
                    layers[i] = layer
        return replace(segment, module=OutputLayers(segment.module, layers)) if layers else segment

    return replace(topology, segments=tuple(fitted(segment) for segment in topology.segments))


def prepend_layers(segment: Segment, values: Collection[str], seed: int, make: Callable[[str], nn.Module]) -> Segment:
    """Return `segment` with `make(value)` before each of its inputs that is among `values`.

    Weights are drawn from `seed`.
    """
    with stream(seed):
        layers = {i: make(value) for i, value in enumerate(segment.inputs) if value in values}
    return replace(segment, module=InputLayers(segment.module, layers)) if layers else segment


def layer_of(module: nn.Module | None, kind: type[L], value: str) -> L | None:
    """Return the layer of this `kind` behind `value` in a segment's `module`; None if there is none."""
    layers = () if module is None else module.modules()
    return next((m for m in layers if isinstance(m, kind) and m.value == value), None)


def layers_on(module: nn.Module | None, kind: type[L], edge: str) -> list[L]:
    """Return the layers of this `kind` behind the values that leave a segment's `module` on `edge`."""
    return [m for m in ([] if module is None else module.modules()) if isinstance(m, kind) and edge in m.edges]


def check_all_guarded(name: str, topology: Topology, edges: tuple[str, ...], facts: TopologyFacts) -> None:
    """Raise `InvalidInput` if a value of the guarded `edges` also crosses on an unguarded edge."""
    wanted = set(values_of(topology, edges, facts))
    for edge in topology.crossings:
        for value in wanted.intersection(edge.values) if edge.name not in edges else ():
            raise InvalidInput(f"{name} guards {value!r}, which also leaves on edge {edge.name!r}; guard that one too")


def check_readers(
    what: str, topology: Topology, edges: tuple[str, ...], facts: TopologyFacts, instead: str = ""
) -> None:
    """Raise `InvalidInput` if a value of `edges` has a reader on none of them, which would get the changed value.

    `what`: what is done to the value, with a placeholder for its name; `instead`: an alternative to cutting elsewhere.
    """
    reached = {topology.role_of(topology.edge(name).target) for name in edges}
    for segment in topology.segments:
        for value in set(values_of(topology, edges, facts)).intersection(segment.inputs):
            if segment.role not in reached:
                raise InvalidInput(
                    f"{what.format(value=value)}, but segment {segment.name!r} at {segment.role!r} reads it too, on no "
                    f"edge that is guarded; cut elsewhere{instead}"
                )
