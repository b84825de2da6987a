"""Standalone: every client trains a whole model alone; nothing is sent. What every federated method has to beat.

Paper: McMahan, Moore, Ramage, Hampson, Aguera y Arcas, "Communication-efficient learning of deep networks from
decentralized data", AISTATS 2017, without its averages: "individual", "local" or "IND" in the tables of later papers.

The run is, to the bit, that of schedule "independent" without a method; the name is for tables and grids of methods. It
refuses a split replica, where clients learn from each other through the server, and a schedule that moves weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from splitfed.core.errors import InvalidInput
from splitfed.core.topology import Topology
from splitfed.federated.averaging import check_whole
from splitfed.federated.base import Method, MethodContext, MethodTraits


@dataclass(frozen=True, kw_only=True)
class Standalone(Method):
    """Adds nothing."""

    def traits(self, topology: Topology) -> MethodTraits:
        """Nothing is sent."""
        off = "standalone adds nothing: every client trains alone"
        return replace(super().traits(topology), turned_off=off, post_processing=True, accumulates=True)

    def check(self, topology: Topology, clients: int) -> None:
        """Refuse a model that clients do not hold whole."""
        check_whole("standalone", topology)

    def check_run(self, context: MethodContext) -> None:
        """Refuse a schedule by which clients would learn from each other."""
        if context.bound is not None:
            raise InvalidInput(f"standalone clients train alone, and the schedule {context.bound}: take 'independent'")
