"""The downstream function of a party: from what arrives there to a loss, through its own segments alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

from torch import Tensor, nn

from splitfed.core.probe import Facts
from splitfed.core.topology import Head, Segment, Topology

Feed = Callable[[Tensor], Mapping[str, Tensor]]


class Downstream:
    """Frozen copies, in evaluation mode, of the segments of a role that lead to the loss of `head`."""

    def __init__(self, segments: tuple[Segment, ...], head: Head, facts: Facts, feed: Feed) -> None:
        self._head, self._feed = head, feed
        self._steps = [(s.inputs, s.outputs, facts.overwritten[s.name], s.module) for s in segments]
        for segment in segments:
            segment.module.eval().requires_grad_(False)

    def __call__(self, x: Tensor, releases: Mapping[str, Tensor]) -> Tensor:
        """Return the head's output for `releases` (value -> (n, ...)) that came of the rows x (n, *shape)."""
        made = {**self._feed(x), **releases}
        for inputs, outputs, overwritten, module in self._steps:
            result = module(*(made[name].clone() if name in overwritten else made[name] for name in inputs))
            found = result if isinstance(result, (tuple, list)) else (result,)
            made.update(zip(outputs, found, strict=True))
        return made[self._head.value]

    def loss(self, x: Tensor, releases: Mapping[str, Tensor], y: Tensor) -> Tensor:
        """Return the mean loss, a scalar, of the labels y (n,) that belong to x."""
        assert self._head.task is not None
        return self._head.task.loss(self(x, releases), y)


def downstream(
    topology: Topology, facts: Facts, role: str, modules: Mapping[str, nn.Module], feed: Feed
) -> Downstream | None:
    """Return how `role` gets from what arrives to a loss on the main labels; None if it does not by itself.

    `modules`: the role's own segments by name, which are copied. `feed(x)` returns what each input of the topology
    gets of rows x.
    """
    head = next((h for h in topology.heads if h.role == role and h.target is None and h.task is not None), None)
    if head is None:
        return None
    makers = {value: s for s in topology.segments_of(role) for value in s.outputs}
    arriving = {v for e in topology.crossings if topology.role_of(e.target) == role for v in e.values}
    needed: set[str] = set()
    waiting, reached = [head.value], False
    while waiting:
        value = waiting.pop()
        if value in arriving:
            reached = True
        elif value in makers and makers[value].name not in needed:
            needed.add(makers[value].name)
            waiting += makers[value].inputs
    if not reached:
        return None
    copies = copy.deepcopy({name: modules[name] for name in needed})
    own = [s for s in topology.segments_of(role) if s.name in needed]
    return Downstream(tuple(Segment(s.name, role, copies[s.name], s.inputs, s.outputs) for s in own), head, facts, feed)
