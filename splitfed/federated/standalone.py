"""Standalone: every client trains a whole model alone and sends nothing, the baseline of every federated method.

Paper: McMahan, Moore, Ramage, Hampson, Aguera y Arcas, "Communication-efficient learning of deep networks from
decentralized data", AISTATS 2017, without averaging: "individual", "local" or "IND" in the tables of later papers.

The run equals, to the bit, one of schedule "independent" without a method; the name serves tables and grids of methods.
It refuses a split replica, where clients learn from each other through the server, and a schedule that moves weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from splitfed.core.errors import InvalidInput
from splitfed.core.topology import Topology
from splitfed.federated.averaging import check_whole
from splitfed.federated.base import Method, MethodContext, MethodTraits


@dataclass(frozen=True, kw_only=True)
class Standalone(Method):
    """Local training without exchange."""

    def traits(self, topology: Topology) -> MethodTraits:
        """Return the traits of a method that sends nothing."""
        off = "standalone adds nothing: every client trains alone"
        return replace(super().traits(topology), turned_off=off, post_processing=True, accumulates=True)

    def check(self, topology: Topology, clients: int) -> None:
        """Raise `InvalidInput` for clients that do not hold the whole model."""
        check_whole("standalone", topology)

    def check_run(self, context: MethodContext) -> None:
        """Raise `InvalidInput` for a schedule that moves client segments."""
        if context.bound is not None:
            raise InvalidInput(f"standalone clients train alone, and the schedule {context.bound}: take 'independent'")
