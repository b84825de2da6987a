"""Clients that hand their segments on: what `sequential` and `alternate` share."""

from __future__ import annotations

from dataclasses import dataclass, field

from splitfed.core.errors import InvalidInput, require_name
from splitfed.core.topology import Topology
from splitfed.engines.base import Trainer
from splitfed.schedules.base import State, client_roles, shared_roles
from splitfed.schedules.sampling_and_dropout import Sampled

HAND_OVERS = ("peer", "server", "none")


@dataclass(frozen=True, kw_only=True)
class SegmentHandover(Sampled):
    """Segments go from "peer" to peer, through the "server" (which sees them), or are handed on by "none".

    Weights and buffers (batch-norm statistics included) are handed on; optimizer state stays with its party. The
    next client starts from the last one that finished its turn.
    """

    hand_over: str = field(default="peer", metadata=require_name("hand_over", HAND_OVERS))

    def check(self, topology: Topology, clients: int) -> None:
        """Raise `InvalidInput` for hand_over="server" in a topology where every party holds data."""
        super().check(topology, clients)
        if self.hand_over == "server" and not shared_roles(topology):
            raise InvalidInput(f"hand_over='server' needs a party without data; topology {topology.name!r} has none")

    def start(self, clients: int) -> State:
        """Nobody has trained yet."""
        return {"newest": None}

    def newest(self, client: int, state: State) -> int:
        """Return the client who trained last, unless every client keeps its own."""
        last = state["newest"]
        return client if self.hand_over == "none" or last is None else int(last)

    def binds(self, clients: int) -> str | None:
        """Every client continues with another's segments, unless none are handed on."""
        return "hands client segments on" if self.hand_over != "none" and clients > 1 else None

    def take_over(self, engine: Trainer, client: int, epoch: int, state: State) -> None:
        """Hand the client segments over from the client that trained last to `client`."""
        last = state["newest"]
        if self.hand_over == "none" or last is None or last == client:
            return
        via = shared_roles(engine.topology)[0] if self.hand_over == "server" else None
        for role in client_roles(engine.topology):
            engine.hand_over(last, client, role, epoch, via)
