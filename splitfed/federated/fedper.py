"""FedPer: the base of the model is averaged, its last layers stay each client's own.

Paper: Arivazhagan, Aggarwal, Singh, Choudhary, "Federated learning with personalization layers", 2019, algorithm 1.

Base and head meet at a cut: of a whole model one of `local(model, cuts=...)`, the last unless `head` names another;
between split nodes of the U-shaped kind the client's last segment is the head. Base and head train together with the
client's optimizer. Bases start from one broadcast state, heads as the run's `starts` says; heads may differ in
architecture between clients. The run predicts with the newest base and the client's own head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from splitfed.core.topology import Topology
from splitfed.federated.averaging import Averaging
from splitfed.federated.base import MethodTraits
from splitfed.federated.base_head import split_base_head


@dataclass(frozen=True, kw_only=True)
class FedPer(Averaging):
    """The clients' bases are averaged every round.

    `head`: the first segment of the head among those that the client holds (default: the last of them).
    """

    who = "fedper"
    what = "base"

    head: str | None = None

    def traits(self, topology: Topology) -> MethodTraits:
        """Return the traits of averaging; the gradient of the base's output comes from a head that is not sent."""
        base, head = split_base_head(self.who, topology, self.head)
        read = {value for name in head for value in topology.segment(name).inputs}
        hidden = tuple(v for name in base for v in topology.segment(name).outputs if v in read)
        return replace(super().traits(topology), accumulates=True, hidden_gradients=hidden)

    def shared(self, topology: Topology) -> tuple[str, ...]:
        """Return the segments of the base."""
        return split_base_head(self.who, topology, self.head)[0]
