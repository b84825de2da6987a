"""The contract of a defense: a frozen value that acts on what leaves a party at an edge, or on its loss.

Every method is optional; the defaults do nothing. The algorithms stand in `splitfed.defenses`, one a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from splitfed.errors import InvalidInput
from splitfed.graph import Topology
from splitfed.probe import Facts
from splitfed.seeding import generator
from splitfed.view import Stamp


@dataclass(frozen=True)
class Context:
    """What a defense may know: what its own party holds at this step, and nothing of any other.

    `inputs`: the party's raw inputs of this batch (value -> tensor), empty where it owns none. `labels`: its labels
    of this batch by head, likewise. `state`: what `Defense.start` returned for this party and edge.
    """

    party: str
    edge: str
    stamp: Stamp
    seed: int
    position: int
    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    labels: Mapping[str, Tensor] = field(default_factory=dict)
    state: Any = None

    def generator(self, value: str, device: torch.device) -> torch.Generator:
        """Return the random numbers of this defense, party, edge, `value`, phase, part, epoch and step."""
        words = ("defense", self.position, self.party, self.edge, value, *self.stamp)
        return generator(self.seed, *words, device=device)


@dataclass(frozen=True, kw_only=True)
class Defense:
    """Base of all defenses. `on` names the edges it guards; empty means every edge that leaves a data owner."""

    on: tuple[str, ...] = ()

    @property
    def task_weight(self) -> float:
        """What the task's loss is multiplied by while this defense is on."""
        return 1.0

    @property
    def least_rows(self) -> int:
        """The smallest batch this defense can work on in training."""
        return 1

    @property
    def guarantee(self) -> str:
        """The formal promise, in one line; most defenses have none and say so."""
        return "no formal guarantee"

    def edges(self, topology: Topology) -> tuple[str, ...]:
        """Return the names of the crossings this defense guards in `topology`, or refuse in one line."""
        crossings = {e.name: e for e in topology.crossings}
        for name in self.on:
            if name not in crossings:
                topology.edge(name)
                raise InvalidInput(f"edge {name!r} stays within one party: nothing crosses there to defend")
        owners = set(topology.inputs.values())
        default = tuple(n for n, e in crossings.items() if topology.role_of(e.source) in owners)
        if not (self.on or default):
            raise InvalidInput(f"{type(self).__name__} has no edge to guard: no data owner sends anything here")
        return self.on or default

    def check(self, topology: Topology, facts: Facts) -> None:
        """Refuse, before training, a topology, model or data to which this defense cannot apply."""

    def start(self, shapes: Mapping[str, tuple[int, ...]], seed: int) -> Any:
        """Return what this defense keeps for one party and edge: anything with `state_dict` and its reverse."""
        return None

    def release(self, name: str, z: Tensor, context: Context) -> Tensor:
        """Return what leaves in place of `z`: (batch, ...), attached to its graph; called in every phase."""
        return z

    def expected(self, name: str, z: Tensor, context: Context) -> Tensor:
        """Return the differentiable release that a white-box adversary would model: the mean over the noise."""
        return self.release(name, z, context)

    def penalty(self, z: Tensor, context: Context) -> Tensor | None:
        """Return a scalar to add to this party's loss; `z`: all that leaves on the edge, (batch, ...)."""
        return None

    def gradient(self, name: str, g: Tensor, context: Context) -> Tensor:
        """Return what leaves in place of the gradient `g`: (batch, ...), of the batch-mean loss."""
        return g
