"""Sequential: clients take turns, an epoch each, and hand their segments to the next one.

Paper: Gupta, Raskar, "Distributed learning of deep neural network over multiple agents", JNCA 2018 (its centralised
and its peer-to-peer mode); Vepakomma, Gupta, Swedish, Raskar, "Split learning for health", 2018.

The hand-over carries weights and buffers (batch-norm statistics included). Optimizer state stays with its party.
Clients that hand nothing on keep segments of their own and share the server's alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from splitfed.accounting.bytes import weight_bytes
from splitfed.data.order import batches
from splitfed.engines.base import Engine
from splitfed.errors import InvalidInput, unknown
from splitfed.graph import Topology
from splitfed.schedules.base import Schedule, State, Training

HAND_OVERS = ("peer", "server", "none")


@dataclass(frozen=True)
class Sequential(Schedule):
    """Clients in a fixed order; `hand_over`: "peer" to peer, through the "server" (which sees them), or "none"."""

    hand_over: str = "peer"

    def __post_init__(self) -> None:
        """Refuse a hand-over that is none of the three."""
        if self.hand_over not in HAND_OVERS:
            raise unknown("hand_over", self.hand_over, HAND_OVERS)

    def check(self, topology: Topology, clients: int) -> None:
        """Refuse a hand-over through a server that is not there."""
        if self.hand_over == "server" and not _server(topology):
            raise InvalidInput(f"hand_over='server' needs a party without data; topology {topology.name!r} has none")

    def start(self, clients: int) -> State:
        """Nobody has trained yet."""
        return {"newest": None}

    def round(self, engine: Engine, training: Training, number: int, state: State) -> list[float]:
        """Train every client in turn on its own rows, after it took over the segments of the one before."""
        losses = []
        for client in range(engine.lanes):
            self._take_over(engine, client, number, state)
            for local in range(training.local_epochs):
                epoch = number * training.local_epochs + local
                rows = engine.rows(client, "train")
                order = batches(rows, training.batch_size, training.seed, epoch, client)
                losses += engine.train(client, epoch, list(order))
            state["newest"] = client
        return losses

    def newest(self, client: int, state: State) -> int:
        """Return the client who trained last, unless every client keeps its own."""
        last = state["newest"]
        return client if self.hand_over == "none" or last is None else int(last)

    def handed_over(self, topology: Topology, clients: int, rounds: int) -> int:
        """One hand-over a turn but the very first, twice over if it goes through the server."""
        hops = {"none": 0, "peer": 1, "server": 2}[self.hand_over] if clients > 1 else 0
        size = sum(weight_bytes(topology, role) for role in topology.data_roles)
        return max(clients * rounds - 1, 0) * hops * size

    def _take_over(self, engine: Engine, client: int, number: int, state: State) -> None:
        last = state["newest"]
        if self.hand_over == "none" or last is None or last == client:
            return
        via = _server(engine.topology) if self.hand_over == "server" else None
        for role in engine.topology.data_roles:
            if engine.topology.segments_of(role):
                engine.hand_over(last, client, role, number, via)


def _server(topology: Topology) -> str | None:
    return next((role for role in topology.roles if role not in topology.data_roles), None)
