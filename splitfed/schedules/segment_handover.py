"""Handover of client segments from one client to the next, shared by the schedules `sequential` and `alternate`."""

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
    """Base of schedules whose clients hand segments on: from "peer" to peer, through the "server", or not ("none").

    The server sees the segments that pass through it. Weights and buffers (batch-norm statistics included) are handed
    on; optimizer state stays with its party. A client starts from the last one that finished its turn.
    """

    hand_over: str = field(default="peer", metadata=require_name("hand_over", HAND_OVERS))

    def check(self, topology: Topology, clients: int) -> None:
        """Raise `InvalidInput` for hand_over="server" in a topology where every party holds data."""
        super().check(topology, clients)
        if self.hand_over == "server" and not shared_roles(topology):
            raise InvalidInput(f"hand_over='server' needs a party without data; topology {topology.name!r} has none")

    def start(self, clients: int) -> State:
        """Return the state before the first handover: no client has trained."""
        return {"newest": None}

    def newest(self, client: int, state: State) -> int:
        """Return the client that trained last; `client` itself if segments are not handed on."""
        last = state["newest"]
        return client if self.hand_over == "none" or last is None else int(last)

    def binds(self, clients: int) -> str | None:
        """Return the reason if client segments are handed on, otherwise None."""
        return "hands client segments on" if self.hand_over != "none" and clients > 1 else None

    def take_over(self, engine: Trainer, client: int, epoch: int, state: State) -> None:
        """Send the client segments of the client that trained last to `client`."""
        last = state["newest"]
        if self.hand_over == "none" or last is None or last == client:
            return
        via = shared_roles(engine.topology)[0] if self.hand_over == "server" else None
        for role in client_roles(engine.topology):
            engine.hand_over(last, client, role, epoch, via)
