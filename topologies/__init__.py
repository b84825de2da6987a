"""Topologies: one builder a file, each returns a `Topology`."""

from splitfed.topologies.u_shaped import u_shaped
from splitfed.topologies.vanilla import vanilla

__all__ = ["u_shaped", "vanilla"]
