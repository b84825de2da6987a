"""Two models a client: its own, and beside it the one that a method averages.

Both are trained on the same batches, side by side: one forward and one backward of each. The client's own segments
never leave it; copies of them beside, by names that begin with "shared_", are averaged as in FedAvg, and trained as
there. Both start alike, unless clients start from weights of their own (the run's `starts`). The run predicts with the
client's own model; score "global", of whole models, is the metric of the averaged one. The loss that the history shows
is the sum of both.

On split replicas the client's segments alone are there twice. What other parties hold is one model that serves both: it
learns from both losses, moves as the schedule says, and is sent the activations, and labels, of both.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace

from splitfed.core.errors import InvalidInput
from splitfed.core.topology import Topology
from splitfed.federated.averaging import score_average
from splitfed.federated.base import State
from splitfed.federated.learner import Learner
from splitfed.federated.model_copy import copy_with_modules

PREFIX = "shared"


def check_second_model(who: str, topology: Topology) -> None:
    """Refuse names that are those of the second model."""
    if taken := [s.name for s in topology.segments if s.name.startswith(f"{PREFIX}_")]:
        raise InvalidInput(f"{who} names the segments of its second model {PREFIX}_...; rename segment {taken[0]!r}")


def add_second_model(topology: Topology) -> Topology:
    """Return the topology with the second model and its heads added."""
    own = copy.deepcopy({s.name: s.module for s in topology.segments if s.role in topology.data_roles})
    modules = {s.name: own.get(s.name, s.module) for s in topology.segments}
    twin = copy_with_modules(topology, list(modules), PREFIX, None, modules)
    heads = tuple(replace(head, value=twin.names[head.value]) for head in topology.heads)
    return replace(
        topology,
        segments=(*topology.segments, *twin.segments),
        heads=(*topology.heads, *heads),
        training_only=topology.training_only | {s.name for s in twin.segments},
    )


def second_model(topology: Topology) -> tuple[str, ...]:
    """Return the segments of the second model that the client, or the parties of a group, hold."""
    held = (s.name for s in topology.segments if s.role in topology.data_roles)
    return tuple(name for name in held if name.startswith(f"{PREFIX}_"))


def score_second_model(learner: Learner, part: str, state: State) -> Mapping[str, float]:
    """Return the task's metric of the averaged model on `part`, as "global"."""
    return score_average(learner, f"{PREFIX}_{learner.topology.heads[0].value}", part, state)
