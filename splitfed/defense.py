"""The contract of a defense: a frozen value that acts on what leaves a party at an edge, or on its loss.

Every method is optional; the defaults do nothing. The algorithms stand in `splitfed.defenses`, one a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from splitfed.errors import InvalidInput
from splitfed.graph import Topology
from splitfed.privacy import Event
from splitfed.probe import Facts
from splitfed.seeding import generator
from splitfed.task import Task
from splitfed.view import Stamp


@dataclass(frozen=True)
class Place:
    """Where a defense starts to work: one party and one edge.

    `shapes`: of what leaves on the edge, `inputs`: of the party's raw inputs, both value -> shape of a row. `device`:
    where the party computes. `seed`: of all that the defense draws to begin with.
    """

    party: str
    edge: str
    shapes: Mapping[str, tuple[int, ...]]
    inputs: Mapping[str, tuple[int, ...]]
    seed: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


@dataclass(frozen=True)
class Context:
    """What a defense may know: what its own party holds at this step, and nothing of any other.

    `inputs`: the party's raw inputs of this batch (value -> tensor), empty where it owns none. `labels`: its labels
    of this batch by head, likewise. `state`: what `Defense.start` returned for this party and edge. `module`: the
    party's own segment that the edge leaves, or that its gradient comes from; None for whoever imitates the party.
    """

    party: str
    edge: str
    stamp: Stamp
    seed: int
    position: int
    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    labels: Mapping[str, Tensor] = field(default_factory=dict)
    state: Any = None
    module: nn.Module | None = None

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

    def fit(self, topology: Topology, facts: Facts, seed: int) -> Topology:
        """Return the topology to train: this one, unless the defense puts layers of its own into a segment.

        Such layers belong to the segment: they are trained, averaged, handed over and stored with it.
        """
        return topology

    def heads(self, topology: Topology) -> tuple[str, ...]:
        """Return the heads whose labels this defense changes in training; none."""
        return ()

    def relabel(self, y: Tensor, task: Task, generator: torch.Generator) -> Tensor:
        """Return the labels to train on in place of `y` (rows,), once, when their holder takes its rows."""
        return y

    def targets(self, y: Tensor, task: Task, generator: torch.Generator) -> Tensor:
        """Return what the loss compares with in place of `y` (batch,), anew at every training step."""
        return y

    def start(self, place: Place) -> Any:
        """Return what this defense keeps for one party and edge: anything with `state_dict` and its reverse."""
        return None

    def learn(self, state: Any) -> None:
        """Let what `start` returned take its own step; called after its party's, in training."""

    def event(self) -> Event | None:
        """Return what one release, one gradient sent or one row's labels cost in privacy; None: no promise."""
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

    def packed(self, kind: str, rows: int, shape: tuple[int, ...], dtype: torch.dtype) -> int | None:
        """Return the bytes that (rows, *shape) of `dtype` takes on the wire as this defense sends it; None: as it is.

        `kind`: "activation" or "gradient". It may depend on nothing else, so that it is known before training.
        """
        return None


def packed_bytes(
    defenses: Iterable[Defense], kind: str, rows: int, shape: tuple[int, ...], dtype: torch.dtype
) -> int | None:
    """Return the bytes of one value behind `defenses`, in their order; None where it crosses as it is.

    What a later defense changes is no longer in the short form that an earlier one gave it.
    """
    found: int | None = None
    for defense in defenses:
        changes = type(defense).release if kind == "activation" else type(defense).gradient
        size = defense.packed(kind, rows, shape, dtype)
        if size is not None:
            found = size
        elif changes is not (Defense.release if kind == "activation" else Defense.gradient):
            found = None
    return found
