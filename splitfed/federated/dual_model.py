"""The base of the methods with two models a client: its own, and the one that all average."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace

from splitfed.core.errors import InvalidInput
from splitfed.core.probe import Facts
from splitfed.core.topology import Topology
from splitfed.federated.averaging import Averaging, check_whole, score_value
from splitfed.federated.base import Learner, State
from splitfed.federated.model_copy import copy_with_modules

PREFIX = "shared"


@dataclass(frozen=True, kw_only=True)
class Doubled(Averaging):
    """Trains both models on the same batches, side by side: one forward and one backward of each.

    The topology's own segments are the client's and never leave it; copies of them beside, by names that begin with
    "shared_", are averaged as in FedAvg, and trained as there. Both start alike, unless clients start from weights of
    their own (the run's `starts`). The run predicts with the client's own model; score "global" is the metric of the
    averaged one. The loss that the history shows is the sum of both.
    """

    def check(self, topology: Topology, clients: int) -> None:
        """Refuse a model that clients do not hold whole."""
        check_whole(self.who, topology)
        if taken := [s.name for s in topology.segments if s.name.startswith(f"{PREFIX}_")]:
            raise InvalidInput(f"{self.who} calls its second model {PREFIX}_...; rename segment {taken[0]!r}")

    def fit(self, topology: Topology, facts: Facts, seed: int) -> Topology:
        """Return the topology with a second model and its heads."""
        modules = copy.deepcopy({s.name: s.module for s in topology.segments})
        twin = copy_with_modules(topology, list(modules), PREFIX, None, modules)
        heads = tuple(replace(head, value=twin.names[head.value]) for head in topology.heads)
        return replace(
            topology,
            segments=(*topology.segments, *twin.segments),
            heads=(*topology.heads, *heads),
            lessons=topology.lessons | {s.name for s in twin.segments},
        )

    def shared(self, topology: Topology) -> tuple[str, ...]:
        """Return the segments of the second model."""
        return tuple(s.name for s in topology.segments if s.name.startswith(f"{PREFIX}_"))

    def kept(self, topology: Topology) -> tuple[str, ...]:
        """The client's own model never leaves it."""
        return tuple(s.name for s in topology.segments if not s.name.startswith(f"{PREFIX}_"))

    @property
    def plain_update(self) -> bool:
        """The second model learns from its own loss alone."""
        return True

    def scores(self, learner: Learner, part: str, state: State) -> Mapping[str, float]:
        """Return the metric of the averaged model."""
        if not state["weights"]:
            return {}
        with learner.lend(state["weights"]):
            return {"global": score_value(learner, f"{PREFIX}_{learner.topology.heads[0].value}", part)}
