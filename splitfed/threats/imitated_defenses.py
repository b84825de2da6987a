"""The defenses of a sender as an adversary imitates them: what they make of a release, and add to the sender's loss.

The adversary has the defenses with their settings, states and random numbers of its own, and nothing that was trained.
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
"""From raw rows (n, *shape) to what each input of a topology gets of them."""


def training_context(context: Context, number: int, epoch: int, arrived: Mapping[str, Tensor]) -> Context:
    """Return `context` as it is where a penalty is asked for: a training step of `epoch`, at draw `number`.

    Its random numbers are not those of the release at the same draw.
    """
    stamp = Stamp("train", 0, epoch, number)
    return replace(context, stamp=stamp, seed=derive(context.seed, "imitated training"), arrived=arrived)


def task_weight(defenses: Sequence[Defense], epoch: int) -> float:
    """Return what the task's loss is multiplied by in `epoch` where these are the run's `defenses`."""
    return prod(d.task_weight(epoch) for d in defenses if isinstance(d, TaskWeightDefense) and d.weighs_task)


class ImitatedStates:
    """What imitated defenses keep, by edge and position: the defense, and what its `start` returned."""

    def __init__(self, held: Mapping[Key, tuple[Defense, Any]]) -> None:
        self._learning = {
            k: (d, state) for k, (d, state) in held.items() if state is not None and isinstance(d, LearnedDefense)
        }

    def learn(self) -> None:
        """Let every defense that learns take its own step, as after a step of its party's in training."""
        for defense, state in self._learning.values():
            defense.learn(state)

    def state_dict(self) -> dict[str, Any]:
        """Return copies of what they have learnt."""
        return {_name(key): copy.deepcopy(state.state_dict()) for key, (_, state) in self._learning.items()}

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Go back to `states`."""
        for key, (_, state) in self._learning.items():
            state.load_state_dict(copy.deepcopy(states[_name(key)]))


class ImitatedSender:
    """The defenses on one `edge` that carries one value with data, for an adversary that imitates the sender.

    `defenses`: as the sender has them; `feed(x)`: what each input of the topology gets of raw rows x.

    `omitted`: the names of those defenses whose penalty cannot be told without the sender's own segments. That is so
    where it reads layers inside them, and where it stands on an edge further up or at a sender without raw rows.
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
        """Return what the defenses would make of z (n, ...) at draw `number`."""
        for position, defense, state in self._guards:
            if isinstance(defense, ReleaseDefense):
                z = defense.release(self._value, z, self._context(position, state, number))
        return z

    def expected(self, z: Tensor) -> Tensor:
        """Return the same with every defense at its mean, differentiable in z."""
        for position, defense, state in self._guards:
            if isinstance(defense, ReleaseDefense):
                z = defense.expected(self._value, z, self._context(position, state, 0))
        return z

    def in_training(self, x: Tensor, z: Tensor, number: int, epoch: int) -> tuple[Tensor, Tensor, float]:
        """Return what would arrive in place of z (n, ...), made of raw rows x (n, *shape), in a step of training.

        With it the sum of the penalties, a scalar whose gradient in z is right (its value is not where a defense gives
        its penalty by the gradient alone), and what the task's loss is multiplied by in `epoch`.
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
        """What the defenses keep and learn."""
        return ImitatedStates({(self._edge, i): (defense, state) for i, defense, state in self._guards})

    def copy(self) -> ImitatedSender:
        """Return the same with states of its own."""
        found = copy.copy(self)
        found._guards = [(i, defense, copy.deepcopy(state)) for i, defense, state in self._guards]
        return found

    def _imitates_penalty(self, defense: PenaltyDefense) -> bool:
        return bool(self._inputs) and not defense.penalty_reads_layers

    def _context(self, position: int, state: Any, number: int) -> Context:
        return Context(self._role, self._edge, Stamp("sample", 0, 0, number), self._seed, position, {}, {}, state)


def _name(key: Key) -> str:
    return f"{key[0]} {key[1]}"
