"""Topologies: one builder a file, each returns a `Topology`; imported on first use."""

from typing import TYPE_CHECKING

from splitfed.core.lazy_package import make_lazy

if TYPE_CHECKING:
    from splitfed.topologies.custom import custom as custom
    from splitfed.topologies.extended_vanilla import extended_vanilla as extended_vanilla
    from splitfed.topologies.fusion import Fusion as Fusion, Output as Output
    from splitfed.topologies.heterogeneous import heterogeneous as heterogeneous
    from splitfed.topologies.local import local as local
    from splitfed.topologies.multi_hop import multi_hop as multi_hop
    from splitfed.topologies.multi_task import multi_task as multi_task
    from splitfed.topologies.u_shaped import u_shaped as u_shaped
    from splitfed.topologies.vanilla import vanilla as vanilla
    from splitfed.topologies.vertical import vertical as vertical

make_lazy(__name__)
