"""FedAvg: clients train the same model for a round, and the aggregation server averages their weights.

Paper: McMahan, Moore, Ramage, Hampson, Aguera y Arcas, "Communication-efficient learning of deep networks from
decentralized data", AISTATS 2017, algorithm 1.

On whole models it equals schedule "splitfed_v1" to the bit; it serves comparisons and as the base of other methods. On
a split replica it averages the clients' segments, under a schedule that leaves them in place ("splitfed_v3", say). The
run predicts with the newest average. Every client starts every round, also the first, from the weights that the
aggregation server sends.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from splitfed.core.topology import Topology
from splitfed.federated.averaging import Averaging
from splitfed.federated.base import MethodTraits


@dataclass(frozen=True, kw_only=True)
class FedAvg(Averaging):
    """The mean of the clients' weights, every round."""

    who = "fedavg"

    def traits(self, topology: Topology) -> MethodTraits:
        """Return the traits of averaging; the weights are sent whatever the client's steps were."""
        return replace(super().traits(topology), accumulates=True)
