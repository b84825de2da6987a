"""FedPer: the base of the model is averaged, its last layers stay each client's own.

Paper: Arivazhagan, Aggarwal, Singh, Choudhary, "Federated learning with personalization layers", 2019, algorithm 1.

The border is a cut: of a whole model one of `local(model, cuts=...)`, the last unless `head` names another; between
split nodes of the U-shaped kind the client's last piece is the head. Everything trains together, as the optimizer says.
Bases start from one broadcast state, heads as the run's `starts` says; they may differ from client to client. The run
predicts with the newest base and the client's own head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from splitfed.core.topology import Topology
from splitfed.federated.averaging import Averaging
from splitfed.federated.base import MethodTraits
from splitfed.federated.base_head import split_base_head


@dataclass(frozen=True, kw_only=True)
class FedPer(Averaging):
    """The mean of the clients' bases, every round.

    `head`: the first segment of the head among those that the client holds (default: the last of them).
    """

    who = "fedper"
    what = "base"

    head: str | None = None

    def traits(self, topology: Topology) -> MethodTraits:
        """The weights are sent, whatever a client's steps were; what the base makes is read by a head that is not."""
        base, head = split_base_head(self.who, topology, self.head)
        read = {value for name in head for value in topology.segment(name).inputs}
        hidden = tuple(v for name in base for v in topology.segment(name).outputs if v in read)
        return replace(super().traits(topology), accumulates=True, hidden_gradients=hidden)

    def shared(self, topology: Topology) -> tuple[str, ...]:
        """Return the segments of the base."""
        return split_base_head(self.who, topology, self.head)[0]
