"""Local loss: clients learn from a loss of their own and send activations only; no gradient is sent back.

Paper: Han, Bhatti, Lee, Moon, "Accelerating federated learning with split learning on locally generated losses",
FL-ICML workshop 2021.

Every client gets an auxiliary head, one linear layer on its release, and takes its steps on the loss of that head; the
server takes steps on its own loss at the same time. The activations of a step are computed before the client's update.
The aggregation server averages client segments and auxiliary heads, the main server its copies, with equal weights over
the clients of the round as in the paper, or by examples. `server="shared"` is the paper's second variant: one server
segment, trained by the clients in turn. Predictions do not use the auxiliary heads.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod

import torch
from torch import Tensor, nn

from splitfed.core.errors import InvalidInput, require_name
from splitfed.core.random import derive, stream
from splitfed.core.topology import Edge, Head, Segment, Topology
from splitfed.core.topology_facts import TopologyFacts
from splitfed.engines.base import Placement, Trainer
from splitfed.schedules.base import Round, State, Training, client_roles, shared_roles
from splitfed.schedules.sampling_and_dropout import Averaged, train_in_parallel


class AuxiliaryHead(nn.Module):
    """One linear layer on all released values, flattened and joined: (rows, ...) each -> (rows, outputs)."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, outputs)

    def forward(self, *values: Tensor) -> Tensor:
        """Return the class scores or outputs of the auxiliary head, (rows, outputs)."""
        flat: Tensor = self.linear(torch.cat([value.flatten(1) for value in values], 1))
        return flat


@dataclass(frozen=True, kw_only=True)
class LocalLoss(Averaged):
    """Clients train in parallel on local losses; `server`: "copies", averaged every round, or one "shared" segment."""

    server: str = field(default="copies", metadata=require_name("server", ("copies", "shared")))
    by_examples: bool = False
    buffers: bool = True
    averages_clients = True

    def check(self, topology: Topology, clients: int) -> None:
        """Raise `InvalidInput` for a topology in which a client that sends activations holds no labels."""
        super().check(topology, clients)
        for edge in _first_edges(topology):
            _head_for(topology, edge)

    def prepare(self, topology: Topology, facts: TopologyFacts, seed: int) -> Topology:
        """Return `topology` with an auxiliary head behind every client segment whose release gets no gradient."""
        edges = _first_edges(topology)
        segments, heads = list(topology.segments), list(topology.heads)
        for source in dict.fromkeys(edge.source for edge in edges):
            values = tuple(dict.fromkeys(v for e in edges if e.source == source for v in facts.data(e.values)))
            if not values:
                continue
            main = _head_for(topology, next(e for e in edges if e.source == source))
            assert main.task is not None
            name = f"auxiliary_{source}"
            with stream(derive(seed, "auxiliary", source)):
                module = AuxiliaryHead(sum(prod(facts.shapes[v]) for v in values), main.task.outputs or 1)
            role = topology.role_of(source)
            place = 1 + next(i for i, s in enumerate(segments) if s.name == source)
            segments.insert(place, Segment(name, role, module, values, (name,)))
            heads.append(Head(name, role, role, main.task, target=main.target))
        one_way = frozenset(edge.name for edge in edges)
        return replace(topology, segments=tuple(segments), heads=tuple(heads), forward_only=one_way)

    def placement(self, topology: Topology) -> Placement:
        """Return an aggregation server for client segments; with `server="copies"` also copies of the shared roles."""
        copied = shared_roles(topology) if self.server == "copies" else ()
        return self.fusing(Placement(copied, client_roles(topology), self.buffers))

    def round(self, engine: Trainer, training: Training, number: int, state: State) -> Round:
        """Send averaged segments to the round's clients, train both sides on their own losses, and average."""
        return train_in_parallel(self, engine, training, number, self.by_examples)


def _first_edges(topology: Topology) -> list[Edge]:
    """Return the edges that leave a segment computed from raw data alone, of nothing that was received."""
    maker = {value: segment for segment in topology.segments for value in segment.outputs}
    received: set[str] = set()
    for segment in topology.segments:
        sources = [maker[value] for value in segment.inputs if value in maker]
        if any(s.role != segment.role or s.name in received for s in sources):
            received.add(segment.name)
    return [e for e in topology.crossings if e.source not in received]


def _head_for(topology: Topology, edge: Edge) -> Head:
    """Return the head whose labels the sender of `edge` holds; raise `InvalidInput` if there is none."""
    role = topology.role_of(edge.source)
    for head in topology.heads:
        if head.labels == role:
            return head
    raise InvalidInput(
        f"local_loss trains {edge.source!r} on labels of its own party; role {role!r} of topology {topology.name!r} "
        "holds none"
    )
