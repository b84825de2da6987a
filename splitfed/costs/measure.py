"""One segment run as training runs it, on made-up rows, so that its work and its memory can be measured.

Copies are run: modules, buffers and random state of the topology stay as they were. Gradients start from ones, not
from a loss, so neither labels nor a task are needed; a loss costs next to nothing beside the segment.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from splitfed.core.topology import Segment, Topology
from splitfed.core.topology_facts import TopologyFacts


@dataclass(frozen=True)
class Rehearsal:
    """A copy of one segment in training mode, what it reads, and which of its outputs a gradient comes back to."""

    module: nn.Module
    inputs: tuple[Tensor, ...]
    arguments: tuple[Tensor, ...]
    rooted: tuple[bool, ...]

    def forward(self) -> tuple[Tensor, ...]:
        """Run the segment; returns its outputs."""
        result = self.module(*self.arguments)
        return tuple(result) if isinstance(result, (tuple, list)) else (result,)

    def backward(self, outputs: tuple[Tensor, ...]) -> None:
        """Send gradients of ones back from those `outputs` that get one in training."""
        if roots := [z for z, rooted in zip(outputs, self.rooted, strict=True) if rooted and z.requires_grad]:
            # Sums, as torch compares the shapes of given gradients by symbolic algebra, which takes long to load.
            torch.autograd.backward([(z.abs() if z.is_complex() else z).sum() for z in roots])


@contextmanager
def rehearsal(topology: Topology, segment: Segment, facts: TopologyFacts, rows: int) -> Iterator[Rehearsal]:
    """Yield `segment` ready to run on `rows` rows of ones (zeros where values are whole numbers, such as words).

    As in training, raw data asks for no gradient, nor does what came over an edge of `topology.forward_only`; an
    input that the segment overwrites is a copy.
    """
    module = copy.deepcopy(segment.module)
    if not module.training:
        # A model given as a whole in evaluation mode is trained; parts frozen inside it stay frozen.
        module.train()
    needy = set(segment.inputs) - set(topology.inputs) - _one_way_values(topology, segment.role)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        inputs = tuple(_dummy_values(facts, v, rows).requires_grad_(v in needy) for v in segment.inputs)
        overwritten = facts.overwritten[segment.name]
        arguments = tuple(x.clone() if v in overwritten else x for v, x in zip(segment.inputs, inputs, strict=True))
        wanted = {h.value for h in topology.heads}.union(*(facts.returned(topology, e) for e in topology.edges))
        yield Rehearsal(module, inputs, arguments, tuple(v in wanted for v in segment.outputs))


def _dummy_values(facts: TopologyFacts, value: str, rows: int) -> Tensor:
    shape, dtype = (rows, *facts.shapes[value]), facts.dtypes[value]
    return torch.ones(shape, dtype=dtype) if dtype.is_floating_point else torch.zeros(shape, dtype=dtype)


def _one_way_values(topology: Topology, role: str) -> set[str]:
    edges = (e for e in topology.crossings if topology.role_of(e.target) == role)
    return {v for e in edges if e.name in topology.forward_only for v in e.values}
