"""LG-FedAvg: every client learns representations of its own architecture, and a head that is averaged.

Paper: Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency, "Think locally, act globally: federated
learning with local and global representations", 2020, algorithm 1.

Representation and head meet at a cut: of a whole model one of `local(model, cuts=...)`, the last unless `head` names
another; between split nodes of the U-shaped kind the client's last segment is the head. Both parts train together on
the client's loss, the paper's plain form without its auxiliary losses of the representations. Heads start from one
broadcast state, representations as the run's `starts` says. The run predicts with a client's own representation and the
newest head; the paper's ensemble for new clients is not implemented.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from splitfed.core.topology import Topology
from splitfed.federated.averaging import Averaging
from splitfed.federated.base import MethodTraits
from splitfed.federated.base_head import split_base_head


@dataclass(frozen=True, kw_only=True)
class LgFedAvg(Averaging):
    """The clients' heads are averaged every round.

    `head`: the first segment of the head among those that the client holds (default: the last of them).
    """

    who = "lg_fedavg"
    what = "head"

    head: str | None = None

    def traits(self, topology: Topology) -> MethodTraits:
        """Return the traits of averaging; the weights are sent whatever the client's steps were."""
        return replace(super().traits(topology), accumulates=True)

    def shared(self, topology: Topology) -> tuple[str, ...]:
        """Return the segments of the head."""
        return split_base_head(self.who, topology, self.head)[1]
