"""What a client's own segments make of raw rows, up to values that a federated method sends class means of."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

from torch import Tensor, nn

from splitfed.core.probe import Facts
from splitfed.core.topology import Topology

Feed = Callable[[Tensor], Mapping[str, Tensor]]


class Extractor:
    """Frozen copies, in evaluation mode, of the segments that make the values of `sent` (kind of message -> value).

    `modules`: the client's segments by name; `feed(x)` returns what each input of the topology gets of rows x. The
    values are made of the client's own rows alone.
    """

    def __init__(
        self, topology: Topology, facts: Facts, modules: Mapping[str, nn.Module], sent: Mapping[str, str], feed: Feed
    ) -> None:
        self._sent, self._feed = dict(sent), feed
        wanted, steps = set(sent.values()), []
        for segment in reversed(topology.segments):
            if wanted.intersection(segment.outputs):
                wanted.update(segment.inputs)
                steps.append(segment)
        copies = copy.deepcopy({s.name: modules[s.name] for s in steps})
        for module in copies.values():
            module.eval().requires_grad_(False)
        self._steps = [(s.inputs, s.outputs, facts.overwritten[s.name], copies[s.name]) for s in reversed(steps)]

    def __call__(self, x: Tensor) -> dict[str, Tensor]:
        """Return kind of message -> the value of which it holds class means, for rows x (n, *shape): (n, ...)."""
        made = dict(self._feed(x))
        for inputs, outputs, overwritten, module in self._steps:
            result = module(*(made[name].clone() if name in overwritten else made[name] for name in inputs))
            found = result if isinstance(result, (tuple, list)) else (result,)
            made.update(zip(outputs, found, strict=True))
        return {kind: made[value] for kind, value in self._sent.items()}
