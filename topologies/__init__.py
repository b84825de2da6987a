"""Topologies: one builder a file, each returns a `Topology`; imported on first use."""

from typing import TYPE_CHECKING

from splitfed.core.lazy_package import make_lazy

if TYPE_CHECKING:
    from splitfed.topologies.custom import custom
    from splitfed.topologies.extended_vanilla import extended_vanilla
    from splitfed.topologies.fusion import Fusion, Output
    from splitfed.topologies.heterogeneous import heterogeneous
    from splitfed.topologies.local import local
    from splitfed.topologies.multi_hop import multi_hop
    from splitfed.topologies.multi_task import multi_task
    from splitfed.topologies.u_shaped import u_shaped
    from splitfed.topologies.vanilla import vanilla
    from splitfed.topologies.vertical import vertical

__all__ = [
    "Fusion",
    "Output",
    "custom",
    "extended_vanilla",
    "heterogeneous",
    "local",
    "multi_hop",
    "multi_task",
    "u_shaped",
    "vanilla",
    "vertical",
]

make_lazy(
    __name__,
    {
        "Fusion": "fusion",
        "Output": "fusion",
        "custom": "custom",
        "extended_vanilla": "extended_vanilla",
        "heterogeneous": "heterogeneous",
        "local": "local",
        "multi_hop": "multi_hop",
        "multi_task": "multi_task",
        "u_shaped": "u_shaped",
        "vanilla": "vanilla",
        "vertical": "vertical",
    },
)
