"""The upstream function of a party for somebody who knows its architecture and none of its weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from splitfed.core.defense import Defense, LearnedDefense
from splitfed.core.defense_context import DefenseSite
from splitfed.core.errors import InvalidInput
from splitfed.core.probe import Facts
from splitfed.core.random import derive
from splitfed.core.step_plan import segment_plans
from splitfed.core.topology import Topology
from splitfed.threats.imitated_defenses import ImitatedStates, task_weight
from splitfed.threats.retraining import fresh
from splitfed.threats.segments_upstream import Upstream

Feed = Callable[[Tensor], Mapping[str, Tensor]]


class FreshUpstream:
    """What `Upstream` computes, with weights to be trained: from raw rows to what arrives at a party.

    Modules are in evaluation mode; those of the party itself, where its own segments stand upstream of it, are frozen.
    """

    def __init__(
        self, upstream: Upstream, feed: Feed, own: Sequence[str], defenses: Sequence[Defense] = (), epoch: int = 0
    ) -> None:
        self._upstream, self._feed, self._defenses, self._epoch = upstream, feed, tuple(defenses), epoch
        for name, module in upstream.modules.items():
            module.requires_grad_(name not in own)

    def __call__(self, x: Tensor) -> dict[str, Tensor]:
        """Return what arrives for raw rows x (n, *shape), every defense at its mean: value -> (n, ...)."""
        return self._upstream(self._feed(x))

    def sample(self, x: Tensor, number: int | None = None) -> dict[str, Tensor]:
        """Return what might arrive for raw rows x (n, *shape): every defense draws afresh, or as at draw `number`."""
        return self._upstream.sample(self._feed(x), number)

    def in_training(
        self, x: Tensor, number: int | None = None, epoch: int | None = None
    ) -> tuple[dict[str, Tensor], Tensor, float]:
        """Return what might arrive for raw rows x (n, *shape) in a training step of `epoch`, at draw `number`.

        With it the sum of what the defenses add to the loss of the parties upstream, a scalar whose gradient is right
        (its value is not where a defense gives its penalty by the gradient alone), and what the task's loss is
        multiplied by. Without an epoch it is the last one of the run, without a number draws are fresh.
        """
        epoch = self._epoch if epoch is None else epoch
        releases, penalty = self._upstream.in_training(self._feed(x), number, epoch)
        return releases, penalty, task_weight(self._defenses, epoch)

    @property
    def defenses(self) -> ImitatedStates:
        """What the imitated defenses keep and learn."""
        return self._upstream.defenses

    @property
    def least_rows(self) -> int:
        """The smallest batch that `in_training` can take: the defenses' own."""
        return max([1, *(d.least_rows for d in self._defenses)])

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the weights that are the adversary's to train."""
        return (p for module in self._upstream.modules.values() for p in module.parameters() if p.requires_grad)

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        """The segments by name."""
        return self._upstream.modules


class Architecture:
    """Draws upstream functions of `role`; holds no trained tensor but copies of the role's `own` segments.

    Defenses that keep a state start afresh. `feed(x)` returns what each input of the topology gets of rows x, and
    must hold no data either. `epoch`: the last one that the run has trained, which courses of defenses are read at.
    """

    def __init__(
        self,
        topology: Topology,
        facts: Facts,
        defenses: Sequence[Defense],
        role: str,
        seed: int,
        own: Mapping[str, nn.Module],
        feed: Feed,
        device: torch.device,
        epoch: int = 0,
    ) -> None:
        self._device, self._epoch = device, epoch
        self._facts, self._defenses, self._role, self._seed, self._feed = facts, tuple(defenses), role, seed, feed
        upstream = [s.name for s in topology.upstream(role)]
        self._own = copy.deepcopy({name: own[name] for name in upstream if name in own})
        theirs = set(upstream) - set(self._own)
        # What the adversary does not model is replaced, so that not even the first weights of it can be reached.
        segments = tuple(
            s if s.name in theirs else replace(s, module=nn.Identity(), original=None) for s in topology.segments
        )
        self._refusal = ""
        try:
            self._topology = fresh(replace(topology, segments=segments), derive(seed, "architecture"))
        except InvalidInput as error:
            self._refusal = str(error)

    def __call__(self, seed: int) -> FreshUpstream:
        """Return an upstream function drawn from `seed`, or refuse a module that nobody can draw anew."""
        if self._refusal:
            raise InvalidInput(self._refusal)
        topology = fresh(self._topology, seed)
        modules = {**{s.name: s.module.to(self._device) for s in topology.segments}, **self._own}
        states = {
            (port.edge, guard.position): guard.defense.start(
                DefenseSite(
                    "",
                    port.edge,
                    {v: self._facts.shapes[v] for v in port.values},
                    {v: self._facts.shapes[v] for v in segment_plan.own},
                    derive(seed, "start", port.edge, guard.position),
                    self._device,
                )
            )
            for work in segment_plans(topology, self._facts, self._defenses).values()
            for segment_plan in work
            for port in segment_plan.departures
            for guard in port.guards
            if isinstance(guard.defense, LearnedDefense)
        }
        upstream = Upstream(topology, self._facts, modules, self._defenses, self._role, self._seed, states)
        return FreshUpstream(upstream, self._feed, tuple(self._own), self._defenses, self._epoch)
