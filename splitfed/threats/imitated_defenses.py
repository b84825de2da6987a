"""Imitation of a sender's defenses by an adversary: defended releases, and penalties added to the sender's loss.

The adversary knows the defenses and their settings, but draws states and random numbers of its own and has nothing that
was trained.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from splitfed.core.defense import (
    Defense,
    LearnedDefense,
    PenaltyDefense,
    ReleaseDefense,
    TaskWeightDefense,
    penalty_term,
)
from splitfed.core.defense_context import Context, DefenseSite
from splitfed.core.messages import Stamp
from splitfed.core.random import derive
from splitfed.core.topology import Edge, Topology
from splitfed.core.topology_facts import TopologyFacts

Key = tuple[str, int]
Feed = Callable[[Tensor], Mapping[str, Tensor]]
"""Maps raw rows (n, *shape) to the inputs of a topology."""


def training_context(context: Context, number: int, epoch: int, arrived: Mapping[str, Tensor]) -> Context:
    """Return `context` for a penalty in a training step of `epoch`, at draw `number`.

    Its random numbers differ from those of the release at the same draw.
    """
    stamp = Stamp("train", 0, epoch, number)
    return replace(context, stamp=stamp, seed=derive(context.seed, "imitated training"), arrived=arrived)


def task_weight(defenses: Sequence[Defense], epoch: int) -> float:
    """Return the factor of the task's loss in `epoch` under the run's `defenses`."""
    return prod(d.task_weight(epoch) for d in defenses if isinstance(d, TaskWeightDefense) and d.weighs_task)


class ImitatedStates:
    """States of imitated defenses by edge and position: the defense, and the value that its `start` returned."""

    def __init__(self, held: Mapping[Key, tuple[Defense, Any]]) -> None:
        self._learning = {
            k: (d, state) for k, (d, state) in held.items() if state is not None and isinstance(d, LearnedDefense)
        }

    def learn(self) -> None:
        """Let every learned defense take one step of its own, as after a training step of its party."""
        for defense, state in self._learning.values():
            defense.learn(state)

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the learned states."""
        return {_name(key): copy.deepcopy(state.state_dict()) for key, (_, state) in self._learning.items()}

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Restore the learned states from `states`."""
        for key, (_, state) in self._learning.items():
            state.load_state_dict(copy.deepcopy(states[_name(key)]))


class ImitatedSender:
    """Imitates the defenses on an `edge` that carries one value with data.

    `defenses`: those of the sender; `feed(x)`: the inputs of the topology for raw rows x. `omitted`: names of the
    defenses whose penalty cannot be computed without the sender's own segments, because it reads layers inside them,
    acts on an edge further upstream, or belongs to a sender without raw rows.
    """

    def __init__(
        self,
        topology: Topology,
        facts: TopologyFacts,
        defenses: Sequence[Defense],
        edge: Edge,
        feed: Feed,
        seed: int,
        device: torch.device,
    ) -> None:
        self._role, self._edge, self._seed = topology.role_of(edge.source), edge.name, seed
        (self._value,) = facts.data(edge.values)
        self._feed, self._defenses = feed, tuple(defenses)
        self._inputs = tuple(name for name, owner in topology.inputs.items() if owner == self._role)
        shapes = {self._value: facts.shapes[self._value]}
        raw = {name: facts.shapes[name] for name in self._inputs}
        guarded = [defense.edges(topology) for defense in defenses]
        sites = {
            i: DefenseSite(self._role, edge.name, shapes, raw, derive(seed, "defense", i), device)
            for i, edges in enumerate(guarded)
            if edge.name in edges
        }
        self._guards: list[tuple[int, Defense, Any]] = [
            (i, d, d.start(sites[i]) if isinstance(d, LearnedDefense) else None)
            for i, d in enumerate(defenses)
            if i in sites
        ]
        self._shares = [1.0 / max(len(edges), 1) for edges in guarded]
        upstream = {s.name for s in topology.upstream(topology.role_of(edge.target))}
        above = {e.name for e in topology.crossings if e.source in upstream and e.name != edge.name}
        self.omitted = tuple(
            type(d).__name__
            for d, edges in zip(defenses, guarded, strict=True)
            if isinstance(d, PenaltyDefense)
            and (above.intersection(edges) or (edge.name in edges and not self._imitates_penalty(d)))
        )

    def release(self, z: Tensor, number: int) -> Tensor:
        """Return the defended release of z (n, ...) at draw `number`."""
        for position, defense, state in self._guards:
            if isinstance(defense, ReleaseDefense):
                z = defense.release(self._value, z, self._context(position, state, number))
        return z

    def expected(self, z: Tensor) -> Tensor:
        """Return the release of z (n, ...) with every defense at its mean, differentiable in z."""
        for position, defense, state in self._guards:
            if isinstance(defense, ReleaseDefense):
                z = defense.expected(self._value, z, self._context(position, state, 0))
        return z

    def in_training(self, x: Tensor, z: Tensor, number: int, epoch: int) -> tuple[Tensor, Tensor, float]:
        """Return the defended release of z (n, ...), the penalty, and the task loss's factor in a training step.

        `x`: the raw rows (n, *shape) that z was computed from. The penalty is a scalar whose gradient in z is exact;
        its value is not where a defense defines its penalty by the gradient alone. The factor is that of `epoch`.
        """
        fed = self._feed(x)
        held, total = {name: fed[name] for name in self._inputs}, z.new_zeros(())
        for position, defense, state in self._guards:
            context = self._context(position, state, number)
            if isinstance(defense, PenaltyDefense) and self._imitates_penalty(defense):
                step_context = training_context(replace(context, inputs=held), number, epoch, {})
                total = total + self._shares[position] * penalty_term(defense.penalty(z, step_context), z)
            if isinstance(defense, ReleaseDefense):
                z = defense.release(self._value, z, context)
        return z, total, task_weight(self._defenses, epoch)

    @property
    def defenses(self) -> ImitatedStates:
        """States of the imitated defenses."""
        return ImitatedStates({(self._edge, i): (defense, state) for i, defense, state in self._guards})

    def copy(self) -> ImitatedSender:
        """Return an equal sender with states of its own."""
        found = copy.copy(self)
        found._guards = [(i, defense, copy.deepcopy(state)) for i, defense, state in self._guards]
        return found

    def _imitates_penalty(self, defense: PenaltyDefense) -> bool:
        return bool(self._inputs) and not defense.penalty_reads_layers

    def _context(self, position: int, state: Any, number: int) -> Context:
        return Context(self._role, self._edge, Stamp("sample", 0, 0, number), self._seed, position, {}, {}, state)


def _name(key: Key) -> str:
    return f"{key[0]} {key[1]}"
