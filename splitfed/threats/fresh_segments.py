"""Segments with freshly drawn weights, for an adversary that knows an architecture but no trained weight."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count

import torch
from torch import Tensor, nn

from splitfed.attacks.networks.frozen_copy import run_segments
from splitfed.core.defense import Defense, LearnedDefense
from splitfed.core.defense_context import DefenseSite
from splitfed.core.errors import InvalidInput
from splitfed.core.random import derive
from splitfed.core.step_plan import segment_plans
from splitfed.core.topology import Segment, Topology
from splitfed.core.topology_facts import TopologyFacts
from splitfed.threats.imitated_defenses import Feed
from splitfed.threats.retraining import fresh
from splitfed.threats.segment_runner import SegmentRunner


class Architecture:
    """Draws upstream functions of `role`; holds no trained tensor except copies of the role's `own` segments.

    Defenses with a state start afresh. `feed(x)` returns the inputs of the topology for rows x, and must hold no data.
    `epoch`: the last epoch that the run has trained, for defenses that change over epochs. `releases`: as in
    `SegmentRunner`.
    """

    def __init__(
        self,
        topology: Topology,
        facts: TopologyFacts,
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
        self._draw = _drawing(topology, self._theirs, derive(seed, "architecture"))

    def __call__(self, seed: int) -> SegmentRunner:
        """Return an upstream function with weights drawn from `seed`.

        Raises `InvalidInput` for a module that cannot be redrawn.
        """
        topology = self._draw(seed)
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
    """Return a function that draws the segments from the one value that `role` sends to another party's head outputs.

    Every call draws new weights, derived from `seed`; no trained weight is reachable. None if the head's segments read
    any other value, or cannot be redrawn.
    """
    sent = {v for e in topology.crossings if topology.role_of(e.source) == role for v in e.values}
    for head in topology.heads:
        names = topology.makers([head.value], given=sent)
        if head.role == role or not _is_chain([topology.segment(name) for name in names], sent, role):
            continue
        try:
            return partial(_draw_head, _redraw_only(topology, names, derive(seed, 0)), names, seed, count(1))
        except InvalidInput:
            return None
    return None


def _draw_head(topology: Topology, names: Sequence[str], seed: int, calls: Iterator[int]) -> nn.Module:
    """Return the segments `names` of `topology`, one after another, drawn for the next of `calls`."""
    drawn = fresh(topology, derive(seed, next(calls)))
    segments = [drawn.segment(name) for name in names]
    (sent,), (out,) = segments[0].inputs, segments[-1].outputs
    return _Segments(segments, lambda z: {sent: z}, out)


def _is_chain(segments: Sequence[Segment], sent: Collection[str], role: str) -> bool:
    """Return whether `segments`, none of them the role's, turn one value in `sent` into one after another."""
    plain = all(s.role != role and len(s.inputs) == len(s.outputs) == 1 for s in segments)
    return plain and bool(segments) and segments[0].inputs[0] in sent


def _drawing(topology: Topology, names: Collection[str], seed: int) -> Callable[[int], Topology]:
    """Return a function that draws the weights of the segments `names` afresh from a seed; it holds no trained weight.

    If a module cannot be redrawn, the function raises `InvalidInput`.
    """
    try:
        return partial(fresh, _redraw_only(topology, names, seed))
    except InvalidInput as error:
        return partial(_refuse, str(error))


def _refuse(reason: str, seed: int) -> Topology:
    raise InvalidInput(reason)


def _redraw_only(topology: Topology, names: Collection[str], seed: int) -> Topology:
    """Return `topology` with weights of the segments `names` drawn from `seed`, and nothing in the others.

    What is left out is replaced, so that not even its first weights can be reached.
    """
    segments = (s if s.name in names else replace(s, module=nn.Identity(), original=None) for s in topology.segments)
    return fresh(replace(topology, segments=tuple(segments)), seed)


class FreshModel:
    """Draws the whole model of a client up to its first head, with fresh weights; no trained weight is reachable."""

    def __init__(self, topology: Topology, feed: Feed, seed: int, device: torch.device) -> None:
        self._feed, self._device, self._out = feed, device, topology.heads[0].value
        self._names = topology.makers((self._out,))
        self._draw = _drawing(topology, [s.name for s in topology.segments], seed)

    def __call__(self, seed: int) -> nn.Module:
        """Return a model from rows (n, *shape) to scores (n, classes), in training mode, with weights by `seed`."""
        segments = [s for s in self._draw(seed).segments if s.name in self._names]
        return _Segments(segments, self._feed, self._out).to(self._device)


class _Segments(nn.Module):
    """Runs segments in order, from the inputs of the topology to the output `out`."""

    def __init__(self, segments: Sequence[Segment], feed: Feed, out: str) -> None:
        super().__init__()
        self._segments, self._feed, self._out = tuple(segments), feed, out
        self.parts = nn.ModuleDict({s.name: s.module for s in segments})

    def forward(self, x: Tensor) -> Tensor:
        """Return the output for rows x: (n, ...)."""
        return run_segments(self._segments, dict(self.parts.items()), self._feed(x))[self._out]
