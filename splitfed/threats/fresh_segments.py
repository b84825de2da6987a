"""Segments drawn anew, for somebody who knows an architecture and none of the weights: upstream, or up to a head."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from splitfed.core.defense import Defense, LearnedDefense
from splitfed.core.defense_context import DefenseSite
from splitfed.core.errors import InvalidInput
from splitfed.core.probe import Facts
from splitfed.core.random import derive
from splitfed.core.step_plan import segment_plans
from splitfed.core.topology import Segment, Topology
from splitfed.threats.imitated_defenses import Feed
from splitfed.threats.retraining import fresh
from splitfed.threats.segment_runner import SegmentRunner


class Architecture:
    """Draws upstream functions of `role`; holds no trained tensor but copies of the role's `own` segments.

    Defenses that keep a state start afresh. `feed(x)` returns what each input of the topology gets of rows x, and
    must hold no data either. `epoch`: the last one that the run has trained, for defenses that change over it.
    `releases`: as in `SegmentRunner`.
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
        releases: int = 1,
    ) -> None:
        self._device, self._epoch, self._releases = device, epoch, releases
        self._facts, self._defenses, self._role, self._seed, self._feed = facts, tuple(defenses), role, seed, feed
        upstream = [s.name for s in topology.upstream(role)]
        self._own = copy.deepcopy({name: own[name] for name in upstream if name in own})
        self._theirs = tuple(name for name in upstream if name not in self._own)
        self._refusal = ""
        try:
            self._topology = _redraw_only(topology, self._theirs, derive(seed, "architecture"))
        except InvalidInput as error:
            self._refusal = str(error)

    def __call__(self, seed: int) -> SegmentRunner:
        """Return an upstream function drawn from `seed`, or refuse a module that nobody can draw anew."""
        if self._refusal:
            raise InvalidInput(self._refusal)
        topology = fresh(self._topology, seed)
        return SegmentRunner(
            topology,
            self._facts,
            {**{s.name: s.module.to(self._device) for s in topology.segments}, **self._own},
            self._feed,
            role=self._role,
            trainable=self._theirs,
            defenses=self._defenses,
            states=self._start_defenses(topology, seed),
            seed=self._seed,
            epoch=self._epoch,
            releases=self._releases,
        )

    def _start_defenses(self, topology: Topology, seed: int) -> dict[tuple[str, int], object]:
        """Return what the defenses keep at the start: edge and position -> state."""
        shapes = self._facts.shapes
        return {
            (port.edge, guard.position): guard.defense.start(
                DefenseSite(
                    "",
                    port.edge,
                    {v: shapes[v] for v in port.defended},
                    {v: shapes[v] for v in plan.own},
                    derive(seed, "start", port.edge, guard.position),
                    self._device,
                )
            )
            for work in segment_plans(topology, self._facts, self._defenses, checked=True).values()
            for plan in work
            for port in plan.departures
            for guard in port.guards
            if isinstance(guard.defense, LearnedDefense)
        }


def head_after(topology: Topology, role: str, seed: int) -> Callable[[], nn.Module] | None:
    """Return what draws the architecture from the one value that `role` sends to the outputs at another's head.

    Every call draws weights anew from `seed`; none of the trained ones can be reached. None where the head's segments
    read anything else, or cannot be drawn.
    """
    sent = {v for e in topology.crossings if topology.role_of(e.source) == role for v in e.values}
    for head in topology.heads:
        names = topology.makers([head.value], given=sent)
        if head.role == role or not _is_chain([topology.segment(name) for name in names], sent, role):
            continue
        try:
            return _HeadArchitecture(_redraw_only(topology, names, derive(seed, 0)), names, seed)
        except InvalidInput:
            return None
    return None


def _is_chain(segments: Sequence[Segment], sent: Collection[str], role: str) -> bool:
    """Return whether `segments`, none of them the role's, turn one value in `sent` into one after another."""
    plain = all(s.role != role and len(s.inputs) == len(s.outputs) == 1 for s in segments)
    return plain and bool(segments) and segments[0].inputs[0] in sent


def _redraw_only(topology: Topology, names: Collection[str], seed: int) -> Topology:
    """Return `topology` with weights of the segments `names` drawn from `seed`, and nothing in the others.

    What is left out is replaced, so that not even its first weights can be reached.
    """
    segments = (s if s.name in names else replace(s, module=nn.Identity(), original=None) for s in topology.segments)
    return fresh(replace(topology, segments=tuple(segments)), seed)


class _HeadArchitecture:
    """Draws the segments `names` of `topology`, which holds fresh weights only."""

    def __init__(self, topology: Topology, names: tuple[str, ...], seed: int) -> None:
        self._topology, self._names, self._seed, self._calls = topology, names, seed, 0

    def __call__(self) -> nn.Module:
        self._calls += 1
        drawn = fresh(self._topology, derive(self._seed, self._calls))
        return _Chain([drawn.segment(name) for name in self._names])


class _Chain(nn.Module):
    """Segments one after another, each on the one value that the one before it returns."""

    def __init__(self, segments: list[Segment]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(s.module for s in segments)

    def forward(self, z: Tensor) -> Tensor:
        for part in self.parts:
            # A segment may begin with an operation in place.
            z = part(z.clone())
        return z
